"""The rules of `DecodeSettings` against slow, obvious versions of themselves."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch

from rollout_actors.backends.hf import BeamScores, Chooser, SeenTokens, draw, processed_logits
from rollout_actors.engine.sampling import BAN
from shared.rollouts import DecodeMode, DecodeSettings

SAMPLE = DecodeSettings(
    DecodeMode.SAMPLE,
    0.7,
    1.0,
    -1,
    1.0,
    4,
    1,
    stop_token_ids=(),
    banned_token_ids=(),
    return_logprobs=True,
)
GREEDY = replace(SAMPLE, mode=DecodeMode.GREEDY, temperature=0.0)


def logits(rows: int = 3, vocabulary: int = 11, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def slowly(row: list[float], decode: DecodeSettings, seen: set[int]) -> list[float]:
    """Probabilities of one row, by the book."""
    row = [
        value + (BAN if token in decode.banned_token_ids else 0.0)
        for token, value in enumerate(row)
    ]
    penalty = decode.repetition_penalty
    row = [
        (value / penalty if value > 0 else value * penalty) if token in seen else value
        for token, value in enumerate(row)
    ]
    temperature = decode.temperature if decode.mode is DecodeMode.SAMPLE else 1.0
    row = [value / temperature for value in row]
    kept = sorted(range(len(row)), key=lambda token: -row[token])
    if decode.mode is DecodeMode.SAMPLE:
        kept = kept[: decode.top_k] if decode.top_k > 0 else kept
        total = sum(math.exp(row[token]) for token in kept)
        smallest, mass = [], 0.0
        for token in kept:
            if smallest and mass >= decode.top_p:
                break
            smallest.append(token)
            mass += math.exp(row[token]) / total
        kept = smallest
    total = sum(math.exp(row[token]) for token in kept)
    return [math.exp(value) / total if token in kept else 0.0 for token, value in enumerate(row)]


@pytest.mark.parametrize(
    "decode",
    [
        GREEDY,
        SAMPLE,
        replace(SAMPLE, banned_token_ids=(1, 4)),
        replace(SAMPLE, top_k=4),
        replace(SAMPLE, top_p=0.8),
        replace(SAMPLE, top_k=5, top_p=0.6, repetition_penalty=1.7, banned_token_ids=(0,)),
        replace(GREEDY, top_k=2, top_p=0.3, repetition_penalty=0.5),
    ],
)
def test_a_token_is_drawn_by_bans_penalty_temperature_top_k_and_top_p_in_this_order(
    decode: DecodeSettings,
) -> None:
    logits_BV, seen = logits(), [{0, 2}, {3}, set()]
    seen_BV = torch.tensor([[token in tokens for token in range(11)] for tokens in seen])
    probabilities = processed_logits(logits_BV, decode, seen_BV).softmax(-1)
    for row, tokens, got in zip(logits_BV.tolist(), seen, probabilities.tolist(), strict=True):
        assert got == pytest.approx(slowly(row, decode, tokens), abs=1e-6)


def test_a_prompts_padding_was_not_seen() -> None:
    seen = SeenTokens([(5, 6), (7,)])
    padded = torch.tensor([[5, 6, 1], [0, 7, 2]])
    assert seen.mask(padded, 8).nonzero().tolist() == [[0, 1], [0, 5], [0, 6], [1, 2], [1, 7]]


def test_what_is_drawn_has_the_distribution_it_is_drawn_from() -> None:
    logprobs_V = logits(1)[0].log_softmax(-1)
    grid = [(i + 0.5) / 20_000 for i in range(20_000)]
    drawn = draw(logprobs_V.expand(len(grid), -1), grid)
    assert torch.bincount(drawn, minlength=11) / len(grid) == pytest.approx(
        logprobs_V.exp(), abs=1e-3
    )


def test_what_has_no_probability_is_never_drawn_not_even_at_the_ends() -> None:
    logprobs_BV = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).expand(3, -1)
    assert draw(logprobs_BV, [0.0, 0.5, 1.0 - 2**-53]).tolist() == [1, 1, 1]


def test_a_rows_token_depends_on_its_own_seed_and_not_on_its_neighbours() -> None:
    def chosen(seeds: list[int], rows: list[int]) -> list[list[float]]:
        chooser = Chooser(SAMPLE, seeds, [(0,)] * len(seeds))
        for step in range(20):
            chooser(
                torch.zeros(len(seeds), 1 + step, dtype=torch.int64), logits(3, 50, seed=step)[rows]
            )
        return chooser.logprobs()

    together = chosen([7, 8, 9], [0, 1, 2])
    assert chosen([9, 7], [2, 0]) == [together[2], together[0]]
    assert chosen([8], [1]) == [together[1]]
    assert chosen([1007], [0]) != [together[0]]


def test_the_chosen_token_is_the_only_one_left() -> None:
    chooser = Chooser(
        replace(GREEDY, banned_token_ids=(int(logits()[0].argmax()),)), [1, 2, 3], [(0,)] * 3
    )
    left_BV = chooser(torch.zeros(3, 1, dtype=torch.int64), logits())
    assert torch.isfinite(left_BV).sum(-1).tolist() == [1, 1, 1]
    assert left_BV[0].argmax() != logits()[0].argmax()
    assert left_BV[1:].argmax(-1).tolist() == logits()[1:].argmax(-1).tolist()


def test_a_beams_log_probabilities_are_found_by_the_rows_it_went_through() -> None:
    decode = replace(GREEDY, mode=DecodeMode.BEAM, num_beams=2, stop_token_ids=(9,))
    scores = BeamScores(decode, [(0,)])
    steps = [
        scores(torch.zeros(2, 1 + step, dtype=torch.int64), logits(2, seed=step))
        for step in range(3)
    ]
    tokens = [int(steps[0][0].argmax()), int(steps[1][1].argmax())]
    assert scores.logprobs([0, 1], tokens) == [float(steps[0][0].max()), float(steps[1][1].max())]


def test_the_chooser_notes_when_each_step_had_chosen() -> None:
    chooser = Chooser(GREEDY, [0, 0], [(1,), (2,)])
    started = time.perf_counter()
    for _ in range(3):
        chooser(torch.zeros(2, 1, dtype=torch.int64), logits(2))
    assert len(chooser.times) == 3
    assert started < chooser.times[0] < chooser.times[1] < chooser.times[2] < time.perf_counter()
