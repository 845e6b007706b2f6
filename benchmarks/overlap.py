"""What the in-step queue gains: a step of scripted rounds, pipelined and alternating, in the same run.

`python -m benchmarks.overlap [--generate 0.2] [--learn 0.2] [--rounds 4]`. Generation is a `ScriptedBackend` of fixed latency, learning a sleep: what is
measured is the queue alone. Both orders must give the same rollouts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from launch.driver import Queue
from launch.pipeline import one_ahead, one_at_a_time
from rollout_actors.backends.scripted import ScriptedBackend
from shared.rollouts import DecodeMode, DecodeSettings, Rollout, RolloutRequest
from shared.seeds import request_seed

GREEDY = DecodeSettings(DecodeMode.GREEDY, 0.0, 1.0, -1, 1.0, 8, 1, (), (), return_logprobs=True)
PER_ROUND = 8


def run_step(queue: Queue, rounds: Sequence[Sequence[RolloutRequest]], generate_s: float, learn_s: float) -> tuple[float, list[tuple[int, ...]]]:
    """(seconds, the responses in the order they were learned)."""
    backend = ScriptedBackend("scripted", lambda request: [request.position, request.seed % 1000], latency_s=generate_s)
    learned: list[tuple[int, ...]] = []
    with ThreadPoolExecutor(max_workers=1) as threads:

        def submit(round_: Sequence[RolloutRequest]) -> Future[list[Rollout]]:
            return threads.submit(backend.generate, round_)

        started = time.perf_counter()
        for done in queue(submit, rounds):
            time.sleep(learn_s)
            learned += [rollout.response_token_ids for rollout in done]
        return time.perf_counter() - started, learned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generate", type=float, default=0.2, help="seconds of generation per round")
    parser.add_argument("--learn", type=float, default=0.2, help="seconds of learning per round")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    requests = [RolloutRequest(0, i, str(i), (1,), (), GREEDY, request_seed(17, 0, i)) for i in range(options.rounds * PER_ROUND)]
    rounds = [requests[i : i + PER_ROUND] for i in range(0, len(requests), PER_ROUND)]
    ahead_s, ahead = run_step(one_ahead, rounds, options.generate, options.learn)
    alternating_s, alternating = run_step(one_at_a_time, rounds, options.generate, options.learn)
    assert ahead == alternating
    bound_s = options.rounds * max(options.generate, options.learn) + options.generate
    print(f"pipelined {ahead_s:.3f} s, alternating {alternating_s:.3f} s, ratio {alternating_s / ahead_s:.2f}")
    print(f"pipelined against max(generate, learn) + first round ({bound_s:.3f} s): {ahead_s / bound_s:.3f}")


if __name__ == "__main__":
    main()
