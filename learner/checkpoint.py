"""An ordinary checkpoint: loads in transformers and vLLM without this project."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from learner.weight_source import CheckpointWeights
from shared.errors import StorageError
from shared.fresh_tokens import FreshTokens
from shared.lora import AdapterFiles

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
    """Weights (safetensors; adapters merged), configuration, tokenizer and processor files in `folder`, complete or not there at all.

    `state_dict` are the weights where the model holds only a part of them; `adapter` is the model's, if it has one.
    `fresh` are tokens that an adapter on this checkpoint has to train.
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
    """Over transformers' own, which names the number type of the model in memory: shards are float32, whatever is saved of them."""
    config = copy.deepcopy(config)
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        part.dtype = dtype
    config.save_pretrained(folder)
