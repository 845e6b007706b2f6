"""A vLLM worker that spoils what a sync loads, when told to. Imported inside the engines' processes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from rollout_actors.weight_receiver import LoadWatch, ReceiptWorker


class SpoilingWatch(LoadWatch):
    """Turns one tensor upside down before its checksum is taken, or after it and before it is loaded; or fails there."""

    def __init__(self, model: nn.Module, bucket_bytes: int, corrupt: str, spoil: str, fail: str) -> None:
        super().__init__(model, bucket_bytes)
        self._corrupt = corrupt
        self._spoil = spoil
        self._fail = fail

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return super().load_weights((name, tensor.flip(0) if name == self._corrupt else tensor) for name, tensor in weights)

    def hand_over(self, tensors: list[tuple[str, torch.Tensor]]) -> set[str]:
        names = [name for name, _ in tensors]
        if self._fail in names:
            raise RuntimeError(f"told to fail at {self._fail}")
        return super().hand_over([(name, tensor.flip(0) if name == self._spoil else tensor) for name, tensor in tensors])


class SpoilingWorker(ReceiptWorker):
    _corrupt = _spoil = _fail = ""

    def arm(self, corrupt: str, spoil: str, fail: str) -> None:
        """For the next sync alone: the parameter to corrupt on its way, to spoil after its checksum, or to fail at; empty for none."""
        self._corrupt, self._spoil, self._fail = corrupt, spoil, fail

    def make_watch(self, model: nn.Module, bucket_bytes: int) -> LoadWatch:
        watch = SpoilingWatch(model, bucket_bytes, self._corrupt, self._spoil, self._fail)
        self.arm("", "", "")
        return watch
