"""The learner's weights under the names of an ordinary checkpoint, for syncs and for disk."""

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
from shared.model_families import TURNED_IN_FILES
from shared.tokens.fresh import FreshTokens
from shared.weight_sync.offer import AdapterFiles

ADAPTER_FOLDER = "adapter"
"""Inside a checkpoint of a learner with an adapter: the adapter alone, in peft's format."""
FILE_SIZE = "50GB"
"""Of weights in one file, at most: transformers' own."""


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

    model: PreTrainedModel
    base: BaseFiles
    weights: Mapping[str, torch.Tensor]
    """Those of `CheckpointWeights`; on the meta device they are not written, which tries the rest.
    """
    adapter: AdapterFiles | None = None
    """The model's, if it has one."""
    fresh: FreshTokens | None = None
    """Tokens that an adapter on this checkpoint has to train."""

    def write_weights(self, folder: Path) -> None:
        """Write all of it to the disk, as often as it is called; beside a step, too."""
        if self.adapter is not None:
            # Beside merged weights, which load where nobody knows of adapters.
            self.adapter.save(folder / ADAPTER_FOLDER)
        if self.fresh is not None:
            self.fresh.save(folder)
        save_as_published(self.model, folder, self.weights, self.base)
        flush(*folder.glob("*"), *folder.glob(f"{ADAPTER_FOLDER}/*"))


def turned_in_files(model: nn.Module) -> tuple[str, ...]:
    """Return the ends of names whose last two dimensions change places in `model`'s files."""
    config = getattr(model, "config", None)
    return TURNED_IN_FILES.get(getattr(config, "model_type", ""), ())


def save_as_published(
    model: PreTrainedModel,
    folder: Path,
    weights: Mapping[str, torch.Tensor],
    base: BaseFiles,
    **text_config: Any,
) -> None:
    """Write weights as the family's own files have them, for any reader, and the files of `base`.

    Args:
        weights: those of `CheckpointWeights`.
        text_config: as of `BaseFiles.write`.
    """
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    has_head = "lm_head.weight" in weights
    base.write(folder, dtype=dtype, has_head=has_head, text_config=text_config)
    # Where tensors are turned, transformers would turn them back, and vLLM, which takes every file
    # for one of the hub, would read them wrongly.
    if not turned_in_files(model):
        weights = revert_weight_conversion(model, dict(weights))
    if not any(tensor.is_meta for tensor in weights.values()):
        save_torch_state_dict(
            dict(weights), folder, max_shard_size=FILE_SIZE, metadata={"format": "pt"}
        )


def require_same_config(folder: Path, base: BaseFiles) -> None:
    """Require that transformers reads in `folder` what it reads in the base.

    Number types and what is tied may differ, as `BaseFiles.write` has them. Raises ConfigError with
    the keys that differ.
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
            " differently from the run's checkpoints; write them there as transformers 5 does"
            " (load the configuration and save it with save_pretrained)"
        )


def _compared(section: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _compared(value) if isinstance(value, dict) else value
        for key, value in section.items()
        if key not in ("dtype", "torch_dtype", "tie_word_embeddings", "_name_or_path")
    }


def flush(*paths: Path) -> None:
    """Have these files on the disk: a name must not outlive a power failure without them.

    They get the permissions of their folder, those that safetensors wrote too.
    Folders are left out. A rank gives its own files alone: another's come and go meanwhile, and
    what another node has in its memory only that node can write.
    """
    for path in paths:
        if path.is_file():
            open_as_folder(path)
            with path.open("rb") as file:
                os.fsync(file.fileno())
