"""Checksums of the weights that a sync sends: 64 bits, equal on GPU, CPU and in plain Python.

A bucket is a number of tensors that are sent together, and has one checksum. A tensor's memory is
read as 8-byte words, 512 to a row and 512 rows to a block. The checksum is a hash of the sums of
every row and of every column of a block, modulo 2**64, and of the bytes that do not fill a row.
Integer sums do not depend on their order, so any parallel reduction agrees (decision 38).

It detects (up to a hash collision, 2**-64) any change within one word, two exchanged words that
differ, and exchanged rows, blocks or tensors whose sums differ. It cannot detect changes that
preserve every row and column sum: at least four words, at the corners of a rectangle, change by the
same amount with alternating signs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from shared.weight_sync.offer import CANARY, CHECKSUMS, FullOffer, buckets

# Only functions import torch: clients that only refer to weights do not need it.
if TYPE_CHECKING:
    import torch

SIDE = 512
"""Words per row, and rows per block."""
CACHED_ROWS = 128
"""Rows of 0.5 MiB, which stay in a core's cache between the sums of rows and of columns."""
WORD_BYTES = 8
ROW_BYTES = SIDE * WORD_BYTES


class BucketChecksum:
    """Computes the checksum of a bucket of weights: add its tensors in order, then call `value`."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=8)

    def add(self, tensor: torch.Tensor) -> None:
        """Add a contiguous tensor of any dtype to the bucket.

        A GPU computes the sums of its tensors, so only 0.4 % of their size is copied to the CPU.
        """
        import torch

        bytes_N = tensor.reshape(-1).view(torch.uint8)
        if bytes_N.storage_offset() % WORD_BYTES:
            # torch needs words at multiples of 8 bytes, and vLLM's packing puts a tensor at any
            # byte.
            bytes_N = bytes_N.clone()
        whole = len(bytes_N) // ROW_BYTES * ROW_BYTES
        if whole:
            words_RS = bytes_N[:whole].view(torch.int64).reshape(-1, SIDE)
            sums_of = cached_sums if words_RS.device.type == "cpu" else device_sums
            for sums in sums_of(words_RS):
                self._hash.update(sums.cpu().numpy().tobytes())
        self._hash.update(bytes_N[whole:].cpu().numpy().tobytes())

    def value(self) -> int:
        """Return the checksum of the tensors added so far, as a signed number of 64 bits."""
        return int.from_bytes(self._hash.digest(), "little", signed=True)


def cached_sums(words_RS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of all rows [R], and of the columns of each block [B, SIDE].

    The last block may have fewer rows. The function reads the memory once: 0.11 s for 0.88 GB.
    """
    import torch

    rows_R = words_RS.new_empty(len(words_RS))
    columns_BS = words_RS.new_zeros(-(-len(words_RS) // SIDE), SIDE)
    for start in range(0, len(words_RS), CACHED_ROWS):
        words = words_RS[start : start + CACHED_ROWS]
        torch.sum(words, 1, out=rows_R[start : start + CACHED_ROWS])
        columns_BS[start // SIDE] += words.sum(0)
    return rows_R, columns_BS


def device_sums(words_RS: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the numbers of `cached_sums` in the same order, in few calls that read memory twice."""
    yield words_RS.sum(1)
    whole = len(words_RS) // SIDE * SIDE
    yield words_RS[:whole].reshape(-1, SIDE, SIDE).sum(1)
    if whole < len(words_RS):
        yield words_RS[whole:].sum(0)


@dataclass(eq=False, repr=False)
class ChecksummedWeights:
    """The tensors that a weight sync sends, in order, to be iterated once.

    These are the weights, then their checksums, then the canary's log-probabilities.
    """

    weights: Iterable[tuple[str, torch.Tensor]]
    """Name and contiguous tensor of each weight, in the order of `terms`."""
    terms: FullOffer
    logprobs: Callable[[], Sequence[float]] | None = None
    """Returns the learner's log-probabilities of the canary, if `terms` has a place for them.

    It is called after the last weight.
    """
    gather_s: float = field(init=False, default=0.0)
    """Seconds that the iterable `weights` has needed to make its tensors."""
    verify_s: float = field(init=False, default=0.0)
    """Seconds that the checksums have needed."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        weights = iter(self.weights)
        checksums = []
        tensor = None
        for bucket in buckets(self.terms.tensors, self.terms.bucket_bytes):
            checksum = BucketChecksum()
            for spec in bucket:
                started = time.perf_counter()
                name, tensor = next(weights)
                gathered = time.perf_counter()
                assert (name, tuple(tensor.shape)) == (spec.name, spec.shape), (
                    f"offered {spec.name} {spec.shape}, sending {name} {tuple(tensor.shape)}"
                )
                checksum.add(tensor)
                self.gather_s += gathered - started
                self.verify_s += time.perf_counter() - gathered
                yield name, tensor
            checksums.append(checksum.value())
        assert tensor is not None, "a sync must send at least one tensor"
        # On the weights' device, because one transport sends everything.
        yield CHECKSUMS, tensor.new_tensor(checksums, dtype=torch.int64).view(torch.uint8)
        if self.terms.num_logprobs:
            assert self.logprobs is not None, "terms.num_logprobs needs logprobs"
            logprobs = tensor.new_tensor(self.logprobs(), dtype=torch.float64)
            yield CANARY, logprobs.view(torch.uint8)
