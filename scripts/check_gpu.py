"""Checks that the packages a vLLM engine needs on a GPU load on this machine.

`scripts/setup.sh gpu` runs it last. locks/gpu.txt has all of these packages, so each must load.
vLLM itself works without some of them, but expects no other error than an ImportError. That of two
CUDA packages of different versions would end the engine.

On a machine without an NVIDIA driver, such as a login node or one that builds an image, only
packages that load without it are checked, so run it again where the GPU is. Not run on a GPU.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

WITHOUT_DRIVER = (
    "torchvision",
    "vllm",
    "triton.language",
    "cuda.bindings.driver",
    "cuda.bindings.runtime",
    "cutlass.cute",
)
"""Modules that vLLM 0.32 and flashinfer import on a GPU, and that load without a driver."""
WITH_DRIVER = (
    "vllm._C_stable_libtorch",
    "vllm.cumem_allocator",
    "vllm.vllm_flash_attn.layers.rotary",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.flashinfer",
    "vllm.distributed.device_communicators.flashinfer_all_reduce",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.model_executor.models.qwen3_vl",
)
"""Modules of vLLM 0.32 that an engine of Qwen3-VL imports on a GPU. They link to the driver, or
flashinfer asks it for the GPU's type."""
LEAST_DRIVER = 580
"""The first driver for CUDA 13, for which the torch of locks/gpu.txt is built."""


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver, such as `580.95.05`; None: nvidia-smi finds none."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    except subprocess.TimeoutExpired:
        sys.exit(
            "nvidia-smi has not answered within 60 s, so the NVIDIA driver hangs; restart the"
            " machine, and run the set-up again"
        )
    found = re.match(r"[0-9]+[0-9.]*", answer.stdout)
    return found and found[0]  # other text says that there is no GPU


def cuda_problem(torch: Any, driver: str | None) -> str | None:
    """Return why torch cannot use the GPU of this driver, and the remedy; None: it can.

    Args:
        torch: the module.
        driver: the driver's version; None: there is none, so nothing needs to be used.
    """
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA (torch.version.cuda is None), so it"
            " is not the torch of locks/gpu.txt; remove .venv, and run the set-up again"
        )
    # With NVIDIA's package of forward compatibility, torch works with an older driver.
    if driver is None or torch.cuda.is_available():
        return None
    if int(driver.partition(".")[0]) < LEAST_DRIVER:
        return (
            f"the NVIDIA driver is version {driver}, but CUDA {torch.version.cuda}, for which torch"
            f" {torch.__version__} is built, needs {LEAST_DRIVER} or later; update the driver, or"
            " choose a machine or image that has a newer one"
        )
    try:
        torch.cuda.init()
        cause = "without an error"
    except Exception as error:
        cause = str(error)
    return (
        f"torch.cuda.is_available() is False, although nvidia-smi finds a GPU with driver {driver}"
        f" ({cause}); check CUDA_VISIBLE_DEVICES, restart the machine if the driver was updated,"
        " and start a container with --gpus all"
    )


def import_problems(names: Sequence[str]) -> Iterator[str]:
    """Import the modules, and yield a message for each that raises any error."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            traceback.print_exc()
            # An AttributeError: of two packages with one module, one has overwritten the other.
            hint = "cuda-python and cuda-bindings must have the same version"
            yield (
                f"{name} does not load ({type(error).__name__}: {error}), and vLLM imports it when"
                " an engine starts; remove .venv and run the set-up again, and if it remains,"
                " compare `pip list` with locks/gpu.txt"
                f"{f' ({hint})' if isinstance(error, AttributeError) else ''}"
            )


def main() -> None:
    import torch

    driver = driver_version()
    if problem := cuda_problem(torch, driver):
        sys.exit(problem)
    has_gpu = driver is not None or torch.cuda.is_available()
    names = WITHOUT_DRIVER + (WITH_DRIVER if has_gpu else ())
    if problems := list(import_problems(names)):
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
