"""Damaged responses by the thousand: nothing raises, nothing before the cut changes, and ground truth can be appended to what is kept (DESIGN 7.2, 7.3).

Every property is checked on what comes out, without a second parser; `benchmarks.parsing` compares with one.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter

import pytest

from shared.grounding.objects import DropReason, ParsedRollout
from shared.grounding.parsing import parse_rollout
from shared.grounding.serialize import serialize_append, serialize_objects
from shared.records import ALL_GEOMETRY, GeometryKind, GroundTruthObject
from shared.tokens.hf_codec import HFTokenCodec

BOXES = frozenset({GeometryKind.BBOX})
DESCS = ["cat", "größe 猫 🙂", 'a "b"', "{}", "}]", "\\", "object_3", '"object_9": {', "鱼", "x.", "tab\t", "<|coord_5|>", "日本語", "black cat"]
SCRAPS = [
    *("{", "}", "[", "]", '"', ",", ":", " ", "\n", "\\", '\\"', "\\u0041", "\\x", "null", "1", "x", "猫", "}}", "]}}", '"]}}', "},", '}, "'),
    *('"object_', '"object_5": ', '"object_7": {"desc": ""}, ', '"object_3": 5, ', '"note": {"object_8": 1}, ', '"desc": ', '"bbox": [1], ', '"score": 1, '),
    *("<|coord_7|>", '"<|coord_7|>"', ', "<|coord_7|>"', '["<|coord_7|>", "<|coord_8|>"], ', "<|im_end|>", "<|endoftext|>", "<|im_start|>"),
]
QUOTED_OR_BARE = re.compile(r'"(?:[^"\\]|\\.)*"|(<\|coord_[0-9]+\|>)', re.DOTALL)


def random_objects(generator: random.Random, count: int, geometry: frozenset[GeometryKind] = ALL_GEOMETRY) -> list[GroundTruthObject]:
    objects = []
    for _ in range(count):
        x, y = sorted(generator.choices(range(1000), k=2)), sorted(generator.choices(range(1000), k=2))
        if GeometryKind.POLY in geometry and generator.random() < 0.3:
            kind, bins = GeometryKind.POLY, tuple(generator.choices(range(1000), k=2 * generator.randint(3, 5)))
        else:
            kind, bins = GeometryKind.BBOX, (x[0], y[0], x[1], y[1])
        objects.append(GroundTruthObject(kind, bins, generator.choice(DESCS)))
    return objects


def response_text(generator: random.Random) -> str:
    """A sound response, written in one of the ways that are allowed; boxes may have their corners exchanged."""
    text = serialize_objects(random_objects(generator, generator.randint(0, 4)), field_order=generator.choice(["desc_first", "geometry_first"]))
    if generator.random() < 0.3:
        text = re.sub(r'"(<\|coord_\d+\|>)"(?=[,\]])', r"\1", text)
    if generator.random() < 0.2:
        text = text.replace('"], ["', '", "').replace('"poly": [[', '"poly": [').replace('"]]', '"]')
    if generator.random() < 0.1:
        text = text.replace(", ", ",").replace(": ", " :\n")
    if generator.random() < 0.1:
        text = text.replace("cat", "c\\u0061t").replace("object_2", "\\u006fbject_2")
    if generator.random() < 0.1:
        text = re.sub(r'(<\|coord_\d+\|>)", "(<\|coord_\d+\|>)', r'\2", "\1', text, count=1)
    return text


class Damage:
    """A source of damaged responses of one tokenizer. The sound ones they are made from are encoded once."""

    def __init__(self, generator: random.Random, codec: HFTokenCodec) -> None:
        self.generator = generator
        self.sound = [codec.encode(response_text(generator)) for _ in range(300)]
        self.scraps = [codec.encode(scrap) for scrap in SCRAPS]
        self.num_ids = len(codec.special_ids) + max(codec.special_ids) + 1000 + 200  # some are beyond the vocabulary

    def response(self) -> list[int]:
        match self.generator.randrange(10):
            case 0:
                return self.noise(60)
            case 1:
                scraps = self.generator.choices(self.scraps, k=self.generator.randint(0, 40))
                return [*self.scraps[0], *(token_id for scrap in scraps for token_id in scrap)]
            case _:
                token_ids = list(self.generator.choice(self.sound))
                for _ in range(self.generator.randint(0, 4)):
                    self.damage(token_ids)
                return token_ids

    def noise(self, most: int) -> list[int]:
        return [self.generator.randrange(self.num_ids) for _ in range(self.generator.randint(0, most))]

    def damage(self, token_ids: list[int]) -> None:
        generator = self.generator
        low, high = sorted(generator.choices(range(len(token_ids) + 1), k=2))
        match generator.randrange(8):
            case 0:
                del token_ids[low : low + generator.randint(1, 3)]
            case 1:
                token_ids[low:low] = generator.choice(self.scraps)
            case 2:
                token_ids[low : low + 1] = generator.choice(self.scraps)
            case 3:
                token_ids[low:low] = self.noise(3)
            case 4 if high < len(token_ids):
                token_ids[low], token_ids[high] = token_ids[high], token_ids[low]
            case 5:
                token_ids[high:high] = token_ids[max(low, high - 40) : high]
            case 6:
                del token_ids[high:]
            case 7:
                other = generator.choice(self.sound)
                token_ids[low:] = other[generator.randint(0, len(other)) :]


def check(token_ids: list[int], codec: HFTokenCodec, appended: list[GroundTruthObject], geometry: frozenset[GeometryKind]) -> ParsedRollout:
    parsed = parse_rollout(token_ids, codec, geometry=geometry)
    prefix = b"".join(map(codec.piece_bytes, parsed.prefix_token_ids))
    assert prefix.decode(errors="replace") == parsed.prefix_text
    assert parsed.prefix_token_ids[: parsed.num_unchanged] == tuple(token_ids[: parsed.num_unchanged])
    if parsed.fallback:
        assert parsed.prefix_text == "{" and parsed.num_unchanged == 0 and parsed.objects == parsed.dropped == () and parsed.max_object_index is None
    elif parsed.num_unchanged < len(parsed.prefix_token_ids):
        # Besides the unchanged tokens there is nothing but part of the one token that was cut.
        rest = b"".join(map(codec.piece_bytes, parsed.prefix_token_ids[parsed.num_unchanged :]))
        cut = codec.piece_bytes(token_ids[parsed.num_unchanged])
        assert cut.startswith(rest) and len(rest) < len(cut)
    for object_ in parsed.objects:
        assert tuple(codec.coord_bin(parsed.prefix_token_ids[i]) for i in object_.coord_positions) == object_.bins
        assert all(object_.span[0] <= i < object_.span[1] <= len(parsed.prefix_token_ids) for i in (*object_.coord_positions, *object_.desc_positions))
        assert object_.desc_positions and object_.desc.strip()
        assert object_.kind in geometry

    start_index = 1 if parsed.max_object_index is None else parsed.max_object_index + 1
    tail = serialize_append(parsed.prefix_text, appended, start_index=start_index)
    again = parse_rollout([*parsed.prefix_token_ids, *codec.encode(tail), codec.eos_token_id], codec, geometry=geometry)
    number = len(parsed.objects)
    assert again.objects[:number] == parsed.objects and again.dropped == parsed.dropped and not again.truncated
    assert [(o.index, o.kind, o.bins, o.desc) for o in again.objects[number:]] == [(start_index + i, o.kind, o.bins, o.desc) for i, o in enumerate(appended)]
    text = parsed.prefix_text + tail
    if not parsed.dropped and not any(QUOTED_OR_BARE.findall(text)):
        pairs = json.loads(text, object_pairs_hook=list)
        assert [key for key, _ in pairs[len(pairs) - len(appended) :]] == [f"object_{start_index + i}" for i in range(len(appended))]
    return parsed


def sweep(codecs: dict[str, HFTokenCodec], count: int, seed: int) -> Counter[object]:
    """Checks `count` damaged responses, shared out among the tokenizers, and says how often what was met."""
    generator = random.Random(seed)
    seen: Counter[object] = Counter()
    for name, codec in codecs.items():
        damage = Damage(generator, codec)
        for _ in range(count // len(codecs)):
            geometry = BOXES if generator.random() < 0.1 else ALL_GEOMETRY
            parsed = check(damage.response(), codec, random_objects(generator, generator.choice([0, 1, 1, 2]), geometry), geometry)
            seen.update({dropped.reason for dropped in parsed.dropped})
            seen.update([("fallback", parsed.fallback), ("truncated", parsed.truncated), ("objects", len(parsed.objects))])
            seen[name, "fused"] += not parsed.fallback and parsed.num_unchanged < len(parsed.prefix_token_ids)
    return seen


def test_damaged_responses_can_always_be_appended_to(codecs: dict[str, HFTokenCodec]) -> None:
    seen = sweep(codecs, 6000, seed=20)
    assert set(DropReason) <= seen.keys()
    assert {("fallback", True), ("fallback", False), ("truncated", True), ("truncated", False), *(("objects", n) for n in range(5))} <= seen.keys()
    assert all(seen[name, "fused"] for name in codecs if name != "bytes")


@pytest.mark.slow
def test_200_000_damaged_responses_can_always_be_appended_to(codecs: dict[str, HFTokenCodec]) -> None:
    seen = sweep(codecs, 200_000, seed=21)
    assert all(seen[reason] > 100 for reason in DropReason), seen
