"""Sums and products that a small model leaves to tools: `What is 374 * 528?` needs two turns.

In the first turn the model calls `add` or `multiply`, in the second it says the result. Two
examples before the question show how, because a small model hardly ever calls a tool without them.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from rollout_actors.environments.examples.sums import correct
from rollout_actors.environments.rubric import Rubric, RubricGroup
from rollout_actors.environments.tool import ToolEnv, ToolRubric
from rollout_actors.environments.types import Message

Tool = Callable[[int, int], int]

SYSTEM_PROMPT = "Use a function for every question."


def add(a: int, b: int) -> int:
    """Return a + b."""
    return a + b


def multiply(a: int, b: int) -> int:
    """Return a * b."""
    return a * b


TOOLS: dict[str, Tool] = {"+": add, "*": multiply}
"""The tools by their sign in a question."""


def load_environment(
    num_examples: int = 200, num_eval_examples: int = 50, largest: int = 999, seed: int = 0
) -> ToolEnv:
    """Return the environment. Questions have two numbers from 0 to `largest`.

    They are drawn independently: with few numbers a held-out question may be a training question.
    """
    tools = list(TOOLS.values())
    return ToolEnv(
        tools,
        env_id="calculator",
        dataset=rows(num_examples, largest, Random(f"train {seed}")),
        eval_dataset=rows(num_eval_examples, largest, Random(f"eval {seed}")),
        system_prompt=SYSTEM_PROMPT,
        few_shot=[*dialogue("+", 612, 97), *dialogue("*", 38, 455)],
        rubric=RubricGroup([Rubric([correct]), ToolRubric(tools)]),
        max_turns=2,
    )


def rows(count: int, largest: int, random: Random) -> list[dict[str, str]]:
    """Return random dataset rows: sums and products in turn."""
    made = []
    for number in range(count):
        sign = list(TOOLS)[number % len(TOOLS)]
        a, b = random.randint(0, largest), random.randint(0, largest)
        made.append({"question": question(sign, a, b), "answer": str(TOOLS[sign](a, b))})
    return made


def question(sign: str, a: int, b: int) -> str:
    return f"What is {a} {sign} {b}?"


def dialogue(sign: str, a: int, b: int) -> list[Message]:
    """Return an example of a whole rollout: question, tool call, the tool's answer, the model's."""
    name, result = TOOLS[sign].__name__, str(TOOLS[sign](a, b))
    call = {"name": name, "arguments": f'{{"a": {a}, "b": {b}}}'}
    calls = [{"id": name, "type": "function", "function": call}]
    return [
        {"role": "user", "content": question(sign, a, b)},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": name, "content": result},
        {"role": "assistant", "content": result},
    ]
