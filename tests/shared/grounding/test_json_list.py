"""Qwen's JSON list (issue 21, point 1): what is read of it, and that appends close it."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from damaged_responses import check_damaged, damage_few, random_objects
from small_tokenizers import small_codecs

from shared.grounding.formats import FORMATS
from shared.grounding.json_list import PictureResize
from shared.grounding.objects import DropReason, ParsedRollout
from shared.grounding.parsing import parse_rollout, trim_prefix
from shared.records import GeometryKind, GroundTruthObject, Sample
from shared.tokens.hf_codec import HFTokenCodec

LIST = FORMATS["qwen3_vl"]
BOXES = frozenset({GeometryKind.BBOX})
SHAPES = frozenset({GeometryKind.BBOX, GeometryKind.POINT})
CAT = '{"bbox_2d": [1, 2, 30, 1000], "label": "cat"}'
DOG = '{"label": "dog", "bbox_2d": [5, 6, 7, 8]}'


def truth(*bins: int, desc: str = "cat") -> GroundTruthObject:
    kind = GeometryKind.BBOX if len(bins) == 4 else GeometryKind.POINT
    return GroundTruthObject(kind, bins, desc)


def read(codec: HFTokenCodec, text: str) -> ParsedRollout:
    return parse_rollout(codec.encode(text), codec, geometry=SHAPES, answer_format=LIST)


def joined(codec: HFTokenCodec, token_ids) -> bytes:
    return b"".join(map(codec.piece_bytes, token_ids))


@pytest.fixture
def parse(codec: HFTokenCodec):
    return lambda text: read(codec, text)


def test_objects_come_with_the_tokens_of_their_digits(codecs: dict[str, HFTokenCodec]) -> None:
    for codec in codecs.values():
        parsed = read(codec, f"[{CAT}, {DOG}]")
        assert [(o.key, o.desc, o.bins) for o in parsed.objects] == [
            ("[0]", "cat", (1, 2, 30, 999)),
            ("[1]", "dog", (5, 6, 7, 8)),
        ]
        prefix = joined(codec, parsed.prefix_token_ids)
        for object_, numbers in zip(parsed.objects, (b"1 2 30 1000", b"5 6 7 8"), strict=True):
            assert [prefix[slice(*span)] for span in object_.coord_spans] == numbers.split()
            tokens = [parsed.prefix_token_ids[i] for i in object_.coord_positions]
            written = joined(codec, tokens)
            assert all(bytes([digit]) in written for digit in b"".join(numbers.split()))
            assert prefix[slice(*object_.desc_value)].decode() == object_.desc
            assert prefix[slice(*object_.value)].startswith(b"{")
        assert parsed.prefix_text == f"[{CAT}, {DOG}"
        assert (parsed.truncated, parsed.fallback, parsed.max_object_index) == (False, False, None)


@pytest.mark.parametrize(
    ("text", "prefix", "truncated"),
    [
        (f"[{CAT}, {DOG[:-9]}", f"[{CAT}", True),
        (f"[{CAT}], {DOG}", f"[{CAT}", False),
        (f"```json\n[\n\t{CAT},\n\t{DOG}\n]\n```", f"```json\n[\n\t{CAT},\n\t{DOG}", False),
        (f"```\n[{CAT}]", f"```\n[{CAT}", False),
        ("[]", "[", False),
        ("[", "[", True),
        ("Sure: [", "[", True),
        ('{"object_1": {}}', "[", True),
        (f"[[{CAT}]", "[", True),
        (f"[[1, {{}}], {CAT}]", f"[[1, {{}}], {CAT}", False),
    ],
)
def test_what_is_kept_ends_behind_the_last_object_of_the_list(
    parse, text: str, prefix: str, truncated: bool
) -> None:
    parsed = parse(text)
    assert (parsed.prefix_text, parsed.truncated) == (prefix, truncated)
    assert parsed.fallback is (prefix == "[")


DROPS = {
    DropReason.MALFORMED: [
        '{"bbox_2d": [1, 2, 3, 4] "label": "cat"}',
        '{"bbox_2d": [01, 2, 3, 4]}',
    ],
    DropReason.KEY_INVALID: [
        '{"bbox_2d": [1, 2, 3, 4], "label": "cat", "score": 1}',
        '{"bbox_2d": [1, 2, 3, 4], "label": "cat", "label": "cat"}',
        '{"bbox_2d": {"x": 1}, "label": "cat"}',
        '{"bbox_2d": [1, 2, 3, 4], "point_2d": [1, 2], "label": "cat"}',
    ],
    DropReason.UNKNOWN_GEOM: ['{"poly": [1, 2, 3, 4, 5, 6], "label": "cat"}'],
    DropReason.MISSING_DESC: ['{"bbox_2d": [1, 2, 3, 4]}', '{"bbox_2d": [1, 2, 3], "label": " "}'],
    DropReason.MISSING_GEOM: ['{"label": "cat"}', '{"label": "cat", "bbox_2d": "1 2 3 4"}'],
    DropReason.NON_COORD_TOKEN: [
        f'{{"label": "cat", "bbox_2d": [{numbers}]}}'
        for numbers in ("1, 2, 3, 1001", "1, 2.5, 3, 4", "-1, 2, 3, 4", '"1", 2, 3, 4', "[1, 2]")
    ]
    + ['{"label": "cat", "point_2d": [1, 1001]}'],
    DropReason.WRONG_ARITY: [
        '{"label": "cat", "bbox_2d": [1, 2, 3]}',
        '{"label": "a", "bbox_2d": []}',
        '{"label": "a", "point_2d": [1, 2, 3]}',
    ],
    DropReason.BBOX_INVALID: ['{"label": "cat", "bbox_2d": [3, 2, 1, 4]}'],
}


@pytest.mark.parametrize(
    ("reason", "value"), [(reason, value) for reason, values in DROPS.items() for value in values]
)
def test_a_bad_object_is_dropped_for_the_first_reason(
    parse, reason: DropReason, value: str
) -> None:
    parsed = parse(f"[{value}, {CAT}]")
    assert [(one.key, one.reason) for one in parsed.dropped] == [("[0]", reason)]
    assert [one.desc for one in parsed.objects] == ["cat"]


def test_a_point_that_is_not_wanted_is_an_unknown_geometry(codec: HFTokenCodec) -> None:
    token_ids = codec.encode(f'[{{"point_2d": [1, 2], "label": "cat"}}, {CAT}]')
    parsed = parse_rollout(token_ids, codec, geometry=BOXES, answer_format=LIST)
    assert [one.reason for one in parsed.dropped] == [DropReason.UNKNOWN_GEOM]


def test_objects_of_a_second_list_are_counted_and_not_read(parse) -> None:
    cases = {f"[{CAT}]": 0, f"[{CAT}]\n[{DOG}, {CAT}]": 2, f"[] or {DOG}": 1, f"[{CAT}, {DOG}": 0}
    for text, num_behind in cases.items():
        parsed = parse(text)
        assert parsed.num_behind == num_behind
        assert not parsed.dropped


def test_one_comma_stands_between_objects(parse) -> None:
    parsed = parse(f"[{CAT} {DOG},, {CAT}, {DOG}]")
    assert [one.key for one in parsed.objects] == ["[0]", "[3]"]
    assert [one.reason for one in parsed.dropped] == [DropReason.MALFORMED] * 2


def test_what_is_written_is_json_and_is_read_back_byte_by_byte(codec: HFTokenCodec) -> None:
    objects = [truth(0, 10, 100, 999), truth(5, 5, 5, 5, desc='größe "猫"\t'), truth(7, 0)]
    layout = LIST.layout_objects(objects)
    values = [{one.kind: list(one.bins), "label": one.desc} for one in objects]
    assert layout.text == json.dumps(values, ensure_ascii=False)
    written = layout.text.encode()
    for one, place in zip(objects, layout.objects, strict=True):
        assert [int(written[slice(*span)]) for span in place.coords] == list(one.bins)
        assert json.loads(b'"%b"' % written[slice(*place.desc)]) == one.desc
        assert json.loads(written[slice(*place.value)])["label"] == one.desc
    assert written[slice(*layout.closing)] == b"]"
    parsed = read(codec, layout.text)
    again = [GroundTruthObject(one.kind, one.bins, one.desc) for one in parsed.objects]
    assert (again, LIST.layout_objects(again).text) == (objects, layout.text)


@pytest.mark.parametrize("size", [(28, 56), (96, 96), (644, 476), (1000, 1001), (1932, 4004)])
def test_pixels_of_the_resized_picture_are_read_back_as_they_are_written(
    codec: HFTokenCodec, size: tuple[int, int]
) -> None:
    """Byte by byte; where there are fewer pixels than bins, several bins are one pixel."""
    pixels = FORMATS["qwen2_5_vl"].for_pictures(PictureResize(1, 1, 10**9))
    pixels = pixels.of(Sample("scene", (), *size, ()))
    objects = [truth(bin, bin, 999, 999) for bin in range(0, 1000, 37)]
    objects += [truth(bin, 999 - bin) for bin in range(0, 1000, 37)]
    text = pixels.layout_objects(objects).text
    parsed = parse_rollout(codec.encode(text), codec, geometry=SHAPES, answer_format=pixels)
    assert parsed.dropped == ()
    again = [GroundTruthObject(one.kind, one.bins, one.desc) for one in parsed.objects]
    assert pixels.layout_objects(again).text == text
    for written, read_back in zip(objects, again, strict=True):
        for axis, (before, after) in enumerate(zip(written.bins, read_back.bins, strict=True)):
            last = size[axis % 2] - 1
            assert abs(before - after) <= 0.5 + max(0.0, 0.5 * 999 / last)
            number = int(pixels.digits(written.bins)[axis])
            assert abs(number - before * last / 999) <= 0.5
    # The far border of the picture is its last bin; what lies beyond it is no coordinate.
    for beyond, kept in ((0, 1), (1, 0)):
        box = f'{{"bbox_2d": [0, 0, {size[0] + beyond}, {size[1]}], "label": "cat"}}'
        ids = codec.encode(f"[{box}]")
        found = parse_rollout(ids, codec, geometry=BOXES, answer_format=pixels)
        assert len(found.objects) == kept
        assert [one.bins for one in found.objects] == [(0, 0, 999, 999)] * kept


def test_an_append_closes_the_fence_that_the_model_has_opened() -> None:
    added = LIST.layout_append(f"```json\n[\n\t{CAT}", [truth(5, 6, 7, 8)], start_index=1).text
    assert added == ', {"bbox_2d": [5, 6, 7, 8], "label": "cat"}]\n```'
    assert LIST.layout_append(f"[{CAT}", [], start_index=1).text == "]"


@pytest.mark.parametrize(
    ("prefix", "problem"),
    [
        (f"[{CAT}]", "it is not an open JSON list"),
        ("{", "it is not an open JSON list"),
        ('["', "it is not an open JSON list"),
        (f"[[{CAT}", "it is not an open JSON list"),
        (f"[{CAT},", "remove the comma"),
    ],
)
def test_nothing_is_appended_where_no_list_is_open(prefix: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        LIST.layout_append(prefix, [], start_index=1)


def test_a_prefix_is_trimmed_behind_an_object(codec: HFTokenCodec) -> None:
    parsed = read(codec, f"[{CAT}, {{}}, {DOG}]")
    trimmed = trim_prefix(parsed, 1, codec, geometry=BOXES, answer_format=LIST)
    assert (trimmed.prefix_text, trimmed.objects) == (f"[{CAT}", parsed.objects[:1])


SCRAPS = [
    *'{}[]",: \n\\10猫-.',
    *("}]", "}, {", '"]}', "```", '"label": ', '"bbox_2d": [', '"point_2d": [1], '),
    *('"poly": [1], ', '"score": 1, ', '{"label": "x"}, ', "1000", "1001", "null", "```json\n"),
    *("<|coord_7|>", "<|im_end|>"),
]


def damaged(generator: random.Random, codec: HFTokenCodec, num_ids: int) -> list[int]:
    text = LIST.layout_objects(
        random_objects(generator, generator.choice([0, 1, 2, 3, 4]), SHAPES)
    ).text
    if generator.random() < 0.3:
        text = f"```json\n{text}\n```".replace("}, {", "},\n\t{")
    if generator.random() < 0.1:
        text = text.replace(", ", ",").replace(": ", " :\n")
    token_ids = codec.encode(text)
    damage_few(token_ids, generator, codec, SCRAPS, num_ids)
    return token_ids


@pytest.mark.slow
def test_damaged_lists_can_always_be_appended_to() -> None:
    generator = random.Random(20)
    seen: Counter[object] = Counter()
    codecs = small_codecs()
    for codec in codecs.values():
        num_ids = max(codec.special_ids) + 1200
        for _ in range(500):
            token_ids = damaged(generator, codec, num_ids)
            appended = random_objects(generator, generator.choice([0, 1, 2]), SHAPES)
            parsed, prefix = check_damaged(token_ids, codec, appended, SHAPES, LIST, seen)
            for one in parsed.objects:
                value = json.loads(prefix[slice(*one.value)])
                assert tuple(min(number, 999) for number in value[one.kind]) == one.bins
                assert value["label"] == one.desc
    for outcome in ("fallback", "truncated"):
        assert {(outcome, True), (outcome, False)} <= seen.keys()
    assert {*DropReason} - {DropReason.POLY_UNSUPPORTED} <= seen.keys()
    assert all(seen["fused", codecs[name]] for name in ("gpt2 words", "qwen words", "no words"))
