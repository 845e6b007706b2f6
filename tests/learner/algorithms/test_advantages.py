"""What each sampled token of a training example is credited with (decision 37:
`policy_gradient`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithms.advantages import (
    NO_CREDIT,
    AdvantageEstimator,
    learned_by_call,
    token_advantages,
)
from learner.algorithms.trajectories import trajectory_target
from learner.targets import Target, TokenRole
from shared.config.pipeline import PolicyGradientConfig
from shared.trajectory import TrainingExample, group_advantages

REWARDS = st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=1, max_size=9)
THREE = {"token_ids": [1, 2, 3], "logprobs": [0.0, -0.5, -1.0], "mask": [0, 1, 1], "reward": 1.0}

PLAIN = AdvantageEstimator(normalize="step", max_new_tokens=20, std_epsilon=None)
TWO_TURNS = TrainingExample(
    token_ids=[10, 11, 12, 13, 14, 15, 16, 17],
    logprobs=[0.0, 0.0, -0.25, -0.5, 0.0, 0.0, -0.75, 0.0],
    mask=[0, 0, 1, 1, 0, 0, 1, 0],
    reward=1.0,
    advantage=0.5,
    example_id=7,
    steps=(0, 1),
    step_ends=(4, 8),
    group_rewards=(1.0, 0.0),
)


def of(example, rule=PLAIN, num_of_rollout=5):
    return trajectory_target(example, rule, num_of_rollout=num_of_rollout)


def test_the_prompt_is_all_before_the_first_sampled_token_and_the_target_all_up_to_the_last():
    prompt_token_ids, target = of(TWO_TURNS)
    assert (prompt_token_ids, target.token_ids) == ((10, 11), (12, 13, 14, 15, 16))
    assert target.sample_id == "7"


def test_every_sampled_token_is_credited_with_its_advantage_and_the_engines_log_probability():
    credit = of(TWO_TURNS).target.credit
    assert credit.positions == (0, 1, 4)
    assert credit.engine_logprobs == (-0.25, -0.5, -0.75)
    assert credit.advantages == (0.5, 0.5, 0.5)


def test_nothing_else_is_supervised():
    target = of(TWO_TURNS).target
    assert set(target.roles.tolist()) == {TokenRole.NEUTRAL}
    assert (target.coord_positions, target.box_slots, target.reading) == ((), (), None)


def test_the_tokens_of_every_turn_are_compared_with_the_engine():
    target = of(TWO_TURNS).target
    assert target.sampled_logprobs == target.credit.engine_logprobs
    assert target.sampled_positions == target.credit.positions
    assert len(target.sampled_logprobs) == 3
    one_turn = of(replace(TWO_TURNS, mask=[0, 0, 1, 1, 0, 0, 0, 0])).target
    assert (one_turn.sampled_logprobs, one_turn.sampled_positions) == ((-0.25, -0.5), (0, 1))
    assert replace(target, sampled_logprobs=()).sampled_positions == (), (
        "of older weights nothing is compared"
    )


@pytest.mark.parametrize(
    ("normalize", "weights"),
    [("step", (1 / 2, 1 / 2, 1)), ("rollout", (1 / 5,) * 3), ("constant", (1 / 20,) * 3)],
)
def test_a_token_counts_for_its_share_of_its_call_or_rollout_or_of_the_longest_response(
    normalize, weights
):
    """The rollout has two sampled tokens more in another example."""
    shared = {"clip_low": 0.2, "clip_high": 0.3, "ratio_cap": 2.0, "advantage_std": False}
    config = PolicyGradientConfig.model_validate(shared | {"normalize": normalize})
    rule = AdvantageEstimator.from_config(config, max_new_tokens=20)
    assert of(TWO_TURNS, rule).target.credit.weights == weights


def test_the_epsilon_of_the_configuration_counts_where_advantages_are_divided_and_only_there():
    shared = {"clip_low": 0.2, "clip_high": 0.3, "ratio_cap": 2.0, "normalize": "step"}
    for changes, divides, epsilon in (
        ({}, True, 1e-4),
        ({"advantage_epsilon": 0.5}, True, 0.5),
        ({"advantage_epsilon": 0.5}, False, None),
    ):
        mapping = shared | changes | {"advantage_std": divides}
        config = PolicyGradientConfig.model_validate(mapping)
        assert AdvantageEstimator.from_config(config, max_new_tokens=20).std_epsilon == epsilon


def test_with_advantage_std_advantages_are_divided_by_the_groups_standard_deviation():
    """Plus the epsilon: the deviation of 1 and 0 is a half."""
    assert of(TWO_TURNS, replace(PLAIN, std_epsilon=0.0)).target.credit.advantages == (1.0,) * 3
    assert of(TWO_TURNS, replace(PLAIN, std_epsilon=0.5)).target.credit.advantages == (0.5,) * 3


def test_an_example_without_a_learned_token_has_no_target():
    assert of(replace(TWO_TURNS, mask=[0] * 8)) is None


def test_a_first_token_to_be_learned_is_refused_because_nothing_predicts_it():
    with pytest.raises(
        ValueError,
        match=(
            r"example 7, rollout 0: its first token is to be learned, .*; make examples with"
            r" mask_prompts=True"
        ),
    ):
        of(replace(TWO_TURNS, mask=[1] * 8))


def test_numbers_that_nothing_can_be_learned_from_are_refused_with_their_example():
    with pytest.raises(
        ValueError,
        match=(
            "example 7, rollout 0: token 2 has the advantage nan; its reward functions must return"
            " finite numbers"
        ),
    ):
        of(replace(TWO_TURNS, advantage=float("nan")))
    with pytest.raises(
        ValueError,
        match="token 6 has the log-probability -inf; the endpoint must return finite ones",
    ):
        of(replace(TWO_TURNS, logprobs=[0.0] * 6 + [float("-inf"), 0.0]))


def test_a_target_that_says_nothing_of_it_has_no_credit():
    assert Target("scene", (1,), np.zeros(1, dtype=np.uint8), (), (), ()).credit is NO_CREDIT
    assert NO_CREDIT.positions == ()


def credited(rewards, advantage, **fields):
    """What one learned token of an example of this group is credited with, the advantage divided by
    the deviation.
    """
    made = TrainingExample(
        [1, 2],
        [0.0, -0.5],
        [0, 1],
        reward=0.0,
        advantage=advantage,
        group_rewards=tuple(rewards),
        **fields,
    )
    return token_advantages(made, std_epsilon=0.0)[1]


@pytest.mark.slow
@settings(deadline=None)
@given(REWARDS)
def test_with_the_standard_deviation_advantages_have_mean_0_and_deviation_1(rewards):
    advantages = np.array([credited(rewards, advantage) for advantage in group_advantages(rewards)])
    if np.std(rewards) > 1e-6 * np.abs(rewards).max():
        np.testing.assert_allclose(
            advantages,
            (np.array(rewards) - np.mean(rewards)) / np.std(rewards),
            rtol=1e-4,
            atol=1e-4,
        )
    assert np.abs(advantages).max() <= len(rewards) ** 0.5 + 1e-6


def test_with_an_epsilon_rewards_that_hardly_differ_are_hardly_told_apart():
    """Divided by the deviation alone, the eighth rollout is as good as a single hit among
    misses."""
    rewards = (1.0,) * 7 + (1.000001,)
    best = 7 / 8 * 1e-6
    made = TrainingExample(
        [1, 2], [0.0, -0.5], [0, 1], reward=1.0, advantage=best, group_rewards=rewards
    )
    assert token_advantages(made, std_epsilon=0.0)[1] == pytest.approx(2.645751, rel=1e-6)
    assert token_advantages(made, std_epsilon=1e-4)[1] == pytest.approx(
        best / (np.std(rewards) + 1e-4)
    )
    assert token_advantages(made, std_epsilon=1e-4)[1] < 0.01
    hit = replace(made, advantage=7 / 8, group_rewards=(0.0,) * 7 + (1.0,))
    assert token_advantages(hit, std_epsilon=1e-4)[1] == pytest.approx(2.645, abs=1e-3)


def test_learned_tokens_are_listed_by_the_step_that_they_are_of():
    made = TrainingExample(
        list(range(6)), [0.0] * 6, [0, 1, 1, 0, 0, 1], 0.0, steps=(0, 2), step_ends=(3, 6)
    )
    assert learned_by_call(made) == [[1, 2], [5]]
    assert learned_by_call(replace(made, steps=(), step_ends=())) == [[1, 2, 5]]


def test_an_advantage_that_a_rubric_gave_itself_is_not_divided():
    assert credited([0.50, 0.52], 1.0) == 1.0
    assert credited([1.0, 0.0], -0.25) == -0.25


def test_every_learned_token_has_the_examples_advantage_and_every_other_none():
    assert token_advantages(TrainingExample(**THREE, advantage=-0.5), std_epsilon=None) == [
        0.0,
        -0.5,
        -0.5,
    ]


def test_tokens_of_steps_with_advantages_of_their_own_have_those():
    made = TrainingExample(
        **THREE, advantage=-0.5, token_advantages=[7.0, 1.0, 2.0], group_rewards=(0.0, 4.0)
    )
    assert token_advantages(made, std_epsilon=None) == [0.0, 1.0, 2.0]
    assert token_advantages(made, std_epsilon=0.0) == [0.0, 1.0, 2.0], (
        "they are in no units of the rewards"
    )


def test_beside_steps_with_advantages_of_their_own_the_groups_is_divided():
    made = TrainingExample(
        **THREE,
        advantage=-2.0,
        token_advantages=[0.0, 0.25, -2.0],
        token_is_relative=[0, 0, 1],
        group_rewards=(0.0, 4.0),
    )
    assert token_advantages(made, std_epsilon=0.0) == [0.0, 0.25, -1.0]
    assert token_advantages(made, std_epsilon=None) == [0.0, 0.25, -2.0]


@pytest.mark.parametrize("rewards", [(), (1.0, 1.0)])
def test_an_advantage_is_not_divided_where_the_group_has_no_deviation(rewards):
    assert token_advantages(
        TrainingExample(**THREE, advantage=-0.5, group_rewards=rewards), std_epsilon=0.0
    ) == [0.0, -0.5, -0.5]


def test_an_example_that_was_not_scored_says_so():
    with pytest.raises(
        ValueError, match="example 7: has no advantage, because its rollouts were not scored"
    ):
        token_advantages(TrainingExample(**THREE, example_id=7), std_epsilon=None)


def test_two_rollouts_one_right_and_one_wrong_are_credited_with_1_and_minus_1():
    assert [credited([1.0, 0.0], advantage) for advantage in (0.5, -0.5)] == [1.0, -1.0]
