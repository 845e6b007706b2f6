"""`python -m launch.preflight +experiment=stage2_3v1 [section.key=value ...]`: what a run would do and whether it can, without starting an engine.

Prints what will be placed where and what it is going to need, then every problem with its remedy. Exit status 1 where there is one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import hydra
from omegaconf import DictConfig
from rich.console import Console

from launch.command import explained, with_absolute_paths
from launch.composition import CONF, as_mapping, as_schema_overrides
from launch.machine import Needs, cluster_nodes, device_memory
from launch.memory_estimate import ModelShape, engine_estimate, learner_estimate, sequences_in_cache, shared_device_estimate
from launch.path_checks import path_problems
from launch.placement import Placement, Resources, plan_placement
from launch.run_engines import settings_of_run
from launch.server_checks import ask_servers, port_problems
from launch.version_checks import version_problems
from rollout_actors.engine_settings import Device
from shared.config import RunConfig, load_config
from shared.config.derive import batch_algebra, engine_devices, rank_name, remarks, rollout_servers
from shared.errors import ConfigError, RecordError


@dataclass(slots=True)
class Findings:
    """What is printed: first what was found, then what is wrong."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    max_images: int = 1
    """Of a sample of the data; 1 where they could not be read."""
    max_image_pixels: int = 0
    """Of an image of the data; 0 where they could not be read."""


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
    console.print(f"[bold red]{len(findings.problems)} problems[/]" if len(findings.problems) > 1 else "[bold red]1 problem[/]", highlight=False)
    for problem in findings.problems:
        console.print(problem, markup=False, highlight=False)
    sys.exit(1)


def preflight(config: RunConfig) -> Findings:
    """Everything that can be known before a start. The configuration itself is sound already."""
    findings = Findings()
    if engine_devices(config) is not None:
        findings.lines += batch_algebra(config).describe()
    findings.lines += (f"note      {remark}" for remark in remarks(config))
    for find in (version_problems, path_problems, port_problems, partial(_data_problems, findings)):
        findings.problems += _all_of(find, config)
    placement = _placement(config, findings)
    findings.problems += _all_of(lambda config: _servers(config, placement, findings), config)
    return findings


def _all_of(find: Callable[[RunConfig], Iterable[str]], config: RunConfig) -> list[str]:
    """The problems of one check, raised or returned."""
    try:
        return list(find(config))
    except ConfigError as error:
        return list(error.problems)
    except RecordError as error:
        return [str(error)]


def _data_problems(findings: Findings, config: RunConfig) -> Iterable[str]:
    """As `launch.train` finds them, and what the learner would: coord tokens, and samples that are too long."""
    from launch.data_checks import check_data
    from learner.heldout import HeldOut
    from learner.lengths import require_lengths
    from learner.loading import load_tokens
    from learner.samples import load_samples
    from learner.segments import PromptEncoder
    from shared.config.derive import num_b_steps

    facts = check_data(config)
    findings.max_images, findings.max_image_pixels = facts.max_images, facts.max_image_pixels
    tokens = load_tokens(config)
    encoder = PromptEncoder(tokens.processor, system_prompt=config.data.system_prompt, user_prompt=config.data.user_prompt)
    longest = config.rollout_matching.max_new_tokens if num_b_steps(config) else 0
    require_lengths(load_samples(config, config.data.train), encoder, tokens.codec, max_new_tokens=longest, global_max_length=config.global_max_length)
    if config.data.val is not None:
        HeldOut.of(config, load_samples(config, config.data.val), tokens)
    return []


def _placement(config: RunConfig, findings: Findings) -> Placement | None:
    """What will be placed where, what it needs there, and whether that is there. None: that cannot be said."""
    try:
        nodes = cluster_nodes(config)
        placement = plan_placement(config, nodes)
        shape = ModelShape.read(Path(config.model.path))
    except ConfigError as error:
        findings.problems += error.problems
        return None
    findings.lines += _describe(config, placement, nodes)
    findings.problems += _all_of(lambda config: _offload(config, placement), config)
    findings.problems += _memory(config, placement, shape, findings)
    return placement


def _servers(config: RunConfig, placement: Placement | None, findings: Findings) -> Iterable[str]:
    """What the servers say, and what that makes of the run's rounds."""
    section = rollout_servers(config)
    if section is None:
        return
    settings = None if placement is None else settings_of_run(config, placement, max_images=findings.max_images)
    answers = ask_servers(section, settings, max_image_pixels=findings.max_image_pixels)
    findings.lines += answers.lines
    yield from answers.problems
    if answers.devices is not None:
        try:
            findings.lines += batch_algebra(config, answers.devices).describe()
        except ValueError as error:
            yield f"rollout_matching.decode_batch_size: {error}"


def _offload(config: RunConfig, placement: Placement) -> Iterable[str]:
    import torch

    from learner.offload import require_offload

    require_offload(config, torch.device(placement.learner_device))
    return []


def _describe(config: RunConfig, placement: Placement, nodes: Sequence[Resources]) -> list[str]:
    size = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    where = "this machine" if config.cluster.address == "local" else f"the cluster at {config.cluster.address}, {size}"
    there = Resources.sum(nodes)
    lines = [f"cluster   {where}: {there.cpus:g} CPU, {there.gpus:g} GPU"]
    for index, engine in enumerate(placement.engines):
        lines.append(f"place     rollout-actor-{index}: {engine.gpus:g} GPU, {engine.cpus:g} CPU, an engine of {_devices(placement)}")
    for rank, resources in enumerate(placement.ranks):
        beside = f", with an engine of {_devices(placement)} beside it" if _starts_engines(config) and not placement.engines else ""
        lines.append(f"place     {rank_name(rank, len(placement.ranks))}: {resources.gpus:g} GPU, {resources.cpus:g} CPU{beside}")
    if (section := rollout_servers(config)) is not None:
        lines += [f"server    {entry.base_url}, group port {entry.group_port or 'any'}" for entry in section.servers]
    if config.rollout_matching.rollout_backend == "hf":
        return [*lines, "weights   stay where they are: the learner's own model generates"]
    return [*lines, f"weights   travel by {placement.transport}"]


def _starts_engines(config: RunConfig) -> bool:
    return config.rollout_matching.rollout_backend == "vllm" and rollout_servers(config) is None


def _devices(placement: Placement) -> str:
    return "1 device" if placement.devices_per_engine == 1 else f"{placement.devices_per_engine} devices"


def _memory(config: RunConfig, placement: Placement, shape: ModelShape, findings: Findings) -> list[str]:
    there = device_memory(placement.learner_device)
    learner = learner_estimate(config, shape)
    findings.lines.append(f"memory    {learner.describe()}")
    if not _starts_engines(config):
        return there.problems(Needs(learner, len(placement.ranks)))
    in_ranks, devices = not placement.engines, placement.devices_per_engine
    engine = engine_estimate(config, shape, devices, there.device, there.total)
    fit, asked = sequences_in_cache(config, shape, engine, devices), config.rollout_matching.decode_batch_size
    is_sized = config.rollout_matching.vllm.kv_cache_memory_bytes is None and there.device is Device.CPU
    sized = " (rollout_matching.vllm.kv_cache_memory_bytes is null: on CPU, as many as these)" if is_sized else ""
    findings.lines.append(f"memory    {engine.describe()}; the cache holds {fit} of the longest sequences, {asked * devices} are decoded{sized}")
    shared = shared_device_estimate(config, learner, engine) if in_ranks and there.device is Device.CUDA else None
    if shared is not None:
        findings.lines.append(f"memory    {shared.describe()}")
    no_room = "rollout_matching.vllm.kv_cache_memory_bytes: the cache cannot hold one sequence; raise it, or lower global_max_length"
    num_engines = len(placement.ranks) if in_ranks else len(placement.engines)
    return ([no_room] if fit < 1 else []) + there.problems(Needs(learner, len(placement.ranks), engine, devices * num_engines, shared))


if __name__ == "__main__":
    sys.argv[1:] = as_schema_overrides(sys.argv[1:])
    main()
