#!/usr/bin/env bash
# Is a changed copy of a script better than the original? Trains both with the same seeds and reports the difference:
#   bash benchmark/compare.sh ppo_continuous_mujoco.py my_ppo.py [FLAGS of both]
# Variables: ENVS (the original's default), SEEDS ("1 2 3 4 5"), STEPS (1000000), and those of run.sh (WORKERS, THREADS, PYTHON).
# A run is done once: its name holds a digest of the script's text, the flags and STEPS.
set -euo pipefail
[[ $# -ge 2 && -f $1 && -f $2 ]] || { sed -n '2,/^set/{/^set/d;s/^# //;p}' "$0" >&2; exit 2; }
scripts=("$(realpath "$1")" "$(realpath "$2")") flags=()
for flag in "${@:3}"; do [[ $flag == --dry-run ]] || flags+=("$flag"); done
SUITE=compare STEPS=${STEPS:-1000000} SEEDS=${SEEDS:-1 2 3 4 5} ENVS=${ENVS:-} SCRIPT=
[[ $ENVS ]] || ENVS=$(sed -n 's/^    env_id: str = "\(.*\)".*/\1/p' "$1")
source "$(dirname "$0")/run.sh"
[[ ! ${SUFFIX:-} ]] || { echo "error: no SUFFIX here: names hold what is compared" >&2; exit 2; }
check_flags "${scripts[@]}"

[[ ! " ${flags[*]} " =~ \ --(seed|exp[-_]name|env[-_]id|total[-_]timesteps|resume|evaluate)[\ =] ]] || {
    echo "error: no ${BASH_REMATCH[0]:1:-1} here: SEEDS, ENVS and STEPS say which runs" >&2
    exit 2
}

names=()
for script in "${scripts[@]}"; do
    digest=$({ cat "$script"; echo "${flags[*]} $STEPS"; } | sha256sum)
    names+=("$(basename "$script" .py)-${digest:0:8}")
done
[[ ${names[0]} != "${names[1]}" ]] || { echo "error: $1 and $2 are the same" >&2; exit 2; }
check_words "$ENVS ${names[*]} ${flags[*]}"
for i in 0 1; do
    SCRIPT=${scripts[i]}
    run_plan < <(for env in $ENVS; do echo "$env ${names[i]} ${flags[*]}"; done)
done
finish
[[ $DRY_RUN || ${TASK:-} ]] || ${PYTHON} benchmark/compare.py "${names[@]}"
