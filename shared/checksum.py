"""An exact, position-sensitive checksum that a torch device and plain Python compute alike (DESIGN 9.3).

Integers modulo 2**64 add up to the same number in any order, so a parallel reduction on a GPU, a loop on a CPU and the reference in
the test agree to the bit. Weights by position tell a permuted tensor from the original; a plain sum would not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

BLOCK = 1 << 20
"""Words per reduction: bounds the temporary product to 8 MiB, so that a tensor is never copied whole."""


class IntegerArray(Protocol):
    """One dimension of integers: a numpy array or a torch tensor. `sum()` is of 64 bits and wraps."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: slice, /) -> Any: ...


def tensor_checksum(words: IntegerArray, positions: IntegerArray) -> int:
    """`sum((i + 1) * words[i])` modulo 2**64, as a signed integer.

    `words` is the tensor's memory read as integers of its own element size; `positions` is `1 .. BLOCK` as int64 on the same device.
    """
    total = 0
    for start in range(0, len(words), BLOCK):
        block = words[start : start + BLOCK]
        total += int((block * positions[: len(block)]).sum()) + start * int(block.sum())
    return _signed(total)


def bucket_checksum(tensor_checksums: Iterable[int]) -> int:
    """The checksums of a bucket's tensors in order, as one: swapping two tensors changes it."""
    total = 0
    for checksum in tensor_checksums:
        total = total * 0x100000001B3 + checksum
    return _signed(total)


def _signed(value: int) -> int:
    """Into -2**63 .. 2**63 - 1: what a message between processes can carry."""
    return (value + 2**63) % 2**64 - 2**63
