#!/usr/bin/env bash
# Vectors and discrete actions, ppo.py:
#   bash benchmark/classic.sh          CartPole and Acrobot, 500k steps: the published recipe, the script's default
#   bash benchmark/classic.sh lunar    LunarLander, 1M steps: a longer horizon, larger batches
# --dry-run prints the commands. Variables: ENVS, SEEDS, STEPS, and those of run.sh (WORKERS, FLAGS, PYTHON).
set -euo pipefail

LUNAR="lunar --num-envs 16 --num-steps 256 --num-minibatches 64 --learning-rate 5e-4 --no-clip-vloss --gamma 0.999"
LUNAR+=" --gae-lambda 0.98"

recipe=${1:-published}
[[ ${2:---dry-run} == --dry-run ]] || recipe=unknown
case $recipe in
    published | --dry-run) experiment=ppo steps=500000 ENVS=${ENVS:-CartPole-v1 Acrobot-v1} ;;
    lunar) experiment=$LUNAR steps=1000000 ENVS=${ENVS:-LunarLander-v3} SEEDS=${SEEDS:-11 12 13} ;; # chosen on others
    *) echo "usage: bash benchmark/classic.sh [published | lunar] [--dry-run]" >&2 && exit 2 ;;
esac
SUITE=classic SCRIPT=ppo.py STEPS=${STEPS:-$steps} SEEDS=${SEEDS:-1 2 3}
source "$(dirname "$0")/run.sh"
run_plan < <(for env in $ENVS; do echo "$env $experiment"; done)
