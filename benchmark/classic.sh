#!/usr/bin/env bash
# Vectors and discrete actions, ppo.py:
#   bash benchmark/classic.sh          CartPole and Acrobot, 500k steps: the script's defaults
#   bash benchmark/classic.sh lunar    LunarLander, 1M steps: a longer horizon, larger batches; chosen on other seeds
# --dry-run prints the commands. Variables: ENVS, SEEDS, STEPS, and those of run.sh (WORKERS, FLAGS, PYTHON).
# Flags, environments and seeds are in recipes.csv.
set -euo pipefail
source "$(dirname "$0")/run.sh"
run_suite classic "$@"
