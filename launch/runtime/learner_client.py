"""The learner as the driver has it: all ranks as one, with a timeout on every wait."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from learner.model.ranks import RankTopology
from shared.config import RunConfig
from shared.config.derive import resolved_sync_mode
from shared.config.job import TimeoutsSection
from shared.errors import CollectiveError, LearnerError, Timeout, ended, late
from shared.grounding.evaluation import Outcome
from shared.metrics import RankReport, StepReport, merge_reports
from shared.protocols import CLOSED_S, MakeBackend, PerRank
from shared.rollouts import SyncReport, WeightOffer
from shared.schedule import StepPlan
from shared.sent_requests import REQUESTS_TOGETHER, RequestRef, in_objects
from shared.trajectory import ExampleCounts
from shared.weight_sync.differences import Differences
from shared.weight_sync.phases import SendReport, SyncPhase, all_phases_s, sender_s
from shared.weight_sync.transports import Device

T = TypeVar("T")

GRACE_S = 3.0
"""Given to the other ranks when one has failed: the one whose connection broke often speaks before
the one that broke it.
"""

WATCHDOG_SHARE = 0.9
"""Of timeouts.learn_s: a rank that ends earlier than this in a phase was not ended by NCCL's
watchdog."""


class RayLearner:
    """All ranks as the driver uses them (`launch.driver.DrivesLearner`). A list over ranks is in
    rank order.
    """

    def __init__(self, actors: Sequence[Any], timeouts: TimeoutsSection) -> None:
        """`actors` are handles of `LearnerActor`s, rank by rank."""
        self._actors = tuple(actors)
        self._timeouts = timeouts
        self._asking = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ask-learner")
        # Its thread starts here: an interruption of a start would make the pool forget the thread,
        # and start another beside it.
        self._asking.submit(int).result()
        self._threads = ThreadPoolExecutor(max_workers=3, thread_name_prefix="learner")
        self._has_backends = False
        self._waits_by_nccl = False
        self.offers_adapter = self.falls_back = False
        """`shared.weight_sync.phases.SendsWeights`."""
        self.num_threads = 0
        """Of torch in each rank's process, once they have started."""
        self.received_version = 0
        """Of the weights that the ranks' backends took last; 0 before the first sync."""

    def start(
        self,
        config: RunConfig,
        places: Sequence[RankTopology],
        make_backend: MakeBackend | None = None,
        examples: ExampleCounts | None = None,
    ) -> None:
        """Returns when every rank has loaded model and data and, where there is one, its backend.
        Raises what a rank finds wrong with them. `examples` are those of the run's environment,
        where it has one."""
        self._has_backends = make_backend is not None
        self.offers_adapter, self.falls_back = (
            resolved_sync_mode(config) == "adapter",
            config.rollout_matching.vllm.sync.fallback_to_full,
        )
        self._waits_by_nccl = len(places) > 1 and places[0].device is Device.CUDA
        limit = self._timeouts.limit("start_s")
        if len(places) > 1:
            (endpoint,) = self._wait(
                "start", limit, [self._actors[0].open_rendezvous.remote(config)]
            )
            places = [replace(place, rendezvous=endpoint) for place in places]
        refs = [
            actor.start.remote(config, place, make_backend, examples)
            for actor, place in zip(self._actors, places, strict=True)
        ]
        self.num_threads = self._wait("start", limit, refs)[0]

    def next_requests(self, plan: StepPlan) -> PerRank:
        return self._requests(
            self._learn("next_requests", lambda rank: self._actors[rank].next_requests.remote(plan))
        )

    def accumulate(self, done: PerRank) -> None:
        self._learn("accumulate", lambda rank: self._actors[rank].accumulate.remote(*done[rank]))

    def finish_step(self) -> StepReport:
        reports: list[RankReport] = self._learn(
            "finish_step", lambda rank: self._actors[rank].finish_step.remote()
        )
        return merge_reports(reports)

    def held_out_requests(self, step: int) -> PerRank:
        return self._requests(
            self._learn(
                "held_out_requests", lambda rank: self._actors[rank].held_out_requests.remote(step)
            )
        )

    def score(self, done: PerRank) -> list[Outcome]:
        return list(
            itertools.chain(
                *self._learn("score", lambda rank: self._actors[rank].score.remote(*done[rank]))
            )
        )

    def offer_weights(self) -> WeightOffer:
        """Every rank takes part, since a sharded model is gathered by all; rank 0 makes the
        offer."""
        offer: WeightOffer = self._sync(
            "offer_weights", lambda rank: self._actors[rank].offer_weights.remote()
        )[0]
        return offer

    def send_weights(self, offer: WeightOffer) -> Future[SendReport]:
        """Rank 0 sends, and keeps the limits of a sync's phases itself: it takes part in two, and
        says first what was late.
        """
        ref = self._actors[0].send_weights.remote(offer)
        limit = Timeout(
            sender_s(offer), "the limits of joining and sending (timeouts.sync_phase_s)"
        )
        return self._threads.submit(lambda: self._wait("send_weights", limit, [ref])[0])

    def sync_done(self, noise: Differences | None) -> None:
        """Tell every rank that the offered version is served, and the noise that was measured."""
        self._sync("sync_done", lambda rank: self._actors[rank].sync_done.remote(noise))

    def fall_back_to_full(self) -> None:
        """Rank 0, which alone has an adapter to offer, offers full weights from now on."""
        self.offers_adapter = False
        self._wait(
            "fall_back_to_full",
            self._timeouts.limit("sync_phase_s"),
            [self._actors[0].fall_back_to_full.remote()],
        )

    def stop(self, *, timeout_s: float) -> int:
        """The run is being ended: every rank leaves what it is learning after its present row, and
        what it is generating before the next token. Returns when all are free.

        The number is that of the finished updates, which the weights are of. `timeout_s` is the
        configuration's timeouts.interrupt_s.
        """
        # Not waited for by itself: a rank that has not been told does not become free, and the
        # limit is one for both.
        self._together(lambda: [actor.stop.remote() for actor in self._actors])
        num_updates: int = self._all(
            "stop",
            Timeout(timeout_s, "timeouts.interrupt_s"),
            lambda rank: self._actors[rank].num_updates.remote(),
        )[0]
        return num_updates

    def save(self, folder: Path, *, timeout_s: float | None = None) -> None:
        """Every rank takes part; rank 0 writes. Raises StorageError. `timeout_s`: what is left of
        timeouts.interrupt_s when a run is being ended.
        """
        limit = (
            self._timeouts.limit("learn_s")
            if timeout_s is None
            else Timeout(timeout_s, "timeouts.interrupt_s")
        )
        self._all("save", limit, lambda rank: self._actors[rank].save.remote(folder))

    def close(self) -> None:
        """End the engines beside the ranks, in order and within `CLOSED_S`; whose process does not
        answer keeps its engine. Twice is harmless.
        """
        closing = [actor.close.remote() for actor in self._actors if self._has_backends]
        ray.wait(closing, num_returns=len(closing), timeout=CLOSED_S)

    # Where the ranks generate their own rollouts

    def generate(self, round_: PerRank) -> Future[PerRank]:
        """Each rank generates what it is going to learn. The future holds, for each rank,
        references to its rollouts.
        """
        sent = self._together(
            lambda: {
                rank: self._send(rank, requests) for rank, requests in enumerate(round_) if requests
            }
        )

        def collect() -> PerRank:
            self._wait(
                "generate",
                self._timeouts.limit("generate_s"),
                [count for _, count in sent.values()],
            )
            return [[sent[rank][0]] if rank in sent else [] for rank in range(len(round_))]

        return self._threads.submit(collect)

    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]:
        """Each rank's backend takes the weights of its own learner. The future holds the slowest
        one's report.
        """
        shared_offer = ray.put(offer)
        refs = self._together(
            lambda: [actor.receive_weights.remote(shared_offer) for actor in self._actors]
        )
        # A backend waits for nobody and keeps no limits of its own: this one bounds the whole sync.
        limit = Timeout(
            all_phases_s(self._timeouts.sync_phase_s), f"{len(SyncPhase)} x timeouts.sync_phase_s"
        )

        def collect() -> SyncReport:
            report = SyncReport.of_slowest(self._wait("receive_weights", limit, refs))
            self.received_version = offer.version
            return report

        return self._threads.submit(collect)

    def _requests(self, counts: list[int]) -> PerRank:
        """References to each rank's requests, which are not waited for: the engines of the first
        round begin when theirs have been made.
        """

        def ask() -> PerRank:
            refs: PerRank = [[] for _ in counts]
            for first in range(0, max(counts), REQUESTS_TOGETHER):
                for rank, count in enumerate(counts):
                    num = len(range(first, min(first + REQUESTS_TOGETHER, count)))
                    if num:
                        sent = self._actors[rank].requests.remote(first, first + num)
                        refs[rank] += [RequestRef(sent, place) for place in range(num)]
            return refs

        return self._together(ask)

    def _send(self, rank: int, requests: list[Any]) -> list[Any]:
        """References to the rank's rollouts, and to their number."""
        objects, places = in_objects(requests)
        answers: list[Any] = (
            self._actors[rank].generate.options(num_returns=2).remote(*objects, places=places)
        )
        return answers

    def _whose(self, refs: list[Any], ref: Any) -> str:
        return "its" if len(self._actors) == 1 else f"rank {refs.index(ref)}'s"

    def _learn(self, phase: str, ask: Callable[[int], Any]) -> list[Any]:
        return self._all(phase, self._timeouts.limit("learn_s"), ask)

    def _sync(self, phase: str, ask: Callable[[int], Any]) -> list[Any]:
        return self._all(phase, self._timeouts.limit("sync_phase_s"), ask)

    def _all(self, phase: str, limit: Timeout, ask: Callable[[int], Any]) -> list[Any]:
        return self._wait(
            phase, limit, self._together(lambda: [ask(rank) for rank in range(len(self._actors))])
        )

    def _together(self, ask: Callable[[], T]) -> T:
        """`ask()`, which asks several ranks, in a thread, where no signal is handled: an
        interruption between two of them would leave the ranks in different collectives. One thread,
        so that what is asked after an interruption comes behind it on every rank.
        """
        return self._asking.submit(ask).result()

    def _wait(self, phase: str, limit: Timeout, refs: list[Any]) -> list[Any]:
        """Every rank's answer, or the error that says most."""
        started = time.monotonic()
        deadline = started + limit.seconds
        waiting, errors = list(refs), []
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            whose = self._whose(refs, ready[0])
            # The first rank to end is normally the one that failed: those that wait for it end when
            # NCCL has waited for learn_s.
            has_waited = time.monotonic() - started >= WATCHDOG_SHARE * self._timeouts.learn_s
            is_victim = self._waits_by_nccl and has_waited
            error = _error_of(ready[0], phase, whose, may_have_lost_peer=is_victim)
            if error is not None:
                errors.append(error)
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if errors:
            # A rank that waited for another in vain knows less than the other.
            raise min(errors, key=lambda error: isinstance(error, CollectiveError))
        if waiting:
            who = (
                "the learner"
                if len(self._actors) == 1
                else f"rank {', '.join(str(refs.index(ref)) for ref in waiting)}"
            )
            told = late(who, limit, "its stack in the Ray dashboard or with `py-spy dump`")
            raise LearnerError(f"{told}, or raise {limit.key}", phase=phase)
        return ray.get(refs)


def _error_of(ref: Any, phase: str, whose: str, *, may_have_lost_peer: bool) -> Exception | None:
    try:
        # The driver reads no payload here: a rollout's reference is never among those that are
        # waited for.
        ray.get(ref)
    except RayError as error:
        told = explained(error, phase, whose, may_have_lost_peer=may_have_lost_peer)
        told.__cause__ = error
        return told
    return None


def explained(error: RayError, phase: str, whose: str, *, may_have_lost_peer: bool) -> Exception:
    """Return what the learner raised in place of Ray's exception around it, or what became of it.

    Args:
        whose: "its", or a rank's: "rank 1's".
        may_have_lost_peer: the rank may have waited for others on a GPU until its process ended.
            There a lost peer is no exception: NCCL's watchdog ends the process that has waited.
    """
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return error.cause
    told = ended(whose, error)
    if not may_have_lost_peer:
        return LearnerError(told, phase=phase)
    peer = "it may have lost a peer, which NCCL waits for no longer than timeouts.learn_s"
    return CollectiveError(f"{told}; {peer}: check the other ranks first", phase=phase)
