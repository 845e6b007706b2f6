"""How much memory a run's processes are going to need, from the checkpoint's files alone: nothing
is loaded.

Estimates, not promises: weights, gradients and optimizer state are exact, activations and caches
follow the shapes of the layers, and what CUDA itself takes is a round number. What the allocators
leave unused between tensors is in none of them (`launch.checks.memory.RESERVED`).
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from launch.runtime.placement import Placement
from learner.model.parts import ModelPart, find_part, model_part, part_settings
from learner.step import LOGIT_CHUNK
from shared.config import RunConfig
from shared.config.derive import is_sharded, may_send_full, rollout_servers, tokens_beside_adapter
from shared.config.model import AdapterSection
from shared.errors import ConfigError
from shared.weight_sync.transports import BUCKET_BYTES, Device, TransportKind

BYTES = {"float32": 4, "bfloat16": 2}
CACHE_BLOCK = 128
"""Tokens that a cache is handed out in, at the most: vLLM's on CPU."""
LOGIT_BYTES = 9
"""Of a logit within a chunk: its value, a float32 copy, a mask (benchmarks/logit_memory.py)."""
CUDA_CONTEXT = 768 << 20
"""Bytes of a process on a GPU before its first tensor: CUDA's context, kernels, and workspaces of
cuBLAS, cuDNN and NCCL. Not measured here."""
BATCHED_TOKENS = {"colocate": 16384, "actors": 2048}
"""Tokens of a forward of an engine, at the most, by `rollout_matching.vllm.mode`: what vLLM 0.32
gives an `LLM` on its large GPUs, and an `AsyncLLM`, where nothing else is asked for."""
COPIES = {
    TransportKind.NCCL: 2,
    TransportKind.IPC: 1,
    TransportKind.GLOO: 0,
    TransportKind.INPROC: 0,
}
"""Of a bucket of weights on the GPU of either end, by transport: one under way and one that is
packed or loaded; or the shared one, and the engine's."""
CONTEXT, BUCKETS = "CUDA context", "buckets of a sync"


@dataclass(frozen=True, slots=True)
class VisionShape:
    """The sizes of a vision tower from which those of its activations follow."""

    hidden: int
    layers: int
    intermediate: int
    patches_per_token: int
    """Patches of an image that become one token of the language model."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> VisionShape:
        """Read the section `vision_config` of a checkpoint's config.json. Raises KeyError."""
        return cls(
            config["hidden_size"],
            config["depth"],
            config["intermediate_size"],
            config["spatial_merge_size"] ** 2,
        )

    @property
    def layer_numbers_per_patch(self) -> int:
        """Numbers that a layer keeps for its backward: as in the language model, with as many keys
        and values as queries."""
        return 10 * self.hidden + 4 * self.intermediate


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the sizes of a model follow from."""

    parameters: Mapping[str, tuple[int, ...]]
    """Shape of each tensor of the checkpoint; tied ones are there once."""
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
        """ConfigError where the folder's files are not those of a checkpoint, or its model is of a
        family that is not trained.
        """
        try:
            config = json.loads((folder / "config.json").read_text())
            text = config.get("text_config", config)
            heads = text["num_attention_heads"]
            shape = cls(
                parameters=_parameters(folder),
                hidden=text["hidden_size"],
                layers=text["num_hidden_layers"],
                intermediate=text["intermediate_size"],
                heads=heads,
                kv_heads=text["num_key_value_heads"],
                head_dim=text.get("head_dim") or text["hidden_size"] // heads,
                vocabulary=text["vocab_size"],
                vision=(
                    VisionShape.of(config["vision_config"]) if "vision_config" in config else None
                ),
            )
        except (OSError, ValueError, KeyError, struct.error) as error:
            raise ConfigError(
                f"model.path: {folder} cannot be read ({type(error).__name__}: {error}); give a"
                " folder that save_pretrained wrote"
            ) from error
        if strange := [name for name in shape.parameters if find_part(name) is None]:
            raise ConfigError(
                f"model.path: {folder} holds {strange[0]}, which no Qwen2.5-VL or Qwen3-VL has;"
                " choose a checkpoint of one of them"
            )
        return shape

    @property
    def num_parameters(self) -> int:
        return sum(map(math.prod, self.parameters.values()))

    @property
    def kv_numbers_per_token(self) -> int:
        """Keys and values of every layer."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def layer_numbers_per_token(self) -> int:
        """Numbers that a layer of the language model keeps for its backward, for each token: inputs
        of norms and projections, queries, keys, values, attention's output, the gate, its product.
        """
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return 6 * self.hidden + attention + 4 * self.intermediate


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of one process on one device, in bytes."""

    what: str
    parts: Mapping[str, int]
    """Bytes by what they are for."""
    holds_reserve: bool = False
    """Whether what allocators leave unused is in it, so that it may come to all of a GPU."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def describe(self) -> str:
        return f"{self.what}: {in_gib(self.total)} = " + " + ".join(
            f"{name} {in_gib(size)}" for name, size in self.parts.items() if size
        )


def num_trainable(config: RunConfig, shape: ModelShape) -> int:
    """Values that have gradients and optimizer state: of the adapter where there is one, else of
    the parts that are not frozen.
    """
    adapter = config.model.adapter
    if adapter is not None:
        tokens = tokens_beside_adapter(config)
        rows = (
            0
            if tokens is None
            else tokens.count * sum(sizes[1] for sizes in _embeddings_with_rows(config, shape))
        )
        return rows + sum(
            adapter.rank * sum(sizes) + (sizes[0] if adapter.kind == "dora" else 0)
            for sizes in _adapted(adapter, shape)
        )
    trained = (
        sizes
        for name, sizes in shape.parameters.items()
        if not part_settings(model_part(name), config.training.parts).frozen
    )
    return sum(map(math.prod, trained))


def _adapted(adapter: AdapterSection, shape: ModelShape) -> list[tuple[int, ...]]:
    """Shapes of the matrices that have adapters."""
    return [
        sizes
        for name, sizes in shape.parameters.items()
        # The vision tower has modules of the same names, which are not adapted.
        if len(sizes) == 2
        and name.split(".")[-2] in adapter.target_modules
        and model_part(name) is ModelPart.LANGUAGE_MODEL
    ]


def _embeddings_with_rows(config: RunConfig, shape: ModelShape) -> list[tuple[int, ...]]:
    """Return the shapes of the embedding and the head of which rows are trained with an adapter."""
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
) -> Estimate:
    """One learner rank on such a device, whose weights go to engines by this transport."""
    trainable = num_trainable(config, shape)
    size, tokens = BYTES[config.model.dtype], config.global_max_length
    ranks = config.learner.world_size if is_sharded(config) else 1
    of_a_row = {
        f"activations of a row of {tokens} tokens": _activation_bytes(config, shape),
        "activations of its images": _image_activation_bytes(config, shape),
        "attention masks": _mask_bytes(config, shape),
    }
    # While weights are sent, there is no row.
    copies = max(0, _copied_bytes(config, shape, transport) - sum(of_a_row.values()))
    return Estimate(
        "learner rank",
        {
            "weights": shape.num_parameters * size // ranks,
            "master weights": trainable * 4 // ranks if size == 2 else 0,
            "gradients": trainable * 4 // ranks,
            "optimizer": trainable * 8 // ranks,
            # peft computes with a copy that has the rows in it, and the copy has a gradient.
            "copies of an embedding with trained rows": (
                2 * size * max(map(math.prod, _embeddings_with_rows(config, shape)), default=0)
            ),
            **of_a_row,
            BUCKETS: copies,
            CONTEXT: CUDA_CONTEXT if device is Device.CUDA else 0,
        },
    )


def _activation_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Count what the language model and its logits keep for the largest row."""
    size, tokens = BYTES[config.model.dtype], config.global_max_length
    layer = shape.layer_numbers_per_token * tokens * size
    # Recomputed: the input of every layer, and one layer at a time.
    activations = (
        shape.layers * shape.hidden * tokens * size + layer
        if config.model.gradient_checkpointing
        else shape.layers * layer
    )
    return activations + min(LOGIT_CHUNK, tokens) * shape.vocabulary * LOGIT_BYTES


def _image_activation_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Of the vision tower, were every token of the largest row of an image: how many are is not
    known before the data are encoded."""
    if shape.vision is None:
        return 0
    vision, size = shape.vision, BYTES[config.model.dtype]
    patches = config.global_max_length * vision.patches_per_token
    layer = vision.layer_numbers_per_patch * patches * size
    is_trained = (
        config.model.adapter is None
        and not part_settings(ModelPart.VISION_TOWER, config.training.parts).frozen
    )
    if not is_trained:
        return layer  # nothing is kept for a backward
    return (
        vision.layers * vision.hidden * patches * size + layer
        if config.model.gradient_checkpointing
        else vision.layers * layer
    )


def _mask_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Of what attention by mask makes in the language model for the largest row.

    Which tokens see which, as booleans and as numbers to be added: of a packed row, and of every
    row under `eager`. That keeps for the backward, of every layer or of the one that is recomputed,
    the softmax of each head in float32 and in the model's dtype. And both keep keys and values that
    are repeated for the queries that share them.
    """
    tokens, size = config.global_max_length, BYTES[config.model.dtype]
    attention = config.model.attention
    is_eager = attention == "eager"
    if attention == "auto" or not (is_eager or config.training.packing):
        return 0  # attention by segments, and of one causal segment, makes none of these
    repeated = (
        2 * shape.heads * shape.head_dim * tokens * size if shape.kv_heads < shape.heads else 0
    )
    softmax = shape.heads * tokens * tokens * (size + 4) if is_eager else 0
    layers = 1 if config.model.gradient_checkpointing else shape.layers
    return tokens * tokens * (1 + size) + layers * (softmax + repeated)


def _copied_bytes(config: RunConfig, shape: ModelShape, transport: TransportKind) -> int:
    """Of the buckets that one end of a sync holds beside the weights. A bucket is closed by the
    tensor that takes it past its size."""
    size = BYTES[config.model.dtype]
    full = (config.rollout_matching.vllm.sync.bucket_bytes or BUCKET_BYTES[transport]) + max(
        map(math.prod, shape.parameters.values())
    ) * size
    return (
        COPIES[transport] * min(full, shape.num_parameters * size) if may_send_full(config) else 0
    )


def engine_estimate(
    config: RunConfig,
    shape: ModelShape,
    devices: int,
    device: Device,
    device_bytes: int,
    transport: TransportKind = TransportKind.GLOO,
) -> Estimate:
    """One device of a vLLM engine of so many devices with so much memory each, to which weights
    come by this transport.

    Counted are weights, CUDA's context, a layer's activations in the largest forward, the cache,
    and a sync's buckets. On a GPU without `kv_cache_memory_bytes` the cache is what vLLM's fraction
    leaves of itself: it holds all the others but the buckets, and what allocators leave unused.
    Else the log-probabilities of a canary and CUDA graphs are left to the reserve.
    """
    size, vllm = BYTES[config.model.dtype], config.rollout_matching.vllm
    of_forward = {
        "weights": shape.num_parameters * size // devices,
        "activations of a forward": _forward_bytes(config, shape, devices),
        CONTEXT: CUDA_CONTEXT if device is Device.CUDA else 0,
    }
    is_fraction = vllm.kv_cache_memory_bytes is None and device is Device.CUDA
    cache = vllm.kv_cache_memory_bytes
    if is_fraction:
        planned = math.floor(vllm.resolved_gpu_memory_utilization * device_bytes)
        cache = max(0, planned - sum(of_forward.values()))
    elif cache is None:
        cache = batch_cache_bytes(config, shape, devices)
    buckets = _copied_bytes(config, shape, transport)
    parts = {**of_forward, "key-value cache": cache, BUCKETS: buckets}
    return Estimate("engine device", parts, holds_reserve=is_fraction)


def _forward_bytes(config: RunConfig, shape: ModelShape, devices: int) -> int:
    """Of a layer of the language model, or of the vision tower, were all tokens of an image. (One
    layer is there at a time; of an engine over several devices it is counted whole.)"""
    sequences = config.rollout_matching.decode_batch_size * devices
    tokens = min(BATCHED_TOKENS[config.rollout_matching.vllm.mode], sequences * _longest(config))
    numbers, vision = shape.layer_numbers_per_token, shape.vision
    if vision is not None:
        numbers = max(numbers, vision.layer_numbers_per_patch * vision.patches_per_token)
    return numbers * tokens * BYTES[config.model.dtype]


def batch_cache_bytes(config: RunConfig, shape: ModelShape, devices: int) -> int:
    """What a null `kv_cache_memory_bytes` is on CPU, where a fraction of the memory would be one of
    the whole machine's: of each of an engine's devices, room for as many of the longest sequences
    as are decoded at a time."""
    blocks = (
        -(-_longest(config) // CACHE_BLOCK) * config.rollout_matching.decode_batch_size * devices
    )
    heads = max(1, -(-shape.kv_heads // devices))
    # vLLM keeps a block for itself.
    return (
        (blocks + 1)
        * CACHE_BLOCK
        * 2
        * shape.layers
        * heads
        * shape.head_dim
        * BYTES[config.model.dtype]
    )


def shared_device_estimate(
    config: RunConfig,
    shape: ModelShape,
    learner: Estimate,
    engine: Estimate,
    transport: TransportKind = TransportKind.INPROC,
) -> Estimate:
    """A learner rank and an engine on the same GPU, at the time when the two need most.

    While the rank learns, an engine that sleeps has given its memory back, but for what CUDA takes.
    While the engine generates or takes weights, the rank has no activations, and is without what
    `rollout_matching.offload` moves away, save that full weights are read where they lie, or where
    they were merged or gathered for it. (Of an engine over several GPUs the others hold copies of
    buckets then, and nothing else of the rank: never more than its own.)
    """
    matching = config.rollout_matching
    sends_full = may_send_full(config)
    model_leaves, optimizer_leaves = matching.offload.moves_model, matching.offload.moves_optimizer
    is_there = {
        "weights": not model_leaves or sends_full,
        "master weights": not optimizer_leaves,
        # Where there are masters, the gradients are theirs.
        "gradients": not (optimizer_leaves if learner.parts["master weights"] else model_leaves),
        "optimizer": not optimizer_leaves,
        CONTEXT: True,
    }
    stays = {name for name, stays in is_there.items() if stays}
    of_engine = {f"engine's {name}": size for name, size in engine.parts.items()}
    asleep = {name: size for name, size in of_engine.items() if name == f"engine's {CONTEXT}"}
    learning = {**learner.parts, **(asleep if matching.vllm.sleep else of_engine)}
    made = {
        "weights made for the sync": _made_bytes(config, shape) if sends_full else 0,
        BUCKETS: _copied_bytes(config, shape, transport),
    }
    at_work = (
        {name: size for name, size in learner.parts.items() if name in stays} | made | of_engine
    )
    return max(
        Estimate("learner rank and engine on one GPU, while the learner learns", learning),
        Estimate("learner rank and engine on one GPU, while the engine works", at_work),
        key=lambda estimate: estimate.total,
    )


def _made_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Bytes of the weights that are there for a full sync alone, all of them until the engine has
    the last: whole ones of shards, merged ones of adapters.
    """
    size, adapter = BYTES[config.model.dtype], config.model.adapter
    if is_sharded(config):
        return shape.num_parameters * size
    if adapter is None:
        return 0
    return size * sum(
        map(math.prod, (*_adapted(adapter, shape), *_embeddings_with_rows(config, shape)))
    )


def synced_bytes(config: RunConfig, placement: Placement, shape: ModelShape) -> int:
    """Bytes of memory that the learner keeps for its syncs beside its weights: all of them, merged,
    where engines of its own machine read them there.
    """
    section = rollout_servers(config)
    reads_here = (
        bool(placement.engines)
        if section is None
        else any(server.is_loopback for server in section.servers)
    )
    shares = reads_here and placement.transport == TransportKind.GLOO and may_send_full(config)
    return shape.num_parameters * BYTES[config.model.dtype] if shares else 0


def sequences_in_cache(config: RunConfig, shape: ModelShape, engine: Estimate, devices: int) -> int:
    """Longest sequences that an engine's cache holds at the same time."""
    return (
        engine.parts["key-value cache"]
        * devices
        // (shape.kv_numbers_per_token * BYTES[config.model.dtype] * _longest(config))
    )


def _longest(config: RunConfig) -> int:
    """Tokens of the longest sequence that an engine takes."""
    return config.rollout_matching.vllm.max_model_len or config.global_max_length


def in_gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"


def _parameters(folder: Path) -> dict[str, tuple[int, ...]]:
    """From the headers of the safetensors files, which begin with their own length."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError("no *.safetensors files")
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(length))
        shapes |= {
            name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
        }
    return shapes


# The memory of this machine's devices, against what a run's processes need.


_SMALLER_LEARNER = (
    "turn model.gradient_checkpointing on, lower global_max_length, train with model.adapter, or"
    " use learner.model.sharding: fsdp over more ranks"
)
_SMALLER_ENGINE = (
    "lower rollout_matching.vllm.kv_cache_memory_bytes or gpu_memory_utilization, or give the"
    " engine more devices"
)

RESERVED = 0.08
"""Part of a GPU's memory that nothing is planned into: what allocators leave unused between
tensors, the driver's own, and the estimates' errors. An engine that is sized by a fraction of the
GPU needs none beside it: vLLM measures these, and gives its cache what they leave of the fraction.
"""

SURE = 1.25
"""Multiple of the memory that is there from which on a need is a problem, and else a warning:
estimates count the longest row with the most images.
"""

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run's processes need."""

    learner: Estimate
    """Of one rank."""
    num_ranks: int
    engine: Estimate | None = None
    """Of one device; None where the run starts no engines."""
    num_engine_devices: int = 0
    shared: Estimate | None = None
    """Of a rank and an engine's device together, where engines live on the ranks' GPUs."""
    synced: int = 0
    """Bytes of the weights that a sync keeps in memory which engines of the same machine read."""


class _Excess(NamedTuple):
    """A need that is larger than what is there."""

    told: str
    is_sure: bool


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Total memory of this machine, whether something holds it or not."""

    device: Device
    total: int
    """Bytes of one GPU; on CPU of the whole machine or of its container, which all processes share.
    """

    def problems(self, needs: Needs) -> list[str]:
        """What certainly has no room. On a GPU a rank and an engine are counted together where they
        share it, else each alone.
        """
        return [excess.told for excess in self._excesses(needs) if excess.is_sure]

    def warnings(self, needs: Needs) -> list[str]:
        """What has no room if the estimates are right."""
        return [
            f"{excess.told}. It is an estimate, and tried"
            for excess in self._excesses(needs)
            if not excess.is_sure
        ]

    def _excesses(self, needs: Needs) -> list[_Excess]:
        if self.device is Device.CPU:
            return self._of_the_machine(needs)
        if needs.shared is not None:
            return self._too_large(
                "learner.gpus",
                needs.shared,
                f"{_SMALLER_LEARNER}, {_SMALLER_ENGINE}, or turn on vllm.sleep and"
                " rollout_matching.offload",
            )
        learner = self._too_large("learner.gpus", needs.learner, _SMALLER_LEARNER)
        if needs.engine is None:
            return learner
        name = "gpu_memory_utilization" if needs.engine.holds_reserve else "kv_cache_memory_bytes"
        key = f"rollout_matching.vllm.{name}"
        return learner + self._too_large(key, needs.engine, _SMALLER_ENGINE)

    def _too_large(self, key: str, needed: Estimate, remedy: str) -> list[_Excess]:
        usable = self.total if needed.holds_reserve else math.floor((1 - RESERVED) * self.total)
        if needed.total <= usable:
            return []
        has = f"a GPU has {in_gib(self.total)}"
        if not needed.holds_reserve:
            planned = f"{in_gib(usable)} can be planned ({RESERVED:.0%} are reserved)"
            has = f"of a GPU's {in_gib(self.total)} {planned}"
        # A fraction of the GPU is taken whatever is needed of it.
        is_sure = needed.holds_reserve or needed.total > SURE * usable
        return [_Excess(f"{key}: {needed.describe()}, and {has}; {remedy}", is_sure)]

    def _of_the_machine(self, needs: Needs) -> list[_Excess]:
        parts = {"learner ranks": needs.learner.total * needs.num_ranks}
        if needs.engine is not None:
            parts["engines"] = needs.engine.total * needs.num_engine_devices
        if needs.synced:
            parts["weights in shared memory"] = needs.synced
        needed = sum(parts.values())
        if needed <= self.total:
            return []
        listed = ", ".join(f"{name} {in_gib(size)}" for name, size in parts.items())
        has = f"this machine, or its container, has {in_gib(self.total)}"
        told = (
            f"cluster.address: the processes need about {in_gib(needed)} ({listed}), {has};"
            f" {_SMALLER_LEARNER}"
        )
        return [_Excess(told, is_sure=needed > SURE * self.total)]


def device_memory(device: Device) -> DeviceMemory | None:
    """Of the smallest GPU of this machine; None where it has none. On CPU no more than the
    container may have.
    """
    if device is Device.CUDA:
        import torch

        sizes = [
            torch.cuda.get_device_properties(index).total_memory
            for index in range(torch.cuda.device_count())
        ]
        return DeviceMemory(device, min(sizes)) if sizes else None
    return DeviceMemory(
        device, min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *container_limits()])
    )


def container_limits() -> Iterator[int]:
    """Bytes that this process and its like may have together, by each of the control groups around
    it (of version 1 or 2) that says so.
    """
    for line in _lines(OWN_CGROUPS):
        _, controllers, own = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mounted, file = (
            (CGROUPS / "memory", "memory.limit_in_bytes")
            if controllers
            else (CGROUPS, "memory.max")
        )
        # Within a container its own group may be mounted as the outermost, under a path that is not
        # told here.
        inner = mounted / own.strip("/")
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(mounted):
                yield from (int(limit) for limit in _lines(folder / file) if limit != "max")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
