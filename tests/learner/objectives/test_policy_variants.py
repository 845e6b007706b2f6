"""The variants of `policy_gradient` against their papers' formulas, call by call in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from learner.objectives.base import LearnedSupervision
from learner.objectives.policy_gradient import is_clipped, policy_gradient_loss
from shared.config.pipeline import EXAMPLE_POLICY_GRADIENT, PolicyGradientConfig

LOW, HIGH, CAP = 0.2, 0.3, 2.0
CONFIG = EXAMPLE_POLICY_GRADIENT["config"] | {"advantage_std": False}
CALLS = [
    # Log-ratios of the tokens of one call, and its advantage: of every side of clip and cap.
    ([0.05, -0.1, 0.02], 1.5),
    ([0.5, 0.4, 0.3, 0.1], 2.0),
    ([0.5, 0.9, 1.2], -1.0),
    ([1.5], -0.5),
    ([1.5], 0.5),
    ([-0.6, -0.2], -2.0),
    ([-0.6, -3.0], 1.0),
    ([0.9, -0.8], -1.0),
    ([0.9, -0.8], 0.7),
    ([0.0, 0.0], 0.0),
]


def learned(**changes):
    """The loss of all calls in one row and its gradient by log-probability, call by call."""
    sizes = [len(log_ratios) for log_ratios, _ in CALLS]
    engine = torch.linspace(-3.0, -0.1, sum(sizes), dtype=torch.float64)
    apart = torch.tensor(
        [value for log_ratios, _ in CALLS for value in log_ratios], dtype=torch.float64
    )
    learner = (engine + apart).requires_grad_()
    call = torch.from_numpy(np.repeat(np.arange(len(CALLS)), sizes))
    of_call = torch.tensor([advantage for _, advantage in CALLS], dtype=torch.float64)
    weight = torch.tensor([1.0 / size for size in sizes], dtype=torch.float64)
    sampled = LearnedSupervision(
        torch.arange(len(engine)), engine, of_call[call], weight[call], call, len(CALLS)
    )
    config = PolicyGradientConfig(**CONFIG | changes)
    loss = policy_gradient_loss(learner, sampled, config)
    loss.backward()
    clipped = is_clipped(learner, sampled, config)
    return loss.item(), [part.tolist() for part in learner.grad.split(sizes)], clipped.tolist()


def slowly(loss_of_call):
    """The sum of a formula over calls and its gradient: it gets log-ratios, to differentiate, and
    an advantage, and returns what is differentiated and the value that is logged."""
    value, gradients = 0.0, []
    for log_ratios, advantage in CALLS:
        log_ratio = torch.tensor(log_ratios, dtype=torch.float64, requires_grad=True)
        differentiated, logged = loss_of_call(log_ratio, advantage)
        differentiated.backward()
        value += logged.item() if isinstance(logged, torch.Tensor) else logged
        gradients.append(log_ratio.grad.tolist())
    return value, gradients


def clip(ratio):
    return ratio.clamp(1 - LOW, 1 + HIGH)


def worse(ratio, advantage):
    return torch.minimum(ratio * advantage, clip(ratio) * advantage)


def dual_clip(log_ratio, advantage):
    """Ye et al. 2020, equation 5: `max(min(r A, clip(r) A), c A)` where A < 0."""
    surrogate = worse(log_ratio.exp(), advantage)
    if advantage < 0:
        surrogate = torch.maximum(surrogate, torch.full_like(surrogate, CAP * advantage))
    loss = -surrogate.mean()
    return loss, loss


def cispo(log_ratio, advantage):
    """MiniMax-M1, equation 4: `sg(clip(r)) A log pi`."""
    factor = clip(log_ratio.detach().exp())
    return -(factor * advantage * log_ratio).mean(), -(factor * advantage).mean()


def gspo(log_ratio, advantage):
    """Zheng et al. 2025, equations 5 and 7: the ratio to the power of 1 / |y|, once per sequence."""
    ratio = (log_ratio.sum() / len(log_ratio)).exp()
    loss = -worse(ratio, torch.tensor(advantage, dtype=torch.float64))
    return loss, loss


def token_tis(log_ratio, advantage):
    """Truncated importance sampling: REINFORCE times `sg(min(r, C))`."""
    factor = log_ratio.detach().exp().clamp(max=CAP)
    return -(factor * advantage * log_ratio).mean(), -(factor * advantage).mean()


def token_mis(log_ratio, advantage):
    """Masked importance sampling: `sg(r) where r <= C`."""
    factor = torch.tensor([math.exp(x) if math.exp(x) <= CAP else 0.0 for x in log_ratio.tolist()])
    return -(factor * advantage * log_ratio).mean(), -(factor * advantage).mean()


def sequence_tis(log_ratio, advantage):
    factor = min(math.exp(log_ratio.sum().item()), CAP)
    return -factor * advantage * log_ratio.mean(), -factor * advantage


def sequence_mis(log_ratio, advantage):
    ratio = math.exp(log_ratio.sum().item())
    factor = ratio if ratio <= CAP else 0.0
    return -factor * advantage * log_ratio.mean(), -factor * advantage


def masked_ppo(log_ratio, advantage):
    """PPO's clip, of the tokens whose ratio is not above the cap."""
    loss = -torch.where(log_ratio.exp() > CAP, 0.0, worse(log_ratio.exp(), advantage)).mean()
    return loss, loss


@pytest.mark.parametrize(
    ("formula", "changes"),
    [
        (dual_clip, {"clip": "dual"}),
        (cispo, {"clip": "cispo"}),
        # The paper has no cap; here nothing reaches it.
        (gspo, {"ratio_level": "call_mean", "ratio_cap": 50.0}),
        (token_tis, {"clip": "none"}),
        (token_mis, {"clip": "none", "above_cap": "mask"}),
        (sequence_tis, {"clip": "none", "ratio_level": "call"}),
        (sequence_mis, {"clip": "none", "ratio_level": "call", "above_cap": "mask"}),
        (masked_ppo, {"above_cap": "mask"}),
    ],
    ids=lambda of: getattr(of, "__name__", ""),
)
def test_a_variant_has_the_loss_and_the_gradient_of_its_papers_formula(formula, changes):
    loss, gradients, clipped = learned(**changes)
    expected, expected_gradients = slowly(formula)
    assert loss == pytest.approx(expected, abs=1e-6)
    for gradient, of_call in zip(gradients, expected_gradients, strict=True):
        assert gradient == pytest.approx(of_call, abs=1e-6)
    # The case is one in which the variant differs from the default.
    assert learned()[1] != gradients
    if changes.get("clip") in ("cispo", "none"):
        assert not any(clipped)


def test_a_row_without_a_sampled_token_has_a_loss_of_zero_at_every_level():
    empty = torch.empty(0, requires_grad=True)
    column = torch.empty(0)
    none = torch.empty(0, dtype=torch.int64)
    sampled = LearnedSupervision(none, column, column, column, none, 0)
    for level in ("token", "call", "call_mean"):
        config = PolicyGradientConfig(**CONFIG, ratio_level=level)
        assert policy_gradient_loss(empty, sampled, config).item() == 0.0
