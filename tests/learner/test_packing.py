"""Decision 35, against a search through every subset."""

import itertools
import random
import sys

import pytest

from learner.packing import CarryBuffer, moves_to_equal, select_segments
from shared.errors import ConfigError

# With 24 segments its table is past the exact search's size: candidates compete.
LARGE_CAPACITY = 1_000_000


def fifo_greedy(lengths, capacity):
    chosen, total = [], 0
    for index, length in enumerate(lengths):
        if total + length <= capacity:
            chosen.append(index)
            total += length
    return chosen


def total_of(chosen, lengths):
    return sum(lengths[i] for i in chosen)


def rank(chosen, lengths):
    """Less is better: larger total, then fewer segments, then the lexicographically smallest
    set."""
    return (-total_of(chosen, lengths), len(chosen), chosen)


def every_subset(lengths, capacity):
    """The best selection by trying all that hold the oldest."""
    others = range(1, len(lengths))
    sizes = range(len(lengths))
    sets = [[0, *rest] for size in sizes for rest in itertools.combinations(others, size)]
    fitting = (chosen for chosen in sets if total_of(chosen, lengths) <= capacity)
    return min(fitting, key=lambda chosen: rank(chosen, lengths))


def check_selection(lengths, capacity):
    """The promises of every selection; returns it."""
    chosen = select_segments(lengths, capacity)
    in_order = total_of(fifo_greedy(lengths, capacity), lengths)
    assert chosen[0] == 0, "the oldest is not selected"
    assert chosen == sorted(set(chosen)), "not in insertion order"
    assert in_order <= total_of(chosen, lengths) <= capacity
    assert chosen == select_segments(lengths, capacity), "not deterministic"
    return chosen


def draw_buffer(draw):
    """(lengths, capacity) of a buffer: few different lengths, so that there are ties, or many."""
    large = draw.random() < 0.1
    capacity = LARGE_CAPACITY if large else draw.randint(5, 80)
    count = draw.randint(20, 28) if large else draw.randint(1, 14)
    longest = max(capacity // draw.choice([1, 2, 3, 10]), 1)
    several = [draw.randint(1, longest) for _ in range(draw.choice([2, 4, count]))]
    return [draw.choice(several) for _ in range(count)], capacity


@pytest.mark.parametrize(
    ("seed", "count"), [(1, 1_000), pytest.param(2, 20_000, marks=pytest.mark.slow)]
)
def test_20_000_random_buffers_are_selected_from_as_promised(seed, count):
    draw = random.Random(seed)
    for _ in range(count):
        lengths, capacity = draw_buffer(draw)
        chosen = check_selection(lengths, capacity)
        if len(lengths) <= 6:
            assert chosen == every_subset(lengths, capacity)
        if capacity == LARGE_CAPACITY:
            assert rank(chosen, lengths) <= rank(fifo_greedy(lengths, capacity), lengths)


def test_multiple_short_segments_pack_efficiently_under_the_same_cap():
    lengths = [2_000, 5_000, 4_100, 3_000, 5_900, 4_100]
    assert check_selection(lengths, 12_000) == [0, 2, 4]
    assert total_of([0, 2, 4], lengths) == 12_000
    assert total_of(fifo_greedy(lengths, 12_000), lengths) == 11_100


def test_a_buffer_too_large_for_the_exact_search_is_selected_from_better_than_in_order():
    # In order: the first three and ten short ones. As full with fewer: the first, the fourth and a
    # short one.
    lengths = [400_000, 300_000, 200_000, 590_000, *[10_000] * 20]
    chosen = check_selection(lengths, LARGE_CAPACITY)
    assert sum(lengths[i] for i in chosen) == LARGE_CAPACITY
    assert rank(chosen, lengths) < rank(fifo_greedy(lengths, LARGE_CAPACITY), lengths)


def test_a_full_row_is_found_however_far_back_the_segment_that_completes_it_waits():
    buffer = CarryBuffer(capacity=10, max_segments=300)
    lengths = [6, *[7] * 150, 4, *[7] * 100]
    for length in lengths:
        buffer.insert("x" * length)
    assert [len(segment) for segment in buffer.pop_row()] == [6, 4]
    assert buffer.num_tokens == sum(lengths) - 10


@pytest.mark.parametrize("longest", [9, 40, 97])
def test_every_row_of_many_waiting_segments_is_as_full_as_all_of_them_allow(longest):
    """The slow version lists the totals of all subsets that contain the oldest segment."""
    capacity = 97
    draw = random.Random(longest)
    waiting = [draw.randint(1 + longest // 2, longest) for _ in range(200)]
    buffer = CarryBuffer(capacity, len(waiting))
    for length in waiting:
        buffer.insert("x" * length)
    while len(buffer):
        totals = {waiting[0]}
        for length in waiting[1:]:
            totals |= {total + length for total in totals if total + length <= capacity}
        row = [len(segment) for segment in buffer.pop_row()]
        assert row[0] == waiting[0]
        assert sum(row) == max(totals)
        for length in row:
            waiting.remove(length)
        assert [len(segment) for segment in buffer.segments()] == waiting


@pytest.mark.parametrize("capacity", [12_000, LARGE_CAPACITY])
def test_deterministic_selection(capacity):
    draw = random.Random(4)
    lengths = [draw.randint(1, capacity // 4) for _ in range(40)]
    assert select_segments(lengths, capacity) == select_segments(list(lengths), capacity)


def test_shared_packing_helper_yields_deterministic_selection():
    draw = random.Random(5)
    segments = [f"{index:02}" + "x" * draw.randint(1, 98) for index in range(50)]

    def rows():
        buffer = CarryBuffer(capacity=200, max_segments=50)
        taken = []
        for count, segment in enumerate(segments, start=1):
            buffer.insert(segment)
            if count % 8 == 0 and buffer.num_tokens >= buffer.capacity:
                taken.append(buffer.pop_row())
        return taken + buffer.flush()

    assert rows() == rows()


def test_oversized_segment_fails_fast_when_it_is_inserted():
    buffer = CarryBuffer(capacity=10, max_segments=4)
    buffer.insert("aaaa")
    message = (
        r"the segment has 11 tokens, but a row holds 10; raise global_max_length, lower"
        r" rollout_matching\.max_new_tokens, or set"
    )
    with pytest.raises(ConfigError, match=message):
        buffer.insert("a" * 11)
    assert buffer.flush() == [["aaaa"]]


def test_carry_buffer_overflow_fails_fast_with_actionable_guidance():
    buffer = CarryBuffer(capacity=10, max_segments=2)
    buffer.insert("aa")
    buffer.insert("bbb")
    message = (
        r"raise training\.packing_buffer \(now 2\), lower"
        r" training\.per_device_train_batch_size or stage2_ab\.channel_b\.rollouts_per_step"
    )
    with pytest.raises(ConfigError, match=message):
        buffer.insert("c")
    assert buffer.flush() == [["aa", "bbb"]]


def test_carry_buffer_preserves_segments_without_splitting():
    draw = random.Random(7)
    segments = ["x" * draw.randint(1, 100) for _ in range(60)]
    buffer = CarryBuffer(capacity=100, max_segments=60)
    rows = []
    for segment in segments:
        buffer.insert(segment)
        if len(buffer) == 10:
            rows.append(buffer.pop_row())
            assert len(buffer) == 10 - len(rows[-1])
    rows += buffer.flush()
    assert all(sum(map(len, row)) <= 100 for row in rows)
    assert sorted(map(id, itertools.chain(*rows))) == sorted(map(id, segments))
    assert (len(buffer), buffer.num_tokens) == (0, 0)


@pytest.mark.parametrize(
    "attempt", [lambda: CarryBuffer(10, 2), lambda: select_segments([1, 2], 10)]
)
def test_missing_binpacking_dependency_fails_fast(monkeypatch, attempt):
    # what an import of a module that is not there finds
    monkeypatch.setitem(sys.modules, "binpacking", None)
    message = r"pip install binpacking`, or set training\.packing: false"
    with pytest.raises(ConfigError, match=message):
        attempt()


@pytest.mark.parametrize(
    ("num_rows", "moves"),
    [
        ([0, 0], []),
        ([6, 5], []),
        ([5, 6], []),
        ([3, 0, 0], [(0, 1), (0, 2)]),
        ([4, 0, 1], [(0, 1), (0, 2)]),
        ([18] + [0] * 63, [(0, rank) for rank in range(1, 18)]),
    ],
)
def test_ranks_share_their_rows_and_no_row_moves_without_need(num_rows, moves):
    assert moves_to_equal(num_rows) == moves


def test_however_many_rows_ranks_have_they_then_have_equally_many():
    for num_rows in itertools.product(range(5), repeat=4):
        then = list(num_rows)
        for source, destination in moves_to_equal(num_rows):
            then[source] -= 1
            then[destination] += 1
            assert then[source] >= sum(num_rows) // 4, "a rank that gets rows gives none"
        assert sum(then) == sum(num_rows)
        assert max(then) - min(then) <= 1
