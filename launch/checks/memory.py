"""Estimates the memory that a run's processes need, and compares it with this machine's.

Caches follow the shapes of the layers, and what CUDA takes is a round number; what allocators leave
unused is in no estimate (`RESERVED`). The learner's is in learner_memory.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from launch.checks.model_shape import (
    BYTES,
    ModelShape,
    adapted_shapes,
    embeddings_with_rows,
    shapes_in_4_bits,
)
from launch.processes.placement import Placement
from learner.host_memory import container_limits, in_gib
from shared.config import RunConfig
from shared.weight_sync.transports import BUCKET_BYTES, Device, TransportKind

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
CONTEXT = "CUDA context"
BUCKETS = "buckets of a sync"
REFERENCE = "reference model"
CACHE = "key-value cache"
RESERVED = 0.08
"""Part of a GPU's memory for unused space between tensors, the driver, and errors of the estimates.

An engine that is sized by a fraction of the GPU needs none beside it: vLLM measures these.
"""
SURE = 1.25
"""Estimates are high, by up to this factor: what is too much even without it is a problem, what is
too much only with it a warning."""
ENGINES = "engine's "
_EXACT = ("weights", "master weights", "gradients", "optimizer", REFERENCE, CACHE)
"""Parts that follow from numbers of values, so that nothing is to be taken off them."""
_SMALLER_LEARNER = (
    "turn model.gradient_checkpointing on, choose another training.optimizer, lower"
    " global_max_length, train with model.adapter, or use learner.parallel: fsdp over more ranks"
)
_SMALLER_ENGINE = (
    "lower rollout_matching.vllm.kv_cache_memory_bytes or gpu_memory_utilization, or give the"
    " engine more devices"
)


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

    @property
    def least(self) -> int:
        """Bytes that it takes in any case: exact parts whole, and estimated ones without margin."""
        return math.floor(
            sum(
                size if name.removeprefix(ENGINES) in _EXACT else size / SURE
                for name, size in self.parts.items()
            )
        )

    def describe(self) -> str:
        parts = [f"{name} {in_gib(size)}" for name, size in self.parts.items() if size]
        return f"{self.what}: {in_gib(self.total)} = {' + '.join(parts)}"


def bucket_bytes(config: RunConfig, shape: ModelShape, transport: TransportKind) -> int:
    if not config.may_send_full:
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
    parts |= {CACHE: cache, BUCKETS: bucket_bytes(config, shape, transport)}
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
    cache = engine.parts[CACHE] * devices
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
    sends_full = config.may_send_full
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
    of_engine = {f"{ENGINES}{name}": size for name, size in engine.parts.items()}
    learning = dict(learner.parts)
    if not matching.vllm.sleep:
        learning |= of_engine
    elif CONTEXT in engine.parts:
        learning[f"{ENGINES}{CONTEXT}"] = engine.parts[CONTEXT]
    working = {
        name: size for name, size in learner.parts.items() if name in moved and not moved[name]
    }
    working["weights made for the sync"] = _made_bytes(config, shape) if sends_full else 0
    working[BUCKETS] = bucket_bytes(config, shape, transport)
    return max(
        Estimate("learner rank and engine on one GPU, while the learner learns", learning),
        Estimate("learner rank and engine on one GPU, while the engine works", working | of_engine),
        key=lambda estimate: estimate.total,
    )


def _made_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Count the weights that are on a device for a sync alone: merged, or back from the host."""
    size = BYTES[config.model.dtype]
    if config.learner.is_sharded:
        # Gathered into host memory, they return one by one.
        return size * max(map(math.prod, shape.parameters.values()))
    if config.model.adapter is None:
        return 0
    merged = shapes_in_4_bits(config, shape) or adapted_shapes(config, shape)
    merged += embeddings_with_rows(config, shape)
    return size * sum(map(math.prod, merged))


def synced_bytes(config: RunConfig, placement: Placement, shape: ModelShape) -> int:
    """Count the weights that the learner keeps in memory which engines of its machine read."""
    section = config.rollout_matching.servers
    if section is None:
        reads_here = bool(placement.engines)
    else:
        reads_here = any(server.is_loopback for server in section.servers)
    if reads_here and placement.transport is TransportKind.GLOO and config.may_send_full:
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
        is_sure = needed.holds_reserve or needed.least > self.total or needed.total > SURE * usable
        yield f"{key}: {needed.describe()}, and {has}; {remedy}", is_sure

    def _on_the_machine(self, needs: Needs) -> Iterator[tuple[str, bool]]:
        parts = {"learner ranks": needs.learner.total * needs.num_ranks}
        least = needs.learner.least * needs.num_ranks + needs.synced
        if needs.engine is not None:
            parts["engines"] = needs.engine.total * needs.num_engine_devices
            least += needs.engine.least * needs.num_engine_devices
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
        yield message, least > self.total


def device_memory(device: Device) -> DeviceMemory | None:
    """Return the memory of this machine's smallest GPU (None: it has none), or for its CPUs."""
    if device is Device.CUDA:
        import torch

        gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        sizes = [gpu.total_memory for gpu in gpus]
        return DeviceMemory(device, min(sizes)) if sizes else None
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DeviceMemory(device, min([machine, *(limit for _, limit in container_limits())]))
