"""Coordinates in digits are supervised by the cross-entropy of their tokens
(docs/explanation/objectives.md).
"""

import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from config_support import configuration, mapping
from learner_support import finish_step, half_right, make_learner
from rollout_support import RULES as BASE
from rollout_support import make_rollout, text_of
from rollout_support import with_role as positions_of
from small_tokenizers import FastTokenizer, byte_level_bpe, gpt2_words, no_words, qwen_words
from tiny_qwen import make_stock_model
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from learner.algorithms.matched_targets import ground_truth_target, parsed_target, rollout_target
from learner.targets import TextWeights, TokenRole
from shared.config import load_config
from shared.config.pipeline import EXAMPLE_PIPELINE
from shared.errors import ConfigError
from shared.grounding.formats import FORMATS
from shared.grounding.json_list import PictureResize
from shared.grounding.parsing import parse_rollout
from shared.records import GeometryKind, GroundTruthObject, Sample
from shared.schedule import RunSchedule
from shared.tokens.hf_codec import HFTokenCodec

LIST = FORMATS["qwen3_vl"]
RULES = replace(
    BASE, geometry=frozenset({GeometryKind.BBOX, GeometryKind.POINT}), answer_format=LIST
)
SEVEN = GroundTruthObject(GeometryKind.BBOX, (100, 100, 300, 300), "seven")
TWO = GroundTruthObject(GeometryKind.BBOX, (500, 500, 800, 900), "two")
WORDS = {"gpt2 words": (144, gpt2_words), "qwen words": (600, qwen_words), "bytes": (0, no_words)}


@pytest.fixture(params=WORDS, scope="module")
def codec(request):
    """Codecs of tokenizers without coord tokens."""
    fast = FastTokenizer(byte_level_bpe(*WORDS[request.param]))
    fast.add_tokens(["<|im_end|>"], special_tokens=True)
    return HFTokenCodec(fast, coord_tokens=())


def entry(name, *numbers):
    return f'{{"bbox_2d": [{", ".join(map(str, numbers))}], "label": "{name}"}}'


def label_first(name, *numbers):
    return f'{{"label": "{name}", "bbox_2d": [{", ".join(map(str, numbers))}]}}'


def target_of(text, codec, objects=(SEVEN, TWO), settings=RULES):
    ids = codec.encode(text)
    rollout = make_rollout(ids, logprobs=tuple(-0.5 for _ in ids))
    return rollout_target(rollout, Sample("scene", (), 96, 96, objects), codec, settings)


def with_role(target, codec, role):
    return [codec.piece_bytes(target.token_ids[at]) for at in positions_of(target, role)]


def digits_of(pieces):
    return re.sub(rb"[^0-9]", b"", b"".join(pieces)).decode()


def test_on_channel_a_digits_are_text_that_is_taught_and_there_are_no_slots(codec):
    target = ground_truth_target(Sample("scene", (), 96, 96, (SEVEN, TWO)), codec, RULES)
    written = text_of(target.token_ids[:-1], codec)
    assert written == f"[{entry('seven', *SEVEN.bins)}, {entry('two', *TWO.bins)}]"
    assert digits_of(with_role(target, codec, TokenRole.DIGITS)) == "100100300300500500800900"
    assert (target.coord_positions, target.box_slots, target.label_overrides) == ((), (), ())
    weights_L = TextWeights(desc=0.5, matched_structure=0.0).of(target)
    assert set(weights_L[target.roles == TokenRole.DIGITS]) == {1.0}
    assert not (target.roles == TokenRole.NEUTRAL).any()


@pytest.mark.parametrize("write", [entry, label_first])
@pytest.mark.parametrize(
    ("numbers", "right"),
    [
        ((100, 100, 300, 300), ["100", "100", "300", "300"]),
        ((110, 90, 310, 290), ["1", "", "3", ""]),
        ((10, 100, 300, 300), ["10", "100", "300", "300"]),
        ((100, 100, 300, 305), ["100", "100", "300", "30"]),
    ],
)
def test_a_matched_coordinate_is_taught_up_to_its_first_wrong_digit(codec, write, numbers, right):
    target = target_of(f"[{write('six', *numbers)}, {write('two', *TWO.bins)}]", codec)
    assert len(target.reading.supervised) == 2
    expected = "".join(right) + "500500800900"
    assert digits_of(with_role(target, codec, TokenRole.DIGITS)) == expected
    wrong = [i for i in range(4) if numbers[i] != SEVEN.bins[i]]
    assert len(target.label_overrides) == len(wrong)
    for i, override in zip(wrong, target.label_overrides, strict=True):
        before = text_of(target.token_ids[: override.position], codec)
        taught = before + codec.piece_bytes(override.token_id).decode()
        corrected = [*numbers]
        corrected[i] = SEVEN.bins[i]
        assert f"[{write('six', *corrected)}, ".startswith(taught)
        assert override.token_id != target.token_ids[override.position]


def test_what_is_missing_is_appended_in_digits_behind_the_kept_answer(codec):
    kept = entry("six", 100, 100, 300, 300)
    target = target_of(f"[{kept}, {entry('x', 1, 2)}, {{", codec)
    written = text_of(target.token_ids[:-1], codec)
    assert written == f"[{kept}, {entry('x', 1, 2)}, {entry('two', *TWO.bins)}]"
    digits = digits_of(with_role(target, codec, TokenRole.DIGITS))
    assert digits == "100100300300500500800900"
    # Without a match all of it is neutral, and everything is appended.
    none = target_of(f"[{entry('six', 700, 0, 900, 100)}]", codec)
    assert digits_of(with_role(none, codec, TokenRole.DIGITS)) == "100100300300500500800900"
    assert "700" in digits_of(with_role(none, codec, TokenRole.NEUTRAL))


def test_the_digits_of_a_point_are_taught_as_those_of_a_box(codec):
    eye = GroundTruthObject(GeometryKind.POINT, (100, 200), "eye")
    written = '{"point_2d": [%d, %d], "label": "eye"}'
    target = target_of(f"[{written % (110, 200)}, {written % (400, 400)}]", codec, (eye, TWO))
    assert [pair[:2] for pair in target.reading.supervised] == [(0, 0)]
    digits = digits_of(with_role(target, codec, TokenRole.DIGITS))
    assert digits == "1" + "200" + "500500800900"
    (override,) = target.label_overrides
    assert codec.piece_bytes(override.token_id).startswith(b"0")
    assert text_of(target.token_ids[:-1], codec).endswith(f", {entry('two', *TWO.bins)}]")
    whole = ground_truth_target(Sample("scene", (), 96, 96, (eye,)), codec, RULES)
    assert text_of(whole.token_ids[:-1], codec) == f"[{written % eye.bins}]"


def test_a_matched_object_in_other_tokens_than_the_tokenizers_is_appended_instead():
    fast = FastTokenizer(byte_level_bpe(*WORDS["qwen words"]))
    fast.add_tokens(["<|im_end|>"], special_tokens=True)
    codec = HFTokenCodec(fast, coord_tokens=())
    text = f"[{entry('seven', *SEVEN.bins)}]"
    ids = [token_id for character in text for token_id in codec.encode(character)]
    assert ids != codec.encode(text)
    parsed = parse_rollout(ids, codec, geometry=RULES.geometry, answer_format=LIST)
    target = parsed_target(parsed, Sample("scene", (), 96, 96, (SEVEN,)), codec, RULES)
    assert (len(target.reading.excluded), target.reading.appended) == (1, (0,))


def test_a_name_is_corrected_whatever_the_tokens_of_other_objects():
    fast = FastTokenizer(byte_level_bpe(*WORDS["qwen words"]))
    fast.add_tokens(["<|im_end|>"], special_tokens=True)
    codec = HFTokenCodec(fast, coord_tokens=())
    odd = f", {entry('nine', 0, 0, 9, 9)}]"
    ids = codec.encode(f"[{entry('six', *SEVEN.bins)}")
    ids += [token_id for character in odd for token_id in codec.encode(character)]
    parsed = parse_rollout(ids, codec, geometry=RULES.geometry, answer_format=LIST)
    rules = replace(RULES, corrects_names=True)
    target = parsed_target(parsed, Sample("scene", (), 96, 96, (SEVEN,)), codec, rules)
    assert (target.roles == TokenRole.CORRECTED_DESC).sum() == 1


def test_options_act_on_lists_too(codec):
    kept = f"[{entry('nine', 0, 0, 9, 9)}, {label_first('six', 100, 100, 300, 301)}"
    kept += f", {entry('two', *TWO.bins)}"
    rules = replace(
        RULES, supervises_separators=True, corrects_names=True, trims_false_positives=True
    )
    target = target_of(f"{kept}, {entry('nine', 0, 0, 9, 9)}]", codec, settings=rules)
    assert target.reading.num_trimmed == 1
    assert text_of(target.token_ids[:-1], codec) == f"{kept}]"
    separators = with_role(target, codec, TokenRole.SEPARATOR)
    assert [piece.count(b",") for piece in separators] == [1, 1]
    assert (target.roles == TokenRole.CORRECTED_DESC).sum() == 1
    assert (target.roles == TokenRole.CORRECTED_DIGITS).sum() == 1


def test_terms_of_coord_tokens_are_refused_by_name(tmp_path):
    changes = {
        "data__answer_format": "qwen3_vl",
        "rollout_matching__geometry": ["bbox_2d", "poly"],
        "rollout_matching__repeat_terminate": {"enabled": True, "max_object_keys": 9},
        "custom__object_field_order": "geometry_first",
        "custom__trainer_variant": "stage1_sft",
    }
    with pytest.raises(ConfigError) as caught:
        load_config(mapping(tmp_path, tmp_path, tmp_path, **changes))
    for problem in (
        "objective[1].name: 'coord_reg' needs one token per coordinate, but qwen3_vl writes digits",
        "rollout_matching.geometry: data.answer_format qwen3_vl has no poly",
        "max_object_keys: has no effect in data.answer_format qwen3_vl",
        "custom.object_field_order: has no effect in data.answer_format qwen3_vl",
    ):
        assert problem in str(caught.value)


def test_pictures_are_resized_as_by_the_processor():
    generator = random.Random(5)
    for limits in ((28, 3136, 1_003_520), (16, 4096, 16_384), (32, 65_536, 16_777_216)):
        for _ in range(300):
            width, height = (generator.randint(8, 900) for _ in range(2))
            side, low, high = limits
            resized = smart_resize(height, width, side, min_pixels=low, max_pixels=high)
            assert PictureResize(*limits).size_of(width, height) == resized[::-1]


def test_numbers_of_a_pixel_format_are_those_of_the_picture_as_it_is_shown(codec):
    rules = replace(RULES, answer_format=FORMATS["qwen2_5_vl"])
    rules = rules.for_pictures(PictureResize(28, 3136, 1_003_520))
    sample = Sample("scene", (), 640, 480, (SEVEN, TWO))  # shown as 644 x 476
    target = ground_truth_target(sample, codec, rules)
    seven = entry("seven", 64, 48, 193, 143)
    two = entry("two", 322, 238, 515, 428)
    assert text_of(target.token_ids[:-1], codec) == f"[{seven}, {two}]"
    rollout = make_rollout(codec.encode(f"[{entry('seven', 64, 49, 193, 143)}]"))
    target = rollout_target(rollout, sample, codec, rules)
    assert text_of(target.token_ids[:-1], codec).endswith(f", {two}]")
    (override,) = target.label_overrides
    assert b"8" in codec.piece_bytes(override.token_id)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_a_stock_checkpoint_learns_digits_on_both_channels(demo_data, tmp_path, family):
    make_stock_model(tmp_path / "model", family)
    config = configuration(
        tmp_path / "model",
        demo_data,
        tmp_path / "run",
        data__answer_format=family,
        rollout_matching__pipeline=EXAMPLE_PIPELINE,
        training__max_steps=3,
        training__effective_batch_size=4,
        stage2_ab__schedule={"b_ratio": 1.0, "warmup_steps": 2},
        stage2_ab__channel_b={"rollouts_per_step": 4},
    )
    torch.manual_seed(0)
    learner = make_learner(config)
    encoder = learner.algorithm.encoder
    sample = learner.algorithm.train[0][0]
    _, height, width = (encoder.encode(sample).image_grid_I3[0] * 8).tolist()  # patches of 8 pixels
    assert encoder.picture_resize.size_of(sample.width, sample.height) == (width, height)
    losses = []
    for step in range(3):
        plan = RunSchedule(config).plan(step)
        rollouts = half_right(learner, plan)
        if rollouts:
            learner.accumulate(rollouts)
        losses.append(finish_step(learner).metrics["loss/token_ce"])
    assert losses[1] < losses[0]
    assert np.isfinite(losses).all()
