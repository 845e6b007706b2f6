"""The learner as the driver sees it: all ranks as one, with a limit on every wait."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from rollout_actors.engine.ray_calls import RayCall, wait_for_all
from shared.config import RunConfig
from shared.config.job import TimeoutsSection
from shared.errors import (
    CollectiveError,
    LearnerError,
    LostLearnerError,
    Timeout,
    ended,
    late,
)
from shared.grounding.evaluation import Outcome
from shared.metrics import StepReport, merge_reports
from shared.protocols import CLOSED_S, MakeBackend, PerRank
from shared.rollouts import SyncReport, WeightOffer
from shared.run_files import Span
from shared.schedule import StepPlan
from shared.sent_requests import REQUESTS_TOGETHER, RequestRef, in_objects
from shared.trajectory import ExampleCounts
from shared.weight_sync.canary import Differences
from shared.weight_sync.phases import SendReport, SyncPhase, all_phases_s, sender_s
from shared.weight_sync.transports import Device

if TYPE_CHECKING:  # it imports torch
    from learner.model.ranks import RankTopology

T = TypeVar("T")

WATCHDOG_SHARE = 0.9
"""Share of timeouts.learn_s before which NCCL's watchdog ends no process."""


@dataclass(frozen=True, slots=True)
class LearnerCall(RayCall):
    """A call to learner ranks, whose own errors are raised as they are."""

    watchdog_from: float = math.inf
    """Monotonic time from which NCCL's watchdog may end a rank that waits for a lost peer."""

    def timeout_error(self, names: Sequence[str]) -> Exception:
        assert self.limit is not None, "every call to the learner has a limit"
        message = late(", ".join(names), self.limit, self.check)
        return LostLearnerError(f"{message}, or raise {self.limit.key}", phase=self.phase)

    def translate_error(self, name: str, error: RayError) -> Exception:
        if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
            return error.cause
        message = ended("its" if name == "the learner" else f"{name}'s", error)
        if time.monotonic() < self.watchdog_from:
            return LostLearnerError(message, phase=self.phase)
        # On a GPU a lost peer is no exception: the watchdog ends the process that waits for it.
        peer = "it may have lost a peer, which NCCL waits for no longer than timeouts.learn_s"
        return CollectiveError(f"{message}; {peer}: check the other ranks first", phase=self.phase)

    def blames_peer(self, error: Exception) -> bool:
        return isinstance(error, CollectiveError)


class RayLearner:
    """The learner ranks on Ray (`launch.driver.LearnerClient`). Lists are in rank order."""

    offers_adapter = False
    """Whether the next offer is of an adapter."""
    falls_back = False
    """Whether full weights follow on an adapter's sync that fails."""
    num_threads = 0
    """Threads of torch in each rank's process, once they have started."""

    def __init__(self, actors: Sequence[Any], timeouts: TimeoutsSection) -> None:
        """`actors` are handles of `LearnerActor`s, rank by rank."""
        self._actors = tuple(actors)
        self._names = [f"rank {rank}" for rank in range(len(actors))]
        if len(actors) == 1:
            self._names = ["the learner"]
        self._timeouts = timeouts
        self._asking = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ask-learner")
        # Starts its thread: an interruption of a later start would make the pool begin another.
        self._asking.submit(int).result()
        self._threads = ThreadPoolExecutor(max_workers=3, thread_name_prefix="learner")
        self._has_backends = False
        self._closed_s = CLOSED_S
        self._updates_per_batch = 1
        self._num_rounds = 0
        """Rounds of the step in progress that were learned."""
        self._waits_by_nccl = False

    def start(
        self,
        config: RunConfig,
        topologies: Sequence[RankTopology],
        make_backend: MakeBackend | None = None,
        examples: ExampleCounts | None = None,
        limit: Timeout | None = None,
    ) -> None:
        """Load model and data on every rank and, where there is one, its backend.

        Args:
            topologies: one for each rank.
            make_backend: makes the backend beside each rank; None: engines are elsewhere.
            examples: those of the run's environment, where it has one.
            limit: of the start; None: timeouts.start_s.

        Raises:
            Exception: what a rank finds wrong with them.
        """
        self._has_backends = make_backend is not None
        self._closed_s = CLOSED_S if config.environment is None else 2 * CLOSED_S
        self._updates_per_batch = config.training.updates_per_batch
        self.falls_back = config.rollout_matching.vllm.sync.fallback_to_full
        self._waits_by_nccl = len(topologies) > 1 and topologies[0].device is Device.CUDA
        limit = limit or self._timeouts.limit("start_s")
        if len(topologies) > 1:
            opening = self._actors[0].open_rendezvous.remote(config)
            (endpoint,) = self._wait("start", limit, [opening])
            topologies = [replace(rank, rendezvous=endpoint) for rank in topologies]
        starting = [
            actor.start.remote(config, topology, make_backend, examples)
            for actor, topology in zip(self._actors, topologies, strict=True)
        ]
        self.num_threads, self.offers_adapter = self._wait("start", limit, starting)[0]

    def next_requests(self, plan: StepPlan) -> PerRank:
        return self._begin("next_requests", plan)

    def refill_requests(self) -> PerRank:
        return self._begin("refill_requests")

    def accumulate(self, done: PerRank) -> None:
        self._num_rounds += 1
        self._on_rollouts("accumulate", done)

    def finish_step(self) -> StepReport:
        limit = self._timeouts.limit("learn_s")
        # Each update behind the first learns the rows of all rounds again.
        if again := (self._updates_per_batch - 1) * self._num_rounds:
            key = f"{again + 1} x timeouts.learn_s (training.updates_per_batch)"
            limit = Timeout((again + 1) * limit.seconds, key)
        self._num_rounds = 0
        return merge_reports(self._all("finish_step", "finish_step", limit=limit))

    def held_out_requests(self, step: int) -> PerRank:
        return self._begin("held_out_requests", step)

    def score(self, done: PerRank) -> list[Outcome]:
        return list(itertools.chain(*self._on_rollouts("score", done)))

    def offer_weights(self, *, again: bool = False) -> WeightOffer:
        """Return rank 0's offer. Every rank takes part: a sharded model is gathered by all."""
        limit = self._timeouts.limit("sync_phase_s")
        offer: WeightOffer = self._all("offer_weights", "publisher.offer", again, limit=limit)[0]
        return offer

    def send_weights(self, offer: WeightOffer) -> Future[SendReport]:
        """Begin to send from rank 0, which keeps the limits of its two phases itself."""
        sending = self._actors[0].call.remote("publisher.send", offer)
        key = "the limits of joining and sending (timeouts.sync_phase_s)"
        limit = Timeout(sender_s(offer), key)
        return self._threads.submit(lambda: self._wait("send_weights", limit, [sending])[0])

    def sync_done(self, noise: Differences | None) -> None:
        """Tell every rank that the offered version is served, and the noise that was measured."""
        self._all("sync_done", "publisher.done", noise, limit=self._timeouts.limit("sync_phase_s"))

    def fall_back_to_full(self) -> None:
        """Have every rank take part in offers of full weights from now on."""
        self.offers_adapter = False
        limit = self._timeouts.limit("sync_phase_s")
        self._all("fall_back_to_full", "publisher.fall_back_to_full", limit=limit)

    def leave_groups(self) -> None:
        """Have rank 0 leave its process groups, so that the next offer is of new ones."""
        # Behind a send that waits for a receiver which will not come.
        limit = Timeout(
            all_phases_s(self._timeouts.sync_phase_s), f"{len(SyncPhase)} x timeouts.sync_phase_s"
        )
        answer = self._actors[0].call.remote("publisher.close")
        self._wait("leave_groups", limit, [answer])

    def stop(self, *, timeout_s: float) -> int:
        """End what the ranks are doing, and return the number of updates that their weights have.

        A rank leaves what it learns after its present row, and what it generates before the next
        token. `timeout_s` is the configuration's timeouts.interrupt_s, for all ranks to be free.
        """
        self._ask_all("stop")  # not waited for: the limit is one for both
        asked = self._ask_all("num_updates")
        num_updates: int = self._wait("stop", Timeout(timeout_s, "timeouts.interrupt_s"), asked)[0]
        return num_updates

    def last_report(self) -> StepReport:
        """Return the report of the last step before a run was resumed."""
        return merge_reports(self._all("last_report", "last_report"))

    def answers_ahead(self) -> PerRank:
        """Return references to the answers that a resumed run has of its first step."""
        return self._ask(lambda: [[actor.answers_ahead.remote()] for actor in self._actors])

    def save(
        self,
        folder: Path,
        run: str,
        answers_ahead: PerRank | None = None,
        *,
        background: bool = False,
        timeout_s: float | None = None,
    ) -> str | None:
        """Save a full checkpoint: every rank takes part, rank 0 the most. Raises StorageError.

        Args:
            run: the driver's part of it, as JSON.
            answers_ahead: the next step's first round, where it was generated already.
            background: copy it, and write it beside the next steps, until `finish_save`.
            timeout_s: what is left of timeouts.interrupt_s when a run is being ended.

        Returns:
            Why it was not written in the background although that was wanted.
        """
        shares = answers_ahead or [[] for _ in self._actors]
        asked = self._ask(
            lambda: [
                actor.save.remote(folder, run, background, *share)
                for actor, share in zip(self._actors, shares, strict=True)
            ]
        )
        reason: str | None = self._wait("save", self._save_limit(timeout_s), asked)[0]
        return reason

    def finish_save(self, *, wait: bool, timeout_s: float | None = None) -> list[Span] | None:
        """Give the checkpoint in the background its name if all ranks have written it.

        `wait`: until they have. Returns when they wrote it; nothing where no save was begun. None:
        it is not all there. Raises StorageError, and writes it again when it is called again.
        """
        limit = self._save_limit(timeout_s)
        written = self._wait("finish_save", limit, self._ask_all("finish_save", wait))
        return None if None in written else list(itertools.chain(*written))

    def _save_limit(self, timeout_s: float | None) -> Timeout:
        if timeout_s is not None:
            return Timeout(timeout_s, "timeouts.interrupt_s")
        return self._timeouts.limit("learn_s")

    def close(self) -> None:
        """End what is beside the ranks in order, within `CLOSED_S` for an engine and as much for an
        environment. Twice is harmless.
        """
        closing = [actor.close.remote() for actor in self._actors if self._has_backends]
        ray.wait(closing, num_returns=len(closing), timeout=self._closed_s)

    # Where the ranks generate their own rollouts

    def generate(self, round_: PerRank, limit: Timeout) -> Future[PerRank]:
        """Begin a round, in which each rank generates what it is going to learn.

        The future holds, for each rank, references to its rollouts.
        """

        def ask() -> dict[int, list[Any]]:
            """Return references to each rank's rollouts and to their number."""
            sent = {}
            for rank, requests in enumerate(round_):
                if requests:
                    objects, places = in_objects(requests)
                    method = self._actors[rank].generate.options(num_returns=2)
                    sent[rank] = method.remote(*objects, places=places)
            return sent

        sent = self._ask(ask)

        def collect() -> PerRank:
            counts = [(self._names[rank], count) for rank, (_, count) in sent.items()]
            wait_for_all(self._call("generate", limit), counts)
            return [[sent[rank][0]] if rank in sent else [] for rank in range(len(round_))]

        return self._threads.submit(collect)

    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]:
        """Begin a sync of each rank's backend. The future holds the slowest one's report."""
        asked = self._ask_all("receive_weights", ray.put(offer))
        # A backend waits for nobody and keeps no limits of its own: this one bounds the whole sync.
        phases = Timeout(
            all_phases_s(self._timeouts.sync_phase_s), f"{len(SyncPhase)} x timeouts.sync_phase_s"
        )
        return self._threads.submit(
            lambda: SyncReport.of_slowest(self._wait("receive_weights", phases, asked))
        )

    def _begin(self, phase: str, *arguments: Any) -> PerRank:
        """Begin a step, a refill or a report. Returns references to each rank's requests."""
        # They are not waited for: the engines of the first round begin when theirs are ready.
        asked = self._ask_all("begin", phase, *arguments)
        counts = self._wait(phase, self._timeouts.limit("learn_s"), asked)

        def ask() -> PerRank:
            refs: PerRank = [[] for _ in counts]
            # Part by part over all ranks, so that no rank's first requests wait for another's last.
            for first in range(0, max(counts), REQUESTS_TOGETHER):
                for rank, count in enumerate(counts):
                    num = len(range(first, min(first + REQUESTS_TOGETHER, count)))
                    if num:
                        sent = self._actors[rank].requests.remote(first, first + num)
                        refs[rank] += [RequestRef(sent, index) for index in range(num)]
            return refs

        return self._ask(ask)

    def _on_rollouts(self, phase: str, done: PerRank) -> list[Any]:
        """Give each rank its own rollouts."""
        asked = self._ask(
            lambda: [
                actor.call_on_rollouts.remote(phase, *shares)
                for actor, shares in zip(self._actors, done, strict=True)
            ]
        )
        return self._wait(phase, self._timeouts.limit("learn_s"), asked)

    def _all(
        self, phase: str, method: str, *arguments: Any, limit: Timeout | None = None
    ) -> list[Any]:
        """Call a method of every rank's learner; `limit` None: timeouts.learn_s."""
        asked = self._ask_all("call", method, *arguments)
        return self._wait(phase, limit or self._timeouts.limit("learn_s"), asked)

    def _ask_all(self, name: str, *arguments: Any) -> list[Any]:
        """Call this method of every rank's actor, and return the references."""
        return self._ask(
            lambda: [getattr(actor, name).remote(*arguments) for actor in self._actors]
        )

    def _ask(self, ask: Callable[[], T]) -> T:
        """Run `ask`, which calls several ranks, in the one thread that does so.

        No signal is handled there: an interruption between two ranks' calls would leave them in
        different collectives. And what is asked after an interruption comes behind it on every
        rank.
        """
        return self._asking.submit(ask).result()

    def _wait(self, phase: str, limit: Timeout, asked: list[Any]) -> list[Any]:
        """Return the answers to what was `asked` of the first ranks, or raise the best error."""
        return wait_for_all(self._call(phase, limit), list(zip(self._names, asked, strict=False)))

    def _call(self, phase: str, limit: Timeout) -> LearnerCall:
        # The first rank to end normally failed itself: NCCL ends those that wait after learn_s.
        patience_s = WATCHDOG_SHARE * self._timeouts.learn_s if self._waits_by_nccl else math.inf
        check = "its stack in the Ray dashboard or with `py-spy dump`"
        return LearnerCall(
            phase, limit, check, LearnerError, watchdog_from=time.monotonic() + patience_s
        )
