"""Rollout matching and policy gradient on the same rollouts, in one step (decisions 6 and 37)."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
import yaml
from config_support import MINIMAL, configuration
from learner_support import finish_step, gradients_of_update, make_learner
from rollout_support import make_rollout

from launch.reports.run_page import step_rows
from learner.algorithms.matched_targets import ground_truth_target
from learner.targets import AdvantageTarget
from shared.config.pipeline import EXAMPLE_POLICY_GRADIENT
from shared.grounding.parsing import parse_rollout
from shared.rollouts import FinishReason
from shared.schedule import RunSchedule

pytestmark = pytest.mark.slow

PER_SAMPLE, ROLLOUTS = 3, 12
MATCHED = yaml.safe_load(MINIMAL.read_text())["rollout_matching"]["pipeline"]["objective"]
REWARDED = EXAMPLE_POLICY_GRADIENT | {
    "weight": 0.5,
    "config": EXAMPLE_POLICY_GRADIENT["config"] | {"normalize": "rollout", "advantage_std": False},
}


@pytest.fixture(scope="module")
def config(demo_checkpoint, demo_data, tmp_path_factory):
    def make(*entries, **changes):
        return configuration(
            demo_checkpoint,
            demo_data,
            tmp_path_factory.mktemp("run"),
            global_max_length=512,
            training__max_steps=3,
            training__effective_batch_size=ROLLOUTS,
            training__packing_window=4,
            training__max_grad_norm=None,
            stage2_ab__schedule__warmup_steps=0,
            stage2_ab__channel_b__rollouts_per_step=ROLLOUTS,
            stage2_ab__channel_b__rollouts_per_sample=PER_SAMPLE,
            rollout_matching__decoding={"temperature": 0.8},
            rollout_matching__logprob_tolerance=100.0,  # of engines that are made up
            rollout_matching__pipeline={"objective": list(entries), "diagnostics": []},
            **changes,
        )

    return make


def sampled(learner, plan):
    """Answers of which each writes another part of its sample's objects; every third ends itself.

    The first sample's are all alike.
    """
    requests = learner.next_requests(plan)
    samples = learner.steps[-1].samples
    draw = np.random.default_rng(0)
    answers = []
    for request, sample in zip(requests, samples, strict=True):
        settings = learner.algorithm.settings
        whole = ground_truth_target(sample, learner.loaded.codec, settings).token_ids
        stops = request.position % PER_SAMPLE == 1 and request.position >= PER_SAMPLE
        size = len(whole) // 2 if request.position % 2 or request.position < PER_SAMPLE else 20
        response = whole[:-1] if stops else whole[:size]
        low, high = -8.5, -6.5
        answers.append(
            make_rollout(
                response,
                step=request.step,
                position=request.position,
                sample_id=request.sample_id,
                prompt_token_ids=learner.algorithm.encoder.encode(sample).token_ids,
                logprobs=tuple(draw.uniform(low, high, len(response)).tolist()),
                stop_token_id=whole[-1] if stops else None,
                stop_token_logprob=-7.0 if stops else None,
                finish_reason=FinishReason.STOP if stops else FinishReason.LENGTH,
                seed=request.seed,
            )
        )
    return answers


def learned(settings, rounds=(range(ROLLOUTS),), moved=0.0):
    """The report of a first step, and its gradient; `moved`: how far weights are from the start."""
    learner = make_learner(settings)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in learner.loaded.model.parameters():
            parameter.add_(moved * torch.randn(parameter.shape, generator=draw))
    answers = sampled(learner, RunSchedule(settings).plan(0))
    gradients = gradients_of_update(learner)
    for round_ in rounds:
        learner.accumulate([answers[place] for place in round_])
    return finish_step(learner).metrics, gradients


def test_both_segments_of_all_rollouts_of_a_sample_share_its_prompt_and_picture(config):
    apart, expected = learned(config(*MATCHED, REWARDED))
    shared, gradients = learned(config(*MATCHED, REWARDED, training__share_prompts=True))
    assert shared["packing/num_tokens"] < 0.6 * apart["packing/num_tokens"]
    kept = ("packing/num_learned_tokens", "packing/num_segments", "loss/total", "optim/grad_norm")
    for name in kept:
        assert shared[name] == pytest.approx(apart[name], rel=1e-5, abs=1e-6), name
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_step_that_matches_and_rewards_its_rollouts_has_the_sum_of_both_losses_and_gradients(
    config,
):
    both, gradients = learned(config(*MATCHED, REWARDED))
    matched, of_matching = learned(config(*MATCHED))
    rewarded, of_rewards = learned(config(REWARDED))
    total = matched["loss/total"] + rewarded["loss/total"]
    assert both["loss/total"] == pytest.approx(total, abs=1e-6)
    assert abs(rewarded["loss/total"]) > 1e-3
    assert rewarded["loss/total"] == pytest.approx(0.5 * both["loss/policy_gradient"], abs=1e-6)
    scale = max(gradient.abs().max().item() for gradient in of_rewards.values())
    assert scale > 1e-3
    for name, gradient in gradients.items():
        expected = of_matching[name] + of_rewards[name]
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)
    counts = [both[f"rollout/{name}"] for name in ("num", "num_groups", "num_left_out")]
    assert counts == [ROLLOUTS, ROLLOUTS // PER_SAMPLE, PER_SAMPLE]


def test_the_log_has_the_rewards_and_the_page_of_a_step_their_advantages(config):
    settings = config(*MATCHED, REWARDED)
    metrics, _ = learned(settings)
    rows = step_rows(settings.telemetry.run_dir, 1, settings)
    rewards = [row["reward"] for row in rows]
    assert fmean(rewards) == pytest.approx(metrics["rollout/reward"])
    for row in rows:
        siblings = [one["reward"] for one in rows if one["group"] == row["position"] // PER_SAMPLE]
        assert row["advantage"] == pytest.approx(row["reward"] - fmean(siblings))
    settings = config(*MATCHED)
    learned(settings)
    assert "reward" not in step_rows(settings.telemetry.run_dir, 1, settings)[0]


def test_an_imported_policy_gradient_learns_the_same_rewards_next_to_matched_objects(
    config, monkeypatch
):
    """The example, with the built-in's settings."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3])
    name = "examples.algorithms.sequence_ratio:SequenceRatio"
    credit = {"normalize": "step", "advantage_std": False}
    clip = {"clip_low": 0.2, "clip_high": 0.3}
    own = REWARDED | {"name": name, "advantages": credit, "config": clip}
    like_it = REWARDED | {"config": credit | clip | {"ratio_cap": 1e6, "ratio_level": "call_mean"}}
    found, gradients = learned(config(*MATCHED, own))
    expected, of_built_in = learned(config(*MATCHED, like_it))
    assert abs(expected["loss/policy_gradient"]) > 1e-3
    assert found["loss/sequence_ratio"] == pytest.approx(expected["loss/policy_gradient"], abs=1e-6)
    for gradient_name, gradient in of_built_in.items():
        torch.testing.assert_close(gradients[gradient_name], gradient, rtol=1e-5, atol=1e-6)


def test_what_was_sampled_is_credited_with_its_f1_less_that_of_its_samples_other_rollouts(config):
    """However the step was cut into rounds; a sample whose rollouts are alike teaches nothing."""
    settings = config(REWARDED)
    for rounds in ([range(12)], [range(5), range(5, 7), range(7, 12)]):
        learner = make_learner(settings)
        answers = sampled(learner, RunSchedule(settings).plan(0))
        step = learner.steps[0]
        found = [
            segment
            for round_ in rounds
            for segment in step.segments([answers[place] for place in round_], version=0)
            if isinstance(segment.target, AdvantageTarget)
        ]
        assert [segment.position for segment in found] == list(range(PER_SAMPLE, ROLLOUTS))
        rewards = []
        for rollout, sample in zip(answers, step.samples, strict=True):
            codec = learner.loaded.codec
            # What is written is right, so it is found.
            number = len(parse_rollout(rollout.response_token_ids, codec).objects)
            rewards.append(2 * number / (number + len(sample.objects)))
        assert len(set(rewards)) > 3
        for segment in found:
            rollout = answers[segment.position]
            stop = () if rollout.stop_token_id is None else (rollout.stop_token_id,)
            token_ids = (*rollout.response_token_ids, *stop)
            credit = segment.target.credit
            assert segment.target.token_ids == token_ids
            assert credit.positions == tuple(range(len(token_ids)))
            assert credit.engine_logprobs == (*rollout.logprobs, *([-7.0] if stop else []))
            assert credit.weights == (1 / len(token_ids),) * len(token_ids)
            first = segment.position // PER_SAMPLE * PER_SAMPLE
            expected = rewards[segment.position] - fmean(rewards[first : first + PER_SAMPLE])
            assert credit.advantages == pytest.approx((expected,) * len(token_ids))


def test_a_step_draws_each_sample_once_and_the_next_goes_on_behind_them(config):
    settings = config(*MATCHED, REWARDED)
    learner = make_learner(settings)
    schedule = RunSchedule(settings)
    names = []
    for number in range(2):
        sampled(learner, schedule.plan(number))
        drawn = [sample.sample_id for sample in learner.steps.pop().samples]
        assert drawn == [name for name in drawn[::PER_SAMPLE] for _ in range(PER_SAMPLE)]
        names += drawn[::PER_SAMPLE]
    assert len(set(names)) == 2 * ROLLOUTS // PER_SAMPLE
    assert schedule.num_samples_before(1) == ROLLOUTS // PER_SAMPLE
    resumed = make_learner(settings)
    resumed.algorithm.move_to(schedule.num_samples_before(1))
    sampled(resumed, schedule.plan(1))
    assert [one.sample_id for one in resumed.steps[0].samples[::PER_SAMPLE]] == names[4:]
