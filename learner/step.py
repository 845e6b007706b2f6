"""Forward and backward of one packed row, and the one optimizer update of a step.

Shape legend: T row tokens, D hidden size, N positions whose logits are needed, V vocabulary, K sampled tokens to compare.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from learner.collate import PackedRow
from learner.objectives.coord_math import sampled_logprobs
from learner.objectives.interface import Objective, Supervision
from shared.config.training import TrainingSection

# Positions whose full-vocabulary logits exist at a time: 1,024 x 152,000 x 4 bytes is 0.6 GB. They are computed again in the backward.
LOGIT_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """How the engine drew its tokens, for computing the same probabilities here."""

    temperature: float
    banned_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowResult:
    loss: float
    """The row's part of the step's loss."""
    terms: dict[str, float]
    """`loss/...` metrics; summed over the rows of a step."""
    sampled_logprobs_K: torch.Tensor
    """The learner's log-probabilities of the row's sampled tokens, on the CPU."""


def backward_row(model: Any, row: PackedRow, objectives: Sequence[Objective], *, coord_ids_C: torch.Tensor, sampled: SampledTokens) -> RowResult:
    """Add the row's gradient. Logits exist only at supervised and compared positions, a chunk at a time."""
    output = model.model(
        input_ids=row.input_ids_1T,
        position_ids=row.position_ids_41T,
        # None, not ones: with a mask transformers lets the segments see each other (FACTS 4).
        attention_mask=None,
        pixel_values=row.pixel_values_RD.to(model.dtype),
        image_grid_thw=row.image_grid_I3,
        use_cache=False,
    )
    hidden_ND = output.last_hidden_state[0, row.positions_N]
    banned_ids = torch.tensor(sampled.banned_ids, dtype=torch.long, device=hidden_ND.device)
    names: list[str] = []

    def chunk_loss(chunk_ND: torch.Tensor, supervision: Supervision, sampled_index: torch.Tensor, sampled_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits_NV = model.lm_head(chunk_ND).float()
        losses = [(objective.name, objective(logits_NV, supervision)) for objective in objectives]
        terms = {f"loss/{name}.{term}": value for name, result in losses for term, value in result.terms.items()}
        names[:] = terms
        loss = sum((result.loss for _, result in losses), start=logits_NV.new_zeros(()))
        with torch.no_grad():
            logprobs = sampled_logprobs(logits_NV[sampled_index], sampled_ids, temperature=sampled.temperature, banned_ids=banned_ids)
        return loss, torch.stack([*terms.values(), logits_NV.new_zeros(())]), logprobs

    chunks = [
        checkpoint(chunk_loss, hidden_ND[start : start + LOGIT_CHUNK], *_slice(row, start, coord_ids_C), use_reentrant=False)
        for start in range(0, hidden_ND.shape[0], LOGIT_CHUNK)
    ]
    loss = sum((chunk[0] for chunk in chunks), start=hidden_ND.new_zeros((), dtype=torch.float32))
    if loss.requires_grad:
        loss.backward()
    values = torch.stack([chunk[1] for chunk in chunks]).sum(0).tolist() if chunks else []
    return RowResult(
        loss=loss.item(),
        terms=dict(zip(names, values, strict=False)),
        sampled_logprobs_K=torch.cat([chunk[2] for chunk in chunks]).cpu() if chunks else torch.empty(0),
    )


def _slice(row: PackedRow, start: int, coord_ids_C: torch.Tensor) -> tuple[Supervision, torch.Tensor, torch.Tensor]:
    """The supervision and the sampled tokens of logit positions `start .. start + LOGIT_CHUNK`, re-indexed to the chunk."""

    def inside(index: torch.Tensor) -> torch.Tensor:
        return (index >= start) & (index < start + LOGIT_CHUNK)

    text, coord, sampled = inside(row.text_index_X), inside(row.coord_index_S), inside(row.sampled_index_K)
    supervision = Supervision(
        text_index_T=row.text_index_X[text] - start,
        text_labels_T=row.text_labels_X[text],
        text_weight_T=row.text_weight_X[text],
        gate_weight_T=row.gate_weight_X[text],
        coord_index_S=row.coord_index_S[coord] - start,
        coord_bins_S=row.coord_bins_S[coord],
        coord_weight_S=row.coord_weight_S[coord],
        coord_ids_C=coord_ids_C,
    )
    return supervision, row.sampled_index_K[sampled] - start, row.sampled_ids_K[sampled]


@dataclass(frozen=True, slots=True)
class UpdateResult:
    grad_norm: float
    """Before clipping."""
    learning_rate: float


class Updater:
    """AdamW with a schedule; `update` is called once a step."""

    def __init__(self, model: torch.nn.Module, config: TrainingSection) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._config = config
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
        )

    def update(self, step: int) -> UpdateResult:
        """Clip, set the step's learning rate, update, and drop the gradients. RuntimeError on a gradient that is not finite."""
        limit = float("inf") if self._config.max_grad_norm is None else self._config.max_grad_norm
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, limit))
        if not math.isfinite(grad_norm):
            raise RuntimeError(f"step {step}: the gradient norm is {grad_norm}; lower training.learning_rate, or look at the step's rollouts and data")
        learning_rate = learning_rate_at(step, self._config)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return UpdateResult(grad_norm, learning_rate)


def learning_rate_at(step: int, config: TrainingSection) -> float:
    """Linear warm-up over `lr_warmup_steps`, then the schedule down to `min_lr_ratio` of the peak at `max_steps`."""
    if step < config.lr_warmup_steps:
        return config.learning_rate * (step + 1) / config.lr_warmup_steps
    if config.lr_schedule == "constant":
        return config.learning_rate
    progress = (step - config.lr_warmup_steps) / max(1, config.max_steps - config.lr_warmup_steps)
    decay = 1.0 - progress if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * decay)
