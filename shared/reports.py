"""What a step says, as a value that travels from the learner to the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.config.pipeline import Channel
from shared.metrics import MetricTotals
from shared.timeline import Span


@dataclass(frozen=True, slots=True)
class RankReport:
    """One learner rank's part of a step."""

    step: int
    channel: Channel
    weight_version: int
    """Of the learner's weights when it took the step."""
    totals: MetricTotals
    """What this rank did, to be merged with the others' before it is read."""
    step_metrics: Mapping[str, float]
    """What is the same on every rank."""
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step of the run: its ranks' reports, merged."""

    step: int
    """From 0."""
    channel: Channel
    weight_version: int
    """Of the learner's weights when it took the step. Its rollouts came from them or, by at most `rollout/staleness_max` updates, from older ones."""
    metrics: Mapping[str, float]
    """`loss/...`, `rollout/...`, `packing/...`, `optim/...`, `time/...`; no IoU, ever."""
    spans: tuple[Span, ...]

    @property
    def number(self) -> int:
        """As `StepPlan.number`: from 1."""
        return self.step + 1


def merge_reports(reports: Sequence[RankReport]) -> StepReport:
    """A step as all its ranks report it, which come in rank order."""
    first = reports[0]
    kinds = {(report.step, report.channel, report.weight_version) for report in reports}
    assert len(kinds) == 1, f"the learner ranks report different steps: {sorted(kinds)}"
    totals = MetricTotals()
    totals.merge(report.totals for report in reports)
    spans = tuple(span for report in reports for span in report.spans)
    return StepReport(first.step, first.channel, first.weight_version, {**totals.as_dict(), **first.step_metrics}, spans)
