"""DESIGN 7.5, against a search through every subset."""

import itertools
import random
import sys

import pytest

from learner import packing
from learner.packing import CarryBuffer, select_segments
from shared.errors import ConfigError


def fifo_greedy(lengths, capacity):
    chosen, total = [], 0
    for index, length in enumerate(lengths):
        if total + length <= capacity:
            chosen.append(index)
            total += length
    return chosen


def every_subset(lengths, capacity):
    """The best selection by trying all: larger total, then fewer segments, then the lexicographically smallest set."""
    others = range(1, len(lengths))
    sets = [(0, *rest) for size in range(len(lengths)) for rest in itertools.combinations(others, size)]
    fitting = [chosen for chosen in sets if sum(lengths[i] for i in chosen) <= capacity]
    return list(min(fitting, key=lambda chosen: (-sum(lengths[i] for i in chosen), len(chosen), chosen)))


def test_the_selection_is_the_best_of_all_subsets_that_hold_the_oldest():
    draw = random.Random(3)
    for _ in range(300):
        capacity = draw.randint(5, 60)
        lengths = [draw.randint(1, capacity) for _ in range(draw.randint(1, 8))]
        assert select_segments(lengths, capacity) == every_subset(lengths, capacity)


def test_a_row_is_at_least_as_full_as_fifo_greedy_and_holds_the_oldest(monkeypatch):
    draw = random.Random(5)
    for exact_cells in (packing._EXACT_CELLS, 0):
        monkeypatch.setattr(packing, "_EXACT_CELLS", exact_cells)
        for _ in range(300):
            capacity = draw.randint(100, 2000)
            lengths = [draw.randint(1, capacity) for _ in range(draw.randint(1, 40))]
            chosen = select_segments(lengths, capacity)
            assert chosen[0] == 0
            assert chosen == sorted(set(chosen))
            assert sum(lengths[i] for i in fifo_greedy(lengths, capacity)) <= sum(lengths[i] for i in chosen) <= capacity
            assert chosen == select_segments(lengths, capacity)


def test_oversized_segment_fails_fast_when_it_is_inserted():
    buffer = CarryBuffer(capacity=10, max_segments=4)
    buffer.insert("aaaa")
    with pytest.raises(ValueError, match=r"raise global_max_length, lower rollout_matching\.max_new_tokens"):
        buffer.insert("a" * 11)
    assert len(buffer) == 1


def test_carry_buffer_overflow_leaves_the_buffer_as_it_was_and_says_what_to_change():
    buffer = CarryBuffer(capacity=10, max_segments=2)
    buffer.insert("aa")
    buffer.insert("bbb")
    with pytest.raises(ValueError, match=r"raise training\.packing_buffer \(now 2\)"):
        buffer.insert("c")
    assert buffer.flush() == [["aa", "bbb"]]


def test_carry_buffer_preserves_segments_without_splitting():
    draw = random.Random(7)
    segments = ["x" * draw.randint(1, 100) for _ in range(60)]
    buffer = CarryBuffer(capacity=100, max_segments=60)
    for segment in segments:
        buffer.insert(segment)
    rows = [buffer.pop_row(), *buffer.flush()]
    assert all(sum(map(len, row)) <= 100 for row in rows)
    assert sorted(map(id, itertools.chain(*rows))) == sorted(map(id, segments))
    assert len(buffer) == 0


def test_missing_binpacking_dependency_fails_fast(monkeypatch):
    monkeypatch.setitem(sys.modules, "binpacking", None)
    with pytest.raises(ConfigError, match=r"pip install binpacking`, or set training\.packing: false"):
        CarryBuffer(capacity=10, max_segments=2)
    with pytest.raises(ConfigError):
        select_segments([1, 2], 10)
