"""What each sampled token of a training example is credited with (decision 37:
`policy_gradient`)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from learner.algorithms.advantages import (
    AdvantageEstimator,
    token_advantages,
)
from learner.algorithms.trajectories import trajectory_target
from shared.config.pipeline import PolicyGradientConfig
from shared.trajectory import TrainingExample

OBJECTIVE = {"clip_low": 0.2, "clip_high": 0.3, "ratio_cap": 2.0}


def rule_of(**changes):
    plain = OBJECTIVE | {"normalize": "step", "advantage_std": False}
    return AdvantageEstimator(PolicyGradientConfig(**plain | changes), max_new_tokens=20)


PLAIN = rule_of()
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


def test_a_target_goes_from_the_first_sampled_token_to_the_last_and_learns_and_compares_those_alone():
    prompt_token_ids, target = of(TWO_TURNS)
    assert (prompt_token_ids, target.token_ids) == ((10, 11), (12, 13, 14, 15, 16))
    assert target.sample_id == "7"
    assert target.credit.positions == target.compared_positions == (0, 1, 4)
    assert target.credit.engine_logprobs == target.compared_logprobs == (-0.25, -0.5, -0.75)
    assert target.credit.advantages == (0.5, 0.5, 0.5)
    one_turn = of(replace(TWO_TURNS, mask=[0, 0, 1, 1, 0, 0, 0, 0]))[1]
    assert (one_turn.compared_logprobs, one_turn.compared_positions) == ((-0.25, -0.5), (0, 1))
    of_older_weights = replace(target, compared_logprobs=())
    assert of_older_weights.compared_positions == (), "nothing is compared"


@pytest.mark.parametrize(
    ("normalize", "weights"),
    [
        ("step", (1 / 2, 1 / 2, 1)),
        ("rollout", (1 / 5,) * 3),
        ("constant", (1 / 20,) * 3),
        ("batch", (1.0,) * 3),
    ],
)
def test_a_token_counts_for_its_share_of_its_call_or_rollout_or_of_the_longest_response(
    normalize, weights
):
    """The rollout has two sampled tokens more in another example."""
    credit = of(TWO_TURNS, rule_of(normalize=normalize))[1].credit
    assert (credit.weights, credit.calls) == (weights, (0, 0, 1))


def test_with_advantage_std_advantages_are_divided_by_the_groups_standard_deviation():
    """Of a sample, n - 1, plus the epsilon: that of 1 and 0 is the root of a half."""
    for changes, divisor in (
        ({"advantage_std": True, "advantage_epsilon": 0.0}, math.sqrt(0.5)),
        ({"advantage_std": True}, math.sqrt(0.5) + 1e-4),
        ({"advantage_std": True, "advantage_epsilon": 0.5}, math.sqrt(0.5) + 0.5),
        ({"advantage_epsilon": 0.5}, 1.0),
    ):
        credit = of(TWO_TURNS, rule_of(**changes))[1].credit
        assert credit.advantages == pytest.approx((0.5 / divisor,) * 3)


@pytest.mark.parametrize("rewards", [(1.0, 0.0), (0.25, 1.0, 0.0, 0.5), (2.0, 2.0, 2.0), (1.0,)])
def test_leave_one_out_compares_a_reward_with_the_mean_of_the_groups_others(rewards):
    """RLOO (Ahmadian et al. 2024): `r_i - mean of r_j, j != i`; a rubric's own stays."""
    rule = rule_of(advantage_baseline="leave_one_out")
    for index, reward in enumerate(rewards):
        others = [*rewards[:index], *rewards[index + 1 :]]
        expected = reward - sum(others) / len(others) if others else 0.0
        example = replace(TWO_TURNS, reward=reward, group_rewards=rewards)
        assert of(example, rule)[1].credit.advantages == pytest.approx((expected,) * 3)
    own = replace(
        TWO_TURNS, advantage=7.0, token_is_relative=[0] * 8, reward=2.0, group_rewards=rewards
    )
    assert of(own, rule)[1].credit.advantages == (7.0,) * 3


def test_an_example_without_a_learned_token_has_no_target():
    assert of(replace(TWO_TURNS, mask=[0] * 8)) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mask": [1] * 8},
            "its first token is to be learned, .*; make examples with mask_prompts",
        ),
        ({"reward": float("nan")}, "token 2 has the advantage nan; reward functions must"),
        (
            {"logprobs": [0.0] * 6 + [float("-inf"), 0.0]},
            "token 6 has the log-probability -inf; the endpoint must return finite ones",
        ),
    ],
)
def test_what_nothing_can_be_learned_from_is_refused_with_its_example(changes, message):
    with pytest.raises(ValueError, match=f"example 7, rollout 0: {message}"):
        of(replace(TWO_TURNS, **changes))


ROOT = math.sqrt(0.5)
"""The advantage of one of two rollouts over their deviation."""
GROUP = {"reward": 0.0, "group_rewards": (0.0, 4.0)}
OWN = GROUP | {"advantage": 9.0, "token_advantages": [7.0, 0.25, 9.0]}


@pytest.mark.parametrize(
    ("fields", "std_epsilon", "expected"),
    [
        pytest.param({"reward": 1.0, "group_rewards": (1.0, 1.0)}, 0.0, [0, 0, 0], id="equal"),
        pytest.param(GROUP, None, [0, -2.0, -2.0], id="the group's"),
        pytest.param(GROUP, 0.0, [0, -ROOT, -ROOT], id="the group's, divided"),
        pytest.param(
            GROUP | {"advantage": -2.0, "token_is_relative": [0, 0, 0]},
            0.0,
            [0, -2.0, -2.0],
            id="its own, although it is the group's number",
        ),
        pytest.param(OWN | {"token_is_relative": [0, 0, 0]}, 0.0, [0, 0.25, 9.0], id="per call"),
        pytest.param(
            OWN | {"token_is_relative": [0, 0, 1]}, 0.0, [0, 0.25, -ROOT], id="beside own"
        ),
        pytest.param(OWN | {"token_is_relative": [0, 0, 1]}, None, [0, 0.25, -2.0], id="undivided"),
    ],
)
def test_only_an_advantage_that_is_the_groups_is_divided(fields, std_epsilon, expected):
    example = TrainingExample([1, 2, 3], [0.0, -0.5, -1.0], [0, 1, 1], **fields)
    assert token_advantages(example, std_epsilon=std_epsilon) == pytest.approx(expected)
