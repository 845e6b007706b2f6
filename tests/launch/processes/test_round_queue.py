"""Who is asked what, when, and who instead: the bound of a device holds whatever fails."""

from __future__ import annotations

import random

import pytest

from launch.processes.rounds import RoundQueue
from shared.chunking import RoundPart


def asked(parts: list[RoundPart]) -> list[tuple[int, int, list[int]]]:
    return [(part.engine, part.rank, list(part.requests)) for part in parts]


def test_every_engine_is_asked_for_its_part_at_once() -> None:
    queue = RoundQueue([2, 2], (1, 1, 1), decode_batch_size=2)
    assert asked(queue.take()) == [(0, 0, [0, 1]), (1, 1, [0, 1])]
    assert queue.take() == []


def test_what_an_engine_failed_to_answer_waits_for_the_next_ones_own_answer() -> None:
    queue = RoundQueue([4], (1, 1), decode_batch_size=2)
    first, second = queue.take()
    assert queue.failed(first) == 1
    assert queue.take() == []
    queue.answered(second)
    assert queue.take() == [RoundPart(1, 0, range(2), num_failed=1)]


def test_an_engine_with_room_takes_it_at_once() -> None:
    queue = RoundQueue([2], (1, 1), decode_batch_size=2)
    first, _ = queue.take()
    assert (queue.failed(first), queue.take()) == (1, [RoundPart(1, 0, range(1), num_failed=1)])


def test_an_engine_of_fewer_devices_takes_it_in_several() -> None:
    queue = RoundQueue([8], (3, 1), decode_batch_size=2)
    first, second = queue.take()
    queue.answered(second)
    assert queue.failed(first) == 1
    for requests in (range(2), range(2, 4), range(4, 6)):
        (part,) = queue.take()
        assert part == RoundPart(1, 0, requests, num_failed=1)
        queue.answered(part)
    assert queue.take() == []


def test_what_every_engine_failed_to_answer_goes_to_nobody() -> None:
    queue = RoundQueue([1], (1, 1, 1), decode_batch_size=1)
    (part,) = queue.take()
    assert queue.failed(part) == 1
    (part,) = queue.take()
    assert queue.failed(part) == 2
    (part,) = queue.take()
    assert queue.failed(part) is None


@pytest.mark.parametrize("seed", range(20))
def test_whatever_fails_every_request_is_answered_once_and_no_device_has_more_than_its_bound(
    seed: int,
) -> None:
    chance = random.Random(seed)
    devices = [chance.randint(1, 3) for _ in range(chance.randint(2, 4))]
    sizes = [sum(devices)] * 2
    queue = RoundQueue(sizes, devices, decode_batch_size=2)
    busy: list[RoundPart] = []
    answers: list[tuple[int, int]] = []
    while busy := busy + queue.take():
        for engine, count in enumerate(devices):
            assert sum(len(part.requests) for part in busy if part.engine == engine) <= 2 * count
        part = busy.pop(chance.randrange(len(busy)))
        # Somebody answers in the end: an engine of the largest number fails at nothing.
        if chance.random() < 0.5 and part.engine != len(devices) - 1:
            assert queue.failed(part) == part.engine + 1
        else:
            queue.answered(part)
            answers += [(part.rank, index) for index in part.requests]
    assert sorted(answers) == [
        (rank, index) for rank, size in enumerate(sizes) for index in range(size)
    ]
