#!/usr/bin/env bash
# stages.sh [--not-run TEXT] NAME COMMAND [NAME COMMAND ...]
#
# Runs each COMMAND (a line for bash), prints its name and the time so far when it begins, and continues with the next one if it fails.
# At the end it prints how long each command took, what failed and what was left out. The exit status is 1 if a command failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

clock() { printf '%d:%02d' $(($1 / 60)) $(($1 % 60)); }

not_run=""
if [[ ${1:-} == --not-run ]]; then
    not_run=$2
    shift 2
fi
if (($# == 0 || $# % 2)); then
    echo "usage: stages.sh [--not-run TEXT] NAME COMMAND [NAME COMMAND ...]" >&2
    exit 2
fi

# Ctrl-C also reaches the command, which ends by itself with its own status.
interrupted=""
trap 'interrupted=1' INT

total=$(($# / 2)) number=0 failed=() lines=()
while (($#)); do
    name=$1 command=$2 began=$SECONDS
    shift 2
    number=$((number + 1))
    echo "== $(clock "$began")  stage $number of $total: $name"
    bash -c "$command"
    status=$?
    outcome=passed
    if [[ -n $interrupted ]]; then
        echo "== $(clock "$SECONDS")  interrupted in stage $number of $total: $name" >&2
        exit 130
    elif ((status != 0)); then
        outcome="FAILED (exit status $status)"
        failed+=("$name")
    fi
    lines+=("$(printf '%-44s %6s  %s' "$name" "$(clock $((SECONDS - began)))" "$outcome")")
done

echo "== $(clock "$SECONDS")  all $total stages have run"
printf '   %s\n' "${lines[@]}"
if [[ -n $not_run ]]; then
    echo "   left out: $not_run"
fi
if ((${#failed[@]})); then
    printf '== failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
