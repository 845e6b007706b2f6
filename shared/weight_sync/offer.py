"""What a weight offer says of the weights: `WeightOffer.rendezvous["terms"]`, and how full weights
are cut into buckets (DESIGN 9).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from shared.chunking import cut_past
from shared.errors import Timeout
from shared.rollouts import WeightOffer

# LoRA adapters as both ends know them: what vLLM can serve of them, which the configuration knows
# too, and how one is written down.


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What an engine can be started for: an adapter of any other rank takes the next one's room, and
none is larger than the last.
"""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter by itself, under the names by which peft and vLLM load it."""

    tensors: bytes
    """`adapter_model.safetensors`."""
    config: str
    """`adapter_config.json`."""

    def save(self, folder: Path) -> None:
        """As `peft.PeftModel.from_pretrained(base model, folder)` takes it. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_model.safetensors").write_bytes(self.tensors)
        (folder / "adapter_config.json").write_text(self.config)


CHECKSUMS = "rollmatch.checksums"
"""The tensor behind the weights: one int64 for each bucket, computed while the bucket was packed,
so that no pass over the weights comes before.

It travels as bytes, and so does `CANARY`: vLLM's packing puts a tensor directly behind the one
before, where no number of 8 bytes may begin.
"""

CANARY = "rollmatch.canary"
"""Behind the checksums: the log-probabilities that the probe in the offer lacks, in double
precision.
"""


PHASE_LIMIT = "timeouts.sync_phase_s"
"""The key that bounds each phase of a sync."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    name: str
    """transformers' own parameter name."""
    dtype: str
    """As in `torch.<dtype>`."""
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ProcessGroupSpec:
    """One process group of a sync, hosted by the sender, who is rank 0 of it."""

    host: str
    port: int
    """Bound by the sender before it is published here."""
    world_size: int
    """The sender and every receiving worker. A receiver's rank is 1 plus the number of workers
    before it in its group.
    """
    key: str
    """Of this opening of the group: whoever has joined under another key has to join again, also
    where host and port are the same.
    """


@dataclass(frozen=True, slots=True)
class FullOffer:
    """Of full weights: what a receiver needs to join and to check. Plain data, so that it can go
    through JSON.
    """

    groups: tuple[ProcessGroupSpec, ...]
    """In the order of `learner.model.ranks.RankTopology.receivers`; none where nothing goes over a
    wire.
    """
    timeout_s: float
    """Longest time of any one phase but the joining: the configuration's timeouts.sync_phase_s."""
    bucket_bytes: int
    """A bucket is closed by the tensor that takes it past this size."""
    tensors: tuple[TensorSpec, ...]
    """The weights that will be sent, in order; `CHECKSUMS` comes behind them."""
    num_logprobs: int = 0
    """Of `CANARY`; 0: the probe in the offer has its own."""
    join: Timeout | None = None
    """Longest time of the joining of the groups, where that has a limit of its own; None:
    `timeout_s`."""

    @classmethod
    def of(cls, offer: WeightOffer) -> FullOffer:
        terms = offer.rendezvous["terms"]
        assert isinstance(terms, cls)
        return terms

    @property
    def join_limit(self) -> Timeout:
        """The longest that sender and receivers may take to find each other."""
        return Timeout(self.timeout_s, PHASE_LIMIT) if self.join is None else self.join

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def group(self) -> ProcessGroupSpec:
        """The only one: what an engine is told of."""
        (group,) = self.groups
        return group

    @property
    def sent(self) -> tuple[TensorSpec, ...]:
        """The weights and what comes behind them: everything that is handed over, in order."""
        num_buckets = sum(1 for _ in buckets(self.tensors, self.bucket_bytes))
        checksums = TensorSpec(CHECKSUMS, "uint8", (8 * num_buckets,), 8 * num_buckets)
        canary = TensorSpec(CANARY, "uint8", (8 * self.num_logprobs,), 8 * self.num_logprobs)
        return (
            (*self.tensors, checksums, canary) if self.num_logprobs else (*self.tensors, checksums)
        )


@dataclass(frozen=True, slots=True)
class AdapterOffer:
    """Of an adapter, which is small enough to travel with the call and needs no process group, and
    how to check it. Plain data, no pickle.
    """

    files: AdapterFiles
    sha256: str
    """Of both, in their order, as hexadecimal digits."""
    timeout_s: float
    """Longest time of any one phase: the configuration's timeouts.sync_phase_s."""

    @classmethod
    def make(cls, files: AdapterFiles, *, timeout_s: float) -> AdapterOffer:
        return cls(files, _digest(files), timeout_s)

    @classmethod
    def of(cls, offer: WeightOffer) -> AdapterOffer:
        terms = offer.rendezvous["terms"]
        assert isinstance(terms, cls)
        return terms

    @property
    def num_bytes(self) -> int:
        return len(self.files.tensors)

    @property
    def is_intact(self) -> bool:
        return _digest(self.files) == self.sha256


def terms_of(offer: WeightOffer) -> FullOffer | AdapterOffer:
    """Of either kind, which `WeightOffer.sends_adapter` tells."""
    return AdapterOffer.of(offer) if offer.sends_adapter else FullOffer.of(offer)


def offer_for(offer: WeightOffer, index: int) -> WeightOffer:
    """The same sync as the receivers of one group are told of it."""
    terms = terms_of(offer)
    return (
        replace(offer, rendezvous={"terms": replace(terms, groups=(terms.groups[index],))})
        if isinstance(terms, FullOffer)
        else offer
    )


def buckets(tensors: tuple[TensorSpec, ...], bucket_bytes: int) -> Iterator[tuple[TensorSpec, ...]]:
    """The tensors in order, cut behind the one that takes a bucket past `bucket_bytes`: the rule of
    vLLM's own packed transfer.
    """
    return cut_past(tensors, bucket_bytes, lambda tensor: tensor.num_bytes)


def offsets(bucket: tuple[TensorSpec, ...], alignment: int = 16) -> list[int]:
    """Where each tensor of a packed bucket begins, in bytes, and at the end the bucket's size.
    Aligned, so that any dtype may follow any other.
    """
    starts = [0]
    for tensor in bucket:
        starts.append(-(-(starts[-1] + tensor.num_bytes) // alignment) * alignment)
    return starts


def _digest(files: AdapterFiles) -> str:
    digest = hashlib.sha256(files.tensors)
    digest.update(files.config.encode())
    return digest.hexdigest()
