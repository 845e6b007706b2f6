"""Where the states of a task's rollouts are noted, so that one that fails leaves what it had."""

from __future__ import annotations

from contextvars import ContextVar

from rollout_actors.environments.types import State

BEGUN: ContextVar[list[State] | None] = ContextVar("begun", default=None)


def note_begun(state: State) -> None:
    """Of a rollout that may fail from here on."""
    begun = BEGUN.get()
    if begun is not None:
        begun.append(state)
