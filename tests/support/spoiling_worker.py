"""A vLLM worker that spoils what a sync loads, when told to. Imported inside the engines' processes."""

from __future__ import annotations

import torch
from torch import nn

from rollout_actors.weight_receiver import LoadWatch, ReceiptWorker


class SpoilingWatch(LoadWatch):
    """Turns one tensor upside down, or fails, after the tensor's checksum was taken and before it is loaded."""

    def __init__(self, model: nn.Module, spoil: str, fail: str) -> None:
        super().__init__(model)
        self._spoil = spoil
        self._fail = fail

    def hand_over(self, tensors: list[tuple[str, torch.Tensor]]) -> set[str]:
        names = [name for name, _ in tensors]
        if self._fail in names:
            raise RuntimeError(f"told to fail at {self._fail}")
        return super().hand_over([(name, tensor.flip(0) if name == self._spoil else tensor) for name, tensor in tensors])


class SpoilingWorker(ReceiptWorker):
    _spoil = _fail = ""

    def arm(self, spoil: str, fail: str) -> None:
        """For the next sync alone: the parameter to spoil, or the one to fail at; empty for neither."""
        self._spoil, self._fail = spoil, fail

    def make_watch(self, model: nn.Module) -> LoadWatch:
        watch = SpoilingWatch(model, self._spoil, self._fail)
        self.arm("", "")
        return watch
