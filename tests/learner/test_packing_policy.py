"""When segments become rows (decision 7; spec: packing with a carry buffer, and to
completion).
"""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import torch

from learner.algorithms.advantages import TokenAdvantages
from learner.packing import CarryBuffer, CarryOver, PackingPolicy, PackWithinStep
from learner.segments import EncodedPrompt, Segment, shared_tokens
from learner.targets import AdvantageTarget


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


def rollouts(*lengths_of_prompts):
    """Segments of (prompt, number of its tokens, tokens of its target), with equal ids by prompt."""
    segments = []
    for position, (prompt, length, num_learned) in enumerate(lengths_of_prompts):
        ids = (ord(prompt),) * length
        credit = TokenAdvantages((), (), (), (), ())
        target = AdvantageTarget("x", (1,) * num_learned, credit, ())
        segments.append(Segment(position, EncodedPrompt.from_text(ids), target))
    return segments


def test_siblings_get_into_one_row_that_holds_their_prompt_once():
    """A tail is the prompt's last token and the target: a row of 10 holds 6 + 2 + 2 tokens."""
    policy = PackWithinStep(CarryBuffer(10, 64), window=8, share_prompts=True)
    a, b = ("a", 5, 1), ("b", 3, 2)
    segments = rollouts(a, b, a, a, a, b)
    assert positions(one_step(policy, segments)) == [[0, 2, 3], [1, 5], [4]]
    apart = PackWithinStep(CarryBuffer(10, 64), window=8)
    assert positions(one_step(apart, segments)) == [[0], [1, 5], [2], [3], [4]]


def test_the_tokens_of_siblings_count_once_when_a_window_ends():
    policy = PackWithinStep(CarryBuffer(10, 64), window=3, share_prompts=True)
    rows = [positions(policy.add(segment)) for segment in rollouts(*[("a", 5, 1)] * 4)]
    assert rows == [[], [], [[0, 1, 2]], []], "6 + 2 + 2 tokens fill a row"
    assert positions(policy.finish_step()) == [[3]]


def test_a_full_buffer_gives_a_row_only_for_a_segment_with_another_prompt():
    policy = PackWithinStep(CarryBuffer(40, 1), window=100, share_prompts=True)
    rows = [positions(policy.add(one)) for one in rollouts(*[("a", 5, 1)] * 3, ("b", 5, 1))]
    assert rows == [[], [], [], [[0, 1, 2]]]


def test_what_segments_share_depends_on_their_prompts_images_and_targets():
    def shown(*, pad_last=False, fill=0.0, later=False):
        modality = torch.tensor([0, 1, 1, int(pad_last)])
        pixels, grid = torch.full((4, 2), fill), torch.tensor([[1, 2, 2]])
        prompt = EncodedPrompt((1, 2, 2, 3), (1, 2, 2, 3), modality, pixels, grid)
        (segment,) = rollouts(("x", 1, 2))
        target_modality = torch.tensor([0, int(later)])
        return replace(segment, prompt=prompt, target_modality_L=target_modality)

    one, text = shown(), rollouts(("a", 4, 1), ("a", 5, 1), ("a", 1, 1), ("a", 1, 1))
    assert shared_tokens([one, shown(), shown(), shown(fill=1.0)]) == (0, 3, 3, 0)
    assert shared_tokens([one, shown(later=True), one]) == (0, 0, 3)
    assert shared_tokens([shown(pad_last=True)] * 2) == (0, 0)
    assert shared_tokens(text) == (0, 0, 0, 0)


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
