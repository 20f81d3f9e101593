"""recipes.csv: what the suites run and what the report calls it; the .sh files read it too.

Columns: suite and recipe (`bash benchmark/SUITE.sh RECIPE`), folder of results/, script (or a
patch of one, see patches.py),
experiment (the name of its runs), environments (`only` before them: no others with ENVS), seeds,
steps, cores of a run (one, all, or the number of processes that torchrun starts), flags, and label
and colour in tables and figures (without a colour it has no curve). No field holds a comma, so bash
can read it.
"""

from functools import cache
from pathlib import Path

import pandas as pd

HERE = Path(__file__).resolve().parent
SCRIPTS = ["ppo", "ppo_continuous_mujoco", "trpo_continuous_mujoco", "ppo_atari", "ppo_lstm"]
SCRIPTS += ["ppo_multidiscrete", "ppo_procgen", "ppg_procgen"]  # in the order of the README
ABLATION = "strong_no_"  # how the names of the strong recipe's ablations begin
CLEAN = "selection_results"  # folder: the chosen recipe and those beside it, on new seeds


@cache
def read_recipes() -> pd.DataFrame:
    """recipes.csv, one row for each experiment, everything as text."""
    return pd.read_csv(HERE / "recipes.csv", dtype=str, keep_default_na=False)


def suites() -> dict[str, list[str]]:
    """The recipes that each of benchmark/*.sh knows, the default first."""
    groups = read_recipes().groupby("suite", sort=False)["recipe"]
    return {suite: list(dict.fromkeys(names)) for suite, names in groups}


def without_suffix(folder: str) -> str:
    """mujoco for mujoco_patch: the folder of a suite before SUFFIX of run.sh.

    The results of the selection are MuJoCo's, too.
    """
    if folder.startswith(CLEAN):
        return "mujoco"
    known = {*read_recipes()["folder"], "mujoco_selection", "ablation_study_flags"}
    fits = [name for name in known if folder.startswith(name)]
    return max(fits, key=len, default=folder)


def recipes_of(folder: str) -> pd.DataFrame:
    """The recipes with results in a folder, by experiment; those of mujoco for mujoco_patch.

    An experiment with other flags for each environment has a row for each: here the first.
    """
    recipes = read_recipes()
    found = recipes[recipes["folder"] == without_suffix(folder)]
    return found.drop_duplicates("experiment").set_index("experiment")


def environments_of(recipe: pd.Series) -> list[str]:
    """Without the word `only`."""
    return [name for name in recipe["environments"].split() if name != "only"]


def flags_of_run(recipe: pd.Series, env: str, seed: str) -> list[str]:
    """What the suite gives to the script."""
    run = ["--env-id", env, "--seed", seed, "--exp-name", recipe["experiment"]]
    return [*run, "--total-timesteps", recipe["steps"], *recipe["flags"].split()]
