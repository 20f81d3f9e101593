"""What the test files share: the scripts on the path, a clean directory per test, small settings and a scripted env."""

import csv
import os
import re
import signal
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from watch import Watch, copied  # noqa: E402

import ppg_procgen  # noqa: E402
import ppo  # noqa: E402
import ppo_atari  # noqa: E402
import ppo_continuous_mujoco  # noqa: E402
import ppo_lstm  # noqa: E402
import ppo_multidiscrete  # noqa: E402
import ppo_procgen  # noqa: E402

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = (
    "1"  # of the scripts that tests start: threads of several processes wait for each other
)


class Scripted(gym.Env):
    """Observes (step of the episode, number of the episode), pays 1 a step and ends after five, whatever is done.

    `ends` says how it ends; from the step `poison` on (of all episodes together) it pays NaN. The actions that it got
    are in `actions`, one list for all instances of this process. Its actions are a Box, or Discrete
    from 2 to 4.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gym.spaces.Box(np.float32([-1, -0.5]), np.float32([1, 2]))
    actions: list = []

    def __init__(self, ends: str, poison: float = np.inf, discrete: bool = False, render_mode=None):
        self.ends, self.poison, self.steps, self.episode, self.render_mode = (
            ends,
            poison,
            0,
            -1,
            render_mode,
        )
        if discrete:
            self.action_space = gym.spaces.Discrete(3, start=2)

    def reset(self, seed=None, options=None):
        self.t, self.episode = 0, self.episode + 1
        return np.array([self.t, self.episode], np.float64), {}

    def step(self, action):
        self.actions.append(np.array(action))
        self.t, self.steps = self.t + 1, self.steps + 1
        over = self.t == 5
        obs = np.array([self.t, self.episode], np.float64)
        reward = 1.0 if self.steps < self.poison else np.nan
        return (
            obs,
            reward,
            over and self.ends == "termination",
            over and self.ends == "truncation",
            {},
        )


SCRIPTED = {
    "Terminating": {"ends": "termination"},
    "Truncating": {"ends": "truncation"},
    "Poisoned": {"ends": "termination", "poison": 40},
}
for name, kwargs in SCRIPTED.items():
    gym.register(f"{name}-v0", Scripted, kwargs=kwargs)
    gym.register(f"{name}Discrete-v0", Scripted, kwargs=kwargs | {"discrete": True})


def pytest_addoption(parser):
    reason = "fail if a test is skipped and the reason does not match REGEX"
    parser.addoption("--no-skips-but", metavar="REGEX", help=reason)


def unexpected_skips(config) -> list[str]:
    """Where and why, of skips that `--no-skips-but` does not name."""
    expected, reporter = (
        config.getoption("--no-skips-but"),
        config.pluginmanager.get_plugin("terminalreporter"),
    )
    if expected is None or reporter is None or hasattr(config, "workerinput"):
        return []
    reasons = [report.longrepr for report in reporter.stats.get("skipped", [])]
    return [
        f"{path}:{line}: {reason}"
        for path, line, reason in reasons
        if not re.search(expected, reason)
    ]


def pytest_sessionfinish(session, exitstatus):
    if exitstatus == 0 and unexpected_skips(session.config):
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter):
    for skip in unexpected_skips(terminalreporter.config):
        terminalreporter.write_line(f"FAILED: skipped without need: {skip}", red=True)


@pytest.fixture(autouse=True)
def clean_start(tmp_path, monkeypatch):
    """Every test works in a directory of its own and leaves signal handlers as they were."""
    monkeypatch.chdir(tmp_path)
    Scripted.actions.clear()
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    yield
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


@pytest.fixture
def scripted() -> type[Scripted]:
    return Scripted


def tiny(script, **changes):
    """Args of a run of a fraction of a second: two environments, 16 steps each, 4 minibatches."""
    small = {"env_id": "Terminating-v0", "num_envs": 2, "num_steps": 16, "num_minibatches": 4}
    small |= {"update_epochs": 2, "total_timesteps": 64, "eval_episodes": 0}
    small |= {} if script is ppo else {"compile": False}
    small |= changes
    if script is ppo and small["env_id"].removesuffix("-v0") in SCRIPTED:
        small["env_id"] = small["env_id"].replace("-v0", "Discrete-v0")
    return script.Args(**small)


@pytest.fixture
def tiny_args():
    """Args of a short run of ppo_continuous_mujoco.py."""
    return partial(tiny, ppo_continuous_mujoco)


@pytest.fixture
def tiny_atari():
    """The same for ppo_atari.py, on Breakout with the readable wrappers."""

    def make(**changes) -> ppo_atari.Args:
        small = {
            "num_envs": 2,
            "num_steps": 16,
            "num_minibatches": 2,
            "update_epochs": 2,
            "env_backend": "gymnasium",
        }
        small |= {"total_timesteps": 64, "compile": False, "cuda": False, "eval_episodes": 0}
        return ppo_atari.Args(**small | changes)

    return make


@pytest.fixture
def tiny_lstm():
    """The same for ppo_lstm.py, on CartPole: four environments, two of them in each minibatch."""

    def make(**changes) -> ppo_lstm.Args:
        small = {
            "num_envs": 4,
            "num_steps": 16,
            "num_minibatches": 2,
            "update_epochs": 2,
            "env_backend": "gymnasium",
        }
        small |= {"total_timesteps": 128, "compile": False, "cuda": False, "eval_episodes": 0}
        return ppo_lstm.Args(**{"env_id": "CartPole-v1"} | small | changes)

    return make


@pytest.fixture
def tiny_multidiscrete():
    """The same for ppo_multidiscrete.py, on CartPole."""

    def make(**changes) -> ppo_multidiscrete.Args:
        small = {
            "env_id": "CartPole-v1",
            "num_envs": 2,
            "num_steps": 16,
            "num_minibatches": 2,
            "update_epochs": 2,
        }
        small |= {"total_timesteps": 64, "compile": False, "cuda": False, "eval_episodes": 0}
        return ppo_multidiscrete.Args(**small | changes)

    return make


@pytest.fixture
def tiny_procgen():
    """The same for ppo_procgen.py and, with policy phases of two iterations, for ppg_procgen.py."""

    def make(script, **changes):
        small = {
            "num_envs": 4,
            "num_steps": 16,
            "num_minibatches": 2,
            "total_timesteps": 128,
            "env_threads": 0,
        }
        small |= {"cuda": False, "compile": False, "eval_episodes": 0}
        small |= (
            {"n_iteration": 2, "e_auxiliary": 2} if script is ppg_procgen else {"update_epochs": 2}
        )
        return script.Args(**small | changes)

    return make


def one_layer(script, monkeypatch) -> None:
    """One linear layer for the convolutions, which take nearly all the time of a run.

    For tests of what surrounds the network: steps, episodes, orders, rates, phases, checkpoints.
    """

    class Agent(script.Agent):
        def __init__(self, obs_space, *rest):
            super().__init__(obs_space, *rest)
            channels = min(obs_space.shape)

            def layer() -> torch.nn.Sequential:
                linear = torch.nn.Linear(64 * channels, self.actor.in_features)
                pool = torch.nn.AdaptiveAvgPool2d(8)
                return torch.nn.Sequential(pool, torch.nn.Flatten(), linear, torch.nn.ReLU())

            self.network = layer()
            self.value_network = self.value_network and layer()

    monkeypatch.setattr(script, "Agent", Agent)


def runner(train, make_args, tmp_path, monkeypatch):
    """Train with small settings in a fresh directory; the result's run_dir is an absolute Path."""

    def go(**changes) -> dict:
        directory = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        monkeypatch.chdir(directory)
        result = train(make_args(**changes))
        return result | {"run_dir": directory / result["run_dir"]}

    return go


@pytest.fixture
def run(tiny_args, tmp_path, monkeypatch):
    return runner(ppo_continuous_mujoco.train, tiny_args, tmp_path, monkeypatch)


@pytest.fixture
def run_atari(tiny_atari, tmp_path, monkeypatch):
    return runner(ppo_atari.train, tiny_atari, tmp_path, monkeypatch)


@pytest.fixture
def run_atari_fast(run_atari, monkeypatch):
    """With one layer for the Nature CNN."""
    one_layer(ppo_atari, monkeypatch)
    return run_atari


@pytest.fixture
def run_lstm(tiny_lstm, tmp_path, monkeypatch):
    return runner(ppo_lstm.train, tiny_lstm, tmp_path, monkeypatch)


@pytest.fixture
def run_multidiscrete(tiny_multidiscrete, tmp_path, monkeypatch):
    return runner(ppo_multidiscrete.train, tiny_multidiscrete, tmp_path, monkeypatch)


@pytest.fixture(params=[ppo, ppo_continuous_mujoco], ids=lambda script: script.__name__)
def script(request):
    """Each script for vectors in the new form."""
    return request.param


@pytest.fixture
def args_of(script):
    """Args of a short run of `script`."""
    return partial(tiny, script)


@pytest.fixture
def run_script(script, args_of, tmp_path, monkeypatch):
    return runner(script.train, args_of, tmp_path, monkeypatch)


@pytest.fixture
def watch(monkeypatch):
    """`seen = watch(script)`: the rollouts and optimizer steps of its runs from now on."""
    watches = []

    def start(script) -> Watch:
        watches.append(Watch(script, monkeypatch))
        return watches[-1]

    yield start
    for each in watches:
        each.hook.remove()


@pytest.fixture
def run_box(run_multidiscrete):
    """ppo_multidiscrete.py with normalizers, on the scripted environments with Box actions."""
    box = {
        "env_id": "Terminating-v0",
        "discretize_actions": 3,
        "norm_obs": True,
        "norm_reward": True,
    }
    box |= {"num_minibatches": 4, "shared_network": False, "gamma": 0.99}
    return lambda **changes: run_multidiscrete(**box | changes)


@pytest.fixture
def run_procgen(tiny_procgen, tmp_path, monkeypatch):
    if find_spec("procgen") is None:
        pytest.skip("procgen-mirror is not installed")
    return lambda script, **changes: runner(
        script.train, partial(tiny_procgen, script), tmp_path, monkeypatch
    )(**changes)


@pytest.fixture
def run_procgen_fast(run_procgen, monkeypatch):
    """With one layer for IMPALA's CNN."""
    for script in (ppo_procgen, ppg_procgen):
        one_layer(script, monkeypatch)
    return run_procgen


@pytest.fixture
def spy(monkeypatch):
    """`calls = spy(owner, name)`: the real function runs, and calls gets (copies of its arguments, its result)."""

    def watch(owner, name: str) -> list:
        original, calls = getattr(owner, name), []

        def watched(*args):
            before = copied(args)
            result = original(*args)
            calls.append((before, copied(result)))
            return result

        monkeypatch.setattr(owner, name, watched)
        return calls

    return watch


@pytest.fixture
def read_episodes():
    """(step, return, length) of every episode in a run's episodes.csv; the seconds differ from run to run."""

    def read(run_dir: Path) -> list[tuple[int, float, int]]:
        with open(run_dir / "episodes.csv") as file:
            return [
                (int(row["step"]), float(row["return"]), int(row["length"]))
                for row in csv.DictReader(file)
            ]

    return read


@pytest.fixture
def scalars_of():
    """(step, value) of every TensorBoard scalar of a run by tag."""

    def read(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
        events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
        return {
            tag: [(event.step, event.value) for event in events.Scalars(tag)]
            for tag in events.Tags()["scalars"]
        }

    return read
