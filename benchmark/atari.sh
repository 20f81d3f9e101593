#!/usr/bin/env bash
# Atari at 10M steps (40M frames), ppo_atari.py:
#   bash benchmark/atari.sh         the published recipe, which is the script's default
#   bash benchmark/atari.sh bf16    the same with the convolutional network in bfloat16
#   bash benchmark/atari.sh fast    "Pong in 5 minutes": 16 environments, 3 epochs, wider clipping
# --dry-run prints the commands. Variables: ENVS, SEEDS, STEPS, and those of run.sh (WORKERS, THREADS, FLAGS, PYTHON).
# One run at a time on all cores, and on the GPU if there is one.
set -euo pipefail
SUITE=atari SCRIPT=ppo_atari.py STEPS=${STEPS:-10000000} WORKERS=${WORKERS:-1} THREADS=${THREADS:-$(nproc)}
source "$(dirname "$0")/run.sh"

recipe=${1:-published}
[[ ${2:---dry-run} == --dry-run ]] || recipe=unknown
case $recipe in
    published | --dry-run) experiment=ppo_atari ENVS=${ENVS:-Breakout-v5 Pong-v5 BeamRider-v5} ;;
    bf16) experiment="bf16 --bf16" ENVS=${ENVS:-Breakout-v5 Pong-v5} ;;
    fast) experiment="fast --clip-coef 0.2 --num-envs 16 --num-minibatches 8 --update-epochs 3" ENVS=${ENVS:-Pong-v5} ;;
    *) echo "usage: bash benchmark/atari.sh [published | bf16 | fast] [--dry-run]" >&2 && exit 2 ;;
esac
SEEDS=${SEEDS:-1 2 3}
for env in $ENVS; do echo "$env $experiment"; done | run_plan
