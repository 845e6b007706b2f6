"""The driver's proxy of the learner: all ranks as one, on Ray or in a thread of this process.

A method of `LearnerClient` sends a function to every rank. In the rank's process, the function is
called with the `LearnerRank` as its argument.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from learner.actor import LearnerRank, Started
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
from shared.sent_requests import REQUESTS_TOGETHER, RequestRef, SentRequests, in_objects
from shared.trajectory import ExampleCounts
from shared.weight_sync.canary import Differences
from shared.weight_sync.phases import SendReport, SyncPhase, sender_s
from shared.weight_sync.transports import Device

if TYPE_CHECKING:  # torch is imported by two of them
    from ray.actor import ActorHandle

    from learner.learner import Learner
    from learner.model.ranks import RankTopology

T = TypeVar("T")

WATCHDOG_SHARE = 0.9
"""NCCL's watchdog ends no process before this fraction of timeouts.learn_s."""


@dataclass(frozen=True, slots=True)
class LearnerCall(RayCall):
    """A call of the driver to learner ranks. The ranks' own errors are raised unchanged."""

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
        # On a GPU a lost peer raises no exception: the watchdog ends the waiting process.
        peer = "it may have lost a peer (another learner rank), which NCCL waits for no longer than"
        peer += " timeouts.learn_s: check the logs of the other ranks first"
        return CollectiveError(f"{message}; {peer}", phase=self.phase)

    def blames_peer(self, error: Exception) -> bool:
        return isinstance(error, CollectiveError)


class RunObserver(Protocol):
    """Interface to which the driver's clients report waits and weight syncs; see `Telemetry`."""

    def waits_for(self, what: str) -> AbstractContextManager[None]:
        """Show that the run waits for `what` during the `with` block."""

    def sync(self, report: SyncReport) -> None:
        """Record a weight sync that is not part of a step."""


class Unobserved:
    """A `RunObserver` that neither shows nor records."""

    def waits_for(self, what: str) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def sync(self, report: SyncReport) -> None:
        pass


UNOBSERVED = Unobserved()

SHOWN = {
    "next_requests": "the learner",
    "refill_requests": "the learner",
    "accumulate": "the learner",
    "finish_step": "the learner",
    "offer_weights": "the weight sync",
    "sync_done": "the weight sync",
    "save": "a checkpoint",
    "finish_save": "a checkpoint",
}
"""By name of a call to the learner ranks, what the console shows while the driver waits for it.
Nothing is shown for other calls.
"""


class RankExecutor(Protocol):
    """Interface that runs tasks (functions of a `LearnerRank`) in each learner rank, one at a time.

    A rank runs its tasks in the order of the calls. A task's first argument is the `LearnerRank`.
    If another argument is a reference, the task gets the value that it refers to.
    """

    num_ranks: int

    def ask(self, rank: int, name: str, task: Callable[..., object], *arguments: object) -> object:
        """Send a task to a rank; return a reference to the task's result.

        Process monitors show `name`.
        """

    def ask_kept(
        self, rank: int, name: str, task: Callable[..., Sequence[object]], *arguments: object
    ) -> tuple[object, object]:
        """Run a task that returns a list, which stays in the rank's process.

        Return two references: one to the list, and one to its length.
        """

    def ask_at_once(self, rank: int, task: Callable[[LearnerRank], object]) -> object:
        """Run the task on this rank at once, even while another task runs there.

        Return a reference to the task's result.
        """

    def put(self, value: object) -> object:
        """Store a value once for all ranks, and return a reference to it."""

    def wait(self, call: LearnerCall, asked: Sequence[tuple[str, object]]) -> list[object]:
        """Wait for the results of (rank name, reference) pairs, and return them.

        If ranks failed, raise the clearest of their errors.
        """

    def close(self, timeout_s: float) -> None:
        """End the engine or environment in each rank's process.

        If ranks are actors, wait at most `timeout_s` seconds for that.
        """


class RayRanks:
    """A `RankExecutor` for learner ranks that are Ray actors (handles in rank order)."""

    def __init__(self, actors: Sequence[ActorHandle]) -> None:
        self._actors = tuple(actors)
        self.num_ranks = len(actors)

    def ask(self, rank: int, name: str, task: Callable[..., object], *arguments: object) -> object:
        return self._actors[rank].run.options(name=name).remote(task, *arguments)

    def ask_kept(
        self, rank: int, name: str, task: Callable[..., Sequence[object]], *arguments: object
    ) -> tuple[object, object]:
        method = self._actors[rank].run_kept.options(name=name, num_returns=2)
        answers, count = method.remote(task, *arguments)
        return answers, count

    def ask_at_once(self, rank: int, task: Callable[[LearnerRank], object]) -> object:
        return self._actors[rank].run_at_once.remote(task)

    def put(self, value: object) -> object:
        return ray.put(value)

    def wait(self, call: LearnerCall, asked: Sequence[tuple[str, object]]) -> list[object]:
        return wait_for_all(call, asked)

    def close(self, timeout_s: float) -> None:
        """Wait, at most `timeout_s` seconds, until the ranks' engines end.

        The caller kills the actors later.
        """
        closing = [actor.run_at_once.remote(lambda rank: rank.close()) for actor in self._actors]
        ray.wait(closing, num_returns=len(closing), timeout=timeout_s)


class LearnerClient:
    """The driver's client of the learner: methods call all ranks and wait for the slowest.

    Arguments and results that are lists have one entry per learner rank, in rank order. Errors of
    the learner are raised unchanged.
    """

    offers_adapter = False
    """Whether the next weight sync sends an adapter instead of full weights."""
    falls_back = False
    """Whether full weights are sent after a failed sync of an adapter."""
    num_threads = 0
    """Number of torch threads in each rank's process, after the start."""
    findings: tuple[str, ...] = ()
    """What the learner's checks of its model's rows have found, one line each, after the start."""

    def __init__(
        self,
        ranks: RankExecutor,
        timeouts: TimeoutsSection | None,
        observer: RunObserver = UNOBSERVED,
    ) -> None:
        """`timeouts` None: this client limits only calls at the end of a run, because a breakpoint
        may stop any other call.
        """
        self._ranks = ranks
        self._names = [f"rank {rank}" for rank in range(ranks.num_ranks)]
        if ranks.num_ranks == 1:
            self._names = ["the learner"]
        self._timeouts = timeouts
        self._observer = observer
        self._asking = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ask-learner")
        # Start the thread now: if a later start is interrupted, the pool starts a second thread.
        self._asking.submit(int).result()
        self._threads = ThreadPoolExecutor(max_workers=3, thread_name_prefix="learner-client")
        self._has_backends = False
        self._closed_s = CLOSED_S
        self._updates_per_batch = 1
        self._refills = False
        self._num_rounds = 0
        """Number of rounds of the current step from which the ranks have learned."""
        self._patience_s = math.inf
        """Seconds from the start of a call in which NCCL's watchdog does not end a waiting rank."""

    def start(
        self,
        config: RunConfig,
        topologies: Sequence[RankTopology],
        make_backend: MakeBackend | None = None,
        examples: ExampleCounts | None = None,
        limit: Timeout | None = None,
    ) -> None:
        """Load model and data on every learner rank, and the engine if the rank has its own.

        Args:
            topologies: each rank's place in weight syncs.
            make_backend: makes the engine or environment in a rank; None: engines are elsewhere.
            examples: example counts of the run's environment, if it has one.
            limit: time limit of the start; None: `timeouts.start_s`. No effect if the client has no
                time limits.

        Raises:
            Exception: a rank's error about model, data or engine.
        """
        self._has_backends = make_backend is not None
        self._closed_s = 2 * CLOSED_S if config.algorithm.uses_environment else CLOSED_S
        self._updates_per_batch = config.training.updates_per_batch
        self._refills = config.environment is not None and config.environment.refill_rounds > 0
        self.falls_back = config.rollout_matching.vllm.sync.fallback_to_full
        limit = None if self._timeouts is None else limit or self._limit("start_s")
        if len(topologies) > 1:
            if topologies[0].device is Device.CUDA and self._timeouts is not None:
                self._patience_s = WATCHDOG_SHARE * self._timeouts.learn_s
            opening = self._ranks.ask(0, "start", lambda rank: rank.open_rendezvous(config))
            (endpoint,) = self._wait("start", limit, [opening])
            topologies = [replace(rank, rendezvous=endpoint) for rank in topologies]

        def start(rank: LearnerRank, topology: RankTopology) -> Started:
            return rank.start(config, topology, make_backend, examples)

        starting = [
            self._ranks.ask(rank, "start", start, topology)
            for rank, topology in enumerate(topologies)
        ]
        started = self._wait("start", limit, starting)[0]
        self.num_threads, self.offers_adapter, self.findings = started

    def next_requests(self, plan: StepPlan) -> PerRank:
        # If there are refill rounds, it is not known yet whether one follows.
        updates_next = not self._refills
        return self._begin(
            "next_requests", lambda learner: learner.next_requests(plan), updates_next=updates_next
        )

    def refill_requests(self, plan: StepPlan) -> PerRank:
        """Return requests that replace the step's rollout groups without a learning signal.

        Such groups have, for example, equal rewards. Call it after `accumulate`.
        """
        return self._begin("refill_requests", lambda learner: learner.refill_requests(plan))

    def accumulate(self, done: PerRank) -> None:
        self._num_rounds += 1
        self._on_rollouts("accumulate", done, lambda rank, own: rank.learner.accumulate(own))

    def finish_step(self) -> StepReport:
        # Each update after the first trains on the rows of all rounds again.
        times = 1 + (self._updates_per_batch - 1) * self._num_rounds
        self._num_rounds = 0
        limit = self._limit("learn_s", times, why=" (training.updates_per_batch)")
        reports = self._all("finish_step", lambda rank: rank.learner.finish_step(), limit)
        return merge_reports(reports)

    def held_out_requests(self, step: int) -> PerRank:
        return self._begin(
            "held_out_requests", lambda learner: learner.algorithm.held_out_requests(step)
        )

    def score(self, done: PerRank) -> list[Outcome]:
        scored = self._on_rollouts(
            "score", done, lambda rank, own: rank.learner.algorithm.score(own)
        )
        return list(itertools.chain(*scored))

    def offer_weights(self, *, again: bool = False) -> WeightOffer:
        """Return rank 0's offer of a weight sync.

        `again`: offer the current version, whose weights have not changed, once more.
        """
        offers = self._all(
            "offer_weights",
            lambda rank: rank.learner.publisher.offer(again),
            self._limit("sync_phase_s"),
        )
        assert offers[0] is not None, "rank 0 makes the offer"
        return offers[0]

    def send_weights(self, offer: WeightOffer) -> Future[SendReport]:
        """Begin to send the offered weights from rank 0, which enforces the offer's time limits.

        The other ranks help to gather a sharded model.
        """

        def send(rank: LearnerRank, offer: WeightOffer) -> SendReport:
            return rank.learner.publisher.send(offer)

        asked = self._ask_all("send_weights", send, self._ranks.put(offer))
        limit = None
        if self._timeouts is not None:
            key = "the limits of joining and sending (timeouts.sync_phase_s)"
            limit = Timeout(sender_s(offer), key)
        return self._threads.submit(lambda: self._wait("send_weights", limit, asked)[0])

    def sync_done(self, noise: Differences | None) -> None:
        """Report a finished weight sync to every rank.

        `noise` are the canary's differences at weight version 0, if the sync measured them.
        """
        limit = self._limit("sync_phase_s")
        self._all("sync_done", lambda rank: rank.learner.publisher.done(noise), limit)

    def fall_back_to_full(self) -> None:
        """Make all later weight syncs send full weights instead of an adapter."""
        self.offers_adapter = False
        limit = self._limit("sync_phase_s")
        self._all(
            "fall_back_to_full", lambda rank: rank.learner.publisher.fall_back_to_full(), limit
        )

    def leave_groups(self) -> None:
        """Make rank 0 leave its process groups with engines; the next sync creates new ones."""
        # This runs after a send, which may wait for a receiver that never comes.
        limit = self._limit("sync_phase_s", len(SyncPhase))
        leaving = self._ranks.ask(0, "leave_groups", lambda rank: rank.learner.publisher.close())
        self._wait("leave_groups", limit, [leaving])

    def stop(self, *, timeout_s: float) -> int:
        """Stop the work of all ranks, and return the number of finished steps.

        A rank stops learning after the current row. It stops generating before the next token.
        `timeout_s` (timeouts.interrupt_s) is the limit for all ranks to stop, in seconds.
        """
        ranks = range(self._ranks.num_ranks)
        # These calls are not waited for, because one limit is for them and the next call.
        self._ask(
            lambda: [
                self._ranks.ask_at_once(rank, lambda one: one.learner.stop()) for rank in ranks
            ]
        )
        limit = Timeout(timeout_s, "timeouts.interrupt_s")
        return self._all("stop", lambda rank: rank.learner.num_updates, limit)[0]

    def last_report(self) -> StepReport:
        """Return the report of the last step before a run was resumed."""
        reports = self._all("last_report", lambda rank: rank.learner.state.report)
        known = [report for report in reports if report is not None]
        assert known, "the run was resumed after an update"
        return merge_reports(known)

    def answers_ahead(self) -> PerRank:
        """Return references to the saved rollouts of a resumed run's first round."""
        asked = self._ask_all("answers_ahead", lambda rank: list(rank.learner.answers_ahead))
        return [[answers] for answers in asked]

    def save(
        self,
        folder: Path,
        run: str,
        answers_ahead: PerRank | None = None,
        *,
        background: bool = False,
        timeout_s: float | None = None,
    ) -> str | None:
        """Save a full checkpoint; all ranks take part. Raises StorageError.

        Args:
            run: the driver's part of the checkpoint, as JSON.
            answers_ahead: rollouts of the next step's first round, if they have been generated
                already.
            background: copy the state now, and write the copy during the next steps. `finish_save`
                completes the checkpoint.
            timeout_s: time limit in seconds: what is left of timeouts.interrupt_s if the run is
                being ended; None: timeouts.learn_s.

        Returns:
            Why the checkpoint was not written in the background although `background` is set; else
            None.
        """
        shares = answers_ahead or [[] for _ in self._names]
        return self._on_rollouts(
            "save",
            shares,
            lambda rank, own: rank.learner.save(folder, run, own, background=background),
            self._save_limit(timeout_s),
        )[0]

    def finish_save(self, *, wait: bool, timeout_s: float | None = None) -> list[Span] | None:
        """Complete the checkpoint that is written in the background, if all ranks have written it.

        `wait`: first wait until all ranks have written it. Returns the periods of writing (empty if
        no save was begun), or None if the checkpoint is still incomplete. Raises StorageError;
        another call then writes the checkpoint again.
        """
        limit = self._save_limit(timeout_s)
        written = self._all("finish_save", lambda rank: rank.learner.finish_save(wait=wait), limit)
        spans = [of_rank for of_rank in written if of_rank is not None]
        return list(itertools.chain(*spans)) if len(spans) == len(written) else None

    def close(self) -> None:
        """End the engine and the environment in each rank, each within `CLOSED_S` seconds.

        A second call is harmless.
        """
        if self._has_backends:
            self._ranks.close(self._closed_s)

    # If the ranks generate their own rollouts

    def generate(self, round_: PerRank, limit: Timeout) -> Future[PerRank]:
        """Begin a round of rollouts: each rank's own engine generates what the rank learns.

        The future holds, for each rank, a list with one reference, to the list of the rank's
        rollouts. It is empty if the rank has no requests.
        """

        def generate(rank: LearnerRank, places: range, *objects: SentRequests) -> list[object]:
            return rank.generate(objects, places)

        def ask() -> dict[int, tuple[object, object]]:
            """Send each rank its requests.

            Return two references for each rank with requests: one to the list of the rank's
            rollouts, and one to the number of these rollouts.
            """
            sent = {}
            for rank, requests in enumerate(round_):
                if requests:
                    objects, places = in_objects(requests)
                    sent[rank] = self._ranks.ask_kept(rank, "generate", generate, places, *objects)
            return sent

        sent = self._ask(ask)
        call = self._call("generate", None if self._timeouts is None else limit)

        def collect() -> PerRank:
            counts = [(self._names[rank], count) for rank, (_, count) in sent.items()]
            self._ranks.wait(call, counts)
            return [[sent[rank][0]] if rank in sent else [] for rank in range(len(round_))]

        return self._threads.submit(collect)

    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]:
        """Begin a weight sync into each rank's own engine.

        The future holds one report for all ranks, with the times of the slowest rank.
        """

        def receive(rank: LearnerRank, offer: WeightOffer) -> SyncReport:
            return rank.receive_weights(offer)

        # Stored once for all ranks, because it may hold an adapter's files.
        asked = self._ask_all("receive_weights", receive, self._ranks.put(offer))
        # A backend waits for no peer and has no limits itself: this limit is for the whole sync.
        limit = self._limit("sync_phase_s", len(SyncPhase))
        return self._threads.submit(
            lambda: SyncReport.of_slowest(self._wait("receive_weights", limit, asked))
        )

    def _begin(
        self, phase: str, draw: Callable[[Learner], list[Any]], *, updates_next: bool = False
    ) -> PerRank:
        """Begin a step, a refill of the step or a held-out report.

        `draw` makes the requests of a rank. `updates_next` is for `LearnerRank.begin`. Returns
        references to each rank's requests.
        """
        # The requests are not waited for: an engine begins as soon as its own are ready.
        counts = self._all(
            phase, lambda rank: rank.begin(draw(rank.learner), updates_next=updates_next)
        )

        def send(rank: LearnerRank, first: int, stop: int) -> SentRequests:
            return rank.requests(first, stop)

        def ask() -> PerRank:
            refs: PerRank = [[] for _ in counts]
            # In parts over all ranks: no rank's first requests wait for another rank's last.
            for first in range(0, max(counts), REQUESTS_TOGETHER):
                for rank, count in enumerate(counts):
                    stop = min(first + REQUESTS_TOGETHER, count)
                    if first < stop:
                        sent = self._ranks.ask(rank, "requests", send, first, stop)
                        refs[rank] += [RequestRef(sent, index) for index in range(stop - first)]
            return refs

        return self._ask(ask)

    def _on_rollouts(
        self,
        phase: str,
        done: PerRank,
        task: Callable[[LearnerRank, list[Any]], T],
        limit: Timeout | None = None,
    ) -> list[T]:
        """Run a task on every rank with the rank's own rollouts, and return the results.

        `limit` None: timeouts.learn_s.
        """

        def joined(rank: LearnerRank, *shares: list[Any]) -> T:
            return task(rank, list(itertools.chain(*shares)))

        asked = self._ask(
            lambda: [
                self._ranks.ask(rank, phase, joined, *shares)
                for rank, shares in zip(range(self._ranks.num_ranks), done, strict=True)
            ]
        )
        return self._wait(phase, limit or self._limit("learn_s"), asked)

    def _all(
        self, phase: str, task: Callable[[LearnerRank], T], limit: Timeout | None = None
    ) -> list[T]:
        """Run a task on every rank, and return the results. `limit` None: timeouts.learn_s."""
        asked = self._ask_all(phase, task)
        return self._wait(phase, limit or self._limit("learn_s"), asked)

    def _ask_all(self, phase: str, task: Callable[..., object], *arguments: object) -> list[object]:
        ranks = range(self._ranks.num_ranks)
        return self._ask(lambda: [self._ranks.ask(rank, phase, task, *arguments) for rank in ranks])

    def _ask(self, ask: Callable[[], T]) -> T:
        """Run `ask`, which calls several ranks, in the single thread for such calls.

        No signal is handled in that thread. Otherwise an interruption could come between the calls
        of two ranks, which would then wait in different collectives. Every rank gets later calls of
        the driver after the calls of `ask`, even if the driver was interrupted.
        """
        return self._asking.submit(ask).result()

    def _wait(self, phase: str, limit: Timeout | None, asked: Sequence[object]) -> list[Any]:
        """Wait for the ranks' answers to a call, and return them.

        `asked` has a reference for each rank from rank 0 on. If several ranks failed, an error that
        is not caused by another rank's failure is raised first.
        """
        named = list(zip(self._names, asked, strict=False))
        shown = SHOWN.get(phase)
        with self._observer.waits_for(shown) if shown else nullcontext():
            return self._ranks.wait(self._call(phase, limit), named)

    def _call(self, phase: str, limit: Timeout | None) -> LearnerCall:
        # The rank that ends first usually failed itself: NCCL ends waiting ranks after learn_s.
        check = "its stack with `py-spy dump` or, on Ray, in the dashboard"
        watchdog_from = time.monotonic() + self._patience_s
        return LearnerCall(phase, limit, check, LearnerError, watchdog_from=watchdog_from)

    def _limit(
        self,
        name: Literal["start_s", "learn_s", "sync_phase_s"],
        times: int = 1,
        *,
        why: str = "",
    ) -> Timeout | None:
        """Return the time limit of this key, multiplied by `times`; None if there are no limits.

        `why` is added to the key in messages.
        """
        if self._timeouts is None:
            return None
        limit = self._timeouts.limit(name)
        if times == 1:
            return limit
        return Timeout(times * limit.seconds, f"{times} x {limit.key}{why}")

    def _save_limit(self, timeout_s: float | None) -> Timeout | None:
        if timeout_s is None:
            return self._limit("learn_s")
        return Timeout(timeout_s, "timeouts.interrupt_s")
