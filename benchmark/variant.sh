#!/usr/bin/env bash
# A new idea, variants/NAME.patch, on the strong recipe beside the recipe as it is: HalfCheetah, Hopper, Walker2d, 1M steps:
#   bash benchmark/variant.sh NAME     both with the same seeds; ends in their difference
#   bash benchmark/variant.sh          every patch that has a row in recipes.csv
# --dry-run prints the commands. Variables: ENVS, SEEDS, STEPS, and those of run.sh. docs/variants.md says how to add one.
set -euo pipefail
source "$(dirname "$0")/run.sh"
name=${1:-}
[[ ${2:---dry-run} == --dry-run ]] || run_suite variant "$name" "$2" # says how it is used
if [[ ! $name || $name == --dry-run ]]; then
    read -rd "" -a recipes < <(recipes_of variant) || true
else
    recipes_of variant | grep -qx -- "$name" || run_suite variant "$name" # says what there is
    recipes=(baseline "$name")
    [[ $name != baseline ]] || recipes=(baseline)
fi
run_in_turns variant "${recipes[@]}"
read -ra python <<< "$PYTHON"
[[ $DRY_RUN ]] || "${python[@]}" benchmark/report.py --only "variants${SUFFIX:-}"
