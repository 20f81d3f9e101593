#!/usr/bin/env bash
# The picture and the video at the top of the README: HalfCheetah with the strong recipe of mujoco.sh, one seed, minutes
# on one core, then one episode of the trained agent without noise:
#   bash benchmark/start.sh             -> results/start/, figures/start.gif; report.py --write draws figures/start.png
# --dry-run prints the command. Variables: ENVS (one), SEEDS (one), STEPS, and those of run.sh (FLAGS, PYTHON).
set -euo pipefail
SUITE=start SCRIPT=ppo_continuous_mujoco.py STEPS=${STEPS:-1000000} SEEDS=${SEEDS:-1} ENVS=${ENVS:-HalfCheetah-v4}
[[ ${1:---dry-run} == --dry-run ]] || { echo "usage: bash benchmark/start.sh [--dry-run]" >&2 && exit 2; }
source "$(dirname "$0")/run.sh"

strong="--num-envs 64 --num-steps 32 --no-clip-vloss --init-log-std -0.5 --no-norm-adv --vf-coef 0.25 --scale-actions"
run_plan <<< "$ENVS start $strong"
[[ ! $DRY_RUN ]] || exit 0
read -ra python <<< "$PYTHON"
# shellcheck disable=SC2086
run=$(find_run "$SEEDS" "$ENVS" start $strong)
"${python[@]}" $SCRIPT --evaluate "$run" --capture-video --eval-episodes 1 --eval-deterministic
"${python[@]}" benchmark/animate.py "$run"/eval_videos/*.mp4 benchmark/figures/start.gif
