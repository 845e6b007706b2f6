"""The rollout actors of a run as one: shares out requests, keeps the phases of a weight sync in step, and waits for nobody forever."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from shared.chunking import split_contiguous, split_rounds
from shared.errors import RolloutError, WeightSyncError
from shared.rollouts import SyncReport, WeightOffer
from shared.weight_sync import MARGIN_S, SyncPhase

Error = RolloutError | WeightSyncError


@dataclass(frozen=True, slots=True)
class PoolTimeouts:
    """Seconds, from the configuration's section `timeouts`."""

    start_s: float
    generate_s: float
    sync_phase_s: float


@dataclass(frozen=True, slots=True)
class _Call:
    """One call to every actor that takes part: what to say when it does not end well."""

    phase: str
    timeout_s: float
    timeout_key: str
    check: str
    error: type[Error]
    margin_s: float = 0.0
    """Waited beyond the timeout, where the actor keeps the same timeout itself and can say more."""


class ActorPool:
    """N actors with the methods of `VllmActor`, already created and placed, which this pool owns from now on.

    Waiting happens in threads of the pool: at most one sync or two rounds at a time, each bounded by a timeout, and unblocked by
    the actors' answers, by an actor's death, or by `close`.
    """

    def __init__(self, actors: Sequence[Any], names: Sequence[str], timeouts: PoolTimeouts, *, round_capacity: int) -> None:
        """`actors` are Ray actor handles; `round_capacity` is the number of requests they decode at a time, all together."""
        self._actors = dict(zip(names, actors, strict=True))
        self._timeouts = timeouts
        self._round_capacity = round_capacity
        self._version = 0
        self._threads = ThreadPoolExecutor(max_workers=3, thread_name_prefix="actor-pool")

    def start(self) -> None:
        """Start every engine at once and wait for all. Raises RolloutError(phase="start")."""
        call = _Call("start", self._timeouts.start_s, "timeouts.start_s", "the actor's log for what it is loading, and the machine's free memory", RolloutError)
        self._wait(call, {name: actor.start.remote() for name, actor in self._actors.items()})

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._actors)

    @property
    def version(self) -> int:
        """The version that every actor serves; 0 before the first sync."""
        return self._version

    def split(self, requests: Sequence[Any]) -> list[list[Any]]:
        """The rounds of a step: as few as the actors' decode batches allow, contiguous and even."""
        return [list(requests[part.start : part.stop]) for part in split_rounds(len(requests), self._round_capacity)]

    def generate(self, requests: Sequence[Any]) -> Future[list[Any]]:
        """Begin one round. `requests` are references to one `RolloutRequest` each, in position order.

        The future holds one reference per share, in order, each to a `list[Rollout]`: the payload stays where it was made.
        It fails with RolloutError naming the actor.
        """
        shares = dict(zip(self._actors, split_contiguous(len(requests), len(self._actors)), strict=True))
        answers = {
            name: self._actors[name].generate.options(num_returns=2).remote(*requests[share.start : share.stop]) for name, share in shares.items() if share
        }
        return self._threads.submit(self._collect, answers, {name: len(share) for name, share in shares.items()})

    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]:
        """Begin one sync. The future fails with WeightSyncError naming phase and actor; the actors then serve no rollouts."""
        return self._threads.submit(self._receive, offer)

    def close(self) -> None:
        """End every actor and with it its engine's processes. Whoever still waits is told so. Twice is harmless."""
        for actor in self._actors.values():
            ray.kill(actor)
        self._threads.shutdown(wait=True)

    def _collect(self, answers: dict[str, tuple[Any, Any]], sizes: dict[str, int]) -> list[Any]:
        check = "the actor's log, and whether max_new_tokens times the share fits the time"
        call = _Call("generate", self._timeouts.generate_s, "timeouts.generate_s", check, RolloutError)
        for name, count in self._wait(call, {name: count for name, (_, count) in answers.items()}).items():
            if count != sizes[name]:
                raise RolloutError(f"answered {count} of {sizes[name]} requests", actor=name, phase="generate")
        return [rollouts for rollouts, _ in answers.values()]

    def _receive(self, offer: WeightOffer) -> SyncReport:
        shared_offer = ray.put(offer)
        check = "that the learner and every other actor are alive"
        # Phase by phase over all actors: none begins to wait for bytes while another is still decoding, and a stopped process is known by its phase.
        for phase in SyncPhase:
            call = _Call(phase, self._timeouts.sync_phase_s, "timeouts.sync_phase_s", check, WeightSyncError, margin_s=2 * MARGIN_S)
            answers = self._wait(call, {name: actor.run_sync_phase.remote(phase, shared_offer) for name, actor in self._actors.items()})
        reports: list[SyncReport] = list(answers.values())
        self._version = offer.version
        return SyncReport(
            version=offer.version,
            bytes=reports[0].bytes,
            phase_s={phase: max(report.phase_s[phase] for report in reports) for phase in reports[0].phase_s},
            canary_max_abs=max(report.canary_max_abs for report in reports),
        )

    def _wait(self, call: _Call, answers: dict[str, Any]) -> dict[str, Any]:
        """Every actor's answer. The first failure ends the wait, whatever the others are doing."""
        values: dict[str, Any] = {}
        name_of = {answer: name for name, answer in answers.items()}
        deadline = time.monotonic() + call.timeout_s + call.margin_s
        while len(values) < len(answers):
            waiting = [answer for answer in name_of if name_of[answer] not in values]
            ready, _ = ray.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(name_of[answer] for answer in waiting)
                told = f"no answer from {late} after {call.timeout_key} = {call.timeout_s:g} s; check {call.check}"
                raise call.error(told, actor=name_of[waiting[0]], phase=call.phase)
            values[name_of[ready[0]]] = _value(call, name_of[ready[0]], ready[0])
        return {name: values[name] for name in answers}


def _value(call: _Call, name: str, answer: Any) -> Any:
    try:
        return ray.get(answer)
    except RayTaskError as error:
        # Ray hides the actor's own exception in one of its own kind.
        if isinstance(error.cause, Error):
            raise error.cause from error
        raise call.error(f"{type(error.cause).__name__}: {error.cause}", actor=name, phase=call.phase) from error
    except RayActorError as error:
        raise call.error(f"its process has ended ({error}); check the actor's log and the machine's memory", actor=name, phase=call.phase) from error
