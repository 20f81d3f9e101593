#!/usr/bin/env bash
# The picture and the video at the top of the README: HalfCheetah with the flags of its Quick start, one seed, minutes on
# one core, then one episode of the trained agent without noise:
#   bash benchmark/start.sh             -> results/start/, figures/start.gif; report.py --write draws figures/start.png
# --dry-run prints the command. Variables: ENVS (one), SEEDS (one), STEPS, and those of run.sh (FLAGS, PYTHON).
set -euo pipefail
source "$(dirname "$0")/run.sh"
run_suite start "$@"
[[ ! $DRY_RUN ]] || exit 0

read -ra python <<< "$PYTHON"
read -r script run <<< "$(plan_of start "")" # one experiment: SCRIPT ENV EXP FLAGS...
# shellcheck disable=SC2086
run=$(find_run "$SEEDS" $run)
[[ $run ]] || { echo "error: the run itself is not here; delete benchmark/results/start/ to train it again" >&2; exit 1; }
"${python[@]}" "$script" --evaluate "$run" --capture-video --eval-episodes 1 --eval-deterministic
"${python[@]}" benchmark/animate.py "$run"/eval_videos_*/*.mp4 benchmark/figures/start.gif
