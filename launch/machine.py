"""What the machine, or the cluster, has: asked without starting anything on it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from launch.memory_estimate import Estimate, in_gib
from launch.placement import Resources
from rollout_actors.engine_settings import Device
from shared.config import RunConfig
from shared.errors import ConfigError

_SMALLER_LEARNER = "turn model.gradient_checkpointing on, lower global_max_length, train with model.adapter, or use learner.parallel: fsdp over more ranks"
_SMALLER_ENGINE = "lower rollout_matching.vllm.kv_cache_memory_bytes or gpu_memory_utilization, or give the engine more devices"


_CHECK_CLUSTER = "check `ray status` there, cluster.temp_dir and, where the cluster asks for a token, RAY_AUTH_MODE=token, or use local"


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


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Total memory of this machine, whether something holds it or not; other nodes of a cluster are taken to be like it."""

    device: Device
    total: int
    """Bytes of one GPU; on CPU of the whole machine, which all processes share."""

    def problems(self, needs: Needs) -> list[str]:
        """On a GPU a rank and an engine are counted together where they share it, else each alone."""
        if self.device is Device.CPU:
            return self._of_the_machine(needs)
        if needs.shared is not None:
            return self._too_large("learner.gpus", needs.shared, f"{_SMALLER_LEARNER}, {_SMALLER_ENGINE}, or turn on vllm.sleep and rollout_matching.offload")
        engine = [] if needs.engine is None else self._too_large("rollout_matching.vllm.kv_cache_memory_bytes", needs.engine, _SMALLER_ENGINE)
        return self._too_large("learner.gpus", needs.learner, _SMALLER_LEARNER) + engine

    def _too_large(self, key: str, needed: Estimate, remedy: str) -> list[str]:
        return [f"{key}: {needed.describe()}, and a GPU has {in_gib(self.total)}; {remedy}"] if needed.total > self.total else []

    def _of_the_machine(self, needs: Needs) -> list[str]:
        parts = {"learner ranks": needs.learner.total * needs.num_ranks}
        if needs.engine is not None:
            parts["engines"] = needs.engine.total * needs.num_engine_devices
        needed = sum(parts.values())
        if needed <= self.total:
            return []
        listed = ", ".join(f"{name} {in_gib(size)}" for name, size in parts.items())
        return [f"cluster.address: the processes need about {in_gib(needed)} ({listed}), this machine has {in_gib(self.total)}; {_SMALLER_LEARNER}"]


def device_memory(device: Device) -> DeviceMemory:
    """Of the smallest GPU."""
    if device is Device.CUDA:
        import torch

        return DeviceMemory(device, min(torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())))
    return DeviceMemory(device, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def cluster_nodes(config: RunConfig) -> list[Resources]:
    """CPUs and GPUs of each node that Ray has, or would find. ConfigError where there is no cluster at the address."""
    if config.cluster.address == "local":
        import torch

        return [Resources(cpus=float(len(os.sched_getaffinity(0))), gpus=float(torch.cuda.device_count()))]
    import ray

    connect(config)
    try:
        return nodes_there()
    finally:
        ray.shutdown()


def connect(config: RunConfig, **of_an_own_cluster: Any) -> None:
    """`ray.init` at the configured address. ConfigError where that gives no cluster."""
    import ray
    from ray.exceptions import AuthenticationError, RayError

    address = config.cluster.address
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error", **of_an_own_cluster)
    except (ConnectionError, ValueError, RuntimeError, OSError, RayError) as error:
        is_refused = isinstance(error, AuthenticationError) or "authenticat" in str(error).lower()
        remedy = "set RAY_AUTH_MODE=token here and give this machine the cluster's token (~/.ray/auth_token)" if is_refused else _CHECK_CLUSTER
        raise ConfigError(f"cluster.address: {address} gives no Ray cluster ({error}); {remedy}") from error


def nodes_there() -> list[Resources]:
    """Of the cluster that this process is connected to."""
    import ray

    return [Resources.of(node["Resources"]) for node in ray.nodes() if node["Alive"]]
