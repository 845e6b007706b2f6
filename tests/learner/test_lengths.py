"""Length and text of every sample are known to be sound before the start (DESIGN 5, decisions 24
and 26).
"""

import io
import itertools
import unicodedata
from pathlib import Path

import pytest
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoProcessor, PreTrainedTokenizerFast, Qwen2VLImageProcessor

from learner.held_out import describe_cut_answers, require_lengths
from learner.segments import PromptEncoder
from shared.dataset import Dataset
from shared.errors import ConfigError, RecordError
from shared.grounding.parsing import parse_rollout
from shared.grounding.serialize import layout_append, serialize_objects
from shared.records import GeometryKind, GroundTruthObject, ImageRef, Sample
from shared.tokens.hf_codec import HFTokenCodec
from shared.tokens.vocabulary import COORD_TOKENS

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
