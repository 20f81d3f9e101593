"""results/ and published.csv -> Markdown tables, figures, blocks of README.md and of the docs.

python benchmark/report.py                      print the tables
python benchmark/report.py --write              draw figures/ and fill the blocks
python benchmark/report.py --check              exit with 1 if a block holds another text
python benchmark/report.py --only mujoco        one block alone, and its figure; any of the above
python benchmark/report.py --tensorboard DIR    one row for each environment and experiment of the
                                                runs in DIR, of any tool that names them
                                                env__exp__seed__time and logs CleanRL's tags

A block stands between <!-- report:NAME --> and <!-- /report:NAME --> in README.md,
benchmark/README.md or docs/*.md. Names are the folders of results/, and summary, time, time_seeds,
speed, wins, equal, windows, suites, effects (the figure of ablation_details), where (the lines of
the details), flags and flags_SCRIPT.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ablation import (
    DETAILS,
    FLAGS_ALONE,
    STUDY,
    VARIANTS,
    details_section,
    effects_section,
    flags_section,
    study_section,
    variants_section,
)
from provenance import refresh
from recipes import HERE, SCRIPTS, without_suffix
from results import RESULTS, folders
from scripts import all_flags, flags_table, patches_table, where_table
from selection import FOLDER as SELECTION
from selection import RESULTS_FOLDER, results_section, selection_section, suite_rows
from tables import (
    equal_section,
    folder_section,
    start_section,
    suites_section,
    summary_section,
    tensorboard,
    wins_section,
)
from timing import FOLDER, speed_section, time_section, time_seeds_section
from windows import FOLDERS, windows_section

ROOT = HERE.parent
MARKER = re.compile(r"(?s)(<!-- report:(\w+) -->\n).*?(<!-- /report:\2 -->)")
LINK = re.compile(r"\]\(((?:benchmark/figures/|(?:pp[og]|trpo)\w*\.py)[^)]*)\)")


def documents() -> list[Path]:
    """The Markdown files that may hold blocks."""
    return [ROOT / "README.md", HERE / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def sections() -> dict[str, Callable[[], str]]:
    """What makes each block, but for what has no results."""
    special = {DETAILS: details_section, VARIANTS: variants_section}  # with any SUFFIX
    made = {}
    for name in sorted({*folders()} - {"start"}):
        made[name] = partial(special.get(without_suffix(name), folder_section), name)
    if "start" in folders():
        made["start"] = start_section
    if FOLDER in folders():
        made |= {"time": time_section, "time_seeds": time_seeds_section}
        made["summary"] = summary_section
    if list(RESULTS.glob("speed/*.csv")):
        made["speed"] = speed_section
    if list(RESULTS.glob("wins/*.csv")):
        made["wins"] = wins_section
    if list(RESULTS.glob("equal/*.csv")):
        made["equal"] = equal_section
    if {*FOLDERS} <= {*folders()}:
        made["windows"] = windows_section
    if FLAGS_ALONE in folders():
        made[FLAGS_ALONE] = flags_section
    made |= special | {STUDY: study_section}
    made |= {"effects": effects_section, SELECTION: selection_section}
    made |= {RESULTS_FOLDER: results_section}
    if RESULTS_FOLDER in folders():
        made["selection_returns"] = partial(folder_section, RESULTS_FOLDER)
    made["flags"] = all_flags
    made |= {f"flags_{name}": partial(flags_table, name) for name in SCRIPTS}
    made["suites"] = lambda: suites_section(suite_rows())
    return made | {"where": where_table, "patches": patches_table}


def figures_of(only: str | None) -> list[str]:
    """The names of the figures to draw, those without results left among them."""
    from figures import FIGURES, TIME

    names = {*folders(), TIME, *(path.stem for path in FIGURES.glob("*.png"))}
    wanted = {"time": TIME, "effects": DETAILS}.get(only, only)
    return sorted(name for name in names if only is None or name == wanted)


def relinked(section: str, document: Path) -> str:
    """A block with its links as seen from the document's folder."""

    def here(match: re.Match) -> str:
        return f"]({os.path.relpath(ROOT / match[1], document.parent)})"

    return LINK.sub(here, section)


def filled(document: Path, text: str, made: dict[str, str], only: str | None) -> str:
    """The text of a document with its blocks and links of today, or with one block."""

    def block(match: re.Match) -> str:
        start, name, end = match.groups()
        if only not in (None, name):
            return match[0]
        return f"{start}{relinked(made.get(name, 'No results yet.'), document)}\n{end}"

    return MARKER.sub(block, text)


def warn_of_homeless(made: dict[str, str], texts: list[str]) -> None:
    """Name the blocks that no document has a place for."""
    placed = {match[2] for text in texts for match in MARKER.finditer(text)}
    if any(name.startswith("flags") for name in placed):  # one table, or one for each script
        made = {name: section for name, section in made.items() if not name.startswith("flags")}
    for name in made.keys() - placed:
        needs = f"<!-- report:{name} --> and <!-- /report:{name} -->"
        print(f"no place for {name}: it needs {needs}", file=sys.stderr)


def update(made: dict[str, str], only: str | None, write: bool) -> None:
    """Fill the blocks of all documents, or stop at the first that is stale."""
    old = {path: path.read_text() for path in documents()}
    warn_of_homeless(made, list(old.values()))
    for path, text in old.items():
        new = filled(path, text, made, only)
        if write:
            path.write_text(new)
        elif new != text:
            name = path.relative_to(ROOT)
            sys.exit(f"error: {name} is not what benchmark/report.py --write makes of the results")


def options_of_command() -> argparse.Namespace:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--write", action="store_true", help="draw the figures, fill the blocks")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a block is stale")
    parser.add_argument("--only", metavar="NAME", help="one block alone, and its figure")
    parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="other tools' runs")
    return parser.parse_args()


def main() -> None:
    options = options_of_command()
    if options.tensorboard:
        return print(tensorboard(options.tensorboard))
    makers = sections()
    if options.only:
        if options.only not in makers:
            sys.exit(f"error: --only knows {', '.join(sorted(makers))}")
        makers = {options.only: makers[options.only]}
    if options.write:
        from figures import draw

        refresh()
        for name in figures_of(options.only):
            draw(name)
    made = {name: maker() for name, maker in makers.items()}
    if options.write or options.check:
        return update(made, options.only, options.write)
    print("\n\n".join(f"## {name}\n\n{section}" for name, section in made.items()))


if __name__ == "__main__":
    main()
