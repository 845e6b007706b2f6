"""Names, meanings and reductions of training-time numbers (spec: training-time counters)."""

from pathlib import Path

import pytest

from shared.grounding.objects import DropReason
from shared.metrics import (
    BY_NAME,
    METRICS,
    REWARD_FAMILY,
    MetricAccumulator,
    Reduction,
    markdown,
    metric_of,
)

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_documentation_shows_the_table():
    assert markdown() in DOCS.read_text()


def test_names_are_unique_and_belong_to_a_family():
    assert len(BY_NAME) == len(METRICS)
    assert {name.split("/")[0] for name in BY_NAME} == {
        "loss",
        "policy",
        "coord_diag",
        "rollout",
        "reward",
        "packing",
        "optim",
        "sync",
        "time",
    }


def test_no_training_time_number_is_an_iou():
    assert [name for name in BY_NAME if "iou" in name.lower()] == []


def test_every_drop_reason_has_a_counter():
    assert all(f"rollout/num_dropped.{reason}" in BY_NAME for reason in DropReason)


def test_ratios_are_of_sums_that_are_in_the_table():
    ratios = [metric for metric in METRICS if metric.reduction is Reduction.RATIO]
    assert ratios
    for metric in ratios:
        assert metric.ratio_of is not None
        assert all(BY_NAME[name].reduction is Reduction.SUM for name in metric.ratio_of)


def rank(matched, ground_truth, ages, largest):
    totals = MetricAccumulator()
    for value in matched:
        totals.add("rollout/num_matched", value)
    for value in ground_truth:
        totals.add("rollout/num_ground_truth", value)
    totals.add_mean("packing/learned_age", sum(ages), len(ages))
    totals.add_max("rollout/logprob_max_abs", largest)
    return totals


def test_rows_and_ranks_of_different_sizes_reduce_to_the_numbers_of_their_union():
    first, second = rank([2, 1], [3, 4], [0, 0, 1], 1e-6), rank([5], [5], [7], 3e-6)
    first.merge([second])
    values = first.as_dict()
    assert values["rollout/num_matched"] == 8
    assert values["rollout/match_rate"] == pytest.approx(8 / 12), (
        "a ratio of sums, not a mean of the ranks' ratios"
    )
    assert values["packing/learned_age"] == pytest.approx(8 / 4), (
        "over all segments, not a mean of the ranks' means"
    )
    assert values["rollout/logprob_max_abs"] == 3e-6


def test_merging_leaves_the_other_ranks_numbers_alone():
    first, second = rank([1], [1], [1], 0.0), rank([2], [2], [2], 0.0)
    first.merge([second])
    assert second.as_dict()["rollout/num_matched"] == 2


def test_a_ratio_or_mean_over_nothing_is_absent():
    values = rank([0], [0], [], 0.0).as_dict()
    assert values["rollout/num_matched"] == 0
    assert "rollout/match_rate" not in values
    assert "packing/learned_age" not in values


def test_a_name_outside_the_table_or_of_another_reduction_cannot_be_logged():
    with pytest.raises(AssertionError, match="rollout/num_typo is not in the table"):
        MetricAccumulator().add("rollout/num_typo", 1)
    with pytest.raises(AssertionError, match="reduced by max"):
        MetricAccumulator().add("rollout/logprob_max_abs", 1)


def rewards(**values):
    """What a rank has of each reward function: a value per rollout."""
    totals = MetricAccumulator()
    for name, each in values.items():
        totals.add_mean(f"{REWARD_FAMILY}{name}", sum(each), len(each))
    totals.add_mean("rollout/reward", 1.0, 2)
    totals.add("rollout/num_failed", 0)
    return totals


def test_a_reward_functions_numbers_have_its_name_behind_the_familys():
    """An environment chooses the names; those of a group's environments may be on one rank and not
    on another.
    """
    first, second = (
        rewards(correct=[1.0, 0.0], format_reward=[0.5]),
        rewards(correct=[1.0], num_turns=[2.0, 4.0]),
    )
    first.merge([second])
    values = first.as_dict()
    assert values["reward/correct"] == pytest.approx(2 / 3), (
        "over all rollouts, not a mean of the ranks' means"
    )
    assert (values["reward/format_reward"], values["reward/num_turns"]) == (0.5, 3.0)


def test_the_family_stands_in_its_place_of_the_table_by_name():
    totals = rewards(zeal=[1.0], correct=[1.0], format_reward=[1.0])
    assert list(totals.as_dict()) == [
        "rollout/reward",
        "reward/correct",
        "reward/format_reward",
        "reward/zeal",
        "rollout/num_failed",
    ]


def test_a_run_without_environments_has_no_number_of_the_family():
    assert not any(name.startswith(REWARD_FAMILY) for name in rank([1], [1], [1], 0.0).as_dict())


def test_the_table_says_what_a_metric_is_whatever_the_reward_functions_are_called():
    assert (
        metric_of("reward/correct")
        == metric_of("reward/num_tool_calls/search")
        == BY_NAME["reward/<function>"]
    )
    assert metric_of("rollout/reward") == BY_NAME["rollout/reward"]
    assert metric_of("rollout/num_typo") is None
    assert metric_of("rewards/correct") is None
    assert "| `reward/<function>` | mean | " in markdown()


def test_a_reward_function_gives_a_mean_and_nothing_else():
    with pytest.raises(AssertionError, match="reward/correct is reduced by mean, not sum"):
        MetricAccumulator().add("reward/correct", 1.0)


def test_a_function_of_no_rollout_is_absent():
    totals = MetricAccumulator()
    totals.add_mean("reward/correct", 0.0, 0)
    assert totals.as_dict() == {}
