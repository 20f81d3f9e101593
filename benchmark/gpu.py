"""The Python half of gpu.sh: copies of unfinished runs, with which another machine goes on.

Run:  python benchmark/gpu.py STAGED
      runs/NAME -> STAGED/NAME: checkpoint, config.json, episodes.csv, the script's own source

TensorBoard's files and videos stay behind; a curve in results/ does not need them. PPG's rollouts
stay behind too (6 GB): a run of it is copied where its checkpoint does without them, between two
phases, and otherwise its last copy stays what it was. A run with a results file needs none.
"""

import json
import shutil
import sys
from pathlib import Path

RESULTS = Path("benchmark/results")
PARTS = ("checkpoint.pt", "config*.json", "episodes.csv", "*.py")  # episodes never behind it


def has_results(run_dir: Path) -> bool:
    """Has some suite collected it? Older results are of another run of that name."""
    env, experiment, seed, _ = run_dir.name.rsplit("__", 3)
    began = (run_dir / "config.json").stat().st_mtime
    found = RESULTS.glob(f"*/{env}/{experiment}__{seed}.csv")
    return any(path.stat().st_mtime > began for path in found)


def is_whole(run_dir: Path) -> bool:
    """Is the checkpoint all that the run needs to go on?"""
    args = json.loads((run_dir / "config.json").read_text())["args"]
    if "n_iteration" not in args:
        return True
    import torch  # not for the others: this is asked three times a minute

    checkpoint = torch.load(run_dir / "checkpoint.pt", map_location="cpu", weights_only=True)
    return checkpoint["iteration"] % args["n_iteration"] == 0


def stage(run_dir: Path, copy: Path) -> None:
    """Bring the copy of a run up to date; a kill leaves the old one or the new one."""
    checkpoints = [folder / PARTS[0] for folder in (run_dir, copy)]
    times = [path.stat().st_mtime_ns for path in checkpoints if path.exists()]
    if len(times) == 2 and times[0] == times[1]:
        return
    fresh = copy.parent.with_suffix(".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for pattern in PARTS:
        for file in run_dir.glob(pattern):
            shutil.copy2(file, fresh)
    if is_whole(fresh):
        copy.parent.mkdir(exist_ok=True)
        shutil.rmtree(copy, ignore_errors=True)
        fresh.rename(copy)


def main() -> None:
    staged = Path(sys.argv[1])
    for checkpoint in sorted(Path("runs").glob("*__*__*__*/checkpoint.pt")):
        run_dir = checkpoint.parent
        copy = staged / run_dir.name
        if has_results(run_dir):
            shutil.rmtree(copy, ignore_errors=True)
        else:
            stage(run_dir, copy)


if __name__ == "__main__":
    main()
