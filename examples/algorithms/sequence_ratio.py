"""A policy gradient: GSPO (Zheng et al., 2025, arXiv 2507.18071).

A sampled token's ratio is the geometric mean of `p_learner / p_engine` over its model call:

    -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

The gradient goes through the ratio. `policy_gradient` with `ratio_level: call_mean` has the same
loss and gradient up to its `ratio_cap`, if all tokens of a call have the same advantage and weight.

Shape legend: M sampled tokens, C model calls that sampled them.
"""

import torch
from pydantic import NonNegativeFloat

from learner.objectives.base import LogitNeeds, ObjectiveLoss, RowValues, Supervision
from learner.objectives.policy_gradient import advantages
from shared.config.base import Fraction01, Section


class SequenceRatio:
    """PPO's clipped loss with one ratio for each model call."""

    class Config(Section):
        clip_low: Fraction01
        """The clip range begins at `1 - clip_low`."""
        clip_high: NonNegativeFloat
        """The clip range ends at `1 + clip_high`."""

    term_names = ("sequence_ratio",)
    needs = LogitNeeds(learned=True)

    def __init__(self, weight: float, config: Config) -> None:
        self._weight = weight
        self._range = (1.0 - config.clip_low, 1.0 + config.clip_high)

    def __call__(self, values: RowValues, supervision: Supervision) -> ObjectiveLoss:
        learned = supervision.learned
        learner_M = values.learned_logprobs_M
        assert learner_M is not None
        log_ratio_M = learner_M - learned.engine_logprobs
        # A row without a sampled token has no call. A mask, because `index_add` is not
        # deterministic on a GPU.
        calls_C = torch.arange(learned.num_calls, device=learned.call.device)
        is_of_CM = learned.call == calls_C[:, None]
        log_ratio_C = torch.where(is_of_CM, log_ratio_M, 0.0).sum(1) / is_of_CM.sum(1)
        ratio_M = log_ratio_C[learned.call].exp()
        advantage_M = advantages(learner_M, learned)  # with the teacher's part, if there is one
        gain_M = torch.minimum(ratio_M * advantage_M, ratio_M.clamp(*self._range) * advantage_M)
        loss = -(learned.weight * gain_M).sum()
        return ObjectiveLoss(self._weight * loss, (loss.detach(),))
