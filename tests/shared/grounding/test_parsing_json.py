"""What makes an object valid, compared with Python's own JSON reader on thousands of values
(decision 32).
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from damaged_responses import DESCS

from shared.grounding.objects import DropReason
from shared.grounding.parsing import parse_rollout
from shared.grounding.serialize import serialize_objects
from shared.records import ALL_GEOMETRY, GeometryKind, GroundTruthObject
from shared.tokens.hf_codec import HFTokenCodec


class Pairs(list[tuple[str, Any]]):
    """A JSON object whose keys may repeat."""


class Bare(int):
    """A coord token without quotes."""


def slow_judge(value: str) -> DropReason | tuple[GeometryKind, str, list[int]]:
    """One value, read with Python's json after quoting is out of the way: unquoted coord tokens
    become numbers that nobody writes.
    """
    parts = re.split(r'("(?:[^"\\]|\\.)*")', value)
    parts[::2] = [
        re.sub(r"<\|coord_(0|[1-9]\d{0,2})\|>", r" 7.25e\1 ", part) for part in parts[::2]
    ]

    def number(text: str) -> object:
        return Bare(text.removeprefix("7.25e")) if text.startswith("7.25e") else float(text)

    def refuse(constant: str) -> object:
        raise ValueError(constant)

    try:
        read = json.loads(
            "".join(parts), object_pairs_hook=Pairs, parse_float=number, parse_constant=refuse
        )
    except ValueError:
        return DropReason.MALFORMED
    keys = [key for key, _ in read]
    unknown = [item for key, item in read if key not in ("desc", "bbox_2d", "poly", "point_2d")]
    shapes = [(key, item) for key, item in read if key in ("bbox_2d", "poly", "point_2d")]
    if (
        nested(list(read))
        or keys.count("desc") > 1
        or len({key for key, _ in shapes}) > 1
        or (unknown and not (len(unknown) == 1 and type(unknown[0]) is list))
    ):
        return DropReason.KEY_INVALID
    if unknown:
        return DropReason.UNKNOWN_GEOM
    desc = next((item for key, item in read if key == "desc"), None)
    if type(desc) is not str or not desc.strip():
        return DropReason.MISSING_DESC
    arrays = [item for _, item in shapes if type(item) is list]
    if not arrays:
        return DropReason.MISSING_GEOM
    poly = shapes[0][0] == "poly"
    bins_of = [[coord(leaf) for leaf in leaves(array, poly)] for array in arrays]
    if any(None in bins for bins in bins_of):
        return DropReason.NON_COORD_TOKEN
    bins = bins_of[0]
    pairs = [item for item in arrays[0] if type(item) is list]
    is_paired = len(pairs) == len(arrays[0]) and all(len(pair) == 2 for pair in pairs)
    if len(shapes) > 1 or (pairs and not is_paired):
        return DropReason.WRONG_ARITY
    num_bins = {"bbox_2d": 4, "point_2d": 2}
    if (len(bins) % 2 or len(bins) < 6) if poly else len(bins) != num_bins[shapes[0][0]]:
        return DropReason.WRONG_ARITY
    if shapes[0][0] == "bbox_2d" and (bins[0] > bins[2] or bins[1] > bins[3]):
        return DropReason.BBOX_INVALID
    text = desc.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return GeometryKind(shapes[0][0]), text, bins


def leaves(array: list[Any], poly: bool) -> list[Any]:
    """The items of an array, those of its own arrays too where it is a polygon's."""
    return [leaf for item in array for leaf in (item if poly and type(item) is list else [item])]


def nested(value: object) -> bool:
    if isinstance(value, Pairs):
        return True
    return isinstance(value, (list, tuple)) and any(nested(item) for item in value)


def coord(leaf: object) -> int | None:
    if isinstance(leaf, Bare):
        return int(leaf)
    if not isinstance(leaf, str):
        return None
    match = re.fullmatch(r"<\|coord_(0|[1-9][0-9]{0,2})\|>", leaf)
    return None if match is None else int(match[1])


PARTS = [
    *"{}[],: \t",
    *('""', '"desc"', "null", "-1.5e3", "01", "NaN", '"<|coord_9|>"', "<|coord_9|>", ", "),
    *('"<|coord_1000|>"', '"desc": "cat"', '"bbox_2d": ', '"poly": [', '"x": 1', '"box": []'),
    *('"\\u0041"', '"\\x"', '"\\ud800"', '"d\\u0065sc": "猫"', '["<|coord_1|>", "<|coord_2|>"]'),
]
DESC_VALUES = ['"cat"', '"dog"', '"猫"', '""', '" "', "1", "<|coord_1|>"]
BOX_VALUES = [
    '["<|coord_3|>", "<|coord_4|>", "<|coord_3|>", <|coord_5|>]',
    '["<|coord_3|>", "<|coord_4|>", "<|coord_2|>", "<|coord_5|>"]',
    '["<|coord_3|>"]',
    '"<|coord_3|>"',
    "[3, 4, 5, 6]",
    '[["<|coord_3|>", "<|coord_4|>"]]',
]
TWO = '"<|coord_1|>", "<|coord_2|>"'
FOUR = '"<|coord_3|>", "<|coord_4|>", "<|coord_5|>", "<|coord_6|>"'
POLY_VALUES = ["null", f"[[{TWO}], [{TWO}], [{TWO}]]", f"[{TWO}, {FOUR}]", f"[[{TWO}], {FOUR}]"]
FIELDS = [
    *(f'"desc": {value}' for value in DESC_VALUES),
    *(f'"x": {value}' for value in ("[]", "1", "{}")),
    *(f'"bbox_2d": {value}' for value in BOX_VALUES),
    *(f'"poly": {value}' for value in POLY_VALUES),
    *(f'"point_2d": {value}' for value in (f"[{TWO}]", f"[{FOUR}]", "[1, 2]")),
]


def assembled_value(generator: random.Random) -> str:
    """Sound JSON of any fields."""
    return "{" + ", ".join(generator.choices(FIELDS, k=generator.choice([0, 1, 2, 2, 2, 3]))) + "}"


def mutated_value(generator: random.Random) -> str:
    """Seldom sound JSON."""
    bins = (3, 4, 3, 5) if generator.random() < 0.7 else tuple(generator.choices(range(1000), k=6))
    kind = GeometryKind.BBOX if len(bins) == 4 else GeometryKind.POLY
    text = serialize_objects(
        [GroundTruthObject(kind, bins, generator.choice(DESCS))],
        field_order=generator.choice(["desc_first", "geometry_first"]),
    )
    value = text.removeprefix('{"object_1": ').removesuffix("}")
    lexemes = re.findall(r'"(?:[^"\\]|\\.)*"|[^"]', value)
    for _ in range(generator.randint(1, 3)):
        position = generator.randrange(len(lexemes) + 1)
        match generator.randrange(4):
            case 0:
                del lexemes[position : position + 1]
            case 1:
                lexemes.insert(position, generator.choice(PARTS))
            case 2:
                lexemes[position : position + 1] = [generator.choice(PARTS)]
            case 3:
                other = generator.randrange(len(lexemes))
                lexemes.insert(position, lexemes[other])
    return "".join(lexemes)


@pytest.mark.slow
def test_validity_is_that_of_a_json_library(codec: HFTokenCodec) -> None:
    generator = random.Random(7)
    compared: dict[object, int] = {}
    while sum(compared.values()) < 2500:
        value = generator.choice([assembled_value, mutated_value])(generator)
        text = f'{{"object_1": {value}}}'
        parsed = parse_rollout(codec.encode(text), codec, geometry=ALL_GEOMETRY)
        # Only values that end where they were meant to end are comparable.
        if parsed.prefix_text != text[:-1] or len(parsed.objects) + len(parsed.dropped) != 1:
            continue
        expected = slow_judge(value)
        read = [(o.kind, o.desc, list(o.bins)) for o in parsed.objects]
        assert [*(dropped.reason for dropped in parsed.dropped), *read] == [expected], value
        outcome = expected if isinstance(expected, DropReason) else expected[0]
        compared[outcome] = compared.setdefault(outcome, 0) + 1
    assert compared.keys() == {*DropReason, *GeometryKind} - {DropReason.POLY_UNSUPPORTED}, compared
