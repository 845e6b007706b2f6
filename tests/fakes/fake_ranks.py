"""Ray actors with the methods of `LearnerActor` and no learner: they fail, wait or die as each
method says. Light to import.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray

from shared.errors import CollectiveError, ConfigError, RolloutError, WeightSyncError
from shared.rollouts import SyncReport, WeightOffer
from shared.sent_requests import SentRequests

STOPPING = "stopping"
"""As in `learner.actor`, which takes seconds to import."""


class FakeRank:
    """The methods of `LearnerActor` that misbehave here. What waits does so until the rank is let
    go.
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._told_to_stop = threading.Event()
        self._let_go = threading.Event()
        self._begun = threading.Event()

    @ray.method(concurrency_group=STOPPING)
    def let_go(self) -> None:
        """End whatever the rank is doing."""
        self._let_go.set()
        self._told_to_stop.set()

    def reset(self) -> None:
        """Prepare for the next test, behind whatever the rank is doing."""
        for event in (self._told_to_stop, self._let_go, self._begun):
            event.clear()

    @ray.method(concurrency_group=STOPPING)
    def wait_until_it_scores(self) -> bool:
        return self._begun.wait(60)

    def open_rendezvous(self, config: Any) -> str:
        return "127.0.0.1:1"

    def start(self, *arguments: Any) -> int:
        raise ConfigError("model.path: no")

    def begin(self, method: str, argument: Any) -> int:
        num: int = getattr(self, method)(argument)
        return num

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self, method.removeprefix("publisher."))(*arguments)

    def call_on_rollouts(self, method: str, *shares: Any) -> Any:
        return getattr(self, method)(*shares)

    def accumulate(self, *shares: Any) -> None:
        """Rank 1 fails at last, rank 0 notices first."""
        if not self._rank:
            raise CollectiveError("rank 1 left", phase="reduce")
        time.sleep(0.3)
        raise RolloutError("a prompt differs", actor="actor-1", phase="check")

    def save(self, folder: Any, run: str, background: bool) -> None:
        if self._rank:
            self._let_go.wait(600)

    def held_out_requests(self, step: int) -> int:
        """Return 1 of rank 0, and `step` of rank 1."""
        return step if self._rank else 1

    def next_requests(self, plan: Any) -> int:
        self._let_go.wait(600)
        return 0

    def requests(self, first: int, stop: int) -> SentRequests:
        """Make the first call's; those of the others not until the rank is let go."""
        if first:
            self._let_go.wait(600)
        return SentRequests(tuple(f"{self._rank}/{index}" for index in range(first, stop)), {})

    def finish_step(self) -> None:
        os._exit(1)

    def score(self, *shares: Any) -> Sequence[Any]:
        """Until it is told to stop."""
        self._begun.set()
        self._told_to_stop.wait(600)
        return []

    @ray.method(concurrency_group=STOPPING)
    def stop(self) -> None:
        self._told_to_stop.set()

    @ray.method(concurrency_group=STOPPING)
    def close(self) -> None:
        self._told_to_stop.set()

    def num_updates(self) -> int:
        return 5

    def send(self, offer: WeightOffer) -> None:
        raise WeightSyncError("nobody came", actor="learner", phase="rendezvous")

    def receive_weights(self, offer: WeightOffer) -> SyncReport:
        return SyncReport(offer.version, 10, {"load": 1.0}, 0.0)


def create_fake_rank(rank: int = 0) -> Any:
    return ray.remote(num_cpus=0, concurrency_groups={STOPPING: 1})(FakeRank).remote(rank)
