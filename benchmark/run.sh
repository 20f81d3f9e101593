# shellcheck shell=bash
# What the suites share. A suite sources this file and calls `run_suite NAME "$@"`, which runs the rows of recipes.csv
# with its name. Another plan sets SUITE, SCRIPT, SEEDS and STEPS and goes to `run_plan` on stdin: one line for each
# experiment, ENV EXP FLAGS..., which becomes one run for each seed.
#   ENVS, SEEDS, STEPS    instead of those of recipes.csv
#   WORKERS  runs side by side (default 2; 1 for recipes that take all cores)
#   THREADS  threads of each run (default 1; all for recipes that take all cores), or of each process of torchrun
#   FLAGS    flags for every run, such as "--track" or "--no-compile"; what changes learning needs a SUFFIX
#   SUFFIX   of the folder of results, such as _mine: the same runs again, or after a change, beside those that are there
#   PYTHON   how to start Python (default: uv run python)
#   GPUS     GPUs of this machine, such as "0 1 2 3": the runs side by side have one each
#   TASK     number of a run of the plan, from 0: only that one, see slurm.sbatch
export SUITE SCRIPT STEPS FLAGS=${FLAGS:-} PYTHON=${PYTHON:-uv run python} DRY_RUN=
PROCESSES= PLANNED=0 # of torchrun in a recipe; runs of the plans before this one
FAILED= # set by a run that has no result; the others go on
FOUND= # set where a plan has TASK
[[ " $* " != *" --dry-run "* ]] || DRY_RUN=yes WORKERS=1
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || { echo "error: the suites need bash 4.4 and GNU's tools" >&2 && exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

ask() { # SEED ENV EXP FLAGS...: sets the name of a run, its results file and log, its flags and how to start Python
    local env=${2//[\/:]/-} folder=$SUITE${SUFFIX:-}
    name=${env}__${3}__$1 csv=benchmark/results/$folder/$env/${3}__$1.csv log=runs/${folder}__${env}__${3}__$1.log
    read -ra python <<< "$PYTHON"
    read -ra flags <<< "$FLAGS"
    flags=(--env-id "$2" --seed "$1" --exp-name "$3" --total-timesteps "$STEPS" "${@:4}" "${flags[@]}")
}

find_run() { # SEED ENV EXP FLAGS...: its newest run directory with a checkpoint, of these flags, today's script and no other suite
    local name csv log python flags file other others=(/dev/null) found=""
    ask "$@"
    for other in runs/*__"$name".log; do
        [[ $other == "$log" || ! -e $other ]] || others+=("$other")
    done
    for file in runs/"$name"__*/checkpoint.pt; do
        [[ -e $file ]] && ! grep -qF "run: ${file%/*}, on " "${others[@]}" &&
            "${python[@]}" benchmark/have.py "${file%/*}/config.json" "$SCRIPT" "${flags[@]}" > /dev/null && found=${file%/*}
    done
    echo "$found"
}

run_one() { # SEED ENV EXP FLAGS...: one run up to its results file; sets `took` to the seconds of its training
    local name csv log python flags gpus command old_run message lock status=0 start=$SECONDS
    ask "$@"
    if [[ -e $csv ]]; then
        message=$("${python[@]}" benchmark/have.py "$csv" "$SCRIPT" "${flags[@]}") && echo "have $csv" && return
        [[ ! $message ]] || message="is of another run: $message; delete it to run again"
        echo "FAIL $csv ${message:-cannot be compared, see above}"
        return 1
    fi

    if [[ ! $DRY_RUN ]]; then
        mkdir -p runs
        exec {lock}>> "$log"
        flock -n "$lock" 2> /dev/null || status=$? # held until the run has ended; where there are no locks it is not 1
        [[ $status != 1 ]] || { echo "FAIL $name is just being run by another suite, see $log" && return 1; }
        status=0
    fi
    old_run=$(find_run "$@")
    local collect=("${python[@]}" benchmark/collect.py --suite "$SUITE${SUFFIX:-}")
    if [[ $old_run && ! $DRY_RUN ]]; then
        message=$("${collect[@]}" "$old_run" 2>&1) || status=$?
        [[ $status == 3 ]] || { echo "$message" && return "$status"; } # it had finished, but was not collected
    fi
    [[ ! ${PROCESSES:-} ]] || python+=(-m torch.distributed.run --standalone --nproc-per-node "$PROCESSES")
    command=("${python[@]}" "$SCRIPT" "${flags[@]}" ${old_run:+--resume "$old_run"})
    [[ ! $DRY_RUN ]] || { echo "${command[@]}" && return; }

    read -ra gpus <<< "${GPUS:-}"
    [[ -z ${gpus[*]} || ${PROCESSES:-} ]] || export CUDA_VISIBLE_DEVICES=${gpus[SLOT % ${#gpus[@]}]}
    echo "run  $name${old_run:+, resumed from $old_run}"
    status=0
    echo "${old_run:+run: $old_run, on its way}" > "$log" # this suite's run, also before the script says so
    "${command[@]}" >> "$log" 2>&1 || status=$?
    old_run=$(sed -n 's/^run: \(.*\), on .*/\1/p' "$log" | tail -n 1)
    if [[ $status != 0 ]] && grep -q "error: losses of " "$log"; then # they are not finite: a result, too
        collect+=(--diverged)
    elif [[ $status != 0 ]]; then
        echo "FAIL $name, exit code $status; the end of $log:"
        tr '\r' '\n' < "$log" | tail -n 10
        return 1
    fi
    "${collect[@]}" "$old_run" || return
    took=$((SECONDS - start))
}

progress() { # SEED ENV EXP FLAGS...: run_one, and how far the plan is
    local status=0 took=""
    run_one "$@" || status=$?
    [[ ! $DRY_RUN ]] || return $status
    echo "$took" >> "$ENDED"
    awk -v runs="$RUNS" -v workers="$WORKERS" 'NF { seconds += $1; n++ } END { left = runs - NR
        if (left > 0 && n) printf "%d of %d runs left, about %.0f minutes\n", left, runs, left * seconds / n / workers / 60
    }' "$ENDED"
    return $status
}
export -f ask find_run run_one progress

stop() { # GROUP: ends the runs, waits for those that write a checkpoint first, and ends the suite
    trap - INT TERM
    kill -- "-$1" || true
    while ps -A -o pgid= -o stat= | grep "^ *$1 \+[^Z ]" > /dev/null; do sleep 0.2; done # Z: ended, but not known to be
    echo "stopped; start the suite again to go on" >&2
    exit 130
}

check_flags() { # SCRIPT...: FLAGS may not change what is learned: the results would pass for those of the recipe
    local python flags message script
    [[ ! ${SUFFIX:-} || ! " $FLAGS" =~ \ --(seed|exp[-_]name|env[-_]id|resume|evaluate)[\ =] ]] || {
        echo "error: FLAGS may not have ${BASH_REMATCH[0]:1:-1}: it is in the name of a run (SEEDS, ENVS)" >&2
        exit 2
    }
    [[ $FLAGS && ! ${SUFFIX:-} ]] || return 0
    read -ra python <<< "$PYTHON"
    read -ra flags <<< "$FLAGS"
    for script; do
        message=$("${python[@]}" benchmark/have.py --free "$script" "${flags[@]}") && continue
        [[ ! $message ]] || echo "error: FLAGS may not have $message for $script; SUFFIX=_name keeps such runs in a folder of their own" >&2
        exit 2
    done
}

check_words() { # TEXT: no plan may have what xargs or the shell changes
    local odd=$'[\'"\\\\*?[\t]'
    [[ ! $1 =~ $odd ]] || { echo "error: no ${BASH_REMATCH[0]} in flags, environments and names of scripts here" >&2 && exit 2; }
}

finish() { # the end of a suite
    [[ ! ${TASK:-} || $FOUND ]] || { echo "error: no run has the number TASK ($TASK)" >&2 && exit 2; }
    [[ ! $FAILED ]] || exit 1
}

run_plan() { # the plan on stdin: all of it with the first seed, then with the next
    local plan runs seed line group status=0 first=$PLANNED folder
    for folder in $(cut -d, -f3 benchmark/recipes.csv) mujoco_selection selection_results ablation_study_flags; do
        [[ ! ${SUFFIX:-} || $SUITE$SUFFIX != "$folder"* || ${#folder} -le ${#SUITE} ]] ||
            { echo "error: SUFFIX ($SUFFIX): the runs of another recipe are in $folder" >&2 && exit 2; }
    done
    [[ ! " $SEEDS" =~ [^0-9\ ]|\ 0[0-9] ]] || { echo "error: SEEDS ($SEEDS) are numbers such as 1 2 10" >&2 && exit 2; }
    export OMP_NUM_THREADS=${THREADS:=1} OPENBLAS_NUM_THREADS=$THREADS MKL_NUM_THREADS=$THREADS
    plan=$(cat)
    check_words "$plan"
    runs=$(for seed in $SEEDS; do while read -r line; do echo "$seed $line"; done <<< "$plan"; done | awk '!seen[$0]++')
    RUNS=$(wc -l <<< "$runs") PLANNED=$((first + RUNS)) # a suite may have several plans
    if [[ ${TASK:-} ]]; then
        ((first <= TASK && TASK < PLANNED)) || return 0
        FOUND=yes
        runs=$(sed -n "$((TASK - first + 1))p" <<< "$runs") RUNS=1
    fi
    WORKERS=${WORKERS:-2} ENDED=$(mktemp)
    export RUNS WORKERS ENDED SLOT=0

    # The runs are a process group. It ends when this shell does, however that ends: then the pipe to its guard closes.
    set -m
    # shellcheck disable=SC2016
    xargs -P "$WORKERS" ${GPUS:+--process-slot-var=SLOT} -I{} bash -c 'progress $1' progress {} <<< "$runs" &
    group=$!
    set +m
    exec 8> >(trap "" HUP INT TERM; read -r || kill -- "-$group" 2> /dev/null)
    # shellcheck disable=SC2064
    trap "stop $group" INT TERM
    wait "$group" || status=$?
    trap - INT TERM
    echo >&8 && exec 8>&-
    rm "$ENDED"
    if [[ $status == 0 ]]; then
        [[ $DRY_RUN ]] || echo "complete: $PYTHON benchmark/report.py shows benchmark/results/$SUITE${SUFFIX:-}"
    else
        echo "error: not every run has a result, see above; start the suite again to go on" >&2
        FAILED=yes
    fi
}

script_of() { # SCRIPT of recipes.csv: its path; of variants/NAME.patch that of the changed script, made anew
    local python
    read -ra python <<< "$PYTHON"
    [[ $1 != *.patch ]] && echo "$1" || "${python[@]}" benchmark/patches.py "$1"
}

rows_of() { # SUITE RECIPE: its rows of recipes.csv
    grep "^$1,$2," benchmark/recipes.csv
}

recipes_of() { # SUITE: the names of its recipes
    awk -F, -v suite="$1" '$1 == suite && !seen[$2]++ { print $2 }' benchmark/recipes.csv
}

plan_of() { # SUITE RECIPE: SCRIPT ENV EXP FLAGS... of each experiment, environment by environment
    local env all="" script experiment environments flags
    [[ ${ENVS:-} ]] || all=$(rows_of "$@" | cut -d, -f6)
    for env in $(printf '%s\n' ${ENVS:-$all} | awk '$0 != "only" && !seen[$0]++'); do
        while IFS=, read -r _ _ _ script experiment environments _ _ _ flags _; do
            [[ $environments == only* ]] || environments=${ENVS:-$environments}
            [[ " $environments " != *" $env "* ]] || echo "$script $env $experiment $flags"
        done < <(rows_of "$@")
    done
}

scripts_of() { # SUITE RECIPE...: their scripts, those of patches made anew
    local recipe script
    for recipe in "${@:2}"; do plan_of "$1" "$recipe"; done | awk '!seen[$1]++ { print $1 }' |
        while read -r script; do script_of "$script" || exit 1; done
}

run_in_turns() { # SUITE RECIPE...: all runs of all recipes, but the first three seeds of each before the next two of any
    local suite=$1 recipe turn seeds scripts asked_seeds=${SEEDS:-} asked_steps=${STEPS:-}
    scripts=$(scripts_of "$@") || exit 2
    # shellcheck disable=SC2086
    check_flags $scripts
    for turn in 1-3 4-5 6-; do
        for recipe in "${@:2}"; do
            IFS=, read -r _ _ _ _ _ _ seeds _ < <(rows_of "$suite" "$recipe")
            seeds=$(cut -d' ' -f"$turn" <<< "$seeds ")
            [[ ! $asked_seeds ]] || { [[ $turn == 1-3 ]] && seeds=$asked_seeds || seeds=; }
            [[ ${seeds// /} && $(plan_of "$suite" "$recipe") ]] || continue # nothing of it with these ENVS
            SEEDS=$seeds STEPS=$asked_steps
            run_recipe "$suite" "$recipe"
        done
    done
    finish
}

run_suite() { # SUITE [RECIPE] [--dry-run]: all runs of a recipe, by default of the first
    local suite=$1 recipe=${2:-} scripts
    [[ $recipe && $recipe != --dry-run ]] || recipe=$(recipes_of "$suite" | head -n 1)
    [[ ${3:---dry-run} == --dry-run && $(plan_of "$suite" "$recipe") ]] || {
        echo "usage: bash benchmark/$suite.sh [$(recipes_of "$suite" | paste -sd'|' | sed 's/|/ | /g')] [--dry-run]" >&2
        exit 2
    }
    scripts=$(scripts_of "$suite" "$recipe") || exit 2
    # shellcheck disable=SC2086
    check_flags $scripts
    run_recipe "$suite" "$recipe"
    finish
}

run_scripts() { # lines of SCRIPT ENV EXP FLAGS...: a plan for each script
    local script
    for script in $(awk '!seen[$1]++ { print $1 }' <<< "$1"); do
        SCRIPT=$(script_of "$script") || exit 2
        run_plan < <(awk -v script="$script" '$1 == script { sub(/^[^ ]+ /, ""); print }' <<< "$1")
    done
}

cores_here() { # whatever OMP_NUM_THREADS says
    env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc
}

run_recipe() { # SUITE RECIPE: all its runs, one plan for each script
    local suite=$1 recipe=$2 plan seeds steps cores
    local -x WORKERS=${WORKERS:-} THREADS=${THREADS:-} PROCESSES=${PROCESSES:-} # the next recipe has its own
    plan=$(plan_of "$suite" "$recipe")
    IFS=, read -r _ _ SUITE _ _ _ seeds steps cores _ < <(rows_of "$suite" "$recipe")
    STEPS=${STEPS:-$steps} SEEDS=${SEEDS:-$seeds}
    [[ $cores != all ]] || WORKERS=${WORKERS:-1} THREADS=${THREADS:-$(cores_here)}
    [[ $cores != [0-9]* ]] || PROCESSES=$cores WORKERS=${WORKERS:-1} THREADS=${THREADS:-$((($(cores_here) - 1) / cores + 1))}
    run_scripts "$plan"
}
