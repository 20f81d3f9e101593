"""Kills, signals, bad flags, full disks of the two Procgen scripts, which still have the old form.

Those of the new form are in tests/test_contract.py.
"""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppg_procgen
import ppo_procgen

MODULES = (ppo_procgen, ppg_procgen)
PATHS = PROCGEN, PPG = [Path(module.__file__).resolve() for module in MODULES]
needs_procgen = pytest.mark.skipif(find_spec("procgen") is None, reason="procgen-mirror is not installed")

# Runs the script and kills it in the middle of the n-th call of something; a write gets half of its bytes out.
KILLER = """
import importlib, io, os, signal, sys
where, n, script = sys.argv[1], int(sys.argv[2]), sys.argv[3]
sys.argv[:4] = [sys.argv[0]]
sys.path.insert(0, os.path.dirname(script))
ppo = importlib.import_module(os.path.basename(script).removesuffix(".py"))

def kill_in(owner, name, before=lambda *args: None, counts=lambda *args: True):
    original, calls = getattr(owner, name), []
    def wrapped(*args, **kwargs):
        calls.extend([1] * counts(*args))
        if len(calls) == n and counts(*args):
            before(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    setattr(owner, name, wrapped)

def write_half(data, file):
    whole = io.BytesIO()
    torch_save(data, whole)
    file.write(whole.getvalue()[: whole.tell() // 2])
    file.flush()

def add_garbage(*args):
    with open(*args) as file:
        file.seek(0, os.SEEK_END)
        file.write(b"garbage" * 1000)

torch_save, replace, ppo.open = ppo.torch.save, os.replace, open
is_checkpoint = lambda source, target: str(target).endswith("checkpoint.pt")
places = {
    "rollout": (ppo, "normalize_obs") if hasattr(ppo, "normalize_obs") else (ppo.Agent, "act"),
    "advantages": (ppo, "gae"),
    "writing": (ppo.torch, "save", write_half),
    "before renaming": (os, "replace", lambda *args: None, is_checkpoint),
    "after renaming": (os, "replace", replace, is_checkpoint),
    "storing": (ppo, "open", add_garbage, lambda path, *args: str(path).endswith("rollouts.bin")),
    "auxiliary phase": (ppo, "read_rollouts"),
}
kill_in(*places[where])
ppo.train(ppo.parse_args())
"""


def script(*flags: str, path: Path = PROCGEN, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, path, *flags], capture_output=True, text=True, timeout=300, **kwargs)


def killed(where: str, n: int, *flags: str, path: Path = PROCGEN) -> Path:
    """Run until the kill; returns the run directory."""
    command = [sys.executable, "-c", KILLER, where, str(n), str(path), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    return the_run()


def the_run(folder: str = "runs") -> Path:
    (run_dir,) = Path(folder).iterdir()
    return run_dir


def equal(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def policy_losses(run_dir: Path) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars("losses/policy_loss")]


def assert_same_run(one: Path, other: Path, read_episodes) -> None:
    """Weights, optimizer, normalizers, generators, environments, counters, episodes and events; clocks may differ."""
    a, b = (torch.load(path / "checkpoint.pt", weights_only=True) for path in (one, other))
    for name in a.keys() - {"args", "seconds", "episodes_size"}:
        assert equal(a[name], b[name]), f"{name} differs"
    episodes = read_episodes(one)
    assert episodes == read_episodes(other) and len(episodes) >= 2
    assert b"\0" not in (one / "episodes.csv").read_bytes() + (other / "episodes.csv").read_bytes()
    losses = policy_losses(one)
    assert losses == policy_losses(other) and len(losses) == 10


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The run directory of a run that nothing stopped, made once for each set of flags."""
    made = {}

    def get(*flags: str, path: Path = PROCGEN) -> Path:
        if (path, flags) not in made:
            folder = tmp_path_factory.mktemp("uninterrupted")
            done = script(*flags, path=path, cwd=folder)
            assert done.returncode == 0, done.stdout + done.stderr
            made[path, flags] = the_run(folder / "runs")
        return made[path, flags]

    return get


# -- kills --


OPENAI = "--arch dual --aux-adam --env-minibatches --no-clip-vloss --vf-coef 1 --max-grad-norm 0 --norm-reward-rollout"
SMALL_PROCGEN = "--env-id bossfight --no-cuda --num-envs 4 --num-steps 16 --num-minibatches 2 --total-timesteps 640"
SMALL_PROCGEN += " --eval-episodes 0"
EVERY_ONE, NONE = ["--checkpoint-every", "1"], ["--checkpoint-every", "0"]
PROCGEN_KILLS = {  # script, flags, kills: where, at which call, flags, what the checkpoint then is: (iteration, stored)
    "ppo": (
        PROCGEN,
        "--update-epochs 1 --checkpoint-every 2",
        [
            ("writing", 2, [], (2, 0)),
            ("rollout", 2 * 16 + 5, EVERY_ONE, (4, 0)),
            ("after renaming", 2, EVERY_ONE, (6, 0)),
        ],
    ),
    # Phases end with iterations 4, 8 and 10; a checkpoint before and after each auxiliary phase. A minibatch reads 4
    # rollouts, so that a pass over 16 has 4 minibatches.
    "ppg": (
        PPG,
        "--n-iteration 4 --e-auxiliary 3 --checkpoint-every 3",
        [
            ("writing", 2, [], (3, 12)),  # the checkpoint of iteration 4
            ("auxiliary phase", 6, NONE, (4, 16)),  # in pass 1, after an optimizer step: the phase is all that is lost
            ("auxiliary phase", 2, NONE, (4, 16)),  # in pass 0 of the same phase
            ("writing", 1, NONE, (4, 16)),  # the checkpoint after it
            ("storing", 1, NONE, (4, 0)),  # iteration 5, the first one after the phase
            ("storing", 3, EVERY_ONE, (6, 8)),  # iteration 7
            ("after renaming", 3, NONE, (10, 8)),  # before the last phase, which is all that is left to do
        ],
    ),
    "ppg as openai's, every other phase": (
        PPG,
        f"{OPENAI} --reward-gamma 0.99 --n-iteration 2 --e-auxiliary 1 --skip-aux-every 2 --checkpoint-every 3",
        [
            ("auxiliary phase", 4, [], (2, 8)),
            ("advantages", 2, EVERY_ONE, (3, 0)),  # iteration 4, in the phase that is skipped
            ("storing", 2, NONE, (4, 0)),  # iteration 6
            ("auxiliary phase", 4 + 4, NONE, (10, 8)),
        ],
    ),
}


@needs_procgen
@pytest.mark.parametrize("case", PROCGEN_KILLS)
def test_killed_and_resumed_procgen_is_never_stopped(case, uninterrupted, read_episodes):
    path, options, kills = PROCGEN_KILLS[case]
    start = flags = [*SMALL_PROCGEN.split(), *options.split()]
    for where, n, resume_options, kept in kills:
        run_dir = killed(where, n, *start, *resume_options, path=path)
        checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
        assert (checkpoint["iteration"], checkpoint.get("stored", 0)) == kept
        start = ["--resume", str(run_dir), "--eval-episodes", "0"]
    done = script(*start, path=path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(the_run(), uninterrupted(*flags, path=path), read_episodes)
    assert not (the_run() / "rollouts.bin").exists()


# -- signals --
def wait_until(process: subprocess.Popen, catches: bool) -> None:
    """Until the process has (or no longer has) a handler for SIGTERM, as the kernel sees it."""
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        mask = int(re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())[1], 16)
        if bool(mask >> (signal.SIGTERM - 1) & 1) == catches:
            return
        time.sleep(0.01)
    pytest.fail(f"exit code {process.poll()}, no change of the SIGTERM handler")


@pytest.fixture
def start():
    """Start the script in a process group of its own and wait for its signal handlers; no process outlives the test."""
    processes = []

    def go(*flags: str, path: Path = PROCGEN) -> subprocess.Popen:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
        processes.append(subprocess.Popen([sys.executable, path, *flags], **pipes))
        wait_until(processes[-1], catches=True)  # Python itself catches SIGINT, but not SIGTERM
        return processes[-1]

    yield go
    for process in processes:
        process.kill()
        process.communicate()


def read_until(words: str, process: subprocess.Popen) -> list[str]:
    """The lines that the process prints, up to one with these words."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return lines
    pytest.fail(f"no '{words}' in {lines}")


@needs_procgen
@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]], ids=["first", "second"])
def test_signals_in_an_auxiliary_phase(signals, start, uninterrupted, read_episodes):
    """The first lets the phase end and says so, the second ends the run at once; neither loses more than the phase."""
    flags = [*SMALL_PROCGEN.split(), *PROCGEN_KILLS["ppg"][1].split()]
    process = start(*flags, path=PPG)
    read_until("auxiliary phase, pass 0 of 3, minibatch 1 of 4", process)
    process.send_signal(signals[0])
    said = read_until("the run stops after it, or now at a second signal", process)
    for signum in signals[1:]:
        process.send_signal(signum)
    output, _ = process.communicate(timeout=120)
    assert len(said) == 1 and (process.returncode, "stopped after 256 steps" in output) == (
        (0, True) if len(signals) == 1 else (-signals[1], False)
    )
    checkpoint = torch.load(the_run() / "checkpoint.pt", weights_only=True)
    assert (checkpoint["iteration"], checkpoint["stored"]) == (4, 0 if len(signals) == 1 else 16)
    done = script("--resume", str(the_run()), "--eval-episodes", "0", path=PPG)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(the_run(), uninterrupted(*flags, path=PPG), read_episodes)


@needs_procgen
def test_signal_before_an_auxiliary_phase_leaves_it_to_the_resumed_run(start):
    """In the iteration that ends a policy phase, here of one iteration."""
    process = start(*SMALL_PROCGEN.split(), "--n-iteration", "1", path=PPG)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "stopped after 64 steps" in output and "auxiliary phase," not in output
    checkpoint = torch.load(the_run() / "checkpoint.pt", weights_only=True)
    assert (checkpoint["iteration"], checkpoint["stored"]) == (1, 4)


# -- bad flags --


PROCGEN_BAD_FLAGS = [
    ("--env-id starpilto", ["--env-id", "starpilto", "starpilot"]),
    ("--env-id Breakout-v5", ["--env-id", "Breakout-v5", "no Procgen game"]),
    ("--distribution-mode extreme", ["--distribution-mode", "(extreme)", "easy", "hard"]),
    ("--init xavier", ["--init", "(xavier)", "torch", "orthogonal", "normed"]),
    ("--num-levels -1", ["--num-levels", "(-1)"]),
    ("--start-level 2000000000", ["--start-level", "(2000000000)"]),
    ("--seed 3000000000", ["--seed", "(3000000000)"]),
    ("--reward-gamma 1.1", ["--reward-gamma", "(1.1)"]),
    ("--eval-levels test", ["--eval-levels", "(test)", "train", "unseen"]),
    ("--eval-levels unseen", ["--eval-levels unseen", "--num-levels", "0"]),
    ("--num-minibatches 3", ["--num-minibatches", "(3)", "64 * 256", "16384"]),
    ("--total-timesteps 16383", ["--total-timesteps", "(16383)", "16384"]),
    ("--micro-batch -1", ["--micro-batch", "(-1)"]),
]
PPG_BAD_FLAGS = [
    *PROCGEN_BAD_FLAGS,
    ("--arch single", ["--arch", "(single)", "detach", "dual", "shared"]),
    ("--e-policy 0", ["--e-policy", "(0)"]),
    ("--e-auxiliary 0", ["--e-auxiliary", "(0)"]),
    ("--n-iteration 0", ["--n-iteration", "(0)"]),
    ("--num-aux-rollouts 0", ["--num-aux-rollouts", "(0)"]),
    ("--beta-clone -1", ["--beta-clone", "(-1.0)"]),
    ("--num-aux-rollouts 3", ["--num-aux-rollouts (3)", "--num-envs (64)"]),
    ("--env-minibatches --num-minibatches 128", ["--num-minibatches (128)", "--num-envs (64)"]),
]


def message_of(*flags: str, module=ppo_procgen) -> str:
    """The one line with which the script stops."""
    with pytest.raises(SystemExit) as stop:
        module.train(module.parse_args(list(flags)))
    message = stop.value.code
    assert isinstance(message, str) and message.startswith("error: ") and "\n" not in message
    return message


@needs_procgen
@pytest.mark.parametrize(
    "module, flags, words",
    [(ppo_procgen, *case) for case in PROCGEN_BAD_FLAGS] + [(ppg_procgen, *case) for case in PPG_BAD_FLAGS],
)
def test_bad_flags_of_procgen_are_named_and_nothing_is_written(module, flags, words, tmp_path):
    message = message_of(*flags.split(), module=module)
    assert [word for word in words if word not in message] == [], message
    assert list(tmp_path.iterdir()) == []


# -- disks --


@needs_procgen
def test_full_disk_for_rollouts_is_one_line():
    """The first rollout of PPG takes 400 kB."""
    flags = "--no-cuda --num-envs 4 --num-steps 8 --num-minibatches 2 --total-timesteps 64".split()
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # noqa: E731
    done = script(*flags, path=PPG, preexec_fn=limit)
    assert done.returncode == 1 and done.stderr.startswith("error: cannot write ") and done.stderr.count("\n") == 1
    assert "no checkpoint.pt yet" in done.stderr


# -- videos --


@needs_procgen
@pytest.mark.parametrize(
    "path, light", [(PROCGEN, "--update-epochs 1"), (PPG, "--e-auxiliary 1 --num-aux-rollouts 2")], ids=["ppo", "ppg"]
)
def test_videos_of_procgen(path, light):
    """bossfight's random episodes take about 50 steps."""
    flags = f"--env-id bossfight --no-cuda --capture-video --eval-episodes 1 --num-envs 2 {light}"
    done = script(*flags.split(), "--num-steps", "256", "--total-timesteps", "512", path=path)
    assert done.returncode == 0, done.stdout + done.stderr
    for folder in ("videos", "eval_videos"):
        assert (the_run() / folder / "rl-video-episode-0.mp4").stat().st_size > 1000


# -- alone on a machine --
ALONE = {
    PROCGEN: "--total-timesteps 1024 --num-steps 512 --num-minibatches 8 --update-epochs 1 --num-envs 2 --no-cuda",
    PPG: "--total-timesteps 1024 --num-steps 512 --num-envs 2 --num-aux-rollouts 2 --e-auxiliary 1 --no-cuda",
}
scripts = pytest.mark.parametrize("path", ALONE, ids=[path.stem for path in ALONE])


@scripts
def test_script_runs_alone_in_an_empty_directory(path, tmp_path):
    if path in (PROCGEN, PPG):
        if find_spec("procgen") is None:
            pytest.skip("procgen-mirror is not installed")
    else:
        pytest.importorskip("envpool")
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(path, alone)
    flags = ALONE[path] + " --no-compile --eval-episodes 1"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, path.name, *flags.split()]
    done = subprocess.run(command, cwd=alone, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search(r"Warning|Error|Traceback", done.stderr), done.stderr
    assert ".xml" not in done.stdout  # MicroRTS prints the paths of its maps
    run_dir = the_run(alone / "runs")
    files = {file.name for file in run_dir.iterdir()}
    assert files - {name for name in files if "tfevents" in name} == {
        *("config.json", "episodes.csv", "checkpoint.pt", path.name)
    }
    assert len(files) == 5 and (run_dir / path.name).read_bytes() == path.read_bytes()
    config = json.loads((run_dir / "config.json").read_text())
    assert config["args"]["num_steps"] == 512 and config["args"]["exp_name"] == path.stem
    assert config["versions"]["torch"] == torch.__version__ and flags in config["command"]
    assert re.match(r"step,return,length,seconds\n\d+,", (run_dir / "episodes.csv").read_text())
    assert {file.name for file in alone.iterdir()} <= {path.name, "runs", "__pycache__"}


@scripts
def test_without_moviepy_only_videos_fail(path, tmp_path):
    """The script starts; --capture-video stops with one line."""
    if path in (PROCGEN, PPG) and find_spec("procgen") is None:
        pytest.skip("procgen-mirror is not installed")
    blocked = "import runpy, sys; sys.modules['moviepy'] = None; del sys.argv[0]; "
    blocked += "runpy.run_path(sys.argv[0], run_name='__main__')"
    video = ["--capture-video"]
    for flags, words in ((["--help"], "usage"), (video, "error: --capture-video needs moviepy")):
        command = [sys.executable, "-c", blocked, str(path), *flags]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert words in done.stdout + done.stderr and "Traceback" not in done.stderr, done.stderr


@scripts
def test_help_shows_every_flag(path):
    done = script("--help", path=path)
    assert done.returncode == 0
    shown = set(re.findall(r"--[a-z][a-z0-9-]*", done.stdout))
    args = dict(zip(PATHS, MODULES))[path].Args()
    assert [name for name in vars(args) if f"--{name.replace('_', '-')}" not in shown] == []


@scripts
def test_inline_metadata_covers_every_import(path):
    """PEP 723: every third-party import of the script is a dependency; the extras of gymnasium bring mujoco."""
    source = path.read_text()
    block = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", source, re.MULTILINE)[1]
    metadata = tomllib.loads("".join(line.removeprefix("#").removeprefix(" ") for line in block.splitlines(True)))
    assert metadata["requires-python"] == ">=3.11,<3.13"
    names = " ".join(metadata["dependencies"])
    brought = set(re.findall(r"[a-z][a-z0-9_-]*", names.replace("ale-py", "ale_py").replace("opencv", "cv2 ")))
    imported = set(re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE)) - set(sys.stdlib_module_names)
    assert len(imported) >= 5 and imported <= brought
    pyproject = tomllib.loads((path.parent / "pyproject.toml").read_text())
    if path in (PROCGEN, PPG):  # imported where it is needed, without what the old gym prints
        assert "procgen-mirror" in names and "import procgen" in source
        assert metadata["tool"]["uv"] == {"override-dependencies": pyproject["tool"]["uv"]["override-dependencies"]}
    for requirement in pyproject["project"]["dependencies"]:  # the same bounds, but for an upper one of torch's
        name, bounds = re.match(r"([a-z]+)(.*)", requirement).groups()
        bounds = re.escape(bounds) + (",<2.14" if name == "torch" else "")
        assert any(re.fullmatch(rf"{name}(\[.*\])?{bounds}", d) for d in metadata["dependencies"]), requirement
