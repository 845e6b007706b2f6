"""The learner's offer to engines in a weight sync: full weights or an adapter (decision 38).

Full weights are sent in buckets of several tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.chunking import cut_past
from shared.errors import Timeout

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks that vLLM reserves space for; an adapter of another rank uses the next larger one."""

CHECKSUMS = "rollmatch.checksums"
"""Name of the tensor with the checksums, one int64 per bucket, which is sent after the weights.

It is sent as bytes, like `CANARY`, because vLLM's packing does not align tensors: an int64 tensor
could begin at any byte.
"""
CANARY = "rollmatch.canary"
"""Name of the tensor with the canary's log-probabilities (float64), sent after the checksums."""
PHASE_LIMIT = "timeouts.sync_phase_s"
"""The configuration key that limits each phase of a weight sync."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The contents of an adapter's two files, as peft and vLLM load them from a folder."""

    tensors: bytes
    """Content of `adapter_model.safetensors`."""
    config: str
    """Content of `adapter_config.json`."""

    def save(self, folder: Path) -> None:
        """Write the files into a folder, for `peft.PeftModel.from_pretrained(model, folder)`.

        Raises OSError.
        """
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_model.safetensors").write_bytes(self.tensors)
        (folder / "adapter_config.json").write_text(self.config)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, type and size of one tensor that a weight sync sends.

    The name is the parameter's name in transformers.

    Example: `TensorSpec("lm_head.weight", "bfloat16", (1000, 64), 128000)`.
    """

    name: str
    dtype: str
    """Name of the type in the module torch."""
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ProcessGroupSpec:
    """Address and size of a process group of a weight sync: the learner and one engine's workers.

    The learner hosts the group and is its rank 0.
    """

    host: str
    port: int
    """The port of the group, which the learner has opened already."""
    world_size: int
    """Number of processes in the group: the learner, and workers with ranks from 1."""
    key: str
    """Id of the group, new each time it is opened; at a new id receivers must join again."""


@dataclass(frozen=True, slots=True)
class FullOffer:
    """An offer of full weights: what an engine needs to receive and check them.

    It is plain data, compatible with JSON.

    Example: three tensors of 10 bytes with `bucket_bytes` 15 are sent as two buckets, of 20 and of
    10 bytes, followed by a tensor `CHECKSUMS` of 2 numbers.
    """

    groups: tuple[ProcessGroupSpec, ...]
    """Process groups, one per engine (`RankTopology.receivers`); empty if none is needed."""
    timeout_s: float
    """Limit of each phase of the sync except joining the groups (`timeouts.sync_phase_s`)."""
    bucket_bytes: int
    """A bucket ends with the tensor that makes the bucket larger than this number of bytes."""
    tensors: tuple[TensorSpec, ...]
    """The weights, in the order of sending."""
    num_logprobs: int = 0
    """Number of log-probabilities in the tensor `CANARY`; 0: the offer's canary contains them."""
    join: Timeout | None = None
    """Time limit for joining the process groups; None: `timeout_s`."""

    @property
    def join_limit(self) -> Timeout:
        return self.join or Timeout(self.timeout_s, PHASE_LIMIT)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def group(self) -> ProcessGroupSpec:
        """The process group of an offer to one engine, which contains no other group."""
        (group,) = self.groups
        return group

    @property
    def sent(self) -> tuple[TensorSpec, ...]:
        """All tensors that are sent, in order: weights, checksums, canary's log-probabilities."""
        num_buckets = sum(1 for _ in buckets(self.tensors, self.bucket_bytes))
        numbers = [(CHECKSUMS, num_buckets)]
        if self.num_logprobs:
            numbers.append((CANARY, self.num_logprobs))
        behind = (TensorSpec(name, "uint8", (8 * n,), 8 * n) for name, n in numbers)
        return (*self.tensors, *behind)


@dataclass(frozen=True, slots=True)
class AdapterOffer:
    """An offer that contains a LoRA adapter, which is small enough to be sent in the offer itself.

    It is plain data, without pickle.
    """

    files: AdapterFiles
    sha256: str
    """Hexadecimal digest of the adapter's two files."""
    timeout_s: float
    """Limit of each phase of the sync (`timeouts.sync_phase_s`)."""

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
    """Yield the tensors of a weight sync in buckets, in order.

    A bucket ends with the tensor that makes it larger than `bucket_bytes`, as in vLLM's packing.
    """
    return cut_past(tensors, bucket_bytes, lambda tensor: tensor.num_bytes)


def offsets(bucket: tuple[TensorSpec, ...], alignment: int = 16) -> list[int]:
    """Return the byte offset of each tensor in a packed bucket, followed by the bucket's size.

    All offsets and the size are multiples of `alignment`, in bytes.
    """
    # Aligned, so that tensors of any dtype can follow each other.
    starts = [0]
    for tensor in bucket:
        starts.append(-(-(starts[-1] + tensor.num_bytes) // alignment) * alignment)
    return starts


def _digest(files: AdapterFiles) -> str:
    digest = hashlib.sha256(files.tensors)
    digest.update(files.config.encode())
    return digest.hexdigest()
