"""`reference_kl`: the learner's policy stays near the one that the run started with (decision 37).

Of a sampled token, with `p` the learner's probabilities in its place and `r` the reference's:

    k3     r / p - log(r / p) - 1                        of the sampled token alone
    top    sum_i p_i log(p_i / r_i) + q log(q / s)       over the `top_tokens` most probable to `r`

with `q` and `s` what is left to all other tokens. Both are at least 0, and 0 where the policies
agree; the gradient is that of `p` as it is written. Probabilities are those of the sampling: at its
temperature, without the tokens that it may not draw. A token counts as it does in
`policy_gradient`.

`k3` is the estimator of Schulman (2020, "Approximating KL divergence") as GRPO's loss has it
(Shao et al. 2024, equation 4). Its mean over the learner's samples is KL(p, r); the mean of its
gradient is that of KL(r, p), and grows with `r / p`, which has no bound. `top` is KL(p, r) itself,
but that it sees nothing of how tokens outside of the top share what is left to them; so it is at
most the whole. The top is the reference's: then the tokens are the same whatever the learner does,
the term is smooth in its weights, and all that the learner moves to other tokens is in `q`, where
`s` is small.

Shape legend: M sampled tokens that are learned, J tokens that the reference finds most probable,
with all others as one.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from learner.objectives.base import LogitNeeds, ObjectiveLoss, RowValues, Supervision
from shared.config.pipeline import ReferenceKLConfig


def k3(learner_logprobs_M: torch.Tensor, reference_logprobs_M: torch.Tensor) -> torch.Tensor:
    """Compute `r / p - log(r / p) - 1` of each sampled token: [M].

    Example: a token that is half as probable as it was: 2 - log 2 - 1 = 0.307.
    """
    log_ratio_M = reference_logprobs_M - learner_logprobs_M
    # expm1 keeps what is left where p is nearly r.
    return torch.expm1(log_ratio_M) - log_ratio_M


def top_kl(learner_logprobs_MJ: torch.Tensor, reference_logprobs_MJ: torch.Tensor) -> torch.Tensor:
    """Compute `sum_j p_j log(p_j / r_j)` over the top tokens and all others as one: [M].

    Example: 0.5 to the one token, and 0.25 in the reference: 0.5 log 2 + 0.5 log(2/3) = 0.144.
    """
    log_ratio_MJ = learner_logprobs_MJ - reference_logprobs_MJ
    return (learner_logprobs_MJ.exp() * log_ratio_MJ).sum(-1)


class ReferenceKL:
    """The weighted sum of `k3` or `top_kl` over the sampled tokens that are learned."""

    term_names: ClassVar[tuple[str, ...]] = ("reference_kl",)

    def __init__(self, weight: float, config: ReferenceKLConfig) -> None:
        self._weight = weight
        self._is_top = config.estimator == "top"
        self.needs = LogitNeeds(learned=True, reference=True, reference_top=config.top_tokens or 0)

    def __call__(self, values: RowValues, supervision: Supervision) -> ObjectiveLoss:
        reference = values.reference
        assert reference is not None
        # Another objective may have asked for the top.
        if self._is_top:
            assert values.top_logprobs_MJ is not None
            assert reference.top_logprobs_MJ is not None
            divergence_M = top_kl(values.top_logprobs_MJ, reference.top_logprobs_MJ)
        else:
            assert values.learned_logprobs_M is not None
            divergence_M = k3(values.learned_logprobs_M, reference.learned_logprobs_M)
        loss = (supervision.learned.weight * divergence_M).sum()
        return ObjectiveLoss(self._weight * loss, (loss.detach(),))
