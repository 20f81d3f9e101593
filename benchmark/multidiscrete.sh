#!/usr/bin/env bash
# Discrete and MultiDiscrete actions, ppo_multidiscrete.py:
#   bash benchmark/multidiscrete.sh                MicroRTS, 2M steps: the published recipe, the script's default
#   bash benchmark/multidiscrete.sh no_mask        the same without action masks
#   bash benchmark/multidiscrete.sh classic        CartPole and Acrobot, 500k steps
#   bash benchmark/multidiscrete.sh lunar          LunarLander, 1M steps: a longer horizon, larger batches
#   bash benchmark/multidiscrete.sh discretized    Hopper, 1M steps: the settings of mujoco.sh, 11 choices a component
# --dry-run prints the commands. Variables: ENVS, SEEDS, STEPS, and those of run.sh (WORKERS, FLAGS, PYTHON).
set -euo pipefail

TASKS="MicrortsMining-v1 MicrortsAttackShapedReward-v1 MicrortsRandomEnemyShapedReward3-v1"
TASKS+=" MicrortsProduceCombatUnitsShapedReward-v1"
CLASSIC="classic --num-envs 4 --clip-coef 0.2 --no-shared-network"
LUNAR="lunar --num-envs 16 --num-steps 256 --num-minibatches 64 --learning-rate 5e-4 --clip-coef 0.2 --no-clip-vloss"
LUNAR+=" --gamma 0.999 --gae-lambda 0.98 --no-shared-network"
DISCRETIZED="discretized --discretize-actions 11 --norm-obs --norm-reward --no-shared-network --num-envs 1"
DISCRETIZED+=" --num-steps 2048 --num-minibatches 32 --update-epochs 10 --learning-rate 3e-4 --clip-coef 0.2 --ent-coef 0"

recipe=${1:-published}
[[ ${2:---dry-run} == --dry-run ]] || recipe=unknown
case $recipe in
    published | --dry-run) experiment=ppo_multidiscrete steps=2000000 ENVS=${ENVS:-$TASKS} ;;
    no_mask) experiment="no_mask --no-action-mask" steps=2000000 ENVS=${ENVS:-$TASKS} ;;
    classic) experiment=$CLASSIC steps=500000 ENVS=${ENVS:-CartPole-v1 Acrobot-v1} ;;
    lunar) experiment=$LUNAR steps=1000000 ENVS=${ENVS:-LunarLander-v3} SEEDS=${SEEDS:-11 12 13} ;; # chosen on others
    discretized) experiment=$DISCRETIZED steps=1000000 ENVS=${ENVS:-Hopper-v4} ;;
    *) echo "usage: bash benchmark/multidiscrete.sh [published | no_mask | classic | lunar | discretized] [--dry-run]" >&2 && exit 2 ;;
esac
SUITE=multidiscrete SCRIPT=ppo_multidiscrete.py STEPS=${STEPS:-$steps} SEEDS=${SEEDS:-1 2 3}
source "$(dirname "$0")/run.sh"
run_plan < <(for env in $ENVS; do echo "$env $experiment"; done)
