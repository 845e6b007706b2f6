"""The reports of a step's ranks become one (shared/metrics.py)."""

import pickle

import pytest

from shared.config.pipeline import Channel
from shared.metrics import MetricAccumulator, RankReport, merge_reports
from shared.run_files import Span


def rank_report(rank, *, version=4, loss=0.0, staleness=(), slowest=0.0):
    totals = MetricAccumulator()
    totals.add("loss/total", loss)
    for value in staleness:
        totals.add_mean("rollout/staleness", value, 1)
    totals.add_max("time/learn_s", slowest)
    return RankReport(
        3,
        Channel.B,
        version,
        totals,
        {"optim/grad_norm": 1.5},
        (Span(f"learner-{rank}", "finish step", 0.0, 1.0),),
    )


def test_sums_add_means_weigh_by_their_counts_and_the_slowest_counts():
    report = merge_reports(
        [
            rank_report(0, loss=0.25, staleness=(1, 1, 0), slowest=2.0),
            rank_report(1, loss=0.5, staleness=(0,), slowest=3.0),
        ]
    )
    assert (report.step, report.channel, report.weight_version) == (3, Channel.B, 4)
    assert report.metrics == {
        "loss/total": 0.75,
        "rollout/staleness": 0.5,
        "time/learn_s": 3.0,
        "optim/grad_norm": 1.5,
    }
    assert [span.track for span in report.spans] == ["learner-0", "learner-1"]


def test_one_ranks_report_is_the_steps_and_travels_between_processes():
    assert (
        merge_reports([pickle.loads(pickle.dumps(rank_report(0, loss=0.25)))]).metrics["loss/total"]
        == 0.25
    )


def test_ranks_of_other_steps_or_weights_are_a_programmers_error():
    with pytest.raises(AssertionError, match="different steps"):
        merge_reports([rank_report(0), rank_report(1, version=5)])
