"""results/ and published.csv -> Markdown tables, learning curves, the result sections of README.md.

It also makes the table of flags from the scripts, and keeps the line numbers in README.md's table of details:
`| C05 | ... [script.py:12](script.py#L12) ...`.

python benchmark/report.py            print the tables
python benchmark/report.py --write    draw figures/ and put each table between its markers in README.md
python benchmark/report.py --check    exit with 1 if README.md holds other tables
"""

import argparse
import ast
import csv
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
PEER = "CleanRL docs"  # the published source that stands beside every result; its first row is drawn
RECIPES = {  # experiment: name and colour of its curve; the others get a table, but no curve
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
}
SCRIPTS = ["ppo_continuous_mujoco", "ppo_atari", "ppo_lstm", "ppo_multidiscrete"]  # in the order of the README
ABLATION = "strong_no_"  # how the names of the strong recipe's ablations begin
STUDENT_T = [12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060]  # 97.5% quantile, 1 to 8 degrees


def interval(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95% interval of the mean over axis 0 (seeds): Student's t below ten seeds, percentile bootstrap from ten."""
    n = len(x)
    if n == 1:
        return x[0] + np.nan, x[0] + np.nan
    if n < 10:
        half = STUDENT_T[n - 2] * x.std(axis=0, ddof=1) / n**0.5
        return x.mean(axis=0) - half, x.mean(axis=0) + half
    weights = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=10_000) / n  # (resamples, seeds)
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
    return {e: {x: results[e][x] for x in sorted(results[e], key=lambda x: place(x, list(RECIPES)))} for e in envs}


def published(suite: str, env: str = "", steps: str = "") -> list[dict]:
    """Rows of published.csv: of a suite, or of one environment (of any version) at one budget."""
    with open(HERE / "published.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["task_suite"] == suite]
    return [row for row in rows if not env or (row["env"] == env.rsplit("-", 1)[0] and row["steps"] == steps)]


def peers(suite: str, env: str, steps: str) -> list[dict]:
    """PEER's published rows for exactly this version of the environment."""
    rows = published(suite, env, steps)
    return [row for row in rows if row["source"].startswith(PEER) and env.endswith(f"-{row['env_version']}")]


def number(x: float | str, size: float | str | None = None) -> str:
    """x without decimals if `size` (or x itself) is at least 100, else with one."""
    return f"{float(x):.0f}" if abs(float(x if size is None else size)) >= 100 else f"{float(x):.1f}"


def figure_of(row: dict) -> str:
    return number(row["mean"]) + (f" ± {number(row['std'], row['mean'])}" if row["std"] else "")


def final_returns(runs: list) -> np.ndarray:
    return np.array([float(facts["final_return"]) for facts, _ in runs])


def mean_and_interval(runs: list) -> str:
    x = final_returns(runs)
    mean, (low, high) = x.mean(), interval(x)
    return number(mean) + (f" [{number(low, mean)}, {number(high, mean)}]" if len(x) > 2 else "")


def table(head: list[str], rows: list[list[str]], left: int = 1) -> str:
    """A Markdown table; the first `left` columns are text."""
    align = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, align, *rows])


def returns_table(suite: str, results: dict) -> str:
    """One row for each environment and recipe; what is published stands in the first row of an environment."""
    rows = []
    for env, recipes in results.items():
        steps = next(iter(recipes.values()))[0][0]["total_timesteps"]
        best = max(published(suite, env, steps), key=lambda row: float(row["mean"]), default=None)
        beside = ["; ".join(map(figure_of, peers(suite, env, steps))) or "-"]
        beside += [f"{figure_of(best)} ({best['source']}, {best['env_version']})" if best else "-"]
        first = [env, *beside]
        for exp, runs in recipes.items():
            if not exp.startswith(ABLATION):
                name = RECIPES[exp][0] if exp in RECIPES else exp
                speed = np.median([float(facts["steps"]) / float(facts["seconds"]) for facts, _ in runs])
                median = number(np.median(final_returns(runs)))
                ours = [name, mean_and_interval(runs), median, str(len(runs)), f"{speed:.0f}"]
                rows.append([first[0], *ours, *first[1:]])
                first = ["", "", ""]
    head = ["environment", "recipe", "mean [95% interval]", "median", "seeds", "steps/s", "CleanRL", "best published"]
    return table(head, rows, left=2)


def ablation_table(results: dict) -> str:
    """The strong recipe and its ablations, (number of seeds); empty if there are none."""
    results = {env: recipes for env, recipes in results.items() if any(exp.startswith(ABLATION) for exp in recipes)}
    exps = sorted({exp for recipes in results.values() for exp in recipes if exp.startswith(ABLATION)})

    def cell(runs: list) -> str:
        return f"{mean_and_interval(runs)} ({len(runs)})" if runs else "-"

    rows = [[exp, *(cell(recipes.get(exp, [])) for recipes in results.values())] for exp in ["strong", *exps]]
    return table(["recipe (seeds)", *results], rows) if exps else ""


def suite_section(suite: str) -> str:
    """The tables of a suite, how to read them, and what its runs ran on."""
    results = read_suite(suite)
    parts = [returns_table(suite, results)]
    parts.append(
        "Final return of a seed: mean of its last 100 training episodes (CleanRL's rule). Interval of the mean over "
        "seeds: Student's t below ten seeds, bootstrap from ten. Steps/s: of these runs, several at a time on a busy "
        "machine; the section on speed has measured ones. CleanRL: same version of the environment, mean ± "
        "standard deviation, one figure for each published benchmark. Best published: the highest mean of any source, "
        "version and rule in `benchmark/published.csv`."
    )
    ablation = ablation_table(results)
    if ablation:
        parts += ["The strong recipe, and with one of its departures taken back:", ablation]
    facts = [facts for recipes in results.values() for runs in recipes.values() for facts, _ in runs]
    setups = Counter(f"{f['hardware']}; {f['versions']}; commit {f['commit']}" for f in facts)
    lines = [f"{n} runs on {setup}." for setup, n in sorted(setups.items(), key=lambda item: (-item[1], item[0]))]
    parts.append(" ".join(lines))
    if (HERE / "figures" / f"{suite}.png").exists():
        parts.append(f"![Learning curves](benchmark/figures/{suite}.png)")
    return "\n\n".join(parts)


def speed_section() -> str:
    """One row for each file of results/speed/: medians over the repetitions."""
    rows, setups = [], set()
    for path in sorted((HERE / "results" / "speed").glob("*.csv")):
        facts, data = read_csv(path)
        median = {name: f"{np.median(column):.0f}" for name, column in data.items()}
        ratio = data["ours_steps_per_second"] / data["peer_steps_per_second"]
        row = [facts["ours"], facts["peer"], facts["env"], facts["threads"], str(len(ratio))]
        row += [f"{np.median(ratio):.2f} ({ratio.min():.2f} to {ratio.max():.2f})"]
        for name in ("steps_per_second", "wall_seconds", "peak_mb"):
            row.append(f"{median[f'ours_{name}']} / {median[f'peer_{name}']}")
        rows.append(row)
        setups.add(f"{facts['ours'].split()[0]} at {facts['commit']} on {facts['hardware']}: {facts['ours_versions']}.")
        setups.add(f"{facts['peer'].split()[0]}: {facts['peer_versions']}.")
    head = ["ours", "peer", "environment", "threads", "pairs", "ratio of steps/s (range)", "steps/s"]
    head += ["seconds in all", "peak MB"]
    rule = (
        "Medians, ours / peer; both ran in turns on the same machine. Steps/s from the first tenth of the run "
        "to its end; seconds in all: the whole process with start-up and compilation."
    )
    return "\n\n".join([table(head, rows, left=3), rule, " ".join(sorted(setups))])


def updates_section() -> str:
    """One row for each file of results/updates/: medians over the repetitions."""
    rows, setups = [], set()
    for path in sorted((HERE / "results" / "updates").glob("*.csv")):
        facts, data = read_csv(path)
        ratio = data["peer_ms"] / data["ours_ms"]
        times = [f"{np.median(data[name]):.1f}" for name in ("ours_ms", "peer_ms")]
        spread = f"{np.median(ratio):.1f} ({ratio.min():.1f} to {ratio.max():.1f})"
        rows.append([facts["update"], facts["device"], facts["threads"], *times, spread])
        setups.add(f"Commit {facts['commit']} on {facts['hardware']}; {facts['versions']}.")
    head = ["update of ppo_lstm.py", "device", "threads", "ms", "CleanRL's ms", "ratio (range)"]
    return "\n\n".join([table(head, rows, left=2), " ".join(sorted(setups))])


def draw(suite: str) -> None:
    """figures/<suite>.png: mean and 95% interval over seeds, one panel for each environment."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    results = {env: recipes for env, recipes in read_suite(suite).items() if RECIPES.keys() & recipes.keys()}
    if not results:
        return
    columns = min(3, len(results))
    rows, width = -(-len(results) // columns), 3 + 3 * columns
    fig, axes = plt.subplots(rows, columns, figsize=(width, 3.3 * rows + 0.6), dpi=100, squeeze=False)
    handles = {}
    for ax in axes.flat[len(results) :]:
        ax.axis("off")
    for ax, (env, recipes) in zip(axes.flat, results.items()):
        for exp, (label, colour) in RECIPES.items():
            if exp not in recipes:
                continue
            curves = [curve for _, curve in recipes[exp]]
            steps = np.linspace(max(c["step"][0] for c in curves), min(c["step"][-1] for c in curves), 100)
            y = np.stack([np.interp(steps, c["step"], c["return"]) for c in curves])  # (seeds, points)
            (handles[label],) = ax.plot(steps / 1e6, y.mean(axis=0), color=colour, linewidth=1.8)
            ax.fill_between(steps / 1e6, *interval(y), color=colour, alpha=0.2, linewidth=0)
        for row in peers(suite, env, next(iter(recipes.values()))[0][0]["total_timesteps"])[:1]:
            line = ax.axhline(float(row["mean"]), color="black", linestyle="--", linewidth=1.2)
            handles[f"{row['source']}, final"] = line
        ax.set_title(env, fontsize=12 if len(env) < 30 else 10)
        ax.set_xlim(left=0)
        ax.grid(alpha=0.3)
    fig.supxlabel("environment steps (millions)", fontsize=12)
    fig.supylabel("mean return of the last 100 episodes", fontsize=12)
    legend = {"loc": "upper center", "ncols": min(len(handles), columns), "fontsize": 11, "frameon": False}
    fig.legend(handles.values(), handles, **legend)
    legend_rows = -(-len(handles) // legend["ncols"])
    fig.tight_layout(rect=(0, 0, 1, 1 - (0.1 + 0.25 * legend_rows) / fig.get_figheight()))
    (HERE / "figures").mkdir(exist_ok=True)
    fig.savefig(HERE / "figures" / f"{suite}.png", metadata={"Software": None})
    plt.close(fig)


def flags_of(script: Path) -> dict[str, tuple[str, str]]:
    """Flag -> (default, help) from the fields of the script's Args and the strings under them."""
    tree = ast.parse(script.read_text())
    (args,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    shown = {"True": "on", "False": "off", "None": "", "Path(__file__).stem": "the script's name"}
    flags = {}
    for field, text in zip(args.body, args.body[1:]):
        if isinstance(field, ast.AnnAssign):
            default = ast.get_source_segment(script.read_text(), field.value)
            flags[f"--{field.target.id.replace('_', '-')}"] = (shown.get(default, default.strip('"')), text.value.value)
    return flags


def flags_table() -> str:
    """One row for each flag of any script, in the order of the scripts; a second line where the help differs."""
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
    return table(["flag", *(name.removeprefix("ppo_") for name in scripts), "effect"], rows, left=len(scripts) + 2)


def line_links(text: str) -> str:
    """README.md whose table of details names the line of each detail's marker in every script."""

    def where(match: re.Match) -> str:
        marker, links = re.compile(rf"# .*(?<!see )\[{match[2]}\]"), []
        for name in SCRIPTS:
            lines = (HERE.parent / f"{name}.py").read_text().splitlines()
            links += [f"[{name}.py:{i}]({name}.py#L{i})" for i, line in enumerate(lines, 1) if marker.search(line)]
        return f"{match[1]} {', '.join(links)} |"

    return re.sub(r"(?m)^(\| ([A-Z]\d\d) \|(?:[^|]*\|){2})[^|]*\|", where, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="draw the figures and write the tables into README.md")
    parser.add_argument("--check", action="store_true", help="exit with 1 if README.md is stale")
    options = parser.parse_args()

    suites = sorted({path.parts[-3] for path in HERE.glob("results/*/*/*.csv")})
    if options.write:
        for suite in suites:
            draw(suite)
    sections = {suite: suite_section(suite) for suite in suites}
    if list(HERE.glob("results/speed/*.csv")):
        sections["speed"] = speed_section()
    if list(HERE.glob("results/updates/*.csv")):
        sections["updates"] = updates_section()
    sections["flags"] = flags_table()

    old = README.read_text() if options.write or options.check else ""
    text = line_links(old)
    for name, section in sections.items():
        start, end = f"<!-- report:{name} -->", f"<!-- /report:{name} -->"
        if not options.write and not options.check:
            print(f"## {name}\n\n{section}\n")
        elif start in text and end in text:
            text = re.sub(f"{start}.*?{end}", lambda _: f"{start}\n{section}\n{end}", text, flags=re.DOTALL)
        else:
            print(f"README.md has no place for {name}: it needs {start} and {end}", file=sys.stderr)
    if options.write:
        README.write_text(text)
    elif text != old:
        sys.exit("error: README.md is not what benchmark/report.py --write makes of the scripts and benchmark/results/")


if __name__ == "__main__":
    main()
