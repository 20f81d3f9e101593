"""recipes.csv, results/ and published*.csv as tables of pandas; the parts of a suite's plan.

recipes.csv has a row for each experiment: suite and recipe (`bash benchmark/SUITE.sh RECIPE`), the
folder of results/ (also the name of its table and figure), the script or a patch of one, the
experiment (the name of its runs), environments, seeds, steps, cores of a run (one, all, or the
number of processes that torchrun starts), flags, and label and colour in tables and figures (an
experiment without a colour has no curve). Behind the word `only` an experiment has no other
environments, whatever ENVS says.
"""

import re
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
SCRIPTS = ["ppo", "ppo_continuous_mujoco", "trpo_continuous_mujoco", "ppo_pixels"]
SCRIPTS += ["ppo_multidiscrete", "ppo_microrts", "ppo_lstm", "ppo_atari", "ppo_atari_lstm"]
SCRIPTS += ["ppo_procgen", "ppg_procgen"]  # as in the README
PEER = "CleanRL docs"  # how the sources begin that stand beside every result
DIAGNOSTICS = {"approx_kl": "KL", "clipfrac": "clip fraction"}
DIAGNOSTICS |= {"explained_variance": "explained variance", "entropy": "entropy"}
DIAGNOSTICS |= {"value_loss": "value loss", "grad_norm": "gradient norm"}
NUMBERS = {"seed": int, "total_timesteps": int, "steps": int, "seconds": float}
NUMBERS |= {"final_return": float, "return_of_iterations": float}


# -- recipes --
@cache
def read_recipes() -> pd.DataFrame:
    """recipes.csv, everything as text."""
    return pd.read_csv(HERE / "recipes.csv", dtype=str, keep_default_na=False)


def environments_of(recipe: pd.Series) -> list[str]:
    """The environments of a row, without the word `only`."""
    return [name for name in recipe["environments"].split() if name != "only"]


def without_suffix(folder: str) -> str:
    """mujoco for mujoco_mine: the folder of a recipe before SUFFIX."""
    fits = [name for name in set(read_recipes()["folder"]) if folder.startswith(name)]
    return max(fits, key=len, default=folder)


def recipes_of(folder: str) -> pd.DataFrame:
    """The experiments with results in a folder, by name; those of mujoco for mujoco_mine.

    An experiment with other flags for each environment has a row for each: here the first.
    """
    recipes = read_recipes()
    found = recipes[recipes["folder"] == without_suffix(folder)]
    return found.drop_duplicates("experiment").set_index("experiment")


# -- results --
@cache
def read_facts(path: Path) -> dict[str, str]:
    """The `# name: value` lines at the top of a results file."""
    facts = {}
    with open(path) as file:
        for line in file:
            if not line.startswith("# "):
                break
            name, value = line[2:].rstrip("\n").split(": ", 1)
            facts[name] = value
    for name in {"script", "ours"} & facts.keys():  # before version 1.0 these had no own script
        if re.fullmatch(r"\w+-v5", facts["env"]):  # a game of Atari
            facts[name] = re.sub(r"\bppo_lstm\b", "ppo_atari_lstm", facts[name])
        if facts["env"].startswith("Microrts"):
            facts[name] = facts[name].replace("ppo_multidiscrete", "ppo_microrts")
    return facts


def read_curve(path: Path) -> pd.DataFrame:
    """Its columns: step, return and seconds of a run; other ones of speed, wins, equal."""
    return pd.read_csv(path, comment="#")


def on_one_grid(curves: list, x: str, y="return", end=max) -> tuple[np.ndarray, np.ndarray]:
    """A grid for all seeds, and their returns, or another column, (seeds, points) there.

    It ends with the longest curve, and the others, which have diverged, keep their last value; or
    with the shortest. A grid of seconds has the median time of the seeds at each step.
    """
    start = max(curve["step"].iloc[0] for curve in curves)
    steps = np.linspace(start, max(start, end(curve["step"].iloc[-1] for curve in curves)), 200)

    def at(name: str) -> np.ndarray:
        return np.stack([np.interp(steps, curve["step"], curve[name]) for curve in curves])

    return np.median(at(x), axis=0), at(y)


def file_of(folder: str, env: str, experiment: str, seed: str | int) -> Path:
    """The results file of a run."""
    env, experiment = (re.sub("[/:]", "-", name) for name in (env, experiment))
    return RESULTS / folder / env / f"{experiment}__{seed}.csv"


def read_runs(folder: str) -> pd.DataFrame:
    """A row for each run of a folder: its facts, its file and its label, in the report's order.

    Environments come in the order of published.csv, experiments in that of recipes.csv.
    """
    rows = []
    for path in sorted((RESULTS / folder).glob("*/*.csv")):
        facts = read_facts(path)
        if path != file_of(folder, facts["env"], facts["exp"], facts["seed"]):
            sys.exit(f"error: {path} is a copy, or has another name than its run")
        absent = {"unfinished": "", "return_of_iterations": "nan", "eval_return": "nan"}
        rows.append(absent | facts | {"path": path, "diverged": "diverged" in facts})
    if not rows:
        return pd.DataFrame()
    runs = pd.DataFrame(rows).astype(NUMBERS)
    for (env, exp), group in runs.groupby(["env", "exp"]):
        same = ("script", "patch", "total_timesteps", "unfinished")
        mixed = [name for name in same if name in group and group[name].nunique(dropna=False) > 1]
        if mixed:
            sys.exit(f"error: seeds of {exp} on {env} in {folder} differ in {', '.join(mixed)}")
    labels = recipes_of(folder)["label"]
    envs = {env: i for i, env in enumerate(dict.fromkeys(published(folder)["env"]))}
    exps = {exp: i for i, exp in enumerate(labels.index)}
    runs["label"] = [labels.get(exp, exp) for exp in runs["exp"]]
    runs["env_place"] = [envs.get(env.rsplit("-", 1)[0], len(envs)) for env in runs["env"]]
    runs["exp_place"] = [exps.get(exp, len(exps)) for exp in runs["exp"]]
    order = ["env_place", "env", "exp_place", "exp", "seed"]
    return runs.sort_values(order, ignore_index=True)


def groups_of(runs: pd.DataFrame, *columns: str):
    """(value, rows) for each value of a column, or of several, in the order of the rows."""
    by = list(columns) if len(columns) > 1 else columns[0]
    return runs.groupby(by, sort=False) if len(runs) else []


def returns_of(folder: str, measure: str = "final_return") -> dict:
    """(experiment, environment) -> the figure of each run, in the order of the seeds."""
    groups = groups_of(read_runs(folder), "exp", "env")
    return {name: runs[measure].to_numpy() for name, runs in groups}


# -- published figures --
@cache
def read_published() -> pd.DataFrame:
    """published.csv; an unknown spread or number of seeds is not a number."""
    rows = pd.read_csv(HERE / "published.csv").fillna({"env_version": ""})
    versions = rows["env_version"].map(lambda version: f"-{version}" if version else "")
    rows["env_id"] = rows["env"] + versions  # such as Hopper-v4; those of Procgen have no version
    return rows


def published(folder: str, env_id: str = "", steps: int = 0) -> pd.DataFrame:
    """Published figures of a suite, or of one environment (of any version) at one budget."""
    rows = read_published()
    rows = rows[rows["task_suite"] == without_suffix(folder)]
    if env_id:
        rows = rows[(rows["env"] == env_id.rsplit("-", 1)[0]) & (rows["steps"] == steps)]
    return rows


def published_curves(folder: str, env_id: str, steps: int) -> dict[str, pd.DataFrame]:
    """Label -> published points of an environment (of any version), as far as runs of `steps` go.

    Their runs may be longer, and then anneal their learning rate to a later end.
    """
    rows = pd.read_csv(HERE / "published_curves.csv")
    rows = rows[rows["task_suite"] == folder.split("_")[0]]
    rows = rows[(rows["env"] == env_id.rsplit("-", 1)[0]) & (rows["step"] <= 1.02 * steps)]
    found = {}
    for (source, seeds), points in groups_of(rows, "source", "seeds"):
        found[f"{source}, {seeds} run{'s' if seeds > 1 else ''}"] = points
    return found


def peers(folder: str, facts: dict) -> list[dict]:
    """CleanRL's figures for the environment of a run, of its version, that name no other script."""
    rows = published(folder, facts["env"], int(facts["total_timesteps"]))
    rows = rows[rows["source"].str.startswith(PEER) & (rows["env_id"] == facts["env"])]
    others = {*SCRIPTS} - {facts["script"]}
    mine = [not others & {*source.split()} for source in rows["source"]]
    return rows[mine].to_dict("records")
