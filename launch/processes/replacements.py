"""Replaces actors that ended or stalled, and waits for lost servers.

The number of restarts is limited (docs/how_to/troubleshooting.md).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError

from rollout_actors.engine.ray_calls import RayCall, next_ready, result_of
from shared.config.rollout import ActorsSection
from shared.errors import LostStartError, RolloutError, Timeout, WeightSyncError, late

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

_LOGGER = logging.getLogger(__name__)

LOOK_S = 5.0
"""Longest time in seconds between two checks of the same actor."""
START_CHECK = "the engine's log for what it is loading, and the machine's free memory"
"""What to check if an actor's start is late; the end of the error's message."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """One actor that was lost, and how long its replacement took.

    Example: `Replacement("actor-1", "generate on actor-1: its process has ended", 100.0, 131.5)`.
    """

    actor: str
    reason: str
    lost_s: float
    """Unix time at which the loss was noticed."""
    started_s: float
    """Unix time at which the new actor was ready."""


class RestartBudget:
    """Limits restarts of actors or the job: `max_restarts` in any `restart_window_s` seconds."""

    def __init__(
        self, section: ActorsSection, *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._section = section
        self._clock_s = clock_s
        self._taken_s = deque[float]()

    def take(self) -> bool:
        """Use up one restart; return False if none was left."""
        now_s = self._clock_s()
        while self._taken_s and self._taken_s[0] <= now_s - self._section.restart_window_s:
            self._taken_s.popleft()
        if len(self._taken_s) == self._section.max_restarts:
            return False
        self._taken_s.append(now_s)
        return True

    def refusal(self, what: str) -> str:
        """Return the end of an error message when no restart is left.

        `what` says what follows from that, such as "it is not replaced".
        """
        section = self._section
        return (
            f"{what}: rollout_matching.vllm.actors.max_restarts permits {section.max_restarts}"
            f" in {section.restart_window_s:g} s (restart_window_s); find out from"
            " their logs why processes end"
        )


@dataclass(frozen=True, slots=True)
class _Starting:
    """A new actor that is being started."""

    actor: ActorHandle
    answer: ObjectRef
    """Reference to the result of the actor's `start`."""
    deadline: float
    """Monotonic time at which the start is late."""
    reason: str
    lost_s: float


class Replacements:
    """Starts new rollout or environment actors in place of lost ones, and waits for them.

    If actors are clients of servers that are started elsewhere, a new actor waits for its server.
    Rounds use this object in their thread, and weight syncs in the driver's thread, never at the
    same time. `close` may be called at any time.
    """

    def __init__(
        self,
        create: Callable[[int, int], ActorHandle],
        names: Sequence[str],
        start: Timeout,
        budget: RestartBudget,
        *,
        check: str = START_CHECK,
        servers: Sequence[str] | None = None,
    ) -> None:
        """Store how new actors are created.

        Args:
            create: `create(index, number)` makes a Ray actor in place of actor `index`. `number`
                counts the actors that had this place; the first was number 1.
            check: what to check if a start is late.
            servers: URL of each actor's server, in the order of `names`; None: the actors have no
                servers.
        """
        self._create = create
        self._names = tuple(names)
        self._servers = servers
        self._call = RayCall("start", start, check, RolloutError)
        self._budget = budget
        self._starting: dict[int, _Starting] = {}
        self._numbers = Counter[int]()
        self._done: list[Replacement] = []
        # `close` must not miss an actor that is being created.
        self._lock = threading.Lock()
        self._is_closed = False

    def lose(
        self,
        index: int,
        actor: ActorHandle,
        error: RolloutError | WeightSyncError,
        *,
        before: _Starting | None = None,
    ) -> None:
        """Kill the lost actor `index` and start another, unless one is being started already.

        Args:
            before: the failed attempt to start this actor, if the actor is itself a replacement.

        Raises `error` if the run is ending. Raises it with a remedy if no restart is left, or if a
        server did not come back in time.
        """
        with self._lock:
            if self._is_closed:
                raise error
            if index in self._starting:
                return
            url = None if self._servers is None else self._servers[index]
            if url is not None and before is not None:
                raise _with_remedy(error, _go_on(url)) from error
            if not self._budget.take():
                remedy = self._budget.refusal("it is not replaced")
                if url is not None:
                    remedy = f"{remedy}; {_go_on(url)}"
                raise _with_remedy(error, remedy) from error
            # Ray's error texts have several lines.
            reason = " ".join(str(error).split())
            if before is not None:
                reason = f"{before.reason}; then {reason}"
            what = f"another {self._names[index]} is being started in its place"
            if url is not None:
                what = (
                    f"the run waits for {url}, as at its start"
                    " (rollout_matching.vllm.server.timeout_s); start the server, unless it"
                    " restarts by itself; if it still runs and its engine is stuck, end it first"
                )
            _LOGGER.warning("%s; %s", reason, what)
            lost_s = time.time() if before is None else before.lost_s
            ray.kill(actor)
            self._numbers[index] += 1
            new = self._create(index, 1 + self._numbers[index])
            self._starting[index] = _Starting(
                new, new.start.remote(), self._call.deadline(), reason, lost_s
            )

    def join(self) -> dict[int, tuple[ActorHandle, int]]:
        """Wait for the new actors; return each actor and its number of rollout devices, by index.

        A failed start is repeated. Raises RolloutError if no restart is left.
        """
        joined = {}
        while self._starting:
            index, one = next(iter(self._starting.items()))
            name = self._names[index]
            try:
                if next_ready({one.answer: one.deadline}) is None:
                    raise self._call.timeout_error([name])
                devices, _ = result_of(self._call, name, one.answer)
            except RolloutError as error:
                del self._starting[index]
                self.lose(index, one.actor, error, before=one)
                continue
            del self._starting[index]
            joined[index] = (one.actor, devices)
            done = Replacement(name, one.reason, one.lost_s, time.time())
            self._done.append(done)
            _LOGGER.warning("%s is back after %.0f s", name, done.started_s - done.lost_s)
        return joined

    def pop_done(self) -> list[Replacement]:
        """Return the replacements of lost actors that became ready since the last call."""
        done = self._done
        self._done = []
        return done

    def close(self) -> None:
        """Kill actors that are being started, and start no more. A second call is harmless."""
        with self._lock:
            self._is_closed = True
            for one in self._starting.values():
                ray.kill(one.actor)


def _go_on(url: str) -> str:
    return (
        f"end the server at {url} if it still runs, start it, and continue with `resume=RUN`, or"
        " continue with the others"
        " (`resume=RUN rollout_matching.vllm.server.servers=[...]`)"
    )


def _with_remedy(
    error: RolloutError | WeightSyncError, remedy: str
) -> RolloutError | WeightSyncError:
    """Return the same error with a remedy.

    A LostStartError becomes a plain error, because no more attempts are permitted.
    """
    kind = RolloutError if isinstance(error, LostStartError) else type(error)
    return kind(f"{error.message}; {remedy}", actor=error.actor, phase=error.phase)


def ended_error(name: str, error: RayError) -> RolloutError:
    """Return the error of an actor that failed to answer a check of whether it is alive."""
    translated = RayCall("generate", None, "its log", RolloutError).translate_error(name, error)
    assert isinstance(translated, RolloutError)
    return translated


@dataclass(slots=True)
class _Watched:
    """The state of one actor, as `StallWatch` has last seen it. Times are monotonic."""

    answer: ObjectRef
    """Reference to the result of the latest call of the actor's `progress`."""
    alive_s: float
    """Time at which the actor's last answer was seen."""
    moved_s: float
    """Time at which the actor was last seen to sample a token, or to have no open requests."""
    progress: int | None = None


class StallWatch:
    """Finds rollout actors that have ended, are stopped, or sample no tokens during a round."""

    def __init__(
        self,
        names: Sequence[str],
        limit: Timeout,
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names = tuple(names)
        self._limit = limit
        self._clock_s = clock_s
        self._watched: dict[int, _Watched] = {}
        self._looked_s = clock_s()

    @property
    def interval_s(self) -> float:
        """Seconds between two checks of the actors."""
        return min(LOOK_S, self._limit.seconds / 4)

    def look(self, actors: Sequence[ActorHandle]) -> dict[int, RolloutError]:
        """Check the progress of all actors, without waiting for their answers.

        Return the error of each lost actor, by the actor's index.
        """
        now_s = self._clock_s()
        gap_s = now_s - self._looked_s
        self._looked_s = now_s
        if gap_s > 2 * self.interval_s:
            # This process was stopped, for example. The gap says nothing about the actors.
            for watched in self._watched.values():
                watched.alive_s += gap_s
                watched.moved_s += gap_s
        given_up: dict[int, RolloutError] = {}
        for index, actor in enumerate(actors):
            if index not in self._watched:
                self._watched[index] = _Watched(actor.progress.remote(), now_s, now_s)
                continue
            watched = self._watched[index]
            name = self._names[index]
            ready, _ = ray.wait([watched.answer], timeout=0)
            if ready:
                try:
                    progress = ray.get(watched.answer)
                except RayError as error:
                    given_up[index] = ended_error(name, error)
                    continue
                watched.alive_s = now_s
                if progress is None or progress != watched.progress:
                    watched.moved_s = now_s
                watched.progress = progress
                watched.answer = actor.progress.remote()
            if now_s - watched.alive_s > self._limit.seconds:
                message = late(name, self._limit, "whether its process is stopped or blocked")
            elif now_s - watched.moved_s > self._limit.seconds:
                message = (
                    f"no token in {self._limit.key} = {self._limit.seconds:g} s, with requests to"
                    " answer; check its log, and whether its engine's process or the GPU hangs"
                )
            else:
                continue
            given_up[index] = RolloutError(message, actor=name, phase="generate")
        return given_up
