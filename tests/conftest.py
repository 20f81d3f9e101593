"""What the test files share: the scripts on the path, a clean directory per test, small runs."""

import os
import re
import shutil
import sys
from contextlib import chdir
from dataclasses import fields
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensorboard.summary.writer import event_file_writer
from torch.optim.optimizer import register_optimizer_step_pre_hook

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

pytest.register_assert_rewrite("watch", "harness")
import envs  # noqa: E402
from harness import small_games  # noqa: E402
from harness import train as run_of  # noqa: E402
from registry import SCRIPTS, Script  # noqa: E402
from watch import copied, one_layer_agent  # noqa: E402

import ppo  # noqa: E402
import ppo_continuous_mujoco as mujoco  # noqa: E402

# One thread each, here and in what tests start: those of several processes wait for each other.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# Event files of one second are read in the order of their names, where the 10th precedes the 9th.
event_file_writer._global_uid = event_file_writer.AtomicCounter(10**6)


# -- what may be skipped --
def pytest_addoption(parser):
    reason = "fail if a test is skipped and the reason does not match REGEX"
    parser.addoption("--no-skips-but", metavar="REGEX", help=reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report, expected = (yield), item.config.getoption("--no-skips-but")
    if report.skipped and expected is not None and not re.search(expected, str(call.excinfo.value)):
        report.outcome = "failed"
        report.longrepr = f"skipped without need: {call.excinfo.value}"
    return report


def pytest_collection_modifyitems(items):
    """What forks comes first: a child of a process with Java in it may wait forever."""
    items.sort(key=lambda item: "async" not in item.name and "pool" not in item.name)


# -- a scripted environment --
class Scripted(gym.Env):
    """Observes (step of the episode, its number), pays 1 a step and ends after five, always.

    `ends` says how it ends; from the step `poison` on (of all episodes together) it pays NaN. The
    actions that it got are in `actions`, one list for all instances of this process. Its actions
    are a Box, or Discrete from 2 to 4. All its observations have the same memory, it writes into
    the actions that it gets, and it takes no `render_mode`: Gymnasium allows all of this.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gym.spaces.Box(np.float32([-1, -0.5]), np.float32([1, 2]))
    actions: list = []

    def __init__(self, ends: str, poison: float = np.inf, discrete: bool = False):
        self.ends, self.poison = ends, poison
        self.steps, self.episode, self.obs = 0, -1, np.zeros(2)
        if discrete:
            self.action_space = gym.spaces.Discrete(3, start=2)

    def reset(self, seed=None, options=None):
        self.t, self.episode = 0, self.episode + 1
        self.obs[:] = self.t, self.episode
        return self.obs, {}

    def step(self, action):
        self.actions.append(np.array(action))
        if isinstance(action, np.ndarray):
            action *= 2
        self.t, self.steps = self.t + 1, self.steps + 1
        self.obs[:] = self.t, self.episode
        reward = 1.0 if self.steps < self.poison else np.nan
        ends = [self.t == 5 and self.ends == way for way in ("termination", "truncation")]
        return self.obs, reward, *ends, {}


SCRIPTED = {
    "Terminating": {"ends": "termination"},
    "Truncating": {"ends": "truncation"},
    "Poisoned": {"ends": "termination", "poison": 40},
}
for name, kwargs in SCRIPTED.items():
    envs.add(name, Scripted, **kwargs)


@pytest.fixture(autouse=True)
def clean_start(tmp_path, monkeypatch):
    """Every test works in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    Scripted.actions.clear()
    envs.Seeds.seen.clear()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """`folder("a")`: work in a new directory of that name from here on."""

    def go(name: str) -> Path:
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        return tmp_path / name

    return go


# -- small runs: a fraction of a second --
SMALL = {"num_envs": 2, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2}
SMALL |= {"total_timesteps": 64, "eval_episodes": 0, "compile": False, "cuda": False}
MORE = {"num_envs": 4, "total_timesteps": 128}
VECTORS = ("ppo", "ppo_continuous_mujoco", "trpo_continuous_mujoco")
SMALL_OF = dict.fromkeys(VECTORS, {"env_id": "Terminating-v0", "num_minibatches": 4}) | {
    "ppo_multidiscrete": {"env_id": "CartPole-v1"},
    "ppo_microrts": {"env_id": "CartPole-v1"},
    "ppo_lstm": MORE,
    "ppo_atari": {"env_backend": "gymnasium"},
    "ppo_atari_lstm": {"env_backend": "gymnasium"} | MORE,
    "ppo_procgen": {"env_threads": 0} | MORE,
    "ppg_procgen": {"env_threads": 0, "n_iteration": 2, "e_auxiliary": 2} | MORE,
}


def tiny(script, **changes):
    """Args of a small run, of the scripted environment where the script takes vectors."""
    known = {field.name for field in fields(script.Args)}
    small = {name: value for name, value in SMALL.items() if name in known}
    small |= SMALL_OF[script.__name__] | changes
    env = small.get("env_id", "").removesuffix("-v0")
    if env in SCRIPTED:
        small["env_id"] = SCRIPTS[script.__name__].env(env)
    return script.Args(**small)


def run_tiny(script, **changes) -> dict:
    """What `train` returns of such a run; its `run_dir` is an absolute Path."""
    result = script.train(tiny(script, **changes))
    return result | {"run_dir": Path(result["run_dir"]).resolve()}


@pytest.fixture
def small(monkeypatch):
    """Small games and networks; what is said once in a process is said once in a test."""
    for row in SCRIPTS.values():
        getattr(row.module, "say_once", lru_cache(str)).cache_clear()
        small_games(row, monkeypatch)


@pytest.fixture
def fast(monkeypatch):
    """One linear layer for the convolutions of games, which take nearly all the time of a run."""
    for script in [row.module for row in SCRIPTS.values() if row.games]:
        monkeypatch.setattr(script, "Agent", one_layer_agent(script))


# -- finished runs, and what a machine may have --
@pytest.fixture(scope="module")
def finished_runs() -> dict[str, Path]:
    return {}


@pytest.fixture
def finished(finished_runs, tmp_path, tmp_path_factory):
    """`finished(script)`: a copy of a finished tiny run of it, which is trained once.

    It is in the working directory, and so is its path.
    """

    def copy(script: Script) -> Path:
        if script.name not in finished_runs:
            with chdir(tmp_path_factory.mktemp("finished")):
                finished_runs[script.name] = run_of(script, exp_name="small", eval_episodes=2)
        run_dir = finished_runs[script.name]
        shutil.copytree(run_dir, tmp_path / "runs" / run_dir.name)
        return Path("runs") / run_dir.name

    return copy


@pytest.fixture
def everything_is_there(monkeypatch):
    """A GPU and wandb, as far as checks see."""
    wandb = ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None, origin="wandb")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


# -- ppo.py and ppo_continuous_mujoco.py alike --
@pytest.fixture(params=[ppo, mujoco], ids=lambda script: script.__name__)
def script(request):
    return request.param


# -- what happens in a run --
@pytest.fixture
def spy(monkeypatch):
    """`calls = spy(owner, name)`: the function runs; calls gets (copies of arguments, result)."""

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
def optimizer_steps():
    """What every optimizer sees before each step: (itself, learning rate, gradients, counts)."""
    steps = []

    def before(optimizer, *_):
        (group,) = optimizer.param_groups
        grads = [None if p.grad is None else p.grad.clone() for p in group["params"]]
        counts = [int(optimizer.state.get(p, {}).get("step", 0)) for p in group["params"]]
        steps.append((optimizer, group["lr"], grads, counts))

    hook = register_optimizer_step_pre_hook(before)
    yield steps
    hook.remove()
