"""The checksum of a bucket of weights: exact, of 64 bits, the same number on a GPU, in a
cache-sized loop on a CPU and in plain Python (DESIGN 9.3).

A tensor's memory is read as 8-byte words, 512 to a row and 512 rows to a block. The checksum is a
hash over the sums of every row and of every column of a block, modulo 2**64, and over the bytes
that fill no row. Integer sums do not depend on their order, so any parallel reduction agrees.

What it tells apart for certain (up to a collision of the hash, 2**-64): any change within one word,
one bit or all; two words that change places and differ; rows, blocks or tensors that change places
and differ in a sum. What it cannot see: changes that leave every row and every column sum of a
block as it was, for which at least four words, at the corners of a rectangle, have to change by the
same amount with alternating signs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.weight_sync.offer import CANARY, CHECKSUMS, FullOffer, buckets

SIDE = 512
"""Words of a row and rows of a block: a block is 2 MiB, which stays in a core's cache between its
two sums.
"""
WORD_BYTES = 8


Torch = Any
"""The module `torch`, as an argument: the one place where this package, which imports no torch,
works on tensors. Whoever has a tensor has the module.
"""


class BucketChecksum:
    """Add the bucket's tensors in order, then take the value."""

    def __init__(self, torch: Torch) -> None:
        self._torch = torch
        self._hash = blake2b(digest_size=8)

    def add(self, tensor: Any) -> None:
        """A contiguous tensor of any dtype and device. On a device only the sums leave it, 0.4 % of
        the bytes.
        """
        bytes_N = tensor.reshape(-1).view(self._torch.uint8)
        if bytes_N.storage_offset() % WORD_BYTES:
            # torch reads words at whole words only, and vLLM's own packing puts a tensor anywhere.
            bytes_N = bytes_N.clone()
        row_bytes = SIDE * WORD_BYTES
        whole = len(bytes_N) // row_bytes * row_bytes
        if whole:
            for sums in self._sums(bytes_N[:whole].view(self._torch.int64).reshape(-1, SIDE)):
                self._hash.update(sums.tobytes())
        self._hash.update(bytes_N[whole:].cpu().numpy().tobytes())

    def value(self) -> int:
        """Signed: what a tensor of int64 can carry."""
        return int.from_bytes(self._hash.digest(), "little", signed=True)

    def _sums(self, words_RS: Any) -> Iterator[NDArray[np.int64]]:
        if words_RS.device.type == "cpu":
            yield from cached_sums(words_RS.numpy())
        else:
            yield from (sums.cpu().numpy() for sums in device_sums(words_RS))


def cached_sums(words_RS: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The sums of all rows [R], and those of each block's columns [B, SIDE], the last block being
    shorter. One pass over the memory: 0.05 s for a gigabyte.
    """
    rows_R = np.empty(len(words_RS), np.int64)
    columns_BS = np.empty((-(-len(words_RS) // SIDE), SIDE), np.int64)
    for block, start in enumerate(range(0, len(words_RS), SIDE)):
        words = words_RS[start : start + SIDE]
        words.sum(1, out=rows_R[start : start + SIDE])
        words.sum(0, out=columns_BS[block])
    return rows_R, columns_BS


def device_sums(words_RS: Any) -> Iterator[Any]:
    """The same numbers in the same order from a torch tensor, by three reductions."""
    yield words_RS.sum(1)
    whole = len(words_RS) // SIDE * SIDE
    yield words_RS[:whole].reshape(-1, SIDE, SIDE).sum(1)
    if whole < len(words_RS):
        yield words_RS[whole:].sum(0)


# Weights on their way out, whoever carries them: counted, and followed by their checksums and the
# canary's log-probabilities (DESIGN 9.3).


class ChecksummedWeights:
    """To be iterated once."""

    def __init__(
        self,
        weights: Iterable[tuple[str, Any]],
        terms: FullOffer,
        torch: Torch,
        logprobs: Callable[[], Sequence[float]] | None = None,
    ) -> None:
        """`weights` are named contiguous tensors, the terms' in the terms' order; `logprobs` is
        asked last, where the terms have some.
        """
        self._weights = iter(weights)
        self.terms = terms
        self._torch = torch
        self._logprobs = logprobs
        self.gather_s = 0.0
        """Seconds in which the source made tensors."""
        self.verify_s = 0.0
        """Seconds of checksums."""

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        checksums, tensor = [], None
        for bucket in buckets(self.terms.tensors, self.terms.bucket_bytes):
            checksum = BucketChecksum(self._torch)
            for spec in bucket:
                started = time.perf_counter()
                name, tensor = next(self._weights)
                gathered = time.perf_counter()
                assert (name, tuple(tensor.shape)) == (spec.name, spec.shape), (
                    f"offered {spec.name} {spec.shape}, sending {name} {tuple(tensor.shape)}"
                )
                checksum.add(tensor)
                self.gather_s += gathered - started
                self.verify_s += time.perf_counter() - gathered
                yield name, tensor
            checksums.append(checksum.value())
        assert tensor is not None, "a sync sends something"
        as_bytes = self._torch.uint8
        yield CHECKSUMS, tensor.new_tensor(checksums, dtype=self._torch.int64).view(as_bytes)
        if self.terms.num_logprobs:
            assert self._logprobs is not None, "the terms promise them"
            yield (
                CANARY,
                tensor.new_tensor(self._logprobs(), dtype=self._torch.float64).view(as_bytes),
            )
