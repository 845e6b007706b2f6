"""Where a run lives: Ray, the placement of engines and learner ranks, and the end of all its
processes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from launch.checks.data import ImageNeeds
from launch.checks.host import require_vllm
from launch.checks.servers import instead_of_servers
from launch.runtime.engine_settings import neighbour_env, settings_of_run
from launch.runtime.learner_client import RayLearner
from launch.runtime.placement import Placement, Resources, plan_placement
from launch.runtime.ray_connection import connect, connected_nodes
from launch.runtime.rollout_client import RankRolloutClient, RolloutClient, RolloutTimeouts
from launch.runtime.start_up import StartUp
from learner.actor import STOPPING, LearnerActor
from learner.model.ranks import RankTopology, ReceiverGroup
from rollout_actors.backends.http import server_addresses
from rollout_actors.backends.stock_server import ServerEngineSpec
from rollout_actors.engine.actor import EngineActor, VllmEngineSpec
from rollout_actors.engine.settings import engine_runtime_env
from rollout_actors.environments.training.actor import EnvironmentActor
from rollout_actors.environments.training.runner import RunnerSettings
from shared.chunking import rank_share
from shared.config import RunConfig
from shared.config.algorithm import EnvironmentSection
from shared.config.derive import (
    EngineLocation,
    actor_name,
    engines_in,
    environment_name,
    rank_name,
    rollout_servers,
    server_name,
)
from shared.config.rollout import ServerSection
from shared.errors import ConfigError
from shared.protocols import MakeBackend
from shared.trajectory import ExampleCounts


class Cluster:
    """One run's processes. On exit, good or bad, all of them end; a cluster that was running before
    the run is left running.
    """

    def __init__(
        self,
        config: RunConfig,
        images: ImageNeeds,
        start_up: StartUp,
        examples: ExampleCounts | None = None,
    ) -> None:
        """`start_up` hears of every stage; `examples` are those of the run's environment, where it
        has one.
        """
        self._config = config
        self._start_up = start_up
        self._images, self._examples = images, examples
        self._ends = ExitStack()

    def __enter__(self) -> Cluster:
        """Raises ConfigError when there is no such cluster, or none can be started."""
        cluster = self._config.cluster
        own = (
            {}
            if cluster.address != "local"
            else {
                "include_dashboard": cluster.dashboard,
                "_temp_dir": cluster.temp_dir and str(cluster.temp_dir),
            }
        )
        # Pool and learner report every failed call themselves.
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
        self._ends.callback(ray.shutdown)
        try:
            with self._start_up.stage("Ray"):
                connect(self._config, **own)
        except ConfigError:
            self._ends.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A stack, so that an end that fails does not keep the others from theirs.
        self._ends.close()

    def start(self) -> tuple[RayLearner, RolloutClient]:
        """Place and start every learner rank and every engine.

        Raises:
            ConfigError: too few resources, or what the learner finds wrong with model and data.
            RolloutError, LearnerError: a process that did not come up.
        """
        placement = plan_placement(self._config, connected_nodes())
        require_vllm(self._config, placement.transport)
        group = self._reserve(placement)
        learner = self._place_learner(placement, group)
        match engines_in(self._config):
            case EngineLocation.RANKS:
                return learner, self._start_in_ranks(placement, learner)
            case EngineLocation.ACTORS:
                return learner, self._start_with_actors(placement, group, learner)
            case EngineLocation.SERVERS:
                return learner, self._start_with_servers(placement, learner)

    def _start_in_ranks(self, placement: Placement, learner: RayLearner) -> RolloutClient:
        """One wait for both: a rank loads its engine when it has loaded its model, whose device the
        two share.
        """
        config = self._config
        with self._start_up.stage(f"{_who(placement)} with an engine"):
            learner.start(
                config, _places(placement, ()), _make_backend(config, placement, self._images)
            )
        size, devices = config.rollout_matching.decode_batch_size, placement.devices_per_engine
        return RankRolloutClient(
            learner,
            config.timeouts,
            num_ranks=config.learner.world_size,
            devices_per_rank=devices,
            decode_batch_size=size,
        )

    def _start_with_actors(
        self, placement: Placement, group: PlacementGroup, learner: RayLearner
    ) -> RolloutClient:
        """The learner knows most about bad input and needs seconds, so it is waited for first; the
        engines, created before that, start meanwhile.
        """
        pool = self._place_actors(placement, group)
        workers = len(placement.engines) * placement.devices_per_engine
        with self._start_up.stage(_who(placement)):
            learner.start(
                self._config, _places(placement, (ReceiverGroup(workers),)), examples=self._examples
            )
        self._start(pool)
        return self._with_environments(pool, placement)

    def _start_with_servers(self, placement: Placement, learner: RayLearner) -> RolloutClient:
        """The servers are waited for first: only they know how many devices are going to receive
        what the learner sends.
        """
        section = rollout_servers(self._config)
        assert section is not None
        pool = self._reach_servers(placement, section)
        self._start(pool)
        receivers = tuple(
            ReceiverGroup(devices, server.group_port)
            for devices, server in zip(pool.devices, section.servers, strict=True)
        )
        with self._start_up.stage(_who(placement)):
            learner.start(self._config, _places(placement, receivers), examples=self._examples)
        return self._with_environments(pool, placement)

    def start_actors(self) -> RolloutClient:
        """Place and start the rollout actors alone: they serve `model.path` as it is. Raises
        ConfigError and RolloutError as `start` does.
        """
        placement = plan_placement(self._config, connected_nodes(), learns=False)
        require_vllm(self._config, placement.transport)
        pool = self._place_actors(placement, self._reserve(placement))
        self._start(pool)
        return pool

    def _place_learner(self, placement: Placement, group: PlacementGroup) -> RayLearner:
        actors = [
            self._create(
                ray.remote(concurrency_groups={STOPPING: 1})(LearnerActor),
                (),
                name=rank_name(rank, len(placement.ranks)),
                resources=resources,
                # Engines come first in the group.
                where=_bundle(group, len(placement.engines) + rank),
                # Beside engines on the same cores, threads that spin while they wait for each other
                # make a step tens of times slower.
                runtime_env=neighbour_env(
                    self._config, placement, self._images, OMP_WAIT_POLICY="PASSIVE"
                ),
            )
            for rank, resources in enumerate(placement.ranks)
        ]
        learner = RayLearner(actors, self._config.timeouts)
        self._ends.callback(learner.close)
        return learner

    def _place_actors(self, placement: Placement, group: PlacementGroup) -> RolloutClient:
        config = self._config
        settings = settings_of_run(config, placement, self._images)
        names = [actor_name(index) for index in range(len(placement.engines))]
        actors = [
            self._create(
                ray.remote(EngineActor),
                (VllmEngineSpec(name, settings, index),),
                name=name,
                resources=resources,
                where=_bundle(group, index),
                runtime_env=engine_runtime_env(settings),
            )
            for index, (name, resources) in enumerate(zip(names, placement.engines, strict=True))
        ]
        return self._pool(
            actors, names, RolloutTimeouts.for_actors(config.timeouts), asks_next_on_failure=False
        )

    def _with_environments(self, engines: RolloutClient, placement: Placement) -> RolloutClient:
        """The engines themselves where rollouts are of samples; else behind actors that
        environments run in.
        """
        config, section = self._config, self._config.environment
        if section is None:
            return engines
        assert self._examples is not None, "they are counted before the start"
        names = [environment_name(index) for index in range(section.num_actors)]
        if section.cpus_per_actor == 0:
            where: Any = here()
            runtime_env = neighbour_env(
                config,
                placement,
                self._images,
                OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"),
            )
        else:  # perhaps on nodes without engines, where there is no server to fork from
            where, runtime_env = "SPREAD", {"env_vars": {"HF_HUB_OFFLINE": "1"}}
        actors = [
            self._create(
                ray.remote(EnvironmentActor),
                (
                    name,
                    runner_settings(config, section, engines.devices, self._examples, index),
                    engines.actors,
                    engines.names,
                    engines.timeouts.generate,
                ),
                name=name,
                resources=Resources(cpus=section.cpus_per_actor, gpus=0.0),
                where=where,
                runtime_env=runtime_env,
            )
            for index, name in enumerate(names)
        ]
        # What bounds a round is what the engines take.
        environments = RolloutClient(
            actors, names, RolloutTimeouts.for_environments(config.timeouts)
        )
        self._ends.callback(environments.close)
        self._start(environments)
        engines.generate_through(environments, group_size=section.rollouts_per_example)
        return engines

    def _reach_servers(self, placement: Placement, section: ServerSection) -> RolloutClient:
        """An actor for each server that was launched elsewhere: it needs a process to wait in, and
        no resources.

        They stay on this node, from which preflight asks: a server's address may mean another
        machine elsewhere, and 127.0.0.1 always does. Raises ConfigError where the token is not
        there.
        """
        names = [server_name(index) for index in range(len(section.servers))]
        settings = settings_of_run(self._config, placement, self._images)
        addresses = server_addresses(section, instead_of_servers(self._config))
        specs = [
            ServerEngineSpec(name, address, index, settings)
            for index, (name, address) in enumerate(zip(names, addresses, strict=True))
        ]
        nothing = Resources(cpus=0.0, gpus=0.0)
        actors = [
            self._create(
                ray.remote(EngineActor),
                (spec,),
                name=spec.name,
                resources=nothing,
                where=here(),
                runtime_env={},
            )
            for spec in specs
        ]
        return self._pool(
            actors,
            names,
            RolloutTimeouts.for_servers(section, self._config.timeouts),
            asks_next_on_failure=True,
        )

    def _pool(
        self,
        actors: list[Any],
        names: list[str],
        timeouts: RolloutTimeouts,
        *,
        asks_next_on_failure: bool,
    ) -> RolloutClient:
        size, ranks = (
            self._config.rollout_matching.decode_batch_size,
            self._config.learner.world_size,
        )
        pool = RolloutClient(
            actors,
            names,
            timeouts,
            decode_batch_size=size,
            learner_ranks=ranks,
            asks_next_on_failure=asks_next_on_failure,
        )
        self._ends.callback(pool.close)
        return pool

    def _start(self, pool: RolloutClient) -> None:
        with self._start_up.stage(", ".join(pool.names)):
            pool.start()

    def _create(
        self,
        shell: Any,
        arguments: tuple[Any, ...],
        *,
        name: str,
        resources: Resources,
        where: Any,
        runtime_env: dict[str, Any],
    ) -> Any:
        """`shell` is what `ray.remote` made of a class; `where` is the strategy by which Ray
        chooses its node.
        """
        actor = shell.options(
            name=name,
            num_cpus=resources.cpus,
            num_gpus=resources.gpus,
            scheduling_strategy=where,
            runtime_env=runtime_env,
        ).remote(*arguments)
        self._ends.callback(ray.kill, actor)
        return actor

    def _reserve(self, placement: Placement) -> PlacementGroup:
        group = placement_group([bundle.named() for bundle in placement.bundles], strategy="PACK")
        self._ends.callback(remove_placement_group, group)
        with self._start_up.stage("room in the cluster"):
            is_there = group.wait(self._config.timeouts.start_s)
        if not is_there:
            asked = ", ".join(
                f"{bundle.gpus:g} GPU and {bundle.cpus:g} CPU" for bundle in placement.bundles
            )
            raise ConfigError(
                f"{placement.key}: the cluster has the resources, but in"
                f" {self._config.timeouts.start_s:g} s (timeouts.start_s) no nodes had room for"
                f" {asked}, each on one node; check `ray status` for what other jobs hold, or lower"
                " what is asked for"
            )
        return group


def runner_settings(
    config: RunConfig,
    section: EnvironmentSection,
    devices: Sequence[int],
    examples: ExampleCounts,
    index: int,
) -> RunnerSettings:
    """Of the environment actor of this index, with engines of so many devices each. Together they
    fill an engine, the first ones with a request more.
    """
    room = config.rollout_matching.decode_batch_size * min(devices)
    return RunnerSettings(
        env_id=section.id,
        env_args=section.args,
        working_dir=str(Path.cwd()),
        examples=examples,
        num_held_out=section.num_eval_examples,
        model_path=config.model.path,
        max_model_len=config.global_max_length,
        max_under_way=len(rank_share(room, section.num_actors, index)),
        max_concurrent_scoring=section.max_concurrent_scoring,
        rollout_timeout_s=section.rollout_timeout_s,
        scoring_timeout_s=section.scoring_timeout_s,
        max_images=section.max_images_per_prompt,
        tool_parser=section.tool_call_parser,
        chat_template_args=section.chat_template_args,
        keeps_messages=config.telemetry.rollouts,
    )


def here() -> NodeAffinitySchedulingStrategy:
    """The driver's node and no other."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def _who(placement: Placement) -> str:
    """Return the names of the learner's ranks."""
    return ", ".join(rank_name(rank, len(placement.ranks)) for rank in range(len(placement.ranks)))


def _bundle(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=index
    )


def _places(placement: Placement, receivers: tuple[ReceiverGroup, ...]) -> list[RankTopology]:
    return [
        RankTopology(
            placement.transport,
            receivers if rank == 0 else (),
            device=placement.learner_device,
            rank=rank,
            world_size=len(placement.ranks),
        )
        for rank in range(len(placement.ranks))
    ]


def _make_backend(config: RunConfig, placement: Placement, images: ImageNeeds) -> MakeBackend:
    """The backend that lives in every learner rank."""
    if config.rollout_matching.rollout_backend == "hf":
        from rollout_actors.backends.hf import HFBackendSpec

        return HFBackendSpec(
            config.rollout_matching.decode_batch_size,
            config.rollout_matching.repeat_terminate.settings(),
        )
    from rollout_actors.backends.colocate import ColocatedSpec

    return ColocatedSpec(
        settings_of_run(config, placement, images), sleep=config.rollout_matching.vllm.sleep
    )
