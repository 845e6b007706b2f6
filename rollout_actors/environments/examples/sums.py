"""Sums for a small pretrained language model: `What is 7 + 5?` is answered with a number.

A system prompt asks for the number only. What the model writes around it is free: the last number
of an answer counts.
"""

from __future__ import annotations

import re
from random import Random

from rollout_actors.environments.answers.parsers import text_of
from rollout_actors.environments.multi_turn import SingleTurnEnv
from rollout_actors.environments.rubric import Rubric
from rollout_actors.environments.types import Message

SYSTEM_PROMPT = "You are a calculator. Reply with one number and nothing else."


def load_environment(
    num_examples: int = 68,
    num_eval_examples: int = 32,
    terms: int = 2,
    largest: int = 9,
    seed: int = 0,
) -> SingleTurnEnv:
    """Return the environment: sums of `terms` numbers from 0 to `largest`, all distinct.

    No held-out sum is among the training sums.
    """
    total = num_examples + num_eval_examples
    if total > (number := (largest + 1) ** terms):
        raise ValueError(
            f"num_examples and num_eval_examples are {total} together; there are {number} sums of"
            f" {terms} numbers up to {largest}"
        )
    sums = [
        [index // (largest + 1) ** term % (largest + 1) for term in range(terms)]
        for index in Random(f"sums {seed}").sample(range(number), total)
    ]
    rows = [
        {"question": f"What is {' + '.join(map(str, one))}?", "answer": str(sum(one))}
        for one in sums
    ]
    return SingleTurnEnv(
        env_id="sums",
        dataset=rows[:num_examples],
        eval_dataset=rows[num_examples:],
        system_prompt=SYSTEM_PROMPT,
        rubric=Rubric([correct]),
    )


def correct(completion: list[Message], answer: str) -> float:
    """Reward function: 1 if the last number of the completion is the right one, else 0."""
    numbers = re.findall(r"\d+", text_of(completion[-1]))
    return float(bool(numbers) and numbers[-1] == answer)
