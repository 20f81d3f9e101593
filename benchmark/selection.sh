#!/usr/bin/env bash
# The clean repetition of the search for a strong recipe, by the plan of docs/selection.md: three rounds, each of the
# candidates that the one before has left; 144 runs of 1M steps on HalfCheetah, Hopper, Walker2d and Ant:
#   bash benchmark/selection.sh            the three rounds
#   bash benchmark/selection.sh results    when one is chosen: that recipe on new seeds, beside the others
# --dry-run prints the commands of the rounds whose candidates are known. Variables: those of run.sh but ENVS, SEEDS and STEPS.
# Candidates are in selection.csv, seeds and the rule in selection.py.
set -euo pipefail
source "$(dirname "$0")/run.sh"
rounds=(1 2 3) SUITE=selection
[[ ${1:-} != results ]] || { rounds=(known unseen) SUITE=selection_results && shift; }
[[ ! ${1:-} || ${1:-} == --dry-run ]] || { echo "usage: bash benchmark/selection.sh [results] [--dry-run]" >&2 && exit 2; }
[[ ! ${ENVS:-}${SEEDS:-}${STEPS:-} ]] || { echo "error: no ENVS, SEEDS and STEPS here: the plan has them" >&2 && exit 2; }
read -ra python <<< "$PYTHON"
STEPS=1000000
check_flags ppo_continuous_mujoco.py
for round in "${rounds[@]}"; do
    plan=$("${python[@]}" benchmark/selection.py "$round") || { [[ $DRY_RUN && ! ${TASK:-} ]] && break; exit 1; } # the last one is not complete
    SEEDS=$(head -n 1 <<< "$plan")
    run_scripts "$(tail -n +2 <<< "$plan")"
    [[ ! $FAILED$FOUND ]] || break # a run of another plan may lie where its result belongs; or TASK is done
done
finish
