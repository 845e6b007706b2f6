"""Each module of the pipeline against a slow reference in Python's floats, over logits that are all
there (decision 37).
"""

import math
from dataclasses import dataclass

import pytest
import torch

from learner.collate import ModelInputs, PackedRow, SampledTokens
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
NEUTRAL = {
    "coord_ce_weight": 0.0,
    "soft_ce_weight": 0.0,
    "w1_weight": 0.0,
    "coord_gate_weight": 0.0,
    "text_gate_weight": 0.0,
    "temperature": 1.0,
    "target_sigma": 2.0,
    "target_truncate": 16,
}
TOKEN_CE = {
    "desc_ce_weight": 1.0,
    "rollout_fn_desc_weight": 1.0,
    "rollout_matched_prefix_struct_weight": 1.0,
}


def entry(name, config, weight=1.0):
    return {
        "name": name,
        "enabled": True,
        "weight": weight,
        "channels": ["A", "B"],
        "config": config,
    }


def objectives(*entries, diagnostics=()):
    pipeline = PipelineSection.model_validate(
        {"objective": list(entries), "diagnostics": list(diagnostics)}
    )
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
        SampledTokens(sampled_at, nothing),
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
    terms = dict(
        zip(
            [n for o in of_channel.objectives for n in o.term_names],
            [t.item() for part in losses for t in part.terms],
            strict=True,
        )
    )
    return loss.item(), terms, leaf.grad


# The slow reference


def log_sum_exp(values):
    largest = max(values)
    return largest + math.log(sum(math.exp(value - largest) for value in values))


def soft_target(center, sigma, truncate):
    nearest = math.floor(center + 0.5)
    weights = [
        (
            math.exp(-(((k - center) / sigma) ** 2) / 2)
            if truncate is None or abs(k - center) <= truncate or k == nearest
            else 0.0
        )
        for k in range(1000)
    ]
    return [weight / sum(weights) for weight in weights]


@dataclass
class Slow:
    """The terms of a row, one position after the other."""

    logits: torch.Tensor
    row: PackedRow

    def at(self, position, temperature=1.0):
        return [value / temperature for value in self.logits[position].tolist()]

    def coord(self, position, temperature=1.0):
        return self.at(position, temperature)[5:1005]

    def token_ce(self):
        text = self.row.supervision.text
        return sum(
            w * (log_sum_exp(self.at(n)) - self.at(n)[self.row.token_ids_N[n]])
            for n, w in zip(TEXT_AT, text.weight.tolist(), strict=True)
        )

    def coord_reg(self, config):
        temperature, terms = (
            config["temperature"],
            {"coord_ce": 0.0, "soft_ce": 0.0, "w1": 0.0, "coord_gate": 0.0, "text_gate": 0.0},
        )
        for n, target, weight in zip(
            COORD_AT, TARGETS, self.row.supervision.coord.weight.tolist(), strict=True
        ):
            plain = self.coord(n)
            terms["coord_ce"] += weight * (
                log_sum_exp(plain) - plain[min(999, math.floor(target + 0.5))]
            )
            q, z = (
                soft_target(target, config["target_sigma"], config["target_truncate"]),
                self.coord(n, temperature),
            )
            normalizer = log_sum_exp(z)
            p = [math.exp(z_k - normalizer) for z_k in z]
            terms["soft_ce"] -= weight * sum(
                q_k * (z_k - normalizer) for q_k, z_k in zip(q, z, strict=True)
            )
            cdf, distance = 0.0, 0.0
            for p_k, q_k in zip(p, q, strict=True):
                cdf += p_k - q_k
                distance += abs(cdf)
            terms["w1"] += weight * distance / 999
            terms["coord_gate"] += weight * (log_sum_exp(self.at(n, temperature)) - normalizer)
        for n, weight in zip(TEXT_AT, self.row.supervision.text.gate_weight.tolist(), strict=True):
            p_coord = math.exp(
                log_sum_exp(self.coord(n, temperature)) - log_sum_exp(self.at(n, temperature))
            )
            terms["text_gate"] -= weight * math.log(max(1 - p_coord, 1e-6))
        return terms

    def expected(self, position):
        z = self.coord(position)
        normalizer = log_sum_exp(z)
        return sum(math.exp(z_k - normalizer) * k / 999 for k, z_k in enumerate(z))

    def bbox_geo(self):
        terms = {"smoothl1": 0.0, "ciou": 0.0}
        for slots, weight in zip(BOXES, self.row.supervision.boxes.weight.tolist(), strict=True):
            decoded = [self.expected(COORD_AT[slot]) for slot in slots]
            aimed = [TARGETS[slot] / 999 for slot in slots]
            x1, x2 = sorted((decoded[0], decoded[2]))
            y1, y2 = sorted((decoded[1], decoded[3]))
            u1, u2 = sorted((aimed[0], aimed[2]))
            v1, v2 = sorted((aimed[1], aimed[3]))
            terms["smoothl1"] += (
                weight
                * sum(
                    0.5 * (a - b) ** 2
                    for a, b in zip((x1, y1, x2, y2), (u1, v1, u2, v2), strict=True)
                )
                / 4
            )
            overlap = max(0.0, min(x2, u2) - max(x1, u1)) * max(0.0, min(y2, v2) - max(y1, v1))
            iou = overlap / ((x2 - x1) * (y2 - y1) + (u2 - u1) * (v2 - v1) - overlap)
            between = ((x1 + x2 - u1 - u2) ** 2 + (y1 + y2 - v1 - v2) ** 2) / 4
            diagonal = (max(x2, u2) - min(x1, u1)) ** 2 + (max(y2, v2) - min(y1, v1)) ** 2
            v = (
                4
                / math.pi**2
                * (math.atan((u2 - u1) / (v2 - v1)) - math.atan((x2 - x1) / (y2 - y1))) ** 2
            )
            terms["ciou"] += weight * (1 - (iou - between / diagonal - v / (1 - iou + v) * v))
        return terms


# token_ce and coord_reg


def test_token_ce_is_the_weighted_cross_entropy_over_the_whole_vocabulary(logits, row):
    loss, terms, _ = learn(logits, row, objectives(entry("token_ce", TOKEN_CE, 2.5)))
    expected = Slow(logits, row).token_ce()
    assert terms == {"token_ce": pytest.approx(expected, rel=1e-5)}
    assert loss == pytest.approx(2.5 * expected, rel=1e-5)


SETTINGS = [
    {"coord_ce_weight": 1.0},
    {"soft_ce_weight": 0.5},
    {"w1_weight": 3.0},
    {"coord_gate_weight": 2.0},
    {"text_gate_weight": 1.5},
    {
        "coord_ce_weight": 0.1,
        "soft_ce_weight": 0.2,
        "w1_weight": 0.3,
        "coord_gate_weight": 0.4,
        "text_gate_weight": 0.5,
        "temperature": 0.7,
    },
    {
        "coord_ce_weight": 1.0,
        "soft_ce_weight": 1.0,
        "w1_weight": 1.0,
        "temperature": 2.0,
        "target_sigma": 8.0,
        "target_truncate": None,
    },
    {"soft_ce_weight": 1.0, "w1_weight": 1.0, "target_sigma": 1.0, "target_truncate": 0},
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", SETTINGS, ids=lambda changes: "-".join(changes))
def test_coord_reg_is_the_weighted_sum_of_its_terms_in_use(logits, row, changes):
    config = NEUTRAL | changes
    loss, terms, _ = learn(logits, row, objectives(entry("coord_reg", config, 0.8)))
    expected = {
        name: value
        for name, value in Slow(logits, row).coord_reg(config).items()
        if config[f"{name}_weight"]
    }
    assert terms == {
        f"coord_reg.{name}": pytest.approx(value, rel=5e-4, abs=1e-5)
        for name, value in expected.items()
    }
    assert loss == pytest.approx(
        0.8 * sum(config[f"{name}_weight"] * value for name, value in expected.items()), rel=5e-4
    )


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


def test_text_gate_leaves_tokens_of_no_gate_weight_alone(logits, row):
    """Closing brace, EOS and tokens of no weight have gate weight 0 (learner/collate.py), and coord
    slots are no text.
    """
    _, _, gradient = learn(
        logits, row, objectives(entry("coord_reg", NEUTRAL | {"text_gate_weight": 1.0}))
    )
    weighted = [
        n
        for n, weight in zip(TEXT_AT, row.supervision.text.gate_weight.tolist(), strict=True)
        if weight
    ]
    assert gradient.any(dim=1).nonzero()[:, 0].tolist() == weighted


# bbox_geo


def test_bbox_geo_decodes_boxes_by_expectation(logits, row):
    of_channel = objectives(entry("bbox_geo", {"smoothl1_weight": 2.0, "ciou_weight": 0.5}, 3.0))
    loss, terms, gradient = learn(logits, row, of_channel)
    expected = Slow(logits, row).bbox_geo()
    assert terms == {
        "bbox_geo": pytest.approx(2.0 * expected["smoothl1"] + 0.5 * expected["ciou"], rel=1e-3)
    }, "one number: no IoU among the metrics"
    assert loss == pytest.approx(3.0 * terms["bbox_geo"], rel=1e-6)
    slots = [COORD_AT[slot] for box in BOXES for slot in box]
    assert gradient.any(dim=1).nonzero()[:, 0].tolist() == slots, "a polygon's slots are in no box"


def test_a_pipeline_of_token_ce_and_coord_reg_computes_no_decoded_coordinate_loss(logits, row):
    everything = NEUTRAL | dict.fromkeys(
        ["coord_ce_weight", "soft_ce_weight", "w1_weight", "coord_gate_weight", "text_gate_weight"],
        1.0,
    )
    of_channel = objectives(entry("token_ce", TOKEN_CE), entry("coord_reg", everything))
    loss, terms, _ = learn(logits, row, of_channel)
    assert list(terms) == [
        "token_ce",
        *(f"coord_reg.{name}" for name in ("coord_ce", "soft_ce", "w1", "coord_gate", "text_gate")),
    ]
    assert loss == pytest.approx(sum(terms.values()), rel=1e-5)


def point_masses(row, bins):
    """Logits whose coord slots are certain."""
    logits = torch.zeros(NUM_POSITIONS, VOCABULARY)
    for n, bin_ in zip(COORD_AT, bins, strict=True):
        logits[n, COORD_IDS[bin_]] = 60.0
    return logits


def test_a_perfect_box_costs_nothing_in_either_corner_order(row):
    of_channel = objectives(entry("bbox_geo", {"smoothl1_weight": 1.0, "ciou_weight": 1.0}))
    exact = [0, 10, 20, 30, 0, 0, 0, 0, 100, 200, 300, 400]
    swapped = [20, 30, 0, 10, 0, 0, 0, 0, 300, 200, 100, 400]
    aimed = row.supervision.coord._replace(targets=torch.tensor(exact, dtype=torch.float32))
    for bins in (exact, swapped):
        values = read(point_masses(row, bins), row, of_channel)
        assert of_channel.objectives[0](
            values, row.supervision._replace(coord=aimed)
        ).loss.item() == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("aim", ["a point", "a line", "the same point"])
def test_degenerate_boxes_are_finite_in_value_and_gradient(row, aim):
    bins = [5, 5, 5, 5, 0, 0, 0, 0, 10, 999, 10, 0]
    targets = {"a point": [7, 7, 7, 7], "a line": [0, 7, 999, 7], "the same point": [5, 5, 5, 5]}[
        aim
    ]
    supervision = row.supervision._replace(
        coord=row.supervision.coord._replace(
            targets=torch.tensor([*targets, 0, 0, 0, 0, *targets], dtype=torch.float32)
        )
    )
    of_channel = objectives(entry("bbox_geo", {"smoothl1_weight": 1.0, "ciou_weight": 1.0}))
    leaf = point_masses(row, bins).requires_grad_(True)
    loss = of_channel.objectives[0](read(leaf, row, of_channel), supervision).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(leaf.grad).all()


# coord_diag


def test_coord_diag_measures_slots_with_the_functions_of_training(logits, row):
    of_channel = objectives(diagnostics=[entry("coord_diag", {})])
    (diagnostic,) = of_channel.diagnostics
    logits = logits.clone()
    logits[3, COORD_IDS[3]] = 40.0
    error, hit, mass = diagnostic(read(logits, row, of_channel), row.supervision)
    slow = Slow(logits, row)
    for n, target, error_s, hit_s, mass_s in zip(
        COORD_AT, TARGETS, error.tolist(), hit.tolist(), mass.tolist(), strict=True
    ):
        assert error_s == pytest.approx(abs(999 * slow.expected(n) - target), abs=1e-2)
        coord = slow.coord(n)
        rank = sorted(range(1000), key=lambda k, coord=coord: -coord[k]).index(
            min(999, math.floor(target + 0.5))
        )
        assert hit_s == float(rank < 5)
        assert mass_s == pytest.approx(
            math.exp(log_sum_exp(coord) - log_sum_exp(slow.at(n))), rel=1e-5
        )
    assert hit[0] == 1.0
    assert diagnostic.names == (
        "coord_diag/expected_bin_error",
        "coord_diag/top5_accuracy",
        "coord_diag/coord_mass",
    )


# The pass that they share

ALL_TERMS = (
    NEUTRAL
    | dict.fromkeys(
        ["coord_ce_weight", "soft_ce_weight", "w1_weight", "coord_gate_weight", "text_gate_weight"],
        1.0,
    )
    | {"temperature": 0.8}
)
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


@pytest.mark.slow
def test_the_gradient_is_that_of_the_loss(logits, row):
    """Along random directions, against differences of the slow reference in Python's floats."""
    of_channel = objectives(*FULL[:2])
    _, _, gradient = learn(logits, row, of_channel)
    draw = torch.Generator().manual_seed(8)
    for _ in range(2):
        direction = torch.randn(NUM_POSITIONS, VOCABULARY, generator=draw, dtype=torch.float64)
        ends = []
        for step in (-1e-4, 1e-4):
            slow = Slow(logits.double() + step * direction, row)
            ends.append(slow.token_ce() + sum(slow.coord_reg(ALL_TERMS).values()))
        assert (gradient.double() * direction).sum().item() == pytest.approx(
            (ends[1] - ends[0]) / 2e-4, rel=1e-3
        )


def test_sampled_logprobs_are_those_of_the_engines_sampling(logits, row):
    values = read(
        logits,
        row,
        objectives(entry("token_ce", TOKEN_CE)),
        sampled_under=Normalizer(0.6, (0, 1007)),
    )
    for n, value in zip(row.sampled.at.tolist(), values.sampled_logprobs_K.tolist(), strict=True):
        z = Slow(logits, row).at(n, 0.6)
        allowed = [z_k for k, z_k in enumerate(z) if k not in (0, 1007)]
        assert value == pytest.approx(z[row.token_ids_N[n]] - log_sum_exp(allowed), abs=1e-4)


def test_what_no_module_asks_for_is_not_computed(logits, row):
    values = read(logits, row, objectives(entry("token_ce", TOKEN_CE)))
    assert values.text_ce_X is not None
    assert (values.text_gate_X, values.coord_gate_S, values.coord_mass_S) == (None, None, None)
    values = read(logits, row, objectives(entry("coord_reg", NEUTRAL | {"soft_ce_weight": 1.0})))
    assert values.text_ce_X is None
    assert values.text_gate_X is None
    assert values.coord_gate_S is None
    assert values.coord_mass_S is None
    assert values.coord_logits_SC.shape == (len(COORD_AT), 1000)


@pytest.mark.parametrize("config", FULL, ids=lambda config: config["name"])
def test_every_objective_is_finite_in_value_and_gradient_for_wild_logits(logits, row, config):
    wild = logits.clone()
    for n, value in zip(
        range(0, NUM_POSITIONS, 2), [math.nan, math.inf, -math.inf] * 4, strict=False
    ):
        wild[n, 3], wild[n, 300 + n] = value, value
    wild[0], wild[3], wild[4], wild[9], wild[19] = (
        math.nan,
        math.nan,
        math.inf,
        -math.inf,
        -math.inf,
    )
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
    pipeline = PipelineSection.model_validate({"objective": entries, "diagnostics": diagnostics})
    names = {
        channel: [
            name
            for objective in build_objectives(pipeline, channel, COORD_IDS).objectives
            for name in objective.term_names
        ]
        for channel in Channel
    }
    assert names == {Channel.A: ["token_ce", "bbox_geo"], Channel.B: ["bbox_geo"]}
    assert [
        len(build_objectives(pipeline, channel, COORD_IDS).diagnostics) for channel in Channel
    ] == [1, 0]
