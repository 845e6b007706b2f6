"""`python -m launch.preflight +experiment=stage2_3v1 [section.key=value ...]`: what a run would do
and whether it can, without starting an engine.

Prints what will be placed where and what it is going to need, then every problem with its remedy.
Exit status 1 where there is one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import hydra
from omegaconf import DictConfig
from rich.console import Console

from launch.checks.data import DataFacts, ImageNeeds, check_data, load_data
from launch.checks.host import path_problems, starts_engines, version_problems
from launch.checks.memory import (
    DeviceMemory,
    ModelShape,
    Needs,
    device_memory,
    engine_estimate,
    in_gib,
    learner_estimate,
    sequences_in_cache,
    shared_device_estimate,
    synced_bytes,
)
from launch.checks.servers import ask_servers, instead_of_servers, port_problems
from launch.cli import CONF, as_mapping, as_schema_overrides, explained, with_absolute_paths
from launch.runtime.batch_algebra import batch_algebra
from launch.runtime.engine_settings import settings_of_run
from launch.runtime.placement import Placement, Resources, plan_placement
from launch.runtime.ray_connection import cluster_nodes
from learner.model.loading import checkpoint_problems
from learner.model.parts import ModelPart, model_part
from rollout_actors.engine.settings import EngineSettings
from shared.config import RunConfig, load_config
from shared.config.derive import (
    actor_name,
    engine_devices,
    environment_name,
    num_b_steps,
    rank_name,
    remarks,
    rollout_servers,
)
from shared.config.pipeline import Channel
from shared.dataset import Dataset
from shared.errors import ConfigError, RecordError
from shared.weight_sync.transports import Device

if TYPE_CHECKING:
    from learner.model.loading import LoadedTokens

T = TypeVar("T")


@dataclass(slots=True)
class PreflightReport:
    """What is printed: first what was found, then what is wrong."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    facts: DataFacts | None = None
    """About the data, where they are sound."""

    def check(self, find: Callable[[], Iterable[str]]) -> None:
        """Note the problems that `find` gives, or those that it ends with."""
        self.problems += self.attempt(lambda: list(find())) or ()

    def attempt(self, make: Callable[[], T]) -> T | None:
        """What `make` returns; None where it ends with problems, which are noted."""
        try:
            return make()
        except ConfigError as error:
            self.problems += error.problems
        except RecordError as error:
            self.problems.append(str(error))
        return None


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def main(composed: DictConfig) -> None:
    console = Console(soft_wrap=True)
    with explained(console):
        findings = preflight(with_absolute_paths(load_config(as_mapping(composed))))
    for line in findings.lines:
        console.print(line, markup=False, highlight=False)
    if not findings.problems:
        console.print("ready     nothing stands in the way", highlight=False)
        return
    console.print(
        (
            f"[bold red]{len(findings.problems)} problems[/]"
            if len(findings.problems) > 1
            else "[bold red]1 problem[/]"
        ),
        highlight=False,
    )
    for problem in findings.problems:
        console.print(problem, markup=False, highlight=False)
    sys.exit(1)


def preflight(
    config: RunConfig,
    *,
    nodes_of: Callable[[RunConfig], list[Resources]] = cluster_nodes,
    memory_of: Callable[[Device], DeviceMemory | None] = device_memory,
    waits_for_servers: bool = False,
) -> PreflightReport:
    """Everything that can be known before a start. The configuration itself is sound already. What
    the cluster and this machine have, they are asked.

    With `waits_for_servers` one that does not answer yet is no problem: a run waits for it.
    """
    findings = PreflightReport()
    if engine_devices(config) is not None:
        findings.lines += batch_algebra(config).describe()
    findings.lines += (f"note      {remark}" for remark in remarks(config))
    for find in (version_problems, path_problems, port_problems):
        findings.check(partial(find, config))
    # Once: all that is asked below of the checkpoint would say the same.
    missing = checkpoint_problems(Path(config.model.path))
    findings.problems += missing
    findings.facts = None if missing else _data(config, findings)
    shape = None if missing else findings.attempt(lambda: ModelShape.read(Path(config.model.path)))
    findings.attempt(lambda: _require_objectives(config))
    if shape is not None:
        findings.check(lambda: _adapter(config, shape))
        findings.check(lambda: _positions(config))
    nodes = findings.attempt(lambda: nodes_of(config))
    placement = None if nodes is None else findings.attempt(lambda: plan_placement(config, nodes))
    expected = None
    if nodes is not None and placement is not None:
        findings.lines += _describe(config, placement, nodes)
        findings.attempt(lambda: _require_offload(config, placement))
        if shape is not None:
            findings.check(
                lambda: _memory(
                    config,
                    placement,
                    shape,
                    memory_of(placement.learner_device),
                    len(nodes),
                    findings,
                )
            )
            expected = settings_of_run(
                config, placement, ImageNeeds() if findings.facts is None else findings.facts.images
            )
    findings.check(lambda: _servers(config, expected, findings, waits=waits_for_servers))
    # What two checks run into is told once.
    findings.problems = list(dict.fromkeys(findings.problems))
    return findings


def _data(config: RunConfig, findings: PreflightReport) -> DataFacts | None:
    """What the learner would find in samples, or in the environment and the checkpoint; None where
    they are not sound.
    """
    if config.environment is not None:
        facts = findings.attempt(lambda: check_data(config))
        findings.lines += () if facts is None else facts.describe()
        findings.attempt(lambda: _load_tokens(config))
        return facts
    data = findings.attempt(lambda: load_data(config))
    if data is None:
        return None
    learnable = findings.attempt(lambda: _require_learnable(config, *data))
    if learnable is None:
        return DataFacts.of(*data)
    train, val, warnings = learnable
    findings.lines += warnings
    return DataFacts.of(train, val)


def _load_tokens(config: RunConfig) -> LoadedTokens:
    from learner.model.loading import load_tokens

    return load_tokens(config)


def _require_learnable(
    config: RunConfig, train: Dataset, val: Dataset | None
) -> tuple[Dataset, Dataset | None, list[str]]:
    """What the learner would find: coord tokens that are missing, and samples that are too long.
    Returns the samples that it keeps, and warnings of answers that will be cut."""
    from learner.held_out import Fitting, HeldOut, describe_cut_answers, require_train_lengths
    from learner.segments import PromptEncoder

    tokens = _load_tokens(config)
    fitting = require_train_lengths(
        config, train, PromptEncoder.of(config, tokens.processor), tokens.codec
    )
    answered = [fitting] if num_b_steps(config) else []
    if val is not None:
        val = HeldOut.of(config, val, tokens).samples
        answered.append(Fitting(val, []))
    longest, field_order = config.rollout_matching.max_new_tokens, config.custom.object_field_order
    found = (
        describe_cut_answers(samples, tokens.codec, max_new_tokens=longest, field_order=field_order)
        for samples in answered
    )
    return (
        fitting.samples,
        val,
        [f"warning   {warning}" for warning in found if warning is not None],
    )


def _require_offload(config: RunConfig, placement: Placement) -> None:
    import torch

    from learner.model.offload import require_offload

    require_offload(config, torch.device(placement.learner_device))


def _require_objectives(config: RunConfig) -> None:
    """Build the declared objective without a model. Raises ConfigError as that does."""
    import torch

    from learner.objectives.registry import build_objectives

    for channel in Channel:
        build_objectives(
            config.rollout_matching.pipeline, channel, torch.empty(0, dtype=torch.int64)
        )


def _adapter(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """What the checkpoint's layers say to the adapter's names and rank. The learner, which has the
    layers themselves, finds the same names.
    """
    adapter = config.model.adapter
    if adapter is None:
        return
    smaller_sides: dict[str, int] = {}
    for name, sizes in shape.parameters.items():
        layer = name.split(".")[-2]
        if (
            len(sizes) == 2
            and model_part(name) is ModelPart.LANGUAGE_MODEL
            and layer not in ("embed_tokens", "lm_head")
        ):
            smaller_sides[layer] = max(min(sizes), smaller_sides.get(layer, 0))
    if unknown := sorted(set(adapter.target_modules) - smaller_sides.keys()):
        has = (
            f"no linear layer of the language model in {config.model.path} is called"
            f" {', '.join(unknown)}"
        )
        yield f"model.adapter.target_modules: {has}; it has {', '.join(sorted(smaller_sides))}"
    highest = max(
        (smaller_sides[layer] for layer in adapter.target_modules if layer in smaller_sides),
        default=None,
    )
    if highest is not None and adapter.rank > highest:
        yield (
            f"model.adapter.rank: {adapter.rank} is more than the rank of any layer that is"
            f" adapted, {highest} at most; lower it"
        )


def _positions(config: RunConfig) -> Iterator[str]:
    """Compare the longest sequence with the positions that the model was made for: vLLM starts no
    engine for more. (Servers say their own.)
    """
    model = json.loads((Path(config.model.path) / "config.json").read_text())
    text = model.get("text_config", model)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    is_stretched = rope.get("rope_type", rope.get("type", "default")) not in ("default", "mrope")
    positions, given = (
        text.get("max_position_embeddings"),
        config.rollout_matching.vllm.max_model_len,
    )
    longest, key = (
        (config.global_max_length, "global_max_length")
        if given is None
        else (given, "rollout_matching.vllm.max_model_len")
    )
    if (
        starts_engines(config)
        and positions is not None
        and not is_stretched
        and longest > positions
    ):
        yield (
            f"{key}: {longest} tokens are more than the {positions} positions of"
            f" {config.model.path} (max_position_embeddings); lower it"
        )


def _servers(
    config: RunConfig, expected: EngineSettings | None, findings: PreflightReport, *, waits: bool
) -> Iterator[str]:
    """What the servers say, and what that makes of the run's rounds. What is expected of them, as
    `ask_servers` wants it.
    """
    section = rollout_servers(config)
    if section is None:
        return
    answers = ask_servers(section, expected, instead=instead_of_servers(config))
    findings.lines += answers.lines
    yield from (
        problem for problem in answers.problems if not (waits and problem in answers.not_up)
    )
    if answers.devices is not None:
        try:
            findings.lines += batch_algebra(config, answers.devices).describe()
        except ValueError as error:
            yield f"rollout_matching.decode_batch_size: {error}"


def _describe(config: RunConfig, placement: Placement, nodes: Sequence[Resources]) -> list[str]:
    size = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    where = (
        "this machine"
        if config.cluster.address == "local"
        else f"the cluster at {config.cluster.address}, {size}"
    )
    there = Resources.sum(nodes)
    lines = [f"cluster   {where}: {there.cpus:g} CPU, {there.gpus:g} GPU"]
    for index, engine in enumerate(placement.engines):
        lines.append(
            f"place     {actor_name(index)}: {engine.gpus:g} GPU, {engine.cpus:g} CPU, an engine of"
            f" {_devices(placement)}"
        )
    for rank, resources in enumerate(placement.ranks):
        beside = (
            f", with an engine of {_devices(placement)} beside it"
            if starts_engines(config) and not placement.engines
            else ""
        )
        lines.append(
            f"place     {rank_name(rank, len(placement.ranks))}: {resources.gpus:g} GPU,"
            f" {resources.cpus:g} CPU{beside}"
        )
    if config.environment is not None:
        reserved = (
            f"{config.environment.cpus_per_actor:g} CPU"
            if config.environment.cpus_per_actor
            else "nothing reserved, on this node"
        )
        lines += [
            f"place     {environment_name(index)}: {reserved}, runs {config.environment.id}"
            for index in range(config.environment.num_actors)
        ]
    if (section := rollout_servers(config)) is not None:
        lines += [
            f"server    {entry.base_url}, group port {entry.group_port or 'any'}"
            for entry in section.servers
        ]
    if config.rollout_matching.rollout_backend == "hf":
        return [*lines, "weights   stay where they are: the learner's own model generates"]
    return [*lines, f"weights   travel by {placement.transport}"]


def _devices(placement: Placement) -> str:
    return (
        "1 device"
        if placement.devices_per_engine == 1
        else f"{placement.devices_per_engine} devices"
    )


def _memory(
    config: RunConfig,
    placement: Placement,
    shape: ModelShape,
    there: DeviceMemory | None,
    num_nodes: int,
    findings: PreflightReport,
) -> Iterator[str]:
    """What the processes need, against the memory of this machine's devices as far as these are
    theirs.
    """
    learner = learner_estimate(config, shape, placement.learner_device, placement.transport)
    needs = Needs(learner, len(placement.ranks), synced=synced_bytes(config, placement, shape))
    findings.lines.append(f"memory    {needs.learner.describe()}")
    if there is None:
        findings.lines.append(
            "memory    not compared, and engines not estimated: this machine has no GPU to ask;"
            " preflight on a node that has one does both"
        )
        return
    if starts_engines(config):
        needs = _with_engines(config, placement, shape, there, needs)
        assert needs.engine is not None
        fit, asked = (
            sequences_in_cache(config, shape, needs.engine, placement.devices_per_engine),
            config.rollout_matching.decode_batch_size,
        )
        is_sized = (
            config.rollout_matching.vllm.kv_cache_memory_bytes is None
            and there.device is Device.CPU
        )
        sized = (
            " (rollout_matching.vllm.kv_cache_memory_bytes is null: on CPU, as many as these)"
            if is_sized
            else ""
        )
        decoded = (
            f"the cache holds {fit} of the longest sequences,"
            f" {asked * placement.devices_per_engine} are decoded{sized}"
        )
        findings.lines += [
            f"memory    {needs.engine.describe()}; {decoded}",
            *(f"memory    {shared.describe()}" for shared in (needs.shared,) if shared),
        ]
        if fit < 1:
            yield (
                "rollout_matching.vllm.kv_cache_memory_bytes: the cache cannot hold one sequence;"
                " raise it, or lower global_max_length"
            )
    if needs.synced:
        findings.lines.append(
            f"memory    weights in shared memory, for syncs on this machine: {in_gib(needs.synced)}"
        )
    if num_nodes > 1 and there.device is Device.CPU:
        findings.lines.append(
            f"memory    not compared: which of the {num_nodes} nodes a process comes to, and what"
            " the other nodes have, is not known here"
        )
        return
    if num_nodes > 1:
        findings.lines.append(
            "memory    compared with this machine's GPUs: those of the other nodes are taken to be"
            " like them"
        )
    findings.lines += (f"warning   {warning}" for warning in there.warnings(needs))
    yield from there.problems(needs)


def _with_engines(
    config: RunConfig, placement: Placement, shape: ModelShape, there: DeviceMemory, needs: Needs
) -> Needs:
    in_ranks, devices = not placement.engines, placement.devices_per_engine
    engine = engine_estimate(config, shape, devices, there.device, there.total, placement.transport)
    shared = (
        shared_device_estimate(config, shape, needs.learner, engine, placement.transport)
        if in_ranks and there.device is Device.CUDA
        else None
    )
    num_engines = len(placement.ranks) if in_ranks else len(placement.engines)
    return replace(needs, engine=engine, num_engine_devices=devices * num_engines, shared=shared)


if __name__ == "__main__":
    with explained(Console(soft_wrap=True)):
        sys.argv[1:] = as_schema_overrides(sys.argv[1:])
    main()
