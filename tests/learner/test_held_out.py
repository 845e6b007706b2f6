"""The held-out samples: what is asked, and what is made of the answers (issue 3, "Evaluation")."""

import io
import re
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

from learner.data.fitting import RowLimits, describe_cut_answers, require_lengths
from learner.data.samples import load_samples
from learner.held_out import HeldOut
from learner.model.loading import load_tokens
from learner.segments import PromptEncoder
from shared.dataset import Dataset
from shared.errors import ConfigError, RecordError, RolloutError
from shared.grounding.formats import COORD_TOKENS_FORMAT
from shared.grounding.json_list import PictureResize
from shared.grounding.objects import DropReason
from shared.grounding.parsing import parse_rollout
from shared.grounding.serialize import layout_append, serialize_objects
from shared.prompts import Prompts
from shared.records import GeometryKind, GroundTruthObject, ImageRef, Sample
from shared.rollouts import DecodeMode, FinishReason
from shared.tokens.hf_codec import HFTokenCodec
from shared.tokens.vocabulary import COORD_TOKENS

SAMPLING = {
    "rollout_matching__decoding": {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
    "rollout_matching__repetition_penalty": 1.1,
}


@pytest.fixture(scope="module")
def tokens(demo_checkpoint, demo_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return load_tokens(configuration(demo_checkpoint, demo_data, folder))


@pytest.fixture
def held_out(demo_checkpoint, demo_data, tmp_path, tokens):
    def make(**changes):
        changes = {"global_max_length": 512} | changes
        config = configuration(demo_checkpoint, demo_data, tmp_path, **changes)
        return HeldOut(config, [load_samples(config, *config.data.sources("val"))], tokens)

    return make


def answered(held, position, text, logprobs=None):
    """What an engine would have returned for this text."""
    request, response = held.requests(3)[position], held.codec.encode(text)
    if request.decode.return_logprobs:
        logprobs = logprobs or [-0.1] * len(response)
    prompt = held.encoder.encode(held.samples[position])
    return answer(request, prompt, response, logprobs=logprobs)


def test_every_sample_is_asked_for_greedily_however_training_decodes(held_out):
    held = held_out(**SAMPLING)
    requests = held.requests(3)
    images = [image for request in requests for image in request.images]
    assert [request.position for request in requests] == list(range(16))
    assert [one.sample_id for one in requests] == [one.sample_id for one in held.samples]
    for decode in (request.decode for request in requests):
        assert (decode.mode, decode.temperature) == (DecodeMode.GREEDY, 0.0)
        assert (decode.top_p, decode.top_k, decode.num_beams) == (1.0, -1, 1)
        assert decode.repetition_penalty == 1.1
    assert all(image.sha256 and image.data is None for image in images), "read when they are sent"
    assert len({request.seed for request in requests}) == 16
    assert requests == held.requests(3)


@pytest.mark.parametrize(("score", "asked"), [("constant", False), ("coord_probability", True)])
def test_log_probabilities_are_asked_for_only_where_they_are_the_score(held_out, score, asked):
    (request, *_) = held_out(evaluation__score=score).requests(0)
    assert request.decode.return_logprobs is asked


def test_a_sample_that_does_not_fit_is_refused_before_anything_is_asked(held_out):
    message = r"global_max_length: 170 is too short for sample val:\d+ of .*val\.jsonl"
    with pytest.raises(ConfigError, match=message):
        held_out(global_max_length=170)


def test_the_ground_truths_own_text_is_found_without_a_mistake(held_out):
    held = held_out()
    texts = {at: serialize_objects(held.samples[at].objects) for at in (2, 3, 4)}
    scenes = held.score([answered(held, at, text) for at, text in texts.items()])
    assert [scene.position for scene in scenes] == [2, 3, 4]
    for scene in scenes:
        assert scene.sample == held.samples[scene.position]
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


def test_the_score_is_the_mean_probability_of_the_objects_own_coord_tokens(held_out):
    held = held_out()
    position = next(i for i, sample in enumerate(held.samples) if len(sample.objects) > 1)
    text = serialize_objects(held.samples[position].objects)
    ids = held.codec.encode(text)
    probabilities = np.random.default_rng(5).uniform(0.01, 1.0, len(ids))
    rollout = answered(held, position, text, np.log(probabilities).tolist())
    # Slowly: coord tokens in order of appearance are four per box.
    slots = [i for i, token in enumerate(ids) if held.codec.coord_bin(token) is not None]
    expected = probabilities[slots].reshape(-1, 4).mean(axis=1).tolist()
    (scene,) = held.score([rollout])
    assert [found.score for found in scene.objects] == pytest.approx(expected, abs=1e-12)
    assert len(set(expected)) > 1


PROMPT = 11
CUT_SLACK = 4


def make_codec(*, add_prefix_space: bool = False) -> HFTokenCodec:
    """A tokenizer of single bytes that normalises as Qwen's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    for token in ("<|im_end|>", "<|image_pad|>"):
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
    coord_tokens = [AddedToken(token, special=False, normalized=False) for token in COORD_TOKENS]
    tokenizer.add_tokens(coord_tokens)
    return HFTokenCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


@pytest.fixture(scope="module")
def codec():
    return make_codec()


class PromptOfLength:
    """Has as many prompt tokens as the sample has columns, and refuses a sample of three."""

    picture_resize = PictureResize(16, 1, 1 << 20)

    def num_tokens(self, sample):
        if sample.width == 3:
            problem = f"sample {sample.sample_id} has a picture of 3 x 5"
            raise RecordError(problem, field="images", remedy="crop it")
        return sample.width


def sample(*descs, sample_id="scene", width=PROMPT):
    objects = tuple(
        GroundTruthObject(GeometryKind.BBOX, (1, 2, 3, 4 + i), desc) for i, desc in enumerate(descs)
    )
    return Sample(sample_id, (), width, 5, objects)


def require(codec, *samples, **options):
    limits = RowLimits(**{"max_new_tokens": 20, "global_max_length": 10_000, **options})
    dataset = Dataset(Path("data/train.jsonl"), samples, ("a row",))
    return require_lengths(dataset, PromptOfLength(), codec, limits)


def longest_append(codec, of):
    """Tokens behind the highest key that parses, closing brace and EOS included: the slow way,
    through the parser.
    """
    box = ", ".join(f'"<|coord_{b}|>"' for b in (1, 1, 2, 2))
    answer = f'{{"object_999999999": {{"desc": "x", "bbox_2d": [{box}]}}'
    parsed = parse_rollout(codec.encode(answer), codec)
    assert parsed.max_object_index == 999_999_999
    text = layout_append(parsed.prefix_text, of.objects, start_index=10**9).text
    assert len(of.objects) == text.count('"object_1000000')
    return len(codec.encode(text)) + 1


def test_the_longest_sequence_is_prompt_response_append_behind_the_longest_key_and_cut(codec):
    shorter, longer = sample("cat", sample_id="shorter"), sample("cat", "größe", sample_id="longer")
    append = longest_append(codec, longer)
    needed = PROMPT + 20 + append + CUT_SLACK
    require(codec, shorter, longer, global_max_length=needed)
    message = (
        rf"^global_max_length: {needed - 1} .* longer of data/train\.jsonl: .* {PROMPT} \+ .* 20"
        rf" \(rollout_matching\.max_new_tokens\) \+ .* {append} \+ {CUT_SLACK} .* = {needed} tokens;"
        rf" .*global_max_length to {needed}, .*rollout_matching\.max_new_tokens, .*the sample$"
    )
    with pytest.raises(ConfigError, match=message):
        require(codec, shorter, longer, shorter, global_max_length=needed - 1)


@pytest.mark.parametrize("taught", [True, False])
def test_answers_shorter_than_their_ground_truth_are_told_before_the_run(codec, taught):
    short, long = sample("cat"), sample("cat", "dog", "owl", sample_id="long")
    needed = len(codec.encode(serialize_objects(long.objects))) + 1
    fitting = require(codec, long, short, short, sample(sample_id="of nothing"), taught=taught)

    def remark(max_new_tokens):
        return describe_cut_answers(
            fitting, codec, max_new_tokens=max_new_tokens, answer_format=COORD_TOKENS_FORMAT
        )

    assert remark(needed) is None
    assert re.match(
        rf"rollout_matching\.max_new_tokens: {needed - 1} .* 1 of the 4 .*data/train\.jsonl, .*"
        rf" {needed} tokens; .* {needed}, ",
        remark(needed - 1),
    )
    assert "of 4 of the 4 samples" in remark(2)


def test_what_the_tokenizer_or_the_image_processor_refuses_is_skipped_counted_and_told_like_any_bad_row(
    codec, caplog
):
    thin = sample("cat", sample_id="thin", width=3)
    bad = (thin, sample("<|coord_5|>", sample_id="token"))
    samples = (sample("cat"), *bad, sample("dog", sample_id="last"))
    fitting = require(codec, *samples, on_bad_row="skip")
    assert [kept.sample_id for kept in fitting.samples] == ["scene", "last"]
    assert fitting.measures.rows_K.tolist() == [0, 3]
    before, of_thin, of_token = fitting.samples.skipped
    assert before == "a row"
    assert re.fullmatch(r"data/train\.jsonl: images: .* thin .* 3 x 5; crop it", of_thin)
    assert "sample token" in of_token
    assert caplog.text.count("bad row skipped: data/train.jsonl") == 2
    first = require(codec, *samples, on_bad_row="skip", most=1)
    assert [kept.sample_id for kept in first.samples] == ["scene"]
    with pytest.raises(RecordError, match=r"no usable row: 2 .*: a row"):
        require(codec, thin, on_bad_row="skip")


@pytest.mark.parametrize("patch_size", [14, 16])
def test_the_length_of_a_prompt_follows_from_the_size_of_its_pictures(demo_checkpoint, patch_size):
    processor = AutoProcessor.from_pretrained(demo_checkpoint)
    processor.image_processor = Qwen2VLImageProcessor(
        patch_size=patch_size, merge_size=2, min_pixels=4096, max_pixels=30_000
    )
    encoder = PromptEncoder(processor, Prompts(("What is there?",), "Look."))
    cases = ((96, 96, 1), (7, 9, 1), (513, 101, 1), (400, 300, 2), (3, 590, 3))
    for width, height, number in cases:
        file = io.BytesIO()
        Image.new("RGB", (width, height)).save(file, format="PNG")
        shown = Sample("s", (ImageRef(None, file.getvalue(), ""),) * number, width, height, ())
        assert encoder.num_tokens(shown) == len(encoder.encode(shown).token_ids)
    unread = Sample("thin", (ImageRef(Path("nowhere.png"), None, ""),), 300, 1, ())
    message = "sample thin has an image of 300 x 1 pixels, which the checkpoint's image processor"
    with pytest.raises(RecordError, match=message):
        encoder.num_tokens(unread)


def test_a_held_out_sequence_ends_with_its_response(codec):
    samples = (sample("cat", "dog"), sample(sample_id="wide", width=30))
    require(codec, *samples, taught=False, global_max_length=50)
    message = r"sample wide of .*: prompt 30 \+ response 20 \(.*max_new_tokens\) = 50 tokens; raise"
    with pytest.raises(ConfigError, match=message):
        require(codec, *samples, taught=False, global_max_length=49)


def test_a_description_that_the_tokenizer_normalises_is_an_error_with_sample_and_field(codec):
    composed, decomposed = "café", unicodedata.normalize("NFD", "café")
    require(codec, sample("cat", composed))
    with pytest.raises(RecordError) as caught:
        require(codec, sample("cat"), sample(composed, decomposed, "dog", sample_id="bad"))
    assert (caught.value.file, caught.value.field) == ("data/train.jsonl", "objects[1].desc")
    assert "NFC" in caught.value.remedy
    for part in ("sample bad", repr(decomposed)):
        assert part in str(caught.value)


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|coord_5|>"])
@pytest.mark.parametrize("around", [("", ""), ("a ", " cat"), ('"', '"')])
def test_a_control_or_coord_token_in_a_description_is_an_error_with_sample_and_field(
    codec, token, around
):
    with pytest.raises(RecordError) as caught:
        require(codec, sample("cat", token.join(around), sample_id="bad"))
    assert caught.value.field == "objects[1].desc"
    for part in (f"reads {token} as a control or coord token", "sample bad"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "desc",
    [
        "<|coord_1000|>",
        "<|image_pad",
        "coord_5",
        '{"object_1": {}}',
        "größe 猫 🙂",
        'a "quoted" \\ word\n',
    ],
)
def test_text_that_resembles_a_token_is_text(codec, desc):
    require(codec, sample(desc))


@pytest.mark.parametrize("descs", [(), ("cat",)])
def test_a_tokenizer_that_changes_the_structure_is_the_checkpoints_fault(descs):
    with pytest.raises(ConfigError, match=r"model\.path: .*tokenizer changes"):
        require(make_codec(add_prefix_space=True), sample(*descs))


def test_max_val_samples_takes_the_first(held_out):
    requests = held_out(data__max_val_samples=5).requests(0)
    assert [request.sample_id for request in requests] == [f"val:{line}" for line in range(1, 6)]


def test_an_engine_that_saw_another_prompt_ends_the_evaluation(held_out):
    held = held_out()
    rollout = answered(held, 0, "{}")
    with pytest.raises(RolloutError, match="the prompts differ first at token 0"):
        held.score([replace(rollout, prompt_token_ids=(1, *rollout.prompt_token_ids))])
