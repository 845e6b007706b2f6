"""One line of a rollout log (learner.rollout_logs.samples): its format, and whether something is
one.

Shape legend: L target tokens, S coord slots. Positions count tokens of the target, whose head is
the kept prefix of the response; ranges are half-open; predictions are indices into
`reading.objects`, ground truths into `ground_truth`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict  # pydantic reads those of typing from Python 3.12 on

from learner.rollout_logs.writer import StepLog, Text, checked, read_lines
from learner.targets import ParsedAndMatched, Target, TokenRole
from shared.config.pipeline import Channel
from shared.records import GeometryKind, Sample
from shared.rollouts import Rollout
from shared.tokens.vocabulary import NUM_BINS, TokenCodec

_Kind = Annotated[str, Field(pattern=f"^({'|'.join(GeometryKind)})$")]
_Bins = Annotated[Sequence[Annotated[int, Field(ge=0, lt=NUM_BINS)]], Field(min_length=4)]
_Role = Annotated[str, Field(pattern=f"^({'|'.join(role.name.lower() for role in TokenRole)})$")]


class GroundTruthEntry(TypedDict):
    kind: _Kind
    """bbox_2d or poly."""
    bins: _Bins
    """0..999: x1, y1, x2, y2, or x, y per vertex."""
    desc: Text


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
    text: Text
    """Of the response; bytes that are not UTF-8 appear as U+FFFD."""


class ObjectEntry(TypedDict):
    """A valid predicted object."""

    key: Text
    kind: _Kind
    """bbox_2d or poly."""
    desc: Text
    bins: _Bins
    """0..999: x1, y1, x2, y2, or x, y per vertex."""
    span: Sequence[int]
    """[start, stop) of its value `{...}`."""
    coord_positions: Sequence[int]
    """One per entry of `bins`."""


class DroppedEntry(TypedDict):
    """A complete entry of the response that is no valid object."""

    key: Text
    reason: str
    """A `DropReason`."""


class PairEntry(TypedDict):
    prediction: int
    ground_truth: int
    iou: float
    """maskIoU."""
    supervised: bool
    """False: excluded, because its coord slots are not beyond doubt; its ground truth is appended.
    """


class ReadingEntry(TypedDict):
    """What was made of the response."""

    prefix_text: Text
    """What was kept of it: an open JSON object, or `{`. Bytes that are not UTF-8 appear as U+FFFD.
    """
    num_kept_bytes: int
    """How much of the response was kept; 0 in the fallback."""
    num_kept: int
    """Leading target tokens that are the response's own."""
    num_prefix: int
    """Leading target tokens that hold no appended text. Those from `num_kept` on were encoded anew.
    """
    truncated: bool
    """No container closed: the response ended before, or it held none."""
    fallback: bool
    """Nothing could be kept."""
    max_object_index: int | None
    """The largest n of an `object_{n}` key in the prefix. Appended objects are numbered on from
    there, or from 1.
    """
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
    appended_text: Text


class TargetEntry(TypedDict):
    """What the sample trains on."""

    token_ids: Annotated[Sequence[int], Field(min_length=1)]
    """[L], EOS last."""
    supervision: Sequence[Annotated[tuple[int, int, _Role, float], Field(strict=False)]]
    """[start, stop), role, weight: runs of equal tokens that cover all L. The role is a
    `TokenRole`, the weight that of `token_ce` before it is averaged; it is 0 for coord slots, which
    are `coord_reg`'s and `bbox_geo`'s."""
    coord_positions: Sequence[int]
    """[S], ascending: the supervised slots."""
    coord_targets: Sequence[float]
    """[S], 0..999: where each should point."""


@with_config(ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))
class RolloutRecord(TypedDict):
    """One sample of one step."""

    step: int
    """From 1."""
    position: int
    """The sample's place in the step, from 0."""
    channel: Annotated[str, Field(pattern="^[AB]$")]
    sample_id: Text
    ground_truth: Sequence[GroundTruthEntry]
    """In record order."""
    rollout: RolloutEntry | None
    reading: ReadingEntry | None
    target: TargetEntry


_LINE = TypeAdapter(RolloutRecord)


def checked_line(value: Any) -> RolloutRecord:
    """What a line's JSON says, if it is the line of a rollout log. RecordError, not located, with
    the field that it is not for.
    """
    return checked(value, _LINE, _consistent)


def _consistent(line: RolloutRecord) -> dict[str, bool]:
    """What readers rely on beyond the types: fields, and whether they fit the others."""
    reading, target = line["reading"], line["target"]
    edges = [0, *(stop for _, stop, _, _ in target["supervision"])]
    fits = {
        "rollout": (line["rollout"] is None) == (reading is None) == (line["channel"] == "A"),
        "ground_truth": all(map(_has_arity, line["ground_truth"])),
        "target.supervision": (
            edges[-1] == len(target["token_ids"])
            and all(
                a == start < b
                for (a, b), (start, *_) in zip(pairwise(edges), target["supervision"], strict=True)
            )
        ),
        "target.coord_targets": len(target["coord_targets"]) == len(target["coord_positions"]),
    }
    if reading is None:
        return fits
    pairs, num_predictions, num_truths = (
        reading["pairs"],
        len(reading["objects"]),
        len(line["ground_truth"]),
    )
    return fits | {
        "reading.objects": all(map(_has_arity, reading["objects"])),
        "reading.pairs": all(
            0 <= pair["prediction"] < num_predictions and 0 <= pair["ground_truth"] < num_truths
            for pair in pairs
        ),
        "reading.appended": all(0 <= index < num_truths for index in reading["appended"]),
    }


def _has_arity(shape: GroundTruthEntry | ObjectEntry) -> bool:
    num = len(shape["bins"])
    return num == 4 if shape["kind"] == GeometryKind.BBOX else num >= 6 and num % 2 == 0


# `rollouts/step_000123.jsonl`: what became of every sample of a step, a line of JSON for each
# (issue 3, "Bad input"; `telemetry.rollouts`).
#
# Lines are in the order of positions, and a line is there as soon as its target is made.
# `RolloutRecord` (learner.rollout_logs.samples) is the format: everything about the engine's answer
# is under `rollout`, everything the parser and the matching made of it under `reading` (both null
# in a channel-A step), and what the sample trains on under `target`. Files and ranks:
# `learner.rollout_logs.writer`. The step's positions are in rank order. Nodes need not share a
# disk: then each has the files of its ranks, and `read_step` shows those that lie beside rank 0's.
#
# jq -c 'select(.reading.dropped != []) | [.position, .reading.dropped]' step_000123.jsonl
# pandas.json_normalize([json.loads(line) for line in open("step_000123.jsonl")])
#
# Shape legend: L target tokens, S coord slots.


class RolloutLog:
    """Of the rollouts of samples, which were parsed and matched."""

    def __init__(self, folder: Path, codec: TokenCodec, *, rank: int = 0) -> None:
        """Makes `folder` where it is missing. Raises StorageError."""
        self._codec = codec
        self._step, self._channel = 0, Channel.A
        self._lines = StepLog(folder, rank=rank)

    def begin(self, step: int, channel: Channel) -> None:
        """The lines that follow are of this step. Raises StorageError."""
        self._step, self._channel = step, channel
        self._lines.begin(step)

    def write(
        self,
        rollout: Rollout | None,
        sample: Sample,
        target: Target,
        weights_L: np.ndarray,
        position: int,
    ) -> None:
        """One sample; `rollout` is None exactly in channel A. `weights_L`: float32 [L],
        `TextWeights.of(target.roles)`. Raises StorageError.
        """
        assert (rollout is None) == (target.reading is None), "a reading is of a rollout"
        line: RolloutRecord = {
            "step": self._step,
            "position": position,
            "channel": self._channel,
            "sample_id": sample.sample_id,
            "ground_truth": [
                {"kind": truth.kind, "bins": truth.bins, "desc": truth.desc}
                for truth in sample.objects
            ],
            "rollout": None if rollout is None else _rollout_entry(rollout, self._codec),
            "reading": (
                None if target.reading is None else _reading_entry(target.reading, self._codec)
            ),
            "target": _target_entry(target, weights_L),
        }
        self._lines.write(line)

    def close(self) -> None:
        self._lines.close()


def read_step(path: Path) -> list[RolloutRecord]:
    """`learner.rollout_logs.writer.read_lines` of a file of `RolloutLog`. Raises OSError, and
    RecordError with file and line for a line that this version did not write."""
    return read_lines(path, checked_line)


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
        "text": (
            b"".join(map(codec.piece_bytes, rollout.response_token_ids)).decode(errors="replace")
        ),
    }


def _reading_entry(reading: ParsedAndMatched, codec: TokenCodec) -> ReadingEntry:
    parsed, match = reading.parsed, reading.match
    excluded = [pair.prediction for pair in reading.excluded]
    return {
        "prefix_text": parsed.prefix_text,
        "num_kept_bytes": (
            0
            if parsed.fallback
            else sum(len(codec.piece_bytes(token_id)) for token_id in parsed.prefix_token_ids)
        ),
        "num_kept": reading.num_kept,
        "num_prefix": reading.num_prefix,
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
            {
                "prediction": pair.prediction,
                "ground_truth": pair.ground_truth,
                "iou": pair.iou,
                "supervised": pair.prediction not in excluded,
            }
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
    changes = (
        np.flatnonzero((np.diff(target.roles.astype(np.int16)) != 0) | (np.diff(weights_L) != 0))
        + 1
    )
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
