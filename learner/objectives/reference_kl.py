"""`reference_kl`: KL penalty towards the policy that the run started with (decision 37).

With `p` the learner's and `r` the reference's probabilities at a sampled token's position:

    k3     r / p - log(r / p) - 1                        of the sampled token only
    top    sum_i p_i log(p_i / r_i) + q log(q / s)       over the `top_tokens` most probable in `r`

`q` and `s` are the probabilities of all other tokens together. Both terms are at least 0, and 0 if
the policies agree. Their gradient goes through every `p`. The probabilities use the sampling's
temperature and exclude its banned tokens. A token has the same weight as in `policy_gradient`.

`k3` is the estimator of Schulman (2020, "Approximating KL divergence"), as in GRPO's loss (Shao et
al. 2024, equation 4). Its mean over the learner's samples is KL(p, r). The mean of its gradient is
the gradient of KL(r, p), and grows with `r / p`, which is not bounded. `top` is a lower bound of
KL(p, r), because it merges all tokens outside the top into one. The top is taken from the
reference. So the tokens do not depend on the learner, the term is smooth in the learner's weights,
and probability that the learner moves to other tokens counts in `q` while `s` is small.

Shape legend: M sampled tokens with an advantage, J the reference's most probable tokens, with all
other tokens as one.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from learner.objectives.base import LogitNeeds, ObjectiveLoss, RowValues, Supervision
from shared.config.pipeline import ReferenceKLConfig


def k3(learner_logprobs_M: torch.Tensor, reference_logprobs_M: torch.Tensor) -> torch.Tensor:
    """Return the KL estimate `r / p - log(r / p) - 1` of each sampled token: [M].

    Example: a token with half its reference probability: 2 - log 2 - 1 = 0.307.
    """
    log_ratio_M = reference_logprobs_M - learner_logprobs_M
    # expm1 stays accurate if p is nearly r.
    return torch.expm1(log_ratio_M) - log_ratio_M


def top_kl(learner_logprobs_MJ: torch.Tensor, reference_logprobs_MJ: torch.Tensor) -> torch.Tensor:
    """Return the KL divergence over the top tokens, with all others as one token: [M].

    It is `sum_j p_j log(p_j / r_j)`, p of the learner and r of the reference.

    Example: one top token with p 0.5 and r 0.25: 0.5 log 2 + 0.5 log(2/3) = 0.144.
    """
    log_ratio_MJ = learner_logprobs_MJ - reference_logprobs_MJ
    return (learner_logprobs_MJ.exp() * log_ratio_MJ).sum(-1)


class ReferenceKL:
    """The loss `reference_kl`: weighted sum of `k3` or `top_kl` over tokens with an advantage."""

    term_names: ClassVar[tuple[str, ...]] = ("reference_kl",)

    def __init__(self, weight: float, config: ReferenceKLConfig) -> None:
        self._weight = weight
        self._is_top = config.estimator == "top"
        self.needs = LogitNeeds(learned=True, reference=True, reference_top=config.top_tokens or 0)

    def __call__(self, values: RowValues, supervision: Supervision) -> ObjectiveLoss:
        reference = values.reference
        assert reference is not None
        # Another objective may have requested the top, so the config decides.
        if self._is_top:
            assert values.top_logprobs_MJ is not None
            assert reference.top_logprobs_MJ is not None
            divergence_M = top_kl(values.top_logprobs_MJ, reference.top_logprobs_MJ)
        else:
            assert values.learned_logprobs_M is not None
            divergence_M = k3(values.learned_logprobs_M, reference.learned_logprobs_M)
        loss = (supervision.learned.weight * divergence_M).sum()
        return ObjectiveLoss(self._weight * loss, (loss.detach(),))
