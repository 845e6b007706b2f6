"""The real learner in the test's own process, as the driver uses it, and a driver run over real engines."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from launch.driver import Queue, train
from launch.runtime.rollout_client import ActorPool, EnvironmentPool
from launch.runtime.telemetry import StepRecord
from learner.learner import Learner
from learner.model.ranks import LearnerPlace, ReceiverGroup
from shared.config import RunConfig
from shared.grounding.evaluation import Evaluation
from shared.metrics import StepReport, merge_reports
from shared.protocols import ByRank
from shared.rollouts import SyncReport, WeightOffer
from shared.run_files import Span
from shared.schedule import RunSchedule, StepPlan
from shared.sent_requests import PictureShelf
from shared.trajectory import ExampleCounts
from shared.weight_sync.differences import Differences
from shared.weight_sync.phases import SendReport
from shared.weight_sync.transports import Transport


class LocalLearner:
    """What `launch.runtime.learner_client.RemoteLearner` of one rank is, without a process of its own and without an adapter. Remembers every rollout."""

    offers_adapter = falls_back = False

    def __init__(self, config: RunConfig, *, receiver_ranks: int, examples: ExampleCounts | None = None) -> None:
        self.learner = Learner(config, LearnerPlace(Transport.GLOO, (ReceiverGroup(receiver_ranks),)), examples=examples)
        self.rollouts: list[Any] = []
        self.sent_s: list[float] = []
        """When each sync's weights were out, Unix time."""
        self._threads = ThreadPoolExecutor(1)

    def next_requests(self, plan: StepPlan) -> ByRank:
        return _put(self.learner.next_requests(plan))

    def accumulate(self, done: ByRank) -> None:
        rollouts = _get(done)
        self.rollouts += rollouts
        self.learner.accumulate(rollouts)

    def finish_step(self) -> StepReport:
        return merge_reports([self.learner.finish_step()])

    def held_out_requests(self, step: int) -> ByRank:
        return _put(self.learner.held_out_requests(step))

    def score(self, done: ByRank) -> Any:
        return self.learner.score(_get(done))

    def offer_weights(self) -> WeightOffer:
        offer = self.learner.publisher.offer()
        assert offer is not None, "it is the only rank"
        return offer

    def send_weights(self, offer: WeightOffer) -> Future[SendReport]:
        return self._threads.submit(self._send, offer)

    def sync_done(self, noise: Differences | None) -> None:
        self.learner.publisher.done(noise)

    def fall_back_to_full(self) -> None:
        raise AssertionError("nothing but full weights is offered")

    def _send(self, offer: WeightOffer) -> SendReport:
        report = self.learner.publisher.send(offer)
        self.sent_s.append(time.time())
        return report

    def close(self) -> None:
        self.learner.close()
        self._threads.shutdown()


class Reports:
    """Telemetry that only remembers."""

    def __init__(self) -> None:
        self.steps: list[StepReport] = []
        self.syncs: list[SyncReport] = []
        self.evaluations: list[Evaluation] = []

    def sync(self, report: SyncReport) -> None:
        self.syncs.append(report)

    def evaluation(self, report: Evaluation) -> float:
        self.evaluations.append(report)
        return 0.0

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[StepRecord]:
        record = StepRecord(plan)
        yield record
        assert record.report is not None
        self.steps.append(record.report)
        if record.sync is not None:
            self.syncs.append(record.sync)

    @property
    def losses(self) -> list[float]:
        return [report.metrics["loss/total"] for report in self.steps]

    @property
    def spans(self) -> list[Span]:
        return [span for report in self.steps for span in report.spans]


@dataclass(frozen=True)
class Job:
    """One run of the page: what was reported, every rollout, and when each sync's weights were out."""

    reports: Reports
    rollouts: list[Any]
    """Or of an environment, its answers."""
    sent_s: list[float]


class NoCheckpoints:
    """Whoever keeps checkpoints, where none is kept."""

    def after_step(self, num_steps: int) -> None:
        pass

    def after_report(self, num_steps: int, score: float) -> None:
        pass

    def at_end(self, num_steps: int) -> None:
        pass


def run_job(config: RunConfig, pool: ActorPool | EnvironmentPool, num_actors: int, queue: Queue, examples: ExampleCounts | None = None) -> Job:
    """The whole page over these actors; `examples` are those of the environment, where there is one."""
    learner, reports = LocalLearner(config, receiver_ranks=num_actors, examples=examples), Reports()
    try:
        train(learner, pool, RunSchedule(config), queue, reports, NoCheckpoints())
    finally:
        learner.close()
    return Job(reports, learner.rollouts, learner.sent_s)


def _put(requests: Sequence[Any]) -> ByRank:
    return [PictureShelf(ray.put).put_each(requests)]


def _get(done: ByRank) -> list[Any]:
    (shares,) = done
    return list(itertools.chain(*ray.get(list(shares))))
