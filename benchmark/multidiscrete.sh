#!/usr/bin/env bash
# Components and action masks, ppo_multidiscrete.py and ppo_microrts.py:
#   bash benchmark/multidiscrete.sh                LunarLanderContinuous, 0.5M steps: the defaults of ppo_multidiscrete.py
#   bash benchmark/multidiscrete.sh microrts       MicroRTS, 2M steps: the defaults of ppo_microrts.py
#   bash benchmark/multidiscrete.sh no_mask        the same without action masks
#   bash benchmark/multidiscrete.sh two_masks      the random enemy, masks of two of the eight components alone
# --dry-run prints the commands; run.py has the variables (ENVS, SEEDS, STEPS, SUFFIX, WORKERS, ...).
set -euo pipefail
cd "$(dirname "$0")/.."
read -ra python <<< "${PYTHON:-uv run python}"
exec "${python[@]}" benchmark/run.py multidiscrete default "$@"
