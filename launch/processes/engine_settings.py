"""The settings of a run's engines, and the Ray `runtime_env` of the run's other processes."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from launch.checks.data import ImageNeeds
from launch.checks.memory import batch_cache_bytes
from launch.checks.model_shape import ModelShape, RunSizes
from launch.processes.placement import Placement, plan_placement
from launch.processes.ray_connection import cluster_nodes
from rollout_actors.engine.settings import (
    EngineSettings,
    engine_environment,
    is_forked,
    neighbour_runtime_env,
)
from rollout_actors.warm import warm_python
from shared.config import RunConfig
from shared.config.rollout import EngineLocation
from shared.errors import ConfigError
from shared.weight_sync.transports import Device


def settings_of_run(config: RunConfig, placement: Placement, images: ImageNeeds) -> EngineSettings:
    """Return the settings of every engine, or the settings that every server must have.

    Raises ConfigError if the model's files are needed but cannot be read.
    """
    vllm = config.rollout_matching.vllm
    devices = placement.devices_per_engine
    cache = vllm.kv_cache_memory_bytes
    if cache is None and placement.device is Device.CPU:
        shape = ModelShape.read(Path(config.model.path))
        cache = batch_cache_bytes(RunSizes.of(config, shape), devices)
    return EngineSettings(
        model_path=config.model.path,
        dtype=config.model.dtype,
        max_model_len=vllm.max_model_len or config.global_max_length,
        max_num_seqs=config.rollout_matching.decode_batch_size * devices,
        seed=config.training.seed,
        transport=placement.transport,
        device=placement.device,
        tensor_parallel_size=devices,
        kv_cache_memory_bytes=cache,
        gpu_memory_utilization=vllm.resolved_gpu_memory_utilization,
        enforce_eager=vllm.enforce_eager,
        is_deterministic=config.training.deterministic,
        max_images_per_prompt=images.max_per_prompt,
        max_image_pixels=images.max_pixels,
        max_pixels=config.data.max_pixels,
        repeat_guard=config.rollout_matching.repeat_terminate.settings(),
        enable_lora=vllm.enable_lora,
        max_lora_rank=1 if config.model.adapter is None else config.model.adapter.rank,
        head_dtype=config.model.head_dtype,
    )


def neighbour_env(
    config: RunConfig, placement: Placement, images: ImageNeeds, **variables: str
) -> dict[str, object]:
    """Return the Ray `runtime_env` of a learner rank or an environment actor.

    `variables` are additional environment variables.
    """
    variables |= {"HF_HUB_OFFLINE": "1"}
    # On CPU it is forked from a warm Python like the engines, if there is one: a warm Python that
    # only this process uses would cost more than it saves.
    has_server = (
        config.rollout_matching.backend.location is EngineLocation.ACTORS
        or warm_python.FOLDER in os.environ
    )
    if placement.device is Device.CPU and has_server:
        return neighbour_runtime_env(settings_of_run(config, placement, images), **variables)
    return {"env_vars": variables}


def engines_imported_early(config: RunConfig) -> AbstractContextManager[None]:
    """Return a context manager that starts the warm Python of the run's actors on this machine.

    Entered before the run is checked: its imports take as long as the checks and the start of Ray,
    on another core. Does nothing if the actors are not forked here.
    """
    cluster = config.cluster
    in_actors = config.rollout_matching.backend.location is EngineLocation.ACTORS
    if not in_actors or cluster.kind != "ray" or cluster.address != "local":
        return nullcontext()
    try:
        placement = plan_placement(config, cluster_nodes(cluster, config.timeouts.start_s))
        settings = settings_of_run(config, placement, ImageNeeds())
    except ConfigError:
        return nullcontext()  # preflight reports it
    if not is_forked(settings):
        return nullcontext()
    return warm_python.started_early(engine_environment(settings))
