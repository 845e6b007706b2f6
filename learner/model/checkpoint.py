"""The learner's weights under the names of an ordinary checkpoint, for syncs and for disk."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
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
from shared.run_files import cannot_write
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
    """A model's parameters as the checkpoint that they amount to, adapters merged."""

    # Merged out of place: adding a product and taking it off again would change the learner's own
    # weights by its rounding.

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def specs(self) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
        for _, name, parameter in self._parameters():
            yield name, parameter.dtype, parameter.shape

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
            else:
                yield name, parameter.detach()

    def _parameters(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Yield each parameter's path in the model, its name in the checkpoint, and itself."""
        # Tied parameters appear once, under their first name, by which engines' loaders know them.
        for path, parameter in self._model.named_parameters():
            # Names of peft's making end here: `base_layer` goes, and what an adapted layer holds
            # beside it is in the merged weight.
            if ".lora_" not in path and ".trainable_tokens_" not in path:
                name = path.replace(".token_adapter.", ".").replace(".base_layer.", ".")
                yield path, name, parameter


def partial_of(folder: Path) -> Path:
    """Return the name that a checkpoint's folder has until it is whole."""
    return folder.with_name(f"{folder.name}.partial")


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Give a folder to write into, which becomes `folder` when the body is done, or is removed.

    Raises StorageError with the path: no space left, no permission.
    """
    partial = partial_of(folder)
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        yield partial
        _flush(partial)
        # One of them is whole at every moment.
        old = folder.with_name(f"{folder.name}.old")
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.replace(old)
        partial.replace(folder)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        # On a full disk a half checkpoint is in the way of everything else.
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise cannot_write(folder, error) from error
        raise


def _flush(folder: Path) -> None:
    """Have the folder's files on the disk: a name must not outlive a power failure without them."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def write_checkpoint(
    model: Any,
    processor: Any,
    folder: Path,
    *,
    state_dict: dict[str, torch.Tensor] | None = None,
    adapter: AdapterFiles | None = None,
    fresh: FreshTokens | None = None,
) -> None:
    """Write an ordinary checkpoint: it loads in transformers and vLLM without this project.

    It has weights (safetensors; adapters merged), configuration, tokenizer and processor files.

    Args:
        folder: an empty one, of `whole_folder`.
        state_dict: the weights, where the model holds only a part of them.
        adapter: the model's, if it has one.
        fresh: tokens that an adapter on this checkpoint has to train.
    """
    if adapter is not None:
        # Merged, so that the checkpoint loads where nobody knows of adapters.
        state_dict = state_dict or dict(CheckpointWeights(model).tensors())
        adapter.save(folder / ADAPTER_FOLDER)
    model.save_pretrained(folder, state_dict=state_dict)
    if state_dict is not None:
        _write_config(model.config, next(iter(state_dict.values())).dtype, folder)
    processor.save_pretrained(folder)
    if fresh is not None:
        fresh.save(folder)


def _write_config(config: Any, dtype: torch.dtype, folder: Path) -> None:
    """Write transformers' configuration with the number type of what is saved."""
    # transformers' own names that of the model in memory, where shards are float32.
    config = copy.deepcopy(config)
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        part.dtype = dtype
    config.save_pretrained(folder)
