"""Estimates the memory that a run's processes will need, from the checkpoint's files alone.

Weights, gradients and optimizer state are exact, activations and caches follow the shapes of the
layers, and what CUDA takes is a round number; what allocators leave unused is in none (`RESERVED`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from launch.runtime.placement import Placement
from learner.host_memory import container_limits, in_gib
from learner.model.parts import model_part, part_settings
from learner.step import LOGIT_CHUNK
from shared.config import RunConfig
from shared.config.derive import (
    adapted_parts,
    is_quantized,
    is_sharded,
    may_send_full,
    reference_kl,
    rollout_servers,
    tokens_beside_adapter,
)
from shared.config.pipeline import Channel, CoordRegEntry
from shared.errors import ConfigError
from shared.model_families import (
    PARTS_OF_ENGINES,
    TILED_MODEL_TYPES,
    VISION_MODEL_TYPES,
    ModelPart,
    find_part,
)
from shared.tokens.vocabulary import NUM_BINS
from shared.weight_sync.transports import BUCKET_BYTES, Device, TransportKind

BYTES = {"float32": 4, "bfloat16": 2}
CACHE_BLOCK = 128
"""The largest block of tokens in which a cache is allocated: vLLM's on CPU."""
CUDA_CONTEXT = 768 << 20
"""Bytes of a process on a GPU before its first tensor: kernels, workspaces. Not measured here."""
BATCHED_TOKENS = {"colocate": 16384, "actors": 2048}
"""Most tokens of an engine's forward, by `vllm.mode`: vLLM 0.32's of `LLM` and `AsyncLLM`."""
COPIES = {
    TransportKind.NCCL: 2,  # one under way, and one that is packed or loaded
    TransportKind.IPC: 1,  # the shared one
    TransportKind.GLOO: 0,
    TransportKind.INPROC: 0,
}
"""Buckets of weights on the GPU of either end, by transport."""
LEAST_8BIT = 4096
"""Values of the smallest tensor whose moments bitsandbytes keeps in 8 bits."""
_EMBEDDINGS = ("embed_tokens", "pos_embed")
"""Modules whose moments keep 32 bits."""
CONTEXT = "CUDA context"
BUCKETS = "buckets of a sync"
MOMENT = "what a backward has for a moment"
REFERENCE = "reference model"
RESERVED = 0.08
"""Part of a GPU's memory for unused space between tensors, the driver, and errors of the estimates.

An engine that is sized by a fraction of the GPU needs none beside it: vLLM measures these.
"""
SURE = 1.25
"""A need above this multiple of the memory is a problem, below it a warning: estimates are high."""
_SMALLER_LEARNER = (
    "turn model.gradient_checkpointing on, choose another training.optimizer, lower"
    " global_max_length, train with model.adapter, or use learner.parallel: fsdp over more ranks"
)
_SMALLER_ENGINE = (
    "lower rollout_matching.vllm.kv_cache_memory_bytes or gpu_memory_utilization, or give the"
    " engine more devices"
)


@dataclass(frozen=True, slots=True)
class VisionShape:
    """The sizes of a vision tower that its activations follow from."""

    hidden: int
    layers: int
    intermediate: int
    patches_per_token: int
    """Patches of an image that become one token of the language model."""

    @property
    def layer_numbers_per_patch(self) -> int:
        """Numbers that a layer keeps for its backward; as many keys and values as queries."""
        return 10 * self.hidden + 4 * self.intermediate


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that its memory follows from."""

    parameters: Mapping[str, tuple[int, ...]]
    """Shape of each tensor of the checkpoint; tied ones are in it once."""
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    vision: VisionShape | None
    """None: a text model."""

    @classmethod
    def read(cls, folder: Path) -> ModelShape:
        """Read config.json and the headers of the safetensors files. Raises ConfigError."""
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
                parameters=_read_parameter_shapes(folder),
                hidden=text["hidden_size"],
                layers=text["num_hidden_layers"],
                # Of experts, those that a token goes through.
                intermediate=max(
                    text["intermediate_size"],
                    text.get("num_experts_per_tok", 0) * text.get("moe_intermediate_size", 0),
                ),
                heads=text["num_attention_heads"],
                kv_heads=text["num_key_value_heads"],
                head_dim=text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
                vocabulary=text["vocab_size"],
                vision=vision,
            )
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ConfigError(
                f"model.path: {folder} cannot be read ({type(error).__name__}: {error}); give a"
                " folder that save_pretrained wrote"
            ) from error
        if unknown := [name for name in shape.parameters if find_part(name) is None]:
            raise ConfigError(
                f"model.path: {folder} holds {unknown[0]}, which no model has of the types"
                f" {', '.join(VISION_MODEL_TYPES)}; choose a checkpoint of one of them"
            )
        return shape

    @property
    def num_parameters(self) -> int:
        return sum(map(math.prod, self.parameters.values()))

    @property
    def has_query_norm(self) -> bool:
        """Whether queries and keys are normalized, as of Qwen3."""
        return any(name.endswith(".q_norm.weight") for name in self.parameters)

    @property
    def has_gated_tower(self) -> bool:
        """Whether the tower's layers are like those of a language model, as of Qwen2.5-VL."""
        return any(
            name.endswith(".mlp.gate_proj.weight") and ".blocks." in name
            for name in self.parameters
        )

    @property
    def num_mergers(self) -> int:
        """Count what makes tokens of patches: several, where the tower's layers are read too."""
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
        """Numbers that a layer of the language model keeps for its backward, for each token."""
        # Inputs of norms and projections, queries, keys, values, attention's output, the gate, its
        # product.
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return 6 * self.hidden + attention + 4 * self.intermediate


def _read_parameter_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError("no *.safetensors files")
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with safe_open(path, framework="np") as file:
            shapes |= {
                name: tuple(file.get_slice(name).get_shape())
                for name in file.offset_keys()
                if not name.startswith(PARTS_OF_ENGINES)
            }
    return shapes


@dataclass(frozen=True, slots=True)
class Estimate:
    """The memory of one process on one device.

    Example: Estimate("learner rank", {"weights": 2**30, "optimizer": 2**31}) has a total of 3 GiB.
    """

    what: str
    parts: Mapping[str, int]
    """Bytes by what they are for."""
    holds_reserve: bool = False
    """Whether unused space is in it, so that it may come to all of a GPU."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def describe(self) -> str:
        parts = [f"{name} {in_gib(size)}" for name, size in self.parts.items() if size]
        return f"{self.what}: {in_gib(self.total)} = {' + '.join(parts)}"


def num_trainable(config: RunConfig, shape: ModelShape) -> int:
    """Count the values that have gradients and optimizer state."""
    adapter = config.model.adapter
    if adapter is None:
        return sum(
            math.prod(sizes)
            for name, sizes in shape.parameters.items()
            if not part_settings(model_part(name), config.training.parts).frozen
        )
    values = sum(
        adapter.rank * sum(sizes) + (sizes[0] if adapter.kind == "dora" else 0)
        for sizes in _adapted(config, shape)
    )
    tokens = tokens_beside_adapter(config)
    if tokens is None:
        return values
    return values + tokens.count * sum(sizes[1] for sizes in _embeddings_with_rows(config, shape))


def _has_gradients(config: RunConfig, part: ModelPart) -> bool:
    """Tell whether the part, or an adapter in it, is trained."""
    if config.model.adapter is not None:
        return part in adapted_parts(config)
    return not part_settings(part, config.training.parts).frozen


def _adapted(config: RunConfig, shape: ModelShape) -> list[tuple[int, ...]]:
    adapter = config.model.adapter
    assert adapter is not None, "the caller knows that there is one"
    return [
        sizes
        for name, sizes in shape.parameters.items()
        # Another part has modules of the same names, which are not adapted.
        if len(sizes) == 2
        and name.split(".")[-2] in adapter.target_modules
        and model_part(name) in adapted_parts(config)
    ]


def _weight_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Count the learner's weights, of which some may be in 4 bits."""
    size = BYTES[config.model.dtype]
    packed = [math.prod(sizes) for sizes in _in_4_bits(config, shape)]
    whole = shape.num_parameters - sum(packed)
    # With a float32 scale for every 64 of them.
    return whole * size + sum(number // 2 + 4 * -(-number // 64) for number in packed)


def _in_4_bits(config: RunConfig, shape: ModelShape) -> list[tuple[int, ...]]:
    """Shapes of what `model.adapter.quantize` packs."""
    if not is_quantized(config):
        return []
    return [
        sizes
        for name, sizes in shape.parameters.items()
        if len(sizes) == 2 and is_linear(name) and model_part(name) in adapted_parts(config)
    ]


def is_linear(name: str) -> bool:
    """Tell whether a matrix of this name is a linear layer that an adapter may be in."""
    return name.split(".")[-2] not in ("embed_tokens", "lm_head", "pos_embed")


def _embeddings_with_rows(config: RunConfig, shape: ModelShape) -> list[tuple[int, ...]]:
    """Shapes of the embedding and the head of which rows are trained with an adapter."""
    if tokens_beside_adapter(config) is None:
        return []
    return [
        sizes
        for name, sizes in shape.parameters.items()
        if name.split(".")[-2] in ("embed_tokens", "lm_head")
    ]


def learner_estimate(
    config: RunConfig,
    shape: ModelShape,
    device: Device = Device.CPU,
    transport: TransportKind = TransportKind.GLOO,
    *,
    image_tokens: int | None = None,
) -> Estimate:
    """Estimate one learner rank whose weights go to engines by this transport.

    `image_tokens`: of the longest row, those that are of images; None: all, which before the data
    are encoded nobody knows better.
    """
    trainable = num_trainable(config, shape)
    size = BYTES[config.model.dtype]
    ranks = config.learner.world_size if is_sharded(config) else 1
    with_rows = max(map(math.prod, _embeddings_with_rows(config, shape)), default=0)
    of_a_row = _row_parts(config, shape, device, image_tokens)
    # While weights are sent, no row is computed.
    buckets = max(0, _bucket_bytes(config, shape, transport) - sum(of_a_row.values()))
    of_update = {
        "master weights": trainable * 4 // ranks if size == 2 else 0,
        "gradients": trainable * 4 // ranks,
        "optimizer": _moment_bytes(config, shape) // ranks,
    }
    if config.training.optimizer == "adamw_offload":
        of_update["master weights"] = trainable * 4
        if device is Device.CUDA:
            # Each gradient leaves as soon as it is there.
            largest = max(map(math.prod, shape.parameters.values())) * size
            of_update = {"gradients": min(largest, trainable * size)}
    return Estimate(
        "learner rank",
        {
            "weights": _weight_bytes(config, shape) // ranks,
            "master weights": 0,
            **of_update,
            REFERENCE: _reference_bytes(config, shape) // ranks,
            # peft computes with a copy that has the rows in it, and the copy has a gradient.
            "copies of an embedding with trained rows": 2 * size * with_rows,
            **of_a_row,
            BUCKETS: buckets,
            CONTEXT: CUDA_CONTEXT if device is Device.CUDA else 0,
        },
    )


def host_estimate(config: RunConfig, shape: ModelShape) -> Estimate:
    """Estimate what a learner rank on a GPU keeps in host memory in its place."""
    parts = {}
    if config.training.optimizer == "adamw_offload":
        parts["masters, gradients and moments"] = 16 * num_trainable(config, shape)
    if config.model.activation_offload:
        tokens = config.global_max_length
        numbers = shape.layers * tokens * shape.hidden
        if shape.vision and _has_gradients(config, ModelPart.VISION_TOWER):
            patches = tokens * shape.vision.patches_per_token
            numbers += shape.vision.layers * patches * shape.vision.hidden
        parts["inputs of layers"] = numbers * BYTES[config.model.dtype]
    return Estimate("host memory of a learner rank", parts)


def _moment_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Count AdamW's two moments of every trained value."""
    trainable = num_trainable(config, shape)
    if config.training.optimizer != "adamw_bnb_8bit":
        return 8 * trainable
    exact = 0
    if config.model.adapter is None:
        exact = sum(
            math.prod(sizes)
            for name, sizes in shape.parameters.items()
            if not part_settings(model_part(name), config.training.parts).frozen
            and (math.prod(sizes) < LEAST_8BIT or name.split(".")[-2] in _EMBEDDINGS)
        )
    # A code and, for every 256 of them, a float32 scale.
    coded = trainable - exact
    return 8 * exact + 2 * coded + 2 * 4 * -(-coded // 256)


def _reference_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Count the second model of `reference_kl`, which an adapter makes needless."""
    if reference_kl(config) is None or config.model.adapter is not None:
        return 0
    # Shards are float32, whatever the forward computes in.
    size = BYTES["float32" if is_sharded(config) else config.model.dtype]
    return shape.num_parameters * size


def _row_parts(
    config: RunConfig, shape: ModelShape, device: Device, image_tokens: int | None
) -> dict[str, int]:
    """Count what exists for the longest row's sake at the moment when most of it does."""
    tokens = config.global_max_length
    text = _text_layers(config, shape, device)
    vision = _vision_layers(config, shape, device, tokens if image_tokens is None else image_tokens)
    pairs, of_layer, of_moment = _mask_bytes(config, shape)
    masks = pairs
    # Attention's backward comes when that of the gated product is over.
    gated = 4 * shape.intermediate * tokens * BYTES[config.model.dtype]
    moment = max(text.moment, of_moment - gated)
    if config.model.gradient_checkpointing:
        moment += text.layer + of_layer
    else:
        masks += shape.layers * of_layer
    moment = max(_logit_bytes(config, shape), moment)
    # The tower comes last in a backward, when nothing is left of the language model, and first in a
    # forward, when there is nothing yet.
    moment = max(moment, vision.moment - text.kept - masks)
    return {
        f"activations of a row of {tokens} tokens": text.kept,
        "activations of its images": vision.kept,
        "attention masks": masks,
        MOMENT: moment,
    }


class _LayerBytes(NamedTuple):
    """The activations of a stack of layers, in bytes."""

    kept: int
    """From the forward to the backward."""
    layer: int
    """Of one layer, which its backward needs."""
    moment: int
    """Beside what is kept, within the backward of one layer."""


def _text_layers(config: RunConfig, shape: ModelShape, device: Device) -> _LayerBytes:
    tokens = config.global_max_length
    size = BYTES[config.model.dtype]
    # A norm keeps its input in float32, what it has normalized, if it has a gradient, and its
    # output.
    is_trained = config.model.adapter is None and not config.training.parts.language_model.frozen
    norm = 4 // size + is_trained + 1
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    turned = norm if shape.has_query_norm else 1
    # Outputs of segments are joined, but not where one kernel attends to all of them.
    outputs = 1
    if config.model.attention == "auto" and not (device is Device.CUDA and size == 2):
        outputs = 2
    of_layer = (
        2 * norm * shape.hidden
        + turned * (queries + keys)
        + keys
        + outputs * queries
        + 4 * shape.intermediate
    )
    if (adapter := config.model.adapter) is not None:
        of_layer += adapter.rank * len(adapter.target_modules)
    layer = tokens * of_layer * size
    inputs = tokens * shape.hidden * size
    # And the last norm, and the hidden states of which there are logits.
    kept = shape.layers * layer
    if config.model.gradient_checkpointing:
        kept = inputs * (1 if _offloads_inputs(config, device) else shape.layers)
    kept += (norm + 1) * inputs
    moment = tokens * (2 * shape.hidden * (4 // size) + 2 * shape.intermediate) * size
    return _LayerBytes(kept, layer, moment)


def _gates_text(config: RunConfig) -> bool:
    """Whether coord logits are read, and kept some times over, at every position of text."""
    return any(
        isinstance(entry, CoordRegEntry) and entry.config.text_gate_weight > 0
        for channel in Channel
        for entry in config.rollout_matching.pipeline.active(channel)
    )


def _offloads_inputs(config: RunConfig, device: Device) -> bool:
    """Whether the inputs of layers that are recomputed wait in host memory."""
    return config.model.activation_offload and device is Device.CUDA


def _vision_layers(
    config: RunConfig, shape: ModelShape, device: Device, image_tokens: int
) -> _LayerBytes:
    vision = shape.vision
    if vision is None or not image_tokens:
        return _LayerBytes(0, 0, 0)
    size = BYTES[config.model.dtype]
    patches = image_tokens * vision.patches_per_token
    norm = 2
    factors = 2
    if shape.has_gated_tower:  # as of Qwen2.5-VL, whose norms are those of a language model
        norm = 4 // size + 2
        factors = 4
    # Queries, keys and values in one, the first two turned, and the output twice.
    of_layer = (2 * norm + 7) * vision.hidden + factors * vision.intermediate
    layer = patches * of_layer * size
    inputs = patches * vision.hidden * size
    kept = shape.num_mergers * image_tokens * shape.hidden * size
    if _has_gradients(config, ModelPart.ALIGNER):
        # Input, normalized or not, and both sides of the activation between its projections.
        kept += shape.num_mergers * 3 * inputs
    moment = patches * (2 * vision.hidden + factors * vision.intermediate // 2) * size
    if not _has_gradients(config, ModelPart.VISION_TOWER):
        return _LayerBytes(kept, layer, patches * vision.layer_numbers_per_patch * size)
    if config.model.gradient_checkpointing:
        kept += inputs * (1 if _offloads_inputs(config, device) else vision.layers)
        return _LayerBytes(kept, layer, layer + moment)
    return _LayerBytes(kept + vision.layers * layer, layer, moment)


def _logit_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Count a chunk's logits in their backward, and the gradients of the head."""
    size = BYTES[config.model.dtype]
    # The logits and their float32 gradient, with two masks, or one and the gradient as the logits
    # are (benchmarks/logit_memory.py).
    of_logit = 10 if size == 4 else 9
    reference = reference_kl(config)
    if reference is not None and reference.top_tokens is not None:
        # The logits of sampled tokens once more, with a float32 copy, beside value and gradient.
        of_logit = 2 * (size + 4)
    logits = min(LOGIT_CHUNK, config.global_max_length) * shape.vocabulary * of_logit
    if _gates_text(config):
        # Read, joined, picked, and what their sums and gradients are made of.
        logits += 5 * 4 * NUM_BINS * config.global_max_length
    head = shape.vocabulary * shape.hidden * size
    is_trained = config.model.adapter is None and not config.training.parts.language_model.frozen
    return logits + is_trained * head


def _mask_bytes(config: RunConfig, shape: ModelShape) -> tuple[int, int, int]:
    """Count what attention by mask makes of the largest row: once, in a layer, for a moment."""
    tokens = config.global_max_length
    size = BYTES[config.model.dtype]
    is_eager = config.model.attention == "eager"
    if config.model.attention == "auto" or not (is_eager or config.training.packing):
        return 0, 0, 0  # attention by segments, and of one causal segment, makes none of these
    pairs = tokens * tokens
    # Keys and values, repeated for the queries that share them, in the place of their own.
    repeated = 2 * (shape.heads - shape.kv_heads) * shape.head_dim * tokens * size
    if not is_eager:
        # The mask is of booleans, of which every layer makes numbers to be added.
        return pairs, repeated + pairs * size, 0
    # The softmax of each head in float32, and in the model's dtype; then its gradients.
    softmax = shape.heads * pairs * (4 + (size if size < 4 else 0))
    return pairs * (1 + size), repeated + softmax, shape.heads * pairs * (4 + size)


def _bucket_bytes(config: RunConfig, shape: ModelShape, transport: TransportKind) -> int:
    if not may_send_full(config):
        return 0
    size = BYTES[config.model.dtype]
    # The tensor that takes a bucket past its size closes it.
    bucket = config.rollout_matching.vllm.sync.bucket_bytes or BUCKET_BYTES[transport]
    bucket += size * max(map(math.prod, shape.parameters.values()))
    return COPIES[transport] * min(bucket, shape.num_parameters * size)


def engine_estimate(
    config: RunConfig,
    shape: ModelShape,
    devices: int,
    device: Device,
    device_bytes: int,
    transport: TransportKind = TransportKind.GLOO,
) -> Estimate:
    """Estimate one device of a vLLM engine over `devices` devices of `device_bytes` each.

    On a GPU without `kv_cache_memory_bytes` the cache is what vLLM's fraction leaves of itself.
    Else a canary's log-probabilities and CUDA graphs are left to the reserve.
    """
    size = BYTES[config.model.dtype]
    vllm = config.rollout_matching.vllm
    # One layer is computed at a time; of an engine over several devices it is counted whole.
    numbers = shape.layer_numbers_per_token
    if (vision := shape.vision) is not None:
        numbers = max(numbers, vision.layer_numbers_per_patch * vision.patches_per_token)
    sequences = config.rollout_matching.decode_batch_size * devices
    tokens = min(BATCHED_TOKENS[vllm.mode], sequences * _longest(config))
    parts = {
        "weights": shape.num_parameters * size // devices,
        "activations of a forward": numbers * tokens * size,
        CONTEXT: CUDA_CONTEXT if device is Device.CUDA else 0,
    }
    cache = vllm.kv_cache_memory_bytes
    is_fraction = cache is None and device is Device.CUDA
    if is_fraction:
        planned = math.floor(vllm.resolved_gpu_memory_utilization * device_bytes)
        cache = max(0, planned - sum(parts.values()))
    elif cache is None:
        cache = batch_cache_bytes(config, shape, devices)
    parts |= {"key-value cache": cache, BUCKETS: _bucket_bytes(config, shape, transport)}
    return Estimate("engine device", parts, holds_reserve=is_fraction)


def batch_cache_bytes(config: RunConfig, shape: ModelShape, devices: int) -> int:
    """Count the cache on CPU, per device, for the longest sequences that are decoded at a time."""
    sequences = config.rollout_matching.decode_batch_size * devices
    blocks = 1 + -(-_longest(config) // CACHE_BLOCK) * sequences  # vLLM keeps a block for itself
    heads = max(1, -(-shape.kv_heads // devices))
    numbers = CACHE_BLOCK * 2 * shape.layers * heads * shape.head_dim
    return blocks * numbers * BYTES[config.model.dtype]


def sequences_in_cache(config: RunConfig, shape: ModelShape, engine: Estimate, devices: int) -> int:
    """Count the longest sequences that an engine's cache holds at the same time."""
    cache = engine.parts["key-value cache"] * devices
    numbers = 2 * shape.layers * shape.kv_heads * shape.head_dim  # keys and values of a token
    return cache // (numbers * BYTES[config.model.dtype] * _longest(config))


def _longest(config: RunConfig) -> int:
    """Tokens of the longest sequence that an engine takes."""
    return config.rollout_matching.vllm.max_model_len or config.global_max_length


def shared_device_estimate(
    config: RunConfig,
    shape: ModelShape,
    learner: Estimate,
    engine: Estimate,
    transport: TransportKind = TransportKind.INPROC,
) -> Estimate:
    """Estimate a learner rank and an engine on the same GPU, at the time when they need most.

    While the rank learns, an engine that sleeps has given its memory back, but for CUDA's. While
    the engine works, the rank is without activations and what `rollout_matching.offload` moves
    away, save that full weights are read where they lie, or were merged or gathered.
    """
    matching = config.rollout_matching
    sends_full = may_send_full(config)
    moves_model = matching.offload.moves_model
    moves_optimizer = matching.offload.moves_optimizer
    # Where there are masters, the gradients are theirs.
    moves_gradients = moves_optimizer if learner.parts["master weights"] else moves_model
    moved = {
        "weights": moves_model and not sends_full,
        "master weights": moves_optimizer,
        "gradients": moves_gradients,
        "optimizer": moves_optimizer,
        REFERENCE: moves_model,
        CONTEXT: False,
    }
    of_engine = {f"engine's {name}": size for name, size in engine.parts.items()}
    learning = dict(learner.parts)
    if not matching.vllm.sleep:
        learning |= of_engine
    elif CONTEXT in engine.parts:
        learning[f"engine's {CONTEXT}"] = engine.parts[CONTEXT]
    working = {
        name: size for name, size in learner.parts.items() if name in moved and not moved[name]
    }
    working["weights made for the sync"] = _made_bytes(config, shape) if sends_full else 0
    working[BUCKETS] = _bucket_bytes(config, shape, transport)
    return max(
        Estimate("learner rank and engine on one GPU, while the learner learns", learning),
        Estimate("learner rank and engine on one GPU, while the engine works", working | of_engine),
        key=lambda estimate: estimate.total,
    )


def _made_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Count the weights that exist for a sync alone: gathered shards, or merged adapters."""
    size = BYTES[config.model.dtype]
    if is_sharded(config):
        return shape.num_parameters * size
    if config.model.adapter is None:
        return 0
    merged = _in_4_bits(config, shape) or _adapted(config, shape)
    merged += _embeddings_with_rows(config, shape)
    return size * sum(map(math.prod, merged))


def synced_bytes(config: RunConfig, placement: Placement, shape: ModelShape) -> int:
    """Count the weights that the learner keeps in memory which engines of its machine read."""
    section = rollout_servers(config)
    if section is None:
        reads_here = bool(placement.engines)
    else:
        reads_here = any(server.is_loopback for server in section.servers)
    if reads_here and placement.transport is TransportKind.GLOO and may_send_full(config):
        return shape.num_parameters * BYTES[config.model.dtype]
    return 0


@dataclass(frozen=True, slots=True)
class Needs:
    """The memory that a run's processes need."""

    learner: Estimate
    """One rank."""
    num_ranks: int
    engine: Estimate | None = None
    """One device of an engine; None where the run starts none."""
    num_engine_devices: int = 0
    shared: Estimate | None = None
    """A rank and an engine's device together, where engines live on the ranks' GPUs."""
    synced: int = 0
    """Bytes of the weights that a sync keeps in memory which engines of the same machine read."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The total memory of this machine, whether something holds it or not."""

    device: Device
    total: int
    """Bytes of one GPU; on CPU of the machine or its container, which all processes share."""

    def problems(self, needs: Needs) -> list[str]:
        """Name what certainly has no room: on a GPU a rank and an engine that share it together."""
        return [message for message, is_sure in self._excesses(needs) if is_sure]

    def warnings(self, needs: Needs) -> list[str]:
        """Name what has no room if the estimates are right."""
        tried = "It is an estimate, and tried"
        return [f"{message}. {tried}" for message, is_sure in self._excesses(needs) if not is_sure]

    def _excesses(self, needs: Needs) -> Iterator[tuple[str, bool]]:
        """Yield a message for each need that is larger than the memory, and whether it is sure."""
        if self.device is Device.CPU:
            yield from self._on_the_machine(needs)
        elif needs.shared is not None:
            more = "or turn on vllm.sleep and rollout_matching.offload"
            remedy = f"{_SMALLER_LEARNER}, {_SMALLER_ENGINE}, {more}"
            yield from self._on_a_gpu("learner.gpus", needs.shared, remedy)
        else:
            yield from self._on_a_gpu("learner.gpus", needs.learner, _SMALLER_LEARNER)
            if (engine := needs.engine) is not None:
                key = "gpu_memory_utilization" if engine.holds_reserve else "kv_cache_memory_bytes"
                yield from self._on_a_gpu(f"rollout_matching.vllm.{key}", engine, _SMALLER_ENGINE)

    def _on_a_gpu(self, key: str, needed: Estimate, remedy: str) -> Iterator[tuple[str, bool]]:
        usable = self.total if needed.holds_reserve else math.floor((1 - RESERVED) * self.total)
        if needed.total <= usable:
            return
        has = f"a GPU has {in_gib(self.total)}"
        if not needed.holds_reserve:
            has = (
                f"of a GPU's {in_gib(self.total)} {in_gib(usable)} can be planned"
                f" ({RESERVED:.0%} are reserved)"
            )
        # A fraction of the GPU is taken whatever is needed of it.
        is_sure = needed.holds_reserve or needed.total > SURE * usable
        yield f"{key}: {needed.describe()}, and {has}; {remedy}", is_sure

    def _on_the_machine(self, needs: Needs) -> Iterator[tuple[str, bool]]:
        parts = {"learner ranks": needs.learner.total * needs.num_ranks}
        if needs.engine is not None:
            parts["engines"] = needs.engine.total * needs.num_engine_devices
        if needs.synced:
            parts["weights in shared memory"] = needs.synced
        needed = sum(parts.values())
        if needed <= self.total:
            return
        listed = ", ".join(f"{name} {in_gib(size)}" for name, size in parts.items())
        message = (
            f"cluster.address: the processes need about {in_gib(needed)} ({listed}), this machine,"
            f" or its container, has {in_gib(self.total)}; {_SMALLER_LEARNER}"
        )
        yield message, needed > SURE * self.total


def device_memory(device: Device) -> DeviceMemory | None:
    """Return the memory of this machine's smallest GPU (None: it has none), or for its CPUs."""
    if device is Device.CUDA:
        import torch

        gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        sizes = [gpu.total_memory for gpu in gpus]
        return DeviceMemory(device, min(sizes)) if sizes else None
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DeviceMemory(device, min([machine, *container_limits()]))
