"""Estimates the memory that a run's processes need, and compares it with this machine's memory.

The sizes of caches are computed from the shapes of the layers. CUDA's own memory counts as a round
number. The unused space of allocators is not estimated, so a share of the GPU is reserved for it
(`RESERVED`). learner_memory.py estimates the learner.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from launch.checks.model_shape import (
    RunSizes,
)
from launch.processes.placement import Placement
from learner.host_memory import container_limits, in_gib
from rollout_actors.engine.settings import batched_tokens
from shared.weight_sync.transports import BUCKET_BYTES, Device, TransportKind

CACHE_BLOCK = 128
"""Most tokens per block of vLLM's KV cache: of a model with a state, on CPU."""
CUDA_CONTEXT = 768 << 20
"""GPU bytes of a process before its first tensor (kernels, workspaces): a round number."""
CPU_BATCHED_TOKENS = {"colocate": 4096, "actors": 2048}
"""Maximum tokens of an engine's forward pass on CPU, by `vllm.mode`: defaults of vLLM 0.32.

A longer prompt is processed in one pass too, because prefill is not chunked there.
"""
COPIES = {
    TransportKind.NCCL: 2,  # one being sent, and one being packed or loaded
    TransportKind.IPC: 1,  # the shared bucket
    TransportKind.GLOO: 0,
    TransportKind.INPROC: 0,
}
"""Number of buckets (buffers of weights) on the GPU of each sender and receiver, by transport."""
CONTEXT = "CUDA context"
BUCKETS = "buckets of a sync"
REFERENCE = "reference model"
CACHE = "key-value cache"
RESERVED = 0.08
"""Share of a GPU's memory for unused space between tensors, the GPU driver, and wrong estimates.

An engine that is sized by `gpu_memory_utilization` needs no such share, because vLLM measures the
memory that it uses.
"""
SURE = 1.25
"""Estimates may be too high by up to this factor. A run is refused if an estimate divided by the
factor exceeds the memory. If only the undivided estimate exceeds the memory, a warning is printed.
"""
ENGINES = "engine's "
_EXACT = ("weights", "master weights", "gradients", "optimizer", REFERENCE, CACHE)
"""Parts of an estimate that are exact numbers, so they are not divided by `SURE`."""
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
    """Bytes by their use, such as `weights`."""
    holds_reserve: bool = False
    """Whether the parts already contain the unused space that `RESERVED` is for.

    The total is then compared with the whole memory of a GPU.
    """

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def least(self) -> int:
        """Bytes needed in any case: exact parts, and estimated parts divided by `SURE`."""
        return math.floor(
            sum(
                size if name.removeprefix(ENGINES) in _EXACT else size / SURE
                for name, size in self.parts.items()
            )
        )

    def describe(self) -> str:
        parts = [f"{name} {in_gib(size)}" for name, size in self.parts.items() if size]
        return f"{self.what}: {in_gib(self.total)} = {' + '.join(parts)}"


def bucket_bytes(run: RunSizes, transport: TransportKind) -> int:
    """Return the bytes of a weight sync's buffers on one GPU; 0 over gloo or for adapters only."""
    if not run.may_send_full:
        return 0
    return COPIES[transport] * _bucket_size(run, transport)


def gathered_for_sync(run: RunSizes, transport: TransportKind) -> int:
    """Return the bytes of whole tensors on the GPU of a rank that sends shards.

    These are the tensors that wait to be packed into one bucket, and two that are being gathered.
    """
    packs = run.may_send_full and transport is TransportKind.NCCL
    waiting = _bucket_size(run, transport) if packs else 0
    return waiting + 2 * run.size * max(map(math.prod, run.shape.parameters.values()))


def _bucket_size(run: RunSizes, transport: TransportKind) -> int:
    # A bucket ends with the tensor that exceeds its size.
    bucket = run.rollouts.vllm.sync.bucket_bytes or BUCKET_BYTES[transport]
    bucket += run.size * max(map(math.prod, run.shape.parameters.values()))
    return min(bucket, run.shape.num_parameters * run.size)


def engine_estimate(
    run: RunSizes,
    devices: int,
    device: Device,
    device_bytes: int,
    transport: TransportKind = TransportKind.GLOO,
) -> Estimate:
    """Estimate the memory of one device of a vLLM engine.

    If `kv_cache_memory_bytes` is null on a GPU, the KV cache takes what is left of the fraction
    `gpu_memory_utilization`. Otherwise the reserved share (`RESERVED`) has to hold the canary's
    log-probabilities and CUDA graphs.

    Args:
        devices: number of devices of the engine.
        device_bytes: total memory of one device.
    """
    shape = run.shape
    vllm = run.rollouts.vllm
    # One layer is computed at a time. It is counted whole even if the engine has more devices.
    numbers = shape.layer_numbers_per_token
    if (vision := shape.vision) is not None:
        numbers = max(numbers, vision.layer_numbers_per_patch * vision.patches_per_token)
    sequences = run.rollouts.decode_batch_size * devices
    tokens = batched_tokens(sequences, run.longest_request)
    if device is Device.CPU:
        tokens = max(CPU_BATCHED_TOKENS[vllm.mode], run.longest_request)
        tokens = min(tokens, sequences * run.longest_request)
    parts = {
        "weights": shape.num_parameters * run.size // devices,
        "activations of a forward": numbers * tokens * run.size,
        CONTEXT: CUDA_CONTEXT if device is Device.CUDA else 0,
    }
    cache = vllm.kv_cache_memory_bytes
    is_fraction = cache is None and device is Device.CUDA
    if is_fraction:
        planned = math.floor(vllm.resolved_gpu_memory_utilization * device_bytes)
        cache = max(0, planned - sum(parts.values()))
    elif cache is None:
        cache = batch_cache_bytes(run, devices)
    parts |= {CACHE: cache, BUCKETS: bucket_bytes(run, transport)}
    return Estimate("engine device", parts, holds_reserve=is_fraction)


def batch_cache_bytes(run: RunSizes, devices: int) -> int:
    """Return the KV cache bytes per device on CPU, for a full batch of the longest sequences."""
    shape = run.shape
    sequences = run.rollouts.decode_batch_size * devices
    blocks = 1 + -(-run.longest_request // CACHE_BLOCK) * sequences  # vLLM keeps a block for itself
    heads = max(1, -(-shape.kv_heads // devices))
    numbers = CACHE_BLOCK * 2 * shape.layers * heads * shape.head_dim
    return blocks * numbers * run.size


def sequences_in_cache(run: RunSizes, engine: Estimate, devices: int) -> int:
    """Return how many of the longest sequences fit into an engine's KV cache on all its devices."""
    shape = run.shape
    cache = engine.parts[CACHE] * devices
    numbers = 2 * shape.layers * shape.kv_heads * shape.head_dim  # keys and values of a token
    return cache // (numbers * run.size * run.longest_request)


def shared_device_estimate(
    run: RunSizes,
    learner: Estimate,
    engine: Estimate,
    transport: TransportKind = TransportKind.INPROC,
) -> Estimate:
    """Estimate the peak memory of a learner rank and an engine on the same GPU.

    While the rank learns, a sleeping engine holds only its CUDA context. While the engine works,
    the rank holds neither activations nor what `rollout_matching.offload` moves away. But if syncs
    send full weights, the rank's weights stay on the GPU, and copies made for the sync are added.
    """
    offload = run.rollouts.offload
    sends_full = run.may_send_full
    # The sums of gradients then belong to them.
    has_masters = learner.parts["master weights"] > 0 or run.training.offloads_optimizer
    moved = {
        "weights": offload.moves_model and not sends_full,
        "master weights": offload.moves_optimizer,
        "gradients": offload.moves_optimizer if has_masters else offload.moves_model,
        "optimizer": offload.moves_optimizer,
        REFERENCE: offload.moves_model,
        CONTEXT: False,
    }
    of_engine = {f"{ENGINES}{name}": size for name, size in engine.parts.items()}
    learning = dict(learner.parts)
    if not run.rollouts.vllm.sleep:
        learning |= of_engine
    elif CONTEXT in engine.parts:
        learning[f"{ENGINES}{CONTEXT}"] = engine.parts[CONTEXT]
    working = {
        name: size for name, size in learner.parts.items() if name in moved and not moved[name]
    }
    working["weights made for the sync"] = _made_bytes(run, transport) if sends_full else 0
    working[BUCKETS] = bucket_bytes(run, transport)
    return max(
        Estimate("learner rank and engine on one GPU, while the learner learns", learning),
        Estimate("learner rank and engine on one GPU, while the engine works", working | of_engine),
        key=lambda estimate: estimate.total,
    )


def _made_bytes(run: RunSizes, transport: TransportKind) -> int:
    """Count the bytes of weights that exist on the learner's GPU only during a weight sync.

    An adapter is merged into copies of weights. Shards are gathered one by one.
    """
    if run.learner.is_sharded:
        return gathered_for_sync(run, transport)
    if run.model.adapter is None:
        return 0
    merged = run.shapes_in_4_bits() or run.adapted_shapes()
    return run.size * sum(map(math.prod, merged + run.shapes_with_rows()))


def synced_bytes(run: RunSizes, placement: Placement) -> int:
    """Return the bytes of shared memory by which engines on this machine receive weights.

    It exists during a weight sync over gloo; 0 if the run does not need it.
    """
    section = run.rollouts.servers
    if section is None:
        reads_here = bool(placement.engines)
    else:
        reads_here = any(server.is_loopback for server in section.servers)
    if reads_here and placement.transport is TransportKind.GLOO and run.may_send_full:
        return run.shape.num_parameters * run.size
    return 0


@dataclass(frozen=True, slots=True)
class Needs:
    """The memory that the processes of a run need, by kind of process."""

    learner: Estimate
    """Memory of one learner rank."""
    num_ranks: int
    engine: Estimate | None = None
    """Memory of one device of an engine; None if the run starts no engine."""
    num_engine_devices: int = 0
    shared: Estimate | None = None
    """Memory of a learner rank and an engine on one GPU; None if they do not share GPUs."""
    synced: int = 0
    """Bytes of shared memory by which engines on this machine receive weights (`synced_bytes`)."""
    host: Estimate | None = None
    """Host memory of this machine's learner ranks on GPUs; None on CPU."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The total memory of a GPU or of this machine, whether it is in use or not."""

    device: Device
    total: int
    """Bytes of one GPU. On CPU: of the machine or its container, shared by all processes."""

    def problems(self, needs: Needs) -> list[str]:
        """Return a message for each need that certainly exceeds this memory."""
        return [message for message, is_sure in self._excesses(needs) if is_sure]

    def warnings(self, needs: Needs) -> list[str]:
        """Return a message for each need that exceeds this memory if the estimates are right."""
        tried = "This is an estimate, so the run starts anyway"
        return [f"{message}. {tried}" for message, is_sure in self._excesses(needs) if not is_sure]

    def _excesses(self, needs: Needs) -> Iterator[tuple[str, bool]]:
        """Yield a message for each need that exceeds the memory, and whether it is certain."""
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
                f"{in_gib(usable)} of a GPU's {in_gib(self.total)} can be used"
                f" ({RESERVED:.0%} are reserved)"
            )
        # vLLM takes its fraction of the GPU even if it needs less.
        is_sure = needed.holds_reserve or needed.least > self.total or needed.total > SURE * usable
        yield f"{key}: {needed.describe()}, but {has}; {remedy}", is_sure

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
            f"cluster.address: the processes need about {in_gib(needed)} ({listed}), but this"
            f" machine or its container has {in_gib(self.total)}; {_SMALLER_LEARNER}"
        )
        yield message, least > self.total


def device_memory(device: Device) -> DeviceMemory | None:
    """Return the memory of the smallest GPU (None: no GPU), or the machine's main memory."""
    if device is Device.CUDA:
        import torch

        gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        sizes = [gpu.total_memory for gpu in gpus]
        return DeviceMemory(device, min(sizes)) if sizes else None
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DeviceMemory(device, min([machine, *(limit for _, limit in container_limits())]))
