"""How fast and how soon: results/speed, and the time to CleanRL's scores."""

import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import have
import numpy as np
import pandas as pd
from provenance import commit_of, labels, unknown_commits
from recipes import CLEAN, HERE, SCRIPTS, recipes_of
from results import RESULTS, groups_of, peers, read_curve, read_facts, read_runs
from stats import pooled
from tables import number, setups, table

MILLION = 1_000_000
FOLDER = CLEAN  # whose environments have scores of CleanRL
EXPERIMENTS = ["ppo_continuous_mujoco", "no_bootstrap", "strong", "chosen"]
PEER_SPEEDS = "cleanrl_*.csv"  # in turns with our default recipe
SPEED_RULE = """
Medians, ours / peer, with ranges in brackets; both ran in turns on the same machine. Steps/s are
over the window: from the first tenth of the run to its end. Seconds in all are those of the whole
process of that measurement, start-up and compilation included. Minutes of a whole run are the
training time of the runs in results/ with the same flags and 1M steps, on any processor,
compilation included, several at a time on a busy machine. Peak MB is that of the largest process.
Short windows have less than 30 seconds, few pairs are less than five, a busy machine had a load
above 0.5 before.
""".strip().replace("\n", " ")
TIME_RULE = """
Median over seeds of the seconds of training until the mean of the last 100 episodes (of all so far,
if fewer) first reaches the score, on a grid of 1% of the run. A run counts even if it ends below
the score again; one that never reaches it is slower than all others ("-": so is the median). The
score is the mean of CleanRL's published figures, weighted by seeds: HalfCheetah's are 1443 and
2906. In brackets: CleanRL's time for all its 1M steps divided by ours to the score, and how many
seeds get there. CleanRL may reach the score before its end; in steps per second we are 2.9 to 5.4
times as fast. Its 1M steps were not run here: their time is that of *default* times this ratio, of
three short pairs. Published seconds are of CleanRL's machine. Each of ours ran on one thread, two
at a time, compilation (mostly from a warm cache) included, imports not.
""".strip().replace("\n", " ")


@cache
def stored_args(path: Path, script: str) -> dict:
    return have.stored_args(path, have.fields_of(HERE.parent / script))


def same_work(asked: dict, args: dict) -> bool:
    """Do two runs compute the same, but for their seeds, and as fast? `...`: who knows."""
    speed = {"compile", "cuda"} & asked.keys()
    pairs = [(asked[name], args.get(name)) for name in asked.keys() - have.FREE - {"seed"} - speed]
    same = all(... in pair or pair[0] == pair[1] for pair in pairs)
    return same and all(asked[name] is args.get(name) for name in speed)


def whole_runs(facts: dict) -> str:
    """Median minutes of training of the runs in results/ with a speed file's flags, 1M steps."""
    script, *flags = shlex.split(facts["ours"])
    steps = ["--total-timesteps", str(MILLION), "--env-id", facts["env"]]
    if not (HERE.parent / script).exists():
        return "-"
    asked = have.parse([*flags, *steps], have.fields_of(HERE.parent / script))
    for name in ("compile", "cuda"):  # by default where there is a GPU
        if asked.get(name) is ...:
            asked[name] = "NVIDIA" in facts["hardware"]
    minutes = []
    for path in sorted(RESULTS.glob(f"*/{facts['env']}/*.csv")):
        if path.parts[-3] == "compare":
            continue
        run = read_facts(path)
        if "diverged" in run or run["script"] != Path(script).stem:
            continue
        if run["total_timesteps"] != str(MILLION):
            continue
        if same_work(asked, stored_args(path, script)):
            minutes.append(float(run["seconds"]) / 60)
    if len(minutes) < 2:
        return f"{minutes[0]:.1f} (one run)" if minutes else "-"
    return f"{np.median(minutes):.1f} ({min(minutes):.1f} to {max(minutes):.1f})"


def windows(facts: dict, data: pd.DataFrame, side: str) -> float:
    """Median seconds over which steps/s were measured; of older files nine tenths of the run."""
    if f"{side}_window_seconds" in data:
        return data[f"{side}_window_seconds"].median()
    return (0.9 * int(facts["steps"]) / data[f"{side}_steps_per_second"]).median()


def sides(data: pd.DataFrame) -> list[str]:
    """Ours and the peer, or ours alone."""
    return [side for side in ("ours", "peer") if f"{side}_steps_per_second" in data]


def conditions(facts: dict, data: pd.DataFrame) -> str:
    """What makes a measurement weak: short windows, few pairs, a busy machine."""
    found = []
    if min(windows(facts, data, side) for side in sides(data)) < 30:
        found.append("short windows")
    if len(data) < 5:
        found.append("few pairs")
    if float(facts["load_before"]) > 0.5:
        found.append("busy machine")
    trouble = labels([facts])
    return "; ".join(found + ([trouble] if trouble else []))


def speed_row(facts: dict, data: pd.DataFrame) -> list[str]:
    """Medians of ours / peer."""

    def medians(name: str) -> str:
        return " / ".join(f"{data[f'{side}_{name}'].median():.0f}" for side in sides(data))

    row = [facts["ours"], facts.get("peer", "-"), facts["env"], facts["threads"], str(len(data))]
    row += [" / ".join(f"{windows(facts, data, side):.0f}" for side in sides(data))]
    row += [facts["load_before"], "-"]
    if "peer" in facts:
        ratio = data["ours_steps_per_second"] / data["peer_steps_per_second"]
        row[-1] = f"{ratio.median():.2f} ({ratio.min():.2f} to {ratio.max():.2f})"
    row += [medians("steps_per_second"), medians("wall_seconds")]
    row += [whole_runs(facts), medians("peak_mb"), conditions(facts, data)]
    return [*row, facts["commit"]]


def script_first(row: list[str]) -> tuple:
    """Rows in the order of the scripts; one without flags comes before one with flags."""
    script, *flags = row[0].split()
    scripts = [f"{name}.py" for name in SCRIPTS]
    return scripts.index(script) if script in scripts else len(scripts), len(flags), row


def speed_section() -> str:
    """One row for each file of results/speed/."""
    rows, ran = [], []
    for path in sorted((RESULTS / "speed").glob("*.csv")):
        facts = read_facts(path)
        rows.append(speed_row(facts, read_curve(path)))
        ours = facts["ours"].split()[0]
        unknown = " (unknown)" if commit_of(facts) in unknown_commits() else ""
        commit = f"{ours} at {facts['commit']}{unknown}"
        ran += [(facts["hardware"], facts["ours_versions"], commit)]
        if "peer" in facts:
            peer = facts["peer"].split()[0]
            ran += [(facts["hardware"], facts["peer_versions"], peer)]
    head = ["ours", "peer", "environment", "threads", "pairs", "window s", "load before"]
    head += ["ratio of steps/s (range)", "steps/s", "seconds in all"]
    head += ["minutes of a whole 1M-step run of ours", "peak MB", "to keep in mind", "commit"]
    measured = {row[0].split()[0] for row in rows}
    missing = [f"`{name}.py`" for name in SCRIPTS if f"{name}.py" not in measured]
    text = f" Not measured yet: {', '.join(missing)}." if missing else ""
    body = table(head, sorted(rows, key=script_first), left=3)
    return "\n\n".join([body, SPEED_RULE + text, setups(sorted(set(ran)))])


@dataclass
class Race:
    """One recipe on one environment: seconds until each seed has CleanRL's score."""

    env: str
    exp: str
    label: str
    score: float
    figures: list[dict]  # of CleanRL, whose mean is the score
    seconds: np.ndarray  # of each seed, infinite where it never gets there
    returns: np.ndarray  # of each seed, at its end


def seconds_to(score: float, path: Path) -> float:
    """Seconds of training until the mean of the last 100 episodes first reaches the score."""
    curve = read_curve(path)
    reached = curve[curve["return"] >= score]
    return float(reached["seconds"].iloc[0]) if len(reached) else np.inf


def races() -> list[Race]:
    """All recipes with curves on the environments for which CleanRL has published a score."""
    found = []
    runs = read_runs(FOLDER)
    for (env, exp), group in groups_of(runs, "env", "exp"):
        figures = peers(FOLDER, group.iloc[0])
        if not figures or exp not in EXPERIMENTS:
            continue
        score = pooled(figures)[0]
        seconds = np.array([seconds_to(score, path) for path in group["path"]])
        returns = group["final_return"].to_numpy()
        found.append(Race(env, exp, group["label"].iloc[0], score, figures, seconds, returns))
    return found


def published_minutes() -> dict[str, dict]:
    """CleanRL's own time for its run of 1M steps, by environment."""
    rows = pd.read_csv(HERE / "published_times.csv")
    return {row["env"]: row for row in rows.to_dict("records")}


def window_seconds(path: Path) -> float:
    """Of a run's 1M steps, by its speed from the first tenth to the end."""
    curve = read_curve(path)
    seconds = np.interp([MILLION // 10, MILLION], curve["step"], curve["seconds"])
    return np.diff(seconds).item() / 0.9


def estimated_minutes() -> dict[str, float]:
    """Minutes of CleanRL's 1M steps had it run beside ours, by environment.

    Those of our default recipe, times the ratio of the two scripts' speeds in turns.
    """
    found, runs = {}, read_runs(FOLDER)
    for path in (RESULTS / "speed").glob(PEER_SPEEDS):
        env, pairs = read_facts(path)["env"], read_curve(path)
        ratio = (pairs["ours_steps_per_second"] / pairs["peer_steps_per_second"]).median()
        default = runs[(runs["env"] == env) & (runs["exp"] == EXPERIMENTS[0])]
        if len(default):
            found[env] = np.median([window_seconds(p) for p in default["path"]]) * ratio / 60
    return found


def race_row(race: Race) -> list[str]:
    """Recipe, median seconds, their range and how many seeds get there."""
    reached = race.seconds[np.isfinite(race.seconds)]
    median = np.median(race.seconds)
    middle = f"{median:.0f}" if np.isfinite(median) else "too few reach it"
    span = f"{reached.min():.0f} to {reached.max():.0f}" if len(reached) else "-"
    span = span if len(reached) != 1 else f"{reached[0]:.0f}, one seed"
    lost = int((np.isfinite(race.seconds) & (race.returns < race.score)).sum())
    seeds = f"{len(reached)} of {len(race.seconds)}" + (f", {lost} end below it" if lost else "")
    return [race.label, middle, span, seeds]


def race_cell(race: Race, whole: float | None) -> str:
    """Median seconds; how much sooner than `whole` minutes that is, and how many get there."""
    reached = f"{np.isfinite(race.seconds).sum()} of {len(race.seconds)}"
    median = np.median(race.seconds)
    if not np.isfinite(median):
        return f"- ({reached})"
    if not whole:
        return f"{median:.0f} ({reached})"
    sooner = 60 * whole / median
    digits = 0 if sooner >= 10 else 1
    return f"{median:.0f} ({sooner:.{digits}f}×, {reached})"


def time_section() -> str:
    """Seconds to CleanRL's published score: rows are environments, columns recipes."""
    cells, scores, found = {}, {}, races()
    theirs, ours = published_minutes(), estimated_minutes()
    for race in found:
        cells[race.env, race.label] = race_cell(race, ours.get(race.env))
        scores[race.env] = race.score
    known = list(recipes_of(FOLDER)["label"])
    names = sorted({race.label for race in found}, key=known.index)
    rows = []
    for env, score in scores.items():
        row = [env, number(score), *(cells.get((env, name), "-") for name in names)]
        row += [f"{ours[env] * 60:.0f}" if env in ours else "-"]
        rows.append([*row, f"{theirs[env]['minutes'] * 60:.0f}" if env in theirs else "-"])
    head = ["environment", "score", *names]
    head += ["CleanRL's 1M steps, estimated here", "CleanRL's 1M steps, as published"]
    figure = "![Time to CleanRL's score](benchmark/figures/time_to_score.png)"
    return "\n\n".join([table(head, rows), TIME_RULE, figure])


def time_seeds_section() -> str:
    """The same, a row for each recipe: the fastest and the slowest seed, and who falls again."""
    rows, above = [], None
    for race in races():
        first = [race.env, number(race.score)] if race.env != above else ["", ""]
        rows.append([*first, *race_row(race)])
        above = race.env
    head = ["environment", "score", "recipe", "seconds to it (median)", "fastest to slowest"]
    return table([*head, "seeds that reach it"], rows, left=3)
