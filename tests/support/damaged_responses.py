"""Random responses of a real tokenizer, sound ones and damaged ones, for the tests of the parser."""

from __future__ import annotations

import random
import re

from shared.grounding.serialize import serialize_objects
from shared.records import ALL_GEOMETRY, GeometryKind, GroundTruthObject
from shared.tokens.hf_codec import HFTokenCodec

DESCS = ["cat", "größe 猫 🙂", 'a "b"', "{}", "}]", "\\", "object_3", '"object_9": {', "鱼", "x.", "tab\t", "<|coord_5|>", "日本語", "black cat"]
SCRAPS = [
    *("{", "}", "[", "]", '"', ",", ":", " ", "\n", "\\", '\\"', "\\u0041", "\\x", "null", "1", "x", "猫", "}}", "]}}", '"]}}', "},", '}, "'),
    *(
        '"object_',
        '"object_5": ',
        '"object_7": {"desc": ""}, ',
        '"object_3": 5, ',
        '"note": {"object_8": 1}, ',
        '"desc": ',
        '"bbox": [1], ',
        '"score": 1, ',
        '{"desc": "x"}',
    ),
    *("<|coord_7|>", '"<|coord_7|>"', ', "<|coord_7|>"', '["<|coord_7|>", "<|coord_8|>"], ', "<|im_end|>", "<|endoftext|>", "<|im_start|>"),
]


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
    text = serialize_objects(random_objects(generator, generator.choice([0, 1, 2, 3, 4, 4])), field_order=generator.choice(["desc_first", "geometry_first"]))
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
        match self.generator.randrange(12):
            case 0:
                return self.noise(60)
            case 1:
                scraps = self.generator.choices(self.scraps, k=self.generator.randint(0, 40))
                return [*self.scraps[0], *(token_id for scrap in scraps for token_id in scrap)]
            case _:
                token_ids = list(self.generator.choice(self.sound))
                for _ in range(self.generator.choice([0, 1, 1, 1, 2, 3])):
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
