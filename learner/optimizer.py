"""The one optimizer update of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from learner.ranks import Ranks
from shared.config.training import TrainingSection
from shared.errors import LearnerError


@dataclass(frozen=True, slots=True)
class UpdateResult:
    grad_norm: float
    """Before clipping."""
    learning_rate: float


class Updater:
    """AdamW with a schedule; `update` is called once a step."""

    def __init__(self, model: torch.nn.Module, config: TrainingSection, ranks: Ranks) -> None:
        self._ranks = ranks
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
        """Sum the gradients over ranks, divide by the samples of the step, clip, set the learning rate, update, and drop the gradients.

        LearnerError on a gradient that is not finite.
        """
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        self._ranks.sum_gradients(gradients)
        torch._foreach_div_(gradients, denominator)
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
