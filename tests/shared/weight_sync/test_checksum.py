"""The checksum is the same number however it is computed, and another number for other weights."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pytest
import torch

from shared.weight_sync.checksum import SIDE, BucketChecksum, cached_sums, device_sums

ROW = SIDE * 8
BLOCK = SIDE * ROW


def slow_checksum(*tensors: bytes) -> int:
    """As the module's docstring says it, one word at a time."""
    digest = blake2b(digest_size=8)
    for data in tensors:
        whole = len(data) // ROW * ROW
        words = [int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, whole, 8)]
        rows = [words[i : i + SIDE] for i in range(0, len(words), SIDE)]
        blocks = [rows[i : i + SIDE] for i in range(0, len(rows), SIDE)]
        sums = [sum(row) for row in rows] + [
            sum(column) for block in blocks for column in zip(*block, strict=True)
        ]
        digest.update(b"".join((total % 2**64).to_bytes(8, "little") for total in sums))
        digest.update(data[whole:])
    return int.from_bytes(digest.digest(), "little", signed=True)


def checksum(*tensors: torch.Tensor) -> int:
    total = BucketChecksum()
    for tensor in tensors:
        total.add(tensor)
    return total.value()


def random_bytes(size: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1, ROW - 1, ROW, 3 * ROW + 5, BLOCK, BLOCK + ROW + 9])
def test_it_is_the_number_that_a_loop_over_words_gives(size: int) -> None:
    data = random_bytes(size)
    assert checksum(data) == checksum(data) == slow_checksum(data.numpy().tobytes())


@pytest.mark.parametrize("rows", [1, SIDE - 1, SIDE, 2 * SIDE + 3])
def test_the_reductions_of_a_device_give_what_the_loop_over_blocks_gives(rows: int) -> None:
    words = random_bytes(rows * ROW).view(torch.int64).reshape(-1, SIDE)
    of_rows, *of_columns = device_sums(words)
    of_columns = [one.reshape(-1, SIDE) for one in of_columns]
    for on_device, in_cache in zip(
        (of_rows, torch.cat(of_columns)), cached_sums(words), strict=True
    ):
        assert on_device.equal(in_cache)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
)
def test_every_dtype_and_shape_is_its_memory(dtype: torch.dtype) -> None:
    tensor = (100 * torch.randn(37, 501)).to(dtype)
    assert checksum(tensor) == slow_checksum(tensor.view(torch.uint8).numpy().tobytes())


def test_a_tensor_at_an_odd_place_of_a_packed_buffer_has_the_checksum_of_its_copy() -> None:
    part = random_bytes(5 * ROW)[2 : 2 + 4 * ROW]
    assert checksum(part.view(torch.bfloat16)) == slow_checksum(part.numpy().tobytes())


def test_any_one_changed_bit_is_seen() -> None:
    data = random_bytes(2 * ROW + 11)
    seen = {checksum(data)}
    for index in np.random.default_rng(0).choice(len(data), 200, replace=False):
        for bit in (0, 7):
            data[index] ^= 1 << bit
            seen.add(checksum(data))
            data[index] ^= 1 << bit
    assert len(seen) == 401


def test_elements_rows_columns_blocks_and_tensors_that_change_places_are_seen() -> None:
    weights = torch.randn(3 * SIDE, 2 * SIDE)
    flat = weights.reshape(-1)
    neighbours, apart = flat.clone(), flat.clone()
    neighbours[[6, 7]] = flat[[7, 6]]
    apart[[5, 900_000]] = flat[[900_000, 5]]
    other = torch.randn(100, 7)
    square = torch.randn(1024, 1024)
    variants = [
        (flat, other),
        (other, flat),
        (neighbours, other),
        (apart, other),
        (weights.flip(0), other),
        (weights.flip(1), other),
        (weights.view(3, SIDE, -1)[[1, 0, 2]].reshape(-1), other),
        (square,),
        (square.T.contiguous(),),
    ]
    assert len({checksum(*variant) for variant in variants}) == len(variants)
