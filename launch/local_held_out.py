"""The held-out samples in this process, as the driver uses them: for a command in which nothing learns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import ray

from learner.heldout import HeldOut
from shared.evaluation import Scene


class LocalHeldOut:
    """Part of what `learner.actor.RemoteLearner` is (`launch.driver.HoldsOut`)."""

    def __init__(self, held_out: HeldOut) -> None:
        self._held_out = held_out

    def held_out_requests(self, step: int) -> list[ray.ObjectRef]:
        return [ray.put(request) for request in self._held_out.requests(step)]

    def score(self, done: Sequence[ray.ObjectRef]) -> list[Scene]:
        # The pool hands out references when the shares are complete, so this waits for a copy at most.
        return self._held_out.score(list(itertools.chain(*ray.get(list(done)))))
