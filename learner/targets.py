"""Targets: the tokens that a segment trains on, and the supervision of each token.

Decided once, where a target is made; objectives only consume it. Each algorithm has its type:

    Target            text, coord slots and boxes, each token with what it is taught
                      (learner/algorithms/matched_targets.py)
    AdvantageTarget   sampled tokens, each with its advantage
                      (learner/algorithms/advantages.py)

In both, the engine's log-probabilities of some tokens are *compared* with the learner's.

Shape legend: L target tokens, S coord slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from learner.algorithms.advantages import TokenAdvantages
from learner.ot_targets import OTSettings
from shared.config import RunConfig
from shared.config.pipeline import Channel, PipelineSection, TokenCEEntry
from shared.grounding.json_list import PictureResize
from shared.grounding.matching import MatchedPair, MatchResult
from shared.grounding.objects import ParsedRollout
from shared.grounding.serialize import AnswerFormat
from shared.records import POINT_TOLERANCE, GeometryKind


class TokenRole(IntEnum):
    """The kind of a target token. Role and channel decide its weight in `token_ce`."""

    NEUTRAL = 0
    """Prefix text that is not of matched objects alone. Never supervised."""
    STRUCTURE = 1
    """Serialised ground truth, with keys and separators; the opening brace where it is ours."""
    DESC = 2
    """Overlaps the value of a serialised `desc`."""
    MATCHED_STRUCTURE = 3
    """A matched object's value `{...}` in the prefix, without its desc and coord tokens."""
    COORD = 4
    """A coord slot: `coord_reg`'s, whatever the role weights are."""
    CLOSING = 5
    """The closing top-level brace, or EOS."""
    SEPARATOR = 6
    """The prefix's token that goes on to a matched object (`supervise_separators`)."""
    CORRECTED_DESC = 7
    """Where a matched object's name first differs from its ground truth's: a `LabelOverride`."""
    DIGITS = 8
    """Overlaps a coordinate in digits: ours, or a matched object's as far as it is right."""
    CORRECTED_DIGITS = 9
    """Where a matched object's coordinate first differs from its ground truth's: a
    `LabelOverride`."""


@dataclass(frozen=True, slots=True)
class TextWeights:
    """The token weights of one channel, from `token_ce`'s configuration. Other roles weigh 0.

    Example: `TextWeights(desc=0.5, matched_structure=0)` weighs an appended entry's structure 1,
    its description 0.5, and the model's own text 0.
    """

    desc: float
    matched_structure: float
    structure: float = 1.0
    """The weight of serialised ground truth, coordinates in digits, separators of the prefix,
    closing brace and EOS; 0 where no text is supervised."""
    matched_desc: float = 0.0
    """The weight of labels that correct the name of a matched object."""
    fp_end: float = 1.0
    """Factor of `structure` for closing brace and EOS where the prefix holds false positives."""

    def of(self, target: Target) -> np.ndarray:
        """Look up the weights of the target's tokens: float32 [L], at least 0."""
        has_false_positives = target.reading is not None and target.reading.false_positives
        # Roles that are not set below (NEUTRAL, COORD) stay 0: coord slots are `coord_reg`'s.
        table = np.zeros(len(TokenRole), dtype=np.float32)
        table[TokenRole.STRUCTURE] = table[TokenRole.SEPARATOR] = self.structure
        table[TokenRole.DIGITS] = table[TokenRole.CORRECTED_DIGITS] = self.structure
        table[TokenRole.CLOSING] = self.structure * (self.fp_end if has_false_positives else 1.0)
        table[TokenRole.DESC] = self.desc
        table[TokenRole.MATCHED_STRUCTURE] = self.matched_structure
        table[TokenRole.CORRECTED_DESC] = self.matched_desc
        return table[target.roles]


def text_weights(pipeline: PipelineSection, channel: Channel) -> TextWeights:
    """Return the weights of `token_ce`'s active entry; all 0 without one."""
    for entry in pipeline.active(channel):
        if isinstance(entry, TokenCEEntry):
            config = entry.config
            # Channel A has no rollout: no matched prefix, no name to correct, no false positive.
            if channel is Channel.A:
                return TextWeights(config.desc_ce_weight, matched_structure=0.0)
            return TextWeights(
                config.rollout_fn_desc_weight,
                config.rollout_matched_prefix_struct_weight,
                matched_desc=config.matched_desc_weight,
                fp_end=config.fp_end_weight,
            )
    return TextWeights(desc=0.0, matched_structure=0.0, structure=0.0)


@dataclass(frozen=True, slots=True)
class MatchSettings:
    """Keyword arguments of `match_objects`, as `rollout_matching` configures them."""

    candidate_top_k: int
    maskiou_gate: float
    maskiou_resolution: int
    fp_cost: float
    fn_cost: float
    point_tolerance: float = POINT_TOLERANCE


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """The configuration of targets, whatever the channel."""

    geometry: frozenset[GeometryKind]
    answer_format: AnswerFormat
    matching: MatchSettings
    transport: OTSettings
    """Between a polygon and its match."""
    trims_false_positives: bool = False
    """Keep the rollout only as far as its last supervised object."""
    supervises_separators: bool = False
    """Teach the prefix to go on where a supervised object follows."""
    corrects_names: bool = False
    """Teach the ground truth's name where a supervised object's differs."""

    def for_pictures(self, resize: PictureResize) -> TargetSettings:
        """Return the settings of a model that is shown its pictures so."""
        return replace(self, answer_format=self.answer_format.for_pictures(resize))

    def with_gate(self, maskiou_gate: float) -> TargetSettings:
        """Return the settings of a step with this gate."""
        return replace(self, matching=replace(self.matching, maskiou_gate=maskiou_gate))


def target_settings(config: RunConfig) -> TargetSettings:
    """Read how targets are made from the configuration; the gate is that behind its schedule."""
    section = config.rollout_matching
    return TargetSettings(
        geometry=config.geometry,
        answer_format=config.answer_format,
        matching=MatchSettings(
            candidate_top_k=section.candidate_top_k,
            maskiou_gate=section.maskiou_gate,
            maskiou_resolution=section.maskiou_resolution,
            fp_cost=section.fp_cost,
            fn_cost=section.fn_cost,
            point_tolerance=section.point_tolerance,
        ),
        transport=OTSettings(
            section.ot_cost, section.ot_epsilon, section.ot_iters, section.ot_epsilon_cap
        ),
        trims_false_positives=section.trim_trailing_false_positives,
        supervises_separators=section.supervise_separators,
        corrects_names=text_weights(section.pipeline, Channel.B).matched_desc > 0,
    )


@dataclass(frozen=True, slots=True)
class ParsedAndMatched:
    """One rollout on its way to a target. Predictions are indices into `parsed.objects`.

    Example: predictions 0 and 1, ground truths 0 and 1, where prediction 0 matches ground truth 0
    and nothing else: `supervised` [(0, 0, 0.8)], `excluded` (), `appended` (1,).
    """

    parsed: ParsedRollout
    kept: ParsedRollout
    """What the target begins with: `parsed`, unless false positives behind the last supervised
    object were trimmed."""
    match: MatchResult
    supervised: tuple[MatchedPair, ...]
    """The matched pairs whose slots are supervised, by prediction."""
    excluded: tuple[MatchedPair, ...]
    """The matched pairs whose slots cannot be supervised; their ground truth is appended."""
    appended: tuple[int, ...]
    """The sample's objects that were appended, ascending."""
    appended_text: str
    num_kept: int = 0
    """Leading target tokens that are the rollout's own."""
    num_prefix: int = 0
    """Leading target tokens without appended text. Those from `num_kept` on were encoded anew."""
    num_capped: int = 0
    """Supervised pairs that were transported with less than `ot_epsilon`."""

    @property
    def num_trimmed(self) -> int:
        """Count the entries, valid or not, that were cut off behind the last supervised object."""
        kept = len(self.kept.objects) + len(self.kept.dropped)
        return len(self.parsed.objects) + len(self.parsed.dropped) - kept

    @property
    def false_positives(self) -> tuple[int, ...]:
        """The unmatched predictions that the target has in its kept prefix."""
        number = len(self.kept.objects)
        return tuple(one for one in self.match.unmatched_predictions if one < number)


class LabelOverride(NamedTuple):
    """A token that is taught in the place of the target's own, which stays the model's input.

    Example: `(5, 812, 0)`: behind the target's first five tokens, token 812 is taught, so that
    prediction 0 takes the name of its ground truth.
    """

    position: int
    """Of the target's token that is not taught."""
    token_id: int
    prediction: int


@dataclass(frozen=True, slots=True)
class Target:
    """`Y_train` of one sample, of rollout matching. Positions are relative to its first token.

    Example (an empty ground truth on channel A): token_ids of `{`, `}` and EOS, roles [STRUCTURE,
    CLOSING, CLOSING], no coord positions, no boxes.
    """

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
    """Indices into [S], ascending: the first slot of each supervised box whose ground
    truth is a box."""
    compared_logprobs: tuple[float, ...] = ()
    """The engine's log-probabilities of the tokens at `compared_positions`; empty in channel A."""
    reading: ParsedAndMatched | None = None
    """The parsed and matched rollout; None in channel A."""
    label_overrides: tuple[LabelOverride, ...] = ()
    """Ascending. Every other token that is taught is the target's own."""

    @property
    def compared_positions(self) -> range:
        """Positions of the tokens to compare: leading ones, which the engine sampled."""
        return range(len(self.compared_logprobs))

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        positions = self.coord_positions
        assert self.roles.shape == (length,)
        assert len(self.coord_targets) == len(positions)
        assert all(0 <= position < length for position in positions), (
            "a supervised coord slot lies outside the assistant span"
        )
        # `coord_targets` and `box_slots` follow this order; a slot listed twice would count twice.
        assert all(a < b for a, b in pairwise(positions))
        assert all(self.roles[list(positions)] == TokenRole.COORD), (
            "a supervised slot is no coord token"
        )
        is_corrected = np.isin(self.roles, (TokenRole.CORRECTED_DESC, TokenRole.CORRECTED_DIGITS))
        corrected = np.flatnonzero(is_corrected).tolist()
        assert corrected == [one.position for one in self.label_overrides], (
            "exactly what is corrected has a label of its own"
        )


@dataclass(frozen=True, slots=True)
class AdvantageTarget:
    """Sampled tokens that are learned by their advantage. Positions are as in `Target`.

    Example: the first two tokens were sampled in one call, the third is a tool's, the fourth was
    sampled in the next call: `token_ids` of all four, `credit.positions` (0, 1, 3).
    """

    sample_id: str
    token_ids: tuple[int, ...]
    """[L]. Those between the calls of a conversation are only read."""
    credit: TokenAdvantages
    """The learned tokens."""
    compared_logprobs: tuple[float, ...] = ()
    """The engine's log-probabilities of the tokens at `compared_positions`."""

    @property
    def compared_positions(self) -> tuple[int, ...]:
        """Positions of the tokens to compare: the learned ones, or none."""
        return self.credit.positions[: len(self.compared_logprobs)]

    def __post_init__(self) -> None:
        assert all(0 <= position < len(self.token_ids) for position in self.credit.positions), (
            "a learned token lies outside the target"
        )
