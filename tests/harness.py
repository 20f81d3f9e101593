"""Runs of a script by its row of the registry: here, killed, resumed, or in another process."""

import gc
import itertools
import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import envs
import pytest
import torch
from registry import SCRIPTS, Script
from watch import Killed, one_layer_agent

# -- which scripts a test is for --
HAS_PROCGEN = find_spec("procgen") is not None  # it has no wheels for Python 3.13
needs_procgen = pytest.mark.skipif(not HAS_PROCGEN, reason="procgen-mirror is not installed")


def some(rows):
    """These."""
    mark = {"ppo_procgen": needs_procgen, "ppg_procgen": needs_procgen}
    rows = [pytest.param(row, id=row.name, marks=mark.get(row.name, ())) for row in rows]
    return pytest.mark.parametrize("script", rows)


def each_text_of(*names: str, rows: dict = SCRIPTS, lines: str | None = None, detail: str = ""):
    """One for each text of these pieces, see `Script.pieces`, and of the lines that match.

    What is the same to the byte is tested once, with the first that has it. No list says which
    scripts that are: who edits one of these pieces has the test of that script from then on.
    """
    assert all(any(name in row.pieces for row in rows.values()) for name in names), names
    found: dict[tuple, Script] = {}
    for row in rows.values():
        if detail and detail not in row.details:
            continue
        matching = [x.strip() for x in row.source.splitlines() if lines and re.search(lines, x)]
        assert matching or not lines, (row.name, lines)
        found.setdefault((*(row.pieces.get(name) for name in names), *matching), row)
    return some(found.values())


# -- runs --
def train(script: Script, **changes) -> Path:
    """The directory of a tiny run in the working directory."""
    result = script.module.train(script.module.Args(**script.tiny | script.inside | changes))
    return Path(result["run_dir"]).resolve()


def resume(script: Script, run_dir: Path, *flags: str) -> dict:
    return script.module.train(script.module.parse_args(["--resume", str(run_dir), *flags]))


def flags_of(script: Script, **changes) -> list[str]:
    """The command line of a tiny run."""
    flags = []
    for name, value in (script.tiny | changes).items():
        flags += flag_of(name, value)
    return flags


def flag_of(name: str, value) -> list[str]:
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", str(value)]


def known(script: Script, **changes) -> dict:
    """The changes of flags that the script has."""
    return {name: value for name, value in changes.items() if hasattr(script.module.Args, name)}


def message_of(script: Script, *flags: str) -> str:
    """The one line with which `main` stops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(script.path), *flags])
        with pytest.raises(SystemExit) as stop:
            script.module.main()
    message = stop.value.code
    assert isinstance(message, str) and message.startswith("error: ") and "\n" not in message
    return message


def refusal(script: Script, **changes) -> str:
    """The one line with which `train` stops, which is all that an uncaught Refused shows."""
    with pytest.raises(script.module.Refused) as stop:
        train(script, **changes)
    message = stop.value.code
    assert message == str(stop.value) and message.startswith("error: ") and "\n" not in message
    return message


def lacks(message: str, words: list[str]) -> list[str]:
    return [word for word in words if word not in message]


def contents(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def watch_envs(script: Script, monkeypatch, **wrappers) -> None:
    """`step=f`: from here on f(what envs.step returns, actions) is returned; `reset` likewise."""
    make_envs = script.module.make_envs

    def watched(*args):
        envs = make_envs(*args)
        for name, wrapper in wrappers.items():
            original = getattr(envs, name)
            call = lambda *a, original=original, f=wrapper, **k: f(original(*a, **k), *a)  # noqa: E731
            setattr(envs, name, call)
        return envs

    monkeypatch.setattr(script.module, "make_envs", watched)


def play_frames(module, patch: pytest.MonkeyPatch) -> None:
    """Let a script for games play `envs.Frames`, with one layer for its convolutions."""

    frames = lambda args, n=1: envs.Frames(n, args.frame_stack)  # noqa: E731
    patch.setattr(module, "make_env", frames)
    patch.setattr(module, "make_envs", lambda args, *_: frames(args, args.num_envs))
    patch.setattr(module, "Agent", one_layer_agent(module))


def small_games(script: Script, patch: pytest.MonkeyPatch, module=None) -> None:
    """Real ones, and convolutions, would take most of the time of a test."""
    module = module or script.module
    if script.reset_rows:
        play_frames(module, patch)
    elif script.games:
        patch.setattr(module, "Agent", one_layer_agent(module))


def steady(script: Script) -> dict:
    """Fields of a run that resumes to the bit: its episodes end with its rollouts.

    Procgen's games need nothing: the checkpoint has their state.
    """
    return {} if script.games else {"env_id": script.env("Steady")}


# -- kills --
def write_half(torch_save, state: dict, file) -> None:
    torch_save(state, file)
    file.truncate(file.tell() // 2)


def kill_at(patch: pytest.MonkeyPatch, script: Script, place: str, n: int) -> None:
    """Let the n-th call of something be the last that happens."""
    calls = itertools.count(1)

    def last(owner, name: str, before=lambda original, *args: None) -> None:
        original = getattr(owner, name)

        def wrapped(*args, **kwargs):
            if next(calls) == n:
                before(original, *args)
                raise Killed
            return original(*args, **kwargs)

        patch.setattr(owner, name, wrapped)

    make_envs = script.module.make_envs

    def watched(*args):
        envs = make_envs(*args)
        last(envs, "step")
        return envs

    match place:
        case "rollout":
            patch.setattr(script.module, "make_envs", watched)
        case "update":
            last(script.module, script.loss)
        case "writing":
            last(torch, "save", write_half)
        case "after renaming":
            last(os, "replace", lambda replace, *args: replace(*args))


def killed(script: Script, place: str, n: int, start) -> Path:
    """The directory of the run, which `start()` starts or resumes, after the kill."""
    writers, make_writer = [], script.module.SummaryWriter

    def recorded(*args, **kwargs):
        writers.append(make_writer(*args, **kwargs))
        return writers[-1]

    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, script, place, n)
        patch.setattr(script.module, "SummaryWriter", recorded)
        with pytest.raises(Killed):
            start()
    gc.collect()  # its lock on episodes.csv goes with it
    for writer in writers:  # its thread lives on, and would write by name after the renaming below
        writer.file_writer.event_writer._general_file_writer.write = lambda content: None
        writer.flush()
    (run_dir,) = Path("runs").iterdir()
    for file in run_dir.glob("events.*"):  # whose names are in order if they differ by a second
        if not re.search(r"tfevents\.0{5}", file.name):
            old = len(list(run_dir.glob("events.out.tfevents.00000*")))
            file.rename(run_dir / f"events.out.tfevents.{old:010d}.killed")
    return run_dir


# -- processes --
def command(script: Script, *flags: str, path: Path | None = None) -> list[str]:
    return [sys.executable, str(path or script.path), *flags]


def process(script: Script, *flags: str, path=None, **kwargs) -> subprocess.CompletedProcess:
    options = {"capture_output": True, "text": True, "timeout": 300}
    return subprocess.run(command(script, *flags, path=path), **options | kwargs)


def the_run(folder: Path = Path()) -> Path:
    (run_dir,) = (folder / "runs").iterdir()
    return run_dir


def wait_for(condition, running: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert running.poll() is None and time.monotonic() < deadline, running.poll()
        time.sleep(0.01)
