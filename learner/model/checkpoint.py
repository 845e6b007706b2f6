"""Where the weights of a sync come from: the learner's parameters, as an ordinary checkpoint has
them.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import nn

from learner.model.adapters import (
    adapted_layers,
    embeddings_with_trained_rows,
    merged_embedding,
    merged_weight,
)
from shared.errors import StorageError
from shared.tokens.fresh import FreshTokens
from shared.weight_sync.offer import AdapterFiles


class WeightSource(Protocol):
    """The same names in the same order every time. What it yields must not change between an offer
    and the end of its sync.
    """

    def specs(self) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
        """Name, dtype and full shape of everything that `tensors` will yield, without computing or
        gathering any of it.
        """
        ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name, as in a checkpoint of transformers, and detached contiguous values, one tensor at a
        time. Called once in each sync.
        """
        ...


class CheckpointWeights:
    """A model's parameters, and where it has adapters the checkpoint that it amounts to: each
    merged matrix is computed when its turn comes, and kept by nobody here.

    Out of place: adding a product and taking it off again would change the learner's own weights by
    its rounding.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def specs(self) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
        for _, name, parameter in self._parameters():
            yield name, parameter.dtype, parameter.shape

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        layers = {
            f"{path}.base_layer.weight": layer
            for path, layer in adapted_layers(self._model).items()
        }
        embeddings = {
            f"{path}.base_layer.weight": layer
            for path, layer in embeddings_with_trained_rows(self._model).items()
        }
        for own_name, name, parameter in self._parameters():
            if own_name in layers:
                yield name, merged_weight(layers[own_name])
            elif own_name in embeddings:
                yield name, merged_embedding(embeddings[own_name])
            else:
                yield name, parameter.detach()

    def _parameters(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Name in the model, name in the checkpoint, values. Tied parameters appear once, under
        their first name, by which the engine's loader knows them.
        """
        for name, parameter in self._model.named_parameters():
            # Names of peft's making end here: `base_layer` goes, and what an adapted layer holds
            # beside it is in the merged weight.
            if ".lora_" not in name and ".trainable_tokens_" not in name:
                checkpoints = name.replace(".token_adapter.", ".").replace(".base_layer.", ".")
                yield name, checkpoints, parameter


# An ordinary checkpoint: loads in transformers and vLLM without this project.


ADAPTER_FOLDER = "adapter"
"""Inside a checkpoint of a learner with an adapter: the adapter alone, in peft's format."""


def save_checkpoint(
    model: Any,
    processor: Any,
    folder: Path,
    *,
    state_dict: dict[str, torch.Tensor] | None = None,
    adapter: AdapterFiles | None = None,
    fresh: FreshTokens | None = None,
) -> None:
    """Weights (safetensors; adapters merged), configuration, tokenizer and processor files in
    `folder`, complete or not there at all.

    `state_dict` are the weights where the model holds only a part of them; `adapter` is the
    model's, if it has one. `fresh` are tokens that an adapter on this checkpoint has to train.
    Raises StorageError with the path: no space left, no permission.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        if adapter is not None:
            # Merged, so that the checkpoint loads where nobody knows of adapters.
            state_dict = state_dict or dict(CheckpointWeights(model).tensors())
            adapter.save(partial / ADAPTER_FOLDER)
        model.save_pretrained(partial, state_dict=state_dict)
        if state_dict is not None:
            _write_config(model.config, next(iter(state_dict.values())).dtype, partial)
        processor.save_pretrained(partial)
        if fresh is not None:
            fresh.save(partial)
        if folder.exists():
            shutil.rmtree(folder)
        partial.replace(folder)
    except (OSError, SafetensorError) as error:
        # On a full disk a half checkpoint is in the way of everything else.
        shutil.rmtree(partial, ignore_errors=True)
        raise StorageError(str(folder), str(error)) from error


def _write_config(config: Any, dtype: torch.dtype, folder: Path) -> None:
    """Over transformers' own, which names the number type of the model in memory: shards are
    float32, whatever is saved of them.
    """
    config = copy.deepcopy(config)
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        part.dtype = dtype
    config.save_pretrained(folder)
