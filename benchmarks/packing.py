"""Compare packing methods by their number of rows, relative to `ceil(sum / capacity)`.

`python -m benchmarks.packing`. It compares whole steps with the streaming windows of decision 7 and
other methods. Lengths are log-normal (sigma 0.6), clipped to 1..capacity. Each method packs the
same draws. Every segment must be packed exactly once, and no row may exceed the capacity. Printed
are the average ratios to the bound, and the rows of streaming relative to the whole step.

Last, one window of many segments is packed, and packed again with every row chosen from all waiting
segments: processor time and its ratio. It must not take more rows.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import binpacking
import numpy as np

from learner.packing import CarryBuffer, PackWithinStep, select_segments

CAPACITY = 12_000
SIGMA = 0.6
WINDOW = 8
MEANS = (800, 2_000)
COUNTS = (32, 64, 128)
LIMIT = 1.03
"""Upper limit of the average ratio to `ceil(sum / capacity)`, if a whole step is packed at once."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A segment to pack, without tokens: its number and its length."""

    index: int
    length: int

    def __len__(self) -> int:
        return self.length


Rows = list[list[Piece]]


def whole_step(pieces: Sequence[Piece]) -> Rows:
    buffer = CarryBuffer(CAPACITY, len(pieces))
    for piece in pieces:
        buffer.insert(piece)
    return buffer.flush()


def streaming(pieces: Sequence[Piece]) -> Rows:
    policy = PackWithinStep(CarryBuffer(CAPACITY, len(pieces)), WINDOW)
    rows = [row for piece in pieces for row in policy.add(piece)]
    return rows + policy.finish_step()


def from_all(pieces: Sequence[Piece]) -> Rows:
    """Choose each row from all segments that wait."""
    rows = []
    left = list(pieces)
    while left:
        chosen = select_segments([*map(len, left)], CAPACITY)
        rows.append([left.pop(index) for index in reversed(chosen)])
    return rows


def fifo(pieces: Sequence[Piece]) -> Rows:
    """Fill one row after another with the remaining segments that fit, in order."""
    rows = []
    left = list(pieces)
    while left:
        row: list[Piece] = []
        for piece in left:
            if sum(map(len, row)) + len(piece) <= CAPACITY:
                row.append(piece)
        rows.append(row)
        left = [piece for piece in left if piece not in row]
    return rows


def first_fit_decreasing(pieces: Sequence[Piece]) -> Rows:
    rows: Rows = []
    for piece in sorted(pieces, key=len, reverse=True):
        for row in rows:
            if sum(map(len, row)) + len(piece) <= CAPACITY:
                row.append(piece)
                break
        else:
            rows.append([piece])
    return rows


def constant_volume(pieces: Sequence[Piece]) -> Rows:
    return binpacking.to_constant_volume(list(pieces), CAPACITY, key=len) if pieces else []


WAYS: dict[str, Callable[[Sequence[Piece]], Rows]] = {
    "whole step": whole_step,
    "FIFO": fifo,
    "first-fit-decr.": first_fit_decreasing,
    "to_constant_vol.": constant_volume,
    "streaming": streaming,
}


def check(rows: Rows, pieces: Sequence[Piece]) -> None:
    assert sorted(piece.index for row in rows for piece in row) == list(range(len(pieces))), (
        "a segment is packed twice or not at all"
    )
    assert all(sum(map(len, row)) <= CAPACITY for row in rows), "a row exceeds the capacity"


def draw(generator: np.random.Generator, mean: int, count: int) -> list[Piece]:
    lengths = generator.lognormal(math.log(mean) - SIGMA**2 / 2, SIGMA, count)
    return [Piece(index, int(n)) for index, n in enumerate(lengths.clip(1, CAPACITY))]


def compare_one_window(count: int) -> None:
    for mean in MEANS:
        pieces = draw(np.random.default_rng((mean, count)), mean, count)
        seconds = []
        rows = []
        for way in (whole_step, from_all):
            start = time.process_time()
            rows.append(way(pieces))
            seconds.append(time.process_time() - start)
            check(rows[-1], pieces)
        ours, slow = map(len, rows)
        assert ours <= math.ceil(1.01 * slow), f"{ours} rows, chosen from all segments {slow}"
        print(
            f"{count} segments with mean {mean} in one window: {ours} rows in {seconds[0]:.3f} s;"
            f" chosen from all {slow} rows in {seconds[1]:.3f} s; ratio"
            f" {seconds[1] / seconds[0]:.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--one-window", type=int, default=2_000, help="segments of the last part")
    arguments = parser.parse_args()
    print(
        f"{'mean':>5} {'segments':>8} "
        + " ".join(f"{name:>17}" for name in WAYS)
        + "  streaming / whole step   ms per whole step"
    )
    kept = True
    for mean in MEANS:
        for count in COUNTS:
            generator = np.random.default_rng((mean, count))
            num_rows: dict[str, list[int]] = {name: [] for name in WAYS}
            bounds = []
            seconds = 0.0
            for _ in range(arguments.draws):
                pieces = draw(generator, mean, count)
                bounds.append(-(-sum(map(len, pieces)) // CAPACITY))
                for name, way in WAYS.items():
                    start = time.perf_counter()
                    rows = way(pieces)
                    seconds += time.perf_counter() - start if way is whole_step else 0.0
                    check(rows, pieces)
                    num_rows[name].append(len(rows))
            ratios = {
                name: float(np.mean(np.array(counts) / bounds)) for name, counts in num_rows.items()
            }
            price = float(np.mean(np.array(num_rows["streaming"]) / num_rows["whole step"]))
            kept &= ratios["whole step"] <= LIMIT
            cells = " ".join(f"{ratio:17.4f}" for ratio in ratios.values())
            print(
                f"{mean:5} {count:8} {cells}  {price:22.4f}"
                f" {1000 * seconds / arguments.draws:19.1f}"
            )
    compare_one_window(arguments.one_window)
    print("Every segment was packed exactly once, and no row exceeded the capacity.")
    assert kept, f"a whole step takes more than {LIMIT} of the bound on average"


if __name__ == "__main__":
    main()
