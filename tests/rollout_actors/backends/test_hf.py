"""`generate` of the learner's own model, as a rollout backend. What every backend has in common is
in `test_contract.py`.
"""

from __future__ import annotations

import math
import random
import time
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from backend_support import ModelHost, beams, what_was_said, with_decode
from engine_support import SmallLearner
from tiny_qwen import make_stock_model
from trajectory_support import picture

from rollout_actors.backends.hf import (
    BeamScores,
    Chooser,
    HFBackend,
    SeenTokens,
    draw,
    processed_logits,
)
from rollout_actors.engine.sampling import BAN
from shared.errors import RolloutError
from shared.rollouts import DecodeMode, DecodeSettings, FinishReason


@pytest.fixture(scope="module")
def learner(learner):
    learner.learn(seed=1)
    return learner


def make_backend(learner, decode_batch_size=4):
    return HFBackend(ModelHost(learner, "hf"), decode_batch_size=decode_batch_size)


@pytest.fixture
def backend(learner):
    return make_backend(learner)


def of_different_lengths(learner, **decode):
    """Make requests whose batch needs padding; one of them has no image."""
    requests = [learner.request(position, **decode) for position in range(6)]
    requests[2] = replace(requests[2], prompt_token_ids=(*requests[2].prompt_token_ids, 5, 6, 7))
    text = tuple(
        token_id for token_id in requests[4].prompt_token_ids if token_id not in learner.banned
    )
    requests[4] = replace(requests[4], prompt_token_ids=text, images=())
    return requests


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_microbatching_increases_decode_parallelism_without_changing_outputs_format_nor_what_a_prompt_alone_says(
    learner, backend, temperature
):
    requests = of_different_lengths(learner, temperature=temperature, max_new_tokens=24)
    alone = make_backend(learner, decode_batch_size=1).generate(requests)
    for one, many in zip(alone, backend.generate(requests), strict=True):
        assert many.response_token_ids == one.response_token_ids
        assert many.logprobs == pytest.approx(one.logprobs, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("eos_token_id", [5, None])
def test_a_tokenizer_without_a_pad_token_changes_no_answer(learner, backend, eos_token_id):
    requests = of_different_lengths(learner, temperature=1.0, max_new_tokens=24)
    host = ModelHost(learner, "hf")
    host.tokenizer = SimpleNamespace(pad_token_id=None, eos_token_id=eos_token_id)
    padless = HFBackend(host, decode_batch_size=4)
    expected = backend.generate(requests)
    for one, other in zip(expected, padless.generate(requests), strict=True):
        assert (other.response_token_ids, other.logprobs) == (one.response_token_ids, one.logprobs)


@pytest.mark.slow
def test_beam_search_selects_exactly_one_rollout_response_the_best_with_the_models_log_probabilities(
    learner, backend
):
    greedy = [learner.request(position, max_new_tokens=12) for position in range(3)]
    rollouts = backend.generate([beams(request, 4) for request in greedy])
    others = backend.generate(greedy)
    for request, rollout, other in zip(greedy, rollouts, others, strict=True):
        # Another batch adds up in another order, on some processors.
        assert sum(rollout.logprobs) >= sum(other.logprobs) - 1e-4
        expanded, logits_TV = learner.logits(
            (*request.prompt_token_ids, *rollout.response_token_ids), request.images[0]
        )
        logits_TV[:, list(learner.banned)] -= 100
        length = len(rollout.response_token_ids)
        logprobs_TV = logits_TV[-length - 1 : -1].log_softmax(-1)
        expected = logprobs_TV.gather(1, torch.tensor(expanded[-length:])[:, None])[:, 0]
        assert rollout.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
    assert [r.response_token_ids for r in rollouts] != [r.response_token_ids for r in others]


@pytest.mark.slow
def test_a_beam_that_ends_is_trimmed_and_keeps_the_log_probability_of_its_end(learner, backend):
    request = beams(learner.request(4, max_new_tokens=12), 3)
    stops = backend.generate([request])[0].response_token_ids
    rollouts = backend.generate([with_decode(request, stop_token_ids=(stop,)) for stop in stops])
    num_ended = 0
    for rollout, stop in zip(rollouts, stops, strict=True):
        if rollout.finish_reason is FinishReason.STOP:
            num_ended += 1
            assert rollout.stop_token_id == stop
            assert stop not in rollout.response_token_ids
            assert rollout.stop_token_logprob is not None
            assert len(rollout.logprobs) == len(rollout.response_token_ids)
    assert num_ended


@pytest.mark.slow
def test_the_length_penalty_decides_between_short_and_long_beams(learner, backend):
    requests = [beams(learner.request(position, max_new_tokens=12), 4) for position in range(6)]
    stop = backend.generate(requests[:1])[0].response_token_ids[4]
    lengths = [
        [
            len(rollout.response_token_ids)
            for rollout in backend.generate(
                [
                    with_decode(request, stop_token_ids=(stop,), length_penalty=penalty)
                    for request in requests
                ]
            )
        ]
        for penalty in (-20.0, 20.0)
    ]
    # A log-probability is negative: over a high power of the length the longest is the best.
    assert all(short <= long for short, long in zip(*lengths, strict=True))
    assert lengths[0] != lengths[1]


@pytest.mark.slow
def test_the_model_and_every_random_state_are_as_they_were_afterwards(learner, backend):
    model = learner.model
    model.train()
    model.model.visual.eval()
    model.gradient_checkpointing_enable()
    request = learner.request(0, temperature=1.0)
    expected = what_was_said(make_backend(learner).generate([request]))
    modes = [module.training for module in model.modules()]
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    states = torch.get_rng_state().clone(), random.getstate(), np.random.get_state()[1].copy()
    try:
        assert what_was_said(backend.generate([request])) == expected
        assert [module.training for module in model.modules()] == modes
        assert torch.is_grad_enabled()
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        assert (np.random.get_state()[1] == states[2]).all()
        damaged = replace(request, images=(replace(request.images[0], data=b"no image"),))
        with pytest.raises(RolloutError, match="image 0 of sample sample-0"):
            backend.generate([damaged])
        assert [module.training for module in model.modules()] == modes
    finally:
        model.gradient_checkpointing_disable()
        model.eval()


@pytest.mark.slow
def test_a_forward_of_the_learner_is_the_same_to_the_bit_behind_a_rollout(learner, backend):
    request = learner.request(0)
    before = learner.logits(request.prompt_token_ids, request.images[0])[1]
    backend.generate(of_different_lengths(learner))
    assert torch.equal(learner.logits(request.prompt_token_ids, request.images[0])[1], before)
    assert all(parameter.grad is None for parameter in learner.model.parameters())


@pytest.mark.slow
def test_what_a_checkpoint_recommends_for_sampling_has_no_part_in_it(learner, backend, monkeypatch):
    request = learner.request(0)
    expected = backend.generate([request])
    recommended = {
        "repetition_penalty": 3.0,
        "do_sample": True,
        "temperature": 2.0,
        "top_k": 3,
        "num_beams": 2,
        "eos_token_id": expected[0].response_token_ids[2],
        "suppress_tokens": [expected[0].response_token_ids[0]],
    }
    for name, value in recommended.items():
        monkeypatch.setattr(learner.model.generation_config, name, value)
    assert what_was_said(backend.generate([request])) == what_was_said(expected)


def test_an_image_without_a_placeholder_is_refused_by_sample(learner, backend):
    request = learner.request(0)
    refused = "generate on hf: sample sample-0 has 2 images and 1 placeholders"
    with pytest.raises(RolloutError, match=refused):
        backend.generate([replace(request, images=request.images * 2)])


@pytest.mark.slow
def test_pictures_of_unlike_numbers_of_tiles_are_read_as_the_processor_writes_them(tmp_path):
    with closing(SmallLearner(make_stock_model(tmp_path / "model", "internvl"), 1)) as learner:
        learner.learn(seed=1)
        sizes = ((96, 96), (144, 48), (64, 64))
        requests = [
            replace(learner.request(position, max_new_tokens=6), images=(picture(*size),))
            for position, size in enumerate(sizes)
        ]
        text = tuple(one for one in requests[0].prompt_token_ids if one not in learner.banned)
        asked = [*requests, replace(requests[0], prompt_token_ids=text, images=())]
        rollouts = make_backend(learner).generate(asked)
        assert rollouts[-1].prompt_token_ids == text
        lengths = [len(rollout.prompt_token_ids) for rollout in rollouts[:3]]
        assert lengths == [len(text) + 2 + 4 * tiles for tiles in (10, 13, 5)]
        for request, rollout in zip(requests, rollouts, strict=False):
            tokens, logprobs = learner.greedy(request)
            assert rollout.response_token_ids == tokens
            assert rollout.logprobs == pytest.approx(logprobs, abs=1e-5)


@pytest.mark.slow
def test_never_more_sequences_than_the_decode_batch_size_are_decoded_at_a_time(learner, backend):
    widths = []
    hook = learner.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    requests = [learner.request(position, max_new_tokens=3) for position in range(6)]
    try:
        backend.generate(requests)
        assert (max(widths), widths[0], widths[-1]) == (4, 4, 2)
        for number, widest in ((2, 4), (3, 3), (4, 4)):
            widths.clear()
            backend.generate([beams(request, number) for request in requests])
            assert max(widths) == widest
        widths.clear()
        too_many = "generate on hf: 5 beams do not fit into a batch of 4 sequences"
        with pytest.raises(RolloutError, match=too_many):
            backend.generate([beams(request, 5) for request in requests])
        assert widths == []
    finally:
        hook.remove()


# The rules of `DecodeSettings` against slow, obvious versions of themselves.

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


def logits(rows=3, vocabulary=11, seed=0):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def ids(rows, length=1):
    return torch.zeros(rows, length, dtype=torch.int64)


def slowly(row, decode, seen):
    """Return the probabilities of one row, by the book."""
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
def test_a_token_is_drawn_by_bans_penalty_temperature_top_k_and_top_p_in_this_order(decode):
    logits_BV, seen = logits(), [{0, 2}, {3}, set()]
    seen_BV = torch.tensor([[token in tokens for token in range(11)] for tokens in seen])
    probabilities = processed_logits(logits_BV, decode, seen_BV).softmax(-1)
    for row, tokens, got in zip(logits_BV.tolist(), seen, probabilities.tolist(), strict=True):
        assert got == pytest.approx(slowly(row, decode, tokens), abs=1e-6)


def test_a_prompts_padding_was_not_seen():
    seen = SeenTokens([(5, 6), (7,)])
    padded = torch.tensor([[5, 6, 1], [0, 7, 2]])
    assert seen.mask(padded, 8).nonzero().tolist() == [[0, 1], [0, 5], [0, 6], [1, 2], [1, 7]]


def test_what_is_drawn_has_the_distribution_it_is_drawn_from():
    logprobs_V = logits(1)[0].log_softmax(-1)
    grid = [(i + 0.5) / 20_000 for i in range(20_000)]
    drawn = draw(logprobs_V.expand(len(grid), -1), grid)
    shares = torch.bincount(drawn, minlength=11) / len(grid)
    assert shares == pytest.approx(logprobs_V.exp(), abs=1e-3)


def test_what_has_no_probability_is_never_drawn_not_even_at_the_ends():
    logprobs_BV = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).expand(3, -1)
    assert draw(logprobs_BV, [0.0, 0.5, 1.0 - 2**-53]).tolist() == [1, 1, 1]


def test_a_rows_token_depends_on_its_own_seed_and_not_on_its_neighbours():
    def chosen(seeds, rows):
        chooser = Chooser(SAMPLE, seeds, [(0,)] * len(seeds))
        for step in range(20):
            chooser(ids(len(seeds), 1 + step), logits(3, 50, seed=step)[rows])
        return chooser.logprobs()

    together = chosen([7, 8, 9], [0, 1, 2])
    assert chosen([9, 7], [2, 0]) == [together[2], together[0]]
    assert chosen([8], [1]) == [together[1]]
    assert chosen([1007], [0]) != [together[0]]


def test_the_chosen_token_is_the_only_one_left_and_the_time_of_its_choice_is_kept():
    best_B = logits().argmax(-1)
    decode = replace(GREEDY, banned_token_ids=(int(best_B[0]),))
    chooser = Chooser(decode, [1, 2, 3], [(0,)] * 3)
    started = time.perf_counter()
    for _ in range(3):
        left_BV = chooser(ids(3), logits())
        assert torch.isfinite(left_BV).sum(-1).tolist() == [1, 1, 1]
        assert left_BV[0].argmax() != best_B[0]
        assert left_BV[1:].argmax(-1).tolist() == best_B[1:].tolist()
    first, second, third = chooser.times
    assert started < first < second < third < time.perf_counter()


def test_a_beams_log_probabilities_are_found_by_the_rows_it_went_through():
    decode = replace(GREEDY, mode=DecodeMode.BEAM, num_beams=2, stop_token_ids=(9,))
    scores = BeamScores(decode, [(0,)])
    steps = [scores(ids(2, 1 + step), logits(2, seed=step)) for step in range(3)]
    tokens = [int(steps[0][0].argmax()), int(steps[1][1].argmax())]
    assert scores.logprobs([0, 1], tokens) == [float(steps[0][0].max()), float(steps[1][1].max())]
