#!/usr/bin/env bash
# Discrete and MultiDiscrete actions, ppo_multidiscrete.py:
#   bash benchmark/multidiscrete.sh                MicroRTS, 2M steps: the script's defaults
#   bash benchmark/multidiscrete.sh no_mask        the same without action masks
#   bash benchmark/multidiscrete.sh two_masks      the random enemy, masks of two of the eight components alone
#   bash benchmark/multidiscrete.sh classic        CartPole and Acrobot, 500k steps
#   bash benchmark/multidiscrete.sh lunar          LunarLander, 1M steps: a longer horizon, larger batches; chosen on other seeds
#   bash benchmark/multidiscrete.sh discretized    Hopper, 1M steps: the settings of mujoco.sh, 11 choices a component
# --dry-run prints the commands. Variables: ENVS, SEEDS, STEPS, and those of run.sh (WORKERS, FLAGS, PYTHON).
# Flags, environments and seeds are in recipes.csv.
set -euo pipefail
source "$(dirname "$0")/run.sh"
run_suite multidiscrete "$@"
