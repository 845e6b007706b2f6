"""What a sample trains on: `Y_train` and, token by token, what supervises it. Decided here, once; objectives only consume it.

Channel A: the ground truth serialised, closed, EOS. Channel B: the kept prefix of the model's own rollout, the unmatched ground truth
appended, closed, EOS (spec rollout-matching-sft: one canonical teacher-forced target sequence; DESIGN 8).

Shape legend: L target tokens, S coord slots.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise

import numpy as np

from learner.credit import NO_CREDIT, Credit
from learner.ot_targets import OTSettings, slot_targets
from shared.grounding.matching import MatchedPair, MatchResult, match_objects
from shared.grounding.objects import ParsedObject, ParsedRollout
from shared.grounding.parsing import parse_rollout
from shared.grounding.serialize import SerializedText, layout_append, layout_objects
from shared.records import GeometryKind, GroundTruthObject, Sample
from shared.rollouts import Rollout
from shared.tokens.pieces import piece_spans
from shared.tokens.vocabulary import TokenCodec


class TokenRole(IntEnum):
    """What a target token is; its weight in `token_ce` follows from the role and the channel."""

    NEUTRAL = 0
    """In the prefix and not of a matched object: false positives, dropped objects, keys and separators. Never supervised."""
    STRUCTURE = 1
    """Text of a serialised ground-truth object, and the separators before it."""
    DESC = 2
    """Overlaps the value of a serialised `desc`."""
    MATCHED_STRUCTURE = 3
    """In the prefix: a matched object's value `{...}` without its desc and coord tokens."""
    COORD = 4
    """A coord slot: `coord_reg`'s, whatever the role weights are."""
    CLOSING = 5
    """The closing top-level brace, or EOS."""


@dataclass(frozen=True, slots=True)
class TextWeights:
    """The token weights of one channel, from `token_ce`'s configuration. Roles not named here weigh 0."""

    desc: float
    matched_structure: float
    structure: float = 1.0
    """Of serialised ground truth, closing brace and EOS; 0 where no text is supervised at all."""

    def of(self, roles_L: np.ndarray) -> np.ndarray:
        """float32 [L], at least 0."""
        table = np.zeros(len(TokenRole), dtype=np.float32)
        table[TokenRole.STRUCTURE] = table[TokenRole.CLOSING] = self.structure
        table[TokenRole.DESC] = self.desc
        table[TokenRole.MATCHED_STRUCTURE] = self.matched_structure
        return table[roles_L]


@dataclass(frozen=True, slots=True)
class MatchSettings:
    """Arguments of `match_objects`, as `rollout_matching` configures them."""

    candidate_top_k: int
    maskiou_gate: float
    maskiou_resolution: int
    fp_cost: float
    fn_cost: float


@dataclass(frozen=True, slots=True)
class TargetRules:
    geometry: frozenset[GeometryKind]
    field_order: str
    matching: MatchSettings
    transport: OTSettings
    """Between a polygon and its match."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What was made of one rollout on the way to its target. Predictions are indices into `parsed.objects`."""

    parsed: ParsedRollout
    match: MatchResult
    supervised: tuple[MatchedPair, ...]
    """The matched pairs whose slots are supervised, by prediction."""
    excluded: tuple[MatchedPair, ...]
    """The matched pairs whose slots cannot be supervised; their ground truth is appended."""
    appended: tuple[int, ...]
    """The sample's objects that were appended, ascending."""
    appended_text: str


@dataclass(frozen=True, slots=True)
class Target:
    """`Y_train` of one sample. Positions are relative to its first token."""

    sample_id: str
    token_ids: tuple[int, ...]
    """[L], EOS last."""
    roles: np.ndarray
    """uint8 [L] of TokenRole."""
    coord_positions: tuple[int, ...]
    """[S], ascending: the supervised slots, object after object."""
    coord_targets: tuple[float, ...]
    """[S], 0..999: where each slot should point; a fraction where optimal transport says so."""
    box_slots: tuple[int, ...]
    """The first of the four slots of each supervised box whose ground truth is a box, into [S], ascending."""
    sampled_logprobs: tuple[float, ...] = ()
    """The engine's log-probabilities of the tokens at `sampled_positions`; empty in channel A."""
    reading: Reading | None = None
    """How the rollout was read; None in channel A."""
    credit: Credit = NO_CREDIT
    """Sampled tokens that are learned by their advantage: of trajectories alone."""

    @property
    def sampled_positions(self) -> tuple[int, ...]:
        """Of tokens that are the rollout's own, none of them forced: the leading ones, or in trajectories, those of every turn."""
        return self.credit.positions[: len(self.sampled_logprobs)] if self.credit.positions else tuple(range(len(self.sampled_logprobs)))

    def __post_init__(self) -> None:
        length, positions = len(self.token_ids), self.coord_positions
        assert self.roles.shape == (length,)
        assert len(self.coord_targets) == len(positions)
        assert all(0 <= position < length for position in positions), "a supervised coord slot lies outside the assistant span"
        assert all(a < b for a, b in pairwise(positions))
        assert all(self.roles[list(positions)] == TokenRole.COORD), "a supervised slot is no coord token"
        assert all(0 <= position < length for position in self.credit.positions), "a sampled token lies outside the target"


@dataclass(frozen=True, slots=True)
class _Slots:
    """Supervised coord slots of some objects, in order; positions relative to the first token of what holds them."""

    positions: list[int]
    targets: list[float]
    boxes: list[int]
    """The first slot of each box."""

    @classmethod
    def empty(cls) -> _Slots:
        return cls([], [], [])

    def add(self, positions: Sequence[int], targets: Sequence[float], *, is_box: bool) -> None:
        """`is_box`: the four slots of a box, with a box as target. Aims of optimal transport are for coord tokens, no box to regress to."""
        if is_box:
            self.boxes.append(len(self.positions))
        self.positions.extend(positions)
        self.targets.extend(targets)


@dataclass(frozen=True, slots=True)
class _Tail:
    """Serialised ground truth as tokens, closing brace and EOS included. Positions relative to its first token."""

    token_ids: list[int]
    roles: list[TokenRole]
    slots: _Slots


def ground_truth_target(sample: Sample, codec: TokenCodec, rules: TargetRules) -> Target:
    """Channel A: the sample's objects in record order."""
    tail = _tail(layout_objects(sample.objects, field_order=rules.field_order), sample.objects, codec)
    return _target(sample.sample_id, (), np.empty(0, np.uint8), _Slots.empty(), tail)


def rollout_target(rollout: Rollout, sample: Sample, codec: TokenCodec, rules: TargetRules) -> Target:
    """Channel B: the rollout's prefix with its matched slots moved to the ground truth, the unmatched ground truth appended."""
    parsed = parse_rollout(rollout.response_token_ids, codec, geometry=rules.geometry)
    target = parsed_target(parsed, sample, codec, rules)
    if rollout.logprobs is None:
        return target
    # EOS at the end of the target is the target's own and teacher-forced, whether or not the rollout's was forced.
    num_sampled = min((parsed.num_unchanged, *rollout.forced_positions))
    return replace(target, sampled_logprobs=rollout.logprobs[:num_sampled])


def parsed_target(parsed: ParsedRollout, sample: Sample, codec: TokenCodec, rules: TargetRules) -> Target:
    """The target of a rollout that was parsed already.

    A matched prediction whose slots cannot be supervised is excluded: its tokens are neutral and its ground truth is appended.
    """
    match = match_objects(
        parsed.objects,
        sample.objects,
        candidate_top_k=rules.matching.candidate_top_k,
        maskiou_gate=rules.matching.maskiou_gate,
        maskiou_resolution=rules.matching.maskiou_resolution,
        fp_cost=rules.matching.fp_cost,
        fn_cost=rules.matching.fn_cost,
    )
    roles = np.full(len(parsed.prefix_token_ids), TokenRole.NEUTRAL, dtype=np.uint8)
    slots = _Slots.empty()
    supervised: list[MatchedPair] = []
    for pair in match.pairs:
        prediction, truth = parsed.objects[pair.prediction], sample.objects[pair.ground_truth]
        aims = _aims(prediction, truth, parsed, codec, rules)
        if aims is None:
            continue
        supervised.append(pair)
        roles[slice(*prediction.span)] = TokenRole.MATCHED_STRUCTURE
        roles[list(prediction.desc_positions)] = TokenRole.NEUTRAL
        roles[list(prediction.coord_positions)] = TokenRole.COORD
        both_boxes = prediction.kind is truth.kind is GeometryKind.BBOX
        slots.add(prediction.coord_positions, aims, is_box=both_boxes)

    taken = {pair.ground_truth for pair in supervised}
    appended = tuple(index for index in range(len(sample.objects)) if index not in taken)
    objects = tuple(sample.objects[index] for index in appended)
    start_index = 1 if parsed.max_object_index is None else parsed.max_object_index + 1
    text = layout_append(parsed.prefix_text, objects, start_index=start_index, field_order=rules.field_order)
    excluded = tuple(pair for pair in match.pairs if pair.ground_truth not in taken)
    reading = Reading(parsed, match, tuple(supervised), excluded, appended, text.text)
    return _target(sample.sample_id, parsed.prefix_token_ids, roles, slots, _tail(text, objects, codec), reading)


def _aims(prediction: ParsedObject, truth: GroundTruthObject, parsed: ParsedRollout, codec: TokenCodec, rules: TargetRules) -> tuple[float, ...] | None:
    """Where each slot of a matched prediction should point, 0..999; None where its slots are not sure or no aim can be computed."""
    return slot_targets(prediction, truth, rules.transport) if _are_slots(prediction, parsed, codec) else None


def _are_slots(prediction: ParsedObject, parsed: ParsedRollout, codec: TokenCodec) -> bool:
    """Whether the positions are the object's coord tokens beyond doubt: one for each bin, in order, inside the object, holding that bin."""
    positions, (start, stop) = prediction.coord_positions, prediction.span
    return (
        len(positions) == len(prediction.bins)
        and all(a < b for a, b in pairwise(positions))
        and all(start <= position < stop for position in positions)
        and all(codec.coord_bin(parsed.prefix_token_ids[position]) == bin for position, bin in zip(positions, prediction.bins, strict=True))
    )


def _target(sample_id: str, prefix: Sequence[int], roles: np.ndarray, slots: _Slots, tail: _Tail, reading: Reading | None = None) -> Target:
    """A prefix and its tail as one sequence."""
    offset, num_slots = len(prefix), len(slots.positions)
    return Target(
        sample_id,
        (*prefix, *tail.token_ids),
        np.concatenate([roles, np.array(tail.roles, dtype=np.uint8)]),
        coord_positions=(*slots.positions, *(offset + position for position in tail.slots.positions)),
        coord_targets=(*slots.targets, *tail.slots.targets),
        box_slots=(*slots.boxes, *(num_slots + slot for slot in tail.slots.boxes)),
        reading=reading,
    )


def _tail(text: SerializedText, objects: Sequence[GroundTruthObject], codec: TokenCodec) -> _Tail:
    token_ids = codec.encode(text.text)
    spans = piece_spans(token_ids, codec)
    assert spans[-1][1] == len(text.text.encode()), "encoding the target changed its text"
    roles = [TokenRole.STRUCTURE] * len(token_ids)
    slots = _Slots.empty()
    for layout, object_ in zip(text.objects, objects, strict=True):
        for position in _overlapping(spans, layout.desc):
            roles[position] = TokenRole.DESC
        positions: list[int] = []
        for span, bin_ in zip(layout.coords, object_.bins, strict=True):
            (position,) = _overlapping(spans, span)
            assert codec.coord_bin(token_ids[position]) == bin_
            roles[position] = TokenRole.COORD
            positions.append(position)
        slots.add(positions, object_.bins, is_box=object_.kind is GeometryKind.BBOX)
    for position in _overlapping(spans, text.closing):
        roles[position] = TokenRole.CLOSING
    return _Tail([*token_ids, codec.eos_token_id], [*roles, TokenRole.CLOSING], slots)


def _overlapping(spans: Sequence[tuple[int, int]], span: tuple[int, int]) -> range:
    """Positions of the tokens whose bytes overlap `span`; token spans are contiguous and ascending."""
    first = bisect_right(spans, span[0], key=lambda token: token[1])
    return range(first, bisect_left(spans, span[1], lo=first, key=lambda token: token[0]))
