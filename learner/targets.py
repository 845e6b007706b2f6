"""Targets: the tokens that a segment trains on after its prompt, and each token's supervision.

Supervision is decided when a target is built, and objectives only read it. The types are:

    Target            text, coordinate slots and boxes with their labels
                      (learner/algorithms/matched_targets.py)
    AdvantageTarget   sampled tokens, each with its advantage
                      (learner/algorithms/advantages.py)

In both, the engine's log-probabilities of some tokens are *compared* with the learner's.

Shape legend: L target tokens, S coordinate slots.
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
    """The kind of a target token. Role and channel decide its weight in the `token_ce` loss."""

    NEUTRAL = 0
    """Sampled text without supervision: unmatched objects, separators, matched objects' descs."""
    STRUCTURE = 1
    """Text of serialised ground truth, with keys and separators; an opening brace that was not
    sampled."""
    DESC = 2
    """Overlaps the class name (value of `desc`) of a serialised ground-truth object."""
    MATCHED_STRUCTURE = 3
    """The sampled JSON value `{...}` of a matched object, without desc and coordinate tokens."""
    COORD = 4
    """A coordinate token to learn. `coord_reg` and `bbox_geo` train it, not `token_ce`."""
    CLOSING = 5
    """The end of the whole answer (such as its closing top-level brace), or EOS."""
    SEPARATOR = 6
    """The sampled token before a matched object that continues the answer instead of ending it
    (`supervise_separators`)."""
    CORRECTED_DESC = 7
    """The first token of a matched object's desc that differs from the ground truth; it has a
    `LabelOverride`."""
    DIGITS = 8
    """Overlaps a coordinate in digits, of a serialised ground-truth object or of a matched object.
    In a matched object, only the coordinate's tokens before a `CORRECTED_DIGITS` have this role."""
    CORRECTED_DIGITS = 9
    """The first token of a matched object's coordinate that differs from the ground truth; it has a
    `LabelOverride`."""


@dataclass(frozen=True, slots=True)
class TextWeights:
    """The weights of target tokens in the loss `token_ce` by their role, for one channel.

    Example: `TextWeights(desc=0.5, matched_structure=0)` gives the structure of an appended entry
    weight 1, its desc 0.5, and the sampled text 0.
    """

    desc: float
    matched_structure: float
    structure: float = 1.0
    """The weight of serialised ground truth and supervised separators, coordinates in digits,
    closing brace and EOS. It is 0 if no text is supervised."""
    matched_desc: float = 0.0
    """The weight of labels that correct the desc of a matched object."""
    fp_end: float = 1.0
    """Factor of `structure` for closing brace and EOS if the target keeps false positives
    (predicted objects without a match)."""

    def of(self, target: Target) -> np.ndarray:
        """Return the weights of the target's tokens: float32 [L], at least 0."""
        has_false_positives = target.reading is not None and target.reading.false_positives
        # Roles that are not set below (NEUTRAL, COORD) stay 0: other objectives train the slots.
        table = np.zeros(len(TokenRole), dtype=np.float32)
        table[TokenRole.STRUCTURE] = table[TokenRole.SEPARATOR] = self.structure
        table[TokenRole.DIGITS] = table[TokenRole.CORRECTED_DIGITS] = self.structure
        table[TokenRole.CLOSING] = self.structure * (self.fp_end if has_false_positives else 1.0)
        table[TokenRole.DESC] = self.desc
        table[TokenRole.MATCHED_STRUCTURE] = self.matched_structure
        table[TokenRole.CORRECTED_DESC] = self.matched_desc
        return table[target.roles]


def text_weights(pipeline: PipelineSection, channel: Channel) -> TextWeights:
    """Return the channel's weights of text tokens, as the pipeline's `token_ce` entry says.

    All weights are 0 without such an entry.
    """
    for entry in pipeline.active(channel):
        if isinstance(entry, TokenCEEntry):
            config = entry.config
            # Channel A has no rollout, so no matched prefix, desc to correct or false positive.
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
    """Settings of matching predicted with ground-truth objects (arguments of `match_objects`)."""

    candidate_top_k: int
    maskiou_gate: float
    maskiou_resolution: int
    fp_cost: float
    fn_cost: float
    point_tolerance: float = POINT_TOLERANCE


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """The settings with which targets are made from ground truth and rollouts."""

    geometry: frozenset[GeometryKind]
    answer_format: AnswerFormat
    matching: MatchSettings
    transport: OTSettings
    """Settings of the optimal transport for matched polygons."""
    trims_false_positives: bool = False
    """Whether the target keeps the rollout only up to its last supervised object."""
    supervises_separators: bool = False
    """Whether the token that continues the answer is taught if a supervised object follows."""
    corrects_names: bool = False
    """Whether the ground truth's desc is taught if a supervised object has another desc."""

    def for_pictures(self, resize: PictureResize) -> TargetSettings:
        """Return these settings for a model whose processor resizes images with `resize`."""
        return replace(self, answer_format=self.answer_format.for_pictures(resize))

    def with_gate(self, maskiou_gate: float) -> TargetSettings:
        """Return these settings with another maskIoU gate, the least overlap of a match.

        The gate can follow a schedule over the steps.
        """
        return replace(self, matching=replace(self.matching, maskiou_gate=maskiou_gate))


def target_settings(config: RunConfig) -> TargetSettings:
    """Return the target settings of a run.

    The maskIoU gate has its value at the end of its schedule.
    """
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
    """A rollout's parsed objects, their matches with the ground truth, and what the target keeps.

    Predictions are indices into `parsed.objects`.

    Example: predictions 0 and 1, ground truths 0 and 1, and only prediction 0 matches ground truth
    0: `supervised` [(0, 0, 0.8)], `excluded` (), `appended` (1,).
    """

    parsed: ParsedRollout
    kept: ParsedRollout
    """The part of `parsed` that the target begins with. It is `parsed` itself, unless false
    positives after the last supervised object were trimmed."""
    match: MatchResult
    supervised: tuple[MatchedPair, ...]
    """The matched pairs whose coordinates are supervised, in order of predictions."""
    excluded: tuple[MatchedPair, ...]
    """The matched pairs whose coordinates cannot be supervised. Their ground truth is appended."""
    appended: tuple[int, ...]
    """Indices of the ground-truth objects that were appended to the answer, ascending."""
    appended_text: str
    num_kept: int = 0
    """Number of leading target tokens that were sampled."""
    num_prefix: int = 0
    """Number of target tokens before the appended text. The tokens from `num_kept` on were not
    sampled: the end of the kept text was encoded again."""
    num_capped: int = 0
    """Number of supervised pairs whose epsilon `OTSettings.epsilon_cap` lowered."""

    @property
    def num_trimmed(self) -> int:
        """The number of predicted objects, valid or not, cut off after the last supervised one."""
        kept = len(self.kept.objects) + len(self.kept.dropped)
        return len(self.parsed.objects) + len(self.parsed.dropped) - kept

    @property
    def false_positives(self) -> tuple[int, ...]:
        """Indices of the unmatched predicted objects that the target keeps."""
        number = len(self.kept.objects)
        return tuple(one for one in self.match.unmatched_predictions if one < number)


class LabelOverride(NamedTuple):
    """A token that is taught instead of the target's token at one position.

    The target's token remains the model's input at the next position.

    Example: `(5, 812, 0)`: after the target's first five tokens, token 812 is taught, so that
    prediction 0 gets the desc of its ground truth.
    """

    position: int
    """Position of the replaced token in the target."""
    token_id: int
    """The token that is taught."""
    prediction: int


@dataclass(frozen=True, slots=True)
class Target:
    """The target of rollout matching (`Y_train`): text, coordinate slots and boxes to learn.

    Positions count from the target's first token.

    Example (an empty ground truth on channel A): token_ids of `{`, `}` and EOS, roles [STRUCTURE,
    CLOSING, CLOSING], no coordinate positions, no boxes.
    """

    sample_id: str
    token_ids: tuple[int, ...]
    """[L]: the tokens to learn, EOS last."""
    roles: np.ndarray
    """uint8 [L]: the `TokenRole` of each token."""
    coord_positions: tuple[int, ...]
    """[S], ascending: positions of the supervised coordinate tokens, object after object."""
    coord_targets: tuple[float, ...]
    """[S], 0..999: the bin to learn at each slot; fractional if from optimal transport."""
    box_slots: tuple[int, ...]
    """Ascending indices into `coord_positions`: the first coordinate of each supervised box whose
    ground truth is a box."""
    compared_logprobs: tuple[float, ...] = ()
    """The engine's log-probabilities of the tokens at `compared_positions`; empty in channel A."""
    reading: ParsedAndMatched | None = None
    """The parsed and matched rollout; None in channel A."""
    label_overrides: tuple[LabelOverride, ...] = ()
    """Positions with another label than the target's own token, ascending."""

    @property
    def compared_positions(self) -> range:
        """Positions of the tokens whose log-probabilities are compared with the engine's.

        They are the leading tokens, which the engine sampled.
        """
        return range(len(self.compared_logprobs))

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        positions = self.coord_positions
        assert self.roles.shape == (length,)
        assert len(self.coord_targets) == len(positions)
        assert all(0 <= position < length for position in positions), (
            "a supervised coordinate slot lies outside the target"
        )
        # `coord_targets` and `box_slots` follow this order. A slot must not occur twice.
        assert all(a < b for a, b in pairwise(positions))
        assert all(self.roles[list(positions)] == TokenRole.COORD), (
            "a supervised slot is not a coordinate token"
        )
        is_corrected = np.isin(self.roles, (TokenRole.CORRECTED_DESC, TokenRole.CORRECTED_DIGITS))
        corrected = np.flatnonzero(is_corrected).tolist()
        assert corrected == [one.position for one in self.label_overrides], (
            "the corrected tokens must be exactly those with a label override"
        )


@dataclass(frozen=True, slots=True)
class AdvantageTarget:
    """The target of policy gradient: sampled tokens, each with its advantage.

    Positions count from the target's first token.

    Example: one model call sampled the first two tokens, a tool returned the third, and the next
    model call sampled the fourth: `token_ids` of all four, `credit.positions` (0, 1, 3).
    """

    sample_id: str
    token_ids: tuple[int, ...]
    """[L]. Tokens between model calls are context only."""
    credit: TokenAdvantages
    """The learned tokens and their advantages."""
    compared_logprobs: tuple[float, ...] = ()
    """The engine's log-probabilities of the tokens at `compared_positions`."""

    @property
    def compared_positions(self) -> tuple[int, ...]:
        """Positions of the tokens whose log-probabilities are compared with the engine's.

        These are the positions of all learned tokens, or none.
        """
        return self.credit.positions[: len(self.compared_logprobs)]

    def __post_init__(self) -> None:
        assert all(0 <= position < len(self.token_ids) for position in self.credit.positions), (
            "a learned token lies outside the target"
        )
