#!/usr/bin/env bash
# Memory, ppo_lstm.py and ppo_atari_lstm.py:
#   bash benchmark/lstm.sh             CartPole without velocities, with memory and without: minutes on a CPU
#   bash benchmark/lstm.sh continuous  a pendulum without velocities, the patch continuous_lstm, with memory and without
#   bash benchmark/lstm.sh pong        Pong at 1M steps, and ppo_atari.py (four frames, no memory) at the same steps
#   bash benchmark/lstm.sh games       the defaults of ppo_atari_lstm.py at 10M steps; for a GPU
#   bash benchmark/lstm.sh bf16        the same with the convolutional network in bfloat16
# --dry-run prints the commands; run.py has the variables (ENVS, SEEDS, STEPS, SUFFIX, WORKERS, ...).
set -euo pipefail
cd "$(dirname "$0")/.."
read -ra python <<< "${PYTHON:-uv run python}"
exec "${python[@]}" benchmark/run.py lstm memory "$@"
