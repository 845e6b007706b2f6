"""`policy_gradient` against a slow reference in Python's floats (decision 37), through collation
and the pass over the logits (decision 6).

The model is one that a float64 reference can follow: what it says at a position depends on the
token there and on the position within the segment.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from called_rollouts import Call, examples_of
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithms.advantages import AdvantageEstimator
from learner.algorithms.trajectories import trajectory_target
from learner.collate import collate
from learner.objectives.base import NOTHING_LEARNED, TeacherSupervision
from learner.objectives.coord_math import Normalizer
from learner.objectives.policy_gradient import is_clipped, policy_gradient_loss
from learner.objectives.registry import build_objectives
from learner.segments import EncodedPrompt, Segment
from learner.step import LogitsPass
from learner.targets import TextWeights
from shared.config.pipeline import (
    EXAMPLE_POLICY_GRADIENT,
    Channel,
    PipelineSection,
    PolicyGradientConfig,
)
from shared.trajectory import TrainingExample

VOCABULARY, LONGEST, MAX_NEW_TOKENS = 11, 16, 20
NO_COORDS = torch.empty(0, dtype=torch.int64)
"""A language model has no coord tokens."""
TEMPERATURE, BANNED = 0.7, (2, 5)
CONFIG = EXAMPLE_POLICY_GRADIENT["config"] | {"advantage_std": False}
NO_TEXT = TextWeights(desc=0.0, matched_structure=0.0, structure=0.0)


def objectives(weight=1.0, *, enabled=True, **changes):
    own = {"enabled": enabled, "weight": weight, "config": CONFIG | changes}
    entry = EXAMPLE_POLICY_GRADIENT | own
    pipeline = PipelineSection(objective=[entry], diagnostics=[])
    return build_objectives(pipeline, Channel.B, NO_COORDS)


def rule(**changes):
    config = PolicyGradientConfig(**CONFIG | changes)
    return AdvantageEstimator(config, MAX_NEW_TOKENS)


def learned_at(example):
    return [at for at, is_learned in enumerate(example.mask) if is_learned]


# What the model says


@pytest.fixture(scope="module")
def tables():
    draw = torch.Generator().manual_seed(3)
    return tuple(
        torch.randn(size, VOCABULARY, generator=draw, dtype=torch.float64)
        for size in (VOCABULARY, LONGEST)
    )


def slow_logprob(tables, example, at):
    """Of the token at this position, as sampled: at the temperature, without the banned ids."""
    by_token, by_position = tables
    scores = (by_token[example.token_ids[at - 1]] + by_position[at - 1]) / TEMPERATURE
    logits = scores.tolist()
    allowed = [math.exp(logit) for v, logit in enumerate(logits) if v not in BANNED]
    return logits[example.token_ids[at]] - math.log(sum(allowed))


def examples(tables, distances, seed=0):
    """Of two turns each; the engine's log-probability is the learner's minus the distance, of one
    sampled token after the other.
    """
    draw, left, drawn = np.random.default_rng(seed), list(distances), []
    while left:
        mask = [0, 0, 1, 1, 0, 1, 1, 0][: draw.integers(4, 9)]
        size = len(mask)
        ids = draw.choice([v for v in range(VOCABULARY) if v not in BANNED], size).tolist()
        reward = float(draw.choice([-1.5, -0.5, 0.75, 2.0]))
        example = TrainingExample(
            ids,
            [0.0] * size,
            mask,
            reward,
            advantage=reward,
            steps=(0, 1) if size > 4 else (0,),
            step_ends=(4, size) if size > 4 else (size,),
            # Of a group whose mean is 0, so that the reward is the advantage.
            group_rewards=(reward, reward - 1.0, 1.0 - 2 * reward),
        )
        logprobs = [0.0] * size
        for at in learned_at(example):
            logprobs[at] = slow_logprob(tables, example, at) - (left.pop() if left else 0.0)
        drawn.append(replace(example, logprobs=logprobs, example_id=len(drawn)))
    return drawn


def segment_of(example, credit_rule, num_of_rollout=None):
    """The example is all of its rollout where nothing else is said."""
    number = num_of_rollout or example.num_learned
    prompt_ids, target = trajectory_target(example, credit_rule, num_of_rollout=number)
    return Segment(0, EncodedPrompt.from_text(prompt_ids), target)


def learn(tables, rows, *, weight=1.0, chunk=3, **config):
    """(loss, terms, diagnostics as a mean over tokens, gradients of both tables) of segments in
    rows.
    """
    of_channel = objectives(weight, **config)
    (objective,), (diagnostic,) = of_channel.objectives, of_channel.diagnostics
    leaves = [table.float().clone().requires_grad_(True) for table in tables]
    sampling = Normalizer(TEMPERATURE, BANNED)
    read = LogitsPass(lambda hidden: hidden, NO_COORDS, of_channel.needs, sampling, chunk)
    loss, term, sums, num_tokens = 0.0, 0.0, Counter(), 0
    for segments in rows:
        row = collate(segments, text_weights=NO_TEXT, rope_index=None)
        inputs, at_N = row.inputs, row.positions_N
        by_token = leaves[0][inputs.input_ids[0, at_N]]
        values = read(by_token + leaves[1][inputs.position_ids[0, at_N]], row)
        part = objective(values, row.supervision)
        part.loss.backward()
        loss += part.loss.item()
        term += part.terms[0].item()
        with torch.no_grad():
            columns = diagnostic(values, row.supervision)
        sums.update(
            {
                name: value_M.sum().item()
                for name, value_M in zip(diagnostic.names, columns, strict=True)
            }
        )
        num_tokens += len(row.supervision.learned.at)
    means = {name: total / num_tokens for name, total in sums.items()}
    return loss, term, means, [leaf.grad for leaf in leaves]


def slow_tokens(tables, all_examples, **changes):
    """(example, position, advantage times what divides it, ratio) of every sampled token."""
    config = CONFIG | changes
    for example in all_examples:
        std = (
            float(np.std(example.group_rewards, ddof=1)) + 1e-4 if config["advantage_std"] else 1.0
        )
        calls = [[at for at in call if at < len(example.mask)] for call in ((2, 3), (5, 6))]
        for call in calls:
            numbers = {"step": len(call), "rollout": sum(map(len, calls))}
            number = numbers.get(config["normalize"], MAX_NEW_TOKENS)
            for at in call:
                ratio = math.exp(slow_logprob(tables, example, at) - example.logprobs[at])
                yield example, at, example.advantage / std / number, ratio


def slow_loss(tables, all_examples, **changes):
    """Token by token: the ratio truncated at its cap, then the worse of itself and its clipped
    self.
    """
    total = 0.0
    for _, _, advantage, ratio in slow_tokens(tables, all_examples, **changes):
        truncated = min(ratio, CAP)
        total -= min(truncated * advantage, max(LOW, min(HIGH, truncated)) * advantage)
    return total


LOW, HIGH, CAP = 0.8, 1.3, 2.0
DISTANCES = [
    *(0.0, 0.1, -0.1, 0.25, -0.2, 0.4, -0.4, 0.65, -0.6, 0.9, -0.9, 3.0, -3.0, 0.02, -0.05, 0.0)
]
"""Of log-probabilities: within the clip, beyond it, and beyond the cap, on either side."""


@pytest.mark.slow
@pytest.mark.parametrize("normalize", ["step", "rollout", "constant"])
@pytest.mark.parametrize("advantage_std", [False, True])
def test_the_loss_equals_a_slow_obvious_version(tables, normalize, advantage_std):
    settings = {"normalize": normalize, "advantage_std": advantage_std}
    of = examples(tables, DISTANCES * 3)
    row = [segment_of(one, rule(**settings)) for one in of]
    loss, term, *_ = learn(tables, [row], weight=0.5, **settings)
    assert term == pytest.approx(slow_loss(tables, of, **settings), abs=1e-5)
    assert loss == pytest.approx(0.5 * term, abs=1e-6)


@pytest.mark.parametrize("level", ["token", "call", "call_mean"])
def test_the_loss_and_its_gradient_do_not_depend_on_packing(tables, level):
    segments = [segment_of(one, rule()) for one in examples(tables, DISTANCES * 3)]
    alone = learn(tables, [[segment] for segment in segments], ratio_level=level)
    for rows in (
        [segments],
        [list(reversed(segments))],
        [segments[:2], segments[2:5], segments[5:]],
    ):
        packed = learn(tables, rows, ratio_level=level)
        assert packed[:2] == pytest.approx(alone[:2], abs=1e-5)
        assert packed[2] == pytest.approx(alone[2], abs=1e-5)
        for gradient, expected in zip(packed[3], alone[3], strict=True):
            torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5)


def test_a_zero_advantage_gives_exactly_zero_gradient(tables):
    drawn = examples(tables, [50.0, -50.0, *DISTANCES])
    of = [replace(one, advantage=0.0, group_rewards=()) for one in drawn]
    loss, _, _, gradients = learn(tables, [[segment_of(one, rule()) for one in of]])
    assert loss == 0.0
    assert all(not gradient.any() for gradient in gradients)


# The ratio


def loss_of(log_ratio, advantage, **changes):
    """Loss and gradient of one token each."""
    learner = torch.tensor(log_ratio, dtype=torch.float64, requires_grad=True)
    sampled = NOTHING_LEARNED._replace(
        engine_logprobs=torch.zeros_like(learner),
        advantage=torch.tensor(advantage, dtype=torch.float64),
        weight=torch.ones_like(learner),
    )
    config = PolicyGradientConfig(**CONFIG | changes)
    loss = policy_gradient_loss(learner, sampled, config)
    loss.backward()
    return loss.item(), learner.grad.tolist(), is_clipped(learner, sampled, config).tolist()


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
        (2.1, -1.0, CAP, True),  # far too probable, and worse: pulled back with the cap's force
        (1e30, -1.0, CAP, True),
        (1e30, 1.0, HIGH, False),
    ],
)
def test_the_ratio_is_truncated_and_clipped_against_the_advantages_sign(
    ratio, advantage, counts_as, is_learned
):
    loss, gradient, clipped = loss_of([math.log(ratio)], [advantage])
    assert loss == pytest.approx(-advantage * counts_as, rel=1e-9)
    assert gradient == [pytest.approx(-advantage * counts_as if is_learned else 0.0, rel=1e-9)]
    assert clipped == [not is_learned]


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-90, 90), st.floats(-5, 5)), min_size=1, max_size=8))
def test_the_loss_is_the_worse_of_the_truncated_ratio_and_the_clipped_one_and_its_gradient_under_the_cap_is_ppos(
    pairs,
):
    """The gradient above it: see the cases above."""
    log_ratio, advantage = (list(column) for column in zip(*pairs, strict=True))
    loss, gradient, _ = loss_of(log_ratio, advantage)
    learner = torch.tensor(log_ratio, dtype=torch.float64, requires_grad=True)
    ratio, of = learner.exp().clamp(max=CAP), torch.tensor(advantage, dtype=torch.float64)
    ppo = -torch.minimum(ratio * of, ratio.clamp(LOW, HIGH) * of)
    ppo.sum().backward()
    assert loss == pytest.approx(ppo.sum().item())
    under = [i for i, value in enumerate(log_ratio) if value < math.log(CAP)]
    at_a_kink = [abs(math.exp(log_ratio[i]) - bound) < 1e-9 for i in under for bound in (LOW, HIGH)]
    if not any(at_a_kink):
        expected = [learner.grad[i].item() for i in under]
        assert [gradient[i] for i in under] == pytest.approx(expected)


def test_several_updates_of_one_batch_do_not_go_past_the_teacher():
    """The reverse KL of what is learned, of 30 tokens; from the engine's probability it is 0.04."""
    torch.manual_seed(0)
    teacher_V = (2 * torch.randn(30)).log_softmax(0)
    logits_V = torch.zeros(30, requires_grad=True)
    optimizer = torch.optim.AdamW([logits_V], lr=0.2, weight_decay=0.0)
    config = PolicyGradientConfig(**CONFIG)
    kl = []
    for _ in range(100):
        engine_V = logits_V.detach().log_softmax(0)
        tokens_M = torch.multinomial(engine_V.exp(), 256, replacement=True)
        sampled = NOTHING_LEARNED._replace(
            engine_logprobs=engine_V[tokens_M],
            advantage=torch.zeros(256),
            weight=torch.full((256,), 1 / 256),
            teacher=TeacherSupervision(teacher_V[tokens_M], torch.ones(256)),
        )
        for _ in range(8):
            loss = policy_gradient_loss(logits_V.log_softmax(0)[tokens_M], sampled, config)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        learned_V = logits_V.detach().log_softmax(0)
        kl.append((learned_V.exp() * (learned_V - teacher_V)).sum().item())
    assert sum(kl[-30:]) / 30 < 0.0005


def test_tokens_of_hardly_any_probability_have_finite_losses_and_gradients():
    learner = torch.tensor([-0.0, -9999.0, -1e4, 0.0], requires_grad=True)
    sampled = NOTHING_LEARNED._replace(
        engine_logprobs=torch.tensor([-9999.0, -0.5, -1e4, -88.8]),
        advantage=torch.tensor([-1.0, 1.0, -1.0, 1.0]),
        weight=torch.ones(4),
    )
    loss = policy_gradient_loss(learner, sampled, PolicyGradientConfig(**CONFIG))
    loss.backward()
    assert loss.item() == pytest.approx(2.0 + 0.0 + 1.0 - 1.3)
    assert learner.grad.tolist() == pytest.approx([2.0, 0.0, 1.0, 0.0])


# Calls that were merged (issue 16, 6: each model call is an example of its own)


def called(tables, *calls, seed):
    """Calls with these prompts and sampled tokens, whose log-probabilities are nearly the
    learner's.
    """
    draw = np.random.default_rng(seed)
    noisy = []
    for prompt, sampled in calls:
        whole = SimpleNamespace(token_ids=[*prompt, *sampled])
        positions = range(len(prompt), len(whole.token_ids))
        logprobs = [slow_logprob(tables, whole, at) - draw.normal(0, 0.3) for at in positions]
        noisy.append(Call(prompt, sampled, logprobs))
    return noisy


ROLLOUTS = {
    "turns of 1 and 3 tokens": ([([1, 3], [4]), ([1, 3, 4, 6], [7, 8, 9])], 1),
    "a history that was rewritten": ([([1, 3], [4, 4]), ([1, 6], [7]), ([1, 9], [7, 3, 3])], 3),
    "two that go on from one": ([([1], [3, 4]), ([1, 3, 4, 6], [7]), ([1, 3, 4, 9], [8, 8])], 2),
    "one call": ([([1, 6], [3, 4])], 1),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("normalize", "level"),
    [("step", "token"), ("rollout", "token"), ("constant", "token"), ("batch", "call")],
)
@pytest.mark.parametrize("which", [*ROLLOUTS, "all of them"])
def test_merging_calls_gives_the_loss_and_gradient_of_each_call_as_an_example_of_its_own(
    tables, which, normalize, level
):
    results = []
    for merges in (False, True):
        segments = []
        for seed, name in enumerate([which] if which in ROLLOUTS else ROLLOUTS):
            calls, num_merged = ROLLOUTS[name]
            noisy = called(tables, *calls, seed=seed)
            of = examples_of(noisy, merges=merges, advantage=1.0 - seed)
            assert len(of) == (num_merged if merges else len(calls))
            total = sum(example.num_learned for example in of)
            segments += [segment_of(one, rule(normalize=normalize), total) for one in of]
        results.append(learn(tables, [segments], normalize=normalize, ratio_level=level))
    (loss, _, _, gradients), (merged_loss, _, _, merged_gradients) = results
    assert merged_loss == pytest.approx(loss, abs=1e-6)
    for merged, expected in zip(merged_gradients, gradients, strict=True):
        torch.testing.assert_close(merged, expected, atol=1e-6, rtol=0)


# What is measured


def test_mean_ratio_share_clipped_log_probability_difference_and_entropy_are_means_over_sampled_tokens(
    tables,
):
    of = examples(tables, DISTANCES * 2)
    segments = [segment_of(one, rule()) for one in of]
    diagnostics = learn(tables, [segments[:3], segments[3:]])[2]
    columns = []
    for one in of:
        for at in learned_at(one):
            logprob = slow_logprob(tables, one, at)
            ratio = math.exp(logprob - one.logprobs[at])
            clipped = ratio > HIGH if one.advantage > 0 else ratio < LOW
            difference = abs(logprob - one.logprobs[at])
            columns.append((min(ratio, CAP), clipped, ratio > CAP, difference, -logprob))
    assert list(diagnostics) == [
        "policy/ratio",
        "policy/clipped_share",
        "policy/capped_share",
        "policy/logprob_difference",
        "policy/entropy",
    ]
    assert list(diagnostics.values()) == pytest.approx(np.mean(columns, axis=0), abs=1e-4)
    assert 0.1 < diagnostics["policy/clipped_share"] < 0.9


def test_a_policy_gradient_is_always_measured_and_nothing_else_is_where_there_is_none():
    assert [diagnostic.names[0] for diagnostic in objectives().diagnostics] == ["policy/ratio"]
    without = objectives(enabled=False)
    assert (without.objectives, without.diagnostics) == ((), ())


def slow_teaching(at, tables, all_examples, **changes):
    """What has the loss's gradient at the tables `at`: a sum over tokens of `-A w log p`.

    `w` is the truncated ratio at `at`, which stays as it is.
    """
    total = 0.0
    for example, position, advantage, ratio in slow_tokens(at, all_examples, **changes):
        is_clipped = ratio > HIGH if advantage > 0 else ratio < LOW
        if not is_clipped:
            total -= advantage * min(ratio, CAP) * slow_logprob(tables, example, position)
    return total


@pytest.mark.slow
@pytest.mark.parametrize("normalize", ["step", "rollout", "constant"])
def test_the_gradient_agrees_with_finite_differences(tables, normalize):
    """Of the log-probabilities, with weights that stay as they are: beyond the cap too."""
    of = examples(tables, DISTANCES)
    row = [segment_of(one, rule(normalize=normalize)) for one in of]
    *_, gradients = learn(tables, [row], normalize=normalize)
    for index, gradient in enumerate(gradients):
        for at in [(i, v) for i in range(0, len(gradient), 3) for v in range(0, VOCABULARY, 2)]:
            ends = []
            for step in (-1e-5, 1e-5):
                moved = [table.clone() for table in tables]
                moved[index][at] += step
                ends.append(slow_teaching(tables, moved, of, normalize=normalize))
            assert gradient[at].item() == pytest.approx((ends[1] - ends[0]) / 2e-5, abs=2e-5)
