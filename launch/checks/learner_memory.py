"""Estimates the memory of a learner rank.

Weights, gradients and optimizer state are exact; activations follow the shapes of the layers
(`python -m benchmarks.learner_memory` compares them with what torch's allocator gave out).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from launch.checks.memory import BUCKETS, CONTEXT, CUDA_CONTEXT, REFERENCE, Estimate, bucket_bytes
from launch.checks.model_shape import RunSizes
from learner.step import LOGIT_CHUNK
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
    run: RunSizes,
    device: Device = Device.CPU,
    transport: TransportKind = TransportKind.GLOO,
    *,
    image_tokens: int | None = None,
) -> Estimate:
    """Estimate one learner rank whose weights go to engines by this transport.

    `image_tokens`: of the longest row, those that are of images; None: all, which before the data
    are encoded nobody knows better.
    """
    trainable = run.num_trainable
    size = run.size
    ranks = run.learner.world_size if run.learner.is_sharded else 1
    with_rows = max(map(math.prod, run.shapes_with_rows()), default=0)
    of_a_row = _row_parts(run, device, image_tokens)
    # While weights are sent, no row is computed.
    buckets = max(0, bucket_bytes(run, transport) - sum(of_a_row.values()))
    of_update = {
        # Shards are float32, whatever a forward computes in: they are the masters.
        "master weights": trainable * 4 if size == 2 and not run.learner.is_sharded else 0,
        "gradients": trainable * 4 // ranks,
        "optimizer": _moment_bytes(run) // ranks,
    }
    if run.training.optimizer == "adamw_offload":
        of_update["master weights"] = trainable * 4
        if device is Device.CUDA:
            # Each gradient leaves as soon as it is there.
            largest = max(map(math.prod, run.shape.parameters.values())) * size
            of_update = {"gradients": min(largest, trainable * size)}
    return Estimate(
        "learner rank",
        {
            "weights": _weight_bytes(run) // ranks,
            "master weights": 0,
            **of_update,
            REFERENCE: _reference_bytes(run) // ranks,
            # peft computes with a copy that has the rows in it, and the copy has a gradient.
            "copies of an embedding with trained rows": 2 * size * with_rows,
            "gathered from shards": _gathered_bytes(run),
            **of_a_row,
            BUCKETS: buckets,
            CONTEXT: CUDA_CONTEXT if device is Device.CUDA else 0,
        },
    )


def host_estimate(run: RunSizes) -> Estimate:
    """Estimate what a learner rank on a GPU keeps in host memory in its place."""
    parts = {}
    if run.training.optimizer == "adamw_offload":
        parts["masters, gradients and moments"] = 16 * run.num_trainable
    if run.model.activation_offload:
        tokens = run.tokens
        numbers = run.shape.layers * tokens * run.shape.hidden
        if run.shape.vision and run.has_gradients(ModelPart.VISION_TOWER):
            patches = tokens * run.shape.vision.patches_per_token
            numbers += run.shape.vision.layers * patches * run.shape.vision.hidden
        parts["inputs of layers"] = numbers * run.size
    return Estimate("host memory of a learner rank", parts)


def _weight_bytes(run: RunSizes) -> int:
    """Count the weights of all ranks, of which some may be in 4 bits."""
    packed = [math.prod(sizes) for sizes in run.shapes_in_4_bits()]
    whole = run.shape.num_parameters - sum(packed)
    # With a float32 scale for every 64 of them.
    return whole * run.weight_size + sum(number // 2 + 4 * -(-number // 64) for number in packed)


def _gathered_bytes(run: RunSizes) -> int:
    """Count what fsdp has whole in a backward, in the dtype of the forward."""
    if not run.learner.is_sharded:
        return 0

    layers = run.shape.names_by_layer()
    outside = layers.pop("", [])

    def values_of(names: list[str], *, trained: bool) -> int:
        return sum(
            math.prod(run.shape.parameters[name])
            for name in names
            if not (trained and run.is_frozen(name))
        )

    # What lies in no layer is whole for all of the backward; while a layer is computed the next one
    # arrives.
    weights = values_of(outside, trained=False)
    weights += 2 * max(values_of(names, trained=False) for names in layers.values())
    gradients = 0
    if run.model.adapter is None:
        # They are whole until they are summed: those of no layer at the backward's end.
        gradients = values_of(outside, trained=True)
        gradients += max(values_of(names, trained=True) for names in layers.values())
    return (weights + gradients) * run.size


def _moment_bytes(run: RunSizes) -> int:
    """Count AdamW's two moments of every trained value."""
    trainable = run.num_trainable
    if run.training.optimizer != "adamw_bnb_8bit":
        return 8 * trainable
    exact = 0
    if run.model.adapter is None:
        exact = sum(
            math.prod(sizes)
            for name, sizes in run.shape.parameters.items()
            if not run.is_frozen(name)
            and (math.prod(sizes) < LEAST_8BIT or name.split(".")[-2] in _EMBEDDINGS)
        )
    # A code and, for every 256 of them, a float32 scale.
    coded = trainable - exact
    return 8 * exact + 2 * coded + 2 * 4 * -(-coded // 256)


def _reference_bytes(run: RunSizes) -> int:
    """Count the second model of `reference_kl`, which an adapter makes needless."""
    if not run.rollouts.pipeline.needs_reference or run.model.adapter is not None:
        return 0
    return run.shape.num_parameters * run.weight_size


def _row_parts(run: RunSizes, device: Device, image_tokens: int | None) -> dict[str, int]:
    """Count what exists for the longest row's sake at the moment when most of it does."""
    tokens = run.tokens
    text = _text_layers(run, device)
    vision = _vision_layers(run, device, tokens if image_tokens is None else image_tokens)
    pairs, of_layer, of_moment = _mask_bytes(run)
    masks = pairs
    # Attention's backward comes when that of the gated product is over.
    gated = 4 * run.shape.intermediate * tokens * run.size
    moment = max(text.moment, of_moment - gated)
    if run.model.gradient_checkpointing:
        moment += text.layer + of_layer
    else:
        masks += run.shape.layers * of_layer
    moment = max(_logit_bytes(run), moment)
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


def _text_layers(run: RunSizes, device: Device) -> _LayerBytes:
    tokens = run.tokens
    size = run.size
    # A norm keeps its input in float32, what it has normalized, if it has a gradient, and its
    # output.
    norm = 4 // size + run.trains_text + 1
    queries = run.shape.heads * run.shape.head_dim
    keys = run.shape.kv_heads * run.shape.head_dim
    turned = norm if run.shape.has_query_norm else 1
    # Outputs of segments are joined, but not where one kernel attends to all of them.
    outputs = 1
    if run.model.attention == "auto" and not (device is Device.CUDA and size == 2):
        outputs = 2
    of_layer = (
        2 * norm * run.shape.hidden
        + turned * (queries + keys)
        + keys
        + outputs * queries
        + 4 * run.shape.intermediate
    )
    if (adapter := run.model.adapter) is not None:
        of_layer += adapter.rank * len(adapter.target_modules)
    layer = tokens * of_layer * size
    inputs = tokens * run.shape.hidden * size
    # And the last norm, and the hidden states of which there are logits.
    kept = run.shape.layers * layer
    if run.model.gradient_checkpointing:
        kept = inputs * (1 if _offloads_inputs(run, device) else run.shape.layers)
    kept += (norm + 1) * inputs
    moment = tokens * (2 * run.shape.hidden * (4 // size) + 2 * run.shape.intermediate) * size
    return _LayerBytes(kept, layer, moment)


def _gates_text(run: RunSizes) -> bool:
    """Whether coord logits are read, and kept some times over, at every position of text."""
    return any(
        isinstance(entry, CoordRegEntry) and entry.config.text_gate_weight > 0
        for channel in Channel
        for entry in run.rollouts.pipeline.active(channel)
    )


def _offloads_inputs(run: RunSizes, device: Device) -> bool:
    """Whether the inputs of layers that are recomputed wait in host memory."""
    return run.model.activation_offload and device is Device.CUDA


def _vision_layers(run: RunSizes, device: Device, image_tokens: int) -> _LayerBytes:
    vision = run.shape.vision
    if vision is None or not image_tokens:
        return _LayerBytes(0, 0, 0)
    size = run.size
    patches = image_tokens * vision.patches_per_token
    norm = 2
    factors = 2
    if run.shape.has_gated_tower:  # as of Qwen2.5-VL, whose norms are those of a language model
        norm = 4 // size + 2
        factors = 4
    # Queries, keys and values in one, the first two turned, and the output twice.
    of_layer = (2 * norm + 7) * vision.hidden + factors * vision.intermediate
    layer = patches * of_layer * size
    inputs = patches * vision.hidden * size
    kept = run.shape.num_mergers * image_tokens * run.shape.hidden * size
    if run.has_gradients(ModelPart.ALIGNER):
        # Input, normalized or not, and both sides of the activation between its projections.
        kept += run.shape.num_mergers * 3 * inputs
    moment = patches * (2 * vision.hidden + factors * vision.intermediate // 2) * size
    if not run.has_gradients(ModelPart.VISION_TOWER):
        return _LayerBytes(kept, layer, patches * vision.layer_numbers_per_patch * size)
    if run.model.gradient_checkpointing:
        kept += inputs * (1 if _offloads_inputs(run, device) else vision.layers)
        return _LayerBytes(kept, layer, layer + moment)
    return _LayerBytes(kept + vision.layers * layer, layer, moment)


def _logit_bytes(run: RunSizes) -> int:
    """Count a chunk's logits in their backward, and the gradients of the head."""
    size = run.size
    # The logits and their float32 gradient, with two masks, or one and the gradient as the logits
    # are (benchmarks/logit_memory.py).
    of_logit = 10 if size == 4 else 9
    if run.rollouts.pipeline.num_reference_top:
        # The logits of sampled tokens once more, with a float32 copy, beside value and gradient.
        of_logit = 2 * (size + 4)
    logits = min(LOGIT_CHUNK, run.tokens) * run.shape.vocabulary * of_logit
    if _gates_text(run):
        # Read, joined, picked, and what their sums and gradients are made of.
        logits += 5 * 4 * NUM_BINS * run.tokens
    head = run.shape.vocabulary * run.shape.hidden * size
    # Of shards it is among what is gathered: it stays to the end of the backward.
    return logits + head * (run.trains_text and not run.learner.is_sharded)


def _mask_bytes(run: RunSizes) -> tuple[int, int, int]:
    """Count what attention by mask makes of the largest row: once, in a layer, for a moment."""
    tokens = run.tokens
    size = run.size
    is_eager = run.model.attention == "eager"
    if run.model.attention == "auto" or not (is_eager or run.training.packing):
        return 0, 0, 0  # attention by segments, and of one causal segment, makes none of these
    pairs = tokens * tokens
    # Keys and values, repeated for the queries that share them, in the place of their own.
    repeated = 2 * (run.shape.heads - run.shape.kv_heads) * run.shape.head_dim * tokens * size
    if not is_eager:
        # The mask is of booleans, of which every layer makes numbers to be added.
        return pairs, repeated + pairs * size, 0
    # The softmax of each head in float32, and in the model's dtype; then its gradients.
    softmax = run.shape.heads * pairs * (4 + (size if size < 4 else 0))
    return pairs * (1 + size), repeated + softmax, run.shape.heads * pairs * (4 + size)
