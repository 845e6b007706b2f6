"""Every function against the slow obvious sum, in Python's own floats (decision 37)."""

import math

import pytest
import torch
from slow_losses import ciou_parts
from torch.utils._python_dispatch import TorchDispatchMode

from learner.objectives import coord_math
from learner.objectives.coord_math import Normalizer

NUM_BINS = 1000
VOCABULARY = 1010
COORD_IDS = torch.arange(5, 1005)


@pytest.fixture(scope="module")
def logits():
    return torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3


def token_logprobs(logits, tokens, normalizer=Normalizer()):  # noqa: B008 - it is frozen
    no_coord = torch.arange(0)
    reading = coord_math.read_logits(logits, tokens, no_coord, COORD_IDS, (normalizer,))
    return coord_math.token_logprobs(
        reading.token_logits_N, reading.log_normalizers_N[0], normalizer.temperature
    )


# Targets


@pytest.mark.parametrize(("sigma", "truncate"), [(2.0, 0), (1e-12, None), (1e-12, 0), (1e30, 0)])
def test_where_truncation_or_a_small_sigma_leaves_nothing_the_nearest_bin_stays(sigma, truncate):
    aims = torch.tensor([0.4, 10.6, 998.8])
    targets = coord_math.soft_targets(aims, sigma=sigma, truncate=truncate)
    nearest = torch.nn.functional.one_hot(torch.tensor([0, 11, 999]), NUM_BINS).float()
    torch.testing.assert_close(targets, nearest)


def test_the_nearest_bin_of_a_half_is_the_upper_one():
    aims = torch.tensor([-0.2, 0.49, 0.5, 1.5, 998.5, 999.4])
    assert coord_math.nearest_bins(aims).tolist() == [0, 0, 1, 2, 999, 999]


# Coord slots


def test_top5_hits_count_the_five_most_probable_bins_of_equal_ones_the_lower(logits):
    ranks = [0, 1, 2, 3, 4, 5, 6, 500, 999, 0, 4, 5]
    coord = logits[:, COORD_IDS].repeat(3, 1)
    order = [sorted(range(NUM_BINS), key=lambda k, row=row: (-float(row[k]), k)) for row in coord]
    aims = torch.tensor([float(order[slot][rank]) for slot, rank in enumerate(ranks)])
    assert coord_math.top5_hits(coord, aims).tolist() == [rank < 5 for rank in ranks]
    ties = coord_math.top5_hits(torch.zeros(3, NUM_BINS), torch.tensor([4.4, 4.5, 0.0]))
    assert ties.tolist() == [True, False, True]


# The whole vocabulary


def leak_of(logits, temperature=1.0):
    tokens = torch.zeros(len(logits), dtype=torch.long)
    every = torch.arange(len(logits))
    normalizers = (Normalizer(temperature),)
    reading = coord_math.read_logits(logits, tokens, every, COORD_IDS, normalizers)
    return coord_math.mass_leak(
        reading.log_normalizers_N[0], reading.coord_logits_PC, temperature=temperature
    )


def test_the_text_gate_is_exact_for_small_and_large_coord_mass_and_bounded():
    """One coord logit against one text logit: the coord vocabulary's probability is a sigmoid of
    their difference.
    """
    differences = [-30.0, -18.0, -9.0, -0.7, 0.0, 0.7, 4.0, 12.0, 40.0]
    logits = torch.full((len(differences), VOCABULARY), -1e4)
    logits[:, 0] = 0.0
    logits[:, 500] = torch.tensor(differences)
    gate = coord_math.gate_of_leak(leak_of(logits))
    expected = [
        min(math.log1p(math.exp(difference)), -math.log(1e-6)) for difference in differences
    ]
    assert gate.tolist() == pytest.approx(expected, rel=1e-2, abs=1e-14)
    assert gate[0] > 0, "the smallest coord mass contributes"


@pytest.mark.parametrize("temperature", [1.0, 0.3, 1e-9])
def test_gate_loss_numeric_fences_are_consistent_across_training_and_rollout_paths(
    logits, temperature
):
    """Identical full-vocabulary logits, coord logits and temperature: a pass that reads other
    temperatures too, and one of each position by itself, agree to the bit.
    """
    wild = logits.clone()
    wild[0, 7], wild[1, 3], wild[2, 900], wild[3, :] = math.nan, math.inf, -math.inf, 3e38
    normalizers = (Normalizer(), Normalizer(temperature))
    tokens = torch.zeros(4, dtype=torch.long)
    reading = coord_math.read_logits(wild, tokens, torch.arange(4), COORD_IDS, normalizers)
    leak = coord_math.mass_leak(
        reading.log_normalizers_N[1], reading.coord_logits_PC, temperature=temperature
    )
    alone = torch.cat([leak_of(row[None], temperature) for row in wild])
    assert torch.equal(leak, alone)
    assert torch.equal(coord_math.gate_of_leak(leak), coord_math.gate_of_leak(alone))
    torch.testing.assert_close(coord_math.coord_mass(leak), torch.exp(-leak))


@pytest.mark.parametrize(
    "normalizer", [Normalizer(), Normalizer(0.5, (0, 1006)), Normalizer(1.0, (1006,))]
)
def test_token_logprobs_divide_by_the_temperature_and_leave_excluded_ids_out(logits, normalizer):
    tokens = torch.tensor([9, 10, 11, 12])
    for row, token, value in zip(
        logits, tokens, token_logprobs(logits, tokens, normalizer), strict=True
    ):
        kept = {
            i: math.exp(float(v) / normalizer.temperature)
            for i, v in enumerate(row)
            if i not in normalizer.excluded_ids
        }
        expected = math.log(kept[int(token)] / sum(kept.values()))
        assert value.item() == pytest.approx(expected, abs=1e-4)


def test_the_gradient_of_a_reading_is_that_of_autograd(logits):
    tokens, coord_at = torch.tensor([9, 1009, 0, 600]), torch.tensor([1, 3])
    normalizers = (Normalizer(), Normalizer(0.6), Normalizer(1.4, (0, 3)))
    draw = torch.Generator().manual_seed(2)
    weights = [
        torch.randn(*shape, generator=draw, dtype=torch.float64)
        for shape in ((4,), (2, NUM_BINS), (4,), (4,), (4,))
    ]
    ours, slow = logits.clone().requires_grad_(True), logits.double().requires_grad_(True)
    reading = coord_math.read_logits(ours, tokens, coord_at, COORD_IDS, normalizers)
    parts = (reading.token_logits_N, reading.coord_logits_PC, *reading.log_normalizers_N)
    allowed = slow.index_fill(1, torch.tensor([0, 3]), -math.inf)
    plain = (
        slow.gather(1, tokens[:, None])[:, 0],
        slow[coord_at][:, COORD_IDS],
        torch.logsumexp(slow, -1),
        torch.logsumexp(slow / 0.6, -1),
        torch.logsumexp(allowed / 1.4, -1),
    )
    for part, expected in zip(parts, plain, strict=True):
        torch.testing.assert_close(part.double(), expected, atol=1e-5, rtol=1e-5)
    for values, dtype in ((parts, torch.float32), (plain, torch.float64)):
        pairs = zip(weights, values, strict=True)
        sum((weight.to(dtype) * value).sum() for weight, value in pairs).backward()
    torch.testing.assert_close(ours.grad.double(), slow.grad, atol=1e-5, rtol=1e-5)


class Exponentials(TorchDispatchMode):
    """Counts the exponentials of whole vocabularies."""

    def __init__(self):
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func is torch.ops.aten.exp_.default and args[0].shape[-1] == VOCABULARY
        return func(*args, **(kwargs or {}))


def test_softmaxes_of_one_temperature_share_a_pass_over_the_vocabulary(logits):
    likely = logits.clone()
    likely[0, 3], likely[1, 3] = 9e3, 40.0  # excluded tokens that are nearly certain
    tokens = torch.zeros(4, dtype=torch.long)
    normalizers = (Normalizer(), Normalizer(0.5), Normalizer(1.0, (0, 3)), Normalizer(0.5, (7,)))
    with Exponentials() as passes:
        reading = coord_math.read_logits(likely, tokens, torch.arange(0), COORD_IDS, normalizers)
    assert passes.num == 2
    for normalizer, found_N in zip(normalizers, reading.log_normalizers_N, strict=True):
        exact_NV = likely.double() / normalizer.temperature
        exact_NV[:, list(normalizer.excluded_ids)] = -math.inf
        torch.testing.assert_close(found_N.double(), exact_NV.logsumexp(-1), atol=1e-5, rtol=1e-6)


def test_a_second_reading_of_the_same_logits_repeats_no_pass_and_has_the_same_bits(logits):
    tokens, at = torch.tensor([9, 1009, 0, 600]), torch.tensor([1, 3])
    picked = coord_math.PickedTokens(at, torch.tensor([[8, 9], [600, 2]]), Normalizer(0.7))
    first = []

    def read():
        ours = logits.clone().requires_grad_(True)
        reading = coord_math.read_logits(
            ours, tokens, at, COORD_IDS, (Normalizer(),), picked, mean=True, first=first
        )
        values = [
            *(reading.token_logits_N, reading.coord_logits_PC, *reading.log_normalizers_N),
            *(reading.picked_logits_MJ, reading.mean_logits_N),
        ]
        return ours, values

    with Exponentials() as passes:
        ours, values = read()
        assert passes.num == 2, "of the normalizer, and of the tokens that are not picked"
        ours_again, values_again = read()
        assert passes.num == 2
    for value, value_again in zip(values, values_again, strict=True):
        assert torch.equal(value, value_again)
    for of_reading in (values, values_again):
        sum(value.square().sum() for value in of_reading).backward()
    assert torch.equal(ours.grad, ours_again.grad)
    assert not any(one.requires_grad for one in (*first[0].log_normalizers_N, first[0].mean_N))


def test_a_bfloat16_gradient_is_rounded_once():
    """A confident token's gradient p - 1 keeps its leading bits: bfloat16 could not tell p from
    1."""
    logits = torch.zeros(1, VOCABULARY, dtype=torch.bfloat16)
    logits[0, 9] = 16.0
    ours, exact = logits.clone().requires_grad_(True), logits.float().requires_grad_(True)
    (-token_logprobs(ours, torch.tensor([9]))).sum().backward()
    torch.nn.functional.cross_entropy(exact, torch.tensor([9])).backward()
    assert ours.grad.dtype is torch.bfloat16
    torch.testing.assert_close(ours.grad.float(), exact.grad, rtol=1e-2, atol=0)


# Boxes


def some_boxes(count, seed):
    corners = torch.rand(count, 4, generator=torch.Generator().manual_seed(seed))
    return coord_math.canonical_boxes(corners)


def test_ciou_is_that_of_the_paper():
    boxes, targets = some_boxes(200, 1), some_boxes(200, 2)
    targets[:20] = boxes[:20]
    values = coord_math.ciou(boxes, targets)
    for box, target, value in zip(boxes.tolist(), targets.tolist(), values.tolist(), strict=True):
        iou, distance, v, alpha = ciou_parts(box, target)
        assert value == pytest.approx(iou - distance - alpha * v, abs=1e-4)
    torch.testing.assert_close(values[:20], torch.ones(20))


def test_alpha_of_ciou_is_a_constant_to_the_gradient():
    """Against differences of the slow version with alpha held."""
    boxes, targets = some_boxes(10, 3), some_boxes(10, 4)
    boxes.requires_grad_(True)
    coord_math.ciou(boxes, targets).sum().backward()
    for box, target, gradient in zip(
        boxes.tolist(), targets.tolist(), boxes.grad.tolist(), strict=True
    ):
        alpha = ciou_parts(box, target)[3]
        for axis in range(4):
            ends = []
            for step in (-1e-6, 1e-6):
                moved = [value + step * (i == axis) for i, value in enumerate(box)]
                iou, distance, v, _ = ciou_parts(moved, target)
                ends.append(iou - distance - alpha * v)
            assert gradient[axis] == pytest.approx((ends[1] - ends[0]) / 2e-6, rel=2e-3, abs=1e-3)


DEGENERATE = [
    (0.5, 0.5, 0.5, 0.5),  # a point
    (0.2, 0.5, 0.8, 0.5),  # a line
    (0.0, 0.0, 0.0, 1.0),
    (0.1, 0.1, 0.10005, 0.9),  # thinner than a tenth of a bin
    (0.0, 0.0, 1.0, 1.0),
    (0.3, 0.3, 0.6, 0.7),
]


def test_degenerate_boxes_have_finite_ciou_and_gradient_and_identical_ones_are_perfect():
    pairs = [(a, b) for a in DEGENERATE for b in DEGENERATE]
    boxes = torch.tensor([a for a, _ in pairs], requires_grad=True)
    targets = torch.tensor([b for _, b in pairs])
    values = coord_math.ciou(boxes, targets)
    (values.sum() + coord_math.smooth_l1(boxes, targets).sum()).backward()
    assert torch.isfinite(values).all()
    assert torch.isfinite(boxes.grad).all()
    assert boxes.grad.abs().max() < 1e5
    same = torch.tensor([a == b for a, b in pairs])
    torch.testing.assert_close(values[same], torch.ones(len(DEGENERATE)))
    assert (values[~same] < 0.999).all()


# Fences


def of_coord(function):
    return lambda logits: function(logits[:, COORD_IDS])


def decoded_box(coord):
    return coord_math.canonical_boxes(coord_math.expected_coordinate(coord)[None, :4])


BINS = torch.tensor([1.0, 2.3, 3.0, 700.5, 999.0])
THIN = torch.tensor([[0.1, 0.2, 0.1, 0.9]])
SOFT = coord_math.soft_targets(BINS, sigma=2.0, truncate=16)
FUNCTIONS = {
    "coord_cross_entropy": of_coord(
        lambda coord: coord_math.coord_cross_entropy(coord, coord_math.nearest_bins(BINS))
    ),
    "soft_cross_entropy": of_coord(
        lambda coord: coord_math.soft_cross_entropy(coord, SOFT, temperature=0.5)
    ),
    "wasserstein1": of_coord(lambda coord: coord_math.wasserstein1(coord, SOFT)),
    "mass_leak": leak_of,
    "gate_of_leak": lambda logits: coord_math.gate_of_leak(leak_of(logits, 2.0)),
    "expected_coordinate": of_coord(coord_math.expected_coordinate),
    "expected_bin_error": of_coord(lambda coord: coord_math.expected_bin_error(coord, BINS)),
    "coord_mass": lambda logits: coord_math.coord_mass(leak_of(logits)),
    "token_logprobs": lambda logits: token_logprobs(
        logits, torch.arange(5, 10), Normalizer(0.7, (0, 1007))
    ),
    "ciou": of_coord(lambda coord: coord_math.ciou(decoded_box(coord), THIN)),
    "smooth_l1": of_coord(lambda coord: coord_math.smooth_l1(decoded_box(coord), THIN)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nan_and_infinite_logits_stay_finite_in_value_and_gradient(name):
    logits = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(3))
    logits[0, 7], logits[1, 7], logits[2, 7], logits[3, :] = math.nan, math.inf, -math.inf, math.inf
    logits[4, 0:1005:2], logits[4, 1:1005:2] = math.nan, -math.inf
    logits.requires_grad_(True)
    values = FUNCTIONS[name](logits)
    assert torch.isfinite(values).all()
    values.sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert not logits.grad[~torch.isfinite(logits)].any(), "what a fence replaced has no gradient"
