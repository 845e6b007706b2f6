"""Forward and backward of one packed row.

Shape legend: D hidden size, N positions whose logits are needed, S coord slots, K sampled tokens to
compare.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from learner.checks import LogprobTolerance, check_logprobs, compares_logprobs
from learner.collate import PackedRow, collate
from learner.model.loading import LoadedModel
from learner.model.sharding import Parallel
from learner.objectives import coord_math
from learner.objectives.base import ChannelObjectives, LogitNeeds, RowValues
from learner.objectives.coord_math import LogitReading, Normalizer
from learner.objectives.registry import build_objectives
from learner.packing import Row
from learner.segments import Segment
from learner.targets import text_weights
from shared.config import RunConfig
from shared.config.pipeline import Channel
from shared.rollouts import DecodeSettings

if TYPE_CHECKING:
    from learner.step_metrics import StepMetrics


# The logits of one packed row, reduced to what its objectives ask: a chunk of positions at a time,
# because all at once fill gigabytes.
#
# The peak is a chunk's backward: its logits, a float32 copy of them (the gradient) and masks;
# benchmarks/logit_memory.py measures it.
#
# Shape legend: D hidden size, N positions whose logits are needed, P of them with coord logits, X
# text, S coord slots, K and M sampled tokens, to compare and to learn, V vocabulary.


LOGIT_CHUNK = 512
"""Positions whose full-vocabulary logits exist at a time: with a vocabulary of 152,000 and float32,
9 bytes for each are 0.70 GB.
"""

_PLAIN = Normalizer()


@dataclass(frozen=True, slots=True)
class LogitsPass:
    lm_head: Callable[[torch.Tensor], torch.Tensor]
    coord_ids_C: torch.Tensor
    needs: LogitNeeds
    sampled_under: Normalizer
    """How the engine drew its tokens."""
    chunk: int = LOGIT_CHUNK

    def __call__(self, hidden_ND: torch.Tensor, row: PackedRow) -> RowValues:
        """Differentiable; `hidden_ND` is what the model says at `row.positions_N`."""
        text, coord, sampled, needs = (
            row.supervision.text,
            row.supervision.coord,
            row.sampled,
            self.needs,
        )
        learned = row.supervision.sampled
        coord_at_P = (
            coord.at if needs.text_gate is None else torch.cat([coord.at, text.at]).sort().values
        )
        normalizers = self._normalizers(len(sampled.at) + (len(learned.at) if needs.sampled else 0))
        reading = self._read(hidden_ND, row.token_ids_N, coord_at_P, normalizers)
        log_normalizers = dict(zip(normalizers, reading.log_normalizers_N, strict=True))

        def leak(at: torch.Tensor, temperature: float) -> torch.Tensor:
            logits = reading.coord_logits_PC[torch.searchsorted(coord_at_P, at)]
            return coord_math.mass_leak(
                log_normalizers[Normalizer(temperature)][at], logits, temperature=temperature
            )

        def logprobs(at: torch.Tensor, normalizer: Normalizer) -> torch.Tensor:
            return coord_math.token_logprobs(
                reading.token_logits_N[at], log_normalizers[normalizer][at], normalizer.temperature
            )

        def sampled_logprobs(at: torch.Tensor) -> torch.Tensor:
            return (
                logprobs(at, self.sampled_under)
                if len(at)
                else hidden_ND.new_zeros(0, dtype=torch.float32)
            )

        return RowValues(
            text_ce_X=-logprobs(text.at, _PLAIN) if needs.text_ce else None,
            text_gate_X=(
                None
                if needs.text_gate is None
                else coord_math.gate_of_leak(leak(text.at, needs.text_gate))
            ),
            coord_logits_SC=reading.coord_logits_PC[torch.searchsorted(coord_at_P, coord.at)],
            coord_gate_S=None if needs.coord_gate is None else leak(coord.at, needs.coord_gate),
            coord_mass_S=coord_math.coord_mass(leak(coord.at, 1.0)) if needs.coord_mass else None,
            sampled_logprobs_K=sampled_logprobs(sampled.at),
            learned_logprobs_M=sampled_logprobs(learned.at) if needs.sampled else None,
        )

    def _normalizers(self, num_sampled: int) -> tuple[Normalizer, ...]:
        """Each once, in an order that does not depend on hashes."""
        needs = self.needs
        plain = (_PLAIN,) if needs.text_ce or needs.coord_mass else ()
        gates = tuple(
            Normalizer(temperature)
            for temperature in (needs.text_gate, needs.coord_gate)
            if temperature is not None
        )
        return tuple(
            dict.fromkeys((*plain, *gates, *((self.sampled_under,) if num_sampled else ())))
        )

    def _read(
        self,
        hidden_ND: torch.Tensor,
        token_ids_N: torch.Tensor,
        coord_at_P: torch.Tensor,
        normalizers: tuple[Normalizer, ...],
    ) -> LogitReading:
        def read(chunk_ND: torch.Tensor, start: int) -> LogitReading:
            stop = start + len(chunk_ND)
            here = coord_at_P[(coord_at_P >= start) & (coord_at_P < stop)] - start
            return coord_math.read_logits(
                self.lm_head(chunk_ND), token_ids_N[start:stop], here, self.coord_ids_C, normalizers
            )

        # The logits of a chunk are computed again in its backward, so that no two chunks' exist at
        # once. An empty row has one empty chunk.
        parts = hidden_ND.split(self.chunk)
        chunks = [
            checkpoint(read, part_ND, index * self.chunk, use_reentrant=False)
            for index, part_ND in enumerate(parts)
        ]
        return LogitReading(
            torch.cat([chunk.token_logits_N for chunk in chunks]),
            torch.cat([chunk.coord_logits_PC for chunk in chunks]),
            tuple(
                torch.cat(of_chunks)
                for of_chunks in zip(*(chunk.log_normalizers_N for chunk in chunks), strict=True)
            ),
        )


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
    """A tuple of tensors on its top level: that is where fsdp looks for what a backward begins
    with.
    """

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
    """Add the row's gradient. Logits exist only at supervised and compared positions, `logit_chunk`
    of them at a time.

    `sampled_under` is how the engine drew its tokens, for computing the same probabilities here.
    `run` runs the forward. `weight` multiplies the gradient: with 0 the row is there for the other
    ranks' sake.
    """
    loss, terms, values = run(_run_row, model, row, objectives, sampled_under, logit_chunk)
    (weight * loss).backward()
    names = [f"loss/{name}" for objective in objectives.objectives for name in objective.term_names]
    return RowResult(
        loss.item(),
        dict(zip(names, terms.tolist(), strict=True)),
        _diagnose(objectives, values, row),
        values.sampled_logprobs_K.detach().cpu(),
    )


def _run_row(
    model: Any,
    row: PackedRow,
    objectives: ChannelObjectives,
    sampled_under: Normalizer,
    logit_chunk: int,
) -> _RowForward:
    inputs = row.inputs
    output = model.model(
        input_ids=inputs.input_ids,
        position_ids=inputs.position_ids,
        # None, not ones: with a mask transformers lets the segments see each other (FACTS 4).
        attention_mask=None,
        **inputs.image_arguments(model.dtype),
        use_cache=False,
    )
    read = LogitsPass(
        model.lm_head, objectives.coord_ids_C, objectives.needs, sampled_under, logit_chunk
    )
    values = read(output.last_hidden_state[0, row.positions_N], row)
    losses = [objective(values, row.supervision) for objective in objectives.objectives]
    # So that a row without supervised slots or text has a gradient too, of zero.
    nothing = 0.0 * values.coord_logits_SC.sum()
    loss = torch.stack([nothing, *(part.loss for part in losses)]).sum()
    terms = torch.stack([nothing.detach(), *(term for part in losses for term in part.terms)])[1:]
    return _RowForward(loss, terms, values)


@torch.no_grad()
def _diagnose(
    objectives: ChannelObjectives, values: RowValues, row: PackedRow
) -> dict[str, SlotMean]:
    means = {}
    for diagnostic in objectives.diagnostics:
        for name, value_S in zip(
            diagnostic.names, diagnostic(values, row.supervision), strict=True
        ):
            means[name] = SlotMean(value_S.sum().item(), len(value_S))
    return means


# Learning from one row: forward, backward, and the comparison of its sampled tokens with the
# engine's.


class RowLearner:
    """Forward, backward and account of one packed row, with the objectives of its channel."""

    def __init__(
        self, config: RunConfig, loaded: LoadedModel, parallel: Parallel, decode: DecodeSettings
    ) -> None:
        """`decode` is how the rollouts are sampled."""
        self._loaded, self._parallel = loaded, parallel
        pipeline = config.rollout_matching.pipeline
        self._objectives = {
            channel: build_objectives(pipeline, channel, loaded.coord_ids_C) for channel in Channel
        }
        self.text_weights = {channel: text_weights(pipeline, channel) for channel in Channel}
        """Of the tokens of a target, by their roles."""
        # Greedy engines (temperature 0) report the log-probability at temperature 1.
        self._sampled_under = Normalizer(decode.temperature or 1.0, loaded.banned_token_ids)
        self._compares_logprobs = compares_logprobs(decode)
        self._tolerance = LogprobTolerance.of(config)

    def learn(self, segments: Row, channel: Channel, tally: StepMetrics, *, version: int) -> None:
        """Add the row's gradient, and count it. `version` is of the weights that learn.
        RolloutError where an engine's log-probabilities are of others.
        """
        segments = [_comparable(segment, version) for segment in segments]
        row = self._collate(segments, channel)
        result = self._backward(row, channel)
        if channel is Channel.B and self._compares_logprobs:
            learner_K, engine_K = result.sampled_logprobs_K, row.sampled.logprobs
            tally.compared = check_logprobs(
                segments, learner_K, engine_K, tolerance=self._tolerance, so_far=tally.compared
            )
        tally.add_row(row, result)

    def compute_beside(self, segment: Segment, channel: Channel) -> None:
        """Beside a row of another rank, with whose weights this one is computed; nothing is learned
        from it.
        """
        self._backward(self._collate([segment], channel), channel, weight=0.0)

    def _collate(self, segments: Row, channel: Channel) -> PackedRow:
        return collate(
            segments, text_weights=self.text_weights[channel], rope_index=self._loaded.rope_index
        )

    def _backward(self, row: PackedRow, channel: Channel, *, weight: float = 1.0) -> RowResult:
        model, device = self._loaded.model, self._loaded.device
        return backward_row(
            model,
            row.to(device),
            self._objectives[channel],
            self._sampled_under,
            run=self._parallel.forward,
            weight=weight,
        )


def _comparable(segment: Segment, version: int) -> Segment:
    """Without the log-probabilities of a rollout, carried or stale, whose weights have changed
    since: there is nothing to compare.
    """
    if segment.weight_version == version:
        return segment
    return replace(segment, target=replace(segment.target, sampled_logprobs=()))
