"""What each sampled token of a training example is credited with (decision 37:
`policy_gradient`)."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest

from learner.algorithms.advantages import (
    AdvantageEstimator,
    find_baseline,
    token_advantages,
)
from learner.algorithms.trajectories import trajectory_target
from shared.config.pipeline import PolicyGradientConfig
from shared.errors import ConfigError
from shared.trajectory import TrainingExample

OBJECTIVE = {"clip_low": 0.2, "clip_high": 0.3, "ratio_cap": 2.0}


def rule_of(**changes):
    plain = OBJECTIVE | {"normalize": "step", "advantage_std": False}
    return AdvantageEstimator(PolicyGradientConfig(**plain | changes), 20, path="at")


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


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes the module `own_baselines`, and returns a name in it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_baselines", raising=False)

    def write(code):
        (tmp_path / "own_baselines.py").write_text(code)
        return "own_baselines:of"

    yield write
    sys.modules.pop("own_baselines", None)


def test_a_function_of_ones_own_decides_the_advantage_before_it_is_divided(own):
    """It gets the reward and the group's rewards in order, and no group of equal rewards."""
    name = own("def of(reward, rewards):\n    return 10 * reward + rewards[0] - rewards[-1] / 4")
    example = replace(TWO_TURNS, reward=0.5, group_rewards=(0.0, 0.5, 2.0))
    plain = rule_of(advantage_baseline=name)
    assert of(example, plain)[1].credit.advantages == (4.5,) * 3
    divided = rule_of(advantage_baseline=name, advantage_std=True, advantage_epsilon=0.0)
    deviation = math.sqrt(((2.5 / 3) ** 2 + (1 / 3) ** 2 + (3.5 / 3) ** 2) / 2)
    assert of(example, divided)[1].credit.advantages == pytest.approx((4.5 / deviation,) * 3)
    equal = replace(example, group_rewards=(0.5, 0.5, 0.5))
    assert of(equal, plain)[1].credit.advantages == (0.0,) * 3


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("", "own_baselines has no of"),
        ("of = 3", "own_baselines:of is not a function"),
        ("def of(rewards): return 0.0", "too many positional arguments"),
        ("def of(reward, rewards, tau): return 0.0", "missing a required argument: 'tau'"),
    ],
)
def test_a_baseline_of_the_wrong_form_is_refused_before_the_start(own, code, cause):
    with pytest.raises(ConfigError) as error:
        find_baseline(own(code), "a.advantage_baseline")
    (line,) = error.value.problems
    assert line.startswith("a.advantage_baseline: ")
    assert cause in line


@pytest.mark.parametrize("result", ["float('nan')", "float('inf')", "None", "[0.5]"])
def test_a_result_that_is_no_finite_number_names_the_function_and_what_it_got(own, result):
    rule = rule_of(advantage_baseline=own(f"def of(reward, rewards): return {result}"))
    with pytest.raises(ConfigError) as error:
        of(TWO_TURNS, rule)
    value = result.removeprefix("float('").removesuffix("')")
    (line,) = error.value.problems
    assert line.startswith(f"at.advantage_baseline: own_baselines:of returned {value} for")
    assert "1.0" in line
    assert "[1.0, 0.0]" in line


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
