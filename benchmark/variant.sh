#!/usr/bin/env bash
# A new idea, variants/ideas/NAME.patch, beside the recipe without it: HalfCheetah, Hopper, Walker2d, 1M steps, same seeds:
#   bash benchmark/variant.sh NAME     one patch that has a row in recipes.csv
#   bash benchmark/variant.sh          all of them
# --dry-run prints the commands; run.py has the variables (ENVS, SEEDS, STEPS, SUFFIX, WORKERS, ...).
set -euo pipefail
cd "$(dirname "$0")/.."
read -ra python <<< "${PYTHON:-uv run python}"
[[ $# == 0 || $* == --dry-run ]] || set -- baseline "$@"
all="baseline staggered_resets adam_reset spo weight_decay cosine_annealing"
exec "${python[@]}" benchmark/run.py variant "$all" "$@"
