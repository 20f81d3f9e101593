"""What each detail is worth: tables of results/ablation_study, ablation_details and variants."""

import re
from dataclasses import dataclass
from functools import cache

import numpy as np
import pandas as pd
from recipes import HERE, environments_of, read_recipes, recipes_of
from results import check_budgets, groups_of, read_runs
from stats import FEWEST, difference, improvement, improvement_interval, relative_difference
from tables import cell_of, mean_cell, number, seeds_cell, setups, table

STUDY, DETAILS, VARIANTS = "ablation_study", "ablation_details", "variants"
FLAGS_ALONE = f"{STUDY}_flags"  # the presets as far as flags go
NONE = "No runs yet."
# The two numbers of the study: the largest of these differences, without their signs.
INDICES = {
    "AAI, the algorithm": [("ppo", "trpo_plus"), ("ppo_m", "trpo")],
    "ACLI, the code-level details": [("ppo", "ppo_m"), ("trpo_plus", "trpo")],
}
THEIR_MEASURE = """
Measured as in the authors' code: mean return of each of the last five iterations, and of these the
mean. Published: v2 tasks, at least 80 agents, 95% bootstrap interval. AAI = max(|PPO - TRPO+|,
|PPO-M - TRPO|), ACLI = max(|PPO - PPO-M|, |TRPO+ - TRPO|), of means. By chance: the mean and the
95th percentile of such an index if all presets had the same true mean and seeds varied as much as
they do here.
""".strip().replace("\n", " ")
OUR_MEASURE = "The same runs, final returns: mean of the last 100 training episodes."
DIFFERENCE_RULE = f"""
First row: final returns. Below it: difference of the mean from that row's, with Welch's 95%
interval, or with fewer than {FEWEST} seeds each seed's difference from that mean. An interval with
0 inside decides nothing. If no change had any effect, about five in a hundred would still leave 0
out, often several together, because all are compared with the same first row.
""".strip().replace("\n", " ")
IMPROVEMENT_RULE = f"""
Probability of improvement: that a run of the changed one is better than one of the original, mean
over environments; from {FEWEST} seeds on with its 95% bootstrap interval.
""".strip().replace("\n", " ")
TITLES = {
    "details": "`ppo_continuous_mujoco.py`",
    "details_core": "`ppo.py`",
    "details_memory": "`ppo_lstm.py`, CartPole without velocities",
    "details_mining": "`ppo_multidiscrete.py`",
}


def returns_of(folder: str, measure: str = "final_return") -> dict[tuple[str, str], np.ndarray]:
    """(experiment, environment) -> final returns, in the order of their seeds."""
    groups = groups_of(read_runs(folder), "exp", "env")
    return {name: runs[measure].to_numpy() for name, runs in groups}


def ran_on(folder: str) -> str:
    """Hardware, versions and commits of all runs of a folder, and scripts of several texts."""
    runs = read_runs(folder)
    places = setups(list(zip(runs["hardware"], runs["versions"], "commit " + runs["commit"])))
    texts = runs.groupby("script")["sha256"].nunique()
    mixed = [f"{name} ran in {n} versions." for name, n in texts.items() if n > 1]
    return " ".join([places, *mixed])


def signed(x: float, size: float) -> str:
    return ("+" if x >= 0 else "-") + number(abs(x), size)


def difference_cell(x: np.ndarray | None, y: np.ndarray | None) -> str:
    """mean(y) - mean(x) with its interval, or with each seed's difference from mean(x)."""
    if x is None or y is None:
        return "-"
    mean, low, high = difference(x, y)
    size = np.mean(x)
    if min(len(x), len(y)) >= FEWEST:
        return f"{signed(mean, size)} [{signed(low, size)}, {signed(high, size)}]"
    if len(y) == 1:
        return signed(mean, size)
    return f"{signed(mean, size)} ({', '.join(signed(value - size, size) for value in y)})"


# -- the study --
@cache
def published_study() -> dict[tuple[str, str], dict]:
    """(experiment, environment without its version) -> mean, low and high."""
    rows = pd.read_csv(HERE / "published_study.csv")
    return {(row["experiment"], row["env"]): row for row in rows.to_dict("records")}


def index_of(means: dict[tuple[str, str], float], env: str, pairs: list[tuple]) -> float | None:
    """The largest difference of an environment; None if one of the presets has no mean."""
    if any((exp, env) not in means for pair in pairs for exp in pair):
        return None
    return max(abs(means[a, env] - means[b, env]) for a, b in pairs)


def environments_in(rows: pd.DataFrame) -> list[str]:
    """Of some rows of recipes.csv, each once."""
    return list(dict.fromkeys(env for _, row in rows.iterrows() for env in environments_of(row)))


def study_environments() -> list[str]:
    recipes = read_recipes()
    return environments_in(recipes[recipes["folder"] == STUDY])


def study_table(returns: dict, beside: bool) -> str:
    """Presets, then the two indices, environment by environment; `beside` what is published."""
    theirs, envs = published_study(), study_environments()
    head, rows = ["preset"], []
    for env in envs:
        head += [env, f"{env.split('-')[0]}, published"] if beside else [env]
    for exp, label in recipes_of(STUDY)["label"].items():
        row = [label]
        for env in envs:
            mine, fact = returns.get((exp, env)), theirs[exp, env.split("-")[0]]
            row += ["-" if mine is None else mean_cell(mine)]
            row += [f"{fact['mean']} [{fact['low']}, {fact['high']}]"] if beside else []
        rows.append(row)
    ours = {name: float(np.mean(x)) for name, x in returns.items()}
    published = {name: fact["mean"] for name, fact in theirs.items()}
    for name, pairs in INDICES.items():
        row = [name]
        for env in envs:
            values = [index_of(ours, env, pairs)]
            values += [index_of(published, env.split("-")[0], pairs)] if beside else []
            row += ["-" if value is None else f"{value:.0f}" for value in values]
        rows.append(row)
    chance = ["either of them by chance"]
    for env in envs:
        chance += [chance_cell([returns.get((exp, env)) for exp in recipes_of(STUDY).index])]
        chance += ["-"] if beside else []
    return table(head, [*rows, chance])


def chance_cell(samples: list[np.ndarray | None]) -> str:
    """What an index would be if all presets had one mean, and what it exceeds in one of 20 cases.

    Normal means of as many seeds as there are, with the deviation of all presets together.
    """
    if any(x is None or len(x) < 2 for x in samples):
        return "-"
    deviation = np.mean([np.var(x, ddof=1) for x in samples]) ** 0.5
    n = min(len(x) for x in samples)
    means = np.random.default_rng(0).normal(0, deviation / n**0.5, size=(100_000, 4))
    index = np.maximum(abs(means[:, 0] - means[:, 1]), abs(means[:, 2] - means[:, 3]))
    return f"{index.mean():.0f}, below {np.quantile(index, 0.95):.0f}"


def study_differences(returns: dict) -> str:
    """The four differences behind the indices; empty if no environment has two presets."""
    labels, envs, rows = recipes_of(STUDY)["label"], study_environments(), []
    for better, worse in (pair for pairs in INDICES.values() for pair in pairs):
        row = [f"{labels[better]} - {labels[worse]}"]
        row += [difference_cell(returns.get((worse, e)), returns.get((better, e))) for e in envs]
        rows.append(row)
    if all(cell == "-" for row in rows for cell in row[1:]):
        return ""
    return table(["difference", *envs], rows)


def study_section() -> str:
    returns = returns_of(STUDY)
    if not returns:
        return f"{NONE}\n\n{study_table(returns, beside=True)}\n\n{THEIR_MEASURE}"
    runs = read_runs(STUDY)
    check_budgets(runs, list(runs["exp"]), list(runs["env"]))
    parts = [study_table(returns_of(STUDY, "return_of_iterations"), beside=True), THEIR_MEASURE]
    parts += [study_table(returns, beside=False), OUR_MEASURE, study_differences(returns)]
    parts += [ran_on(STUDY), "![The study](benchmark/figures/ablation_study.png)"]
    return "\n\n".join(filter(None, parts))


def flags_section() -> str:
    """The runs without the patches."""
    returns = returns_of(FLAGS_ALONE, "return_of_iterations")
    return f"{study_table(returns, beside=False)}\n\n{ran_on(FLAGS_ALONE)}"


# -- details --
def details_of(recipe: str) -> pd.DataFrame:
    """The rows of a recipe of ablation.sh; the first is what the others are changes of."""
    recipes = read_recipes()
    return recipes[(recipes["suite"] == "ablation") & (recipes["recipe"] == recipe)]


def id_and_text(label: str) -> tuple[str, str]:
    """Of a label such as `C02 torch's initial weights`; some have no id."""
    detail, text = re.fullmatch(r"([A-Z]\d\d)? ?(.*)", label).groups()
    return detail or "", text


def change_rows(rows: pd.DataFrame, folder: str) -> tuple[list[str], list[list[str]]]:
    """Environments, and id, change, seeds and a cell for each environment of every row."""
    baseline, recipes, returns = rows.iloc[0], read_recipes(), returns_of(folder)
    mine, cells = environments_in(rows), []
    if "only" not in baseline["environments"]:  # others that ENVS asked for
        known = environments_in(recipes[recipes["folder"] == baseline["folder"]])
        names = set(rows["experiment"])
        mine += sorted({env for exp, env in returns if exp in names} - set(known))
    runs = read_runs(folder)
    check_budgets(runs, list(rows["experiment"]), mine)
    for i, (_, row) in enumerate(rows.iterrows()):
        pairs = [(returns.get((baseline["experiment"], e)), (row["experiment"], e)) for e in mine]
        found = [len(returns[name]) for _, name in pairs if name in returns]
        diverged = 0
        if found:
            mask = (runs["exp"] == row["experiment"]) & runs["env"].isin(mine)
            diverged = runs[mask]["diverged"].sum()
        cells.append([*id_and_text(row["label"]), seeds_cell(found, diverged)])
        if i == 0:
            cells[-1] += [mean_cell(x) if x is not None else "-" for x, _ in pairs]
        else:
            cells[-1] += [difference_cell(x, returns.get(name)) for x, name in pairs]
    return mine, cells


def without_runs(cells: list[list[str]]) -> tuple[list[list[str]], str]:
    """Of rows of id, change, seeds, ...: those with runs, and the names of the others."""
    missing = [row for row in cells if row[2] == "0"]
    names = ", ".join(f"{row[0]} {row[1]}".strip() for row in missing)
    return [row for row in cells if row not in missing], f"No runs yet: {names}." if names else ""


def details_section(folder: str = DETAILS) -> str:
    """A table for each script that has runs."""
    runs = read_runs(folder)
    if runs.empty:
        return NONE
    parts = []
    for recipe, title in TITLES.items():
        rows = details_of(recipe)
        envs, cells = change_rows(rows, folder)
        ran, missing = without_runs(cells)
        if not ran:
            parts.append(f"{title}: no runs yet.")
            continue
        of_rows = runs[runs["exp"].isin(rows["experiment"]) & runs["env"].isin(envs)]
        steps = " or ".join(f"{n:,}" for n in of_rows["total_timesteps"].unique()) + " steps"
        text = table(["id", "change", "seeds", *envs], ran, left=2)
        parts += [f"{title}, {steps}:", text, *filter(None, [missing])]
    return "\n\n".join([*parts, DIFFERENCE_RULE, ran_on(folder)])


@dataclass
class Effect:
    """Of one change on all environments of its row, as a share of the baseline's return."""

    detail: str
    text: str
    seeds: int  # the fewest
    shares: list[float]  # of each environment
    mean: float
    low: float
    high: float


def effects(recipe: str = "details") -> list[Effect]:
    """The changes that have two seeds, as has the baseline, in all their environments."""
    returns, rows = returns_of(DETAILS), details_of(recipe)
    baseline, found = rows["experiment"].iloc[0], []
    for _, row in rows.iloc[1:].iterrows():
        envs = environments_of(row)
        names = [((baseline, env), (row["experiment"], env)) for env in envs]
        pairs = [(returns[a], returns[b]) for a, b in names if a in returns and b in returns]
        seeds = min((len(z) for pair in pairs for z in pair), default=0)
        if len(pairs) == len(envs) and seeds > 1:
            shares = [(np.mean(y) - np.mean(x)) / abs(np.mean(x)) for x, y in pairs]
            detail, text = id_and_text(row["label"])
            where = f" ({envs[0].split('-')[0]})" if len(envs) == 1 else ""
            interval = relative_difference(pairs)
            found.append(Effect(detail, text + where, seeds, shares, *interval))
    return found


def baseline_spread(recipe: str = "details") -> list[float]:
    """How far each seed of the baseline is from its mean, as a share of it, in all environments."""
    returns, rows = returns_of(DETAILS), details_of(recipe)
    envs = environments_of(rows.iloc[1])  # those of nearly all changes
    names = [(rows["experiment"].iloc[0], env) for env in envs]
    found = [returns[name] for name in names if name in returns]
    return [share for x in found for share in (x - x.mean()) / abs(x.mean())]


def effects_section() -> str:
    """The figure alone."""
    if not returns_of(DETAILS):
        return NONE
    if not effects():
        return "No figure yet: no change has two seeds in all its environments."
    return "![What each detail is worth](benchmark/figures/ablation_details.png)"


# -- variants --
def improvement_cell(olds: list[np.ndarray], news: list[np.ndarray]) -> str:
    """With an interval if seeds are not few; of each side those that all its environments have."""
    if not olds:
        return "-"
    fewest = [min(map(len, group)) for group in (olds, news)]
    old, new = (np.stack([x[:n] for x in g], axis=1) for g, n in zip((olds, news), fewest))
    if min(fewest) < FEWEST:
        return f"{improvement(new, old):.2f}"
    return cell_of(*improvement_interval(new, old))


def variants_section(folder: str = VARIANTS) -> str:
    """The baseline, then a row for each patch."""
    recipes, returns = read_recipes(), returns_of(folder)
    rows = recipes[recipes["folder"] == VARIANTS]
    envs, cells = change_rows(rows, folder)
    baseline = rows["experiment"].iloc[0]
    for (_, row), cell in zip(rows.iterrows(), cells):
        exp = row["experiment"]
        cell[0] = f"`{exp}`"
        shared = [env for env in envs if (baseline, env) in returns and (exp, env) in returns]
        groups = [[returns[name, env] for env in shared] for name in (baseline, exp)]
        cell.append("-" if exp == baseline else improvement_cell(*groups))
    head = ["patch", "what", "seeds", *envs, "probability of improvement"]
    ran, missing = without_runs(cells)
    if not ran:
        return missing
    rule = f"{DIFFERENCE_RULE} {IMPROVEMENT_RULE}"
    parts = [table(head, ran, left=2), missing, rule, ran_on(folder)]
    return "\n\n".join(filter(None, parts))
