"""The learner's weights under the names of an ordinary checkpoint, for syncs and for disk."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from learner.model.adapters import (
    adapted_layers,
    embeddings_with_trained_rows,
    in_full,
    merged_embedding,
    merged_weight,
    stored_as,
)
from shared.model_families import TURNED_IN_FILES
from shared.tokens.fresh import FreshTokens
from shared.weight_sync.offer import AdapterFiles

ADAPTER_FOLDER = "adapter"
"""Inside a checkpoint of a learner with an adapter: the adapter alone, in peft's format."""


class WeightSource(Protocol):
    """Named tensors, the same names in the same order every time.

    What it yields must not change between an offer and the end of its sync.
    """

    def specs(self) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
        """Yield name, dtype and full shape of all `tensors`, without computing any of them."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a checkpoint's names and detached contiguous values, one tensor at a time."""


class CheckpointWeights:
    """A model's parameters as the checkpoint that they amount to, merged and unpacked."""

    # Merged out of place: adding a product and taking it off again would change the learner's own
    # weights by its rounding.

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._turned = turned_in_files(model)

    def specs(self) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
        for _, name, parameter in self._parameters():
            dtype, shape = stored_as(parameter)
            if name.endswith(self._turned):
                shape = torch.Size([*shape[:-2], shape[-1], shape[-2]])
            yield name, dtype, shape

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        layers = adapted_layers(self._model)
        embeddings = embeddings_with_trained_rows(self._model)
        for path, name, parameter in self._parameters():
            adapted = path.removesuffix(".base_layer.weight")
            # Another parameter of an adapted layer, such as its bias, is as it was.
            if adapted != path and adapted in layers:
                yield name, merged_weight(layers[adapted])
            elif adapted != path and adapted in embeddings:
                yield name, merged_embedding(embeddings[adapted])
            elif name.endswith(self._turned):
                yield name, parameter.detach().transpose(-1, -2).contiguous()
            else:
                yield name, in_full(parameter)

    def _parameters(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Yield each parameter's path in the model, its name in the checkpoint, and itself."""
        # Tied parameters appear once, under their first name, by which engines' loaders know them.
        for path, parameter in self._model.named_parameters():
            # Names of peft's making end here: `base_layer` goes, and what an adapted layer holds
            # beside it is in the merged weight.
            if ".lora_" not in path and ".trainable_tokens_" not in path:
                name = path.replace(".token_adapter.", ".").replace(".base_layer.", ".")
                yield path, name, parameter


@dataclass(frozen=True, slots=True)
class CheckpointContent:
    """An ordinary checkpoint: it loads in transformers and vLLM without this project.

    It has weights (safetensors; adapters merged), configuration, tokenizer and processor files.
    """

    model: Any
    processor: Any
    weights: Mapping[str, torch.Tensor]
    """Those of `CheckpointWeights`."""
    adapter: AdapterFiles | None = None
    """The model's, if it has one."""
    fresh: FreshTokens | None = None
    """Tokens that an adapter on this checkpoint has to train."""

    def write_processor(self, folder: Path) -> None:
        """Write what a step may be working with: not beside one."""
        self.processor.save_pretrained(folder)
        if self.fresh is not None:
            self.fresh.save(folder)

    def write_weights(self, folder: Path) -> None:
        """Write weights and configuration to the disk, as often as it is called; beside a step,
        too.
        """
        if self.adapter is not None:
            # Beside merged weights, which load where nobody knows of adapters.
            self.adapter.save(folder / ADAPTER_FOLDER)
        save_as_published(self.model, folder, self.weights)
        _write_config(self.model.config, next(iter(self.weights.values())).dtype, folder)
        flush(*folder.glob("*"), *folder.glob(f"{ADAPTER_FOLDER}/*"))


def turned_in_files(model: nn.Module) -> tuple[str, ...]:
    """Return the ends of names whose last two dimensions change places in `model`'s files."""
    config = getattr(model, "config", None)
    return TURNED_IN_FILES.get(getattr(config, "model_type", ""), ())


def save_as_published(model: Any, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Write weights and configuration as the family's own files have them, for any reader.

    `weights` are those of `CheckpointWeights`.
    """
    # A copy: transformers takes out of it what it has written. Where tensors are turned, it would
    # turn them back, and vLLM, which takes every file for one of the hub, would read them wrongly.
    options = {"save_original_format": False} if turned_in_files(model) else {}
    model.save_pretrained(folder, state_dict=dict(weights), **options)


def flush(*paths: Path) -> None:
    """Have these files on the disk: a name must not outlive a power failure without them.

    Folders are left out. A rank gives its own files alone: another's come and go meanwhile, and
    what another node has in its memory only that node can write.
    """
    for path in paths:
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _write_config(config: Any, dtype: torch.dtype, folder: Path) -> None:
    """Write transformers' configuration with the number type of what is saved."""
    # transformers' own names that of the model in memory, where shards are float32.
    config = copy.deepcopy(config)
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        part.dtype = dtype
    config.save_pretrained(folder)
