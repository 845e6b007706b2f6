"""Estimates the memory of a learner rank.

Weights, gradients and optimizer state are counted exactly. Activations are computed from the shapes
of the layers (`python -m benchmarks.learner_memory` compares the estimates with the memory that
torch allocated).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from launch.checks.memory import (
    BUCKETS,
    CONTEXT,
    CUDA_CONTEXT,
    REFERENCE,
    Estimate,
    bucket_bytes,
    gathered_for_sync,
)
from launch.checks.model_shape import RunSizes
from shared.config.pipeline import Channel, CoordRegEntry
from shared.config.training import LOGIT_CHUNK
from shared.model_families import ModelPart
from shared.tokens.vocabulary import NUM_BINS
from shared.weight_sync.transports import Device, TransportKind

LEAST_8BIT = 4096
"""Number of values in the smallest tensor whose optimizer moments bitsandbytes keeps in 8 bits."""
_EMBEDDINGS = ("embed_tokens", "pos_embed")
"""Modules whose optimizer moments bitsandbytes keeps in 32 bits."""
MOMENT = "temporary tensors of a backward"
LOADED = "loaded weights"
"""Part of the host memory that learner ranks need while they load."""


def learner_estimate(
    run: RunSizes,
    device: Device = Device.CPU,
    transport: TransportKind = TransportKind.GLOO,
    *,
    image_tokens: int | None = None,
    key_tokens: int | None = None,
) -> Estimate:
    """Estimate the memory of a learner rank that sends weights to engines by this transport.

    The real numbers of these tokens are known only after the data are encoded.

    Args:
        image_tokens: number of image tokens in the longest packed row. None: all its tokens.
        key_tokens: number of keys of a layer in this row, in which segments share prompts. None: as
            many as with answers of one token.
    """
    trainable = run.num_trainable
    size = run.size
    shards = run.learner.num_shards
    with_rows = max(map(math.prod, run.shapes_with_rows()), default=0)
    of_a_row = _row_parts(run, device, image_tokens, key_tokens)
    gathered = _gathered_bytes(run)
    # While weights are sent, no row is computed.
    of_sync = bucket_bytes(run, transport)
    if run.learner.is_sharded:
        of_sync += gathered_for_sync(run, transport)
    buckets = max(0, of_sync - sum(of_a_row.values()) - gathered)
    of_update = {
        # Shards are always float32, whatever a forward computes in: they are the master weights.
        "master weights": trainable * 4 if size == 2 and not run.learner.is_sharded else 0,
        "gradients": trainable * 4 // shards,
        "optimizer": _moment_bytes(run) // shards,
    }
    if run.training.offloads_optimizer:
        of_update["master weights"] = trainable * 4
        if device is Device.CUDA:
            of_update = {"gradients": trainable * 4}
    if run.training.optimizer == "adamw_offload_all" and device is Device.CUDA:
        # Each gradient is moved to the host as soon as it is computed.
        largest = max(map(math.prod, run.shape.parameters.values())) * size
        of_update = {"gradients": min(largest, trainable * size)}
    return Estimate(
        "learner rank",
        {
            "weights": _weight_bytes(run) // shards,
            "master weights": 0,
            **of_update,
            REFERENCE: _reference_bytes(run) // shards,
            # peft computes with a copy that contains the rows, and the copy has a gradient.
            "copies of an embedding with trained rows": 2 * size * with_rows,
            "gathered from shards": gathered,
            **of_a_row,
            BUCKETS: buckets,
            CONTEXT: CUDA_CONTEXT if device is Device.CUDA else 0,
        },
    )


def host_estimate(run: RunSizes, num_ranks: int) -> Estimate:
    """Estimate the host memory of a machine with this number of learner ranks on GPUs.

    It is the larger of two needs: each rank loads the model into host memory, with fsdp only its
    shard, in float32; later the ranks offload, and rank 0 gathers shards there for a checkpoint.
    """
    plural = "" if num_ranks == 1 else "s"
    what = f"host memory of {num_ranks} learner rank{plural}"
    loading = {LOADED: num_ranks * read_bytes(run)}
    learning = {name: num_ranks * size for name, size in _offloaded_parts(run).items()}
    if run.learner.is_sharded:
        learning["weights gathered for a checkpoint"] = run.shape.num_parameters * run.size
    return max(
        Estimate(f"{what}, while the model is loaded", loading),
        Estimate(f"{what}, during the training", learning),
        key=lambda estimate: estimate.total,
    )


def read_bytes(run: RunSizes) -> int:
    """Count the bytes of the weights that the first learner rank reads into host memory.

    With fsdp they are its rows of each weight. Weights with too few rows for all ranks are read
    whole, and so are embeddings if rows of new tokens are trained. Embedding and head that ranks
    read whole because the files have a head that config.json ties are counted as rows.
    """
    shards = run.learner.num_shards
    with_rows = run.shapes_with_rows()
    numbers = 0
    for sizes in run.shape.parameters.values():
        rows = sizes[0] if sizes else 0
        of_rank = -(-rows // shards)
        # torch divides 4 rows among 3 ranks as 2 and 2, so not all ranks have some.
        if sizes in with_rows or not rows or -(-rows // of_rank) < shards:
            numbers += math.prod(sizes)
        else:
            numbers += of_rank * math.prod(sizes[1:])
    return numbers * run.weight_size


def _offloaded_parts(run: RunSizes) -> dict[str, int]:
    """Return the bytes that a learner rank on a GPU offloads to host memory, by their use."""
    parts = {}
    if run.training.offloads_optimizer:
        parts["masters, gradients and moments"] = 16 * run.num_trainable
    if run.model.activation_offload:
        tokens = run.tokens
        layers = run.num_recomputed(ModelPart.LANGUAGE_MODEL, run.shape.layers)
        numbers = layers * tokens * run.shape.hidden
        if run.shape.vision and run.has_gradients(ModelPart.VISION_TOWER):
            patches = tokens * run.shape.vision.patches_per_token
            layers = run.num_recomputed(ModelPart.VISION_TOWER, run.shape.vision.layers)
            numbers += layers * patches * run.shape.vision.hidden
        parts["inputs of layers"] = numbers * run.size
    return parts


def _weight_bytes(run: RunSizes) -> int:
    """Count the bytes of one copy of the model's weights, some of which may be in 4 bits.

    With fsdp, `learner.shard_size` ranks (null: all) divide the copy among them.
    """
    packed = [math.prod(sizes) for sizes in run.shapes_in_4_bits()]
    whole = run.shape.num_parameters - sum(packed)
    # Packed weights have a float32 scale for every 64 values.
    return whole * run.weight_size + sum(number // 2 + 4 * -(-number // 64) for number in packed)


def _gathered_bytes(run: RunSizes) -> int:
    """Count the bytes of unsharded weights and gradients on a rank in a backward with fsdp.

    They have the dtype of the forward.
    """
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

    # Weights outside of the layers stay gathered for the whole backward. While one layer is
    # computed, the next one is gathered.
    weights = values_of(outside, trained=False)
    weights += 2 * max(values_of(names, trained=False) for names in layers.values())
    gradients = 0
    if run.model.adapter is None:
        # Gradients are whole until they are summed; outside of the layers, at the backward's end.
        gradients = values_of(outside, trained=True)
        gradients += max(values_of(names, trained=True) for names in layers.values())
    return (weights + gradients) * run.size


def _moment_bytes(run: RunSizes) -> int:
    """Count the bytes of AdamW's two moments of all trained values."""
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
    # A moment is a code of one byte and, for every 256 codes, a float32 scale.
    coded = trainable - exact
    return 8 * exact + 2 * coded + 2 * 4 * -(-coded // 256)


def _reference_bytes(run: RunSizes) -> int:
    """Count the bytes of the reference model that the loss `reference_kl` needs.

    With an adapter there is no second model: the model without its adapter is the reference.
    """
    if not run.rollouts.pipeline.needs_reference or run.model.adapter is not None:
        return 0
    return run.shape.num_parameters * run.weight_size


def _row_parts(
    run: RunSizes, device: Device, image_tokens: int | None, key_tokens: int | None
) -> dict[str, int]:
    """Return the bytes that the longest packed row needs at the peak, by their use."""
    tokens = run.tokens
    text = _text_layers(run, device)
    vision = _vision_layers(run, device, tokens if image_tokens is None else image_tokens)
    pairs, of_layer, of_moment = _mask_bytes(run)
    shared, shared_moment = _shared_key_bytes(run, key_tokens)
    # Attention's backward runs after the backward of the gated product.
    gated = 4 * run.shape.intermediate * tokens * run.size
    moment = max(text.moment, of_moment - gated, shared_moment - gated)
    layers = run.shape.layers
    num_kept = layers - run.num_recomputed(ModelPart.LANGUAGE_MODEL, layers)
    masks = pairs + num_kept * of_layer
    keys = num_kept * shared
    if run.recomputes_last(ModelPart.LANGUAGE_MODEL, layers):
        moment += text.layer + of_layer + shared
    moment = max(_logit_bytes(run, device), moment)
    # The tower runs last in a backward, when the language model's activations are freed, and first
    # in a forward, before they exist.
    moment = max(moment, vision.moment - text.kept - masks - keys)
    return {
        f"activations of a row of {tokens} tokens": text.kept,
        "activations of its images": vision.kept,
        "attention masks": masks,
        "keys and values of shared prompts": keys,
        MOMENT: moment,
    }


class _LayerBytes(NamedTuple):
    """Bytes of the activations of a stack of layers."""

    kept: int
    """Bytes that the stack keeps from the forward to the backward."""
    layer: int
    """Bytes that one layer needs for its backward: kept, or recomputed (gradient checkpointing)."""
    moment: int
    """Bytes of temporary tensors while one layer runs, in addition to `kept`."""


def _text_layers(run: RunSizes, device: Device) -> _LayerBytes:
    tokens = run.tokens
    size = run.size
    # A norm keeps its input in float32, its normalized values if it has a gradient, and its
    # output.
    norm = 4 // size + run.trains_text + 1
    queries = run.shape.heads * run.shape.head_dim
    keys = run.shape.kv_heads * run.shape.head_dim
    turned = norm if run.shape.has_query_norm else 1
    # Outputs of segments are concatenated, unless one kernel attends to all of them.
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
    # In addition: the last norm, and the hidden states from which logits are computed.
    recomputed = run.num_recomputed(ModelPart.LANGUAGE_MODEL, run.shape.layers)
    kept = (run.shape.layers - recomputed) * layer
    kept += inputs * (min(1, recomputed) if _offloads_inputs(run, device) else recomputed)
    kept += (norm + 1) * inputs
    moment = tokens * (2 * run.shape.hidden * (4 // size) + 2 * run.shape.intermediate) * size
    return _LayerBytes(kept, layer, moment)


def _gates_text(run: RunSizes) -> bool:
    """Return whether an active loss `coord_reg` has a text gate.

    It keeps the logits of all coordinate tokens at every text position.
    """
    return any(
        isinstance(entry, CoordRegEntry) and entry.config.text_gate_weight > 0
        for channel in Channel
        for entry in run.rollouts.pipeline.active(channel)
    )


def _offloads_inputs(run: RunSizes, device: Device) -> bool:
    """Return whether the inputs of recomputed layers are kept in host memory."""
    return run.model.activation_offload and device is Device.CUDA


def _vision_layers(run: RunSizes, device: Device, image_tokens: int) -> _LayerBytes:
    vision = run.shape.vision
    if vision is None or not image_tokens:
        return _LayerBytes(0, 0, 0)
    size = run.size
    patches = image_tokens * vision.patches_per_token
    norm = 2
    factors = 2
    if run.shape.has_gated_tower:  # such as Qwen2.5-VL, with the norms of a language model
        norm = 4 // size + 2
        factors = 4
    # Queries, keys and values in one tensor, rotated queries and keys, and the output twice.
    of_layer = (2 * norm + 7) * vision.hidden + factors * vision.intermediate
    layer = patches * of_layer * size
    inputs = patches * vision.hidden * size
    kept = run.shape.num_mergers * image_tokens * run.shape.hidden * size
    if run.has_gradients(ModelPart.ALIGNER):
        # Input, normalized or not, and input and output of the activation between projections.
        kept += run.shape.num_mergers * 3 * inputs
    moment = patches * (2 * vision.hidden + factors * vision.intermediate // 2) * size
    if not run.has_gradients(ModelPart.VISION_TOWER):
        return _LayerBytes(kept, layer, patches * vision.layer_numbers_per_patch * size)
    recomputed = run.num_recomputed(ModelPart.VISION_TOWER, vision.layers)
    kept += (vision.layers - recomputed) * layer
    kept += inputs * (min(1, recomputed) if _offloads_inputs(run, device) else recomputed)
    if run.recomputes_last(ModelPart.VISION_TOWER, vision.layers):
        moment += layer
    return _LayerBytes(kept, layer, moment)


def _logit_bytes(run: RunSizes, device: Device) -> int:
    """Count the bytes of the logits of `LOGIT_CHUNK` tokens and of the head's gradient.

    They exist in the backward.
    """
    size = run.size
    # The logits and their float32 gradient with two masks, or with one mask and the gradient in
    # the dtype of the logits (benchmarks/logit_memory.py).
    of_head = 4 if run.model.head_dtype == "float32" else size
    of_logit = 10 if of_head == 4 else 9
    if run.rollouts.pipeline.num_reference_top:
        # The logits of sampled tokens again with a float32 copy, besides value and gradient.
        of_logit = 2 * (of_head + 4)
    logits = min(LOGIT_CHUNK, run.tokens) * run.shape.vocabulary * of_logit
    if _gates_text(run):
        # Five float32 copies: read, concatenated, selected, and inputs of sums and gradients.
        logits += 5 * 4 * NUM_BINS * run.tokens
    if of_head > size and device is Device.CPU:
        logits += 4 * run.shape.vocabulary * run.shape.hidden  # a float32 copy of the weights
    head = run.shape.vocabulary * run.shape.hidden * size
    # With shards, the head's gradient is counted in `_gathered_bytes`, to the backward's end.
    return logits + head * (run.trains_text and not run.learner.is_sharded)


def _shared_key_bytes(run: RunSizes, key_tokens: int | None) -> tuple[int, int]:
    """Count the bytes of the copies of shared prompts' keys and values in the longest packed row.

    Returns:
        Bytes that each layer keeps, and bytes of temporary tensors in the backward of one layer.
    """
    tokens = run.tokens
    if key_tokens is None:
        # The row of a prompt and its rollouts: each has a token of its own, and repeats the last
        # one of the prompt. Rows of several prompts have fewer keys.
        key_tokens = tokens + (run.siblings - 1) * max(0, tokens - 2 * run.siblings)
    of_keys = 2 * run.shape.kv_heads * run.shape.head_dim * run.size
    # The copies replace keys and values of the row, and have gradients.
    return (key_tokens - tokens) * of_keys, (run.siblings > 1) * key_tokens * of_keys


def _mask_bytes(run: RunSizes) -> tuple[int, int, int]:
    """Count the bytes that attention masks need for the longest packed row.

    Returns:
        Bytes kept once for all layers, bytes that each layer keeps, and bytes of temporary tensors
        in the backward of one layer.
    """
    tokens = run.tokens
    size = run.size
    is_eager = run.model.attention == "eager"
    if run.model.attention == "auto" or not (is_eager or run.training.packing):
        return 0, 0, 0  # attention by segments, or over one causal segment, needs no mask
    pairs = tokens * tokens
    # Keys and values, repeated for the queries that share them, replace the unrepeated ones.
    repeated = 2 * (run.shape.heads - run.shape.kv_heads) * run.shape.head_dim * tokens * size
    if not is_eager:
        # The mask is boolean; every layer converts it to numbers that are added.
        return pairs, repeated + pairs * size, 0
    # The softmax of each head in float32 and in the model's dtype, then its gradients.
    softmax = run.shape.heads * pairs * (4 + (size if size < 4 else 0))
    return pairs * (1 + size), repeated + softmax, run.shape.heads * pairs * (4 + size)
