#!/usr/bin/env bash
# ppo_lstm.py:
#   bash benchmark/lstm.sh          CartPole without velocities, 1M steps, with memory and without: minutes on a CPU
#   bash benchmark/lstm.sh pong     Pong at 1M steps, and ppo_atari.py (four frames, no memory) at the same steps
#   bash benchmark/lstm.sh games    the published recipe, which is the script's default, at 10M steps; for a GPU
# --dry-run prints the commands. Variables: ENVS (of games), SEEDS, STEPS, and those of run.sh (WORKERS, THREADS, FLAGS,
# PYTHON). Games run one at a time on all cores, and on the GPU if there is one.
set -euo pipefail

# The defaults are for games. CartPole pays 1 a step, so its values are in the tens: the value loss would drown the
# policy's in the network that they share, and value clipping would hold the values back.
CARTPOLE="--mask-velocity --num-envs 16 --learning-rate 1e-3 --gamma 0.98 --clip-coef 0.2 --no-clip-vloss --ent-coef 0"
CARTPOLE+=" --vf-coef 0.001 --no-cuda --no-compile"

export SUITE=lstm SCRIPT=ppo_lstm.py
recipe=${1:-memory} SEEDS=${SEEDS:-1 2 3}
[[ ${2:---dry-run} == --dry-run ]] || recipe=unknown
[[ $recipe == @(memory|--dry-run) ]] || export WORKERS=${WORKERS:-1} THREADS=${THREADS:-$(nproc)}
[[ $recipe != games ]] || SUITE=lstm_games STEPS=${STEPS:-10000000}
STEPS=${STEPS:-1000000}
source "$(dirname "$0")/run.sh"

case $recipe in
    memory | --dry-run)
        run_plan < <(printf 'CartPole-v1 %s\n' "memory $CARTPOLE" "no_memory $CARTPOLE --no-lstm")
        ;;
    pong)
        run_plan <<< "Pong-v5 lstm_1M"
        SCRIPT=ppo_atari.py
        run_plan <<< "Pong-v5 four_frames_1M"
        ;;
    games) run_plan < <(for env in ${ENVS:-Pong-v5 Breakout-v5 BeamRider-v5}; do echo "$env ppo_lstm"; done) ;;
    *) echo "usage: bash benchmark/lstm.sh [memory | pong | games] [--dry-run]" >&2 && exit 2 ;;
esac
