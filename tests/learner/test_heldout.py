"""The held-out samples: what is asked, and what is made of the answers (issue 3, "Evaluation")."""

import math
from dataclasses import replace

import numpy as np
import pytest
from config_support import configuration
from learner_support import answer
from scene_support import counts_of

from learner.held_out import HeldOut
from learner.model.loading import load_tokens
from learner.samples import load_samples
from shared.errors import ConfigError, RolloutError
from shared.grounding.objects import DropReason
from shared.grounding.serialize import serialize_objects
from shared.rollouts import DecodeMode, FinishReason
from shared.tokens.vocabulary import COORD_TOKENS

SAMPLING = {
    "rollout_matching__decoding": {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
    "rollout_matching__repetition_penalty": 1.1,
}


@pytest.fixture(scope="module")
def held_out(demo_checkpoint, demo_data, tmp_path_factory):
    tokens = {}

    def make(**changes):
        config = configuration(
            demo_checkpoint,
            demo_data,
            tmp_path_factory.mktemp("run"),
            **{"global_max_length": 512} | changes,
        )
        if not tokens:
            tokens["loaded"] = load_tokens(config)
        return HeldOut(config, load_samples(config, config.data.val), tokens["loaded"])

    return make


def answered(held, position, text, logprobs=None):
    """What an engine would have returned for this text."""
    request, response = held.requests(3)[position], held.codec.encode(text)
    given = (logprobs or [-0.1] * len(response)) if request.decode.return_logprobs else None
    return answer(request, held.encoder.encode(held.samples[position]), response, logprobs=given)


def test_every_sample_is_asked_for_greedily_however_training_decodes(held_out):
    held = held_out(**SAMPLING)
    requests = held.requests(3)
    assert [request.position for request in requests] == list(range(16))
    assert [request.sample_id for request in requests] == [
        sample.sample_id for sample in held.samples
    ]
    assert {
        (r.decode.mode, r.decode.temperature, r.decode.top_p, r.decode.top_k, r.decode.num_beams)
        for r in requests
    } == {(DecodeMode.GREEDY, 0.0, 1.0, -1, 1)}
    assert {r.decode.repetition_penalty for r in requests} == {1.1}
    assert all(
        image.sha256 and image.data is None for request in requests for image in request.images
    ), "they are read when they are sent"
    assert len({request.seed for request in requests}) == 16
    assert requests == held.requests(3)


def test_max_val_samples_takes_the_first(held_out):
    held = held_out(data__max_val_samples=5)
    assert [request.sample_id for request in held.requests(0)] == [
        f"val:{line}" for line in range(1, 6)
    ]


def test_log_probabilities_are_asked_for_only_where_they_are_the_score(held_out):
    modes = {
        score: held_out(evaluation__score=score).requests(0)[0].decode.return_logprobs
        for score in ("constant", "coord_probability")
    }
    assert modes == {"constant": False, "coord_probability": True}


def test_a_sample_that_does_not_fit_is_refused_before_anything_is_asked(held_out):
    with pytest.raises(
        ConfigError, match=r"global_max_length: 170 is too short for sample val:\d+ of .*val\.jsonl"
    ):
        held_out(global_max_length=170)


def test_the_ground_truths_own_text_is_found_without_a_mistake(held_out):
    held = held_out()
    scenes = held.score(
        [
            answered(held, position, serialize_objects(held.samples[position].objects))
            for position in (2, 3, 4)
        ]
    )
    assert [scene.position for scene in scenes] == [2, 3, 4]
    for scene in scenes:
        assert scene.sample is held.samples[scene.position]
        assert counts_of(scene, iou_threshold=1.0).f1 == 1.0
        assert (scene.dropped, scene.truncated) == ((), False)
        assert all(image.data is None for image in scene.sample.images)


def test_what_is_dropped_and_what_is_cut_off_is_reported(held_out):
    held = held_out()
    box = '["<|coord_9|>", "<|coord_1|>", "<|coord_5|>", "<|coord_8|>"]'
    text = (
        f'{{"object_1": {{"desc": "one", "bbox_2d": {box}}}, "object_2": {{"desc": "two",'
        ' "bbox_2d": ["<|coord_1|>"]}, "object_3": {"desc": "th'
    )
    (scene,) = held.score([answered(held, 0, text)])
    assert scene.dropped == (DropReason.BBOX_INVALID, DropReason.WRONG_ARITY)
    assert (scene.objects, scene.truncated, scene.never_opened) == ((), True, False)


@pytest.mark.parametrize(
    ("text", "truncated", "never_opened"),
    [
        ("I see a seven.", True, True),
        ("", True, True),
        (' \n{"object_1": {', True, False),
        (" {}", False, False),
    ],
)
def test_an_answer_keeps_its_text_its_end_and_whether_it_ever_opened(
    held_out, text, truncated, never_opened
):
    held = held_out()
    (scene,) = held.score([replace(answered(held, 0, text), finish_reason=FinishReason.LENGTH)])
    assert (scene.text, scene.finish_reason) == (text, FinishReason.LENGTH)
    assert (scene.truncated, scene.never_opened) == (truncated, never_opened)


def test_a_constant_score_is_1(held_out):
    held = held_out(evaluation__score="constant")
    (scene,) = held.score([answered(held, 1, serialize_objects(held.samples[1].objects))])
    assert [found.score for found in scene.objects] == [1.0] * len(held.samples[1].objects)


def test_the_score_is_the_mean_probability_of_the_objects_own_coord_tokens(held_out):
    held = held_out()
    position = next(i for i, sample in enumerate(held.samples) if len(sample.objects) > 1)
    text = serialize_objects(held.samples[position].objects)
    logprobs = np.log(
        np.random.default_rng(5).uniform(0.01, 1.0, len(held.codec.encode(text)))
    ).tolist()
    rollout = answered(held, position, text, logprobs)
    # Slowly: coord tokens in order of appearance are four per box.
    slots = [
        i
        for i, token in enumerate(rollout.response_token_ids)
        if held.codec.piece_bytes(token).decode(errors="replace") in COORD_TOKENS
    ]
    expected = [
        sum(math.exp(logprobs[i]) for i in slots[first : first + 4]) / 4
        for first in range(0, len(slots), 4)
    ]
    (scene,) = held.score([rollout])
    assert [found.score for found in scene.objects] == pytest.approx(expected, abs=1e-12)
    assert len(set(expected)) > 1
    assert held.score([rollout]) == [scene]


def test_an_engine_that_saw_another_prompt_ends_the_evaluation(held_out):
    held = held_out()
    rollout = answered(held, 0, "{}")
    with pytest.raises(RolloutError, match="the prompts differ first at token 0"):
        held.score([replace(rollout, prompt_token_ids=(1, *rollout.prompt_token_ids))])
