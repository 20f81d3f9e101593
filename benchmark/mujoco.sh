#!/usr/bin/env bash
# MuJoCo, ppo_continuous_mujoco.py, 1M steps: the front page's table and figure, five hours on two cores.
#   bash benchmark/mujoco.sh              default and tuned
#   bash benchmark/mujoco.sh default      the script's defaults: the published values, but time limits bootstrap
#   bash benchmark/mujoco.sh tuned        one set of flags for all tasks
#   bash benchmark/mujoco.sh published    default without bootstrapping at time limits, as CleanRL has it
#   bash benchmark/mujoco.sh strong       tuned without --gae-lambda 0.9 --staggered-resets
#   bash benchmark/mujoco.sh trpo         trpo_continuous_mujoco.py on Hopper, with the flags of TRPO+
#   bash benchmark/mujoco.sh pendulum     five more seeds of tuned on InvertedPendulum, and two changes that may help
# --dry-run prints the commands; run.py has the variables (ENVS, SEEDS, STEPS, SUFFIX, WORKERS, ...).
set -euo pipefail
cd "$(dirname "$0")/.."
read -ra python <<< "${PYTHON:-uv run python}"
exec "${python[@]}" benchmark/run.py mujoco "default tuned" "$@"
