"""An ordinary checkpoint: loads in transformers and vLLM without this project."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from learner.adapters import adapted_layers, save_adapter
from learner.weight_source import MergedWeights
from shared.errors import StorageError

ADAPTER_FOLDER = "adapter"
"""Inside a checkpoint of a learner with an adapter: the adapter alone, in peft's format."""


def save_checkpoint(model: Any, processor: Any, folder: Path, *, state_dict: dict[str, torch.Tensor] | None = None) -> None:
    """Weights (safetensors; adapters merged), configuration, tokenizer and processor files in `folder`, complete or not there at all.

    `state_dict` are the weights where the model holds only a part of them.
    Raises StorageError with the path: no space left, no permission.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        if adapted_layers(model):
            # Merged, so that it loads where nobody knows of adapters.
            model.save_pretrained(partial, state_dict=dict(MergedWeights(model).tensors()))
            save_adapter(model, partial / ADAPTER_FOLDER)
        else:
            model.save_pretrained(partial, state_dict=state_dict)
        processor.save_pretrained(partial)
        if folder.exists():
            shutil.rmtree(folder)
        partial.replace(folder)
    except (OSError, SafetensorError) as error:
        raise StorageError(str(folder), str(error)) from error
