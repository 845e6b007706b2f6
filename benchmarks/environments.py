"""Measure the cost of orchestrating rollouts, and the gain of interleaved scoring.

`python -m benchmarks.environments [--rollouts 1000] [--turns 3] [--repetitions 7]`. Three
measurements, with clients in this process:

1. Six rollouts of 0.1 s generation and 0.1 s scoring, two at a time: interleaved, and in two
   phases. The results must be equal.
2. Overhead per turn: many concurrent rollouts with a client that answers immediately, as vLLM does
   (64 token ids of the prompt and 16 sampled ones with their log-probabilities), and an
   asynchronous reward function. Every result is checked. Printed are wall time per turn, and
   processor time per turn for machines that are busy. Then the same with a reward function in a
   thread.
3. Cost of the garbage collector: the same, but every call gets a new answer object, as from an
   endpoint. The collector's settings alternate. Printed is the processor time per turn, which
   includes making the answer.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.turns import IDS, PROMPT_IDS, Client, ends_well, ends_well_plainly, response
from rollout_actors.environments.chat.responses import RETURNS_TOKENS
from rollout_actors.environments.datasets import GenerateOutputs
from rollout_actors.environments.multi_turn import MultiTurnEnv, SingleTurnEnv
from rollout_actors.environments.rubric import Rubric
from rollout_actors.environments.training.actor import THRESHOLDS
from rollout_actors.environments.types import Messages, State


class DelayedClient(Client):
    """A model client without a model: it returns a fixed answer, after a delay if one is given.

    With `makes_anew`, each call gets a new answer object.
    """

    def __init__(self, delay_s: float = 0.0, *, makes_anew: bool = False) -> None:
        super().__init__()
        self._delay_s = delay_s
        self._makes_anew = makes_anew
        self.num_calls = 0

    async def create(self, **arguments: Any) -> Any:
        self.num_calls += 1
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        return response() if self._makes_anew else await super().create(**arguments)


class Talk(MultiTurnEnv):
    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Messages:
        return [{"role": "user", "content": "go on"}]


async def slowly(completion: Messages, answer: str) -> float:
    await asyncio.sleep(0.1)
    return await ends_well(completion, answer)


def interleaving() -> tuple[float, float]:
    """Return the seconds of some rollouts with interleaved scoring, and with scoring afterwards."""
    rows = [{"question": str(i), "answer": "4" if i % 2 else "5"} for i in range(6)]

    def timed(interleaved: bool) -> tuple[float, list[Any]]:
        environment = SingleTurnEnv(rubric=Rubric([slowly]))
        began_s = time.perf_counter()
        results = environment.generate_sync(
            rows,
            DelayedClient(0.1),
            "model",
            max_concurrent=2,
            interleave_scoring=interleaved,
            use_tqdm=False,
        )
        return time.perf_counter() - began_s, [
            results[name] for name in ("prompt", "completion", "example_id", "reward", "metrics")
        ]

    timed(True)
    (fast_s, one) = timed(True)
    (slow_s, other) = timed(False)
    assert one == other, (one, other)
    assert one[3] == [0.0, 1.0] * 3, one
    return fast_s, slow_s


def overhead(
    num_rollouts: int, num_turns: int, reward: Callable[..., Any], *, makes_anew: bool = False
) -> tuple[float, float]:
    """Return the milliseconds that an environment's turn takes: wall time and processor time."""
    environment = Talk(max_turns=num_turns, rubric=Rubric([reward]))
    rows = [{"question": f"2 + {i}", "answer": "4", "info": {"i": i}} for i in range(num_rollouts)]
    client = DelayedClient(makes_anew=makes_anew)

    async def timed() -> tuple[float, float, GenerateOutputs]:
        began_s = time.perf_counter()
        cpu_s = time.process_time()
        results = await environment.generate(rows, client, "model", RETURNS_TOKENS, use_tqdm=False)
        return time.perf_counter() - began_s, time.process_time() - cpu_s, results

    gc.collect()
    spent_s, cpu_s, results = asyncio.run(timed())
    check(results, num_rollouts, num_turns, client.num_calls)
    num = num_rollouts * num_turns
    return 1000 * spent_s / num, 1000 * cpu_s / num


@contextmanager
def as_python_sets_it() -> Iterator[None]:
    yield


@contextmanager
def frozen() -> Iterator[None]:
    """Exclude all existing objects from garbage collection inside the context."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def rarer() -> Iterator[None]:
    """Collect garbage after 50,000 new objects instead of 700, and exclude existing objects."""
    former = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    try:
        with frozen():
            yield
    finally:
        gc.set_threshold(*former)


@contextmanager
def off() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


COLLECTORS = {
    "as Python sets it": as_python_sets_it,
    "gc.freeze()": frozen,
    f"gc.freeze(), gc.set_threshold{THRESHOLDS}": rarer,
    "gc.disable()": off,
}


def collectors(num_rollouts: int, num_turns: int, repetitions: int) -> dict[str, list[float]]:
    """Return milliseconds of processor time per turn, by setting of the garbage collector.

    Each setting has one value per repetition.
    """
    spent: dict[str, list[float]] = {name: [] for name in COLLECTORS}
    for _ in range(repetitions):
        for name, setting in COLLECTORS.items():
            with setting():
                spent[name].append(overhead(num_rollouts, num_turns, ends_well, makes_anew=True)[1])
            gc.collect()
    return spent


def check(results: GenerateOutputs, num_rollouts: int, num_turns: int, num_calls: int) -> None:
    assert num_calls == num_rollouts * num_turns
    assert results.reward == [1.0] * num_rollouts
    assert results.metadata.num_errors == 0
    for i, state in enumerate(results.state):
        assert state["info"] == {"i": i}
        assert state["example_id"] == i
        assert len(state["completion"]) == 2 * num_turns - 1
        for number, step in enumerate(state["trajectory"]):
            tokens = step["tokens"]
            assert len(step["prompt"]) == 1 + 2 * number
            assert step["reward"] == 1.0
            assert (tokens["prompt_ids"], tokens["completion_ids"]) == (PROMPT_IDS, IDS)
            assert tokens["completion_logprobs"] == [-0.5] * len(IDS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args()
    fast_s, slow_s = interleaving()
    print(
        f"6 rollouts, 0.1 s generation and 0.1 s scoring, 2 at a time: {fast_s:.3f} s interleaved,"
        f" {slow_s:.3f} s in two phases: {1 - fast_s / slow_s:.0%} less"
    )
    for name, reward in (("asynchronous", ends_well), ("synchronous", ends_well_plainly)):
        overhead(args.rollouts, args.turns, reward)
        wall, cpu = zip(
            *(overhead(args.rollouts, args.turns, reward) for _ in range(args.repetitions)),
            strict=True,
        )
        print(
            f"{args.rollouts} rollouts of {args.turns} turns, {name} reward function:"
            f" {statistics.median(wall):.3f} ms of overhead per turn (median of {args.repetitions};"
            f" {min(wall):.3f} to {max(wall):.3f}), {statistics.median(cpu):.3f} ms of processor"
            " time"
        )
    print(
        f"{args.rollouts} rollouts of {args.turns} turns, an answer for every call,"
        f" {len(gc.get_objects()):,} objects before; processor time per turn:"
    )
    for name, cpu in collectors(args.rollouts, args.turns, args.repetitions).items():
        print(f"    {name}: {statistics.median(cpu):.3f} ms ({min(cpu):.3f} to {max(cpu):.3f})")


if __name__ == "__main__":
    main()
