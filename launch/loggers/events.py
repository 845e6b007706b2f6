"""Events that the driver sends, pickled, to the process of a logger such as wandb."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from learner.rollout_logs.samples import RolloutRecord
    from learner.rollout_logs.trajectories import LoggedMessages, TrajectoryRecord

Scalar: TypeAlias = float | str


class RolloutFile(StrEnum):
    """The kind of a JSONL file of rollouts: which module writes its lines."""

    SAMPLES = "samples"
    """Written by `learner.rollout_logs.samples`."""
    TRAJECTORIES = "trajectories"
    """Written by `learner.rollout_logs.trajectories`."""
    PREDICTIONS = "predictions"
    """The `predictions.jsonl` of a held-out report."""


@dataclass(frozen=True, slots=True)
class RunEvent:
    """The start of the run: the first event of a logger."""

    logger: str
    folder: Path
    """Folder for the logger's files, which exists."""
    project: str
    name: str
    """Name of the run: the configured name and the end of the run folder's path."""
    first_step: int
    """The first step to log, counted from 1. Earlier starts of the run may have logged it too."""
    config: Mapping[str, object]
    """The run's configuration as JSON values, by sections."""
    flat_config: Mapping[str, object]
    """The values of `config` by dotted keys."""


@dataclass(frozen=True, slots=True)
class MetricsEvent:
    """Metrics of a step, or of the held-out report after a step, for a logger.

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
    """Images of held-out samples, with ground truth and predictions drawn in, for a logger."""

    step: int
    name: str
    pictures: tuple[Picture, ...]


@dataclass(frozen=True, slots=True)
class RolloutsEvent:
    """A JSONL file of rollouts, whose first rollouts a logger logs as a table."""

    step: int
    name: str
    path: Path
    kind: RolloutFile


@dataclass(frozen=True, slots=True)
class AlertEvent:
    """A finding of the doctor (`launch.doctor`), for a logger.

    Example: `AlertEvent(12, "no matches", "match rate 0.02 (threshold 0.05 over 4): ...")`.
    """

    step: int
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class EndEvent:
    """The end of the run: the last event of a logger."""

    failed: bool


Event: TypeAlias = RunEvent | MetricsEvent | PicturesEvent | RolloutsEvent | AlertEvent | EndEvent


# The first rollouts of a file as a table to read

MAX_ROWS = 32
MAX_CHARACTERS = 4000
"""Maximum number of characters of a table's cell."""


@dataclass(frozen=True, slots=True)
class RolloutTable:
    columns: tuple[str, ...]
    rows: list[tuple[Scalar, ...]]
    """Each row has one value per column; all texts can be encoded as UTF-8."""


def rollout_table(path: Path, kind: RolloutFile) -> RolloutTable:
    """Return a table of the first `MAX_ROWS` rollouts of a JSONL file.

    Raises OSError, and ValueError for a line that is not JSON.
    """
    with path.open("rb") as file:
        lines: Iterator[Any] = map(json.loads, file)
        readable: Iterator[dict[str, Scalar | None]]
        match kind:
            case RolloutFile.SAMPLES:
                readable = (row for row in map(sample_row, lines) if row is not None)
            case RolloutFile.TRAJECTORIES:
                readable = map(trajectory_row, lines)
            case RolloutFile.PREDICTIONS:
                readable = _prediction_rows(lines)
        rows = [
            {name: as_cell(value) for name, value in row.items()}
            for row in islice(readable, MAX_ROWS)
        ]
    columns = tuple(rows[0]) if rows else ()
    return RolloutTable(columns, [tuple(row.values()) for row in rows])


def sample_row(line: RolloutRecord) -> dict[str, Scalar | None] | None:
    """Return what a line of the rollout log says about a sample, to read; None on channel A."""
    rollout, reading = line["rollout"], line["reading"]
    if rollout is None or reading is None:
        return None
    return {
        "position": line["position"],
        "sample": line["sample_id"],
        "answer": rollout["text"],
        "end": rollout["finish_reason"],
        "tokens": len(rollout["response_token_ids"]),
        "truth": ", ".join(truth["desc"] for truth in line["ground_truth"]),
        "found": ", ".join(found["desc"] for found in reading["objects"]),
        "matched": len(reading["pairs"]),
        "dropped": ", ".join(dropped["reason"] for dropped in reading["dropped"]),
        "appended": len(reading["appended"]),
    }


def trajectory_row(line: TrajectoryRecord) -> dict[str, Scalar | None]:
    """Return what a line of the rollout log says about an environment's rollout, to read."""
    return {
        "position": line["position"],
        "example": line["example"],
        "reward": line["reward"],
        "prompt": _dialogue(line["prompt"]),
        "completion": _dialogue(line["completion"]),
        "rewards": ", ".join(f"{name} {value:g}" for name, value in line["metrics"].items()),
        "turns": line["num_turns"],
        "error": line["error"] or "",
    }


def _prediction_rows(lines: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Scalar | None]]:
    for line in lines:
        yield {
            "sample": line["sample_id"],
            "answer": line["text"],
            "end": line["finish_reason"],
            "found": ", ".join(f"{one['desc']} {one['score']:.2f}" for one in line["objects"]),
        }


def _dialogue(messages: LoggedMessages | None) -> str:
    """Return messages as a text, with role and content of each message in a line.

    Other fields of a message, and content that is not text, are written as JSON.
    """
    if messages is None or isinstance(messages, str):
        return messages or ""
    lines = []
    for message in messages:
        fields = {name: value for name, value in message.items() if value is not None}
        role = fields.pop("role", "message")
        content = fields.pop("content", "")
        parts = [content if isinstance(content, str) else json.dumps(content)]
        if fields:
            parts.append(json.dumps(fields))
        lines.append(f"{role}: {' '.join(parts)}")
    return "\n".join(lines)


def as_cell(value: Any) -> Scalar:
    """Return a value for a table: a long text is cut, and half of a surrogate pair replaced."""
    if not isinstance(value, str):
        return value
    if len(value) > MAX_CHARACTERS:
        value = f"{value[:MAX_CHARACTERS]}..."
    # A model's text may hold half of a surrogate pair, which no package can store.
    return value.encode(errors="replace").decode()
