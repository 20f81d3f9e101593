"""ppo_atari.py: the wrappers of A01 to A07 on a scripted game and on the real one, lives, time
limits, EnvPool.
"""

import copy
import shutil
from pathlib import Path

import cv2
import gymnasium as gym
import numpy as np
import pytest
import torch
from watch import assert_equal, checkpoint_of, episodes_of, scalars_of, state_of

import ppo_atari as ppo


class Game(gym.Env):
    """A stand-in for ALE at one frame a step. Frame k of the n-th game (k, n from 0) is gray of
    value 10 * n + k.

    `lives[k]` are the lives at frame k, the last entry ends the game; every frame pays
    `rewards[k]`. `actions` has one list for each game.
    """

    action_space = gym.spaces.Discrete(4)
    observation_space = gym.spaces.Box(0, 255, (210, 160, 3), np.uint8)

    def __init__(
        self, lives: list, rewards: list | None = None, limit: int = 10**9, fire: bool = True
    ):
        self.lives, self.rewards, self.limit, self.fire = (
            lives,
            rewards or [1.0] * len(lives),
            limit,
            fire,
        )
        self.actions = []

    def get_action_meanings(self):
        return ["NOOP", "FIRE" if self.fire else "UP", "RIGHT", "LEFT"]

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
        return (
            self.frame(),
            self.rewards[self.k],
            over,
            cut and not over,
            {"lives": self.lives[self.k]},
        )


def make_agent(args: ppo.Args) -> ppo.Agent:
    """An agent of four actions."""
    obs_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    agent = ppo.Agent(obs_space, gym.spaces.Discrete(4), args)
    return agent.to(memory_format=torch.channels_last)


def pixels(obs: np.ndarray) -> list[int]:
    """The gray value of each frame of an observation (C, 84, 84)."""
    assert (obs == obs[:, :1, :1]).all()
    return obs[:, 0, 0].tolist()


# -- A01: no-op starts --
def test_noop_reset_does_nothing_for_1_to_noop_max_frames():
    game = Game([1] * 50)
    env = ppo.NoopReset(game, 5)
    env.reset(seed=0)
    for _ in range(300):
        env.reset()
    lengths = [len(actions) for actions in game.actions]
    assert {action for actions in game.actions for action in actions} == {0}
    counts = np.bincount(lengths)
    assert (
        len(counts) == 6 and counts[0] == 0 and counts[1:].min() > 30
    )  # uniform over 1..5: 60 each


def test_noop_reset_goes_on_in_a_new_game_if_the_first_one_ends():
    game = Game([1, 1, 1, 0])
    obs, _ = ppo.NoopReset(game, 30).reset(seed=3)
    assert len(game.actions) > 1 and len(game.actions[-1]) < 3
    assert obs[0, 0, 0] == 10 * (len(game.actions) - 1) + len(game.actions[-1])


# -- A02: frame skipping --
class Flicker(Game):
    """Odd frames show only the left half, even frames only the right."""

    def frame(self):
        frame = super().frame() + np.uint8(100)
        frame[:, :80] *= self.k % 2
        frame[:, 80:] *= 1 - self.k % 2
        return frame


@pytest.mark.parametrize(
    "skip, left, right", [(4, 103, 104), (3, 103, 102), (2, 101, 102), (1, 101, 0)]
)
def test_max_and_skip_takes_the_maximum_of_the_last_two_frames_and_adds_rewards(skip, left, right):
    game = Flicker([1] * 20, rewards=[0, 1, 2, 4, 8, 16, 32] + [0] * 13)
    env = ppo.MaxAndSkip(game, skip)
    env.reset()
    obs, reward, terminated, truncated, _ = env.step(3)
    assert (obs[0, 0, 0], obs[0, 159, 0]) == (left, right)
    assert reward == sum([1, 2, 4, 8][:skip]) and not terminated and not truncated
    assert game.actions == [[3] * skip]


@pytest.mark.parametrize("ends", ["termination", "truncation"])
def test_max_and_skip_stops_at_the_end_with_frames_of_this_step_only(ends):
    """Four frames, then one: that frame alone, not its maximum with one from before the step."""
    game = Flicker([1] * 6) if ends == "termination" else Flicker([1] * 20, limit=5)
    env = ppo.MaxAndSkip(game, 4)
    env.reset()
    env.step(0)
    obs, reward, terminated, truncated, _ = env.step(0)
    assert (terminated, truncated) == (ends == "termination", ends == "truncation")
    assert reward == 1 and (obs[0, 0, 0], obs[0, 159, 0]) == (105, 0)


# -- A03: lives --
def test_a_lost_life_ends_the_episode_and_goes_on_without_a_reset():
    game = Game([3, 3, 2, 2, 2, 1, 1, 0])
    env = ppo.EpisodicLife(game, True)
    _, info = env.reset()
    assert info == {"lives": 3, "terminated": False, "reward": 0.0}
    ends = []
    for _ in range(2):
        *_, terminated, _, info = env.step(2)
        ends.append((terminated, info["terminated"]))
    assert ends == [(False, False), (True, False)]
    obs, info = env.reset()  # one step of doing nothing, no new game
    assert len(game.actions) == 1 and game.actions[0] == [2, 2, 0] and obs[0, 0, 0] == 3
    assert info == {"lives": 2, "terminated": False, "reward": 1.0}
    assert [env.step(2)[2] for _ in range(2)] == [False, True]
    env.reset()
    *_, terminated, _, info = env.step(2)
    assert terminated and info["terminated"]  # game over
    obs, info = env.reset()
    assert (
        len(game.actions) == 2
        and game.actions[1] == []
        and obs[0, 0, 0] == 10
        and info["reward"] == 0
    )


def test_the_last_life_ends_with_the_game_not_before():
    """Some games show no lives for a few frames and play on: that is no end, the end of the game
    is.
    """
    env = ppo.EpisodicLife(Game([1, 0, 0, 0]), True)
    env.reset()
    assert [env.step(0)[2] for _ in range(3)] == [False, False, True]


def test_a_gained_life_is_no_end_and_its_loss_is():
    env = ppo.EpisodicLife(Game([1, 2, 2, 1, 1, 0]), True)
    env.reset()
    assert [env.step(0)[2] for _ in range(3)] == [False, False, True]


def test_a_game_that_ends_while_doing_nothing_is_reset():
    game = Game([2, 1, 0], rewards=[0, 1, 5])
    env = ppo.EpisodicLife(game, True)
    assert not env.reset()[1]["terminated"]
    assert env.step(0)[2]
    obs, info = env.reset()
    assert (
        len(game.actions) == 2
        and obs[0, 0, 0] == 10
        and info == {"lives": 2, "terminated": True, "reward": 5}
    )
    assert env.step(0)[2]  # the lives of the new game count


def test_a_truncated_game_is_reset():
    game = Game([2] * 9, limit=2)
    env = ppo.EpisodicLife(game, True)
    env.reset()
    env.step(0)
    *_, terminated, truncated, info = env.step(0)
    assert (terminated, truncated, info["terminated"]) == (False, True, False)
    env.reset()
    assert len(game.actions) == 2


def test_without_episodic_life_only_the_game_ends():
    env = ppo.EpisodicLife(Game([3, 2, 1, 0]), False)
    env.reset()
    assert [env.step(0)[2] for _ in range(3)] == [False, False, True]


# -- A04: fire --
def test_fire_reset_presses_fire_and_the_third_action_and_keeps_their_rewards():
    game = Game([1] * 20, rewards=[0, 3, 5] + [0] * 17)
    env = ppo.FireReset(ppo.EpisodicLife(game, True))
    obs, info = env.reset()
    assert (
        game.actions == [[1, 2]]
        and obs[0, 0, 0] == 2
        and info["reward"] == 8
        and not info["terminated"]
    )


def test_fire_reset_returns_the_frame_of_the_new_game_if_the_old_one_ends():
    game = Game([1, 1, 1, 0])
    env = ppo.FireReset(ppo.EpisodicLife(ppo.MaxAndSkip(game, 4), True))
    obs, info = env.reset()
    assert len(game.actions) == 3 and game.actions[-1] == [] and obs[0, 0, 0] == 20
    assert info["terminated"] is True  # so that the games that ended unseen are counted


def test_fire_reset_counts_what_happens_when_fire_loses_a_life():
    """FIRE loses a life, the hidden step after it pays 2, the third action ends the game and pays
    4.
    """
    game = Game([2, 1, 1, 0], rewards=[0, 1, 2, 4])
    _, info = ppo.FireReset(ppo.EpisodicLife(game, True)).reset()
    assert game.actions == [[1, 0, 2], []] and info["reward"] == 7 and info["terminated"]


# -- A05: gray and small --
def test_warp_frame_is_gray_by_luma_then_averaged_over_pixel_areas():
    rng = np.random.default_rng(0)
    frame = rng.integers(0, 256, (210, 160, 3)).astype(np.uint8)
    warped = ppo.warp_frame(frame)
    gray = np.rint(frame @ np.array([0.299, 0.587, 0.114]))
    rows, columns = (weights_of_area(n) for n in (210, 160))
    expected = rows @ gray @ columns.T
    assert warped.shape == (84, 84) and warped.dtype == np.uint8
    assert np.abs(warped - expected).max() <= 1.01  # both steps round
    resized_first = cv2.cvtColor(
        cv2.resize(frame, (84, 84), interpolation=cv2.INTER_AREA), cv2.COLOR_RGB2GRAY
    )
    assert (resized_first != warped).any()  # the order matters


def weights_of_area(n: int) -> np.ndarray:
    """(84, n): the share of each input pixel's length in each of 84 output pixels."""
    edges = np.linspace(0, n, 85)
    left, right = (
        np.maximum(edges[:-1, None], np.arange(n)),
        np.minimum(edges[1:, None], np.arange(n) + 1),
    )
    return (right - left).clip(0) / (n / 84)


# -- A06: sign of the reward --
BARE = {"noop_max": 0, "frame_skip": 1, "fire_reset": False, "episodic_life": False}


@pytest.mark.parametrize("clip", [True, False])
def test_the_reward_is_its_sign_and_info_has_the_reward(clip, tiny_atari):
    game = Game([1] * 5, rewards=[0, 7.0, 0.0, -3.0, 0.25])
    env = ppo.wrap_game(game, tiny_atari(**BARE, clip_reward=clip))
    env.reset()
    steps = [env.step(0) for _ in range(4)]
    assert [step[1] for step in steps] == ([1, 0, -1, 1] if clip else [7, 0, -3, 0.25])
    assert [step[4]["reward"] for step in steps] == [7, 0, -3, 0.25]


# -- A07: stack --
def test_frame_stack_starts_black_and_keeps_the_last_frames(tiny_atari):
    env = ppo.wrap_game(Game([1] * 9), tiny_atari(**BARE, frame_stack=4))
    env.reset()
    first, _ = env.reset(seed=1)  # of game 1
    assert pixels(first) == [0, 0, 0, 10] and first.shape == env.observation_space.shape
    assert env.observation_space == gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    seen = [env.step(0)[0] for _ in range(5)]
    assert pixels(first) == [0, 0, 0, 10]  # what was returned does not change
    assert [pixels(obs) for obs in seen[2:]] == [
        [10, 11, 12, 13],
        [11, 12, 13, 14],
        [12, 13, 14, 15],
    ]
    assert pixels(env.reset(seed=2)[0]) == [0, 0, 0, 20]


def test_wrappers_stand_in_the_order_of_baselines(tiny_atari):
    env, names = ppo.make_env(tiny_atari(env_id="Breakout")), []
    while isinstance(env, gym.Wrapper):
        names.append(type(env).__name__)
        env = env.env
    ours = [name for name in names if name not in ("OrderEnforcing", "PassiveEnvChecker")]
    order = "FrameStackObservation TransformReward TransformObservation"
    assert ours == f"{order} FireReset EpisodicLife MaxAndSkip NoopReset".split()


@pytest.mark.parametrize(
    "changes, missing",
    [
        ({"noop_max": 0}, "NoopReset"),
        ({"fire_reset": False}, "FireReset"),
        ({"env_id": "MsPacman"}, "FireReset"),
    ],
)
def test_wrappers_that_are_off_or_useless_are_left_out(changes, missing, tiny_atari):
    env, names = ppo.make_env(tiny_atari(**({"env_id": "Breakout"} | changes))), []
    while isinstance(env, gym.Wrapper):
        names.append(type(env).__name__)
        env = env.env
    assert missing not in names and "EpisodicLife" in names


# -- the real games --
def play(env_or_envs, actions: list[int], vector: bool) -> list[tuple]:
    """(last frame, reward, terminated) of each step up to the first end."""
    result = []
    for action in actions:
        obs, reward, terminated, *_ = env_or_envs.step(
            np.array([action], np.int32) if vector else action
        )
        obs, reward, terminated = (
            (obs[0], reward[0], terminated[0]) if vector else (obs, reward, terminated)
        )
        result.append((obs[-1], float(reward), bool(terminated)))
        if terminated:
            break
    return result


@pytest.mark.parametrize("env_id", ["MsPacman", "Freeway"])
def test_both_backends_play_the_same_game(env_id, tiny_atari, tmp_path, monkeypatch):
    """Without random no-ops and FIRE: same rewards and ends, and the same frames but for one
    documented difference.

    EnvPool takes the maximum of two frames after they are gray, baselines before; with its order
    the frames are equal.
    """
    pytest.importorskip("envpool")

    def gray_then_max(self, action):
        frames, total = [], 0.0
        for _ in range(self.frame_skip):
            obs, reward, terminated, truncated, info = self.env.step(action)
            frames.append(cv2.cvtColor(obs, cv2.COLOR_RGB2GRAY))
            total += reward
        return (
            np.repeat(np.max(frames[-2:], 0)[..., None], 3, 2),
            total,
            terminated,
            truncated,
            info,
        )

    args = tiny_atari(env_id=env_id, num_envs=1, noop_max=1)
    actions = (
        np.random.default_rng(0).choice([0] + [1] * 12, 300).tolist()
    )  # 1: up, where the rewards are
    games = []
    for patched in (False, True):
        if patched:
            monkeypatch.setattr(ppo.MaxAndSkip, "step", gray_then_max)
        env = ppo.make_env(args)
        first, _ = env.reset(seed=1)
        games.append(play(env, actions, vector=False))
    envs = ppo.make_envs(ppo.replace(args, env_backend="envpool"), tmp_path, 1)
    first_envpool = envs.reset()[0][0]
    assert (first[:3] == 0).all() and (
        first_envpool == first[3]
    ).all()  # EnvPool repeats the first frame
    theirs = play(envs, actions, vector=True)
    baselines, gray_first = games
    assert [step[1:] for step in baselines] == [step[1:] for step in theirs] and sum(
        step[1] for step in theirs
    ) > 0
    assert all((mine[0] == other[0]).all() for mine, other in zip(gray_first, theirs, strict=True))
    differences = [np.abs(mine[0].astype(int) - other[0]) for mine, other in zip(baselines, theirs)]
    assert (
        0 < max(d.max() for d in differences) < 64
        and np.mean([(d > 0).mean() for d in differences]) < 0.02
    )


def test_envpool_gets_every_flag(tiny_atari, tmp_path):
    pytest.importorskip("envpool")
    flags = {"episodic_life": False, "full_action_space": True, "repeat_action_probability": 0.25}
    flags |= {"noop_max": 7, "frame_skip": 3, "max_episode_steps": 99}
    theirs = {"frame_stack": 2, "fire_reset": False, "clip_reward": False}
    args = tiny_atari(env_backend="envpool", **flags, **theirs)
    config = ppo.make_envs(args, tmp_path, 5).config
    assert {name: config[name] for name in flags} == flags and config["seed"] == 5
    names = ("stack_num", "use_fire_reset", "reward_clip")
    assert [config[name] for name in names] == [*theirs.values()]
    assert ppo.make_env(tiny_atari(full_action_space=True)).action_space.n == 18


def test_both_backends_play_every_frame(tiny_atari, tmp_path):
    """Without frames to skip there is no maximum in which they could differ."""
    pytest.importorskip("envpool")
    args = tiny_atari(env_id="Freeway", num_envs=1, noop_max=1, frame_skip=1)
    actions = [0, *[1] * 600]  # up; a crossing pays
    env = ppo.make_env(args)
    env.reset(seed=1)
    ours = play(env, actions, vector=False)
    args = ppo.replace(args, env_backend="envpool")
    ppo.check_args(args)
    envs = ppo.make_envs(args, tmp_path, 1)
    envs.reset()
    theirs = play(envs, actions, vector=True)
    assert [step[1:] for step in ours] == [step[1:] for step in theirs]
    assert sum(step[1] for step in theirs) > 0
    late = list(zip(ours, theirs, strict=True))[4:]  # EnvPool repeats the first frame of a game
    assert all((mine[0] == other[0]).all() for mine, other in late)


@pytest.mark.parametrize("env_id, lives", [("Breakout", 5), ("Pong", 0)])
def test_a_real_game_is_played_to_its_end_over_all_lives(env_id, lives, tiny_atari):
    env = ppo.make_env(tiny_atari(env_id=env_id))
    obs, info = env.reset(seed=3)
    assert obs.shape == (4, 84, 84) and obs.dtype == np.uint8 and info["lives"] == lives
    rng, ends, total = np.random.default_rng(0), [], info["reward"]
    while not ends or not ends[-1][0]:
        obs, reward, terminated, truncated, info = env.step(int(rng.integers(env.action_space.n)))
        assert reward == np.sign(info["reward"]) and not truncated
        total += info["reward"]
        if terminated:
            ends.append((info["terminated"], info["lives"]))
            obs, info = env.reset()
            total += info["reward"]
            assert (obs[:3] == 0).all() and obs[3].any()
    assert (
        [left for _, left in ends] == list(range(lives - 1, -1, -1))
        if lives
        else ends == [(True, 0)]
    )
    assert total in range(-21, -15) if env_id == "Pong" else 0 <= total < 12


def test_environment_state_is_exact_and_plain(tiny_atari, tmp_path):
    """Saved in the middle of a game and written into fresh environments, it goes on to the bit,
    no-ops included.
    """
    args = tiny_atari(num_envs=2)
    envs, copies = (ppo.make_envs(args, tmp_path, 1) for _ in range(2))
    envs.reset(seed=1), copies.reset(seed=9)
    rng, copied, ends = np.random.default_rng(0), False, 0
    for t in range(400):
        actions = rng.integers(0, 4, 2)
        obs, reward, terminated, truncated, infos = envs.step(actions)
        if copied:
            other = copies.step(actions)
            assert (
                (obs == other[0]).all()
                and (reward == other[1]).all()
                and (terminated == other[2]).all()
            )
            assert (infos["lives"] == other[4]["lives"]).all()
            ends += terminated.sum()
        if t == 100:
            torch.save(ppo.env_states(envs), tmp_path / "state.pt")
            states = torch.load(tmp_path / "state.pt", weights_only=True)
            assert ppo.restore_envs(copies, states)
            copied = True
    assert ends >= 6  # lives were lost and games reset along the way
    sticky = ppo.make_envs(tiny_atari(repeat_action_probability=0.25), tmp_path, 1)
    sticky.reset(seed=1)
    assert ppo.env_states(sticky) is None and not ppo.restore_envs(sticky, None)


# -- the loop on both backends --
@pytest.fixture
def recorded(monkeypatch):
    """What every step of the training environments returned: a list of (reward, terminated,
    truncated, infos).
    """
    steps, make_envs = [], ppo.make_envs

    def make_recorded(*args):
        envs = make_envs(*args)
        step = envs.step

        def recorded_step(actions):
            result = step(actions)
            steps.append(copy.deepcopy(result[1:]))
            return result

        envs.step = recorded_step
        return envs

    monkeypatch.setattr(ppo, "make_envs", make_recorded)
    return steps


backends = pytest.mark.parametrize("env_backend", ["gymnasium", "envpool"])


def valid_of(dones: np.ndarray) -> np.ndarray:
    """(T, N) of the first rollout: False where a step resets, after the end of an episode."""
    valid = np.ones(dones.shape, bool)
    valid[1:] = dones[:-1] == 0
    return valid


@backends
@pytest.mark.parametrize("limit", [27_000, 60])
def test_games_are_counted_whole_and_unclipped_and_reset_rows_are_no_steps(
    env_backend, limit, recorded, run_atari_fast, spy
):
    """Every game's return and length, and the step that it ended on, against a plain loop over what
    the env said.
    """
    if env_backend == "envpool":
        pytest.importorskip("envpool")
    gae_calls = spy(ppo, "gae")
    size = {
        "num_steps": 128,
        "total_timesteps": 128 * 2 * 4,
        "num_minibatches": 1,
        "update_epochs": 1,
    }
    result = run_atari_fast(
        env_id="Breakout", env_backend=env_backend, max_episode_steps=limit, **size
    )
    expected, totals, lengths, reset, step = [], np.zeros(2), np.zeros(2, int), [False, False], 0
    for reward, terminated, truncated, infos in recorded:
        step += reset.count(False)
        for n in range(2):
            totals[n] += infos["reward"][n]
            lengths[n] += not reset[n]
            assert not reset[n] or (reward[n] == 0 and not terminated[n] and not truncated[n])
        for n in range(2):
            if infos["terminated"][n] or truncated[n]:
                expected.append((step, totals[n], lengths[n]))
                totals[n] = lengths[n] = 0
        reset = [bool(terminated[n] or truncated[n]) for n in range(2)]
    assert episodes_of(result["run_dir"]) == expected and len(expected) > 3
    assert result["global_step"] == step < 1024
    longest = max(length for *_, length in expected)
    assert (
        limit == 27_000 or limit - 12 <= longest <= limit
    )  # no-ops and FIRE are frames without the agent
    lives_lost = sum(terminated.sum() for _, terminated, *_ in recorded)
    assert lives_lost > (len(expected) if limit == 27_000 else 5)
    # a lost life cuts the bootstrap, a time limit only the trace
    terminations, dones = (np.concatenate([call[0][i] for call in gae_calls]) for i in (3, 4))
    cut = sum((truncated & ~terminated).sum() for _, terminated, truncated, _ in recorded)
    assert dones.sum() - terminations.sum() == cut and (cut > 3) == (limit == 60)
    assert valid_of(dones).sum() == step


@backends
def test_returns_are_unclipped(env_backend, recorded, run_atari_fast):
    """MsPacman pays 10 for a dot; a game cut off after 120 steps has eaten a few. The agent gets 1
    for each.
    """
    if env_backend == "envpool":
        pytest.importorskip("envpool")
    result = run_atari_fast(
        env_id="MsPacman",
        env_backend=env_backend,
        max_episode_steps=120,
        num_steps=128,
        total_timesteps=512,
    )
    returns = [value for _, value, _ in episodes_of(result["run_dir"])]
    assert len(returns) >= 2 and min(returns) >= 10 and all(value % 10 == 0 for value in returns)
    assert {float(value) for reward, *_ in recorded for value in reward} == {0.0, 1.0}


@backends
def test_reset_rows_are_no_samples(env_backend, run_atari_fast, spy):
    """Every epoch has each real step once or, in place of a reset, twice, and no reset; by their
    advantages.
    """
    if env_backend == "envpool":
        pytest.importorskip("envpool")
    losses, gae_calls = spy(ppo, "minibatch_loss"), spy(ppo, "gae")
    run_atari_fast(env_backend=env_backend, num_steps=128, total_timesteps=256)
    ((_, values, _, _, dones, *_), advantages) = gae_calls[0]
    valid = valid_of(dones)
    real, resets = advantages[valid], advantages[~valid]
    assert 2 < len(resets) < 40 and len(set(real)) > 0.9 * len(real)
    orders = []
    for epoch in (losses[:2], losses[2:]):
        assert [len(inputs[1]["values"]) for inputs, _ in epoch] == [128, 128]
        mb = {
            name: np.concatenate([inputs[1][name] for inputs, _ in epoch])
            for name in ("advantages", "values")
        }
        orders.append(mb["advantages"])
        assert set(mb["advantages"]) == set(real) and not set(resets) - set(real) & set(
            mb["advantages"]
        )
        counts = {a: list(real).count(a) for a in set(real)}
        assert all(n <= list(mb["advantages"]).count(a) <= 2 * n for a, n in counts.items())
        at = {(a, v) for a, v in zip(advantages.ravel(), values.ravel())}
        assert set(zip(mb["advantages"], mb["values"])) <= at
    assert (orders[0] != orders[1]).any()


def test_a_game_that_resets_in_two_steps_of_three_trains_on_the_third(run_atari_fast, spy):
    losses = spy(ppo, "minibatch_loss")
    run_atari_fast(
        max_episode_steps=1, noop_max=0, fire_reset=False, num_steps=3, total_timesteps=12
    )
    assert [len(inputs[1]["values"]) for inputs, _ in losses] == [3, 3] * 4
    assert (torch.stack([inputs[1]["logprobs"] for inputs, _ in losses]) < 0).all()


@backends
@pytest.mark.parametrize("bf16", [False, True])
def test_first_minibatch_has_ratio_one(env_backend, bf16, run_atari, spy):
    if env_backend == "envpool":
        pytest.importorskip("envpool")
    losses = spy(ppo, "minibatch_loss")
    run_atari(env_backend=env_backend, ortho_init=False, learning_rate=0.01, bf16=bf16)
    first, second = (stats for _, (_, stats) in losses[:2])
    scale = 1000 if bf16 else 1  # other sizes of batches, other sums
    assert abs(first["old_approx_kl"]) < 1e-5 * scale and abs(first["approx_kl"]) < 1e-6 * scale
    assert (
        first["clipfrac"] == 0 and second["approx_kl"] > 1e-5
    )  # one step later the policy has moved


def test_next_values_are_those_of_the_states_that_followed(run_atari_fast, spy):
    """With a new time limit every 20 steps: the row after the limit holds the state that it cut
    off.
    """
    acts, gae_calls = spy(ppo.Agent, "act"), spy(ppo, "gae")
    flags = {"max_episode_steps": 20, "ortho_init": False, "num_steps": 64}
    run_atari_fast(**flags, total_timesteps=256, learning_rate=1e-30)  # two rollouts of one policy
    agent, obs = acts[0][0][0], torch.stack([inputs[1] for inputs, _ in acts])  # (128, 2, ...)
    both = zip(*(inputs[:5] for inputs, _ in gae_calls))
    _, values, next_values, terminations, dones = map(np.concatenate, both)
    with torch.no_grad():
        truth = agent(obs.flatten(0, 1))[1].reshape(128, 2).numpy()
    np.testing.assert_allclose(values, truth, atol=1e-5)
    np.testing.assert_allclose(next_values[:-1], truth[1:], atol=1e-5)
    cuts = np.argwhere((dones - terminations)[:-1] == 1)
    assert len(cuts) >= 4
    for t, n in cuts:  # the row after the limit goes on from the state before it: no reset yet
        assert (obs[t + 1, n, :3] == obs[t, n, 1:]).all() and not valid_of(dones)[t + 1, n]


def test_explained_variance_leaves_out_reset_rows(run_atari_fast, spy):
    gae_calls = spy(ppo, "gae")
    flags = {"max_episode_steps": 7, "num_steps": 64, "total_timesteps": 128}
    run_dir = run_atari_fast(**flags, ortho_init=False)["run_dir"]
    (_, values, _, _, dones, *_), advantages = gae_calls[0]
    ((_, logged),) = scalars_of(run_dir)["losses/explained_variance"]
    explained = [
        1 - advantages[rows].var() / (advantages + values)[rows].var()
        for rows in (valid_of(dones), np.ones_like(dones, bool))
    ]
    assert logged == pytest.approx(explained[0], rel=1e-4)
    assert logged != pytest.approx(explained[1], rel=1e-3)


def test_time_limits_end_the_game_without_bootstrap_truncation(run_atari_fast, spy):
    gae_calls = spy(ppo, "gae")
    run_atari_fast(
        max_episode_steps=20, num_steps=64, total_timesteps=128, bootstrap_truncation=False
    )
    (_, _, _, terminations, dones, *_), _ = gae_calls[0]
    assert (terminations == dones).all() and dones.sum() >= 4


# -- agent --
def test_network_is_nature_cnn_with_published_scales(tiny_atari):
    torch.manual_seed(0)
    agent = make_agent(tiny_atari())
    shapes = [tuple(p.shape) for p in agent.parameters()]
    convolutions = [(32, 4, 8, 8), (32,), (64, 32, 4, 4), (64,), (64, 64, 3, 3), (64,)]
    assert shapes == convolutions + [(512, 3136), (512,), (4, 512), (4,), (1, 512), (1,)]
    layers = [m for m in agent.modules() if isinstance(m, (torch.nn.Conv2d, torch.nn.Linear))]
    for layer, gain in zip(layers, [2**0.5, 2**0.5, 2**0.5, 2**0.5, 0.01, 1.0], strict=True):
        weight = layer.weight.detach().flatten(1).double()
        gram = weight @ weight.T if len(weight) <= weight.shape[1] else weight.T @ weight
        torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram)).double(), atol=1e-4, rtol=0)
        assert (layer.bias == 0).all()


def test_forward_is_the_network_by_hand(tiny_atari):
    torch.manual_seed(0)
    agent = make_agent(tiny_atari(ortho_init=False))
    obs = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    conv1, conv2, conv3, linear = [m for m in agent.network if hasattr(m, "weight")]
    x = obs.float() / 255
    for conv, stride in ((conv1, 4), (conv2, 2), (conv3, 1)):
        x = torch.nn.functional.conv2d(x, conv.weight, conv.bias, stride).relu()
    hidden = (x.permute(0, 2, 3, 1).flatten(1) @ linear.weight.T + linear.bias).relu()
    logits, value = agent(obs)
    torch.testing.assert_close(
        logits, hidden @ agent.actor.weight.T + agent.actor.bias, atol=1e-5, rtol=1e-4
    )
    torch.testing.assert_close(
        value, hidden @ agent.critic.weight[0] + agent.critic.bias, atol=1e-5, rtol=1e-4
    )
    assert logits.shape == (3, 4) and value.shape == (3,)


def test_two_networks_share_nothing(tiny_atari):
    agent = make_agent(tiny_atari(shared_network=False))
    logits, value = agent(torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8))
    value.sum().backward(retain_graph=True)
    assert all(p.grad is None for p in [*agent.network.parameters(), *agent.actor.parameters()])
    logits.sum().backward()
    assert all(p.grad is not None for p in agent.parameters())


def test_actions_are_drawn_with_the_probabilities_of_the_policy(tiny_atari):
    torch.manual_seed(1)
    agent = make_agent(tiny_atari(ortho_init=False))
    obs = torch.randint(0, 256, (1, 4, 84, 84), dtype=torch.uint8)
    with torch.no_grad():
        agent.actor.bias += torch.tensor([0.0, 1.0, 2.0, -1.0])
        logits, value = agent(obs)
        n = 20_000
        with_noise = -torch.empty(n, 4).exponential_().log()
        stand_in = lambda _: (logits.expand(n, 4), value.expand(n))  # noqa: E731
        agent.forward = stand_in
        action, logprob, _ = agent.act(obs, with_noise)
        mode, *_ = agent.act(obs, torch.zeros(n, 4))
    probs = logits.softmax(1)[0]
    counts = torch.bincount(action, minlength=4)
    assert ((counts / n - probs).abs() < 4 * (probs * (1 - probs) / n).sqrt()).all()
    torch.testing.assert_close(logprob, probs.log()[action], atol=1e-5, rtol=0)
    assert (mode == logits.argmax()).all()


def test_log_probability_and_entropy_are_those_of_the_categorical(tiny_atari):
    torch.manual_seed(1)
    agent = make_agent(tiny_atari(ortho_init=False))
    obs, action = (
        torch.randint(0, 256, (5, 4, 84, 84), dtype=torch.uint8),
        torch.tensor([0, 1, 2, 3, 1]),
    )
    with torch.no_grad():
        logprob, entropy, value = agent.evaluate_actions(obs, action)
        p = agent(obs)[0].double().softmax(1).numpy()
    np.testing.assert_allclose(logprob, np.log(p[np.arange(5), action]), atol=1e-5)
    np.testing.assert_allclose(entropy, -(p * np.log(p)).sum(1), atol=1e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_bf16_casts_the_weights_of_the_rollout_once(shared, run_atari_fast, monkeypatch):
    """Before it acts, not at each step; a head stays float32."""
    act, types = ppo.Agent.act, set()

    def watched(agent, *args):
        networks = [net for net in (agent.network, agent.value_network) if net]
        types.update((len(networks), p.dtype) for net in networks for p in net.parameters())
        types.update((0, p.dtype) for p in agent.actor.parameters())
        return act(agent, *args)

    monkeypatch.setattr(ppo.Agent, "act", watched)
    run_atari_fast(bf16=True, shared_network=shared, eval_episodes=0)
    assert types == {(1 if shared else 2, torch.bfloat16), (0, torch.float32)}


def test_bf16_stays_inside_the_network(tiny_atari):
    torch.manual_seed(0)
    agent = make_agent(tiny_atari(bf16=True))
    plain = make_agent(tiny_atari())
    plain.load_state_dict(agent.state_dict())
    obs = torch.randint(0, 256, (16, 4, 84, 84), dtype=torch.uint8)
    scaled = []  # what the first layer sees: scaled in bfloat16, to the same as in float32
    agent.network.register_forward_pre_hook(lambda _, inputs: scaled.append(inputs[0]))
    logprob, entropy, value = agent.evaluate_actions(obs, torch.zeros(16, dtype=torch.long))
    assert torch.equal(scaled[0], (obs / 255).bfloat16())
    others = plain.evaluate_actions(obs, torch.zeros(16, dtype=torch.long))
    for mine, other in zip((logprob, entropy, value), others):
        assert mine.dtype == torch.float32
        assert 0 < (mine - other).abs().max() < 0.05
    (logprob.sum() + value.sum()).backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in agent.parameters())


def test_observations_stay_uint8(run_atari, spy):
    losses = spy(ppo, "minibatch_loss")
    run_atari()
    obs = losses[0][0][1]["obs"]
    assert obs.dtype == torch.uint8 and obs.shape == (16, 4, 84, 84)
    assert obs.is_contiguous(memory_format=torch.channels_last)


# -- game names --
@pytest.mark.parametrize(
    "env_id",
    ["Breakout", "Breakout-v5", "Breakout-v4", "ALE/Breakout-v5", "BreakoutNoFrameskip-v4"],
)
def test_usual_names_of_a_game(env_id):
    assert ppo.game_name(env_id) == "Breakout"


@pytest.mark.parametrize(
    "env_id, words",
    [
        ("Brekout-v5", "Breakout"),
        ("pong", "Pong"),
        ("HalfCheetah-v4", "no Atari game"),
        ("", "no Atari game"),
    ],
)
def test_unknown_games_are_named(env_id, words):
    with pytest.raises(ppo.UserError) as error:
        ppo.game_name(env_id)
    assert env_id in str(error.value) and words in str(error.value) and "\n" not in str(error.value)


def test_every_game_of_envpool_has_a_name_of_ours(tiny_atari, tmp_path):
    pytest.importorskip("envpool")
    from envpool.atari.registration import atari_game_list

    ppo.game_name("Pong")  # registers ALE's games
    ours = {spec.name.lower() for spec in gym.registry.values() if spec.namespace == "ALE"}
    theirs = {name.replace("_", "") for name in atari_game_list}
    assert len(theirs) > 50 and theirs <= ours
    for env_id in ("TicTacToe3D", "MsPacman"):
        assert (
            ppo.make_envs(tiny_atari(env_id=env_id, env_backend="envpool"), tmp_path, 1).num_envs
            == 2
        )


# -- checkpoints --
def test_resumed_run_is_bit_equal_to_one_never_stopped(run_atari_fast, monkeypatch, tmp_path):
    """Stopped after each of the first three of five iterations, also when the next step resets a
    game.
    """
    save = ppo.save_checkpoint

    def save_and_copy(run_dir, checkpoint):
        save(run_dir, checkpoint)
        stopped = tmp_path / f"stopped{checkpoint['iteration']}"
        if checkpoint["iteration"] < 4 and not stopped.exists():
            shutil.copytree(run_dir, stopped)

    monkeypatch.setattr(ppo, "save_checkpoint", save_and_copy)
    limit = {"max_episode_steps": 15, "noop_max": 1}  # with FIRE: ends with the first iteration
    size = {"num_steps": 13, "num_minibatches": 2, "total_timesteps": 130, "checkpoint_seconds": 0}
    run_dir = run_atari_fast(**size, **limit)["run_dir"]
    expected, episodes = state_of(run_dir), episodes_of(run_dir)
    assert expected["iteration"] == 5 and expected["envs"] is not None and len(episodes) > 4
    resets = []
    for iteration in (1, 2, 3):
        stopped = tmp_path / f"stopped{iteration}"
        checkpoint = checkpoint_of(stopped)
        resets += [state["resets"] for state in checkpoint["envs"]]
        assert [state["resets"] for state in checkpoint["envs"]] == (
            ~checkpoint["carried"][1]
        ).tolist()
        ppo.train(ppo.parse_args(["--resume", str(stopped)]))
        assert_equal(state_of(stopped), expected, "checkpoint")
        assert episodes_of(stopped) == episodes
    assert True in resets and False in resets


def test_what_the_first_reset_pays_counts(run_atari_fast, monkeypatch):
    """FIRE and no-ops may bring rewards, in training and in evaluation."""
    make_envs = ppo.make_envs

    def paying(*args):
        envs = make_envs(*args)
        reset = envs.reset

        def first(**how):
            obs, infos = reset(**how)
            return obs, infos | {"reward": 1000.0 * np.arange(1, 1 + envs.num_envs)}

        envs.reset = first
        return envs

    monkeypatch.setattr(ppo, "make_envs", paying)
    size = {"max_episode_steps": 20, "num_steps": 32, "total_timesteps": 256}
    result = run_atari_fast(eval_episodes=3, **size)
    thousands = [value // 1000 for _, value, _ in episodes_of(result["run_dir"])]
    assert sorted(thousands[:2]) == [1, 2] and set(thousands[2:]) == {0}
    assert [value // 1000 for value in result["eval_returns"]] == [1, 2, 3]


@pytest.mark.parametrize(
    "changes", [{"env_backend": "envpool"}, {"repeat_action_probability": 0.25}]
)
def test_where_the_state_cannot_be_saved_new_games_start(changes, run_atari_fast, monkeypatch):
    """With seeds of their own: the first rollout after it is none of those before."""
    if "env_backend" in changes:
        pytest.importorskip("envpool")
    seeds, make_envs = [], ppo.make_envs
    monkeypatch.setattr(ppo, "make_envs", lambda *args: seeds.append(args[2]) or make_envs(*args))
    run_dir = run_atari_fast(**changes)["run_dir"]
    checkpoint = checkpoint_of(run_dir)
    assert checkpoint["envs"] is None and checkpoint["iteration"] == 2
    ppo.save_checkpoint(run_dir, checkpoint | {"iteration": 1})
    ppo.train(ppo.parse_args(["--resume", str(run_dir)]))
    assert seeds == [1, 3]


def test_a_gymnasium_that_hides_which_games_reset_is_named(tiny_atari, tmp_path):
    envs = ppo.make_envs(tiny_atari(), tmp_path, 1)
    envs.reset(seed=1)
    del envs._autoreset_envs
    with pytest.raises(ppo.UserError, match="version of gymnasium"):
        ppo.env_states(envs)


def test_losses_that_are_not_finite_stop_the_run(run_atari_fast, monkeypatch):
    """The advantages are NaN in iteration 2; the checkpoint before stays."""
    gae, calls = ppo.gae, []

    def spoiled(*inputs):
        calls.append(1)
        return gae(*inputs) * (np.nan if len(calls) == 2 else 1)

    monkeypatch.setattr(ppo, "gae", spoiled)
    with pytest.raises(ppo.UserError, match="iteration 2 .*not finite.*nan"):
        run_atari_fast(checkpoint_seconds=0)
    (path,) = Path("runs").glob("*/checkpoint.pt")
    assert torch.load(path, weights_only=True)["iteration"] == 1


def test_envpool_takes_its_seed_when_it_is_made(tiny_atari, tmp_path):
    pytest.importorskip("envpool")
    first = []
    for seed in (1, 1, 3):
        envs = ppo.make_envs(tiny_atari(env_backend="envpool", env_id="MsPacman"), tmp_path, seed)
        frames = [envs.reset(seed=seed)[0]]
        frames += [envs.step(np.ones(2, np.int32))[0] for _ in range(60)]
        first.append(np.stack(frames))
    assert (first[0] == first[1]).all() and (first[0] != first[2]).any()
    assert (first[0][:, 0] != first[0][:, 1]).any()


# -- evaluation --
@backends
def test_evaluation_of_breakout_ends_without_an_agent_that_presses_fire(
    env_backend, run_atari_fast, monkeypatch, recorded
):
    """The agent does nothing: five lives are lost, each after the FIRE of training, and count."""
    if env_backend == "envpool":
        pytest.importorskip("envpool")
    size = {"num_steps": 2, "num_minibatches": 1, "total_timesteps": 4}
    run_dir = run_atari_fast(env_backend=env_backend, **size)["run_dir"]
    recorded.clear()
    nothing = lambda agent, obs, noise: (torch.zeros(len(obs)).long(),) * 3  # noqa: E731
    monkeypatch.setattr(ppo.Agent, "act", nothing)
    args = ppo.parse_args(["--evaluate", str(run_dir), "--eval-episodes", "2"])
    returns = ppo.evaluate(args, run_dir)
    totals, ends, over = np.zeros(2), np.zeros(2, int), np.zeros(2, bool)
    for _, terminated, truncated, infos in recorded:
        totals += infos["reward"] * ~over
        ends += terminated & ~over
        over |= infos["terminated"].astype(bool)
        assert not truncated.any()
    assert len(recorded) < 500 and over.all() and ends.tolist() == [5, 5]
    assert returns == totals.tolist()


@backends
def test_evaluation_plays_whole_games_unclipped(env_backend, run_atari_fast, recorded):
    if env_backend == "envpool":
        pytest.importorskip("envpool")
    size = {"num_steps": 2, "num_minibatches": 1, "total_timesteps": 4}
    flags = {"env_id": "MsPacman", "env_backend": env_backend, "max_episode_steps": 150}
    run_dir = run_atari_fast(**flags, **size)["run_dir"]
    recorded.clear()
    args = ppo.parse_args(["--evaluate", str(run_dir), "--eval-episodes", "3"])
    returns = ppo.evaluate(args, run_dir)
    assert len(recorded) <= 160 and len(returns) == 3
    assert min(returns) >= 10 and all(value % 10 == 0 for value in returns)
    assert returns == ppo.evaluate(args, run_dir)


@pytest.mark.parametrize("frame_skip", [4, 7, 70])
def test_films_last_as_long_as_the_game(frame_skip, tiny_atari, tmp_path):
    """A game has 60 frames a second, a film those that the agent sees."""
    args = tiny_atari(env_backend="gymnasium", frame_skip=frame_skip)
    env = ppo.make_env(args, tmp_path)
    while not isinstance(env, gym.wrappers.RecordVideo):
        env = env.env
    assert env.frames_per_sec == pytest.approx(60 / frame_skip)


# -- flags --
@pytest.mark.parametrize(
    "flags, words",
    [
        ("--env-backend envpool --noop-max 0", ["--noop-max (0)", "--env-backend gymnasium"]),
        ("--capture-video", ["--capture-video", "--env-backend gymnasium"]),
        ("--num-steps 1", ["--num-steps (1)"]),
        ("--repeat-action-probability 1.5", ["--repeat-action-probability (1.5)"]),
        ("--env-id Brekout", ["--env-id (Brekout)", "Breakout"]),
        ("--env-id HalfCheetah-v4", ["--env-id", "HalfCheetah-v4", "no Atari game"]),
        ("--num-minibatches 3", ["--num-minibatches (3)", "8 * 128", "1024"]),
        ("--noop-max -1", ["--noop-max (-1)"]),
        ("--max-episode-steps 1000000000", ["--max-episode-steps (1000000000)"]),  # no C int
        ("--frame-stack 0", ["--frame-stack (0)"]),
        ("--noop-max 10000000000", ["--noop-max (10000000000)"]),
        ("--env-threads 10000000000", ["--env-threads (10000000000)"]),
        ("--max-episode-steps 0", ["--max-episode-steps (0)"]),
    ],
)
def test_flags_that_make_no_sense_are_named(flags, words, tmp_path):
    with pytest.raises(ppo.UserError) as error:
        ppo.parse_args(flags.split())
    assert [word for word in words if word not in str(error.value)] == []
    assert list(tmp_path.iterdir()) == []


def test_without_envpool_the_message_says_what_does(monkeypatch):
    monkeypatch.setattr(ppo, "find_spec", lambda name: None)
    with pytest.raises(ppo.UserError, match="EnvPool is not installed.*--env-backend gymnasium"):
        ppo.parse_args([])


def test_what_envpool_has_learned_can_be_played_and_filmed_without_it(run_atari_fast, monkeypatch):
    pytest.importorskip("envpool")
    run_dir = run_atari_fast(env_backend="envpool")["run_dir"]
    monkeypatch.setattr(ppo, "find_spec", lambda name: name != "envpool")
    play = ["--evaluate", str(run_dir), "--eval-episodes", "1"]
    assert ppo.parse_args([*play, "--env-backend", "gymnasium"]).env_backend == "gymnasium"
    filming = ppo.parse_args([*play, "--capture-video"])
    with pytest.raises(ppo.UserError, match="--env-backend gymnasium"):
        ppo.parse_args(play)

    def stop(args, *_):
        raise KeyboardInterrupt(args.env_backend)

    monkeypatch.setattr(ppo, "make_envs", stop)
    with pytest.raises(KeyboardInterrupt, match="gymnasium"):
        ppo.evaluate(filming, run_dir)


@pytest.mark.parametrize(
    "cpuinfo, said", [("avx2", True), ("avx512_bf16", False), ("amx_bf16", False)]
)
def test_a_processor_without_bf16_is_said(cpuinfo, said, monkeypatch, tmp_path, capsys):
    """Once, where a run starts."""
    monkeypatch.setattr(ppo.Path, "read_text", lambda path, **kwargs: cpuinfo)
    monkeypatch.setattr(ppo.Path, "exists", lambda path: True)
    for bf16 in (True, False):
        args = ppo.Args(bf16=bf16, cuda=False)
        writer, episodes, bar = ppo.open_logs(args, tmp_path / f"run {bf16}", None)
        assert ("--bf16 is slower" in capsys.readouterr().out) == (said and bf16)
        for closable in (writer, episodes, bar):
            closable.close()


def test_threads_of_envpool_are_the_cores_and_the_gpu_is_used_if_there_is_one():
    args = ppo.Args()
    assert args.env_threads == ppo.os.cpu_count()
    assert args.cuda == args.compile == torch.cuda.is_available()


# -- compiled and eager --
@pytest.mark.e2e
@pytest.mark.parametrize("bf16, tolerance, share", [(False, 1e-6, 1e-3), (True, 1e-3, 0.3)])
def test_compiled_and_eager_updates_agree(bf16, tolerance, share, tiny_atari):
    """Twenty minibatches, both with the same weights each time.

    On random images, left alone, a difference of 1e-8 grows to 1e-3 in 20 steps: Adam scales the
    smallest gradients up.
    """
    size, args = 64, tiny_atari(bf16=bf16)
    torch.manual_seed(0)
    agent = make_agent(args)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=args.adam_eps, fused=True)
    batch = {"obs": torch.randint(0, 256, (size, 84, 84, 4), dtype=torch.uint8).permute(0, 3, 1, 2)}
    batch |= {"actions": torch.randint(0, 4, (size,))}
    batch |= {name: torch.randn(size) for name in ("advantages", "returns", "values")}
    with torch.no_grad():
        batch["logprobs"] = agent.evaluate_actions(batch["obs"], batch["actions"])[0]
    example = {name: b[torch.arange(32)] for name, b in batch.items()}
    clip_coef = torch.tensor(0.1)
    fast = ppo.compiled(ppo.minibatch_loss, torch.device("cpu"), (agent, example, clip_coef, args))
    assert fast is not ppo.minibatch_loss
    for _ in range(20):
        mb_inds, grads = torch.randperm(size)[:32], []
        mb = {name: b[mb_inds] for name, b in batch.items()}
        results = []
        for function in (fast, ppo.minibatch_loss):
            loss, stats = function(agent, mb, clip_coef, args)
            optimizer.zero_grad()
            loss.backward()
            grads.append(torch.cat([p.grad.flatten() for p in agent.parameters()]))
            results.append(
                {name: stat.clone() for name, stat in stats.items()} | {"loss": loss.detach()}
            )
        for name, stat in results[1].items():
            torch.testing.assert_close(
                results[0][name], stat, rtol=max(share, 1e-2), atol=100 * tolerance
            )
        assert (grads[0] - grads[1]).norm() <= share * grads[1].norm()
        optimizer.step()


def test_what_cannot_be_compiled_runs_eagerly_and_says_so(run_atari, monkeypatch, capsys):
    def fails(function, **options):
        def graph(*inputs):
            raise RuntimeError("no compiler\nand more")

        return graph

    monkeypatch.setattr(torch, "compile", fails)
    run_atari(compile=True)
    out = capsys.readouterr().out
    for name in ("act", "minibatch_loss"):
        assert out.count(f"{name} cannot be compiled here and runs eagerly: no compiler\n") == 1
    assert out.count("compiling takes") == out.count("runs eagerly") == 2
