#!/usr/bin/env bash
# Our script and a peer's on this machine, five pairs by turns -> results/speed/NAME.csv:
#   bash benchmark/speed.sh NAME CLONE PYTHON    a row of pairs.csv, a clone of the peer's repository, its Python
# SUFFIX=_mine measures beside what is there. CUDA_VISIBLE_DEVICES=0 lets both see a GPU. speed.py says how it measures.
set -euo pipefail
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-}
read -ra python <<< "${PYTHON:-uv run python}"
exec "${python[@]}" "$(dirname "$0")/speed.py" "$@"
