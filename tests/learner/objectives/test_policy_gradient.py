"""`policy_gradient` against a slow reference in Python's floats (DESIGN 8), through collation and the pass over the logits (DESIGN 5, decision 6).

The model is one that a float64 reference can follow: what it says at a position depends on the token there and on the position within the segment.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.collate import collate
from learner.credit import CreditRule
from learner.logits import LogitsPass
from learner.objectives.coord_math import Normalizer
from learner.objectives.interface import NOTHING_SAMPLED
from learner.objectives.policy_gradient import clipped_ratio, is_clipped, policy_gradient_loss, truncated_ratio
from learner.objectives.registry import build_objectives
from learner.segments import EncodedPrompt, Segment
from learner.targets import TextWeights
from learner.trajectory_targets import trajectory_target
from shared.config.pipeline import Channel, PipelineSection, PolicyGradientConfig
from shared.trajectory import TrainingExample

VOCABULARY, LONGEST, MAX_NEW_TOKENS = 11, 16, 20
NO_COORDS = torch.empty(0, dtype=torch.int64)
"""A language model has no coord tokens."""
TEMPERATURE, BANNED = 0.7, (2, 5)
CONFIG = {"clip_low": 0.2, "clip_high": 0.3, "ratio_cap": 2.0, "normalize": "segment", "advantage_std": False}
NO_TEXT = TextWeights(desc=0.0, matched_structure=0.0, structure=0.0)


def objectives(weight=1.0, **changes):
    entry = {"name": "policy_gradient", "enabled": True, "weight": weight, "channels": ["B"], "config": CONFIG | changes}
    return build_objectives(PipelineSection.model_validate({"objective": [entry], "diagnostics": []}), Channel.B, NO_COORDS)


def rule(**changes):
    return CreditRule.of(PolicyGradientConfig.model_validate(CONFIG | changes), max_new_tokens=MAX_NEW_TOKENS)


# What the model says


@pytest.fixture(scope="module")
def tables():
    draw = torch.Generator().manual_seed(3)
    return tuple(torch.randn(size, VOCABULARY, generator=draw, dtype=torch.float64) for size in (VOCABULARY, LONGEST))


def slow_logprob(tables, example, place):
    """Of the token at `place`, as sampled: at the temperature, without the banned ids."""
    by_token, by_position = tables
    logits = [(by_token[example.token_ids[place - 1]][v] + by_position[place - 1][v]).item() / TEMPERATURE for v in range(VOCABULARY)]
    allowed = [math.exp(logit) for v, logit in enumerate(logits) if v not in BANNED]
    return logits[example.token_ids[place]] - math.log(sum(allowed))


def examples(tables, distances, seed=0):
    """Of two turns each; the engine's log-probability is the learner's minus the distance, of one sampled token after the other."""
    draw, left, made = np.random.default_rng(seed), list(distances), []
    while left:
        mask = [0, 0, 1, 1, 0, 1, 1, 0][: draw.integers(4, 9)]
        ids = [int(i) for i in draw.choice([v for v in range(VOCABULARY) if v not in BANNED], len(mask))]
        reward = float(draw.choice([-1.5, -0.5, 0.75, 2.0]))
        # Of a group whose mean is 0, so that the reward is the advantage.
        example = TrainingExample(ids, [0.0] * len(ids), mask, reward, advantage=reward, group_rewards=(reward, reward - 1.0, 1.0 - 2 * reward))
        logprobs = [slow_logprob(tables, example, place) - (left.pop() if left else 0.0) if m else 0.0 for place, m in enumerate(mask)]
        made.append(replace(example, logprobs=logprobs, example_id=len(made)))
    return made


def segment_of(example, credit_rule):
    prompt_ids, target = trajectory_target(example, credit_rule)
    size = len(prompt_ids)
    nothing = torch.zeros(0, 4), torch.zeros(0, 3, dtype=torch.int64)
    return Segment(0, EncodedPrompt(prompt_ids, prompt_ids, torch.zeros(size, dtype=torch.int64), *nothing), target)


def plain_positions(ids_1L, **_):
    return torch.arange(ids_1L.shape[1]).expand(3, 1, -1), None


def learn(tables, rows, *, weight=1.0, chunk=3, **config):
    """(loss, terms, diagnostics as a mean over tokens, gradients of both tables) of segments in rows."""
    of_channel = objectives(weight, **config)
    leaves = [table.float().clone().requires_grad_(True) for table in tables]
    loss, term, sums, num_tokens = 0.0, 0.0, {}, 0
    for segments in rows:
        row = collate(segments, text_weights=NO_TEXT, rope_index=plain_positions)
        at_N = row.positions_N
        hidden = leaves[0][row.inputs.input_ids[0, at_N]] + leaves[1][row.inputs.position_ids[0, 0, at_N]]
        values = LogitsPass(lambda hidden: hidden, NO_COORDS, of_channel.needs, Normalizer(TEMPERATURE, BANNED), chunk)(hidden, row)
        (objective,), (diagnostic,) = of_channel.objectives, of_channel.diagnostics
        part = objective(values, row.supervision)
        part.loss.backward()
        loss, term = loss + part.loss.item(), term + part.terms[0].item()
        with torch.no_grad():
            for name, value_M in zip(diagnostic.names, diagnostic(values, row.supervision), strict=True):
                sums[name] = sums.get(name, 0.0) + value_M.sum().item()
            num_tokens += len(row.supervision.sampled.at)
    return loss, term, {name: total / num_tokens for name, total in sums.items()}, [leaf.grad for leaf in leaves]


def slow_loss(tables, all_examples, **changes):
    """Token by token: the ratio truncated at its cap, then the worse of itself and its clipped self."""
    config, total = CONFIG | changes, 0.0
    for example in all_examples:
        of_segment, num_sampled = 0.0, 0
        for place, is_learned in enumerate(example.mask):
            if not is_learned:
                continue
            num_sampled += 1
            advantage = example.advantage / (float(np.std(example.group_rewards)) if config["advantage_std"] else 1.0)
            ratio = min(math.exp(slow_logprob(tables, example, place) - example.logprobs[place]), config["ratio_cap"])
            within = max(1 - config["clip_low"], min(1 + config["clip_high"], ratio))
            of_segment -= min(ratio * advantage, within * advantage)
        total += of_segment / (num_sampled if config["normalize"] == "segment" else MAX_NEW_TOKENS)
    return total


DISTANCES = [0.0, 0.1, -0.1, 0.25, -0.2, 0.4, -0.4, 0.65, -0.6, 0.9, -0.9, 3.0, -3.0, 0.02, -0.05, 0.0]
"""Of log-probabilities: within the clip, beyond it, and beyond the cap, on either side."""


@pytest.mark.parametrize("normalize", ["segment", "constant"])
@pytest.mark.parametrize("advantage_std", [False, True])
def test_the_loss_equals_a_slow_obvious_version(tables, normalize, advantage_std):
    settings = {"normalize": normalize, "advantage_std": advantage_std}
    of = examples(tables, DISTANCES * 3)
    loss, term, *_ = learn(tables, [[segment_of(one, rule(**settings)) for one in of]], weight=0.5, **settings)
    assert term == pytest.approx(slow_loss(tables, of, **settings), abs=1e-5)
    assert loss == pytest.approx(0.5 * term, abs=1e-6)


def test_the_loss_and_its_gradient_do_not_depend_on_packing(tables):
    segments = [segment_of(one, rule()) for one in examples(tables, DISTANCES * 3)]
    alone = learn(tables, [[segment] for segment in segments])
    for rows in ([segments], [list(reversed(segments))], [segments[:2], segments[2:5], segments[5:]]):
        packed = learn(tables, rows)
        assert packed[:2] == pytest.approx(alone[:2], abs=1e-5)
        assert packed[2] == pytest.approx(alone[2], abs=1e-5)
        for gradient, expected in zip(packed[3], alone[3], strict=True):
            torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("normalize", ["segment", "constant"])
def test_the_gradient_agrees_with_finite_differences(tables, normalize):
    of = examples(tables, DISTANCES)
    _, _, _, gradients = learn(tables, [[segment_of(one, rule(normalize=normalize)) for one in of]], normalize=normalize)
    step = 1e-5
    for table, gradient in zip(tables, gradients, strict=True):
        for place in [(i, v) for i in range(0, len(table), 3) for v in range(0, VOCABULARY, 2)]:
            differences = []
            for sign in (1, -1):
                moved = table.clone()
                moved[place] += sign * step
                differences.append(slow_loss([moved if other is table else other for other in tables], of, normalize=normalize))
            assert gradient[place].item() == pytest.approx((differences[0] - differences[1]) / (2 * step), abs=2e-5)


def test_a_zero_advantage_gives_exactly_zero_gradient(tables):
    of = [replace(one, advantage=0.0) for one in examples(tables, [50.0, -50.0, *DISTANCES])]
    loss, _, _, gradients = learn(tables, [[segment_of(one, rule()) for one in of]])
    assert loss == 0.0
    assert all(not gradient.any() for gradient in gradients)


def test_the_step_from_where_the_engine_is_raises_what_was_better_and_lowers_what_was_worse(tables):
    """On-policy the gradient is that of REINFORCE: minus the advantage times the score, mean over the segment's sampled tokens."""
    (one,) = examples(tables, [0.0])
    for advantage in (2.0, -1.0):
        gradient = learn(tables, [[segment_of(replace(one, advantage=advantage), rule())]])[3][1]
        expected = torch.zeros_like(gradient)
        for place in (place for place, is_learned in enumerate(one.mask) if is_learned):
            for v in (v for v in range(VOCABULARY) if v not in BANNED):
                ids = [*one.token_ids[:place], v]
                p = math.exp(slow_logprob(tables, replace(one, token_ids=ids, logprobs=[0.0] * len(ids), mask=[0] * len(ids)), place))
                expected[place - 1, v] -= advantage * ((v == one.token_ids[place]) - p) / TEMPERATURE / one.num_learned
        torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-4)


# The ratio


LOW, HIGH, CAP = 0.8, 1.3, 2.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "counts_as", "is_learned"),
    [
        (1.0, 1.0, 1.0, True),
        (1.29, 1.0, 1.29, True),
        (1.31, 1.0, HIGH, False),  # probable enough by now
        (0.1, 1.0, 0.1, True),  # too improbable, and better: pulled back however far away
        (1.0, -1.0, 1.0, True),
        (0.81, -1.0, 0.81, True),
        (0.79, -1.0, LOW, False),  # improbable enough by now
        (1.9, -1.0, 1.9, True),  # too probable, and worse: pulled back
        (2.1, -1.0, CAP, False),  # further than the engine can tell
        (1e30, -1.0, CAP, False),
        (1e30, 1.0, HIGH, False),
    ],
)
def test_the_ratio_is_truncated_and_clipped_against_the_advantages_sign(ratio, advantage, counts_as, is_learned):
    learner = torch.tensor([math.log(ratio)], requires_grad=True)
    advantages, engine = torch.tensor([advantage]), torch.zeros(1)
    loss = policy_gradient_loss(truncated_ratio(learner, engine, cap=CAP), advantages, torch.ones(1), clip_low=0.2, clip_high=0.3)
    loss.backward()
    assert loss.item() == pytest.approx(-advantage * counts_as, rel=1e-5)
    assert learner.grad.item() == pytest.approx(-advantage * ratio if is_learned else 0.0, rel=1e-5)
    sampled = NOTHING_SAMPLED._replace(engine_logprobs=engine, advantage=advantages)
    assert is_clipped(learner.detach(), sampled, PolicyGradientConfig.model_validate(CONFIG)).tolist() == [not is_learned]


def test_a_token_without_advantage_is_not_counted_as_clipped():
    sampled = NOTHING_SAMPLED._replace(engine_logprobs=torch.zeros(3), advantage=torch.zeros(3))
    assert not is_clipped(torch.tensor([-5.0, 0.0, 5.0]), sampled, PolicyGradientConfig.model_validate(CONFIG)).any()


@given(st.lists(st.tuples(st.floats(-90, 90), st.floats(-5, 5)), min_size=1, max_size=8))
def test_the_clipped_surrogate_is_the_worse_of_the_ratio_and_the_clipped_one(pairs):
    log_ratio, advantage = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
    ratio = truncated_ratio(log_ratio, torch.zeros_like(log_ratio), cap=CAP)
    torch.testing.assert_close(ratio, log_ratio.exp().clamp(max=CAP))
    worse = torch.minimum(ratio * advantage, ratio.clamp(LOW, HIGH) * advantage)
    torch.testing.assert_close(clipped_ratio(ratio, advantage, clip_low=0.2, clip_high=0.3) * advantage, worse)


def test_tokens_of_hardly_any_probability_have_finite_losses_and_gradients():
    learner = torch.tensor([-0.0, -9999.0, -1e4, 0.0], requires_grad=True)
    engine, advantage = torch.tensor([-9999.0, -0.5, -1e4, -88.8]), torch.tensor([-1.0, 1.0, -1.0, 1.0])
    loss = policy_gradient_loss(truncated_ratio(learner, engine, cap=CAP), advantage, torch.ones(4), clip_low=0.2, clip_high=0.3)
    loss.backward()
    assert loss.item() == pytest.approx(2.0 + 0.0 + 1.0 - 1.3)
    assert learner.grad.tolist() == pytest.approx([0.0, 0.0, 1.0, 0.0])


# What is measured


def test_mean_ratio_share_clipped_log_probability_difference_and_entropy_are_means_over_sampled_tokens(tables):
    of = examples(tables, DISTANCES * 2)
    diagnostics = learn(tables, [[segment_of(one, rule()) for one in of[:3]], [segment_of(one, rule()) for one in of[3:]]])[2]
    ratios, clipped, differences, surprises = [], [], [], []
    for one in of:
        for place in (place for place, is_learned in enumerate(one.mask) if is_learned):
            logprob = slow_logprob(tables, one, place)
            ratio = math.exp(logprob - one.logprobs[place])
            ratios.append(min(ratio, CAP))
            clipped.append(ratio > HIGH if one.advantage > 0 else not LOW <= ratio <= CAP)
            differences.append(abs(logprob - one.logprobs[place]))
            surprises.append(-logprob)
    means = [np.mean(values) for values in (ratios, clipped, differences, surprises)]
    assert list(diagnostics) == ["policy/ratio", "policy/clipped_share", "policy/logprob_difference", "policy/entropy"]
    assert list(diagnostics.values()) == pytest.approx(means, abs=1e-4)
    assert 0.1 < diagnostics["policy/clipped_share"] < 0.9


@pytest.mark.slow
def test_the_entropy_estimate_is_near_the_entropy_of_what_samples(tables):
    """Of the tokens that follow token 0 at position 0, sampled by the learner itself."""
    logits = (tables[0][0] + tables[1][0]) / TEMPERATURE
    logits[list(BANNED)] = -math.inf
    distribution = torch.distributions.Categorical(logits=logits)
    torch.manual_seed(0)
    made = [TrainingExample([0, token], [0.0, -1.0], [0, 1], 0.0, advantage=0.0) for token in distribution.sample((3000,)).tolist()]
    diagnostics = learn(tables, [[segment_of(one, rule()) for one in made]], chunk=512)[2]
    assert diagnostics["policy/entropy"] == pytest.approx(distribution.entropy().item(), abs=0.05)


def test_a_policy_gradient_is_always_measured_and_nothing_else_is_where_there_is_none():
    assert [diagnostic.names[0] for diagnostic in objectives().diagnostics] == ["policy/ratio"]
    off = {"name": "policy_gradient", "enabled": False, "weight": 1.0, "channels": ["B"], "config": CONFIG}
    without = build_objectives(PipelineSection.model_validate({"objective": [off], "diagnostics": []}), Channel.B, NO_COORDS)
    assert (without.objectives, without.diagnostics) == ((), ())
