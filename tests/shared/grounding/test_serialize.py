from __future__ import annotations

import json

import pytest

from shared.grounding.parsing import parse_rollout
from shared.grounding.serialize import (
    SerializedText,
    layout_append,
    layout_objects,
    serialize_objects,
)
from shared.records import ALL_GEOMETRY, GeometryKind, GroundTruthObject
from shared.tokens.hf_codec import HFTokenCodec

CAT = GroundTruthObject(GeometryKind.BBOX, (1, 2, 3, 4), 'größe "猫" \\ 🙂\n')
DOG = GroundTruthObject(GeometryKind.POLY, (10, 20, 30, 40, 50, 60), "dog")
EAR = GroundTruthObject(GeometryKind.POINT, (0, 999), "ear")

both_orders = pytest.mark.parametrize("field_order", ["desc_first", "geometry_first"])


def slow_value(object_: GroundTruthObject, field_order: str) -> dict[str, object]:
    geometry: list[object] = [f"<|coord_{bin}|>" for bin in object_.bins]
    if object_.kind is GeometryKind.POLY:
        geometry = [geometry[i : i + 2] for i in range(0, len(geometry), 2)]
    fields = [("desc", object_.desc), (object_.kind.value, geometry)]
    return dict(fields if field_order == "desc_first" else fields[::-1])


@both_orders
@pytest.mark.parametrize("objects", [[], [CAT], [DOG], [EAR], [CAT, DOG, EAR, CAT]])
def test_the_text_is_what_json_dumps_writes(
    objects: list[GroundTruthObject], field_order: str
) -> None:
    values = {f"object_{i}": slow_value(one, field_order) for i, one in enumerate(objects, 5)}
    expected = json.dumps(values, ensure_ascii=False, separators=(", ", ": "))
    assert serialize_objects(objects, field_order=field_order, start_index=5) == expected


def test_objects_are_written_as_the_canonical_text() -> None:
    cat = GroundTruthObject(GeometryKind.BBOX, (1, 2, 3, 4), "cat")
    assert serialize_objects([cat, DOG]) == (
        '{"object_1": {"desc": "cat", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>",'
        ' "<|coord_4|>"]}, "object_2": {"desc": "dog", "poly": [["<|coord_10|>",'
        ' "<|coord_20|>"], ["<|coord_30|>", "<|coord_40|>"], ["<|coord_50|>", "<|coord_60|>"]]}}'
    )


def spans(layout: SerializedText) -> list[tuple[str, str, list[str]]]:
    data = layout.text.encode()
    return [
        (
            data[slice(*one.value)].decode(),
            data[slice(*one.desc)].decode(),
            [data[start:end].decode() for start, end in one.coords],
        )
        for one in layout.objects
    ]


@both_orders
@pytest.mark.parametrize("append", [False, True])
def test_the_layout_says_in_bytes_where_everything_is(field_order: str, append: bool) -> None:
    objects = [CAT, DOG, EAR]
    layout = layout_objects(objects, field_order=field_order)
    if append:
        layout = layout_append('{"object_1": {}', objects, start_index=2, field_order=field_order)
    assert spans(layout) == [
        (
            json.dumps(slow_value(object_, field_order), ensure_ascii=False),
            json.dumps(object_.desc, ensure_ascii=False)[1:-1],
            [f"<|coord_{bin}|>" for bin in object_.bins],
        )
        for object_ in objects
    ]
    length = len(layout.text.encode())
    assert layout.closing == (length - 1, length)
    assert layout.text[-1] == "}"


@both_orders
def test_what_is_written_is_read_back(codec: HFTokenCodec, field_order: str) -> None:
    text = serialize_objects([CAT, DOG, EAR], field_order=field_order)
    parsed = parse_rollout(codec.encode(text), codec, geometry=ALL_GEOMETRY)
    expected = [(o.kind, o.bins, o.desc) for o in (CAT, DOG, EAR)]
    assert [(o.kind, o.bins, o.desc) for o in parsed.objects] == expected


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("{", '"object_3": '),
        (" {\n ", '"object_3": '),
        ('{"object_2": {}', ', "object_3": '),
        ('{"object_2": {} \n', ', "object_3": '),
        ('{"object_2": {},', '"object_3": '),
        ('{"object_2": {}, ', '"object_3": '),
        ('{"object_2": {"desc": "}, \\" {"}', ', "object_3": '),
        ('{"object_2": {"bbox_2d": [1}', ', "object_3": '),
    ],
)
def test_the_append_begins_with_a_comma_exactly_behind_a_brace_that_closes(
    prefix: str, expected: str
) -> None:
    text = layout_append(prefix, [DOG], start_index=3).text
    assert text.startswith(expected)
    assert text.endswith("]]}}")


@pytest.mark.parametrize("prefix", ["{", '{"object_1": {}', '{"object_1": {} '])
def test_with_nothing_to_append_only_the_brace_closes(prefix: str) -> None:
    assert layout_append(prefix, [], start_index=2).text == "}"


CLOSED = ["", " ", "{}", '{"object_1": {}}', '{"object_1": {}}, {', "[{}", "x {"]
IN_A_VALUE = ['{"object_1": {', '{"object_1": {"desc": "a",', '{"object_1": "}', '{"object_1": 5']


@pytest.mark.parametrize("prefix", [*CLOSED, *IN_A_VALUE, '{"a": "\\"},'])
def test_a_prefix_that_is_not_an_open_top_level_object_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="cannot append"):
        layout_append(prefix, [DOG], start_index=1)


def test_a_comma_with_nothing_to_append_is_refused() -> None:
    with pytest.raises(ValueError, match="comma"):
        layout_append('{"object_1": {},', [], start_index=2)


@pytest.mark.parametrize("objects", [[CAT], []])
def test_an_unknown_field_order_is_refused_with_nothing_to_serialise_too(objects) -> None:
    message = "unknown field_order 'alphabetical'; use one of desc_first, geometry_first"
    with pytest.raises(ValueError, match=message):
        serialize_objects(objects, field_order="alphabetical")
    with pytest.raises(ValueError, match=message):
        layout_append("{", objects, start_index=1, field_order="alphabetical")
