"""Does the engine compute what the learner computes? The first difference ends the run, with the
sample's id (issue 2; decision 38).
"""

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

NOTHING = torch.zeros(0)


def rollout(sample_id="scene", prompt=(1, 2, 3)):
    return make_rollout(
        (7, 8),
        sample_id=sample_id,
        prompt_token_ids=prompt,
        logprobs=(-0.1, -0.2),
        actor="rollout-actor-1",
    )


def prompt(*token_ids):
    return EncodedPrompt(token_ids, token_ids, NOTHING, NOTHING, NOTHING)


def segment(sample_id, *logprobs):
    ids = tuple(range(10, 10 + len(logprobs) + 1))
    return Segment(
        0,
        prompt(1),
        Target(
            sample_id,
            ids,
            np.full(len(ids), TokenRole.NEUTRAL, dtype=np.uint8),
            (),
            (),
            (),
            sampled_logprobs=logprobs,
        ),
        actor="rollout-actor-1",
    )


def sampling(sample_id="scene", version=0):
    return Sampling(sample_id, "rollout-actor-1", version)


def test_equal_prompts_pass():
    check_prompt(rollout(), prompt(1, 2, 3))


@pytest.mark.parametrize(
    ("engine", "learner", "index"),
    [((1, 2, 9), (1, 2, 3), 2), ((1, 2), (1, 2, 3), 2), ((1, 2, 3, 3), (1, 2, 3), 3)],
)
def test_the_first_differing_prompt_token_is_shown_with_the_samples_id(engine, learner, index):
    with pytest.raises(
        RolloutError,
        match=rf"check on rollout-actor-1: sample scene: the prompts differ first at token {index}",
    ):
        check_prompt(rollout(prompt=engine), prompt(*learner))


def test_a_rollout_of_other_weights_ends_the_run():
    check_weight_versions([], 4, max_staleness=0)
    check_weight_versions([sampling(version=4), sampling(version=4)], 4, max_staleness=0)
    with pytest.raises(
        RolloutError,
        match="generated with weight version 4, the learner holds 5; a sync was skipped or lost",
    ):
        check_weight_versions([sampling(version=4)], 5, max_staleness=0)


def test_a_rollout_may_be_one_version_old_where_the_configuration_allows_it_and_never_newer():
    check_weight_versions([sampling(version=4)], 5, max_staleness=1)
    for version in (3, 6):
        with pytest.raises(
            RolloutError,
            match=(
                f"weight version {version}, the learner holds 5, and rollout_matching.max_staleness"
                " is 1"
            ),
        ):
            check_weight_versions([sampling(version=version)], 5, max_staleness=1)


def test_a_round_is_of_one_weight_version():
    with pytest.raises(
        RolloutError,
        match=(
            r"sample late: .* version 4, and sample scene of the same round with 5 \(on"
            r" rollout-actor-1\); an engine missed"
        ),
    ):
        check_weight_versions(
            [sampling(version=5), sampling("late", version=4)], 5, max_staleness=1
        )


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
    assert compared.num_tokens == 5
    assert compared.num_outliers == 0
    assert compared.max_abs == pytest.approx(5e-5, rel=1e-2)
    learner = engine.clone()
    learner[3] -= 0.01
    with pytest.raises(
        RolloutError,
        match=(
            r"sample second: response token 1 \(id 11\) has log-probability -0.800000 in the engine"
            r" and -0.810000 in the learner; 1 of the 5"
        ),
    ):
        compare(segments, learner, engine)


def test_a_log_probability_that_is_not_a_number_is_a_difference():
    for tolerance in (EXACT, ROUNDED):
        with pytest.raises(RolloutError, match="sample first: response token 1"):
            compare(
                [segment("first", -0.5, -0.5)],
                torch.tensor([-0.5, float("nan")]),
                torch.tensor([-0.5, -0.5]),
                tolerance,
            )


def test_a_bfloat16_run_ends_on_the_share_of_tokens_beyond_the_tolerance_and_not_on_one():
    assert compare(*off_by(1, 10), ROUNDED) == Compared(10, 1, 5.0)
    assert compare(*off_by(3, 10), ROUNDED).num_outliers == 3, (
        "so many say nothing, whatever their share"
    )
    assert compare(*off_by(10, 1000), ROUNDED).num_outliers == 10
    with pytest.raises(
        RolloutError,
        match=(
            r"4 of the 10 tokens of this step so far differ by more than 1"
            r" \(rollout_matching\.logprob_tolerance\), and at most 0\.01"
        ),
    ):
        compare(*off_by(4, 10), ROUNDED)
    with pytest.raises(RolloutError, match="11 of the 1000 tokens"):
        compare(*off_by(11, 1000), ROUNDED)


def test_tokens_beyond_the_tolerance_are_counted_over_the_rows_of_a_step():
    so_far = compare(*off_by(3, 10), ROUNDED)
    assert compare(*off_by(0, 10), ROUNDED, so_far) == Compared(20, 3, 5.0)
    with pytest.raises(RolloutError, match="4 of the 20 tokens of this step so far"):
        compare(*off_by(1, 10), ROUNDED, so_far)
    assert compare([], torch.zeros(0), torch.zeros(0), ROUNDED, so_far) == so_far


def test_a_float32_run_ends_on_the_first_token_and_a_bfloat16_run_on_more_than_one_in_a_thousand(
    tmp_path, demo_checkpoint, demo_data
):
    strict = LogprobTolerance.from_config(configuration(demo_checkpoint, demo_data, tmp_path))
    assert (
        strict.max_abs,
        strict.permits(Compared(10**6, 0)),
        strict.permits(Compared(10**6, 1)),
    ) == (1e-4, True, False)
    rounded = LogprobTolerance.from_config(
        configuration(demo_checkpoint, demo_data, tmp_path, model__dtype="bfloat16")
    )
    assert rounded.max_abs == 1.0
    assert (rounded.permits(Compared(100, 10)), rounded.permits(Compared(100, 11))) == (True, False)
    assert (rounded.permits(Compared(10**5, 100)), rounded.permits(Compared(10**5, 101))) == (
        True,
        False,
    )


def test_nothing_is_compared_where_sampling_was_truncated_or_penalised():
    plain = {
        "mode": DecodeMode.SAMPLE,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "repetition_penalty": 1.0,
    }
    rest = {
        "max_new_tokens": 8,
        "num_beams": 1,
        "stop_token_ids": (),
        "banned_token_ids": (),
        "return_logprobs": True,
    }
    assert compares_logprobs(DecodeSettings(**plain, **rest))
    for change in ({"top_p": 0.9}, {"top_k": 5}, {"repetition_penalty": 1.1}):
        assert not compares_logprobs(DecodeSettings(**(plain | change), **rest))
