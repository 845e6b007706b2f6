"""Targets of Rex-Omni's phrases: slots as of coord tokens, and what a shared name means."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from config_support import configuration, mapping
from learner_support import finish_step, half_right, make_learner
from rollout_support import RULES as BASE
from rollout_support import make_rollout, text_of
from rollout_support import with_role as positions_of
from small_tokenizers import byte_level_bpe, gpt2_words, qwen_words, rex_codec
from tiny_qwen import make_rex_omni

from launch.tools.rex_omni import write_tokenizer
from learner.algorithms.matched_targets import ground_truth_target, rollout_target
from learner.model.loading import load_tokens
from learner.targets import TokenRole
from shared.config import load_config
from shared.errors import ConfigError
from shared.grounding.formats import FORMATS
from shared.records import GeometryKind, GroundTruthObject, Sample
from shared.schedule import RunSchedule

REX = FORMATS["rex_omni"]
RULES = replace(BASE, geometry=frozenset({GeometryKind.BBOX}), answer_format=REX)
TWO = GroundTruthObject(GeometryKind.BBOX, (500, 0, 800, 400), "two")
SEVEN = GroundTruthObject(GeometryKind.BBOX, (100, 100, 300, 300), "seven")
OTHER_TWO = GroundTruthObject(GeometryKind.BBOX, (400, 500, 600, 900), "two")
WORDS = {"gpt2 words": (144, gpt2_words), "qwen words": (600, qwen_words)}


@pytest.fixture(params=WORDS, scope="module")
def codec(request):
    return rex_codec(byte_level_bpe(*WORDS[request.param]))


def phrase(name, *boxes, end="<|box_end|>"):
    written = ",".join("".join(f"<{bin}>" for bin in bins) for bins in boxes)
    return f"<|object_ref_start|>{name}<|object_ref_end|><|box_start|>{written}{end}"


def target_of(text, codec, objects=(TWO, SEVEN, OTHER_TWO), settings=RULES):
    rollout = make_rollout(codec.encode(text))
    return rollout_target(rollout, Sample("scene", (), 96, 96, objects), codec, settings)


def with_role(target, codec, role):
    return text_of([target.token_ids[at] for at in positions_of(target, role)], codec)


def slots(target, codec):
    held = [codec.coord_bin(target.token_ids[position]) for position in target.coord_positions]
    return list(zip(held, target.coord_targets, strict=True))


def test_on_channel_a_an_object_has_four_slots_wherever_its_phrase_stands(codec):
    target = ground_truth_target(Sample("scene", (), 96, 96, (TWO, SEVEN, OTHER_TWO)), codec, RULES)
    written = text_of(target.token_ids[:-1], codec)
    twos = phrase("two", OTHER_TWO.bins, TWO.bins)
    assert written == f"{twos}, {phrase('seven', SEVEN.bins)}"
    bins = [*OTHER_TWO.bins, *TWO.bins, *SEVEN.bins]
    assert slots(target, codec) == [(bin, bin) for bin in bins]
    assert target.box_slots == (0, 4, 8)
    assert with_role(target, codec, TokenRole.DESC) == "twoseven"
    assert with_role(target, codec, TokenRole.CLOSING) == "<|box_end|><|im_end|>"
    assert not (target.roles == TokenRole.NEUTRAL).any()


def test_on_channel_b_matched_boxes_are_aimed_and_missed_ones_go_on_in_the_open_phrase(codec):
    text = f"{phrase('seven', (110, 90, 310, 290), (900, 900, 950, 950))}, "
    kept = text + phrase("two", (510, 0, 800, 400), end="")
    target = target_of(f"{kept}<|box_end|>", codec)
    assert text_of(target.token_ids[:-1], codec) == f"{kept},<400><500><600><900><|box_end|>"
    held = [110, 90, 310, 290, 510, 0, 800, 400, *OTHER_TWO.bins]
    aims = [*SEVEN.bins, *TWO.bins, *OTHER_TWO.bins]
    assert slots(target, codec) == list(zip(held, aims, strict=True))
    assert target.box_slots == (0, 4, 8)
    # Of a matched box in the rollout the phrase's markers, but neither its name nor what led to it.
    structure = with_role(target, codec, TokenRole.MATCHED_STRUCTURE)
    assert structure == "<|object_ref_end|><|box_start|>" * 2
    neutral = with_role(target, codec, TokenRole.NEUTRAL)
    assert neutral == (
        "<|object_ref_start|>seven,<900><900><950><950><|box_end|>, <|object_ref_start|>two"
    )
    assert with_role(target, codec, TokenRole.STRUCTURE) == ","


def test_trim_and_separators_act_on_phrases_too(codec):
    nine = (900, 0, 990, 90)
    kept = phrase("two", nine, OTHER_TWO.bins) + ", " + phrase("seven", SEVEN.bins, end="")
    rules = replace(RULES, supervises_separators=True, trims_false_positives=True)
    text = f"{kept},<900><0><990><90><|box_end|>"
    target = target_of(text, codec, objects=(OTHER_TWO, SEVEN), settings=rules)
    assert target.reading.num_trimmed == 1
    assert text_of(target.token_ids[:-1], codec) == f"{kept}<|box_end|>"
    separators = np.flatnonzero(target.roles == TokenRole.SEPARATOR)
    assert [text_of([target.token_ids[i]], codec).strip() for i in separators] == [",", ","]
    first = target_of(
        kept, codec, objects=(GroundTruthObject(TWO.kind, nine, "two"),), settings=rules
    )
    assert with_role(first, codec, TokenRole.SEPARATOR) == "<|object_ref_start|>"


def test_what_a_phrase_cannot_do_is_refused_by_name(tmp_path):
    changes = {
        "data__answer_format": "rex_omni",
        "rollout_matching__geometry": ["bbox_2d", "poly", "point_2d"],
        "rollout_matching__repeat_terminate": {"enabled": True, "max_object_keys": 9},
        "custom__object_field_order": "geometry_first",
    }
    config = mapping(tmp_path, tmp_path, tmp_path, **changes)
    entry = config["rollout_matching"]["pipeline"]["objective"][0]
    entry["config"]["matched_desc_weight"] = 0.5
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    for problem in (
        "objective[0].config.matched_desc_weight: needs a name per object, but in data.answer_format rex_omni",
        "rollout_matching.geometry: data.answer_format rex_omni has no poly",
        "rollout_matching.geometry: data.answer_format rex_omni has no point_2d",
        "max_object_keys: has no effect in data.answer_format rex_omni",
        "custom.object_field_order: has no effect in data.answer_format rex_omni",
    ):
        assert problem in str(caught.value)
    assert "coord_reg" not in str(caught.value)


@pytest.mark.slow
def test_a_checkpoint_as_rex_omnis_learns_on_both_channels(demo_data, tmp_path):
    """From the files of a hub: refused until its `tokenizer.json` is written."""
    folder = make_rex_omni(tmp_path / "model")
    config = configuration(
        folder,
        demo_data,
        tmp_path / "run",
        data__answer_format="rex_omni",
        training__max_steps=3,
        training__effective_batch_size=4,
        stage2_ab__schedule={"b_ratio": 1.0, "warmup_steps": 2},
        stage2_ab__channel_b={"rollouts_per_step": 4},
    )
    with pytest.raises(ConfigError, match=r"<0> .* 343, .* \d+; .*`rollmatch rex-omni model="):
        load_tokens(config)
    assert write_tokenizer(folder).endswith("1,000 tokens of the vocabulary renamed")
    codec = load_tokens(config).codec
    assert codec.coord_ids == tuple(range(343, 1343))
    assert [codec.piece_bytes(343), codec.encode("<7>, cat")[0]] == [b"<0>", 350]
    with pytest.raises(ConfigError, match=r"already has a tokenizer\.json"):
        write_tokenizer(folder)
    torch.manual_seed(0)
    learner = make_learner(config)
    losses = []
    for step in range(3):
        rollouts = half_right(learner, RunSchedule(config).plan(step))
        if rollouts:
            learner.accumulate(rollouts)
        losses.append(finish_step(learner).metrics)
    assert losses[1]["loss/token_ce"] < losses[0]["loss/token_ce"]
    for term in ("soft_ce", "w1"):
        assert all(np.isfinite(one[f"loss/coord_reg.{term}"]) for one in losses)
