"""A vLLM worker that spoils what a sync loads, when told to. Imported inside the engines'
processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Any

import torch
from torch import nn

from rollout_actors.weight_sync.worker import ChecksumLoader, VerifyingWorker


class Fault(StrEnum):
    """A fault of one tensor of a sync."""

    CORRUPT = "corrupt"
    """It is turned upside down before its checksum is taken."""
    SPOIL = "spoil"
    """It is turned upside down after its checksum, before it is loaded."""
    FAIL = "fail"
    """Loading it fails."""


class SpoilingWatch(ChecksumLoader):
    def __init__(self, model: nn.Module, bucket_bytes: int, fault: Fault | None, name: str) -> None:
        super().__init__(model, bucket_bytes)
        self._fault = fault
        self._name = name

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return super().load_weights(
            (name, self._damaged(tensor) if name == self._name else tensor)
            for name, tensor in weights
        )

    def hand_over(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        return super().hand_over(
            (name, self._spoiled(tensor) if name == self._name else tensor)
            for name, tensor in tensors
        )

    def _spoiled(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._fault is Fault.FAIL:
            raise RuntimeError(f"told to fail at {self._name}")
        return tensor.flip(0) if self._fault is Fault.SPOIL else tensor

    def _damaged(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flip(0) if self._fault is Fault.CORRUPT else tensor


class SpoilingWorker(VerifyingWorker):
    model_runner: Any
    _fault: Fault | None = None
    _spoiled = ""
    watch_class = SpoilingWatch

    def arm(self, fault: str, name: str) -> None:
        """Set the fault of the parameter of this name, for the next sync alone."""
        self._fault = Fault(fault)
        self._spoiled = name

    def fail_next_step(self) -> None:
        def fail(module: nn.Module, args: tuple[Any, ...]) -> None:
            hook.remove()
            raise ZeroDivisionError("told to fail")

        hook = self.model_runner.model.register_forward_pre_hook(fail)

    def make_loader(self, model: nn.Module, bucket_bytes: int) -> ChecksumLoader:
        watch = self.watch_class(model, bucket_bytes, self._fault, self._spoiled)
        self._fault = None
        return watch
