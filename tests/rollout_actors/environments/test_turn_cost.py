"""What a turn costs in ways that can be counted; in time it is `benchmarks.turns`."""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import Any

from openai.types.chat import ChatCompletion

from rollout_actors.environments import MultiTurnEnv, Rubric
from rollout_actors.environments.scope import RolloutScope

NUM_ROLLOUTS, NUM_TURNS = 20, 3
MOST_CALLS = 172
"""Of Python functions in a turn, the rollout's own part included: 170.6, and up to 0.4 for
asyncio tasks that earlier tests left."""
ROWS = [{"question": f"2 + {i}", "answer": "4", "info": {"i": i}} for i in range(NUM_ROLLOUTS)]


class Client:
    """Answers everyone the same, at once."""

    def __init__(self) -> None:
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "the answer is 4"},
        }
        self._response = ChatCompletion.construct(
            id="1", object="chat.completion", created=0, model="model", choices=[choice]
        )
        self.chat = self.completions = self

    async def create(self, **arguments: Any) -> ChatCompletion:
        return self._response


class Talk(MultiTurnEnv):
    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return [{"role": "user", "content": "go on"}]


async def ends_well(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"].endswith(answer))


def generate() -> Any:
    environment = Talk(max_turns=NUM_TURNS, rubric=Rubric([ends_well]))
    return asyncio.run(environment.generate(ROWS, Client(), "model", use_tqdm=False))


def all_scopes() -> list[RolloutScope]:
    return [one for one in gc.get_objects() if type(one) is RolloutScope]


def test_a_rollout_that_is_over_leaves_nothing_to_the_garbage_collector() -> None:
    generate()
    gc.collect()
    gc.disable()
    try:
        of_other_tests = {id(one) for one in all_scopes()}
        results = generate()
        assert results["reward"] == [1.0] * NUM_ROLLOUTS
        assert [one for one in all_scopes() if id(one) not in of_other_tests] == []
    finally:
        gc.enable()


def test_a_turn_takes_a_bounded_number_of_calls_of_python_functions() -> None:
    generate()
    gc.collect()  # else what earlier tests left could be finalized meanwhile
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    gc.disable()
    sys.setprofile(count)
    try:
        generate()
    finally:
        sys.setprofile(None)
        gc.enable()
    assert calls / (NUM_ROLLOUTS * NUM_TURNS) <= MOST_CALLS
