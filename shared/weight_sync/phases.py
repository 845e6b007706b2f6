"""One weight sync as both ends know it: its phases and its conversation (DESIGN 9);
`shared.weight_sync.offer` is what they talk about.

::

    learner                                   every rollout engine
    offer: version, terms, canary
                                              pause        finish what is running, start nothing
                                                           (before the first weights in bfloat16:
                                                           score
                                                           the probe, whose difference then is
                                                           noise)
    send:  rendezvous  <------------------->  rendezvous   the first time, and after a failure
           wire        ------ buckets ----->  wire         receive and load
           (gather, checksums while packing, the canary's log-probabilities)
           the last two  -- behind them --->
                                              verify       every parameter loaded, checksums equal
                                              the sender's
                                              reset        prefix, multimodal and encoder caches
                                              canary       resume, score the probe, raise the
                                              version
"""

from __future__ import annotations

from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from shared.errors import ENGINES, LEARNER, LearnerError, Timeout, WeightSyncError, late
from shared.rollouts import SyncReport, WeightOffer
from shared.weight_sync.differences import Differences
from shared.weight_sync.offer import PHASE_LIMIT, FullOffer, terms_of

ENGINE_MARGIN_S, CLIENT_MARGIN_S, POOL_MARGIN_S, SYNC_MARGIN_S = 2.0, 3.0, 4.0, 6.0
"""What each layer waits in a phase beyond its `timeout_s`: the engine or the sender, a server's
client, the pool or whoever waits for the sender, the whole sync. An outer one waits longer, so that
the innermost error, which knows most, is the one reported."""


OFFER = "offer"
"""In an error: before a receiver did anything, or where it is not known what it did."""


class SyncPhase(StrEnum):
    """What a receiver does, in this order."""

    PAUSE = "pause"
    RENDEZVOUS = "rendezvous"
    WIRE = "wire"
    VERIFY = "verify"
    RESET = "reset"
    CANARY = "canary"


@dataclass(frozen=True, slots=True)
class SendReport:
    """The sender's side of one sync."""

    phase_s: dict[str, float]
    """Empty where nothing was left to send. Else seconds in `send_gather` (materialising the
    weights), `send_verify` (checksums), `send_canary` (the learner's own scores), `send_rendezvous`
    (0 when the groups are kept) and `send_wire`."""


def all_phases_s(timeout_s: float) -> float:
    """The limit of a receiver that bounds no single phase, which may take `timeout_s` each."""
    return len(SyncPhase) * timeout_s


def phase_limit(offer: WeightOffer, phase: SyncPhase) -> Timeout:
    """Return the longest that this phase of the offer's sync may take."""
    terms = terms_of(offer)
    if phase is SyncPhase.RENDEZVOUS and isinstance(terms, FullOffer):
        return terms.join_limit
    return Timeout(terms.timeout_s, PHASE_LIMIT)


def whole_sync_s(offer: WeightOffer) -> float:
    """The outermost limit of a sync: above that of any receiver."""
    phases_s = sum(phase_limit(offer, phase).seconds for phase in SyncPhase)
    return phases_s + terms_of(offer).timeout_s + (len(SyncPhase) + 1) * SYNC_MARGIN_S


def sender_s(offer: WeightOffer) -> float:
    """The limit of whoever waits for the sender, which takes part in two phases."""
    return sum(
        phase_limit(offer, phase).seconds + POOL_MARGIN_S
        for phase in (SyncPhase.RENDEZVOUS, SyncPhase.WIRE)
    )


class SendsWeights(Protocol):
    @property
    def offers_adapter(self) -> bool:
        """Whether the next offer is of an adapter."""
        ...

    @property
    def falls_back(self) -> bool:
        """What follows on a sync of an adapter that fails,
        rollout_matching.vllm.sync.fallback_to_full: full ones (true), or the run's end.
        """
        ...

    def offer_weights(self) -> WeightOffer: ...
    def send_weights(self, offer: WeightOffer) -> Future[SendReport]: ...
    def sync_done(self, noise: Differences | None) -> None:
        """Note on every learner rank that the offered version is served.

        Every later offer brings the `noise` of the canary, where this sync has measured it.
        """
        ...

    def fall_back_to_full(self) -> None:
        """Every later offer is of full weights; called only where the last one was to be of an
        adapter.
        """
        ...


class TakesWeights(Protocol):
    def wait_idle(self) -> None:
        """Return when nothing is being generated, within the limit that a round has. Raises
        RolloutError where that round failed.

        Under `max_staleness` the next step's first round may still be running: it ends with the
        weights it began with, before anyone's limits of a sync begin to count.
        """
        ...

    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]: ...


def sync_weights(learner: SendsWeights, rollouts: TakesWeights) -> SyncReport:
    """One verified sync; afterwards every engine serves the offered version. Raises WeightSyncError
    naming phase and engine.

    Where the learner offers its adapter and that fails in any way, a full sync takes its place, now
    and for the rest of the run, if the configuration permits it (DESIGN 5, decision 20); the report
    says why.
    """
    rollouts.wait_idle()
    try:
        return _sync(learner, rollouts)
    # of any kind: what the engines hold after it is proved by the full sync that follows
    except Exception as error:
        if not learner.offers_adapter:
            raise
        # Full weights would be scored by the same canary.
        if isinstance(error, LearnerError) and (
            not learner.falls_back or error.phase == SyncPhase.CANARY
        ):
            raise
        if not learner.falls_back:
            raise _final(error) from error
        reason = (
            str(error) if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"
        )
        learner.fall_back_to_full()
    return replace(_sync(learner, rollouts), fell_back=reason)


def _final(error: Exception) -> WeightSyncError:
    """The failure of an adapter sync where it ends the run."""
    remedy = (
        "set rollout_matching.vllm.sync.fallback_to_full: true to go on with full weights, or"
        " sync.mode: full to begin with them"
    )
    if isinstance(error, WeightSyncError):
        return WeightSyncError(
            f"of the adapter: {error.message}; {remedy}",
            actor=error.actor,
            phase=error.phase,
            quantity=error.quantity,
            size=error.size,
        )
    return WeightSyncError(
        f"of the adapter: {type(error).__name__}: {error}; {remedy}", actor=ENGINES, phase=OFFER
    )


def _sync(learner: SendsWeights, rollouts: TakesWeights) -> SyncReport:
    """One offer, and both sides of it.

    Both futures are bounded by the offer's phase timeout. When one side fails it leaves the group,
    which ends the other side's wait: a few seconds are given to that, so that the error shown is
    the receiver's, with the sender's as its cause; a learner that fails by itself is shown first.
    """
    offer = learner.offer_weights()
    receiving = rollouts.receive_weights(offer)
    sending = learner.send_weights(offer)
    sides: tuple[Future[Any], Future[Any]] = (receiving, sending)
    limit_s = whole_sync_s(offer)
    wait(sides, timeout=limit_s, return_when=FIRST_EXCEPTION)
    wait(sides, timeout=SYNC_MARGIN_S)
    errors = [error for side in sides if side.done() and (error := side.exception()) is not None]
    if errors:
        # The receivers of a learner that failed know only that it left.
        errors.sort(key=lambda error: not isinstance(error, LearnerError))
        raise errors[0] from (errors[1] if len(errors) > 1 else None)
    for side, who in zip(sides, (ENGINES, LEARNER), strict=True):
        if not side.done():
            told = late(
                f"the {who}",
                Timeout(limit_s, f"the limits of all phases ({PHASE_LIMIT})"),
                "that its process is alive",
            )
            raise WeightSyncError(told, actor=who, phase=SyncPhase.WIRE)
    sent, report = sending.result(), receiving.result()
    learner.sync_done(report.canary_noise)
    return replace(report, phase_s={**report.phase_s, **sent.phase_s})
