"""Markdown tables of the runs: returns, aggregates, what details and variants are worth."""

import re

import numpy as np
import pandas as pd
import results
import stats

STUDY, DETAILS, VARIANTS = "ablation_study", "ablation_details", "variants"
BROKEN = "broken"
# The two numbers of the study: the largest of these differences, without their signs.
INDICES = {
    "AAI, the algorithm": [("ppo", "trpo_plus"), ("ppo_m", "trpo")],
    "ACLI, the code-level details": [("ppo", "ppo_m"), ("trpo_plus", "trpo")],
}
SUMMARY_RULE = """
Returns are means of the last 100 training episodes, averaged over ten seeds (five for Pusher,
Reacher and Swimmer), with the 95% interval of that average. CleanRL's are from the two tables in
its documentation, the newer one first: mean ± standard deviation of three seeds.
"""
STUDY_RULE = """
Measured as in the authors' code: mean return of each of the last five iterations, and of these the
mean. Published: v2 tasks, at least 80 agents, 95% bootstrap interval. AAI = max(|PPO - TRPO+|,
|PPO-M - TRPO|), ACLI = max(|PPO - PPO-M|, |TRPO+ - TRPO|), of means. By chance: the mean and the
95th percentile of such an index if all presets had the same true mean and seeds varied as here.
"""
RETURN_RULE = """
Final returns: mean of the last 100 training episodes. Differences are of the means, with Welch's
95% interval; below five seeds each seed's is listed. An interval with 0 inside decides nothing.
"""
DIFFERENCE_RULE = f"""{RETURN_RULE}
If no change had any effect, about five in a hundred would still leave 0 out, often several
together, because all are compared with the same first row.
"""
IMPROVEMENT_RULE = """
Probability of improvement: that a run of the changed script beats one of the original, averaged
over environments; from five seeds on with its 95% bootstrap interval, which has no width where all
runs of one beat all of the other.
"""

BROKEN_RULE = """
Return: mean of the last 100 training episodes, over the seeds, with its 95% interval. Difference
from the healthy runs: Welch's 95% interval; with 0 inside it decides nothing. Evaluation: mean
return of ten episodes after training. The others: mean over the first half of training, in which
the learning rate is high and the return rises, and over the seeds.
"""


# -- cells --
def table(head: list[str], rows: list[list[str]], left: int = 1) -> str:
    """A Markdown table without columns that say nothing; the first `left` columns are text."""
    full = [i for i in range(len(head)) if i < left or {row[i] for row in rows} - {"", "-"}]
    head, rows = [head[i] for i in full], [[row[i] for i in full] for row in rows]
    align = ["---" if i < left else "---:" for i in full]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, align, *rows])


def text(rule: str) -> str:
    """A rule in one line."""
    return " ".join(rule.split())


def number(x: float, size: float | None = None) -> str:
    """x with one decimal; with none if `size` (or x itself) is at least 100, below 1 with three."""
    size = abs(x if size is None else size)
    digits = 0 if size >= 100 else 3 if 0 < size < 1 else 1
    return f"{x:.{digits}f}"


def signed(x: float, size: float) -> str:
    return ("+" if x >= 0 else "-") + number(abs(x), size)


def spread(row: dict) -> str:
    """A published mean, with its deviation if there is one."""
    deviation = "" if np.isnan(row["std"]) else f" ± {number(row['std'], row['mean'])}"
    return number(row["mean"]) + deviation


def cell_of(value: float, low: float, high: float) -> str:
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def mean_cell(x: np.ndarray | None) -> str:
    """The mean with its interval, or with the seeds if they are few; a single seed alone."""
    if x is None:
        return "-"
    mean = x.mean()
    if len(x) == 1:
        return number(mean)
    if len(x) < stats.FEWEST:
        return f"{number(mean)} ({', '.join(number(value, mean) for value in x)})"
    low, high = stats.mean_interval(x)
    return f"{number(mean)} [{number(low, mean)}, {number(high, mean)}]"


def difference_cell(x: np.ndarray | None, y: np.ndarray | None) -> str:
    """mean(y) - mean(x) with its interval, or with each seed's difference from mean(x)."""
    if x is None or y is None:
        return "-"
    mean, low, high = stats.difference(x, y)
    size = max(abs(np.mean(x)), abs(mean))
    if min(len(x), len(y)) >= stats.FEWEST:
        return f"{signed(mean, size)} [{signed(low, size)}, {signed(high, size)}]"
    if len(y) == 1:
        return signed(mean, size)
    return f"{signed(mean, size)} ({', '.join(signed(value - np.mean(x), size) for value in y)})"


def improvement_cell(olds: list[np.ndarray], news: list[np.ndarray]) -> str:
    """With an interval if seeds are not few; of each side those that all its environments have."""
    if not olds:
        return "-"
    fewest = [min(map(len, group)) for group in (olds, news)]
    old, new = (np.stack([x[:n] for x in g], axis=1) for g, n in zip((olds, news), fewest))
    if min(fewest) < stats.FEWEST:
        return f"{stats.improvement(new, old)[0]:.2f}"
    return cell_of(*stats.improvement(new, old))


def seeds_cell(counts: list[int], diverged: int) -> str:
    """How many seeds there are, from task to task, and how many runs ended before their time."""
    low, high = min(counts, default=0), max(counts, default=0)
    seeds = str(low) if low == high else f"{low} to {high}"
    return f"{seeds}, {diverged} diverged" if diverged else seeds


def ran_on(runs: pd.DataFrame) -> str:
    """The hardware and the commits of some runs; their files have the versions of packages."""
    return " ".join(
        f"{hardware}: commit {', '.join(group['commit'].unique())}."
        for hardware, group in runs.groupby("hardware")
    )


# -- returns of a folder --
def returns_table(folder: str, runs: pd.DataFrame) -> str:
    """One row for each environment and recipe; what is published stands where it is new."""
    rows = []
    for env, of_env in results.groups_of(runs, "env"):
        known = results.published(folder, env, of_env["total_timesteps"].iloc[0])
        known, above = known.sort_values("mean").to_dict("records")[-1:], None
        best = [f"{spread(row)} ({row['source']} {row['env_version']}".rstrip() for row in known]
        for i, (_, group) in enumerate(results.groups_of(of_env, "exp")):
            first, returns = group.iloc[0], group["final_return"].to_numpy()
            figures = results.peers(folder, first)
            theirs = "; ".join(map(spread, figures)) or "-"
            row = [env if i == 0 else "", ", ".join(filter(None, first[["label", "unfinished"]]))]
            row += [mean_cell(returns), number(np.median(returns))]
            row += [seeds_cell([len(group)], group["diverged"].sum())]
            row += [f"{(group['steps'] / group['seconds']).median():.0f}"]
            row += [theirs if theirs != above else "", f"{best[0]})" if best and i == 0 else ""]
            rows.append(row)
            above = theirs
    head = ["environment", "recipe", "mean [95% interval] or mean (each seed)", "median", "seeds"]
    head += ["steps/s", "CleanRL", "best published"]
    return table(head, rows, left=2)


def folder_section(folder: str) -> str:
    """The tables of a folder of results, what its runs ran on, and its figure."""
    runs = results.read_runs(folder)
    parts = [returns_table(folder, runs), ran_on(runs)]
    if (results.HERE / "figures" / f"{folder}.png").exists():
        parts.append(f"![Learning curves](benchmark/figures/{folder}.png)")
    return "\n\n".join(parts)


def summary_section(folder: str = "mujoco") -> str:
    """One row for each environment: the two recipes with curves, and what CleanRL has published."""
    runs, recipes = results.read_runs(folder), results.recipes_of(folder)
    returns = results.returns_of(folder)
    shown = recipes[recipes["colour"] != ""]
    rows = []
    for env, of_env in results.groups_of(runs, "env"):
        theirs = "; ".join(map(spread, results.peers(folder, of_env.iloc[0]))) or "-"
        rows.append([env, *(mean_cell(returns.get((exp, env))) for exp in shown.index), theirs])
    return f"{table(['environment', *shown['label'], 'CleanRL'], rows)}\n\n{text(SUMMARY_RULE)}"


# -- the front page --
def time_cell(runs: pd.DataFrame) -> str:
    """How long a run took, and on what: its cores, or its GPU."""
    minutes = runs["seconds"].median() / 60
    time = f"{minutes:.0f} minutes" if minutes < 90 else f"{minutes / 60:.1f} hours"
    time = "a minute" if time == "1 minutes" else time
    if runs["threads"].eq("1").all():
        return f"{time}, one core"
    parts = runs["hardware"].iloc[0].split("; then ")
    return f"{time}, {', then '.join(part.rsplit(', ', 1)[-1] for part in parts)}"


def front_section(name: str) -> str:
    """A table of front.csv: the scripts with a score of each, or results beside published ones."""
    front, rows = pd.read_csv(results.HERE / "front.csv", dtype=str, keep_default_na=False), []
    for _, row in front.query("table == @name").iterrows():
        runs = results.read_runs(row["folder"])
        runs = runs if runs.empty else runs.query("env == @row.env and exp == @row.experiment")
        script, about = f"[`{row['script']}`]({row['script']})", f"[more]({row['page']})"
        if runs.empty:
            missing = [script, row["words"], row["environments"], "not measured yet", "", "", about]
            rows += [missing] if name == "scripts" else []
            continue
        first = runs.iloc[0]
        steps = f"{round(first['total_timesteps'] / 1e6, 1):g}M"
        seeds = f"{len(runs)} seed{'s' if len(runs) > 1 else ''}"
        mean = number(runs["final_return"].mean())
        if name == "scripts":
            task = f"{row['env']} {row['flags']}".rstrip()
            training = f"{steps} steps, {time_cell(runs)}, {seeds}"
            rows.append([script, row["words"], row["environments"], task, mean, training, about])
            continue
        known = results.published(row["folder"], row["env"], first["total_timesteps"])
        known = known[known["source"].str.contains(row["published"])]
        same = known[known["env_id"] == row["env"]]  # or of another version
        known = (same if len(same) else known)["mean"]
        low, high = number(known.min()), number(known.max())
        theirs = f"{low if low == high else f'{low} to {high}'} ({row['by']})"
        command = f"`{row['script']} {row['flags']}`".replace(" `", "`")
        rows.append([row["env"], command, steps, mean, str(len(runs)), theirs, time_cell(runs)])
    if name == "scripts":
        head = ["script", "it adds", "environments", "for example", "score", "trained for", ""]
        return table(head, rows, left=7)
    head = ["environment", "script", "steps", "ours", "seeds", "published", "a run takes"]
    return table(head, rows, left=2)


# -- what is worth what --
def id_and_text(label: str) -> tuple[str, str]:
    """Of a label such as `C02 torch's initial weights`; some have no id."""
    detail, words = re.fullmatch(r"([A-Z]\d\d)? ?(.*)", label).groups()
    return detail or "", words


def environments_in(rows: pd.DataFrame) -> list[str]:
    """The environments of some rows of recipes.csv, each once."""
    return list(
        dict.fromkeys(e for _, row in rows.iterrows() for e in results.environments_of(row))
    )


def change_table(folder: str, rows: pd.DataFrame) -> str:
    """The first row's returns, and of all others the difference from them; of rows with runs."""
    returns, runs = results.returns_of(folder), results.read_runs(folder)
    baseline = rows["experiment"].iloc[0]
    envs = environments_in(rows)
    if "only" not in rows["environments"].iloc[0]:  # those that ENVS asked for come last
        known = environments_in(results.read_recipes().query("folder == @rows['folder'].iloc[0]"))
        envs += [env for exp, env in returns if exp == baseline and env not in known]
    cells, missing = [], []
    for _, row in rows.iterrows():
        exp, (detail, words) = row["experiment"], id_and_text(row["label"])
        old = [returns.get((baseline, env)) for env in envs]
        new = [returns.get((exp, env)) for env in envs]
        if all(x is None for x in new):
            missing.append(f"{detail} {words}".strip())
            continue
        diverged = runs[(runs["exp"] == exp) & runs["env"].isin(envs)]["diverged"].sum()
        seeds = [len(x) for x in new if x is not None]
        cell = [detail or f"`{exp}`", words, seeds_cell(seeds, diverged)]
        both = [(x, y) for x, y in zip(old, new) if x is not None and y is not None]
        if exp == baseline:
            cell += [*map(mean_cell, new), "-"]
        else:
            cell += [difference_cell(x, y) for x, y in zip(old, new)]
            cell += [improvement_cell(*map(list, zip(*both))) if both else "-"]
        cells.append(cell)
    head = ["id", "change", "seeds", *envs, "probability of improvement"]
    note = f"\n\nNo runs yet: {', '.join(missing)}." if missing else ""
    return (table(head, cells, left=2) if cells else "") + note


def changes_section(folder: str) -> str:
    """Details, a table for each script, or variants: what changes of one thing do."""
    name, parts = results.without_suffix(folder), []
    rows = results.read_recipes().query("folder == @name")
    for _, group in results.groups_of(rows, "recipe" if name == DETAILS else "suite"):
        script, steps = group["script"].iloc[0], int(group["steps"].iloc[0])
        parts += [f"`{script}`, {steps:,} steps:", change_table(folder, group)]
    rules = f"{text(DIFFERENCE_RULE)} {text(IMPROVEMENT_RULE)}"
    return "\n\n".join([*parts, rules, ran_on(results.read_runs(folder))])


def effects(recipe: str = "details") -> list[dict]:
    """The changes on all environments of their rows, as shares of the baseline's return."""
    recipes, returns = results.read_recipes(), results.returns_of(DETAILS)
    rows = recipes[(recipes["suite"] == "ablation") & (recipes["recipe"] == recipe)]
    baseline, found = rows["experiment"].iloc[0], []
    for _, row in rows.iloc[1:].iterrows():
        envs = results.environments_of(row)
        names = [((baseline, env), (row["experiment"], env)) for env in envs]
        pairs = [(returns[a], returns[b]) for a, b in names if a in returns and b in returns]
        if len(pairs) < len(envs) or min(len(x) for pair in pairs for x in pair) < 2:
            continue
        mean, low, high = stats.relative_difference(pairs)
        shares = [(np.mean(y) - np.mean(x)) / abs(np.mean(x)) for x, y in pairs]
        where = f" ({envs[0].split('-')[0]})" if len(envs) == 1 else ""
        detail, words = id_and_text(row["label"])
        about = {"detail": detail, "text": words + where, "shares": shares}
        found.append(about | {"mean": mean, "low": low, "high": high})
    return found


def worth_of(detail: str) -> list[dict]:
    """The changes of one detail, task by task: returns as published (seeds,) and changed."""
    returns, found = results.returns_of(DETAILS), []
    rows = results.read_recipes().query("folder == @DETAILS")
    for _, group in results.groups_of(rows, "recipe"):
        for _, row in group.iterrows():
            known, words = id_and_text(row["label"])
            for env in results.environments_of(row) if known == detail else []:
                old = returns.get((group["experiment"].iloc[0], env))
                new = returns.get((row["experiment"], env))
                if old is not None and new is not None:
                    about = {"text": words, "script": group["script"].iloc[0], "env": env}
                    found.append(about | {"old": old, "new": new})
    return found


def details_with_worth() -> list[str]:
    """The ids of details with a change that has results."""
    rows = results.read_recipes().query("folder == @DETAILS")
    ids = sorted({id_and_text(label)[0] for label in rows["label"]} - {""})
    return [detail for detail in ids if worth_of(detail)]


def worth_section(detail: str) -> str:
    """A row for each change of a detail on each task, and their figure."""
    rows = []
    for case in worth_of(detail):
        cells = [mean_cell(case["old"]), difference_cell(case["old"], case["new"])]
        seeds = seeds_cell([len(case["old"]), len(case["new"])], 0)
        rows.append([case["text"], f"`{case['script']}`", case["env"], seeds, *cells])
    head = ["change", "script", "task", "seeds", "return before", "difference"]
    figure = f"![intervals](benchmark/figures/details/{detail}.svg)"
    return f"{table(head, rows, left=3)}\n\n{figure}"


# -- PPO and TRPO --
def published_study() -> dict[tuple[str, str], dict]:
    """(experiment, environment) -> mean, low and high; theirs were v2 tasks."""
    rows = pd.read_csv(results.HERE / "published_study.csv").to_dict("records")
    return {(row["experiment"], f"{row['env']}-v4"): row for row in rows}


def study_environments() -> list[str]:
    return environments_in(results.read_recipes().query("folder == @STUDY"))


def index_of(means: dict[tuple[str, str], float], env: str, pairs: list[tuple]) -> str:
    """The largest difference of an environment."""
    if any((exp, env) not in means for pair in pairs for exp in pair):
        return "-"
    return f"{max(abs(means[a, env] - means[b, env]) for a, b in pairs):.0f}"


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


def study_section(folder: str = STUDY) -> str:
    """Presets, ours and as published, then the two indices."""
    returns, theirs = results.returns_of(folder, "return_of_iterations"), published_study()
    labels, envs = results.recipes_of(folder)["label"], study_environments()
    ours = {name: float(np.mean(x)) for name, x in returns.items()}
    known = {name: fact["mean"] for name, fact in theirs.items()}
    rows = []
    for exp, label in labels.items():
        facts = [theirs[exp, env] for env in envs]
        cells = [f"{fact['mean']} [{fact['low']}, {fact['high']}]" for fact in facts]
        rows.append([label, *(mean_cell(returns.get((exp, env))) for env in envs), *cells])
    for name, pairs in INDICES.items():
        rows.append([name, *(index_of(each, env, pairs) for each in (ours, known) for env in envs)])
    chance = [chance_cell([returns.get((exp, env)) for exp in labels.index]) for env in envs]
    rows.append(["either of them by chance", *chance, *("-" for _ in envs)])
    head = ["preset", *envs, *(f"{env.split('-')[0]}, published" for env in envs)]
    return "\n\n".join([table(head, rows), text(STUDY_RULE), ran_on(results.read_runs(folder))])


# -- broken runs --
def symptoms_row(group: pd.DataFrame, healthy: np.ndarray) -> list[str]:
    """Name and label of an experiment, its seeds, its returns and its diagnostics."""
    curves = [results.read_curve(path) for path in group["path"]]
    halves = [curve[curve["step"] <= curve["step"].iloc[-1] / 2] for curve in curves]
    means = pd.DataFrame([half[list(results.DIAGNOSTICS)].mean() for half in halves]).mean()
    exp, label = group[["exp", "label"]].iloc[0]
    row = [f"`{exp}`: {label}" if exp != label else exp]
    row += [seeds_cell([len(group)], group["diverged"].sum())]
    returns, played = group["final_return"].to_numpy(), group["eval_return"].astype(float).dropna()
    row += [mean_cell(returns), "-" if exp == "healthy" else difference_cell(healthy, returns)]
    row += [mean_cell(played.to_numpy() if len(played) else None)]
    return [*row, *(f"{mean:.2g}" for mean in means)]


def symptoms_table(runs: pd.DataFrame) -> str:
    """A row for each experiment on one environment."""
    healthy = runs[runs["exp"] == "healthy"]["final_return"].to_numpy()
    rows = [symptoms_row(group, healthy) for _, group in results.groups_of(runs, "exp")]
    head = [runs["env"].iloc[0], "seeds", "return", "difference", "evaluation"]
    return table([*head, *results.DIAGNOSTICS.values()], rows)


def mistake_section(exp: str, folder: str = BROKEN) -> str:
    """The lines that a patch takes out and puts in."""
    patch = (results.ROOT / results.recipes_of(folder)["script"][exp]).read_text()
    lines = [line for line in patch.partition("\n@@")[2].splitlines() if line[:1] in ("+", "-")]
    return "\n".join(["```diff", *lines, "```"])


def mistakes_section(folder: str = BROKEN) -> str:
    """A table for each environment, what the runs ran on, and the figure."""
    runs = results.read_runs(folder)
    parts = [symptoms_table(of_env) for _, of_env in results.groups_of(runs, "env")]
    figure = f"![Healthy and broken runs](benchmark/figures/{folder}.png)"
    return "\n\n".join([*parts, text(BROKEN_RULE), ran_on(runs), figure])
