"""The locks: what `pyproject.toml` asks for, each package with the hashes of its files."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENTRY = re.compile(
    r"([a-z0-9-]+)==(\S+)( ; python_full_version (?:<|>=) '3\.1[123]')?"
    r"((?: \\\n    --hash=sha256:[0-9a-f]{64})+)"
)


def versions(extra: str) -> dict[str, list[str]]:
    """Return the versions of each package: one, or one for some Pythons and one for the others."""
    lines = (ROOT / "locks" / f"{extra}.txt").read_text().split("\n", 1)[1]
    found: dict[str, list[str]] = {}
    for entry in re.split(r"\n(?! )", lines.rstrip()):
        match = ENTRY.fullmatch(entry)
        assert match, entry
        found.setdefault(match[1], []).append(match[2])
        assert (len(found[match[1]]) == 1) or match[3]
    return found


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_a_lock_has_every_direct_requirement_in_a_permitted_version_with_hashes_and_no_address(
    extra,
):
    locked = versions(extra)
    extras = PROJECT["optional-dependencies"]
    for line in PROJECT["dependencies"] + extras[extra] + extras["dev"]:
        requirement = Requirement(line)
        for one in locked[canonicalize_name(requirement.name)]:
            assert requirement.specifier.contains(one), line


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_a_lock_has_every_package_that_its_packages_require_here(extra):
    """As far as they are installed: those of this machine's extra."""
    locked = versions(extra)
    absent = {"torchaudio", "torchcodec"} if extra == "cpu" else set()
    checked = 0
    for name, numbers in locked.items():
        try:
            if version(name) not in numbers:
                continue
        except ModuleNotFoundError:
            continue
        for line in requires(name) or ():
            requirement = Requirement(line)
            needed = canonicalize_name(requirement.name)
            if needed in absent or (
                requirement.marker and not requirement.marker.evaluate({"extra": ""})
            ):
                continue
            found = locked[needed]
            assert any(requirement.specifier.contains(one, prereleases=True) for one in found), (
                f"{name} requires {line}, locked is {found}"
            )
            checked += 1
    assert checked > 100


def test_the_cpu_build_of_torch_has_the_requirements_that_its_wheel_states():
    if not version("torch").endswith("+cpu"):
        pytest.skip("torch is a CUDA build here")
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import lock
    finally:
        sys.path.pop(0)
    stated = {line for line in requires("torch") or () if "extra ==" not in line}
    assert (lock.TORCH_CPU, set(lock.TORCH_CPU_REQUIRES)) == (f"torch=={version('torch')}", stated)
