"""The clean repetition of the search for a strong recipe: which candidates run in which round.

python benchmark/selection.py ROUND       the seeds of a round, from 1, then what runs with each of
                                          them: lines of SCRIPT ENV CANDIDATE FLAGS... for run.sh
python benchmark/selection.py known       the same for the results: the environments of the table
python benchmark/selection.py unseen      and those that the selection has not seen
python benchmark/selection.py newcomers   the variants that may become candidates

The candidates are in selection.csv, each the strong recipe with other flags, or with a patch.
docs/selection.md has the plan, which was fixed before the first run.
"""

import os
import sys

import have
import numpy as np
import pandas as pd
from ablation import VARIANTS, returns_of
from patches import script_of
from provenance import labels
from recipes import CLEAN, HERE, environments_of, read_recipes, recipes_of
from results import RESULTS, groups_of, read_facts, read_runs
from stats import FEWEST, difference, improvement_interval
from tables import cell_of, mean_cell, number, seeds_cell, setups, suite_row, table

FOLDER, RESULTS_FOLDER = "selection", CLEAN
FLAGS = ""  # for every run, beside a SUFFIX
AIMS = {"HalfCheetah-v4": 6000, "Hopper-v4": 2600, "Walker2d-v4": 3700, "Ant-v4": 3500}
STEPS = 1_000_000
STRONG = "--num-envs 64 --num-steps 32 --no-clip-vloss --init-log-std -0.5 --no-norm-adv"
STRONG += " --vf-coef 0.25 --scale-actions"  # when the plan was made
ROUNDS = [("103 104", 10), ("105 106", 4), ("107 108 109 110", 2)]  # seeds, candidates
RESULT_AIMS = AIMS | {"Humanoid-v4": 1030}
FLAG_OF = {"variants/staggered_resets.patch": "--staggered-resets"}  # the same to the bit: a test
BESIDE = ["strong", "ppo_continuous_mujoco", "no_bootstrap"]  # recipes of mujoco.sh
FINAL = {  # seeds and environments of the results
    "known": (
        "201 202 203 204 205 206 207 208 209 210",
        [*AIMS, "InvertedPendulum-v4", "Humanoid-v4"],
    ),
    "unseen": ("201 202 203 204 205", ["Swimmer-v4", "Reacher-v4", "Pusher-v5"]),
}


RESULTS_RULE = """
*chosen - strong* has Welch's 95% interval of the difference of the means. Probability: mean over
environments; equal returns count half, so an environment where two recipes always have 1000 gives
0.50. Its interval draws seeds for each environment, as if all seeds were independent; with five
seeds it is too narrow, and [1.00, 1.00] says only that no run of one was below one of the other.
""".strip().replace("\n", " ")


def candidates() -> pd.DataFrame:
    """selection.csv by candidate, with all flags."""
    rows = pd.read_csv(HERE / "selection.csv", dtype=str, keep_default_na=False)
    rows["flags"] = [words(options(STRONG) | options(flags)) for flags in rows["flags"]]
    return rows.set_index("candidate")


def options(flags: str) -> dict[str, str]:
    """Name -> value, or nothing, of each flag."""
    return dict(flag.partition(" ")[::2] for flag in f" {flags}".split(" --")[1:])


def words(named: dict[str, str]) -> str:
    return " ".join(f"--{name} {value}".strip() for name, value in named.items())


def seeds_until(number_of_rounds: int) -> list[str]:
    return [seed for seeds, _ in ROUNDS[:number_of_rounds] for seed in seeds.split()]


def shares(candidate: str, seeds: list[str]) -> np.ndarray:
    """(seeds, environments): final return / aim; not a number where there is no run.

    A run that is not of the plan, or of a patch that says something else by now, is an error.
    """
    row = candidates().loc[candidate]
    found = np.full((len(seeds), len(AIMS)), np.nan)
    for i, seed in enumerate(seeds):
        for k, (env, aim) in enumerate(AIMS.items()):
            path = RESULTS / FOLDER / env / f"{candidate}__{seed}.csv"
            if path.exists():
                run = (
                    f"--env-id {env} --seed {seed} --total-timesteps {STEPS} {row['flags']} {FLAGS}"
                )
                if other := have.differences(path, script_of(row["script"]), run.split()):
                    raise ValueError(f"{path} is no run of the plan: {', '.join(other)}")
                found[i, k] = float(read_facts(path)["final_return"]) / aim
    return found


def left(rounds: int) -> list[str]:
    """The candidates after so many rounds, the best first; an error names those that lack runs.

    A round keeps those with the highest mean share over all environments and all seeds so far.
    """
    if rounds == 0:
        return list(candidates().index)
    names, seeds = left(rounds - 1), seeds_until(rounds)
    keep = ROUNDS[rounds][1] if rounds < len(ROUNDS) else 1
    scores = {name: shares(name, seeds).mean() for name in names}
    missing = [name for name, score in scores.items() if np.isnan(score)]
    if missing:
        raise ValueError(f"round {rounds} is not complete, runs are missing: {', '.join(missing)}")
    return sorted(names, key=lambda name: -scores[name])[:keep]


def plan(round_: int) -> str:
    """What run.sh runs."""
    rows, names, lines = candidates(), left(round_ - 1), [ROUNDS[round_ - 1][0]]
    for env in AIMS:
        for name in names:
            row = rows.loc[name]
            lines.append(f"{row['script']} {env} {name} {row['flags']}")
    return "\n".join(lines)


def final_plan(part: str) -> str:
    """What run.sh runs when the recipe is chosen; it is named `chosen`, whatever it is."""
    (best,) = left(len(ROUNDS))
    chosen = candidates().loc[best]
    if flag := FLAG_OF.get(chosen["script"]):
        script = "ppo_continuous_mujoco.py"
        chosen = {"script": script, "flags": f"{chosen['flags']} {flag}"}
    recipes = read_recipes()
    recipes = recipes[recipes["suite"] == "mujoco"].set_index("experiment")
    rows = {"chosen": chosen} | {name: recipes.loc[name] for name in BESIDE}
    seeds, envs = FINAL[part]
    lines = [f"{r['script']} {env} {name} {r['flags']}" for env in envs for name, r in rows.items()]
    return "\n".join([seeds, *lines])


def newcomers() -> list[str]:
    """The patches that are better than the recipe by the rule of the plan, the best first."""
    recipes, returns = read_recipes(), returns_of(VARIANTS)
    rows = recipes[recipes["folder"] == VARIANTS]
    baseline, *patches = rows["experiment"]
    envs, found = environments_of(rows.iloc[0]), {}
    for exp in patches:
        groups = [[returns.get((name, env), [])[:5] for env in envs] for name in (exp, baseline)]
        if min(len(x) for group in groups for x in group) == 5:
            new, old = (np.stack(group, axis=1) for group in groups)
            value, low, _ = improvement_interval(new, old, level=0.99)
            found |= {exp: value} if low > 0.5 else {}
    return sorted(found, key=lambda exp: -found[exp])


def selection_section() -> str:
    """A row for each candidate: how many seeds have run everywhere, its returns, its score."""
    head = ["candidate", "what", "seeds", *AIMS, "mean share of the aims"]
    rows = []
    for name, row in candidates().iterrows():
        try:
            found = shares(name, seeds_until(len(ROUNDS)))
        except ValueError as error:
            sys.exit(f"error: {error}")
        found = found[~np.isnan(found).any(axis=1)]
        if len(found):
            cells = [mean_cell(x * aim) for x, aim in zip(found.T, AIMS.values())]
            rows.append([f"`{name}`", row["what"], str(len(found)), *cells, f"{found.mean():.3f}"])
    if not rows:
        return "No runs yet."
    try:
        end = f"Chosen: `{left(len(ROUNDS))[0]}`."
    except ValueError as error:  # runs are missing
        end = f"Nothing is chosen yet: {error}."
    runs = read_runs(FOLDER)
    commits = "commit " + runs["commit"]
    ran = setups(list(zip(runs["hardware"], runs["versions"], commits)))
    return f"{table(head, rows, left=2)}\n\n{end}\n\n{ran}"


def check_plan(runs: pd.DataFrame) -> None:
    """Stop where a file of the results is no run of the plan, or of another text of the script."""
    planned = {}
    for part in FINAL:
        seeds, *lines = final_plan(part).splitlines()
        for script, env, exp, *flags in map(str.split, lines):
            planned |= {(env, exp, int(seed)): (script, flags) for seed in seeds.split()}
    for run in runs.to_dict("records"):
        script, flags = planned.get((run["env"], run["exp"], run["seed"]), ("", []))
        asked = [
            "--env-id",
            run["env"],
            "--seed",
            str(run["seed"]),
            "--total-timesteps",
            str(STEPS),
        ]
        asked += [*flags, *FLAGS.split()]
        if not script or have.differences(run["path"], script_of(script), asked):
            sys.exit(f"error: {run['path']} is no run of the plan")
    if runs["sha256"].nunique() > 1:
        sys.exit(f"error: {RESULTS_FOLDER} has runs of several texts of the script")


def suite_rows() -> list[list[str]]:
    """Rows of the table of suites: how far the rounds and the results have come."""
    rounds = sum(len(seeds.split()) * candidates for seeds, candidates in ROUNDS) * len(AIMS)
    results = sum(len(seeds.split()) * len(envs) for seeds, envs in FINAL.values())
    results *= len(["chosen", *BESIDE])
    rows = []
    for folder, command, planned in [
        (FOLDER, "selection.sh", rounds),
        (RESULTS_FOLDER, "selection.sh results", results),
    ]:
        found = [read_facts(path) for path in RESULTS.glob(f"{folder}/*/*.csv")]
        rows.append(suite_row(command, planned, found))
    return rows


def gap_cell(new: np.ndarray, old: np.ndarray) -> str:
    """Difference of two means with Welch's interval; nothing for a few seeds."""
    if min(len(new), len(old)) < FEWEST:
        return "-"
    mean, low, high = difference(old, new)
    size = max(np.abs(new).mean(), np.abs(old).mean())
    signed = [("+" if x > 0 else "") + number(x, size) for x in (mean, low, high)]
    return "{} [{}, {}]".format(*signed)


def better(returns: dict[tuple[str, str], np.ndarray], other: str, part: str) -> str:
    """How likely the chosen recipe beats another one; nothing until all runs of a part are there.

    `returns` of (experiment, environment), one for each seed.
    """
    seeds, envs = FINAL[part]
    groups = [[returns.get((exp, env), []) for env in envs] for exp in ("chosen", other)]
    if {len(x) for group in groups for x in group} != {len(seeds.split())}:
        return "-"
    return cell_of(*improvement_interval(*(np.stack(group, axis=1) for group in groups)))


def results_section() -> str:
    """A row for each environment: the chosen recipe beside the others on the same seeds."""
    runs = read_runs(RESULTS_FOLDER)
    if runs.empty:
        return "No runs yet."
    check_plan(runs)
    returns = {key: g["final_return"].to_numpy() for key, g in groups_of(runs, "exp", "env")}
    exps = ["chosen", *BESIDE]
    rows = []
    for part, (_, envs) in FINAL.items():
        for env in envs:
            found = [returns.get((exp, env), np.array([])) for exp in exps]
            if any(map(len, found)):
                cells = [mean_cell(x) if len(x) else "-" for x in found]
                diverged = int(runs[runs["env"] == env]["diverged"].sum())
                seeds = seeds_cell([len(x) for x in found], diverged)
                aim = str(RESULT_AIMS.get(env, "-"))
                rows.append([env, seeds, *cells, gap_cell(*found[:2]), aim])
        text = f"probability that a run of *chosen* beats one of this recipe, {len(envs)} {part}"
        cells = [better(returns, exp, part) for exp in BESIDE]
        rows.append([f"{text} environments", "", "", *cells, "", ""])
    names = recipes_of("mujoco")["label"]
    head = ["environment", "seeds", "chosen", *(names[exp] for exp in BESIDE)]
    body = table([*head, "chosen - strong", "aim"], rows) + f"\n\n{RESULTS_RULE}"
    commits = "commit " + runs["commit"]
    ran = setups(list(zip(runs["hardware"], runs["versions"], commits)))
    trouble = labels(runs.to_dict("records"))
    return "\n\n".join(filter(None, [body, ran, trouble and f"Not traceable: {trouble}."]))


if __name__ == "__main__":
    what = sys.argv[1]
    FOLDER += os.environ.get("SUFFIX", "")
    FLAGS = os.environ.get("FLAGS", "")
    try:
        if what == "newcomers":
            print(", ".join(newcomers()) or "none")
        else:
            print(final_plan(what) if what in FINAL else plan(int(what)))
    except ValueError as error:
        sys.exit(str(error))
