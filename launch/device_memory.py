"""The memory of this machine's devices, against what a run's processes need."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from launch.memory_estimate import Estimate, in_gib
from shared.transports import Device

_SMALLER_LEARNER = "turn model.gradient_checkpointing on, lower global_max_length, train with model.adapter, or use learner.parallel: fsdp over more ranks"
_SMALLER_ENGINE = "lower rollout_matching.vllm.kv_cache_memory_bytes or gpu_memory_utilization, or give the engine more devices"

RESERVED = 0.08
"""Part of a GPU's memory that nothing is planned into: what allocators leave unused between
tensors, the driver's own, and the estimates' errors. An engine that is sized by a fraction of the
GPU needs none beside it: vLLM measures these, and gives its cache what they leave of the fraction.
"""

SURE = 1.25
"""Multiple of the memory that is there from which on a need is a problem, and else a warning: estimates count the longest row with the most images."""

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
    """Bytes of one GPU; on CPU of the whole machine or of its container, which all processes share."""

    def problems(self, needs: Needs) -> list[str]:
        """What certainly has no room. On a GPU a rank and an engine are counted together where they share it, else each alone."""
        return [excess.told for excess in self._excesses(needs) if excess.is_sure]

    def warnings(self, needs: Needs) -> list[str]:
        """What has no room if the estimates are right."""
        return [f"{excess.told}. It is an estimate, and tried" for excess in self._excesses(needs) if not excess.is_sure]

    def _excesses(self, needs: Needs) -> list[_Excess]:
        if self.device is Device.CPU:
            return self._of_the_machine(needs)
        if needs.shared is not None:
            return self._too_large("learner.gpus", needs.shared, f"{_SMALLER_LEARNER}, {_SMALLER_ENGINE}, or turn on vllm.sleep and rollout_matching.offload")
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
        told = f"cluster.address: the processes need about {in_gib(needed)} ({listed}), {has}; {_SMALLER_LEARNER}"
        return [_Excess(told, is_sure=needed > SURE * self.total)]


def device_memory(device: Device) -> DeviceMemory | None:
    """Of the smallest GPU of this machine; None where it has none. On CPU no more than the container may have."""
    if device is Device.CUDA:
        import torch

        sizes = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
        return DeviceMemory(device, min(sizes)) if sizes else None
    return DeviceMemory(device, min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *container_limits()]))


def container_limits() -> Iterator[int]:
    """Bytes that this process and its like may have together, by each of the control groups around it (of version 1 or 2) that says so."""
    for line in _lines(OWN_CGROUPS):
        _, controllers, own = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mounted, file = (CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (CGROUPS, "memory.max")
        # Within a container its own group may be mounted as the outermost, under a path that is not told here.
        inner = mounted / own.strip("/")
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(mounted):
                yield from (int(limit) for limit in _lines(folder / file) if limit != "max")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
