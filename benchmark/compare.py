"""The table of compare.sh: final returns of two experiments in results/compare/, their difference.

python benchmark/compare.py ORIGINAL CHANGED      names of experiments
"""

import argparse
import sys

import numpy as np
from ablation import IMPROVEMENT_RULE, difference_cell, improvement_cell
from results import groups_of, read_runs
from stats import FEWEST
from tables import mean_cell, table

RULE = f"""
Final returns: mean of the last 100 training episodes. Differences have Welch's 95% interval; with
fewer than {FEWEST} seeds each seed's difference from the original's mean stands instead.
{IMPROVEMENT_RULE} An interval with 0 inside decides nothing: add seeds."""


def row_of(env: str, x: np.ndarray, y: np.ndarray) -> list[str]:
    row = [env, f"{len(x)}, {len(y)}", mean_cell(x), mean_cell(y), difference_cell(x, y)]
    return [*row, improvement_cell([x], [y])]


def comparison(original: str, changed: str) -> str:
    """Markdown table, one row for each environment with results of both."""
    rows = []
    for env, group in groups_of(read_runs("compare"), "env"):
        returns = {exp: runs["final_return"].to_numpy() for exp, runs in groups_of(group, "exp")}
        if {original, changed} <= returns.keys():
            rows.append(row_of(env, returns[original], returns[changed]))
    if not rows:
        missing = f"runs of both {original} and {changed}"
        sys.exit(f"error: results/compare/ has no environment with {missing}")
    head = ["environment", "seeds", original, changed, "difference"]
    return table([*head, "probability of improvement"], rows) + "\n" + RULE.replace("\n", " ")


if __name__ == "__main__":
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("original")
    parser.add_argument("changed")
    options = parser.parse_args()
    print(comparison(options.original, options.changed))
