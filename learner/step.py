"""Forward and backward of one packed row, and the one optimizer update of a step.

Shape legend: D hidden size, N positions whose logits are needed, V vocabulary, K sampled tokens to compare.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from learner.collate import PackedRow, SampledTokens
from learner.objectives.coord_math import sampled_logprobs
from learner.objectives.interface import CoordSupervision, Objective, TextSupervision
from shared.config.training import TrainingSection
from shared.errors import LearnerError

Indexed = TypeVar("Indexed", TextSupervision, CoordSupervision, SampledTokens)

# Positions whose full-vocabulary logits exist at a time: 1,024 x 152,000 x 4 bytes is 0.6 GB.
LOGIT_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the engine drew its tokens, for computing the same probabilities here."""

    temperature: float
    banned_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowResult:
    loss: float
    """The row's part of the step's loss."""
    terms: dict[str, float]
    """`loss/...` metrics, to be summed over the rows of a step."""
    sampled_logprobs_K: torch.Tensor
    """The learner's log-probabilities of the row's sampled tokens, on the CPU."""


def backward_row(model: Any, row: PackedRow, objectives: Sequence[Objective], sampling: Sampling) -> RowResult:
    """Add the row's gradient. Logits exist only at supervised and compared positions, a chunk at a time."""
    inputs = row.inputs
    output = model.model(
        input_ids=inputs.input_ids,
        position_ids=inputs.position_ids,
        # None, not ones: with a mask transformers lets the segments see each other (FACTS 4).
        attention_mask=None,
        pixel_values=inputs.pixel_values.to(model.dtype),
        image_grid_thw=inputs.image_grid_thw,
        use_cache=False,
    )
    hidden_ND = output.last_hidden_state[0, row.positions_N]
    banned_ids = torch.tensor(sampling.banned_ids, dtype=torch.long, device=hidden_ND.device)

    def chunk(chunk_ND: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(loss, terms, log-probabilities of sampled tokens) of the positions from `start`."""
        stop = start + len(chunk_ND)
        logits_NV = model.lm_head(chunk_ND).float()
        text, coord, sampled = _between(row.text, start, stop), _between(row.coord, start, stop), _between(row.sampled, start, stop)
        losses = [objective(logits_NV, text, coord) for objective in objectives]
        with torch.no_grad():
            logprobs = sampled_logprobs(logits_NV[sampled.at], sampled.ids, temperature=sampling.temperature, banned_ids=banned_ids)
        return torch.stack([loss for loss, _ in losses]).sum(), torch.stack([term for _, terms in losses for term in terms]), logprobs

    # The logits of a chunk are computed again in its backward, so that no two chunks' exist at once.
    results = [checkpoint(chunk, hidden_ND[start : start + LOGIT_CHUNK], start, use_reentrant=False) for start in range(0, max(1, len(hidden_ND)), LOGIT_CHUNK)]
    loss = torch.stack([result[0] for result in results]).sum()
    loss.backward()
    names = [f"loss/{name}" for objective in objectives for name in objective.term_names]
    terms = torch.stack([result[1] for result in results]).sum(0).tolist()
    return RowResult(loss.item(), dict(zip(names, terms, strict=True)), torch.cat([result[2] for result in results]).cpu())


def _between(columns: Indexed, start: int, stop: int) -> Indexed:
    """The rows at positions `start .. stop`, counted from `start`."""
    inside = (columns.at >= start) & (columns.at < stop)
    kept = type(columns)(*(column[inside] for column in columns))
    return kept._replace(at=kept.at - start)


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

    def update(self, step: int, denominator: int) -> UpdateResult:
        """Divide the summed gradients by the samples of the step, clip, set the learning rate, update, and drop the gradients.

        LearnerError on a gradient that is not finite.
        """
        torch._foreach_div_([parameter.grad for parameter in self._parameters if parameter.grad is not None], denominator)
        limit = float("inf") if self._config.max_grad_norm is None else self._config.max_grad_norm
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, limit))
        if not math.isfinite(grad_norm):
            raise LearnerError(f"step {step}: the gradient norm is {grad_norm}; lower training.learning_rate, or look at the step's data", phase="update")
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
