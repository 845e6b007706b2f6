"""What a weight offer says of the weights: `WeightOffer.rendezvous["terms"]`, and how full weights are cut into buckets (DESIGN 9)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shared.rollouts import WeightOffer

CHECKSUMS = "rollmatch.checksums"
"""The tensor behind the weights: one int64 for each bucket, computed while the bucket was packed, so that no pass over the weights comes before.

It travels as bytes, and so does `CANARY`: vLLM's packing puts a tensor directly behind the one before, where no number of 8 bytes may begin.
"""

CANARY = "rollmatch.canary"
"""Behind the checksums: the log-probabilities that the probe in the offer lacks, in double precision."""


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
class FullTerms:
    """Of full weights: what a receiver needs to join and to check. Plain data, so that it can go through JSON."""

    groups: tuple[Group, ...]
    """In the order of `learner.place.LearnerPlace.receivers`; none where nothing goes over a wire."""
    timeout_s: float
    """Longest time of any one phase: the configuration's timeouts.sync_phase_s."""
    bucket_bytes: int
    """A bucket is closed by the tensor that takes it past this size."""
    tensors: tuple[TensorSpec, ...]
    """The weights that will be sent, in order; `CHECKSUMS` comes behind them."""
    num_logprobs: int = 0
    """Of `CANARY`; 0: the probe in the offer has its own."""

    @classmethod
    def of(cls, offer: WeightOffer) -> FullTerms:
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

    def for_group(self, index: int) -> FullTerms:
        """The same sync as the receivers of this group are told of it."""
        return replace(self, groups=(self.groups[index],))

    @property
    def sent(self) -> tuple[TensorSpec, ...]:
        """The weights and what comes behind them: everything that is handed over, in order."""
        num_buckets = sum(1 for _ in buckets(self.tensors, self.bucket_bytes))
        checksums = TensorSpec(CHECKSUMS, "uint8", (8 * num_buckets,), 8 * num_buckets)
        canary = TensorSpec(CANARY, "uint8", (8 * self.num_logprobs,), 8 * self.num_logprobs)
        return (*self.tensors, checksums, canary) if self.num_logprobs else (*self.tensors, checksums)


@dataclass(frozen=True, slots=True)
class AdapterTerms:
    """Of an adapter, which is small enough to travel with the call and needs no process group: the two files of its folder as peft writes it, and how to check
    them. Plain data, no pickle."""

    tensors: bytes
    """`adapter_model.safetensors`."""
    config: str
    """`adapter_config.json`."""
    sha256: str
    """Of both, in this order, as hexadecimal digits."""
    timeout_s: float
    """Longest time of any one phase: the configuration's timeouts.sync_phase_s."""
    falls_back: bool
    """What is done when this sync fails, rollout_matching.vllm.sync.fallback_to_full: full syncs from then on (true), or the run's end."""

    @classmethod
    def make(cls, tensors: bytes, config: Mapping[str, Any], *, timeout_s: float, falls_back: bool) -> AdapterTerms:
        text = json.dumps(config, sort_keys=True)
        return cls(tensors, text, _digest(tensors, text), timeout_s, falls_back)

    @classmethod
    def of(cls, offer: WeightOffer) -> AdapterTerms:
        terms = offer.rendezvous["terms"]
        assert isinstance(terms, cls)
        return terms

    @property
    def num_bytes(self) -> int:
        return len(self.tensors)

    @property
    def is_intact(self) -> bool:
        return _digest(self.tensors, self.config) == self.sha256


def terms_of(offer: WeightOffer) -> FullTerms | AdapterTerms:
    """Of either kind, which `WeightOffer.sends_adapter` tells."""
    return AdapterTerms.of(offer) if offer.sends_adapter else FullTerms.of(offer)


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


def _digest(tensors: bytes, config: str) -> str:
    digest = hashlib.sha256(tensors)
    digest.update(config.encode())
    return digest.hexdigest()
