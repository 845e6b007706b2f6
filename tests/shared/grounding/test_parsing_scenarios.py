"""The scenarios of `rollout-matching-sft.md` that parsing answers for, by their titles."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shared.grounding.parsing import parse_rollout
from shared.grounding.serialize import FIELD_ORDERS, layout_append, serialize_objects
from shared.records import GeometryKind, GroundTruthObject
from shared.tokens.hf_codec import HFTokenCodec

BOX = '["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"]'
OTHER_BOX = '["<|coord_5|>", "<|coord_6|>", "<|coord_7|>", "<|coord_8|>"]'
CAT = f'{{"desc": "cat", "bbox_2d": {BOX}}}'
DOG = f'{{"desc": "dog", "bbox_2d": {OTHER_BOX}}}'
MISSED = [
    GroundTruthObject(GeometryKind.BBOX, (10, 20, 30, 40), "größe"),
    GroundTruthObject(GeometryKind.POLY, (1, 2, 3, 4, 5, 6), "猫"),
]
OBJECTS = [*MISSED, GroundTruthObject(GeometryKind.BBOX, (0, 0, 999, 999), "x.")]


@pytest.mark.parametrize(
    "body",
    [
        '{"desc": ""}',
        "5",
        '{"desc": "cat" "bbox_2d": []}',
        '{"desc": "cat", "bbox_2d": ["<|coord_1|>"]}',
    ],
)
def test_highest_retained_object_key_controls_fn_start_even_when_object_is_invalid(
    codec: HFTokenCodec, body: str
) -> None:
    parsed = parse_rollout(codec.encode(f'{{"object_9": {body}, "object_2": {CAT}}}'), codec)
    assert [o.key for o in parsed.objects] == ["object_2"]
    assert [d.key for d in parsed.dropped] == ["object_9"]
    assert parsed.max_object_index == 9
    appended = layout_append(parsed.prefix_text, MISSED, start_index=10).text
    assert appended.startswith(', "object_10": {')


def test_geometry_first_object_remains_valid_under_strict_parse(
    codecs: dict[str, HFTokenCodec],
) -> None:
    expected = [(f"object_{i}", o.kind, o.bins, o.desc) for i, o in enumerate(OBJECTS, 1)]
    for codec in codecs.values():
        for order in FIELD_ORDERS:
            text = serialize_objects(OBJECTS, field_order=order)
            parsed = parse_rollout(codec.encode(text), codec)
            assert parsed.dropped == ()
            assert [(o.key, o.kind, o.bins, o.desc) for o in parsed.objects] == expected


def test_dict_keys_are_not_sorted_for_matching_order(codec: HFTokenCodec) -> None:
    parsed = parse_rollout(codec.encode(f'{{"object_10": {CAT}, "object_2": {DOG}}}'), codec)
    assert [(o.key, o.desc) for o in parsed.objects] == [("object_10", "cat"), ("object_2", "dog")]
    assert parsed.prefix_text == f'{{"object_10": {CAT}, "object_2": {DOG}'


def test_one_malformed_object_does_not_block_training_parse(codec: HFTokenCodec) -> None:
    middle = '{"desc": "bird", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>"]}'
    token_ids = codec.encode(f'{{"object_1": {CAT}, "object_2": {middle}, "object_3": {DOG}}}')
    parsed = parse_rollout(token_ids, codec)
    assert [(d.key, d.reason.value) for d in parsed.dropped] == [("object_2", "wrong_arity")]
    assert [(o.key, o.desc, o.bins) for o in parsed.objects] == [
        ("object_1", "cat", (1, 2, 3, 4)),
        ("object_3", "dog", (5, 6, 7, 8)),
    ]
    # No repair: what was dropped stays in the prefix, token by token.
    unchanged = parsed.num_unchanged
    assert parsed.prefix_token_ids[:unchanged] == tuple(token_ids[:unchanged])
    assert middle in parsed.prefix_text


ONE = f'{{"object_1": {CAT}'


@pytest.mark.parametrize(
    ("response", "prefix"),
    [
        (f'{ONE}, "object_2": {{"desc": "do', ONE),
        (f'{ONE}, "object_2": {{"desc": "dog", "bbox_2d": ["<|coord_1|>", "<|coo', ONE),
        (f'{ONE}, "object_2": {DOG[:-1]}', ONE),
        (f'{ONE}, "obj', ONE),
        (ONE[:-1], "{"),
        ('{"object_1": {"desc": "c', "{"),
        ("", "{"),
    ],
)
def test_truncated_rollout_tail_is_trimmed_suffix_only_and_training_proceeds_parse(
    codecs: dict[str, HFTokenCodec], response: str, prefix: str
) -> None:
    for codec in codecs.values():
        token_ids = codec.encode(response)
        parsed = parse_rollout(token_ids, codec)
        assert (parsed.prefix_text, parsed.truncated, parsed.dropped) == (prefix, True, ())
        assert parsed.fallback == (prefix == "{")
        unchanged = parsed.num_unchanged
        assert parsed.prefix_token_ids[:unchanged] == tuple(token_ids[:unchanged])
        appended = layout_append(
            parsed.prefix_text, MISSED, start_index=(parsed.max_object_index or 0) + 1
        ).text
        target = json.loads(parsed.prefix_text + appended)
        expected = [o.desc for o in (*parsed.objects, *MISSED)]
        assert [value["desc"] for value in target.values()] == expected


def test_shared_parsing_contract_is_importable_without_trainer_class_dependency() -> None:
    code = (
        "import sys, shared.grounding.objects, shared.grounding.parsing\n"
        "shared.grounding.parsing.parse_rollout, shared.grounding.objects.ParsedRollout\n"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        timeout=300,
        check=True,
    )
    heavy = "torch transformers vllm ray learner launch rollout_actors"
    assert not set(done.stdout.split()) & set(heavy.split())
