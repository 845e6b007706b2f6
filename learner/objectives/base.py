"""The interface of objectives: the supervision and values of a row, and the losses of them.

Every term is a weighted sum over a row's positions. The weights already hold the means within a
segment, so that the terms of rows add and packing cannot change a step's loss (decision 6).

Shape legend: N positions whose logits are needed, X of them text, S of them coord slots, K of them
predict tokens to compare, M of them sampled tokens that are learned by their advantage, T
tokens that the reference finds most probable, J = T + 1, B boxes, C the 1,000 coord bins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any, NamedTuple, Protocol

import torch


class TextSupervision(NamedTuple):
    """Supervised text tokens, a column per field."""

    at: torch.Tensor
    """int64 [X], into the N positions, ascending."""
    weight: torch.Tensor
    """float32 [X]: token weight / segment's sum of token weights."""
    gate_weight: torch.Tensor
    """float32 [X]: the same without closing brace and EOS, where it is 0."""


class CoordSupervision(NamedTuple):
    """Supervised coord slots, a column per field."""

    at: torch.Tensor
    """int64 [S], into the N positions, ascending."""
    targets: torch.Tensor
    """float32 [S], 0..999: the bin to point at; a fraction where optimal transport says so."""
    weight: torch.Tensor
    """float32 [S]: 1 / slots of the segment."""


class BoxSupervision(NamedTuple):
    """Supervised boxes, a column per field."""

    slots: torch.Tensor
    """int64 [B, 4], into the S coord slots of the row: those of x1, y1, x2, y2."""
    weight: torch.Tensor
    """float32 [B]: 1 / boxes of the segment."""


class TeacherSupervision(NamedTuple):
    """What a teacher says of the sampled tokens, a column per field."""

    logprobs: torch.Tensor
    """float32 [M]"""
    weight: torch.Tensor
    """float32 [M], of the teacher's part of the advantage."""


class LearnedSupervision(NamedTuple):
    """Sampled tokens that are learned by their advantage, a column per field."""

    at: torch.Tensor
    """int64 [M], into the N positions, ascending."""
    engine_logprobs: torch.Tensor
    """float32 [M], under the probabilities that the engine sampled from."""
    advantage: torch.Tensor
    """float32 [M], of the rewards: `learner.objectives.policy_gradient.advantages` is all of it."""
    weight: torch.Tensor
    """float32 [M], in the step's sum. With `normalize: step` the tokens of a call add up to 1, with
    `rollout` those of a rollout (`learner.algorithms.advantages`)."""
    call: torch.Tensor
    """int64 [M], ascending from 0 over the row: the call of the model that sampled it."""
    teacher: TeacherSupervision | None = None
    """None: no teacher has scored the tokens."""


NOTHING_LEARNED = LearnedSupervision(
    torch.empty(0, dtype=torch.int64),
    torch.empty(0),
    torch.empty(0),
    torch.empty(0),
    torch.empty(0, dtype=torch.int64),
)


class Supervision(NamedTuple):
    """Everything that supervises a row. Objectives consume it and never re-derive eligibility.

    Example (one segment with 5 text tokens and one box): `text.weight` five times 1/5, `coord.at`
    4 slots with `weight` 1/4, `boxes.slots` [[0, 1, 2, 3]] with `weight` [1.0].
    """

    text: TextSupervision
    coord: CoordSupervision
    boxes: BoxSupervision
    learned: LearnedSupervision = NOTHING_LEARNED


@dataclass(frozen=True, slots=True)
class LogitNeeds:
    """The values that a module needs besides the coord logits; others are not computed.

    Example: `LogitNeeds(text_ce=True) | LogitNeeds(coord_gate=0.8)` asks for both.
    """

    text_ce: bool = False
    text_gate: float | None = None
    """The gate's temperature; None: not asked."""
    coord_gate: float | None = None
    """The gate's temperature; None: not asked."""
    coord_mass: bool = False
    learned: bool = False
    """Log-probabilities of the tokens that are learned by their advantage."""
    reference: bool = False
    """The same of the weights that the run started with, which a run has that declares a
    `reference_kl`."""
    reference_top: int = 0
    """The tokens most probable to them at each sampled token, to be compared too."""

    def __or__(self, other: LogitNeeds) -> LogitNeeds:
        return LogitNeeds(
            *(_either(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        )


def _either(a: Any, b: Any) -> Any:
    # The logits are reduced once per row for all modules, so they must ask for the same gate.
    assert not a or not b or a == b, "a gate has one temperature per channel"
    return a or b


@dataclass(frozen=True, slots=True)
class ReferenceValues:
    """The policy that the run started with, at the tokens that are learned by their advantage.

    Float32 and finite, without gradient, under what the engine sampled from.

    Example: one token, of probability 1/2, and `reference_top` 2: `learned_logprobs_M` [log 1/2],
    `top_ids_MT` [[7, 3]], `top_logprobs_MJ` [[log 1/2, log 3/8, log 1/8]].
    """

    learned_logprobs_M: torch.Tensor
    """Log-probability of each token."""
    top_ids_MT: torch.Tensor | None
    """int64: the most probable tokens in its place, the most probable first; None where
    `reference_top` is 0."""
    top_logprobs_MJ: torch.Tensor | None
    """Theirs, and that of all other tokens together."""


@dataclass(frozen=True, slots=True)
class RowValues:
    """The reduced logits of a row: float32, differentiable, finite; None where not needed."""

    text_ce_X: torch.Tensor | None
    """Cross-entropy over the whole vocabulary, in nats."""
    text_gate_X: torch.Tensor | None
    """`-log(1 - p_coord)`"""
    coord_logits_SC: torch.Tensor
    coord_gate_S: torch.Tensor | None
    """`-log p_coord`"""
    coord_mass_S: torch.Tensor | None
    """`p_coord` at temperature 1."""
    compared_logprobs_K: torch.Tensor
    """Log-probabilities of the tokens to compare, under what the engine sampled from."""
    learned_logprobs_M: torch.Tensor | None = None
    """Likewise, of the tokens that are learned by their advantage."""
    reference: ReferenceValues | None = None
    """The same row under the weights that the run started with."""
    top_logprobs_MJ: torch.Tensor | None = None
    """Log-probabilities of the reference's most probable tokens, `reference.top_ids_MT`, and that
    of all others together."""


class ObjectiveLoss(NamedTuple):
    """The loss of one objective over one row.

    Example (weight 2, terms 0.5 and 0.25): `loss` 1.5, `terms` (0.5, 0.25).
    """

    loss: torch.Tensor
    """Scalar, the module's own weight included."""
    terms: tuple[torch.Tensor, ...]
    """Detached scalars for the log, without the module's weight, in the order of `term_names`."""


class Objective(Protocol):
    """A loss over a row's values and supervision. Made of its entry's `weight` and `config`."""

    @property
    def term_names(self) -> tuple[str, ...]:
        """Names of the terms, which are logged as `loss/<name>`."""

    @property
    def needs(self) -> LogitNeeds: ...

    def __call__(self, values: RowValues, supervision: Supervision) -> ObjectiveLoss: ...


class Diagnostic(Protocol):
    """Metrics of a row of which nothing is learned."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def needs(self) -> LogitNeeds: ...

    def __call__(self, values: RowValues, supervision: Supervision) -> tuple[torch.Tensor, ...]:
        """Return a column per name: a value per slot, or per sampled token that is learned.

        The step's metric is their mean over all of its rows. Called without gradient.
        """


@dataclass(frozen=True, slots=True)
class ChannelObjectives:
    """The objectives and diagnostics of one channel's rows."""

    objectives: tuple[Objective, ...]
    diagnostics: tuple[Diagnostic, ...]
    coord_ids_C: torch.Tensor
    """int64, the token id of each bin."""

    @property
    def needs(self) -> LogitNeeds:
        modules: Iterable[Objective | Diagnostic] = (*self.objectives, *self.diagnostics)
        return reduce(LogitNeeds.__or__, (module.needs for module in modules), LogitNeeds())
