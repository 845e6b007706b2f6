"""Training examples as values, and what a group of rewards says (decision 37: `policy_gradient`;
issue: the share of groups without signal is logged).
"""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.rollouts import DecodeMode, DecodeSettings
from shared.trajectory import (
    EnvironmentRequest,
    EnvironmentRollout,
    ExampleCounts,
    ExampleGroup,
    TrainingExample,
    group_advantages,
    has_signal,
)

REWARDS = st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=1, max_size=9)
THREE = {"token_ids": [1, 2, 3], "logprobs": [0.0, -0.5, -1.0], "mask": [0, 1, 1], "reward": 1.0}


def test_a_training_example_is_made_of_token_ids_logprobs_mask_and_reward():
    three = TrainingExample(**THREE)
    assert {name: getattr(three, name) for name in THREE} == THREE
    assert (three.advantage, three.weight_version, three.num_learned) == (None, None, 2)
    names = [field.name for field in dataclasses.fields(three)]
    assert names[:7] == [*THREE, "advantage", "example_id", "weight_version"]


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": [0.0]},
        {"mask": [0, 1]},
        {"token_advantages": [1.0]},
        # An example of several steps says where each of them ends.
        {"steps": (0, 1), "step_ends": ()},
        {"steps": (0, 1), "step_ends": (3,)},
        {"steps": (0, 1), "step_ends": (1, 2)},
    ],
)
def test_columns_of_another_length_are_a_programmers_error(changes):
    with pytest.raises(AssertionError):
        TrainingExample(**THREE | changes)


@pytest.mark.slow
@settings(deadline=None)
@given(REWARDS)
@example([0.1, 0.1, 0.1])
@example([1.0, 0.0])
def test_an_advantage_is_the_reward_without_the_groups_mean(rewards):
    expected = np.array(rewards) - np.mean(rewards)
    np.testing.assert_allclose(group_advantages(rewards), expected, atol=1e-6)


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(1, 9))
@example(0.1, 3)
def test_rewards_that_are_all_equal_have_advantages_of_exactly_0(reward, size):
    assert not has_signal([reward] * size)
    assert group_advantages([reward] * size) == [0.0] * size


def test_what_rounding_leaves_of_equal_rewards_is_no_signal():
    rewards = [0.1 + 0.2, 0.3, 0.3, 0.3]
    assert rewards[0] != rewards[1]
    assert not has_signal(rewards)
    assert group_advantages(rewards) == [0.0] * 4


@pytest.mark.parametrize(
    "rewards", [[1.0, 1.0 + 1e-6], [0.0, 1e-300], [float("nan"), 1.0], [1.0, float("nan")]]
)
def test_rewards_that_differ_or_are_no_number_are_not_taken_for_equal(rewards):
    assert has_signal(rewards)


ROLLOUT = EnvironmentRollout(
    position=7,
    example=3,
    reward=0.5,
    metrics={"correct": 0.5},
    error=None,
    is_truncated=False,
    num_turns=2,
    num_tokens=4,
    num_length_limited=0,
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


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (TrainingExample(**THREE, advantage=0.5, group_rewards=(1.0, 0.0)), "reward"),
        (REQUEST, "step"),
        (ROLLOUT, "reward"),
        (ExampleCounts(train=200, held_out=50), "train"),
    ],
)
def test_what_learner_and_environments_tell_each_other_is_frozen_and_travels_between_processes(
    value, field
):
    assert pickle.loads(pickle.dumps(value)) == value
    with pytest.raises(AttributeError):
        setattr(value, field, 1)
