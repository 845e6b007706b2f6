"""Names, meanings and reductions of training-time numbers (spec: training-time counters)."""

import hashlib
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from shared.config.pipeline import Channel
from shared.grounding.objects import DropReason
from shared.metrics import (
    BY_NAME,
    METRICS,
    REWARD_FAMILY,
    MetricAccumulator,
    RankReport,
    Reduction,
    markdown,
    merge_reports,
    metric_of,
)
from shared.run_files import Span

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
FAMILIES = "loss policy coord_diag rollout reward source augment packing optim sync time"


def test_the_documentation_shows_the_table():
    assert markdown() in DOCS.read_text()


def test_names_are_unique_and_belong_to_a_family():
    assert len(BY_NAME) == len(METRICS)
    assert {name.split("/")[0] for name in BY_NAME} == set(FAMILIES.split())


def test_no_training_time_number_is_an_iou():
    assert [name for name in BY_NAME if "iou" in name.lower()] == []


def test_every_drop_reason_has_a_counter():
    assert all(f"rollout/num_dropped.{reason}" in BY_NAME for reason in DropReason)


def test_ratios_are_of_sums_that_are_in_the_table_or_per_second():
    ratios = [metric for metric in METRICS if metric.reduction is Reduction.RATIO]
    assert ratios
    for metric in ratios:
        assert metric.ratio_of is not None
        above, below = (BY_NAME[name] for name in metric.ratio_of)
        assert above.reduction is Reduction.SUM
        assert below.reduction is Reduction.SUM or below.name.startswith("time/")


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
    """Ratios and means are of all segments, not means of the ranks' own."""
    first = rank([2, 1], [3, 4], [0, 0, 1], 1e-6)
    second = rank([5], [5], [7], 3e-6)
    first.merge([second])
    values = first.as_dict()
    assert values["rollout/num_matched"] == 8
    assert values["rollout/match_rate"] == pytest.approx(8 / 12)
    assert values["packing/learned_age"] == pytest.approx(8 / 4)
    assert values["rollout/logprob_max_abs"] == 3e-6
    assert second.as_dict()["rollout/num_matched"] == 5


def test_the_deviation_of_all_ranks_rewards_is_of_their_union_and_exactly_0_if_all_are_equal():
    first, second = MetricAccumulator(), MetricAccumulator()
    values = [0.1, 0.7, 0.2, 1.3, -2.0]
    for number, value in enumerate(values):
        (first if number < 2 else second).add_value("rollout/reward_std", value)
    first.merge([second])
    mean = sum(values) / 5
    slow = (sum((value - mean) ** 2 for value in values) / 5) ** 0.5
    assert first.as_dict() == {"rollout/reward_std": pytest.approx(slow)}
    equal = MetricAccumulator()
    for _ in range(3):
        equal.add_value("rollout/reward_std", 0.1)
    equal.merge([equal])
    assert equal.as_dict() == {"rollout/reward_std": 0.0}
    with pytest.raises(AssertionError, match="reduced by mean"):
        equal.add_value("rollout/reward", 0.1)


def test_a_ratio_or_mean_over_nothing_is_absent_as_are_families_of_others():
    values = rank([0], [0], [], 0.0).as_dict()
    assert values["rollout/num_matched"] == 0
    assert "rollout/match_rate" not in values
    assert "packing/learned_age" not in values
    assert not any(name.startswith(REWARD_FAMILY) for name in values)
    totals = MetricAccumulator()
    totals.add_mean("reward/correct", 0.0, 0)
    assert totals.as_dict() == {}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rollout/num_typo", "rollout/num_typo is not in the table"),
        ("rollout/logprob_max_abs", "reduced by max"),
        ("reward/correct", "reward/correct is reduced by mean, not sum"),
    ],
)
def test_a_name_outside_the_table_or_of_another_reduction_cannot_be_logged(name, message):
    with pytest.raises(AssertionError, match=message):
        MetricAccumulator().add(name, 1.0)


def rewards(**values):
    """The numbers that a rank has of each reward function: a value per rollout."""
    totals = MetricAccumulator()
    for name, each in values.items():
        totals.add_mean(f"{REWARD_FAMILY}{name}", sum(each), len(each))
    totals.add_mean("rollout/reward", 1.0, 2)
    totals.add("rollout/num_failed", 0)
    return totals


def test_a_reward_functions_numbers_have_its_name_behind_the_familys_in_its_place_of_the_table():
    """An environment chooses the names; those of a group's environments may be on one rank and not
    on another.
    """
    first = rewards(zeal=[0.5], correct=[1.0, 0.0])
    first.merge([rewards(correct=[1.0], num_turns=[2.0, 4.0])])
    values = first.as_dict()
    assert list(values) == [
        "rollout/reward",
        "reward/correct",
        "reward/num_turns",
        "reward/zeal",
        "rollout/num_failed",
    ]
    assert values["reward/correct"] == pytest.approx(2 / 3)
    assert (values["reward/zeal"], values["reward/num_turns"]) == (0.5, 3.0)


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("reward/correct", BY_NAME["reward/<function>"]),
        ("reward/num_tool_calls/search", BY_NAME["reward/<function>"]),
        ("rollout/reward", BY_NAME["rollout/reward"]),
        ("rollout/num_typo", None),
        ("rewards/correct", None),
        ("source/num_samples/coco", BY_NAME["source/num_samples/<source>"]),
        ("source/num_typo/coco", None),
    ],
)
def test_the_table_says_what_a_metric_is_whatever_the_reward_functions_are_called(name, metric):
    assert metric_of(name) == metric
    assert "\n`reward/<function>` | mean | " in markdown()


def rank_report(rank, *, version=4, loss=0.0, staleness=(), slowest=0.0):
    totals = MetricAccumulator()
    totals.add("loss/total", loss)
    for value in staleness:
        totals.add_mean("rollout/staleness", value, 1)
    totals.add_max("time/learn_s", slowest)
    spans = (Span(f"learner-{rank}", "finish step", 0.0, 1.0),)
    return RankReport(3, Channel.B, version, totals, {"optim/grad_norm": 1.5}, spans)


def test_the_reports_of_ranks_add_sums_weigh_means_by_their_counts_and_take_the_slowest():
    first = rank_report(0, loss=0.25, staleness=(1, 1, 0), slowest=2.0)
    second = rank_report(1, loss=0.5, staleness=(0,), slowest=3.0)
    report = merge_reports([pickle.loads(pickle.dumps(first)), second])
    assert (report.step, report.channel, report.weight_version) == (3, Channel.B, 4)
    assert report.metrics == {
        "loss/total": 0.75,
        "rollout/staleness": 0.5,
        "time/learn_s": 3.0,
        "optim/grad_norm": 1.5,
    }
    assert [span.track for span in report.spans] == ["learner-0", "learner-1"]
    assert merge_reports([first]).metrics["loss/total"] == 0.25


def test_digests_of_ranks_are_joined_in_rank_order_and_one_rank_has_its_own():
    first = replace(rank_report(0), digests={"weights": "a", "requests": "b"})
    second = replace(rank_report(1), digests={"weights": "c"})
    both = merge_reports([first, second]).digests
    assert list(both) == ["requests", "weights"]
    assert both["weights"] == hashlib.sha256(b"a c").hexdigest()
    assert both != merge_reports([second, first]).digests
    assert merge_reports([first]).digests == first.digests


def test_ranks_of_other_steps_or_weights_are_a_programmers_error():
    with pytest.raises(AssertionError, match="different steps"):
        merge_reports([rank_report(0), rank_report(1, version=5)])
