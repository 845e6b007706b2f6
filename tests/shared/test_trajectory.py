"""Training examples as values, and what a group of rewards says (DESIGN 8: `policy_gradient`; issue: the share of groups without signal is logged)."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scene_support import scene

from shared.evaluation import Evaluation, Scene
from shared.rollouts import DecodeMode, DecodeSettings
from shared.trajectory import (
    EnvironmentRequest,
    EnvironmentRollout,
    ExampleCounts,
    ExampleGroup,
    TrainingExample,
    count_signal,
    group_advantages,
    has_signal,
    without_flat_groups,
)

REWARDS = st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=1, max_size=9)
THREE = {"token_ids": [1, 2, 3], "logprobs": [0.0, -0.5, -1.0], "mask": [0, 1, 1], "reward": 1.0}


def test_a_training_example_is_made_of_token_ids_logprobs_mask_and_reward():
    made = TrainingExample(**THREE)
    assert (made.token_ids, made.logprobs, made.mask, made.reward) == ([1, 2, 3], [0.0, -0.5, -1.0], [0, 1, 1], 1.0)
    assert (made.advantage, made.weight_version, made.num_learned) == (None, None, 2)
    assert [field.name for field in dataclasses.fields(made)][:7] == ["token_ids", "logprobs", "mask", "reward", "advantage", "example_id", "weight_version"]


def test_a_training_example_is_frozen_and_travels_between_processes():
    made = TrainingExample(**THREE, advantage=0.5, example_id="a", group_rewards=(1.0, 0.0))
    assert pickle.loads(pickle.dumps(made)) == made
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.reward = 2.0


@pytest.mark.parametrize("short", [{"logprobs": [0.0]}, {"mask": [0, 1]}, {"token_advantages": [1.0]}])
def test_columns_of_another_length_are_a_programmers_error(short):
    with pytest.raises(AssertionError):
        TrainingExample(**THREE | short)


@settings(deadline=None)
@given(REWARDS)
@example([0.1, 0.1, 0.1])
def test_an_advantage_is_the_reward_without_the_groups_mean(rewards):
    np.testing.assert_allclose(group_advantages(rewards), np.array(rewards) - np.mean(rewards), atol=1e-6)


@settings(deadline=None)
@given(REWARDS)
def test_with_the_standard_deviation_advantages_have_mean_0_and_deviation_1(rewards):
    advantages = group_advantages(rewards, divided_by_std=True)
    if np.std(rewards) > 1e-6:
        np.testing.assert_allclose(advantages, (np.array(rewards) - np.mean(rewards)) / np.std(rewards), rtol=1e-4, atol=1e-4)
    assert np.abs(advantages).max() <= len(rewards) ** 0.5 + 1e-6


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(1, 9), st.booleans())
@example(0.1, 3, True)
def test_rewards_that_are_all_equal_have_advantages_of_exactly_0(reward, size, divided_by_std):
    assert not has_signal([reward] * size)
    assert group_advantages([reward] * size, divided_by_std=divided_by_std) == [0.0] * size


def test_two_rollouts_one_right_and_one_wrong():
    assert group_advantages([1.0, 0.0]) == [0.5, -0.5]
    assert group_advantages([1.0, 0.0], divided_by_std=True) == [1.0, -1.0]


def test_groups_whose_rewards_are_all_equal_are_counted():
    assert count_signal([[1.0, 1.0], [0.0, 1.0], [0.3], [0.1, 0.1, 0.2]]) == (4, 2)
    assert count_signal([]) == (0, 0)


def test_groups_whose_rewards_are_all_equal_can_be_dropped_and_what_was_dropped_is_counted():
    flat, telling, unscored = (TrainingExample(**THREE, group_rewards=rewards) for rewards in ((1.0, 1.0), (1.0, 0.0), ()))
    kept, num_dropped = without_flat_groups([flat, telling, unscored, flat])
    assert kept == [telling, unscored]
    assert num_dropped == 2


def test_every_learned_token_has_the_examples_advantage_and_every_other_none():
    assert TrainingExample(**THREE, advantage=-0.5).advantages(divided_by_std=False) == [0.0, -0.5, -0.5]


def test_tokens_of_steps_with_advantages_of_their_own_have_those():
    made = TrainingExample(**THREE, advantage=-0.5, token_advantages=[7.0, 1.0, 2.0], group_rewards=(0.0, 4.0))
    assert made.advantages(divided_by_std=False) == [0.0, 1.0, 2.0]
    assert made.advantages(divided_by_std=True) == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("rewards", [(), (1.0, 1.0)])
def test_an_advantage_is_not_divided_where_the_group_has_no_deviation(rewards):
    assert TrainingExample(**THREE, advantage=-0.5, group_rewards=rewards).advantages(divided_by_std=True) == [0.0, -0.5, -0.5]


def test_an_example_that_was_not_scored_says_so():
    with pytest.raises(ValueError, match="example 7: has no advantage, because its rollouts were not scored"):
        TrainingExample(**THREE, example_id=7).advantages(divided_by_std=False)


ROLLOUT = EnvironmentRollout(
    position=7,
    example=3,
    reward=0.5,
    metrics={"correct": 0.5},
    error=None,
    is_truncated=False,
    num_turns=2,
    num_tokens=4,
    num_splits=0,
    examples=(TrainingExample(**THREE),),
    prompt=[{"role": "user", "content": "2 + 2"}],
    completion=[{"role": "assistant", "content": "4"}],
    actor="environment-0",
    started_s=0.0,
    generate_s=1.0,
)
REQUEST = EnvironmentRequest(
    step=2,
    groups=(ExampleGroup(3, range(8)), ExampleGroup(3, range(8, 16))),
    decode=DecodeSettings(DecodeMode.SAMPLE, 1.0, 1.0, -1, 1.0, 8, 1, (1,), (), True),
    run_seed=17,
)


@pytest.mark.parametrize("value", [REQUEST, ROLLOUT, ExampleCounts(train=200, held_out=50)])
def test_what_learner_and_environments_tell_each_other_is_frozen_and_travels_between_processes(value):
    assert pickle.loads(pickle.dumps(value)) == value
    with pytest.raises(AttributeError):
        setattr(value, "step" if value is REQUEST else "train" if isinstance(value, ExampleCounts) else "reward", 1)


def test_an_example_that_a_step_draws_twice_is_two_groups_of_their_own_positions():
    assert [group.positions for group in REQUEST.groups] == [range(8), range(8, 16)]
    assert not REQUEST.is_held_out


def test_an_evaluation_is_of_scenes_or_of_rollouts():
    """Whoever makes one orders its outcomes by what both have (`launch.driver.evaluate`)."""
    of_scenes: Evaluation[Scene] = Evaluation(1, 1, (scene(4, [], []),), wall_s=1.0)
    of_rollouts: Evaluation[EnvironmentRollout] = Evaluation(1, 1, (ROLLOUT,), wall_s=1.0)
    assert [outcome.position for outcome in (*of_scenes.outcomes, *of_rollouts.outcomes)] == [4, 7]
