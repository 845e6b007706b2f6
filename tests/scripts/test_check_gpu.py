"""The set-up's check of a GPU machine, with stand-ins for torch, nvidia-smi and the packages."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_gpu.py"
PACKAGES = {
    "sound.py": "",
    "missing.py": "import a_package_that_does_not_exist",
    "mixed.py": "raise AttributeError('cudaIpcMemHandle_t')",
}


@pytest.fixture
def check() -> ModuleType:
    spec = spec_from_file_location("check_gpu", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def torch_of(cuda: str | None, *, sees_gpu: bool) -> Any:
    def init() -> None:
        raise RuntimeError("No CUDA GPUs are available")

    functions = SimpleNamespace(is_available=lambda: sees_gpu, init=init)
    version = SimpleNamespace(cuda=cuda)
    return SimpleNamespace(__version__="2.13.0", version=version, cuda=functions)


@pytest.mark.parametrize(
    ("cuda", "driver", "sees_gpu", "parts"),
    [
        (None, "580.95.05", True, ["torch.version.cuda is None", "locks/gpu.txt", "remove .venv"]),
        ("13.0", "579.10", False, ["version 579.10", "CUDA 13.0", "580 or later", "update"]),
        ("13.0", "580.0", False, ["No CUDA GPUs are available", "CUDA_VISIBLE_DEVICES"]),
        ("13.0", "570.0", True, None),
        ("13.0", "580.95.05", True, None),
        ("13.0", None, False, None),
    ],
    ids=[
        "torch without CUDA",
        "old driver",
        "hidden GPU",
        "old driver with the package of forward compatibility",
        "sound",
        "login node",
    ],
)
def test_torch_and_driver_that_do_not_fit_are_named_with_a_remedy(
    check: Any, cuda: str | None, driver: str | None, sees_gpu: bool, parts: list[str] | None
) -> None:
    problem = check.cuda_problem(torch_of(cuda, sees_gpu=sees_gpu), driver)
    assert (problem is None) == (parts is None)
    assert all(part in problem for part in parts or ())


@pytest.mark.parametrize(
    ("program", "version"),
    [
        ("echo 580.95.05; echo 580.95.05", "580.95.05"),
        ("echo No devices were found", None),
        ("exit 9", None),
        (None, None),
    ],
    ids=["two GPUs", "no GPU", "no driver is loaded", "no nvidia-smi"],
)
def test_the_drivers_version_is_what_nvidia_smi_says(
    check: Any, program: str | None, version: str | None, tmp_path: Path, monkeypatch: Any
) -> None:
    if program is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check.driver_version() == version


def test_a_package_that_raises_any_error_is_named_and_the_others_are_checked(
    check: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    for name, text in PACKAGES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    names = [name.removesuffix(".py") for name in PACKAGES]
    missing, mixed = check.import_problems(names)
    assert missing.startswith("missing does not load (ModuleNotFoundError: ")
    assert mixed.startswith("mixed does not load (AttributeError: cudaIpcMemHandle_t), ")
    assert "cuda-python and cuda-bindings" in mixed
    assert "cuda-python and cuda-bindings" not in missing
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_a_machine_that_fails_is_told_in_the_last_line(tmp_path: Path) -> None:
    """The set-up shows the end of its log."""
    torch = "from types import SimpleNamespace\n__version__ = '2.13.0+cpu'\n"
    (tmp_path / "torch.py").write_text(f"{torch}version = SimpleNamespace(cuda=None)\n")
    command = [sys.executable, str(SCRIPT)]
    environment = {"PYTHONPATH": str(tmp_path), "PATH": str(tmp_path)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith("torch 2.13.0+cpu is built without CUDA")


def test_the_modules_of_vllm_exist_in_the_version_that_the_project_pins(check: Any) -> None:
    vllm = find_spec("vllm")
    assert vllm is not None and vllm.submodule_search_locations is not None
    folder = Path(vllm.submodule_search_locations[0])
    python = [name for name in check.WITH_DRIVER if "_C" not in name]
    # Only the build for GPUs has these.
    python.remove("vllm.cumem_allocator")
    python.remove("vllm.vllm_flash_attn.layers.rotary")
    files = [folder.joinpath(*name.split(".")[1:]).with_suffix(".py") for name in python]
    assert [file for file in files if not file.is_file()] == []
