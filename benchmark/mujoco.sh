#!/usr/bin/env bash
# MuJoCo at 1M steps, ppo_continuous_mujoco.py:
#   bash benchmark/mujoco.sh             the script's defaults; HalfCheetah and Hopper also with the published recipe,
#                                        which does not bootstrap where a time limit ends an episode
#   bash benchmark/mujoco.sh strong      our strong recipe, the same flags for every environment
#   bash benchmark/mujoco.sh chosen      its successor, see docs/selection.md
#   bash benchmark/mujoco.sh pendulum    why the chosen recipe does not pay on InvertedPendulum, and what helps there
#   bash benchmark/mujoco.sh ablation    the strong recipe with one of its departures taken back at a time
# --dry-run prints the commands. Variables: ENVS, SEEDS, STEPS, and those of run.sh. Flags, environments and seeds are in
# recipes.csv. Of the ablations Humanoid has one, of scaled actions: the other three have bounds of -1 and 1 anyway.
set -euo pipefail
source "$(dirname "$0")/run.sh"
run_suite mujoco "$@"
