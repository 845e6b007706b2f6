"""Does the engine compute what the learner computes? The first difference ends the run, with the
sample's id (issue 2; decision 38).
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from config_support import configuration
from rollout_support import make_rollout

from learner.checks import (
    Compared,
    LogprobTolerance,
    Sampling,
    check_logprobs,
    check_prompt,
    check_weight_versions,
    compares_logprobs,
)
from learner.segments import EncodedPrompt, Segment
from learner.targets import Target, TokenRole
from shared.errors import RolloutError
from shared.rollouts import DecodeMode, DecodeSettings
from shared.weight_sync.canary import Differences

NOTHING = torch.zeros(0)


def prompt(*token_ids):
    return EncodedPrompt(token_ids, token_ids, NOTHING, NOTHING, NOTHING)


def segment(sample_id, *logprobs):
    ids = tuple(range(10, 10 + len(logprobs) + 1))
    roles = np.full(len(ids), TokenRole.NEUTRAL, dtype=np.uint8)
    target = Target(sample_id, ids, roles, (), (), (), compared_logprobs=logprobs)
    return Segment(0, prompt(1), target, actor="rollout-actor-1")


@pytest.mark.parametrize(
    ("engine", "learner", "index"),
    [((1, 2, 9), (1, 2, 3), 2), ((1, 2), (1, 2, 3), 2), ((1, 2, 3, 3), (1, 2, 3), 3)],
)
def test_the_first_differing_prompt_token_is_shown_with_the_samples_id(engine, learner, index):
    rollout = make_rollout(
        (7, 8), sample_id="scene", prompt_token_ids=engine, actor="rollout-actor-1"
    )
    check_prompt(rollout, prompt(*engine))
    message = f"check on rollout-actor-1: sample scene: the prompts differ first at token {index}"
    with pytest.raises(RolloutError, match=message):
        check_prompt(rollout, prompt(*learner))


@pytest.mark.parametrize(
    ("versions", "max_staleness", "problem"),
    [
        ([], 0, None),
        ([5, 5], 0, None),
        ([4], 0, "version 4, the learner has 5; a weight sync was skipped or lost"),
        ([6], 0, "version 6, the learner has 5; a weight sync was skipped or lost"),
        ([4], 1, None),
        ([3], 1, "version 3, the learner has 5, and rollout_matching.max_staleness is 1"),
        ([6], 1, "version 6, the learner has 5, and rollout_matching.max_staleness is 1"),
        (
            [5, 4],
            1,
            r"sample s1: .* version 4, and sample s0 of the same round with 5 \(on .*\); an engine",
        ),
    ],
)
def test_a_round_is_of_one_version_of_the_weights_and_not_too_old(versions, max_staleness, problem):
    sampled = [Sampling(f"s{i}", "rollout-actor-1", one) for i, one in enumerate(versions)]
    if problem is None:
        check_weight_versions(sampled, 5, max_staleness=max_staleness)
    else:
        with pytest.raises(RolloutError, match=problem):
            check_weight_versions(sampled, 5, max_staleness=max_staleness)


EXACT = LogprobTolerance(1e-4)
ROUNDED = LogprobTolerance(1.0, num_outliers=3, outlier_share=0.01)


def compare(segments, learner, engine, tolerance=EXACT, so_far=Compared()):  # noqa: B008 - it is frozen
    return check_logprobs(segments, learner, engine, tolerance=tolerance, so_far=so_far)


def off_by(number, of, difference=5.0):
    """A segment of so many sampled tokens, what the learner thinks of them, and what the engine
    did, which is another thing for the first.
    """
    engine = torch.full((of,), -0.5)
    learner = engine.clone()
    learner[:number] -= difference
    return [segment("scene", *engine.tolist())], learner, engine


def test_the_first_differing_log_probability_is_shown_with_its_sample_and_token():
    segments = [segment("first", -0.5, -0.6), segment("second", -0.7, -0.8, -0.9)]
    engine = torch.tensor([-0.5, -0.6, -0.7, -0.8, -0.9])
    compared = compare(segments, engine + 5e-5, engine)
    assert compared == Compared(5, 0, pytest.approx(5e-5, rel=1e-2))
    learner = engine.clone()
    learner[3] -= 0.01
    message = (
        r"sample second: response token 1 \(id 11\) has log-probability -0.800000 in the engine"
        r" and -0.810000 in the learner; 1 of the 5"
    )
    with pytest.raises(RolloutError, match=message):
        compare(segments, learner, engine)


@pytest.mark.parametrize("tolerance", [EXACT, ROUNDED])
def test_a_log_probability_that_is_not_a_number_is_a_difference(tolerance):
    engine, learner = torch.tensor([-0.5, -0.5]), torch.tensor([-0.5, float("nan")])
    with pytest.raises(RolloutError, match="sample first: response token 1"):
        compare([segment("first", -0.5, -0.5)], learner, engine, tolerance)


def test_a_bfloat16_run_ends_on_the_share_of_tokens_beyond_the_tolerance_and_not_on_one():
    assert compare(*off_by(1, 10), ROUNDED) == Compared(10, 1, 5.0)
    few = compare(*off_by(3, 10), ROUNDED)
    assert few.num_outliers == 3, "so many say nothing, whatever their share"
    assert compare(*off_by(10, 1000), ROUNDED).num_outliers == 10
    message = (
        r"4 of the 10 tokens of this step so far differ by more than 1"
        r" \(rollout_matching\.logprob_tolerance\), and at most a share of 0\.01"
    )
    with pytest.raises(RolloutError, match=message):
        compare(*off_by(4, 10), ROUNDED)
    with pytest.raises(RolloutError, match="11 of the 1000 tokens"):
        compare(*off_by(11, 1000), ROUNDED)


def test_tokens_beyond_the_tolerance_are_counted_over_the_rows_of_a_step():
    so_far = compare(*off_by(3, 10), ROUNDED)
    assert compare(*off_by(0, 10), ROUNDED, so_far) == Compared(20, 3, 5.0)
    with pytest.raises(RolloutError, match="4 of the 20 tokens"):
        compare(*off_by(1, 10), ROUNDED, so_far)
    assert compare([], torch.zeros(0), torch.zeros(0), ROUNDED, so_far) == so_far


@pytest.mark.parametrize(
    ("dtype", "max_abs", "num_tokens", "most"),
    [
        ("float32", 1e-4, 10**6, 0),
        ("bfloat16", 1.0, 100, 10),
        ("bfloat16", 1.0, 10**5, 100),
    ],
)
def test_a_float32_run_ends_on_the_first_token_and_a_bfloat16_run_on_more_than_one_in_a_thousand(
    dtype, max_abs, num_tokens, most
):
    config = configuration(Path("model"), Path("data"), Path("run"), model__dtype=dtype)
    tolerance = LogprobTolerance.of(config.model.dtype, config.logprob_tolerance)
    assert tolerance.max_abs == max_abs
    assert tolerance.permits(Compared(num_tokens, most))
    assert not tolerance.permits(Compared(num_tokens, most + 1))


def test_in_float32_the_canarys_noise_raises_the_tolerance_of_sampled_tokens():
    exact = LogprobTolerance.of("float32", 1e-4)
    assert exact.raised_by(None) == exact.raised_by(Differences(0.0, 1e-6)) == exact
    assert exact.raised_by(Differences(1e-5, 9e-5)).max_abs == pytest.approx(9e-4)
    rounded = LogprobTolerance.of("bfloat16", 1.0)
    assert rounded.raised_by(Differences(0.1, 0.5)) == rounded


@pytest.mark.parametrize(
    ("change", "compares"),
    [
        ({}, True),
        ({"top_p": 0.9}, False),
        ({"top_k": 5}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"return_logprobs": False}, False),
    ],
)
def test_nothing_is_compared_where_sampling_was_truncated_or_penalised(change, compares):
    plain = DecodeSettings(
        mode=DecodeMode.SAMPLE,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        repetition_penalty=1.0,
        max_new_tokens=8,
        num_beams=1,
        stop_token_ids=(),
        banned_token_ids=(),
        return_logprobs=True,
    )
    assert compares_logprobs(replace(plain, **change)) is compares
