#!/usr/bin/env bash
# Atari, ppo_atari.py:
#   bash benchmark/atari.sh         the published recipe, which is the script's default: 10M steps (40M frames)
#   bash benchmark/atari.sh bf16    the same with the convolutional network in bfloat16
#   bash benchmark/atari.sh 1M      the published recipe over 1M steps, annealed to their end: for a CPU
#   bash benchmark/atari.sh fast    "Pong in 5 minutes": 16 environments, 3 epochs, wider clipping; 3M steps
# --dry-run prints the commands. Variables: ENVS, SEEDS, STEPS, and those of run.sh (WORKERS, THREADS, FLAGS, PYTHON).
# One run at a time on all cores, and on the GPU if there is one.
set -euo pipefail
SUITE=atari SCRIPT=ppo_atari.py WORKERS=${WORKERS:-1} THREADS=${THREADS:-$(nproc)}
source "$(dirname "$0")/run.sh"

recipe=${1:-published}
[[ ${2:---dry-run} == --dry-run ]] || recipe=unknown
case $recipe in
    published | --dry-run) experiment=ppo_atari ENVS=${ENVS:-Breakout-v5 Pong-v5 BeamRider-v5} ;;
    bf16) experiment="bf16 --bf16" ENVS=${ENVS:-Breakout-v5 Pong-v5} ;;
    1M) SUITE=atari_1M experiment=ppo_atari_1M STEPS=${STEPS:-1000000} ENVS=${ENVS:-Breakout-v5} ;;
    fast)
        SUITE=atari_fast STEPS=${STEPS:-3000000} ENVS=${ENVS:-Pong-v5}
        experiment="fast --clip-coef 0.2 --num-envs 16 --num-minibatches 8 --update-epochs 3"
        ;;
    *) echo "usage: bash benchmark/atari.sh [published | bf16 | 1M | fast] [--dry-run]" >&2 && exit 2 ;;
esac
SEEDS=${SEEDS:-1 2 3} STEPS=${STEPS:-10000000}
run_plan < <(for env in $ENVS; do echo "$env $experiment"; done)
