"""When segments become rows (decision 7; spec: packing with a carry buffer, and to
completion).
"""

import itertools
from dataclasses import dataclass

import numpy as np

from learner.packing import CarryBuffer, CarryOver, PackingPolicy, PackWithinStep


@dataclass(frozen=True)
class Piece:
    position: int
    length: int

    def __len__(self) -> int:
        return self.length


def pieces(*lengths):
    return [Piece(position, length) for position, length in enumerate(lengths)]


def positions(rows):
    return [[piece.position for piece in row] for row in rows]


def one_step(policy, segments):
    rows = [row for segment in segments for row in policy.add(segment)]
    return rows + policy.finish_step()


def test_without_packing_every_segment_is_a_row():
    assert positions(one_step(PackingPolicy(), pieces(5, 6, 7))) == [[0], [1], [2]]


def test_rows_are_taken_after_a_window_only_and_the_rest_at_the_steps_end():
    policy = PackWithinStep(CarryBuffer(10, 64), window=4)
    taken = [positions(policy.add(piece)) for piece in pieces(6, 6, 4, 4, 6, 1)]
    assert taken[:3] == [[], [], []], "the buffer holds more than a row, but the window is not full"
    assert taken[3] == [[0, 2], [1, 3]]
    assert taken[4:] == [[], []]
    assert positions(policy.finish_step()) == [[4, 5]]
    assert policy.num_carried == 0


def test_a_step_learned_to_completion_leaves_nothing_and_the_next_starts_its_windows_anew():
    policy = PackWithinStep(CarryBuffer(10, 64), window=2)
    first = one_step(policy, pieces(9, 9, 9))
    assert sorted(itertools.chain(*positions(first))) == [0, 1, 2]
    assert positions(policy.add(Piece(0, 9))) == []
    assert positions(policy.add(Piece(1, 9))) == [[0]], (
        "with 9 of 10 tokens left, no full row is there"
    )


def test_carry_buffer_preserves_segments_without_splitting():
    """Scenario: leftovers of a step wait for later ones; no segment is split or lost."""
    rng = np.random.default_rng(3)
    policy, learned, drawn = CarryOver(CarryBuffer(100, 64), micro_step=4), [], []
    for step in range(50):
        segments = [
            Piece(4 * 2 * step + i, int(length))
            for i, length in enumerate(rng.integers(5, 45, size=8))
        ]
        drawn += segments
        rows = one_step(policy, segments)
        assert len(rows) == 2, "one row per micro-step"
        assert all(sum(map(len, row)) <= 100 for row in rows)
        learned += [piece for row in rows for piece in row]
        assert policy.num_carried == len(drawn) - len(learned)
    assert len({piece.position for piece in learned}) == len(learned)
    waiting = {piece.position for piece in drawn} - {piece.position for piece in learned}
    assert len(waiting) == policy.num_carried
