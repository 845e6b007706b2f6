"""`policy_gradient`: PPO-clipped policy gradient on sampled tokens (decision 37).

With `ratio = p_learner / p_engine` of a sampled token and `A` its advantage, its loss is

    -A * w * log p_learner,    w = min(ratio, ratio_cap), without gradient.

The clip of PPO removes the gradient of a token if `A > 0` and `ratio > 1 + clip_high`, or if
`A < 0` and `ratio < 1 - clip_low`: the policy has moved far enough from the engine's. A token whose
probability moved against its advantage always has a gradient. It is at most `ratio_cap` times the
gradient at the engine's own weights.

`w` corrects for differences between learner and engine: older weights, other kernels. It is the
truncated importance weight of Ionides (2008), detached as in the policy gradient of IMPALA
(Espeholt et al. 2018, V-trace: `min(rho_bar, pi / mu) * grad log pi * A`) and in CISPO (MiniMax-M1,
2025). Below the cap the gradient equals the gradient of PPO's `-min(ratio A, clip(ratio) A)`. Above
the cap, a truncation with gradient, as in dual clip (Ye et al. 2020), would give no gradient to a
token that is far too probable and has a negative advantage. Such tokens need it most.

The logged loss has the value of the surrogate, `-A w`. For a clipped token the bound replaces `w`.
`log p_learner` changes only the gradient, not the value.

This is the default. docs/explanation/objectives.md describes the variants and their papers:

- `clip: dual`: a token with `A < 0` and `ratio > ratio_cap` has no gradient either. `cispo`: every
  token has a gradient, and `w` is the ratio clamped to `[1 - clip_low, 1 + clip_high]`. `none`: no
  clip, only truncated importance sampling.
- `above_cap: mask`: a token with `ratio > ratio_cap` has no loss and no gradient.
- `ratio_level`: a token's ratio is the ratio of its whole model call, or its geometric mean.

Shape legend: M sampled tokens with an advantage, C model calls that sampled them.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch

from learner.objectives.base import (
    LearnedSupervision,
    LogitNeeds,
    ObjectiveLoss,
    RowValues,
    Supervision,
)
from shared.config.pipeline import AdvantageConfig, PolicyGradientConfig


def log_ratios(
    learner_logprobs_M: torch.Tensor,
    learned: LearnedSupervision,
    level: Literal["token", "call", "call_mean"],
) -> torch.Tensor:
    """Return `log(p_learner / p_engine)` of each sampled token: [M], without gradient.

    With level `call` it is the sum of the log-ratios of all tokens of the same model call, with
    `call_mean` their mean.

    Example: two tokens of one call with the ratios 2 and 1/8. `call`: log(1/4) for both;
    `call_mean`: log(1/2).
    """
    log_ratio_M = learner_logprobs_M.detach() - learned.engine_logprobs
    if level == "token" or not len(log_ratio_M):
        return log_ratio_M
    numbers = torch.arange(learned.num_calls + 1, device=learned.call.device)
    # Not `index_add`, which is not deterministic on a GPU. `unsafe` skips checks of the offsets,
    # for which the host would wait for the GPU.
    log_ratio_C = torch.segment_reduce(
        log_ratio_M,
        "mean" if level == "call_mean" else "sum",
        offsets=torch.searchsorted(learned.call, numbers),
        unsafe=True,
    )
    return log_ratio_C[learned.call]


def advantages(learner_logprobs_M: torch.Tensor, learned: LearnedSupervision) -> torch.Tensor:
    """Return each sampled token's advantage, including the teacher's part: [M], without gradient.

    The teacher's part uses the learner's current log-probabilities. So it is 0 when learner and
    teacher agree, also with several updates per batch.
    """
    if learned.teacher is None:
        return learned.advantage
    # Detached: the teacher's part only weighs the tokens.
    log_ratio_M = learned.teacher.logprobs - learner_logprobs_M.detach()
    return learned.advantage + learned.teacher.weight * log_ratio_M


def truncated_ratio(log_ratio_M: torch.Tensor, *, cap: float) -> torch.Tensor:
    """Return the importance weight `min(ratio, cap)` of each token: [M]."""
    # Truncated before the exponential, because that could overflow.
    return log_ratio_M.clamp(max=math.log(cap)).exp()


def is_clipped(
    learner_logprobs_M: torch.Tensor, learned: LearnedSupervision, config: PolicyGradientConfig
) -> torch.Tensor:
    """Return which sampled tokens have no gradient because of the clip: bool [M].

    The value is False for an advantage of 0.
    """
    log_ratio_M = log_ratios(learner_logprobs_M, learned, config.ratio_level)
    # CISPO bounds the factor of the gradient instead, so every token keeps a gradient.
    if config.clip in ("cispo", "none"):
        return torch.zeros_like(log_ratio_M, dtype=torch.bool)
    advantage_M = advantages(learner_logprobs_M, learned)
    is_worse_M = advantage_M < 0
    too_high_M = (advantage_M > 0) & (log_ratio_M > math.log1p(config.clip_high))
    # Compared as a ratio, because `clip_low` may be 1 and log(0) does not exist.
    too_low_M = is_worse_M & (log_ratio_M.exp() < 1.0 - config.clip_low)
    clipped_M = too_high_M | too_low_M
    if config.clip == "dual":
        clipped_M |= is_worse_M & is_above_cap(log_ratio_M, config)
    return clipped_M


def is_above_cap(log_ratio_M: torch.Tensor, config: PolicyGradientConfig) -> torch.Tensor:
    """Return which tokens' ratio of learner to engine probability exceeds `ratio_cap`: bool [M]."""
    return log_ratio_M > math.log(config.ratio_cap)


def policy_gradient_loss(
    learner_logprobs_M: torch.Tensor, learned: LearnedSupervision, config: PolicyGradientConfig
) -> torch.Tensor:
    """Return the policy-gradient loss of a packed row: a scalar, weighted sum over sampled tokens.

    The module docstring defines a token's loss.

    Example: ratio 1.5, advantage 1, weight 1, clip_high 0.2: the token is clipped. The loss is -1.2
    and has no gradient. With advantage -1 the loss is 1.5 and lowers the token's probability.
    """
    advantage_M = advantages(learner_logprobs_M, learned)
    clipped_M = is_clipped(learner_logprobs_M, learned, config)
    log_ratio_M = log_ratios(learner_logprobs_M, learned, config.ratio_level)
    ratio_M = truncated_ratio(log_ratio_M, cap=config.ratio_cap)
    if config.clip == "cispo":
        ratio_M = ratio_M.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    bound_M = torch.where(
        advantage_M > 0,
        ratio_M.clamp(max=1.0 + config.clip_high),
        ratio_M.clamp(min=1.0 - config.clip_low),
    )
    # The value is 1. The gradient is the gradient of the log-probability.
    score_M = 1.0 + (learner_logprobs_M - learner_logprobs_M.detach())
    # A clipped token adds a constant to the loss, without gradient.
    counts_M = torch.where(clipped_M, bound_M, ratio_M * score_M)
    if config.above_cap == "mask":
        counts_M = torch.where(is_above_cap(log_ratio_M, config), 0.0, counts_M)
    return -(learned.weight * advantage_M * counts_M).sum()


class PolicyGradient:
    """The loss `policy_gradient` over the sampled tokens of a packed row."""

    term_names: ClassVar[tuple[str, ...]] = ("policy_gradient",)
    needs: ClassVar[LogitNeeds] = LogitNeeds(learned=True)

    def __init__(self, weight: float, config: PolicyGradientConfig) -> None:
        self._weight = weight
        self._config = config

    def __call__(self, values: RowValues, supervision: Supervision) -> ObjectiveLoss:
        learner_M = values.learned_logprobs_M
        assert learner_M is not None
        loss = policy_gradient_loss(learner_M, supervision.learned, self._config)
        return ObjectiveLoss(self._weight * loss, (loss.detach(),))


class PolicyDiag:
    """Metrics of sampled tokens: how far the learner's policy is from the engine's, and entropy."""

    needs: ClassVar[LogitNeeds] = LogitNeeds(learned=True)

    def __init__(self, config: AdvantageConfig) -> None:
        """`config`: only `policy_gradient` has a ratio and a clip; an imported one has its own."""
        self._config = config if isinstance(config, PolicyGradientConfig) else None
        of_clip = ("policy/ratio", "policy/clipped_share", "policy/capped_share")
        of_policy = ("policy/logprob_difference", "policy/entropy")
        self.names = of_policy if self._config is None else (*of_clip, *of_policy)

    def __call__(self, values: RowValues, supervision: Supervision) -> tuple[torch.Tensor, ...]:
        learner_M = values.learned_logprobs_M
        learned = supervision.learned
        assert learner_M is not None
        # The mean of -log p over samples of a distribution estimates the distribution's entropy.
        of_policy = ((learner_M - learned.engine_logprobs).abs(), -learner_M)
        if self._config is None:
            return of_policy
        log_ratio_M = log_ratios(learner_M, learned, self._config.ratio_level)
        return (
            truncated_ratio(log_ratio_M, cap=self._config.ratio_cap),
            is_clipped(learner_M, learned, self._config).float(),
            is_above_cap(log_ratio_M, self._config).float(),
            *of_policy,
        )
