"""The number of torch threads of each learner rank (`learner.cpu_threads`)."""

from __future__ import annotations

import json
import os

from launch.processes.batch_algebra import batch_algebra
from launch.processes.placement import Placement
from shared.config import RunConfig
from shared.config.rollout import EngineLocation
from shared.weight_sync.transports import Device


def with_threads(config: RunConfig, placement: Placement) -> RunConfig:
    """Return the configuration with a number of learner threads instead of null.

    A resumed run keeps its number, because the number decides the order of sums. It stays null on
    GPUs, and on a cluster at an address: then a rank has a thread for each core of its node.
    """
    section = config.learner
    if section.cpu_threads is not None:
        return config
    threads = None
    file = config.telemetry.run_dir / "placement.json"
    if _is_resumed(config) and file.is_file():
        threads = json.loads(file.read_text())["learner_threads"]
    elif placement.device is Device.CPU and config.cluster.address == "local":
        cores = len(os.sched_getaffinity(0))
        threads = num_threads(cores, len(placement.ranks), num_busy_engines(config, placement))
    learner = section.model_copy(update={"cpu_threads": threads})
    return config.model_copy(update={"learner": learner})


def _is_resumed(config: RunConfig) -> bool:
    """Return whether `launch.run_folder.resume.resumed` has found a checkpoint for this start."""
    return config.resume.run is not None and not config.resume.is_auto


def num_threads(cores: int, num_ranks: int, num_busy: int) -> int:
    """Return the threads of each rank: a share of the cores that no engine uses, at least 1.

    Example: of 16 cores, 2 ranks next to 3 busy engines have 6 threads each.
    """
    return max(1, (cores - num_busy) // num_ranks)


def num_busy_engines(config: RunConfig, placement: Placement) -> int:
    """Return how many processes of engines on CPU generate while the learner learns.

    They are all or none: with one round a step, engines wait while the learner learns it, unless
    they generate the next step's round with older weights (`max_staleness`).
    """
    if (
        config.rollout_matching.backend.location is not EngineLocation.ACTORS
        or not config.stage2_ab.channel_b.enable_pipeline
    ):
        return 0
    num_processes = placement.devices_per_engine * len(placement.engines)
    num_rounds = len(batch_algebra(config).round_sizes)
    overlaps = num_rounds > 1 or (num_rounds == 1 and config.rollout_matching.max_staleness > 0)
    return num_processes if overlaps else 0


def describe_threads(config: RunConfig, placement: Placement) -> str:
    """Return preflight's line about the learner's threads."""
    threads = with_threads(config, placement).learner.cpu_threads
    if threads is None:
        return "threads   each learner rank: one for each core of its node"
    why = "set by learner.cpu_threads"
    if config.learner.cpu_threads is None:
        why = "as before in this run"
        if not _is_resumed(config):
            busy = num_busy_engines(config, placement)
            why = f"{busy} engines generate meanwhile" if busy else "no engine generates meanwhile"
    return f"threads   each learner rank: {threads} ({why})"
