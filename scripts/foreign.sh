#!/usr/bin/env bash
# Creates an interpreter for each library whose dependencies conflict with this project's versions: .venv/foreign/NAME/bin/python.
# Tests use them, and `environment.args.interpreter` may name them. Does nothing if they exist already.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh

# make_interpreter NAME PACKAGE...
make_interpreter() {
    local folder=$VENV/foreign/$1 stamp="${*:2}"
    if [[ -f $folder/made && $(<"$folder/made") == "$stamp" ]]; then
        return
    fi
    step "make an interpreter for $1" "$VENV/bin/uv" venv --clear --python "$VENV/bin/python" "$folder"
    step "install ${*:2}" "$VENV/bin/uv" pip install --compile-bytecode --python "$folder/bin/python" "${@:2}"
    echo "$stamp" >"$folder/made"
}

configure_uv
make_interpreter openenv "openenv==0.10.0"
make_interpreter verifiers "verifiers==0.3.1"
