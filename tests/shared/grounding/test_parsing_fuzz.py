"""Damaged responses by the thousand: nothing raises, nothing before the cut changes, and ground
truth can be appended to what is kept (decisions 32 and 33).

Every property is checked on what comes out, without a second parser; `benchmarks.parsing` compares
with one.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter

import pytest
from damaged_responses import Damage, random_objects

from shared.grounding.objects import DropReason, ParsedRollout
from shared.grounding.parsing import parse_rollout
from shared.grounding.serialize import layout_append
from shared.records import ALL_GEOMETRY, GeometryKind, GroundTruthObject
from shared.tokens.hf_codec import HFTokenCodec

pytestmark = pytest.mark.slow

BOXES = frozenset({GeometryKind.BBOX})
QUOTED_OR_BARE = re.compile(r'"(?:[^"\\]|\\.)*"|(<\|coord_[0-9]+\|>)', re.DOTALL)

ONLY_KEYS = re.compile(rb'\s*\{(\s*(,\s*)?"object_[0-9]+"\s*:)*\s*')
"""A prefix without its objects' values, where it has no other members."""


def check(
    token_ids: list[int],
    codec: HFTokenCodec,
    appended: list[GroundTruthObject],
    geometry: frozenset[GeometryKind],
) -> ParsedRollout:
    parsed = parse_rollout(token_ids, codec, geometry=geometry)
    unchanged = parsed.num_unchanged
    prefix = b"".join(map(codec.piece_bytes, parsed.prefix_token_ids))
    assert prefix.decode(errors="replace") == parsed.prefix_text
    assert parsed.prefix_token_ids[:unchanged] == tuple(token_ids[:unchanged])
    if parsed.fallback:
        assert (parsed.prefix_text, unchanged, parsed.max_object_index) == ("{", 0, None)
        assert parsed.objects == parsed.dropped == ()
    elif unchanged < len(parsed.prefix_token_ids):
        # Besides the unchanged tokens there is nothing but part of the one token that was cut.
        rest = b"".join(map(codec.piece_bytes, parsed.prefix_token_ids[unchanged:]))
        cut = codec.piece_bytes(token_ids[unchanged])
        assert cut.startswith(rest)
        assert len(rest) < len(cut)
    for object_ in parsed.objects:
        positions = object_.coord_positions
        bins = tuple(codec.coord_bin(parsed.prefix_token_ids[i]) for i in positions)
        assert bins == object_.bins
        start, stop = object_.span
        assert all(start <= i < stop <= len(parsed.prefix_token_ids) for i in positions)
        assert object_.desc.strip()
        assert object_.kind in geometry
        written = prefix[slice(*object_.desc_value)]
        assert b"\\u" in written or object_.desc == json.loads(b'"%b"' % written)

    start_index = 1 if parsed.max_object_index is None else parsed.max_object_index + 1
    tail = layout_append(parsed.prefix_text, appended, start_index=start_index).text
    token_ids = [*parsed.prefix_token_ids, *codec.encode(tail), codec.eos_token_id]
    again = parse_rollout(token_ids, codec, geometry=geometry)
    number = len(parsed.objects)
    assert again.objects[:number] == parsed.objects
    assert (again.dropped, again.truncated) == (parsed.dropped, False)
    assert [(o.index, o.kind, o.bins, o.desc) for o in again.objects[number:]] == [
        (start_index + i, o.kind, o.bins, o.desc) for i, o in enumerate(appended)
    ]
    text = parsed.prefix_text + tail
    outside = prefix
    for object_ in reversed(parsed.objects):
        outside = outside[: object_.value[0]] + outside[object_.value[1] :]
    is_json = not parsed.dropped and not any(QUOTED_OR_BARE.findall(text))
    if is_json and ONLY_KEYS.fullmatch(outside):
        keys = [key for key, _ in json.loads(text, object_pairs_hook=list)]
        expected = [f"object_{start_index + i}" for i in range(len(appended))]
        assert keys[len(keys) - len(appended) :] == expected
    return parsed


def sweep(codecs: dict[str, HFTokenCodec], count: int, seed: int) -> Counter[object]:
    """Checks `count` damaged responses, shared out among the tokenizers, and says how often what
    was met.
    """
    generator = random.Random(seed)
    seen: Counter[object] = Counter()
    for name, codec in codecs.items():
        damage = Damage(generator, codec)
        for _ in range(count // len(codecs)):
            geometry = BOXES if generator.random() < 0.1 else ALL_GEOMETRY
            response = damage.response()
            appended = random_objects(generator, generator.choice([0, 1, 1, 2]), geometry)
            parsed = check(response, codec, appended, geometry)
            seen.update({dropped.reason for dropped in parsed.dropped})
            seen["fallback", parsed.fallback] += 1
            seen["truncated", parsed.truncated] += 1
            seen["objects", len(parsed.objects)] += 1
            is_fused = parsed.num_unchanged < len(parsed.prefix_token_ids)
            seen[name, "fused"] += is_fused and not parsed.fallback
    return seen


def test_damaged_responses_can_always_be_appended_to(codecs: dict[str, HFTokenCodec]) -> None:
    seen = sweep(codecs, 6000, seed=20)
    for outcome in ("fallback", "truncated"):
        assert {(outcome, True), (outcome, False)} <= seen.keys()
    assert {*DropReason, *(("objects", n) for n in range(5))} <= seen.keys()
    assert all(seen[name, "fused"] for name in codecs if name != "bytes")


@pytest.mark.long
def test_20_000_damaged_responses_can_always_be_appended_to(
    codecs: dict[str, HFTokenCodec],
) -> None:
    seen = sweep(codecs, 20_000, seed=21)
    assert all(seen[reason] > 5 for reason in DropReason), seen
