"""The held-out samples in this process, as the driver uses them: for a command in which nothing learns."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from learner.heldout import HeldOut
from shared.config.timeouts import TimeoutsSection
from shared.errors import ENGINES, RolloutError, late
from shared.evaluation import Scene
from shared.protocols import ByRank
from shared.sent_requests import PictureShelf


class LocalHeldOut:
    """Part of what `learner.remote_learner.RemoteLearner` is (`launch.driver.HasHeldOut`)."""

    def __init__(self, held_out: HeldOut, timeouts: TimeoutsSection, *, fetch: Callable[..., Any] = ray.get) -> None:
        """`fetch(references, timeout=seconds)` waits for rollouts."""
        self._held_out, self._limit, self._fetch = held_out, timeouts.limit("generate_s"), fetch
        self._shelf = PictureShelf(ray.put)

    def held_out_requests(self, step: int) -> ByRank:
        """Of one rank."""
        return [self._shelf.put_each(self._held_out.requests(step))]

    def score(self, done: ByRank) -> list[Scene]:
        """As `HeldOut.score`. RolloutError also where the rollouts do not arrive."""
        (rollouts,) = done
        try:
            # The pool hands out references when the shares are complete, so this waits for a copy at most.
            shares = self._fetch(list(rollouts), timeout=self._limit.seconds)
        except GetTimeoutError as error:
            told = late(f"the {ENGINES}", self._limit, _CHECK)
            raise RolloutError(f"{told}, or raise {self._limit.key}", actor=ENGINES, phase="collect") from error
        except RayError as error:
            raise RolloutError(f"finished rollouts were lost ({error}); check {_CHECK}", actor=ENGINES, phase="collect") from error
        return self._held_out.score(list(itertools.chain(*shares)))


_CHECK = "that every actor's process is alive (their logs), the network between the machines, and the memory of Ray's object store (`ray memory`)"
