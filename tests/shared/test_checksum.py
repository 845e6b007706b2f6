"""The checksum is the same number however it is computed, and another number for other weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shared.checksum import BLOCK, bucket_checksum, tensor_checksum


def slow_checksum(words: list[int]) -> int:
    total = sum((i + 1) * word for i, word in enumerate(words)) % 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("size", [0, 1, 1000, BLOCK - 1, BLOCK + 1])
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.int64])
def test_numpy_torch_and_a_loop_agree(size: int, dtype: type[np.integer]) -> None:
    info = np.iinfo(dtype)
    words = np.random.default_rng(size).integers(info.min, info.max, size, dtype=dtype, endpoint=True)
    expected = slow_checksum(words.tolist())
    assert tensor_checksum(words, np.arange(1, BLOCK + 1)) == expected
    assert tensor_checksum(torch.from_numpy(words), torch.arange(1, BLOCK + 1)) == expected


def test_a_permutation_a_swap_and_one_changed_bit_all_differ() -> None:
    positions = torch.arange(1, BLOCK + 1)
    words = torch.randn(64, 32).view(torch.int32).reshape(-1)
    flipped = words.clone()
    flipped[100] ^= 1
    swapped = words.clone()
    swapped[[3, 4]] = words[[4, 3]]
    sums = [tensor_checksum(variant, positions) for variant in (words, words.view(64, 32).flip(0).reshape(-1), flipped, swapped)]
    assert len(set(sums)) == 4


def test_a_bucket_knows_the_order_of_its_tensors() -> None:
    assert bucket_checksum([5, 7]) != bucket_checksum([7, 5])
    assert -(2**63) <= bucket_checksum([2**63 - 1] * 50) < 2**63
