"""The logits of one packed row, reduced to what its objectives ask: a chunk of positions at a time, because all at once fill gigabytes.

The peak is a chunk's backward: its logits, a float32 copy of them (the gradient) and masks; benchmarks/logit_memory.py measures it.

Shape legend: D hidden size, N positions whose logits are needed, P of them with coord logits, X text, S coord slots, K and M sampled tokens, to
compare and to learn, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from learner.collate import PackedRow
from learner.objectives import coord_math
from learner.objectives.coord_math import LogitReading, Normalizer
from learner.objectives.interface import LogitNeeds, RowValues

LOGIT_CHUNK = 512
"""Positions whose full-vocabulary logits exist at a time: with a vocabulary of 152,000 and float32, 9 bytes for each are 0.70 GB."""

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
        text, coord, sampled, needs = row.supervision.text, row.supervision.coord, row.sampled, self.needs
        learned = row.supervision.sampled
        coord_at_P = coord.at if needs.text_gate is None else torch.cat([coord.at, text.at]).sort().values
        normalizers = self._normalizers(len(sampled.at) + (len(learned.at) if needs.sampled else 0))
        reading = self._read(hidden_ND, row.token_ids_N, coord_at_P, normalizers)
        log_normalizers = dict(zip(normalizers, reading.log_normalizers_N, strict=True))

        def leak(at: torch.Tensor, temperature: float) -> torch.Tensor:
            logits = reading.coord_logits_PC[torch.searchsorted(coord_at_P, at)]
            return coord_math.mass_leak(log_normalizers[Normalizer(temperature)][at], logits, temperature=temperature)

        def logprobs(at: torch.Tensor, normalizer: Normalizer) -> torch.Tensor:
            return coord_math.token_logprobs(reading.token_logits_N[at], log_normalizers[normalizer][at], normalizer.temperature)

        def sampled_logprobs(at: torch.Tensor) -> torch.Tensor:
            return logprobs(at, self.sampled_under) if len(at) else hidden_ND.new_zeros(0, dtype=torch.float32)

        return RowValues(
            text_ce_X=-logprobs(text.at, _PLAIN) if needs.text_ce else None,
            text_gate_X=None if needs.text_gate is None else coord_math.gate_of_leak(leak(text.at, needs.text_gate)),
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
        gates = tuple(Normalizer(temperature) for temperature in (needs.text_gate, needs.coord_gate) if temperature is not None)
        return tuple(dict.fromkeys((*plain, *gates, *((self.sampled_under,) if num_sampled else ()))))

    def _read(self, hidden_ND: torch.Tensor, token_ids_N: torch.Tensor, coord_at_P: torch.Tensor, normalizers: tuple[Normalizer, ...]) -> LogitReading:
        def read(chunk_ND: torch.Tensor, start: int) -> LogitReading:
            stop = start + len(chunk_ND)
            here = coord_at_P[(coord_at_P >= start) & (coord_at_P < stop)] - start
            return coord_math.read_logits(self.lm_head(chunk_ND), token_ids_N[start:stop], here, self.coord_ids_C, normalizers)

        # The logits of a chunk are computed again in its backward, so that no two chunks' exist at once. An empty row has one empty chunk.
        parts = hidden_ND.split(self.chunk)
        chunks = [checkpoint(read, part_ND, index * self.chunk, use_reentrant=False) for index, part_ND in enumerate(parts)]
        return LogitReading(
            torch.cat([chunk.token_logits_N for chunk in chunks]),
            torch.cat([chunk.coord_logits_PC for chunk in chunks]),
            tuple(torch.cat(of_chunks) for of_chunks in zip(*(chunk.log_normalizers_N for chunk in chunks), strict=True)),
        )
