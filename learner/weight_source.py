"""Where the weights of a sync come from: the learner's parameters, as an ordinary checkpoint has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn

from learner.adapters import (
    adapted_layers,
    embeddings_with_trained_rows,
    merged_embedding,
    merged_weight,
)


class WeightSource(Protocol):
    """The same names in the same order every time. What it yields must not change between an offer and the end of its sync."""

    def specs(self) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
        """Name, dtype and full shape of everything that `tensors` will yield, without computing or gathering any of it."""
        ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name, as in a checkpoint of transformers, and detached contiguous values, one tensor at a time. Called once in each sync."""
        ...


class CheckpointWeights:
    """A model's parameters, and where it has adapters the checkpoint that it amounts to: each merged matrix is computed when its turn comes, and kept by
    nobody here.

    Out of place: adding a product and taking it off again would change the learner's own weights by its rounding.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def specs(self) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
        for _, name, parameter in self._parameters():
            yield name, parameter.dtype, parameter.shape

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        layers = {f"{path}.base_layer.weight": layer for path, layer in adapted_layers(self._model).items()}
        embeddings = {f"{path}.base_layer.weight": layer for path, layer in embeddings_with_trained_rows(self._model).items()}
        for own_name, name, parameter in self._parameters():
            if own_name in layers:
                yield name, merged_weight(layers[own_name])
            elif own_name in embeddings:
                yield name, merged_embedding(embeddings[own_name])
            else:
                yield name, parameter.detach()

    def _parameters(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Name in the model, name in the checkpoint, values. Tied parameters appear once, under their first name, by which the engine's loader knows them."""
        for name, parameter in self._model.named_parameters():
            # Names of peft's making end here: `base_layer` goes, and what an adapted layer holds beside it is in the merged weight.
            if ".lora_" not in name and ".trainable_tokens_" not in name:
                checkpoints = name.replace(".token_adapter.", ".").replace(".base_layer.", ".")
                yield name, checkpoints, parameter
