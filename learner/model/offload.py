"""What leaves the learner's device while the engine beside it works there
(`rollout_matching.offload`).

Values are moved bit for bit, and are back before anything of the learner runs, also behind an
exception. Not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch
from torch import nn

from shared.config import RunConfig
from shared.config.derive import is_sharded
from shared.errors import ConfigError, LearnerError

CPU = torch.device("cpu")
SECTION = "rollout_matching.offload"


class Movable(Protocol):
    """An `Optimizer`, as far as the optimizer's state has to go somewhere."""

    def move_to(self, device: torch.device) -> None: ...


def require_offload(config: RunConfig, device: torch.device) -> None:
    """ConfigError where offload is asked for and cannot be had. Only mode `colocate` has it:
    elsewhere the section is ignored.
    """
    if not offloads(config):
        return
    problems = []
    if device.type == "cpu":
        problems.append(
            f"{SECTION}.enabled: the learner runs on the CPU, and its weights are in the host's"
            " memory already; set it to false, or lower"
            " rollout_matching.vllm.kv_cache_memory_bytes to make room for the engine"
        )
    if is_sharded(config):
        problems.append(
            f"{SECTION}.enabled: the parameters are sharded over {config.learner.world_size} ranks"
            " (learner.parallel: fsdp), and shards cannot be moved away; set it to false,"
            " set learner.parallel: ddp, or generate elsewhere (rollout_matching.vllm.mode:"
            " actors)"
        )
    if problems:
        raise ConfigError(problems)


def offloads(config: RunConfig) -> bool:
    """Whether anything is to be moved away in this run."""
    rollouts = config.rollout_matching
    return (
        rollouts.offload.enabled
        and rollouts.rollout_backend == "vllm"
        and rollouts.vllm.mode == "colocate"
    )


@contextmanager
def offloaded_optimizer(
    updater: Movable, device: torch.device, *, host: torch.device = CPU
) -> Iterator[None]:
    """The optimizer's state in host memory, and afterwards on `device` again."""
    try:
        updater.move_to(host)
        yield
    finally:
        with _room_on(device):
            updater.move_to(device)


@contextmanager
def offloaded_model(model: nn.Module, *, host: torch.device = CPU) -> Iterator[None]:
    """Parameters, their gradients so far, and buffers in host memory, and afterwards each on the
    device it came from.

    The tensors stay the same objects, so that whoever holds one (the optimizer, tied layers) holds
    it still; their memory on the device is let go.
    """
    moved: list[tuple[torch.Tensor, torch.device]] = []
    try:
        for tensor in _tensors(model):
            device = tensor.device
            tensor.data = _copied(tensor.data, host)
            moved.append((tensor, device))
        yield
    finally:
        for tensor, device in moved:
            with _room_on(device):
                tensor.data = _copied(tensor.data, device)


@contextmanager
def offloaded(
    config: RunConfig, model: nn.Module, updater: Movable, device: torch.device, *, with_model: bool
) -> Iterator[None]:
    """What the configuration names; without `with_model` but for the model.

    On a GPU the memory is given back to the driver, because the engine is another process.
    """
    if not offloads(config):
        yield
        return
    section = config.rollout_matching.offload
    with ExitStack() as stack:
        if section.moves_optimizer:
            stack.enter_context(offloaded_optimizer(updater, device))
        if section.moves_model and with_model:
            stack.enter_context(offloaded_model(model))
        if device.type == "cuda":
            torch.cuda.empty_cache()
        yield


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Each once, tied ones too."""
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()


def _copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device, copy=True)


@contextmanager
def _room_on(device: torch.device) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise LearnerError(
            f"what {SECTION} moved away does not fit back onto {device} beside the engine"
            f" ({error}); lower rollout_matching.vllm.gpu_memory_utilization, set"
            " rollout_matching.vllm.sleep: true, or generate elsewhere (rollout_backend: hf,"
            " vllm.mode: actors)",
            phase="offload",
        ) from error
