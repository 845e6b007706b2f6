"""Small environments, and rows for them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from rollout_actors.environments.datasets import GenerateOutputs
from rollout_actors.environments.multi_turn import MultiTurnEnv
from rollout_actors.environments.rubric import Rubric
from rollout_actors.environments.types import Messages, RolloutInput, SamplingArgs, State


class Talk(MultiTurnEnv):
    """Answers `yes` to whatever the model says, for as many turns as it is told."""

    def __init__(self, max_turns: int = 3, **kwargs: Any) -> None:
        super().__init__(max_turns=max_turns, **kwargs)

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Messages:
        return " yes " if isinstance(messages, str) else [{"role": "user", "content": "yes"}]


class Documented(Talk):
    """With a `rollout` of its own: the loop of the specification (trajectories, 7)."""

    async def rollout(self, input: RolloutInput, client: Any, model: str, sampling_args: SamplingArgs | None = None) -> State:
        state = await self.setup_state(await self.init_state(input))
        while not await self.is_completed(state):
            prompt_messages = await self.get_prompt_messages(state)
            response = await self.get_model_response(client, model, prompt_messages, oai_tools=state["oai_tools"], sampling_args=sampling_args)
            await self.add_model_response(state, prompt_messages, response)
        return state


def rows(number: int) -> list[dict[str, Any]]:
    """Whose answers are their questions."""
    return [{"question": f"q{i}", "answer": f"q{i}"} for i in range(number)]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def said_the_answer(completion: Messages, answer: str) -> float:
    """1.0 where the last message is the answer."""
    return float(completion[-1]["content"] == answer)


def generated(environment: Any, inputs: Any, client: Any, **kwargs: Any) -> GenerateOutputs:
    """`environment.generate` on a loop of its own, without a bar."""
    return asyncio.run(environment.generate(inputs, client, "model", use_tqdm=False, **kwargs))


def rolled_out(environment: Any, row: dict[str, Any], client: Any, **kwargs: Any) -> State:
    """`environment.rollout` of one row, on a loop of its own."""
    return asyncio.run(environment.rollout(row, client, "model", **kwargs))


def without_place(state: State) -> str | None:
    """Its error, which says of what the environment's own code raised where that was."""
    return re.sub(r" \(\w+\.py:\d+\)$", "", state["error"]) if state["error"] else None


def rubric_of(*functions: Any, weights: Sequence[float] | None = None) -> Rubric:
    return Rubric(list(functions), weights)
