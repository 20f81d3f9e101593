"""Several processes [X02]: runs of the patched scripts in two real ones, with gloo on the CPU.

torchrun starts this file, too: each process writes down what it does in runs that are whole, killed
and resumed. The documented commands are in the test marked `e2e`.
"""

import contextlib
import copy
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import HAS_PROCGEN, flag_of, needs_procgen
from registry import GAMES, ROOT, SCRIPTS, pages
from watch import (
    Killed,
    assert_equal,
    assert_same_run,
    checkpoint_of,
    copied,
    episodes_of,
    flat,
    one_layer_agent,
    scalars_of,
)

sys.path.insert(0, str(ROOT / "benchmark"))

import patches  # noqa: E402

SIZE = 2  # processes
# Patch -> flags of four iterations, in which no process normalizes anything for itself.
CASES = {"multigpu_atari": GAMES | {"num_envs": 4, "update_epochs": 3, "norm_adv": False}}
CASES["multigpu_atari"] |= {"total_timesteps": 512}
CASES["multigpu_ppg"] = SCRIPTS["ppg_procgen"].tiny | {"num_envs": 4, "total_timesteps": 512}
CASES["multigpu_ppg"] |= {"e_policy": 3, "e_auxiliary": 2, "norm_adv": False}
PPG = pytest.param("multigpu_ppg", marks=needs_procgen)
all_cases = pytest.mark.parametrize("name", ["multigpu_atari", PPG])
ppg_alone = pytest.mark.parametrize("name", [PPG])


def torchrun(size, *words, **kwargs) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(size), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **kwargs)


def script_of(name: str, folder: Path) -> Path:
    return patches.patched(ROOT / "variants" / "combine" / f"{name}.patch", folder)


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- what each of two processes does --
def grads(agent: torch.nn.Module) -> torch.Tensor:
    """One vector; PPG's policy phase has none for the auxiliary head."""
    return flat(p.grad for p in agent.parameters() if p.grad is not None)


def record(name: str) -> dict:
    """What a patched script does in this process, run by run."""
    module = load(script_of(name, Path(os.environ["RANK"])))
    module.Agent = one_layer_agent(module)  # convolutions take most of the time
    seen, found, how = {}, {}, {}

    def make_envs(original, args, run_dir, seed):
        seen["seeds"] += range(seed, seed + args.num_envs)
        return original(args, run_dir, seed)

    def act(original, *args, **kwargs):
        seen["rngs"].append(torch.get_rng_state())
        return original(*args, **kwargs)

    def gae(original, rewards, *rest):
        seen["rewards"].append(rewards.copy())
        seen["advantages"].append(original(rewards, *rest))
        return seen["advantages"][-1]

    def aux_loss(original, agent, mb, args):
        how.setdefault("aux", [copy.deepcopy(agent), copied(mb)])
        return original(agent, mb, args)

    def save_checkpoint(original, args, state, log):
        time.sleep(0.1)  # while the other process could go on
        original(args, state, log)
        seen["files"] = sorted(path.name for path in log.run_dir.glob("observations*"))

    def evaluate_actions(original, agent, *inputs):
        seen["weights"].append(flat(agent.parameters()))
        how.setdefault("policy", [copy.deepcopy(agent)])  # and its first minibatch
        return original(agent, *inputs)

    def ppo_loss(original, newlogprob, entropy, newvalue, mb, *rest):
        how["policy"] += [copied(mb)] * (len(how["policy"]) == 1)
        seen["normalized"].append(copied(mb["advantages"]))
        return original(newlogprob, entropy, newvalue, mb, *rest)

    def average_gradients(original, agent, stats):
        phase = "policy" if "policy_loss" in stats else "aux"
        original(agent, stats)
        seen[phase].append((grads(agent), copied(stats)))
        if len(seen[phase]) == how.get(phase + " last"):
            raise Killed

    def all_gather(original, value):
        if isinstance(value, tuple):  # what is logged
            seen["gathered"].append(value)
            if len(seen["gathered"]) == how.get("last"):
                raise Killed
        if isinstance(value, np.ndarray):
            seen["discounted"].append(value.copy())
        return original(value)

    def train(key, args=None, **changes) -> None:
        names = "seeds rngs weights policy aux gathered rewards advantages normalized discounted"
        seen.update({name: [] for name in names.split()}, run_dir=None)
        with contextlib.suppress(Killed):
            results = module.train(args or module.Args(**CASES[name] | changes))
            seen["run_dir"] = results and results["run_dir"]
        found[key] = seen.copy()

    gather = module.all_gather
    wrappers = [make_envs, act, evaluate_actions, ppo_loss, average_gradients, all_gather, gae]
    wrappers += [aux_loss, save_checkpoint] if name == "multigpu_ppg" else []
    for wrapper in wrappers:
        owner = module if hasattr(module, wrapper.__name__) else module.Agent

        def wrapped(*args, wrapper=wrapper, original=getattr(owner, wrapper.__name__), **kwargs):
            return wrapper(original, *args, **kwargs)

        setattr(owner, wrapper.__name__, wrapped)

    train("whole")
    args = module.Args(**CASES[name])

    def policy_loss(agent, mb, args):
        evaluated = agent.evaluate_actions(mb["obs"], mb["actions"])
        return module.ppo_loss(*evaluated, mb, args.clip_coef, args)

    for phase in ("policy", "aux")[: len(how)]:
        agent, mine = how[phase]
        parts = gather(mine)
        mb = {key: torch.cat([part[key] for part in parts]) for key in mine}
        loss, stats = (policy_loss if phase == "policy" else module.aux_loss)(agent, mb, args)
        agent.zero_grad()
        loss.backward()
        found[f"joined {phase}"] = len(mb["returns"]), grads(agent), copied(stats)
    # In the third iteration; or in the second auxiliary phase, which follows the fourth
    kill = {"aux last": len(seen["aux"]) // 2 + 3} if name == "multigpu_ppg" else {"last": 3}
    how.update(kill)
    train("killed", exp_name=f"killed_{name}")
    how.clear()
    dist.barrier()
    (run_dir,) = Path("runs").glob(f"*__killed_{name}__*")
    found["checkpoint"] = checkpoint_of(run_dir)
    train("resumed", module.parse_args(["--resume", str(run_dir)]))
    return found


@pytest.fixture(scope="module")
def recordings(tmp_path_factory) -> tuple[Path, list[dict]]:
    """Where the processes ran, and what each did, by rank."""
    folder = tmp_path_factory.mktemp("processes")
    done = torchrun(SIZE, __file__, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, [torch.load(folder / f"{n}.pt", weights_only=False) for n in range(SIZE)]


@pytest.fixture
def both(recordings, name, monkeypatch) -> list[dict]:
    monkeypatch.chdir(recordings[0])
    return [recording[name] for recording in recordings[1]]


@pytest.fixture
def module(name, tmp_path):
    yield load(script_of(name, tmp_path / "patched"))
    del sys.modules[name]


# -- gradients, weights, generators --
@all_cases
def test_the_gradient_is_that_of_one_process_with_the_joined_minibatch(name, both):
    """The first one of each phase, with the weights that both had then. So are the diagnostics, by
    which all stop an update early: a process that went on alone would wait for ever.
    """
    case = CASES[name]
    sizes = {"policy": 4 * case["num_steps"] // case["num_minibatches"]}
    if name == "multigpu_ppg":
        sizes["aux"] = case["num_aux_rollouts"] * case["num_steps"]
    for one, (phase, samples) in itertools.product(both, sizes.items()):
        size, grad, stats = one[f"joined {phase}"]
        reduced_grad, reduced_stats = one["whole"][phase][0]
        assert size == samples
        assert (reduced_grad - grad).abs().max() <= 1e-6 * grad.abs().max()
        for key, stat in stats.items():
            torch.testing.assert_close(reduced_stats[key], stat, rtol=1e-5, atol=1e-6)


@all_cases
def test_weights_stay_equal_and_random_streams_apart(name, both, module):
    """The seeds of environments are those of one process, which has them all."""
    for run in ("whole", "killed", "resumed"):
        ours, theirs = (one[run] for one in both)
        assert all(map(torch.equal, ours["weights"], theirs["weights"])) and ours["weights"]
        assert not any(map(torch.equal, ours["rngs"], theirs["rngs"]))
    first = module.env_seed(module.Args(**CASES[name]))
    seeds = [sum([one[run]["seeds"] for one in both], []) for run in ("whole", "resumed")]
    later = first + 4 * both[0]["checkpoint"]["iteration"]
    assert seeds == [[*range(first, first + 4)], [*range(later, later + 4)]]


@all_cases
def test_what_is_logged_is_of_all_processes(name, both):
    run_dir = Path(both[0]["whole"]["run_dir"])
    assert both[1]["whole"]["run_dir"] is None and len(list(run_dir.glob("events*"))) == 1
    iterations = list(zip(*(one["whole"]["gathered"] for one in both)))
    episodes = [x for parts in iterations for part in parts for x in part[0]]
    assert episodes_of(run_dir) == sorted(episodes, key=lambda episode: episode[0])
    for parts in zip(*iterations):  # of a process: its first episode began with the run
        step, _, length = next(episode for part in parts for episode in part[0])
        assert step == 4 * length  # of four environments
    logged = scalars_of(run_dir)
    for i, parts in enumerate(iterations):
        residuals, returns = (torch.cat([part[k] for part in parts]) for k in (1, 2))
        explained = float(1 - residuals.var() / returns.var())
        assert logged["losses/explained_variance"][i] == (128 * (i + 1), pytest.approx(explained))
        averages = both[1]["whole"]["policy"][6 * i : 6 * (i + 1)]
        losses = [(stats["policy_loss"], grad.norm()) for grad, stats in averages]
        policy_loss, grad_norm = torch.tensor(losses).mean(0).tolist()  # the norm before clipping
        assert logged["losses/policy_loss"][i][1] == pytest.approx(policy_loss, rel=1e-4)
        assert logged["losses/grad_norm"][i][1] == pytest.approx(grad_norm, rel=1e-4)


@all_cases
def test_a_run_resumes_with_the_generators_of_all_and_only_with_as_many(
    name, both, module, tmp_path
):
    checkpoint, run_dir = both[0]["checkpoint"], Path(both[0]["resumed"]["run_dir"])
    kept = {"multigpu_atari": 2, "multigpu_ppg": 3}[name]
    assert (checkpoint["iteration"], checkpoint_of(run_dir)["iteration"]) == (kept, 4)
    for one, rng in zip(both, checkpoint["rng"].chunk(SIZE)):
        assert torch.equal(one["resumed"]["rngs"][0], rng)
    steps = [step for step, *_ in episodes_of(run_dir)]
    assert steps == sorted(steps) and steps[0] <= 256 < steps[-1]
    run_dir = shutil.copytree(run_dir, tmp_path / "unfinished")
    torch.save(checkpoint, run_dir / "checkpoint.pt")
    with pytest.raises(module.Refused, match="^error: .* 2 processes, as it began, not 1$"):
        module.train(module.parse_args(["--resume", str(run_dir)]))


@all_cases
def test_what_cannot_be_shared_is_an_error(name, module, monkeypatch):
    started = {"TORCHELASTIC_RUN_ID": 0, "WORLD_SIZE": 2, "RANK": 1, "LOCAL_WORLD_SIZE": 2}
    for variable, value in started.items():
        monkeypatch.setenv(variable, str(value))
    wrong = {"cannot share --num-envs 3": {"num_envs": 3}}
    wrong |= {r"1 \* 25.* in each of 2": {"num_envs": 2, "num_steps": 25}}
    if name == "multigpu_ppg":
        wrong["cannot share --num-aux-rollouts 3"] = {"num_aux_rollouts": 3}
    for words, changes in wrong.items():
        with pytest.raises(module.Refused, match=f"^error: .*{words}"):
            module.join_processes(module.Args(**CASES[name] | changes), None)
    with pytest.raises(module.Refused, match="--evaluate .*torchrun"):
        module.parse_args(["--evaluate", "runs/NAME"])


# -- PPG --
@ppg_alone
def test_ppg_resumes_to_the_bit(name, both):
    """The checkpoint has games, sums of rewards and returns of the phase of all processes.

    Their rollouts are kept until the last one is written: that before it could not go on without.
    """
    whole, resumed = (Path(both[0][run]["run_dir"]) for run in ("whole", "resumed"))
    assert len(both[0]["checkpoint"]["games"]) == 4
    for run_dir in (whole, resumed):
        state = checkpoint_of(run_dir)
        state["args"]["exp_name"] = ""
        torch.save(state, run_dir / "checkpoint.pt")
    assert_same_run(resumed, whole)
    assert both[0]["whole"]["files"] == ["observations0.bin", "observations1.bin"]
    assert not [*whole.glob("observations*")]


@ppg_alone
def test_rewards_and_advantages_are_normalized_over_all_processes(name, both, module):
    """As in one process that has all environments."""
    runs = [one["whole"] for one in both]
    rms, rewards = module.RunningMeanStd(np.zeros(()), np.ones(())), []
    both_of = lambda key: zip(*(run[key] for run in runs))  # noqa: E731
    for sums, scaled in zip(both_of("discounted"), both_of("rewards")):
        for step, row in zip(np.concatenate(sums, 1), np.concatenate(scaled, 1)):
            rms.update(step)
            rewards += [x * np.sqrt(rms.var + 1e-8) for x in row[abs(row) < 10]]  # not clipped
    assert np.any(rewards) and np.allclose(rewards, np.round(rewards), atol=1e-5)
    assert_equal(checkpoint_of(Path(runs[0]["run_dir"]))["return_rms"], module.rms_state(rms), "")
    joined = torch.cat([torch.cat(run["normalized"][:2]) for run in runs])  # an epoch
    raw = torch.cat([torch.from_numpy(run["advantages"][0]).flatten() for run in runs])
    expected = (raw - raw.mean()) / (raw.std(correction=0) + 1e-8)
    torch.testing.assert_close(joined.sort()[0], expected.sort()[0], rtol=1e-4, atol=1e-5)


# -- torchrun --
def documented(pattern: str) -> list[str]:
    text = "\n".join(page.read_text() for page in pages()).replace("\\\n", " ")
    return list(dict.fromkeys(re.findall(rf"(?m)^({pattern}[^#\n]*)", text)))


@pytest.mark.e2e
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[needs_procgen] * ("procgen" in command))
        for command in documented("patch -o pp")
    ],
)
def test_documented_commands_make_the_script_and_run_it(command):
    """Two iterations of few steps; what is said stands there once."""
    shutil.copytree(ROOT / "variants", "variants")
    _, _, made, original, _ = words = shlex.split(command)
    shutil.copy(ROOT / original, original)
    subprocess.run(words, check=True)
    runs = [run for run in documented("uv run torchrun --standalone ") if f" {made} " in run]
    size, flags = re.search(rf"node (\d+) {made} (.*)", runs[0]).groups()
    args = load(Path(made)).parse_args(flags.split())
    few = {"num_steps": 16, "total_timesteps": 32 * args.num_envs, "max_episode_steps": 60}
    if made == "ppg_procgen_multigpu.py":  # OpenAI's recipe
        assert size == "4" and args.num_envs == 256 and args.aux_adam
        few = {"num_steps": 4, "total_timesteps": 8 * args.num_envs, "e_auxiliary": 1}
    few |= {"eval_episodes": 1, "compile": False, "cuda": False}
    less = [word for item in few.items() for word in flag_of(*item)]
    done = torchrun(size, made, *flags.split(), *less)
    assert done.returncode == 0 and "evaluation" in done.stdout, done.stdout + done.stderr
    (run_dir,) = Path("runs").iterdir()
    assert checkpoint_of(run_dir)["iteration"] == 2
    assert done.stdout.count("run: ") == 1 and done.stdout.count("observations of ") <= 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    names = [name for name in CASES if HAS_PROCGEN or name != "multigpu_ppg"]
    torch.save({name: record(name) for name in names}, f"{os.environ['RANK']}.pt")
    dist.destroy_process_group()
    threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    assert "gloo" not in "".join(threads)  # one that meets the end of Python could abort it
