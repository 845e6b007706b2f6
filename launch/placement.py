"""What a run asks of a cluster: a pure function of the configuration and the cluster's resources."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_actors.backends.vllm_colocate import colocate_tensor_parallel
from rollout_actors.engine_settings import Device, EngineSettings
from shared.config import RunConfig
from shared.config.derive import generates_in_ranks
from shared.errors import ConfigError
from shared.transports import Sharing, choose_transport

Resources = dict[str, float]
"""Of one process, as Ray names them: `CPU` and `GPU`."""


@dataclass(frozen=True, slots=True)
class Placement:
    engines: tuple[Resources, ...]
    """Of each rollout actor; none where the ranks generate, or servers do."""
    ranks: tuple[Resources, ...]
    """Of each learner rank; none where nothing learns."""
    devices_per_engine: int
    """Tensor-parallel devices of each engine that the run starts."""
    engine_device: Device
    learner_device: Device
    transport: str
    """How weights travel (`WeightOffer.transport`)."""

    @property
    def bundles(self) -> list[Resources]:
        """The engines first, then the learner ranks."""
        return [*self.engines, *self.ranks]

    def total(self, resource: str) -> float:
        return sum(bundle[resource] for bundle in self.bundles)


def plan_placement(config: RunConfig, available: Resources, *, learns: bool = True) -> Placement:
    """What the configuration asks for on a cluster with these resources; without `learns`, for its actors alone.

    Raises ConfigError when there is too little, or when a transport cannot join the two sides.
    """
    has_gpus = available.get("GPU", 0.0) > 0
    if not learns:
        return _fitting(_with_actors(config, (), has_gpus), available)
    ranks = tuple(_rank(config, has_gpus) for _ in range(config.learner.world_size))
    if generates_in_ranks(config):
        return _fitting(_in_ranks(config, ranks, available), available)
    if config.rollout_matching.vllm.mode == "server":
        device = _device(ranks[0])
        # Servers live where the learner does: on GPUs or on CPUs.
        return _fitting(Placement((), ranks, 1, device, device, choose_transport(config, device, device, Sharing.NOTHING)), available)
    return _fitting(_with_actors(config, ranks, has_gpus), available)


def _rank(config: RunConfig, has_gpus: bool) -> Resources:
    gpus = config.learner.gpus if config.learner.gpus is not None else float(has_gpus)
    return {"GPU": gpus, "CPU": 1.0 if config.learner.cpus is None else config.learner.cpus}


def _with_actors(config: RunConfig, ranks: tuple[Resources, ...], has_gpus: bool) -> Placement:
    actors = config.rollout_matching.vllm.actors
    gpus = actors.gpus_per_actor if actors.gpus_per_actor is not None else float(actors.tensor_parallel_size if has_gpus else 0)
    # On CPU a device of a tensor-parallel engine is a process.
    cpus = actors.cpus_per_actor if actors.cpus_per_actor is not None else float(1 if gpus else actors.tensor_parallel_size)
    engines = ({"GPU": gpus, "CPU": cpus},) * actors.num_actors
    engine_device = _device(engines[0])
    learner_device = _device(ranks[0]) if ranks else engine_device
    if learner_device is not engine_device:
        raise ConfigError(
            f"learner.gpus: {ranks[0]['GPU']:g} GPUs for the learner and {gpus:g} for each actor (rollout_matching.vllm.actors.gpus_per_actor); "
            "weights travel between GPUs or between CPUs, give both sides GPUs or neither"
        )
    transport = choose_transport(config, learner_device, engine_device, Sharing.NOTHING)
    return Placement(engines, ranks, actors.tensor_parallel_size, engine_device, learner_device, transport)


def _in_ranks(config: RunConfig, ranks: tuple[Resources, ...], available: Resources) -> Placement:
    device = _device(ranks[0])
    if config.rollout_matching.rollout_backend == "hf":
        return Placement((), ranks, 1, device, device, "inproc")
    visible = int(available.get("GPU", 0.0)) // len(ranks) if device is Device.CUDA else 1
    devices = colocate_tensor_parallel(config.rollout_matching.vllm.tensor_parallel_size, visible)
    if device is Device.CUDA:
        ranks = tuple({**rank, "GPU": max(rank["GPU"], float(devices))} for rank in ranks)
    sharing = Sharing.DEVICE if device is Device.CUDA else Sharing.PROCESS
    return Placement((), ranks, devices, device, device, choose_transport(config, device, device, sharing))


def _device(resources: Resources) -> Device:
    return Device.CUDA if resources["GPU"] else Device.CPU


def _fitting(placement: Placement, available: Resources) -> Placement:
    short = [resource for resource in ("GPU", "CPU") if placement.total(resource) > available.get(resource, 0.0)]
    if short:
        raise ConfigError([_too_little(placement, resource, available.get(resource, 0.0)) for resource in short])
    return placement


def _too_little(placement: Placement, resource: str, there: float) -> str:
    asked, keys, key = [], [], "learner.world_size"
    if placement.engines:
        key = "rollout_matching.vllm.actors.num_actors"
        asked.append(f"{len(placement.engines)} actors of {placement.engines[0][resource]:g} {resource}")
        keys.append({"GPU": "rollout_matching.vllm.actors.gpus_per_actor", "CPU": "rollout_matching.vllm.actors.cpus_per_actor"}[resource])
    if placement.ranks:
        size = f"{placement.ranks[0][resource]:g}"
        asked.append(f"a learner of {size}" if len(placement.ranks) == 1 else f"{len(placement.ranks)} learner ranks of {size}")
        keys.append({"GPU": "learner.gpus", "CPU": "learner.cpus"}[resource])
    how = {"GPU": "0 on both sides runs on CPU", "CPU": "fractions are allowed"}[resource]
    return (
        f"{key}: {' and '.join(asked)} ask for {placement.total(resource):g} {resource}, the cluster has {there:g}; "
        f"lower {key.rpartition('.')[2]}, or {' and '.join(keys)} ({how}), or join a larger cluster with cluster.address"
    )


def engine_settings(config: RunConfig, placement: Placement, *, max_images: int) -> EngineSettings:
    """What every engine of the run is started with."""
    vllm = config.rollout_matching.vllm
    return EngineSettings(
        model_path=config.model.path,
        dtype=config.model.dtype,
        max_model_len=vllm.max_model_len or config.global_max_length,
        max_num_seqs=config.rollout_matching.decode_batch_size * placement.devices_per_engine,
        seed=config.training.seed,
        transport=placement.transport,
        device=placement.engine_device,
        tensor_parallel_size=placement.devices_per_engine,
        kv_cache_memory_bytes=vllm.kv_cache_memory_bytes,
        gpu_memory_utilization=vllm.resolved_gpu_memory_utilization,
        enforce_eager=vllm.enforce_eager,
        max_images_per_prompt=max_images,
        repeat_guard=config.rollout_matching.repeat_terminate.settings(),
        enable_lora=vllm.enable_lora,
        max_lora_rank=1 if config.model.adapter is None else config.model.adapter.rank,
    )
