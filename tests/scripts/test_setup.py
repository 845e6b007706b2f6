"""Functions of `scripts/setup.sh`: what it asks of a machine, and what it installs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SETUP = Path(__file__).parents[2] / "scripts" / "setup.sh"
# Has venv and libnuma.
PYTHON = """\
#!/bin/sh
case "$2" in
    *version_info*) echo 3.11 ;;
    *Python.h*) exit {no_header} ;;
esac
"""


class Machine:
    """A copy of the script in a folder, beside the only programs that it finds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "bin"
        (folder / "scripts").mkdir()
        self.script = Path(shutil.copy(SETUP, folder / "scripts"))
        self.programs.mkdir()
        for name in ("dirname", "sed", "tail"):
            (self.programs / name).symlink_to(f"/usr/bin/{name}")

    def add(self, name: str, text: str = "#!/bin/sh\n") -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Call a function of the script. Without apt-get, what is missing is printed."""
        program = 'source "$1"; shift; "$@"'
        return run("-c", program, "a test", str(self.script), *words, PATH=str(self.programs))


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/bash", *words],
        env=environ or None,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_packages_are_not_installed_through_a_link(machine, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (machine.folder / ".venv").symlink_to(tmp_path / "elsewhere")
    done = run(str(machine.script))
    assert done.returncode == 1
    message = rf"set-up: \.venv is a link to {tmp_path / 'elsewhere'}, .*\(rm \.venv\).*\n"
    assert re.fullmatch(message, done.stderr)
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("quote", ["", "'", '"'])
def test_a_copy_of_another_clone_s_environment_is_refused_and_one_that_was_moved_with_its_clone_is_not(
    machine, tmp_path, quote
):
    assert machine.call("require_own_venv").returncode == 0, "without one"
    other = tmp_path / "other clone" / ".venv"
    export = f"    export VIRTUAL_ENV={quote}{other}{quote}"
    machine.add(".venv/bin/activate", f"unset VIRTUAL_ENV\nif a; then\n{export}\nfi\n")
    assert machine.call("require_own_venv").returncode == 0, "there is none any more"
    other.mkdir(parents=True)
    done = machine.call("require_own_venv")
    assert done.returncode == 1
    message = rf"set-up: \.venv is a copy of {other} .*\(rm -r \.venv\).*\n"
    assert re.fullmatch(message, done.stderr)
    assignment = f"VIRTUAL_ENV={quote}{machine.folder}/.venv{quote}"
    machine.add(".venv/bin/activate", f"{assignment}\nexport VIRTUAL_ENV\n")
    assert machine.call("require_own_venv").returncode == 0


@pytest.mark.parametrize(
    ("kind", "compiler", "header", "missing"),
    [
        ("gpu", None, False, "gcc libc6-dev python3.11-dev"),
        ("gpu", None, True, "gcc libc6-dev"),
        ("gpu", "gcc", False, "python3.11-dev"),
        ("gpu", "clang", False, "python3.11-dev"),
        ("gpu", "gcc", True, ""),
        ("cpu", None, False, ""),
    ],
)
def test_a_machine_with_a_gpu_needs_a_compiler_and_pythons_headers_for_triton(
    machine, kind, compiler, header, missing
):
    machine.add("bin/python3.11", PYTHON.format(no_header=int(not header)))
    if compiler is not None:
        machine.add(f"bin/{compiler}")
    done = machine.call("require_system_packages", "python3.11", kind)
    assert done.returncode == int(bool(missing))
    install = "apt-get update && apt-get install -y"
    message = f"set-up: needs system packages; as root run: {install} {missing}\n"
    assert done.stderr == (message if missing else "")


@pytest.mark.parametrize("machine_name", ["Linux aarch64", "Darwin arm64", "Linux x86_64"])
def test_a_machine_that_no_lock_is_for_is_refused(machine, machine_name):
    """There the locks' markers would install nothing, or files that do not fit."""
    machine.add("bin/uname", f"#!/bin/sh\necho {machine_name}\n")
    done = machine.call("require_locked_machine")
    assert done.returncode == int(machine_name != "Linux x86_64")
    assert (machine_name in done.stderr) == (machine_name != "Linux x86_64")


def test_uv_is_told_what_pip_is_configured_with(machine):
    lines = r"""
:env:.find-links='/opt/wheels /mnt/wheels'
global.cert='/etc/ca.crt'
global.find-links='/of/a/file'
global.extra-index-url='\nhttps://a.example/simple\nhttps://b.example/simple?x=1'
global.index-url='https://user:secret@c.example/simple'
global.timeout='180'
install.trusted-host='c.example'
"""
    machine.add(".venv/bin/python", f"#!/bin/sh\ncat <<'END'{lines}END\n")
    (machine.programs / "cat").symlink_to("/bin/cat")
    (machine.programs / "env").symlink_to("/usr/bin/env")
    program = 'source "$1"; configure_uv; env'
    done = run("-c", program, "a test", str(machine.script), PATH=str(machine.programs))
    told = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert {key: told.get(key) for key in ("SSL_CERT_FILE", "UV_HTTP_TIMEOUT")} == {
        "SSL_CERT_FILE": "/etc/ca.crt",
        "UV_HTTP_TIMEOUT": "180",
    }
    assert told["UV_FIND_LINKS"] == "/opt/wheels,/mnt/wheels"
    assert told["UV_DEFAULT_INDEX"] == "https://user:secret@c.example/simple"
    assert told["UV_INSECURE_HOST"] == "c.example"
    assert told["UV_EXTRA_INDEX_URL"].split() == [
        "https://a.example/simple",
        "https://b.example/simple?x=1",
    ]


@pytest.mark.parametrize("uv_status", [0, 1])
def test_what_uv_cannot_install_pip_does(machine, uv_status):
    for name, status in (("uv", uv_status), ("python", 0)):
        machine.add(f".venv/bin/{name}", f'#!/bin/sh\necho "{name}: $*"\nexit {status}\n')
    done = machine.call("install_locked", "locks/cpu.txt")
    options = "--no-deps --no-build-isolation --require-hashes -r locks/cpu.txt"
    asked = f"pip install --python .venv/bin/python {options}"
    by_pip = ["uv failed; trying pip", f"python: -m pip install {options}"]
    assert done.stdout.splitlines() == [f"uv: {asked}", *(by_pip if uv_status else [])]
    assert done.returncode == 0


def test_the_build_of_torch_that_pip_does_not_find_is_asked_of_pytorch_s_index_by_the_same_hashes(
    machine,
):
    """Only torch: other packages of that index are other builds than the locked ones."""
    lock = "torch==2.13.0+cpu \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n"
    machine.add("locks/cpu.txt", f"sympy==1.14.0 \\\n    --hash=sha256:cc\n{lock}torchvision==1\n")
    machine.add(".venv/bin/python", "#!/bin/sh\nexit 1\n")
    program = '#!/bin/sh\ncase "$*" in *extra-index-url*) echo "$*";; *) exit 1;; esac\n'
    machine.add(".venv/bin/uv", program)
    done = machine.call("install_cpu_torch")
    assert done.returncode == 0
    assert (machine.folder / ".venv" / "locked.txt").read_text() == lock
    first, last = done.stdout.splitlines()[-1].split(" --extra-index-url ")
    assert first.endswith("--require-hashes -r .venv/locked.txt")
    assert last == re.findall(r"TORCH_CPU_INDEX=(\S+)", SETUP.read_text())[0]


STEPS = """\
source "$1"
for name in require_own_venv require_locked_machine find_python require_system_packages pip locked \
    configure_uv python3.11; do eval "$name() { :; }"; done
has_gpu() { false; }
say() { echo "says $*"; }
step() { echo "${@:2}"; }
main "$2" packages
"""


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_the_last_step_imports_what_an_engine_needs_on_the_kind_of_machine(machine, extra):
    machine.add(f"locks/{extra}.txt")
    machine.add("pyproject.toml")
    for name in ("cat", "rm", "sha256sum"):
        (machine.programs / name).symlink_to(f"/usr/bin/{name}")
    machine.add("scripts/torchvision_cpu_hook.py")
    machine.add("scripts/check_gpu.py")
    machine.add(".venv/bin/python")
    path = str(machine.programs)
    done = subprocess.run(
        ["/bin/bash", "-c", STEPS, "a test", str(machine.script), extra],
        cwd=machine.folder,
        env={"PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    *_, before, last = done.stdout.splitlines()
    checks = {"cpu": "-c import torchvision, vllm", "gpu": "scripts/check_gpu.py"}
    assert last == f".venv/bin/python {checks[extra]}"
    assert ("finds no GPU here" in before) == (extra == "gpu")
