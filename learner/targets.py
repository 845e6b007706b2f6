"""What a sample trains on: `Y_train` and, token by token, what supervises it. Decided here, once; objectives only consume it.

Channel A: the ground truth serialised, closed, EOS. Channel B: the kept prefix of the model's own rollout, the unmatched ground truth
appended, closed, EOS (spec rollout-matching-sft: one canonical teacher-forced target sequence; DESIGN 8).

Shape legend: L target tokens, S coord slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from shared.grounding.matching import match_objects
from shared.grounding.objects import ParsedRollout
from shared.grounding.parsing import parse_rollout
from shared.grounding.serialize import SerializedText, layout_append, layout_objects
from shared.records import GeometryKind, GroundTruthObject, Sample
from shared.rollouts import FinishReason, Rollout
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

    def of(self, roles_L: np.ndarray) -> np.ndarray:
        """float32 [L], at least 0."""
        table = np.zeros(len(TokenRole), dtype=np.float32)
        table[TokenRole.STRUCTURE] = table[TokenRole.CLOSING] = 1.0
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


@dataclass(frozen=True, slots=True)
class Target:
    """`Y_train` of one sample. Positions are relative to its first token."""

    sample_id: str
    token_ids: tuple[int, ...]
    """[L], EOS last."""
    roles: np.ndarray
    """uint8 [L] of TokenRole."""
    coord_positions: tuple[int, ...]
    """[S], ascending: the supervised slots, four to a box."""
    coord_bins: tuple[int, ...]
    """[S], 0..999: where each slot should point."""
    sampled_logprobs: tuple[float, ...] = ()
    """The engine's log-probabilities of the leading tokens that are the rollout's own; empty in channel A."""
    counters: Mapping[str, float] = field(default_factory=dict)
    """`rollout/...` counters of this sample; none in channel A."""

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        assert self.roles.shape == (length,)
        assert len(self.coord_bins) == len(self.coord_positions)
        assert all(0 <= position < length for position in self.coord_positions), "a supervised coord slot lies outside the assistant span"
        assert all(self.roles[list(self.coord_positions)] == TokenRole.COORD)


@dataclass(frozen=True, slots=True)
class _Tail:
    """Serialised ground truth as tokens, closing brace and EOS included. Positions relative to its first token."""

    token_ids: list[int]
    roles: list[TokenRole]
    coord_positions: list[int]
    coord_bins: list[int]


def ground_truth_target(sample: Sample, codec: TokenCodec, rules: TargetRules) -> Target:
    """Channel A: the sample's objects in record order."""
    tail = _tail(layout_objects(sample.objects, field_order=rules.field_order), sample.objects, codec)
    return Target(sample.sample_id, tuple(tail.token_ids), np.array(tail.roles, dtype=np.uint8), tuple(tail.coord_positions), tuple(tail.coord_bins))


def rollout_target(rollout: Rollout, sample: Sample, codec: TokenCodec, rules: TargetRules) -> Target:
    """Channel B: the rollout's prefix with its matched slots moved to the ground truth, the unmatched ground truth appended."""
    parsed = parse_rollout(rollout.response_token_ids, codec, geometry=rules.geometry)
    matching = rules.matching
    match = match_objects(
        parsed.objects,
        sample.objects,
        candidate_top_k=matching.candidate_top_k,
        maskiou_gate=matching.maskiou_gate,
        maskiou_resolution=matching.maskiou_resolution,
        fp_cost=matching.fp_cost,
        fn_cost=matching.fn_cost,
    )
    appended = tuple(sample.objects[i] for i in match.unmatched_ground_truth)
    start_index = 1 if parsed.max_object_index is None else parsed.max_object_index + 1
    tail = _tail(layout_append(parsed.prefix_text, appended, start_index=start_index, field_order=rules.field_order), appended, codec)

    offset = len(parsed.prefix_token_ids)
    roles = np.full(offset + len(tail.token_ids), TokenRole.NEUTRAL, dtype=np.uint8)
    slots: list[tuple[int, int]] = []
    for pair in match.pairs:
        prediction = parsed.objects[pair.prediction]
        roles[slice(*prediction.span)] = TokenRole.MATCHED_STRUCTURE
        roles[list(prediction.desc_positions)] = TokenRole.NEUTRAL
        roles[list(prediction.coord_positions)] = TokenRole.COORD
        slots += zip(prediction.coord_positions, sample.objects[pair.ground_truth].bins, strict=True)
    slots.sort()
    roles[offset:] = tail.roles
    return Target(
        sample.sample_id,
        parsed.prefix_token_ids + tuple(tail.token_ids),
        roles,
        tuple(position for position, _ in slots) + tuple(offset + position for position in tail.coord_positions),
        tuple(bin_ for _, bin_ in slots) + tuple(tail.coord_bins),
        sampled_logprobs=() if rollout.logprobs is None else rollout.logprobs[: parsed.num_unchanged],
        counters=_counters(rollout, parsed, len(sample.objects), len(match.pairs), match.gating_rejections),
    )


def _tail(text: SerializedText, objects: Sequence[GroundTruthObject], codec: TokenCodec) -> _Tail:
    token_ids = codec.encode(text.text)
    spans = piece_spans(token_ids, codec)
    assert spans[-1][1] == len(text.text.encode()), "encoding the target changed its text"
    roles = [TokenRole.STRUCTURE] * len(token_ids)
    coord_positions: list[int] = []
    coord_bins: list[int] = []
    for layout, object_ in zip(text.objects, objects, strict=True):
        for position in _overlapping(spans, layout.desc):
            roles[position] = TokenRole.DESC
        for span, bin_ in zip(layout.coords, object_.bins, strict=True):
            (position,) = _overlapping(spans, span)
            assert codec.coord_bin(token_ids[position]) == bin_
            roles[position] = TokenRole.COORD
            coord_positions.append(position)
            coord_bins.append(bin_)
    for position in _overlapping(spans, text.closing):
        roles[position] = TokenRole.CLOSING
    return _Tail([*token_ids, codec.eos_token_id], [*roles, TokenRole.CLOSING], coord_positions, coord_bins)


def _overlapping(spans: Sequence[tuple[int, int]], span: tuple[int, int]) -> range:
    """Positions of the tokens whose bytes overlap `span`; token spans are contiguous and ascending."""
    first = next(i for i, (_, end) in enumerate(spans) if end > span[0])
    last = next((i for i in range(first, len(spans)) if spans[i][0] >= span[1]), len(spans))
    return range(first, last)


def _counters(rollout: Rollout, parsed: ParsedRollout, num_ground_truth: int, num_matched: int, gating_rejections: int) -> dict[str, float]:
    counters: dict[str, float] = {
        "rollout/num": 1,
        "rollout/num_tokens": len(rollout.response_token_ids),
        "rollout/num_length_limited": float(rollout.finish_reason is FinishReason.LENGTH),
        "rollout/num_truncated": float(parsed.truncated),
        "rollout/num_fallback": float(parsed.fallback),
        "rollout/num_valid_objects": len(parsed.objects),
        "rollout/num_dropped_objects": len(parsed.dropped),
        "rollout/num_ground_truth": num_ground_truth,
        "rollout/num_matched": num_matched,
        "rollout/num_appended": num_ground_truth - num_matched,
        "rollout/num_gating_rejections": gating_rejections,
    }
    for dropped in parsed.dropped:
        name = f"rollout/num_dropped.{dropped.reason}"
        counters[name] = counters.setdefault(name, 0) + 1
    return counters
