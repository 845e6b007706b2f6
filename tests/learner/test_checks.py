"""Does the engine compute what the learner computes? The first difference ends the run, with the sample's id (issue 2; DESIGN 9)."""

import numpy as np
import pytest
import torch

from learner.checks import check_logprobs, check_prompt, check_weight_versions, compares_logprobs
from learner.segments import EncodedPrompt, Segment
from learner.targets import Target, TokenRole
from shared.errors import RolloutError
from shared.rollouts import DecodeMode, DecodeSettings, FinishReason, Rollout

NOTHING = torch.zeros(0)


def rollout(sample_id="scene", prompt=(1, 2, 3), version=4):
    return Rollout(0, 0, sample_id, prompt, (7, 8), None, (-0.1, -0.2), None, FinishReason.STOP, (), version, "rollout-actor-1", 0, 1, 0.1)


def prompt(*token_ids):
    return EncodedPrompt(token_ids, token_ids, NOTHING, NOTHING, NOTHING)


def segment(sample_id, *logprobs):
    ids = tuple(range(10, 10 + len(logprobs) + 1))
    return Segment(
        0,
        prompt(1),
        Target(sample_id, ids, np.full(len(ids), TokenRole.NEUTRAL, dtype=np.uint8), (), (), (), sampled_logprobs=logprobs),
        actor="rollout-actor-1",
    )


def test_equal_prompts_pass():
    check_prompt(rollout(), prompt(1, 2, 3))


@pytest.mark.parametrize(("engine", "learner", "index"), [((1, 2, 9), (1, 2, 3), 2), ((1, 2), (1, 2, 3), 2), ((1, 2, 3, 3), (1, 2, 3), 3)])
def test_the_first_differing_prompt_token_is_shown_with_the_samples_id(engine, learner, index):
    with pytest.raises(RolloutError, match=rf"check on rollout-actor-1: sample scene: the prompts differ first at token {index}"):
        check_prompt(rollout(prompt=engine), prompt(*learner))


def test_a_rollout_of_other_weights_ends_the_run():
    check_weight_versions([], 4, max_staleness=0)
    check_weight_versions([rollout(version=4), rollout(version=4)], 4, max_staleness=0)
    with pytest.raises(RolloutError, match="generated with weight version 4, the learner holds 5; a sync was skipped or lost"):
        check_weight_versions([rollout(version=4)], 5, max_staleness=0)


def test_a_rollout_may_be_one_version_old_where_the_configuration_allows_it_and_never_newer():
    check_weight_versions([rollout(version=4)], 5, max_staleness=1)
    for version in (3, 6):
        with pytest.raises(RolloutError, match=f"weight version {version}, the learner holds 5, and rollout_matching.max_staleness is 1"):
            check_weight_versions([rollout(version=version)], 5, max_staleness=1)


def test_a_round_is_of_one_weight_version():
    with pytest.raises(RolloutError, match=r"sample late: .* version 4, and sample scene of the same round with 5 \(on rollout-actor-1\); an engine missed"):
        check_weight_versions([rollout(version=5), rollout("late", version=4)], 5, max_staleness=1)


def test_the_first_differing_log_probability_is_shown_with_its_sample_and_token():
    segments = [segment("first", -0.5, -0.6), segment("second", -0.7, -0.8, -0.9)]
    engine = torch.tensor([-0.5, -0.6, -0.7, -0.8, -0.9])
    assert check_logprobs(segments, engine + 5e-5, engine, tolerance=1e-4) == pytest.approx(5e-5, rel=1e-2)
    learner = engine.clone()
    learner[3] -= 0.01
    with pytest.raises(
        RolloutError, match=r"sample second: response token 1 \(id 11\) has log-probability -0.800000 in the engine and -0.810000 in the learner; 1 of 5"
    ):
        check_logprobs(segments, learner, engine, tolerance=1e-4)


def test_a_log_probability_that_is_not_a_number_is_a_difference():
    with pytest.raises(RolloutError, match="sample first"):
        check_logprobs([segment("first", -0.5)], torch.tensor([float("nan")]), torch.tensor([-0.5]), tolerance=1e-4)


def test_nothing_is_compared_where_sampling_was_truncated_or_penalised():
    plain = {"mode": DecodeMode.SAMPLE, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
    rest = {"max_new_tokens": 8, "num_beams": 1, "stop_token_ids": (), "banned_token_ids": (), "return_logprobs": True}
    assert compares_logprobs(DecodeSettings(**plain, **rest))
    for change in ({"top_p": 0.9}, {"top_k": 5}, {"repetition_penalty": 1.1}):
        assert not compares_logprobs(DecodeSettings(**(plain | change), **rest))
