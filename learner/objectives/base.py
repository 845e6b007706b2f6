"""Interface of objectives: the supervision and the model's values of a packed row, and the loss.

Every term is a weighted sum over a row's positions. The weights already contain the means within a
segment, so the terms of rows add up, and packing cannot change a step's loss (decision 6).

Shape legend: N positions whose logits are needed, X of them text, S of them coord slots, K of them
predict tokens to compare, M of them sampled tokens with an advantage, T most probable tokens of the
reference, J = T + 1, B boxes, C the 1,000 coord bins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any, NamedTuple, Protocol

import torch


class TextSupervision(NamedTuple):
    """Supervised text tokens, one column per field."""

    at: torch.Tensor
    """int64 [X], into the N positions, ascending."""
    weight: torch.Tensor
    """float32 [X]: token weight / segment's sum of token weights."""
    gate_weight: torch.Tensor
    """float32 [X]: the same weight, but 0 for the closing brackets and EOS."""


class CoordSupervision(NamedTuple):
    """Supervised coord slots, one column per field."""

    at: torch.Tensor
    """int64 [S], into the N positions, ascending."""
    targets: torch.Tensor
    """float32 [S], 0..999: the target bin. Optimal transport gives fractions."""
    weight: torch.Tensor
    """float32 [S]: 1 / slots of the segment."""


class BoxSupervision(NamedTuple):
    """Supervised boxes, one column per field."""

    slots: torch.Tensor
    """int64 [B, 4], into the S coord slots of the row: the slots of x1, y1, x2, y2."""
    weight: torch.Tensor
    """float32 [B]: 1 / boxes of the segment."""


class TeacherSupervision(NamedTuple):
    """A teacher's log-probabilities of the sampled tokens, one column per field."""

    logprobs: torch.Tensor
    """float32 [M]"""
    weight: torch.Tensor
    """float32 [M], the weight of the teacher's part of the advantage."""


class LearnedSupervision(NamedTuple):
    """Sampled tokens with an advantage, one column per field."""

    at: torch.Tensor
    """int64 [M], into the N positions, ascending."""
    engine_logprobs: torch.Tensor
    """float32 [M], under the probabilities that the engine sampled from."""
    advantage: torch.Tensor
    """float32 [M], computed from the rewards. `learner.objectives.policy_gradient.advantages` adds
    the teacher's part."""
    weight: torch.Tensor
    """float32 [M], the weight in the step's sum. With `normalize: step` the weights of a call add
    up to 1, with `rollout` the weights of a rollout (`learner.algorithms.advantages`)."""
    call: torch.Tensor
    """int64 [M], ascending from 0 over the row: the model call that sampled the token."""
    teacher: TeacherSupervision | None = None
    """None if no teacher scored the tokens."""


NOTHING_LEARNED = LearnedSupervision(
    torch.empty(0, dtype=torch.int64),
    torch.empty(0),
    torch.empty(0),
    torch.empty(0),
    torch.empty(0, dtype=torch.int64),
)


class Supervision(NamedTuple):
    """The whole supervision of a packed row. Objectives do not decide what is supervised.

    Example (one segment with 5 text tokens and one box): `text.weight` is five times 1/5, `coord`
    has 4 slots with `weight` 1/4, `boxes.slots` is [[0, 1, 2, 3]] with `weight` [1.0].
    """

    text: TextSupervision
    coord: CoordSupervision
    boxes: BoxSupervision
    learned: LearnedSupervision = NOTHING_LEARNED


@dataclass(frozen=True, slots=True)
class LogitNeeds:
    """The values that a module needs in addition to the coord logits. Others are not computed.

    Example: `LogitNeeds(text_ce=True) | LogitNeeds(coord_gate=0.8)` requests both.
    """

    text_ce: bool = False
    text_gate: float | None = None
    """The gate's temperature. None: not needed."""
    coord_gate: float | None = None
    """The gate's temperature. None: not needed."""
    coord_mass: bool = False
    learned: bool = False
    """Log-probabilities of the sampled tokens with an advantage."""
    reference: bool = False
    """Their log-probabilities under the weights that the run started with. The run needs a
    `reference_kl`."""
    reference_top: int = 0
    """Number of the reference's most probable tokens to compare at each sampled token."""

    def __or__(self, other: LogitNeeds) -> LogitNeeds:
        return LogitNeeds(
            *(_either(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        )


def _either(a: Any, b: Any) -> Any:
    # The logits are reduced once per row for all modules, so all gates need the same temperature.
    assert not a or not b or a == b, "a gate has one temperature per channel"
    return a or b


@dataclass(frozen=True, slots=True)
class ReferenceValues:
    """Log-probabilities under the weights that the run started with (the reference).

    Float32 and finite, without gradient, normalised like the engine's sampling.

    Example: one token, of probability 1/2, and `reference_top` 2: `learned_logprobs_M` [log 1/2],
    `top_ids_MT` [[7, 3]], `top_logprobs_MJ` [[log 1/2, log 3/8, log 1/8]].
    """

    learned_logprobs_M: torch.Tensor
    """Log-probability of each sampled token with an advantage."""
    top_ids_MT: torch.Tensor | None
    """int64: the most probable tokens at this position, most probable first. None if
    `reference_top` is 0."""
    top_logprobs_MJ: torch.Tensor | None
    """Their log-probabilities, and the log-probability of all other tokens together."""


@dataclass(frozen=True, slots=True)
class RowValues:
    """The reduced logits of a row: float32, differentiable, finite. None if not needed."""

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
    """Log-probabilities of the tokens to compare, normalised like the engine's sampling."""
    learned_logprobs_M: torch.Tensor | None = None
    """The same for the sampled tokens with an advantage."""
    reference: ReferenceValues | None = None
    """Values of the same row under the weights that the run started with."""
    top_logprobs_MJ: torch.Tensor | None = None
    """Log-probabilities of the reference's most probable tokens (`reference.top_ids_MT`), and of
    all other tokens together."""


class ObjectiveLoss(NamedTuple):
    """The loss of one objective for one packed row.

    Example (weight 2, terms 0.5 and 0.25): `loss` 1.5, `terms` (0.5, 0.25).
    """

    loss: torch.Tensor
    """Scalar, the module's own weight included."""
    terms: tuple[torch.Tensor, ...]
    """Detached scalars for the log, without the module's weight, in the order of `term_names`."""


class Objective(Protocol):
    """A loss of a row's values and supervision. Built from its entry's `weight` and `config`."""

    @property
    def term_names(self) -> tuple[str, ...]:
        """Names of the terms. They are logged as `loss/<name>`."""

    @property
    def needs(self) -> LogitNeeds: ...

    def __call__(self, values: RowValues, supervision: Supervision) -> ObjectiveLoss: ...


class Diagnostic(Protocol):
    """Metrics of a packed row that do not change the loss."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def needs(self) -> LogitNeeds: ...

    def __call__(self, values: RowValues, supervision: Supervision) -> tuple[torch.Tensor, ...]:
        """Return one column per name, with a value per coord slot or per token with an advantage.

        The step's metric is the mean over all of its rows. Called without gradient.
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
