"""How rollouts begin: with which fields, and where their states are noted, so that one that fails leaves what it had."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rollout_actors.environments.types import State

BEGUN: ContextVar[list[State] | None] = ContextVar("begun", default=None)

CLEANED: ContextVar[list[object] | None] = ContextVar("cleaned", default=None)
"""Environments that have cleaned up after the rollout, of a task that `generate` has begun."""


def whole(state: State) -> State:
    """With every field of a rollout, as it begins, that it does not have: an environment's own `init_state` may leave out some."""
    fields: dict[str, Any] = {
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
        "timing": {"generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0, "start_time": time.time()},
    }
    for name, value in fields.items():
        if name not in state:
            state[name] = value
    return state


def require_state(made: Any, by: str) -> State:
    """TypeError where an environment's method returned anything else, which is what one without a `return` does."""
    if not isinstance(made, State):
        raise TypeError(f"{by} returned {'nothing' if made is None else type(made).__name__}; return the state")
    return made


def note_begun(state: State) -> None:
    """Of a rollout that may fail from here on."""
    begun = BEGUN.get()
    if begun is not None:
        begun.append(state)


@contextmanager
def inside_a_rollout() -> Iterator[Callable[[State], None]]:
    """Rollouts that begin inside (of another environment, that this one asks) are none of the task's. Gives `note_begun` for the one that is."""
    begun = BEGUN.get()
    begun_token, cleaned_token = BEGUN.set(None), CLEANED.set(None)
    try:
        yield (lambda _: None) if begun is None else begun.append
    finally:
        CLEANED.reset(cleaned_token)
        BEGUN.reset(begun_token)


def note_cleaned(environment: object) -> None:
    """It has cleaned up after the task's rollout."""
    cleaned = CLEANED.get()
    if cleaned is not None:
        cleaned.append(environment)
