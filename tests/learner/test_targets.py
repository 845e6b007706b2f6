"""What supervises each token (DESIGN 8, spec: canonical teacher-forced target, unified loss by token masks)."""

import itertools

import numpy as np
import pytest
from transformers import AutoTokenizer

from learner.targets import MatchSettings, Target, TargetRules, TextWeights, TokenRole, ground_truth_target, rollout_target
from shared.grounding.parsing import parse_rollout
from shared.records import GeometryKind, GroundTruthObject, Sample
from shared.rollouts import FinishReason, Rollout
from shared.tokens.hf_codec import HFTokenCodec

RULES = TargetRules(
    geometry=frozenset({GeometryKind.BBOX}),
    field_order="desc_first",
    matching=MatchSettings(candidate_top_k=10, maskiou_gate=0.3, maskiou_resolution=256, fp_cost=1.0, fn_cost=1.0),
)
SEVEN = GroundTruthObject(GeometryKind.BBOX, (100, 100, 300, 300), "seven")
TWO = GroundTruthObject(GeometryKind.BBOX, (500, 500, 800, 900), "two")
SAMPLE = Sample("scene", (), 96, 96, (SEVEN, TWO))


@pytest.fixture(scope="module")
def codec(demo_checkpoint):
    return HFTokenCodec(AutoTokenizer.from_pretrained(demo_checkpoint))


def response(text, codec, logprobs=True):
    ids = tuple(codec.encode(text))
    return Rollout(
        0, 0, "scene", (), ids, None, tuple(-0.5 - i for i in range(len(ids))) if logprobs else None, None, FinishReason.STOP, (), 1, "actor", 0, 7, 0.0
    )


def box(*bins):
    return "[" + ", ".join(f'"<|coord_{b}|>"' for b in bins) + "]"


def text_of(token_ids, codec):
    return b"".join(codec.piece_bytes(token) for token in token_ids).decode()


def roles_text(target: Target, codec, role: TokenRole) -> list[str]:
    """The stretches of text whose tokens have this role."""
    pairs = zip(target.token_ids, target.roles, strict=True)
    return [text_of([token for token, _ in group], codec) for is_role, group in itertools.groupby(pairs, key=lambda pair: pair[1] == role) if is_role]


def test_channel_a_trains_on_the_ground_truth_closed_and_with_eos(codec):
    target = ground_truth_target(SAMPLE, codec, RULES)
    text = (
        '{"object_1": {"desc": "seven", "bbox_2d": ' + box(100, 100, 300, 300) + '}, "object_2": {"desc": "two", "bbox_2d": ' + box(500, 500, 800, 900) + "}}"
    )
    assert text_of(target.token_ids[:-1], codec) == text
    assert target.token_ids[-1] == codec.eos_token_id
    assert roles_text(target, codec, TokenRole.DESC) == ["seven", "two"]
    assert target.coord_targets == (100, 100, 300, 300, 500, 500, 800, 900)
    assert [codec.coord_bin(target.token_ids[p]) for p in target.coord_positions] == list(target.coord_targets)
    assert target.roles[-1] == TokenRole.CLOSING
    assert roles_text(target, codec, TokenRole.CLOSING)[0].startswith("}")


def test_unmatched_ground_truth_is_always_appended_and_matched_slots_aim_at_their_match(codec):
    predicted = '{"object_1": {"desc": "one", "bbox_2d": ' + box(110, 90, 310, 290) + '}, "object_4": {"desc": "six", "bbox_2d": ' + box(0, 0, 50, 50) + "}}"
    target = rollout_target(response(predicted, codec), SAMPLE, codec, RULES)
    kept = predicted[:-1]
    appended = ', "object_5": {"desc": "two", "bbox_2d": ' + box(500, 500, 800, 900) + "}}"
    assert text_of(target.token_ids[:-1], codec) == kept + appended
    # The matched box keeps its own tokens as input; its slots are moved to the ground truth.
    assert target.coord_targets == (*SEVEN.bins, *TWO.bins)
    assert [codec.coord_bin(target.token_ids[p]) for p in target.coord_positions] == [110, 90, 310, 290, *TWO.bins]
    # False positives are neutral, and so are the matched object's name, its key and the separators.
    neutral = "".join(roles_text(target, codec, TokenRole.NEUTRAL))
    assert neutral.startswith('{"object_1')
    assert "one" in neutral
    assert '"object_4": {"desc": "six", "bbox_2d": [' in neutral
    # A token that overlaps the value belongs to it: the demo's tokenizer writes `": {"` as one.
    structure = "".join(roles_text(target, codec, TokenRole.MATCHED_STRUCTURE))
    assert structure.replace(" ", "") == '":{"desc":"","bbox_2d":["","","",""]}'
    assert roles_text(target, codec, TokenRole.DESC) == ["two"]


def test_all_gt_is_appended_when_no_valid_matches_exist(codec):
    for text in ("", "no json here", '{"object_1": {"desc": "seven", "bbox_2d": ["<|coord_1|>"', '{"object_3": {"desc": "seven"}}'):
        target = rollout_target(response(text, codec), SAMPLE, codec, RULES)
        assert target.coord_targets == (*SEVEN.bins, *TWO.bins)
        assert len(target.reading.appended) == 2
        whole = parse_rollout(target.token_ids, codec, geometry=RULES.geometry)
        assert [o.bins for o in whole.objects] == [SEVEN.bins, TWO.bins]
        assert not whole.truncated


def test_highest_retained_object_key_controls_fn_start_even_when_object_is_invalid(codec):
    text = '{"object_2": {"desc": "seven", "bbox_2d": ' + box(100, 100, 300, 300) + '}, "object_9": {"desc": "two"}}'
    target = rollout_target(response(text, codec), SAMPLE, codec, RULES)
    assert '"object_10": {"desc": "two"' in text_of(target.token_ids[:-1], codec)
    assert [dropped.reason for dropped in target.reading.parsed.dropped] == ["missing_geom"]


def test_a_rollout_that_found_everything_gets_only_the_closing_brace_and_eos(codec):
    text = '{"object_1": {"desc": "seven", "bbox_2d": ' + box(*SEVEN.bins) + '}, "object_2": {"desc": "two", "bbox_2d": ' + box(*TWO.bins) + "}}"
    target = rollout_target(response(text, codec), SAMPLE, codec, RULES)
    assert text_of(target.token_ids[:-1], codec) == text
    assert target.token_ids[-1] == codec.eos_token_id
    assert target.reading.appended == ()


def test_log_probabilities_are_kept_for_exactly_the_tokens_that_are_the_rollouts_own(codec):
    rollout = response('{"object_1": {"desc": "seven", "bbox_2d": ' + box(*SEVEN.bins) + '}, "object_2": {"de', codec)
    target = rollout_target(rollout, SAMPLE, codec, RULES)
    own = len(target.sampled_logprobs)
    assert 0 < own < len(rollout.response_token_ids)
    assert target.token_ids[:own] == rollout.response_token_ids[:own]
    assert target.sampled_logprobs == rollout.logprobs[:own]


def test_geometry_first_changes_only_per_object_field_order_in_fn_append(codec):
    rules = TargetRules(RULES.geometry, "geometry_first", RULES.matching)
    target = rollout_target(response("", codec), SAMPLE, codec, rules)
    assert text_of(target.token_ids[:-1], codec).startswith('{"object_1": {"bbox_2d": [')
    assert roles_text(target, codec, TokenRole.DESC) == ["seven", "two"]


def test_predicted_polygons_are_dropped_with_a_reason(codec):
    text = '{"object_1": {"desc": "seven", "poly": ' + box(1, 1, 9, 1, 9, 9) + "}}"
    target = rollout_target(response(text, codec), SAMPLE, codec, RULES)
    assert [dropped.reason for dropped in target.reading.parsed.dropped] == ["poly_unsupported"]


def test_the_weight_of_a_token_follows_from_its_role():
    roles = np.array([TokenRole.NEUTRAL, TokenRole.STRUCTURE, TokenRole.DESC, TokenRole.MATCHED_STRUCTURE, TokenRole.COORD, TokenRole.CLOSING], dtype=np.uint8)
    assert TextWeights(desc=0.5, matched_structure=0.25).of(roles).tolist() == [0.0, 1.0, 0.5, 0.25, 0.0, 1.0]
    assert TextWeights(desc=0.0, matched_structure=0.0).of(roles).tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
