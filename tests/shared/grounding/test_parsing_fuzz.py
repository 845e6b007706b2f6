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
from damaged_responses import Damage, check_damaged, random_objects

from shared.grounding.formats import FORMATS
from shared.grounding.objects import DropReason, ParsedRollout
from shared.grounding.serialize import layout_append
from shared.records import ALL_GEOMETRY, GeometryKind, GroundTruthObject
from shared.tokens.hf_codec import HFTokenCodec

pytestmark = pytest.mark.slow

BOXES = frozenset({GeometryKind.BBOX})
QUOTED_OR_BARE = re.compile(r'"(?:[^"\\]|\\.)*"|(<\|coord_[0-9]+\|>)', re.DOTALL)

ONLY_KEYS = re.compile(rb'\s*\{(\s*(,\s*)?"object_[0-9]+"\s*:)*\s*')
"""A prefix without its objects' values, where it has no other members."""


def check_json(parsed: ParsedRollout, prefix: bytes, appended: list[GroundTruthObject]) -> None:
    """The names are those of JSON, and with what is appended JSON reads all of it."""
    outside = prefix
    for one in reversed(parsed.objects):
        written = prefix[slice(*one.desc_value)]
        assert b"\\u" in written or one.desc == json.loads(b'"%b"' % written)
        outside = outside[: one.value[0]] + outside[one.value[1] :]
    start = 1 if parsed.max_object_index is None else parsed.max_object_index + 1
    text = parsed.prefix_text + layout_append(parsed.prefix_text, appended, start_index=start).text
    if parsed.dropped or any(QUOTED_OR_BARE.findall(text)) or not ONLY_KEYS.fullmatch(outside):
        return
    keys = [key for key, _ in json.loads(text, object_pairs_hook=list)]
    expected = [f"object_{start + i}" for i in range(len(appended))]
    assert keys[len(keys) - len(appended) :] == expected


def test_damaged_responses_can_always_be_appended_to(codecs: dict[str, HFTokenCodec]) -> None:
    generator = random.Random(20)
    seen: Counter[object] = Counter()
    for codec in codecs.values():
        damage = Damage(generator, codec)
        for _ in range(3000 // len(codecs)):
            geometry = BOXES if generator.random() < 0.1 else ALL_GEOMETRY
            response = damage.response()
            appended = random_objects(generator, generator.choice([0, 1, 1, 2]), geometry)
            parsed, prefix = check_damaged(
                response, codec, appended, geometry, FORMATS["coord_tokens"], seen
            )
            check_json(parsed, prefix, appended)
            seen["objects", len(parsed.objects)] += 1
    for outcome in ("fallback", "truncated"):
        assert {(outcome, True), (outcome, False)} <= seen.keys()
    assert {*DropReason, *(("objects", n) for n in range(5))} <= seen.keys()
    assert all(seen["fused", codec] for name, codec in codecs.items() if name != "bytes")
