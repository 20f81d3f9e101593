"""Markdown tables of the runs: returns, aggregates, ablations, suites, other tools' runs."""

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

import have
import numpy as np
import pandas as pd
from patches import script_of
from provenance import labels, unknown_commits
from recipes import (
    ABLATION,
    CLEAN,
    HERE,
    SCRIPTS,
    environments_of,
    flags_of_run,
    read_recipes,
    recipes_of,
)
from results import (
    RESULTS,
    check_budgets,
    groups_of,
    peers,
    published,
    read_curve,
    read_facts,
    read_runs,
)
from stats import (
    FEWEST,
    improvement_interval,
    interquartile_mean,
    mean_interval,
    normalized,
)

AGGREGATE_RULE = """
All environments with a figure of CleanRL and at least SEEDS seeds; of each the first SEEDS in
order of their numbers. Returns are divided by CleanRL's mean: that of all seeds behind all its
figures for the environment. The interval resamples seeds and draws CleanRL's means with their
standard error. *By the lowest* and *by the highest* divide by only one of its figures for each
environment.
""".strip().replace("\n", " ")


SUMMARY_RULE = """
Mean over seeds of the last 100 training episodes' mean return, with its 95% interval. CleanRL's:
mean ± standard deviation of three seeds, of two publications. An interval may pass a task's
maximum. Humanoid never reaches its time limit, so *default* and *published* are the same run there.
""".strip().replace("\n", " ")


def table(head: list[str], rows: list[list[str]], left: int = 1) -> str:
    """A Markdown table without columns that say nothing; the first `left` columns are text."""
    full = [i for i in range(len(head)) if i < left or {row[i] for row in rows} - {"", "-"}]
    head, rows = [head[i] for i in full], [[row[i] for i in full] for row in rows]
    align = ["---" if i < left else "---:" for i in full]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, align, *rows])


def number(x: float, size: float | None = None) -> str:
    """x without decimals if `size` (or x itself) is at least 100, else with one."""
    return f"{x:.0f}" if abs(x if size is None else size) >= 100 else f"{x:.1f}"


def spread(row: dict) -> str:
    """A published mean, with its deviation if there is one."""
    deviation = "" if np.isnan(row["std"]) else f" ± {number(row['std'], row['mean'])}"
    return number(row["mean"]) + deviation


def mean_cell(x: np.ndarray) -> str:
    """The mean with its interval, or with the seeds if they are few; a single seed alone."""
    mean = x.mean()
    if len(x) == 1:
        return number(mean)
    if len(x) < FEWEST:
        return f"{number(mean)} ({', '.join(number(value, mean) for value in x)})"
    low, high = mean_interval(x)
    return f"{number(mean)} [{number(low, mean)}, {number(high, mean)}]"


def seeds_cell(counts: list[int], diverged: int) -> str:
    """How many seeds there are, from task to task, and how many runs ended before their time."""
    low, high = min(counts, default=0), max(counts, default=0)
    text = str(low) if low == high else f"{low} to {high}"
    return f"{text}, {diverged} diverged" if diverged else text


def best_published(folder: str, env: str, steps: int) -> str:
    """The highest mean of any source, with its source and version."""
    rows = published(folder, env, steps)
    if rows.empty:
        return "-"
    best = rows.loc[rows["mean"].idxmax()]
    where = ", ".join(filter(None, (best["source"], best["env_version"])))
    return f"{spread(best)} ({where})"


def recipe_cells(folder: str, runs: pd.DataFrame) -> list[str]:
    """Label, mean, median, seeds, steps/s, CleanRL's figures, the difference to each, problems."""
    facts = runs.to_dict("records")
    returns = runs["final_return"].to_numpy()
    figures = peers(folder, facts[0])
    gaps = [(returns.mean() - row["mean"], row["mean"]) for row in figures]
    gaps = "; ".join(f"{'+' if gap > 0 else ''}{number(gap, mean)}" for gap, mean in gaps)
    seeds = seeds_cell([len(returns)], runs["diverged"].sum())
    label = ", ".join(filter(None, [facts[0]["label"], *runs["unfinished"]]))
    cells = [label, mean_cell(returns), number(np.median(returns)), seeds]
    cells += [f"{(runs['steps'] / runs['seconds']).median():.0f}"]
    return [*cells, "; ".join(map(spread, figures)) or "-", gaps or "-", labels(facts)]


def returns_table(folder: str, runs: pd.DataFrame) -> str:
    """One row for each environment and recipe; what is published stands where it is new."""
    rows = []
    for env, of_env in groups_of(runs, "env"):
        best = best_published(folder, env, of_env["total_timesteps"].iloc[0])
        first, above = env, None
        for exp, group in groups_of(of_env, "exp"):
            if exp.startswith(ABLATION):
                continue
            *ours, theirs, gaps, trouble = recipe_cells(folder, group)
            shown = theirs if theirs != above else ""
            rows.append([first, *ours, shown, gaps, best, trouble])
            first, best, above = "", "", theirs
    head = ["environment", "recipe", "mean [95% interval] or mean (each seed)", "median", "seeds"]
    head += ["steps/s", "CleanRL", "ours - CleanRL's", "best published", "not traceable"]
    return table(head, rows, left=2)


def equal_seeds(folder: str, runs: pd.DataFrame) -> int:
    """How many seeds each recipe has on each environment with a figure of CleanRL; at least 5."""
    groups = [group for _, group in groups_of(runs, "env", "exp")]
    counts = [len(group) for group in groups if peers(folder, group.iloc[0])]
    return max(FEWEST, min(counts, default=0))


def first_seeds(runs: pd.DataFrame, exp: str, n: int) -> dict[str, np.ndarray]:
    """The final returns of the first n seeds of each environment that has as many."""
    found = {}
    for env, group in groups_of(runs[runs["exp"] == exp], "env"):
        if len(group) >= n:
            found[env] = group.sort_values("seed")["final_return"].to_numpy()[:n]
    return found


def matrix(scores: dict[str, np.ndarray], envs: list[str]) -> np.ndarray:
    """(seeds, tasks), as rliable has them."""
    return np.stack([scores[env] for env in envs], axis=1)


def cell_of(value: float, low: float, high: float) -> str:
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def aggregate_row(folder: str, runs: pd.DataFrame, exp: str, first: str, n: int) -> list[str]:
    """n seeds over all environments with a figure of CleanRL; [label, how many] if they are few."""
    of_exp = runs[runs["exp"] == exp]
    facts = {env: group.iloc[0] for env, group in groups_of(of_exp, "env")}
    figures = {env: peers(folder, fact) for env, fact in facts.items()}
    scores = first_seeds(runs, exp, n)
    envs = [env for env in scores if figures[env]]
    label = of_exp["label"].iloc[0]
    if len(envs) < 3:
        return [label, str(len(envs))]
    returns = matrix(scores, envs)
    lowest = np.array([min(row["mean"] for row in figures[env]) for env in envs])
    highest = np.array([max(row["mean"] for row in figures[env]) for env in envs])
    row = [label, str(len(envs)), cell_of(*normalized(returns, [figures[env] for env in envs]))]
    row += [f"{interquartile_mean(returns / by):.2f}" for by in (lowest, highest)]
    if exp == first:
        return [*row, "-"]
    old = first_seeds(runs, first, n)
    shared = [env for env in envs if env in old]
    if not shared:
        return [*row, "-"]
    better = improvement_interval(matrix(scores, shared), matrix(old, shared))
    tasks = "" if shared == envs else f" ({len(shared)} environments)"
    return [*row, cell_of(*better) + tasks]


def aggregate_section(folder: str, runs: pd.DataFrame) -> str:
    """Recipes over all environments, what they are divided by, and which recipes are left out."""
    exps = [exp for exp in runs["exp"].unique() if exp in recipes_of(folder).index]
    exps = [exp for exp in exps if not exp.startswith(ABLATION)]
    shown = runs[runs["exp"].isin(exps)]
    n = equal_seeds(folder, shown)
    rows = [aggregate_row(folder, shown, exp, exps[0], n) for exp in exps]
    full = [row for row in rows if len(row) > 2]
    if len(full) < 2 or len(rows[0]) == 2:  # nothing to compare with
        return ""
    few = [f"*{row[0]}* has {row[1]}" for row in rows if len(row) == 2]
    text = f"{AGGREGATE_RULE.replace('SEEDS', str(n))} Improvement is on *{rows[0][0]}*."
    text += f" Too few environments for a row: {'; '.join(few)}." if few else ""
    head = ["recipe", "environments", "interquartile mean of return / CleanRL's"]
    head += ["by the lowest", "by the highest", "probability of improvement"]
    return f"{text}\n\n{table(head, full)}"


def ablation_table(runs: pd.DataFrame) -> str:
    """The strong recipe on the seeds of its ablations, and these; empty if there are none."""
    ablations = runs[runs["exp"].str.startswith(ABLATION)]
    if ablations.empty:
        return ""
    strong = runs[(runs["exp"] == "strong") & runs["seed"].isin(ablations["seed"])]
    envs = [env for env in runs["env"].unique() if env in set(ablations["env"])]
    rows = []
    for _, of_exp in pd.concat([strong, ablations]).groupby("exp"):
        row = [of_exp["label"].iloc[0]]
        for env in envs:
            returns = of_exp[of_exp["env"] == env]["final_return"].to_numpy()
            row.append(mean_cell(returns) if len(returns) else "-")
        rows.append(row)
    return table(["recipe", *envs], rows)


def summary_section(folder: str = CLEAN) -> str:
    """One row for each environment: every recipe's mean, and what CleanRL has published."""
    runs = read_runs(folder)
    check_budgets(runs, list(runs["exp"]), list(runs["env"]))
    runs = runs[~runs["exp"].str.startswith(ABLATION)]
    labels_of = dict(zip(runs["exp"], runs["label"]))
    exps = [exp for exp, _ in groups_of(runs, "exp")]
    rows = []
    for env, of_env in groups_of(runs, "env"):
        returns = {exp: group["final_return"].to_numpy() for exp, group in groups_of(of_env, "exp")}
        figures = peers(folder, of_env.iloc[0].to_dict())
        theirs = "; ".join(map(spread, figures)) or "-"
        rows.append([env, *(mean_cell(returns[e]) if e in returns else "-" for e in exps), theirs])
    body = table(["environment", *(labels_of[exp] for exp in exps), "CleanRL"], rows)
    return f"{body}\n\n{SUMMARY_RULE}"


def wins_section() -> str:
    """One row for each experiment of results/wins/: how its games of MicroRTS end, of each seed."""
    files = [(read_facts(path), read_curve(path)) for path in sorted(RESULTS.glob("wins/*.csv"))]
    games = defaultdict(list)  # of each seed
    for facts, data in files:
        games[facts["env"], facts["exp"]].append(data["outcome"])
    rows = []
    for (env, exp), seeds in games.items():
        row = [env, recipes_of("multidiscrete")["label"].get(exp, exp)]
        for kind in (1, 0, -1):
            row.append(", ".join(f"{100 * (seed == kind).mean():.0f}" for seed in seeds))
        rows.append([*row, str(len(seeds[0]))])
    head = ["environment", "recipe", "won, % (each seed)", "drawn, %", "lost, %", "games"]
    ran = [(f["hardware"], f["versions"], f"commit {f['commit']}") for f, _ in files]
    return f"{table(head, rows, left=2)}\n\n{setups(ran)}"


def original_of(facts: dict[str, str]) -> str:
    """What a file of results/equal compares with: CleanRL's `ppo.py` (fe8d8a03)."""
    original, commit = facts["original"].rsplit(", ", 1)
    if original.startswith("cleanrl/"):
        return f"CleanRL's `{Path(original).name}` ({commit})"
    if original.startswith("ppo_multidiscrete"):
        return f"the post's `{original}` ({commit})"
    if original.startswith("configs/"):
        return f"Implementation Matters' `{Path(original).stem.split('_', 1)[1]}` ({commit})"
    arch = json.loads(facts["args"])["arch"]
    phases = ", no auxiliary phase" if arch == "shared" else ""
    return f"OpenAI's `{original}` ({commit}), `arch={arch}`{phases}"


def equal_section() -> str:
    """A row for each original of results/equal/: how far apart the last weights are."""
    files = [(read_facts(path), read_curve(path)) for path in sorted(RESULTS.glob("equal/*.csv"))]
    files.sort(key=lambda file: [*SCRIPTS, file[0]["script"]].index(file[0]["script"]))
    groups = defaultdict(list)
    for facts, data in files:
        groups[facts["script"], original_of(facts), facts["iterations"]].append((facts, data))
    rows = []
    for (script, original, iterations), runs in groups.items():
        ours = Path(script).name if script.endswith(".patch") else f"{script}.py"
        far = pd.DataFrame([data.drop(columns="weights").max() for _, data in runs])
        ends = (far["from_first"].max(), far["from_theirs"].max(), far["from_changed"].min())
        envs = ", ".join(facts["env"].split(":")[-1] for facts, _ in runs)
        rows.append([f"`{ours}`", original, envs, iterations, *(f"{end:.1e}" for end in ends)])
    head = ["ours", "original", "environments", "iterations", "weights move by up to"]
    head += ["end from theirs by up to", "ours with lambda 0.94 differs by"]
    ran = [
        (facts["hardware"], facts["versions"], f"commit {facts['commit']}") for facts, _ in files
    ]
    return f"{table(head, rows, left=3)}\n\n{setups(ran)}"


def setups(runs: list[tuple[str, str, str]]) -> str:
    """What ran on what: many (hardware, versions, name), each pair of the first two once."""
    groups = defaultdict(list)
    for (hardware, versions, name), n in sorted(Counter(runs).items(), key=most_first):
        commit = name.removeprefix("commit ")
        unknown = " (unknown)" if commit.split("-")[0] in unknown_commits() else ""
        text = f"{n} at {name}{unknown}" if name.startswith("commit ") else name
        groups[hardware, versions].append(text)
    return " ".join(f"{'; '.join(key)}: {', '.join(names)}." for key, names in groups.items())


def most_first(item: tuple) -> tuple:
    return -item[1], item[0]


def folder_section(folder: str) -> str:
    """The tables of a folder of results, what its runs ran on, and its figure."""
    runs = read_runs(folder)
    check_budgets(runs, list(runs["exp"]), list(runs["env"]))
    parts = [returns_table(folder, runs), aggregate_section(folder, runs)]
    if ablation := ablation_table(runs):
        parts += ["The strong recipe, and with one of its departures undone, same seeds:", ablation]
    commits = "commit " + runs["commit"]
    parts.append(setups(list(zip(runs["hardware"], runs["versions"], commits))))
    if (HERE / "figures" / f"{folder}.png").exists():
        parts.append(f"![Learning curves](benchmark/figures/{folder}.png)")
    return "\n\n".join(filter(None, parts))


def start_section() -> str:
    """The run of start.sh in a sentence."""
    run = read_runs("start").iloc[0]
    steps = read_curve(run["path"])["step"].iloc[-1]
    text = f"{run['env']} with the flags of the Quick start, one seed: a return of "
    text += f"{number(run['final_return'])} (mean of the last 100 training episodes) after "
    text += f"{steps:,} steps and {run['seconds']:.0f} seconds of training on one thread "
    text += f"({run['hardware']})."
    if trouble := labels([run.to_dict()]):
        text += f" Not traceable: {trouble}."
    return text


def result_of(recipe: pd.Series, env: str, seed: str) -> dict | None:
    """The facts of a run that the suite would skip; None if it would train it."""
    path = RESULTS / recipe["folder"] / env / f"{recipe['experiment']}__{seed}.csv"
    flags = flags_of_run(recipe, env, seed)
    if not path.exists() or have.differences(path, script_of(recipe["script"]), flags):
        return None
    return read_facts(path)


def suite_row(command: str, planned: int, found: list[dict]) -> list[str]:
    """How many of the planned runs have results, and how long these took, from their facts."""
    row = [f"`bash benchmark/{command}`", f"{len(found)} of {planned}"]
    if found:
        done = pd.DataFrame(found)
        seconds = done["seconds"].astype(float)
        steps = sorted({f"{int(steps):,}" for steps in done["total_timesteps"]})
        row += ["; ".join(steps), f"{seconds.median() / 60:.1f}", f"{seconds.sum() / 3600:.1f}"]
        row += ["; ".join(sorted(set(done["hardware"])))]
    return row + ["-"] * (6 - len(row))


def suites_section(more: list[list[str]]) -> str:
    """One row for each command: which of its runs have results, and how long they took.

    `more` rows come after those of recipes.csv.
    """
    rows = []
    for (suite, recipe), group in groups_of(read_recipes(), "suite", "recipe"):
        found = []
        for _, row in group.iterrows():
            for env in environments_of(row):
                found += [result_of(row, env, seed) for seed in row["seeds"].split()]
        done = [facts for facts in found if facts]
        rows.append(suite_row(f"{suite}.sh {recipe}".strip(), len(found), done))
    head = ["command", "runs with results", "steps of each", "minutes of each (median)"]
    return table([*head, "hours of these", "hardware"], rows + more)


def tensorboard(folder: Path) -> str:
    """Table of the runs of any tool that logs CleanRL's tags, by our own rule.

    Of several runs of one seed the newest counts.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    last = {}
    for run_dir in sorted({path.parent for path in folder.rglob("*tfevents*")}):
        events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
        logged = "charts/episodic_return" in events.Tags()["scalars"]
        if not logged or run_dir.name.count("__") < 3:
            why = "no charts/episodic_return, or not named env__exp__seed__time"
            print(f"skipped {run_dir}: {why}", file=sys.stderr)
            continue
        env, exp, seed, at = run_dir.name.rsplit("__", 3)
        values = [event.value for event in events.Scalars("charts/episodic_return")]
        runs = last.setdefault((env, exp), {}).setdefault(seed, [])
        runs.append((at, np.mean(values[-100:])))
    rows = []
    for name, seeds in sorted(last.items()):
        returns = [max(runs)[1] for runs in seeds.values()]
        rows.append([*name, str(len(returns)), mean_cell(np.array(returns))])
    if not rows:
        sys.exit(f"error: {folder} holds no run with charts/episodic_return")
    head = ["environment", "experiment", "runs", "mean [95% interval] or mean (each seed)"]
    return table(head, rows, left=2)
