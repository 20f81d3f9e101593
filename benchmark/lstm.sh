#!/usr/bin/env bash
# ppo_lstm.py:
#   bash benchmark/lstm.sh          CartPole without velocities, 1M steps, with memory and without: minutes on a CPU
#   bash benchmark/lstm.sh pong     Pong at 1M steps, and ppo_atari.py (four frames, no memory) at the same steps
#   bash benchmark/lstm.sh games    the script's defaults at 10M steps; for a GPU
#   bash benchmark/lstm.sh bf16     the same with the convolutional network in bfloat16
# --dry-run prints the commands. Variables: ENVS (of games), SEEDS, STEPS, and those of run.sh (WORKERS, THREADS, FLAGS,
# PYTHON). Games run one at a time on all cores, and on the GPU if there is one. Flags, environments and seeds are in recipes.csv.
#
# The defaults are for games. CartPole pays 1 a step, so its values are in the tens: the value loss would drown the
# policy's in the network that they share, and value clipping would hold the values back. So it has flags of its own.
set -euo pipefail
source "$(dirname "$0")/run.sh"
run_suite lstm "$@"
