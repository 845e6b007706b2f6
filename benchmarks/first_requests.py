"""How long engines wait for the requests of a step: each put by the learner before the driver hears of any, and made in order while the first engines work.

`python -m benchmarks.first_requests [--requests 4096] [--engines 3] [--share 6]`. A learner rank's shell over a learner that has its requests ready, each with
a picture of its own of 150 kB, and engines that answer at once; no model. Both ways in turn; what the engines get must be the same.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray

from learner.actor import STOPPING, LearnerActor
from learner.remote_learner import RemoteLearner
from shared.config.timeouts import TimeoutsSection
from shared.records import ImageRef
from shared.rollouts import DecodeMode, DecodeSettings, RolloutRequest

GREEDY = DecodeSettings(DecodeMode.GREEDY, 0.0, 1.0, -1, 1.0, 8, 1, (), (), return_logprobs=True)
PICTURE_BYTES, PROMPT_TOKENS = 150_000, 300


def make_request(number: int) -> RolloutRequest:
    image = ImageRef(None, np.random.default_rng(number).bytes(PICTURE_BYTES), str(number))
    return RolloutRequest(0, number, str(number), tuple(range(PROMPT_TOKENS)), (image,), GREEDY, number)


class Rank(LearnerActor):
    def __init__(self, num_requests: int) -> None:
        made = [make_request(number) for number in range(num_requests)]
        self._learner: Any = SimpleNamespace(next_requests=lambda plan: made)

    def put_each(self) -> list[Any]:
        """As it was."""
        return [ray.put(request) for request in self._learner.next_requests(None)]


class Engine:
    def generate(self, *requests: RolloutRequest) -> str:
        return hashlib.sha256(repr(requests).encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--share", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=2_000_000_000)
    rank = ray.remote(num_cpus=0, concurrency_groups={STOPPING: 1})(Rank).remote(arguments.requests)
    engines = [ray.remote(num_cpus=0)(Engine).remote() for _ in range(arguments.engines)]
    ray.get([engine.generate.remote() for engine in engines])
    learner = RemoteLearner([rank], TimeoutsSection())
    ways = {"each put first": lambda: ray.get(rank.put_each.remote()), "in order": lambda: learner.next_requests(None)[0]}  # type: ignore[arg-type]
    first: dict[str, list[float]] = {name: [] for name in ways}
    last: dict[str, list[float]] = {name: [] for name in ways}
    answers = []
    for _ in range(arguments.repeats + 1):
        for name, way in ways.items():
            started_s = time.perf_counter()
            refs = way()
            of_engines = [refs[place * arguments.share :][: arguments.share] for place in range(arguments.engines)]
            answers.append(ray.get([engine.generate.remote(*refs) for engine, refs in zip(engines, of_engines, strict=True)]))
            first[name].append(time.perf_counter() - started_s)
            ray.wait(refs, num_returns=len(refs), fetch_local=False)
            last[name].append(time.perf_counter() - started_s)
            del refs, of_engines
    assert all(answer == answers[0] for answer in answers), "the engines got other requests"
    print(f"{arguments.requests} requests; the first {arguments.engines} x {arguments.share} answered after, and all requests made after:")
    for name in ways:
        ratio = statistics.median(before / after for before, after in zip(first["each put first"][1:], first[name][1:], strict=True))
        print(f"{name:15} {statistics.median(first[name][1:]):6.2f} s {statistics.median(last[name][1:]):6.2f} s  ratio {ratio:5.1f}")
    ray.shutdown()


if __name__ == "__main__":
    main()
