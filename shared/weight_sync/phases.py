"""The protocol of a weight sync between learner and engines: phases and limits (decision 38).

::

    learner                                   every rollout engine
    offer: version, terms, canary
                                              pause        finish running requests, start none
                                                           (before the first weights in bfloat16:
                                                           score the probe, to measure the noise)
    send:  rendezvous  <------------------->  rendezvous   the first time, and after a failure
           wire        ------ buckets ----->  wire         receive and load
           (gather, checksums while packing, the canary's log-probabilities)
           the last two  -- after them ---->
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
from typing import TYPE_CHECKING, Any, Protocol

from shared.errors import ENGINES, LEARNER, LearnerError, Timeout, WeightSyncError, late
from shared.weight_sync.offer import PHASE_LIMIT, FullOffer

if TYPE_CHECKING:
    from shared.rollouts import SyncReport, WeightOffer
    from shared.weight_sync.canary import Differences

# The time that each layer waits beyond a phase's `timeout_s`. Outer layers wait longer, so that the
# innermost error, which is the most specific, is reported.
ENGINE_MARGIN_S = 2.0  # the engine and the sender
CLIENT_MARGIN_S = 3.0  # the client of a rollout server
POOL_MARGIN_S = 4.0  # the pool, and callers that wait for the sender
SYNC_MARGIN_S = 6.0  # the whole sync
RECEIVER_ERROR_S = 30.0
"""Seconds to wait for the receivers' error after the sender's: an engine that fails leaves the
group, and restores its model before it reports why."""

OFFER = "offer"
"""The phase that an error names if no engine has begun a phase, or an engine's state is unknown."""


class SyncPhase(StrEnum):
    """A phase of a weight sync in an engine; the phases run in this order."""

    PAUSE = "pause"
    RENDEZVOUS = "rendezvous"
    WIRE = "wire"
    VERIFY = "verify"
    RESET = "reset"
    CANARY = "canary"


@dataclass(frozen=True, slots=True)
class SendReport:
    """Seconds of the learner's phases of a weight sync."""

    phase_s: dict[str, float]
    """Seconds of each phase of the learner; empty if it had nothing to send.

    `send_gather` makes the tensors, `send_verify` computes checksums, and `send_canary` computes
    the canary's log-probabilities. The others are `send_rendezvous` and `send_wire`.
    """


def phase_limit(offer: WeightOffer, phase: SyncPhase) -> Timeout:
    """Return the time limit of one phase of the weight sync that begins with this offer."""
    if phase is SyncPhase.RENDEZVOUS and isinstance(offer.terms, FullOffer):
        return offer.terms.join_limit
    return Timeout(offer.terms.timeout_s, PHASE_LIMIT)


def whole_sync_s(offer: WeightOffer) -> float:
    """Return the time limit, in seconds, of the whole weight sync that begins with this offer."""
    phases_s = sum(phase_limit(offer, phase).seconds for phase in SyncPhase)
    return phases_s + offer.terms.timeout_s + (len(SyncPhase) + 1) * SYNC_MARGIN_S


def sender_s(offer: WeightOffer) -> float:
    """Return the time limit, in seconds, of the learner's part of the weight sync.

    The learner takes part in the phases rendezvous and wire.
    """
    limits = (phase_limit(offer, phase) for phase in (SyncPhase.RENDEZVOUS, SyncPhase.WIRE))
    return sum(limit.seconds + POOL_MARGIN_S for limit in limits)


class SendingLearner(Protocol):
    """The learner as `sync_weights` uses it: the sender of the weights."""

    @property
    def offers_adapter(self) -> bool:
        """Return whether the next offer contains only an adapter, not full weights."""

    @property
    def falls_back(self) -> bool:
        """True if full weights are sent after an adapter sync failed (`sync.fallback_to_full`)."""

    def offer_weights(self, *, again: bool = False) -> WeightOffer:
        """Return the offer of the next weight version.

        `again`: of the present version, for engines that have lost it.
        """

    def send_weights(self, offer: WeightOffer) -> Future[SendReport]:
        """Begin to send the weights of the offer; the future holds the times of the phases."""
        ...

    def sync_done(self, noise: Differences | None) -> None:
        """Record on every learner rank that engines have the offered version.

        `noise` are the canary's differences at version 0, if they were measured.
        """

    def fall_back_to_full(self) -> None:
        """Offer full weights from now on, because an adapter sync failed."""

    def leave_groups(self) -> None:
        """Close the process groups of weight syncs, so that the next sync opens new ones.

        This is needed if an engine is new or a sync has failed.
        """


class ReceivingEngines(Protocol):
    """The rollout engines as `sync_weights` uses them: the receivers of the weights."""

    def wait_idle(self) -> None:
        """Wait until no engine generates rollouts.

        With `max_staleness`, engines may generate the next step's first round. Raises RolloutError
        if that round failed.
        """

    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]:
        """Begin the phases of the sync in all engines; the future holds the merged report."""
        ...

    @property
    def replaces_lost(self) -> bool:
        """Return whether new engines are started in place of lost engines."""

    def join_replacements(self) -> bool:
        """Replace all engines that have ended or do not respond, and wait for the new engines.

        Return whether an engine was replaced. Raises RolloutError if no more engines may be
        replaced.
        """

    def replace_named(self, error: WeightSyncError) -> bool:
        """Replace the engine that the error names; return whether the error names an engine."""


def sync_weights(
    learner: SendingLearner, rollouts: ReceivingEngines, *, again: bool = False
) -> SyncReport:
    """Send the learner's weights to every engine, and verify them. Return the report.

    Waits for engines that are starting in place of lost engines. If engines may be replaced, a sync
    that failed with a WeightSyncError is repeated, unless weights or results differed. Before that,
    all engines that have ended or do not respond are replaced. If all engines are alive, a full
    sync is repeated once with new process groups. If that fails too, it is repeated once more with
    a new engine in place of the engine that the error names.

    If a sync of an adapter fails in any way, full weights are sent, now and for the rest of the
    run, if the configuration permits it (decision 20). The report contains the reason.

    `again`: send the present version again, because some engines have lost it.

    Raises:
        WeightSyncError: names phase and engine.
        LearnerError: the learner failed, without a fault of an engine.
        RolloutError: no more engines may be replaced.
    """
    rollouts.wait_idle()
    fell_back: str | None = None
    num_failed = 0
    if rollouts.join_replacements():
        learner.leave_groups()
    while True:
        try:
            return replace(_sync(learner, rollouts, again=again), fell_back=fell_back)
        # any kind: the next sync verifies the weights that the engines have after it
        except Exception as error:
            # After a difference the sync is not repeated: an engine that differed once is not
            # trusted.
            if rollouts.replaces_lost and isinstance(error, WeightSyncError) and not error.quantity:
                mended = rollouts.join_replacements()
                if not mended and not learner.offers_adapter:
                    num_failed += 1
                    mended = num_failed == 1 or (num_failed == 2 and rollouts.replace_named(error))
                if mended:
                    learner.leave_groups()
                    continue
            if not learner.offers_adapter:
                raise
            # Full weights would use the same canary.
            if isinstance(error, LearnerError) and (
                not learner.falls_back or error.phase == SyncPhase.CANARY
            ):
                raise
            if not learner.falls_back:
                raise _adapter_error(error) from error
            named = isinstance(error, WeightSyncError)
            fell_back = str(error) if named else f"{type(error).__name__}: {error}"
            learner.fall_back_to_full()


def _adapter_error(error: Exception) -> WeightSyncError:
    """Add the remedies to the failure of an adapter sync that ends the run."""
    if not isinstance(error, WeightSyncError):
        error = WeightSyncError(f"{type(error).__name__}: {error}", actor=ENGINES, phase=OFFER)
    return WeightSyncError(
        f"adapter sync failed: {error.message}; set rollout_matching.vllm.sync.fallback_to_full:"
        " true to continue with full weights, or sync.mode: full to use them from the start",
        actor=error.actor,
        phase=error.phase,
        quantity=error.quantity,
        size=error.size,
    )


def _sync(learner: SendingLearner, rollouts: ReceivingEngines, *, again: bool) -> SyncReport:
    """Make one offer and wait for both sides.

    A side that fails leaves the group, which ends the other side's wait. This function waits for
    that too, at most `RECEIVER_ERROR_S` for the receivers and `SYNC_MARGIN_S` for the sender, so
    that it can raise the receiver's error with the sender's error as its cause. If the learner
    failed, its LearnerError is raised instead, because the receivers' errors only follow from it.
    """
    offer = learner.offer_weights(again=again)
    receiving = rollouts.receive_weights(offer)
    sending = learner.send_weights(offer)
    sides: tuple[Future[Any], Future[Any]] = (receiving, sending)
    limit = Timeout(whole_sync_s(offer), f"the limits of all phases ({PHASE_LIMIT})")
    wait(sides, timeout=limit.seconds, return_when=FIRST_EXCEPTION)
    wait(sides, timeout=RECEIVER_ERROR_S if sending.done() else SYNC_MARGIN_S)
    errors = [error for side in sides if side.done() and (error := side.exception()) is not None]
    if errors:
        # If the learner failed, the receivers only know that it left.
        errors.sort(key=lambda error: not isinstance(error, LearnerError))
        raise errors[0] from (errors[1] if len(errors) > 1 else None)
    for side, who in zip(sides, (ENGINES, LEARNER), strict=True):
        if not side.done():
            message = late(f"the {who}", limit, "that its process is alive")
            raise WeightSyncError(message, actor=who, phase=SyncPhase.WIRE)
    report: SyncReport = receiving.result()
    learner.sync_done(report.canary_noise)
    ports: tuple[int, ...] = ()
    if isinstance(offer.terms, FullOffer):
        ports = tuple(group.port for group in offer.terms.groups)
    phase_s = {**report.phase_s, **sending.result().phase_s}
    return replace(report, phase_s=phase_s, ports=ports)
