#!/usr/bin/env bash
# stages.sh [--not-run TEXT] NAME COMMAND [--beside NAME COMMAND] [NAME COMMAND ...]
#
# Runs each COMMAND (a line for bash), prints its name and the time so far when it begins, and continues with the next one if it fails.
# The command of --beside runs next to the stage before it, at a lower priority, and its output is printed after that stage's.
# At the end it prints how long each command took, what failed and what was left out. The exit status is 1 if a command failed.
# Commands may append the names of failed tests to the file $FAILED_TESTS. It is printed last, because the middle of a long log may be cut.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

clock() { printf '%d:%02d' $(($1 / 60)) $(($1 % 60)); }

not_run=""
if [[ ${1:-} == --not-run ]]; then
    not_run=$2
    shift 2
fi
total=0
for word in "$@"; do [[ $word == --beside ]] || total=$((total + 1)); done
if ((total == 0 || total % 2)) || [[ $1 == --beside ]]; then
    echo "usage: stages.sh [--not-run TEXT] NAME COMMAND [--beside NAME COMMAND] [NAME COMMAND ...]" >&2
    exit 2
fi

# Ctrl-C also reaches the commands, which end by themselves with their own status. (Without a trap, one in the background would ignore it.)
interrupted=""
trap 'interrupted=1' INT

total=$((total / 2)) number=0 failed=() lines=() output=$(mktemp -d)
trap 'rm -rf "$output"' EXIT
export FAILED_TESTS=$output/failed_tests

# Records the outcome of a stage: its name, when it began and ended, and its exit status.
note() {
    local outcome=passed
    if (($4)); then
        outcome="FAILED (exit status $4)"
        failed+=("$1")
    fi
    lines+=("$(printf '%-44s %6s  %s' "$1" "$(clock $(($3 - $2)))" "$outcome")")
}

while (($#)); do
    name=$1 command=$2 began=$SECONDS number=$((number + 1)) other=""
    shift 2
    echo "== $(clock "$began")  stage $number of $total: $name"
    if [[ ${1:-} == --beside ]]; then
        other=$2
        echo "== $(clock "$began")  stage $((number + 1)) of $total, next to it and printed after it: $other"
        rm -f "$output/end"
        { nice -n 5 bash -c "$3"; echo "$SECONDS $?" >"$output/end"; } >"$output/printed" 2>&1 &
        shift 3
    fi
    bash -c "$command"
    status=$? ended=$SECONDS
    if [[ -n $other ]]; then
        until wait; do :; done # Ctrl-C ends the wait, not the command
        echo "== $(clock "$SECONDS")  output of stage $((number + 1)) of $total: $other"
        cat "$output/printed"
    fi
    if [[ -n $interrupted ]]; then
        echo "== $(clock "$SECONDS")  interrupted in stage $number of $total: $name" >&2
        exit 130
    fi
    note "$name" "$began" "$ended" "$status"
    if [[ -n $other ]]; then
        number=$((number + 1)) ended=$SECONDS status=1 # they stay if the shell was killed
        read -r ended status <"$output/end"
        note "$other" "$began" "$ended" "$status"
    fi
done

echo "== $(clock "$SECONDS")  all $total stages have run"
printf '   %s\n' "${lines[@]}"
if [[ -n $not_run ]]; then
    echo "   left out: $not_run"
fi
if ((${#failed[@]})); then
    printf '== failed: %s\n' "${failed[@]}" >&2
    [[ ! -e $FAILED_TESTS ]] || sed 's/^/   /' "$FAILED_TESTS" >&2
    exit 1
fi
