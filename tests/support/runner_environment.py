"""An environment of two turns for runners and environment actors: `load_environment("runner_environment", ...)`. What becomes of its rollouts is noted."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout_actors.environments.environment import Environment
from rollout_actors.environments.group import EnvGroup
from rollout_actors.environments.lifecycle import cleanup, teardown
from rollout_actors.environments.multi_turn import MultiTurnEnv
from rollout_actors.environments.rubric import Rubric, text_of
from rollout_actors.environments.types import Messages, RolloutInput, SamplingArgs, State
from shared.errors import RolloutError

CLEANED: list[int] = []
"""Positions of the rollouts of this process that were cleaned up, in order."""
TORN_DOWN: list[str] = []
"""What was torn down."""


class Echo(MultiTurnEnv):
    """Says the row's number again. A rollout is worth how often the model wrote an `x`."""

    def __init__(self, trouble: str, at: int | None, mark: str | None = None, **kwargs: Any) -> None:
        """`trouble` is met in the second turn, by rollouts of the row `at`; None: by all. `mark`: a file that is made at the end."""
        super().__init__(max_turns=2, **kwargs)
        self._trouble, self._at, self._mark = trouble, at, mark

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Messages:
        if self._trouble and self._at in (None, state["example_id"]):
            await self._meet(state)
        seen = {"seen_by": object()} if self._trouble == "odd" else {}
        return [{"role": "user", "content": f"again {state['example_id']}", **seen}]

    async def _meet(self, state: State) -> None:
        match self._trouble:
            case "fail":
                raise ZeroDivisionError("no such luck")
            case "sleep":
                await asyncio.sleep(3600)
            case "die":
                os._exit(1)

    async def rollout(self, input: RolloutInput, client: Any, model: str, sampling_args: SamplingArgs | None = None) -> State:
        if self._trouble != "forgives":
            return await super().rollout(input, client, model, sampling_args)
        try:
            return await super().rollout(input, client, model, sampling_args)
        except RolloutError:
            return await self.init_state(input)

    @cleanup
    async def tidy(self, state: State) -> None:
        await asyncio.sleep(0.01)
        CLEANED.append(state["input"]["position"])

    @teardown(priority=1)
    async def fails(self) -> None:
        if self._trouble == "teardown":
            raise ZeroDivisionError("no such luck at the end")

    @teardown
    async def ends(self) -> None:
        TORN_DOWN.append(self.name)
        if self._mark is not None:
            Path(self._mark).touch()


def crosses(completion: Messages) -> float:
    """`x` in what the model said, of both turns."""
    return float(sum(text_of(message).count("x") for message in completion if message["role"] == "assistant"))


def beats(states: Sequence[State]) -> list[float]:
    """How many of the group said less."""
    said = [crosses(state["completion"]) for state in states]
    return [float(sum(other < own for other in said)) for own in said]


async def endless(completion: Messages) -> float:
    await asyncio.sleep(3600)
    return 1.0


def load_environment(
    trouble: str = "",
    at: int | None = None,
    num_rows: int = 6,
    num_eval_rows: int | None = 3,
    sampling_args: dict[str, Any] | None = None,
    compares: bool = False,
    grouped: bool = False,
    image: str | None = None,
    mark: str | None = None,
    oai_tools: list[dict[str, Any]] | None = None,
) -> Environment:
    """`image`: the URL of one that the rows show; `grouped`: as a group of two such environments; the rest is `Echo`'s."""
    if grouped:
        plain = load_environment(trouble, at, num_rows, num_eval_rows, compares=compares)
        other = load_environment(trouble, at, num_rows, num_eval_rows, sampling_args, compares, oai_tools=oai_tools)
        return EnvGroup([plain, other], ["plain", "other"])
    rows = [_row(number, image) for number in range(num_rows)]
    held_out = None if num_eval_rows is None else [_row(100 + number, image) for number in range(num_eval_rows)]
    rubric = Rubric([endless if trouble == "unjudged" else beats if compares else crosses])
    return Echo(trouble, at, mark, dataset=rows, eval_dataset=held_out, sampling_args=sampling_args, rubric=rubric, oai_tools=oai_tools)


def _row(number: int, image: str | None) -> dict[str, Any]:
    content: Any = f"q{number}"
    if image is not None:
        content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": content}]
    return {"prompt": [{"role": "user", "content": content}], "example_id": number}
