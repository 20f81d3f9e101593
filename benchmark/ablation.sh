#!/usr/bin/env bash
# What each detail is worth:
#   bash benchmark/ablation.sh              everything below: seeds 1 to 3 of all tables, then 4 and 5, then the rest
#   bash benchmark/ablation.sh study        PPO, TRPO and their code-level details (Engstrom et al. 2020): Walker2d, Hopper,
#                                           Humanoid, 1M steps, the flags of their released configurations
#   bash benchmark/ablation.sh details      the published recipe with one thing changed at a time: HalfCheetah, Hopper, Walker2d;
#                                           core details on CartPole and LunarLander, the LSTM's on CartPole, masks on Mining
#   bash benchmark/ablation.sh study_humanoid, details_core, details_memory, details_mining     one of these alone
# --dry-run prints the commands. Variables: ENVS, SEEDS, STEPS, and those of run.sh. Flags, environments and seeds are in
# recipes.csv; what no flag switches is a patch in variants/. A01 to A09 and P01 to P10 need a GPU: they have no runs.
set -euo pipefail
source "$(dirname "$0")/run.sh"
recipe=${1:-}
[[ ${2:---dry-run} == --dry-run ]] || run_suite ablation "$recipe" "$2" # says how it is used
case $recipe in
"" | --dry-run) read -rd "" -a recipes < <(recipes_of ablation) || true ;;
study) recipes=(study study_humanoid) ;;
details) recipes=(details details_core details_memory details_mining) ;;
*) recipes=("$recipe") && recipes_of ablation | grep -qx -- "$recipe" || run_suite ablation "$recipe" ;; # says what there is
esac
run_in_turns ablation "${recipes[@]}"
