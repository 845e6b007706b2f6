"""transformers' `generate` ends a sequence where the rule says, whoever stands beside it."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForImageTextToText, GenerationConfig, LogitsProcessorList

from rollout_actors.repeat_guard.hf import HFRepeatGuard
from shared.tokens.repeat_guard import RepeatGuardSettings, RepeatRule

pytestmark = pytest.mark.slow

PROMPT = 3
STOP = 7
RULE = RepeatRule(
    RepeatGuardSettings(4, 3, 2, 3, 1),
    lambda token_id: [b'{"object_', b"1", b'": ', b", "][token_id] if token_id < 4 else b"",
)


def over(scores: torch.Tensor) -> list[bool]:
    ended = scores[:, STOP] == 0.0
    assert torch.isneginf(scores[ended][:, :STOP]).all()
    assert (scores[~ended] == 1.0).all(), "neighbours keep their scores"
    return ended.tolist()


def expected(tokens: list[int]) -> bool:
    guard = RULE.guard()
    verdicts = [guard.push(token) for token in tokens]
    return bool(verdicts) and verdicts[-1]


@pytest.mark.parametrize("num_shuffled", [0, 1, 4])
def test_every_row_is_judged_by_its_own_tokens_even_when_rows_change_places_as_beams_do(
    num_shuffled,
):
    rng = random.Random(num_shuffled)
    ended = 0
    for _ in range(60):
        processor = HFRepeatGuard(RULE, prompt_length=PROMPT, stop_token_id=STOP)
        rows: list[list[int]] = [[] for _ in range(4)]
        for _ in range(20):
            ids = torch.tensor([[9] * PROMPT + row for row in rows])
            verdicts = over(processor(ids, torch.ones(len(rows), 12)))
            assert verdicts == [expected(row) for row in rows]
            ended += sum(verdicts)
            for index in rng.sample(range(4), num_shuffled):
                rows[index] = list(rng.choice(rows))
            for row in rows:
                row.append(row[-2] if len(row) > 1 and rng.random() < 0.7 else rng.randrange(6))
    assert ended > 50


def test_the_prompt_does_not_count():
    processor = HFRepeatGuard(RULE, prompt_length=8, stop_token_id=STOP)
    assert over(processor(torch.full((1, 8), 5), torch.ones(1, 12))) == [False]


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generate_ends_the_offending_sequences_and_leaves_their_neighbours_alone(
    demo_checkpoint, num_beams
):
    model = AutoModelForImageTextToText.from_pretrained(demo_checkpoint, dtype=torch.float32).eval()
    rng = random.Random(0)
    stop = 0
    ids = torch.tensor([[rng.randrange(1300) for _ in range(PROMPT)] for _ in range(8)])
    stops = {"eos_token_id": stop, "pad_token_id": stop}
    config = GenerationConfig(do_sample=False, num_beams=num_beams, max_new_tokens=24, **stops)
    rule = RepeatRule(RepeatGuardSettings(0, 8, 99, 2, None))

    def generate(*processors: HFRepeatGuard) -> list[list[int]]:
        with torch.no_grad():
            output = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                logits_processor=LogitsProcessorList(processors),
            )
        rows = output[:, PROMPT:].tolist()
        return [row[: row.index(stop)] if stop in row else row for row in rows]

    free = generate()
    guarded = generate(HFRepeatGuard(rule, prompt_length=PROMPT, stop_token_id=stop))
    ends = [rule.first_repetition(row) for row in free]
    assert {None} < set(ends)
    for row in guarded:
        assert rule.first_repetition(row) in (None, len(row)), "it goes on behind a repetition"
    if num_beams == 1:
        assert guarded == [row[:end] for row, end in zip(free, ends, strict=True)]
    else:  # its beams are one prompt's: a prompt none of whose beams is ended keeps its answer
        assert any(row == other for row, other in zip(free, guarded, strict=True))
        assert free != guarded
