from __future__ import annotations

import json
import time

import pytest

from shared.grounding.objects import DropReason, ParsedRollout
from shared.grounding.parsing import parse_rollout
from shared.records import ALL_GEOMETRY, GeometryKind
from shared.tokens.hf_codec import HFTokenCodec

ONLY_BOXES = frozenset({GeometryKind.BBOX})


def coords(*bins: int) -> str:
    return ", ".join(f'"<|coord_{bin}|>"' for bin in bins)


def boxed(*bins: int) -> str:
    return f'"bbox_2d": [{coords(*bins)}]'


def members(*parts: str) -> str:
    return "{" + ", ".join(parts) + "}"


DESC = '"desc": "cat"'
BOX = boxed(1, 2, 3, 4)
CAT = members(DESC, BOX)
DOG = members('"desc": "dog"', boxed(5, 6, 7, 8))
PAIRS = f"[[{coords(1, 2)}], [{coords(3, 4)}], [{coords(5, 6)}]]"
POLY = f'"poly": {PAIRS}'
OUTLINE = members('"desc": "p"', POLY)
POINT = f'"point_2d": [{coords(1, 2)}]'


@pytest.fixture
def parse(codec: HFTokenCodec):
    everything = {"geometry": ALL_GEOMETRY}
    return lambda text, **options: parse_rollout(
        codec.encode(text), codec, **(everything | options)
    )


def keys(parsed: ParsedRollout) -> list[str]:
    return [object_.key for object_ in parsed.objects]


def reasons(parsed: ParsedRollout) -> list[tuple[str, str]]:
    return [(dropped.key, dropped.reason.value) for dropped in parsed.dropped]


def joined(codec: HFTokenCodec, token_ids) -> bytes:
    return b"".join(map(codec.piece_bytes, token_ids))


def value_at(codec: HFTokenCodec, parsed: ParsedRollout, number: int = 0) -> str:
    span = parsed.objects[number].span
    return joined(codec, parsed.prefix_token_ids[slice(*span)]).decode()


def desc_at(codec: HFTokenCodec, parsed: ParsedRollout, number: int = 0) -> str:
    prefix = joined(codec, parsed.prefix_token_ids)
    return prefix[slice(*parsed.objects[number].desc_value)].decode()


def spelled(codec: HFTokenCodec, text: str) -> list[int]:
    """Character by character, so that no special token comes of it."""
    return [token_id for character in text for token_id in codec.encode(character)]


@pytest.mark.slow
def test_objects_come_with_their_tokens(codec: HFTokenCodec) -> None:
    token_ids = codec.encode(f'{{"object_1": {CAT}, "object_2": {DOG}}}')
    parsed = parse_rollout(token_ids, codec)
    assert [(o.key, o.index, o.desc, o.bins, o.kind) for o in parsed.objects] == [
        ("object_1", 1, "cat", (1, 2, 3, 4), GeometryKind.BBOX),
        ("object_2", 2, "dog", (5, 6, 7, 8), GeometryKind.BBOX),
    ]
    for number, object_ in enumerate(parsed.objects):
        positions = object_.coord_positions
        assert [token_ids[i] for i in positions] == [codec.coord_id(bin) for bin in object_.bins]
        assert desc_at(codec, parsed, number) == object_.desc
        assert value_at(codec, parsed, number).strip(" ").startswith("{")
        assert '"object_' not in value_at(codec, parsed, number)
    assert (parsed.dropped, parsed.truncated, parsed.fallback) == ((), False, False)
    assert parsed.max_object_index == 2


def test_the_prefix_ends_behind_the_last_complete_entry_without_the_comma(
    parse, codec: HFTokenCodec
) -> None:
    parsed = parse(f'{{"object_1": {CAT}, "object_2": {DOG}, "object_3": {{"desc": "tr')
    assert parsed.prefix_text == f'{{"object_1": {CAT}, "object_2": {DOG}'
    assert (parsed.dropped, parsed.truncated, parsed.fallback) == ((), True, False)
    assert parsed.max_object_index == 2
    assert joined(codec, parsed.prefix_token_ids).decode() == parsed.prefix_text


@pytest.mark.parametrize(
    ("tokenizer", "value", "rest", "fused", "kept"),
    [
        ("gpt2 words", CAT, "}", '"]}}', '"]}'),
        # A token that goes on with the next entry.
        ("no words", CAT, ', "object_2": {"desc": "tr', '"]}, "', '"]}'),
        # A desc that ends in the token keeps its place in the prefix.
        ("gpt2 words", members(BOX, '"desc": "x."'), "}", '."}}', '."}'),
    ],
)
def test_only_the_fused_token_at_the_cut_is_replaced(
    codecs: dict[str, HFTokenCodec], tokenizer, value, rest, fused, kept
) -> None:
    codec = codecs[tokenizer]
    token_ids = codec.encode(f'{{"object_1": {value}{rest}')
    at = [codec.piece_bytes(token_id) for token_id in token_ids].index(fused.encode())
    parsed = parse_rollout(token_ids, codec)
    assert parsed.num_unchanged == at
    assert parsed.prefix_token_ids == (*token_ids[:at], *codec.encode(kept))
    assert parsed.prefix_text == f'{{"object_1": {value}'
    assert parsed.truncated is (rest != "}")
    assert parsed.objects[0].span[1] == len(parsed.prefix_token_ids)
    assert value_at(codec, parsed).endswith(kept)
    assert desc_at(codec, parsed) == parsed.objects[0].desc


def test_characters_that_are_split_over_tokens_are_read_whole(
    codecs: dict[str, HFTokenCodec],
) -> None:
    desc = "größe 猫 🙂 日本語"
    for codec in codecs.values():
        token_ids = codec.encode(f'{{"object_1": {CAT.replace("cat", desc)}, "object_2": {DOG}}}')
        parsed = parse_rollout(token_ids, codec)
        assert [o.desc for o in parsed.objects] == [desc, "dog"]
        assert parsed.dropped == ()
        assert desc_at(codec, parsed) == desc


def test_a_cut_inside_a_character_moves_to_the_entry_before(codec: HFTokenCodec) -> None:
    class Fused:
        """The same codec with one more token: the last byte of a character, two closing braces."""

        eos_token_id = codec.eos_token_id
        encode = staticmethod(codec.encode)
        coord_bin = staticmethod(codec.coord_bin)
        coord_id = staticmethod(codec.coord_id)
        fused = 99_999

        def piece_bytes(self, token_id: int) -> bytes:
            is_fused = token_id == self.fused
            return "猫".encode()[2:] + b"}}" if is_fused else codec.piece_bytes(token_id)

    byte_ids = {codec.piece_bytes(token_id): token_id for token_id in range(300)}
    first, second, _ = "猫".encode()
    token_ids = codec.encode(f'{{"object_1": {CAT}, "object_2": {{')
    token_ids += [byte_ids[bytes([first])], byte_ids[bytes([second])], Fused.fused]
    parsed = parse_rollout(token_ids, Fused())
    assert parsed.prefix_text == f'{{"object_1": {CAT}'
    assert (keys(parsed), parsed.dropped, parsed.max_object_index) == (["object_1"], (), 1)


@pytest.mark.parametrize(
    ("text", "truncated"),
    [
        ("", True),
        ("   \n", True),
        ("{", True),
        ("{}", False),
        ("{ }", False),
        ('{"object_1": ', True),
        ('{"object_1": {', True),
        (f'{{"object_1": {CAT[:-1]}', True),
        ('{"object_1": 5}', False),
        ('{"note": {"a": 1}}', False),
        (f'Sure! {{"object_1": {CAT}}}', True),
        (f'[{{"object_1": {CAT}}}]', True),
        ("}", True),
        ('"', True),
    ],
)
def test_without_a_complete_entry_in_a_leading_container_the_prefix_is_a_brace(
    parse, codec: HFTokenCodec, text: str, truncated: bool
) -> None:
    parsed = parse(text)
    assert (parsed.fallback, parsed.prefix_text, parsed.truncated) == (True, "{", truncated)
    assert list(parsed.prefix_token_ids) == codec.encode("{")
    assert (parsed.objects, parsed.max_object_index, parsed.num_unchanged) == ((), None, 0)


@pytest.mark.parametrize(
    ("text", "prefix", "truncated"),
    [
        (f'{{"object_1": {CAT}', f'{{"object_1": {CAT}', True),
        (f'{{"object_1": {CAT}}}', f'{{"object_1": {CAT}', False),
        # Leading space is kept.
        (f' \n{{"object_1": {CAT}}}', f' \n{{"object_1": {CAT}', False),
        # What follows the first top-level close is not parsed.
        (f'{{"object_1": {CAT}}} {{"object_2": {DOG}}}', f'{{"object_1": {CAT}', False),
    ],
)
def test_truncated_says_that_the_container_did_not_close(parse, text, prefix, truncated) -> None:
    parsed = parse(text)
    assert (keys(parsed), parsed.prefix_text, parsed.fallback) == (["object_1"], prefix, False)
    assert parsed.truncated is truncated


@pytest.mark.parametrize("as_text", [False, True])
def test_end_of_turn_is_a_hard_stop_as_a_token_and_as_text_inside_desc(
    codec: HFTokenCodec, as_text: bool
) -> None:
    head = codec.encode(f'{{"object_1": {CAT}, "object_2": {{"desc": "a')
    stop = spelled(codec, "<|im_end|>") if as_text else [codec.eos_token_id]
    assert (codec.eos_token_id in stop) is not as_text
    parsed = parse_rollout([*head, *stop, *codec.encode(f'", {boxed(1, 1, 2, 2)}}}}}')], codec)
    assert (keys(parsed), parsed.truncated, parsed.dropped) == (["object_1"], True, ())
    assert parsed.prefix_text == f'{{"object_1": {CAT}'


STRUCTURE = ["{", "}", "}}", "[", "a]", ", ", ": {", '"object_7": {', "<|coord_5|>"]
CHARACTERS = ["back\\slash", 'quo"te', "größe 猫 🙂", "鱼鱼", "tab\t\n", " x ", "a\u2028"]


@pytest.mark.parametrize("desc", STRUCTURE + CHARACTERS)
def test_desc_is_text_whatever_is_in_it(parse, codec: HFTokenCodec, desc: str) -> None:
    written = json.dumps(desc, ensure_ascii=False)
    value = members(f'"desc": {written}', BOX)
    parsed = parse(f'{{"object_1": {value}, "object_2": {DOG}}}')
    assert [o.desc for o in parsed.objects] == [desc, "dog"]
    assert (parsed.dropped, parsed.max_object_index) == ((), 2)
    positions = parsed.objects[0].coord_positions
    assert [codec.coord_bin(parsed.prefix_token_ids[i]) for i in positions] == [1, 2, 3, 4]
    assert desc_at(codec, parsed) == written[1:-1]


def test_escapes_in_desc_are_resolved(parse) -> None:
    value = members('"desc": "\\u732b \\"\\\\ \\ud83d\\ude42 \\ud800"', BOX)
    assert parse(f'{{"object_1": {value}}}').objects[0].desc == '猫 "\\ 🙂 \ufffd'


@pytest.mark.parametrize(
    "value",
    [
        CAT.replace('"<', "<").replace('>"', ">"),
        CAT.replace('"<|coord_2|>"', "<|coord_2|>"),
        CAT.replace(", ", ","),
        CAT.replace("[", "[ \n").replace(":", " :\t"),
        members(BOX, DESC),
    ],
)
def test_coord_tokens_need_no_quotes_and_space_and_order_mean_nothing(parse, value: str) -> None:
    parsed = parse(f'{{"object_1": {value}}}')
    assert [(o.desc, o.bins) for o in parsed.objects] == [("cat", (1, 2, 3, 4))]


@pytest.mark.parametrize(
    "array", [PAIRS, f"[{coords(1, 2, 3, 4, 5, 6)}]", PAIRS.replace('"<', "<").replace('>"', ">")]
)
def test_polygons_are_read_nested_or_flat(parse, array: str) -> None:
    text = f'{{"object_1": {{"desc": "p", "poly": {array}}}}}'
    parsed = parse(text)
    assert [(o.kind, o.bins) for o in parsed.objects] == [(GeometryKind.POLY, (1, 2, 3, 4, 5, 6))]
    boxes_only = parse(text, geometry=ONLY_BOXES)
    assert reasons(boxes_only) == [("object_1", "poly_unsupported")]
    assert boxes_only.objects == ()


def test_a_point_that_is_not_wanted_is_an_unknown_geometry(parse) -> None:
    text = f'{{"object_1": {members(POINT, DESC)}, "object_2": {members(DESC, POINT, BOX)}}}'
    boxes_only = parse(text, geometry=ONLY_BOXES)
    assert reasons(boxes_only) == [("object_1", "unknown_geom"), ("object_2", "unknown_geom")]


DROPS = {
    DropReason.MALFORMED: [
        f"{{{DESC} {BOX}}}",
        f"{{{DESC},, {BOX}}}",
        f"{{, {DESC}, {BOX}}}",
        members('"desc":: "cat"', BOX),
        members(DESC, BOX[:-1]),
        members(DESC, BOX.replace(", ", " ", 1)),
        members(DESC, f'"bbox_2d": [{coords(1, 2, 3)}, <|coord_4|>"]') + '",}',
        members('"desc": "c\nat"', BOX),
        members(DESC, '"bbox_2d": [NaN]'),
        "{{}}",
        members('"desc": "p"', POLY.replace("], [", "] [")),
    ],
    DropReason.KEY_INVALID: [
        members(DESC, '"score": 1', BOX),
        members(DESC, DESC, BOX),
        members(DESC, BOX, POLY),
        members(POINT, DESC, POLY),
        members(DESC, BOX.replace("_2d", ""), '"box": []'),
        '{"desc": {"a": {"b": [1, {}]}}}',
        '{"object_2": {"desc": "nested"}}',
    ],
    DropReason.UNKNOWN_GEOM: [
        members(DESC, BOX.replace("_2d", "")),
        '{"box": [1, [2, [[]]]], "desc": ""}',
        members(DESC, POLY, '"holes": []'),
    ],
    DropReason.MISSING_DESC: [
        "{}",
        members(BOX),
        members('"desc": " \\t\\u00a0"', BOX),
        members('"desc": ["cat"]', BOX),
        '{"desc": "", "bbox_2d": [1]}',
    ],
    DropReason.MISSING_GEOM: [members(DESC), members(DESC, '"poly": null')],
    DropReason.NON_COORD_TOKEN: [
        members(DESC, f'"bbox_2d": [{coords(1, 2, 3)}, "4"]'),
        members(DESC, f'"bbox_2d": ["<|coord_1|><|coord_2|>", {coords(3, 4)}]'),
        members(DESC, boxed(1000)),
        members(DESC, f'"poly": [{PAIRS}]'),
    ],
    DropReason.WRONG_ARITY: [
        members(DESC, boxed(1, 2, 3)),
        members(DESC, BOX, BOX),
        members(DESC, f'"poly": [{coords(1, 2, 3, 4)}]'),
        members(DESC, f'"poly": [[{coords(1, 2)}], [{coords(1, 2)}], {coords(1, 2)}]'),
    ],
    DropReason.BBOX_INVALID: [members(DESC, boxed(4, 2, 3, 4)), members(DESC, boxed(1, 5, 3, 4))],
}
"""A few of each; `test_parsing_json.py` compares thousands with a JSON library."""


@pytest.mark.parametrize(
    ("reason", "value"), [(reason, value) for reason, values in DROPS.items() for value in values]
)
def test_a_bad_object_is_dropped_for_the_first_reason_and_the_next_is_judged_afresh(
    parse, reason: DropReason, value: str
) -> None:
    for next_one in (DOG, OUTLINE):
        parsed = parse(f'{{"object_4": {value}, "object_2": {next_one}}}')
        assert reasons(parsed) == [("object_4", reason.value)]
        assert keys(parsed) == ["object_2"]
        assert parsed.prefix_text == f'{{"object_4": {value}, "object_2": {next_one}'
        assert parsed.max_object_index == 4


FIRST_OF_SEVERAL = {
    DropReason.MALFORMED: '{"desc": "" "x": {}, "bbox": [], "bbox_2d": [1]}',
    DropReason.KEY_INVALID: '{"desc": "", "x": {}, "bbox": [], "bbox_2d": [1]}',
    DropReason.UNKNOWN_GEOM: '{"desc": "", "bbox": [], "bbox_2d": [1]}',
    DropReason.MISSING_DESC: '{"desc": "", "bbox_2d": null}',
    DropReason.MISSING_GEOM: '{"desc": "cat", "bbox_2d": null, "bbox_2d": "<|coord_1|>"}',
    DropReason.NON_COORD_TOKEN: members(DESC, '"bbox_2d": [1]', boxed(9, 2, 3, 4, 5)),
    DropReason.WRONG_ARITY: members(DESC, boxed(9, 2, 3, 4, 5)),
    DropReason.BBOX_INVALID: members(DESC, boxed(9, 2, 3, 4)),
    DropReason.POLY_UNSUPPORTED: OUTLINE,
}


@pytest.mark.parametrize("reason", DropReason)
def test_of_several_faults_the_first_of_the_list_is_the_reason(parse, reason: DropReason) -> None:
    """Each value has its own fault and those that come after it, as far as they can go together."""
    text = f'{{"object_1": {FIRST_OF_SEVERAL[reason]}, "object_2": {DOG}}}'
    parsed = parse(text, geometry=ONLY_BOXES)
    assert (reasons(parsed), keys(parsed)) == ([("object_1", reason.value)], ["object_2"])


@pytest.mark.parametrize(
    ("geometry", "bins"),
    [
        # Corners in any order make a polygon: `bbox_invalid` is for boxes alone.
        (f'"poly": [{coords(9, 9, 5, 1, 0, 4)}]', (9, 9, 5, 1, 0, 4)),
        # A box without extent is a box.
        (boxed(7, 7, 7, 7), (7, 7, 7, 7)),
        (f'"point_2d": [{coords(0, 999)}]', (0, 999)),
    ],
)
def test_odd_shapes_are_shapes(parse, geometry: str, bins: tuple[int, ...]) -> None:
    parsed = parse(f'{{"object_1": {members(DESC, geometry)}}}')
    assert [o.bins for o in parsed.objects] == [bins]


@pytest.mark.parametrize(
    ("aside", "sound"),
    [
        ('"note": 1, ', True),
        ('"note": [1, {"a": ["object_7"]}], "scale": "x", ', True),
        ('"note": <|coord_5|>, ', True),
        ('"note": {}, ', True),
        ('"note": oops, ', True),
        ('"note": , ', True),
        ('"note", ', True),
        ('"note" 1, ', True),
        ('"note": 1 ', False),
        ('"note": [1, ', True),
        ('"note": "\t", ', True),
        ('"note": {"a": 1 2}, ', True),
        ("5, ", True),
        (", ", False),
        ('"note": 1,, ', False),
    ],
)
def test_a_damaged_member_never_costs_the_entry_after_it_but_a_wrong_comma_in_front_of_an_entry_does(
    parse, aside: str, sound: bool
) -> None:
    entries = f'{aside}"object_1": {CAT}, "object_2": {DOG}}}'
    for text in (f"{{{entries}", f'{{"object_0": {DOG}, {entries}'):
        parsed = parse(text)
        assert reasons(parsed) == ([] if sound else [("object_1", "malformed")])
        expected = ["object_1", "object_2"] if sound else ["object_2"]
        assert [key for key in keys(parsed) if key != "object_0"] == expected
        assert parsed.prefix_text == text[:-1]


def test_spans_of_bytes_lead_to_the_value_and_the_desc(parse) -> None:
    value = members('"desc": "größe"', BOX)
    (parsed,) = parse(f' {{"object_1": {value}}}').objects
    text = f' {{"object_1": {value}'.encode()
    assert text[slice(*parsed.value)].decode() == value
    assert text[slice(*parsed.desc_value)].decode() == "größe"


@pytest.mark.parametrize(
    "tail",
    [
        '"object_7": 5}',
        '"object_7": 5',
        '"object_7", "object_8": []}',
        '"object_7": {"desc": "cut',
        '"note": 1}',
    ],
)
def test_only_what_is_kept_counts_as_dropped(parse, tail: str) -> None:
    """An entry whose value is not an object has no brace to cut behind: at the end, it goes with
    the rest.
    """
    parsed = parse(f'{{"object_1": {CAT}, {tail}')
    assert (parsed.dropped, parsed.max_object_index) == ((), 1)
    assert parsed.prefix_text == f'{{"object_1": {CAT}'
    alone = parse(f"{{{tail}")
    assert (alone.dropped, alone.fallback, alone.max_object_index) == ((), True, None)


def test_a_dropped_entry_at_the_end_stays_in_the_prefix(parse) -> None:
    parsed = parse(f'{{"object_1": {CAT}, "object_9": {{"desc": "no box"}}}}')
    assert parsed.prefix_text.endswith('{"desc": "no box"}')
    assert (keys(parsed), parsed.max_object_index) == (["object_1"], 9)


ONE = ["object_1"]
TWO = ["object_2"]


@pytest.mark.parametrize(
    ("text", "dropped", "valid"),
    [
        (f'{{"object_1" {CAT}, "object_2": {DOG}}}', ONE, TWO),
        (f'{{"object_1":: {CAT}, "object_2": {DOG}}}', ONE, TWO),
        (f'{{"object_1": = {CAT}, "object_2": {DOG}}}', ONE, TWO),
        (f'{{, "object_1": {CAT}, "object_2": {DOG}}}', ONE, TWO),
        (f'{{"object_1": {CAT} "object_2": {DOG}}}', TWO, ONE),
        (f'{{"object_1": {CAT},, "object_2": {DOG}}}', TWO, ONE),
        (f'{{"object_1": {CAT}, "object_2": {DOG},}}', [], ONE + TWO),
        # A comma that is missing in front of another member costs no entry.
        (f'{{"object_1": {CAT} "note": 1, "object_2": {DOG}}}', [], ONE + TWO),
        (f'{{"object_1": 5, "object_2": {DOG}}}', ONE, TWO),
        (f'{{"object_1": [{CAT}, {CAT}], "object_2": {DOG}}}', ONE, TWO),
        (f'{{"object_1": [{CAT}, "object_2": {DOG}}}', ONE, TWO),
        (f'{{"object_1": "object_3", "object_2": {DOG}}}', ONE, TWO),
        (f'{{"object_1": "object_2": {DOG}}}', ONE, []),
        (f'{{"object_1", "object_2": {DOG}}}', ONE, TWO),
        (f'{{"object_1": , "object_2": {DOG}}}', ONE, TWO),
    ],
)
def test_punctuation_around_an_entry_is_its_own(parse, text, dropped, valid) -> None:
    parsed = parse(text)
    assert reasons(parsed) == [(key, "malformed") for key in dropped]
    assert keys(parsed) == valid


@pytest.mark.parametrize(
    ("sound", "spelling", "reason"),
    [
        ("", '"<|coord_4|>"', "non_coord_token"),
        ("", "<|coord_4|>", "malformed"),
        # The four beside it are no box.
        ('"<|coord_4|>", ', '"<|coord_5|>"', "non_coord_token"),
    ],
)
def test_coord_tokens_spelled_by_other_tokens_are_not_coord_tokens(
    codec: HFTokenCodec, sound: str, spelling: str, reason: str
) -> None:
    head = codec.encode(f'{{"object_1": {{{DESC}, "bbox_2d": [{coords(1, 2, 3)}, {sound}')
    token_ids = [*head, *spelled(codec, spelling), *codec.encode("]}}")]
    assert reasons(parse_rollout(token_ids, codec)) == [("object_1", reason)]


OTHER_KEYS = ["object_01", "object_", "object_-1", "object_1234567890", "Object_1", "object_1 "]


@pytest.mark.parametrize("key", [*OTHER_KEYS, "object_１", "note"])
def test_other_top_level_keys_are_text(parse, key: str) -> None:
    parsed = parse(f'{{"{key}": {CAT}, "object_0": {DOG}, "{key}": [{CAT}, "object_7"]}}')
    assert (keys(parsed), parsed.dropped, parsed.max_object_index) == (["object_0"], (), 0)
    assert parsed.prefix_text.endswith(DOG)


@pytest.mark.parametrize(
    ("text", "expected", "largest"),
    [
        # The largest key has nine digits, and keys may be escaped.
        (
            f'{{"object_999999999": {CAT}, "object_\\u0031": {DOG}}}',
            [("object_999999999", 999999999, "cat"), ("object_1", 1, "dog")],
            999999999,
        ),
        # Duplicate keys are two objects in order of appearance.
        (
            f'{{"object_10": {CAT}, "object_2": {DOG}, "object_10": {DOG}}}',
            [("object_10", 10, "cat"), ("object_2", 2, "dog"), ("object_10", 10, "dog")],
            10,
        ),
    ],
)
def test_objects_have_the_index_of_their_key(parse, text, expected, largest) -> None:
    parsed = parse(text)
    assert [(o.key, o.index, o.desc) for o in parsed.objects] == expected
    assert parsed.max_object_index == largest


@pytest.mark.parametrize(
    ("text", "largest"),
    [
        (f'{{"object_2": {CAT}, "object_9": {{"desc": 1}}}}', 9),
        (f'{{"object_7": 5, "object_2": {CAT}}}', 7),
        (f'{{"object_1": {CAT}, "object_7": 5}}', 1),
        (f'{{"object_1": {{"object_9": {CAT}}}}}', 9),
        (f'{{"note": {{"object_9": 1}}, "object_2": {CAT}}}', 9),
        (f'{{"object_2": {CAT}, "note": {{"object_9": 1}}}}', 2),
        (f'{{"object_2": {CAT}, "note": "object_9", "object_3": {DOG}}}', 3),
        (f'{{"object_1": {CAT}, "object_7": {{"desc": "cut o', 1),
        (f'{{"object_1": {CAT[:-1]}, "object_2": {DOG}}}', 2),
        (f'{{"object_1": {CAT.replace("cat", "object_8")}, "note": "\\"object_9\\": "}}', 1),
    ],
)
def test_the_largest_index_counts_every_key_of_the_kept_prefix(parse, text, largest) -> None:
    assert parse(text).max_object_index == largest


def test_bytes_that_are_not_text_are_malformed_and_shown_as_replacement(
    codec: HFTokenCodec,
) -> None:
    byte_ids = {codec.piece_bytes(token_id): token_id for token_id in range(300)}
    head = codec.encode('{"object_1": {"desc": "a')
    tail = codec.encode(f'", {BOX}}}, "object_2": {DOG}}}')
    parsed = parse_rollout([*head, byte_ids[b"\xff"], *tail], codec)
    assert (reasons(parsed), keys(parsed)) == ([("object_1", "malformed")], ["object_2"])
    assert "a\ufffd" in parsed.prefix_text


def test_boxes_are_always_read(codec: HFTokenCodec) -> None:
    with pytest.raises(ValueError, match="bbox_2d"):
        parse_rollout([], codec, geometry=frozenset({GeometryKind.POLY}))


PIECES = ['{"a": ', "[", '"object_1": ', "}{", '"', "\\", '"object_1" [', '"a": "b", ', " "]
MEMBERS = ['"object_1": 5, ', '"a": {}, ', f'"object_1": {CAT}, ', f'"object_1": {CAT} [']
PARTS = [f'"object_1": {CAT}', f'"object_1": {CAT[:-1]}, ', f"[{coords(1, 1)}], ", f"{coords(1)}, "]


@pytest.mark.slow
@pytest.mark.parametrize(
    "opening",
    ["{", '{"object_1": {"desc": "a", "poly": ["<|coord_1|>", ', '{"object_1": {"desc": "'],
)
@pytest.mark.parametrize("unit", PIECES + MEMBERS + PARTS)
def test_time_is_linear_in_the_length(codec: HFTokenCodec, opening: str, unit: str) -> None:
    def seconds(count: int) -> float:
        token_ids = codec.encode(opening) + codec.encode(unit) * count
        best = float("inf")
        for _ in range(3):
            start = time.thread_time()
            parse_rollout(token_ids, codec)
            best = min(best, time.thread_time() - start)
        return best

    few = 25 if len(unit) > 20 else 250
    # Quadratic time would be a factor of 256; the time is this thread's own, and the machine may be
    # busy.
    assert seconds(16 * few) < 100 * seconds(few) + 0.02
