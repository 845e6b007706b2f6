"""Estimates the memory of a learner rank.

Weights, gradients and optimizer state are exact; activations follow the shapes of the layers
(`python -m benchmarks.learner_memory` compares them with what torch's allocator gave out).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from launch.checks.memory import BUCKETS, CONTEXT, CUDA_CONTEXT, REFERENCE, Estimate, bucket_bytes
from launch.checks.model_shape import (
    BYTES,
    ModelShape,
    embeddings_with_rows,
    has_gradients,
    num_trainable,
    shapes_in_4_bits,
)
from learner.model.parts import model_part, part_settings
from learner.step import LOGIT_CHUNK
from shared.config import RunConfig
from shared.config.pipeline import Channel, CoordRegEntry
from shared.model_families import ModelPart
from shared.tokens.vocabulary import NUM_BINS
from shared.weight_sync.transports import Device, TransportKind

LEAST_8BIT = 4096
"""Values of the smallest tensor whose moments bitsandbytes keeps in 8 bits."""
_EMBEDDINGS = ("embed_tokens", "pos_embed")
"""Modules whose moments keep 32 bits."""
MOMENT = "what a backward has for a moment"


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
    ranks = config.learner.world_size if config.learner.is_sharded else 1
    with_rows = max(map(math.prod, embeddings_with_rows(config, shape)), default=0)
    of_a_row = _row_parts(config, shape, device, image_tokens)
    # While weights are sent, no row is computed.
    buckets = max(0, bucket_bytes(config, shape, transport) - sum(of_a_row.values()))
    of_update = {
        # Shards are float32, whatever a forward computes in: they are the masters.
        "master weights": trainable * 4 if size == 2 and not config.learner.is_sharded else 0,
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
            "gathered from shards": _gathered_bytes(config, shape),
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
        if shape.vision and has_gradients(config, ModelPart.VISION_TOWER):
            patches = tokens * shape.vision.patches_per_token
            numbers += shape.vision.layers * patches * shape.vision.hidden
        parts["inputs of layers"] = numbers * BYTES[config.model.dtype]
    return Estimate("host memory of a learner rank", parts)


def _weight_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Count the weights of all ranks, of which some may be in 4 bits."""
    size = BYTES["float32" if config.learner.is_sharded else config.model.dtype]
    packed = [math.prod(sizes) for sizes in shapes_in_4_bits(config, shape)]
    whole = shape.num_parameters - sum(packed)
    # With a float32 scale for every 64 of them.
    return whole * size + sum(number // 2 + 4 * -(-number // 64) for number in packed)


def _gathered_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Count what fsdp has whole in a backward, in the dtype of the forward."""
    if not config.learner.is_sharded:
        return 0

    layers = shape.names_by_layer()
    outside = layers.pop("", [])

    def values_of(names: list[str], *, trained: bool) -> int:
        return sum(
            math.prod(shape.parameters[name])
            for name in names
            if not (trained and part_settings(model_part(name), config.training.parts).frozen)
        )

    # What lies in no layer is whole for all of the backward; while a layer is computed the next one
    # arrives.
    weights = values_of(outside, trained=False)
    weights += 2 * max(values_of(names, trained=False) for names in layers.values())
    gradients = 0
    if config.model.adapter is None:
        # They are whole until they are summed: those of no layer at the backward's end.
        gradients = values_of(outside, trained=True)
        gradients += max(values_of(names, trained=True) for names in layers.values())
    return (weights + gradients) * BYTES[config.model.dtype]


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
    if not config.rollout_matching.pipeline.needs_reference or config.model.adapter is not None:
        return 0
    # Shards are float32, whatever the forward computes in.
    size = BYTES["float32" if config.learner.is_sharded else config.model.dtype]
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
    if has_gradients(config, ModelPart.ALIGNER):
        # Input, normalized or not, and both sides of the activation between its projections.
        kept += shape.num_mergers * 3 * inputs
    moment = patches * (2 * vision.hidden + factors * vision.intermediate // 2) * size
    if not has_gradients(config, ModelPart.VISION_TOWER):
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
    if config.rollout_matching.pipeline.num_reference_top:
        # The logits of sampled tokens once more, with a float32 copy, beside value and gradient.
        of_logit = 2 * (size + 4)
    logits = min(LOGIT_CHUNK, config.global_max_length) * shape.vocabulary * of_logit
    if _gates_text(config):
        # Read, joined, picked, and what their sums and gradients are made of.
        logits += 5 * 4 * NUM_BINS * config.global_max_length
    head = shape.vocabulary * shape.hidden * size
    is_trained = config.model.adapter is None and not config.training.parts.language_model.frozen
    # Of shards it is among what is gathered: it stays to the end of the backward.
    return logits + head * (is_trained and not config.learner.is_sharded)


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
