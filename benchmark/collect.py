"""Finished runs -> results/<folder>/<env>/<exp>__<seed>.csv: facts as comments, a learning curve.

Run:     python benchmark/collect.py --folder NAME RUN_DIR ...
Columns: step (100 points, the last one is the end of the run), return (mean of the last 100
         training episodes that ended by then, as CleanRL reports it; no point before the first
         one) and seconds of training. Runs of the folder `broken` also have the diagnostics, read
         off between iterations along a line, and the return of the evaluation at the end.

The suites do this after each run. With --unfinished a run is a result as far as its checkpoint
goes, and the tables say how far. A run whose losses stopped being finite is a result, too: its
final return is 0, or the mean of its last 100 episodes if that was lower.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from results import DIAGNOSTICS, file_of, without_suffix

WINDOW = 100  # episodes in a reported return


def load_checkpoint(run_dir: Path) -> dict:
    checkpoint = torch.load(run_dir / "checkpoint.pt", map_location="cpu", weights_only=True)
    args = checkpoint["args"]
    steps = checkpoint["iteration"] * args["num_envs"] * args["num_steps"]
    return checkpoint | {"global_step": steps}


def is_finished(checkpoint: dict) -> bool:
    """Has it reached its last iteration?"""
    args, steps = checkpoint["args"], checkpoint["global_step"]
    return args["total_timesteps"] - steps < args["num_envs"] * args["num_steps"]


def read_episodes(run_dir: Path) -> np.ndarray:
    """Steps, returns and seconds (3, episodes)."""
    episodes = pd.read_csv(run_dir / "episodes.csv")
    return episodes[["step", "return", "seconds"]].to_numpy(float).T


def check_episodes(run_dir: Path, episodes: np.ndarray, recent_returns: list[float]) -> None:
    """There are some, and the last returns have the mean of those in the checkpoint."""
    if not episodes.size:
        sys.exit(f"error: {run_dir} has no finished episode: it needs more steps, or a time limit")
    last = episodes[1, -WINDOW:].mean()
    if not np.isclose(np.mean(recent_returns), last, rtol=1e-4, atol=1e-4):
        files = f"episodes.csv and checkpoint.pt of {run_dir}"
        sys.exit(f"error: {files} disagree on the last {WINDOW} returns")


def diverged(run_dir: Path, episodes: np.ndarray) -> dict:
    """What stands for the checkpoint of a run whose losses stopped being finite."""
    if not episodes.size:
        sys.exit(f"error: the losses of {run_dir} were not finite before an episode had ended")
    step, _, seconds = episodes[:, -1]
    worst = min(0.0, float(episodes[1, -WINDOW:].mean()))
    checkpoint = {"args": json.loads((run_dir / "config.json").read_text())["args"]}
    checkpoint |= {"global_step": int(step), "seconds": float(seconds)}
    return checkpoint | {"recent_returns": [worst]}


def mean_of_iterations(episodes: np.ndarray, batch_size: int, last: int = 5) -> float:
    """Mean of the last iterations' mean returns, those without a finished episode left out.

    As Engstrom et al. 2020 have it: an iteration of few long episodes counts as much as one of many
    short ones, which lifts the figure where long episodes are good ones.
    """
    iterations = (episodes[0].astype(int) - 1) // batch_size
    means = [episodes[1, iterations == i].mean() for i in np.unique(iterations)[-last:]]
    return float(np.mean(means or [0.0]))


def machine() -> str:
    """Processor, cores and GPU of this machine."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    processor = found[1] if found else platform.processor() or platform.machine()
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return ", ".join(filter(None, [processor, f"{os.cpu_count()} cores", card]))


def commit_of(folder: Path) -> str:
    """The commit of the repository that a folder is in."""
    if not shutil.which("git"):
        return "unknown"
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def made_with(run_dir: Path) -> dict[str, str]:
    """Versions, all of them if the run was resumed with others; this machine, where it ended."""
    configs = run_dir.glob("config*.json")  # the first has no number
    configs = sorted(configs, key=lambda path: int(path.stem.partition("_")[2] or 0))
    versions = [json.loads(path.read_text())["versions"] for path in configs]
    texts = (", ".join(map(" ".join, each.items())) for each in versions)
    return {"versions": "; then ".join(dict.fromkeys(texts)), "hardware": machine()}


def patch_in(script: Path) -> str:
    """The digest of the patch that made a script (see patches.py); empty if none did."""
    text = script.read_text() if script.exists() else ""
    found = re.search(r"\n# changed by .*, digest (\w+)\n$", text)
    return found[1] if found else ""


def facts_of(run_dir: Path, checkpoint: dict, episodes: np.ndarray) -> dict:
    """What the top of the results file says."""
    config = json.loads((run_dir / "config.json").read_text())
    args = checkpoint["args"] | {"resume": None}  # a resumed run may have more steps than at first
    program, *flags = shlex.split(config["command"])
    source = run_dir / Path(program).name  # the copy that the run made of its script
    source = source if source.is_file() else next(run_dir.glob("*.py"))  # a sweep started it
    return {
        "script": source.stem,
        "env": args["env_id"],
        "exp": args["exp_name"],
        "seed": args["seed"],
        "total_timesteps": args["total_timesteps"],
        "command": shlex.join([Path(program).name, *flags]),
        "args": json.dumps(args),
        "commit": config["commit"] or os.environ.get("COMMIT", ""),  # where there was no git
        "sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
        **({"patch": patch} if (patch := patch_in(source)) else {}),
        **made_with(run_dir),
        "threads": os.environ.get("OMP_NUM_THREADS", "not recorded"),
        "steps": checkpoint["global_step"],
        "seconds": round(checkpoint["seconds"], 2),
        "episodes": episodes.shape[1],
        "final_return": float(np.mean(checkpoint["recent_returns"])),
        "return_of_iterations": mean_of_iterations(episodes, args["num_envs"] * args["num_steps"]),
    }


def curve_of(facts: dict, episodes: np.ndarray) -> list[str]:
    """The rows of the results file."""
    steps, returns, seconds = episodes
    grid = np.arange(1, 100) * facts["total_timesteps"] // 100
    grid = [*grid[grid < facts["steps"]], facts["steps"]]
    clock = np.interp(grid, [0, *steps, facts["steps"]], [0, *seconds, facts["seconds"]])
    ended = np.searchsorted(steps, grid, side="right")  # episodes that ended by each point
    rows = []
    for step, n, at in zip(grid, ended, clock):
        if n:
            rows.append(f"{step},{returns[max(0, n - WINDOW) : n].mean():.6g},{at:.1f}")
    if "diverged" in facts:
        rows[-1:] = [f"{facts['steps']},{facts['final_return']:.6g},{facts['seconds']:.1f}"]
    return rows


def read_scalars(run_dir: Path) -> dict[str, np.ndarray]:
    """Tag -> steps and values (2, n) of TensorBoard's files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()["scalars"]
    return {tag: np.array([(x.step, x.value) for x in events.Scalars(tag)]).T for tag in tags}


def add_diagnostics(run_dir: Path, facts: dict, rows: list[str]) -> list[str]:
    """The rows with a column for each diagnostic; the fact eval_return, if there is one."""
    scalars = read_scalars(run_dir)
    if "eval/episodic_return" in scalars:
        facts["eval_return"] = float(scalars["eval/episodic_return"][1, -1])
    steps = [int(row.split(",")[0]) for row in rows]
    columns = [np.interp(steps, *scalars[f"losses/{name}"]) for name in DIAGNOSTICS]
    return [",".join([row, *(f"{x:.4g}" for x in cells)]) for row, *cells in zip(rows, *columns)]


def collect(run_dir: Path, folder: str, has_diverged=False, unfinished=False) -> Path:
    """Write the results file of a run; never over another run's."""
    episodes = read_episodes(run_dir)
    checkpoint = diverged(run_dir, episodes) if has_diverged else load_checkpoint(run_dir)
    if not has_diverged:
        if not (unfinished or is_finished(checkpoint)):
            sys.exit(f"error: {run_dir} is not finished: iteration {checkpoint['iteration']}")
        episodes = episodes[:, episodes[0] <= checkpoint["global_step"]]  # the run may be ahead
        check_episodes(run_dir, episodes, checkpoint["recent_returns"])
    facts = facts_of(run_dir, checkpoint, episodes)
    if has_diverged:
        facts["return_of_iterations"] = min(0.0, facts["return_of_iterations"])
        facts["diverged"] = f"losses not finite, last episode at step {facts['steps']}"
    elif not is_finished(checkpoint):
        facts["unfinished"] = f"{facts['steps']} of {facts['total_timesteps']} steps"
    columns, rows = ["step", "return", "seconds"], curve_of(facts, episodes)
    if without_suffix(folder) == "broken":
        columns, rows = columns + [*DIAGNOSTICS], add_diagnostics(run_dir, facts, rows)
    top = [f"# {name}: {value}" for name, value in facts.items()]
    text = "\n".join([*top, ",".join(columns), *rows]) + "\n"

    path = file_of(folder, facts["env"], facts["exp"], facts["seed"])
    if path.exists() and path.read_text() != text:
        sys.exit(f"error: {path} holds another run than {run_dir}; delete it to replace it")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)  # a kill leaves a whole file, or none
    return path


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--folder", required=True, help="of results/, such as mujoco_mine")
    parser.add_argument("--unfinished", action="store_true", help="those not at their end, too")
    options = parser.parse_args()
    os.environ.pop("OMP_NUM_THREADS", None)  # this shell's, not the run's
    for run_dir in options.run_dirs:
        print(f"done {collect(run_dir, options.folder, unfinished=options.unfinished)}")


if __name__ == "__main__":
    main()
