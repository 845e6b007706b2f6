"""Every loss against the slow obvious sum over bins (DESIGN 8)."""

import math

import pytest
import torch

from learner.objectives import coord_math

NUM_BINS = 1000
VOCABULARY = 1010
COORD_IDS = torch.arange(5, 1005)


@pytest.fixture(scope="module")
def logits():
    return torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3


def softmax(values, temperature=1.0):
    exponentials = [math.exp(float(value) / temperature) for value in values]
    return [value / sum(exponentials) for value in exponentials]


def gaussian(center, sigma, truncate):
    weights = [math.exp(-(((k - center) / sigma) ** 2) / 2) if truncate is None or abs(k - center) <= truncate else 0.0 for k in range(NUM_BINS)]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize(("sigma", "truncate"), [(2.0, 16), (8.0, None), (1.0, 0)])
def test_soft_targets_are_a_truncated_renormalised_gaussian(sigma, truncate):
    targets = coord_math.soft_targets(torch.tensor([0, 500, 999]), sigma=sigma, truncate=truncate)
    for row, center in zip(targets, (0, 500, 999), strict=True):
        torch.testing.assert_close(row, torch.tensor(gaussian(center, sigma, truncate)), atol=1e-6, rtol=0)


def test_soft_cross_entropy_is_the_sum_over_bins(logits):
    coord = logits[:, COORD_IDS]
    targets = coord_math.soft_targets(torch.tensor([3, 400, 700, 998]), sigma=4.0, truncate=16)
    for temperature in (1.0, 0.7):
        losses = coord_math.soft_cross_entropy(coord, targets, temperature=temperature)
        for row, target, loss in zip(coord, targets, losses, strict=True):
            p = softmax(row, temperature)
            assert loss.item() == pytest.approx(-sum(float(q) * math.log(p_k) for q, p_k in zip(target, p, strict=True)), rel=1e-4)


def test_w1_is_the_l1_distance_of_the_cumulative_distributions_over_999(logits):
    coord = logits[:, COORD_IDS]
    targets = coord_math.soft_targets(torch.tensor([3, 400, 700, 998]), sigma=4.0, truncate=None)
    losses = coord_math.wasserstein1(coord, targets, temperature=0.9)
    for row, target, loss in zip(coord, targets, losses, strict=True):
        p, cdf_p, cdf_q, total = softmax(row, 0.9), 0.0, 0.0, 0.0
        for p_k, q_k in zip(p, target, strict=True):
            cdf_p, cdf_q = cdf_p + p_k, cdf_q + float(q_k)
            total += abs(cdf_p - cdf_q)
        assert loss.item() == pytest.approx(total / 999, rel=1e-4)


def test_a_point_mass_k_bins_off_costs_k_over_999():
    coord = torch.full((1, NUM_BINS), -1e4)
    coord[0, 250] = 1e4
    target = coord_math.soft_targets(torch.tensor([200]), sigma=1.0, truncate=0)
    assert coord_math.wasserstein1(coord, target).item() == pytest.approx(50 / 999, rel=1e-5)


def test_the_gates_measure_the_probability_on_the_wrong_vocabulary(logits):
    leak, gate = coord_math.gate_mass_leak(logits, COORD_IDS, temperature=1.3), coord_math.text_gate(logits, COORD_IDS, temperature=1.3)
    for row, leak_value, gate_value in zip(logits, leak, gate, strict=True):
        p = softmax(row, 1.3)
        p_coord = sum(p[int(token)] for token in COORD_IDS)
        assert leak_value.item() == pytest.approx(-math.log(p_coord), abs=2e-6)
        assert gate_value.item() == pytest.approx(-math.log(max(1 - p_coord, 1e-6)), abs=2e-3)


def test_coord_ce_and_token_ce_are_plain_cross_entropy(logits):
    bins = torch.tensor([0, 10, 500, 999])
    p = [softmax(row) for row in logits[:, COORD_IDS]]
    torch.testing.assert_close(
        coord_math.coord_cross_entropy(logits[:, COORD_IDS], bins), torch.tensor([-math.log(row[int(b)]) for row, b in zip(p, bins, strict=True)])
    )
    p = [softmax(row) for row in logits]
    torch.testing.assert_close(coord_math.token_cross_entropy(logits, bins), torch.tensor([-math.log(row[int(b)]) for row, b in zip(p, bins, strict=True)]))


def test_nan_and_infinite_logits_stay_finite_in_value_and_gradient():
    logits = torch.randn(4, VOCABULARY)
    logits[0, 7], logits[1, 7], logits[2, 7], logits[3, :] = math.nan, math.inf, -math.inf, math.inf
    logits.requires_grad_(True)
    bins = torch.tensor([1, 2, 3, 4])
    targets = coord_math.soft_targets(bins, sigma=2.0, truncate=16)
    coord = logits[:, COORD_IDS]
    losses = [
        coord_math.coord_cross_entropy(coord, bins),
        coord_math.soft_cross_entropy(coord, targets),
        coord_math.wasserstein1(coord, targets),
        coord_math.gate_mass_leak(logits, COORD_IDS),
        coord_math.text_gate(logits, COORD_IDS),
        coord_math.token_cross_entropy(logits, bins),
    ]
    assert all(torch.isfinite(loss).all() for loss in losses)
    sum(loss.sum() for loss in losses).backward()
    assert torch.isfinite(logits.grad).all()


def test_sampled_logprobs_take_banned_ids_out_and_divide_by_the_temperature(logits):
    banned = torch.tensor([0, 1006])
    values = coord_math.sampled_logprobs(logits, torch.tensor([9, 10, 11, 12]), temperature=0.5, banned_ids=banned)
    for row, token, value in zip(logits, (9, 10, 11, 12), values, strict=True):
        kept = {i: math.exp(float(v) / 0.5) for i, v in enumerate(row) if i not in (0, 1006)}
        assert value.item() == pytest.approx(math.log(kept[token] / sum(kept.values())), abs=1e-4)
    greedy = coord_math.sampled_logprobs(logits, torch.tensor([9, 10, 11, 12]), temperature=0.0, banned_ids=banned)
    torch.testing.assert_close(greedy, coord_math.sampled_logprobs(logits, torch.tensor([9, 10, 11, 12]), temperature=1.0, banned_ids=banned))
