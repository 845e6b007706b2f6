"""A digit that only a tool returns: the smallest environment for tool calls of a tiny model."""

from __future__ import annotations

from random import Random
from string import digits as DIGITS
from typing import Any

from rollout_actors.environments.answers.parsers import text_of
from rollout_actors.environments.rubric import Rubric, RubricGroup
from rollout_actors.environments.tool import StatefulToolEnv, ToolRubric, num_tool_calls
from rollout_actors.environments.types import Arguments, Messages, State

QUESTION = "which digit"


def load_environment(
    num_examples: int = 800, num_eval_examples: int = 128, seed: int = 0
) -> StatefulToolEnv:
    """Return the environment, with a random digit in each dataset row.

    The model has one turn to call the tool, and one to answer.
    """
    environment = HiddenDigit(
        env_id="hidden_digit",
        dataset=rows(num_examples, Random(f"train {seed}")),
        eval_dataset=rows(num_eval_examples, Random(f"eval {seed}")),
        max_turns=2,
    )
    environment.rubric = RubricGroup([Rubric([asked, right], [0.5, 0.5]), ToolRubric()])
    return environment


def rows(count: int, random: Random) -> list[dict[str, str]]:
    return [{"question": QUESTION, "answer": random.choice(DIGITS)} for _ in range(count)]


def peek(digit: str) -> str:
    """Tell the digit."""
    return digit


class HiddenDigit(StatefulToolEnv):
    """An environment whose tool gets the row's answer, which the model does not see."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_tool(peek, args_to_skip=["digit"])

    async def update_tool_args(
        self, tool_name: str, tool_args: Arguments, messages: Messages, state: State
    ) -> Arguments:
        return {**tool_args, "digit": state["answer"]}


def asked(completion: Messages) -> float:
    """Reward function: return 1 if the tool was called exactly once, else 0."""
    return float(num_tool_calls(completion) == 1)


def right(completion: Messages, answer: str) -> float:
    """Reward function: 1 if the last message is exactly the digit, 0.5 if more follows it."""
    last: Any = completion[-1]
    text = text_of(last)
    if text == answer:
        return 1.0
    return 0.5 if text.startswith(answer) else 0.0
