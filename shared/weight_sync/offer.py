"""A learner's offer of weights, and the cutting of full weights into buckets (decision 38)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.chunking import cut_past
from shared.errors import Timeout

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that an engine supports; another rank uses the space of the next larger one."""

CHECKSUMS = "rollmatch.checksums"
"""Name of the tensor after the weights: one int64 per bucket, computed while the bucket was packed.

It is sent as bytes, like `CANARY`, because vLLM's packing puts a tensor at any byte.
"""
CANARY = "rollmatch.canary"
"""Name of the tensor after the checksums: the probe's log-probabilities, in double precision."""
PHASE_LIMIT = "timeouts.sync_phase_s"
"""The key that limits each phase of a sync."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The files of an adapter, under the names that peft and vLLM load."""

    tensors: bytes
    """`adapter_model.safetensors`."""
    config: str
    """`adapter_config.json`."""

    def save(self, folder: Path) -> None:
        """Write a folder for `peft.PeftModel.from_pretrained(model, folder)`. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_model.safetensors").write_bytes(self.tensors)
        (folder / "adapter_config.json").write_text(self.config)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor to send, under its parameter name in transformers.

    Example: `TensorSpec("lm_head.weight", "bfloat16", (1000, 64), 128000)`.
    """

    name: str
    dtype: str
    """Name in the module torch."""
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ProcessGroupSpec:
    """One process group of a sync; the sender hosts it and is its rank 0."""

    host: str
    port: int
    """The sender binds it before publishing it here."""
    world_size: int
    """The sender and all receiving workers; a receiver's rank is 1 plus the workers before it."""
    key: str
    """Changes each time the group is opened; a new key means that receivers must join again."""


@dataclass(frozen=True, slots=True)
class FullOffer:
    """Full weights: what a receiver needs for joining and checking. Plain data, JSON-compatible.

    Example: three tensors of 10 bytes with `bucket_bytes` 15 are sent as two buckets, of 20 and of
    10 bytes, followed by a tensor `CHECKSUMS` of 2 numbers.
    """

    groups: tuple[ProcessGroupSpec, ...]
    """One per entry of `RankTopology.receivers`; empty if no process group is needed."""
    timeout_s: float
    """Limit of each phase except joining (`timeouts.sync_phase_s`)."""
    bucket_bytes: int
    """A bucket ends with the tensor that takes it past this size."""
    tensors: tuple[TensorSpec, ...]
    """The weights in the order of sending."""
    num_logprobs: int = 0
    """Number of values in `CANARY`; 0: the probe of the offer contains them."""
    join: Timeout | None = None
    """Limit of joining the groups; None: `timeout_s`."""

    @property
    def join_limit(self) -> Timeout:
        return self.join or Timeout(self.timeout_s, PHASE_LIMIT)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def group(self) -> ProcessGroupSpec:
        """The only group: an offer to one engine contains only its group."""
        (group,) = self.groups
        return group

    @property
    def sent(self) -> tuple[TensorSpec, ...]:
        """Everything that is sent, in order: weights, checksums, the canary's log-probabilities."""
        num_buckets = sum(1 for _ in buckets(self.tensors, self.bucket_bytes))
        numbers = [(CHECKSUMS, num_buckets)]
        if self.num_logprobs:
            numbers.append((CANARY, self.num_logprobs))
        behind = (TensorSpec(name, "uint8", (8 * n,), 8 * n) for name, n in numbers)
        return (*self.tensors, *behind)


@dataclass(frozen=True, slots=True)
class AdapterOffer:
    """An adapter, small enough to send with the call. Plain data, no pickle."""

    files: AdapterFiles
    sha256: str
    """Hexadecimal digest of tensors and configuration."""
    timeout_s: float
    """Limit of each phase (`timeouts.sync_phase_s`)."""

    @classmethod
    def make(cls, files: AdapterFiles, *, timeout_s: float) -> AdapterOffer:
        return cls(files, _digest(files), timeout_s)

    @property
    def num_bytes(self) -> int:
        return len(self.files.tensors)

    @property
    def is_intact(self) -> bool:
        return _digest(self.files) == self.sha256


def buckets(tensors: tuple[TensorSpec, ...], bucket_bytes: int) -> Iterator[tuple[TensorSpec, ...]]:
    """Cut after each tensor that takes a bucket past `bucket_bytes`, as vLLM's packing does."""
    return cut_past(tensors, bucket_bytes, lambda tensor: tensor.num_bytes)


def offsets(bucket: tuple[TensorSpec, ...], alignment: int = 16) -> list[int]:
    """Return the byte offset of each tensor in a packed bucket, and finally the bucket's size."""
    # Aligned, so that tensors of any dtype can follow each other.
    starts = [0]
    for tensor in bucket:
        starts.append(-(-(starts[-1] + tensor.num_bytes) // alignment) * alignment)
    return starts


def _digest(files: AdapterFiles) -> str:
    digest = hashlib.sha256(files.tensors)
    digest.update(files.config.encode())
    return digest.hexdigest()
