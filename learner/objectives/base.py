"""Interface of objectives (losses) and of their inputs: a packed row's values and supervision.

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
    """The text tokens of a packed row that are taught, one column per field."""

    at: torch.Tensor
    """int64 [X]: indices into the row's N positions with logits, ascending."""
    weight: torch.Tensor
    """float32 [X]: the token's weight divided by the sum of token weights in its segment."""
    gate_weight: torch.Tensor
    """float32 [X]: the token's weight in the term `text_gate` of `coord_reg`. It is like `weight`,
    but 0 for closing brackets and EOS, which the sum does not contain either."""


class CoordSupervision(NamedTuple):
    """The coordinate tokens of a packed row that are taught (slots), one column per field."""

    at: torch.Tensor
    """int64 [S]: indices into the row's N positions with logits, ascending."""
    targets: torch.Tensor
    """float32 [S], 0..999: the bin to learn. Targets of optimal transport can be fractional."""
    weight: torch.Tensor
    """float32 [S]: 1 / number of slots of the segment."""


class BoxSupervision(NamedTuple):
    """The boxes of a packed row that are taught, one column per field."""

    slots: torch.Tensor
    """int64 [B, 4]: indices into the row's S coord slots, for x1, y1, x2, y2."""
    weight: torch.Tensor
    """float32 [B]: 1 / number of boxes of the segment."""


class TeacherSupervision(NamedTuple):
    """A teacher model's log-probabilities of a row's sampled tokens, one column per field."""

    logprobs: torch.Tensor
    """float32 [M]: the teacher's log-probability of each token."""
    weight: torch.Tensor
    """float32 [M]: factor of `log p_teacher - log p_learner` in the advantage."""


class LearnedSupervision(NamedTuple):
    """The sampled tokens of a packed row that have an advantage, one column per field."""

    at: torch.Tensor
    """int64 [M]: indices into the row's N positions with logits, ascending."""
    engine_logprobs: torch.Tensor
    """float32 [M]: each token's log-probability in the engine's sampling distribution."""
    advantage: torch.Tensor
    """float32 [M]: each token's advantage from the rewards. The teacher's part is added by
    `learner.objectives.policy_gradient.advantages`."""
    weight: torch.Tensor
    """float32 [M]: the token's weight in the step's loss, which is a sum over tokens. With
    `normalize: step` the weights of a model call add up to 1, with `rollout` the weights of a
    rollout (`learner.algorithms.advantages`)."""
    call: torch.Tensor
    """int64 [M], ascending: number, from 0 in the row, of the model call that sampled the token."""
    num_calls: int
    """Number of model calls in the row. To read it from `call`, the host would wait for the GPU."""
    teacher: TeacherSupervision | None = None
    """The teacher's log-probabilities; None if no teacher scored the tokens."""


NOTHING_LEARNED = LearnedSupervision(
    torch.empty(0, dtype=torch.int64),
    torch.empty(0),
    torch.empty(0),
    torch.empty(0),
    torch.empty(0, dtype=torch.int64),
    0,
)


class Supervision(NamedTuple):
    """The supervision of a packed row: text, coordinates, boxes and advantages to learn.

    Objectives only read it, and do not decide what is supervised.

    Example (one segment with 5 text tokens and one box): `text.weight` is five times 1/5, `coord`
    has 4 slots with `weight` 1/4, `boxes.slots` is [[0, 1, 2, 3]] with `weight` [1.0].
    """

    text: TextSupervision
    coord: CoordSupervision
    boxes: BoxSupervision
    learned: LearnedSupervision = NOTHING_LEARNED


@dataclass(frozen=True, slots=True)
class LogitNeeds:
    """The values of a row's logits that an objective or diagnostic needs. Others are not computed.

    Logits of coordinate tokens are always computed.

    Example: `LogitNeeds(text_ce=True) | LogitNeeds(coord_gate=0.8)` requests both.
    """

    text_ce: bool = False
    text_uniform_ce: bool = False
    """Whether the cross-entropy with a uniform target is needed, at text tokens."""
    text_gate: float | None = None
    """Temperature of the gate at text tokens (`RowValues.text_gate_X`). None: not needed."""
    coord_gate: float | None = None
    """Temperature of the gate at coord slots (`RowValues.coord_gate_S`). None: not needed."""
    coord_mass: bool = False
    """Whether the total probability of the coordinate tokens is needed, at coord slots."""
    learned: bool = False
    """Whether the log-probabilities of sampled tokens with an advantage are needed."""
    reference: bool = False
    """Whether the log-probabilities of sampled tokens under the run's initial weights are needed.
    The pipeline must then contain a `reference_kl`."""
    reference_top: int = 0
    """Number of tokens to compare at the position of each sampled token: the most probable ones
    under the run's initial weights."""

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
    """Log-probabilities of a row's tokens under the run's initial weights (the reference).

    They are float32 and finite, and have no gradient. As in the engine's sampling, logits are
    divided by the temperature, and banned tokens have probability 0.

    Example: one token, of probability 1/2, and `reference_top` 2: `learned_logprobs_M` [log 1/2],
    `top_ids_MT` [[7, 3]], `top_logprobs_MJ` [[log 1/2, log 3/8, log 1/8]].
    """

    learned_logprobs_M: torch.Tensor
    """Log-probability of each sampled token with an advantage."""
    top_ids_MT: torch.Tensor | None
    """int64: the reference's most probable tokens at the position of each sampled token, most
    probable first. None if `reference_top` is 0."""
    top_logprobs_MJ: torch.Tensor | None
    """Log-probabilities of `top_ids_MT`, then of all other tokens together."""


@dataclass(frozen=True, slots=True)
class RowValues:
    """The values of the model's logits that objectives read, for one packed row.

    They are float32, differentiable and finite; None if no objective needs them. `p_coord` is the
    total probability of the coordinate tokens at a position.
    """

    text_ce_X: torch.Tensor | None
    """Cross-entropy of each text token over the whole vocabulary, in nats."""
    text_gate_X: torch.Tensor | None
    """`-log(1 - p_coord)` at each text token."""
    coord_logits_SC: torch.Tensor
    coord_gate_S: torch.Tensor | None
    """`-log p_coord` at each coordinate slot."""
    coord_mass_S: torch.Tensor | None
    """`p_coord` at each coordinate slot, at temperature 1."""
    compared_logprobs_K: torch.Tensor
    """Log-probabilities of the tokens to compare with the engine. As in the engine's sampling,
    logits are divided by the temperature, and banned tokens have probability 0."""
    learned_logprobs_M: torch.Tensor | None = None
    """Log-probabilities of the sampled tokens with an advantage, with the temperature and the
    banned tokens of the engine's sampling."""
    reference: ReferenceValues | None = None
    """Log-probabilities of the same row under the run's initial weights."""
    top_logprobs_MJ: torch.Tensor | None = None
    """The learner's log-probabilities of the reference's most probable tokens
    (`reference.top_ids_MT`), and of all other tokens together."""
    text_uniform_ce_X: torch.Tensor | None = None
    """Cross-entropy with a uniform target at each text token, in nats: the mean of `-log p` over
    the whole vocabulary."""


class ObjectiveLoss(NamedTuple):
    """The loss of one objective for one packed row, with its terms for the log.

    Example (weight 2, terms 0.5 and 0.25): `loss` 1.5, `terms` (0.5, 0.25).
    """

    loss: torch.Tensor
    """Scalar, multiplied by the objective's weight."""
    terms: tuple[torch.Tensor, ...]
    """Detached scalars for the log, not multiplied by the weight, in the order of `term_names`."""


class Objective(Protocol):
    """A loss of a packed row, computed from the model's values and the row's supervision.

    It is built from `weight` and `config` of its entry in the configured pipeline.
    """

    @property
    def term_names(self) -> tuple[str, ...]:
        """Names of the loss terms that it logs, as `loss/<name>`."""

    @property
    def needs(self) -> LogitNeeds: ...

    def __call__(self, values: RowValues, supervision: Supervision) -> ObjectiveLoss: ...


class Diagnostic(Protocol):
    """Metrics of a packed row that are logged and do not change the loss."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def needs(self) -> LogitNeeds: ...

    def __call__(self, values: RowValues, supervision: Supervision) -> tuple[torch.Tensor, ...]:
        """Return one column per metric of `names`.

        A column has a value per coordinate slot, or per token with an advantage. The step's metric
        is the mean over the values of all rows of the step. The call runs without gradient.
        """


@dataclass(frozen=True, slots=True)
class ChannelObjectives:
    """The losses (objectives) and logged metrics (diagnostics) of one channel's packed rows."""

    objectives: tuple[Objective, ...]
    diagnostics: tuple[Diagnostic, ...]
    coord_ids_C: torch.Tensor
    """int64: the token id of each coordinate bin."""

    @property
    def needs(self) -> LogitNeeds:
        modules: Iterable[Objective | Diagnostic] = (*self.objectives, *self.diagnostics)
        return reduce(LogitNeeds.__or__, (module.needs for module in modules), LogitNeeds())
