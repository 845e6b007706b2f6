"""A vLLM worker that can be told to receive one tensor wrongly: so that a benchmark of verified syncs shows that they are verified."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from rollout_actors.weight_receiver import LoadWatch, ReceiptWorker


class CorruptingWatch(LoadWatch):
    """Exchanges two neighbouring elements of one tensor before anything else sees it."""

    name = ""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return super().load_weights((name, _exchanged(tensor) if name == self.name else tensor) for name, tensor in weights)


class CorruptingWorker(ReceiptWorker):
    _name = ""

    def corrupt_next(self, name: str) -> None:
        self._name = name

    def make_watch(self, model: nn.Module, bucket_bytes: int) -> LoadWatch:
        watch = CorruptingWatch(model, bucket_bytes)
        watch.name, self._name = self._name, ""
        return watch


def _exchanged(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[[100, 101]] = tensor.view(-1)[[101, 100]]
    return changed
