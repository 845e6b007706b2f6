"""A run in one process and without Ray: `cluster=local`.

The learner and its engine (`hf`, or vLLM's mode `colocate`) run in a thread of this process. A
debugger's breakpoint works anywhere in them. Results are the same as on Ray, bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import TypeVar

from launch.checks.data import ImageNeeds
from launch.checks.host import require_vllm
from launch.processes.cluster import start_ranks
from launch.processes.learner_client import UNOBSERVED, LearnerCall, LearnerClient, RunObserver
from launch.processes.placement import plan_placement
from launch.processes.ray_connection import cluster_nodes
from launch.processes.rollout_client import RankRolloutClient
from launch.processes.threads import with_threads
from launch.run_folder.console import StartUp
from learner.actor import LearnerRank
from shared.config import RunConfig
from shared.sent_requests import PictureShelf
from shared.trajectory import ExampleCounts

T = TypeVar("T")


class ThreadRank:
    """A `RankExecutor` for the only learner rank, in a thread of this process.

    The references that its methods return are `Future`s. Ctrl-C interrupts only the main thread, so
    it cannot break off an optimizer update in the learner's thread. A learner that is asked to stop
    does so between two rows (`Learner.stop`).
    """

    num_ranks = 1

    def __init__(self) -> None:
        # The shelf keeps nothing: here a repeated image only costs a look at its file.
        shelf = PictureShelf(_done, max_bytes=0)
        self.rank = LearnerRank(shelf, lambda boxes: [box.result() for box in boxes])
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")

    def ask(
        self,
        rank: int,  # noqa: ARG002
        name: str,  # noqa: ARG002
        task: Callable[..., T],
        *arguments: object,
    ) -> Future[T]:
        def run() -> T:
            values = (one.result() if isinstance(one, Future) else one for one in arguments)
            return task(self.rank, *values)

        return self._thread.submit(run)

    def ask_kept(
        self, rank: int, name: str, task: Callable[..., Sequence[object]], *arguments: object
    ) -> tuple[object, object]:
        answers = self.ask(rank, name, task, *arguments)
        return answers, self._thread.submit(lambda: len(answers.result()))

    def ask_at_once(self, rank: int, task: Callable[[LearnerRank], object]) -> object:  # noqa: ARG002
        return _done(task(self.rank))

    def put(self, value: object) -> object:
        return value

    def wait(self, call: LearnerCall, asked: Sequence[tuple[str, object]]) -> list[object]:
        ((name, answer),) = asked
        assert isinstance(answer, Future), "what `ask` returned"
        wait([answer], timeout=None if call.limit is None else call.limit.seconds)
        if not answer.done():
            raise call.timeout_error([name])
        return [answer.result()]

    def close(self, timeout_s: float) -> None:  # noqa: ARG002
        """End the thread, the backend and the learner, even if one of them raises an error.

        `timeout_s` has no effect.
        """
        learner = self.rank.loaded
        with ExitStack() as ends:
            if learner is not None:
                ends.callback(learner.close)
            ends.callback(self.rank.close)
            ends.callback(self._thread.shutdown)
            if learner is not None:
                learner.stop()


class LocalRun:
    """The learner and the engine of a run in this process; a context manager.

    On exit from the `with` block both end.
    """

    def __init__(
        self,
        config: RunConfig,
        images: ImageNeeds,
        start_up: StartUp,
        examples: ExampleCounts | None = None,
        observer: RunObserver = UNOBSERVED,
    ) -> None:
        self._config = config
        self._images = images
        self._start_up = start_up
        self._examples = examples
        # As for a learner rank: weights are read from a folder, and no hub is contacted.
        os.environ["HF_HUB_OFFLINE"] = "1"
        # Only a sync and an end have time limits, because a breakpoint may stop anything else.
        self._learner = LearnerClient(ThreadRank(), None, observer)
        self._observer = observer

    def __enter__(self) -> LocalRun:
        return self

    def __exit__(self, *error: object) -> None:
        self._learner.close()

    def start(self) -> tuple[LearnerClient, RankRolloutClient]:
        """Load model, data and engine; return the clients of learner and engine.

        Raises:
            ConfigError, RecordError: problems of model and data that the learner finds.
            RolloutError: the engine does not start.
        """
        config = self._config
        placement = plan_placement(config, cluster_nodes(config.cluster, config.timeouts.start_s))
        config = with_threads(config, placement)
        require_vllm(config.rollout_matching, placement.transport)
        with self._start_up.stage("the learner with an engine, in this process"):
            rollouts = start_ranks(
                *(config, self._learner, placement, self._images, self._examples),
                self._observer,
            )
        return self._learner, rollouts


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future
