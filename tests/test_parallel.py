"""Several processes [X02]: two real ones with gloo on the CPU, started as torchrun starts them.

One run of each script is recorded in both processes and compared with what one process computes
of both parts together. The documented commands, kills and torchrun itself are in the tests marked
`e2e`.
"""

import contextlib
import itertools
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from registry import SCRIPTS, Script, pages
from watch import (
    Killed,
    assert_equal,
    assert_same_run,
    copied,
    episodes_of,
    flat,
    one_layer_agent,
    scalars_of,
    state_of,
)

NAMES = [name for name, script in SCRIPTS.items() if "X02" in script.details]
scripts = pytest.mark.parametrize("script", [SCRIPTS[name] for name in NAMES], ids=NAMES)
SIZE = 2  # processes
# Four iterations of at least 20 updates, with nothing that is normalized in each process alone.
CASES = {name: {"num_envs": 4, "total_timesteps": 512, "norm_adv": False} for name in NAMES}
for name in NAMES:
    CASES[name][SCRIPTS[name].epochs] = 3


def available(name: str) -> bool:
    """Whether this machine has its environments."""
    return "procgen" not in name or find_spec("procgen") is not None


# -- two processes --
PORTS = itertools.count(20_000 + os.getpid() % 10_000)  # below those that the system gives away


def free_port() -> int:
    """Another one in each call and in each process of the tests."""
    for port in PORTS:
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def variables(rank: int, size: int = SIZE) -> dict[str, str]:
    """What torchrun sets; each call has another port."""
    port = free_port()
    found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    return {name: str(value) for name, value in found.items()}


def start(rank: int, environment: dict, folder: Path) -> None:
    os.environ |= environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.chdir(folder)
    torch.set_num_threads(1)
    found = {}
    for script in [SCRIPTS[name] for name in NAMES if available(name)]:
        if script.name != "ppo_lstm":  # the others play games: convolutions take most of the time
            script.module.Agent = one_layer_agent(script.module)
        found[script.name] = {"killed": killed_and_resumed(script)}
        found[script.name] |= {"epochs": stopped_early(script)} | recorded(script)
    torch.save(found, f"{rank}.pt")


@pytest.fixture(scope="module")
def recordings(tmp_path_factory) -> list[dict]:
    """What each process did, by rank and name of the script; an error in one ends both."""
    folder = tmp_path_factory.mktemp("processes")
    torch.multiprocessing.spawn(start, (variables(0), folder), SIZE)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(SIZE)]


def wrap(owner, name: str, wrapper) -> None:
    """For the rest of this process: wrapper(original, *args) instead of owner.name(*args)."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


def recorded(script: Script) -> dict:
    """What one of the processes does in a run."""
    module = script.module
    names = ("seeds", "noise", "steps", "gae", "losses", "minibatches", "averages", "advantages")
    seen = {name: [] for name in names}

    def make_envs(original, args, video_dir, seed):
        envs = original(args, video_dir, seed)
        seen["seeds"].append(seed)
        wrap(envs, "step", step)
        return envs

    def step(original, actions):
        _, reward, terminated, truncated, infos = result = original(actions)
        over = np.logical_or(terminated, truncated)
        rewards = np.array(infos.get("reward", reward))
        ended = np.logical_or(infos.get("terminated", terminated), truncated)
        seen["steps"].append((rewards, over.copy(), ended))
        return result

    def draw_noise(original, agent, *shape):
        seen["noise"].append(original(agent, *shape))
        return seen["noise"][-1]

    def gae(original, *args):
        result = original(*args)
        seen["gae"].append((*copied(args[:2]), result.copy()))
        return result

    def minibatch(original, agent, mb, *rest):
        loss, stats = original(agent, mb, *rest)
        first = {"weights": copied(agent.state_dict()), "mb": copied(mb), "rest": copied(rest)}
        seen["minibatches"] += [first | {"loss": original}] * (not seen[f"of {original.__name__}"])
        seen[f"of {original.__name__}"] = True
        if "advantages" in mb:
            seen["advantages"].append(copied(mb["advantages"]))
        return loss, stats

    def average(original, agent, stats):
        parts = [param.grad for param in agent.parameters() if param.grad is not None]
        before = (flat(parts), copied(stats))
        original(agent, stats)
        seen["averages"].append((before, (flat(parts), copied(stats))))
        seen["agent"] = agent

    def save_checkpoint(original, run_dir, state):
        time.sleep(0.1)  # while the other process could go on
        original(run_dir, state)
        seen["rollouts"] = sorted(path.name for path in run_dir.glob("observations*.bin"))

    wrap(module, "save_checkpoint", save_checkpoint)
    wrap(module, "make_envs", make_envs)
    wrap(module.Agent, "draw_noise", draw_noise)
    wrap(module, "gae", gae)
    for name in ("minibatch_loss", "aux_loss"):
        seen[f"of {name}"] = False
        if hasattr(module, name):
            wrap(module, name, minibatch)
    wrap(module, "average_gradients", average)
    result = module.train(module.Args(**script.tiny | CASES[script.name]))
    for first in seen["minibatches"]:
        first["loss"] = first["loss"].__name__
    agent = flat(seen.pop("agent").parameters())
    return seen | {"weights": agent, "run_dir": str(Path(result["run_dir"]).resolve())}


@pytest.fixture
def both(recordings, script):
    """What each of the two processes did."""
    if not available(script.name):
        pytest.skip("procgen-mirror is not installed")
    return [recording[script.name] for recording in recordings]


# -- gradients --
@scripts
def test_the_gradient_is_that_of_one_process_with_both_parts_of_the_minibatch(script, both):
    """The first one of each phase, in one process with the weights that both had then."""
    module = script.module
    phases = list(zip(*(one["minibatches"] for one in both)))
    assert len(phases) == 1 + hasattr(module, "aux_loss")
    for ours, theirs in phases:
        assert_equal(ours["weights"], theirs["weights"], "weights")
        if "hidden" in ours["mb"]:
            continue  # of the LSTM: below
        args = module.Args(**script.tiny | CASES[script.name])
        mb = {key: torch.cat([ours["mb"][key], theirs["mb"][key]]) for key in ours["mb"]}
        agent = agent_of(script, args, ours["weights"])
        loss, stats = getattr(module, ours["loss"])(agent, mb, *ours["rest"])
        loss.backward()
        grad = flat(p.grad for p in agent.parameters() if p.grad is not None)
        for reduced_grad, reduced_stats in [first_average(one, stats) for one in both]:
            assert (reduced_grad - grad).abs().max() <= 1e-6 * max(1, grad.abs().max())
            for key, stat in stats.items():
                torch.testing.assert_close(reduced_stats[key], stat.detach(), rtol=1e-5, atol=1e-6)


def agent_of(script: Script, args, weights: dict):
    """In one process, with the spaces of its environments."""
    module = script.module
    envs = module.make_envs(args, Path(), 1)
    agent = one_layer_agent(module)(envs.single_observation_space, envs.single_action_space, args)
    envs.close()
    agent.load_state_dict(weights)
    return agent


def first_average(one: dict, stats: dict) -> tuple:
    """Gradient and diagnostics after the first average of a phase, known by its diagnostics."""
    return next(after for _, after in one["averages"] if after[1].keys() == stats.keys())


@scripts
def test_every_update_has_the_mean_of_both_gradients(script, both):
    ours, theirs = (one["averages"] for one in both)
    assert len(ours) == len(theirs) >= 20
    for (before, after), (other_before, other_after) in zip(ours, theirs):
        assert torch.equal(after[0], other_after[0]) and after[1] == other_after[1]
        assert not torch.equal(before[0], other_before[0])
        mean = (before[0] + other_before[0]) / 2
        torch.testing.assert_close(after[0], mean, rtol=1e-6, atol=1e-9)
        for key in before[1]:
            mean = (before[1][key] + other_before[1][key]) / 2
            torch.testing.assert_close(after[1][key], mean, rtol=1e-6, atol=1e-9)


@scripts
def test_weights_are_those_of_all_processes_and_streams_their_own(script, both):
    """Those of the start too, which each process drew for itself."""
    ours, theirs = both
    assert torch.equal(ours["weights"], theirs["weights"])
    first = ours["minibatches"][0]["weights"]
    start = torch.cat([first[key].flatten() for key in first])
    assert start.shape == ours["weights"].shape and not torch.equal(start, ours["weights"])
    assert all(not torch.equal(a, b) for a, b in zip(ours["noise"], theirs["noise"]))
    assert (ours["seeds"], theirs["seeds"]) == ([1], [1 + 2])  # an environment's number, from 1


# -- what is of all processes --
@scripts
def test_episodes_are_those_of_all_processes_at_the_steps_of_all(script, both):
    expected, step = [], 0
    returns, lengths = np.zeros((SIZE, 2)), np.zeros((SIZE, 2))
    valid = np.ones((SIZE, 2), bool)
    for row in zip(*(one["steps"] for one in both)):
        step += int(valid.sum())
        for rank, (rewards, over, ended) in enumerate(row):
            returns[rank] += rewards
            lengths[rank] += valid[rank]
            for n in np.flatnonzero(ended):
                expected.append((step, returns[rank, n], lengths[rank, n]))
                returns[rank, n] = lengths[rank, n] = 0
            valid[rank] = ~over | (not script.reset_rows)
    run_dir = Path(both[0]["run_dir"])
    if script.name == "ppo_atari":  # FIRE and no-ops bring rewards before the first step
        expected = [(step, None, length) for step, _, length in expected]
        found = [(step, None, length) for step, _, length in episodes_of(run_dir)]
    else:
        found = [(step, pytest.approx(value), n) for step, value, n in episodes_of(run_dir)]
    assert found == expected != []
    assert state_of(run_dir)["global_step"] == step
    assert both[0]["run_dir"] == both[1]["run_dir"]
    assert len(list(run_dir.glob("events*"))) == 1  # only the first process logs


@scripts
def test_metrics_are_means_over_all_processes(script, both):
    scalars = scalars_of(Path(both[0]["run_dir"]))
    averages = [average for average in both[0]["averages"] if "policy_loss" in average[1][1]]
    count = len(averages) // 4
    logged = zip(scalars["losses/policy_loss"], scalars["losses/explained_variance"], strict=True)
    for i, ((_, policy_loss), (_, explained)) in enumerate(logged):
        stats = [after[1]["policy_loss"] for _, after in averages[i * count : (i + 1) * count]]
        assert policy_loss == pytest.approx(float(torch.stack(stats).mean()), rel=1e-5)
        values = np.stack([one["gae"][i][1] for one in both])
        advantages = np.stack([one["gae"][i][2] for one in both])
        T = values.shape[1]
        over = np.stack([[over for _, over, _ in one["steps"]] for one in both])
        samples = np.ones_like(over)
        samples[:, 1:] = ~over[:, :-1] | (not script.reset_rows)  # a row that resets is none
        mine = samples[:, i * T : (i + 1) * T]
        expected = 1 - advantages[mine].var() / (advantages + values)[mine].var()
        assert explained == pytest.approx(expected, rel=1e-4, abs=1e-5)


@scripts
def test_the_reward_normalizer_is_that_of_one_process_with_all_environments(script, both):
    if "M08" not in script.details:
        return
    module, statistics = script.module, script.module.RunningMeanStd(np.zeros(()), np.ones(()))
    discounted = np.zeros((SIZE, 2))
    gamma = module.Args().gamma
    for row in zip(*(one["steps"] for one in both)):
        discounted = gamma * discounted + np.stack([rewards for rewards, _, _ in row])
        statistics = statistics.update(discounted.ravel())
        discounted[np.stack([over for _, over, _ in row])] = 0
    stored = [x.item() for x in state_of(Path(both[0]["run_dir"]))["return_rms"]]
    np.testing.assert_allclose(stored, [float(x) for x in statistics], rtol=1e-9)
    rewards = np.stack([one["gae"][-1][0] for one in both])  # of the last rollout, scaled
    raw = np.stack([[r for r, _, _ in one["steps"][-len(rewards[0]) :]] for one in both])
    assert (np.sign(rewards) == np.sign(raw)).all()


# -- early stop, checkpoints --
def stopped_early(script: Script) -> dict:
    """Epochs of an iteration where only the second process sees a large KL divergence."""
    module, rank, epochs = script.module, int(os.environ["RANK"]), {}

    def minibatch_loss(original, *args):
        loss, stats = original(*args)
        epochs["losses"] = epochs.get("losses", 0) + 1
        return loss, stats | {"approx_kl": torch.tensor(0.04 * rank)}

    original = module.minibatch_loss
    wrap(module, "minibatch_loss", minibatch_loss)
    found = {}
    for target in (0.015, 0.025):  # of a mean of 0.02
        epochs.clear()
        case = CASES[script.name] | {"target_kl": target, "total_timesteps": 128}
        module.train(module.Args(**script.tiny | case | {"exp_name": f"to {target}"}))
        minibatches = script.tiny["num_minibatches"]
        found[target] = epochs["losses"] / minibatches
    module.minibatch_loss = original
    return found


def killed_and_resumed(script: Script) -> list[tuple[str, str]]:
    """Directories of a run that was never stopped and of one that was killed in both processes."""
    module = script.module
    case = CASES[script.name] | {"e_auxiliary": 2}
    known = vars(module.Args())
    flags = script.tiny | {name: value for name, value in case.items() if name in known}
    whole = module.train(module.Args(**flags, exp_name="whole"))["run_dir"]
    kills = {"gae": 3} | ({"aux_loss": 6} if "e_auxiliary" in known else {})
    pairs = []
    for name, n in kills.items():
        calls = []

        def last(original, *args):
            calls.append(1)
            if len(calls) == n:
                raise Killed
            return original(*args)

        original = getattr(module, name)
        wrap(module, name, last)
        try:
            module.train(module.Args(**flags, exp_name=f"{script.name} killed in {name}"))
        except Killed:
            pass
        setattr(module, name, original)
        (run_dir,) = Path("runs").glob(f"*__{script.name} killed in {name}__*")
        module.train(module.parse_args(["--resume", str(run_dir)]))
        pairs.append((str(Path(whole).resolve()), str(run_dir.resolve())))
    return pairs


@scripts
def test_a_resumed_run_is_bit_equal_to_one_never_stopped(script, both):
    pairs = both[0]["killed"]
    assert pairs == both[1]["killed"] != []
    for whole, resumed in map(lambda pair: map(Path, pair), pairs):
        a, b = state_of(whole), state_of(resumed)
        for state in (a, b):
            del state["args"]["exp_name"]
        assert_equal(a, b, "checkpoint")
        first, second = a["processes"]
        assert first["envs"] is not None and not torch.equal(first["rng"], second["rng"])
        assert episodes_of(whole) == episodes_of(resumed) != []
        assert not list(resumed.glob("observations*")) and not list(whole.glob("observations*"))


@scripts
def test_another_number_of_processes_is_refused_in_one_line(script, both, monkeypatch):
    _, run_dir = both[0]["killed"][0]
    module, before = script.module, sorted(Path(run_dir).iterdir())
    if script.name != "ppo_lstm":
        monkeypatch.setattr(module, "Agent", one_layer_agent(module))
    monkeypatch.setattr(sys, "argv", [str(script.path), "--resume", run_dir])
    load = module.load_checkpoint
    unfinished = lambda path: load(path) | {"iteration": 2}  # noqa: E731
    monkeypatch.setattr(module, "load_checkpoint", unfinished)
    with pytest.raises(SystemExit) as stop:
        module.main()
    assert re.fullmatch("error: .* needs 2 processes, as before, not 1", stop.value.code)
    assert sorted(Path(run_dir).iterdir()) == before
    args = module.parse_args(["--evaluate", run_dir, "--eval-episodes", "1"])
    assert len(module.evaluate(args, Path(run_dir))) == 1


@scripts
def test_the_early_stop_is_that_of_all_processes(script, both):
    """A process that went on alone would wait for ever."""
    assert [one["epochs"] for one in both] == [{0.015: 1, 0.025: 3}] * SIZE


# -- one process, and what it is asked --
@scripts
def test_torchrun_with_one_process_is_no_torchrun(script, tmp_path, monkeypatch):
    if not available(script.name):
        pytest.skip("procgen-mirror is not installed")
    module, flags = script.module, script.tiny
    plain = Path(module.train(module.Args(**flags, exp_name="plain"))["run_dir"]).resolve()
    monkeypatch.chdir(tmp_path)
    for name, value in variables(0, size=1).items():
        monkeypatch.setenv(name, value)
    try:
        result = module.train(module.Args(**flags, exp_name="started"))
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
    started = Path(result["run_dir"]).resolve()
    for run_dir in (plain, started):
        checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
        checkpoint["args"]["exp_name"] = "one"
        torch.save(checkpoint, run_dir / "checkpoint.pt")
    assert_same_run(started, plain)


@scripts
def test_a_checkpoint_of_before_is_refused(script, tmp_path):
    """It had what is now in `processes` beside the rest."""
    if not available(script.name):
        pytest.skip("procgen-mirror is not installed")
    module = script.module
    old = {"args": asdict(module.Args()), "agent": {}, "rng": torch.get_rng_state()}
    torch.save(old, tmp_path / "checkpoint.pt")
    with pytest.raises(module.UserError, match="use the copy beside it"):
        module.load_checkpoint(tmp_path)


@pytest.fixture
def second_of_two(monkeypatch):
    """The environment variables of the second process, without a first one."""
    for name, value in variables(1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)


@scripts
def test_a_process_has_its_share(script, second_of_two):
    changes = {"num_envs": 8, "env_threads": 5, "capture_video": True}
    args = script.module.Args(**script.tiny | changes)
    rank, own = script.module.join_processes(args)
    changed = {k: v for k, v in vars(own).items() if v != getattr(args, k)}
    expected = {"num_envs": 4, "env_threads": 3, "capture_video": False, "total_timesteps": 128}
    assert own.num_iterations == args.num_iterations
    assert (rank, changed) == (1, expected)
    args.env_threads = 1
    assert script.module.join_processes(args)[1].env_threads == 1


SHARES = {
    "--num-envs 3": ["2 processes", "--num-envs 3"],
    "--num-envs 2 --num-steps 25 --num-minibatches 2": [
        "each of 2 processes",
        "1 * 25",
        "--num-minibatches (2)",
    ],
}


@scripts
@pytest.mark.parametrize("flags", SHARES)
def test_what_cannot_be_shared_is_an_error(script, flags, second_of_two):
    words = SHARES[flags]
    if script.whole_sequences:
        flags = flags.replace("--num-envs 3", "--num-envs 3 --num-minibatches 1")
        words = words if "3" in flags else [words[0], "--num-envs (1)", words[2]]
    fields = {flag.replace("-", "_"): int(n) for flag, n in re.findall(r"--(\S+) (\d+)", flags)}
    args = script.module.Args(**script.tiny | fields)
    with pytest.raises(script.module.UserError) as stop:
        script.module.join_processes(args)
    assert [word for word in words if word not in str(stop.value)] == []


@scripts
def test_several_processes_do_not_evaluate(script, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    with pytest.raises(script.module.UserError, match="--evaluate .*torchrun"):
        script.module.parse_args(["--evaluate", "runs/NAME"])


# -- torchrun --
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
LSTM = "--env-id CartPole-v1 --num-envs 4 --num-steps 32 --num-minibatches 2 --no-compile"
LSTM += " --no-cuda --eval-episodes 0 --checkpoint-seconds 0 --update-epochs 2"


def torchrun(*words, **kwargs) -> subprocess.CompletedProcess:
    how = {"capture_output": True, "text": True, "timeout": 600}
    return subprocess.run([*TORCHRUN, *words], **how | kwargs)


def workers(parent: int) -> dict[int, int]:
    """Rank -> process id of what torchrun started."""
    found = {}
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    for child in map(int, children):
        variables = Path(f"/proc/{child}/environ").read_text()
        if rank := re.search(r"\0RANK=(\d+)", "\0" + variables):
            found[int(rank[1])] = child
    return found


@pytest.mark.e2e
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_run_which_resumes(rank, tmp_path):
    """With the printed command, to the bit."""
    flags = f"{SCRIPTS['ppo_lstm'].path} {LSTM} --total-timesteps 12800".split()
    with open("out.txt", "w") as out:
        running = subprocess.Popen([*TORCHRUN, "2", *flags], stdout=out, stderr=out)
    while not list(tmp_path.glob("runs/*/checkpoint.pt")):
        assert running.poll() is None, Path("out.txt").read_text()
        time.sleep(0.05)
    os.kill(workers(running.pid)[rank], signal.SIGKILL)
    assert running.wait(timeout=60) != 0
    (run_dir,) = Path("runs").iterdir()
    assert state_of(run_dir)["global_step"] < 12000
    (line,) = re.findall("if it is stopped: (.*)", Path("out.txt").read_text())
    words = shlex.split(line)
    words[: words.index("-m")] = [sys.executable]
    port = ["--master-port", variables(0)["MASTER_PORT"]]  # other tests may have torchrun's
    done = subprocess.run([*words[:3], *port, *words[3:]], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "whole").mkdir()
    done = torchrun("2", *flags, cwd=tmp_path / "whole")
    assert done.returncode == 0, done.stdout + done.stderr
    (whole,) = (tmp_path / "whole" / "runs").iterdir()
    assert_equal(state_of(run_dir), state_of(whole), "checkpoint")
    assert episodes_of(run_dir) == episodes_of(whole) != []


@pytest.mark.e2e
def test_what_all_processes_would_say_is_one_line(tmp_path):
    done = torchrun("2", SCRIPTS["ppo_lstm"].path, *LSTM.split(), "--num-envs", "5")
    assert done.returncode != 0 and list(tmp_path.iterdir()) == []
    lines = [line for line in done.stderr.splitlines() if "error: " in line]
    assert lines == ["error: --num-envs (5) must be divisible by --num-minibatches (2), which have"
                     " whole rollouts"]  # fmt: skip
    done = torchrun("3", SCRIPTS["ppo_lstm"].path, *LSTM.split())
    lines = [line for line in done.stderr.splitlines() if "error: " in line]
    assert lines == ["error: 3 processes cannot share --num-envs 4"]


@scripts
def test_what_keeps_a_group_is_imported_before_there_is_one(script):
    """The next test shows what comes of it; this one sees all scripts."""
    text = Path(script.path).read_text()
    assert text.index("    torch.compiler.reset()") < text.index(" = join_processes(args)")


@pytest.mark.e2e
def test_no_thread_of_the_group_outlives_it(tmp_path):
    """A thread of gloo that meets the end of Python sometimes aborts its process."""
    watched = tmp_path / "watched.py"
    watched.write_text("""
import os, runpy, sys
from pathlib import Path

del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
names = [name.read_text() for name in Path("/proc/self/task").glob("*/comm")]
os.write(1, f"threads {names}\\n".encode())  # in one piece: the processes share the pipe
""")
    done = torchrun("2", watched, SCRIPTS["ppo_lstm"].path, *LSTM.split(), "--total-timesteps=128")
    lines = re.findall("threads .*", done.stdout)
    assert done.returncode == 0 and len(lines) == SIZE, done.stdout + done.stderr
    assert "gloo" not in "".join(lines)


def documented() -> list[str]:
    """Commands of README.md and docs/ with torchrun, but for those of several machines."""
    text = "\n".join(page.read_text() for page in pages()).replace("\\\n", " ")
    commands = re.findall(r"(?m)^uv run torchrun --standalone ([^#\n]*)", text)
    return list(dict.fromkeys(command.strip() for command in commands))


@pytest.mark.e2e
@pytest.mark.parametrize("command", documented())
def test_documented_commands_run(command):
    """Two iterations of few steps."""
    words = shlex.split(command)
    (path,) = [word for word in words if word.endswith(".py")]
    if not available(path.removesuffix(".py")):
        pytest.skip("procgen-mirror is not installed")
    i = words.index(path)
    size, flags = words[i - 1], words[i + 1 :]
    if "--resume" in flags:
        return  # as in test_a_killed_process_ends_the_run_which_resumes
    script = SCRIPTS[path.removesuffix(".py")]
    args = script.module.parse_args([*flags, "--no-cuda"])
    steps = max(2, 8 * args.num_minibatches // args.num_envs)
    shorter = {"num-steps": steps, "total-timesteps": 2 * args.num_envs * steps}
    shorter |= {"eval-episodes": 1} | ({"e-auxiliary": 1} if "ppg" in path else {})
    flags += [word for name, value in shorter.items() for word in (f"--{name}", str(value))]
    done = torchrun(size, script.path, *flags, "--no-cuda", "--no-compile")
    assert done.returncode == 0 and "evaluation" in done.stdout, done.stdout + done.stderr
    (run_dir,) = Path("runs").iterdir()
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    assert len(checkpoint["processes"]) == int(size) and checkpoint["iteration"] == 2
