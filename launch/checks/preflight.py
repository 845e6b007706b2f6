"""Checks everything that can be known before a run starts: the work of `rollmatch preflight`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from launch.checks.contents import PreflightReport, check_contents, require_objectives
from launch.checks.data import ImageNeeds
from launch.checks.host import compiler_problems, path_problems, version_problems
from launch.checks.learner_memory import LOADED, host_estimate, learner_estimate
from launch.checks.memory import (
    DeviceMemory,
    Estimate,
    Needs,
    device_memory,
    engine_estimate,
    sequences_in_cache,
    shared_device_estimate,
    synced_bytes,
)
from launch.checks.model_shape import ModelShape, RunSizes, is_linear
from launch.checks.proposals import less_recomputation, proposals
from launch.loggers.sink import missing_packages
from launch.processes.batch_algebra import batch_algebra
from launch.processes.engine_settings import settings_of_run
from launch.processes.placement import Placement, Resources, plan_placement
from launch.processes.ray_connection import cluster_nodes
from launch.processes.threads import describe_threads
from learner.host_memory import in_gib
from learner.model.checkpoint_folder import checkpoint_problems
from learner.model.parts import model_part, target_problem
from rollout_actors.engine.settings import family_problems
from rollout_actors.server.lease import run_name
from shared.config import RunConfig
from shared.config.derive import actor_name, environment_name, rank_name, remarks
from shared.config.job import ClusterSection
from shared.config.model import ModelSection
from shared.config.rollout import RolloutMatchingSection
from shared.config.training import LearnerSection, TrainingSection
from shared.errors import ConfigError
from shared.model_families import ModelPart
from shared.weight_sync.transports import Device

_CACHE_KEY = "rollout_matching.vllm.kv_cache_memory_bytes"


def preflight(
    config: RunConfig,
    *,
    nodes_of: Callable[[ClusterSection, float], list[Resources]] = cluster_nodes,
    memory_of: Callable[[Device], DeviceMemory | None] = device_memory,
    waits_for_servers: bool = False,
) -> PreflightReport:
    """Check everything that can be known before a run with a valid configuration starts.

    Args:
        nodes_of: returns the nodes of the Ray cluster, within a limit in seconds.
        memory_of: returns a device's memory; None if it is unknown.
        waits_for_servers: a server or a teacher that does not answer yet is not a problem, because
            a run waits for it.
    """
    report = PreflightReport()
    if config.engine_devices is not None:
        report.lines += batch_algebra(config).describe()
    report.lines += (f"note      {remark}" for remark in remarks(config))
    rollouts = config.rollout_matching
    report.collect(version_problems(rollouts))
    report.collect(missing_packages(config.telemetry.loggers))
    report.collect(_optimizer_problems(config.training))
    report.collect(path_problems(config))
    if rollouts.servers is not None:
        from launch.checks.servers import port_problems

        report.collect(port_problems(rollouts.servers.servers))

    shape = None
    folder = Path(config.model.path)
    if missing := checkpoint_problems(folder):
        report.problems += missing
        report.attempt(lambda: require_objectives(rollouts.pipeline))
    else:
        shape = check_contents(config, report)
    if shape is not None:
        report.collect(_adapter_problems(config.model, config.adapted_parts, shape))
        report.collect(position_problems(config.model, rollouts, config.global_max_length))
        if config.environment is not None and (teacher := config.environment.teacher) is not None:
            from launch.checks.servers import teacher_problems

            of_run = (config.model.path, config.global_max_length)
            report.collect(teacher_problems(teacher, *of_run, waits=waits_for_servers))

    start_s = config.timeouts.start_s
    nodes = report.attempt(lambda: nodes_of(config.cluster, start_s))
    placement = None if nodes is None else report.attempt(lambda: plan_placement(config, nodes))
    expected = None
    if nodes is not None and placement is not None:
        report.lines += _describe(config, placement, nodes)
        report.attempt(lambda: _require_offload(rollouts, config.learner, placement))
        report.collect(compiler_problems(config.model, placement.device))
        if shape is not None:
            report.collect(engine_family_problems(config.model, rollouts, placement.device))
            report.collect(_memory(config, placement, shape, memory_of, nodes, report.lines))
            images = ImageNeeds() if report.facts is None else report.facts.images
            expected = settings_of_run(config, placement, images)

    if (servers := rollouts.servers) is not None:
        from launch.checks.servers import ask_servers

        run = run_name(config.telemetry.run_dir)
        answers = report.attempt(lambda: ask_servers(servers, run, expected))
        if answers is not None:
            report.lines += answers.lines
            ignored = answers.not_up if waits_for_servers else ()
            report.problems += (text for text in answers.problems if text not in ignored)
            if answers.devices is not None:
                try:
                    report.lines += batch_algebra(config, answers.devices).describe()
                except ValueError as error:
                    report.problems.append(f"rollout_matching.decode_batch_size: {error}")
    # Two checks may find the same problem.
    report.problems = list(dict.fromkeys(report.problems))
    return report


def _require_offload(
    rollouts: RolloutMatchingSection, learner: LearnerSection, placement: Placement
) -> None:
    if not rollouts.offload.enabled:
        return
    import torch

    from learner.model.optimizer.offload import require_offload  # takes seconds

    require_offload(rollouts, learner, torch.device(placement.device))


def _optimizer_problems(training: TrainingSection) -> Iterator[str]:
    if training.optimizer == "adamw_bnb_8bit" and find_spec("bitsandbytes") is None:
        yield (
            "training.optimizer: adamw_bnb_8bit needs bitsandbytes, which is not installed; run"
            " `pip install 'rollmatch[qlora]'`, or set it to adamw_torch or adamw_offload"
        )


def _adapter_problems(
    model: ModelSection, parts: Sequence[ModelPart], shape: ModelShape
) -> Iterator[str]:
    adapter = model.adapter
    if adapter is None:
        return
    smaller_sides: dict[str, int] = {}
    layers: dict[ModelPart, set[str]] = {part: set() for part in parts}
    for name, sizes in shape.parameters.items():
        layer = name.split(".")[-2]
        if len(sizes) != 2 or not is_linear(name):
            continue
        if (part := model_part(name)) in layers:
            layers[part].add(layer)
            smaller_sides[layer] = max(min(sizes), smaller_sides.get(layer, 0))
    if problem := target_problem(adapter.target_modules, layers, model.path):
        yield problem
    if adapter.quantize is not None and find_spec("bitsandbytes") is None:
        from learner.model.adapters import NO_BITSANDBYTES

        yield NO_BITSANDBYTES
    ranks = [smaller_sides[name] for name in adapter.target_modules if name in smaller_sides]
    if ranks and adapter.rank > max(ranks):
        yield (
            f"model.adapter.rank: {adapter.rank} is more than the largest rank of an adapted"
            f" layer, {max(ranks)}; lower it"
        )


def position_problems(
    model: ModelSection, rollouts: RolloutMatchingSection, longest: int
) -> Iterator[str]:
    """Yield a problem if an engine's sequences may have more tokens than the model has positions.

    Models whose RoPE is scaled are not checked.

    Args:
        longest: `global_max_length`, which `vllm.max_model_len` replaces if it is set.
    """
    written = json.loads((Path(model.path) / "config.json").read_text())
    text = written.get("text_config", written)
    positions = text.get("max_position_embeddings")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    is_stretched = rope.get("rope_type", rope.get("type", "default")) not in ("default", "mrope")
    if not rollouts.starts_engines or positions is None or is_stretched:
        return
    key = "global_max_length"
    if rollouts.vllm.max_model_len is not None:
        key = "rollout_matching.vllm.max_model_len"
        longest = rollouts.vllm.max_model_len
    if longest > positions:
        yield (
            f"{key}: {longest} tokens are more than the {positions} positions of"
            f" {model.path} (max_position_embeddings); lower it"
        )


def engine_family_problems(
    model: ModelSection, rollouts: RolloutMatchingSection, device: Device
) -> Iterator[str]:
    """Yield a problem for each setting that engines do not support for this model family."""
    if not rollouts.starts_engines:
        return
    enable_lora = rollouts.vllm.enable_lora
    found = family_problems(model.path, device=device, dtype=model.dtype, enable_lora=enable_lora)
    keys = {"dtype": "model.dtype", "enable_lora": "rollout_matching.vllm.enable_lora"}
    for setting, text in found:
        yield f"{keys[setting]}: {text}, or rollout_matching.rollout_backend: hf"


def _describe(config: RunConfig, placement: Placement, nodes: Sequence[Resources]) -> list[str]:
    """Return lines about the placement of each process, and about the transport of weights."""
    where = "this machine"
    if config.cluster.address != "local":
        plural = "" if len(nodes) == 1 else "s"
        where = f"the cluster at {config.cluster.address}, {len(nodes)} node{plural}"
    total = Resources.sum(nodes)
    lines = [f"cluster   {where}: {total.cpus:g} CPU, {total.gpus:g} GPU"]
    plural = "" if placement.devices_per_engine == 1 else "s"
    engine_of = f"an engine of {placement.devices_per_engine} device{plural}"
    for index, engine in enumerate(placement.engines):
        resources = f"{engine.gpus:g} GPU, {engine.cpus:g} CPU"
        lines.append(f"place     {actor_name(index)}: {resources}, {engine_of}")
    in_learner = config.rollout_matching.in_learner
    in_ranks = config.rollout_matching.starts_engines and in_learner
    for rank, share in enumerate(placement.ranks):
        name = rank_name(rank, len(placement.ranks))
        beside = f", with {engine_of} next to it" if in_ranks else ""
        lines.append(f"place     {name}: {share.gpus:g} GPU, {share.cpus:g} CPU{beside}")
    lines.append(describe_threads(config, placement))
    if (environment := config.environment) is not None and in_learner:
        lines.append(f"place     {environment.id}: in the process of each learner rank")
    elif environment is not None:
        reserved = "nothing reserved, on this node"
        if environment.cpus_per_actor:
            reserved = f"{environment.cpus_per_actor:g} CPU"
        for index in range(environment.num_actors):
            lines.append(f"place     {environment_name(index)}: {reserved}, runs {environment.id}")
    if (section := config.rollout_matching.servers) is not None:
        for server in section.servers:
            lines.append(f"server    {server.base_url}, group port {server.group_port or 'any'}")
    if config.rollout_matching.backend.shares_model:
        return [*lines, "weights   are not sent: the learner's own model generates"]
    return [*lines, f"weights   travel by {placement.transport}"]


@dataclass(frozen=True, slots=True)
class _Machine:
    """The memory of this machine, with which the needs of a run are compared."""

    device: DeviceMemory
    """Memory of one GPU. If the run computes on CPU: of the machine."""
    host: DeviceMemory | None
    nodes: Sequence[Resources]
    """The nodes of the run's cluster. Only this machine's memory is known."""

    @property
    def on_cpu(self) -> bool:
        return self.device.device is Device.CPU

    def needs(self, run: RunSizes, placement: Placement) -> Needs:
        """Estimate the memory that a run's processes need on devices like this machine's."""
        transport = placement.transport
        num_ranks = len(placement.ranks)
        learner = learner_estimate(run, placement.device, transport)
        engine = None
        shared = None
        num_engine_devices = 0
        if run.rollouts.starts_engines:
            devices = placement.devices_per_engine
            num_engine_devices = devices * len(placement.engines or placement.ranks)
            engine = engine_estimate(run, devices, self.device.device, self.device.total, transport)
            if not placement.engines and not self.on_cpu:
                shared = shared_device_estimate(run, learner, engine, transport)
        synced = synced_bytes(run, placement)
        host = None
        if not self.on_cpu:
            # On several nodes it is not known how many ranks share one.
            host = host_estimate(run, num_ranks if len(self.nodes) == 1 else 1)
        return Needs(learner, num_ranks, engine, num_engine_devices, shared, synced, host)

    def host_is_too_small(self, needs: Needs) -> bool:
        """Return whether learner ranks on GPUs need more host memory; False on several nodes."""
        if needs.host is None or self.host is None or len(self.nodes) > 1:
            return False
        return needs.host.total > self.host.total

    def estimate_if_it_fits(self, shape: ModelShape, config: RunConfig) -> Estimate | None:
        """Return the memory of the learner's device with this configuration; None: too little."""
        try:
            placement = plan_placement(config, self.nodes)
            _require_offload(config.rollout_matching, config.learner, placement)
            needs = self.needs(RunSizes.of(config, shape), placement)
        except ConfigError:
            return None  # not enough GPUs for that many ranks, or shards that would be moved
        if self.device.problems(needs) or self.device.warnings(needs):
            return None
        return None if self.host_is_too_small(needs) else needs.shared or needs.learner


def _memory(
    config: RunConfig,
    placement: Placement,
    shape: ModelShape,
    memory_of: Callable[[Device], DeviceMemory | None],
    nodes: Sequence[Resources],
    lines: list[str],
) -> Iterator[str]:
    """Yield a problem for each process that needs more memory than this machine's devices have.

    Append the estimates to `lines` and, if there is too little memory, settings that need less.
    """
    sizes = RunSizes.of(config, shape)
    learner = learner_estimate(sizes, placement.device, placement.transport)
    lines.append(f"memory    {learner.describe()}")
    device = memory_of(placement.device)
    if device is None:
        lines.append(
            "memory    not compared, and engines not estimated: this machine has no GPU; run"
            " preflight on a node that has one"
        )
        return
    machine = _Machine(device, memory_of(Device.CPU), nodes)
    needs = machine.needs(sizes, placement)
    fit = None
    if needs.engine is not None:
        fit = sequences_in_cache(sizes, needs.engine, placement.devices_per_engine)
        if fit < 1:
            raise_it = "raise it, or lower global_max_length"
            yield f"{_CACHE_KEY}: the cache cannot hold one sequence; {raise_it}"
    lines += _describe_needs(config, placement, machine, needs, fit)
    if needs.host is not None and machine.host is not None and machine.host_is_too_small(needs):
        key, remedy = _smaller_host(config, needs.host)
        has = f"this machine or its container has {in_gib(machine.host.total)}"
        yield f"{key}: {needs.host.describe()}, but {has}; {remedy}"
    if len(nodes) > 1 and machine.on_cpu:
        unknown = f"it is not known on which of the {len(nodes)} nodes a process will run"
        lines.append(f"memory    not compared: {unknown}")
        return
    if len(nodes) > 1:
        lines.append("memory    compared with this machine's GPUs; other nodes may have others")
    problems = device.problems(needs)
    warnings = device.warnings(needs)
    lines += (f"warning   {warning}" for warning in warnings)
    fitting = partial(machine.estimate_if_it_fits, shape)
    if problems or warnings:
        unused = Resources.sum(nodes).gpus - Resources.sum(placement.bundles).gpus
        fits = proposals(config, fitting, idle_gpus=int(unused))
        lines += (f"memory    fits with {one.describe()}" for one in fits)
        if not fits:
            lines.append("memory    no memory-saving setting of the learner makes it fit")
    elif (faster := less_recomputation(config, fitting)) is not None:
        lines.append(f"memory    faster, and fits: {faster.describe()}")
    yield from problems


def _describe_needs(
    config: RunConfig, placement: Placement, machine: _Machine, needs: Needs, fit: int | None
) -> Iterator[str]:
    """Yield lines about each need but the learner's. `fit`: longest sequences in a KV cache."""
    if machine.on_cpu and config.model.activation_offload:
        yield "note      model.activation_offload: no effect on CPU"
    if machine.on_cpu and config.training.offloads_optimizer:
        name = config.training.optimizer
        yield f"note      training.optimizer: {name} saves nothing on CPU"
    if needs.engine is not None:
        decoded = config.rollout_matching.decode_batch_size * placement.devices_per_engine
        line = f"the cache holds {fit} of the longest sequences, {decoded} are decoded at once"
        if machine.on_cpu and config.rollout_matching.vllm.kv_cache_memory_bytes is None:
            line += f" ({_CACHE_KEY} is null: on CPU, the cache is sized for this number)"
        yield f"memory    {needs.engine.describe()}; {line}"
    if needs.shared is not None:
        yield f"memory    {needs.shared.describe()}"
    if needs.synced:
        yield f"memory    weights in shared memory during a sync: {in_gib(needs.synced)}"
    if needs.host is not None:
        yield f"memory    {needs.host.describe()}"


def _smaller_host(config: RunConfig, host: Estimate) -> tuple[str, str]:
    """Return the key to change if the learner ranks need so much host memory, and how."""
    if LOADED in host.parts:
        if config.learner.world_size > 1 and not config.learner.is_sharded:
            remedy = "lower it, or join a cluster of more nodes with cluster.address"
            return "learner.world_size", f"each rank loads the whole model; {remedy}"
        return "model.path", "choose a smaller model, or a machine with more memory"
    if not config.training.offloads_optimizer:
        return "model.activation_offload", "set it to false"
    remedy = "set it to adamw_bnb_8bit"
    if config.model.activation_offload:
        remedy += ", or model.activation_offload: false"
    return "training.optimizer", remedy
