"""Starts a run's processes on Ray, according to the placement, and ends them all."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from launch.checks.data import ImageNeeds
from launch.checks.host import require_vllm
from launch.processes.engine_settings import neighbour_env, settings_of_run
from launch.processes.fleet import Fleet, RolloutTimeouts
from launch.processes.learner_client import UNOBSERVED, LearnerClient, RayRanks, RunObserver
from launch.processes.placement import Placement, Resources, plan_placement
from launch.processes.ray_connection import connect, connected_nodes
from launch.processes.replacements import Replacements, RestartBudget
from launch.processes.rollout_client import RankRolloutClient, RolloutClient
from launch.processes.rounds import RoundSize
from launch.processes.threads import with_threads
from launch.run_folder.console import StartUp
from learner.actor import STOPPING, LearnerActor
from learner.model.ranks import RankTopology, ReceiverGroup
from rollout_actors.backends.calls import ServingBackend
from rollout_actors.backends.http import server_addresses
from rollout_actors.backends.stock_server import ServerEngineSpec
from rollout_actors.engine.actor import EngineActor, VllmEngineSpec
from rollout_actors.engine.settings import engine_runtime_env
from rollout_actors.server.lease import run_name
from shared.chunking import rank_share
from shared.config import RunConfig
from shared.config.algorithm import EnvironmentSection
from shared.config.derive import actor_name, environment_name, rank_name, server_name
from shared.config.rollout import EngineLocation, ServerSection
from shared.errors import ConfigError
from shared.protocols import BackendHost, MakeBackend
from shared.trajectory import ExampleCounts

if TYPE_CHECKING:  # names for readers: mypy does not look into ray
    from ray.actor import ActorClass, ActorHandle
    from ray.util.scheduling_strategies import SchedulingStrategyT

    from rollout_actors.environments.training.runner import RunnerSettings


Places = Mapping[int, PlacementGroupSchedulingStrategy]
"""Where Ray starts the process of each of `Placement.bundles`, by its index."""


class Cluster:
    """The processes of one run on Ray. On exit they end, and so does Ray if the run started it.

    Example, 3 rollout actors and 1 learner rank: one placement group of 4 bundles; bundles 0 to 2
    hold the actors, bundle 3 the rank. `Placement.groups` lists the groups.
    """

    def __init__(
        self,
        config: RunConfig,
        images: ImageNeeds,
        start_up: StartUp,
        examples: ExampleCounts | None = None,
        observer: RunObserver = UNOBSERVED,
    ) -> None:
        self._config = config
        self._images = images
        self._start_up = start_up
        self._examples = examples
        self._observer = observer
        self._budget = RestartBudget(config.rollout_matching.vllm.actors)
        self.ray_logs: Path | None = None
        """The folder of the Ray session's logs, on this node; None before the connection to Ray."""
        # A stack, so that all callbacks run even if one of them fails.
        self._ends = ExitStack()

    def __enter__(self) -> Cluster:
        """Connect to Ray. Raises ConfigError if the cluster is not found or does not start."""
        cluster = self._config.cluster
        options = {}
        if cluster.address == "local":
            options = {"include_dashboard": cluster.dashboard}
        # The clients of engines and learner report every failed call themselves.
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
        # Ray would start an idle process per CPU, which only the clients of servers could use: the
        # other actors have their own runtime_env.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        self._ends.callback(ray.shutdown)
        try:
            with self._start_up.stage("Ray"):
                session = connect(cluster, **options)
        except ConfigError:
            self._ends.close()
            raise
        self.ray_logs = session.logs
        for line in session.lines:
            self._start_up.note(line)
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.close()

    def start(self) -> tuple[LearnerClient, RolloutClient | RankRolloutClient]:
        """Place and start every learner rank and every engine; return the clients of both.

        Raises:
            ConfigError: too few resources, or a problem of model or data that the learner finds.
            RolloutError, LearnerError: a process did not start.
        """
        placement = plan_placement(self._config, connected_nodes())
        config = with_threads(self._config, placement)
        require_vllm(config.rollout_matching, placement.transport)
        places = self._reserve(placement)
        learner = self._place_learner(placement, places)
        names = ", ".join(_rank_names(placement))
        match config.rollout_matching.backend.location:
            case EngineLocation.RANKS:
                with self._start_up.stage(f"{names} with an engine"):
                    return learner, start_ranks(
                        *(config, learner, placement, self._images, self._examples), self._observer
                    )
            case EngineLocation.ACTORS:
                # Wait for the learner first: its errors about bad input are the clearest, and it
                # starts in seconds. The engines start meanwhile.
                engines = self._place_actors(placement, places, learner)
                engines.engines.begin_start()
                workers = len(placement.engines) * placement.devices_per_engine
                topologies = rank_topologies(placement, ReceiverGroup(workers))
                with self._start_up.stage(names):
                    learner.start(config, topologies, examples=self._examples)
                self._start(engines)
            case EngineLocation.SERVERS:
                # Wait for the servers first, because only they know how many devices receive.
                section = config.rollout_matching.servers
                assert section is not None
                engines = self._reach_servers(placement, section, learner)
                self._start(engines)
                receivers = [
                    ReceiverGroup(devices, server.group_port)
                    for devices, server in zip(engines.devices, section.servers, strict=True)
                ]
                topologies = rank_topologies(placement, *receivers)
                with self._start_up.stage(names):
                    learner.start(config, topologies, examples=self._examples)
        if config.environment is not None:
            self._start_environments(config.environment, engines, placement)
        return learner, engines

    def start_actors(self) -> RolloutClient:
        """Place and start only the rollout actors, which load `model.path`. Raises like `start`."""
        placement = plan_placement(self._config, connected_nodes(), learns=False)
        require_vllm(self._config.rollout_matching, placement.transport)
        engines = self._place_actors(placement, self._reserve(placement))
        self._start(engines)
        return engines

    def _reserve(self, placement: Placement) -> Places:
        with self._start_up.stage("room in the cluster"):
            return reserve(placement, self._config.timeouts.start_s, self._ends)

    def _place_learner(self, placement: Placement, places: Places) -> LearnerClient:
        # If engines share the cores, spinning threads make a step tens of times slower.
        passive = {"OMP_WAIT_POLICY": "PASSIVE"}
        runtime_env = neighbour_env(self._config, placement, self._images, **passive)
        shell = ray.remote(concurrency_groups={STOPPING: 1})(LearnerActor)
        actors = []
        for rank, name in enumerate(_rank_names(placement)):
            where = places[len(placement.engines) + rank]  # engines come first
            resources = placement.ranks[rank]
            actors.append(self._create(shell, name, resources, where, runtime_env))
        learner = LearnerClient(RayRanks(actors), self._config.timeouts, self._observer)
        self._ends.callback(learner.close)
        return learner

    def _place_actors(
        self, placement: Placement, places: Places, learner: LearnerClient | None = None
    ) -> RolloutClient:
        settings = settings_of_run(self._config, placement, self._images)
        runtime_env = engine_runtime_env(settings)
        shell = ray.remote(EngineActor)
        names = [actor_name(index) for index in range(len(placement.engines))]
        run = uuid.uuid4().hex

        def create(index: int, number: int = 1) -> ActorHandle:
            spec = VllmEngineSpec(names[index], settings, index, f"{run}-{index}")
            name = _ray_name(names[index], number)
            where = places[index]
            resources = placement.engines[index]
            is_first = number == 1
            return self._create(shell, name, resources, where, runtime_env, spec, is_first=is_first)

        actors = {name: create(index) for index, name in enumerate(names)}
        timeouts = RolloutTimeouts.for_actors(self._config.timeouts)
        replacements = None
        # Without a learner a new actor would wait for a weight sync that never comes.
        if learner is not None:
            replacements = self._replacements(create, names, timeouts)
        return self._engines(actors, timeouts, learner, replacements)

    def _reach_servers(
        self, placement: Placement, section: ServerSection, learner: LearnerClient
    ) -> RolloutClient:
        """Create an actor for each server: the server's client, which reserves no CPU and no GPU.

        Return the client of these actors.
        """
        settings = settings_of_run(self._config, placement, self._images)
        run = run_name(self._config.telemetry.run_dir, is_start=True)
        addresses = server_addresses(section, run)
        nothing = Resources(cpus=0.0, gpus=0.0)
        names = [server_name(index) for index in range(len(addresses))]
        shell = ray.remote(EngineActor)

        def create(index: int, number: int = 1) -> ActorHandle:
            spec = ServerEngineSpec(names[index], addresses[index], index, settings)
            name = _ray_name(names[index], number)
            # On this node, as in preflight: on other nodes 127.0.0.1 is another machine.
            return self._create(shell, name, nothing, here(), {}, spec, is_first=number == 1)

        actors = {name: create(index) for index, name in enumerate(names)}
        can_return = self._config.rollout_matching.vllm.actors.max_restarts > 0
        timeouts = RolloutTimeouts.for_servers(section, self._config.timeouts, watched=can_return)
        urls = [address.base_url for address in addresses]
        replacements = self._replacements(create, names, timeouts, servers=urls)
        return self._engines(actors, timeouts, learner, replacements, asks_next=True)

    def _replacements(
        self,
        create: Callable[[int, int], ActorHandle],
        names: Sequence[str],
        timeouts: RolloutTimeouts,
        *,
        servers: Sequence[str] | None = None,
    ) -> Replacements | None:
        """Return what replaces lost actors; None if the run permits no replacements."""
        if self._config.rollout_matching.vllm.actors.max_restarts == 0:
            return None
        start, check = timeouts.start, timeouts.start_check
        return Replacements(create, names, start, self._budget, check=check, servers=servers)

    def _engines(
        self,
        actors: dict[str, ActorHandle],
        timeouts: RolloutTimeouts,
        learner: LearnerClient | None,
        replacements: Replacements | None,
        *,
        asks_next: bool = False,
    ) -> RolloutClient:
        fleet = Fleet(
            list(actors.values()),
            list(actors),
            timeouts,
            asks_next_on_failure=asks_next,
            replacements=replacements,
        )
        config = self._config
        size = RoundSize(
            config.rollout_matching.decode_batch_size, learner_ranks=config.learner.world_size
        )
        engines = RolloutClient(fleet, size, learner=learner, observer=self._observer)
        self._ends.callback(engines.close)
        return engines

    def _start_environments(
        self, section: EnvironmentSection, engines: RolloutClient, placement: Placement
    ) -> None:
        """Start the environment actors, and make the engines generate through them."""
        # Imported here, because most runs have no environment, and it imports openai.
        from rollout_actors.environments.training.actor import EnvironmentActor

        config = self._config
        assert self._examples is not None, "examples are counted before the start"
        # They may run on nodes without engines, which have no warm Python to fork from.
        where: SchedulingStrategyT = "SPREAD"
        runtime_env: dict[str, object] = {"env_vars": {"HF_HUB_OFFLINE": "1"}}
        if section.cpus_per_actor == 0:
            where = here()
            threads = os.environ.get("OMP_NUM_THREADS", "1")
            runtime_env = neighbour_env(config, placement, self._images, OMP_NUM_THREADS=threads)
        resources = Resources(cpus=section.cpus_per_actor, gpus=0.0)
        shell = ray.remote(EnvironmentActor)
        examples = self._examples
        num_actors = num_environments(section, examples)
        names = [environment_name(index) for index in range(num_actors)]

        def create(index: int, number: int = 1) -> ActorHandle:
            settings = runner_settings(config, section, engines.devices, examples, index)
            fleet = engines.engines
            asked = (fleet.actors, fleet.names, fleet.timeouts.generate, fleet.replaces_lost)
            name = _ray_name(names[index], number)
            return self._create(
                *(shell, name, resources, where, runtime_env, names[index], settings, *asked),
                is_first=number == 1,
            )

        actors = [create(index) for index in range(num_actors)]
        timeouts = RolloutTimeouts.for_environments(config.timeouts, section.teacher)
        replacements = self._replacements(create, names, timeouts)
        environments = Fleet(actors, names, timeouts, replacements=replacements)
        self._ends.callback(environments.close)
        self._start(environments)
        engines.generate_through(
            environments,
            group_size=section.rollouts_per_example,
            in_one_round=examples.scores_at_once,
        )

    def _start(self, actors: RolloutClient | Fleet) -> None:
        with self._start_up.stage(", ".join(actors.names)):
            actors.start()

    def _create(
        self,
        shell: ActorClass,
        name: str,
        resources: Resources,
        where: SchedulingStrategyT,
        runtime_env: dict[str, object],
        *arguments: object,
        is_first: bool = True,
    ) -> ActorHandle:
        """Create a Ray actor of `shell`, with the scheduling strategy `where`.

        If `is_first`, the actor is killed when the cluster ends. Otherwise the actor's client kills
        it.
        """
        actor = shell.options(
            name=name,
            num_cpus=resources.cpus,
            num_gpus=resources.gpus,
            scheduling_strategy=where,
            runtime_env=runtime_env,
        ).remote(*arguments)
        if is_first:
            # Callbacks run in reverse order: a later actor would be killed before its client's
            # `close` lets it end by itself.
            self._ends.callback(ray.kill, actor)
        return actor


def reserve(placement: Placement, start_s: float, ends: ExitStack) -> Places:
    """Reserve the placement's resources on Ray until `ends` is closed.

    `start_s` is timeouts.start_s. Raises ConfigError if nodes have no room for so long.
    """
    places: dict[int, PlacementGroupSchedulingStrategy] = {}
    ends_s = time.monotonic() + start_s
    names = [actor_name(index) for index in range(len(placement.engines))] + _rank_names(placement)
    for strategy, indices in placement.groups:
        bundles = [placement.bundles[index] for index in indices]
        # Ray's dashboard shows the name.
        name = " to ".join(dict.fromkeys((names[indices[0]], names[indices[-1]])))
        amounts = [bundle.named() for bundle in bundles]
        group = placement_group(amounts, strategy=strategy, name=name)
        ends.callback(remove_placement_group, group)
        if not group.wait(max(0.0, ends_s - time.monotonic())):
            sizes = [f"{bundle.gpus:g} GPU and {bundle.cpus:g} CPU" for bundle in bundles]
            key = placement.key
            where = "each on one node"
            if strategy == "STRICT_PACK":
                key = "learner.shard_size"
                where = "all on one node"
            raise ConfigError(
                f"{key}: the cluster has the resources, but in {start_s:g} s (timeouts.start_s) no"
                f" nodes had room for {', '.join(sizes)}, {where}; check `ray status` for what"
                " other jobs hold, or lower the key"
            )
        for number, index in enumerate(indices):
            places[index] = PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=number
            )
    return places


def num_environments(section: EnvironmentSection, examples: ExampleCounts) -> int:
    """Return the number of environment actors: one if a step's rollouts are scored together."""
    return 1 if examples.scores_at_once else section.num_actors


def runner_settings(
    config: RunConfig,
    section: EnvironmentSection,
    devices: Sequence[int],
    examples: ExampleCounts,
    index: int,
) -> RunnerSettings:
    """Return the settings of environment actor `index`.

    `devices`: number of devices of each engine.
    """
    from rollout_actors.environments.training.runner import RunnerSettings
    from rollout_actors.environments.training.teacher import TeacherSettings

    # All actors together send as many requests as one engine decodes at a time.
    room = config.rollout_matching.decode_batch_size * min(devices)
    return RunnerSettings(
        env_id=section.id,
        env_args=section.args,
        working_dir=str(Path.cwd()),
        examples=examples,
        num_held_out=section.num_eval_examples,
        model_path=config.model.path,
        max_model_len=config.global_max_length,
        max_under_way=len(rank_share(room, num_environments(section, examples), index)),
        max_concurrent_scoring=section.max_concurrent_scoring,
        rollout_timeout_s=section.rollout_timeout_s,
        scoring_timeout_s=section.scoring_timeout_s,
        max_images=section.max_images_per_prompt,
        tool_parser=section.tool_call_parser,
        chat_template_args=section.chat_template_args,
        system_prompt=section.system_prompt,
        keeps_messages=config.telemetry.rollouts,
        teacher=TeacherSettings.from_section(section.teacher) if section.teacher else None,
    )


def here() -> NodeAffinitySchedulingStrategy:
    """Return the Ray scheduling strategy that keeps an actor on the driver's node."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def _rank_names(placement: Placement) -> list[str]:
    return [rank_name(rank, len(placement.ranks)) for rank in range(len(placement.ranks))]


def _ray_name(name: str, number: int) -> str:
    """Return Ray's name of an actor: a replacement is numbered, as the old name is still taken."""
    return name if number == 1 else f"{name}.{number}"


def rank_topologies(placement: Placement, *receivers: ReceiverGroup) -> list[RankTopology]:
    """Return each learner rank's place in weight syncs; only rank 0 sends to `receivers`."""
    return [
        RankTopology(
            placement.transport,
            receivers if rank == 0 else (),
            device=placement.device,
            rank=rank,
            world_size=len(placement.ranks),
        )
        for rank in range(len(placement.ranks))
    ]


def start_ranks(
    config: RunConfig,
    learner: LearnerClient,
    placement: Placement,
    images: ImageNeeds,
    examples: ExampleCounts | None,
    observer: RunObserver,
) -> RankRolloutClient:
    """Start a learner whose ranks generate their own rollouts; return the client for rollouts."""
    timeouts = RolloutTimeouts.for_ranks(config.timeouts, config.environment)
    # One wait for both: a rank loads its engine after its model, on the same device.
    learner.start(
        config,
        rank_topologies(placement),
        make_backend(config, placement, images, examples),
        examples=examples,
        limit=timeouts.start,
    )
    size = RoundSize(
        config.rollout_matching.decode_batch_size,
        learner_ranks=config.learner.world_size,
        group_size=config.group_size,
        in_one_round=examples is not None and examples.scores_at_once,
    )
    devices = placement.devices_per_engine
    return RankRolloutClient(learner, timeouts, size, devices_per_rank=devices, observer=observer)


MakeEngine = Callable[[BackendHost], ServingBackend]


def _hf(config: RunConfig, *_: object) -> MakeEngine:
    from rollout_actors.backends.hf import HFBackend

    section = config.rollout_matching
    return partial(
        HFBackend,
        decode_batch_size=section.decode_batch_size,
        repeat_guard=section.repeat_terminate.settings(),
    )


def _colocated(config: RunConfig, placement: Placement, images: ImageNeeds) -> MakeEngine:
    from rollout_actors.backends.colocate import ColocatedBackend

    settings = settings_of_run(config, placement, images)
    return partial(ColocatedBackend, settings=settings, sleep=config.rollout_matching.vllm.sleep)


IN_RANKS: dict[str, Callable[[RunConfig, Placement, ImageNeeds], MakeEngine]] = {
    "hf": _hf,
    "colocate": _colocated,
}
"""By backend name, a function that returns the factory of a learner rank's engine."""


def make_backend(
    config: RunConfig, placement: Placement, images: ImageNeeds, examples: ExampleCounts | None
) -> MakeBackend:
    """Return the factory of the backend that generates rollouts in a learner rank's process.

    The backend is an engine, or an environment that calls an engine. `examples` are the example
    counts of the environment.
    """
    make_engine = IN_RANKS[config.rollout_matching.backend_name](config, placement, images)
    if config.environment is None:
        return make_engine
    from rollout_actors.environments.training.beside import EnvironmentSpec

    assert examples is not None, "examples are counted before the start"
    devices = (placement.devices_per_engine,)
    settings = runner_settings(config, config.environment, devices, examples, 0)
    if examples.scores_at_once:
        # The rank's engine waits for all calls of the round, and cuts them into batches itself.
        num_rollouts = max(config.raw_rollouts_per_step, examples.held_out)
        settings = replace(settings, max_under_way=max(settings.max_under_way, num_rollouts))
    return EnvironmentSpec(make_engine, settings)
