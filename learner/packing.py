"""Packing policies: which segments share a row, and when a row is ready (decisions 7 and 35).

With every policy, rows depend only on positions, not on arrival order, rounds or rollout actors.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from types import ModuleType
from typing import Generic, TypeVar

import numpy as np

from learner.segments import Segment, shared_tokens
from shared.config.run import RowRule
from shared.config.training import TrainingSection
from shared.errors import ConfigError

SizedT = TypeVar("SizedT", bound=Sized)

# Largest table of the exact search (segments x tokens): about 40 MB of int16. Larger problems use
# the better of two heuristics.
_EXACT_CELLS = 20_000_000

# A row is searched among this many of the oldest segments, and more only if it can then be fuller.
# Otherwise packing n segments into rows would take a time that grows with the square of n.
_NUM_SEARCHED = 64


def require_binpacking() -> ModuleType:
    """Import the package `binpacking`. Raises ConfigError if it is not installed."""
    try:
        import binpacking
    except ModuleNotFoundError as error:
        raise ConfigError(
            "training.packing: the package `binpacking` is not installed; run `pip install"
            " binpacking`, or set training.packing: false"
        ) from error
    return binpacking


def select_segments(lengths: Sequence[int], capacity: int) -> list[int]:
    """Choose which waiting segments form the next packed row. Return their indices, ascending.

    The row always contains index 0 (the oldest segment) and never exceeds `capacity`. Its total is
    never less than with first-fit in order. A larger total is preferred, then fewer segments, then
    the lexicographically smallest index set.

    Args:
        lengths: number of tokens of each waiting segment, oldest first.
        capacity: maximum number of tokens of a row.

    Example:
        >>> select_segments([6, 5, 4, 3], capacity=10)
        [0, 2]

    Raises:
        ValueError: `lengths` is empty.
        ConfigError: a segment is longer than a row, or `binpacking` is not installed.
    """
    require_binpacking()
    if not lengths:
        raise ValueError("no segments to select from")
    for index, length in enumerate(lengths):
        _require_fits(length, capacity, f"segment {index}")
    if len(lengths) * (capacity + 1) <= _EXACT_CELLS:
        return _select_exact(lengths, capacity)
    return min(
        (_select_fifo(lengths, capacity), _select_binpacking(lengths, capacity)),
        key=lambda chosen: (-sum(lengths[i] for i in chosen), len(chosen), chosen),
    )


def _num_searched(lengths: Sequence[int], capacity: int) -> int:
    """Return how many of the oldest segments suffice for a row with the largest total.

    Example: capacity 10 and 200 segments of 6, 5, 4, 3, ... tokens. The oldest three contain a full
    row (6 + 4), so the result is the minimum `_NUM_SEARCHED`.
    """
    if len(lengths) <= _NUM_SEARCHED:
        return len(lengths)
    room = capacity - lengths[0]
    # Bit t of `reached[i]`: some of the segments 1..i have t tokens in total.
    reached = [1]
    for length in lengths[1:]:
        reached.append((reached[-1] | reached[-1] << length) & ((2 << room) - 1))
        if reached[-1] >> room:  # the row is full
            break
    most = reached[-1].bit_length()
    first = next(index for index, totals in enumerate(reached) if totals.bit_length() == most)
    return max(_NUM_SEARCHED, first + 1)


def _require_fits(length: int, capacity: int, what: str) -> None:
    if length > capacity:
        raise ConfigError(
            f"global_max_length: {what} has {length} tokens, but a row holds {capacity}; raise"
            " global_max_length, lower rollout_matching.max_new_tokens, or set training.packing:"
            " false"
        )


def _select_exact(lengths: Sequence[int], capacity: int) -> list[int]:
    """Solve the subset sum by dynamic programming.

    `fewest[i][c]` is the smallest number of segments among `i..` that total exactly `c` tokens.
    """
    n = len(lengths)
    room = capacity - lengths[0]  # index 0 is always taken, so that no segment waits forever
    unreachable = np.int16(np.iinfo(np.int16).max)
    fewest = np.full((n + 1, room + 1), unreachable, dtype=np.int16)
    fewest[n, 0] = 0
    for i in range(n - 1, 0, -1):
        fewest[i] = fewest[i + 1]
        length = lengths[i]
        if length <= room:
            before = fewest[i + 1, : room + 1 - length]
            with_i = np.where(before == unreachable, unreachable, before + 1)
            np.minimum(fewest[i, length:], with_i, out=fewest[i, length:])
    total = int(np.flatnonzero(fewest[1] != unreachable)[-1])
    chosen = [0]
    for i in range(1, n):
        # Take i whenever an optimal set contains it: the result is the lexicographically smallest
        # set of the fewest segments.
        if lengths[i] <= total:
            without = fewest[i + 1, total - lengths[i]]
            if without != unreachable and fewest[i, total] == without + 1:
                chosen.append(i)
                total -= lengths[i]
    return chosen


def _select_fifo(lengths: Sequence[int], capacity: int) -> list[int]:
    chosen = []
    total = 0
    for index, length in enumerate(lengths):
        if total + length <= capacity:
            chosen.append(index)
            total += length
    return chosen


def _select_binpacking(lengths: Sequence[int], capacity: int) -> list[int]:
    """Return index 0 and the fullest bin that `to_constant_volume` packs from the others."""
    room = capacity - lengths[0]
    others = {index: length for index, length in enumerate(lengths) if index and length <= room}
    if not others:
        return [0]
    bins: list[dict[int, int]] = require_binpacking().to_constant_volume(others, room)
    fullest = max(
        bins, key=lambda bin_: (sum(bin_.values()), -len(bin_), [-index for index in sorted(bin_)])
    )
    return [0, *sorted(fullest)]


class CarryBuffer(Generic[SizedT]):
    """A buffer of segments that wait for a packed row. `len(segment)` is its token count.

    Example:
        With capacity 10 and segments of 6, 5 and 4 tokens, `pop_row()` returns the segments of 6
        and 4 tokens. The segment of 5 tokens waits.
    """

    def __init__(self, capacity: int, max_segments: int) -> None:
        require_binpacking()
        self.capacity = capacity
        self.max_segments = max_segments
        self.num_tokens = 0
        """Number of tokens of all segments that wait."""
        self._segments: list[SizedT] = []

    def __len__(self) -> int:
        return len(self._segments)

    def insert(self, segment: SizedT) -> None:
        """Add a segment. Raises ConfigError if it does not fit a row or the buffer is full."""
        _require_fits(len(segment), self.capacity, "the segment")
        if len(self._segments) >= self.max_segments:
            raise ConfigError(
                "training.packing_buffer: the buffer is full; raise training.packing_buffer (now"
                f" {self.max_segments}), lower training.per_device_train_batch_size or"
                " stage2_ab.channel_b.rollouts_per_step, or raise global_max_length"
            )
        self._segments.append(segment)
        self.num_tokens += len(segment)

    def replace(self, index: int, segment: SizedT) -> None:
        """Put a segment in the place of one that waits. Raises ConfigError if it does not fit."""
        _require_fits(len(segment), self.capacity, "the segment")
        self.num_tokens += len(segment) - len(self._segments[index])
        self._segments[index] = segment

    def segments(self) -> tuple[SizedT, ...]:
        """Return the segments that wait in the buffer, oldest first."""
        return tuple(self._segments)

    def pop_row(self) -> list[SizedT]:
        """Remove and return the segments of the next row. Raises ValueError if no segment waits.

        Its total is the largest that contains the oldest segment. Among rows with this total,
        `select_segments` chooses from the oldest segments only, if many wait.
        """
        lengths = [len(segment) for segment in self._segments]
        chosen = select_segments(lengths[: _num_searched(lengths, self.capacity)], self.capacity)
        row = [self._segments.pop(index) for index in reversed(chosen)][::-1]
        self.num_tokens -= sum(map(len, row))
        return row

    def flush(self) -> list[list[SizedT]]:
        """Empty the buffer: return all waiting segments, as rows that `pop_row` would give."""
        rows = []
        while self._segments:
            rows.append(self.pop_row())
        return rows


Row = list[Segment]


def moves_to_equal(num_rows: Sequence[int]) -> list[tuple[int, int]]:
    """Return by which moves of single rows all ranks get equally many, up to one row.

    `num_rows`: the number of rows of each rank.

    Returns, for each row that moves, the rank that gives its last row away and the rank that gets
    it.

    Example: for 4, 0 and 1 rows these are (0, 1) and (0, 2), and the ranks then have 2, 1 and 2.
    """
    least, more = divmod(sum(num_rows), len(num_rows))
    # One more for those that have most, so that fewest rows move.
    by_number = sorted(range(len(num_rows)), key=lambda rank: -num_rows[rank])
    surplus = {rank: num_rows[rank] - least - (rank in by_number[:more]) for rank in by_number}
    ranks = sorted(surplus)
    sources = [rank for rank in ranks for _ in range(surplus[rank])]
    destinations = [rank for rank in ranks for _ in range(-surplus[rank])]
    return list(zip(sources, destinations, strict=True))


class PackingPolicy:
    """Decides which segments share a packed row. It takes segments and returns rows to train.

    This base class does not pack: each segment is a row (`training.packing: false`). Segments are
    added in the order of positions.
    """

    carries = False
    """Whether segments may wait for a later step, so that a step learns fewer or more segments than
    it drew."""

    @property
    def num_carried(self) -> int:
        """The number of segments that wait for a later step."""
        return len(self.carried)

    @property
    def carried(self) -> tuple[Segment, ...]:
        """The segments that wait for a later step, oldest first."""
        return ()

    def carry(self, segments: Sequence[Segment]) -> None:
        """Restore the segments that waited for a later step (`carried`) when a run was saved."""
        assert not segments, "this policy does not carry segments"

    def add(self, segment: Segment) -> list[Row]:
        return [[segment]]

    def finish_step(self) -> list[Row]:
        return []


@dataclass(frozen=True, slots=True)
class Siblings:
    """Segments that share a row's copy of their prompt (`shared_tokens`), or a single segment.

    Example: two segments of 30 and 28 tokens that share 25: `len(siblings)` is 33.
    """

    segments: tuple[Segment, ...]

    def __len__(self) -> int:
        first, *others = self.segments
        # The last token of the prompt is not shared.
        return len(first) + sum(1 + len(segment.target.token_ids) for segment in others)

    def joined_by(self, segment: Segment) -> Siblings | None:
        """Return these segments and one more; None if it has another prompt."""
        shares = shared_tokens([self.segments[-1], segment])[-1]
        return Siblings((*self.segments, segment)) if shares else None


class PackWithinStep(PackingPolicy):
    """Packing policy that trains every segment in the step that drew its sample.

    It returns full rows after every `window` segments or if the buffer is full, and the remaining
    rows at the step's end. With `share_prompts`, segments with the prompt of a segment that waits
    get into the same row as long as they fit.
    """

    def __init__(
        self, buffer: CarryBuffer[Siblings], window: int, *, share_prompts: bool = False
    ) -> None:
        self._buffer = buffer
        self._window = window
        self._share_prompts = share_prompts
        self._num_added = 0

    def add(self, segment: Segment) -> list[Row]:
        rows: list[Row] = []
        if not (self._share_prompts and self._joins(segment)):
            if len(self._buffer) == self._buffer.max_segments:
                rows.append(_row(self._buffer.pop_row()))
            self._buffer.insert(Siblings((segment,)))
        self._num_added += 1
        if self._num_added % self._window == 0:
            while self._buffer.num_tokens >= self._buffer.capacity:
                rows.append(_row(self._buffer.pop_row()))
        return rows

    def finish_step(self) -> list[Row]:
        self._num_added = 0
        return [_row(siblings) for siblings in self._buffer.flush()]

    def _joins(self, segment: Segment) -> bool:
        """Add the segment to waiting segments with its prompt. Return False if there are none."""
        # The newest first, because siblings follow each other.
        for index, waiting in reversed([*enumerate(self._buffer.segments())]):
            siblings = waiting.joined_by(segment)
            if siblings is not None and len(siblings) <= self._buffer.capacity:
                self._buffer.replace(index, siblings)
                return True
        return False


def _row(siblings: Sequence[Siblings]) -> Row:
    return [segment for one in siblings for segment in one.segments]


class CarryOver(PackingPolicy):
    """Packing policy that returns one row after every `micro_step` segments.

    The trainer variant `stage2_rollout_aligned` uses it. Segments that do not fit into the row wait
    in the carry buffer for another row of this or a later step.
    """

    carries = True

    def __init__(self, buffer: CarryBuffer[Segment], micro_step: int) -> None:
        self._buffer = buffer
        self._micro_step = micro_step
        self._num_added = 0

    @property
    def carried(self) -> tuple[Segment, ...]:
        return self._buffer.segments()

    def carry(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            self._buffer.insert(segment)

    def add(self, segment: Segment) -> list[Row]:
        """Add a segment. Return one row if it is the last segment of a micro-step, else no row.

        Raises ConfigError if the buffer (`training.packing_buffer`) is full.
        """
        self._buffer.insert(segment)
        self._num_added += 1
        return [self._buffer.pop_row()] if self._num_added % self._micro_step == 0 else []

    def finish_step(self) -> list[Row]:
        assert self._num_added % self._micro_step == 0, "a step must end after a whole micro-step"
        return []


def packing_policy(rule: RowRule, training: TrainingSection, capacity: int) -> PackingPolicy:
    """Return the packing policy of a run, for rows of at most `capacity` tokens.

    Raises ConfigError if the package `binpacking` is needed and not installed.
    """
    if rule is RowRule.SEGMENT:
        return PackingPolicy()
    if rule is RowRule.STEP:
        return PackWithinStep(
            CarryBuffer[Siblings](capacity, training.packing_buffer),
            training.packing_window,
            share_prompts=training.share_prompts,
        )
    buffer = CarryBuffer[Segment](capacity, training.packing_buffer)
    return CarryOver(buffer, training.per_device_train_batch_size)
