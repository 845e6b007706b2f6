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


@pytest.mark.parametrize(
    "desc", ["a] }}, {", '": {"object_7": {', "<|coord_5|>", 'größe 猫 🙂\\ "\t\n']
)
def test_desc_is_text_whatever_is_in_it(parse, codec: HFTokenCodec, desc: str) -> None:
    written = json.dumps(desc, ensure_ascii=False)
    value = members(f'"desc": {written}', BOX)
    parsed = parse(f'{{"object_1": {value}, "object_2": {DOG}}}')
    assert [o.desc for o in parsed.objects] == [desc, "dog"]
    assert (parsed.dropped, parsed.max_object_index) == ((), 2)
    positions = parsed.objects[0].coord_positions
    assert [codec.coord_bin(parsed.prefix_token_ids[i]) for i in positions] == [1, 2, 3, 4]
    assert desc_at(codec, parsed) == written[1:-1]


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
    DropReason.MALFORMED: [f"{{{DESC} {BOX}}}", members(DESC, BOX[:-1]), "{{}}"],
    DropReason.KEY_INVALID: [
        members(DESC, '"score": 1', BOX),
        members(DESC, BOX, POLY),
        '{"object_2": {"desc": "nested"}}',
    ],
    DropReason.UNKNOWN_GEOM: [members(DESC, BOX.replace("_2d", ""))],
    DropReason.MISSING_DESC: ["{}", members(BOX), members('"desc": " \\t\\u00a0"', BOX)],
    DropReason.MISSING_GEOM: [members(DESC), members(DESC, '"poly": null')],
    DropReason.NON_COORD_TOKEN: [
        members(DESC, f'"bbox_2d": [{coords(1, 2, 3)}, "4"]'),
        members(DESC, boxed(1000)),
    ],
    DropReason.WRONG_ARITY: [members(DESC, boxed(1, 2, 3)), members(DESC, BOX, BOX)],
    DropReason.BBOX_INVALID: [members(DESC, boxed(4, 2, 3, 4)), members(DESC, boxed(1, 5, 3, 4))],
}
"""A few of each; `test_parsing_json.py` compares thousands with a JSON library, and
`test_parsing_reference.py` with a slow parser."""


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


def test_boxes_are_always_read(codec: HFTokenCodec) -> None:
    with pytest.raises(ValueError, match="bbox_2d"):
        parse_rollout([], codec, geometry=frozenset({GeometryKind.POLY}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "opening",
    ["{", '{"object_1": {"desc": "a", "poly": ["<|coord_1|>", ', '{"object_1": {"desc": "'],
)
def test_time_is_linear_in_the_length(codec: HFTokenCodec, opening: str) -> None:
    def seconds(unit: str, count: int) -> float:
        token_ids = codec.encode(opening) + codec.encode(unit) * count
        best = float("inf")
        for _ in range(3):
            start = time.thread_time()
            parse_rollout(token_ids, codec)
            best = min(best, time.thread_time() - start)
        return best

    for unit in ('{"a": ', '"object_1": ', "\\", '"a": {}, ', f'"object_1": {CAT[:-1]}, '):
        few = 25 if len(unit) > 20 else 250
        # Quadratic time would be a factor of 256; the time is this thread's own, and the machine
        # may be busy.
        assert seconds(unit, 16 * few) < 100 * seconds(unit, few) + 0.02, unit
