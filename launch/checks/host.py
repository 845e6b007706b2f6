"""Checks this machine: installed packages, and the paths that a run writes to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

from launch.checks.model_shape import BYTES, ModelShape
from learner.host_memory import in_gib
from rollout_actors.engine.vllm_import import REMEDY, require_installed
from shared.config import RunConfig
from shared.config.derive import rollout_servers
from shared.weight_sync.transports import TransportKind

LONGEST_SOCKET_PATH = 107
"""Bytes; the kernel's limit."""
RAY_SOCKET = "session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
"""The path of Ray's longest socket below its folder."""
DISTRIBUTION = "rollmatch"


def path_problems(config: RunConfig) -> Iterator[str]:
    """Check the run's folder and Ray's: occupied, not writable, full, or too long."""
    yield from _run_folder_problems(config)
    folder = config.cluster.temp_dir
    if folder is not None and config.cluster.address == "local":
        length = len(os.fsencode(folder / RAY_SOCKET))
        if length > LONGEST_SOCKET_PATH:
            yield (
                f"cluster.temp_dir: {folder} makes Ray's sockets {length} bytes long,"
                f" {LONGEST_SOCKET_PATH} are possible; choose a shorter path, such as /tmp/ray"
            )


def run_folder_problem(config: RunConfig) -> str | None:
    """Refuse a folder that holds a run, which would be overwritten."""
    folder = config.telemetry.run_dir
    if config.resume.run is not None or not (folder / "config.json").exists():
        return None
    return (
        f"telemetry.run_dir: {folder} holds a run already; choose another folder, or go on with"
        f" that run: resume={folder}"
    )


def _run_folder_problems(config: RunConfig) -> Iterator[str]:
    folder = config.telemetry.run_dir
    if (problem := run_folder_problem(config)) is not None:
        yield problem
        return
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield (
            f"telemetry.run_dir: {folder} cannot be made, {existing} permits no writing; choose"
            " another folder, or permit it"
        )
        return
    needed = _checkpoint_bytes(config)
    if config.resume.run is not None:
        # A run that goes on has some of them already.
        there = (path for path in folder.glob("checkpoint*/**/*") if path.is_file())
        needed -= sum(path.stat().st_size for path in there)
    free = shutil.disk_usage(existing).free
    if needed > free:
        yield (
            f"telemetry.run_dir: the checkpoints that are kept need about {in_gib(needed)},"
            f" {existing} has {in_gib(free)} free; free space, keep fewer (checkpoint.keep_last,"
            " checkpoint.keep_best; none on the way: checkpoint.save_minutes=null) or less of each"
            " (checkpoint.full=false), or choose another folder"
        )


def _checkpoint_bytes(config: RunConfig) -> int:
    """Count the bytes of all checkpoints that exist at the same time."""
    if not (Path(config.model.path) / "config.json").is_file():
        return 0
    section = config.checkpoint
    number = int(section.save_final)
    # A new one is complete before an old one goes.
    if section.save_steps or section.save_minutes:
        number += section.keep_last + 1
    if section.keep_best:
        number += section.keep_best + 1
    parameters = ModelShape.read(Path(config.model.path)).num_parameters
    size = BYTES[config.model.dtype]
    if section.full and config.model.adapter is None:
        size += 3 * BYTES["float32"]  # a master and two moments
    return number * parameters * size


def version_problems(config: RunConfig) -> Iterator[str]:
    """Name every package that is missing, or of another version than pyproject.toml pins."""
    try:
        pinned = [Requirement(text) for text in requires(DISTRIBUTION) or ()]
    except PackageNotFoundError:
        yield (
            f"installation: {DISTRIBUTION} is not installed, so vLLM does not find its plugin; run"
            " `make setup`, or `pip install -e .`"
        )
        return
    for requirement in pinned:
        if requirement.marker is None and (problem := _version_problem(requirement)):
            yield problem
    if starts_engines(config):
        builds = [requirement for requirement in pinned if requirement.name.startswith("vllm")]
        yield from vllm_problems(builds)


def starts_engines(config: RunConfig) -> bool:
    """Tell whether the run has vLLM engines of its own, beside the learner or in actors."""
    return config.rollout_matching.rollout_backend == "vllm" and rollout_servers(config) is None


@contextmanager
def vllm_import(config: RunConfig) -> Iterator[Callable[[], Iterator[str]]]:
    """Import what an engine of the run imports, in a process of its own, while the body runs.

    What the body is given waits for the end of the import, and yields its problem if it failed.
    Only this node's installation is tried.
    """
    if not starts_engines(config) or find_spec("vllm") is None:
        yield lambda: iter(())
        return
    module = "rollout_actors.engine.vllm_engine"
    if config.rollout_matching.vllm.mode == "colocate":
        module = "rollout_actors.backends.colocated_llm"
    process = subprocess.Popen(
        [sys.executable, "-c", f"import {module}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )

    def problems() -> Iterator[str]:
        limit_s = config.timeouts.start_s
        try:
            _, printed = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            yield (
                f"installation: vLLM was not imported within timeouts.start_s = {limit_s:g} s; end"
                " what keeps this machine busy (`uptime`), or raise the key"
            )
            return
        if process.returncode:
            lines = printed.strip().splitlines() or [f"exit status {process.returncode}"]
            yield f"installation: vLLM cannot be imported ({lines[-1]}); {REMEDY}"

    try:
        yield problems
    finally:
        process.kill()
        process.communicate()


def require_vllm(config: RunConfig, transport: TransportKind | None = None) -> None:
    """Raise ConfigError where this machine's part of the run needs vLLM and has none.

    Args:
        transport: of the weights, once the run is placed. Over NCCL a learner sends with vLLM's
            code, to servers too.
    """
    if starts_engines(config):
        require_installed(f"rollout_matching.vllm.mode: {config.rollout_matching.vllm.mode}")
    elif transport is TransportKind.NCCL:
        require_installed("a learner that sends weights over NCCL")


def vllm_problems(builds: list[Requirement]) -> Iterator[str]:
    """Yield one problem, or none where one of these builds of vLLM is installed."""
    if all(_version_problem(build) for build in builds):
        wanted = sorted(f"{build.name}{build.specifier}" for build in builds)
        yield f"installation: needs {' or '.join(wanted)}; {REMEDY}"


def _version_problem(requirement: Requirement) -> str | None:
    name = requirement.name
    pinned = requirement.specifier
    try:
        installed = version(name)
    except PackageNotFoundError:
        return f"installation: {name}{pinned} is missing; run `make setup`"
    if pinned.contains(installed, prereleases=True):
        return None
    return (
        f"installation: {name} is {installed}, and {pinned} was run together with the rest; run"
        " `make setup`"
    )
