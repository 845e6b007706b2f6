"""`policy_gradient`: sampled tokens become more or less probable by their advantage (decision 37).

With `ratio = p_learner / p_engine` of a sampled token and `A` its advantage, its loss is

    -A * w * log p_learner,    w = min(ratio, ratio_cap), without gradient,

where the clip of PPO allows it: not where `A > 0` and `ratio > 1 + clip_high`, nor where `A < 0`
and `ratio < 1 - clip_low`. There the token has no gradient: it went as far as the engine can vouch
for. What went the wrong way is always pulled back, with at most `ratio_cap` times the force that
it would have on the engine's own weights.

`w` corrects for what learner and engine differ in: older weights, other kernels. It is the
truncated importance weight of Ionides (2008), detached as in the policy gradient of IMPALA
(Espeholt et al. 2018, V-trace: `min(rho_bar, pi / mu) * grad log pi * A`) and in CISPO (MiniMax-M1,
2025). Under the cap the gradient is exactly that of PPO's `-min(ratio A, clip(ratio) A)`. Above it
a truncation that the gradient runs through, as in dual clip (Ye et al. 2020), would teach nothing
of a token that is far too probable and worse than the others: the one that needs it most.

The loss that is logged has the value of the surrogate, `-A w`, with the bound in place of `w`
where a token is clipped; `log p_learner` enters by its gradient alone.

Shape legend: M sampled tokens that are learned.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from learner.objectives.base import (
    LogitNeeds,
    ObjectiveLoss,
    RowValues,
    SampledSupervision,
    Supervision,
)
from shared.config.pipeline import PolicyGradientConfig


def truncated_ratio(
    learner_logprobs_M: torch.Tensor, engine_logprobs_M: torch.Tensor, *, cap: float
) -> torch.Tensor:
    """Compute `min(p_learner / p_engine, cap)`: [M], without gradient."""
    # Truncated before the exponential, which would overflow.
    log_ratio_M = learner_logprobs_M.detach() - engine_logprobs_M
    return log_ratio_M.clamp(max=math.log(cap)).exp()


def is_clipped(
    learner_logprobs_M: torch.Tensor, sampled: SampledSupervision, config: PolicyGradientConfig
) -> torch.Tensor:
    """Tell which tokens the clip keeps from being learned: bool [M]. None without an advantage."""
    log_ratio_M = learner_logprobs_M.detach() - sampled.engine_logprobs
    too_high_M = (sampled.advantage > 0) & (log_ratio_M > math.log1p(config.clip_high))
    too_low_M = (sampled.advantage < 0) & (log_ratio_M.exp() < 1.0 - config.clip_low)
    return too_high_M | too_low_M


def policy_gradient_loss(
    learner_logprobs_M: torch.Tensor, sampled: SampledSupervision, config: PolicyGradientConfig
) -> torch.Tensor:
    """Sum the weighted losses of the tokens, as the module's first lines define them: a scalar.

    Example: ratio 1.5, advantage 1, weight 1, clip_high 0.2: the token is clipped; the loss is -1.2
    and has no gradient. With advantage -1 it is 1.5 and pulls the token back.
    """
    advantage_M = sampled.advantage
    clipped_M = is_clipped(learner_logprobs_M, sampled, config)
    ratio_M = truncated_ratio(learner_logprobs_M, sampled.engine_logprobs, cap=config.ratio_cap)
    bound_M = torch.where(
        advantage_M > 0,
        ratio_M.clamp(max=1.0 + config.clip_high),
        ratio_M.clamp(min=1.0 - config.clip_low),
    )
    # 1 in value; its gradient is that of the log-probability.
    score_M = 1.0 + (learner_logprobs_M - learner_logprobs_M.detach())
    counts_M = torch.where(clipped_M, bound_M, ratio_M * score_M)
    return -(sampled.weight * advantage_M * counts_M).sum()


class PolicyGradient:
    """The objective of `policy_gradient_loss`."""

    term_names: ClassVar[tuple[str, ...]] = ("policy_gradient",)
    needs: ClassVar[LogitNeeds] = LogitNeeds(sampled=True)

    def __init__(self, weight: float, config: PolicyGradientConfig) -> None:
        self._weight = weight
        self._config = config

    def __call__(self, values: RowValues, supervision: Supervision) -> ObjectiveLoss:
        learner_M = values.learned_logprobs_M
        assert learner_M is not None
        loss = policy_gradient_loss(learner_M, supervision.sampled, self._config)
        return ObjectiveLoss(self._weight * loss, (loss.detach(),))


class PolicyDiag:
    """Measures the learner's distance from the engine's policy, and its entropy, per token."""

    names: ClassVar[tuple[str, ...]] = (
        "policy/ratio",
        "policy/clipped_share",
        "policy/logprob_difference",
        "policy/entropy",
    )
    needs: ClassVar[LogitNeeds] = LogitNeeds(sampled=True)

    def __init__(self, config: PolicyGradientConfig) -> None:
        self._config = config

    def __call__(self, values: RowValues, supervision: Supervision) -> tuple[torch.Tensor, ...]:
        learner_M = values.learned_logprobs_M
        sampled = supervision.sampled
        assert learner_M is not None
        return (
            truncated_ratio(learner_M, sampled.engine_logprobs, cap=self._config.ratio_cap),
            is_clipped(learner_M, sampled, self._config).float(),
            (learner_M - sampled.engine_logprobs).abs(),
            # Its mean over what a distribution samples is the distribution's entropy.
            -learner_M,
        )
