#!/usr/bin/env bash
# Our script against a peer's on this machine, in pairs by turns (ours, peer, peer, ours, ours, ...):
#   bash benchmark/speed.sh OURS PEER PEER_PYTHON [REPETITIONS] [--short] [--max-load LOAD] [--replace]
# Both scripts take --env-id, --total-timesteps and --seed and write the TensorBoard tag charts/SPS into runs/.
# With - for PEER and PEER_PYTHON ours runs alone. By default five pairs of whole runs of 1M steps. Windows of less than
# 30 seconds are refused without --short, a start at a load above 0.5 without --max-load, and a results file that exists
# without --replace.
#   ENV_ID, STEPS            what to train on (HalfCheetah-v4) and for how long (1000000): a minute or more of each side
#   OURS_FLAGS, PEER_FLAGS   more flags for one side, such as OURS_FLAGS="--no-compile"
#   NAME                     of results/speed/NAME.csv (default: OURS__PEER); needed with OURS_FLAGS or PEER_FLAGS
#   THREADS                  of each side (1)
#   CLEANRL_SCRIPT, LEANRL_SCRIPT, BLOG_SCRIPT   the file that a peer of peers/ starts
#   PYTHON                   runs ours (default: uv run python); CUDA_VISIBLE_DEVICES=0 lets both see a GPU
set -euo pipefail
[[ $# -ge 3 ]] || { sed -n '2,/^set/{/^set/d;s/^# //;p}' "$0" >&2; exit 2; }
export OMP_NUM_THREADS=${THREADS:-1} CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-}
export OPENBLAS_NUM_THREADS=$OMP_NUM_THREADS MKL_NUM_THREADS=$OMP_NUM_THREADS
read -ra python <<< "${PYTHON:-uv run python}"
exec "${python[@]}" "$(dirname "$0")/speed.py" "$@" --env-id "${ENV_ID:-HalfCheetah-v4}" \
    --steps "${STEPS:-1000000}" --name "${NAME:-}" --ours-flags="${OURS_FLAGS:-}" --peer-flags="${PEER_FLAGS:-}"
