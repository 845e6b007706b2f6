"""`reference_kl` through whole rows, against its formulas token by token in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig

from learner.algorithms.advantages import TokenAdvantages
from learner.collate import collate
from learner.model.checkpoint import CheckpointWeights
from learner.model.ranks import Ranks
from learner.model.sharding import Parallel, Reference
from learner.objectives.coord_math import Normalizer
from learner.objectives.registry import build_objectives
from learner.segments import EncodedPrompt, Segment
from learner.step import train_row
from learner.targets import AdvantageTarget, TextWeights
from shared.config.pipeline import EXAMPLE_POLICY_GRADIENT, Channel, PipelineSection

VOCABULARY = 13
TEMPERATURE, BANNED = 0.7, (2, 5)
NO_COORDS = torch.empty(0, dtype=torch.int64)
NO_TEXT = TextWeights(desc=0.0, matched_structure=0.0, structure=0.0)
POLICY = EXAMPLE_POLICY_GRADIENT | {
    "config": EXAMPLE_POLICY_GRADIENT["config"] | {"advantage_std": False}
}
BETA = 0.3


class TableModel(nn.Module):
    """What it says of the next token depends on the last one alone."""

    def __init__(self, moved: float = 0.0) -> None:
        """`moved`: by about how much its logits differ from those of another one."""
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        table, change = torch.randn(2, VOCABULARY, VOCABULARY, generator=draw)
        self.table = nn.Parameter(table + moved * change)
        self.dtype = torch.float32
        self.config = PreTrainedConfig()
        self.num_forwards = 0

    @property
    def base_model(self):
        return self.model

    def model(self, input_ids, **_):
        self.num_forwards += 1
        return SimpleNamespace(last_hidden_state=self.table[input_ids])

    def lm_head(self, hidden_ND):
        return hidden_ND


def segments(sizes=((3, 4), (2, 1), (4, 6), (1, 2)), seed=1):
    """Of a prompt and a sampled answer each, with weights and advantages that are all different.

    In each answer of more than 3 tokens the third is not the model's own.
    """
    draw = np.random.default_rng(seed)
    allowed = [token for token in range(VOCABULARY) if token not in BANNED]
    made = []
    for num_prompt, num_target in sizes:
        ids = tuple(draw.choice(allowed, num_prompt + num_target).tolist())
        positions = tuple(at for at in range(num_target) if at != 2)
        count = len(positions)
        credit = TokenAdvantages(
            positions,
            tuple(draw.uniform(-3.0, -1.0, count).tolist()),
            tuple(draw.uniform(-1.0, 1.0, count).tolist()),
            tuple(draw.uniform(0.05, 0.5, count).tolist()),
            (0,) * count,
        )
        target = AdvantageTarget("x", ids[num_prompt:], credit, credit.engine_logprobs)
        made.append(Segment(0, EncodedPrompt.from_text(ids[:num_prompt]), target))
    return made


def learned(model, reference, rows, entries, chunk=3):
    """The sum of the rows' losses and terms, and the gradient of the table."""
    objectives = build_objectives(
        PipelineSection(objective=entries, diagnostics=[]), Channel.B, NO_COORDS
    )
    model.table.grad = None
    loss, terms = 0.0, {}
    for of_row in rows:
        row = collate(of_row, text_weights=NO_TEXT, rope_index=None)
        sampled_under = Normalizer(TEMPERATURE, BANNED)
        result = train_row(
            model, row, objectives, sampled_under, logit_chunk=chunk, reference=reference
        )
        loss += result.loss
        for name, value in result.terms.items():
            terms[name] = terms.get(name, 0.0) + value
    return loss, terms, model.table.grad


def copy_as_reference(learner, copy):
    copy.requires_grad_(False)
    return Reference(learner, copy, Parallel(copy, CheckpointWeights(copy), Ranks()))


def slowly(learner_table, start_table, all_segments, divergence):
    """The weighted sum of a divergence, which gets both distributions and the token, in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for segment in all_segments:
        ids = (*segment.prompt.token_ids, *segment.target.token_ids)
        credit = segment.target.credit
        for position, weight in zip(credit.positions, credit.weights, strict=True):
            at = len(segment.prompt.token_ids) + position
            p_V, r_V = (
                (table[ids[at - 1]] / TEMPERATURE)
                .index_fill(0, torch.tensor(BANNED), -math.inf)
                .softmax(-1)
                for table in (learner_table, start_table)
            )
            total = total + weight * divergence(p_V, r_V, ids[at])
    return total


def estimated(p_V, r_V, token):
    """Shao et al. 2024, equation 4."""
    ratio = r_V[token] / p_V[token]
    return ratio - ratio.log() - 1


def over_top(count):
    """KL(p, r) over the `count` most probable tokens of r, the others as one."""

    def divergence(p_V, r_V, _):
        top = sorted(range(VOCABULARY), key=lambda token: -r_V[token].item())[:count]
        total = sum(p_V[token] * (p_V[token] / r_V[token]).log() for token in top)
        left, left_of_start = (1 - sum(of_V[token] for token in top) for of_V in (p_V, r_V))
        return total + left * (left / left_of_start).log()

    return divergence


def whole(p_V, r_V, _):
    """KL(p, r)."""
    allowed = [token for token in range(VOCABULARY) if token not in BANNED]
    return sum(p_V[token] * (p_V[token] / r_V[token]).log() for token in allowed)


@pytest.mark.parametrize(
    ("config", "divergence"),
    [
        ({"estimator": "k3"}, estimated),
        ({"estimator": "top", "top_tokens": 1}, over_top(1)),
        ({"estimator": "top", "top_tokens": 4}, over_top(4)),
        # All but one token; and as many as there are, of more that are asked for.
        ({"estimator": "top", "top_tokens": 10}, whole),
        ({"estimator": "top", "top_tokens": 64}, whole),
    ],
    ids=["k3", "top 1", "top 4", "top 10", "top 64"],
)
def test_loss_and_gradient_are_those_of_the_formula_however_rows_are_packed(config, divergence):
    model, start = TableModel(0.3), TableModel()
    all_segments = segments()
    table = model.table.detach().double().requires_grad_()
    expected = slowly(table, start.table.detach().double(), all_segments, divergence)
    expected.backward()
    entry = POLICY | {"name": "reference_kl", "weight": BETA, "config": config}
    reference = copy_as_reference(model, start)
    for rows in ([all_segments], [[one] for one in all_segments]):
        loss, terms, gradient = learned(model, reference, rows, [entry])
        assert expected.item() > 0.05
        assert loss == pytest.approx(BETA * expected.item(), abs=1e-6)
        assert terms == {"loss/reference_kl": pytest.approx(expected.item(), abs=1e-6)}
        torch.testing.assert_close(gradient.double(), BETA * table.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("config", [{"estimator": "k3"}, {"estimator": "top", "top_tokens": 3}])
def test_beside_a_policy_gradient_loss_and_gradient_are_the_sum_of_both(config):
    model, start = TableModel(0.3), TableModel()
    entry = POLICY | {"name": "reference_kl", "weight": BETA, "config": config}
    reference, rows = copy_as_reference(model, start), [segments()]
    both, terms, gradient = learned(model, reference, rows, [POLICY, entry])
    policy, of_policy, policy_gradient = learned(model, None, rows, [POLICY])
    near, of_near, near_gradient = learned(model, reference, rows, [entry])
    assert both == pytest.approx(policy + near, abs=1e-6)
    assert terms == of_policy | of_near
    torch.testing.assert_close(gradient, policy_gradient + near_gradient, rtol=0, atol=1e-6)


def test_the_estimator_is_the_entrys_also_where_another_objective_asks_for_the_top():
    model, start = TableModel(0.3), TableModel()
    reference, rows = copy_as_reference(model, start), [segments()]
    k3, top = (
        build_objectives(
            PipelineSection(
                objective=[POLICY | {"name": "reference_kl", "config": config}], diagnostics=[]
            ),
            Channel.B,
            NO_COORDS,
        )
        for config in ({"estimator": "k3"}, {"estimator": "top", "top_tokens": 3})
    )
    both = replace(k3, objectives=(*k3.objectives, *top.objectives))
    row = collate(rows[0], text_weights=NO_TEXT, rope_index=None)
    sampled_under = Normalizer(TEMPERATURE, BANNED)
    of_k3, of_top, of_both = (
        train_row(model, row, objectives, sampled_under, reference=reference).loss
        for objectives in (k3, top, both)
    )
    assert of_k3 != pytest.approx(of_top, rel=0.01)
    assert of_both == pytest.approx(of_k3 + of_top, rel=1e-5)


def test_a_run_without_the_objective_asks_no_reference():
    model, start = TableModel(0.3), TableModel()
    learned(model, copy_as_reference(model, start), [segments()], [POLICY])
    assert (model.num_forwards, start.num_forwards) == (1, 0)


def test_a_row_without_a_learned_token_has_no_divergence():
    model, start = TableModel(0.3), TableModel()
    entry = POLICY | {"name": "reference_kl", "config": {"estimator": "top", "top_tokens": 3}}
    no_credit = TokenAdvantages((), (), (), (), ())
    nothing = [
        replace(one, target=AdvantageTarget("x", one.target.token_ids, no_credit))
        for one in segments()
    ]
    loss, _, gradient = learned(model, copy_as_reference(model, start), [nothing], [POLICY, entry])
    assert loss == 0.0
    assert not gradient.any()
