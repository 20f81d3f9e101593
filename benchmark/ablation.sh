#!/usr/bin/env bash
# What each detail is worth: about 900 runs of minutes, all of them or
#   bash benchmark/ablation.sh study study_humanoid    PPO, TRPO and their code-level details (Engstrom et al. 2020)
#   bash benchmark/ablation.sh details                 one thing changed at a time in the published recipe, MuJoCo
#   bash benchmark/ablation.sh details_core            the same for ppo.py: CartPole and LunarLander
#   bash benchmark/ablation.sh details_memory details_mining    the LSTM on CartPole, masks on Mining
# What no flag switches is a patch in variants/study/.
# --dry-run prints the commands; run.py has the variables (ENVS, SEEDS, STEPS, SUFFIX, WORKERS, ...).
set -euo pipefail
cd "$(dirname "$0")/.."
read -ra python <<< "${PYTHON:-uv run python}"
exec "${python[@]}" benchmark/run.py ablation "study study_humanoid details details_core details_memory details_mining" "$@"
