"""results/*/*/*.csv, published.csv and published_curves.csv as tables of pandas."""

import json
import sys
from functools import cache
from pathlib import Path

import have
import pandas as pd
from recipes import HERE, SCRIPTS, recipes_of, without_suffix

RESULTS = HERE / "results"
PEER = "CleanRL docs"  # how the sources begin that stand beside every result
NUMBERS = {"seed": int, "total_timesteps": int, "steps": int, "seconds": float}
NUMBERS |= {"final_return": float}


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
    return facts


def read_curve(path: Path) -> pd.DataFrame:
    """Its columns: step, return and seconds of a run; other ones of speed, wins, equal."""
    return pd.read_csv(path, comment="#")


def folders() -> list[str]:
    """Those of results/ with runs in them, but for compare.sh's."""
    return sorted({path.parts[-3] for path in RESULTS.glob("*/*/*.csv")} - {"compare"})


def read_runs(folder: str) -> pd.DataFrame:
    """A row for each run of a folder: its facts, its file and its label, in the report's order.

    Environments come in the order of published.csv, experiments in that of recipes.csv.
    """
    rows = []
    for path in sorted((RESULTS / folder).glob("*/*.csv")):
        facts = read_facts(path)
        env = facts["env"].replace("/", "-").replace(":", "-")
        if path.parts[-2:] != (env, f"{facts['exp']}__{facts['seed']}.csv"):
            sys.exit(f"error: {path} is a copy, or has another name than its run")
        numbers = {name: kind(facts[name]) for name, kind in NUMBERS.items()}
        numbers["return_of_iterations"] = float(facts.get("return_of_iterations", "nan"))  # newer
        numbers["diverged"] = "diverged" in facts
        numbers["unfinished"] = facts.get("unfinished", "")  # how far it came
        rows.append({"folder": folder, "path": path} | facts | numbers)
    if not rows:
        return pd.DataFrame()
    runs = pd.DataFrame(rows)
    for (env, exp), group in runs.groupby(["env", "exp"]):
        if found := differing(group):
            sys.exit(f"error: seeds of {exp} on {env} in {folder} differ in {', '.join(found)}")
    recipes = recipes_of(folder)
    known_envs = list(dict.fromkeys(published(folder)["env"]))
    known_exps = list(recipes.index)
    runs["label"] = [recipes["label"].get(exp, exp) for exp in runs["exp"]]
    runs["env_place"] = [place(env.rsplit("-", 1)[0], known_envs) for env in runs["env"]]
    runs["exp_place"] = [place(exp, known_exps) for exp in runs["exp"]]
    order = ["env_place", "env", "exp_place", "exp", "seed"]
    return runs.sort_values(order, ignore_index=True)


def differing(runs: pd.DataFrame) -> list[str]:
    """What should be the same in all runs of an experiment and, as their files say, is not."""
    names = ("total_timesteps", "unfinished", "script", "patch")
    names = [name for name in names if name in runs]
    found = [name for name in names if runs[name].nunique(dropna=False) > 1]
    stored = [json.loads(args) for args in runs.get("args", pd.Series()).dropna()]
    for name in sorted({name for args in stored for name in args} - have.FREE - {"seed"}):
        values = {json.dumps(args[name]) for args in stored if name in args}
        if len(values) > 1 and name not in found:
            found.append(name)
    return found


def check_budgets(runs: pd.DataFrame, experiments: list[str], envs: list[str]) -> None:
    """All runs that a table compares have the same number of steps."""
    shown = runs[runs["exp"].isin(experiments) & runs["env"].isin(envs)] if len(runs) else runs
    for env, of_env in groups_of(shown, "env"):
        if of_env["total_timesteps"].nunique() > 1:
            names = ", ".join(of_env.groupby("total_timesteps")["exp"].first())
            sys.exit(f"error: runs on {env} in {of_env['folder'].iloc[0]} differ in steps: {names}")


def place(name: str, known: list[str]) -> int:
    """Its place among the known names; all others come after them."""
    return known.index(name) if name in known else len(known)


def groups_of(runs: pd.DataFrame, *columns: str):
    """(value, rows) for each value of a column, or of several, in the order of the rows."""
    by = list(columns) if len(columns) > 1 else columns[0]
    return runs.groupby(by, sort=False) if len(runs) else []


@cache
def read_published() -> pd.DataFrame:
    """published.csv; an unknown spread or number of seeds is not a number."""
    rows = pd.read_csv(HERE / "published.csv", dtype=str, keep_default_na=False)
    for name in ("steps", "seeds", "mean", "std"):
        rows[name] = pd.to_numeric(rows[name])
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
