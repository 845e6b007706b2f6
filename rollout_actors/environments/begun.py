"""Where the states of a task's rollouts are noted, so that one that fails leaves what it had."""

from __future__ import annotations

from contextvars import ContextVar

from rollout_actors.environments.types import State

BEGUN: ContextVar[list[State] | None] = ContextVar("begun", default=None)
