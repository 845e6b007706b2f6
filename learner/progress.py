"""A step between `next_requests` and `finish_step`: its work, its numbers and where its time went."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from learner.counters import StepTally
from learner.work import StepWork
from shared.config.pipeline import Channel
from shared.reports import RankReport
from shared.schedule import StepPlan
from shared.timeline import Span


@dataclass(slots=True)
class StepInProgress:
    """One rank's part of a step."""

    plan: StepPlan
    work: StepWork
    tally: StepTally
    track: str
    """Of the rank's spans."""
    generate_s: float = 0.0
    learn_s: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def add_generation(self, answers: Sequence[Any]) -> None:
        """Of one round."""
        if answers:
            spans = self.work.generation_spans(answers)
            self.spans += spans
            self.generate_s += max(span.end_s for span in spans) - min(span.start_s for span in spans)

    def mark(self, name: str, started_s: float, **args: int) -> None:
        """This rank's own work, from then until now."""
        span = Span(self.track, name, started_s, time.time(), {"step": self.plan.number, **args})
        self.learn_s += span.duration_s
        self.spans.append(span)

    def report(self, version: int, step_metrics: Mapping[str, float], waits: Sequence[Span], *, denominator: int, num_carried: int) -> RankReport:
        """At the step's end, once. `waits` lie within what was marked."""
        totals = self.tally.totals
        self.tally.finish(denominator)
        totals.add("packing/num_carried", num_carried)
        totals.raise_to("time/learn_s", self.learn_s)
        if waits:
            totals.raise_to("time/reduce_s", sum(wait.duration_s for wait in waits))
        self.spans += [replace(wait, args={"step": self.plan.number}) for wait in waits]
        if self.plan.channel is Channel.B:
            totals.raise_to("time/generate_s", self.generate_s)
        return RankReport(self.plan.step, self.plan.channel, version, totals, step_metrics, tuple(self.spans))
