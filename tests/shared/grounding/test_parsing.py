from __future__ import annotations

import json
import time

import pytest

from shared.grounding.objects import DropReason, ParsedRollout
from shared.grounding.parsing import parse_rollout
from shared.records import GeometryKind
from shared.tokens.hf_codec import HFTokenCodec


def box(*bins: int, quoted: bool = True) -> str:
    return (
        "["
        + ", ".join(f'"<|coord_{bin}|>"' if quoted else f"<|coord_{bin}|>" for bin in bins)
        + "]"
    )


CAT = '{"desc": "cat", "bbox_2d": ' + box(1, 2, 3, 4) + "}"
DOG = '{"desc": "dog", "bbox_2d": ' + box(5, 6, 7, 8) + "}"
SIX = "[" + ", ".join(f'["<|coord_{k}|>", "<|coord_{k + 1}|>"]' for k in (1, 3, 5)) + "]"


@pytest.fixture
def parse(codec: HFTokenCodec):
    return lambda text, **options: parse_rollout(codec.encode(text), codec, **options)


def reasons(parsed: ParsedRollout) -> list[tuple[str, str]]:
    return [(dropped.key, dropped.reason.value) for dropped in parsed.dropped]


def text_at(codec: HFTokenCodec, parsed: ParsedRollout, positions: range | tuple[int, ...]) -> str:
    return b"".join(codec.piece_bytes(parsed.prefix_token_ids[i]) for i in positions).decode()


def desc_at(codec: HFTokenCodec, parsed: ParsedRollout, number: int = 0) -> str:
    prefix = b"".join(map(codec.piece_bytes, parsed.prefix_token_ids))
    return prefix[slice(*parsed.objects[number].desc_value)].decode()


@pytest.mark.slow
def test_objects_come_with_their_tokens(codec: HFTokenCodec) -> None:
    token_ids = codec.encode(f'{{"object_1": {CAT}, "object_2": {DOG}}}')
    parsed = parse_rollout(token_ids, codec)
    assert [(o.key, o.index, o.desc, o.bins, o.kind) for o in parsed.objects] == [
        ("object_1", 1, "cat", (1, 2, 3, 4), GeometryKind.BBOX),
        ("object_2", 2, "dog", (5, 6, 7, 8), GeometryKind.BBOX),
    ]
    for number, object_ in enumerate(parsed.objects):
        assert [token_ids[i] for i in object_.coord_positions] == [
            codec.coord_id(bin) for bin in object_.bins
        ]
        assert desc_at(codec, parsed, number) == object_.desc
        assert text_at(codec, parsed, range(*object_.span)).strip(" ").startswith(
            "{"
        ) and '"object_' not in text_at(codec, parsed, range(*object_.span))
    assert (
        parsed.dropped == ()
        and not parsed.truncated
        and not parsed.fallback
        and parsed.max_object_index == 2
    )


def test_the_prefix_ends_behind_the_last_complete_entry_without_the_comma(
    parse, codec: HFTokenCodec
) -> None:
    parsed = parse(f'{{"object_1": {CAT}, "object_2": {DOG}, "object_3": {{"desc": "tr')
    assert parsed.prefix_text == f'{{"object_1": {CAT}, "object_2": {DOG}'
    assert (
        parsed.truncated
        and not parsed.fallback
        and parsed.dropped == ()
        and parsed.max_object_index == 2
    )
    assert b"".join(map(codec.piece_bytes, parsed.prefix_token_ids)).decode() == parsed.prefix_text


def test_only_the_fused_token_at_the_cut_is_replaced(codec: HFTokenCodec) -> None:
    token_ids = codec.encode(f'{{"object_1": {CAT}}}')
    assert codec.piece_bytes(token_ids[-1]) == b'"]}}', "the test needs a fused token"
    parsed = parse_rollout(token_ids, codec)
    assert parsed.num_unchanged == len(token_ids) - 1
    assert parsed.prefix_token_ids[: parsed.num_unchanged] == tuple(token_ids[:-1])
    assert parsed.prefix_token_ids[parsed.num_unchanged :] == tuple(codec.encode('"]}'))
    assert parsed.prefix_text == f'{{"object_1": {CAT}'
    assert parsed.objects[0].span[1] == len(parsed.prefix_token_ids)


def test_a_cut_inside_a_token_that_goes_on_with_the_next_entry_replaces_that_token_alone(
    codecs: dict[str, HFTokenCodec],
) -> None:
    codec = codecs["no words"]
    token_ids = codec.encode(f'{{"object_1": {CAT}, "object_2": {{"desc": "tr')
    at = [codec.piece_bytes(token_id) for token_id in token_ids].index(b'"]}, "')
    parsed = parse_rollout(token_ids, codec)
    assert parsed.num_unchanged == at and parsed.prefix_token_ids == (
        *token_ids[:at],
        *codec.encode('"]}'),
    )
    assert parsed.prefix_text == f'{{"object_1": {CAT}' and parsed.truncated


def test_characters_that_are_split_over_tokens_are_read_whole(
    codecs: dict[str, HFTokenCodec],
) -> None:
    desc = "größe 猫 🙂 日本語"
    for codec in codecs.values():
        token_ids = codec.encode(f'{{"object_1": {CAT.replace("cat", desc)}, "object_2": {DOG}}}')
        parsed = parse_rollout(token_ids, codec)
        assert [o.desc for o in parsed.objects] == [desc, "dog"] and parsed.dropped == ()
        assert desc_at(codec, parsed) == desc


def test_a_desc_that_ends_in_the_fused_token_keeps_its_place_in_the_prefix(
    codec: HFTokenCodec,
) -> None:
    text = '{"object_1": {"bbox_2d": ' + box(1, 2, 3, 4) + ', "desc": "x."}}'
    token_ids = codec.encode(text)
    assert codec.piece_bytes(token_ids[-1]) == b'."}}', "the test needs a fused token"
    parsed = parse_rollout(token_ids, codec)
    assert desc_at(codec, parsed) == "x."
    assert text_at(codec, parsed, range(*parsed.objects[0].span)).endswith('"x."}')
    assert parsed.objects[0].span[1] == len(parsed.prefix_token_ids)


def test_a_cut_inside_a_character_moves_to_the_entry_before(codec: HFTokenCodec) -> None:
    class Fused:
        """The same codec with one more token: the last byte of a character, two closing braces."""

        eos_token_id = codec.eos_token_id
        encode = staticmethod(codec.encode)
        coord_bin = staticmethod(codec.coord_bin)
        coord_id = staticmethod(codec.coord_id)
        fused = 99_999

        def piece_bytes(self, token_id: int) -> bytes:
            return (
                "猫".encode()[2:] + b"}}" if token_id == self.fused else codec.piece_bytes(token_id)
            )

    byte_ids = {codec.piece_bytes(token_id): token_id for token_id in range(300)}
    token_ids = codec.encode(f'{{"object_1": {CAT}')
    token_ids += (
        codec.encode(', "object_2": {')
        + [byte_ids["猫".encode()[i : i + 1]] for i in range(2)]
        + [Fused.fused]
    )
    parsed = parse_rollout(token_ids, Fused())
    assert (
        parsed.prefix_text == f'{{"object_1": {CAT}'
        and len(parsed.objects) == 1
        and parsed.dropped == ()
        and parsed.max_object_index == 1
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   \n",
        "{",
        "{}",
        "{ }",
        '{"object_1": ',
        '{"object_1": 5}',
        '{"note": {"a": 1}}',
        f'Sure! {{"object_1": {CAT}}}',
        f'[{{"object_1": {CAT}}}]',
        "}",
        '"',
    ],
)
def test_without_a_complete_entry_in_a_leading_container_the_prefix_is_a_brace(
    parse, codec: HFTokenCodec, text: str
) -> None:
    parsed = parse(text)
    assert (
        parsed.fallback
        and parsed.prefix_text == "{"
        and list(parsed.prefix_token_ids) == codec.encode("{")
    )
    assert parsed.objects == () and parsed.max_object_index is None and parsed.num_unchanged == 0


@pytest.mark.parametrize(
    ("text", "truncated"),
    [
        ("", True),
        ("{", True),
        ("{}", False),
        ('{"object_1": {', True),
        ("prose", True),
        ("[{}]", True),
        (" ", True),
        (f'{{"object_1": {CAT}', True),
    ],
)
def test_truncated_says_that_the_container_did_not_close(parse, text: str, truncated: bool) -> None:
    assert parse(text).truncated is truncated


def test_leading_space_is_kept(parse) -> None:
    parsed = parse(f' \n{{"object_1": {CAT}}}')
    assert parsed.prefix_text == f' \n{{"object_1": {CAT}' and not parsed.fallback


def test_what_follows_the_first_top_level_close_is_not_parsed(parse) -> None:
    parsed = parse(f'{{"object_1": {CAT}}} {{"object_2": {DOG}}}')
    assert (
        [o.key for o in parsed.objects] == ["object_1"]
        and parsed.prefix_text == f'{{"object_1": {CAT}'
        and not parsed.truncated
    )


def test_end_of_turn_as_a_token_is_a_hard_stop(codec: HFTokenCodec) -> None:
    token_ids = [
        *codec.encode(f'{{"object_1": {CAT}, "object_2": {{"desc": "a'),
        codec.eos_token_id,
        *codec.encode(f'", "bbox_2d": {box(1, 1, 2, 2)}}}}}'),
    ]
    parsed = parse_rollout(token_ids, codec)
    assert (
        [o.key for o in parsed.objects] == ["object_1"]
        and parsed.truncated
        and parsed.dropped == ()
    )


def test_end_of_turn_as_text_is_a_hard_stop_even_inside_desc(codec: HFTokenCodec) -> None:
    def spelled(text: str) -> list[int]:
        return [token_id for character in text for token_id in codec.encode(character)]

    token_ids = [
        *codec.encode(f'{{"object_1": {CAT}, "object_2": {{"desc": "a'),
        *spelled("<|im_end|>"),
        *codec.encode(f'", "bbox_2d": {box(1, 1, 2, 2)}}}}}'),
    ]
    assert codec.eos_token_id not in token_ids
    parsed = parse_rollout(token_ids, codec)
    assert (
        [o.key for o in parsed.objects] == ["object_1"]
        and parsed.truncated
        and parsed.prefix_text == f'{{"object_1": {CAT}'
    )


@pytest.mark.parametrize(
    "desc",
    [
        "{",
        "}",
        "}}",
        "[",
        "a]",
        ", ",
        ": {",
        '"object_7": {',
        "<|coord_5|>",
        "back\\slash",
        'quo"te',
        "größe 猫 🙂",
        "鱼鱼",
        "tab\t\n",
        " x ",
        "a\u2028",
    ],
)
def test_desc_is_text_whatever_is_in_it(parse, codec: HFTokenCodec, desc: str) -> None:
    parsed = parse(
        f'{{"object_1": {{"desc": {json.dumps(desc, ensure_ascii=False)}, "bbox_2d":'
        f' {box(1, 2, 3, 4)}}}, "object_2": {DOG}}}'
    )
    assert (
        [o.desc for o in parsed.objects] == [desc, "dog"]
        and parsed.dropped == ()
        and parsed.max_object_index == 2
    )
    assert [
        codec.coord_bin(parsed.prefix_token_ids[i]) for i in parsed.objects[0].coord_positions
    ] == [1, 2, 3, 4]
    assert desc_at(codec, parsed) == json.dumps(desc, ensure_ascii=False)[1:-1]


def test_escapes_in_desc_are_resolved(parse) -> None:
    parsed = parse(
        '{"object_1": {"desc": "\\u732b \\"\\\\ \\ud83d\\ude42 \\ud800", "bbox_2d":'
        f" {box(1, 2, 3, 4)}}}}}"
    )
    assert parsed.objects[0].desc == '猫 "\\ 🙂 \ufffd'


@pytest.mark.parametrize(
    "value",
    [
        CAT.replace('"<', "<").replace('>"', ">"),
        CAT.replace('"<|coord_2|>"', "<|coord_2|>"),
        CAT.replace(", ", ","),
        CAT.replace("[", "[ \n").replace(":", " :\t"),
    ],
)
def test_coord_tokens_need_no_quotes_and_space_means_nothing(parse, value: str) -> None:
    parsed = parse(f'{{"object_1": {value}}}')
    assert [o.bins for o in parsed.objects] == [(1, 2, 3, 4)]


def test_field_order_means_nothing(parse) -> None:
    parsed = parse(f'{{"object_1": {{"bbox_2d": {box(1, 2, 3, 4)}, "desc": "cat"}}}}')
    assert [(o.desc, o.bins) for o in parsed.objects] == [("cat", (1, 2, 3, 4))]


@pytest.mark.parametrize(
    "array",
    [
        SIX,
        SIX.replace("[[", "[").replace("]]", "]").replace("], [", ", "),
        SIX.replace('"<', "<").replace('>"', ">"),
    ],
)
def test_polygons_are_read_nested_or_flat(parse, array: str) -> None:
    parsed = parse(f'{{"object_1": {{"desc": "p", "poly": {array}}}}}')
    assert [(o.kind, o.bins) for o in parsed.objects] == [(GeometryKind.POLY, (1, 2, 3, 4, 5, 6))]
    boxes_only = parse(
        f'{{"object_1": {{"desc": "p", "poly": {array}}}}}', geometry=frozenset({GeometryKind.BBOX})
    )
    assert reasons(boxes_only) == [("object_1", "poly_unsupported")] and boxes_only.objects == ()


MALFORMED = [
    '{"desc": "cat" "bbox_2d": ' + box(1, 2, 3, 4) + "}",
    '{"desc": "cat",, "bbox_2d": ' + box(1, 2, 3, 4) + "}",
    '{"desc": "cat", "bbox_2d": ' + box(1, 2, 3, 4) + ",}",
    '{, "desc": "cat", "bbox_2d": ' + box(1, 2, 3, 4) + "}",
    '{"desc" "cat", "bbox_2d": ' + box(1, 2, 3, 4) + "}",
    '{"desc":: "cat", "bbox_2d": ' + box(1, 2, 3, 4) + "}",
    '{desc: "cat", "bbox_2d": ' + box(1, 2, 3, 4) + "}",
    '{"desc": cat, "bbox_2d": ' + box(1, 2, 3, 4) + "}",
    '{"desc": "cat", "bbox_2d": ' + box(1, 2, 3, 4)[:-1] + "}",
    '{"desc": "cat", "bbox_2d": ' + box(1, 2, 3, 4) + "]}",
    '{"desc": "cat", "bbox_2d": ' + box(1, 2, 3, 4)[1:] + "}",
    '{"desc": "cat", "bbox_2d": ' + box(1, 2, 3, 4).replace(", ", " ", 1) + "}",
    '{"desc": "cat", "bbox_2d": ' + box(1, 2, 3, 4).replace(", ", ", , ", 1) + "}",
    '{"desc": "cat", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", <|coord_4|>"]}",}',
    '{"desc": "c\nat", "bbox_2d": ' + box(1, 2, 3, 4) + "}",
    '{"desc": "c\\qat", "bbox_2d": ' + box(1, 2, 3, 4) + "}",
    '{"desc": "cat", "bbox_2d": [01, 2, 3, 4]}',
    '{"desc": "cat", "bbox_2d": [NaN]}',
    '{"desc": "cat", "bbox_2d": [+1]}',
    '{"desc": "cat", "bbox_2d": [1.]}',
    "{'desc': 'cat'}",
    '{"desc"}',
    '{"a": {"b": }}',
    '{"a": {"b" 1}}',
    '{"desc": "", }',
    "{1}",
    "{{}}",
]

DROPS = {
    DropReason.MALFORMED: MALFORMED,
    DropReason.KEY_INVALID: [
        '{"desc": "cat", "score": 1, "bbox_2d": ' + box(1, 2, 3, 4) + "}",
        '{"desc": "cat", "desc": "cat", "bbox_2d": ' + box(1, 2, 3, 4) + "}",
        '{"desc": "cat", "bbox_2d": ' + box(1, 2, 3, 4) + ', "poly": ' + SIX + "}",
        '{"desc": "cat", "bbox": ' + box(1, 2, 3, 4) + ', "box": []}',
        '{"desc": "cat", "bbox": ' + box(1, 2, 3, 4) + ', "bbox": ' + box(1, 2, 3, 4) + "}",
        '{"desc": {}, "bbox_2d": ' + box(1, 2, 3, 4) + "}",
        '{"desc": {"a": {"b": [1, {}]}}}',
        '{"bbox_2d": [{"x": "<|coord_1|>"}], "desc": "cat"}',
        '{"box": [{}]}',
        '{"object_2": {"desc": "nested"}}',
        '{"": 0}',
        '{"a": {"b": 1}, "c": [[], [1, 2.5e+3, -0, true, null]]}',
    ],
    DropReason.UNKNOWN_GEOM: [
        '{"desc": "cat", "bbox": ' + box(1, 2, 3, 4) + "}",
        '{"bbox_3d": []}',
        '{"box": [1, [2, [[]]]], "desc": ""}',
    ],
    DropReason.MISSING_DESC: [
        "{}",
        "{ }",
        '{"bbox_2d": ' + box(1, 2, 3, 4) + "}",
        '{"desc": "", "bbox_2d": ' + box(1, 2, 3, 4) + "}",
        '{"desc": " \\t\\u00a0", "bbox_2d": ' + box(1, 2, 3, 4) + "}",
        '{"desc": null, "bbox_2d": ' + box(1, 2, 3, 4) + "}",
        '{"desc": ["cat"], "bbox_2d": ' + box(1, 2, 3, 4) + "}",
        '{"desc": <|coord_3|>, "bbox_2d": ' + box(1, 2, 3, 4) + "}",
        '{"desc": "", "bbox_2d": [1]}',
    ],
    DropReason.MISSING_GEOM: [
        '{"desc": "cat"}',
        '{"desc": "cat", "bbox_2d": "<|coord_1|>"}',
        '{"desc": "cat", "poly": null}',
    ],
    DropReason.NON_COORD_TOKEN: [
        '{"desc": "cat", "bbox_2d": [1, 2, 3, 4]}',
        '{"desc": "cat", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "4"]}',
        '{"desc": "cat", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|> "]}',
        '{"desc": "cat", "bbox_2d": ["<|coord_1|><|coord_2|>", "<|coord_3|>", "<|coord_4|>"]}',
        (
            '{"desc": "cat", "bbox_2d": [["<|coord_1|>", "<|coord_2|>"], ["<|coord_3|>",'
            ' "<|coord_4|>"]]}'
        ),
        '{"desc": "cat", "bbox_2d": ["<|coord_1|>", null]}',
        '{"desc": "cat", "bbox_2d": ["<|coord_1000|>"]}',
        '{"desc": "cat", "poly": [' + SIX + "]}",
        '{"desc": "cat", "bbox_2d": ' + box(1, 2, 3, 4) + ', "bbox_2d": [1]}',
    ],
    DropReason.WRONG_ARITY: [
        '{"desc": "cat", "bbox_2d": []}',
        '{"desc": "cat", "bbox_2d": ' + box(1, 2, 3) + "}",
        '{"desc": "cat", "bbox_2d": ' + box(9, 2, 3, 4, 5) + "}",
        '{"desc": "cat", "bbox_2d": ' + box(1, 2, 3, 4) + ', "bbox_2d": ' + box(1, 2, 3, 4) + "}",
        '{"desc": "cat", "poly": []}',
        '{"desc": "cat", "poly": [[]]}',
        '{"desc": "cat", "poly": ' + box(1, 2, 3, 4) + "}",
        '{"desc": "cat", "poly": ' + box(1, 2, 3, 4, 5, 6, 7) + "}",
        (
            '{"desc": "cat", "poly": [["<|coord_1|>", "<|coord_2|>", "<|coord_3|>"],'
            ' ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>"]]}'
        ),
        (
            '{"desc": "cat", "poly": [["<|coord_1|>", "<|coord_2|>"], ["<|coord_1|>",'
            ' "<|coord_2|>"], "<|coord_1|>", "<|coord_2|>"]}'
        ),
    ],
    DropReason.BBOX_INVALID: [
        '{"desc": "cat", "bbox_2d": ' + box(4, 2, 3, 4) + "}",
        '{"desc": "cat", "bbox_2d": ' + box(1, 5, 3, 4) + "}",
    ],
}


@pytest.mark.parametrize(
    ("reason", "value"), [(reason, value) for reason, values in DROPS.items() for value in values]
)
def test_a_bad_object_is_dropped_for_the_first_reason_and_the_next_is_judged_afresh(
    parse, reason: DropReason, value: str
) -> None:
    parsed = parse(f'{{"object_4": {value}, "object_2": {DOG}}}')
    assert reasons(parsed) == [("object_4", reason.value)]
    assert [(o.key, o.desc) for o in parsed.objects] == [("object_2", "dog")]
    assert (
        parsed.prefix_text == f'{{"object_4": {value}, "object_2": {DOG}'
        and parsed.max_object_index == 4
    )


FIRST_OF_SEVERAL = {
    DropReason.MALFORMED: '{"desc": "" "x": {}, "bbox": [], "bbox_2d": [1]}',
    DropReason.KEY_INVALID: '{"desc": "", "x": {}, "bbox": [], "bbox_2d": [1]}',
    DropReason.UNKNOWN_GEOM: '{"desc": "", "bbox": [], "bbox_2d": [1]}',
    DropReason.MISSING_DESC: '{"desc": "", "bbox_2d": null}',
    DropReason.MISSING_GEOM: '{"desc": "cat", "bbox_2d": null, "bbox_2d": "<|coord_1|>"}',
    DropReason.NON_COORD_TOKEN: (
        '{"desc": "cat", "bbox_2d": [1], "bbox_2d": ' + box(9, 2, 3, 4, 5) + "}"
    ),
    DropReason.WRONG_ARITY: '{"desc": "cat", "bbox_2d": ' + box(9, 2, 3, 4, 5) + "}",
    DropReason.BBOX_INVALID: '{"desc": "cat", "bbox_2d": ' + box(9, 2, 3, 4) + "}",
    DropReason.POLY_UNSUPPORTED: '{"desc": "cat", "poly": ' + SIX + "}",
}


@pytest.mark.parametrize("reason", DropReason)
def test_of_several_faults_the_first_of_the_list_is_the_reason(parse, reason: DropReason) -> None:
    """Each value has its own fault and those that come after it, as far as they can go together."""
    parsed = parse(
        f'{{"object_1": {FIRST_OF_SEVERAL[reason]}, "object_2": {DOG}}}',
        geometry=frozenset({GeometryKind.BBOX}),
    )
    assert reasons(parsed) == [("object_1", reason.value)] and [o.key for o in parsed.objects] == [
        "object_2"
    ]


POLYGON_DROPS = {
    DropReason.MALFORMED: [
        '{"desc": "p", "poly": ' + SIX[:-1] + "}",
        '{"desc": "p" "poly": ' + SIX + "}",
        '{"desc": "p", "poly": ' + SIX.replace("], [", "] [") + "}",
    ],
    DropReason.KEY_INVALID: [
        '{"desc": "p", "poly": ' + SIX + ', "score": 1}',
        '{"poly": ' + SIX + ', "desc": "p", "bbox_2d": []}',
    ],
    DropReason.UNKNOWN_GEOM: [
        '{"desc": "p", "polygon": ' + SIX + "}",
        '{"desc": "p", "poly": ' + SIX + ', "holes": []}',
    ],
    DropReason.MISSING_DESC: [
        '{"poly": ' + SIX + "}",
        '{"desc": "", "poly": ' + SIX + "}",
        '{"poly": ' + SIX + ', "desc": " \\n"}',
    ],
    DropReason.MISSING_GEOM: ['{"desc": "p"}', '{"desc": "p", "poly": "<|coord_1|>"}'],
    DropReason.NON_COORD_TOKEN: [
        '{"desc": "p", "poly": ' + SIX.replace('"<|coord_3|>"', "3") + "}",
        '{"desc": "p", "poly": [' + SIX + "]}",
    ],
    DropReason.WRONG_ARITY: [
        '{"desc": "p", "poly": ' + box(1, 2, 3, 4) + "}",
        '{"desc": "p", "poly": ' + box(*range(7)) + "}",
    ],
}


@pytest.mark.parametrize(
    ("reason", "value"),
    [(reason, value) for reason, values in POLYGON_DROPS.items() for value in values],
)
def test_a_bad_polygon_is_dropped_for_its_reason(parse, reason: DropReason, value: str) -> None:
    parsed = parse(f'{{"object_1": {value}, "object_2": {{"desc": "p", "poly": {SIX}}}}}')
    assert reasons(parsed) == [("object_1", reason.value)] and [o.key for o in parsed.objects] == [
        "object_2"
    ]


def test_corners_in_any_order_make_a_polygon(parse) -> None:
    """`bbox_invalid` is for boxes alone."""
    parsed = parse(f'{{"object_1": {{"desc": "p", "poly": {box(9, 9, 5, 1, 0, 4)}}}}}')
    assert parsed.dropped == () and parsed.objects[0].bins == (9, 9, 5, 1, 0, 4)


def test_a_box_without_extent_is_a_box(parse) -> None:
    assert parse(f'{{"object_1": {{"desc": "p", "bbox_2d": {box(7, 7, 7, 7)}}}}}').objects[
        0
    ].bins == (7, 7, 7, 7)


ASIDES = [
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
]


@pytest.mark.parametrize(("aside", "sound"), ASIDES)
def test_a_damaged_member_never_costs_the_entry_after_it_but_a_wrong_comma_in_front_of_an_entry_does(
    parse, aside: str, sound: bool
) -> None:
    for text in (
        f'{{{aside}"object_1": {CAT}, "object_2": {DOG}}}',
        f'{{"object_0": {DOG}, {aside}"object_1": {CAT}, "object_2": {DOG}}}',
    ):
        parsed = parse(text)
        assert reasons(parsed) == ([] if sound else [("object_1", "malformed")])
        assert [o.key for o in parsed.objects if o.index] == (
            ["object_1", "object_2"] if sound else ["object_2"]
        )
        assert parsed.prefix_text == text[:-1]


def test_a_comma_that_is_missing_in_front_of_another_member_costs_no_entry(parse) -> None:
    parsed = parse(f'{{"object_1": {CAT} "note": 1, "object_2": {DOG}}}')
    assert parsed.dropped == () and [o.key for o in parsed.objects] == ["object_1", "object_2"]


def test_spans_of_bytes_lead_to_the_value_and_the_desc(parse) -> None:
    (parsed,) = parse(f' {{"object_1": {{"desc": "größe", "bbox_2d": {box(1, 2, 3, 4)}}}}}').objects
    text = f' {{"object_1": {{"desc": "größe", "bbox_2d": {box(1, 2, 3, 4)}}}'.encode()
    assert text[slice(*parsed.value)].startswith(b'{"desc"') and parsed.value[1] == len(text)
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
    assert (
        parsed.dropped == ()
        and parsed.prefix_text == f'{{"object_1": {CAT}'
        and parsed.max_object_index == 1
    )
    alone = parse(f"{{{tail}")
    assert alone.dropped == () and alone.fallback and alone.max_object_index is None


def test_a_dropped_entry_at_the_end_stays_in_the_prefix(parse) -> None:
    parsed = parse(f'{{"object_1": {CAT}, "object_9": {{"desc": "no box"}}}}')
    assert (
        parsed.prefix_text.endswith('{"desc": "no box"}')
        and parsed.max_object_index == 9
        and len(parsed.objects) == 1
    )


@pytest.mark.parametrize(
    ("text", "dropped", "valid"),
    [
        (f'{{"object_1" {CAT}, "object_2": {DOG}}}', ["object_1"], ["object_2"]),
        (f'{{"object_1":: {CAT}, "object_2": {DOG}}}', ["object_1"], ["object_2"]),
        (f'{{"object_1": = {CAT}, "object_2": {DOG}}}', ["object_1"], ["object_2"]),
        (f'{{, "object_1": {CAT}, "object_2": {DOG}}}', ["object_1"], ["object_2"]),
        (f'{{"object_1": {CAT} "object_2": {DOG}}}', ["object_2"], ["object_1"]),
        (f'{{"object_1": {CAT},, "object_2": {DOG}}}', ["object_2"], ["object_1"]),
        (f'{{"object_1": {CAT}, "object_2": {DOG},}}', [], ["object_1", "object_2"]),
        (f'{{"object_1": 5, "object_2": {DOG}}}', ["object_1"], ["object_2"]),
        (f'{{"object_1": [{CAT}, {CAT}], "object_2": {DOG}}}', ["object_1"], ["object_2"]),
        (f'{{"object_1": [{CAT}, "object_2": {DOG}}}', ["object_1"], ["object_2"]),
        (f'{{"object_1": "object_3", "object_2": {DOG}}}', ["object_1"], ["object_2"]),
        (f'{{"object_1": "object_2": {DOG}}}', ["object_1"], []),
        (f'{{"object_1", "object_2": {DOG}}}', ["object_1"], ["object_2"]),
        (f'{{"object_1": , "object_2": {DOG}}}', ["object_1"], ["object_2"]),
    ],
)
def test_punctuation_around_an_entry_is_its_own(
    parse, text: str, dropped: list[str], valid: list[str]
) -> None:
    parsed = parse(text)
    assert reasons(parsed) == [(key, "malformed") for key in dropped]
    assert [o.key for o in parsed.objects] == valid


def test_coord_tokens_spelled_by_other_tokens_are_not_coord_tokens(codec: HFTokenCodec) -> None:
    def spelled(text: str) -> list[int]:
        return [token_id for character in text for token_id in codec.encode(character)]

    head, tail = (
        codec.encode(
            '{"object_1": {"desc": "cat", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", '
        ),
        codec.encode("]}}"),
    )
    quoted = parse_rollout([*head, *spelled('"<|coord_4|>"'), *tail], codec)
    bare = parse_rollout([*head, *spelled("<|coord_4|>"), *tail], codec)
    assert reasons(quoted) == [("object_1", "non_coord_token")] and reasons(bare) == [
        ("object_1", "malformed")
    ]
    four_and_one = parse_rollout(
        [*head, *codec.encode('"<|coord_4|>", '), *spelled('"<|coord_5|>"'), *tail], codec
    )
    assert reasons(four_and_one) == [("object_1", "non_coord_token")], (
        "the four beside it are no box"
    )


@pytest.mark.parametrize(
    "key",
    [
        "object_01",
        "object_",
        "object_-1",
        "object_1234567890",
        "Object_1",
        "object_1 ",
        "object_１",
        "note",
    ],
)
def test_other_top_level_keys_are_text(parse, key: str) -> None:
    parsed = parse(f'{{"{key}": {CAT}, "object_0": {DOG}, "{key}": [{CAT}, "object_7"]}}')
    assert (
        [o.key for o in parsed.objects] == ["object_0"]
        and parsed.dropped == ()
        and parsed.max_object_index == 0
    )
    assert parsed.prefix_text.endswith(DOG)


def test_the_largest_key_has_nine_digits_and_keys_may_be_escaped(parse) -> None:
    parsed = parse(f'{{"object_999999999": {CAT}, "object_\\u0031": {DOG}}}')
    assert [(o.key, o.index) for o in parsed.objects] == [
        ("object_999999999", 999999999),
        ("object_1", 1),
    ]


def test_duplicate_keys_are_two_objects_in_order_of_appearance(parse) -> None:
    parsed = parse(f'{{"object_10": {CAT}, "object_2": {DOG}, "object_10": {DOG}}}')
    assert [(o.key, o.desc) for o in parsed.objects] == [
        ("object_10", "cat"),
        ("object_2", "dog"),
        ("object_10", "dog"),
    ]
    assert parsed.max_object_index == 10


def test_the_largest_index_counts_every_key_of_the_kept_prefix(parse) -> None:
    assert parse(f'{{"object_2": {CAT}, "object_9": {{"desc": 1}}}}').max_object_index == 9
    assert parse(f'{{"object_7": 5, "object_2": {CAT}}}').max_object_index == 7
    assert parse(f'{{"object_1": {CAT}, "object_7": 5}}').max_object_index == 1
    assert parse(f'{{"object_1": {{"object_9": {CAT}}}}}').max_object_index == 9
    assert parse(f'{{"note": {{"object_9": 1}}, "object_2": {CAT}}}').max_object_index == 9
    assert parse(f'{{"object_2": {CAT}, "note": {{"object_9": 1}}}}').max_object_index == 2
    assert (
        parse(f'{{"object_2": {CAT}, "note": "object_9", "object_3": {DOG}}}').max_object_index == 3
    )
    assert parse(f'{{"object_1": {CAT}, "object_7": {{"desc": "cut o').max_object_index == 1
    assert parse(f'{{"object_1": {CAT[:-1]}, "object_2": {DOG}}}').max_object_index == 2
    assert (
        parse(
            f'{{"object_1": {CAT.replace("cat", "object_8")}, "note": "\\"object_9\\": "}}'
        ).max_object_index
        == 1
    )


def test_bytes_that_are_not_text_are_malformed_and_shown_as_replacement(
    codec: HFTokenCodec,
) -> None:
    byte_ids = {codec.piece_bytes(token_id): token_id for token_id in range(300)}
    head, tail = (
        codec.encode('{"object_1": {"desc": "a'),
        codec.encode(f'", "bbox_2d": {box(1, 2, 3, 4)}}}, "object_2": {DOG}}}'),
    )
    parsed = parse_rollout([*head, byte_ids[b"\xff"], *tail], codec)
    assert reasons(parsed) == [("object_1", "malformed")] and [o.key for o in parsed.objects] == [
        "object_2"
    ]
    assert "a\ufffd" in parsed.prefix_text


def test_boxes_are_always_read(codec: HFTokenCodec) -> None:
    with pytest.raises(ValueError, match="bbox_2d"):
        parse_rollout([], codec, geometry=frozenset({GeometryKind.POLY}))


def test_parsing_twice_gives_the_same(codec: HFTokenCodec) -> None:
    token_ids = codec.encode(
        f'{{"object_1": {CAT}, "object_2": {MALFORMED[0]}, "object_3": {DOG}}}'
    )
    assert parse_rollout(token_ids, codec) == parse_rollout(token_ids, codec)


REPEATED = [
    *(
        '{"a": ',
        "[",
        '"object_1": ',
        "}{",
        '"',
        "\\",
        '"object_1" [',
        '"a": "b", ',
        '"object_1": 5, ',
        '"a": {}, ',
        " ",
    ),
    *(
        f'"object_1": {CAT}, ',
        f'"object_1": {CAT} [',
        f'"object_1": {CAT}',
        f'"object_1": {CAT[:-1]}, ',
        '["<|coord_1|>", "<|coord_1|>"], ',
        '"<|coord_1|>", ',
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "opening",
    ["{", '{"object_1": {"desc": "a", "poly": ["<|coord_1|>", ', '{"object_1": {"desc": "'],
)
@pytest.mark.parametrize("unit", REPEATED)
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
