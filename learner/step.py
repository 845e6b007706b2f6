"""Forward and backward of one packed row.

Shape legend: D hidden size, N positions whose logits are needed, S coord slots, K sampled tokens to compare.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from learner.collate import PackedRow
from learner.logits import LOGIT_CHUNK, LogitsPass
from learner.objectives.coord_math import Normalizer
from learner.objectives.interface import ChannelObjectives, RowValues

T = TypeVar("T")


def directly(function: Callable[..., T], *arguments: Any) -> T:
    """How a forward is run where nothing has to happen around it."""
    return function(*arguments)


class SlotMean(NamedTuple):
    """A mean over coord slots, in parts that add over rows."""

    total: float
    num_slots: int


@dataclass(frozen=True, slots=True)
class RowResult:
    """What the forward and backward of one row gave."""

    loss: float
    """The row's part of the step's loss."""
    terms: dict[str, float]
    """`loss/...` metrics, to be summed over the rows of a step."""
    diagnostics: dict[str, SlotMean]
    """Metrics of the active diagnostics, of which nothing is learned."""
    sampled_logprobs_K: torch.Tensor
    """The learner's log-probabilities of the row's sampled tokens, on the CPU."""


class _RowForward(NamedTuple):
    """A tuple of tensors on its top level: that is where fsdp looks for what a backward begins with."""

    loss: torch.Tensor
    terms: torch.Tensor
    values: RowValues


def backward_row(
    model: Any,
    row: PackedRow,
    objectives: ChannelObjectives,
    sampled_under: Normalizer,
    *,
    logit_chunk: int = LOGIT_CHUNK,
    run: Callable[..., _RowForward] = directly,
    weight: float = 1.0,
) -> RowResult:
    """Add the row's gradient. Logits exist only at supervised and compared positions, `logit_chunk` of them at a time.

    `sampled_under` is how the engine drew its tokens, for computing the same probabilities here. `run` runs the forward. `weight` multiplies the gradient:
    with 0 the row is there for the other ranks' sake.
    """
    loss, terms, values = run(_run_row, model, row, objectives, sampled_under, logit_chunk)
    (weight * loss).backward()
    names = [f"loss/{name}" for objective in objectives.objectives for name in objective.term_names]
    return RowResult(loss.item(), dict(zip(names, terms.tolist(), strict=True)), _diagnose(objectives, values, row), values.sampled_logprobs_K.detach().cpu())


def _run_row(model: Any, row: PackedRow, objectives: ChannelObjectives, sampled_under: Normalizer, logit_chunk: int) -> _RowForward:
    inputs = row.inputs
    output = model.model(
        input_ids=inputs.input_ids,
        position_ids=inputs.position_ids,
        # None, not ones: with a mask transformers lets the segments see each other (FACTS 4).
        attention_mask=None,
        **inputs.image_arguments(model.dtype),
        use_cache=False,
    )
    read = LogitsPass(model.lm_head, objectives.coord_ids_C, objectives.needs, sampled_under, logit_chunk)
    values = read(output.last_hidden_state[0, row.positions_N], row)
    losses = [objective(values, row.supervision) for objective in objectives.objectives]
    # So that a row without supervised slots or text has a gradient too, of zero.
    nothing = 0.0 * values.coord_logits_SC.sum()
    loss = torch.stack([nothing, *(part.loss for part in losses)]).sum()
    terms = torch.stack([nothing.detach(), *(term for part in losses for term in part.terms)])[1:]
    return _RowForward(loss, terms, values)


@torch.no_grad()
def _diagnose(objectives: ChannelObjectives, values: RowValues, row: PackedRow) -> dict[str, SlotMean]:
    means = {}
    for diagnostic in objectives.diagnostics:
        for name, value_S in zip(diagnostic.names, diagnostic(values, row.supervision), strict=True):
            means[name] = SlotMean(value_S.sum().item(), len(value_S))
    return means
