"""results/ and published.csv -> Markdown tables, learning curves, sections of both README.md.

It also makes the table of flags from the scripts, and keeps the line numbers in README.md's table
of details: `| C05 | ... [script.py:12](script.py#L12) ...`.

python benchmark/report.py                      print the tables
python benchmark/report.py --write              draw figures/ and put each table between its markers
python benchmark/report.py --check              exit with 1 if a README.md holds other tables
python benchmark/report.py --tensorboard DIR    one row for each environment and experiment of the
                                                runs in DIR, of any tool that names them
                                                env__exp__seed__time and logs CleanRL's tags
"""

import argparse
import ast
import csv
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
READMES = [HERE.parent / "README.md", HERE / "README.md"]
PEER = (
    "CleanRL docs"  # the published source that stands beside every result; its first row is drawn
)
RECIPES = {  # experiment: name and colour of its curve; the others get a table, but no curve
    "ppo": ("published recipe (default)", "#1f77b4"),
    "ppo_continuous_mujoco": ("published recipe (default)", "#1f77b4"),
    "no_bootstrap": ("published recipe, time limits as ends", "#8c8c8c"),
    "strong": ("strong recipe", "#d62728"),
    "ppo_atari": ("published recipe (default)", "#1f77b4"),
    "ppo_atari_1M": ("published recipe over 1M steps", "#1f77b4"),
    "bf16": ("published recipe, bfloat16", "#d62728"),
    "fast": ('"Pong in 5 minutes"', "#2ca02c"),
    "memory": ("LSTM, velocities hidden", "#d62728"),
    "no_memory": ("the same, forgetting after every step", "#8c8c8c"),
    "lstm_1M": ("LSTM, one frame", "#d62728"),
    "four_frames_1M": ("no memory, four frames (ppo_atari.py)", "#1f77b4"),
    "ppo_lstm": ("LSTM, one frame (default)", "#d62728"),
    "ppo_multidiscrete": ("published recipe with action masks (default)", "#1f77b4"),
    "no_mask": ("without action masks", "#8c8c8c"),
    "classic": ("recipe for classic control", "#2ca02c"),
    "lunar": ("recipe for LunarLander", "#2ca02c"),
    "discretized": ("11 choices for each component", "#9467bd"),
    "ppo_procgen": ("PPO (default)", "#1f77b4"),
    "ppg_procgen": ("PPG (default)", "#d62728"),
    "ppg_bf16": ("PPG, auxiliary phase in bfloat16", "#2ca02c"),
    "openai": ("PPG as OpenAI runs it", "#9467bd"),
    "start": ("strong recipe, one seed", "#d62728"),
    "ppo_short": ("PPO", "#1f77b4"),
    "ppg_short": ("PPG, --n-iteration 8 --bf16", "#d62728"),
}
SCRIPTS = ["ppo", "ppo_continuous_mujoco", "ppo_atari", "ppo_lstm", "ppo_multidiscrete"]
SCRIPTS += ["ppo_procgen", "ppg_procgen"]  # in the order of the README
SUITES = {  # what each of benchmark/*.sh knows to run
    "start": [""],
    "classic": ["published", "lunar"],
    "mujoco": ["faithful", "strong", "ablation"],
    "atari": ["published", "bf16", "1M", "fast"],
    "lstm": ["memory", "pong", "games"],
    "multidiscrete": ["published", "no_mask", "classic", "lunar", "discretized"],
    "procgen": ["ppo", "ppg", "bf16", "openai", "short_ppo", "short_ppg"],
}
ABLATION = "strong_no_"  # how the names of the strong recipe's ablations begin
STUDENT_T = [
    12.7062,
    4.3027,
    3.1824,
    2.7764,
    2.5706,
    2.4469,
    2.3646,
    2.3060,
]  # 97.5% quantile, 1 to 8 degrees


def interval(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95% interval of the mean over axis 0 (seeds): Student's t, from ten on by bootstrap."""
    n = len(x)
    if n == 1:
        return x[0] + np.nan, x[0] + np.nan
    if n < 10:
        half = STUDENT_T[n - 2] * x.std(axis=0, ddof=1) / n**0.5
        return x.mean(axis=0) - half, x.mean(axis=0) + half
    weights = (
        np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=10_000) / n
    )  # (resamples, seeds)
    low, high = np.quantile(weights @ x, [0.025, 0.975], axis=0)
    return low, high


def read_csv(path: Path) -> tuple[dict, dict]:
    """The `# name: value` comments of a results file, and its columns as arrays."""
    lines = path.read_text().splitlines()
    facts = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    rows = list(csv.DictReader(line for line in lines if not line.startswith("# ")))
    return facts, {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}


def read_suite(suite: str) -> dict:
    """{env: {exp: [(facts, curve) of each seed]}}, in the order of published.csv and RECIPES."""
    results = defaultdict(lambda: defaultdict(list))
    for path in sorted((HERE / "results" / suite).glob("*/*.csv")):
        facts, curve = read_csv(path)
        runs = results[facts["env"]][facts["exp"]]
        runs.append((facts, curve))
        if facts["total_timesteps"] != runs[0][0]["total_timesteps"]:
            sys.exit(f"error: {path} has other total_timesteps than {facts['exp']}'s other seeds")
    known_envs = [row["env"] for row in published(suite)]

    def place(name: str, known: list) -> tuple:
        return known.index(name) if name in known else len(known), name

    envs = sorted(results, key=lambda env: place(env.rsplit("-", 1)[0], known_envs))
    return {
        e: {x: results[e][x] for x in sorted(results[e], key=lambda x: place(x, list(RECIPES)))}
        for e in envs
    }


def published(suite: str, env: str = "", steps: str = "") -> list[dict]:
    """Rows of published.csv: of a suite, or of one environment (of any version) at one budget."""
    with open(HERE / "published.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["task_suite"] == suite]
    return [
        row
        for row in rows
        if not env or (row["env"] == env.rsplit("-", 1)[0] and row["steps"] == steps)
    ]


def peers(suite: str, facts: dict) -> list[dict]:
    """PEER's rows for exactly this version of a run's environment that name no other script."""
    rows = published(suite, facts["env"], facts["total_timesteps"])
    rows = [
        row for row in rows if row["source"].startswith(PEER) and facts["env"] == version_of(row)
    ]
    return [row for row in rows if not {*SCRIPTS} - {facts["script"]} & {*row["source"].split()}]


def version_of(row: dict) -> str:
    """The environment of a published row, such as Hopper-v4; those of Procgen have no version."""
    return "-".join(filter(None, (row["env"], row["env_version"])))


def number(x: float | str, size: float | str | None = None) -> str:
    """x without decimals if `size` (or x itself) is at least 100, else with one."""
    return (
        f"{float(x):.0f}" if abs(float(x if size is None else size)) >= 100 else f"{float(x):.1f}"
    )


def figure_of(row: dict) -> str:
    return number(row["mean"]) + (f" ± {number(row['std'], row['mean'])}" if row["std"] else "")


def final_returns(runs: list) -> np.ndarray:
    return np.array([float(facts["final_return"]) for facts, _ in runs])


def mean_and_interval(x: np.ndarray, fewest: int = 3) -> str:
    """The mean and, from `fewest` seeds on, its interval."""
    mean, (low, high) = x.mean(), interval(x)
    return number(mean) + (
        f" [{number(low, mean)}, {number(high, mean)}]" if len(x) >= fewest else ""
    )


def table(head: list[str], rows: list[list[str]], left: int = 1) -> str:
    """A Markdown table without columns that say nothing; the first `left` columns are text."""
    full = [i for i in range(len(head)) if i < left or {row[i] for row in rows} - {"", "-"}]
    head, rows = [head[i] for i in full], [[row[i] for i in full] for row in rows]
    align = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, align, *rows])


def returns_table(suite: str, results: dict) -> str:
    """One row for each environment and recipe; what is published stands in its first row."""
    rows = []
    for env, recipes in results.items():
        steps = next(iter(recipes.values()))[0][0]["total_timesteps"]
        best = max(published(suite, env, steps), key=lambda row: float(row["mean"]), default=None)
        where = ", ".join(filter(None, (best["source"], best["env_version"]))) if best else ""
        first, above = [env, f"{figure_of(best)} ({where})" if best else "-"], None
        for exp, runs in recipes.items():
            if not exp.startswith(ABLATION):
                name = RECIPES[exp][0] if exp in RECIPES else exp
                speed = np.median(
                    [float(facts["steps"]) / float(facts["seconds"]) for facts, _ in runs]
                )
                median = number(np.median(final_returns(runs)))
                ours = [
                    name,
                    mean_and_interval(final_returns(runs)),
                    median,
                    str(len(runs)),
                    f"{speed:.0f}",
                ]
                peer = peers(suite, runs[0][0])
                more = (
                    f"{final_returns(runs).mean() - float(peer[0]['mean']):+.0f}" if peer else "-"
                )
                theirs = "; ".join(map(figure_of, peer)) or "-"
                rows.append([first[0], *ours, theirs if theirs != above else "", more, first[1]])
                first, above = ["", ""], theirs
    head = ["environment", "recipe", "mean [95% interval]", "median", "seeds", "steps/s"]
    head += ["CleanRL", "ours - CleanRL's", "best published"]
    return table(head, rows, left=2)


def summary_table(suite: str, results: dict) -> str:
    """Recipes over all environments with a figure of PEER, as in rliable (arXiv:2108.13264).

    Interquartile mean of return / PEER's return over environments and seeds, and the probability
    that a run is better than one of the first recipe, mean over environments; intervals by
    bootstrap of the seeds of each environment.
    """
    rng, rows, first = np.random.default_rng(0), [], None
    for exp in dict.fromkeys(
        exp for recipes in results.values() for exp in recipes if exp in RECIPES
    ):
        scores = {}
        for env, recipes in results.items():
            peer = peers(suite, recipes[exp][0][0]) if exp in recipes else []
            if peer:
                scores[env] = final_returns(recipes[exp]) / float(peer[0]["mean"])
        if len(scores) < 3 or min(map(len, scores.values())) < 2:
            continue
        first = first or scores
        draws = [
            [{e: rng.choice(x, len(x)) for e, x in s.items()} for s in (first, scores)]
            for _ in range(2000)
        ]
        middle = [interquartile_mean(new) for _, new in [(first, scores), *draws]]
        better = [improvement(*pair) for pair in [(first, scores), *draws]]
        cells = []
        for value, *samples in (middle, better):
            low, high = np.quantile(samples, [0.025, 0.975])
            cells.append(f"{value:.2f} [{low:.2f}, {high:.2f}]")
        rows.append([RECIPES[exp][0], str(len(scores)), cells[0], cells[1] if rows else "-"])
    head = [
        "recipe",
        "environments",
        "interquartile mean of return / CleanRL's",
        "probability of improvement",
    ]
    return table(head, rows) if len(rows) > 1 else ""


def interquartile_mean(scores: dict[str, np.ndarray]) -> float:
    """Mean of the middle half of all scores."""
    x = np.sort(np.concatenate(list(scores.values())))
    cut = len(x) // 4
    return x[cut : len(x) - cut].mean()


def improvement(old: dict[str, np.ndarray], new: dict[str, np.ndarray]) -> float:
    """Mean over shared environments of P(score of `new` > score of `old`); ties count half."""
    pairs = [(old[env][:, None], new[env]) for env in new if env in old]
    return float(np.mean([np.mean((y > x) + 0.5 * (y == x)) for x, y in pairs]))


def ablation_table(results: dict) -> str:
    """The strong recipe and its ablations, (number of seeds); empty if there are none."""
    results = {
        env: recipes
        for env, recipes in results.items()
        if any(exp.startswith(ABLATION) for exp in recipes)
    }
    exps = sorted(
        {exp for recipes in results.values() for exp in recipes if exp.startswith(ABLATION)}
    )

    def cell(runs: list) -> str:
        return f"{mean_and_interval(final_returns(runs))} ({len(runs)})" if runs else "-"

    rows = [
        [exp, *(cell(recipes.get(exp, [])) for recipes in results.values())]
        for exp in ["strong", *exps]
    ]
    return table(["recipe (seeds)", *results], rows) if exps else ""


def suite_section(suite: str) -> str:
    """The tables of a suite and what its runs ran on."""
    results = read_suite(suite)
    parts = [returns_table(suite, results)]
    summary = summary_table(suite, results)
    if summary:
        parts += ["All environments together; improvement is on the first recipe:", summary]
    ablation = ablation_table(results)
    if ablation:
        parts += ["The strong recipe, and with one of its departures taken back:", ablation]
    facts = [
        facts for recipes in results.values() for runs in recipes.values() for facts, _ in runs
    ]
    parts.append(setups((f["hardware"], f["versions"], f"commit {f['commit']}") for f in facts))
    if (HERE / "figures" / f"{suite}.png").exists():
        parts.append(f"![Learning curves](benchmark/figures/{suite}.png)")
    return "\n\n".join(parts)


def setups(runs) -> str:
    """What ran on what: many (hardware, versions, name), each pair of the first two once."""
    counts = Counter(runs)
    groups = defaultdict(list)
    for (hardware, versions, name), n in sorted(
        counts.items(), key=lambda item: (-item[1], item[0])
    ):
        groups[hardware, versions].append(f"{n} at {name}" if name.startswith("commit ") else name)
    return " ".join(f"{'; '.join(key)}: {', '.join(names)}." for key, names in groups.items())


def start_section() -> str:
    """The run of start.sh in a sentence."""
    [[(facts, curve), *_], *_] = [
        runs for recipes in read_suite("start").values() for runs in recipes.values()
    ]
    final, steps = number(facts["final_return"]), f"{float(curve['step'][-1]):,.0f} steps"
    text = f"A return of {final} (mean of the last 100 training episodes) after {steps} and "
    text += f"{float(facts['seconds']):.0f} seconds of training on one thread"
    return text + f" ({facts['hardware']}; {facts['versions']}; commit {facts['commit']})."


def suites_section() -> str:
    """One row for each command: which of its runs have results, and how long they took."""
    rows = []
    clean = os.environ.keys() - {"ENVS", "SEEDS", "STEPS", "TASK", "FLAGS"}
    clean = {name: os.environ[name] for name in clean} | {"PYTHON": sys.executable}
    for suite, recipes in SUITES.items():
        for recipe in recipes:
            command = ["bash", f"benchmark/{suite}.sh", *recipe.split()]
            how = {"cwd": HERE.parent, "env": clean, "stdout": subprocess.PIPE, "text": True}
            lines = subprocess.run([*command, "--dry-run"], **how).stdout.splitlines()
            have = [line.removeprefix("have ") for line in lines if line.startswith("have ")]
            done = [read_csv(HERE.parent / path)[0] for path in have]
            row = [f"`{' '.join(command)}`", f"{len(done)} of {len(lines)}"]
            if done:
                seconds = [float(facts["seconds"]) for facts in done]
                steps = "; ".join(sorted({f"{int(facts['total_timesteps']):,}" for facts in done}))
                row += [steps, f"{np.median(seconds) / 60:.1f}", f"{sum(seconds) / 3600:.1f}"]
                row += ["; ".join(sorted({facts["hardware"] for facts in done}))]
            rows.append(row + ["-"] * (6 - len(row)))
    head = ["command", "runs with results", "steps of each", "minutes of each"]
    return table([*head, "hours of these", "hardware"], rows)


def speed_section() -> str:
    """One row for each file of results/speed/, in the order of SCRIPTS: medians."""
    rows, ran = [], []
    for path in sorted((HERE / "results" / "speed").glob("*.csv")):
        facts, data = read_csv(path)
        median = {name: f"{np.median(column):.0f}" for name, column in data.items()}
        ratio = data["ours_steps_per_second"] / data["peer_steps_per_second"]
        row = [facts["ours"], facts["peer"], facts["env"], facts["threads"], str(len(ratio))]
        row += [f"{np.median(ratio):.2f} ({ratio.min():.2f} to {ratio.max():.2f})"]
        for name in ("steps_per_second", "wall_seconds", "peak_mb"):
            row.append(f"{median[f'ours_{name}']} / {median[f'peer_{name}']}")
        rows.append(row)
        ours, peer = facts["ours"].split()[0], facts["peer"].split()[0]
        ran += [(facts["hardware"], facts["ours_versions"], f"{ours} at {facts['commit']}")]
        ran += [(facts["hardware"], facts["peer_versions"], peer)]
    scripts = [f"{name}.py" for name in SCRIPTS]
    measured = {row[0].split()[0] for row in rows}

    def place(row: list[str]) -> tuple:  # a script without flags comes before one with flags
        script, *flags = row[0].split()
        return scripts.index(script) if script in scripts else len(scripts), len(flags), row

    head = ["ours", "peer", "environment", "threads", "pairs", "ratio of steps/s (range)"]
    head += ["steps/s", "seconds in all", "peak MB"]
    rule = (
        "Medians, ours / peer; both ran in turns on the same machine. Steps/s from the first tenth "
        "of the run to its end; seconds in all: the whole process with start-up and compilation."
    )
    missing = ", ".join(f"`{script}`" for script in scripts if script not in measured)
    rule += f" Not measured yet: {missing}." if missing else ""
    return "\n\n".join(
        [table(head, sorted(rows, key=place), left=3), rule, setups(sorted(set(ran)))]
    )


def updates_section() -> str:
    """One row for each file of results/updates/: medians over the repetitions."""
    rows, ran = [], []
    for path in sorted((HERE / "results" / "updates").glob("*.csv")):
        facts, data = read_csv(path)
        ratio = data["peer_ms"] / data["ours_ms"]
        times = [f"{np.median(data[name]):.1f}" for name in ("ours_ms", "peer_ms")]
        spread = f"{np.median(ratio):.1f} ({ratio.min():.1f} to {ratio.max():.1f})"
        rows.append([facts["update"], facts["device"], facts["threads"], *times, spread])
        ran.append((facts["hardware"], facts["versions"], f"commit {facts['commit']}"))
    head = ["update of ppo_lstm.py", "device", "threads", "ms", "CleanRL's ms", "ratio (range)"]
    return "\n\n".join([table(head, rows, left=2), setups(ran)])


def tensorboard(folder: Path) -> str:
    """Markdown table of the runs of any tool that logs CleanRL's tags, by our own rule."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    returns = defaultdict(list)
    for run_dir in sorted({path.parent for path in folder.rglob("*tfevents*")}):
        events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
        if "charts/episodic_return" not in events.Tags()["scalars"] or run_dir.name.count("__") < 3:
            print(
                f"skipped {run_dir}: no charts/episodic_return, or not named env__exp__seed__time",
                file=sys.stderr,
            )
            continue
        env, exp, *_ = run_dir.name.rsplit("__", 3)
        values = [event.value for event in events.Scalars("charts/episodic_return")]
        returns[env, exp].append(np.mean(values[-100:]))
    rows = [
        [*name, str(len(x)), mean_and_interval(np.array(x), 2)]
        for name, x in sorted(returns.items())
    ]
    if not rows:
        sys.exit(f"error: {folder} holds no run with charts/episodic_return")
    return table(["environment", "experiment", "runs", "mean [95% interval]"], rows, left=2)


def draw(suite: str) -> None:
    """figures/<suite>.png: mean and 95% interval over seeds, one panel for each environment.

    A panel is as high as the returns of all seeds: a wider interval, of few seeds, is cut.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = HERE / "figures" / f"{suite}.png"
    results = {
        env: recipes
        for env, recipes in read_suite(suite).items()
        if RECIPES.keys() & recipes.keys()
    }
    if not results:
        return figure.unlink(missing_ok=True)
    x, unit, label = "step", 1e6, "environment steps (millions)"
    if suite == "start":
        x, unit, label = "seconds", 60, "minutes of training on one thread"
    columns = min(3, len(results))
    rows, width = -(-len(results) // columns), 3 + 3 * columns
    fig, axes = plt.subplots(
        rows, columns, figsize=(width, 3.3 * rows + 0.6), dpi=100, squeeze=False
    )
    handles = {}
    for ax in axes.flat[len(results) :]:
        ax.axis("off")
    for ax, (env, recipes) in zip(axes.flat, results.items()):
        seen = []  # lowest and highest values
        for exp, (name, colour) in RECIPES.items():
            if exp not in recipes:
                continue
            curves = [curve for _, curve in recipes[exp]]
            grid = np.linspace(max(c[x][0] for c in curves), min(c[x][-1] for c in curves), 100)
            y = np.stack([np.interp(grid, c[x], c["return"]) for c in curves])  # (seeds, points)
            (handles[name],) = ax.plot(grid / unit, y.mean(axis=0), color=colour, linewidth=1.8)
            ax.fill_between(grid / unit, *interval(y), color=colour, alpha=0.2, linewidth=0)
            seen += [y.min(), y.max()]
        beside = {
            row["source"]: row for runs in recipes.values() for row in peers(suite, runs[0][0])[:1]
        }
        for (source, row), style in zip(beside.items(), ("--", ":")):
            line = ax.axhline(float(row["mean"]), color="black", linestyle=style, linewidth=1.2)
            handles[f"final return, {source}"] = line
            seen.append(float(row["mean"]))
        margin = 0.05 * (max(seen) - min(seen))
        ax.set_ylim(min(seen) - margin, max(seen) + margin)
        ax.set_title(env, fontsize=12 if len(env) < 30 else 10)
        ax.set_xlim(left=0)
        ax.grid(alpha=0.3)
    fig.supxlabel(label, fontsize=12)
    fig.supylabel("return (mean of 100 episodes)", fontsize=12)
    legend = {
        "loc": "upper center",
        "ncols": min(len(handles), columns),
        "fontsize": 11,
        "frameon": False,
    }
    fig.legend(handles.values(), handles, **legend)
    legend_rows = -(-len(handles) // legend["ncols"])
    fig.tight_layout(rect=(0, 0, 1, 1 - (0.1 + 0.25 * legend_rows) / fig.get_figheight()))
    figure.parent.mkdir(exist_ok=True)
    fig.savefig(figure, metadata={"Software": None})
    plt.close(fig)


def flags_of(script: Path) -> dict[str, tuple[str, str]]:
    """Flag -> (default, help), the comment beside a field of Args or the string under it."""
    source = script.read_text()
    tree, lines = ast.parse(source), source.splitlines()
    (args,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    shown = {"True": "on", "False": "off", "None": "", "Path(__file__).stem": "the script's name"}
    flags = {}
    for field, below in zip(args.body, args.body[1:]):
        if isinstance(field, ast.AnnAssign):
            default = ast.get_source_segment(source, field.value)
            if isinstance(below, ast.Expr):
                help_text = " ".join(below.value.value.split())
            else:
                help_text = lines[field.end_lineno - 1][field.end_col_offset :].lstrip(" #")
            flags[f"--{field.target.id.replace('_', '-')}"] = (
                shown.get(default, default.strip('"')),
                help_text,
            )
    return flags


def flags_table() -> str:
    """One row for each flag of any script, in the order of the scripts, with all its helps."""
    scripts = {name: flags_of(HERE.parent / f"{name}.py") for name in SCRIPTS}
    order = []
    for flags in scripts.values():  # a new flag comes after the one before it
        at = 0
        for flag in flags:
            if flag not in order:
                order.insert(at, flag)
            at = order.index(flag) + 1
    rows = []
    for flag in order:
        defaults = [flags[flag][0] if flag in flags else "-" for flags in scripts.values()]
        texts = dict.fromkeys(flags[flag][1] for flags in scripts.values() if flag in flags)
        rows.append([f"`{flag}`", *defaults, "; or: ".join(texts)])
    return table(
        ["flag", *(name.removeprefix("ppo_") for name in scripts), "effect"],
        rows,
        left=len(scripts) + 2,
    )


def line_links(text: str) -> str:
    """README.md whose table of details names the line of each detail's marker in every script."""

    def where(match: re.Match) -> str:
        # a marker is followed by words; an id at the end of a flag's help is a reference
        marker = re.compile(rf"# .*(?<!see )(?<!~)\[{match[2]}\]( \[\w+\])* [^\[]")
        links = []
        for name in SCRIPTS:
            lines = (HERE.parent / f"{name}.py").read_text().splitlines()
            links += [
                f"[{name}.py:{i}]({name}.py#L{i})"
                for i, line in enumerate(lines, 1)
                if marker.search(line)
            ]
        return f"{match[1]} {', '.join(links)} |"

    return re.sub(r"(?m)^(\| ([A-Z]\d\d) \|(?:[^|]*\|){2})[^|]*\|", where, text)


def sections_of(suites: list[str]) -> dict[str, str]:
    """What stands between the markers of the same names, but for suites without results."""
    sections = {suite: suite_section(suite) for suite in suites if suite != "start"}
    sections |= {"start": start_section()} if "start" in suites else {}
    if list(HERE.glob("results/speed/*.csv")):
        sections["speed"] = speed_section()
    if list(HERE.glob("results/updates/*.csv")):
        sections["updates"] = updates_section()
    return sections | {"flags": flags_table(), "suites": suites_section()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="draw the figures and write the tables into the READMEs",
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if one is stale")
    parser.add_argument(
        "--tensorboard", type=Path, metavar="DIR", help="print the table of other tools' runs"
    )
    options = parser.parse_args()
    if options.tensorboard:
        return print(tensorboard(options.tensorboard))

    suites = sorted(
        {path.parts[-3] for path in HERE.glob("results/*/*/*.csv")} - {"compare"}
    )  # see compare.sh
    if options.write:
        for suite in {*suites, *(path.stem for path in HERE.glob("figures/*.png"))}:
            draw(suite)
    sections = sections_of(suites)
    if not options.write and not options.check:
        return print("\n\n".join(f"## {name}\n\n{section}" for name, section in sections.items()))

    old = {path: path.read_text() for path in READMES}
    new = {path: line_links(text) for path, text in old.items()}
    marker = re.compile(r"(?s)(<!-- report:(\w+) -->\n).*?(<!-- /report:\2 -->)")
    placed = {match[2] for text in new.values() for match in marker.finditer(text)}
    for name in sections.keys() - placed:
        print(
            f"no place for {name}: it needs <!-- report:{name} --> and <!-- /report:{name} -->",
            file=sys.stderr,
        )
    for path, text in new.items():
        text = marker.sub(lambda m: f"{m[1]}{sections.get(m[2], 'No results yet.')}\n{m[3]}", text)
        if options.write:
            path.write_text(text)
        elif text != old[path]:
            sys.exit(f"error: {path} is not what benchmark/report.py --write makes of the results")


if __name__ == "__main__":
    main()
