"""What supervises each token (decision 37, spec: canonical teacher-forced target, unified loss by
token masks).
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from rollout_support import make_rollout
from transformers import AutoTokenizer

from learner.ot_targets import OTSettings, barycentric_targets
from learner.targets import (
    MatchSettings,
    Target,
    TargetSettings,
    TextWeights,
    TokenRole,
    ground_truth_target,
    parsed_target,
    rollout_target,
)
from shared.grounding.parsing import parse_rollout
from shared.records import ALL_GEOMETRY, GeometryKind, GroundTruthObject, Sample
from shared.rollouts import FinishReason
from shared.tokens.hf_codec import HFTokenCodec

RULES = TargetSettings(
    geometry=frozenset({GeometryKind.BBOX}),
    field_order="desc_first",
    matching=MatchSettings(
        candidate_top_k=10, maskiou_gate=0.3, maskiou_resolution=256, fp_cost=1.0, fn_cost=1.0
    ),
    transport=OTSettings(cost="l2", epsilon=10.0, iters=30),
)
BOTH_KINDS = replace(RULES, geometry=ALL_GEOMETRY)
SEVEN = GroundTruthObject(GeometryKind.BBOX, (100, 100, 300, 300), "seven")
TWO = GroundTruthObject(GeometryKind.BBOX, (500, 500, 800, 900), "two")
SAMPLE = Sample("scene", (), 96, 96, (SEVEN, TWO))


@pytest.fixture(scope="module")
def codec(demo_checkpoint):
    return HFTokenCodec(AutoTokenizer.from_pretrained(demo_checkpoint))


def response(text, codec, logprobs=True):
    ids = tuple(codec.encode(text))
    return make_rollout(
        ids, logprobs=tuple(-0.5 - i for i in range(len(ids))) if logprobs else None
    )


def box(*bins):
    return "[" + ", ".join(f'"<|coord_{b}|>"' for b in bins) + "]"


def text_of(token_ids, codec):
    return b"".join(codec.piece_bytes(token) for token in token_ids).decode()


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
    text = (
        '{"object_1": {"desc": "seven", "bbox_2d": '
        + box(100, 100, 300, 300)
        + '}, "object_2": {"desc": "two", "bbox_2d": '
        + box(500, 500, 800, 900)
        + "}}"
    )
    assert text_of(target.token_ids[:-1], codec) == text
    assert target.token_ids[-1] == codec.eos_token_id
    assert roles_text(target, codec, TokenRole.DESC) == ["seven", "two"]
    assert target.coord_targets == (100, 100, 300, 300, 500, 500, 800, 900)
    assert [codec.coord_bin(target.token_ids[p]) for p in target.coord_positions] == list(
        target.coord_targets
    )
    assert target.roles[-1] == TokenRole.CLOSING
    assert roles_text(target, codec, TokenRole.CLOSING)[0].startswith("}")


def test_unmatched_ground_truth_is_always_appended_and_matched_slots_aim_at_their_match(codec):
    predicted = (
        '{"object_1": {"desc": "one", "bbox_2d": '
        + box(110, 90, 310, 290)
        + '}, "object_4": {"desc": "six", "bbox_2d": '
        + box(0, 0, 50, 50)
        + "}}"
    )
    target = rollout_target(response(predicted, codec), SAMPLE, codec, RULES)
    kept = predicted[:-1]
    appended = ', "object_5": {"desc": "two", "bbox_2d": ' + box(500, 500, 800, 900) + "}}"
    assert text_of(target.token_ids[:-1], codec) == kept + appended
    # The matched box keeps its own tokens as input; its slots are moved to the ground truth.
    assert target.coord_targets == (*SEVEN.bins, *TWO.bins)
    assert [codec.coord_bin(target.token_ids[p]) for p in target.coord_positions] == [
        110,
        90,
        310,
        290,
        *TWO.bins,
    ]
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


def test_all_gt_is_appended_when_no_valid_matches_exist(codec):
    for text in (
        "",
        "no json here",
        '{"object_1": {"desc": "seven", "bbox_2d": ["<|coord_1|>"',
        '{"object_3": {"desc": "seven"}}',
    ):
        target = rollout_target(response(text, codec), SAMPLE, codec, RULES)
        assert target.coord_targets == (*SEVEN.bins, *TWO.bins)
        assert len(target.reading.appended) == 2
        whole = parse_rollout(target.token_ids, codec, geometry=RULES.geometry)
        assert [o.bins for o in whole.objects] == [SEVEN.bins, TWO.bins]
        assert not whole.truncated


def test_highest_retained_object_key_controls_fn_start_even_when_object_is_invalid(codec):
    text = (
        '{"object_2": {"desc": "seven", "bbox_2d": '
        + box(100, 100, 300, 300)
        + '}, "object_9": {"desc": "two"}}'
    )
    target = rollout_target(response(text, codec), SAMPLE, codec, RULES)
    assert '"object_10": {"desc": "two"' in text_of(target.token_ids[:-1], codec)
    assert [dropped.reason for dropped in target.reading.parsed.dropped] == ["missing_geom"]


def test_a_rollout_that_found_everything_gets_only_the_closing_brace_and_eos(codec):
    text = (
        '{"object_1": {"desc": "seven", "bbox_2d": '
        + box(*SEVEN.bins)
        + '}, "object_2": {"desc": "two", "bbox_2d": '
        + box(*TWO.bins)
        + "}}"
    )
    target = rollout_target(response(text, codec), SAMPLE, codec, RULES)
    assert text_of(target.token_ids[:-1], codec) == text
    assert target.token_ids[-1] == codec.eos_token_id
    assert target.reading.appended == ()


def test_log_probabilities_are_kept_for_exactly_the_tokens_that_are_the_rollouts_own(codec):
    rollout = response(
        '{"object_1": {"desc": "seven", "bbox_2d": ' + box(*SEVEN.bins) + '}, "object_2": {"de',
        codec,
    )
    target = rollout_target(rollout, SAMPLE, codec, RULES)
    own = len(target.sampled_logprobs)
    assert 0 < own < len(rollout.response_token_ids)
    assert target.token_ids[:own] == rollout.response_token_ids[:own]
    assert target.sampled_logprobs == rollout.logprobs[:own]


def appended_text(codec, **changes):
    return rollout_target(
        response('{"object_7": {"desc": "six"}}', codec), SAMPLE, codec, replace(RULES, **changes)
    ).reading.appended_text


def test_desc_first_remains_baseline_append_layout(codec):
    expected = (
        ', "object_8": {"desc": "seven", "bbox_2d": '
        + box(*SEVEN.bins)
        + '}, "object_9": {"desc": "two", "bbox_2d": '
        + box(*TWO.bins)
        + "}}"
    )
    assert appended_text(codec) == appended_text(codec, field_order="desc_first") == expected


def test_geometry_first_changes_only_per_object_field_order_in_fn_append(codec):
    expected = (
        ', "object_8": {"bbox_2d": '
        + box(*SEVEN.bins)
        + ', "desc": "seven"}, "object_9": {"bbox_2d": '
        + box(*TWO.bins)
        + ', "desc": "two"}}'
    )
    assert appended_text(codec, field_order="geometry_first") == expected
    target = rollout_target(
        response("", codec), SAMPLE, codec, replace(RULES, field_order="geometry_first")
    )
    assert roles_text(target, codec, TokenRole.DESC) == ["seven", "two"]


def test_one_malformed_object_does_not_block_training(codec):
    """Scenario: of three entries the middle one has a wrong coord count; it is excluded, the others
    match, what is missing is appended.
    """
    entries = [("seven", SEVEN.bins), ("eight", (1, 2, 3)), ("two", TWO.bins)]
    text = (
        "{"
        + ", ".join(
            f'"object_{i}": {{"desc": "{desc}", "bbox_2d": {box(*bins)}}}'
            for i, (desc, bins) in enumerate(entries, 1)
        )
        + "}"
    )
    third = GroundTruthObject(GeometryKind.BBOX, (900, 900, 950, 950), "one")
    target = rollout_target(
        response(text, codec), replace(SAMPLE, objects=(SEVEN, TWO, third)), codec, RULES
    )
    assert [(dropped.key, dropped.reason) for dropped in target.reading.parsed.dropped] == [
        ("object_2", "wrong_arity")
    ]
    assert [(pair.prediction, pair.ground_truth) for pair in target.reading.supervised] == [
        (0, 0),
        (1, 1),
    ]
    assert target.reading.appended == (2,)
    assert text_of(target.token_ids[:-1], codec) == text[:-1] + target.reading.appended_text
    assert '"eight"' in "".join(roles_text(target, codec, TokenRole.NEUTRAL)).replace(
        '": "', ': "'
    ), "the malformed entry stays, unsupervised"


def test_truncated_rollout_tail_is_trimmed_suffix_only_and_training_proceeds(codec):
    complete = '{"object_1": {"desc": "seven", "bbox_2d": ' + box(*SEVEN.bins) + "}"
    rollout = response(
        complete + ', "object_2": {"desc": "two", "bbox_2d": ["<|coord_5|>", "<|co', codec
    )
    target = rollout_target(rollout, SAMPLE, codec, RULES)
    assert target.reading.parsed.truncated
    assert (
        text_of(target.token_ids[:-1], codec)
        == complete + ', "object_2": {"desc": "two", "bbox_2d": ' + box(*TWO.bins) + "}}"
    )
    assert target.token_ids[-1] == codec.eos_token_id
    nothing = rollout_target(response('{"object_1": {"desc": "sev', codec), SAMPLE, codec, RULES)
    assert nothing.reading.parsed.prefix_text == "{"
    assert nothing.reading.appended == (0, 1)


def test_pre_assignment_gating_prevents_wrong_matches_and_triggers_fn_append(codec):
    text = '{"object_1": {"desc": "seven", "bbox_2d": ' + box(290, 290, 500, 500) + "}}"
    reading = rollout_target(response(text, codec), SAMPLE, codec, RULES).reading
    assert reading.match.pairs == ()
    assert reading.match.unmatched_predictions == (0,)
    assert reading.match.gating_rejections == 2
    assert reading.appended == (0, 1)


def ambiguous(parsed, codec):
    """The same objects with coord positions that are not those of their coord tokens: what a
    response cannot do to the parser.
    """
    first, *others = parsed.objects
    shifted = tuple(position + 1 for position in first.coord_positions)
    return replace(parsed, objects=(replace(first, coord_positions=shifted), *others))


def test_ambiguous_coord_slot_alignment_excludes_object_from_self_context_supervision(codec):
    text = (
        '{"object_1": {"desc": "seven", "bbox_2d": '
        + box(*SEVEN.bins)
        + '}, "object_2": {"desc": "two", "bbox_2d": '
        + box(*TWO.bins)
        + "}}"
    )
    parsed = parse_rollout(codec.encode(text), codec, geometry=RULES.geometry)
    target = parsed_target(ambiguous(parsed, codec), SAMPLE, codec, RULES)
    assert [(pair.prediction, pair.ground_truth) for pair in target.reading.excluded] == [(0, 0)]
    assert [(pair.prediction, pair.ground_truth) for pair in target.reading.supervised] == [(1, 1)]
    assert target.reading.appended == (0,), "the excluded object's ground truth joins the append"
    start, stop = parsed.objects[0].span
    assert set(target.roles[start:stop]) == {TokenRole.NEUTRAL}
    assert target.coord_targets == (*TWO.bins, *SEVEN.bins)
    assert target.box_slots == (0, 4)


def test_excluded_and_unmatched_ground_truth_is_appended_in_ground_truth_order(codec):
    objects = (SEVEN, GroundTruthObject(GeometryKind.BBOX, (10, 10, 60, 60), "one"), TWO)
    text = (
        '{"object_1": {"desc": "two", "bbox_2d": '
        + box(*TWO.bins)
        + '}, "object_2": {"desc": "one", "bbox_2d": '
        + box(10, 10, 60, 60)
        + "}}"
    )
    parsed = ambiguous(parse_rollout(codec.encode(text), codec, geometry=RULES.geometry), codec)
    target = parsed_target(parsed, replace(SAMPLE, objects=objects), codec, RULES)
    assert target.reading.appended == (0, 2)
    assert [
        o.desc for o in parse_rollout(target.token_ids, codec, geometry=RULES.geometry).objects[2:]
    ] == ["seven", "two"]


@pytest.mark.parametrize(
    ("position", "target", "problem"),
    [
        (-1, 5, "outside the assistant span"),
        (7, 5, "outside the assistant span"),
        (0, 5, "no coord token"),
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
    text = '{"object_1": {"desc": "three", "poly": ' + box(*TRIANGLE) + "}}"
    target = rollout_target(
        response(text, codec), replace(SAMPLE, objects=(OUTLINE,)), codec, BOTH_KINDS
    )
    assert target.reading.appended == ()
    expected = barycentric_targets(
        points(*TRIANGLE), points(*OUTLINE.bins), epsilon=10.0, iters=30, cost="l2"
    ).reshape(-1)
    assert target.coord_targets == pytest.approx(expected.tolist())
    assert any(value % 1 for value in target.coord_targets), "projections are fractions"
    assert [codec.coord_bin(target.token_ids[p]) for p in target.coord_positions] == list(TRIANGLE)
    assert target.box_slots == (), "a polygon is no box"


def test_a_box_matched_with_a_polygon_aims_at_the_enclosing_box_of_its_projected_corners(codec):
    corners = (100, 100, 400, 100, 400, 500, 100, 500)
    outline = GroundTruthObject(GeometryKind.POLY, (105, 95, 390, 110, 405, 490, 95, 505), "three")
    text = '{"object_1": {"desc": "three", "bbox_2d": ' + box(100, 100, 400, 500) + "}}"
    target = rollout_target(
        response(text, codec), replace(SAMPLE, objects=(outline,)), codec, BOTH_KINDS
    )
    projected = barycentric_targets(points(*corners), points(*outline.bins))
    assert target.coord_targets == pytest.approx((*projected.min(axis=0), *projected.max(axis=0)))
    assert target.box_slots == (), "transport aims coord tokens; it is no box to regress to"


def test_polygons_are_appended_as_nested_pairs_and_every_coordinate_is_a_slot(codec):
    sample = replace(SAMPLE, objects=(SEVEN, OUTLINE))
    for target in (
        ground_truth_target(sample, codec, BOTH_KINDS),
        rollout_target(response("", codec), sample, codec, BOTH_KINDS),
    ):
        text = text_of(target.token_ids[:-1], codec)
        assert '"poly": [["<|coord_110|>", "<|coord_90|>"], ["<|coord_300|>"' in text
        assert target.coord_targets == (*SEVEN.bins, *OUTLINE.bins)
        assert [codec.coord_bin(target.token_ids[p]) for p in target.coord_positions] == list(
            target.coord_targets
        )
        assert target.box_slots == (0,)


def test_predicted_polygons_are_dropped_with_a_reason(codec):
    text = '{"object_1": {"desc": "seven", "poly": ' + box(1, 1, 9, 1, 9, 9) + "}}"
    target = rollout_target(response(text, codec), SAMPLE, codec, RULES)
    assert [dropped.reason for dropped in target.reading.parsed.dropped] == ["poly_unsupported"]


def test_the_weight_of_a_token_follows_from_its_role():
    roles = np.array(
        [
            TokenRole.NEUTRAL,
            TokenRole.STRUCTURE,
            TokenRole.DESC,
            TokenRole.MATCHED_STRUCTURE,
            TokenRole.COORD,
            TokenRole.CLOSING,
        ],
        dtype=np.uint8,
    )
    assert TextWeights(desc=0.5, matched_structure=0.25).of(roles).tolist() == [
        0.0,
        1.0,
        0.5,
        0.25,
        0.0,
        1.0,
    ]
    assert TextWeights(desc=0.0, matched_structure=0.0).of(roles).tolist() == [
        0.0,
        1.0,
        0.0,
        0.0,
        0.0,
        1.0,
    ]


def test_a_forced_token_is_no_sampled_one_and_eos_is_supervised_as_ever(codec):
    sampled = response(
        '{"object_1": {"desc": "one", "bbox_2d": ' + box(110, 90, 310, 290) + "}, ", codec
    )
    length = len(sampled.response_token_ids)
    forced = replace(
        sampled,
        finish_reason=FinishReason.REPETITION,
        stop_token_id=codec.eos_token_id,
        forced_positions=(length,),
    )
    target = rollout_target(forced, SAMPLE, codec, RULES)
    assert target.token_ids == rollout_target(sampled, SAMPLE, codec, RULES).token_ids
    assert target.sampled_logprobs == sampled.logprobs[: len(target.sampled_logprobs)] != ()
    assert (target.token_ids[-1], target.roles[-1]) == (codec.eos_token_id, TokenRole.CLOSING)
    early = replace(sampled, forced_positions=(3, 5))
    assert rollout_target(early, SAMPLE, codec, RULES).sampled_logprobs == sampled.logprobs[:3], (
        "nothing behind a forced token is compared"
    )
