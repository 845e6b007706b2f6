"""Where the weights of a sync come from: the learner's parameters, as an ordinary checkpoint has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn

from learner.adapters import adapted_layers, merged_weight


class WeightSource(Protocol):
    """The same names in the same order every time. What it yields must not change between an offer and the end of its sync."""

    def specs(self) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
        """Name, dtype and full shape of everything that `tensors` will yield, without computing or gathering any of it."""
        ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name, as in a checkpoint of transformers, and detached contiguous values, one tensor at a time. Called once in each sync."""
        ...


class FullWeights:
    """A model whose parameters are the checkpoint's."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def specs(self) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
        for name, parameter in self._model.named_parameters():
            yield name, parameter.dtype, parameter.shape

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        # Tied parameters appear once, under their first name, which is how the engine's loader knows them.
        for name, parameter in self._model.named_parameters():
            yield name, parameter.detach()


class MergedWeights:
    """A model with adapters, as the checkpoint it amounts to. Each merged matrix is computed when its turn comes and kept by nobody here.

    Out of place: adding a product and taking it off again would change the learner's own weights by its rounding.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def specs(self) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
        for name, parameter in self._model.named_parameters():
            if ".lora_" not in name:
                yield name.replace(".base_layer.", "."), parameter.dtype, parameter.shape

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        # Names of peft's making end here: `base_layer` goes, and what an adapted layer holds beside it is in the merged weight.
        layers = {f"{path}.base_layer.weight": layer for path, layer in adapted_layers(self._model).items()}
        for name, parameter in self._model.named_parameters():
            if ".lora_" not in name:
                yield name.replace(".base_layer.", "."), merged_weight(layers[name]) if name in layers else parameter.detach()


def weight_source(model: nn.Module) -> WeightSource:
    """Full weights of any learner's model, adapters merged."""
    return MergedWeights(model) if adapted_layers(model) else FullWeights(model)
