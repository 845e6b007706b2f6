"""New actors in place of those that have ended or stalled, within a budget (docs/recovery.md)."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from rollout_actors.engine.ray_calls import RayCall, next_ready, result_of
from shared.config.rollout import ActorsSection
from shared.errors import RolloutError, Timeout

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Replacement:
    """One actor that was lost, and how long its place was empty.

    Example: `Replacement("actor-1", "generate on actor-1: its process has ended", 100.0, 131.5)`.
    """

    actor: str
    reason: str
    lost_s: float
    """Unix time at which it was found to be gone."""
    started_s: float
    """Unix time at which the new one had started."""


class RestartBudget:
    """The actors of a run that may still be replaced: `max_restarts` in any `restart_window_s`."""

    def __init__(
        self, section: ActorsSection, *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._section = section
        self._clock_s = clock_s
        self._taken_s = deque[float]()

    @property
    def is_none(self) -> bool:
        return self._section.max_restarts == 0

    def take(self) -> str | None:
        """Take one restart; return what to say where none is left."""
        now = self._clock_s()
        window_s = self._section.restart_window_s
        while self._taken_s and self._taken_s[0] <= now - window_s:
            self._taken_s.popleft()
        if len(self._taken_s) < self._section.max_restarts:
            self._taken_s.append(now)
            return None
        return (
            f"{len(self._taken_s)} actors were replaced in the last {window_s:g} s, as many as"
            " rollout_matching.vllm.actors.max_restarts permits; find out why they end"
        )


@dataclass(slots=True)
class _Starting:
    """A new actor that is being started."""

    actor: Any
    answer: Any
    """Reference to what its `start` returns."""
    deadline: float
    reason: str
    lost_s: float


class Replacements:
    """The actors of one client that are being started in place of others."""

    def __init__(
        self,
        create: Callable[[int], Any],
        names: tuple[str, ...],
        start: Timeout,
        budget: RestartBudget,
    ) -> None:
        """`create(index)` makes the Ray actor that takes this place."""
        self._create = create
        self._names = names
        check = "the engine's log for what it is loading, and the machine's free memory"
        self._call = RayCall("start", start, check, RolloutError)
        self._budget = budget
        self._starting: dict[int, _Starting] = {}
        self.done: list[Replacement] = []
        """Those that are complete and were not yet asked for."""

    def lose(self, index: int, actor: Any, error: Exception) -> None:
        """Kill the actor of this place and start another one. Does nothing where that was done.

        Raises the error, with what is to be said, where the budget is used up.
        """
        if index in self._starting:
            return
        if (refusal := self._budget.take()) is not None:
            error.add_note(refusal)
            _LOGGER.warning("%s; it is not replaced: %s", error, refusal)
            raise error
        name = self._names[index]
        _LOGGER.warning("%s; a new %s is being started in its place", error, name)
        lost_s = time.time()
        ray.kill(actor)
        new = self._create(index)
        deadline = self._call.deadline()
        self._starting[index] = _Starting(
            new, new.start.remote(), deadline, str(error), lost_s
        )

    def join(self) -> dict[int, tuple[Any, int]]:
        """Wait for all that are being started; return actors and their devices, by place.

        One that fails to start is replaced again. Raises RolloutError where the budget is used up.
        """
        joined = {}
        while self._starting:
            waiting = {one.answer: one.deadline for one in self._starting.values()}
            answer = next_ready(waiting)
            if answer is None:
                answer = min(waiting, key=lambda late: waiting[late])
            index = next(place for place, one in self._starting.items() if one.answer == answer)
            one = self._starting.pop(index)
            name = self._names[index]
            try:
                if waiting[answer] <= time.monotonic() and not _is_ready(answer):
                    raise self._call.timeout_error([name])
                devices, _ = result_of(self._call, name, answer)
            except RolloutError as error:
                self.lose(index, one.actor, error)
                continue
            joined[index] = (one.actor, devices)
            self.done.append(Replacement(name, one.reason, one.lost_s, time.time()))
            _LOGGER.warning("%s is back after %.0f s", name, time.time() - one.lost_s)
        return joined

    def close(self) -> None:
        """Kill what is being started."""
        for one in self._starting.values():
            ray.kill(one.actor)


class StallWatch:
    """Watches the tokens of engines that owe answers, for one round."""

    def __init__(self, limit: Timeout, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock_s = clock_s
        self._asked: dict[int, Any] = {}
        self._seen: dict[int, tuple[int, float]] = {}
        """By engine: its tokens, and since when they are as many."""

    @property
    def interval_s(self) -> float:
        """Seconds between two looks."""
        return min(5.0, self._limit.seconds / 4)

    def look(self, engines: dict[int, Any]) -> list[int]:
        """Ask the engines that owe answers, by index; return those that have stalled.

        An engine that answers nothing has stalled too: its process may be stopped.
        """
        now = self._clock_s()
        stalled = []
        for engine, actor in engines.items():
            tokens, since = self._seen.setdefault(engine, (-1, now))
            answer = self._asked.get(engine)
            if answer is None or _is_ready(answer):
                if answer is not None and (count := _tokens(answer)) != tokens:
                    since = now
                    self._seen[engine] = (count, now)
                self._asked[engine] = actor.num_tokens.remote()
            if now - since > self._limit.seconds:
                stalled.append(engine)
        for engine in self._seen.keys() - engines.keys():
            del self._seen[engine]
            self._asked.pop(engine, None)
        return stalled

    def error(self, name: str) -> RolloutError:
        message = (
            f"no token in {self._limit.key} = {self._limit.seconds:g} s, with requests to answer;"
            " check its log, and whether its process or the GPU hangs"
        )
        return RolloutError(message, actor=name, phase="generate")


def _is_ready(answer: Any) -> bool:
    ready, _ = ray.wait([answer], timeout=0)
    return bool(ready)


def _tokens(answer: Any) -> int:
    """Return the answer of `num_tokens`; -1 of an actor that has ended, which its calls tell."""
    try:
        return int(ray.get(answer))
    except ray.exceptions.RayError:
        return -1
