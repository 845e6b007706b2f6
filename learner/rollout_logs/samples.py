"""The rollout log of samples: `rollouts/step_000123.jsonl`, one line of JSON per sample of a step.

`RolloutRecord` is the format of a line: under `rollout` what the engine answered, under `reading`
what the parser and the matching made of it (both null in a channel-A step), under `target` what the
sample trains on. Lines are in the order of positions, each written as soon as its target is made.
Nodes need not share a disk: then each has the files of its own ranks.

    jq -c 'select(.reading.dropped != []) | [.position, .reading.dropped]' step_000123.jsonl
    pandas.json_normalize([json.loads(line) for line in open("step_000123.jsonl")])

Shape legend: L target tokens, S coord slots. Positions count tokens of the target, whose head is
the kept prefix of the response; ranges are half-open; predictions are indices into
`reading.objects`, ground truths into `ground_truth`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NotRequired

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict  # pydantic reads those of typing from Python 3.12 on

from learner.data.augment import Augmentation
from learner.rollout_logs.writer import Text, log_entry, read_lines
from learner.targets import ParsedAndMatched, Target, TokenRole
from shared.records import GeometryKind, Sample
from shared.rollouts import Rollout
from shared.schedule import StepPlan
from shared.tokens.vocabulary import NUM_BINS, TokenCodec

_Kind = Annotated[str, Field(pattern=f"^({'|'.join(GeometryKind)})$")]
_Bins = Annotated[Sequence[Annotated[int, Field(ge=0, lt=NUM_BINS)]], Field(min_length=2)]
_Role = Annotated[str, Field(pattern=f"^({'|'.join(role.name.lower() for role in TokenRole)})$")]


class GroundTruthEntry(TypedDict):
    kind: _Kind
    """bbox_2d, poly or point_2d."""
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
    """The response; bytes that are not UTF-8 appear as U+FFFD."""


class ObjectEntry(TypedDict):
    """A valid predicted object."""

    key: Text
    kind: _Kind
    """bbox_2d, poly or point_2d."""
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
    """False: excluded, as its coord slots are not beyond doubt; its ground truth is appended."""


class ReadingEntry(TypedDict):
    """The response as it was parsed and matched."""

    prefix_text: Text
    """What was kept of it: an open JSON object, or `{`; U+FFFD as in `rollout.text`."""
    num_kept_bytes: int
    """How much of the response was kept; 0 where that is nothing."""
    num_kept: int
    """Leading target tokens that are the response's own."""
    num_prefix: int
    """Leading target tokens without appended text; those from `num_kept` on were encoded anew."""
    truncated: bool
    """No container closed: the response ended before, or it held none."""
    fallback: bool
    """Nothing could be kept, whatever is matched."""
    max_object_index: int | None
    """The largest n of an `object_{n}` key in the prefix, from which appended objects go on."""
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
    trimmed: NotRequired[Sequence[int]]
    """The predictions that were cut off behind the last supervised one
    (`trim_trailing_false_positives`): their positions count tokens of the response. Absent, like
    the next, where no entry was."""
    num_trimmed_dropped: NotRequired[int]
    """How many of the last `dropped` were cut off too."""


class LabelOverrideEntry(TypedDict):
    """A token that is taught in the place of the target's own."""

    position: int
    token_id: int
    prediction: int
    """The one whose name it corrects."""


class TargetEntry(TypedDict):
    """The tokens that the sample trains on, and their supervision."""

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
    label_overrides: NotRequired[Sequence[LabelOverrideEntry]]
    """Ascending. Absent where there is none (`matched_desc_weight`)."""


class AugmentationEntry(TypedDict):
    """Changes made to the sample's pictures and objects, in this order (`data.augment`)."""

    crop: Annotated[tuple[int, int, int, int], Field(strict=False)]
    """Left, top, width and height of what was kept, in the picture's pixels."""
    mirrored: bool
    size: Annotated[tuple[int, int], Field(strict=False)]
    """Width and height that it was resized to."""
    colour: Annotated[tuple[float, float, float], Field(strict=False)]
    """Factors of brightness, contrast and saturation."""
    hue: float
    """Turn of the hue; 1 is the whole circle."""
    min_visible: float
    """An object of whose area the crop left a smaller share, or nothing, was left out."""


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
    augmentation: NotRequired[AugmentationEntry]
    """Absent where the sample is as its file has it; `ground_truth` is behind it."""


def sample_record(
    plan: StepPlan,
    position: int,
    sample: Sample,
    target: Target,
    weights_L: np.ndarray,
    codec: TokenCodec,
    *,
    rollout: Rollout | None,
    augmentation: Augmentation | None = None,
) -> RolloutRecord:
    """Make the line of one sample; `rollout` is None exactly in channel A.

    `weights_L`: float32 [L], `TextWeights.of(target)`.
    """
    reading = target.reading
    assert (rollout is None) == (reading is None), "a reading is of a rollout"
    line = RolloutRecord(
        step=plan.number,
        position=position,
        channel=plan.channel,
        sample_id=sample.sample_id,
        ground_truth=[log_entry(GroundTruthEntry, truth) for truth in sample.objects],
        rollout=None if rollout is None else _rollout_entry(rollout, codec),
        reading=None if reading is None else _reading_entry(reading, codec),
        target=_target_entry(target, weights_L),
    )
    if augmentation is not None:
        line["augmentation"] = log_entry(AugmentationEntry, augmentation)
    return line


_RECORD = TypeAdapter(RolloutRecord)


def read_step(path: Path) -> list[RolloutRecord]:
    """Read the lines of one step, of all ranks. Raises as `writer.read_lines` does."""
    return read_lines(path, _RECORD)


def _rollout_entry(rollout: Rollout, codec: TokenCodec) -> RolloutEntry:
    pieces = map(codec.piece_bytes, rollout.response_token_ids)
    text = b"".join(pieces).decode(errors="replace")
    num_prompt_tokens = len(rollout.prompt_token_ids)
    return log_entry(RolloutEntry, rollout, text=text, num_prompt_tokens=num_prompt_tokens)


def _reading_entry(reading: ParsedAndMatched, codec: TokenCodec) -> ReadingEntry:
    parsed = reading.parsed
    kept = reading.kept
    excluded = [pair.prediction for pair in reading.excluded]
    num_kept_bytes = sum(len(codec.piece_bytes(token_id)) for token_id in kept.prefix_token_ids)
    entry = ReadingEntry(
        prefix_text=kept.prefix_text,
        num_kept_bytes=0 if kept.fallback else num_kept_bytes,
        num_kept=reading.num_kept,
        num_prefix=reading.num_prefix,
        truncated=parsed.truncated,
        fallback=parsed.fallback,
        max_object_index=kept.max_object_index,
        objects=[log_entry(ObjectEntry, found) for found in parsed.objects],
        dropped=[log_entry(DroppedEntry, dropped) for dropped in parsed.dropped],
        pairs=[
            log_entry(PairEntry, pair, supervised=pair.prediction not in excluded)
            for pair in reading.match.pairs
        ],
        excluded=excluded,
        unmatched_predictions=reading.match.unmatched_predictions,
        gating_rejections=reading.match.gating_rejections,
        appended=reading.appended,
        appended_text=reading.appended_text,
    )
    if reading.num_trimmed:
        entry["trimmed"] = list(range(len(kept.objects), len(parsed.objects)))
        entry["num_trimmed_dropped"] = len(parsed.dropped) - len(kept.dropped)
    return entry


def _target_entry(target: Target, weights_L: np.ndarray) -> TargetEntry:
    assert weights_L.shape == target.roles.shape
    # Signed, because a difference of uint8 wraps around.
    role_changes = np.diff(target.roles.astype(np.int16)) != 0
    changes = np.flatnonzero(role_changes | (np.diff(weights_L) != 0)) + 1
    starts = [0, *changes.tolist()]
    stops = [*starts[1:], len(target.token_ids)]
    entry = TargetEntry(
        token_ids=target.token_ids,
        supervision=[
            # Through text, so that a weight of 0.1 reads 0.1 and not as float32 holds it.
            (start, stop, TokenRole(target.roles[start]).name.lower(), float(str(weights_L[start])))
            for start, stop in zip(starts, stops, strict=True)
        ],
        coord_positions=target.coord_positions,
        coord_targets=target.coord_targets,
    )
    if target.label_overrides:
        overrides = target.label_overrides
        entry["label_overrides"] = [log_entry(LabelOverrideEntry, one) for one in overrides]
    return entry
