"""A step between `next_requests` and `finish_step`: its samples, its numbers and where its time went."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from learner.counters import StepTally
from shared.config.pipeline import Channel
from shared.records import Sample
from shared.reports import RankReport
from shared.rollouts import Rollout
from shared.schedule import StepPlan
from shared.timeline import Span


@dataclass(slots=True)
class StepInProgress:
    """One rank's part of a step. Lists are in position order."""

    plan: StepPlan
    share: range
    """The positions that are this rank's."""
    samples: list[Sample]
    """Of these positions. Their images with data: read once, sent to the engines, encoded here."""
    tally: StepTally
    track: str
    """Of the rank's spans."""
    num_targets: int = 0
    generate_s: float = 0.0
    learn_s: float = 0.0
    spans: list[Span] = field(default_factory=list)

    @property
    def next_position(self) -> int:
        """Of the first sample without a target."""
        return self.share.start + self.num_targets

    @property
    def next_sample(self) -> Sample:
        return self.samples[self.num_targets]

    def sample(self, position: int) -> Sample:
        return self.samples[position - self.share.start]

    def add_generation(self, rollouts: Sequence[Rollout]) -> None:
        """Of one round."""
        if rollouts:
            spans = _generation_spans(rollouts)
            self.spans += spans
            self.generate_s += max(span.end_s for span in spans) - min(span.start_s for span in spans)

    def mark(self, name: str, started_s: float, **args: int) -> None:
        """This rank's own work, from then until now."""
        span = Span(self.track, name, started_s, time.time(), {"step": self.plan.step, **args})
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
        self.spans += [replace(wait, args={"step": self.plan.step}) for wait in waits]
        if self.plan.channel is Channel.B:
            totals.raise_to("time/generate_s", self.generate_s)
        return RankReport(self.plan.step, self.plan.channel, version, totals, step_metrics, tuple(self.spans))


def _generation_spans(rollouts: Sequence[Rollout]) -> list[Span]:
    """One span per engine's share of the round."""
    spans = []
    for engine, share in groupby(rollouts, key=lambda rollout: rollout.actor):
        of_engine = list(share)
        start_s, end_s = min(r.started_s for r in of_engine), max(r.started_s + r.generate_s for r in of_engine)
        tokens = sum(len(r.response_token_ids) for r in of_engine)
        place = {"step": of_engine[0].step, "first_position": of_engine[0].position, "last_position": of_engine[-1].position}
        spans.append(Span(engine, "generate", start_s, end_s, {**place, "tokens": tokens}))
    return spans
