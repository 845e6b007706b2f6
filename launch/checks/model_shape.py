"""The sizes of a checkpoint's tensors, read from headers of its files, and of what a run trains."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from learner.model.parts import model_part, part_settings
from shared.config import RunConfig
from shared.config.model import ModelSection
from shared.config.rollout import RolloutMatchingSection
from shared.config.training import LearnerSection, TrainingSection
from shared.errors import ConfigError
from shared.model_families import (
    TILED_MODEL_TYPES,
    ModelPart,
    find_part,
)

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class VisionShape:
    """The sizes of a vision tower that determine its activations."""

    hidden: int
    layers: int
    intermediate: int
    patches_per_token: int
    """Patches of an image that become one token of the language model."""

    @property
    def layer_numbers_per_patch(self) -> int:
        """Values per patch that a vision layer (as many keys as queries) keeps for its backward."""
        return 10 * self.hidden + 4 * self.intermediate


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that determine its memory."""

    parameters: Mapping[str, tuple[int, ...]]
    """Shape of each of the model's tensors in the files; tied tensors are listed once."""
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    """Number of heads of keys and values, in grouped-query attention."""
    head_dim: int
    vocabulary: int
    vision: VisionShape | None
    """The vision tower; None for a text model."""

    @classmethod
    def read(cls, folder: Path) -> ModelShape:
        """Read config.json and the headers of the safetensors files. Raises ConfigError."""
        headers = read_headers(folder)
        try:
            config = json.loads((folder / "config.json").read_text())
            text = config.get("text_config", config)
            tower = config.get("vision_config")
            vision = None
            if tower is not None:
                is_tiled = config["model_type"] in TILED_MODEL_TYPES
                merged = (
                    tower["spatial_merge_size"] if not is_tiled else 1 / config["downsample_ratio"]
                )
                vision = VisionShape(
                    hidden=tower["hidden_size"],
                    layers=tower["num_hidden_layers" if is_tiled else "depth"],
                    intermediate=tower["intermediate_size"],
                    patches_per_token=round(merged**2),
                )
            shape = cls(
                parameters={name: sizes for name, sizes in headers.items() if find_part(name)},
                hidden=text["hidden_size"],
                layers=text["num_hidden_layers"],
                # Of experts, only those that a token passes through.
                intermediate=max(
                    text.get("intermediate_size") or 4 * text["hidden_size"],
                    text.get("num_experts_per_tok", 0) * text.get("moe_intermediate_size", 0),
                ),
                heads=text["num_attention_heads"],
                kv_heads=text.get("num_key_value_heads") or text["num_attention_heads"],
                head_dim=text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
                vocabulary=text["vocab_size"],
                vision=vision,
            )
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"model.path: {folder} cannot be read ({type(error).__name__}: {error}); give a"
                " folder that save_pretrained wrote"
            ) from error
        return shape

    @property
    def num_parameters(self) -> int:
        return sum(map(math.prod, self.parameters.values()))

    def names_by_layer(self) -> dict[str, list[str]]:
        """Return the tensors' names by layer of the language model or the vision tower.

        The key "" is for tensors outside of layers. fsdp gathers a model in these parts.
        """
        names: dict[str, list[str]] = {}
        for name in self.parameters:
            # Such as model.language_model.layers.7 of model.language_model.layers.7.mlp.up_proj.
            layer = re.match(r"(.*?\.\d+)\.", name)
            is_of_layer = layer is not None and find_part(name) is not ModelPart.ALIGNER
            names.setdefault(layer[1] if layer and is_of_layer else "", []).append(name)
        return names

    @property
    def has_query_norm(self) -> bool:
        """Return whether attention normalizes queries and keys, as in Qwen3."""
        return any(name.endswith(".q_norm.weight") for name in self.parameters)

    @property
    def has_gated_tower(self) -> bool:
        """True if the vision tower has gated layers like a language model, as in Qwen2.5-VL."""
        return any(
            name.endswith(".mlp.gate_proj.weight") and ".blocks." in name
            for name in self.parameters
        )

    @property
    def num_mergers(self) -> int:
        """Number of modules that turn image patches into tokens.

        Some models have several, which read the outputs of different vision layers.
        """
        if self.vision is None:
            return 0
        matrices = [
            name
            for name, sizes in self.parameters.items()
            if len(sizes) == 2 and find_part(name) is ModelPart.ALIGNER
        ]
        return max(1, len(matrices) // 2)

    @property
    def layer_numbers_per_token(self) -> int:
        """Numbers per token that a layer of the language model keeps for its backward pass."""
        # Inputs of norms and projections, queries, keys, values, the output of attention, the
        # gate and the gated product.
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return 6 * self.hidden + attention + 4 * self.intermediate


_FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of safetensors that store a weight without quantisation."""


def read_headers(folder: Path, *, key: str = "model.path") -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a checkpoint's files, by name.

    `key` is the configuration key that names the folder, for errors.

    Raises ConfigError for a damaged file, for weights that are stored as integers or in 8 bits,
    and the errors of `weight_files`.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder, key=key):
        try:
            with safe_open(path, framework="np") as file:
                for name in file.offset_keys():
                    tensor = file.get_slice(name)
                    shapes[name] = tuple(tensor.get_shape())
                    # Buffers may be integers.
                    is_weight = name.endswith((".weight", ".bias"))
                    if is_weight and tensor.get_dtype() not in _FLOATS:
                        raise ConfigError(
                            f"{key}: {path} stores {name} as {tensor.get_dtype()}, a quantised"
                            " weight, which would be read without its scale; give the checkpoint"
                            " that it was quantised from"
                        )
        except (OSError, SafetensorError) as error:
            problem = f"{key}: {path} cannot be read ({error}); fetch or copy it again"
            raise ConfigError(problem) from error
    return shapes


def weight_files(folder: Path, *, key: str = "model.path") -> list[Path]:
    """Return the safetensors files of a checkpoint's folder that transformers and vLLM read.

    `key` is the configuration key that names the folder, for errors.

    Raises ConfigError if the folder has no such file, if a file that the index names is missing,
    or if the two packages would read different files.
    """
    whole = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        if whole.is_file():
            return [whole]
        has = f"{key}: {folder} has no model.safetensors, and no {index.name}"
        if any(folder.glob("pytorch_model*.bin")):
            raise ConfigError(
                f"{has}, but pytorch_model.bin: load the model in transformers and save it again"
                " with save_pretrained"
            )
        raise ConfigError(f"{has}; give a folder that save_pretrained wrote")
    try:
        of_tensors = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        named = sorted(set(of_tensors.values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        problem = f"{key}: {index} cannot be read ({error!r}); fetch or copy it again"
        raise ConfigError(problem) from error
    if missing := [name for name in named if not (folder / name).is_file()]:
        raise ConfigError(
            f"{key}: {index} names files that do not exist ({', '.join(missing)}); fetch or copy"
            " them"
        )
    if whole.is_file() and whole.name not in named:
        raise ConfigError(
            f"{key}: {folder} holds model.safetensors, which transformers would read, and an"
            f" {index.name} of other files, which vLLM would read; remove the outdated files"
        )
    return [folder / name for name in named]


@dataclass(frozen=True, slots=True)
class RunSizes:
    """The sizes and settings that determine the memory of a run's processes."""

    shape: ModelShape
    model: ModelSection
    training: TrainingSection
    learner: LearnerSection
    rollouts: RolloutMatchingSection
    tokens: int
    """Tokens of the longest packed row."""
    adapted_parts: tuple[ModelPart, ...]
    num_fresh_tokens: int
    """Number of tokens whose rows of embedding and head are trained in addition to an adapter."""
    may_send_full: bool
    """Whether a weight sync may send full weights."""
    siblings: int
    """Number of rollouts of a prompt that a packed row may hold, with one copy of the prompt; 1
    without `training.share_prompts`."""

    @classmethod
    def of(cls, config: RunConfig, shape: ModelShape) -> RunSizes:
        fresh = config.tokens_beside_adapter
        of_prompt = config.stage2_ab.channel_b.rollouts_per_sample
        if config.environment is not None:
            of_prompt = config.group_size
        return cls(
            shape=shape,
            model=config.model,
            training=config.training,
            learner=config.learner,
            rollouts=config.rollout_matching,
            tokens=config.global_max_length,
            adapted_parts=config.adapted_parts,
            num_fresh_tokens=0 if fresh is None else fresh.count,
            may_send_full=config.may_send_full,
            siblings=of_prompt if config.training.share_prompts else 1,
        )

    @property
    def size(self) -> int:
        """Bytes of a number in the model's dtype."""
        return BYTES[self.model.dtype]

    @property
    def weight_size(self) -> int:
        """Bytes of a weight in a learner rank; shards are float32 for any model dtype."""
        return BYTES["float32"] if self.learner.is_sharded else self.size

    def num_recomputed(self, part: ModelPart, layers: int) -> int:
        """Return how many of the first `layers` of a part are computed again in the backward."""
        if part is ModelPart.VISION_TOWER and not self.model.recompute_tower:
            return 0
        return -(-layers // self.model.recompute_every) * self.model.gradient_checkpointing

    def recomputes_last(self, part: ModelPart, layers: int) -> bool:
        """Return whether the last of a part's layers is computed again.

        When the backward reaches another layer, it has freed the activations of at least one.
        """
        return self.num_recomputed(part, layers) > self.num_recomputed(part, layers - 1)

    @property
    def longest_request(self) -> int:
        """Tokens of the longest sequence that an engine accepts."""
        return self.rollouts.vllm.max_model_len or self.tokens

    @property
    def num_trainable(self) -> int:
        """The number of values that have gradients and optimizer state."""
        adapter = self.model.adapter
        if adapter is None:
            return sum(
                math.prod(sizes)
                for name, sizes in self.shape.parameters.items()
                if not self.is_frozen(name)
            )
        values = sum(
            adapter.rank * sum(sizes) + (sizes[0] if adapter.kind == "dora" else 0)
            for sizes in self.adapted_shapes()
        )
        return values + self.num_fresh_tokens * sum(sizes[1] for sizes in self.shapes_with_rows())

    @property
    def trains_text(self) -> bool:
        """Return whether the language model's own weights have gradients."""
        return self.model.adapter is None and not self.training.parts.language_model.frozen

    def has_gradients(self, part: ModelPart) -> bool:
        """Return whether this part of the model, or an adapter in it, is trained."""
        if self.model.adapter is not None:
            return part in self.adapted_parts
        return not part_settings(part, self.training.parts).frozen

    def is_frozen(self, name: str) -> bool:
        return part_settings(model_part(name), self.training.parts).frozen

    def adapted_shapes(self) -> list[tuple[int, ...]]:
        adapter = self.model.adapter
        assert adapter is not None, "callers have checked that there is an adapter"
        return [
            sizes
            for name, sizes in self.shape.parameters.items()
            # Other parts may have modules of the same names, which are not adapted.
            if len(sizes) == 2
            and name.split(".")[-2] in adapter.target_modules
            and model_part(name) in self.adapted_parts
        ]

    def shapes_in_4_bits(self) -> list[tuple[int, ...]]:
        """Return the shapes of the matrices that `model.adapter.quantize` stores in 4 bits."""
        if not self.model.is_quantized:
            return []
        return [
            sizes
            for name, sizes in self.shape.parameters.items()
            if len(sizes) == 2 and is_linear(name) and model_part(name) in self.adapted_parts
        ]

    def shapes_with_rows(self) -> list[tuple[int, ...]]:
        """Return the shapes of embedding and head if rows of new tokens are trained, else none."""
        if not self.num_fresh_tokens:
            return []
        return [
            sizes
            for name, sizes in self.shape.parameters.items()
            if name.split(".")[-2] in ("embed_tokens", "lm_head")
        ]


def is_linear(name: str) -> bool:
    """Return whether the weight `name` is of a linear layer that may have an adapter."""
    return name.split(".")[-2] not in ("embed_tokens", "lm_head", "pos_embed")
