"""A game of several turns: the model guesses a number, and reads whether it is higher or lower."""

from __future__ import annotations

import math
import re
from random import Random
from typing import Any

from rollout_actors.environments.answers.parsers import text_of
from rollout_actors.environments.lifecycle import stop
from rollout_actors.environments.multi_turn import MultiTurnEnv
from rollout_actors.environments.rubric import Rubric
from rollout_actors.environments.types import Messages, ModelResponse, State

GUESS = re.compile(r"<guess>\s*([0-9]{1,9})\s*</guess>")


def load_environment(
    num_examples: int = 200,
    num_eval_examples: int = 50,
    largest: int = 100,
    max_turns: int = 10,
    seed: int = 0,
) -> MultiTurnEnv:
    """Return the environment: games with numbers from 1 to `largest`, of `max_turns` turns at most.

    `largest` is at least 2.
    """
    if largest < 2:
        raise ValueError(
            f"largest is {largest}; with fewer than 2 numbers there is nothing to guess"
        )
    return GuessNumber(
        largest,
        env_id="guess_number",
        dataset=games(num_examples, largest, Random(f"train {seed}")),
        eval_dataset=games(num_eval_examples, largest, Random(f"eval {seed}")),
        rubric=Rubric([found, early, read], [1.0, 0.5, 0.1]),
        max_turns=max_turns,
    )


def games(count: int, largest: int, random: Random) -> list[dict[str, str]]:
    """Return random dataset rows. The number is the row's answer, which the model does not see."""
    question = (
        f"I think of a number from 1 to {largest}. Guess it: write one guess as"
        " <guess>number</guess>, and I will say whether mine is higher or lower."
    )
    return [{"question": question, "answer": str(random.randint(1, largest))} for _ in range(count)]


class GuessNumber(MultiTurnEnv):
    """A game in which the model guesses a number, with one guess per turn."""

    def __init__(self, largest: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.largest = largest

    async def setup_state(self, state: State) -> State:
        state["guesses"] = []
        """One for each turn; None for a message without a guess."""
        state["fewest_guesses"] = math.ceil(math.log2(self.largest + 1))
        return state

    async def add_model_response(
        self, state: State, prompt_messages: Messages, response: ModelResponse
    ) -> None:
        await super().add_model_response(state, prompt_messages, response)
        # Here, because the environment does not respond to the last turn's guess.
        for step in state["trajectory"][len(state["guesses"]) :]:
            state["guesses"].append(guess_in(step["completion"]))

    async def env_response(self, messages: Messages, state: State, **kwargs: object) -> Messages:  # noqa: ARG002
        guess = state["guesses"][-1]
        if guess is None:
            hint = "I see no guess. Write it as <guess>number</guess>."
        else:
            comparison = "higher" if int(state["answer"]) > guess else "lower"
            hint = f"My number is {comparison} than {guess}."
        return [{"role": "user", "content": hint}]

    @stop
    async def number_found(self, state: State) -> bool:
        return found(state) == 1.0


def guess_in(completion: Messages) -> int | None:
    """Return the last guess in the last of these messages; None if it has no guess."""
    last: Any = completion[-1]
    guesses = GUESS.findall(text_of(last))
    return int(guesses[-1]) if guesses else None


def found(state: State) -> float:
    """Reward function: return 1 if the last guess is the right number, else 0."""
    return float(bool(state["guesses"]) and state["guesses"][-1] == int(state["answer"]))


def early(state: State) -> float:
    """Reward function: 1 if the number is found with at most the guesses that bisection needs.

    The reward is less with more guesses, and 0 if the number is not found.
    """
    return found(state) * min(1.0, state["fewest_guesses"] / max(1, len(state["guesses"])))


def read(state: State) -> float:
    """Reward function: return the share of the model's messages that have a guess."""
    guesses = state["guesses"]
    return sum(guess is not None for guess in guesses) / len(guesses) if guesses else 0.0
