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

That is the default; docs/objectives.md has the variants, and the papers that they are from:

- `clip: dual`: nor is a token learned where `A < 0` and `ratio > ratio_cap`. `cispo`: every token
  is, and `w` is the ratio clamped to `[1 - clip_low, 1 + clip_high]`. `none`: no clip at all, which
  leaves truncated importance sampling.
- `above_cap: mask`: where `ratio > ratio_cap` a token has neither loss nor gradient.
- `ratio_level`: the ratio of a token is that of its whole call of the model, or its geometric mean.

Shape legend: M sampled tokens that are learned, C calls of the model that they are of.
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
from shared.config.pipeline import PolicyGradientConfig


def log_ratios(
    learner_logprobs_M: torch.Tensor,
    learned: LearnedSupervision,
    level: Literal["token", "call", "call_mean"],
) -> torch.Tensor:
    """Compute `log(p_learner / p_engine)` of what `level` says: [M], without gradient.

    Example: two tokens of one call with the ratios 2 and 1/8. `call`: log(1/4) for both;
    `call_mean`: log(1/2).
    """
    log_ratio_M = learner_logprobs_M.detach() - learned.engine_logprobs
    if level == "token" or not len(log_ratio_M):
        return log_ratio_M
    calls_C = torch.arange(int(learned.call[-1]) + 1, device=learned.call.device)
    # Not `index_add`, which adds in no fixed order on a GPU.
    is_of_CM = learned.call == calls_C[:, None]
    log_ratio_C = torch.where(is_of_CM, log_ratio_M, 0.0).sum(dim=1)
    if level == "call_mean":
        log_ratio_C = log_ratio_C / is_of_CM.sum(dim=1)
    return log_ratio_C[learned.call]


def advantages(learner_logprobs_M: torch.Tensor, learned: LearnedSupervision) -> torch.Tensor:
    """Compute the advantages, the teacher's part included: [M], without gradient.

    The teacher's part compares with the learner of this very update, so that it ends where learner
    and teacher agree, however many updates a batch has.
    """
    if learned.teacher is None:
        return learned.advantage
    # Detached: the teacher's part weighs the tokens, and has no gradient of its own.
    log_ratio_M = learned.teacher.logprobs - learner_logprobs_M.detach()
    return learned.advantage + learned.teacher.weight * log_ratio_M


def truncated_ratio(log_ratio_M: torch.Tensor, *, cap: float) -> torch.Tensor:
    """Compute `min(ratio, cap)`: [M]."""
    # Truncated before the exponential, which would overflow.
    return log_ratio_M.clamp(max=math.log(cap)).exp()


def is_clipped(
    learner_logprobs_M: torch.Tensor, learned: LearnedSupervision, config: PolicyGradientConfig
) -> torch.Tensor:
    """Tell which tokens the clip keeps from being learned: bool [M]. None without an advantage."""
    log_ratio_M = log_ratios(learner_logprobs_M, learned, config.ratio_level)
    # CISPO bounds the factor of the gradient instead, so that every token keeps one.
    if config.clip in ("cispo", "none"):
        return torch.zeros_like(log_ratio_M, dtype=torch.bool)
    advantage_M = advantages(learner_logprobs_M, learned)
    is_worse_M = advantage_M < 0
    too_high_M = (advantage_M > 0) & (log_ratio_M > math.log1p(config.clip_high))
    # Compared as a ratio: `clip_low` may be 1, and 0 has no logarithm.
    too_low_M = is_worse_M & (log_ratio_M.exp() < 1.0 - config.clip_low)
    clipped_M = too_high_M | too_low_M
    if config.clip == "dual":
        clipped_M |= is_worse_M & is_above_cap(log_ratio_M, config)
    return clipped_M


def is_above_cap(log_ratio_M: torch.Tensor, config: PolicyGradientConfig) -> torch.Tensor:
    """Tell whose ratio counts as `ratio_cap`, or is left out for it: bool [M]."""
    return log_ratio_M > math.log(config.ratio_cap)


def policy_gradient_loss(
    learner_logprobs_M: torch.Tensor, learned: LearnedSupervision, config: PolicyGradientConfig
) -> torch.Tensor:
    """Sum the weighted losses of the tokens, as the module's first lines define them: a scalar.

    Example: ratio 1.5, advantage 1, weight 1, clip_high 0.2: the token is clipped; the loss is -1.2
    and has no gradient. With advantage -1 it is 1.5 and pulls the token back.
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
    # 1 in value; its gradient is that of the log-probability.
    score_M = 1.0 + (learner_logprobs_M - learner_logprobs_M.detach())
    # A clipped token counts with a constant: it is in the loss, and has no gradient.
    counts_M = torch.where(clipped_M, bound_M, ratio_M * score_M)
    if config.above_cap == "mask":
        counts_M = torch.where(is_above_cap(log_ratio_M, config), 0.0, counts_M)
    return -(learned.weight * advantage_M * counts_M).sum()


class PolicyGradient:
    """The objective of `policy_gradient_loss`."""

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
    """Measures the learner's distance from the engine's policy, and its entropy, per token."""

    names: ClassVar[tuple[str, ...]] = (
        "policy/ratio",
        "policy/clipped_share",
        "policy/capped_share",
        "policy/logprob_difference",
        "policy/entropy",
    )
    needs: ClassVar[LogitNeeds] = LogitNeeds(learned=True)

    def __init__(self, config: PolicyGradientConfig) -> None:
        self._config = config

    def __call__(self, values: RowValues, supervision: Supervision) -> tuple[torch.Tensor, ...]:
        learner_M = values.learned_logprobs_M
        learned = supervision.learned
        assert learner_M is not None
        log_ratio_M = log_ratios(learner_M, learned, self._config.ratio_level)
        return (
            truncated_ratio(log_ratio_M, cap=self._config.ratio_cap),
            is_clipped(learner_M, learned, self._config).float(),
            is_above_cap(log_ratio_M, self._config).float(),
            (learner_M - learned.engine_logprobs).abs(),
            # Its mean over what a distribution samples is the distribution's entropy.
            -learner_M,
        )
