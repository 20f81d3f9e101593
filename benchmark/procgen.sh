#!/usr/bin/env bash
# Procgen, easy, all levels, 25M steps, ppo_procgen.py and ppg_procgen.py:
#   bash benchmark/procgen.sh ppo          the published recipe of PPO, which is the script's default
#   bash benchmark/procgen.sh ppg          that of PPG; hours on a GPU, days on a CPU
#   bash benchmark/procgen.sh bf16         the same with the network in bfloat16
#   bash benchmark/procgen.sh openai       PPG as openai/phasic-policy-gradient runs it, but one process and easy
#   bash benchmark/procgen.sh short_ppo    half a million steps of starpilot, for a CPU
#   bash benchmark/procgen.sh short_ppg    the same, with policy phases of 8 iterations instead of 32, and --bf16
# --dry-run prints the commands. Variables: ENVS, SEEDS, STEPS, and those of run.sh (WORKERS, THREADS, FLAGS, PYTHON).
# One run at a time on all cores, and on the GPU if there is one. One seed at first: SEEDS="1 2 3" adds two.
set -euo pipefail
recipe=${1:-ppo}
[[ ${2:---dry-run} == --dry-run ]] || recipe=unknown
SUITE=procgen SCRIPT=ppg_procgen.py STEPS=${STEPS:-} WORKERS=${WORKERS:-1} THREADS=${THREADS:-$(nproc)}
source "$(dirname "$0")/run.sh"

case $recipe in
    ppo | --dry-run) SCRIPT=ppo_procgen.py experiment=ppo_procgen ;;
    ppg) experiment=ppg_procgen ;;
    bf16) experiment="ppg_bf16 --bf16" ;;
    openai)
        experiment="openai --arch dual --aux-adam --env-minibatches --no-clip-vloss --vf-coef 1 --max-grad-norm 0"
        experiment+=" --norm-reward-rollout --reward-gamma 0.99"
        ;;
    short_ppo) SCRIPT=ppo_procgen.py experiment=ppo_short ;;
    short_ppg) experiment="ppg_short --n-iteration 8 --bf16" ;;
    *)
        echo "usage: bash benchmark/procgen.sh [ppo | ppg | bf16 | openai | short_ppo | short_ppg] [--dry-run]" >&2
        exit 2
        ;;
esac
[[ $recipe != short_* ]] || SUITE=procgen_short STEPS=${STEPS:-507904} ENVS=${ENVS:-starpilot}
STEPS=${STEPS:-25000000} ENVS=${ENVS:-starpilot bigfish bossfight} SEEDS=${SEEDS:-1}
run_plan < <(for env in $ENVS; do echo "$env $experiment"; done)
