#!/usr/bin/env bash
# Is a changed copy of a script better than the original? Trains both with the same seeds and prints the difference:
#   bash benchmark/compare.sh ppo_continuous_mujoco.py my_ppo.py [FLAGS of both]
# ENVS (the original's default), SEEDS ("1 2 3 4 5") and STEPS (1000000) say which runs; run.py has WORKERS, THREADS, GPUS.
set -euo pipefail
read -ra python <<< "${PYTHON:-uv run python}"
exec "${python[@]}" "$(dirname "$0")/compare.py" "$@"
