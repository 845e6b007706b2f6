"""What a checkpoint makes of the rows: objects that it is shown small, and measures that are
kept.
"""

import hashlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from config_support import configuration, trajectory_config
from PIL import Image
from scene_support import truth

from learner.data import fitting, kept
from learner.data.fitting import Fitting, describe_small_objects, require_train_lengths
from learner.data.samples import load_samples
from learner.model.loading import load_tokens
from learner.segments import PromptEncoder
from shared.dataset import Dataset
from shared.errors import ConfigError, RecordError
from shared.grounding.formats import COORD_TOKENS_FORMAT, FORMATS
from shared.grounding.json_list import PictureResize
from shared.records import ImageRef, Sample

RESIZE = PictureResize(side=32, min_pixels=1024, max_pixels=500_000)
"""Shows 2000 x 1000 as 992 x 480."""


class OneToken:
    """Prompts of one token, and texts of one."""

    picture_resize = RESIZE

    def num_tokens(self, sample):
        return 1

    def encode(self, text):
        return [1]


def fits(path, *samples):
    dataset = Dataset(Path(path), samples)
    tokens = OneToken()
    return fitting.require_lengths(dataset, tokens, tokens, fitting.RowLimits(1, 10, taught=False))


def picture(name, *boxes, width=2000, height=1000):
    return Sample(name, (ImageRef(Path(f"{name}.png"), None, ""),), width, height, boxes)


def test_objects_that_are_shown_under_8_pixels_are_counted_with_the_worst_picture():
    assert RESIZE.size_of(2000, 1000) == (992, 480)
    wide = truth(0, 0, 500, 500)
    thin_in_file = truth(0, 0, 3, 500)  # 6 pixels of 2000
    halved = truth(0, 0, 500, 15)  # 15 pixels of 1000, 7.2 of 480
    polygon = truth(0, 0, 500, 0, 500, 14)  # 14 and 6.7
    train = fits("a.jsonl", picture("plain", wide), picture("thin", *[thin_in_file] * 3, wide))
    other = fits("b.jsonl", picture("worst", wide, halved, thin_in_file), picture("one", polygon))
    assert re.fullmatch(
        r"6 of 9 .*data\.train .* 8 pixels, 2 .* 500,000 pixels; .*worst\.png \(sample worst\):"
        r" 2 of 3, .*992 x 480 of 2000 x 1000",
        describe_small_objects("data.train", [train, other], RESIZE),
    )
    # Where resizing costs none, the picture with most of them.
    assert re.fullmatch(
        r"3 of 5 .*data\.val .* 8 pixels; .*thin\.png \(sample thin\): 3 of 4, .*992 x 480 of"
        r" 2000 x 1000",
        describe_small_objects("data.val", [train], RESIZE),
    )
    sound = fits("a.jsonl", picture("plain", wide), picture("empty"))
    assert re.fullmatch(
        r"no .*data\.val \(1\) .* 8 pixels", describe_small_objects("data.val", [sound], RESIZE)
    )


def test_the_digest_is_of_all_that_is_learned_and_of_plain_rows_it_stays_what_checkpoints_have():
    wide = truth(0, 0, 500, 500)
    plain = picture("plain", wide)
    content = repr(("plain", [""], 2000, 1000, (wide,)))
    assert fits("a.jsonl", plain).measures.digest == hashlib.sha256(content.encode()).hexdigest()
    others = [
        {"sample_id": "other"},
        {"images": (ImageRef(None, None, "ab"),)},
        {"width": 1999},
        {"objects": (truth(0, 0, 500, 501),)},
        {"prompt": "Find the cat."},
        {"system": "Find the cat."},
        {"phrase": "Find the cat."},
        {"classes": ("Find the cat.",)},
    ]
    samples = [plain, *(replace(plain, **changes) for changes in others)]
    assert len({fits("a.jsonl", one).measures.digest for one in samples}) == 9
    elsewhere = replace(plain, images=(ImageRef(Path("b.png"), None, ""),))
    assert fits("b.jsonl", elsewhere).measures.digest == fits("a.jsonl", plain).measures.digest


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"prompt": "Find <|secret|>."}, "prompt"),
        ({"system": "<|secret|>"}, "system"),
        ({"phrase": "a <|plain|> cat"}, "phrase"),
        ({"classes": ["cat", "<|secret|>"]}, "classes[1]"),
        ({"prompt": "Show <think>, </think> and <|coord_5|>."}, None),
    ],
)
def test_a_question_with_a_control_token_of_the_tokenizer_is_refused_with_its_line(
    tmp_path, demo_checkpoint, row, field
):
    config = configuration(demo_checkpoint, tmp_path, tmp_path, global_max_length=512)
    tokens = load_tokens(config)
    tokens.tokenizer.add_tokens(["<|secret|>"], special_tokens=True)
    tokens.tokenizer.add_tokens(["<|plain|>", "<think>", "</think>"])
    file = tmp_path / "train.jsonl"
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    of_all = {"images": ["a.png"], "width": 64, "height": 64, "objects": []}
    file.write_text("".join(json.dumps(of_all | one) + "\n" for one in ({}, row)))
    (source,) = config.data.sources("train")
    dataset = load_samples(config, source)
    encoder = PromptEncoder(tokens.processor, config.prompts)
    if field is None:
        assert len(require_train_lengths(config, dataset, encoder, tokens.codec).samples) == 2
        return
    with pytest.raises(RecordError) as caught:
        require_train_lengths(config, dataset, encoder, tokens.codec)
    assert str(caught.value).startswith(f"{file}:2: {field}: sample train:2 has <|")
    changes = {"global_max_length": 512, "data__on_bad_row": "skip"}
    skipping = configuration(demo_checkpoint, tmp_path, tmp_path, **changes)
    assert len(require_train_lengths(skipping, dataset, encoder, tokens.codec).samples) == 1


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"data__user_prompt": "Find all.<|im_end|>"}, "data.user_prompt"),
        ({"data__system_prompt": "<|vision_start|>"}, "data.system_prompt"),
        ({"data__prompts": ["Find all.", "<|image_pad|> Find all."]}, "data.prompts[1]"),
    ],
)
def test_a_question_of_the_run_with_a_control_token_is_refused_with_its_key(
    tmp_path, demo_checkpoint, changes, key
):
    config = configuration(demo_checkpoint, tmp_path, tmp_path, **changes)
    with pytest.raises(ConfigError) as caught:
        load_tokens(config)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{key}: has <|")
    changes = {"environment__system_prompt": "Count.<|im_end|>"}
    with pytest.raises(ConfigError, match=r"environment.system_prompt: has <\|im_end\|>"):
        load_tokens(trajectory_config(demo_checkpoint, tmp_path, **changes))


@pytest.fixture
def measured(monkeypatch, tmp_path, demo_checkpoint, demo_data):
    """Measure the training data, and return the fitting with the number of rows encoded so far."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "QUICK_S", 0.0)
    encoded = []
    count = fitting._append_length

    def counting(sample, *rest):
        encoded.append(sample.sample_id)
        return count(sample, *rest)

    monkeypatch.setattr(fitting, "_append_length", counting)
    model = tmp_path / "model"
    shutil.copytree(demo_checkpoint, model)

    data = tmp_path / "data"
    shutil.copytree(demo_data, data)

    def measure(**changes) -> tuple[Fitting, int]:
        changes = {"global_max_length": 512} | changes
        config = configuration(model, data, tmp_path, **changes)
        tokens = load_tokens(config)
        encoder = PromptEncoder(tokens.processor, config.prompts)
        dataset = load_samples(config, *config.data.sources("train"))
        return require_train_lengths(config, dataset, encoder, tokens.codec), len(encoded)

    measure.model = model
    measure.data = data
    return measure


@pytest.mark.slow
def test_rows_are_measured_once_for_a_tokenizer_and_a_question(measured):
    first, num_encoded = measured()
    assert num_encoded == len(first.samples) == 64
    again, num_encoded = measured(rollout_matching__max_new_tokens=100)
    assert num_encoded == 64
    assert again.measures.digest == first.measures.digest
    for name in ("rows_K", "prompt_K", "text_K", "objects_K", "small_K", "shrunk_K"):
        assert (getattr(again.measures, name) == getattr(first.measures, name)).all()
    longer, num_encoded = measured(data__user_prompt="What is there? Tell of all of it.")
    assert num_encoded == 128
    assert (longer.measures.prompt_K > first.measures.prompt_K).all()
    file = measured.model / "preprocessor_config.json"
    file = file if file.exists() else measured.model / "processor_config.json"
    file.write_text(file.read_text() + "\n")
    assert measured()[1] == 192
    # Images may have other numbers of tokens.
    assert measured(data__max_pixels=4 * 96 * 96)[1] == 256


@pytest.mark.slow
def test_lengths_of_answers_that_will_be_cut_are_measured_once(measured, monkeypatch):
    found, _ = measured()
    codec = load_tokens(configuration(measured.model, measured.data, measured.data)).codec
    encoded = []
    encode = codec.encode

    def counting(text):
        encoded.append(text)
        return encode(text)

    monkeypatch.setattr(codec, "encode", counting)

    def described(limit=20, checkpoint=measured.model, of=found, written=COORD_TOKENS_FORMAT):
        settings = {"max_new_tokens": limit, "answer_format": written}
        return fitting.describe_cut_answers(of, codec, checkpoint=checkpoint, **settings)

    first = described()
    num = len(encoded)
    assert num and first == described(checkpoint=None) and len(encoded) == 2 * num
    assert described() == first and len(encoded) == 2 * num
    assert described(limit=30) != first and len(encoded) > 2 * num, "another limit is another key"
    few = found._replace(
        samples=found.samples.keep(np.arange(3), ()),
        measures=replace(
            found.measures, **{name: getattr(found.measures, name)[:3] for name in fitting._COLUMNS}
        ),
    )
    assert described() == first, "kept last"
    assert "of the 3 samples" in described(of=few)
    assert described(of=few) == described(of=few, checkpoint=None)
    assert described() == first, "kept last"
    in_digits = described(written=FORMATS["qwen3_vl"])
    assert in_digits == described(written=FORMATS["qwen3_vl"], checkpoint=None) != first
    assert described() == first, "kept last"
    num = len(encoded)
    file = measured.model / "tokenizer_config.json"
    file.write_text(file.read_text() + "\n")
    assert described() == first and len(encoded) > num, "another tokenizer is another key"


@pytest.mark.slow
def test_rows_are_measured_again_when_the_content_of_an_image_or_what_is_skipped_has_changed(
    measured,
):
    first, _ = measured(data__on_bad_row="skip")
    file = first.samples[3].images[0].path
    with Image.open(file) as picture:
        size = picture.size
    Image.new("RGB", size, "white").save(file)
    repainted, num_encoded = measured(data__on_bad_row="skip")
    assert num_encoded == 128
    assert repainted.measures.digest != first.measures.digest, "a resumption compares it"
    file.write_bytes(b"no image")
    broken, _ = measured(data__on_bad_row="skip")
    lengths = first.measures.prompt_K, first.measures.text_K
    assert len(broken.samples) == len(broken.measures.rows_K) == 63
    for name, before in zip(("prompt_K", "text_K"), lengths, strict=True):
        of_all = getattr(broken.measures, name).tolist()
        assert of_all == [*before[:3].tolist(), *before[4:].tolist()]
    assert measured(data__on_bad_row="skip")[1] == 64 + 64 + 63, "and then it is kept"
