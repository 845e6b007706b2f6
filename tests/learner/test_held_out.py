"""The held-out samples: what is asked, and what is made of the answers (issue 3, "Evaluation")."""

import io
import itertools
import math
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from config_support import configuration
from learner_support import answer
from PIL import Image
from scene_support import counts_of
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoProcessor, PreTrainedTokenizerFast, Qwen2VLImageProcessor

from learner.held_out import HeldOut, describe_cut_answers, require_lengths
from learner.model.loading import load_tokens
from learner.samples import load_samples
from learner.segments import PromptEncoder
from shared.dataset import Dataset
from shared.errors import ConfigError, RecordError, RolloutError
from shared.grounding.objects import DropReason
from shared.grounding.parsing import parse_rollout
from shared.grounding.serialize import layout_append, serialize_objects
from shared.records import GeometryKind, GroundTruthObject, ImageRef, Sample
from shared.rollouts import DecodeMode, FinishReason
from shared.tokens.hf_codec import HFTokenCodec
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


PROMPT = 11
CUT_SLACK = 4


def make_codec(*, add_prefix_space: bool = False) -> HFTokenCodec:
    """A tokenizer of single bytes that normalises as Qwen's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token in ("<|im_end|>", "<|image_pad|>")
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in COORD_TOKENS]
    )
    return HFTokenCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


@pytest.fixture(scope="module")
def codec():
    return make_codec()


class PromptOfLength:
    """Has as many prompt tokens as the sample has columns, and refuses a sample of three."""

    def num_tokens(self, sample):
        if sample.width == 3:
            raise RecordError(
                f"sample {sample.sample_id} has a picture of 3 x 5",
                field="images",
                remedy="crop it",
            )
        return sample.width


def sample(*descs, sample_id="scene", width=PROMPT):
    objects = tuple(
        GroundTruthObject(GeometryKind.BBOX, (1, 2, 3, 4 + i), desc) for i, desc in enumerate(descs)
    )
    return Sample(sample_id, (), width, 5, objects)


def require(codec, *samples, **options):
    options = {"max_new_tokens": 20, "global_max_length": 10_000, "on_bad_row": "error", **options}
    return require_lengths(
        Dataset(Path("data/train.jsonl"), samples, ("a row",)), PromptOfLength(), codec, **options
    )


def longest_append(codec, of):
    """Tokens behind the highest key that parses, closing brace and EOS included: the slow way,
    through the parser.
    """
    response = codec.encode(
        '{"object_999999999": {"desc": "x", "bbox_2d": ["<|coord_1|>", "<|coord_1|>",'
        ' "<|coord_2|>", "<|coord_2|>"]}'
    )
    parsed = parse_rollout(response, codec)
    assert parsed.max_object_index == 999_999_999
    text = layout_append(
        parsed.prefix_text, of.objects, start_index=parsed.max_object_index + 1
    ).text
    assert len(of.objects) == text.count('"object_1000000')
    return len(codec.encode(text)) + 1


def test_the_longest_sequence_is_prompt_response_append_behind_the_longest_key_and_cut(codec):
    shorter, longer = sample("cat", sample_id="shorter"), sample("cat", "größe", sample_id="longer")
    append = longest_append(codec, longer)
    needed = PROMPT + 20 + append + CUT_SLACK
    require(codec, shorter, longer, global_max_length=needed)
    with pytest.raises(ConfigError) as caught:
        require(codec, shorter, longer, shorter, global_max_length=needed - 1)
    assert (
        str(caught.value)
        == f"global_max_length: {needed - 1} is too short for sample longer of data/train.jsonl:"
        f" prompt {PROMPT} + response 20 (rollout_matching.max_new_tokens) + appended objects"
        f" {append} + {CUT_SLACK} for the cut = {needed} tokens; raise global_max_length to"
        f" {needed}, lower rollout_matching.max_new_tokens, or remove the sample"
    )


def test_answers_shorter_than_their_ground_truth_are_told_before_the_run(codec):
    short, long = sample("cat"), sample("cat", "dog", "owl", sample_id="long")
    needed = len(codec.encode(serialize_objects(long.objects))) + 1
    for taught in (True, False):
        fitting = require(codec, long, short, short, sample(sample_id="of nothing"), taught=taught)

        def told(max_new_tokens, fitting=fitting):
            return describe_cut_answers(
                fitting, codec, max_new_tokens=max_new_tokens, field_order="desc_first"
            )

        assert told(needed) is None
        assert (
            told(needed - 1)
            == f"rollout_matching.max_new_tokens: {needed - 1} is less than the ground truth of 1"
            f" of the 4 samples of data/train.jsonl, which takes up to {needed} tokens; raise it"
            f" to {needed}, or expect such answers to be cut"
        )
        assert "of 4 of the 4 samples" in told(2)


def test_a_ground_truth_is_encoded_once_where_what_is_appended_fits_an_answer(codec):
    fitting = require(codec, sample("cat"), sample("dog"))

    class Refusing:
        def encode(self, text):
            raise AssertionError(f"{text} is encoded again")

    assert (
        describe_cut_answers(
            fitting, Refusing(), max_new_tokens=max(fitting.appends) + 1, field_order="desc_first"
        )
        is None
    )


def test_what_the_tokenizer_or_the_image_processor_refuses_is_skipped_counted_and_told_like_any_bad_row(
    codec, caplog
):
    samples = (
        sample("cat"),
        sample("cat", sample_id="thin", width=3),
        sample("<|coord_5|>", sample_id="token"),
        sample("dog", sample_id="last"),
    )
    fitting = require(codec, *samples, on_bad_row="skip")
    assert [kept.sample_id for kept in fitting.samples] == ["scene", "last"]
    assert len(fitting.appends) == 2
    first, thin, token = fitting.samples.skipped
    assert first == "a row"
    assert thin == "data/train.jsonl: images: sample thin has a picture of 3 x 5; crop it"
    assert "sample token" in token
    assert caplog.text.count("bad row skipped: data/train.jsonl") == 2
    assert [
        kept.sample_id for kept in require(codec, *samples, on_bad_row="skip", most=1).samples
    ] == ["scene"]
    with pytest.raises(RecordError, match="has no usable row: 2 were bad, the first: a row"):
        require(codec, samples[1], on_bad_row="skip")


@pytest.mark.parametrize("patch_size", [14, 16])
def test_the_length_of_a_prompt_follows_from_the_size_of_its_pictures(demo_checkpoint, patch_size):
    processor = AutoProcessor.from_pretrained(demo_checkpoint)
    processor.image_processor = Qwen2VLImageProcessor(
        patch_size=patch_size, merge_size=2, min_pixels=4096, max_pixels=30_000
    )
    encoder = PromptEncoder(processor, system_prompt="Look.", user_prompt="What is there?")
    for width, height, number in (
        (96, 96, 1),
        (7, 9, 1),
        (513, 101, 1),
        (400, 300, 2),
        (3, 590, 3),
    ):
        file = io.BytesIO()
        Image.new("RGB", (width, height)).save(file, format="PNG")
        shown = Sample("s", (ImageRef(None, file.getvalue(), ""),) * number, width, height, ())
        assert encoder.num_tokens(shown) == len(encoder.encode(shown).token_ids)
    unread = Sample("thin", (ImageRef(Path("nowhere.png"), None, ""),), 300, 1, ())
    with pytest.raises(
        RecordError,
        match=(
            "sample thin has a picture of 300 x 1 pixels, which the checkpoint's image processor"
            " does not take"
        ),
    ):
        encoder.num_tokens(unread)


def test_a_held_out_sequence_ends_with_its_response(codec):
    samples = (sample("cat", "dog"), sample(sample_id="wide", width=30))
    require(codec, *samples, taught=False, global_max_length=50)
    with pytest.raises(
        ConfigError,
        match=(
            r"too short for sample wide of .*: prompt 30 \+ response 20"
            r" \(rollout_matching\.max_new_tokens\) = 50 tokens; raise"
        ),
    ):
        require(codec, *samples, taught=False, global_max_length=49)


def test_a_description_that_the_tokenizer_normalises_is_an_error_with_sample_and_field(codec):
    composed, decomposed = "café", unicodedata.normalize("NFD", "café")
    assert composed != decomposed
    require(codec, sample("cat", composed))
    with pytest.raises(RecordError) as caught:
        require(codec, sample("cat"), sample(composed, decomposed, "dog", sample_id="bad"))
    error = caught.value
    assert (error.file, error.field) == ("data/train.jsonl", "objects[1].desc")
    assert "sample bad" in str(error)
    assert repr(decomposed) in str(error)
    assert "NFC" in error.remedy


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|coord_5|>"])
@pytest.mark.parametrize("around", [("", ""), ("a ", " cat"), ('"', '"')])
def test_a_control_or_coord_token_in_a_description_is_an_error_with_sample_and_field(
    codec, token, around
):
    with pytest.raises(RecordError) as caught:
        require(codec, sample("cat", token.join(around), sample_id="bad"))
    assert caught.value.field == "objects[1].desc"
    assert f"reads {token} as a control or coord token" in str(caught.value)
    assert "sample bad" in str(caught.value)


def test_text_that_resembles_a_token_is_text(codec):
    for desc in (
        "<|coord_1000|>",
        "<|image_pad",
        "coord_5",
        '{"object_1": {}}',
        "größe 猫 🙂",
        'a "quoted" \\ word\n',
    ):
        require(codec, sample(desc))


def test_descriptions_that_nobody_is_taught_may_be_anything(codec):
    require(codec, sample("<|image_pad|>", unicodedata.normalize("NFD", "café")), taught=False)


@pytest.mark.parametrize("descs", [(), ("cat",)])
def test_a_tokenizer_that_changes_the_structure_is_the_checkpoints_fault(descs):
    with pytest.raises(ConfigError, match=r"model\.path: the tokenizer changes the text"):
        require(make_codec(add_prefix_space=True), sample(*descs))


def test_every_sample_is_checked_whichever_is_longest(codec):
    good, bad = sample("a long description of a cat"), sample("<|coord_5|>", sample_id="bad")
    for order in itertools.permutations([good, bad]):
        with pytest.raises(RecordError, match="sample bad"):
            require(codec, *order)
