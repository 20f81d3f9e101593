"""Draw your own runs: returns over steps and over seconds, and print a table.

Run:  python benchmark/plot.py runs [MORE ...] [--out curves.png]

Takes run directories or folders that hold some, of our scripts or of others that log CleanRL's tags
into directories named env__exp__seed__time. Draws means of the last 100 episodes by environment and
experiment, as far as the shortest run goes: from five runs on with their 95% interval (Student's
t), else with a thin line for each.
"""

import argparse
import json
import sys
from itertools import cycle
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from figures import AXES, add_legend, draw_seeds, save
from results import groups_of, on_one_grid
from tables import mean_cell, table


def read_episodes(run_dir: Path) -> pd.DataFrame:
    """step, return and seconds of each episode: of episodes.csv, else of TensorBoard's files."""
    file = run_dir / "episodes.csv"
    if file.exists() and file.stat().st_size:
        return pd.read_csv(file)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    if "charts/episodic_return" not in events.Tags()["scalars"]:
        return pd.DataFrame()
    found = pd.DataFrame(events.Scalars("charts/episodic_return"))
    seconds = found["wall_time"] - events.FirstEventTimestamp()
    return pd.DataFrame({"step": found["step"], "return": found["value"], "seconds": seconds})


def read_run(run_dir: Path) -> dict | None:
    """Environment, experiment, seed and smoothed curve; None if no episode has ended."""
    episodes = read_episodes(run_dir)
    if episodes.empty:
        print(f"skipped {run_dir}: no finished episode", file=sys.stderr)
        return None
    try:
        args = json.loads((run_dir / "config.json").read_text())["args"]
        env, exp, seed = args["env_id"], args["exp_name"], args["seed"]
    except (OSError, ValueError):  # another project's run, or a copy under way
        if run_dir.name.count("__") < 3:
            return None
        env, exp, seed, _ = run_dir.name.rsplit("__", 3)
    mean = episodes["return"].rolling(100, min_periods=1).mean()
    curve = episodes[["step", "seconds"]].assign(**{"return": mean})
    curve = pd.concat([curve.iloc[:: max(1, len(curve) // 500)], curve.iloc[[-1]]])  # enough to see
    return {"env": env, "exp": exp, "seed": str(seed), "curve": curve}


def began(run_dir: Path) -> float:
    """When a run began: by its name, or if it has another name by its directory."""
    end = run_dir.name.rpartition("__")[2]
    return float(end) if end.isdecimal() else run_dir.stat().st_mtime


def find_runs(folders: list[Path]) -> pd.DataFrame:
    """All runs below the folders, in the order of their names; the newest of each seed."""
    names = ("episodes.csv", "events.out.tfevents*")
    files = (file for folder in folders for name in names for file in folder.resolve().rglob(name))
    by_name = sorted({file.parent for file in files}, key=lambda path: path.name)
    named = [x for x in by_name if x.name.count("__") >= 3 or (x / "config.json").exists()]
    found = [run | {"began": began(x)} for x in named if (run := read_run(x))]
    runs = pd.DataFrame(found, columns=["env", "exp", "seed", "curve", "began"])
    by_time = runs.sort_values("began", kind="stable")
    newest = by_time.drop_duplicates(["env", "exp", "seed"], keep="last").sort_index()
    if older := len(runs) - len(newest):
        same = "environment, --exp-name and --seed"
        print(f"left out {older} older runs with the same {same}", file=sys.stderr)
    return newest


def draw(runs: pd.DataFrame, out: Path) -> None:
    """A row of two panels for each environment: over steps and over minutes."""
    envs = list(dict.fromkeys(runs["env"]))
    how = {"figsize": (9, 2.7 * len(envs) + 1), "squeeze": False, "layout": "constrained"}
    fig, axes = plt.subplots(len(envs), 2, **how)
    colours = dict(zip(dict.fromkeys(runs["exp"]), cycle(plt.get_cmap("tab10").colors)))
    entries = {}
    for row, (env, of_env) in zip(axes, groups_of(runs, "env")):
        for ax, (x, (unit, label)) in zip(row, AXES.items()):
            for exp, group in groups_of(of_env, "exp"):
                grid, y = on_one_grid(list(group["curve"]), x, end=min)
                draw_seeds(ax, grid / unit, y, colours[exp])
                entries.setdefault((exp, colours[exp]), []).append(len(group))
            ax.set_xlabel(label)
        row[0].set_ylabel(f"{env}\nreturn")
    add_legend(fig, entries)
    save(fig, out)


def table_of(runs: pd.DataFrame) -> str:
    rows = []
    for (env, exp), group in groups_of(runs, "env", "exp"):
        last = pd.DataFrame([curve.iloc[-1] for curve in group["curve"]])
        steps = dict.fromkeys(f"{x:,.0f}" for x in sorted({last["step"].min(), last["step"].max()}))
        row = [env, exp, str(len(group)), " to ".join(steps)]
        row += [mean_cell(last["return"].to_numpy()), f"{last['seconds'].median() / 60:.1f}"]
        rows.append(row)
    head = ["environment", "experiment", "runs", "steps"]
    return table([*head, "return: mean [95% interval] or (each run)", "minutes"], rows, left=2)


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=Path("curves.png"))
    options = parser.parse_args()
    runs = find_runs(options.folders)
    if runs.empty:
        sys.exit(f"error: no runs with finished episodes in {', '.join(map(str, options.folders))}")
    draw(runs, options.out)
    print(f"{table_of(runs)}\n\n{options.out}")


if __name__ == "__main__":
    main()
