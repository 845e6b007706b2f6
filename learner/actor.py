"""The learner on Ray: a thin shell for each rank in a process of its own, and the driver's end of all of them with a timeout on every wait."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from learner.host import LearnerHost
from learner.learner import Learner
from learner.place import LearnerPlace
from learner.ranks import Rendezvous
from shared.config import RunConfig
from shared.config.derive import rollout_servers
from shared.config.timeouts import TimeoutsSection
from shared.errors import CollectiveError, LearnerError
from shared.evaluation import Scene
from shared.protocols import MakeBackend, RolloutBackend
from shared.reports import RankReport, StepReport, merge_reports
from shared.rollouts import Rollout, RolloutRequest, SyncReport, WeightOffer
from shared.schedule import StepPlan
from shared.weight_sync import SendReport

Share = list[Rollout]

GRACE_S = 3.0
"""Given to the other ranks when one has failed: the one whose connection broke often speaks before the one that broke it."""


class LearnerShell:
    """One rank: `Learner` with references instead of payloads, and where it generates its own rollouts, the backend beside it."""

    _learner: Learner
    _rendezvous: Rendezvous | None = None
    _backend: RolloutBackend | None = None

    def open_rendezvous(self, config: RunConfig) -> str:
        """On rank 0: where the others find it, `host:port`."""
        self._rendezvous = Rendezvous(_host(config))
        return self._rendezvous.address

    def start(self, config: RunConfig, place: LearnerPlace, make_backend: MakeBackend | None) -> int:
        """Load model and data; the number of torch's threads. Not in the constructor, whose exceptions Ray turns into a dead actor."""
        self._learner = Learner(config, replace(place, host=_host(config)), self._rendezvous)
        if make_backend is not None:
            self._backend = make_backend(LearnerHost(config, self._learner))
        return torch.get_num_threads()

    def next_requests(self, plan: StepPlan) -> list[ray.ObjectRef]:
        return [ray.put(request) for request in self._learner.next_requests(plan)]

    def accumulate(self, *shares: Share) -> None:
        self._learner.accumulate(list(itertools.chain(*shares)))

    def finish_step(self) -> RankReport:
        return self._learner.finish_step()

    def offer_weights(self) -> WeightOffer | None:
        """The offer of rank 0; None on the others, which only take part."""
        return self._learner.offer_weights()

    def send_weights(self, offer: WeightOffer) -> SendReport:
        return self._learner.send_weights(offer)

    def sync_done(self) -> None:
        self._learner.sync_done()

    def fall_back_to_full(self) -> None:
        self._learner.fall_back_to_full()

    def held_out_requests(self, step: int) -> list[ray.ObjectRef]:
        return [ray.put(request) for request in self._learner.held_out_requests(step)]

    def score(self, *shares: Share) -> list[Scene]:
        return self._learner.score(list(itertools.chain(*shares)))

    def save(self, folder: Path) -> None:
        self._learner.save(folder)

    def num_updates(self) -> int:
        return self._learner.num_updates

    def generate(self, *requests: RolloutRequest) -> tuple[Share, int]:
        """As `EngineActor.generate`, by the backend beside the learner."""
        assert self._backend is not None, "this rank was started without a backend"
        rollouts = self._backend.generate(requests)
        return rollouts, len(rollouts)

    def receive_weights(self, offer: WeightOffer) -> SyncReport:
        assert self._backend is not None, "this rank was started without a backend"
        return self._backend.receive_weights(offer)


def _host(config: RunConfig) -> str:
    """An address of this node that engines and other ranks reach: the loopback where all of them are on this machine, and nothing then leaves it."""
    section = rollout_servers(config)
    if config.cluster.address == "local" and (section is None or all(server.is_loopback for server in section.servers)):
        return "127.0.0.1"
    return str(ray.util.get_node_ip_address())


@dataclass(frozen=True, slots=True)
class _Wait:
    """What all ranks are asked at once, and how long that may take."""

    phase: str
    timeout_s: float
    timeout_key: str


class RemoteLearner:
    """All ranks as the driver uses them (`launch.driver.DrivesLearner`). A list over ranks is in rank order."""

    def __init__(self, actors: Sequence[Any], timeouts: TimeoutsSection) -> None:
        """`actors` are handles of `LearnerShell`s, rank by rank."""
        self._actors = tuple(actors)
        self._timeouts = timeouts
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="learner")
        self.num_threads = 0
        """Of torch in each rank's process, once they have started."""
        self.received_version = 0
        """Of the weights that the ranks' backends took last; 0 before the first sync."""

    def start(self, config: RunConfig, places: Sequence[LearnerPlace], make_backend: MakeBackend | None = None) -> None:
        """Returns when every rank has loaded model and data and, where there is one, its backend. Raises what a rank finds wrong with them."""
        starting = _Wait("start", self._timeouts.start_s, "timeouts.start_s")
        if len(places) > 1:
            (address,) = self._wait(starting, [self._actors[0].open_rendezvous.remote(config)])
            places = [replace(place, rendezvous=address) for place in places]
        refs = [actor.start.remote(config, place, make_backend) for actor, place in zip(self._actors, places, strict=True)]
        self.num_threads = self._wait(starting, refs)[0]

    def next_requests(self, plan: StepPlan) -> list[list[ray.ObjectRef]]:
        return self._learn("next_requests", lambda rank: self._actors[rank].next_requests.remote(plan))

    def accumulate(self, done: Sequence[Sequence[ray.ObjectRef]]) -> None:
        self._learn("accumulate", lambda rank: self._actors[rank].accumulate.remote(*done[rank]))

    def finish_step(self) -> StepReport:
        reports: list[RankReport] = self._learn("finish_step", lambda rank: self._actors[rank].finish_step.remote())
        return merge_reports(reports)

    def held_out_requests(self, step: int) -> list[list[ray.ObjectRef]]:
        return self._learn("held_out_requests", lambda rank: self._actors[rank].held_out_requests.remote(step))

    def score(self, done: Sequence[Sequence[ray.ObjectRef]]) -> list[Scene]:
        return list(itertools.chain(*self._learn("score", lambda rank: self._actors[rank].score.remote(*done[rank]))))

    def offer_weights(self) -> WeightOffer:
        """Every rank takes part, since a sharded model is gathered by all; rank 0 makes the offer."""
        offers = self._all("offer_weights", self._timeouts.sync_phase_s, "timeouts.sync_phase_s", lambda rank: self._actors[rank].offer_weights.remote())
        offer: WeightOffer = offers[0]
        return offer

    def send_weights(self, offer: WeightOffer) -> Future[SendReport]:
        """Rank 0 sends. Its own timeouts end it."""
        return _without_rays_wrapping(self._actors[0].send_weights.remote(offer).future(), "send_weights")

    def sync_done(self) -> None:
        """Every rank knows that the offered version is the one that is served."""
        self._all("sync_done", self._timeouts.sync_phase_s, "timeouts.sync_phase_s", lambda rank: self._actors[rank].sync_done.remote())

    def fall_back_to_full(self) -> None:
        self._learn("fall_back_to_full", lambda rank: self._actors[rank].fall_back_to_full.remote())

    def num_updates(self, *, timeout_s: float) -> int:
        """Finished updates, once the ranks have done whatever they are doing."""
        counts = self._all("num_updates", timeout_s, "the limit of an interrupted run", lambda rank: self._actors[rank].num_updates.remote())
        return max(counts)

    def save(self, folder: Path, *, timeout_s: float | None = None) -> None:
        """Behind whatever the ranks are doing; None: timeouts.learn_s for both."""
        limit_s, key = (self._timeouts.learn_s, "timeouts.learn_s") if timeout_s is None else (timeout_s, "the limit of an interrupted run")
        self._all("save", limit_s, key, lambda rank: self._actors[rank].save.remote(folder))

    # Where the ranks generate their own rollouts

    def generate(self, round_: Sequence[Sequence[ray.ObjectRef]]) -> Future[list[list[ray.ObjectRef]]]:
        """Each rank generates what it is going to learn. The future holds, for each rank, references to its rollouts."""
        sent = {rank: self._actors[rank].generate.options(num_returns=2).remote(*requests) for rank, requests in enumerate(round_) if requests}
        call = _Wait("generate", self._timeouts.generate_s, "timeouts.generate_s")

        def collect() -> list[list[ray.ObjectRef]]:
            self._wait(call, [count for _, count in sent.values()])
            return [[sent[rank][0]] if rank in sent else [] for rank in range(len(round_))]

        return self._threads.submit(collect)

    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]:
        """Each rank's backend takes the weights of its own learner. The future holds the slowest one's report."""
        shared_offer = ray.put(offer)
        refs = [actor.receive_weights.remote(shared_offer) for actor in self._actors]
        # A backend waits for nobody and keeps no limits of its own: this one bounds the whole sync.
        call = _Wait("receive_weights", 10 * self._timeouts.sync_phase_s, "10 x timeouts.sync_phase_s")

        def collect() -> SyncReport:
            report = SyncReport.of_slowest(self._wait(call, refs))
            self.received_version = offer.version
            return report

        return self._threads.submit(collect)

    def _whose(self, refs: list[Any], ref: Any) -> str:
        return "its" if len(self._actors) == 1 else f"rank {refs.index(ref)}'s"

    def _learn(self, phase: str, ask: Callable[[int], Any]) -> list[Any]:
        return self._all(phase, self._timeouts.learn_s, "timeouts.learn_s", ask)

    def _all(self, phase: str, timeout_s: float, key: str, ask: Callable[[int], Any]) -> list[Any]:
        return self._wait(_Wait(phase, timeout_s, key), [ask(rank) for rank in range(len(self._actors))])

    def _wait(self, call: _Wait, refs: list[Any]) -> list[Any]:
        """Every rank's answer, or the error that says most."""
        deadline = time.monotonic() + call.timeout_s
        waiting, errors = list(refs), []
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            error = _error_of(ready[0], call.phase, self._whose(refs, ready[0]))
            if error is not None:
                errors.append(error)
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if errors:
            # A rank that waited for another in vain knows less than the other.
            raise min(errors, key=lambda error: isinstance(error, CollectiveError))
        if waiting:
            late = "" if len(self._actors) == 1 else f" from rank {', '.join(str(refs.index(ref)) for ref in waiting)}"
            told = f"no answer{late} in {call.timeout_s:g} s ({call.timeout_key})"
            look = "look at the learner's stack in the Ray dashboard or with `py-spy dump`"
            raise LearnerError(f"{told}; {look}, or raise {call.timeout_key}", phase=call.phase)
        return ray.get(refs)


def _error_of(ref: Any, phase: str, whose: str) -> Exception | None:
    try:
        # The driver reads no payload here: a rollout's reference is never among those that are waited for.
        ray.get(ref)
    except RayError as error:
        explained = _explained(error, phase, whose)
        explained.__cause__ = error
        return explained
    return None


def _explained(error: RayError, phase: str, whose: str) -> Exception:
    """What the learner raised in place of Ray's exception around it, or what became of its process; `whose` is "its" or names a rank's."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return error.cause
    return LearnerError(f"{whose} process ended; look for a lack of memory (dmesg) and at Ray's worker logs: {error}", phase=phase)


def _without_rays_wrapping(source: Future[Any], phase: str) -> Future[Any]:
    target: Future[Any] = Future()

    def deliver(done: Future[Any]) -> None:
        error = done.exception()
        if isinstance(error, RayError):
            explained = _explained(error, phase, "its")
            explained.__cause__ = error
            target.set_exception(explained)
        elif error is not None:
            target.set_exception(error)
        else:
            target.set_result(done.result())

    source.add_done_callback(deliver)
    return target
