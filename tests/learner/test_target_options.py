"""Options beyond the specification (decision 30): what each changes in a target, and nothing else.

docs/explanation/objectives.md tells of them by such examples. The
demo's tokenizer writes `},` and `": {"` as one.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
from damaged_responses import Damage, random_objects
from rollout_support import RULES, make_rollout, text_of
from rollout_support import with_role as positions_of
from small_tokenizers import small_codecs
from transformers import AutoTokenizer

from learner.algorithms.matched_targets import parsed_target, rollout_target
from learner.collate import collate
from learner.segments import EncodedPrompt, Segment
from learner.targets import (
    TextWeights,
    TokenRole,
    target_settings,
    text_weights,
)
from shared.config.pipeline import Channel
from shared.grounding.formats import ObjectDictionary
from shared.grounding.parsing import parse_rollout, trim_prefix
from shared.grounding.serialize import escaped
from shared.records import ALL_GEOMETRY, GeometryKind, GroundTruthObject, Sample
from shared.tokens.hf_codec import HFTokenCodec

TRIM = replace(RULES, trims_false_positives=True)
SEPARATORS = replace(RULES, supervises_separators=True)
NAMES = replace(RULES, corrects_names=True)
ALL = replace(RULES, trims_false_positives=True, supervises_separators=True, corrects_names=True)
SEVEN = GroundTruthObject(GeometryKind.BBOX, (100, 100, 300, 300), "seven")
TWO = GroundTruthObject(GeometryKind.BBOX, (500, 500, 800, 900), "two")
NOWHERE = (900, 0, 999, 40)


@pytest.fixture(scope="module")
def codec(demo_checkpoint):
    return HFTokenCodec(AutoTokenizer.from_pretrained(demo_checkpoint))


def target_of(text, codec, settings, objects=(SEVEN, TWO)):
    ids = codec.encode(text)
    rollout = make_rollout(ids, logprobs=tuple(-0.5 for _ in ids))
    return rollout_target(rollout, Sample("scene", (), 96, 96, objects), codec, settings)


def entry(number, desc, bins):
    tokens = ", ".join(f'"<|coord_{bin}|>"' for bin in bins)
    return f'"object_{number}": {{"desc": "{desc}", "bbox_2d": [{tokens}]}}'


def geometry_first(number, desc, bins):
    tokens = ", ".join(f'"<|coord_{bin}|>"' for bin in bins)
    return f'"object_{number}": {{"bbox_2d": [{tokens}], "desc": "{desc}"}}'


def answer(*entries):
    return "{" + ", ".join(entries) + "}"


def with_role(target, codec, role):
    """The positions of the tokens of this role, with the text of each."""
    return [(at, text_of([target.token_ids[at]], codec)) for at in positions_of(target, role)]


# Trailing false positives

SEVEN_ENTRY = entry(1, "seven", SEVEN.bins)
FALSE_ENTRY = entry(2, "six", NOWHERE)


def test_entries_behind_the_last_match_are_cut_off_and_numbers_go_on_from_what_is_kept(codec):
    text = answer(
        SEVEN_ENTRY,
        FALSE_ENTRY,
        entry(3, "two", TWO.bins),
        '"object_8": {}',
        entry(9, "x", NOWHERE),
    )
    third = GroundTruthObject(GeometryKind.BBOX, (5, 600, 90, 700), "one")
    target = target_of(text, codec, TRIM, (SEVEN, TWO, third))
    kept = answer(SEVEN_ENTRY, FALSE_ENTRY, entry(3, "two", TWO.bins))[:-1]
    expected = kept + ", " + entry(4, "one", third.bins) + "}"
    assert text_of(target.token_ids[:-1], codec) == expected
    reading = target.reading
    assert (reading.num_trimmed, reading.false_positives) == (2, (1,))
    assert reading.match.unmatched_predictions == (1, 3), "the answer was read and matched whole"
    assert len(reading.parsed.objects) == 4
    # As if the answer had ended there; what stands between matches stays.
    ended = target_of(kept + "}", codec, RULES, (SEVEN, TWO, third))
    assert target.token_ids == ended.token_ids
    assert np.array_equal(target.roles, ended.roles)
    assert target.coord_targets == ended.coord_targets
    assert len(target.compared_logprobs) == reading.num_kept == ended.reading.num_kept
    without = target_of(text, codec, RULES, (SEVEN, TWO, third))
    assert '"object_10": {"desc": "one"' in text_of(without.token_ids[:-1], codec)
    assert (without.reading.num_trimmed, without.reading.false_positives) == (0, (1, 3))


def test_of_an_answer_without_a_match_nothing_is_kept_and_the_target_is_that_of_no_answer(codec):
    for text in (answer(FALSE_ENTRY), answer('"object_1": {"desc": "x"}'), "{", "prose"):
        target = target_of(text, codec, TRIM)
        nothing = target_of("", codec, RULES)
        assert target.token_ids == nothing.token_ids
        assert np.array_equal(target.roles, nothing.roles)
        assert target.compared_logprobs == ()
    assert target_of(answer(FALSE_ENTRY), codec, TRIM, ()).token_ids == (
        *codec.encode("{}"),
        codec.eos_token_id,
    )


# Separators


def test_going_on_to_a_matched_object_is_taught_and_to_a_false_positive_it_is_not(codec):
    text = answer(SEVEN_ENTRY, FALSE_ENTRY, entry(3, "two", TWO.bins), entry(4, "x", NOWHERE))
    target = target_of(text, codec, SEPARATORS)
    plain = target_of(text, codec, RULES)
    separators = with_role(target, codec, TokenRole.SEPARATOR)
    # The first entry's choice is its key's quote; that of "two" closes the false positive too.
    assert [piece for _, piece in separators] == ['{"', "},"]
    before = text_of(target.token_ids[: separators[1][0]], codec) + "}"
    assert before == answer(SEVEN_ENTRY, FALSE_ENTRY)[:-1]
    assert target.token_ids == plain.token_ids
    changed = np.flatnonzero(target.roles != plain.roles).tolist()
    assert changed == [position for position, _ in separators]
    assert set(plain.roles[changed]) == {TokenRole.NEUTRAL}
    weights_L = TextWeights(desc=0.5, matched_structure=0.25).of(target)
    assert weights_L[changed].tolist() == [1.0, 1.0], "as much as the end that it may not be"


# Names


def test_the_true_name_is_taught_where_the_models_first_differs_and_its_rest_stays_neutral(codec):
    text = answer(entry(1, "six", SEVEN.bins), entry(2, "two", TWO.bins))
    target = target_of(text, codec, NAMES)
    plain = target_of(text, codec, RULES)
    (override,) = target.label_overrides
    assert override.prediction == 0
    # The model's own tokens are its input; the label alone is the truth's.
    assert target.token_ids == plain.token_ids
    written = codec.encode(text)
    right = codec.encode(answer(SEVEN_ENTRY, entry(2, "two", TWO.bins)))
    position = next(n for n, (a, b) in enumerate(zip(written, right, strict=False)) if a != b)
    assert (override.position, override.token_id) == (position, right[position])
    assert np.flatnonzero(target.roles != plain.roles).tolist() == [position]
    assert target.roles[position] == TokenRole.CORRECTED_DESC
    weights = TextWeights(desc=1.0, matched_structure=1.0, matched_desc=0.5)
    assert weights.of(target)[position] == 0.5


def test_a_name_is_left_alone_where_it_is_right_or_another_tokenisation_or_ends_in_our_own_text(
    codec,
):
    assert target_of(answer(SEVEN_ENTRY), codec, NAMES).label_overrides == ()
    # A name of single bytes, which the tokenizer writes as one or two tokens.
    begin, end = answer(entry(1, "seven", SEVEN.bins)).split("seven")
    ids = [*codec.encode(begin), *(codec.encode(c)[0] for c in "eight"), *codec.encode(end)]
    sample = Sample("scene", (), 96, 96, (SEVEN, TWO))
    pieced = parsed_target(parse_rollout(ids, codec), sample, codec, NAMES)
    assert len(pieced.reading.supervised) == 1
    assert pieced.label_overrides == ()
    # The quote behind the name is a token with the end, which is ours and is taught as it is.
    first = replace(NAMES, answer_format=ObjectDictionary("geometry_first"))
    longer = replace(SEVEN, desc="seven up")
    text = answer(geometry_first(1, "seven", SEVEN.bins))
    target = target_of(text, codec, first, (longer,))
    for override in target.label_overrides:
        assert override.position < target.reading.num_prefix


def test_the_loss_sees_the_corrected_label_and_the_comparison_the_sampled_token(codec):
    """At one position, in a row of two segments."""
    text = answer(entry(1, "six", SEVEN.bins), entry(2, "two", TWO.bins))
    target = target_of(text, codec, NAMES)
    (override,) = target.label_overrides
    prompt = EncodedPrompt.from_text((1, 2, 3))
    segments = [Segment(position, prompt, target) for position in (0, 1)]
    weights = TextWeights(desc=1.0, matched_structure=1.0, matched_desc=0.5)
    row = collate(segments, text_weights=weights, rope_index=None)
    own = [n for n in range(len(target.token_ids)) if weights.of(target)[n] > 0]
    length = len(target.token_ids)
    labels = [override.token_id if n == override.position else target.token_ids[n] for n in own]
    supervision = row.supervision
    assert row.token_ids_N[supervision.text.at].tolist() == labels * 2
    at = row.positions_N[supervision.text.at].tolist()
    assert at == [2 + n for n in own] + [3 + length + 2 + n for n in own]
    weight = supervision.text.weight[own.index(override.position)].item()
    assert weight == pytest.approx(0.5 / weights.of(target).sum())
    sampled = list(target.token_ids[: len(target.compared_logprobs)])
    assert override.position < len(sampled)
    assert row.token_ids_N[row.compared.at].tolist() == sampled * 2
    coords = [target.token_ids[n] for n in target.coord_positions]
    assert row.token_ids_N[supervision.coord.at].tolist() == coords * 2
    assert (row.positions_N.diff() >= 0).all()
    assert (row.positions_N.diff() == 0).sum() == 2, "only the corrected positions come twice"
    assert row.inputs.input_ids[0].tolist() == [1, 2, 3, *target.token_ids] * 2


# The end


def test_the_end_weighs_less_where_unmatched_predictions_stand_before_it(codec):
    weights = TextWeights(desc=1.0, matched_structure=1.0, fp_end=0.25)

    def ends(text, settings=RULES):
        target = target_of(text, codec, settings)
        closing = target.roles == TokenRole.CLOSING
        others = TextWeights(desc=1.0, matched_structure=1.0).of(target)[~closing]
        assert weights.of(target)[~closing].tolist() == others.tolist()
        return weights.of(target)[closing].tolist()

    assert ends(answer(SEVEN_ENTRY, FALSE_ENTRY)) == [0.25, 0.25]
    assert ends(answer(SEVEN_ENTRY)) == [1.0, 1.0]
    assert ends("prose") == [1.0, 1.0]
    # A damaged entry is no prediction, and one that was cut off stands nowhere.
    assert ends(answer(SEVEN_ENTRY, '"object_2": {}')) == [1.0, 1.0]
    assert ends(answer(SEVEN_ENTRY, FALSE_ENTRY), TRIM) == [1.0, 1.0]


# All of them


def test_the_configuration_turns_them_on_and_without_it_they_are_off(tmp_path):
    from config_support import configuration

    plain = configuration(tmp_path, tmp_path, tmp_path)
    assert target_settings(plain) == replace(
        target_settings(plain),
        trims_false_positives=False,
        supervises_separators=False,
        corrects_names=False,
    )
    assert target_settings(plain).transport.epsilon_cap is None
    weights = text_weights(plain.rollout_matching.pipeline, Channel.B)
    assert (weights.matched_desc, weights.fp_end) == (0.0, 1.0)
    values = plain.rollout_matching.pipeline.model_dump()
    values["objective"][0]["config"] |= {"matched_desc_weight": 0.5, "fp_end_weight": 0.25}
    changed = configuration(
        tmp_path,
        tmp_path,
        tmp_path,
        custom__trainer_variant="stage2_rollout_aligned",
        training__packing_drop_last=True,
        rollout_matching__pipeline=values,
        rollout_matching__trim_trailing_false_positives=True,
        rollout_matching__supervise_separators=True,
        rollout_matching__ot_epsilon_cap=0.2,
    )
    settings = target_settings(changed)
    assert settings.trims_false_positives
    assert settings.supervises_separators
    assert settings.corrects_names
    assert settings.transport.epsilon_cap == 0.2
    weights = text_weights(changed.rollout_matching.pipeline, Channel.B)
    assert (weights.matched_desc, weights.fp_end) == (0.5, 0.25)
    assert text_weights(changed.rollout_matching.pipeline, Channel.A) == TextWeights(
        weights.desc, 0.0
    )


def test_pairs_that_the_cap_concerns_are_counted(codec):
    outline = GroundTruthObject(GeometryKind.POLY, (100, 100, 110, 100, 110, 110, 100, 110), "dot")
    capped = replace(RULES, transport=replace(RULES.transport, epsilon_cap=0.2))
    text = answer(entry(1, "dot", (100, 100, 110, 110)), entry(2, "two", TWO.bins))
    for settings, number, epsilon in ((RULES, 0, 10.0), (capped, 1, 2.0)):
        target = target_of(text, codec, settings, (outline, TWO))
        assert target.reading.num_capped == number
        plain = replace(RULES, transport=replace(RULES.transport, epsilon=epsilon))
        assert target.coord_targets == target_of(text, codec, plain, (outline, TWO)).coord_targets


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo", "qwen words", "bytes"])
def test_of_damaged_answers_only_what_an_option_is_for_changes(codec, name):
    codec = codec if name == "demo" else small_codecs()[name]
    generator = random.Random(3)
    damage = Damage(generator, codec)
    counts = np.zeros(3, dtype=int)
    for _ in range(200):
        ids = damage.response()
        parsed = parse_rollout(ids, codec, geometry=ALL_GEOMETRY)
        # Its own objects in part, under other names, so that there are matches.
        truth = random_objects(generator, 1, ALL_GEOMETRY)
        truth += [
            GroundTruthObject(one.kind, one.bins, generator.choice([one.desc, "b cat", "bl"]))
            for one in parsed.objects
            if generator.random() < 0.5 and "\ud800" not in one.desc
        ]
        sample = Sample("scene", (), 96, 96, tuple(truth))
        target = parsed_target(parsed, sample, codec, ALL)
        reading = target.reading
        kept = reading.kept
        number = len(kept.objects)
        assert kept.objects == trim_prefix(parsed, number, codec, geometry=ALL_GEOMETRY).objects
        assert [one.value for one in kept.objects] == [one.value for one in parsed.objects[:number]]
        assert kept.dropped == parsed.dropped[: len(kept.dropped)]
        assert parsed.prefix_text.startswith(kept.prefix_text)
        matched = {pair.prediction for pair in reading.supervised}
        assert number == max(matched, default=-1) + 1
        text = text_of_bytes = b"".join(map(codec.piece_bytes, target.token_ids[:-1]))
        assert text.decode(errors="replace") == kept.prefix_text + reading.appended_text
        for position, _ in enumerate(target.token_ids):
            if target.roles[position] == TokenRole.SEPARATOR:
                # It ends behind the entry before, and in front of a matched object.
                end = len(b"".join(map(codec.piece_bytes, target.token_ids[: position + 1])))
                following = next(n for n, one in enumerate(kept.objects) if one.value[0] + 1 > end)
                assert following in matched
        for override in target.label_overrides:
            one = kept.objects[override.prediction]
            pair = next(
                pair for pair in reading.supervised if pair.prediction == override.prediction
            )
            name = escaped(truth[pair.ground_truth].desc).encode()
            right = text[: one.desc_value[0]] + name + text_of_bytes[one.desc_value[1] :]
            before = b"".join(map(codec.piece_bytes, target.token_ids[: override.position]))
            assert right.startswith(before + codec.piece_bytes(override.token_id))
            assert override.position < reading.num_prefix
        separators = (target.roles == TokenRole.SEPARATOR).sum()
        counts += [reading.num_trimmed > 0, separators > 0, len(target.label_overrides) > 0]
    assert (counts > 10).all(), counts
