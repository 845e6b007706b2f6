"""Measure how long engines wait for a step's requests, for two ways to send images.

`python -m benchmarks.scale [--actors 3 16 64] [--rollouts 512 4096] [--processes 12]`. It uses the
run's Ray actors of learner rank and engines, the driver's clients and the engine pool, without a
model. Engines answer immediately with their requests, and a checksum instead of each image. If
there are more actors than processes, actors share processes. Each rollout has an image of 150 kB
from disk; with `--per-picture 8`, eight rollouts share an image. Both ways take two steps with the
same images, alternating. The answers must be the same.

- each in its request: the old way. The rank reads all images and stores every request separately
  before the driver receives any.
- once: `shared.sent_requests`. In the first step no image has been sent, in the second step all
  images on the shelf are reused.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import statistics
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import ray

from benchmarks.overlap import GREEDY
from launch.processes.fleet import Fleet, RolloutTimeouts
from launch.processes.learner_client import LearnerClient, RayRanks
from launch.processes.rollout_client import RolloutClient
from launch.processes.rounds import RoundSize
from learner.actor import STOPPING, LearnerActor, LearnerRank
from rollout_actors.engine.actor import EngineActor
from shared.config.job import TimeoutsSection
from shared.records import ImageRef
from shared.rollouts import RolloutRequest
from shared.sent_requests import PictureShelf, RequestRef, SentRequests

PICTURE_BYTES = 150_000
PROMPT_TOKENS = 300
EACH = "each in its request"
ONCE = "once"


def write_pictures(folder: Path, number: int) -> list[ImageRef]:
    images = []
    for index in range(number):
        data = np.random.default_rng(index).bytes(PICTURE_BYTES)
        path = folder / f"{index}.png"
        path.write_bytes(data)
        images.append(ImageRef(path, None, hashlib.sha256(data).hexdigest()))
    return images


class Rank(LearnerActor):
    """A learner rank without a model, which makes a step's requests, each with an image."""

    def __init__(self) -> None:
        super().__init__()
        self.forget_pictures()

    def _made(self, images: Sequence[ImageRef]) -> list[RolloutRequest]:
        ids = tuple(range(PROMPT_TOKENS))
        return [
            RolloutRequest(0, position, str(position), ids, (image,), GREEDY, position)
            for position, image in enumerate(images)
        ]

    def clock(self) -> float:
        return time.time()

    def forget_pictures(self) -> None:
        self._rank = LearnerRank(PictureShelf(ray.put), ray.get)
        self._rank.loaded = cast(Any, SimpleNamespace(next_requests=self._made))

    def put_each(self, images: Sequence[ImageRef]) -> list[RequestRef]:
        requests = self._made([image.with_data() for image in images])
        return [RequestRef(ray.put(SentRequests((request,), {})), 0) for request in requests]


class Echo:
    """An engine without a model, which answers with its requests."""

    process = ""
    is_dead = False
    num_tokens = 0

    async def start(self) -> int:
        return 1

    async def generate(self, requests: Sequence[RolloutRequest]) -> list[Any]:
        return [
            (
                replace(request, images=()),
                *(zlib.crc32(image.data or b"") for image in request.images),
            )
            for request in requests
        ]


class Engine(EngineActor):
    def __init__(self) -> None:
        super().__init__(Echo)  # type: ignore[arg-type]

    async def generate_each(
        self, *objects: SentRequests, places: range, attempt: int
    ) -> tuple[list[Any], int]:
        """Answer requests that contain their images, which is the old way to send images."""
        answers = await Echo().generate([request for one in objects for request in one.requests])
        return answers, len(answers)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--actors", type=int, nargs="+", default=[3, 16, 64])
    parser.add_argument("--rollouts", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--processes", type=int, default=12, help="most engine processes")
    parser.add_argument("--decode-batch-size", type=int, default=4)
    parser.add_argument(
        "--per-picture", type=int, default=1, help="consecutive rollouts with the same image"
    )
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=3_000_000_000,
    )
    rank = ray.remote(num_cpus=0, concurrency_groups={STOPPING: 1})(Rank).remote()
    processes = [
        ray.remote(num_cpus=0)(Engine).remote()
        for _ in range(min(arguments.processes, max(arguments.actors)))
    ]
    ray.get(
        [rank.__ray_ready__.remote(), *(process.__ray_ready__.remote() for process in processes)]
    )
    with tempfile.TemporaryDirectory() as folder:
        images = write_pictures(Path(folder), -(-max(arguments.rollouts) // arguments.per_picture))
        print(
            "actors rollouts rounds  way                 step   first round answered s all made all"
            " rounds"
        )
        for num_actors, num_rollouts in itertools.product(arguments.actors, arguments.rollouts):
            actors = [processes[index % len(processes)] for index in range(num_actors)]
            shown = [images[position // arguments.per_picture] for position in range(num_rollouts)]
            compare(rank, actors, shown, arguments.decode_batch_size, arguments.repeats)
    ray.shutdown()


def compare(
    rank: Any, actors: list[Any], shown: list[ImageRef], decode_batch_size: int, repeats: int
) -> None:
    timeouts = TimeoutsSection()
    learner = LearnerClient(RayRanks([rank]), timeouts)
    names = [f"actor-{index}" for index in range(len(actors))]

    def pool_of(engines: list[Any]) -> RolloutClient:
        return RolloutClient(
            Fleet(
                engines, names, RolloutTimeouts.for_actors(timeouts), devices=(1,) * len(engines)
            ),
            RoundSize(decode_batch_size),
        )

    once = pool_of(actors)
    each = pool_of([SimpleNamespace(generate=actor.generate_each) for actor in actors])
    seconds: dict[tuple[str, int], list[tuple[float, float, float]]] = {
        (way, step): [] for way in (EACH, ONCE) for step in (1, 2)
    }
    answers: list[list[Any]] = []
    num_rounds = 0
    # The first repetition is a warm-up.
    for repeat in range(repeats + 1):
        ray.get(rank.forget_pictures.remote())
        for way, step in seconds:
            started_s = time.time()
            if way == EACH:
                pool = each
                refs = [ray.get(rank.put_each.remote(shown))]
            else:
                pool = once
                refs = learner.next_requests(shown)
            created = rank.clock.remote()
            first_s = 0.0
            done = []
            rounds = pool.split(refs)
            for round_ in rounds:
                done += pool.generate(round_).result()[0]
                first_s = first_s or time.time() - started_s
            all_s = time.time() - started_s
            made_s = ray.get(created) - started_s
            answers.append(list(itertools.chain(*ray.get(done))))
            num_rounds = len(rounds)
            if repeat:
                seconds[way, step].append((first_s, made_s, all_s))
            del refs, rounds, done
    assert all(answer == answers[0] for answer in answers), "the engines' requests differ"
    for (way, step), of_way in seconds.items():
        first, created, whole = zip(*of_way, strict=True)
        spread = f"{statistics.median(first):.3f} ({min(first):.3f}, {max(first):.3f})"
        rest = f"{statistics.median(created):8.2f} {statistics.median(whole):10.2f}"
        print(
            f"{len(actors):6} {len(shown):8} {num_rounds:6}  {way:19} {step:4}  {spread:>24}"
            f" {rest}",
            flush=True,
        )


if __name__ == "__main__":
    main()
