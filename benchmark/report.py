"""results/ and published.csv -> Markdown tables, figures, blocks of README.md and of the docs.

python benchmark/report.py mujoco_mine ...     the table and figure of a folder of results/
python benchmark/report.py                     print all tables
python benchmark/report.py --write             draw figures/ and fill the blocks
python benchmark/report.py --check             exit with 1 if a block holds another text

A block stands between <!-- report:NAME --> and <!-- /report:NAME --> in README.md,
benchmark/README.md or docs/. Names are the folders of recipes.csv that have results, those of
the tables of front.csv (scripts, others), and summary, effects, speed, pairs (speed in brief),
equal, spaces, suites, patches, details, worth_C05 and so on (what a detail is worth), and
broken_EXPERIMENT.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd
import results
from figures import FIGURES, draw
from patches import original_of
from results import HERE, RESULTS, ROOT, read_curve, read_facts, read_recipes
from tables import (
    BROKEN,
    DETAILS,
    STUDY,
    VARIANTS,
    changes_section,
    details_with_worth,
    folder_section,
    front_section,
    mistake_section,
    mistakes_section,
    number,
    ran_on,
    study_section,
    summary_section,
    table,
    text,
    worth_section,
)

MARKER = re.compile(r"(?s)(<!-- report:(\w+) -->\n).*?(<!-- /report:\2 -->)")
LINK = re.compile(r"\]\(((?:benchmark/figures|docs)/[^)]*)\)")
FAMILIES = "core atari continuous lstm multidiscrete ppg auxiliary ours".split()
KEYS = {"steps_per_second": "steps/s", "wall_seconds": "seconds in all", "peak_mb": "peak MB"}
SPEED_RULE = """
Ours and the peer ran in turns on one machine with the same hyperparameters. Medians over the pairs,
and the ratio of the two; in brackets the range of the pairs' own ratios. Steps/s leave out the
first tenth of a run; seconds in all are those of the whole process, start and compilation included.
"""


# -- sections that are no folder of runs --
def speed_section(folder: str = "speed", is_brief: bool = False) -> str:
    """One row for each measurement of two scripts in turns, in the order of pairs.csv."""
    pairs = pd.read_csv(HERE / "pairs.csv", dtype=str, keep_default_na=False)
    rows = []
    for name, label in zip(pairs["name"], pairs["label"]):
        path = RESULTS / folder / f"{name}.csv"
        if not path.exists():
            continue
        facts, data = read_facts(path), read_curve(path)
        median = {key: (data[f"ours_{key}"].median(), data[f"peer_{key}"].median()) for key in KEYS}
        ours, peer = median["steps_per_second"]
        each = data["ours_steps_per_second"] / data["peer_steps_per_second"]
        spread = f"{each.min():.2f} to {each.max():.2f}" if len(data) > 1 else "one pair"
        row = [f"`{facts['ours'].replace(' --eval-episodes 0', '')}`", label, facts["env"]]
        row += [facts["hardware"], str(len(data)), f"{ours / peer:.2f} ({spread})"]
        rows.append([*row, *(f"{number(a)} / {number(b)}" for a, b in median.values())])
    head = ["ours", "peer", "environment", "on", "pairs", "ours / peer (range)", *KEYS.values()]
    if is_brief:  # real pairs, without what differs little
        shown = [0, 1, 2, 5, 6]
        rows = [[row[i] for i in shown] for row in rows if int(row[4]) >= 5]
        return table([head[i] for i in shown], rows, left=3)
    return f"{table(head, rows, left=4)}\n\n{text(SPEED_RULE)}"


def equal_section() -> str:
    """A row for each case of equal.py: how far apart the last weights are."""
    rows, runs = [], []
    for path in sorted(RESULTS.glob("equal/*.csv")):
        facts, data = read_facts(path), read_curve(path)
        far = data[["from_first", "from_theirs", "from_changed"]].max()
        ours = facts["script"] if facts["script"].endswith(".patch") else f"{facts['script']}.py"
        row = [path.stem, f"`{Path(ours).name}`", facts["original"].replace(", ", " at ")]
        row += [facts["env"].split(":")[-1], facts["iterations"]]
        rows.append([*row, *(f"{x:.1e}" for x in far)])
        runs.append(facts)
    head = ["case", "ours", "original", "environment", "iterations", "weights move by up to"]
    head += ["end from theirs by up to", "ours with lambda 0.94 differs by"]
    return f"{table(head, rows, left=4)}\n\n{ran_on(pd.DataFrame(runs))}"


def suites_section() -> str:
    """One row for each recipe: how many of its runs have results, and how long they took."""
    rows = []
    for (suite, recipe), group in results.groups_of(read_recipes(), "suite", "recipe"):
        paths = [
            results.file_of(row["folder"], env, row["experiment"], seed)
            for _, row in group.iterrows()
            for env in results.environments_of(row)
            for seed in row["seeds"].split()
        ]
        found = pd.DataFrame([read_facts(path) for path in paths if path.exists()])
        row = [f"`bash benchmark/{suite}.sh {recipe}`", f"{len(found)} of {len(paths)}"]
        if len(found):
            seconds = found["seconds"].astype(float)
            row += ["; ".join(f"{int(n):,}" for n in sorted({*found["total_timesteps"]}, key=int))]
            row += [f"{seconds.median() / 60:.1f}", f"{seconds.sum() / 3600:.1f}"]
            row += ["; ".join(sorted(set(found["hardware"])))]
        rows.append(row + ["-"] * (6 - len(row)))
    head = ["command", "runs with results", "steps of each", "minutes of each (median)"]
    return table([*head, "hours of these", "hardware"], rows)


def spaces_section() -> str:
    """Which script takes which spaces, as spaces.csv has it."""
    rows = pd.read_csv(HERE / "spaces.csv", dtype=str, header=None).to_numpy().tolist()
    return table(rows[0], rows[1:], left=len(rows[0]))


def patches_section() -> str:
    """One row for each patch: its script, and what it says it does. broken.md has the mistakes."""
    paths = sorted((ROOT / "variants").glob("*/*.patch"))
    rows = []
    for path in [path for path in paths if path.parent.name != "broken"]:
        about = path.read_text().partition("\n--- ")[0]
        name = f"`{path.parent.name}/{path.stem}`"
        rows.append([name, f"`{original_of(path)}`", " ".join(about.split())])
    return table(["patch", "of", "what it does"], rows, left=3)


def details_section() -> str:
    """One row for each card of docs/details/: its id, its name and the scripts that have it."""
    sources = {f"{name}.py": (ROOT / f"{name}.py").read_text() for name in sorted(results.SCRIPTS)}
    parts = []
    for family in FAMILIES:
        page, rows = ROOT / "docs" / "details" / f"{family}.md", []
        for detail, title in re.findall(r"(?m)^## ([A-Z]\d\d) (.*)$", page.read_text()):
            anchor = re.sub(r"[^\w\- ]", "", f"{detail} {title}".lower()).replace(" ", "-")
            marked = re.compile(rf"# (?:\[\w+\] )?\[{detail}\]")
            having = [name for name, source in sources.items() if marked.search(source)]
            lacking = [f"`{name}`" for name in sources if name not in having]
            where = ", ".join(f"`{name}`" for name in having) or "a patch"
            if len(lacking) < len(having) / 2:
                where = f"all but {', '.join(lacking)}" if lacking else "all"
            link = f"[{detail}](docs/details/{page.name}#{anchor})"
            rows.append([link, title, where])
        head = page.read_text().partition("\n")[0].removeprefix("# ")
        parts += [f"**{head}**", table(["id", "detail", "found in"], rows, left=3)]
    return "\n\n".join(parts)


# -- documents --
def section_of(folder: str) -> Callable[[], str]:
    """What makes the tables of a folder of results, with any SUFFIX."""
    if folder.startswith("speed"):
        return partial(speed_section, folder)
    made = {DETAILS: changes_section, VARIANTS: changes_section, STUDY: study_section}
    made |= {BROKEN: mistakes_section}
    return partial(made.get(results.without_suffix(folder), folder_section), folder)


def folders() -> list[str]:
    """Those of recipes.csv that have results."""
    known = dict.fromkeys(read_recipes()["folder"])
    return [name for name in known if any((RESULTS / name).glob("*/*.csv"))]


def sections() -> dict[str, Callable[[], str]]:
    """What makes each block."""
    made = {name: section_of(name) for name in folders()}
    made |= {"summary": summary_section, "speed": speed_section, "equal": equal_section}
    made |= {name: partial(front_section, name) for name in ("scripts", "others")}
    made["pairs"] = partial(speed_section, is_brief=True)
    made["effects"] = lambda: f"![What each detail is worth](benchmark/figures/{DETAILS}.png)"
    made |= {f"worth_{x}": partial(worth_section, x) for x in details_with_worth()}
    made |= {"spaces": spaces_section, "details": details_section}
    broken = dict.fromkeys(results.read_runs(BROKEN).get("exp", []))
    made |= {f"broken_{exp}": partial(mistake_section, exp) for exp in broken if exp != "healthy"}
    return made | {"suites": suites_section, "patches": patches_section}


def show(folder: str, drawn: bool = True) -> None:
    """Print the tables of a folder of results; draw its figure, if it is new or asked for."""
    path = FIGURES / f"{folder}.png"
    if not folder.startswith("speed") and (drawn or not path.exists()):
        draw(folder)
    print(f"\n{section_of(folder)()}")
    if path.exists():
        print(f"\nfigure: {path.relative_to(ROOT)}")


def documents() -> list[Path]:
    """The Markdown files that may hold blocks."""
    return [ROOT / "README.md", HERE / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(document: Path, made: dict[str, str]) -> str:
    """The text of a document with its blocks, and links as seen from its folder."""

    def here(match: re.Match) -> str:
        return f"]({os.path.relpath(ROOT / match[1], document.parent)})"

    def block(match: re.Match) -> str:
        start, name, end = match.groups()
        return f"{start}{LINK.sub(here, made.get(name, 'No results yet.'))}\n{end}"

    return MARKER.sub(block, document.read_text())


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help="of results/")
    parser.add_argument("--write", action="store_true", help="draw the figures, fill the blocks")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a block is stale")
    options = parser.parse_args()
    if options.folders and (options.write or options.check):
        parser.error("--write and --check are for all documents: leave out FOLDER")
    for folder in (name.strip("/") for name in options.folders):
        runs = "*.csv" if folder.startswith("speed") else "*/*.csv"
        if not any((RESULTS / folder).glob(runs)):
            sys.exit(f"error: there are no results of runs in {RESULTS / folder}")
        show(folder)
    if options.folders:
        return
    for folder in folders() if options.write else []:
        draw(folder)
    made = {name: maker() for name, maker in sections().items()}
    if not (options.write or options.check):
        return print("\n\n".join(f"## {name}\n\n{section}" for name, section in made.items()))
    for document in documents():
        new = filled(document, made)
        if options.write:
            document.write_text(new)
        elif new != document.read_text():
            sys.exit(f"error: {document} is not what benchmark/report.py --write makes")


if __name__ == "__main__":
    main()
