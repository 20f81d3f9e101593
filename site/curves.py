"""The runs of benchmark/results/ as JSON for curves.js: one file for each environment."""

import json
import math
from itertools import groupby
from pathlib import Path

import numpy as np
import results
import stats
from tables import published_study

AXES = {"step": 1e6, "seconds": 60}  # x of a curve -> its unit


def rounded(x) -> list:
    """Numbers of four digits; JSON has none that is not finite."""
    return [float(f"{v:.4g}") if math.isfinite(v) else None for v in np.asarray(x, float)]


def on_grid(curves: list, axis: str) -> dict:
    """Returns of all seeds, their mean and its interval, on a grid that all have."""
    grid, y = results.on_one_grid(curves, axis)
    found = {
        "x": rounded(grid / AXES[axis]),
        "seeds": [*map(rounded, y)],
        "mean": rounded(y.mean(0)),
    }
    if len(y) >= stats.FEWEST:
        found["low"], found["high"] = map(rounded, stats.mean_interval(y))
    return found


def of_environment(folder: str, runs) -> dict:
    """What curves.js draws of one environment: our runs and what others published."""
    colours, ours = results.recipes_of(folder)["colour"], []
    for exp, group in results.groups_of(runs, "exp"):
        curves = [results.read_curve(path) for path in group["path"]]
        facts = {"label": group["label"].iloc[0], "numbers": [*map(int, group["seed"])]}
        facts["colour"] = colours.get(exp, "")
        ours.append(facts | {axis: on_grid(curves, axis) for axis in AXES})
    first = runs.iloc[0]
    lines = [{"label": x["source"], "mean": x["mean"]} for x in results.peers(folder, first)]
    if folder == "ablation_study":
        study = {exp: x for (exp, env), x in published_study().items() if env == first["env"]}
        lines += [{"label": f"{x['source']}: {exp}", "mean": x["mean"]} for exp, x in study.items()]
    theirs = results.published_curves(folder, first["env"], int(first["total_timesteps"]))
    points = [
        {"label": label, "x": rounded(x["step"] / 1e6), "y": rounded(x["mean"])}
        for label, x in theirs.items()
    ]
    return {"env": first["env"], "ours": ours, "lines": lines, "points": points}


def write(pages: Path) -> str:
    """curves/FOLDER/ENVIRONMENT.json below pages; the options of the page's list of them."""
    options = []
    for folder in dict.fromkeys(results.read_recipes()["folder"]):
        for env, runs in results.groups_of(results.read_runs(folder), "env"):
            name = f"{folder}/{env.replace('/', '-').replace(':', '-')}"
            path = pages / "curves" / f"{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(of_environment(folder, runs), separators=(",", ":")))
            options.append((folder, f'<option value="{name}">{env}</option>'))
    groups = groupby(options, key=lambda option: option[0])
    return "".join(
        f'<optgroup label="{folder.replace("_", " ")}">{"".join(x for _, x in group)}</optgroup>'
        for folder, group in groups
    )
