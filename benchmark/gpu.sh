#!/usr/bin/env bash
# A GPU that is lent for minutes: tests, speed beside peers, curves that go on from lease to lease.
#   bash benchmark/gpu.sh OUT SECONDS STEP...    the steps one after the other, ended after SECONDS
#   tests                   pytest -m cuda; a skipped test counts as failed
#   speed:NAME              a row of pairs.csv, one pair, the peer from PEERS with PEER_PYTHON
#   SUITE:RECIPE            a recipe of a suite, such as procgen:ppo_bf16; ENVS, SEEDS, WORKERS and so on as in run.py
# OUT gets log.txt and kept.tar.gz.00, .01, ... (parts of 15 MB, every minute): new results files, and of each run what
# goes on elsewhere: checkpoint, config, episodes, the script. A machine that finds these in OUT goes on from them.
# PPG's rollouts stay behind, so its runs are kept as they were at the end of their last phase.
#   PYTHON    one with torch for this GPU (python3)
#   WHEELS    folder of wheels for what it lacks (.whl), installed without a network into .gpu/site
#   COMMIT    what is run, where there is no git to ask
set -euo pipefail
[[ $# -ge 3 ]] || { sed -n '2,/^set/{/^set/d;s/^# //;p}' "$0" >&2; exit 2; }
out=$(realpath -m "$1") limit=$2
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p "$out" .gpu/staged runs
exec > >(tee -a "$out/log.txt") 2>&1
export PYTHON=${PYTHON:-python3} PYTHONUNBUFFERED=1 CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-0}

prepare() { # packages, what an earlier lease has kept, what this machine is
    if compgen -G "${WHEELS:-.whl}/*.whl" > /dev/null && [[ ! -e .gpu/site ]]; then
        "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target .gpu/site "${WHEELS:-.whl}"/*.whl
    fi
    export PYTHONPATH=$PWD/.gpu/site${PYTHONPATH:+:$PYTHONPATH}
    touch .gpu/begun # results files that are newer than this are kept
    sleep 1
    if compgen -G "$out/kept.tar.gz.*" > /dev/null; then
        cat "$out"/kept.tar.gz.* | tar -xzm --skip-old-files
        echo "goes on from $out"
    fi
    date
    nvidia-smi || echo "no nvidia-smi"
    "$PYTHON" -c "import torch; print('torch', torch.__version__, torch.cuda.is_available())"
}

stage() { # copies of runs that a kill cannot tear; of PPG's only between two phases
    "$PYTHON" - << 'END'
import json
import shutil
from pathlib import Path

import torch

for checkpoint in Path("runs").glob("*/runs/*/checkpoint.pt"):
    run, copy = checkpoint.parent, Path(".gpu/staged") / checkpoint.parent
    new = copy.with_suffix(".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    # in this order: the episodes may be ahead of the checkpoint, not behind it
    for pattern in ("checkpoint.pt", "config*.json", "episodes.csv", "*.py"):
        for file in run.glob(pattern):
            shutil.copy2(file, new)
    phase = json.loads((new / "config.json").read_text())["args"].get("n_iteration", 1)
    if torch.load(new / "checkpoint.pt", map_location="cpu")["iteration"] % phase == 0:
        shutil.rmtree(copy, ignore_errors=True)
        new.rename(copy)
    else:
        shutil.rmtree(new)
END
}

keep() { # to OUT, whole or not at all
    local new=.gpu/new
    rm -rf "$new"
    mkdir -p "$new"
    stage || return # what is kept stays
    find benchmark/results -name '*.csv' -newer .gpu/begun -print0 > .gpu/results
    tar -cz --null -T .gpu/results -C .gpu/staged . | split -d -b 15M - "$new/kept.tar.gz." || return
    rm -f "$out"/kept.tar.gz.*
    mv "$new"/* "$out"
}

step() { # one of those above
    case $1 in
        tests) exec "$PYTHON" -m pytest -m cuda -n 8 --no-skips-but '^$' tests/test_cuda.py ;;
        speed:*)
            SUFFIX=_mine exec bash benchmark/speed.sh "${1#speed:}" "${PEERS:-peer}" "${PEER_PYTHON:-$PYTHON}" \
                --pairs 1 --short --max-load 1000
            ;;
        *) exec bash "benchmark/${1%%:*}.sh" "${1#*:}" ;;
    esac
}

prepare
for name; do
    echo "== $name, at $SECONDS s"
    step "$name" < /dev/null &
    running=$!
    kept=$SECONDS
    while kill -0 "$running" 2> /dev/null && ((SECONDS < limit)); do
        sleep 1
        ((SECONDS < kept + 60)) || { keep && kept=$SECONDS; }
    done
    ((SECONDS < limit)) || kill "$running" 2> /dev/null || true # its runs end with it
    code=0
    wait "$running" || code=$?
    keep
    echo "== $name: exit code $code, at $SECONDS s"
done
