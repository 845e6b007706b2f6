"""How rollouts begin: with which fields, and where their states are noted, so that one that fails leaves what it had, and each is cleaned up after."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rollout_actors.environments.client import client_of
from rollout_actors.environments.types import State


class Begun:
    """What is known of a rollout while an environment makes it."""

    def __init__(self, environment: object, row: Mapping[str, Any]) -> None:
        self.environment = environment
        self.state: State | None = None
        """The first one noted, or what the environment has made of it; one in its place, where a call comes before."""
        self._row = row
        self._open: list[State] = []
        self._cleaned: list[State] = []
        self._clients: list[tuple[Any, Any]] = []

    @property
    def noted(self) -> State | None:
        return self.state if self._open or self._cleaned else None

    def note(self, state: State) -> None:
        """One more state: an environment's own `rollout` may make several."""
        if self.noted is None:
            self.state = state
        self._open.append(state)

    def note_successor(self, state: State, former: State | None = None) -> None:
        """What the environment has made of a former one, or of the last; nothing, where it is the same object, or another that was noted."""
        if _place(self._open, state) is not None or _place(self._cleaned, state) is not None:
            return
        if not self._open:
            self.note(state)
            return
        place = len(self._open) - 1 if former is None else _place(self._open, former)
        assert place is not None, "it is noted"
        if self.state is self._open[place]:
            self.state = state
        self._open[place] = state

    def note_cleaned(self, state: State) -> None:
        """It has been cleaned up after."""
        self.note_successor(state)
        if (place := _place(self._open, state)) is not None:
            self._cleaned.append(self._open.pop(place))

    def left(self, made: State | None) -> list[State]:
        """Those to clean up after, where it came to `made`."""
        if made is not None and (self._open or not self._cleaned):
            self.note_successor(made)
        return list(self._open)

    def client(self, given: Any) -> Any:
        """The one that its calls go to: always the same, so that no two of them have one seed."""
        for known, own in self._clients:
            if known is given:
                return own
        if self.state is None:
            self.state = State(input=dict(self._row))
        own = client_of(given, self.state)
        self._clients.append((given, own))
        return own


BEGUN: ContextVar[Begun | None] = ContextVar("begun", default=None)
"""The one that states of its environment are noted of."""
UNDER_WAY: ContextVar[tuple[Begun, ...]] = ContextVar("under_way", default=())
"""Rollouts that are being made here, innermost first: an environment may ask another one for some. One of each environment."""


_FIELDS: dict[str, Callable[[], Any]] = {
    "is_completed": lambda: False,
    "is_truncated": lambda: False,
    "stop_condition": lambda: None,
    "oai_tools": list,
    "trajectory": list,
    "completion": lambda: None,
    "reward": lambda: None,
    "advantage": lambda: None,
    "metrics": lambda: None,
    "error": lambda: None,
    "timing": lambda: {"generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0, "start_time": time.time()},
}


def whole(state: State) -> State:
    """With every field of a rollout, as it begins, that it does not have: an environment's own `init_state` may leave out some."""
    # None of them is the input's, so the state's own table tells.
    if not dict.keys(state) >= _FIELDS.keys():
        for name in [name for name in _FIELDS if not dict.__contains__(state, name)]:
            state[name] = _FIELDS[name]()
    return state


def require_state(made: Any, by: str) -> State:
    """TypeError where an environment's method returned anything else, which is what one without a `return` does."""
    if not isinstance(made, State):
        raise TypeError(f"{by} returned {'nothing' if made is None else type(made).__name__}; return the state")
    return made


def note_begun(environment: object, state: State) -> None:
    """Of a rollout that may fail from here on."""
    begun = BEGUN.get()
    if begun is not None and begun.environment is environment:
        begun.note(state)
    else:
        # Somebody calls `rollout` himself, and nothing says when that ends: until the next one of this environment.
        begun = Begun(environment, {})
        begun.note(state)
        UNDER_WAY.set(_with(begun))


def note_cleaned(environment: object, state: State) -> None:
    """It has cleaned up after this state."""
    begun = BEGUN.get()
    if begun is not None and begun.environment is environment:
        begun.note_cleaned(state)


@contextmanager
def begins(environment: object, row: Mapping[str, Any]) -> Iterator[Begun]:
    """A rollout of `generate`."""
    begun = Begun(environment, row)
    begun_token, under_way_token = BEGUN.set(begun), UNDER_WAY.set((begun,))
    try:
        yield begun
    finally:
        UNDER_WAY.reset(under_way_token)
        BEGUN.reset(begun_token)


@contextmanager
def inside_a_rollout(environment: object, state: State) -> Iterator[Begun]:
    """Rollouts that begin inside (of another environment, that this one asks) are none of its states."""
    begun = BEGUN.get()
    if begun is None or begun.environment is not environment:
        begun = Begun(environment, {})
    begun.note_successor(state)
    begun_token, under_way_token = BEGUN.set(None), UNDER_WAY.set(_with(begun))
    try:
        yield begun
    finally:
        UNDER_WAY.reset(under_way_token)
        BEGUN.reset(begun_token)


def client_under_way(environment: object, client: Any) -> Any:
    """The one that a call by this environment goes to. RuntimeError where none of its rollouts, or of others, is being made here."""
    under_way = UNDER_WAY.get()
    if not under_way:
        name = type(client).__name__
        raise RuntimeError(f"{name} has to know of which rollout a call is, and none is under way here; call init_state first, or give another client")
    return next((begun for begun in under_way if begun.environment is environment), under_way[0]).client(client)


def _with(begun: Begun) -> tuple[Begun, ...]:
    return (begun, *(other for other in UNDER_WAY.get() if other.environment is not begun.environment))


def _place(states: list[State], state: State) -> int | None:
    """Of this very object."""
    return next((place for place, one in enumerate(states) if one is state), None)
