"""One weight sync as both ends know it: its terms, its phases and its conversation (DESIGN 9).

::

    learner                                   every rollout engine
    offer: version, terms, checksums, canary
                                              pause        finish what is running, start nothing
    send:  rendezvous  <------------------->  rendezvous   the first time, and after a failure
           wire        ------ buckets ----->  wire         receive and load
                                              verify       every parameter loaded, checksums equal the offer's
                                              reset        prefix, multimodal and encoder caches
                                              canary       resume, score the probe, raise the version
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from shared.errors import WeightSyncError
from shared.rollouts import SyncReport, WeightOffer

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
class Terms:
    """What a receiver needs to join and to check: `WeightOffer.rendezvous["terms"]`."""

    host: str
    port: int
    """Bound by the sender before it is published here. A new port means a new group."""
    world_size: int
    """The sender (rank 0) and every receiving worker."""
    timeout_s: float
    """Longest time of any one phase: the configuration's timeouts.sync_phase_s."""
    bucket_bytes: int
    """A bucket is closed by the tensor that takes it past this size."""
    tensors: tuple[TensorSpec, ...]
    """Everything that will be sent, in order."""
    checksums: tuple[int, ...]
    """One per bucket (`shared.checksum`)."""

    @classmethod
    def of(cls, offer: WeightOffer) -> Terms:
        terms = offer.rendezvous["terms"]
        assert isinstance(terms, cls)
        return terms

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class SendReport:
    """The sender's side of one sync."""

    bytes: int
    phase_s: dict[str, float]
    """Seconds in `rendezvous` (0 when the group is kept) and `wire`."""


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


class SendsWeights(Protocol):
    def offer_weights(self) -> WeightOffer: ...
    def send_weights(self, offer: WeightOffer) -> Future[SendReport]: ...


class TakesWeights(Protocol):
    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]: ...


def sync_weights(learner: SendsWeights, rollouts: TakesWeights) -> SyncReport:
    """One verified sync; afterwards every actor serves the offered version. Raises WeightSyncError naming phase and actor.

    Both futures are bounded by the offer's phase timeout. When one side fails it leaves the group, which ends the other side's wait:
    a few seconds are given to that, so that the error shown is the receiver's, with the sender's as its cause.
    """
    offer = learner.offer_weights()
    terms = Terms.of(offer)
    receiving = rollouts.receive_weights(offer)
    sending = learner.send_weights(offer)
    sides: tuple[Future[Any], Future[Any]] = (receiving, sending)
    limit_s = (len(SyncPhase) + 1) * (terms.timeout_s + 3 * MARGIN_S)
    wait(sides, timeout=limit_s, return_when=FIRST_EXCEPTION)
    wait(sides, timeout=3 * MARGIN_S)
    errors = [error for side in sides if side.done() and (error := side.exception()) is not None]
    if errors:
        raise errors[0] from (errors[1] if len(errors) > 1 else None)
    for side, who in zip(sides, ("rollout actors", "learner"), strict=True):
        if not side.done():
            late = f"no answer in {limit_s:.0f} s (timeouts.sync_phase_s is {terms.timeout_s:g}); check that its process is alive"
            raise WeightSyncError(late, actor=who, phase="wire")
    sent, report = sending.result(), receiving.result()
    return replace(report, phase_s={**report.phase_s, **{f"send_{phase}": seconds for phase, seconds in sent.phase_s.items()}})
