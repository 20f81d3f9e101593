#!/usr/bin/env bash
# Images, ppo_pixels.py:
#   bash benchmark/pixels.sh        CartPole from its pictures: the script's defaults
#   bash benchmark/pixels.sh car    CarRacing, Box actions
# --dry-run prints the commands; run.py has the variables (ENVS, SEEDS, STEPS, SUFFIX, WORKERS, ...).
set -euo pipefail
cd "$(dirname "$0")/.."
read -ra python <<< "${PYTHON:-uv run python}"
exec "${python[@]}" benchmark/run.py pixels default "$@"
