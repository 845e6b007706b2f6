"""Each module of the pipeline against a slow reference in Python's floats, over logits that are all
there (decision 37).
"""

import math

import pytest
import torch
from slow_losses import SlowRow

from learner.collate import ComparedTokens, ModelInputs, PackedRow
from learner.objectives.base import BoxSupervision, CoordSupervision, Supervision, TextSupervision
from learner.objectives.coord_math import Normalizer
from learner.objectives.registry import build_objectives
from learner.step import LogitsPass
from shared.config.pipeline import Channel, PipelineSection

VOCABULARY = 1010
COORD_IDS = torch.arange(5, 1005)
NUM_POSITIONS = 20
TEXT_AT = [0, 1, 2, 7, 8, 13, 18, 19]
COORD_AT = [3, 4, 5, 6, 9, 10, 11, 12, 14, 15, 16, 17]
TARGETS = [3.0, 10.4, 400.0, 411.5, 0.0, 999.0, 500.25, 999.0, 1.0, 2.0, 3.0, 998.6]
BOXES = [[0, 1, 2, 3], [8, 9, 10, 11]]
"""The four slots between them are a polygon's."""
TERMS = ("coord_ce", "soft_ce", "w1", "coord_gate", "text_gate")
NEUTRAL = {f"{term}_weight": 0.0 for term in TERMS} | {
    "temperature": 1.0,
    "target_sigma": 2.0,
    "target_truncate": 16,
}
EVERY_TERM = {f"{term}_weight": 1.0 for term in TERMS}
TOKEN_CE = {
    "desc_ce_weight": 1.0,
    "rollout_fn_desc_weight": 1.0,
    "rollout_matched_prefix_struct_weight": 1.0,
}


def entry(name, config, weight=1.0):
    on = {"enabled": True, "channels": ["A", "B"]}
    return {"name": name, **on, "weight": weight, "config": config}


def objectives(*entries, diagnostics=()):
    pipeline = PipelineSection(objective=list(entries), diagnostics=list(diagnostics))
    return build_objectives(pipeline, Channel.B, COORD_IDS)


@pytest.fixture(scope="module")
def row():
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCABULARY, (NUM_POSITIONS,), generator=draw)
    # Two of the text tokens are closing brace and EOS, and one weighs nothing.
    gate_weight = torch.rand(len(TEXT_AT), generator=draw) * torch.tensor([1, 1, 0, 1, 0, 1, 1, 0])
    supervision = Supervision(
        TextSupervision(
            torch.tensor(TEXT_AT), torch.rand(len(TEXT_AT), generator=draw), gate_weight
        ),
        CoordSupervision(
            torch.tensor(COORD_AT), torch.tensor(TARGETS), torch.rand(len(COORD_AT), generator=draw)
        ),
        BoxSupervision(torch.tensor(BOXES), torch.tensor([0.3, 0.9])),
    )
    sampled_at = torch.tensor([0, 3, 4, 19])
    nothing = torch.empty(0)
    return PackedRow(
        (),
        ModelInputs(nothing, nothing, nothing, nothing),
        torch.arange(NUM_POSITIONS),
        tokens,
        supervision,
        ComparedTokens(sampled_at, nothing),
    )


@pytest.fixture(scope="module")
def logits():
    return torch.randn(NUM_POSITIONS, VOCABULARY, generator=torch.Generator().manual_seed(6)) * 3


def read(logits, row, of_channel, chunk=7, sampled_under=None):
    """The row's pass, with a head that changes nothing: hidden states are logits."""
    return LogitsPass(
        lambda hidden: hidden,
        of_channel.coord_ids_C,
        of_channel.needs,
        sampled_under or Normalizer(),
        chunk,
    )(logits, row)


def learn(logits, row, of_channel, chunk=7):
    """(loss, terms by name, gradient of the logits)."""
    leaf = logits.clone().requires_grad_(True)
    values = read(leaf, row, of_channel, chunk)
    losses = [objective(values, row.supervision) for objective in of_channel.objectives]
    loss = sum(part.loss for part in losses)
    loss.backward()
    names = [name for objective in of_channel.objectives for name in objective.term_names]
    terms = [term.item() for part in losses for term in part.terms]
    return loss.item(), dict(zip(names, terms, strict=True)), leaf.grad


def slow_row(logits, row):
    text, coord, boxes, _ = row.supervision
    columns = (part.tolist() for part in (text.at, text.weight, text.gate_weight))
    slots = (part.tolist() for part in (coord.at, coord.targets, coord.weight))
    return SlowRow(
        logits,
        row.token_ids_N.tolist(),
        COORD_IDS.tolist(),
        list(zip(*columns, strict=True)),
        list(zip(*slots, strict=True)),
        list(zip(boxes.slots.tolist(), boxes.weight.tolist(), strict=True)),
    )


# token_ce and coord_reg


def test_token_ce_is_the_weighted_cross_entropy_over_the_whole_vocabulary(logits, row):
    loss, terms, _ = learn(logits, row, objectives(entry("token_ce", TOKEN_CE, 2.5)))
    expected = slow_row(logits, row).token_ce()
    assert terms == {"token_ce": pytest.approx(expected, rel=1e-5)}
    assert loss == pytest.approx(2.5 * expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.1, 1.0])
def test_label_smoothing_gives_the_loss_and_gradient_of_torchs_cross_entropy(
    logits, row, smoothing, dtype
):
    config = TOKEN_CE | {"label_smoothing": smoothing}
    logits = logits.to(dtype)
    loss, terms, gradient = learn(logits, row, objectives(entry("token_ce", config, 2.5)))
    leaf = logits.float().clone().requires_grad_(True)
    tokens_X = row.token_ids_N[TEXT_AT]
    ce_X = torch.nn.functional.cross_entropy(
        leaf[TEXT_AT], tokens_X, reduction="none", label_smoothing=smoothing
    )
    expected = (row.supervision.text.weight * ce_X).sum()
    (2.5 * expected).backward()
    assert terms == {"token_ce": pytest.approx(expected.item(), rel=1e-6)}
    assert loss == pytest.approx(2.5 * expected.item(), rel=1e-6)
    assert gradient.dtype is dtype
    # The gradient is rounded once to bfloat16, which may differ by its last bit.
    rtol = 0.0 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(gradient, leaf.grad.to(dtype), rtol=rtol, atol=1e-6)
    assert not leaf.grad[COORD_AT].any()


def test_label_smoothing_of_0_changes_no_bit(logits, row):
    without = learn(logits, row, objectives(entry("token_ce", TOKEN_CE)))
    zero = learn(logits, row, objectives(entry("token_ce", TOKEN_CE | {"label_smoothing": 0.0})))
    assert zero[:2] == without[:2]
    assert torch.equal(zero[2], without[2])


SETTINGS = [
    {"coord_ce_weight": 1.0},
    {"soft_ce_weight": 0.5},
    {"w1_weight": 3.0},
    {"coord_gate_weight": 2.0},
    {"text_gate_weight": 1.5},
    {f"{term}_weight": 0.1 * n for n, term in enumerate(TERMS, 1)} | {"temperature": 0.7},
    {"coord_ce_weight": 1.0, "soft_ce_weight": 1.0, "w1_weight": 1.0}
    | {"temperature": 2.0, "target_sigma": 8.0, "target_truncate": None},
    {"soft_ce_weight": 1.0, "w1_weight": 1.0, "target_sigma": 1.0, "target_truncate": 0},
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", SETTINGS, ids=lambda changes: "-".join(changes))
def test_coord_reg_is_the_weighted_sum_of_its_terms_in_use(logits, row, changes):
    config = NEUTRAL | changes
    loss, terms, _ = learn(logits, row, objectives(entry("coord_reg", config, 0.8)))
    every = slow_row(logits, row).coord_reg(config)
    used = {name: value for name, value in every.items() if config[f"{name}_weight"]}
    expected = sum(config[f"{name}_weight"] * value for name, value in used.items())
    assert terms == {
        f"coord_reg.{name}": pytest.approx(value, rel=5e-4, abs=1e-5)
        for name, value in used.items()
    }
    assert loss == pytest.approx(0.8 * expected, rel=5e-4)


def test_text_gate_weight_introduces_a_non_zero_contribution_when_coord_vocab_mass_appears_at_supervised_text_positions(
    logits, row
):
    gate = objectives(entry("coord_reg", NEUTRAL | {"text_gate_weight": 1.0}))
    spread = logits.clone()
    spread[:, COORD_IDS] -= 40.0
    assert learn(spread, row, gate)[0] == pytest.approx(0.0, abs=1e-6)
    spread[0, 500] = spread[0].max() + 3.0
    loss, _, gradient = learn(spread, row, gate)
    assert loss > 0.1
    assert gradient[0, 500] > 0, "descending lowers the coord token's logit"


# bbox_geo


def test_bbox_geo_decodes_boxes_by_expectation(logits, row):
    of_channel = objectives(entry("bbox_geo", {"smoothl1_weight": 2.0, "ciou_weight": 0.5}, 3.0))
    loss, terms, gradient = learn(logits, row, of_channel)
    slow = slow_row(logits, row).bbox_geo()
    expected = pytest.approx(2.0 * slow["smoothl1"] + 0.5 * slow["ciou"], rel=1e-3)
    assert terms == {"bbox_geo": expected}, "one number: no IoU among the metrics"
    assert loss == pytest.approx(3.0 * terms["bbox_geo"], rel=1e-6)
    slots = [COORD_AT[slot] for box in BOXES for slot in box]
    assert gradient.any(dim=1).nonzero()[:, 0].tolist() == slots, "a polygon's slots are in no box"


def test_a_pipeline_of_token_ce_and_coord_reg_computes_no_decoded_coordinate_loss(logits, row):
    of_channel = objectives(entry("token_ce", TOKEN_CE), entry("coord_reg", NEUTRAL | EVERY_TERM))
    loss, terms, _ = learn(logits, row, of_channel)
    assert list(terms) == ["token_ce", *(f"coord_reg.{name}" for name in TERMS)]
    assert loss == pytest.approx(sum(terms.values()), rel=1e-5)


def point_masses(row, bins):
    """Logits whose coord slots are certain."""
    logits = torch.zeros(NUM_POSITIONS, VOCABULARY)
    for n, bin_ in zip(COORD_AT, bins, strict=True):
        logits[n, COORD_IDS[bin_]] = 60.0
    return logits


def with_aims(row, *aims):
    targets = torch.tensor(aims, dtype=torch.float32)
    return row.supervision._replace(coord=row.supervision.coord._replace(targets=targets))


def test_a_perfect_box_costs_nothing_in_either_corner_order(row):
    of_channel = objectives(entry("bbox_geo", {"smoothl1_weight": 1.0, "ciou_weight": 1.0}))
    exact = [0, 10, 20, 30, 0, 0, 0, 0, 100, 200, 300, 400]
    swapped = [20, 30, 0, 10, 0, 0, 0, 0, 300, 200, 100, 400]
    for bins in (exact, swapped):
        values = read(point_masses(row, bins), row, of_channel)
        loss = of_channel.objectives[0](values, with_aims(row, *exact)).loss
        assert loss.item() == pytest.approx(0.0, abs=1e-5)


# coord_diag


def test_coord_diag_measures_slots_with_the_functions_of_training(logits, row):
    of_channel = objectives(diagnostics=[entry("coord_diag", {})])
    (diagnostic,) = of_channel.diagnostics
    logits = logits.clone()
    logits[3, COORD_IDS[3]] = 40.0
    error, hit, mass = diagnostic(read(logits, row, of_channel), row.supervision)
    slow_error, slow_hit, slow_mass = zip(*slow_row(logits, row).coord_diag(), strict=True)
    assert error.tolist() == pytest.approx(slow_error, abs=1e-2)
    assert hit.tolist() == list(slow_hit)
    assert mass.tolist() == pytest.approx(slow_mass, rel=1e-5)
    assert hit[0] == 1.0
    assert diagnostic.names == (
        "coord_diag/expected_bin_error",
        "coord_diag/top5_accuracy",
        "coord_diag/coord_mass",
    )


# The pass that they share

ALL_TERMS = NEUTRAL | EVERY_TERM | {"temperature": 0.8}
FULL = (
    entry("token_ce", TOKEN_CE),
    entry("coord_reg", ALL_TERMS),
    entry("bbox_geo", {"smoothl1_weight": 1.0, "ciou_weight": 1.0}),
)


def test_loss_and_gradient_do_not_depend_on_the_chunk(logits, row):
    loss, terms, gradient = learn(logits, row, objectives(*FULL), chunk=1000)
    for chunk in (1, 3, 7, 20):
        other_loss, other_terms, other_gradient = learn(logits, row, objectives(*FULL), chunk)
        assert other_loss == pytest.approx(loss, rel=1e-6)
        assert other_terms == pytest.approx(terms, rel=1e-6)
        torch.testing.assert_close(other_gradient, gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("chunk", "num_products"), [(NUM_POSITIONS, 1), (-(-NUM_POSITIONS // 2), 3)]
)
def test_the_logits_of_all_chunks_but_the_last_are_computed_again(logits, row, chunk, num_products):
    """The last chunk is the first in the backward, so its logits need not be dropped."""
    of_channel = objectives(*FULL)
    sizes = []

    def head(hidden):
        sizes.append(len(hidden))
        return hidden.clone()

    hidden = logits.clone().requires_grad_(True)
    read = LogitsPass(head, of_channel.coord_ids_C, of_channel.needs, Normalizer(), chunk)
    values = read(hidden, row)
    sum(objective(values, row.supervision).loss for objective in of_channel.objectives).backward()
    assert len(sizes) == num_products
    assert sizes[-1] == chunk


@pytest.mark.slow
def test_the_gradient_is_that_of_the_loss(logits, row):
    """Along random directions, against differences of the slow reference in Python's floats."""
    _, _, gradient = learn(logits, row, objectives(*FULL[:2]))
    draw = torch.Generator().manual_seed(8)
    for _ in range(2):
        direction = torch.randn(NUM_POSITIONS, VOCABULARY, generator=draw, dtype=torch.float64)
        ends = []
        for step in (-1e-4, 1e-4):
            slow = slow_row(logits.double() + step * direction, row)
            ends.append(slow.token_ce() + sum(slow.coord_reg(ALL_TERMS).values()))
        along = (gradient.double() * direction).sum().item()
        assert along == pytest.approx((ends[1] - ends[0]) / 2e-4, rel=1e-3)


def test_what_no_module_asks_for_is_not_computed(logits, row):
    values = read(logits, row, objectives(entry("token_ce", TOKEN_CE)))
    assert values.text_ce_X is not None
    assert (values.text_gate_X, values.coord_gate_S, values.coord_mass_S) == (None, None, None)
    values = read(logits, row, objectives(entry("coord_reg", NEUTRAL | {"soft_ce_weight": 1.0})))
    assert (values.text_ce_X, values.text_gate_X) == (None, None)
    assert (values.coord_gate_S, values.coord_mass_S) == (None, None)
    assert values.coord_logits_SC.shape == (len(COORD_AT), 1000)


@pytest.mark.parametrize("config", FULL, ids=lambda config: config["name"])
def test_every_objective_is_finite_in_value_and_gradient_for_wild_logits(logits, row, config):
    wild = logits.clone()
    for n, value in zip(
        range(0, NUM_POSITIONS, 2), [math.nan, math.inf, -math.inf] * 4, strict=False
    ):
        wild[n, 3], wild[n, 300 + n] = value, value
    for n, value in {0: math.nan, 3: math.nan, 4: math.inf, 9: -math.inf, 19: -math.inf}.items():
        wild[n] = value
    loss, terms, gradient = learn(wild, row, objectives(config))
    assert all(math.isfinite(value) for value in (loss, *terms.values()))
    assert torch.isfinite(gradient).all()


def test_modules_of_another_channel_or_disabled_take_no_part():
    entries = [
        entry("token_ce", TOKEN_CE) | {"channels": ["A"]},
        entry("coord_reg", ALL_TERMS) | {"enabled": False},
        FULL[2],
    ]
    diagnostics = [entry("coord_diag", {}) | {"channels": ["A"]}]
    pipeline = PipelineSection(objective=entries, diagnostics=diagnostics)
    a, b = (build_objectives(pipeline, channel, COORD_IDS) for channel in Channel)
    assert [name for one in a.objectives for name in one.term_names] == ["token_ce", "bbox_geo"]
    assert [name for one in b.objectives for name in one.term_names] == ["bbox_geo"]
    assert (len(a.diagnostics), len(b.diagnostics)) == (1, 0)
