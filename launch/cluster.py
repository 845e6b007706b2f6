"""Where a run lives: Ray, the placement of actors and learner, and the end of all its processes."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from learner.actor import LearnerShell, RemoteLearner
from learner.place import LearnerPlace, ReceiverGroup
from rollout_actors.engine_actor import EngineActor, LocalEngine
from rollout_actors.engine_settings import Device, EngineSettings, engine_environment
from rollout_actors.pool import ActorPool, PoolTimeouts
from shared.config import RunConfig
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Placement:
    """What one run asks of a cluster."""

    num_actors: int
    actor: dict[str, float]
    """Resources of each rollout actor, as Ray names them."""
    learner: dict[str, float] | None
    """None: nothing learns."""

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The actors first, then the learner."""
        return [self.actor] * self.num_actors + ([] if self.learner is None else [self.learner])

    def total(self, resource: str) -> float:
        return sum(bundle.get(resource, 0.0) for bundle in self.bundles)

    @property
    def transport(self) -> str:
        """How weights travel: `nccl` between GPUs, `rollmatch_gloo` between processes on CPU."""
        return "nccl" if self.actor["GPU"] else "rollmatch_gloo"


def plan_placement(config: RunConfig, available: dict[str, float], *, learns: bool = True) -> Placement:
    """What the configuration asks for on a cluster with these resources; without `learns`, for its actors alone.

    Raises ConfigError when there is too little, or when only one side of the weight sync has GPUs.
    """
    actors = config.rollout_matching.vllm.actors
    has_gpus = available.get("GPU", 0.0) > 0
    gpus = actors.gpus_per_actor if actors.gpus_per_actor is not None else float(actors.tensor_parallel_size if has_gpus else 0)
    learner_gpus = config.learner.gpus if config.learner.gpus is not None else float(has_gpus)
    if learns and bool(gpus) != bool(learner_gpus):
        raise ConfigError(
            f"learner.gpus: {learner_gpus:g} GPUs for the learner and {gpus:g} for each actor (rollout_matching.vllm.actors.gpus_per_actor); "
            "weights travel between GPUs or between CPUs, give both sides GPUs or neither"
        )
    placement = Placement(
        num_actors=actors.num_actors,
        actor={"GPU": gpus, "CPU": 1.0 if actors.cpus_per_actor is None else actors.cpus_per_actor},
        learner={"GPU": learner_gpus, "CPU": 1.0 if config.learner.cpus is None else config.learner.cpus} if learns else None,
    )
    short = [resource for resource in ("GPU", "CPU") if placement.total(resource) > available.get(resource, 0.0)]
    if short:
        raise ConfigError([_too_little(placement, resource, available.get(resource, 0.0)) for resource in short])
    return placement


def _too_little(placement: Placement, resource: str, there: float) -> str:
    keys = {
        "GPU": "rollout_matching.vllm.actors.gpus_per_actor and learner.gpus (0 on both sides runs on CPU)",
        "CPU": "rollout_matching.vllm.actors.cpus_per_actor and learner.cpus (fractions are allowed)",
    }
    learner = "" if placement.learner is None else f" and a learner of {placement.learner[resource]:g}"
    return (
        f"rollout_matching.vllm.actors.num_actors: {placement.num_actors} actors of {placement.actor[resource]:g} {resource}{learner} "
        f"ask for {placement.total(resource):g} {resource}, the cluster has {there:g}; "
        f"lower num_actors, or {keys[resource]}, or join a larger cluster with cluster.address"
    )


class Cluster:
    """One run's processes. On exit, good or bad, all of them end; a cluster that was running before the run is left running."""

    def __init__(self, config: RunConfig, *, max_images: int) -> None:
        """`max_images` is the largest number of images of a sample."""
        self._config = config
        self._max_images = max_images
        self._ends = ExitStack()

    def __enter__(self) -> Cluster:
        """Raises ConfigError when there is no such cluster, or none can be started."""
        cluster = self._config.cluster
        own = {} if cluster.address != "local" else {"include_dashboard": cluster.dashboard, "_temp_dir": cluster.temp_dir and str(cluster.temp_dir)}
        # Pool and learner report every failed call themselves.
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
        self._ends.callback(ray.shutdown)
        try:
            ray.init(address=cluster.address, log_to_driver=False, logging_level="error", **own)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            self._ends.close()
            raise ConfigError(
                f"cluster.address: {cluster.address} gives no Ray cluster ({error}); check `ray status` there and cluster.temp_dir, or use local"
            ) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # A stack, so that an end that fails does not keep the others from theirs.
        self._ends.close()

    def start(self) -> tuple[RemoteLearner, ActorPool]:
        """Place and start the learner and every actor at once.

        Raises:
            ConfigError: too few resources, or what the learner finds wrong with model and data.
            RolloutError, LearnerError: a process that did not come up.
        """
        config = self._config
        placement = plan_placement(config, ray.cluster_resources())
        assert placement.learner is not None
        group = self._reserve(placement)
        learner = self._place_learner(placement.learner, group, placement.num_actors)
        pool = self._place_actors(placement, group)
        # The learner knows most about bad input and needs seconds, so it is waited for first; the engines, created above, import vllm meanwhile.
        workers = placement.num_actors * config.rollout_matching.vllm.actors.tensor_parallel_size
        learner.start(config, LearnerPlace(placement.transport, (ReceiverGroup(workers),), device="cuda" if placement.learner["GPU"] else "cpu"))
        pool.start()
        return learner, pool

    def start_actors(self) -> ActorPool:
        """Place and start the rollout actors alone: they serve `model.path` as it is. Raises ConfigError and RolloutError as `start` does."""
        placement = plan_placement(self._config, ray.cluster_resources(), learns=False)
        pool = self._place_actors(placement, self._reserve(placement))
        pool.start()
        return pool

    def _place_learner(self, resources: dict[str, float], group: PlacementGroup, bundle: int) -> RemoteLearner:
        actor = (
            ray.remote(LearnerShell)
            .options(
                name="learner",
                num_cpus=resources["CPU"],
                num_gpus=resources["GPU"],
                scheduling_strategy=_bundle(group, bundle),
                # Beside engines on the same cores, threads that spin while they wait for each other make a step tens of times slower.
                runtime_env={"env_vars": {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}},
            )
            .remote()
        )
        self._ends.callback(ray.kill, actor)
        return RemoteLearner(actor, self._config.timeouts)

    def _place_actors(self, placement: Placement, group: PlacementGroup) -> ActorPool:
        config = self._config
        settings = engine_settings(config, Device.CUDA if placement.actor["GPU"] else Device.CPU, placement.transport, max_images=self._max_images)
        names = [f"rollout-actor-{index}" for index in range(placement.num_actors)]
        actors = [
            ray.remote(EngineActor)
            .options(
                name=name,
                num_cpus=placement.actor["CPU"],
                num_gpus=placement.actor["GPU"],
                scheduling_strategy=_bundle(group, index),
                runtime_env={"env_vars": engine_environment(settings)},
            )
            .remote(LocalEngine(name, settings, index))
            for index, name in enumerate(names)
        ]
        timeouts = PoolTimeouts(config.timeouts.start_s, config.timeouts.generate_s, config.timeouts.sync_phase_s)
        pool = ActorPool(actors, names, timeouts, decode_batch_size=config.rollout_matching.decode_batch_size, learner_ranks=config.learner.world_size)
        self._ends.callback(pool.close)
        return pool

    def _reserve(self, placement: Placement) -> PlacementGroup:
        group = placement_group(placement.bundles, strategy="PACK")
        self._ends.callback(remove_placement_group, group)
        if not group.wait(self._config.timeouts.start_s):
            raise ConfigError(
                f"rollout_matching.vllm.actors.num_actors: the cluster has the resources, but in {self._config.timeouts.start_s:g} s (timeouts.start_s) "
                f"no nodes had room for {placement.bundles}; "
                "look at `ray status` for what other jobs hold, or lower what is asked for"
            )
        return group


def _bundle(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)


def engine_settings(config: RunConfig, device: Device, transport: str, *, max_images: int) -> EngineSettings:
    """What every engine of the run is started with."""
    vllm = config.rollout_matching.vllm
    return EngineSettings(
        model_path=config.model.path,
        dtype=config.model.dtype,
        max_model_len=vllm.max_model_len or config.global_max_length,
        max_num_seqs=config.rollout_matching.decode_batch_size,
        seed=config.training.seed,
        transport=transport,
        device=device,
        tensor_parallel_size=vllm.actors.tensor_parallel_size,
        kv_cache_memory_bytes=vllm.kv_cache_memory_bytes,
        gpu_memory_utilization=vllm.gpu_memory_utilization or 0.85,
        enforce_eager=vllm.enforce_eager,
        max_images_per_prompt=max_images,
    )
