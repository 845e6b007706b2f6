"""One weight sync as both ends know it: its terms, its phases and its conversation (DESIGN 9).

::

    learner                                   every rollout engine
    offer: version, terms, canary
                                              pause        finish what is running, start nothing
    send:  rendezvous  <------------------->  rendezvous   the first time, and after a failure
           wire        ------ buckets ----->  wire         receive and load
           (gather, checksums while packing)
           checksums   ------ last tensor -->
                                              verify       every parameter loaded, checksums equal the sender's
                                              reset        prefix, multimodal and encoder caches
                                              canary       resume, score the probe, raise the version
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from shared.adapter_terms import ADAPTER_TRANSPORT, AdapterTerms
from shared.checksum import BucketChecksum, Torch
from shared.errors import ENGINES, LEARNER, WeightSyncError, late
from shared.rollouts import SyncReport, WeightOffer

_LOGGER = logging.getLogger(__name__)
CHECKSUMS = "rollmatch.checksums"
"""The tensor behind the weights: one int64 for each bucket, computed while the bucket was packed, so that no pass over the weights comes before."""
MARGIN_S = 2.0
"""Every layer waits this much longer than the one inside it, so that the innermost error, which knows most, is the one reported."""


class SyncPhase(StrEnum):
    """What a receiver does, in this order."""

    PAUSE = "pause"
    RENDEZVOUS = "rendezvous"
    WIRE = "wire"
    VERIFY = "verify"
    RESET = "reset"
    CANARY = "canary"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    name: str
    """transformers' own parameter name."""
    dtype: str
    """As in `torch.<dtype>`."""
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Group:
    """One process group of a sync, hosted by the sender, who is rank 0 of it."""

    host: str
    port: int
    """Bound by the sender before it is published here."""
    world_size: int
    """The sender and every receiving worker. A receiver's rank is 1 plus the number of workers before it in its group."""
    key: str
    """Of this opening of the group: whoever has joined under another key has to join again, also where host and port are the same."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a receiver needs to join and to check: `WeightOffer.rendezvous["terms"]`. Plain data, so that it can go through JSON."""

    groups: tuple[Group, ...]
    """In the order of `learner.place.LearnerPlace.receivers`; none where nothing goes over a wire."""
    timeout_s: float
    """Longest time of any one phase: the configuration's timeouts.sync_phase_s."""
    bucket_bytes: int
    """A bucket is closed by the tensor that takes it past this size."""
    tensors: tuple[TensorSpec, ...]
    """The weights that will be sent, in order; `CHECKSUMS` comes behind them."""

    @classmethod
    def of(cls, offer: WeightOffer) -> Terms:
        terms = offer.rendezvous["terms"]
        assert isinstance(terms, cls)
        return terms

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def group(self) -> Group:
        """The only one: what an engine is told of."""
        (group,) = self.groups
        return group

    def for_group(self, index: int) -> Terms:
        """The same sync as the receivers of this group are told of it."""
        return replace(self, groups=(self.groups[index],))

    @property
    def sent(self) -> tuple[TensorSpec, ...]:
        """The weights and their checksums: everything that is handed over, in order."""
        num_buckets = sum(1 for _ in buckets(self.tensors, self.bucket_bytes))
        return (*self.tensors, TensorSpec(CHECKSUMS, "int64", (num_buckets,), 8 * num_buckets))


@dataclass(frozen=True, slots=True)
class SendReport:
    """The sender's side of one sync."""

    bytes: int
    phase_s: dict[str, float]
    """Seconds in `send_gather` (materialising the weights), `send_verify` (checksums), `send_rendezvous` (0 when the groups are kept) and `send_wire`."""


def buckets(tensors: tuple[TensorSpec, ...], bucket_bytes: int) -> Iterator[tuple[TensorSpec, ...]]:
    """The tensors in order, cut behind the one that takes a bucket past `bucket_bytes`: the rule of vLLM's own packed transfer."""
    bucket: list[TensorSpec] = []
    size = 0
    for tensor in tensors:
        bucket.append(tensor)
        size += tensor.num_bytes
        if size > bucket_bytes:
            yield tuple(bucket)
            bucket, size = [], 0
    if bucket:
        yield tuple(bucket)


def offsets(bucket: tuple[TensorSpec, ...], alignment: int = 16) -> list[int]:
    """Where each tensor of a packed bucket begins, in bytes, and at the end the bucket's size. Aligned, so that any dtype may follow any other."""
    starts = [0]
    for tensor in bucket:
        starts.append(-(-(starts[-1] + tensor.num_bytes) // alignment) * alignment)
    return starts


class Sealed:
    """Weights on their way out, and behind them their checksums. To be iterated once."""

    def __init__(self, weights: Iterable[tuple[str, Any]], terms: Terms, torch: Torch) -> None:
        """`weights` are named contiguous tensors, the terms' in the terms' order."""
        self._weights = iter(weights)
        self._terms = terms
        self._torch = torch
        self.gather_s = 0.0
        """Seconds in which the source made tensors."""
        self.verify_s = 0.0
        """Seconds of checksums."""

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        checksums, tensor = [], None
        for bucket in buckets(self._terms.tensors, self._terms.bucket_bytes):
            checksum = BucketChecksum(self._torch)
            for spec in bucket:
                started = time.perf_counter()
                name, tensor = next(self._weights)
                gathered = time.perf_counter()
                assert (name, tuple(tensor.shape)) == (spec.name, spec.shape), f"offered {spec.name} {spec.shape}, sending {name} {tuple(tensor.shape)}"
                checksum.add(tensor)
                self.gather_s += gathered - started
                self.verify_s += time.perf_counter() - gathered
                yield name, tensor
            checksums.append(checksum.value())
        assert tensor is not None, "a sync sends something"
        yield CHECKSUMS, tensor.new_tensor(checksums, dtype=self._torch.int64)


def all_phases_s(timeout_s: float) -> float:
    """The limit of a receiver that bounds no single phase, which may take `timeout_s` each."""
    return len(SyncPhase) * timeout_s


def whole_sync_s(timeout_s: float) -> float:
    """The outermost limit of a sync: above that of any receiver, whose layers wait up to 3 margins longer in every phase."""
    return (len(SyncPhase) + 1) * (timeout_s + 3 * MARGIN_S)


class SendsWeights(Protocol):
    def offer_weights(self) -> WeightOffer: ...
    def send_weights(self, offer: WeightOffer) -> Future[SendReport]: ...
    def sync_done(self) -> None:
        """The offered version is served: every learner rank holds it from here on."""
        ...

    def fall_back_to_full(self) -> None:
        """Every later offer is of full weights; called only after an offer of an adapter."""
        ...


class TakesWeights(Protocol):
    def settle(self) -> None:
        """Return when nothing is being generated, within the limit that a round has. Raises RolloutError where that round failed.

        Under `max_staleness` the next step's first round may still be running: it ends with the weights it began with, before anyone's limits of a
        sync begin to count.
        """
        ...

    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]: ...


def sync_weights(learner: SendsWeights, rollouts: TakesWeights) -> SyncReport:
    """One verified sync; afterwards every actor serves the offered version. Raises WeightSyncError naming phase and actor.

    Where the learner offers its adapter and that fails in any way, a full sync takes its place, now and for the rest of the run, if the configuration
    permits it (DESIGN 5, decision 20).
    """
    rollouts.settle()
    offer = learner.offer_weights()
    reason = offer.fell_back
    if offer.transport == ADAPTER_TRANSPORT:
        try:
            return _sync(learner, rollouts, offer)
        except Exception as error:  # of any kind: what the engines hold after it is proved by the full sync that follows
            if not AdapterTerms.of(offer).falls_back:
                raise _final(error) from error
            reason = str(error)
        learner.fall_back_to_full()
        offer = learner.offer_weights()
    if reason is not None:
        _LOGGER.warning("the adapter sync failed, full weights are sent from now on: %s", reason)
    return replace(_sync(learner, rollouts, offer), fell_back=reason)


def _final(error: Exception) -> WeightSyncError:
    """The failure of an adapter sync where it ends the run."""
    remedy = "set rollout_matching.vllm.sync.fallback_to_full: true to go on with full weights, or sync.mode: full to begin with them"
    if isinstance(error, WeightSyncError):
        return WeightSyncError(f"of the adapter: {error.message}; {remedy}", actor=error.actor, phase=error.phase, quantity=error.quantity, size=error.size)
    return WeightSyncError(f"of the adapter: {type(error).__name__}: {error}; {remedy}", actor="rollout actors", phase="adapter")


def _sync(learner: SendsWeights, rollouts: TakesWeights, offer: WeightOffer) -> SyncReport:
    """Both sides of one offer.

    Both futures are bounded by the offer's phase timeout. When one side fails it leaves the group, which ends the other side's wait:
    a few seconds are given to that, so that the error shown is the receiver's, with the sender's as its cause.
    """
    timeout_s = AdapterTerms.of(offer).timeout_s if offer.transport == ADAPTER_TRANSPORT else Terms.of(offer).timeout_s
    receiving = rollouts.receive_weights(offer)
    sending = learner.send_weights(offer)
    sides: tuple[Future[Any], Future[Any]] = (receiving, sending)
    limit_s = whole_sync_s(timeout_s)
    wait(sides, timeout=limit_s, return_when=FIRST_EXCEPTION)
    wait(sides, timeout=3 * MARGIN_S)
    errors = [error for side in sides if side.done() and (error := side.exception()) is not None]
    if errors:
        raise errors[0] from (errors[1] if len(errors) > 1 else None)
    for side, who in zip(sides, (ENGINES, LEARNER), strict=True):
        if not side.done():
            told = late(f"the {who}", f"{limit_s / timeout_s:.1f} x timeouts.sync_phase_s", limit_s, "that its process is alive")
            raise WeightSyncError(told, actor=who, phase=SyncPhase.WIRE)
    sent, report = sending.result(), receiving.result()
    learner.sync_done()
    return replace(report, phase_s={**report.phase_s, **sent.phase_s})
