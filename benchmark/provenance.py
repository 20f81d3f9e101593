"""Can a results file be traced to what made it? Finds names edited by hand and commits not here.

python benchmark/provenance.py            print what was found, folder by folder
python benchmark/provenance.py --write    and list the commits that this repository does not have

The report reads that list, unknown_commits.txt, so that it writes the same text without history
(an archive, a shallow clone). `report.py --write` brings it up to date where the history is whole.
"""

import argparse
import shlex
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

from recipes import HERE
from results import RESULTS, read_facts

LIST = HERE / "unknown_commits.txt"


def name_in_command(facts: dict) -> str:
    """The experiment's name that the command of a run gives, the script's by default."""
    words = shlex.split(facts["command"])
    for word, following in zip(words, [*words[1:], ""]):
        if word == "--exp-name":
            return following
        if word.startswith("--exp-name="):
            return word.removeprefix("--exp-name=")
    return Path(words[0]).stem


def commit_of(facts: dict) -> str:
    """Without the mark of a tree with changes."""
    return facts["commit"].removesuffix("-dirty")


@cache
def unknown_commits() -> frozenset[str]:
    """The commits of results files that are not in this repository, as listed."""
    return frozenset(LIST.read_text().split()) if LIST.exists() else frozenset()


def problems(facts: dict) -> list[str]:
    """Why a results file cannot be traced; none if it can."""
    found = []
    if "command" in facts and name_in_command(facts) != facts["exp"]:
        found.append("name edited by hand")
    if not facts["commit"]:
        found.append("no commit")
    if commit_of(facts) in unknown_commits():
        found.append("commit unknown")
    if facts["commit"].endswith("-dirty"):
        found.append("dirty tree")
    return found


def labels(all_facts: list[dict]) -> str:
    """The problems of several files in a cell: with their number, if not all files have them."""
    counts = Counter(problem for facts in all_facts for problem in problems(facts))
    cells = []
    for problem, n in counts.items():
        cells.append(problem if n == len(all_facts) else f"{problem} ({n} of {len(all_facts)})")
    return "; ".join(cells)


def result_files() -> list[Path]:
    """All of results/, but for compare.sh's."""
    files = RESULTS.rglob("*.csv")
    return sorted(path for path in files if path.relative_to(RESULTS).parts[0] != "compare")


def git(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", *command], cwd=HERE, capture_output=True, text=True)


def history_is_whole() -> bool:
    """Is this the top of a clone with all its commits? Not so in an archive or a shallow clone."""
    top = git("rev-parse", "--show-toplevel", "--is-shallow-repository").stdout.split("\n")
    return top[:2] == [str(HERE.parent), "false"]


def missing_commits() -> set[str]:
    """The commits of results files that the history does not have."""
    commits = {commit_of(read_facts(path)) for path in result_files()} - {""}
    return {name for name in commits if git("merge-base", "--is-ancestor", name, "HEAD").returncode}


def refresh() -> None:
    """Write the list, where git can tell."""
    if history_is_whole():
        LIST.write_text("".join(f"{name}\n" for name in sorted(missing_commits())))
        unknown_commits.cache_clear()


def summary() -> str:
    """How many files of each folder of results/ have which problem, and of all."""
    counts = Counter()
    for path in result_files():
        folder = path.relative_to(RESULTS).parts[0]
        for problem in problems(read_facts(path)):
            counts[folder, problem] += 1
            counts["all", problem] += 1
    lines = [f"{folder}: {n} files, {problem}" for (folder, problem), n in sorted(counts.items())]
    return "\n".join([f"{len(result_files())} files", *lines])


if __name__ == "__main__":
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--write", action="store_true", help="write unknown_commits.txt")
    if parser.parse_args().write:
        refresh()
    print(summary())
