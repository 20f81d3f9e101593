"""Starpilot by windows of half a million steps: our runs beside those of openai/train-procgen.

No rate is annealed, so runs of different lengths can be compared, window by window. A point of a
curve is a mean of 100 games alone; a window is the mean of all points in it.

python benchmark/windows.py CLONE    a clone of openai/train-procgen -> published_windows.csv
"""

import sys
from pathlib import Path

import pandas as pd
from recipes import HERE
from results import groups_of, read_curve, read_runs
from tables import number, table

WIDTH, LAST = 500_000, 5_000_000  # steps
PUBLISHED = HERE / "published_windows.csv"
SOURCE = "openai/train-procgen (1a2ae219)"
FOLDERS = ["procgen_4M", "procgen_3M"]  # of results/


def means_of(steps: pd.Series, returns: pd.Series) -> dict[int, float]:
    """Last step of a window -> the mean of its points, for all windows that the run completes."""
    whole = range(WIDTH, int(steps.max()) + 1, WIDTH)
    return {end: returns[(steps > end - WIDTH) & (steps <= end)].mean() for end in whole}


def windows_section() -> str:
    """A row for each window, a column for each experiment, its seeds in a cell."""
    groups = [group for folder in FOLDERS for _, group in groups_of(read_runs(folder), "exp")]
    head, columns = ["steps"], []
    for group in groups:
        head.append(f"{group['label'].iloc[0]}, {group['steps'].max() / 1e6:.1f}M")
        curves = [read_curve(path) for path in group["path"]]
        columns.append([means_of(curve["step"], curve["return"]) for curve in curves])
    theirs = pd.read_csv(PUBLISHED)
    head.append("openai/train-procgen's PPO, three runs")
    columns.append([dict(zip(run["end"], run["mean"])) for _, run in groups_of(theirs, "run")])
    rows = []
    for end in sorted({end for seeds in columns[:-1] for means in seeds for end in means}):
        cells = [[number(means[end]) for means in seeds if end in means] for seeds in columns]
        rows.append([f"to {end / 1e6:.1f}M", *(", ".join(cell) or "-" for cell in cells)])
    return table(head, rows)


def write_published(clone: Path) -> None:
    """What train-procgen logs after each iteration is the mean return of the last 100 games."""
    rows = []
    for run in range(3):
        log = pd.read_csv(clone / f"train_procgen/results/easy-all-run{run}/progress-starpilot.csv")
        for end, mean in means_of(log["misc/total_timesteps"], log["eprewmean"]).items():
            if end <= LAST:
                rows.append(["procgen", "starpilot", run, end, f"{mean:.4f}", SOURCE])
    names = ["task_suite", "env", "run", "end", "mean", "source"]
    pd.DataFrame(rows, columns=names).to_csv(PUBLISHED, index=False)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write_published(Path(sys.argv[1]))
