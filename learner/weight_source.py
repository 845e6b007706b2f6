"""Where the weights of a sync come from: the learner's parameters, as an ordinary checkpoint has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn


class WeightSource(Protocol):
    """The same names in the same order every time. What it yields must not change between an offer and the end of its sync."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name, as in a checkpoint of transformers, and detached values, one tensor at a time."""
        ...


class FullWeights:
    """A model whose parameters are the checkpoint's."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        # Tied parameters appear once, under their first name, which is how the engine's loader knows them.
        for name, parameter in self._model.named_parameters():
            yield name, parameter.detach()
