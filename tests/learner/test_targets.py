"""What supervises each token (decision 37, spec: canonical teacher-forced target, unified loss by
token masks).
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from rollout_support import RULES as BOTH_KINDS
from rollout_support import make_rollout, text_of
from transformers import AutoTokenizer

from learner.algorithms.matched_targets import ground_truth_target, parsed_target, rollout_target
from learner.ot_targets import barycentric_targets
from learner.targets import (
    LabelOverride,
    Target,
    TextWeights,
    TokenRole,
)
from shared.grounding.formats import ObjectDictionary
from shared.grounding.parsing import parse_rollout
from shared.records import GeometryKind, GroundTruthObject, Sample
from shared.rollouts import FinishReason
from shared.tokens.hf_codec import HFTokenCodec

RULES = replace(BOTH_KINDS, geometry=frozenset({GeometryKind.BBOX}))
SEVEN = GroundTruthObject(GeometryKind.BBOX, (100, 100, 300, 300), "seven")
TWO = GroundTruthObject(GeometryKind.BBOX, (500, 500, 800, 900), "two")
SAMPLE = Sample("scene", (), 96, 96, (SEVEN, TWO))


@pytest.fixture(scope="module")
def codec(demo_checkpoint):
    return HFTokenCodec(AutoTokenizer.from_pretrained(demo_checkpoint))


def response(text, codec):
    ids = tuple(codec.encode(text))
    return make_rollout(ids, logprobs=tuple(-0.5 - i for i in range(len(ids))))


def target_of(text, codec, objects=(SEVEN, TWO), settings=RULES):
    return rollout_target(response(text, codec), replace(SAMPLE, objects=objects), codec, settings)


def box(*bins):
    return "[" + ", ".join(f'"<|coord_{b}|>"' for b in bins) + "]"


def entry(number, desc, bins, key="bbox_2d"):
    return f'"object_{number}": {{"desc": "{desc}", "{key}": {box(*bins)}}}'


def slots_of(target, codec):
    return [codec.coord_bin(target.token_ids[position]) for position in target.coord_positions]


def pairs_of(pairs):
    return [(pair.prediction, pair.ground_truth) for pair in pairs]


FOUND = "{" + entry(1, "seven", SEVEN.bins) + ", " + entry(2, "two", TWO.bins) + "}"


def roles_text(target: Target, codec, role: TokenRole) -> list[str]:
    """The stretches of text whose tokens have this role."""
    pairs = zip(target.token_ids, target.roles, strict=True)
    return [
        text_of([token for token, _ in group], codec)
        for is_role, group in itertools.groupby(pairs, key=lambda pair: pair[1] == role)
        if is_role
    ]


def test_channel_a_trains_on_the_ground_truth_closed_and_with_eos(codec):
    target = ground_truth_target(SAMPLE, codec, RULES)
    assert text_of(target.token_ids[:-1], codec) == FOUND
    assert target.token_ids[-1] == codec.eos_token_id
    assert roles_text(target, codec, TokenRole.DESC) == ["seven", "two"]
    assert target.coord_targets == (*SEVEN.bins, *TWO.bins)
    assert slots_of(target, codec) == [*SEVEN.bins, *TWO.bins]
    assert target.roles[-1] == TokenRole.CLOSING
    assert roles_text(target, codec, TokenRole.CLOSING)[0].startswith("}")


def test_unmatched_ground_truth_is_always_appended_and_matched_slots_aim_at_their_match(codec):
    kept = "{" + entry(1, "one", (110, 90, 310, 290)) + ", " + entry(4, "six", (0, 0, 50, 50))
    target = target_of(kept + "}", codec)
    appended = ", " + entry(5, "two", TWO.bins) + "}"
    assert text_of(target.token_ids[:-1], codec) == kept + appended
    # The matched box keeps its own tokens as input; its slots are moved to the ground truth.
    assert target.coord_targets == (*SEVEN.bins, *TWO.bins)
    assert slots_of(target, codec) == [110, 90, 310, 290, *TWO.bins]
    # False positives are neutral, and so are the matched object's name, its key and the separators.
    neutral = "".join(roles_text(target, codec, TokenRole.NEUTRAL))
    assert neutral.startswith('{"object_1')
    assert "one" in neutral
    assert '"object_4": {"desc": "six", "bbox_2d": [' in neutral
    # A token that overlaps the value belongs to it: the demo's tokenizer writes `": {"` as one. It
    # writes `},` as one, too; that goes on to a false positive.
    structure = "".join(roles_text(target, codec, TokenRole.MATCHED_STRUCTURE))
    assert structure.replace(" ", "") == '":{"desc":"","bbox_2d":["","","",""]'
    assert roles_text(target, codec, TokenRole.DESC) == ["two"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json here",
        '{"object_1": {"desc": "seven", "bbox_2d": ["<|coord_1|>"',
        '{"object_3": {"desc": "seven"}}',
    ],
)
def test_all_gt_is_appended_when_no_valid_matches_exist(codec, text):
    target = target_of(text, codec)
    whole = parse_rollout(target.token_ids, codec, geometry=RULES.geometry)
    assert target.coord_targets == (*SEVEN.bins, *TWO.bins)
    assert len(target.reading.appended) == 2
    assert [one.bins for one in whole.objects] == [SEVEN.bins, TWO.bins]
    assert not whole.truncated


def test_highest_retained_object_key_controls_fn_start_even_when_object_is_invalid(codec):
    target = target_of(
        "{" + entry(2, "seven", SEVEN.bins) + ', "object_9": {"desc": "two"}}', codec
    )
    assert '"object_10": {"desc": "two"' in text_of(target.token_ids[:-1], codec)
    assert [dropped.reason for dropped in target.reading.parsed.dropped] == ["missing_geom"]


def test_log_probabilities_are_kept_for_exactly_the_tokens_that_are_the_rollouts_own(codec):
    rollout = response("{" + entry(1, "seven", SEVEN.bins) + ', "object_2": {"de', codec)
    target = rollout_target(rollout, SAMPLE, codec, RULES)
    own = len(target.compared_logprobs)
    assert 0 < own < len(rollout.response_token_ids)
    assert target.token_ids[:own] == rollout.response_token_ids[:own]
    assert target.compared_logprobs == rollout.logprobs[:own]


def appended_text(codec, field_order=None):
    text = '{"object_7": {"desc": "six"}}'
    settings = RULES
    if field_order is not None:
        settings = replace(RULES, answer_format=ObjectDictionary(field_order))
    return target_of(text, codec, settings=settings).reading.appended_text


def test_desc_first_remains_baseline_append_layout(codec):
    expected = ", " + entry(8, "seven", SEVEN.bins) + ", " + entry(9, "two", TWO.bins) + "}"
    assert appended_text(codec) == appended_text(codec, "desc_first") == expected


def test_geometry_first_changes_only_per_object_field_order_in_fn_append(codec):
    expected = (
        f', "object_8": {{"bbox_2d": {box(*SEVEN.bins)}, "desc": "seven"}}'
        f', "object_9": {{"bbox_2d": {box(*TWO.bins)}, "desc": "two"}}}}'
    )
    assert appended_text(codec, "geometry_first") == expected
    target = target_of(
        "", codec, settings=replace(RULES, answer_format=ObjectDictionary("geometry_first"))
    )
    assert roles_text(target, codec, TokenRole.DESC) == ["seven", "two"]


def ambiguous(text, codec, objects=(SEVEN, TWO)):
    """The target of a response whose first object has coord positions that are not those of its
    coord tokens: what a response cannot do to the parser.
    """
    parsed = parse_rollout(codec.encode(text), codec, geometry=RULES.geometry)
    first, *others = parsed.objects
    shifted = tuple(position + 1 for position in first.coord_positions)
    parsed = replace(parsed, objects=(replace(first, coord_positions=shifted), *others))
    return parsed_target(parsed, replace(SAMPLE, objects=objects), codec, RULES)


def test_ambiguous_coord_slot_alignment_excludes_object_from_self_context_supervision(codec):
    target = ambiguous(FOUND, codec)
    assert pairs_of(target.reading.excluded) == [(0, 0)]
    assert pairs_of(target.reading.supervised) == [(1, 1)]
    assert target.reading.appended == (0,), "the excluded object's ground truth joins the append"
    start, stop = target.reading.parsed.objects[0].span
    assert set(target.roles[start:stop]) == {TokenRole.NEUTRAL}
    assert target.coord_targets == (*TWO.bins, *SEVEN.bins)
    assert target.box_slots == (0, 4)


def test_excluded_and_unmatched_ground_truth_is_appended_in_ground_truth_order(codec):
    one = GroundTruthObject(GeometryKind.BBOX, (10, 10, 60, 60), "one")
    text = "{" + entry(1, "two", TWO.bins) + ", " + entry(2, "one", one.bins) + "}"
    target = ambiguous(text, codec, (SEVEN, one, TWO))
    whole = parse_rollout(target.token_ids, codec, geometry=RULES.geometry)
    assert target.reading.appended == (0, 2)
    assert [found.desc for found in whole.objects[2:]] == ["seven", "two"]


@pytest.mark.parametrize(
    ("position", "target", "problem"),
    [
        (-1, 5, "outside the target"),
        (7, 5, "outside the target"),
        (0, 5, "not a coordinate token"),
    ],
    ids=["prompt", "behind", "text"],
)
def test_supervision_indices_are_validated_against_assistant_span(position, target, problem):
    roles = np.full(7, TokenRole.NEUTRAL, dtype=np.uint8)
    with pytest.raises(AssertionError, match=problem):
        Target("scene", tuple(range(7)), roles, (position,), (float(target),), ())


TRIANGLE = (100, 100, 400, 100, 400, 500)
OUTLINE = GroundTruthObject(GeometryKind.POLY, (110, 90, 300, 95, 410, 110, 405, 490), "three")


def points(*bins):
    return np.array(bins, dtype=float).reshape(-1, 2)


@pytest.mark.slow
def test_poly_prediction_is_supervised_by_barycentric_projected_targets(codec):
    text = "{" + entry(1, "three", TRIANGLE, "poly") + "}"
    target = target_of(text, codec, (OUTLINE,), BOTH_KINDS)
    expected = barycentric_targets(points(*TRIANGLE), points(*OUTLINE.bins))
    assert target.reading.appended == ()
    assert target.coord_targets == pytest.approx(expected.reshape(-1).tolist())
    assert any(value % 1 for value in target.coord_targets), "projections are fractions"
    assert slots_of(target, codec) == list(TRIANGLE)
    assert target.box_slots == (), "a polygon is no box"


def test_polygons_are_appended_as_nested_pairs_and_every_coordinate_is_a_slot(codec):
    objects = (SEVEN, OUTLINE)
    for target in (
        ground_truth_target(replace(SAMPLE, objects=objects), codec, BOTH_KINDS),
        target_of("", codec, objects, BOTH_KINDS),
    ):
        text = text_of(target.token_ids[:-1], codec)
        assert '"poly": [["<|coord_110|>", "<|coord_90|>"], ["<|coord_300|>"' in text
        assert target.coord_targets == (*SEVEN.bins, *OUTLINE.bins)
        assert slots_of(target, codec) == list(target.coord_targets)
        assert target.box_slots == (0,)


def test_points_are_matched_appended_and_taught_by_two_slots_each(codec):
    """Within the gate of 0.3 is what is nearer than 70 bins."""
    near, far = (
        GroundTruthObject(GeometryKind.POINT, (100, 100), "eye"),
        GroundTruthObject(GeometryKind.POINT, (800, 100), "ear"),
    )
    objects = (near, far, SEVEN)
    taught = ground_truth_target(replace(SAMPLE, objects=objects), codec, BOTH_KINDS)
    assert '"point_2d": ["<|coord_100|>", "<|coord_100|>"]}' in text_of(taught.token_ids, codec)
    assert taught.coord_targets == (*near.bins, *far.bins, *SEVEN.bins)
    assert slots_of(taught, codec) == list(taught.coord_targets)
    assert taught.box_slots == (4,), "a point is no box"
    wrong = entry(2, "ear", (800, 175), "point_2d")
    kept = "{" + entry(1, "eye", (130, 140), "point_2d") + ", " + wrong
    target = target_of(kept + "}", codec, objects, BOTH_KINDS)
    assert pairs_of(target.reading.supervised) == [(0, 0)]
    assert target.reading.supervised[0].iou == 0.5
    assert target.reading.appended == (1, 2)
    assert target.reading.match.gating_rejections == 3
    appended = ", " + entry(3, "ear", far.bins, "point_2d") + ", " + entry(4, "seven", SEVEN.bins)
    assert text_of(target.token_ids[:-1], codec) == kept + appended + "}"
    assert slots_of(target, codec) == [130, 140, *far.bins, *SEVEN.bins]
    assert target.coord_targets == (*near.bins, *far.bins, *SEVEN.bins)
    assert target.box_slots == (4,)
    neutral = "".join(roles_text(target, codec, TokenRole.NEUTRAL))
    assert '"ear", "point_2d": ["<|coord_800|>", "<|coord_175|>"]' in neutral
    structure = "".join(roles_text(target, codec, TokenRole.MATCHED_STRUCTURE))
    assert structure.replace(" ", "") == '":{"desc":"","point_2d":["",""]'
    assert roles_text(target, codec, TokenRole.DESC) == ["ear", "seven"]


def weights_of(weights, *roles):
    """The weights of tokens with these roles, without a rollout."""
    overrides = [n for n, role in enumerate(roles) if role == TokenRole.CORRECTED_DESC]
    target = Target(
        "scene",
        (0,) * len(roles),
        np.array(roles, dtype=np.uint8),
        (),
        (),
        (),
        label_overrides=tuple(LabelOverride(n, 1, 0) for n in overrides),
    )
    return weights.of(target).tolist()


@pytest.mark.parametrize(("desc", "matched"), [(0.5, 0.25), (0.0, 0.0)])
def test_the_weight_of_a_token_follows_from_its_role(desc, matched):
    expected = {
        TokenRole.NEUTRAL: 0.0,
        TokenRole.STRUCTURE: 1.0,
        TokenRole.DESC: desc,
        TokenRole.MATCHED_STRUCTURE: matched,
        TokenRole.COORD: 0.0,
        TokenRole.CLOSING: 1.0,
        TokenRole.SEPARATOR: 1.0,
        TokenRole.CORRECTED_DESC: 0.0,
    }
    weights = TextWeights(desc=desc, matched_structure=matched)
    assert weights_of(weights, *expected) == [*expected.values()]


def test_a_forced_token_is_no_sampled_one_and_eos_is_supervised_as_ever(codec):
    sampled = response("{" + entry(1, "one", (110, 90, 310, 290)) + ", ", codec)
    forced = replace(
        sampled,
        finish_reason=FinishReason.REPETITION,
        stop_token_id=codec.eos_token_id,
        forced_positions=(len(sampled.response_token_ids),),
    )
    target = rollout_target(forced, SAMPLE, codec, RULES)
    assert target.token_ids == rollout_target(sampled, SAMPLE, codec, RULES).token_ids
    assert target.compared_logprobs == sampled.logprobs[: len(target.compared_logprobs)] != ()
    assert (target.token_ids[-1], target.roles[-1]) == (codec.eos_token_id, TokenRole.CLOSING)
    early = replace(sampled, forced_positions=(3, 5))
    assert rollout_target(early, SAMPLE, codec, RULES).compared_logprobs == sampled.logprobs[:3], (
        "nothing behind a forced token is compared"
    )
