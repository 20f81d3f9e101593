#!/usr/bin/env bash
# Mistakes, variants/broken/NAME.patch, beside healthy runs of the same five seeds; minutes of one core for each recipe:
#   bash benchmark/broken.sh           all of them:
#   bash benchmark/broken.sh cartpole  ppo.py
#   bash benchmark/broken.sh hopper    ppo_continuous_mujoco.py
#   bash benchmark/broken.sh memory    ppo_lstm.py on CartPole without velocities
# --dry-run prints the commands; run.py has the variables (ENVS, SEEDS, STEPS, SUFFIX, WORKERS, ...).
set -euo pipefail
cd "$(dirname "$0")/.."
read -ra python <<< "${PYTHON:-uv run python}"
exec "${python[@]}" benchmark/run.py broken "cartpole hopper memory" "$@"
