"""`rollouts/step_000123.jsonl`: what became of every sample of a step, a line of JSON for each (issue 3, "Bad input"; `telemetry.rollouts`).

Lines are in the order of positions, and a line is there as soon as its target is made. `RolloutLine` is the format: everything about the
engine's answer is under `rollout`, everything the parser and the matching made of it under `reading` (both null in a channel-A step), and what
the sample trains on under `target`. ASCII only, whatever a model wrote: its text is escaped as JSON escapes it.

    jq -c 'select(.reading.dropped != []) | [.position, .reading.dropped]' step_000123.jsonl
    pandas.json_normalize([json.loads(line) for line in open("step_000123.jsonl")])

Shape legend: L target tokens, S coord slots. Positions count tokens of the target, whose head is the kept prefix of the response; ranges are
half-open; predictions are indices into `reading.objects`, ground truths into `ground_truth`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import TypedDict

import numpy as np

from learner.targets import Reading, Target, TokenRole
from shared.config.pipeline import Channel
from shared.errors import StorageError
from shared.records import Sample
from shared.rollouts import Rollout
from shared.tokens.vocabulary import TokenCodec


class GroundTruthEntry(TypedDict):
    kind: str
    """bbox_2d or poly."""
    bins: Sequence[int]
    """0..999: x1, y1, x2, y2, or x, y per vertex."""
    desc: str


class RolloutEntry(TypedDict):
    """The engine's answer."""

    weight_version: int
    actor: str
    seed: int
    attempt: int
    """0 for the first try."""
    finish_reason: str
    """stop, length, repetition or aborted."""
    num_prompt_tokens: int
    """Image placeholders expanded."""
    response_token_ids: Sequence[int]
    """Without the stop token."""
    forced_positions: Sequence[int]
    """Response positions set by the repeat guard, not sampled."""
    text: str
    """Of the response; bytes that are not UTF-8 appear as U+FFFD."""


class ObjectEntry(TypedDict):
    """A valid predicted object."""

    key: str
    kind: str
    """bbox_2d or poly."""
    desc: str
    bins: Sequence[int]
    """0..999: x1, y1, x2, y2, or x, y per vertex."""
    span: Sequence[int]
    """[start, stop) of its value `{...}`."""
    coord_positions: Sequence[int]
    """One per entry of `bins`."""


class DroppedEntry(TypedDict):
    """A complete entry of the response that is no valid object."""

    key: str
    reason: str
    """A `DropReason`."""


class PairEntry(TypedDict):
    prediction: int
    ground_truth: int
    iou: float
    """maskIoU."""
    supervised: bool
    """False: excluded, because its coord slots are not beyond doubt; its ground truth is appended."""


class ReadingEntry(TypedDict):
    """What was made of the response."""

    prefix_text: str
    """What was kept of it: an open JSON object, or `{`. Bytes that are not UTF-8 appear as U+FFFD."""
    num_prefix: int
    """Target tokens before the appended text."""
    num_unchanged: int
    """How many of those are the response's own; the replaced end of a fused token, and the fallback's `{`, are not."""
    truncated: bool
    """The response ended before its container closed."""
    fallback: bool
    """Nothing could be kept."""
    max_object_index: int | None
    """The largest n of an `object_{n}` key in the prefix. Appended objects are numbered on from there, or from 1."""
    objects: Sequence[ObjectEntry]
    """In order of appearance."""
    dropped: Sequence[DroppedEntry]
    """In order of appearance."""
    pairs: Sequence[PairEntry]
    """By prediction."""
    excluded: Sequence[int]
    """The predictions of the pairs that are not supervised."""
    unmatched_predictions: Sequence[int]
    gating_rejections: int
    """Candidate pairs under `maskiou_gate`."""
    appended: Sequence[int]
    """The ground truths that were appended."""
    appended_text: str


class TargetEntry(TypedDict):
    """What the sample trains on."""

    token_ids: Sequence[int]
    """[L], EOS last."""
    supervision: Sequence[tuple[int, int, str, float]]
    """[start, stop), role, weight: runs of equal tokens that cover all L. The role is a `TokenRole`, the weight that of `token_ce` before it
    is averaged; it is 0 for coord slots, which are `coord_reg`'s and `bbox_geo`'s."""
    coord_positions: Sequence[int]
    """[S], ascending: the supervised slots."""
    coord_targets: Sequence[float]
    """[S], 0..999: where each should point."""


class RolloutLine(TypedDict):
    """One sample of one step."""

    step: int
    """From 0."""
    position: int
    """The sample's place in the step, from 0."""
    channel: str
    """A or B."""
    sample_id: str
    ground_truth: Sequence[GroundTruthEntry]
    """In record order."""
    rollout: RolloutEntry | None
    reading: ReadingEntry | None
    target: TargetEntry


class RolloutLog:
    """Writes the file of one step after the other. Every line is on its way to the disk when `write` returns: nothing is held back."""

    def __init__(self, folder: Path, codec: TokenCodec) -> None:
        """Makes `folder` where it is missing. Raises StorageError."""
        self._folder, self._codec = folder, codec
        self._step, self._channel = 0, Channel.A
        self._file: FileIO | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(str(folder), str(error)) from error

    def begin(self, step: int, channel: Channel) -> None:
        """The lines that follow are of this step. Raises StorageError."""
        self.close()
        self._step, self._channel = step, channel
        path = step_path(self._folder, step)
        try:
            # Unbuffered: a buffer that could not be emptied would raise once more when it is closed.
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise StorageError(str(path), str(error)) from error

    def write(self, rollout: Rollout | None, sample: Sample, target: Target, weights_L: np.ndarray, position: int) -> None:
        """One sample; `rollout` is None exactly in channel A. `weights_L`: float32 [L], `TextWeights.of(target.roles)`. Raises StorageError."""
        assert self._file is not None, "begin comes before write"
        assert (rollout is None) == (target.reading is None), "a reading is of a rollout"
        line: RolloutLine = {
            "step": self._step,
            "position": position,
            "channel": self._channel,
            "sample_id": sample.sample_id,
            "ground_truth": [{"kind": truth.kind, "bins": truth.bins, "desc": truth.desc} for truth in sample.objects],
            "rollout": None if rollout is None else _rollout_entry(rollout, self._codec),
            "reading": None if target.reading is None else _reading_entry(target.reading),
            "target": _target_entry(target, weights_L),
        }
        data = memoryview(json.dumps(line).encode() + b"\n")
        try:
            # A disk that is almost full takes a part, and refuses the rest at the next call.
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise StorageError(str(step_path(self._folder, self._step)), str(error)) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.jsonl"


def read_step(path: Path) -> list[RolloutLine]:
    """The whole lines of one file; half a line at its end is what a run that died left, and no line.

    Raises OSError, and ValueError for a line that `RolloutLog` of this version did not write.
    """
    lines: list[RolloutLine] = []
    for number, text in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: is not JSON ({error})") from error
        if not _is_line(line):
            raise ValueError(f"{path}:{number}: is not a line of this version's rollout log")
        lines.append(line)
    return lines


def _is_line(value: object) -> bool:
    return isinstance(value, dict) and value.keys() == RolloutLine.__annotations__.keys()


def _rollout_entry(rollout: Rollout, codec: TokenCodec) -> RolloutEntry:
    return {
        "weight_version": rollout.weight_version,
        "actor": rollout.actor,
        "seed": rollout.seed,
        "attempt": rollout.attempt,
        "finish_reason": rollout.finish_reason,
        "num_prompt_tokens": len(rollout.prompt_token_ids),
        "response_token_ids": rollout.response_token_ids,
        "forced_positions": rollout.forced_positions,
        "text": b"".join(map(codec.piece_bytes, rollout.response_token_ids)).decode(errors="replace"),
    }


def _reading_entry(reading: Reading) -> ReadingEntry:
    parsed, match = reading.parsed, reading.match
    excluded = [pair.prediction for pair in reading.excluded]
    return {
        "prefix_text": parsed.prefix_text,
        "num_prefix": len(parsed.prefix_token_ids),
        "num_unchanged": parsed.num_unchanged,
        "truncated": parsed.truncated,
        "fallback": parsed.fallback,
        "max_object_index": parsed.max_object_index,
        "objects": [
            {
                "key": object_.key,
                "kind": object_.kind,
                "desc": object_.desc,
                "bins": object_.bins,
                "span": object_.span,
                "coord_positions": object_.coord_positions,
            }
            for object_ in parsed.objects
        ],
        "dropped": [{"key": dropped.key, "reason": dropped.reason} for dropped in parsed.dropped],
        "pairs": [
            {"prediction": pair.prediction, "ground_truth": pair.ground_truth, "iou": pair.iou, "supervised": pair.prediction not in excluded}
            for pair in match.pairs
        ],
        "excluded": excluded,
        "unmatched_predictions": match.unmatched_predictions,
        "gating_rejections": match.gating_rejections,
        "appended": reading.appended,
        "appended_text": reading.appended_text,
    }


def _target_entry(target: Target, weights_L: np.ndarray) -> TargetEntry:
    assert weights_L.shape == target.roles.shape
    changes = np.flatnonzero((np.diff(target.roles.astype(np.int16)) != 0) | (np.diff(weights_L) != 0)) + 1
    starts = [0, *changes.tolist()]
    stops = [*starts[1:], len(target.token_ids)]
    return {
        "token_ids": target.token_ids,
        "supervision": [
            # By way of text, so that a weight of 0.1 reads 0.1 and not as float32 holds it.
            (start, stop, TokenRole(target.roles[start]).name.lower(), float(str(weights_L[start])))
            for start, stop in zip(starts, stops, strict=True)
        ],
        "coord_positions": target.coord_positions,
        "coord_targets": target.coord_targets,
    }
