"""ppo_atari.py: its wrappers on a scripted game, both backends, reset rows, whole games.

What it promises as every script does is in tests/test_form.py.
"""

import copy
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import cv2
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import run_tiny, tiny
from envs import Frames
from harness import killed, lacks, message_of, play_frames, resume, train, watch_envs
from registry import SCRIPTS
from torch.nn.functional import conv2d
from watch import assert_orthogonal, checkpoint_of, episodes_of, scalars_of

import ppo_atari as ppo

tiny_atari = partial(tiny, ppo)

SCRIPT = SCRIPTS["ppo_atari"]
no_envpool = pytest.mark.skipif(find_spec("envpool") is None, reason="envpool is not installed")
both = ["gymnasium", pytest.param("envpool", marks=no_envpool)]
backends = pytest.mark.parametrize("env_backend", both)


class Game(gym.Env):
    """A stand-in for ALE at one frame a step. Frame k of the n-th game (k, n from 0) is gray of
    value 10 * n + k.

    `lives[k]` are the lives at frame k, the last entry ends the game; every frame pays
    `rewards[k]`. `actions` has one list for each game.
    """

    action_space = gym.spaces.Discrete(4)
    observation_space = gym.spaces.Box(0, 255, (210, 160, 3), np.uint8)

    def __init__(self, lives: list, rewards: list | None = None, limit: int = 10**9):
        self.lives, self.rewards, self.limit = lives, rewards or [1.0] * len(lives), limit
        self.actions = []

    def get_action_meanings(self):
        return ["NOOP", "FIRE", "RIGHT", "LEFT"]

    def frame(self):
        return np.full((210, 160, 3), (10 * (len(self.actions) - 1) + self.k) % 256, np.uint8)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.k = 0
        self.actions.append([])
        return self.frame(), {"lives": self.lives[0]}

    def step(self, action):
        self.actions[-1].append(int(action))
        self.k += 1
        over, cut = self.k == len(self.lives) - 1, self.k == self.limit
        info = {"lives": self.lives[self.k]}
        return self.frame(), self.rewards[self.k], over, cut and not over, info


def gray(frame: np.ndarray) -> int:
    return int(frame[0, 0, 0])


# -- A01: no-op starts --
def test_noop_reset_does_nothing_for_1_to_noop_max_frames():
    """And goes on in a new game if the first one ends."""
    game = Game([1] * 50)
    env = ppo.NoopReset(game, 5)
    env.reset(seed=0)
    for _ in range(300):
        env.reset()
    assert {action for actions in game.actions for action in actions} == {0}
    counts = np.bincount([len(actions) for actions in game.actions])
    assert len(counts) == 6 and counts[0] == 0 and counts[1:].min() > 30  # uniform: 60 each
    game = Game([1, 1, 1, 0])
    obs, _ = ppo.NoopReset(game, 30).reset(seed=3)
    last = len(game.actions) - 1
    assert last > 0 and gray(obs) == 10 * last + len(game.actions[last]) < 10 * last + 3


# -- A02: frame skipping --
class Flicker(Game):
    """Odd frames show only the left half, even frames only the right."""

    def frame(self):
        frame = super().frame() + np.uint8(100)
        frame[:, :80] *= self.k % 2
        frame[:, 80:] *= 1 - self.k % 2
        return frame


SKIPS = [  # frames of an action, actions, frames of the game, limit -> seen, paid, ends
    (4, 1, 20, 99, (103, 104), 15, [False, False]),
    (3, 1, 20, 99, (103, 102), 7, [False, False]),
    (2, 1, 20, 99, (101, 102), 3, [False, False]),
    (1, 1, 20, 99, (101, 0), 1, [False, False]),
    (4, 2, 5, 99, (105, 0), 16, [True, False]),  # that frame alone, none from before the action
    (4, 2, 20, 5, (105, 0), 16, [False, True]),
]


@pytest.mark.parametrize("skip, actions, frames, limit, seen, paid, ends", SKIPS)
def test_max_and_skip(skip, actions, frames, limit, seen, paid, ends):
    """The maximum of the last two frames of an action, and the sum of its rewards."""
    game = Flicker([1] * (frames + 1), [0, 1, 2, 4, 8, 16] + [0] * 15, limit)
    env = ppo.MaxAndSkip(game, skip)
    env.reset()
    for _ in range(actions):
        obs, *rest, _ = env.step(3)
    assert (gray(obs), obs[0, 159, 0]) == seen and rest == [paid, *ends]
    assert game.actions == [[3] * min(skip * actions, 5)]


# -- A03: lives --
def test_a_lost_life_ends_the_episode_and_goes_on_without_a_reset():
    game = Game([3, 3, 2, 2, 2, 1, 1, 0])
    env = ppo.EpisodicLife(game, True)
    assert env.reset()[1] == {"lives": 3, "terminated": False, "reward": 0.0}
    steps = [env.step(2) for _ in range(2)]
    assert [(step[2], step[4]["terminated"]) for step in steps] == [(False, False), (True, False)]
    obs, info = env.reset()  # one step of doing nothing, no new game
    assert game.actions == [[2, 2, 0]] and gray(obs) == 3
    assert info == {"lives": 2, "terminated": False, "reward": 1.0}
    assert [env.step(2)[2] for _ in range(2)] == [False, True]
    obs, info = env.reset(seed=1)  # a new game, whatever is left of this one
    assert game.actions[1:] == [[]] and gray(obs) == 10
    assert info == {"lives": 3, "terminated": False, "reward": 0.0}


@pytest.mark.parametrize("how", ["in a step", "while doing nothing", "by its limit"])
def test_a_game_that_is_over_is_reset(how):
    rewards, limit = [0, 1, 5, 2], 2 if how == "by its limit" else 9
    game = Game([2, 1, 0] if how == "while doing nothing" else [2, 2, 2, 0], rewards, limit)
    env = ppo.EpisodicLife(game, True)
    env.reset()
    steps = [env.step(0) for _ in range({"in a step": 3, "by its limit": 2}.get(how, 1))]
    *_, terminated, truncated, info = steps[-1]
    assert (terminated, truncated) == (limit == 9, limit == 2)
    assert info["terminated"] == (how == "in a step")
    obs, info = env.reset()
    unseen = how == "while doing nothing"  # what its last step paid counts
    assert len(game.actions) == 2 and gray(obs) == 10
    assert info == {"lives": 2, "terminated": unseen, "reward": 5 * unseen}
    assert env.step(0)[2] == unseen  # the lives of the new game count


LIVES = [([1, 0, 0, 0], True), ([1, 2, 2, 1, 1, 0], True), ([3, 2, 1, 0], False)]


@pytest.mark.parametrize("lives, episodic_life", LIVES)
def test_what_ends_an_episode(lives, episodic_life):
    """The game; before it a lost life, if the game shows some after it, but no gained one."""
    env = ppo.EpisodicLife(Game(lives), episodic_life)
    env.reset()
    assert [env.step(0)[2] for _ in range(3)] == [False, False, True]


# -- A04: fire --
FIRE = {  # lives and rewards at each frame -> actions of each game, what the reset paid, its end
    "FIRE and the third action": ([1] * 9, [0, 3, 5] + [0] * 6, [[1, 2]], 8, False),
    "FIRE ends the game": ([1, 0], [0, 3], [[1], [2], []], 3 + 3, True),
    "FIRE loses a life, then it ends": ([2, 1, 1, 0], [0, 1, 2, 4], [[1, 0, 2], []], 7, True),
}


@pytest.mark.parametrize("name", FIRE)
def test_fire_reset(name):
    """Games that end unseen are counted, and so is what they pay."""
    lives, rewards, actions, paid, over = FIRE[name]
    game = Game(lives, rewards)
    obs, info = ppo.FireReset(ppo.EpisodicLife(game, True)).reset()
    assert game.actions == actions and info["reward"] == paid and info["terminated"] is over
    assert gray(obs) == 10 * (len(actions) - 1) + len(actions[-1])


# -- A05: gray and small --
def weights_of_area(n: int) -> np.ndarray:
    """(84, n): the share of each input pixel's length in each of 84 output pixels."""
    edges = np.linspace(0, n, 85)
    left = np.maximum(edges[:-1, None], np.arange(n))
    right = np.minimum(edges[1:, None], np.arange(n) + 1)
    return (right - left).clip(0) / (n / 84)


def test_warp_frame_is_gray_by_luma_then_averaged_over_pixel_areas():
    frame = np.random.default_rng(0).integers(0, 256, (210, 160, 3)).astype(np.uint8)
    warped = ppo.warp_frame(frame)
    gray = np.rint(frame @ np.array([0.299, 0.587, 0.114]))
    expected = weights_of_area(210) @ gray @ weights_of_area(160).T
    assert warped.shape == (84, 84) and warped.dtype == np.uint8
    assert np.abs(warped - expected).max() <= 1.01  # both steps round
    small = cv2.resize(frame, (84, 84), interpolation=cv2.INTER_AREA)
    assert (cv2.cvtColor(small, cv2.COLOR_RGB2GRAY) != warped).any()  # the order matters


# -- A06: sign of the reward, A07: stack, and all of them --
BARE = {"noop_max": 0, "frame_skip": 1, "fire_reset": False, "episodic_life": False}


@pytest.mark.parametrize("clip, rewards", [(True, [1, 0, -1, 1]), (False, [7, 0, -3, 0.25])])
def test_the_last_frames_are_stacked_and_the_reward_is_its_sign(clip, rewards):
    """A stack starts black and does not change when it was returned; info has the reward."""
    game = Game([1] * 9, rewards=[0, 7.0, 0.0, -3.0, 0.25, 0, 0, 0, 0])
    env = ppo.wrap_game(game, tiny_atari(**BARE, clip_reward=clip, frame_stack=4))
    assert env.observation_space == gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    env.reset()
    stacks = [env.reset(seed=1)[0]]  # of game 1
    steps = [env.step(0) for _ in range(4)]
    assert [step[1] for step in steps] == rewards
    assert [step[4]["reward"] for step in steps] == [7, 0, -3, 0.25]
    stacks += [step[0] for step in steps] + [env.reset(seed=2)[0]]
    expected = [[0, 0, 0, 10], [0, 0, 10, 11], [0, 10, 11, 12], [10, 11, 12, 13]]
    expected += [[11, 12, 13, 14], [0, 0, 0, 20]]
    for stack, grays in zip(stacks, expected, strict=True):
        assert (stack == np.reshape(grays, (4, 1, 1))).all()


LEFT_OUT = [
    (None, {}),
    ("NoopReset", {"noop_max": 0}),
    ("TransformReward", {"clip_reward": False}),
    ("FireReset", {"fire_reset": False}),
    ("FireReset", {"env_id": "MsPacman"}),
]


@pytest.mark.parametrize("left_out, flags", LEFT_OUT)
def test_wrappers_stand_in_the_order_of_baselines(left_out, flags):
    """Those that are off or useless are left out."""
    order = "FrameStackObservation TransformReward TransformObservation"
    order += " FireReset EpisodicLife MaxAndSkip NoopReset"
    env, names = ppo.make_env(tiny_atari(**flags)), []
    while isinstance(env, gym.Wrapper):
        names.append(type(env).__name__)
        env = env.env
    expected = [name for name in order.split() if name != left_out]
    assert [name for name in names if name != "OrderEnforcing"] == expected


# -- the real games --
def gray_then_max(self, action):
    """EnvPool's order in MaxAndSkip."""
    frames, total = [], 0.0
    for _ in range(self.frame_skip):
        obs, reward, *ends, info = self.env.step(action)
        frames.append(cv2.cvtColor(obs, cv2.COLOR_RGB2GRAY))
        total += reward
    return np.repeat(np.max(frames[-2:], 0)[..., None], 3, 2), total, *ends, info


@no_envpool
def test_both_backends_play_the_same_game(tmp_path, monkeypatch):
    """Without random no-ops: same rewards, ends and frames but for what is documented.

    EnvPool repeats the first frame, and takes the maximum of two frames after they are gray,
    baselines before; with its order the frames are equal.
    """
    rng, upwards = np.random.default_rng(0), [0] + [1] * 12  # where the rewards are
    actions = rng.choice(upwards, (300, 1)).astype(np.int32)

    def play(env_backend: str) -> tuple[np.ndarray, list]:
        """The first stack and the newest frame of each step, and what else a step returned."""
        args = tiny_atari(env_id="MsPacman", num_envs=1, noop_max=1, env_backend=env_backend)
        envs = ppo.make_envs(args, tmp_path, 1)
        frames, rest = [envs.reset(seed=1)[0][0].copy()], []
        for action in actions:
            obs, reward, terminated, *_ = envs.step(action)
            frames.append(obs[0, -1:].copy())
            rest.append((reward[0], terminated[0]))
            if terminated[0]:
                break
        return np.concatenate(frames), rest

    (baselines, ours), (frames, theirs) = play("gymnasium"), play("envpool")
    assert ours == theirs and sum(reward for reward, _ in ours) > 0
    assert (baselines[:3] == 0).all() and (frames[:4] == baselines[3]).all()
    off = np.abs(baselines[4:].astype(int) - frames[4:])
    assert 0 < off.max() < 64 and np.mean(off > 0) < 0.02
    monkeypatch.setattr(ppo.MaxAndSkip, "step", gray_then_max)
    np.testing.assert_array_equal(play("gymnasium")[0][4:], frames[4:])


@no_envpool
def test_envpool_gets_every_flag(tmp_path):
    flags = {"episodic_life": False, "full_action_space": True, "repeat_action_probability": 0.25}
    flags |= {"noop_max": 7, "frame_skip": 3, "max_episode_steps": 99}
    theirs = {"frame_stack": 2, "fire_reset": False, "clip_reward": False, "env_threads": 3}
    args = tiny_atari(env_backend="envpool", num_envs=4, **flags, **theirs)
    config = ppo.make_envs(args, tmp_path, 2**31 + 5).config
    assert {name: config[name] for name in flags} == flags
    names = ("stack_num", "use_fire_reset", "reward_clip", "num_threads")
    assert [config[name] for name in names] == [*theirs.values()]
    assert (config["num_envs"], config["seed"]) == (4, 5)  # of 31 bits
    assert config["gray_scale"] and config["use_inter_area_resize"]
    kwargs = ppo.make_env(args).spec.kwargs
    expected = {name: flags[name] for name in ("full_action_space", "repeat_action_probability")}
    expected |= {"frameskip": 1, "max_num_frames_per_episode": 297}
    assert {name: kwargs[name] for name in expected} == expected


@no_envpool
def test_a_resumed_run_of_envpool_has_new_seeds(fast, monkeypatch):
    """It takes them when it is made. The first rollout after a resumption is none of before."""
    seeds, make_envpool = [], ppo.make_envpool
    watched = lambda args, seed: seeds.append(seed) or make_envpool(args, seed)  # noqa: E731
    monkeypatch.setattr(ppo, "make_envpool", watched)
    run_dir = killed(SCRIPT, "after renaming", 2, lambda: train(SCRIPT, env_backend="envpool"))
    resume(SCRIPT, run_dir)
    first = ppo.env_seed(tiny_atari())
    assert seeds == [first, first + 2 * 2]


# -- the loop on both backends --
@pytest.fixture
def recorded(monkeypatch):
    """Of every step of all environments: (obs before it, actions, what it returned)."""
    steps, before = [], []

    def reset(result: tuple) -> tuple:
        before[:] = [result[0].copy()]
        return result

    def step(result: tuple, actions: np.ndarray) -> tuple:
        steps.append((before[0], actions.copy(), copy.deepcopy(result)))
        return reset(result)

    watch_envs(SCRIPT, monkeypatch, reset=reset, step=step)
    return steps


def valid_of(dones: np.ndarray) -> np.ndarray:
    """(T, N) of a run: False where a step resets, after the end of an episode."""
    return np.concatenate([np.ones((1, dones.shape[1]), bool), dones[:-1] == 0])


@no_envpool
@pytest.mark.parametrize("env_backend, limit", [("envpool", 27_000), ("gymnasium", 60)])
def test_games_are_counted_whole(env_backend, limit, recorded, fast, spy):
    """Their returns, lengths and rows, against a plain loop over what the environments said."""
    gae_calls = spy(ppo, "gae")
    size = {"num_steps": 128, "total_timesteps": 128 * 2 * 4, "num_minibatches": 1}
    game = {"env_id": "Breakout", "env_backend": env_backend, "max_episode_steps": limit}
    result = run_tiny(ppo, update_epochs=1, **size, **game)
    expected, totals, lengths, reset = [], np.zeros(2), np.zeros(2, int), [False, False]
    for row, (_, _, (_, reward, terminated, truncated, infos)) in enumerate(recorded, 1):
        for n in range(2):
            totals[n] += infos["reward"][n]
            lengths[n] += not reset[n]
            assert not reset[n] or (reward[n] == 0 and not terminated[n] and not truncated[n])
            if infos["terminated"][n] or truncated[n]:
                expected.append((2 * row, totals[n], lengths[n]))
                totals[n] = lengths[n] = 0
        reset = [bool(terminated[n] or truncated[n]) for n in range(2)]
    assert episodes_of(result["run_dir"]) == expected and len(expected) > 3
    assert result["global_step"] == 1024 == 2 * len(recorded)
    longest = max(length for *_, length in expected)  # the agent plays no no-ops and no FIRE
    assert limit == 27_000 or limit - 12 <= longest <= limit
    lost = sum(terminated.sum() for *_, (_, _, terminated, *_) in recorded)
    assert lost > (len(expected) if limit == 27_000 else 5)
    # a lost life cuts the bootstrap, a time limit only the trace
    terminations, dones = (np.concatenate([call[0][i] for call in gae_calls]) for i in (3, 4))
    cut = sum((truncated & ~terminated).sum() for *_, (_, _, terminated, truncated, _) in recorded)
    assert dones.sum() - terminations.sum() == cut and (cut > 3) == (limit == 60)


@backends
def test_a_sample_is_one_step_and_no_reset(env_backend, fast, recorded, spy):
    """Observation, action, reward and values of one row, also where a rollout begins with a reset.
    Every epoch has each step once or, in place of a reset, twice. Explained variance is of them.
    """
    losses, gae_calls = spy(ppo, "ppo_loss"), spy(ppo, "gae")
    flags = {"env_backend": env_backend, "max_episode_steps": 7, "learning_rate": 1e-30}
    flags |= {"num_steps": 5, "total_timesteps": 120, "norm_adv": False, "ortho_init": False}
    logged = scalars_of(run_tiny(ppo, **flags)["run_dir"])["losses/explained_variance"]
    inputs = zip(*(inputs[:5] for inputs, _ in gae_calls))
    rewards, values, next_values, terminations, dones = map(np.concatenate, inputs)
    assert (rewards == [result[1] for *_, result in recorded]).all()
    assert (terminations == [result[2] for *_, result in recorded]).all()
    assert (dones == [np.logical_or(*result[2:4]) for *_, result in recorded]).all()
    np.testing.assert_allclose(next_values[:-1], values[1:], rtol=1e-4, atol=1e-6)
    cuts = np.argwhere((dones - terminations)[:-1] == 1)
    assert len(cuts) > 3
    for t, n in cuts:  # the row after the limit holds the state that it cut off
        assert (recorded[t + 1][0][n, :3] == recorded[t][0][n, 1:]).all()
    advantages, valid = np.concatenate([result for _, result in gae_calls]), valid_of(dones)
    assert 5 < (~valid).sum() < 60 and not valid[::5].all()
    orders = [[], []]  # of the first epochs, of the second ones
    for i in range(0, 60, 5):
        a, v, own = advantages[i : i + 5], values[i : i + 5], valid[i : i + 5]
        explained = 1 - a[own].var(ddof=1) / (a + v)[own].var(ddof=1)
        assert logged[i // 5] == (2 * (i + 5), pytest.approx(explained, rel=1e-4, abs=1e-5))
        rows = [(t, n) for t in range(i, i + 5) for n in np.flatnonzero(valid[t])]
        keys = [(advantages[row], values[row]) for row in rows]
        for epoch, order in enumerate(orders):
            mbs = [inputs[3] for inputs, _ in losses[4 * i // 5 + 2 * epoch :][:2]]
            mb = {name: torch.cat([x[name] for x in mbs]).numpy() for name in mbs[0]}
            found = list(zip(mb["advantages"], mb["values"]))
            order += found
            assert len(found) == 10 and set(found) == set(keys)
            for key, (t, n) in zip(keys, rows):
                assert keys.count(key) <= found.count(key) <= 2 * keys.count(key)
                obs, action = (mb[name][found.index(key)] for name in ("obs", "actions"))
                same = (obs == recorded[t][0][n]).all() and action == recorded[t][1][n]
                assert same or keys.count(key) > 1
    assert orders[0] != orders[1]


def test_a_game_that_resets_in_two_steps_of_three_trains_on_the_third(fast, spy):
    """And as published a time limit ends the game."""
    losses, gae_calls = spy(ppo, "ppo_loss"), spy(ppo, "gae")
    short = {"max_episode_steps": 1, "noop_max": 0, "fire_reset": False}
    run_tiny(ppo, **short, num_steps=3, total_timesteps=12, bootstrap_truncation=False)
    assert [len(inputs[3]["values"]) for inputs, _ in losses] == [3, 3] * 4
    assert (torch.stack([inputs[3]["logprobs"] for inputs, _ in losses]) < 0).all()
    for (_, _, _, terminations, dones, *_), _ in gae_calls:
        assert (terminations == dones).all() and dones.sum() >= 2


def test_what_the_first_reset_pays_counts(monkeypatch):
    """FIRE and no-ops may bring rewards, in training and in evaluation."""
    reset = Frames.reset

    def paying(frames, seed):
        obs, infos = reset(frames, seed)
        return obs, infos | {"reward": 1000.0 * np.arange(1, 1 + frames.num_envs)}

    monkeypatch.setattr(Frames, "reset", paying)
    play_frames(ppo, monkeypatch)
    result = run_tiny(ppo, eval_episodes=3, total_timesteps=128)
    thousands = [value // 1000 for _, value, _ in episodes_of(result["run_dir"])]
    assert thousands[:2] == [1, 2] and set(thousands[2:]) == {0}
    assert [value // 1000 for value in result["eval_returns"]] == [1, 2, 3]


# -- agent --
def make_agent(args: ppo.Args) -> ppo.Agent:
    """An agent of four actions."""
    torch.manual_seed(0)
    obs_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    agent = ppo.Agent(obs_space, gym.spaces.Discrete(4), args)
    return agent.to(memory_format=torch.channels_last)


def images(n: int) -> torch.Tensor:
    return torch.randint(0, 256, (n, 4, 84, 84), dtype=torch.uint8)


def test_network_is_nature_cnn_with_published_scales():
    agent = make_agent(tiny_atari())
    shapes = [tuple(p.shape) for p in agent.parameters()]
    convolutions = [(32, 4, 8, 8), (32,), (64, 32, 4, 4), (64,), (64, 64, 3, 3), (64,)]
    assert shapes == convolutions + [(512, 3136), (512,), (4, 512), (4,), (1, 512), (1,)]
    layers = [m for m in agent.modules() if isinstance(m, (torch.nn.Conv2d, torch.nn.Linear))]
    for layer, gain in zip(layers, [2**0.5, 2**0.5, 2**0.5, 2**0.5, 0.01, 1.0], strict=True):
        assert_orthogonal(layer.weight, gain)
        assert (layer.bias == 0).all()


def test_forward_is_the_network_by_hand():
    """The features flattened channel by channel, as PyTorch's and CleanRL's weights are."""
    agent, obs = make_agent(tiny_atari(ortho_init=False)), images(3)
    conv1, conv2, conv3, linear = [m for m in agent.network if hasattr(m, "weight")]
    x = obs.float() / 255
    for conv, stride in ((conv1, 4), (conv2, 2), (conv3, 1)):
        x = conv2d(x, conv.weight, conv.bias, stride).relu()
    hidden = (x.reshape(3, 64 * 7 * 7) @ linear.weight.T + linear.bias).relu()
    logits, value = agent(obs)
    close = {"atol": 1e-5, "rtol": 1e-4}
    torch.testing.assert_close(logits, hidden @ agent.actor.weight.T + agent.actor.bias, **close)
    torch.testing.assert_close(value, hidden @ agent.critic.weight[0] + agent.critic.bias, **close)
    assert logits.shape == (3, 4) and value.shape == (3,)
    _, entropy, again = agent.evaluate_actions(obs, torch.tensor([0, 3, 1]))
    p = logits.softmax(1)
    torch.testing.assert_close(entropy, -(p * p.log()).sum(1), **close)
    assert torch.equal(again, value)


def test_actions_are_drawn_with_the_probabilities_of_the_policy():
    agent, n = make_agent(tiny_atari(ortho_init=False)), 20_000
    agent.actor.bias.data += torch.tensor([0.0, 1.0, 2.0, -1.0])
    with torch.no_grad():
        logits, value = agent(images(1))
    agent.forward = lambda obs: (logits.expand(n, 4), value.expand(n))
    action, logprob, values = agent.act(images(1))
    p = logits.softmax(1)[0]
    counts = torch.bincount(action, minlength=4)
    assert ((counts / n - p).abs() < 4 * (p * (1 - p) / n).sqrt()).all() and p.max() < 0.9
    torch.testing.assert_close(logprob, p.log()[action], atol=1e-5, rtol=0)
    assert (values == value).all()
    mode, logprob, _ = agent.act(images(1), greedy=True)
    assert (mode == logits.argmax()).all()
    torch.testing.assert_close(logprob, p.log()[mode], atol=1e-5, rtol=0)


# -- evaluation --
SHORT = {"num_steps": 2, "num_minibatches": 1, "total_timesteps": 4}


def evaluate(run_dir: Path, *flags: str) -> list[float]:
    return ppo.evaluate(ppo.parse_args(["--evaluate", str(run_dir), *flags]), run_dir)


@no_envpool
def test_evaluation_plays_whole_games(fast, monkeypatch, recorded):
    """Side by side, over all their lives: a new agent, and one that never presses FIRE itself."""
    run_dir = run_tiny(ppo, env_backend="envpool", **SHORT)["run_dir"]
    moves, after = [], 0.0
    monkeypatch.setattr(ppo.tqdm, "update", lambda bar, n: moves.append(n))
    nothing = lambda agent, obs, greedy: (torch.zeros(len(obs)).long(),) * 3  # noqa: E731
    for act in (ppo.Agent.act, nothing):
        monkeypatch.setattr(ppo.Agent, "act", act)
        recorded.clear(), moves.clear()
        returns = evaluate(run_dir, "--eval-episodes", "3")
        _, _, ends, truncated, infos = zip(*[result for *_, result in recorded])
        rewards, over = (np.array([x[name] for x in infos]) for name in ("reward", "terminated"))
        first = np.cumsum(over, 0) - over == 0  # (T, 3): of the first game of each side
        assert len(infos) < 1000 and over.any(0).all() and not np.any(truncated)
        assert returns == (rewards * first).sum(0).tolist()
        assert (ends * first).sum(0).tolist() == [5] * 3
        finished = (over * first).sum(1)
        assert moves == finished[finished > 0].tolist()  # the bar, where a game has ended
        after += (rewards * ~first).sum()
    assert after > 0  # in the games that a side begins while others play on


@pytest.mark.filterwarnings("ignore::UserWarning")
@no_envpool
def test_filmed_games_are_those_evaluated(fast, monkeypatch, capsys):
    """Played in turns, a film each, from the first frame that the agent may see to the last. What
    EnvPool has learned is filmed, or played, without it.
    """
    flags = {"env_id": "Breakout", "env_backend": "envpool", "max_episode_steps": 200}
    run_dir = run_tiny(ppo, **flags, **SHORT)["run_dir"]
    films, write = [], gym.wrappers.RecordVideo.stop_recording
    counted = lambda film: films.append(len(film.recorded_frames)) or write(film)  # noqa: E731
    monkeypatch.setattr(gym.wrappers.RecordVideo, "stop_recording", counted)
    steps, step = [], ppo.MaxAndSkip.step
    counted = lambda env, action: steps.append(action) or step(env, action)  # noqa: E731
    monkeypatch.setattr(ppo.MaxAndSkip, "step", counted)
    monkeypatch.setattr(ppo, "find_spec", lambda name: name != "envpool")
    monkeypatch.setattr(ppo, "make_envpool", None)
    games = evaluate(run_dir, "--eval-episodes", "3", "--capture-video")
    assert len(games) == len(films) == 3 and min(films) > 60  # more than a life, which ends no film
    assert sum(films) == len(steps) + 3 and f"videos: {run_dir}" in capsys.readouterr().out
    names = {file.name for file in run_dir.glob("eval_videos_*/*") if file.stat().st_size > 1000}
    assert names == {f"rl-video-episode-{i}.mp4" for i in range(3)}
    flags = ["--evaluate", str(run_dir), "--eval-episodes", "1"]
    assert lacks(message_of(SCRIPT, *flags), ["EnvPool", "--env-backend gymnasium"]) == []
    assert ppo.parse_args([*flags, "--env-backend", "gymnasium"]).evaluate


def test_a_run_of_a_gpu_is_evaluated_without_one_and_says_so(fast, monkeypatch, capsys):
    run_dir = run_tiny(ppo, max_episode_steps=20, **SHORT)["run_dir"]
    expected = evaluate(run_dir, "--eval-episodes", "2")
    assert "GPU" not in capsys.readouterr().out
    checkpoint = checkpoint_of(run_dir)
    checkpoint["args"]["cuda"] = True
    torch.save(checkpoint, run_dir / "checkpoint.pt")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert evaluate(run_dir, "--eval-episodes", "2") == expected
    assert capsys.readouterr().out.startswith("evaluation: the run was on a GPU, this machine")


# -- flags --
NAMES = "Breakout Breakout-v5 ALE/Breakout-v5 BreakoutNoFrameskip-v4 BreakoutDeterministic-v4"


@no_envpool
def test_names_of_games_are_those_of_both_backends(tmp_path):
    from envpool.atari.registration import atari_game_list

    assert {ppo.game_name(name) for name in NAMES.split()} == {"Breakout"}
    ours = {spec.name.lower() for spec in gym.registry.values() if spec.namespace == "ALE"}
    theirs = {name.replace("_", "") for name in atari_game_list}
    assert len(theirs) > 50 and theirs <= ours
    for env_id in ("TicTacToe3D", "MsPacman"):  # whose capitals differ
        args = tiny_atari(env_id=env_id, env_backend="envpool")
        assert ppo.make_envs(args, tmp_path, 1).num_envs == 2


def test_without_envpool_the_message_says_what_does(monkeypatch):
    found = ppo.provenance(tiny_atari())["versions"].keys()
    monkeypatch.setattr(ppo, "find_spec", lambda name: None)
    message = message_of(SCRIPT)
    assert lacks(message, ["EnvPool is not installed", "--env-backend gymnasium"]) == []
    without = ppo.provenance(tiny_atari())["versions"].keys()
    assert "ale-py" in without and found - without <= {"envpool"} and "envpool" not in without


# -- compiled and eager --
@pytest.mark.e2e
def test_compiled_and_eager_updates_agree_in_bfloat16():
    """Ten minibatches, both with the same weights each time; float32 is in test_behaviour.py."""
    args = tiny_atari(bf16=True)
    agent = make_agent(args)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=args.adam_eps, fused=True)
    eager, fast = agent.forward, ppo.compiled(agent.forward, torch.device("cpu"))
    for _ in range(10):
        mb = {name: torch.randn(32) for name in ("advantages", "returns", "values")}
        mb |= {"obs": images(32), "actions": torch.randint(0, 4, (32,))}
        with torch.no_grad():
            mb["logprobs"] = agent.evaluate_actions(mb["obs"], mb["actions"])[0]
        losses, grads = [], []
        for agent.forward in (fast, eager):
            outputs = agent.evaluate_actions(mb["obs"], mb["actions"])
            loss, _ = ppo.ppo_loss(*outputs, mb, 0.1, args)
            optimizer.zero_grad()
            loss.backward()
            grads.append(torch.cat([p.grad.flatten() for p in agent.parameters()]))
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-2, abs=0.03)
        assert (grads[0] - grads[1]).norm() <= 0.3 * grads[1].norm()
        optimizer.step()
