"""Rollouts of one call."""

from __future__ import annotations

import inspect
from typing import Any

from rollout_actors.environments.environment import Environment
from rollout_actors.environments.multi_turn import MultiTurnEnv
from rollout_actors.environments.types import Messages, State


class SingleTurnEnv(MultiTurnEnv):
    """One question, one answer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As that of `Environment`, by place and by name."""
        # Of several turns, environments take them by name alone.
        placed = inspect.signature(Environment).bind(*args).arguments
        super().__init__(max_turns=1, **placed, **kwargs)

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Messages:  # noqa: ARG002
        raise AssertionError("a rollout of one turn has ended before the environment is asked")
