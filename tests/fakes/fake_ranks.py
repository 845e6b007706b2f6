"""Ray actors with the methods of `LearnerActor` and no learner: they fail, wait or die as each
method says. Light to import.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from shared.errors import CollectiveError, ConfigError, RolloutError, WeightSyncError
from shared.rollouts import SyncReport, WeightOffer
from shared.sent_requests import SentRequests

STOPPING = "stopping"
"""As in `learner.actor`, which takes seconds to import."""


class FakeLearner:
    """The methods of `LearnerRank`, its learner and its publisher that misbehave here. What waits
    does so until the rank is let go.
    """

    num_updates = 5

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.learner = self.algorithm = self.publisher = self
        self.told_to_stop = threading.Event()
        self.let_go = threading.Event()
        self.begun = threading.Event()

    def start(self, *arguments: Any) -> int:
        raise ConfigError("model.path: no")

    def begin(self, num: int, *, updates_next: bool) -> int:
        return num

    def requests(self, first: int, stop: int) -> SentRequests:
        """Make the first call's; those of the others not until the rank is let go."""
        if first:
            self.let_go.wait(600)
        return SentRequests(tuple(f"{self._rank}/{index}" for index in range(first, stop)), {})

    def next_requests(self, plan: Any) -> int:
        self.let_go.wait(600)
        return 0

    def held_out_requests(self, step: int) -> int:
        """Return 1 of rank 0, and `step` of rank 1."""
        return step if self._rank else 1

    def accumulate(self, answers: Sequence[Any]) -> None:
        """Rank 1 fails at last, rank 0 notices first."""
        if not self._rank:
            raise CollectiveError("rank 1 left", phase="reduce")
        time.sleep(0.3)
        raise RolloutError("a prompt differs", actor="actor-1", phase="check")

    def score(self, answers: Sequence[Any]) -> Sequence[Any]:
        """Until it is told to stop."""
        self.begun.set()
        self.told_to_stop.wait(600)
        return []

    def finish_step(self) -> None:
        os._exit(1)

    def save(self, folder: Any, run: str, answers: Sequence[Any], *, background: bool) -> None:
        if self._rank:
            self.let_go.wait(600)

    def send(self, offer: WeightOffer) -> None:
        raise WeightSyncError("nobody came", actor="learner", phase="rendezvous")

    def receive_weights(self, offer: WeightOffer) -> SyncReport:
        return SyncReport(offer.version, 10, {"load": 1.0}, 0.0)

    def stop(self) -> None:
        self.told_to_stop.set()

    close = stop


class FakeRank:
    """As `LearnerActor`, over a `FakeLearner`."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = FakeLearner(rank)

    def run(self, task: Callable[..., Any], *arguments: Any) -> Any:
        return task(self._rank, *arguments)

    @ray.method(concurrency_group=STOPPING)
    def run_at_once(self, task: Callable[..., Any]) -> Any:
        return task(self._rank)

    @ray.method(concurrency_group=STOPPING)
    def let_go(self) -> None:
        """End whatever the rank is doing."""
        self._rank.let_go.set()
        self._rank.told_to_stop.set()

    def reset(self) -> None:
        """Prepare for the next test, after whatever the rank is doing."""
        for event in (self._rank.told_to_stop, self._rank.let_go, self._rank.begun):
            event.clear()

    @ray.method(concurrency_group=STOPPING)
    def wait_until_it_scores(self) -> bool:
        return self._rank.begun.wait(240)


def create_fake_rank(rank: int = 0) -> Any:
    return ray.remote(num_cpus=0, concurrency_groups={STOPPING: 1})(FakeRank).remote(rank)
