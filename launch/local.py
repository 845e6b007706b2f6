"""A run in one process and without Ray: `cluster=local`.

The learner and the engine beside it (`hf`, or vLLM's mode `colocate`) take the driver's calls
directly. So a breakpoint works anywhere, and the results are those of the same run on Ray, to the
bit.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from launch.checks.data import ImageNeeds
from launch.checks.host import require_vllm
from launch.cluster import make_backend, rank_topologies
from launch.run_folder.console import StartUp
from launch.runtime.placement import plan_placement
from launch.runtime.ray_connection import cluster_nodes
from launch.runtime.replacements import Replacement
from shared.chunking import cut_rounds, round_chunk
from shared.config import RunConfig
from shared.config.derive import group_size
from shared.errors import LearnerError, WeightSyncError
from shared.grounding.evaluation import Outcome
from shared.metrics import StepReport, merge_reports
from shared.protocols import PerRank, RankBackend
from shared.rollouts import SyncReport, WeightOffer
from shared.run_files import Span
from shared.schedule import StepPlan
from shared.trajectory import ExampleCounts
from shared.weight_sync.canary import Differences
from shared.weight_sync.phases import SendReport

if TYPE_CHECKING:  # it imports torch
    from learner.learner import Learner

T = TypeVar("T")


class LocalRun:
    """Learner and engine in this process, as the driver sees them (`launch.driver`).

    One thread does what is asked of them, in order, as a learner rank's process does: an
    interruption, which comes to the main thread, finds the learner between two rows and not inside
    an update. Nothing has a limit but a sync and an end, for a breakpoint may hold it up.
    """

    falls_back = False
    replaces_lost = False

    def __init__(
        self,
        config: RunConfig,
        images: ImageNeeds,
        start_up: StartUp,
        examples: ExampleCounts | None = None,
    ) -> None:
        self._config = config
        self._images = images
        self._start_up = start_up
        self._examples = examples
        # As for a learner rank: weights are read from a folder, and nothing is asked of a hub.
        os.environ["HF_HUB_OFFLINE"] = "1"
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")
        self._loaded: Learner | None = None
        self._backend: RankBackend | None = None
        self.version = 0
        """The version that the engine serves; 0 before the first sync."""

    def __enter__(self) -> LocalRun:
        return self

    def __exit__(self, *error: object) -> None:
        # In the opposite order, whatever one of them raises.
        with ExitStack() as ends:
            if self._loaded is not None:
                ends.callback(self._loaded.close)
            if self._backend is not None:
                ends.callback(self._backend.close)
            ends.callback(self._thread.shutdown)
            if self._loaded is not None:
                self._loaded.stop()

    def start(self) -> tuple[LocalRun, LocalRun]:
        """Load model, data and engine; return learner and engine.

        Raises:
            ConfigError, RecordError: what the learner finds wrong with model and data.
            RolloutError: the engine does not come up.
        """
        placement = plan_placement(self._config, cluster_nodes(self._config))
        require_vllm(self._config, placement.transport)
        self.devices = (placement.devices_per_engine,)
        (topology,) = rank_topologies(placement)
        backend = make_backend(self._config, placement, self._images, self._examples)

        def load() -> None:
            import torch

            from learner.actor import EngineHost
            from learner.learner import Learner

            self._loaded = Learner(self._config, topology, examples=self._examples)
            self.num_threads = torch.get_num_threads()
            self._backend = backend(EngineHost(self._config, self._loaded))
            self.names = (self._loaded.name,)

        with self._start_up.stage("the learner with an engine, in this process"):
            self._do(load)
        return self, self

    # The learner

    @property
    def _learner(self) -> Learner:
        assert self._loaded is not None, "start comes first"
        return self._loaded

    @property
    def offers_adapter(self) -> bool:
        return self._learner.publisher.offers_adapter

    def next_requests(self, plan: StepPlan) -> PerRank:
        return [self._do(self._learner.next_requests, plan)]

    def refill_requests(self) -> PerRank:
        return [self._do(self._learner.refill_requests)]

    def accumulate(self, done: PerRank) -> None:
        self._do(self._learner.accumulate, list(itertools.chain(*done[0])))

    def finish_step(self) -> StepReport:
        return merge_reports([self._do(self._learner.finish_step)])

    def last_report(self) -> StepReport:
        report = self._do(self._learner.last_report)
        assert report is not None, "it is asked behind an update"
        return merge_reports([report])

    def held_out_requests(self, step: int) -> PerRank:
        return [self._do(self._learner.held_out_requests, step)]

    def score(self, done: PerRank) -> list[Outcome]:
        return list(self._do(self._learner.score, list(itertools.chain(*done[0]))))

    def answers_ahead(self) -> PerRank:
        return [[self._do(self._learner.answers_ahead)]]

    def offer_weights(self, *, again: bool = False) -> WeightOffer:
        offer = self._do(self._learner.publisher.offer, again)
        assert offer is not None, "the only rank offers"
        return offer

    def send_weights(self, offer: WeightOffer) -> Future[SendReport]:
        return self._thread.submit(self._learner.publisher.send, offer)

    def sync_done(self, noise: Differences | None) -> None:
        self._do(self._learner.publisher.done, noise)

    def fall_back_to_full(self) -> None:
        raise AssertionError("an engine beside the learner takes no adapters by themselves")

    def leave_groups(self) -> None:
        raise AssertionError("an engine beside the learner is in no group")

    def stop(self, *, timeout_s: float) -> int:
        """End what the thread is doing; return the number of updates that the weights have."""
        self._learner.stop()
        return self._do_within("stop", lambda: self._learner.num_updates, timeout_s)

    def save(
        self,
        folder: Path,
        run: str,
        answers_ahead: PerRank | None = None,
        *,
        background: bool = False,
        timeout_s: float | None = None,
    ) -> str | None:
        (shares,) = answers_ahead or [[]]
        answers = list(itertools.chain(*shares))

        def save() -> str | None:
            return self._learner.save(folder, run, answers, background=background)

        return self._do_within("save", save, timeout_s)

    def finish_save(self, *, wait: bool, timeout_s: float | None = None) -> list[Span] | None:
        return self._do_within(
            "finish_save", lambda: self._learner.finish_save(wait=wait), timeout_s
        )

    # The engine

    def split(self, requests: PerRank) -> list[PerRank]:
        size = self._config.rollout_matching.decode_batch_size
        together = group_size(self._config)
        chunk = round_chunk(size, self.devices, 1, together=together) // together
        if self._examples is not None and self._examples.scores_at_once:
            chunk = sys.maxsize
        return cut_rounds(requests, chunk)

    def generate(self, round_: PerRank) -> Future[PerRank]:
        """Begin one round. The future holds the rollouts themselves."""

        backend = self._backend
        assert backend is not None, "start comes first"

        def generate() -> PerRank:
            requests = round_[0]
            if self._config.environment is None:  # whose requests show no pictures themselves
                requests = [
                    replace(request, images=tuple(image.with_data() for image in request.images))
                    for request in requests
                ]
            return [[backend.generate(requests)]]

        return self._thread.submit(generate)

    def wait_idle(self) -> None:
        """Return at once: what is asked next comes behind a round in the one thread."""

    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]:
        backend = self._backend
        assert backend is not None, "start comes first"

        def receive() -> SyncReport:
            report = backend.receive_weights(offer)
            self.version = offer.version
            return report

        return self._thread.submit(receive)

    def join_replacements(self) -> bool:
        return False

    def replace_named(self, error: WeightSyncError) -> bool:  # noqa: ARG002
        return False

    def pop_replaced(self) -> list[Replacement]:
        return []

    def _do(self, method: Callable[..., T], *arguments: Any) -> T:
        """Call this in the thread, and wait for it."""
        return self._thread.submit(method, *arguments).result()

    def _do_within(self, phase: str, method: Callable[[], T], timeout_s: float | None) -> T:
        """Call this in the thread, for which a run that is being ended waits so long."""
        try:
            return self._thread.submit(method).result(timeout_s)
        except TimeoutError as error:
            if timeout_s is None:
                raise
            message = f"not done within timeouts.interrupt_s, of which {timeout_s:.0f} s were left"
            raise LearnerError(message, phase=phase) from error
