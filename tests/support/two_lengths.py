"""An environment for a model that knows nothing: two turns, and a reward for the length of what is said in them."""

from __future__ import annotations

from typing import Any

from rollout_actors.environments.multi_turn import MultiTurnEnv
from rollout_actors.environments.rubric import Rubric
from rollout_actors.environments.types import Messages, State


def load_environment(num_examples: int = 6) -> MultiTurnEnv:
    rows = [{"question": f"Say {number}."} for number in range(num_examples)]
    return TwoLengths(env_id="two_lengths", dataset=rows, eval_dataset=rows[:3], rubric=Rubric([length]), max_turns=2)


class TwoLengths(MultiTurnEnv):
    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Messages:
        return [{"role": "user", "content": "And again."}]


def length(state: State) -> float:
    """Characters of both turns, of 100."""
    return sum(len(str(step["completion"][-1]["content"])) for step in state["trajectory"]) / 100
