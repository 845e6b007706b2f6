"""`policy_gradient`: sampled tokens become more or less probable by their advantage, as far as the engine's weights may tell (DESIGN 8).

The ratio of the learner's probability to the engine's corrects for what the two differ in: weights that are older, and kernels. It is truncated at `ratio_cap`,
and clipped against the advantage's sign: a token is pushed no further than the clip, and always pulled back.

Shape legend: M sampled tokens that are learned.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from learner.objectives.interface import LogitNeeds, ObjectiveLoss, RowValues, SampledSupervision, Supervision
from shared.config.pipeline import PolicyGradientConfig


def truncated_ratio(learner_logprobs_M: torch.Tensor, engine_logprobs_M: torch.Tensor, *, cap: float) -> torch.Tensor:
    """`min(p_learner / p_engine, cap)`: [M]. Beyond the cap there is no gradient."""
    # Truncated before the exponential: an infinite ratio would have the gradient 0 * inf.
    return (learner_logprobs_M - engine_logprobs_M).clamp(max=math.log(cap)).exp()


def clipped_ratio(ratio_M: torch.Tensor, advantage_M: torch.Tensor, *, clip_low: float, clip_high: float) -> torch.Tensor:
    """At most `1 + clip_high` where the advantage is positive, at least `1 - clip_low` where it is not: [M]. Beyond the clip there is no gradient."""
    return torch.where(advantage_M > 0, ratio_M.clamp(max=1.0 + clip_high), ratio_M.clamp(min=1.0 - clip_low))


def policy_gradient_loss(ratio_M: torch.Tensor, advantage_M: torch.Tensor, weight_M: torch.Tensor, *, clip_low: float, clip_high: float) -> torch.Tensor:
    """`-sum weight min(ratio A, clip(ratio) A)`: a scalar. `ratio_M` is truncated already."""
    return -(weight_M * advantage_M * clipped_ratio(ratio_M, advantage_M, clip_low=clip_low, clip_high=clip_high)).sum()


def is_clipped(learner_logprobs_M: torch.Tensor, sampled: SampledSupervision, config: PolicyGradientConfig) -> torch.Tensor:
    """Whether clip or cap keep a token from being learned: bool [M]. One without advantage is not learned anyway."""
    log_ratio_M, advantage_M = learner_logprobs_M - sampled.engine_logprobs, sampled.advantage
    high_M = (advantage_M > 0) & (log_ratio_M > math.log1p(config.clip_high))
    low_M = (advantage_M < 0) & (log_ratio_M.exp() < 1.0 - config.clip_low)
    return high_M | low_M | ((advantage_M != 0) & (log_ratio_M > math.log(config.ratio_cap)))


class PolicyGradient:
    term_names: ClassVar[tuple[str, ...]] = ("policy_gradient",)
    needs: ClassVar[LogitNeeds] = LogitNeeds(sampled=True)

    def __init__(self, weight: float, config: PolicyGradientConfig) -> None:
        self._weight = weight
        self._config = config

    def __call__(self, values: RowValues, supervision: Supervision) -> ObjectiveLoss:
        learner_M, sampled, config = values.learned_logprobs_M, supervision.sampled, self._config
        assert learner_M is not None
        ratio_M = truncated_ratio(learner_M, sampled.engine_logprobs, cap=config.ratio_cap)
        loss = policy_gradient_loss(ratio_M, sampled.advantage, sampled.weight, clip_low=config.clip_low, clip_high=config.clip_high)
        return ObjectiveLoss(self._weight * loss, (loss.detach(),))


class PolicyDiag:
    """How far the learner is from the engine that sampled, and how much it still tries: a value per sampled token."""

    names: ClassVar[tuple[str, ...]] = ("policy/ratio", "policy/clipped_share", "policy/logprob_difference", "policy/entropy")
    needs: ClassVar[LogitNeeds] = LogitNeeds(sampled=True)

    def __init__(self, config: PolicyGradientConfig) -> None:
        self._config = config

    def __call__(self, values: RowValues, supervision: Supervision) -> tuple[torch.Tensor, ...]:
        learner_M, sampled = values.learned_logprobs_M, supervision.sampled
        assert learner_M is not None
        return (
            truncated_ratio(learner_M, sampled.engine_logprobs, cap=self._config.ratio_cap),
            is_clipped(learner_M, sampled, self._config).float(),
            (learner_M - sampled.engine_logprobs).abs(),
            # Of what a distribution samples, the mean of this is its entropy.
            -learner_M,
        )
