"""Is a changed copy of a script better? Trains both with the same seeds, prints the difference.

Run:  bash benchmark/compare.sh ORIGINAL CHANGED [FLAGS of both] [--dry-run]

ENVS (the original's default), SEEDS ("1 2 3 4 5") and STEPS (1000000) say which runs; WORKERS,
THREADS, GPUS, TASK and PYTHON are those of run.py. A run is done once: its name holds a digest of
the script's text, the flags and the steps, so the original is not trained anew for the next change.
All results lie in results/compare/.
"""

import hashlib
import os
import re
import sys
from pathlib import Path

from patches import script_of
from results import groups_of, read_runs
from run import NAMES, Refused, Run, names_of, parsed, train_all, with_whole_path
from tables import (
    IMPROVEMENT_RULE,
    RETURN_RULE,
    difference_cell,
    improvement_cell,
    mean_cell,
    seeds_cell,
    table,
    text,
)


def plan(scripts: list[Path], flags: tuple[str, ...]) -> list[Run]:
    """The runs of both, seed by seed, environment by environment."""
    steps = os.environ.get("STEPS", "1000000")
    if found := names_of(flags) & NAMES:
        names = ", ".join(sorted(found))
        raise Refused(f"no {names} here: ENVS, SEEDS and STEPS say which runs")
    if scripts[0].read_bytes() == scripts[1].read_bytes():
        raise Refused(f"{scripts[0].name} and {scripts[1].name} are the same")
    runs = []
    for seed in os.environ.get("SEEDS", "1 2 3 4 5").split():
        for env in os.environ.get("ENVS", parsed(scripts[0], ())["env_id"]).split():
            for script in scripts:
                said = script.read_bytes() + f"{' '.join(flags)} {steps}".encode()
                stem = re.sub(r"\W+", "_", script.stem, flags=re.ASCII)[:50]
                name = f"{stem}-{hashlib.sha256(said).hexdigest()[:8]}"
                about = ("--env-id", env, "--exp-name", name, "--total-timesteps", steps)
                runs.append(Run("compare", script, env, name, int(seed), (*about, *flags)))
    return runs


def comparison(original: str, changed: str) -> str:
    """Markdown table, one row for each environment with results of both."""
    rows = []
    for env, group in groups_of(read_runs("compare"), "env"):
        returns = {exp: runs["final_return"].to_numpy() for exp, runs in groups_of(group, "exp")}
        if {original, changed} <= returns.keys():
            x, y = returns[original], returns[changed]
            ended = group.groupby("exp")["diverged"].sum()
            both = [(returns[exp], ended[exp]) for exp in (original, changed)]
            row = [env, "; ".join(seeds_cell([len(z)], n) for z, n in both)]
            row += [mean_cell(x), mean_cell(y), difference_cell(x, y)]
            rows.append([*row, improvement_cell([x], [y]) if min(len(x), len(y)) > 2 else "-"])
    head = ["environment", "seeds", original, changed, "difference", "probability of improvement"]
    return f"{table(head, rows)}\n\n{text(RETURN_RULE)} {text(IMPROVEMENT_RULE)}"


def main() -> None:
    dry_run = "--dry-run" in sys.argv
    scripts, flags = sys.argv[1:3], [word for word in sys.argv[3:] if word != "--dry-run"]
    if len(scripts) < 2:
        sys.exit(__doc__)
    if missing := [script for script in scripts if not Path(script).is_file()]:
        sys.exit(f"error: no file {missing[0]}")
    try:
        paths = [script_of(str(Path(script).resolve())) for script in scripts]
        runs = plan(paths, with_whole_path(tuple(flags)))
        train_all(runs, dry_run)
    except (Refused, ValueError) as error:
        sys.exit(f"error: {error}")
    if not dry_run and not os.environ.get("TASK"):
        print("\n" + comparison(runs[0].exp, runs[1].exp))


if __name__ == "__main__":
    main()
