"""Weights on their way out, whoever carries them: counted, and followed by their checksums and the canary's log-probabilities (DESIGN 9.3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from shared.checksum import BucketChecksum, Torch
from shared.weight_terms import CANARY, CHECKSUMS, FullTerms, buckets


class ChecksummedWeights:
    """To be iterated once."""

    def __init__(self, weights: Iterable[tuple[str, Any]], terms: FullTerms, torch: Torch, logprobs: Callable[[], Sequence[float]] | None = None) -> None:
        """`weights` are named contiguous tensors, the terms' in the terms' order; `logprobs` is asked last, where the terms have some."""
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
                assert (name, tuple(tensor.shape)) == (spec.name, spec.shape), f"offered {spec.name} {spec.shape}, sending {name} {tuple(tensor.shape)}"
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
            yield CANARY, tensor.new_tensor(self._logprobs(), dtype=self._torch.float64).view(as_bytes)
