# shellcheck shell=bash
# What the suites share. A suite sets SUITE, SCRIPT, SEEDS and STEPS, sources this file and pipes its plan into
# `run_plan`: one line for each experiment, ENV EXP FLAGS..., which becomes one run for each seed.
#   WORKERS  runs side by side (default 2)
#   THREADS  threads of each run (default 1)
#   FLAGS    flags for every run that do not change what it learns, such as "--track" or "--checkpoint-every 10"
#   PYTHON   how to start Python (default: uv run python)
#   GPUS     GPUs of this machine, such as "0 1 2 3": the runs side by side have one each
#   TASK     number of a run of the plan, from 0: only that one, see slurm.sbatch
export SUITE SCRIPT STEPS FLAGS=${FLAGS:-} PYTHON=${PYTHON:-uv run python} DRY_RUN=
export OMP_NUM_THREADS=${THREADS:=1} OPENBLAS_NUM_THREADS=$THREADS MKL_NUM_THREADS=$THREADS
[[ " $* " != *" --dry-run "* ]] || DRY_RUN=yes WORKERS=1
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

find_run() { # NAME: its newest run directory that holds a checkpoint
    local file found=""
    for file in runs/"$1"__*/checkpoint.pt; do [[ ! -e $file ]] || found=${file%/*}; done
    echo "$found"
}

run_one() { # SEED ENV EXP FLAGS...: one run up to its results file; 255 if it was stopped, which ends the suite
    local seed=$1 env=${2//\//-} env_id=$2 exp=$3 python flags status=0
    shift 3
    local name=${env}__${exp}__$seed csv=benchmark/results/$SUITE/$env/${exp}__$seed.csv
    if [[ -e $csv ]]; then
        grep -qx "# total_timesteps: $STEPS" "$csv" && [[ $(grep "^# command: " "$csv") == *"$*" ]] &&
            echo "have $csv" && return
        echo "FAIL $csv exists, but its run did not have $STEPS steps and the flags '$*'; delete it to run again"
        return 1
    fi

    read -ra python <<< "$PYTHON"
    read -ra flags <<< "$FLAGS"
    read -ra gpus <<< "${GPUS:-}"
    [[ -z ${gpus[*]} ]] || export CUDA_VISIBLE_DEVICES=${gpus[SLOT % ${#gpus[@]}]}
    local collect=("${python[@]}" benchmark/collect.py --suite "$SUITE") old_run
    old_run=$(find_run "$name")
    [[ $old_run && ! $DRY_RUN ]] && "${collect[@]}" "$old_run" 2> /dev/null && return # finished, but not collected
    set -- "${python[@]}" "$SCRIPT" --env-id "$env_id" --seed "$seed" --exp-name "$exp" --total-timesteps "$STEPS" \
        "${flags[@]}" ${old_run:+--resume "$old_run"} "$@"
    [[ $DRY_RUN ]] && echo "$@" && return

    echo "run  $name${old_run:+, resumed from $old_run}"
    mkdir -p runs
    local start=$SECONDS
    "$@" > "runs/$name.log" 2>&1 || status=$?
    if [[ $status != 0 ]]; then
        printf '%s\n' "FAIL $name, exit code $status; the end of runs/$name.log:" "$(tail -n 10 "runs/$name.log")"
        return 1
    fi
    "${collect[@]}" "$(find_run "$name")" || status=$?
    [[ $status != 0 ]] || echo $((SECONDS - start)) >> "$TIMES"
    return $((status == 3 ? 255 : status))
}

progress() { # SEED ENV EXP FLAGS...: run_one, and how far the plan is
    local status=0
    run_one "$@" || status=$?
    [[ ! $DRY_RUN ]] || return $status
    echo >> "$ENDED"
    local left=$((RUNS - $(wc -l < "$ENDED"))) mean
    mean=$(awk '{ s += $1 } END { print NR ? s / NR : 0 }' "$TIMES")
    [[ $left == 0 || $mean == 0 ]] || awk "BEGIN { printf \"%d of %d runs left, about %.0f minutes\n\", $left, $RUNS, \
        $left * $mean / $WORKERS / 60 }"
    return $status
}
export -f find_run run_one progress

run_plan() { # the plan on stdin: all of it with the first seed, then with the next
    local plan runs seed line first=${PLANNED:-0}
    plan=$(cat)
    runs=$(for seed in $SEEDS; do while read -r line; do echo "$seed $line"; done <<< "$plan"; done)
    RUNS=$(wc -l <<< "$runs") PLANNED=$((first + RUNS)) # a suite may have several plans
    if [[ ${TASK:-} ]]; then
        ((first <= TASK && TASK < PLANNED)) || return 0
        runs=$(sed -n "$((TASK - first + 1))p" <<< "$runs") RUNS=1
    fi
    WORKERS=${WORKERS:-2} TIMES=$(mktemp) ENDED=$(mktemp)
    export RUNS WORKERS TIMES ENDED SLOT=0
    trap "" INT TERM # they are for the runs: each writes its checkpoint and stops, and that stops the suite
    # shellcheck disable=SC2016
    if xargs -P "$WORKERS" ${GPUS:+--process-slot-var=SLOT} -I{} bash -c 'progress $1' progress {} <<< "$runs"; then
        [[ $DRY_RUN ]] || echo "complete: $PYTHON benchmark/report.py shows benchmark/results/$SUITE"
    else
        echo "error: not every run has a result, see above; start the suite again to go on" >&2
        exit 1
    fi
}
