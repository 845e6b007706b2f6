"""How rollouts begin: with which fields, and where their states are noted, so that one that fails
leaves what it had, and each is cleaned up after.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

from rollout_actors.environments.clients.openai import client_of, knows_rollouts
from rollout_actors.environments.types import State


class _Noted:
    """A state of a rollout that is being made, as whatever object the environment has it now, and
    what its calls go to.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        """In the outermost rollout: no two of its states sample with the same seeds."""
        self.state: State | None = None
        """None: calls came before it."""
        self.is_cleaned = False
        self.clients: tuple[tuple[Any, Any], ...] = ()
        """Those that know rollouts, each with its own for this one."""


class Begun:
    """What is known of a rollout while an environment makes it."""

    def __init__(
        self,
        environment: object,
        row: Mapping[str, Any],
        within: Inside | None = None,
        *,
        mark: str = "",
    ) -> None:
        """
        Args:
            within: where it begins in another one, whose environment asks another one (or itself)
            for it; None: in none.
            mark: of what is none, and has calls of its own all the same.
        """
        self.environment = environment
        self._path = mark if within is None else within.path + mark
        # None: this one. No reference to itself: what it holds goes with it, and is not left to the
        # collector.
        self._around: Begun | None = (
            None if within is None else within.parent._around or within.parent
        )
        self._row = row
        self._num_children = 0
        self._states: tuple[_Noted, ...] = ()

    @property
    def is_inside(self) -> bool:
        """Another one."""
        return self._around is not None

    def inside(self) -> Inside:
        """Where the next one begins that its environment asks for. By their order: those of
        coroutines that are gathered are numbered as they begin.
        """
        self._num_children += 1
        return Inside(self, f"{self._path}/{self._num_children - 1}")

    @property
    def first(self) -> State | None:
        """The first state, or what the environment has made of it."""
        return next((one.state for one in self._states if one.state is not None), None)

    @property
    def num_splits(self) -> int | None:
        """Calls whose prompt did not go on from the tokens of the one before; None where its
        clients count none.
        """
        counted = [
            getattr(own, "num_splits", None)
            for one in self._states
            for given, own in one.clients
            if own is not given
        ]
        numbers = [number for number in counted if number is not None]
        return sum(numbers) if numbers else None

    def note(self, state: State) -> _Noted:
        """One more state: an environment's own `rollout` may make several."""
        waiting = self._states[0] if self._states and self._states[0].state is None else None
        one = waiting or self._added()
        one.state = state
        return one

    def note_successor(self, state: State, former: _Noted | None = None) -> _Noted:
        """What the environment has made of a former one, or of the last; nothing new, where it is
        an object that was noted.
        """
        for one in self._states:
            if one.state is state:
                return one
        open_ = self._open()
        if former not in open_:
            former = open_[-1] if open_ else None
        if former is None:
            return self.note(state)
        former.state = state
        return former

    def left(self, made: State | None) -> list[State]:
        """Those to clean up after, where it came to `made`."""
        if made is not None and (self._open() or not any(one.is_cleaned for one in self._states)):
            self.note_successor(made)
        return [one.state for one in self._open() if one.state is not None]

    def client(self, given: Any, one: _Noted | None = None) -> Any:
        """What the calls of this state, or else of the first, go to: always the same."""
        if not knows_rollouts(given):
            return given
        one = one or (self._states[0] if self._states else self._added())
        for known, own in one.clients:
            if known is given:
                return own
        own = client_of(
            given,
            State(input=dict(self._row)) if one.state is None else one.state,
            of=(self._around or self)._input(),
            path=one.path,
        )
        one.clients = (*one.clients, (given, own))
        return own

    def _input(self) -> Mapping[str, Any]:
        """Which has the rollout's `position`."""
        first = self.first
        given: Mapping[str, Any] = self._row if first is None else first.get("input", self._row)
        return given

    def _open(self) -> list[_Noted]:
        return [one for one in self._states if one.state is not None and not one.is_cleaned]

    def _added(self) -> _Noted:
        one = _Noted(f"{self._path}+{len(self._states)}" if self._states else self._path)
        self._states = (*self._states, one)
        return one


class Inside(NamedTuple):
    """A place in a rollout where others begin."""

    parent: Begun
    path: str

    def of(self, position: int) -> Inside:
        """For the rollout of this place in a call of `generate`."""
        return Inside(self.parent, f"{self.path}.{position}")


class _Called(Begun):
    """A rollout that somebody calls himself: outside `generate`, or inside another rollout."""

    def __init__(self, environment: object, before: tuple[_Place, ...]) -> None:
        parent = _parent(before)
        super().__init__(environment, {}, None if parent is None else parent.inside())
        self._before = before
        self.is_taken = False
        """Its end will be known."""
        for begun, _ in before:
            if isinstance(begun, _Called) and not begun.is_taken:
                # Or each would keep the one before it.
                begun._before = tuple(
                    place
                    for place in begun._before
                    if not isinstance(place[0], _Called) or place[0].is_taken
                )

    def take(self) -> tuple[_Place, ...]:
        """By what ends it. Returns what was under way before."""
        self.is_taken = True
        return self._before


_Place = tuple[Begun, _Noted | None]
"""A rollout, and its state in this context: coroutines that are gathered have contexts of their
own.
"""

_BEGUN: ContextVar[Begun | None] = ContextVar("begun", default=None)
"""The one that states of its environment are noted of."""
_UNDER_WAY: ContextVar[tuple[_Place, ...]] = ContextVar("under_way", default=())
"""Rollouts that are being made here, innermost first. One of each environment."""


def _fields() -> dict[str, Any]:
    return {
        "is_completed": False,
        "is_truncated": False,
        "stop_condition": None,
        "oai_tools": [],
        "trajectory": [],
        "completion": None,
        "reward": None,
        "advantage": None,
        "metrics": None,
        "error": None,
        "timing": {
            "generation_ms": 0.0,
            "scoring_ms": 0.0,
            "total_ms": 0.0,
            "start_time": time.time(),
        },
    }


_FIELDS = frozenset(_fields())
_NEVER_NONE = ("trajectory", "timing")


def new_state(given: dict[str, Any]) -> State:
    """With every field of a rollout, as it begins. `given` becomes its input."""
    state = State()
    dict.update(state, {"input": given, "id": given.get("id", given["example_id"]), **_fields()})
    return state


def whole(state: State) -> State:
    """With every field of a rollout, as it begins, that it does not have: an environment's own
    `init_state` may leave out some.
    """
    # None of them is the input's, so the state's own table tells.
    own = dict.keys(state)
    if not own >= _FIELDS or state["trajectory"] is None or state["timing"] is None:
        new = _fields()
        for name in own & _FIELDS:
            if name not in _NEVER_NONE or dict.__getitem__(state, name) is not None:
                del new[name]
        dict.update(state, new)
    return state


def require_state(made: Any, method: str, environment: Any) -> State:
    """TypeError where an environment's method returned anything else, which is what one without a
    `return` does.
    """
    if not isinstance(made, State):
        raise TypeError(
            f"{method} of {environment.name} returned"
            f" {'nothing' if made is None else type(made).__name__}; return the state"
        )
    return made


def note_begun(environment: object, state: State) -> None:
    """Of a rollout that may fail from here on."""
    begun = _BEGUN.get()
    if begun is None or begun.environment is not environment:
        # Somebody calls `rollout` himself, and where that is one of his own, nothing says when it
        # ends: until the next one of this environment.
        begun = _Called(environment, _UNDER_WAY.get())
    _UNDER_WAY.set(_with(begun, begun.note(state)))


def note_cleaned(environment: object, state: State) -> None:
    """It has cleaned up after this state."""
    begun = _BEGUN.get()
    if begun is not None and begun.environment is environment:
        begun.note_successor(state, _here(begun)).is_cleaned = True


def call_begins() -> Inside | None:
    """A call of `generate`: in which rollout, where it is in one."""
    parent = _parent(_UNDER_WAY.get())
    return None if parent is None else parent.inside()


def rollout_begins(begun: Begun) -> None:
    """Note that this task, which has a context of its own, makes a rollout of `generate`."""
    _BEGUN.set(begun)
    _UNDER_WAY.set(((begun, None),))


def scoring_begins(row: Mapping[str, Any], within: Inside | None) -> None:
    """Note that this task, which has a context of its own, scores a rollout, or those of an
    example: a reward function may ask for rollouts too.
    """
    if _BEGUN.get() is not None:
        _BEGUN.set(None)
    _UNDER_WAY.set(((Begun(None, row, within, mark="="), None),))


class InsideARollout:
    """The part of a rollout in which the environment and the model speak. Rollouts that begin
    inside it (of another environment, or of this one, that are asked for some) are none of its
    states."""

    def __init__(self, environment: object, state: State) -> None:
        self._before, self._outer = _UNDER_WAY.get(), _BEGUN.get()
        begun = self._outer
        if begun is None or begun.environment is not environment:
            begun, self._before = _taken(environment, self._before)
        self._begun = begun
        self._one = begun.note_successor(state, _here(begun))

    def __enter__(self) -> InsideARollout:
        _BEGUN.set(None)
        _UNDER_WAY.set(_with(self._begun, self._one))
        return self

    def __exit__(self, *error: object) -> None:
        _UNDER_WAY.set(self._before)
        _BEGUN.set(self._outer)

    def note_successor(self, state: State) -> None:
        """What the environment has made of the state."""
        self._one = self._begun.note_successor(state, self._one)
        _UNDER_WAY.set(_with(self._begun, self._one))

    def client(self, given: Any) -> Any:
        return self._begun.client(given, self._one)


def client_under_way(environment: object, client: Any) -> Any:
    """The one that a call by this environment goes to. RuntimeError where none of its rollouts, or
    of others, is being made here.
    """
    under_way = _UNDER_WAY.get()
    if not under_way:
        name = type(client).__name__
        raise RuntimeError(
            f"{name} has to know of which rollout a call is, and none is under way here; call"
            " init_state first, or give another client"
        )
    begun, one = next(
        (place for place in under_way if place[0].environment is environment), under_way[0]
    )
    return begun.client(client, one)


def _with(begun: Begun, one: _Noted) -> tuple[_Place, ...]:
    return (
        (begun, one),
        *[place for place in _UNDER_WAY.get() if place[0].environment is not begun.environment],
    )


def _here(begun: Begun) -> _Noted | None:
    """Its state in this context."""
    for other, one in _UNDER_WAY.get():
        if other is begun:
            return one
    return None


def _taken(environment: object, under_way: tuple[_Place, ...]) -> tuple[Begun, tuple[_Place, ...]]:
    """The rollout that this environment's `rollout` makes, called by hand, and what was under way
    before.
    """
    noted = (
        begun
        for begun, _ in under_way
        if begun.environment is environment and isinstance(begun, _Called) and not begun.is_taken
    )
    # not noted where `init_state` does not ask Environment's
    called = next(noted, None) or _Called(environment, under_way)
    return called, called.take()


def _parent(under_way: tuple[_Place, ...]) -> Begun | None:
    """The innermost, but for one that may have ended long ago, in nothing that goes on."""
    return next(
        (
            begun
            for begun, _ in under_way
            if not isinstance(begun, _Called) or begun.is_taken or begun.is_inside
        ),
        None,
    )
