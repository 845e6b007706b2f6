"""Events that the driver sends to the process of a logger, pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

Scalar: TypeAlias = float | str


class RolloutFile(StrEnum):
    """The kind of a file that has a line of JSON for every rollout."""

    SAMPLES = "samples"
    """`learner.rollout_logs.samples`."""
    TRAJECTORIES = "trajectories"
    """`learner.rollout_logs.trajectories`."""
    PREDICTIONS = "predictions"
    """`predictions.jsonl` of a held-out report."""


@dataclass(frozen=True, slots=True)
class RunEvent:
    """The run: the first event of a logger."""

    logger: str
    folder: Path
    """Folder for its files, which exists."""
    project: str
    name: str
    """Name of the run: the configured name and the end of the run folder's path."""
    first_step: int
    """The first step that comes now, from 1. After a resumption later steps are removed."""
    config: Mapping[str, Any]
    """The configuration as JSON has it, by sections."""
    flat_config: Mapping[str, Any]
    """The same by dotted keys."""


@dataclass(frozen=True, slots=True)
class MetricsEvent:
    """Figures of a step, or of the held-out report after it.

    Example: `MetricsEvent(26, {"loss/total": 1.5, "rollout/decode_mode": "greedy"})`.
    """

    step: int
    values: Mapping[str, Scalar]


@dataclass(frozen=True, slots=True)
class Picture:
    path: Path
    """A PNG file."""
    caption: str


@dataclass(frozen=True, slots=True)
class PicturesEvent:
    """Pictures with ground truth and predictions."""

    step: int
    name: str
    pictures: tuple[Picture, ...]


@dataclass(frozen=True, slots=True)
class RolloutsEvent:
    """A file of rollouts. The first of them become a table."""

    step: int
    name: str
    path: Path
    kind: RolloutFile


@dataclass(frozen=True, slots=True)
class EndEvent:
    """The end of the run: the last event of a logger."""

    failed: bool


Event: TypeAlias = RunEvent | MetricsEvent | PicturesEvent | RolloutsEvent | EndEvent
