"""Finished runs -> results/<suite>/<env>/<exp>__<seed>.csv: facts as comments, a learning curve.

Run:     python benchmark/collect.py runs/HalfCheetah-v4__ppo_continuous_mujoco__1__1700000000
Columns: step (100 points, the last one is the end of the run), return (mean of the last 100
         training episodes that ended by then, as CleanRL reports it; no point before the first
         one) and seconds of training.
Exit code 3: the run is not finished. With --unfinished it is a result all the same, as far as its
checkpoint goes, and the tables say how far. A run whose losses stopped being finite never will be:
with --diverged it is a result, too. Its final return is 0, or the mean of its last 100
episodes if that was lower, and so is the last point of its curve.
"""

import argparse
import csv
import hashlib
import json
import os
import shlex
import sys
from itertools import groupby
from pathlib import Path

import have
import numpy as np
import torch

RESULTS = Path(__file__).resolve().parent / "results"
WINDOW = 100  # episodes in a reported return


def finished(run_dir: Path, or_not: bool = False) -> dict:
    """The checkpoint of a run; exit code 3 if it has not reached its last step and has to."""
    checkpoint = torch.load(run_dir / "checkpoint.pt", map_location="cpu", weights_only=True)
    args, iteration = checkpoint["args"], checkpoint["iteration"]
    num_iterations = args["total_timesteps"] // (args["num_envs"] * args["num_steps"])
    if iteration < num_iterations and or_not:
        checkpoint["unfinished"] = f"{checkpoint['global_step']} of {args['total_timesteps']} steps"
    elif iteration < num_iterations:
        done = f"iteration {iteration} of {num_iterations}"
        print(f"{run_dir} is not finished: {done}", file=sys.stderr)
        sys.exit(3)
    return checkpoint


def read_episodes(run_dir: Path) -> np.ndarray:
    """Steps, returns and seconds (3, episodes)."""
    with open(run_dir / "episodes.csv") as file:
        columns = ("step", "return", "seconds")
        rows = [[float(row[name]) for name in columns] for row in csv.DictReader(file)]
    return np.array(rows).reshape(-1, 3).T


def check_episodes(run_dir: Path, episodes: np.ndarray, final_return: float) -> None:
    """The last returns have this mean."""
    if not episodes.size:
        sys.exit(f"error: {run_dir} has no finished episode")
    if not np.isclose(final_return, episodes[1, -WINDOW:].mean(), rtol=1e-4, atol=1e-4):
        files = f"episodes.csv and checkpoint.pt of {run_dir}"
        sys.exit(f"error: {files} disagree on the last {WINDOW} returns")


def diverged(run_dir: Path, episodes: np.ndarray) -> dict:
    """What stands for the checkpoint of a run whose losses stopped being finite."""
    last = episodes[:, -1] if episodes.size else np.zeros(3)
    worst = min(0.0, float(episodes[1, -WINDOW:].mean())) if episodes.size else 0.0
    args = json.loads((run_dir / "config.json").read_text())["args"]
    checkpoint = {"args": args, "global_step": int(last[0]), "seconds": float(last[2])}
    return checkpoint | {"recent_returns": [worst], "diverged": True}


def mean_of_iterations(episodes: np.ndarray, batch_size: int, last: int = 5) -> float:
    """Mean of the last iterations' mean returns, those without a finished episode left out.

    As Engstrom et al. 2020 have it: an iteration of few long episodes counts as much as one of many
    short ones, which lifts the figure where long episodes are good ones. An iteration is
    `batch_size` steps here, so one with reset rows is a bit longer.
    """
    iterations = (episodes[0].astype(int) - 1) // batch_size
    means = [episodes[1, iterations == i].mean() for i in np.unique(iterations)[-last:]]
    return float(np.mean(means or [0.0]))


def on_the_way(run_dir: Path, checkpoint: dict) -> dict[str, str]:
    """Hardware and versions of the start, and of what resumed the run elsewhere after that."""
    later = {int(path.stem.split("_")[1]): path for path in run_dir.glob("config_*.json")}
    reached = checkpoint.get("iteration", max(later, default=0) + 1)
    paths = [run_dir / "config.json", *(later[n] for n in sorted(later) if n < reached)]
    configs = [json.loads(path.read_text()) for path in paths]  # config_N: after N iterations
    versions = [", ".join(map(" ".join, config["versions"].items())) for config in configs]
    found = {"versions": versions, "hardware": [config["hardware"] for config in configs]}
    return {name: "; then ".join(key for key, _ in groupby(x)) for name, x in found.items()}


def facts_of(run_dir: Path, checkpoint: dict, episodes: np.ndarray) -> dict:
    """What the top of the results file says."""
    config = json.loads((run_dir / "config.json").read_text())
    args = checkpoint["args"] | {"resume": None}  # a resumed run may have more steps than at first
    program, *flags = shlex.split(config["command"])
    source = run_dir / Path(program).name  # the copy that the run made of the file that ran
    final_return = float(np.mean(checkpoint["recent_returns"]))
    of_iterations = mean_of_iterations(episodes, args["num_envs"] * args["num_steps"])
    end = {"unfinished": checkpoint["unfinished"]} if "unfinished" in checkpoint else {}
    if "diverged" in checkpoint:
        of_iterations = min(0.0, of_iterations)
        end = {"diverged": f"losses not finite, last episode at step {checkpoint['global_step']}"}
    return {
        "script": Path(program).stem,
        "env": args["env_id"],
        "exp": args["exp_name"],
        "seed": args["seed"],
        "total_timesteps": args["total_timesteps"],
        "command": shlex.join([Path(program).name, *flags]),
        "args": json.dumps(args),
        "commit": config["commit"] or os.environ.get("COMMIT", ""),  # where there was no git
        "sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
        **have.patch_in(source),  # what of a variant decides whether it is run again
        **on_the_way(run_dir, checkpoint),
        "threads": config.get("threads", "not recorded"),
        "load": config.get("load", "not recorded"),
        "steps": checkpoint["global_step"],
        "seconds": round(checkpoint["seconds"], 2),
        "episodes": episodes.shape[1],
        "final_return": final_return,
        "return_of_iterations": of_iterations,
        **end,
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


def collect(
    run_dir: Path, suite: str | None = None, has_diverged: bool = False, unfinished: bool = False
) -> Path:
    """Write the results file of a run; never over another run's."""
    episodes = read_episodes(run_dir)
    if has_diverged:
        checkpoint = diverged(run_dir, episodes)
    else:
        checkpoint = finished(run_dir, or_not=unfinished)
        episodes = episodes[:, episodes[0] <= checkpoint["global_step"]]  # the run may be ahead
        check_episodes(run_dir, episodes, float(np.mean(checkpoint["recent_returns"])))
    facts = facts_of(run_dir, checkpoint, episodes)
    top = [f"# {name}: {value}" for name, value in facts.items()]
    text = "\n".join([*top, "step,return,seconds", *curve_of(facts, episodes)]) + "\n"

    suite = suite or facts["script"].rsplit("_", 1)[-1]
    folder = RESULTS / suite / facts["env"].replace("/", "-").replace(":", "-")
    path = folder / f"{facts['exp']}__{facts['seed']}.csv"
    if path.exists() and path.read_text() != text:
        sys.exit(f"error: {path} holds another run than {run_dir}; delete it to replace it")
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # a power cut leaves a whole file, or none
    temporary.replace(path)
    after = f"after {facts['seconds']:.0f} s"
    print(f"done {path.relative_to(RESULTS)}: return {facts['final_return']:.1f} {after}")
    return path


if __name__ == "__main__":
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--suite", help="folder of results/ (default: the script's last word)")
    ends = parser.add_mutually_exclusive_group()
    ends.add_argument("--diverged", action="store_true", help="their losses stopped being finite")
    ends.add_argument("--unfinished", action="store_true", help="those not at their end, too")
    options = parser.parse_args()
    for path in options.run_dirs:
        collect(path, options.suite, options.diverged, options.unfinished)
