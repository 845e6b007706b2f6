"""Measure the gain of the queue between generation and learning, with three schedules.

`python -m benchmarks.overlap [--generate 0.2] [--learn 0.2] [--sync 0.1] [--rounds 4] [--steps 5]`.
Generation is a `ScriptedBackend` with fixed latency. Learning and syncing are sleeps, so only the
queue is measured. All schedules must give the same rollouts in the same order.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from benchmarks.scripted_backend import ScriptedBackend
from launch.driver import Queue
from launch.pipeline import RoundStream, one_ahead, one_at_a_time
from shared.rollouts import DecodeMode, DecodeSettings, Rollout, RolloutRequest
from shared.seeds import request_seed

GREEDY = DecodeSettings(DecodeMode.GREEDY, 0.0, 1.0, -1, 1.0, 8, 1, (), (), return_logprobs=True)
PER_ROUND = 8


@dataclass(frozen=True, slots=True)
class Seconds:
    """How many seconds it takes to generate a round, to learn a round, and to sync weights."""

    generate: float
    learn: float
    sync: float


def requests_of(step: int, num_rounds: int) -> list[RolloutRequest]:
    return [
        RolloutRequest(step, i, f"{step}-{i}", (1,), (), GREEDY, request_seed(17, step, i))
        for i in range(num_rounds * PER_ROUND)
    ]


class Engine:
    """A scripted backend that generates in a thread, one round at a time."""

    def __init__(self, latency_s: float) -> None:
        self._backend = ScriptedBackend(
            "scripted",
            lambda request: [request.step, request.position, request.seed % 1000],
            latency_s=latency_s,
        )
        self._threads = ThreadPoolExecutor(max_workers=1)
        self.running: list[Future[list[Rollout]]] = []

    def split(self, requests: list[RolloutRequest]) -> list[list[RolloutRequest]]:
        return [requests[i : i + PER_ROUND] for i in range(0, len(requests), PER_ROUND)]

    def generate(self, round_: Sequence[RolloutRequest]) -> Future[list[Rollout]]:
        self.running = [self._threads.submit(self._backend.generate, round_)]
        return self.running[0]


def run_steps(
    queue: Queue, windows: Sequence[Sequence[int]], num_rounds: int, takes: Seconds
) -> tuple[float, list[tuple[int, ...]]]:
    """Run all steps; return their seconds, and the answers in the order of learning.

    The queue of rounds continues across the steps of one window.
    """
    engine = Engine(takes.generate)
    learned: list[tuple[int, ...]] = []
    started = time.perf_counter()
    for stretch in windows:
        rounds = RoundStream(queue, engine, lambda step: requests_of(step, num_rounds), stretch)
        for _ in stretch:
            for done in rounds.of_next_step():
                time.sleep(takes.learn)
                learned += [rollout.response_token_ids for rollout in done]
            wait(engine.running)  # as in a sync: engines receive weights between rounds
            time.sleep(takes.sync)
    return time.perf_counter() - started, learned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--generate", type=float, default=0.2, help="seconds of generation per round"
    )
    parser.add_argument("--learn", type=float, default=0.2, help="seconds of learning per round")
    parser.add_argument(
        "--sync", type=float, default=0.1, help="seconds of the sync after each step"
    )
    parser.add_argument("--rounds", type=int, default=4, help="rounds of a step")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    takes = Seconds(options.generate, options.learn, options.sync)
    steps = range(options.steps)
    one_by_one = [[step] for step in steps]
    schedules: dict[str, tuple[Queue, Sequence[Sequence[int]]]] = {
        "alternating": (one_at_a_time, one_by_one),
        "queue within a step": (one_ahead, one_by_one),
        "queue across steps (max_staleness: 1)": (one_ahead, [list(steps)]),
    }
    results = {
        name: run_steps(queue, windows, options.rounds, takes)
        for name, (queue, windows) in schedules.items()
    }
    alternating_s, expected = results["alternating"]
    for name, (seconds, learned) in results.items():
        assert learned == expected, f"{name}: other rollouts"
        print(
            f"{name:<38} {seconds / options.steps:.3f} s a step, {alternating_s / seconds:.2f}"
            " times as fast as alternating"
        )
    bound_s = (
        options.rounds * max(options.generate, options.learn)
        + min(options.generate, options.learn)
        + options.sync
    )
    within_s = results["queue within a step"][0] / options.steps
    print(
        "queue within a step against rounds x max(generate, learn) + the shorter of the two + sync"
        f" ({bound_s:.3f} s): {within_s / bound_s:.3f}"
    )


if __name__ == "__main__":
    main()
