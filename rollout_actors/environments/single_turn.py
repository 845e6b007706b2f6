"""Rollouts of one call."""

from __future__ import annotations

from typing import Any

from rollout_actors.environments.multi_turn import MultiTurnEnv
from rollout_actors.environments.types import Messages, State


class SingleTurnEnv(MultiTurnEnv):
    """One question, one answer."""

    def __init__(self, dataset: Any = None, eval_dataset: Any = None, **kwargs: Any) -> None:
        super().__init__(max_turns=1, dataset=dataset, eval_dataset=eval_dataset, **kwargs)

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Messages:  # noqa: ARG002
        raise AssertionError("a rollout of one turn has ended before the environment is asked")
