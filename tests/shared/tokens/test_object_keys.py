"""Keys are counted wherever tokens split them, and nothing else is."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from shared.tokens.repeat_guard import NUM_STATES, START, ObjectKeys, token_steps

KEY = re.compile(rb'"object_[0-9]+"[ \t\r\n]*:')
WHOLE = [b'"object_', b'"', b'"object_1": ', b"7", b"12", b'":', b": ", b"{", b"}", b'{"object']
CUT = [b"_", b"3", b'" : ', b"obj", b"ect_", b"\\", "ü".encode(), b"", b"\xc3"]
PARTS = WHOLE + CUT


def count(data: bytes) -> int:
    keys = ObjectKeys(lambda token_id: bytes([token_id]))
    state = START
    number = 0
    for byte in data:
        state, found = keys.step(state, byte)
        number += found
    return number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ('{"object_1": {"desc": "a"}, "object_2": {}}', 2),
        ('{"object_1" :{}', 1),
        ('{"object_1"', 0),  # its colon has not come
        ('{"object_": {}, "object_x1": {}, "objects_1": {}, "1object_1": {}', 0),
        ('{"desc": "object_4", "object_5": {}', 1),  # a value is no key
        (r'{"desc": "say \"object_4\": hi"', 0),
        ('""object_1": {', 1),
        ('"object_1"object_2": {', 1),
        ('"object_1" object_2": {', 0),
        ('"object_12345678901234567890":', 1),
    ],
)
def test_a_key_is_a_string_object_number_followed_by_a_colon(text: str, number: int) -> None:
    assert count(text.encode()) == number


def test_every_split_into_tokens_counts_what_a_search_over_the_whole_text_finds() -> None:
    rng = random.Random(5)
    keys = ObjectKeys(PARTS.__getitem__)
    total = 0
    for _ in range(3000):
        state = START
        text = b""
        number = 0
        for token_id in rng.choices(range(len(PARTS)), k=rng.randint(0, 24)):
            state, found = keys.step(state, token_id)
            number += found
            text += PARTS[token_id]
            # Non-overlapping, from the left: a key cannot begin inside another.
            assert number == len(KEY.findall(text))
        total += number
    assert total > 1000


def test_the_tables_for_a_device_say_what_a_token_by_token_reading_says() -> None:
    keys = ObjectKeys(PARTS.__getitem__)
    next_SV, found_SV = token_steps(PARTS)
    assert next_SV.shape == found_SV.shape == (NUM_STATES, len(PARTS))
    tokens = range(len(PARTS))
    expected = [[keys.step(state, token) for token in tokens] for state in range(NUM_STATES)]
    np.testing.assert_array_equal(np.stack([next_SV, found_SV], axis=-1), expected)
