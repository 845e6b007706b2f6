"""One packed row: forward, losses and backward.

    segments --collate--> PackedRow --model--> hidden states --LogitsPass--> RowValues
             --objectives--> loss --backward--> gradients, and a RowResult

Example: a row has two segments of 300 and 200 tokens, with 40 and 25 supervised tokens. The model
computes hidden states [500, D]. Logits are computed for 65 positions, `LOGIT_CHUNK` at a time. The
loss is the sum over both segments of each term's mean within the segment. The optimizer divides the
gradient at the step's end, so the result does not depend on the order or packing of the rows.

Shape legend: D hidden size, L row tokens, N positions whose logits are needed, P of these that need
coordinate logits, X text tokens, S coordinate slots, K tokens to compare, M tokens learned by their
advantage, T most probable tokens of the reference, J = T + 1, V vocabulary, C coordinate bins.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from learner.checks import Compared, LogprobTolerance, check_logprobs, compares_logprobs
from learner.collate import PackedRow, collate
from learner.model.attention import packed_row
from learner.model.loading import LoadedModel
from learner.model.packed_rows import logits_of
from learner.model.sharding import Parallel, Reference
from learner.objectives import coord_math
from learner.objectives.base import ChannelObjectives, LogitNeeds, ReferenceValues, RowValues
from learner.objectives.coord_math import (
    LogitReading,
    Normalizer,
    OverVocabulary,
    PickedTokens,
)
from learner.objectives.registry import build_objectives
from learner.packing import Row
from learner.segments import Segment
from learner.targets import text_weights
from shared.config.pipeline import Channel, PipelineSection
from shared.config.training import LOGIT_CHUNK
from shared.rollouts import DecodeSettings


class SlotMean(NamedTuple):
    """A metric's mean over coordinate slots or learned tokens, as a sum and a count.

    Sums and counts of several rows are added.
    """

    total: float
    num_slots: int


@dataclass(frozen=True, slots=True)
class RowResult:
    """The loss, metrics and log-probabilities of one packed row's forward and backward.

    Example (only token_ce, weight 2, over two segments with means 0.5 and 0.3): loss 1.6, terms
    `{"loss/token_ce": 0.8}`, no diagnostics, and one log-probability per token to compare.
    """

    loss: float
    """The row's part of the step's loss. The sum over all rows is divided at the step's end."""
    terms: dict[str, float]
    """The row's part of each `loss/...` metric. The step's metric is the sum over its rows."""
    diagnostics: dict[str, SlotMean]
    """Metrics of the channel's diagnostics (metrics without a loss), by name."""
    compared_logprobs_K: torch.Tensor
    """The learner's log-probabilities of the tokens to compare with the engine, on the CPU."""


class _RowForward(NamedTuple):
    """The result of a row's forward. A tuple, because FSDP hooks only tensors at its top level."""

    loss: torch.Tensor
    terms: torch.Tensor
    values: RowValues


def train_row(
    model: Any,
    row: PackedRow,
    objectives: ChannelObjectives,
    sampled_under: Normalizer,
    **options: Any,
) -> RowResult:
    """Run `queue_row` with these arguments, and wait for its result."""
    return queue_row(model, row, objectives, sampled_under, **options)()


def queue_row(
    model: Any,
    row: PackedRow,
    objectives: ChannelObjectives,
    sampled_under: Normalizer,
    *,
    logit_chunk: int = LOGIT_CHUNK,
    run: Callable[..., Any] = operator.call,
    weight: float = 1.0,
    reference: Reference | None = None,
) -> Callable[[], RowResult]:
    """Run forward, losses and backward of one packed row. Only the model's gradients change.

    On a GPU the work is only queued. Return a function that waits for it and returns the result;
    until then the host is free to prepare the next row.

    Args:
        objectives: losses and diagnostics of the row's channel.
        sampled_under: temperature and excluded tokens of the engine's sampling, to compute the same
            probabilities here.
        logit_chunk: number of positions whose full-vocabulary logits are in memory at once.
        run: calls a function that runs the forward (`Parallel.forward` for a sharded model).
        weight: factor of the gradient. With 0 this rank only takes part in the forward and backward
            of a sharded model, which needs all ranks.
        reference: the initial model of the run, for objectives that compare the learner with it.
    """
    needs = objectives.needs
    start: ReferenceValues | None = None
    if needs.reference:
        assert reference is not None, "`build_objectives` requires a reference for this objective"
        # Before the forward with a gradient, whose activations are then not yet in memory.
        top = (objectives.coord_ids_C, needs.reference_top)
        start = reference.forward(_read_reference, row, *top, sampled_under, logit_chunk)
    forward: _RowForward = run(_forward, model, row, objectives, sampled_under, logit_chunk, start)
    # Gradients add up over a step's rows, in the master weights if there are any (`MasterWeights`).
    # The optimizer divides once, at the step's end.
    (weight * forward.loss).backward()
    names = [f"loss/{name}" for objective in objectives.objectives for name in objective.term_names]
    diagnosed = _diagnose(objectives, forward.values, row)
    # One copy, because the host waits for a GPU in each. float64 holds all the numbers exactly.
    sums = [total for total, _ in diagnosed.values()]
    compared_K = forward.values.compared_logprobs_K
    columns = [forward.loss[None], forward.terms, *(total[None] for total in sums), compared_K]
    on_device = torch.cat([column.detach().double() for column in columns])
    counts = {name: size for name, (_, size) in diagnosed.items()}
    sizes = [1, len(names), len(counts), len(compared_K)]

    def result() -> RowResult:
        loss, terms, totals, compared_K = on_device.cpu().split(sizes)
        means = zip(counts, totals.tolist(), counts.values(), strict=True)
        return RowResult(
            loss.item(),
            dict(zip(names, terms.tolist(), strict=True)),
            {name: SlotMean(total, size) for name, total, size in means},
            compared_K.float(),
        )

    return result


def _forward(
    model: Any,
    row: PackedRow,
    objectives: ChannelObjectives,
    sampled_under: Normalizer,
    logit_chunk: int,
    reference: ReferenceValues | None,
) -> _RowForward:
    read = LogitsPass(
        logits_of(model), objectives.coord_ids_C, objectives.needs, sampled_under, logit_chunk
    )
    hidden_LD = _hidden_states(model, row)
    values = read(hidden_LD[row.positions_N], row, reference)
    losses = [objective(values, row.supervision) for objective in objectives.objectives]
    # A row without supervised slots or text must have a gradient too: zero.
    nothing = 0.0 * values.coord_logits_SC.sum()
    if row.has_beside:
        # The vision tower too, through the images of a segment without supervision.
        nothing = nothing + 0.0 * hidden_LD[-1].float().sum()
    loss = torch.stack([nothing, *(part.loss for part in losses)]).sum()
    terms = torch.stack([nothing.detach(), *(term for part in losses for term in part.terms)])[1:]
    return _RowForward(loss, terms, values)


def _hidden_states(model: Any, row: PackedRow) -> torch.Tensor:
    """Return the hidden states [L, D] in the model's own type."""
    inputs = row.inputs
    with packed_row(row.lengths, row.num_shared):
        output = model.base_model(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            # None instead of ones: with a mask, transformers lets the segments see each other.
            attention_mask=None,
            **inputs.image_arguments(model.dtype),
            use_cache=False,
        )
    hidden_LD: torch.Tensor = output.last_hidden_state[0]
    return hidden_LD


def loss_of_row(model: Any, row: PackedRow) -> torch.Tensor:
    """Return the mean cross-entropy of the first tokens that the row predicts.

    They are so few that their logits are in memory at once.
    """
    hidden_ND = _hidden_states(model, row)[row.positions_N[:LOGIT_CHUNK]]
    return F.cross_entropy(logits_of(model)(hidden_ND).float(), row.token_ids_N[:LOGIT_CHUNK])


def _read_reference(
    model: Any,
    row: PackedRow,
    coord_ids_C: torch.Tensor,
    num_top: int,
    sampled_under: Normalizer,
    logit_chunk: int,
) -> ReferenceValues:
    """Return the model's log-probabilities at the tokens that are learned by their advantage."""
    temperature = sampled_under.temperature
    logprobs, top_ids, top_logprobs = [], [], []
    # The chunks are the same as in `LogitsPass`, because a product of another shape may round
    # differently. With equal weights the difference must be 0.
    hidden_ND = _hidden_states(model, row)[row.positions_N]
    head = logits_of(model)
    chunks = _Chunks(len(hidden_ND), logit_chunk)
    learned_at = chunks.positions(row.supervision.learned.at, row.on_host.supervision.learned.at)
    token_ids = row.token_ids_N.split(logit_chunk)
    for index, part_ND in enumerate(hidden_ND.split(logit_chunk)):
        at_M = learned_at[index]
        logits_NV = head(part_ND)
        picked = None
        if num_top:
            ids_MT = coord_math.most_probable(logits_NV[at_M], sampled_under, num_top)
            picked = PickedTokens(at_M, ids_MT, sampled_under)
            top_ids.append(ids_MT)
        reading = coord_math.read_logits(
            logits_NV, token_ids[index], at_M[:0], coord_ids_C, (sampled_under,), picked
        )
        normalizer_M = reading.log_normalizers_N[0][at_M]
        logits_M = reading.token_logits_N[at_M]
        logprobs.append(coord_math.token_logprobs(logits_M, normalizer_M, temperature))
        if (logits_MJ := reading.picked_logits_MJ) is not None:
            normalizer_M1 = normalizer_M[:, None]
            top_logprobs.append(coord_math.token_logprobs(logits_MJ, normalizer_M1, temperature))
    return ReferenceValues(
        torch.cat(logprobs),
        torch.cat(top_ids) if num_top else None,
        torch.cat(top_logprobs) if num_top else None,
    )


@torch.no_grad()
def _diagnose(
    objectives: ChannelObjectives, values: RowValues, row: PackedRow
) -> dict[str, tuple[torch.Tensor, int]]:
    """Return the sum and the number of the values of each diagnostic's metric."""
    sums = {}
    for diagnostic in objectives.diagnostics:
        columns = diagnostic(values, row.supervision)
        for name, value_S in zip(diagnostic.names, columns, strict=True):
            sums[name] = value_S.sum(), len(value_S)
    return sums


class _Chunks(NamedTuple):
    """Chunks of a row's positions with logits. Without positions there is one empty chunk.

    Example: `_Chunks(7, 3).positions(at, at)` of the positions [0, 2, 5] is [[0, 2], [2], []].
    """

    num_positions: int
    size: int

    def split(self, column: torch.Tensor, at_on_host: torch.Tensor) -> Sequence[torch.Tensor]:
        """Split a column by chunk. Its entries belong to ascending positions.

        `at_on_host` are these positions in host memory, in any order: to count them on a GPU, the
        host would wait.
        """
        number = max(1, -(-self.num_positions // self.size))
        sizes = torch.bincount(at_on_host // self.size, minlength=number).tolist()
        return column.split(sizes)

    def positions(self, at: torch.Tensor, at_on_host: torch.Tensor) -> list[torch.Tensor]:
        """Split ascending positions by chunk. The results count from their chunk's start."""
        parts = enumerate(self.split(at, at_on_host))
        return [part - index * self.size for index, part in parts]


_PLAIN = Normalizer()


@dataclass(frozen=True, slots=True)
class LogitsPass:
    """Computes the logits of one packed row in chunks, and reduces them to what objectives need.

    Memory peaks in the backward of a chunk; benchmarks/logit_memory.py measures the peak.
    """

    lm_head: Callable[[torch.Tensor], torch.Tensor]
    coord_ids_C: torch.Tensor
    needs: LogitNeeds
    sampled_under: Normalizer
    """Temperature and excluded tokens of the engine's sampling."""
    chunk: int = LOGIT_CHUNK

    def __call__(
        self, hidden_ND: torch.Tensor, row: PackedRow, reference: ReferenceValues | None = None
    ) -> RowValues:
        """Return the values that the row's objectives read. They are differentiable.

        `hidden_ND` are the model's hidden states at `row.positions_N`.
        """
        needs = self.needs
        text = row.supervision.text
        coord = row.supervision.coord
        learned = row.supervision.learned
        on_host = row.on_host.supervision
        coord_at_P = coord.at
        host_at_P = on_host.coord.at
        if needs.text_gate is not None:
            # The gate needs coordinate logits at text positions too.
            coord_at_P = torch.cat([coord.at, text.at]).sort().values
            host_at_P = torch.cat([host_at_P, on_host.text.at])
        # Each normalizer costs a pass over the vocabulary, so the sampling's is read only if used.
        num_sampled = len(row.compared.at) + (len(learned.at) if needs.learned else 0)
        normalizers = self._normalizers(num_sampled)
        chunks = _Chunks(len(hidden_ND), self.chunk)
        top = None
        if needs.reference_top:
            assert reference is not None
            assert reference.top_ids_MT is not None
            at = chunks.positions(learned.at, on_host.learned.at)
            ids = chunks.split(reference.top_ids_MT, on_host.learned.at)
            top = [PickedTokens(*part, self.sampled_under) for part in zip(at, ids, strict=True)]
        reading = self._read(
            hidden_ND, row.token_ids_N, chunks.positions(coord_at_P, host_at_P), normalizers, top
        )
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
            if not len(at):  # the sampling's normalizer was not read
                return hidden_ND.new_zeros(0, dtype=torch.float32)
            return logprobs(at, self.sampled_under)

        # Keep this order: a backward adds gradients in the order in which its graph was built.
        text_ce_X = -logprobs(text.at, _PLAIN) if needs.text_ce else None
        text_uniform_ce_X = None
        if reading.mean_logits_N is not None:
            text_uniform_ce_X = log_normalizers[_PLAIN][text.at] - reading.mean_logits_N[text.at]
        text_gate_X = None
        if needs.text_gate is not None:
            text_gate_X = coord_math.gate_of_leak(leak(text.at, needs.text_gate))
        coord_logits_SC = reading.coord_logits_PC[torch.searchsorted(coord_at_P, coord.at)]
        # The gate of a slot is the leak itself, -log p(coord). Text uses the complement.
        coord_gate_S = None if needs.coord_gate is None else leak(coord.at, needs.coord_gate)
        coord_mass_S = coord_math.coord_mass(leak(coord.at, 1.0)) if needs.coord_mass else None
        top_logprobs_MJ = reading.picked_logits_MJ
        if top_logprobs_MJ is not None and len(learned.at):  # otherwise no normalizer was read
            normalizer_M1 = log_normalizers[self.sampled_under][learned.at, None]
            top_logprobs_MJ = coord_math.token_logprobs(
                top_logprobs_MJ, normalizer_M1, self.sampled_under.temperature
            )
        return RowValues(
            text_ce_X,
            text_gate_X,
            coord_logits_SC,
            coord_gate_S,
            coord_mass_S,
            compared_logprobs_K=sampled_logprobs(row.compared.at),
            learned_logprobs_M=sampled_logprobs(learned.at) if needs.learned else None,
            reference=reference,
            top_logprobs_MJ=top_logprobs_MJ,
            text_uniform_ce_X=text_uniform_ce_X,
        )

    def _normalizers(self, num_sampled: int) -> tuple[Normalizer, ...]:
        """List the needed normalizers without duplicates, in an order that is always the same."""
        needs = self.needs
        of_plain = needs.text_ce or needs.text_uniform_ce or needs.coord_mass
        wanted = [_PLAIN] if of_plain else []
        gates = (needs.text_gate, needs.coord_gate)
        wanted += [Normalizer(temperature) for temperature in gates if temperature is not None]
        if num_sampled:
            wanted.append(self.sampled_under)
        return tuple(dict.fromkeys(wanted))

    def _read(
        self,
        hidden_ND: torch.Tensor,
        token_ids_N: torch.Tensor,
        coord_at: Sequence[torch.Tensor],
        normalizers: tuple[Normalizer, ...],
        picked: Sequence[PickedTokens] | None,
    ) -> LogitReading:
        """Read the logits of all chunks. `coord_at` and `picked` have an entry for each chunk."""
        first: list[list[OverVocabulary]] = [[] for _ in coord_at]

        def read(chunk_ND: torch.Tensor, index: int) -> LogitReading:
            return coord_math.read_logits(
                self.lm_head(chunk_ND),
                token_ids_N.split(self.chunk)[index],
                coord_at[index],
                self.coord_ids_C,
                normalizers,
                None if picked is None else picked[index],
                mean=self.needs.text_uniform_ce,
                first=first[index],
            )

        # A chunk's logits are recomputed in its backward, so only one chunk's logits are in memory.
        # `first` keeps what was read of them. The concatenation of all chunks has the order of the
        # positions. The last chunk is the first in the backward, so its logits are kept.
        *parts, last_ND = hidden_ND.split(self.chunk)
        chunks = [
            checkpoint(read, part_ND, index, use_reentrant=False)
            for index, part_ND in enumerate(parts)
        ]
        chunks.append(read(last_ND, len(parts)))
        by_normalizer = zip(*(chunk.log_normalizers_N for chunk in chunks), strict=True)
        of_picked = [chunk.picked_logits_MJ for chunk in chunks if picked is not None]
        means = [chunk.mean_logits_N for chunk in chunks if self.needs.text_uniform_ce]
        return LogitReading(
            torch.cat([chunk.token_logits_N for chunk in chunks]),
            torch.cat([chunk.coord_logits_PC for chunk in chunks]),
            tuple(torch.cat(of_chunks) for of_chunks in by_normalizer),
            torch.cat(of_picked) if of_picked else None,
            torch.cat(means) if means else None,
        )


class RowTrainer:
    """Packs segments into rows, and trains the rows with the objectives of their channel."""

    def __init__(
        self,
        pipeline: PipelineSection,
        tolerance: Callable[[], LogprobTolerance],
        loaded: LoadedModel,
        parallel: Parallel,
        decode: DecodeSettings,
        reference: Reference | None = None,
        *,
        dtype: torch.dtype,
        share_prompts: bool = False,
    ) -> None:
        """Build the objectives of both channels from `pipeline`.

        Args:
            tolerance: returns the current tolerance. It is called for each row, because the first
                weight sync may measure that a larger tolerance is needed.
            decode: sampling settings of the rollouts.
            reference: the run's initial model, for objectives that compare the learner with it.
            dtype: number type of the model's forwards. Shards have another.
            share_prompts: the configuration's `training.share_prompts`.
        """
        self._loaded = loaded
        self._dtype = dtype
        self._share_prompts = share_prompts
        self._parallel = parallel
        self._reference = reference
        self._objectives = {
            channel: build_objectives(pipeline, channel, loaded.coord_ids_C) for channel in Channel
        }
        self._text_weights = {channel: text_weights(pipeline, channel) for channel in Channel}
        # Greedy engines (temperature 0) report the log-probability at temperature 1.
        self._sampled_under = Normalizer(decode.temperature or 1.0, loaded.banned_token_ids)
        self._compares_logprobs = compares_logprobs(decode)
        self._tolerance = tolerance

    def collate(
        self, segments: Row, channel: Channel, *, version: int, beside: Segment | None = None
    ) -> PackedRow:
        """Pack the segments into one row, and start to copy it to the model's device.

        The pixel values already have the type of the forward, so a copy in bfloat16 is half as
        large.

        Args:
            version: the learner's weight version. Log-probabilities that an engine computed with
                another version are not compared.
            beside: segment with images that is appended without supervision, so that a row without
                images runs the vision tower too.
        """
        return collate(
            [_comparable(segment, version) for segment in segments],
            text_weights=self._text_weights[channel],
            rope_index=self._loaded.rope_index,
            beside=beside,
            pixel_dtype=self._dtype,
            share_prompts=self._share_prompts,
        ).to(self._loaded.device)

    def queue(
        self, row: PackedRow, channel: Channel, *, weight: float = 1.0
    ) -> Callable[[], RowResult]:
        """Run forward and backward of the row, which adds a gradient to the model's gradients.

        With `weight` 0 nothing is added: the rank only takes part in a sharded model's forward.
        Return a function that waits for the result, like `queue_row`.
        """
        return queue_row(
            self._loaded.model,
            row,
            self._objectives[channel],
            self._sampled_under,
            run=self._parallel.forward,
            weight=weight,
            reference=self._reference,
        )

    def compare(
        self, row: PackedRow, result: RowResult, channel: Channel, so_far: Compared
    ) -> Compared:
        """Compare engine and learner log-probabilities of the row's sampled tokens.

        Return `so_far`, the result over earlier rows, with this row added. Raises RolloutError if
        too many log-probabilities differ (see `check_logprobs`).
        """
        if channel is Channel.A or not self._compares_logprobs:
            return so_far
        return check_logprobs(
            row.segments,
            result.compared_logprobs_K,
            row.on_host.compared.engine_logprobs,
            tolerance=self._tolerance(),
            so_far=so_far,
        )


def _comparable(segment: Segment, version: int) -> Segment:
    """Return the segment, without log-probabilities to compare if older weights generated it."""
    # The segment was carried over from an earlier step, or its rollout is stale.
    if segment.weight_version == version:
        return segment
    return replace(segment, target=replace(segment.target, compared_logprobs=()))
