"""The learner's weights under the names that checkpoints use, for weight syncs and for saving."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import save_torch_state_dict
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from learner.model.adapters import (
    adapted_layers,
    embeddings_with_trained_rows,
    in_full,
    merged_embedding,
    merged_weight,
    stored_as,
)
from learner.model.checkpoint_folder import CONFIG, BaseFiles, open_as_folder
from shared.errors import ConfigError
from shared.model_families import TURNED_IN_FILES, reads_only_text
from shared.tokens.fresh import FreshTokens
from shared.weight_sync.offer import AdapterFiles

ADAPTER_FOLDER = "adapter"
"""Subfolder of a checkpoint that contains only the adapter, in peft's format."""
FILE_SIZE = "50GB"
"""Maximum size of a checkpoint's weight file, the same as in transformers."""


class WeightSource(Protocol):
    """Weights that can be sent or saved: named tensors, always with the same names and order.

    The tensors must not change between the offer of a weight sync and its end.
    """

    def specs(self) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
        """Yield name, dtype and full shape of each tensor, without computing its values."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor's name in a checkpoint and its values, detached and contiguous."""


class CheckpointWeights:
    """A model's weights as a checkpoint has them: adapters merged, 4-bit weights dequantized."""

    # Merged out of place: adding and subtracting a product would change the learner's weights by
    # rounding errors.

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._turned = turned_in_files(model)
        config = getattr(model, "config", None)
        # Some text models have other names in memory than in files, and fused experts, which files
        # hold one by one. vLLM reads the names of the files.
        self._is_text = config is not None and reads_only_text(config.to_dict())

    def specs(self) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
        for _, name, parameter in self._parameters():
            dtype, shape = stored_as(parameter)
            if name.endswith(self._turned):
                shape = torch.Size([*shape[:-2], shape[-1], shape[-2]])
            if self._is_text:
                fused = torch.empty(shape, dtype=dtype, device="meta")
                for part, tensor in revert_weight_conversion(self._model, {name: fused}).items():
                    yield part, tensor.dtype, tensor.shape
            else:
                yield name, dtype, shape

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        layers = adapted_layers(self._model)
        embeddings = embeddings_with_trained_rows(self._model)
        for path, name, parameter in self._parameters():
            adapted = path.removesuffix(".base_layer.weight")
            # Other parameters of an adapted layer, such as its bias, are not merged.
            if adapted != path and adapted in layers:
                yield name, merged_weight(layers[adapted])
            elif adapted != path and adapted in embeddings:
                yield name, merged_embedding(embeddings[adapted])
            elif name.endswith(self._turned):
                yield name, parameter.detach().transpose(-1, -2).contiguous()
            elif self._is_text:
                split = revert_weight_conversion(self._model, {name: in_full(parameter)})
                for part, tensor in split.items():
                    # Views of one tensor cannot be saved as several.
                    yield part, tensor if len(split) == 1 else tensor.clone()
            else:
                yield name, in_full(parameter)

    def _parameters(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Yield each parameter's path in the model, its checkpoint name, and the parameter."""
        # Tied parameters appear once, under their first name, which the engines' loaders expect.
        for path, parameter in self._model.named_parameters():
            # Remove peft's names: `base_layer` is dropped, and the adapter's own tensors are part
            # of the merged weight.
            if ".lora_" not in path and ".trainable_tokens_" not in path:
                name = path.replace(".token_adapter.", ".").replace(".base_layer.", ".")
                yield path, name, parameter


@dataclass(frozen=True, slots=True)
class CheckpointContent:
    """The content of a checkpoint, which transformers and vLLM load without this project.

    It has weights (safetensors; adapters merged), configuration, tokenizer and processor files.
    """

    model: PreTrainedModel
    base: BaseFiles
    weights: Mapping[str, torch.Tensor]
    """The tensors of `CheckpointWeights`. If they are on the meta device, only the other files are
    written, as a test."""
    adapter: AdapterFiles | None = None
    """The model's adapter, if it has one."""
    fresh: FreshTokens | None = None
    """Token ids whose embeddings are still untrained, so an adapter on this checkpoint must train
    them."""

    def write_weights(self, folder: Path) -> None:
        """Write the whole checkpoint into `folder`, and flush it to disk.

        It can be called again, and while a step runs.
        """
        if self.adapter is not None:
            # In addition to the merged weights, which load without support for adapters.
            self.adapter.save(folder / ADAPTER_FOLDER)
        if self.fresh is not None:
            self.fresh.save(folder)
        save_as_published(self.model, folder, self.weights, self.base)
        flush(*folder.glob("*"), *folder.glob(f"{ADAPTER_FOLDER}/*"))


def turned_in_files(model: nn.Module) -> tuple[str, ...]:
    """Return suffixes of the names of tensors that the files of `model` store transposed."""
    config = getattr(model, "config", None)
    return TURNED_IN_FILES.get(getattr(config, "model_type", ""), ())


def save_as_published(
    model: PreTrainedModel,
    folder: Path,
    weights: Mapping[str, torch.Tensor],
    base: BaseFiles,
    **text_config: Any,
) -> None:
    """Write a checkpoint: weights in the layout of the family's published files, and small files.

    Args:
        weights: the tensors of `CheckpointWeights`.
        base: the small files, of the initial checkpoint (configuration, tokenizer, processor).
        text_config: as in `BaseFiles.write`.
    """
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    has_head = "lm_head.weight" in weights
    base.write(folder, dtype=dtype, has_head=has_head, text_config=text_config)
    # For families with transposed tensors, transformers would transpose them back, and vLLM, which
    # expects the layout of the hub's files, would read them wrongly.
    if not turned_in_files(model):
        weights = revert_weight_conversion(model, dict(weights))
    if not any(tensor.is_meta for tensor in weights.values()):
        save_torch_state_dict(
            dict(weights), folder, max_shard_size=FILE_SIZE, metadata={"format": "pt"}
        )


def require_same_config(folder: Path, base: BaseFiles) -> None:
    """Check that transformers reads the same configuration from a saved checkpoint as from `base`.

    `folder` is the saved checkpoint, `base` has the files of the initial checkpoint. Number types
    and tied weights may differ (see `BaseFiles.write`). Raises ConfigError with the keys that
    differ.
    """
    original = folder / "base"
    original.mkdir()
    (original / CONFIG).write_text(base.config_text, encoding="utf-8")
    saved, given = (
        _compared(AutoConfig.from_pretrained(one).to_dict()) for one in (folder, original)
    )
    if differing := sorted(key for key in given if saved.get(key) != given[key]):
        raise ConfigError(
            f"model.path: transformers would read {', '.join(differing)} of its config.json"
            " differently from the run's checkpoints; rewrite config.json with transformers 5"
            " (load the configuration and save it with save_pretrained)"
        )


def _compared(section: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _compared(value) if isinstance(value, dict) else value
        for key, value in section.items()
        if key not in ("dtype", "torch_dtype", "tie_word_embeddings", "_name_or_path")
    }


def flush(*paths: Path) -> None:
    """Flush files of a checkpoint to disk, and give them their folder's permissions.

    This happens before the checkpoint gets its final name. So a power failure cannot leave a
    checkpoint with this name that lacks these files. Folders are skipped. A rank passes only its
    own files: other ranks' files may appear and vanish meanwhile, and only the node that wrote a
    file can flush it.
    """
    for path in paths:
        if path.is_file():
            open_as_folder(path)
            with path.open("rb") as file:
                os.fsync(file.fileno())
