#!/usr/bin/env bash
# Procgen, easy, all levels, ppo_procgen.py and ppg_procgen.py, one run at a time on all cores and the GPU if there is one:
#   bash benchmark/procgen.sh          PPO with the script's defaults, 25M steps: for a GPU, as the next four
#   bash benchmark/procgen.sh ppo_bf16 ppg ppg_bf16    in bfloat16; PPG; PPG in bfloat16
#   bash benchmark/procgen.sh openai                   PPG as openai/phasic-policy-gradient runs it, four processes
#   bash benchmark/procgen.sh 4M_ppo 4M_ppg            the first 4.2M steps of starpilot in bfloat16
#   bash benchmark/procgen.sh 3M_ppo                   the first 3M steps, two to three hours of two cores
#   bash benchmark/procgen.sh 3M_reward_gamma 3M_glorot    with train-procgen's scale of rewards; and its initial weights
#   bash benchmark/procgen.sh short_ppo short_ppg      half a million steps of starpilot, PPG with phases of 8 iterations
# --dry-run prints the commands; run.py has the variables (ENVS, SEEDS, STEPS, SUFFIX, WORKERS, ...).
set -euo pipefail
cd "$(dirname "$0")/.."
read -ra python <<< "${PYTHON:-uv run python}"
exec "${python[@]}" benchmark/run.py procgen ppo "$@"
