"""The rollout log of samples: `rollouts/step_000123.jsonl`, one line of JSON per sample of a step.

`RolloutRecord` is the format of a line: `rollout` is the engine's answer, `reading` the result of
parsing and matching (both null in a channel-A step), `target` the tokens that are trained. Lines
are in the order of positions. Each line is written when its target is ready. If nodes do not share
a disk, each node has only its ranks' files.

    jq -c 'select(.reading.dropped != []) | [.position, .reading.dropped]' step_000123.jsonl
    pandas.json_normalize([json.loads(line) for line in open("step_000123.jsonl")])

Shape legend: L target tokens, S coord slots. Positions count tokens of the target, which begins
with the kept prefix of the response. Ranges are half-open. Predictions are indices into
`reading.objects`, ground truths are indices into `ground_truth`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NotRequired

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict  # pydantic needs Python 3.12 to read typing.TypedDict

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
    """A ground-truth object of the sample."""

    kind: _Kind
    """The object's geometry: bbox_2d, poly or point_2d."""
    bins: _Bins
    """The object's coordinates, 0..999: x1, y1, x2, y2 of a box, or x, y per vertex."""
    desc: Text


class RolloutEntry(TypedDict):
    """The engine's answer to the sample's prompt."""

    weight_version: int
    actor: str
    seed: int
    attempt: int
    """Number of the attempt that generated the answer: 0, or higher after an engine failed."""
    finish_reason: str
    """Why the answer ended: stop, length, repetition or aborted."""
    num_prompt_tokens: int
    """Number of prompt tokens, with expanded image placeholders."""
    response_token_ids: Sequence[int]
    """The sampled tokens, without the stop token."""
    forced_positions: Sequence[int]
    """Response positions whose token was forced, not sampled, to end an answer that repeats itself
    (by the repeat guard)."""
    text: Text
    """The response as text. Bytes that are not UTF-8 appear as U+FFFD."""


class ObjectEntry(TypedDict):
    """A valid object of the model's answer."""

    key: Text
    kind: _Kind
    """The object's geometry: bbox_2d, poly or point_2d."""
    desc: Text
    bins: _Bins
    """The object's coordinates, 0..999: x1, y1, x2, y2 of a box, or x, y per vertex."""
    span: Sequence[int]
    """[start, stop): the target tokens of the object's JSON value `{...}`."""
    coord_positions: Sequence[int]
    """Positions of the object's coordinate tokens, one per entry of `bins`."""


class DroppedEntry(TypedDict):
    """A complete JSON entry of the model's answer that is not a valid object."""

    key: Text
    reason: str
    """Why the entry is not a valid object: a value of `DropReason`."""


class PairEntry(TypedDict):
    """A predicted object and the ground-truth object that it was matched with, by indices."""

    prediction: int
    ground_truth: int
    iou: float
    """The overlap of the two filled shapes (maskIoU), 0..1."""
    supervised: bool
    """Whether the prediction's coordinates are trained. Otherwise the ground truth is appended."""


class ReadingEntry(TypedDict):
    """The model's answer as it was parsed and matched with the ground truth."""

    prefix_text: Text
    """The kept part of the response, to which objects can be appended; `{`, `[` or nothing if no
    part could be kept. Bytes that are not UTF-8 appear as U+FFFD."""
    num_kept_bytes: int
    """Number of bytes of the response that are kept; 0 if `fallback` is true."""
    num_kept: int
    """Number of leading target tokens that were sampled."""
    num_prefix: int
    """Number of target tokens before the appended text. The tokens from `num_kept` on were not
    sampled: the end of the kept text was encoded again."""
    truncated: bool
    """Whether the JSON of the answer was not closed: the answer ended too early, or has no JSON."""
    fallback: bool
    """Whether no part of the response could be kept, so the prefix is a new opening bracket."""
    max_object_index: int | None
    """The largest n of an `object_{n}` key in the prefix. The first appended object has n + 1."""
    objects: Sequence[ObjectEntry]
    """The valid objects of the answer, in order of appearance."""
    dropped: Sequence[DroppedEntry]
    """The entries of the answer that are no valid objects, in order of appearance."""
    pairs: Sequence[PairEntry]
    """The matched objects, ordered by prediction."""
    excluded: Sequence[int]
    """Predictions that were matched, but whose coordinates cannot be supervised."""
    unmatched_predictions: Sequence[int]
    gating_rejections: int
    """Number of candidate pairs that were not matched, as their maskIoU is under `maskiou_gate`."""
    appended: Sequence[int]
    """The ground truths whose entries were appended to the answer."""
    appended_text: Text
    trimmed: NotRequired[Sequence[int]]
    """The predicted objects that were cut off after the last supervised one
    (`trim_trailing_false_positives`). Their positions count tokens of the response. Absent if
    nothing was cut off."""
    num_trimmed_dropped: NotRequired[int]
    """Number of entries at the end of `dropped` that were cut off too. Absent if `trimmed` is."""


class LabelOverrideEntry(TypedDict):
    """A token that is taught instead of the target's own token."""

    position: int
    token_id: int
    prediction: int
    """The predicted object that the token corrects."""


class TargetEntry(TypedDict):
    """The tokens that the sample trains on, and their supervision."""

    token_ids: Annotated[Sequence[int], Field(min_length=1)]
    """[L]: the tokens to learn, EOS last."""
    supervision: Sequence[Annotated[tuple[int, int, _Role, float], Field(strict=False)]]
    """[start, stop), role, weight: ranges of tokens with the same role and weight that cover all L.
    The role is a `TokenRole`. The weight is the `token_ce` weight before averaging. It is 0 for
    coord slots, because `coord_reg` and `bbox_geo` train them."""
    coord_positions: Sequence[int]
    """[S], ascending: positions of the supervised coordinate tokens."""
    coord_targets: Sequence[float]
    """[S], 0..999: the bin to learn at each of the `coord_positions`."""
    label_overrides: NotRequired[Sequence[LabelOverrideEntry]]
    """Tokens that are taught instead of the target's, by ascending position. Absent if empty (see
    `matched_desc_weight`)."""


class AugmentationEntry(TypedDict):
    """Changes to the sample's images and objects, in the order of the fields (`data.augment`)."""

    crop: Annotated[tuple[int, int, int, int], Field(strict=False)]
    """Left, top, width and height of the kept part, in the image's pixels."""
    mirrored: bool
    """Whether left and right are exchanged."""
    size: Annotated[tuple[int, int], Field(strict=False)]
    """Width and height in pixels after resizing."""
    colour: Annotated[tuple[float, float, float], Field(strict=False)]
    """Factors of brightness, contrast and saturation."""
    hue: float
    """Shift of the hue; 1 is the whole colour circle."""
    min_visible: float
    """An object was dropped if the crop kept nothing of it, or a smaller share of its area than
    this."""


@with_config(ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))
class RolloutRecord(TypedDict):
    """One line of the rollout log: a sample of a step, with its rollout and its target."""

    step: int
    """Number of the step, from 1."""
    position: int
    """The sample's position in the step, from 0."""
    channel: Annotated[str, Field(pattern="^[AB]$")]
    sample_id: Text
    ground_truth: Sequence[GroundTruthEntry]
    """The sample's objects, in the order of its row."""
    rollout: RolloutEntry | None
    reading: ReadingEntry | None
    target: TargetEntry
    reward: NotRequired[float]
    """The rollout's reward (`stage2_ab.channel_b.reward`); absent without `policy_gradient`."""
    augmentation: NotRequired[AugmentationEntry]
    """How the sample was changed; absent if it was not. `ground_truth` has the changed objects."""


def sample_record(
    plan: StepPlan,
    position: int,
    sample: Sample,
    target: Target,
    weights_L: np.ndarray,
    codec: TokenCodec,
    *,
    rollout: Rollout | None,
    reward: float | None = None,
    augmentation: Augmentation | None = None,
) -> RolloutRecord:
    """Return the line of the rollout log for one sample. `rollout` is None only on channel A.

    `weights_L` are the token weights of the target, float32 [L] (`TextWeights.of`).
    """
    reading = target.reading
    assert (rollout is None) == (reading is None), "a target has a reading if it has a rollout"
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
    if reward is not None:
        line["reward"] = reward
    if augmentation is not None:
        line["augmentation"] = log_entry(AugmentationEntry, augmentation)
    return line


_RECORD = TypeAdapter(RolloutRecord)


def read_step(path: Path) -> list[RolloutRecord]:
    """Read a step's lines of the rollout log, of all ranks. `path` is the file of rank 0.

    Raises as `writer.read_lines` does.
    """
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
    # Signed, because a uint8 difference wraps around.
    role_changes = np.diff(target.roles.astype(np.int16)) != 0
    changes = np.flatnonzero(role_changes | (np.diff(weights_L) != 0)) + 1
    starts = [0, *changes.tolist()]
    stops = [*starts[1:], len(target.token_ids)]
    entry = TargetEntry(
        token_ids=target.token_ids,
        supervision=[
            # Converted by way of text, so a float32 weight of 0.1 is written as 0.1.
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
