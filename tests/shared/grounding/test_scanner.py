from __future__ import annotations

import pytest

from shared.grounding.scanner import Entry, is_open_container, object_indices, scan_container

BOX = b'["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"]'
CAT = b'{"desc": "cat", "bbox_2d": ' + BOX + b"}"


def entries(text: bytes) -> tuple[Entry, ...]:
    container = scan_container(text)
    assert container is not None
    return container.entries


def values(text: bytes) -> list[tuple[str, bytes | None, bool]]:
    return [
        (entry.key, None if entry.value is None else text[slice(*entry.value)], entry.separated)
        for entry in entries(text)
    ]


@pytest.mark.parametrize(
    "text", [b"", b" \n", b"[{}]", b"Sure: {}", b"}", b'"{"', b"\xff{", b"\x0b{}"]
)
def test_the_container_opens_with_the_first_character_that_is_no_space(text: bytes) -> None:
    assert scan_container(text) is None


@pytest.mark.parametrize(
    ("text", "closed"),
    [
        (b"{", False),
        (b" \t\r\n{}", True),
        (b'{"a": "}', False),
        (b'{"a": "}"}', True),
        (b'{"a": {}', False),
        (b"{} {", True),
    ],
)
def test_it_is_closed_by_the_first_brace_at_the_top_level_outside_strings(
    text: bytes, closed: bool
) -> None:
    container = scan_container(text)
    assert container is not None
    assert (container.closed, container.entries) == (closed, ())


@pytest.mark.parametrize(
    "value",
    [CAT, b"{}", b'{"a": {"b": "}"}}', b'{"\\"}": [{}]}', b"{x}", b'{"desc": "\xff{"}', b"{]}"],
)
def test_an_entry_ends_with_the_brace_that_closes_its_value(value: bytes) -> None:
    for key in (b'"object_3"', b'"\\u006fbject_3"'):
        text = b"{" + key + b": " + value + b', "object_4": ' + CAT + b', "object_5": {"cut": "'
        assert values(text) == [("object_3", value, True), ("object_4", CAT, True)]


def test_offsets_lead_to_the_key_and_to_what_a_plain_entry_has() -> None:
    text = b' {"object_3": {"poly": [ <|coord_1|>], "desc": "a\\n"} , "object_4" :' + CAT + b"}"
    expected = [
        (b'"object_3"', "poly", b"a\\n", b"[ <|coord_1|>]"),
        (b'"object_4"', "bbox_2d", b"cat", BOX),
    ]
    for entry, (key, kind, desc, array) in zip(entries(text), expected, strict=True):
        assert text[entry.start :].startswith(key)
        assert entry.plain is not None
        assert entry.plain.kind == kind
        assert text[slice(*entry.plain.desc)] == desc
        assert text[slice(*entry.plain.array)] == array


@pytest.mark.parametrize(
    "members",
    [
        b'"bbox_2d": ' + BOX,
        b'"desc": "cat"',
        b'"desc": "cat", "bbox_2d": ' + BOX + b', "desc": "cat"',
        b'"desc": "cat", "bbox_2d": ' + BOX + b', "poly": ' + BOX,
        b'"desc": "cat", "bbox_2d": ' + BOX + b', "x": 1',
        b'"desc": "cat", "bbox_2d": ' + BOX + b",",
        b'"desc": "cat" "bbox_2d": ' + BOX,
        b'"desc": "cat", "bbox_2d": []',
        b'"desc": "cat", "bbox_2d": [' + BOX + b"]",
        b'"desc": "cat", "bbox_2d": [["<|coord_1|>", "<|coord_2|>"]]',
        b'"desc": "cat", "poly": [["<|coord_1|>"]]',
        b'"desc": "cat", "poly": [["<|coord_1|>", "<|coord_2|>"], "<|coord_3|>"]',
        b'"desc": "cat", "bbox_2d": ["<|coord_1|>, <|coord_2|>"]',
        b'"desc": "cat", "bbox_2d": ["<|coord_1|> "]',
        b'"desc": "c\nat", "bbox_2d": ' + BOX,
        b'"desc": "c\\at", "bbox_2d": ' + BOX,
        b'"d\\u0065sc": "cat", "bbox_2d": ' + BOX,
    ],
)
def test_what_is_not_plain_is_an_entry_all_the_same(members: bytes) -> None:
    value = b"{" + members + b"}"
    text = b'{"object_1": ' + CAT + b', "object_2": ' + value + b', "object_3": ' + CAT + b"}"
    assert [entry.plain is None for entry in entries(text)] == [False, True, False]
    assert values(text)[1] == ("object_2", value, True)


BOTH = [("object_1", None), ("object_2", b"{}")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"object_1": 5, "object_2": {}}', BOTH),
        (b'{"object_1": "object_7", "object_2": {}}', BOTH),
        (b'{"object_1": [{}, {}], "object_2": {}}', BOTH),
        (b'{"object_1": [{}, "object_2": {}}', BOTH),
        (b'{"object_1", "object_2": {}}', BOTH),
        (b'{"object_1": }', [("object_1", None)]),
        (b'{"note": "object_1", "object_2": {}}', [("object_2", b"{}")]),
        (b'{"note": ["object_1", "object_3"], "object_2": {}}', [("object_2", b"{}")]),
        (b'{"object_1": 5', []),
    ],
)
def test_a_value_that_is_no_object_ends_before_the_next_comma_key_or_the_containers_end(
    text: bytes, expected: list[tuple[str, bytes | None]]
) -> None:
    assert [(key, value) for key, value, _ in values(text)] == expected


def test_keys_are_found_at_any_depth_but_not_in_strings() -> None:
    text = (
        b'{"object_1": {"object_22" : 5, "x": "\\"object_3\\": ", "object_4", "object_05": 1},'
        b' "object_1234567890": 1}'
    )
    assert object_indices(text) == [1, 22]


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        (b"{", True),
        (b' {"a": {}', True),
        (b'{"a": "}"', True),
        (b"{}", False),
        (b'{"a', False),
        (b'{"a": {', False),
        (b"", False),
        (b"[{", False),
    ],
)
def test_a_container_is_open_at_its_top_level_outside_strings(text: bytes, is_open: bool) -> None:
    assert is_open_container(text) is is_open
