"""Functions of `scripts/setup.sh`, on machines of our own making: what it asks for, and which torch
it accepts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SETUP = Path(__file__).parents[2] / "scripts" / "setup.sh"
PYTHON = """\
#!/bin/sh
case "$2" in
    *version_info*) echo 3.11 ;;
    *Python.h*) exit {no_header} ;;
esac
"""
"""Has venv and libnuma."""


class Machine:
    """A copy of the script in a folder of its own, beside the programs that there are."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.programs = folder, folder / "bin"
        (folder / "scripts").mkdir()
        self.script = Path(shutil.copy(SETUP, folder / "scripts"))
        self.programs.mkdir()
        (self.programs / "dirname").symlink_to("/usr/bin/dirname")

    def add(self, name: str, text: str = "#!/bin/sh\n") -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A function of the script with these arguments. There is no apt-get: what is missing is
        printed, whoever runs this."""
        command = [
            "/bin/bash",
            "-c",
            'source "$1"; shift; "$@"',
            "a test",
            str(self.script),
            *words,
        ]
        return subprocess.run(
            command,
            env={"PATH": str(self.programs)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_packages_are_not_installed_through_a_link(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (machine.folder / ".venv").symlink_to(tmp_path / "elsewhere")
    done = subprocess.run(
        ["/bin/bash", str(machine.script)], capture_output=True, text=True, timeout=60, check=False
    )
    told = (
        f"set-up: .venv is a link to {tmp_path / 'elsewhere'}, which this would change for"
        " everybody who uses it; remove the link (rm .venv)"
    )
    assert (done.returncode, done.stderr) == (1, f"{told}, and run the same command again\n")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("quote", ["", "'", '"'])
def test_a_copy_of_another_clone_s_environment_is_refused_and_one_that_was_moved_with_its_clone_is_not(
    machine: Machine, tmp_path: Path, quote: str
) -> None:
    (machine.programs / "sed").symlink_to("/usr/bin/sed")
    (machine.programs / "tail").symlink_to("/usr/bin/tail")
    other = tmp_path / "other clone" / ".venv"
    machine.add(
        ".venv/bin/activate",
        f"unset VIRTUAL_ENV\nif a; then\n    export VIRTUAL_ENV={quote}{other}{quote}\nfi\n",
    )
    assert machine.call("require_own_venv").returncode == 0, "there is none any more"
    other.mkdir(parents=True)
    done = machine.call("require_own_venv")
    told = (
        f"set-up: .venv is a copy of {other}, of another clone, and its programs use that one;"
        " remove it (rm -r .venv), and run the same command again\n"
    )
    assert (done.returncode, done.stderr) == (1, told)
    machine.add(
        ".venv/bin/activate",
        f"VIRTUAL_ENV={quote}{machine.folder}/.venv{quote}\nexport VIRTUAL_ENV\n",
    )
    assert machine.call("require_own_venv").returncode == 0


def test_without_an_environment_there_is_nothing_to_refuse(machine: Machine) -> None:
    assert machine.call("require_own_venv").returncode == 0


@pytest.mark.parametrize(
    ("compiler", "header", "missing"),
    [
        (None, False, "gcc libc6-dev python3.11-dev"),
        (None, True, "gcc libc6-dev"),
        ("gcc", False, "python3.11-dev"),
        ("clang", False, "python3.11-dev"),
        ("gcc", True, ""),
    ],
)
def test_a_machine_with_a_gpu_needs_a_compiler_and_pythons_headers_for_triton(
    machine: Machine, compiler: str | None, header: bool, missing: str
) -> None:
    machine.add("bin/python3.11", PYTHON.format(no_header=int(not header)))
    if compiler is not None:
        machine.add(f"bin/{compiler}")
    done = machine.call("require_system_packages", "python3.11", "gpu")
    told = (
        "set-up: needs system packages; as root run: apt-get update && apt-get install -y"
        f" {missing}\n"
        if missing
        else ""
    )
    assert (done.returncode, done.stderr) == (int(bool(missing)), told)


def test_a_machine_without_one_needs_neither(machine: Machine) -> None:
    machine.add("bin/python3.11", PYTHON.format(no_header=1))
    done = machine.call("require_system_packages", "python3.11", "cpu")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("cuda", "sound"), [("'13.0'", True), ("None", False)])
def test_a_cpu_build_of_torch_that_pip_found_for_the_gpu_ends_the_set_up_with_what_to_do(
    machine: Machine, cuda: str, sound: bool
) -> None:
    machine.add("torch.py", f"__version__ = '2.13.0+cpu'\nclass version:\n    cuda = {cuda}\n")
    machine.add(
        ".venv/bin/python",
        f'#!/bin/sh\nPYTHONPATH={machine.folder} exec {sys.executable} -S "$@"\n',
    )
    done = machine.call("require_cuda_torch")
    assert done.returncode == int(not sound)
    assert (
        "torch 2.13.0+cpu has no CUDA; take the CPU index out of the configuration of pip"
        in done.stderr
    ) == (not sound)
