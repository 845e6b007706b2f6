"""COCO boxes, polygons, annotations and results to and from ours. Pure: `launch` does the files.

A COCO coordinate `v`, in pixels along an axis of length `W`, is the bin `v / (W - 1) * 999`
(docs/decisions.md). A COCO box `[x, y, w, h]` is half-open, and its far edge `x + w` is a
coordinate like any other. So boxes and polygons of one object stay aligned, and two boxes overlap
alike in bins and in pixels. The price: the last pixel of an axis is bin 999 throughout, so a box
that ends at the far border comes back up to one pixel shorter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.grounding.geometry import bin_box, bin_points, pixels_of
from shared.records import GeometryKind, Sample


@dataclass(frozen=True, slots=True)
class ScoredObject:
    """One predicted object."""

    kind: GeometryKind
    bins: tuple[int, ...]
    """Integers 0..999: (x1, y1, x2, y2), x, y per polygon vertex, or (x, y) of a point."""
    desc: str
    score: float
    """Confidence: any finite number; greater is surer."""


@dataclass(frozen=True, slots=True)
class ImagePredictions:
    """The objects that a model found on one image."""

    image_id: int
    width: int
    """Pixels."""
    height: int
    """Pixels."""
    objects: tuple[ScoredObject, ...]
    orientation: int = 1
    """EXIF orientation of a picture whose COCO annotations are relative to it as it is stored."""


@dataclass(frozen=True, slots=True)
class CocoResults:
    """The content of a COCO results file, and what could not go into it."""

    results: list[dict[str, Any]]
    """One `{"image_id", "category_id", "bbox", "segmentation", "score"}` per object, in order."""
    unknown_names: Mapping[str, int]
    """Objects left out because no category has their name, counted by name."""
    num_points: int = 0
    """Points left out: COCO's detections are boxes and masks."""


def coco_box(bins: Sequence[int], width: int, height: int) -> list[float]:
    """Return `[x, y, w, h]` in pixels of a box (4 bins), or of the box around a polygon."""
    pixels = pixels_of(bins, width=width, height=height)
    xs = pixels[::2]
    ys = pixels[1::2]
    return [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]


def coco_segmentation(bins: Sequence[int], width: int, height: int) -> list[list[float]]:
    """Return one ring in pixels, `[[x, y, ...]]`; of a box its corners, clockwise from (x1, y1)."""
    if len(bins) == 4:
        x1, y1, x2, y2 = bins
        bins = (x1, y1, x2, y1, x2, y2, x1, y2)
    return [list(pixels_of(bins, width=width, height=height))]


def coco_area(bins: Sequence[int], width: int, height: int) -> float:
    """Return the square pixels that the ring of `coco_segmentation` encloses."""
    (ring,) = coco_segmentation(bins, width, height)
    xs = ring[::2]
    ys = ring[1::2]
    turned = zip(xs, ys, [*xs[1:], xs[0]], [*ys[1:], ys[0]], strict=True)
    return abs(sum(x * next_y - next_x * y for x, y, next_x, next_y in turned)) / 2


def bins_of_coco_box(box: Sequence[float], width: int, height: int) -> tuple[int, int, int, int]:
    """Turn `[x, y, w, h]` into bins (x1, y1, x2, y2), rounded outwards and clamped to 0..999.

    Raises ValueError for an image with an axis under 2 pixels.
    """
    x, y, w, h = box
    return bin_box(_within((x, y, x + w, y + h), width, height), width=width, height=height)


def bins_of_coco_ring(ring: Sequence[float], width: int, height: int) -> tuple[int, ...]:
    """Turn one ring into bins x, y, ..., to the nearest and clamped to 0..999.

    Neighbouring vertices on the same bin become one, the last and the first too. Raises ValueError
    for an image with an axis under 2 pixels.
    """
    bins = bin_points(_within(ring, width, height), width=width, height=height)
    points = list(zip(bins[::2], bins[1::2], strict=True))
    steps = zip(points, [*points[1:], *points[:1]], strict=True)
    return tuple(bin for point, following in steps if point != following for bin in point)


def _within(pixels: Sequence[float], width: int, height: int) -> list[float]:
    """Move x, y, ... into the image. Their bins stay; but 1e308 times 999 would not be finite."""
    return [min(max(value, 0.0), (width, height)[i % 2]) for i, value in enumerate(pixels)]


def has_area(bins: Sequence[int]) -> bool:
    """Tell whether the vertices x, y, ... are not all on one line."""
    points = list(zip(bins[::2], bins[1::2], strict=True))
    directions = [(x - points[0][0], y - points[0][1]) for x, y in points if (x, y) != points[0]]
    return any(dx * directions[0][1] != dy * directions[0][0] for dx, dy in directions)


def number_categories(names: Iterable[str]) -> dict[str, int]:
    """Number categories 1, 2, ... in the order of their names."""
    return {name: number for number, name in enumerate(sorted(set(names)), 1)}


def samples_to_coco(
    samples: Sequence[Sample], image_ids: Sequence[int], category_ids: Mapping[str, int]
) -> dict[str, Any]:
    """Return a COCO data set of the samples' ground truth without points, one image per sample.

    `image_ids` are one per sample; annotations are numbered from 1. Raises KeyError for an object
    whose name is not in `category_ids`.
    """
    annotations: list[dict[str, Any]] = []
    for image_id, sample in zip(image_ids, samples, strict=True):
        size = (sample.width, sample.height)
        for truth in sample.objects:
            if truth.kind is GeometryKind.POINT:
                continue
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image_id,
                    "category_id": category_ids[truth.desc],
                    "bbox": coco_box(truth.bins, *size),
                    "segmentation": coco_segmentation(truth.bins, *size),
                    "area": coco_area(truth.bins, *size),
                    "iscrowd": 0,
                }
            )
    images = [
        {"id": image_id, "width": sample.width, "height": sample.height}
        for image_id, sample in zip(image_ids, samples, strict=True)
    ]
    return {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": id, "name": name} for name, id in category_ids.items()],
    }


def predictions_to_coco(
    predictions: Iterable[ImagePredictions], category_ids: Mapping[str, int]
) -> CocoResults:
    """Return COCO results of predictions; `category_ids` maps the names of objects to ids."""
    results: list[dict[str, Any]] = []
    unknown: Counter[str] = Counter()
    num_points = 0
    for image in predictions:
        for found in image.objects:
            if found.kind is GeometryKind.POINT:
                num_points += 1
                continue
            if found.desc not in category_ids:
                unknown[found.desc] += 1
                continue
            results.append(
                {
                    "image_id": image.image_id,
                    "category_id": category_ids[found.desc],
                    "bbox": coco_box(found.bins, image.width, image.height),
                    "segmentation": coco_segmentation(found.bins, image.width, image.height),
                    "score": found.score,
                }
            )
    return CocoResults(results, dict(unknown), num_points)
