"""How much memory a run's processes are going to need, from the checkpoint's files alone: nothing is loaded.

Estimates, not promises: weights, gradients and optimizer state are exact, activations and caches follow the shapes of the layers.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.placement import Placement
from learner.logits import LOGIT_CHUNK
from learner.parts import Part, find_part, part_of, section_of
from shared.config import RunConfig
from shared.config.derive import is_sharded, may_send_full, rollout_servers
from shared.config.model import AdapterSection
from shared.errors import ConfigError
from shared.transports import Device, Transport

BYTES = {"float32": 4, "bfloat16": 2}
CACHE_BLOCK = 128
"""Tokens that a cache is handed out in, at the most: vLLM's on CPU."""
LOGIT_BYTES = 9
"""Of a logit within a chunk: its value, a float32 copy, a mask (benchmarks/logit_memory.py)."""


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

    @classmethod
    def read(cls, folder: Path) -> ModelShape:
        """ConfigError where the folder's files are not those of a checkpoint, or its model is of a family that is not trained."""
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
            )
        except (OSError, ValueError, KeyError, struct.error) as error:
            raise ConfigError(f"model.path: {folder} cannot be read ({type(error).__name__}: {error}); give a folder that save_pretrained wrote") from error
        if strange := [name for name in shape.parameters if find_part(name) is None]:
            raise ConfigError(f"model.path: {folder} holds {strange[0]}, which no Qwen2.5-VL or Qwen3-VL has; choose a checkpoint of one of them")
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
        """Numbers that a layer of the language model keeps for its backward, for each token: inputs of norms and projections, queries, keys, values,
        attention's output, the gate, its product."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return 6 * self.hidden + attention + 4 * self.intermediate


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of one process on one device, in bytes."""

    what: str
    parts: Mapping[str, int]
    """Bytes by what they are for."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def describe(self) -> str:
        return f"{self.what}: {in_gib(self.total)} = " + " + ".join(f"{name} {in_gib(size)}" for name, size in self.parts.items() if size)


def num_trainable(config: RunConfig, shape: ModelShape) -> int:
    """Values that have gradients and optimizer state: of the adapter where there is one, else of the parts that are not frozen."""
    adapter = config.model.adapter
    if adapter is not None:
        return sum(adapter.rank * sum(sizes) + (sizes[0] if adapter.kind == "dora" else 0) for sizes in _adapted(adapter, shape))
    trained = (sizes for name, sizes in shape.parameters.items() if not section_of(part_of(name), config.training.parts).frozen)
    return sum(map(math.prod, trained))


def _adapted(adapter: AdapterSection, shape: ModelShape) -> list[tuple[int, ...]]:
    """Shapes of the matrices that have adapters."""
    return [
        sizes
        for name, sizes in shape.parameters.items()
        # The vision tower has modules of the same names, which are not adapted.
        if len(sizes) == 2 and name.split(".")[-2] in adapter.target_modules and part_of(name) is Part.LANGUAGE_MODEL
    ]


def learner_estimate(config: RunConfig, shape: ModelShape) -> Estimate:
    """One learner rank."""
    trainable = num_trainable(config, shape)
    size, tokens = BYTES[config.model.dtype], config.global_max_length
    ranks = config.learner.world_size if is_sharded(config) else 1
    layer = shape.layer_numbers_per_token * tokens * size
    # Recomputed: the input of every layer, and one layer at a time.
    activations = shape.layers * shape.hidden * tokens * size + layer if config.model.gradient_checkpointing else shape.layers * layer
    return Estimate(
        "learner rank",
        {
            "weights": shape.num_parameters * size // ranks,
            "master weights": trainable * 4 // ranks if size == 2 else 0,
            "gradients": trainable * 4 // ranks,
            "optimizer": trainable * 8 // ranks,
            f"activations of a row of {tokens} tokens": activations + min(LOGIT_CHUNK, tokens) * shape.vocabulary * LOGIT_BYTES,
        },
    )


def engine_estimate(config: RunConfig, shape: ModelShape, devices: int, device: Device, device_bytes: int) -> Estimate:
    """One device of a vLLM engine of so many devices with so much memory each."""
    size, vllm = BYTES[config.model.dtype], config.rollout_matching.vllm
    weights = shape.num_parameters * size // devices
    cache = vllm.kv_cache_memory_bytes
    if cache is None:
        of_the_rest = math.floor(vllm.resolved_gpu_memory_utilization * device_bytes) - weights
        cache = batch_cache_bytes(config, shape, devices) if device is Device.CPU else max(0, of_the_rest)
    return Estimate("engine device", {"weights": weights, "key-value cache": cache})


def batch_cache_bytes(config: RunConfig, shape: ModelShape, devices: int) -> int:
    """What a null `kv_cache_memory_bytes` is on CPU, where a fraction of the memory would be one of the whole machine's: of each of an engine's devices, room
    for as many of the longest sequences as are decoded at a time."""
    blocks = -(-_longest(config) // CACHE_BLOCK) * config.rollout_matching.decode_batch_size * devices
    heads = max(1, -(-shape.kv_heads // devices))
    # vLLM keeps a block for itself.
    return (blocks + 1) * CACHE_BLOCK * 2 * shape.layers * heads * shape.head_dim * BYTES[config.model.dtype]


def shared_device_estimate(config: RunConfig, shape: ModelShape, learner: Estimate, engine: Estimate) -> Estimate:
    """A learner rank and an engine on the same GPU, at the time when the two need most.

    While the rank learns, an engine that sleeps has given its memory back. While the engine generates or takes weights, the rank has no activations, and is
    without what `rollout_matching.offload` moves away, save that full weights are read where they lie, or where they were merged or gathered for it. (Of an
    engine over several GPUs the others hold a copy of the weights then, and nothing else of the rank: never more than its own.)
    """
    matching = config.rollout_matching
    sends_full = may_send_full(config)
    model_leaves, optimizer_leaves = (matching.offload.enabled and moved for moved in (matching.offload.offload_model, matching.offload.offload_optimizer))
    stays = {
        "weights": not model_leaves or sends_full,
        "master weights": not optimizer_leaves,
        # Where there are masters, the gradients are theirs.
        "gradients": not (optimizer_leaves if learner.parts["master weights"] else model_leaves),
        "optimizer": not optimizer_leaves,
    }
    of_engine = {f"engine's {name}": size for name, size in engine.parts.items()}
    learning = learner.parts if matching.vllm.sleep else {**learner.parts, **of_engine}
    made = {"weights made for the sync": _made_bytes(config, shape) if sends_full else 0}
    at_work = {name: learner.parts[name] for name in stays if stays[name]} | made | of_engine
    return max(
        Estimate("learner rank and engine on one GPU, while the learner learns", learning),
        Estimate("learner rank and engine on one GPU, while the engine works", at_work),
        key=lambda estimate: estimate.total,
    )


def _made_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Bytes of the weights that are there for a full sync alone, all of them until the engine has the last: whole ones of shards, merged ones of adapters."""
    size, adapter = BYTES[config.model.dtype], config.model.adapter
    if is_sharded(config):
        return shape.num_parameters * size
    return 0 if adapter is None else size * sum(map(math.prod, _adapted(adapter, shape)))


def synced_bytes(config: RunConfig, placement: Placement, shape: ModelShape) -> int:
    """Bytes of memory that the learner keeps for its syncs beside its weights: all of them, merged, where engines of its own machine read them there."""
    section = rollout_servers(config)
    reads_here = bool(placement.engines) if section is None else any(server.is_loopback for server in section.servers)
    shares = reads_here and placement.transport == Transport.GLOO and may_send_full(config)
    return shape.num_parameters * BYTES[config.model.dtype] if shares else 0


def sequences_in_cache(config: RunConfig, shape: ModelShape, engine: Estimate, devices: int) -> int:
    """Longest sequences that an engine's cache holds at the same time."""
    return engine.parts["key-value cache"] * devices // (shape.kv_numbers_per_token * BYTES[config.model.dtype] * _longest(config))


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
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes
