#!/usr/bin/env bash
# Atari, ppo_atari.py, one run at a time on all cores, and on the GPU if there is one:
#   bash benchmark/atari.sh         the script's defaults: 10M steps (40M frames)
#   bash benchmark/atari.sh bf16    the same with the convolutional network in bfloat16
#   bash benchmark/atari.sh 1M      the same over 1M steps, annealed to their end: for a CPU
#   bash benchmark/atari.sh fast    "Pong in 5 minutes": 16 environments, 3 epochs, wider clipping; 3M steps, also in bfloat16
# --dry-run prints the commands; run.py has the variables (ENVS, SEEDS, STEPS, SUFFIX, WORKERS, ...).
set -euo pipefail
cd "$(dirname "$0")/.."
read -ra python <<< "${PYTHON:-uv run python}"
exec "${python[@]}" benchmark/run.py atari default "$@"
