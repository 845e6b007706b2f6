"""One weight sync, for both sides: its phases, limits and messages (decision 38).

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

OFFER = "offer"
"""Phase in an error before a receiver did anything, or if its state is unknown."""


class SyncPhase(StrEnum):
    """A phase of a receiver, in this order."""

    PAUSE = "pause"
    RENDEZVOUS = "rendezvous"
    WIRE = "wire"
    VERIFY = "verify"
    RESET = "reset"
    CANARY = "canary"


@dataclass(frozen=True, slots=True)
class SendReport:
    """The sender's report on one sync."""

    phase_s: dict[str, float]
    """Seconds in `send_gather` (materialising the weights), `send_verify` (checksums),
    `send_canary` (its scores), `send_rendezvous` and `send_wire`. Empty if there was nothing to
    send."""


def all_phases_s(timeout_s: float) -> float:
    """Return the limit of a receiver whose phases may take `timeout_s` each."""
    return len(SyncPhase) * timeout_s


def phase_limit(offer: WeightOffer, phase: SyncPhase) -> Timeout:
    """Return the limit of this phase in the sync of the offer."""
    if phase is SyncPhase.RENDEZVOUS and isinstance(offer.terms, FullOffer):
        return offer.terms.join_limit
    return Timeout(offer.terms.timeout_s, PHASE_LIMIT)


def whole_sync_s(offer: WeightOffer) -> float:
    """Return the outermost limit of a sync."""
    phases_s = sum(phase_limit(offer, phase).seconds for phase in SyncPhase)
    return phases_s + offer.terms.timeout_s + (len(SyncPhase) + 1) * SYNC_MARGIN_S


def sender_s(offer: WeightOffer) -> float:
    """Return the limit for waiting for the sender, which takes part in two phases."""
    limits = (phase_limit(offer, phase) for phase in (SyncPhase.RENDEZVOUS, SyncPhase.WIRE))
    return sum(limit.seconds + POOL_MARGIN_S for limit in limits)


class SendingLearner(Protocol):
    """The interface of the learner in a sync."""

    @property
    def offers_adapter(self) -> bool:
        """Whether the next offer is an adapter."""

    @property
    def falls_back(self) -> bool:
        """Whether full syncs follow a failed adapter sync (`sync.fallback_to_full`)."""

    def offer_weights(self, *, again: bool = False) -> WeightOffer:
        """Offer the next version, or `again` the present one to engines that have lost it."""

    def send_weights(self, offer: WeightOffer) -> Future[SendReport]: ...
    def sync_done(self, noise: Differences | None) -> None:
        """Record on every rank that the version is served, and the measured noise."""

    def fall_back_to_full(self) -> None:
        """Offer full weights from now on, after an offer of an adapter."""

    def leave_groups(self) -> None:
        """Offer new process groups next time: an engine is new, or a sync has failed."""


class ReceivingEngines(Protocol):
    """The interface of the rollout engines in a sync."""

    def wait_idle(self) -> None:
        """Wait for running generation, such as the next step's first round (`max_staleness`).

        Raises RolloutError if that round failed.
        """

    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]: ...

    @property
    def replaces_lost(self) -> bool:
        """Whether new engines are started to replace lost ones."""

    def join_replacements(self) -> bool:
        """Replace all engines that have ended or do not respond; return whether there were any.

        Waits for the new engines. Raises RolloutError if no more engines may be replaced.
        """

    def replace_named(self, error: WeightSyncError) -> bool:
        """Replace the engine that the error names; return whether it names one."""


def sync_weights(
    learner: SendingLearner, rollouts: ReceivingEngines, *, again: bool = False
) -> SyncReport:
    """Run one verified sync; afterwards every engine serves the offered version.

    Waits for engines that are starting as replacements of lost ones. If engines may be replaced, a
    sync that failed with a WeightSyncError is repeated, unless weights or results differed. All
    engines that have ended or do not respond are replaced before that. If all are alive, a full
    sync is repeated once with a fresh group, then once with a replacement for the engine that the
    error names.

    If an offered adapter fails in any way, a full sync replaces it, now and for the rest of the
    run, if the configuration permits it (decision 20). The report contains the reason.

    Args:
        again: some engines have lost the present version, which the learner still has.

    Raises:
        WeightSyncError: names phase and engine.
        LearnerError: the learner failed on its own.
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

    A side that fails leaves the group, which ends the other side's wait. This function waits a few
    seconds for that, so that it raises the receiver's error with the sender's as its cause. A
    LearnerError comes first: the receivers' errors then only follow from it.
    """
    offer = learner.offer_weights(again=again)
    receiving = rollouts.receive_weights(offer)
    sending = learner.send_weights(offer)
    sides: tuple[Future[Any], Future[Any]] = (receiving, sending)
    limit = Timeout(whole_sync_s(offer), f"the limits of all phases ({PHASE_LIMIT})")
    wait(sides, timeout=limit.seconds, return_when=FIRST_EXCEPTION)
    wait(sides, timeout=SYNC_MARGIN_S)
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
