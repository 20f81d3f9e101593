#!/usr/bin/env bash
# Vectors and discrete actions, ppo.py:
#   bash benchmark/classic.sh          CartPole and Acrobot, 500k steps: the script's defaults
#   bash benchmark/classic.sh lunar    LunarLander, 1M steps: a longer horizon and larger batches
# --dry-run prints the commands; run.py has the variables (ENVS, SEEDS, STEPS, SUFFIX, WORKERS, ...).
set -euo pipefail
cd "$(dirname "$0")/.."
read -ra python <<< "${PYTHON:-uv run python}"
exec "${python[@]}" benchmark/run.py classic default "$@"
