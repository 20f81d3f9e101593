"""The table of compare.sh: final returns of two experiments in results/compare/, their difference.

python benchmark/compare.py ORIGINAL CHANGED      names of experiments
"""

import argparse
import sys

import numpy as np
from report import STUDENT_T, final_returns, mean_and_interval, read_suite, table


def difference(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """mean(y) - mean(x) and its 95% interval: Welch's, with the smaller sample's degrees."""
    n = min(len(x), len(y))
    if n < 2:
        return y.mean() - x.mean(), np.nan, np.nan
    half = STUDENT_T[min(n, 9) - 2] * (x.var(ddof=1) / len(x) + y.var(ddof=1) / len(y)) ** 0.5
    return y.mean() - x.mean(), y.mean() - x.mean() - half, y.mean() - x.mean() + half


def comparison(original: str, changed: str) -> str:
    """Markdown table, one row for each environment with results of both."""
    rows = []
    for env, recipes in read_suite("compare").items():
        if original in recipes and changed in recipes:
            x, y = (final_returns(recipes[exp]) for exp in (original, changed))
            mean, low, high = difference(x, y)
            better = np.mean((y > x[:, None]) + 0.5 * (y == x[:, None]))
            text = f"{mean:+.3g} [{low:+.3g}, {high:+.3g}]"
            rows.append(
                [
                    env,
                    f"{len(x)}, {len(y)}",
                    mean_and_interval(x, 2),
                    mean_and_interval(y, 2),
                    text,
                    f"{better:.2f}",
                ]
            )
    if not rows:
        sys.exit(
            f"error: results/compare/ has no environment with runs of both {original} and {changed}"
        )
    head = [
        "environment",
        "seeds",
        original,
        changed,
        "difference [95% interval]",
        "probability of improvement",
    ]
    rule = (
        "Final returns: mean of the last 100 training episodes. Interval of the difference: "
        "Welch's. Probability of improvement: that a run of the second is better than one of the "
        "first. An interval with 0 inside decides nothing: add seeds."
    )
    return table(head, rows) + "\n\n" + rule


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("original")
    parser.add_argument("changed")
    options = parser.parse_args()
    print(comparison(options.original, options.changed))
