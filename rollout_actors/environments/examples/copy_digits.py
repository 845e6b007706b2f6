"""A dialogue of two turns that a tiny model learns from scratch: `first of 431`, then `last`.

The second turn can only be answered from the message of the first turn.
"""

from __future__ import annotations

from itertools import product
from random import Random
from string import digits as DIGITS

from rollout_actors.environments.answers.parsers import text_of
from rollout_actors.environments.multi_turn import MultiTurnEnv
from rollout_actors.environments.rubric import Rubric
from rollout_actors.environments.types import Messages, State

SECOND_TURN = "last"
EXACT = 1.0
"""Reward of an answer that is exactly the right digit."""
BEGUN = 0.5
"""Reward of an answer that only begins with the right digit."""


def load_environment(
    num_examples: int = 800,
    num_eval_examples: int = 128,
    num_digits: int = 3,
    base: int = 10,
    seed: int = 0,
) -> MultiTurnEnv:
    """Return the environment. The model repeats the first and then the last digit of a number.

    Numbers have `num_digits` (at least 2) digits below `base` (2 to 10) and are distinct. Held-out
    numbers are not among the training numbers.
    """
    if num_digits < 2:
        raise ValueError(f"num_digits is {num_digits}; with fewer than 2, first and last are equal")
    if not 2 <= base <= 10:
        raise ValueError(f"base is {base}; must be from 2 to 10")
    numbers = ["".join(digits) for digits in product(DIGITS[:base], repeat=num_digits)]
    total = num_examples + num_eval_examples
    if total > len(numbers):
        raise ValueError(
            f"num_examples and num_eval_examples are {total} together; there are {len(numbers)}"
            f" numbers of {num_digits} digits below {base}"
        )
    rows = [row(digits) for digits in Random(f"copy_digits {seed}").sample(numbers, total)]
    return CopyDigits(
        env_id="copy_digits",
        dataset=rows[:num_examples],
        eval_dataset=rows[num_examples:],
        rubric=Rubric([first, last], [0.5, 0.5]),
        max_turns=2,
    )


def row(digits: str) -> dict[str, str]:
    """Return the dataset row for a number: the first question, and the answers of both turns."""
    return {"question": f"first of {digits}", "answer": digits[0] + digits[-1]}


class CopyDigits(MultiTurnEnv):
    """A dialogue of two turns, whose second question is always the same."""

    async def env_response(self, messages: Messages, state: State, **kwargs: object) -> Messages:  # noqa: ARG002
        return [{"role": "user", "content": SECOND_TURN}]


def first(state: State) -> float:
    """Reward function: score the answer of the first turn."""
    return worth(state, 0)


def last(state: State) -> float:
    """Reward function: score the answer of the second turn."""
    return worth(state, 1)


def worth(state: State, turn: int) -> float:
    """Score the answer of a turn: `EXACT` if it is only the right digit, `BEGUN` if more follows.

    An answer that was cut off after the digit has `BEGUN` too. Any other answer has 0.
    """
    if len(state["trajectory"]) <= turn:
        return 0.0
    step = state["trajectory"][turn]
    digit = state["answer"][turn]
    answer = text_of(step["completion"][-1])
    if answer == digit and step["response"].choices[0].finish_reason == "stop":
        return EXACT
    return BEGUN if answer.startswith(digit) else 0.0
