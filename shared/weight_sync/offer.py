"""A learner's offer of weights, and how full weights are cut into buckets (decision 38)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.chunking import cut_past
from shared.errors import Timeout

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks an engine can be started for; another rank takes the next larger one's room."""

CHECKSUMS = "rollmatch.checksums"
"""Name of the tensor behind the weights: one int64 per bucket, computed while it was packed.

It travels as bytes, and so does `CANARY`: vLLM's packing puts a tensor at any byte.
"""
CANARY = "rollmatch.canary"
"""Name of the tensor behind the checksums: the probe's log-probabilities, in double precision."""
PHASE_LIMIT = "timeouts.sync_phase_s"
"""The key that bounds each phase of a sync."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter by itself, under the names by which peft and vLLM load it."""

    tensors: bytes
    """`adapter_model.safetensors`."""
    config: str
    """`adapter_config.json`."""

    def save(self, folder: Path) -> None:
        """Write what `peft.PeftModel.from_pretrained(base model, folder)` loads. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_model.safetensors").write_bytes(self.tensors)
        (folder / "adapter_config.json").write_text(self.config)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor that will be sent, under transformers' own parameter name.

    Example: `TensorSpec("lm_head.weight", "bfloat16", (1000, 64), 128000)`.
    """

    name: str
    dtype: str
    """A name in the module torch."""
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ProcessGroupSpec:
    """One process group of a sync, hosted by the sender, which is its rank 0."""

    host: str
    port: int
    """Bound by the sender before it is published here."""
    world_size: int
    """The sender and every receiving worker; a receiver's rank is 1 plus the workers before it."""
    key: str
    """A new one each time the group is opened, which says to join again."""


@dataclass(frozen=True, slots=True)
class FullOffer:
    """Full weights: what a receiver needs to join and to check. Plain data, fit for JSON.

    Example: three tensors of 10 bytes with `bucket_bytes` 15 go as two buckets, of 20 and of 10
    bytes, followed by a tensor `CHECKSUMS` of 2 numbers.
    """

    groups: tuple[ProcessGroupSpec, ...]
    """One for each of `RankTopology.receivers`; none where nothing goes over a wire."""
    timeout_s: float
    """Longest time of any one phase but the joining (`timeouts.sync_phase_s`)."""
    bucket_bytes: int
    """A bucket is closed by the tensor that takes it past this size."""
    tensors: tuple[TensorSpec, ...]
    """The weights in the order in which they will be sent."""
    num_logprobs: int = 0
    """Numbers in `CANARY`; 0: the offered probe has its own."""
    join: Timeout | None = None
    """Longest time of joining the groups; None: `timeout_s`."""

    @property
    def join_limit(self) -> Timeout:
        return self.join or Timeout(self.timeout_s, PHASE_LIMIT)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def group(self) -> ProcessGroupSpec:
        """The only one: an engine is told of no other."""
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
    """An adapter, small enough to travel with the call. Plain data, no pickle."""

    files: AdapterFiles
    sha256: str
    """Hexadecimal digits, over tensors and configuration."""
    timeout_s: float
    """Longest time of any one phase (`timeouts.sync_phase_s`)."""

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
    """Cut behind each tensor that takes a bucket past `bucket_bytes`, as vLLM's packing does."""
    return cut_past(tensors, bucket_bytes, lambda tensor: tensor.num_bytes)


def offsets(bucket: tuple[TensorSpec, ...], alignment: int = 16) -> list[int]:
    """Return where each tensor of a packed bucket begins, in bytes, and at the end its size."""
    # Aligned, so that any dtype may follow any other.
    starts = [0]
    for tensor in bucket:
        starts.append(-(-(starts[-1] + tensor.num_bytes) // alignment) * alignment)
    return starts


def _digest(files: AdapterFiles) -> str:
    digest = hashlib.sha256(files.tensors)
    digest.update(files.config.encode())
    return digest.hexdigest()
