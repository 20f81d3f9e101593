#!/usr/bin/env bash
# MultiDiscrete actions and action masks, ppo_multidiscrete.py:
#   bash benchmark/multidiscrete.sh                MicroRTS, 2M steps: the script's defaults
#   bash benchmark/multidiscrete.sh no_mask        the same without action masks
#   bash benchmark/multidiscrete.sh two_masks      the random enemy, masks of two of the eight components alone
#   bash benchmark/multidiscrete.sh discretized    Hopper, 1M steps: the default settings of MuJoCo, 11 choices a component
# --dry-run prints the commands; run.py has the variables (ENVS, SEEDS, STEPS, SUFFIX, WORKERS, ...).
set -euo pipefail
cd "$(dirname "$0")/.."
read -ra python <<< "${PYTHON:-uv run python}"
[[ ${1:---dry-run} != --dry-run ]] || set -- default "$@"
exec "${python[@]}" benchmark/run.py multidiscrete "$@"
