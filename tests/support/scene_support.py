"""Held-out scenes without a model."""

from __future__ import annotations

import io
from collections.abc import Sequence
from random import Random

from PIL import Image

from shared.grounding.coco import ScoredObject
from shared.grounding.evaluation import DetectionCounts, Scene, summarise
from shared.grounding.objects import DropReason
from shared.records import GeometryKind, GroundTruthObject, ImageRef, Sample

NAMES = ("cat", "dog", "owl")


def png(width: int = 101, height: int = 61) -> bytes:
    """A grey image."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), (90, 90, 90)).save(file, "PNG")
    return file.getvalue()


def truth(*bins: int, desc: str = "cat") -> GroundTruthObject:
    return GroundTruthObject(GeometryKind.BBOX if len(bins) == 4 else GeometryKind.POLY, bins, desc)


def guess(*bins: int, desc: str = "cat", score: float = 1.0) -> ScoredObject:
    return ScoredObject(GeometryKind.BBOX if len(bins) == 4 else GeometryKind.POLY, bins, desc, score)


def scene(
    position: int,
    truths: Sequence[GroundTruthObject],
    found: Sequence[ScoredObject],
    *,
    dropped: Sequence[DropReason] = (),
    image: bytes | None = None,
    sample_id: str = "",
) -> Scene:
    images = (ImageRef(path=None, data=image, sha256=""),)
    sample = Sample(sample_id or f"val:{position + 1}", images, width=101, height=61, objects=tuple(truths))
    return Scene(position, sample, tuple(found), tuple(dropped), truncated=False)


def counts_of(one: Scene, *, iou_threshold: float = 0.5) -> DetectionCounts:
    """Of one scene, whatever the classes of its pairs."""
    return summarise([one], [iou_threshold]).thresholds[0].any_class


def random_scenes(count: int, *, seed: int = 0) -> list[Scene]:
    """Boxes around the right places under mostly right names; scores with ties."""
    random = Random(seed)
    scenes = []
    for position in range(count):
        truths = [truth(*_box(random), desc=random.choice(NAMES)) for _ in range(random.randrange(5))]
        found = [
            guess(*_moved(random, one.bins), desc=random.choice((one.desc, *NAMES)), score=random.randrange(9) / 8) for one in truths if random.random() < 0.8
        ]
        found += [guess(*_box(random), desc=random.choice(NAMES), score=random.random()) for _ in range(random.randrange(3))]
        scenes.append(scene(position, truths, found, dropped=random.choices(list(DropReason), k=random.randrange(2))))
    return scenes


def _box(random: Random) -> tuple[int, ...]:
    x, y = random.randrange(700), random.randrange(700)
    return x, y, x + random.randrange(30, 300), y + random.randrange(30, 300)


def _moved(random: Random, bins: Sequence[int]) -> tuple[int, ...]:
    x1, y1, x2, y2 = (min(999, max(0, bin + random.randrange(-25, 26))) for bin in bins)
    return min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)
