"""What the machine, or the cluster, has: asked without starting anything on it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from launch.memory_estimate import in_gib
from launch.placement import Resources
from rollout_actors.engine_settings import Device
from shared.config import RunConfig
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Of this machine; other nodes of a cluster are taken to be like it."""

    device: Device
    per_device: int
    """Bytes of one GPU, or of the whole machine."""

    def problems(self, learner: int, needed: Mapping[str, int], *, shares_device: bool) -> list[str]:
        """`learner` bytes for one rank, `needed` for all processes by kind."""
        remedy = "turn model.gradient_checkpointing on, lower global_max_length, train with model.adapter, or use learner.parallel: fsdp over more ranks"
        if self.device is Device.CUDA:
            if learner > self.per_device:
                return [f"learner.gpus: a learner rank needs about {in_gib(learner)}, a GPU has {in_gib(self.per_device)}; {remedy}"]
            return []
        if sum(needed.values()) > self.per_device:
            parts = ", ".join(f"{name} {in_gib(size)}" for name, size in needed.items())
            return [f"cluster.address: the processes need about {in_gib(sum(needed.values()))} ({parts}), this machine has {in_gib(self.per_device)}; {remedy}"]
        return []


def free_memory(device: Device) -> FreeMemory:
    if device is Device.CUDA:
        import torch

        return FreeMemory(device, min(torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())))
    return FreeMemory(device, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def cluster_resources(config: RunConfig) -> Resources:
    """CPUs and GPUs that Ray has, or would find. ConfigError where there is no cluster at the address."""
    if config.cluster.address == "local":
        import torch

        return {"CPU": float(len(os.sched_getaffinity(0))), "GPU": float(torch.cuda.device_count())}
    import ray

    try:
        ray.init(address=config.cluster.address, log_to_driver=False, logging_level="error")
        return dict(ray.cluster_resources())
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise ConfigError(f"cluster.address: {config.cluster.address} gives no Ray cluster ({error}); check `ray status` there") from error
    finally:
        ray.shutdown()
