#!/usr/bin/env bash
# Procgen, easy, all levels, 25M steps, ppo_procgen.py and ppg_procgen.py:
#   bash benchmark/procgen.sh ppo          PPO with the script's defaults
#   bash benchmark/procgen.sh ppg          PPG with its defaults; hours on a GPU, days on a CPU
#   bash benchmark/procgen.sh bf16         the same with the network in bfloat16
#   bash benchmark/procgen.sh openai       PPG as openai/phasic-policy-gradient runs it, but easy
#   bash benchmark/procgen.sh 4M_ppo       the first 4.2M steps of starpilot in bfloat16: minutes of a GPU; 4M_ppg is PPG, eight of its phases
#   bash benchmark/procgen.sh 3M_ppo       the first 3M steps, two to three hours of two cores that have bfloat16 arithmetic
#   bash benchmark/procgen.sh 3M_reward_gamma   the same, rewards scaled as openai/train-procgen does
#   bash benchmark/procgen.sh 3M_glorot    and with its initial weights, variants/glorot_init.patch
#   bash benchmark/procgen.sh short_ppo    half a million steps of starpilot, for a CPU
#   bash benchmark/procgen.sh short_ppg    the same, with policy phases of 8 iterations instead of 32, and --bf16
#   bash benchmark/procgen.sh short_float32    the same without --bf16, for a processor without such arithmetic
# --dry-run prints the commands. Variables: ENVS, SEEDS, STEPS, and those of run.sh (WORKERS, THREADS, FLAGS, PYTHON).
# One run at a time on all cores, and on the GPU if there is one. One seed at first: SEEDS="1 2 3" adds two. Flags and environments are in
# recipes.csv.
set -euo pipefail
source "$(dirname "$0")/run.sh"
run_suite procgen "$@"
