from __future__ import annotations

import json

import pytest

from shared.grounding.scanner import unescape
from shared.grounding.validation import Leaf, Value, read_fields

COORD = b"<|coord_5|>"


def coords_in(text: bytes) -> dict[tuple[int, int], int]:
    """As if every spelling of `COORD` were one token; numbered from 0."""
    starts = [i for i in range(len(text)) if text.startswith(COORD, i)]
    return {(start, start + len(COORD)): number for number, start in enumerate(starts)}


def shown(text: bytes, value: Value) -> object:
    """A value as plain lists: leaves as written, coord tokens as their number."""
    if isinstance(value, Leaf):
        return text[value.start : value.end].decode() if value.coord is None else value.coord
    return [shown(text, item) for item in value]


def test_members_come_in_order_with_arrays_as_they_are_nested() -> None:
    text = b'{ "a": ["<|coord_5|>", [<|coord_5|> , 1.5e3], []] ,"desc":"x y", "a": null}'
    members = read_fields(text, coords_in(text))
    assert members is not None
    assert not members.nested
    assert [(key, shown(text, value)) for key, value in members.fields] == [
        ("a", [0, [1, "1.5e3"], []]),
        ("desc", "x y"),
        ("a", "null"),
    ]
    leaf = members.fields[1][1]
    assert isinstance(leaf, Leaf)
    assert leaf.quoted
    assert text[leaf.start : leaf.end] == b"x y"


@pytest.mark.parametrize(
    ("text", "nested"),
    [
        (b'{"a": {}}', True),
        (b'{"a": [{"b": 1}]}', True),
        (b'{"a": {"b": {"c": [1]}}, "d": 2}', True),
        (b"{}", False),
        (b"{ \n}", False),
    ],
)
def test_objects_inside_are_noticed_and_an_object_may_be_empty(text: bytes, nested: bool) -> None:
    members = read_fields(text, {})
    assert members is not None
    assert members.nested is nested
    assert [key for key, _ in members.fields] == list(json.loads(text))


PUNCTUATION = [b'{"a" 1}', b'{"a": 1 "b": 2}', b'{"a": 1,}', b"{,}", b'{"a": }', b"{a: 1}"]
BRACKETS = [b'{"a": [1,]}', b'{"a": [1 2]}', b'{"a": [1}', b'{"a": 1]}', b'{"a": [1}]}']
LITERALS = [b'{"a": 01}', b'{"a": NaN}', b'{"a": tru}', b"{\"a\": 'b'}", b'{"a": <|coord_5|>}']
ENDS = [b'{"a": "\\x"}', b'{"a": "\n"}', b'{"a": 1}}', b'{"a": 1']


@pytest.mark.parametrize("text", PUNCTUATION + BRACKETS + LITERALS + ENDS)
def test_what_is_not_json_is_refused(text: bytes) -> None:
    """The coord token among them is only spelled like one. Python's reader takes NaN, which is not
    JSON.
    """
    with pytest.raises(ValueError):
        json.loads(text.replace(b"NaN", b"_"))
    assert read_fields(text, {}) is None


def test_nothing_may_follow_the_object() -> None:
    assert read_fields(b'{"a": 1} ', {}) is None


@pytest.mark.parametrize("raw", ['a\\"b', "\\u732b", "\\ud83d\\ude42", "\\\\n", "\\n\\t", "猫", ""])
def test_escapes_are_resolved_as_json_does(raw: str) -> None:
    assert unescape(raw.encode()) == json.loads(f'"{raw}"')


@pytest.mark.parametrize(
    ("raw", "text"), [(b"\\ud800x", "\ufffdx"), (b"\xffx", "\ufffdx"), (b"\xff\\n", "\ufffd\n")]
)
def test_what_is_no_character_becomes_a_replacement(raw: bytes, text: str) -> None:
    assert unescape(raw) == text
