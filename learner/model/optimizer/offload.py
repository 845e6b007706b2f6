"""Makes room for the engine on the learner's device: moves the learner's tensors to host memory
while the engine generates (`rollout_matching.offload`), and frees torch's cache.

The values do not change. The tensors are moved back before any code of the learner runs, even after
an exception. Not tested on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from learner.model.optimizer.adamw import Optimizer
from shared.config.rollout import RolloutMatchingSection
from shared.config.training import LearnerSection
from shared.errors import ConfigError, LearnerError

CPU = torch.device("cpu")
SECTION = "rollout_matching.offload"


def require_offload(
    rollouts: RolloutMatchingSection, learner: LearnerSection, device: torch.device
) -> None:
    """Raise ConfigError if the run offloads the learner's tensors, but this is not possible."""
    if not offloads(rollouts):
        return
    problems = []
    if device.type == "cpu":
        problems.append(
            f"{SECTION}.enabled: the learner already runs on the CPU; set it to false, or lower"
            " rollout_matching.vllm.kv_cache_memory_bytes to make room for the engine"
        )
    if learner.is_sharded:
        problems.append(
            f"{SECTION}.enabled: shards (learner.parallel: fsdp) cannot be offloaded; set it to"
            " false, set learner.parallel: ddp, or rollout_matching.vllm.mode: actors"
        )
    if problems:
        raise ConfigError(problems)


def offloads(rollouts: RolloutMatchingSection) -> bool:
    """Return whether the run moves the learner's tensors to host memory while engines generate.

    Only the mode `colocate` supports it.
    """
    return rollouts.offload.enabled and rollouts.backend_name == "colocate"


@contextmanager
def offloaded_optimizer(optimizer: Optimizer, device: torch.device) -> Iterator[None]:
    """Keep the optimizer's state in host memory inside the block, then move it to `device`."""
    try:
        optimizer.move_to(CPU)
        yield
    finally:
        with _room_on(device):
            optimizer.move_to(device)


@contextmanager
def offloaded_model(model: nn.Module) -> Iterator[None]:
    """Keep parameters, gradients and buffers in host memory inside the block, then move them back.

    The tensors stay the same objects, so references to them (the optimizer, tied layers) remain
    valid. Their memory on the device is freed.
    """
    # Each tensor once, including tied ones.
    tensors: list[torch.Tensor] = []
    for parameter in model.parameters():
        tensors.append(parameter)
        if parameter.grad is not None:
            tensors.append(parameter.grad)
    tensors += model.buffers()
    moved: list[tuple[torch.Tensor, torch.device]] = []
    try:
        for tensor in tensors:
            device = tensor.device
            tensor.data = tensor.data.to(CPU, copy=True)
            moved.append((tensor, device))
        yield
    finally:
        for tensor, device in moved:
            with _room_on(device):
                tensor.data = tensor.data.to(device, copy=True)


@contextmanager
def offloaded(
    rollouts: RolloutMatchingSection,
    model: nn.Module,
    optimizer: Optimizer,
    device: torch.device,
    *,
    with_model: bool,
    reference: nn.Module | None = None,
) -> Iterator[None]:
    """Keep the learner's tensors in host memory inside the block, then move them back.

    The configuration chooses the tensors of the optimizer, of the model (moved only if `with_model`
    is true) or of both. If it chooses the model, a separate `reference` model is moved too.

    On a GPU, memory that torch holds without using it is returned to the CUDA driver, also without
    offload: the engine is another process, and activations of the last row may have filled the GPU.
    """
    section = rollouts.offload
    is_moved = offloads(rollouts)
    with ExitStack() as stack:
        if is_moved and section.moves_optimizer:
            stack.enter_context(offloaded_optimizer(optimizer, device))
        if is_moved and section.moves_model and with_model:
            stack.enter_context(offloaded_model(model))
        if is_moved and section.moves_model and reference is not None:
            stack.enter_context(offloaded_model(reference))
        if device.type == "cuda":
            torch.cuda.empty_cache()
        yield


@contextmanager
def _room_on(device: torch.device) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise LearnerError(
            f"the tensors of {SECTION} do not fit on {device} again, next to the engine"
            f" ({error}); lower rollout_matching.vllm.gpu_memory_utilization, set"
            " rollout_matching.vllm.sleep: true, or use another backend (rollout_backend: hf,"
            " vllm.mode: actors)",
            phase="offload",
        ) from error
