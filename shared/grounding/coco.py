"""Convert objects, annotations and predictions between norm1000 (bins 0..999) and the COCO format.

The package `launch` reads and writes the COCO files.

A COCO coordinate `v`, in pixels along an axis of length `W`, is the bin `v / (W - 1) * 999`
(docs/explanation/decisions.md). A COCO box `[x, y, w, h]` is half-open, and its far edge `x + w` is
converted like any other coordinate. So boxes and polygons of an object stay aligned, and two boxes
have the same overlap in bins and in pixels. The cost: the last pixel of an axis is entirely bin
999, so a box that ends at the far border becomes up to one pixel shorter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.data.annotations import Annotation
from shared.grounding.geometry import bin_box, bin_points, pixels_of
from shared.records import GeometryKind, Sample


@dataclass(frozen=True, slots=True)
class ScoredObject:
    """One object that a model found in an image, with a confidence."""

    kind: GeometryKind
    bins: tuple[int, ...]
    """Integers 0..999: (x1, y1, x2, y2), x, y per polygon vertex, or (x, y) of a point."""
    desc: str
    score: float
    """Confidence: any finite number; greater means more certain."""
    pixels: tuple[float, ...] | None = None
    """The coordinates in pixels of the image, not rounded to bins; None: compute from `bins`."""

    def pixels_in(self, width: int, height: int) -> tuple[float, ...]:
        """Return the object's coordinates in pixels of its image, which has this size."""
        return self.pixels or pixels_of(self.bins, width=width, height=height)


@dataclass(frozen=True, slots=True)
class ImagePredictions:
    """The objects that a model found in one image."""

    image_id: int
    width: int
    """Width of the image in pixels."""
    height: int
    """Height of the image in pixels."""
    objects: tuple[ScoredObject, ...]
    orientation: int = 1
    """EXIF orientation of the image file if annotations refer to the unrotated pixels; else 1."""


@dataclass(frozen=True, slots=True)
class CocoResults:
    """The content of a COCO results file, and counts of objects that it cannot contain."""

    results: list[dict[str, Any]]
    """One `{"image_id", "category_id", "bbox", "segmentation", "score"}` per object, in order."""
    unknown_names: Mapping[str, int]
    """Number of objects, by name, that were left out because no category has their name."""
    num_points: int = 0
    """Number of points that were left out, because COCO detections are only boxes and masks."""


def box_around(pixels: Sequence[float]) -> list[float]:
    """Return `[x, y, w, h]` of the smallest box around the points x, y, x, y, ..."""
    xs = pixels[::2]
    ys = pixels[1::2]
    return [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]


def ring_of(pixels: Sequence[float]) -> list[float]:
    """Return the outline x, y, x, y, ... of a shape, as COCO's `segmentation` has it.

    Four numbers are a box (x1, y1, x2, y2), more are a polygon.
    """
    if len(pixels) != 4:
        return list(pixels)
    x1, y1, x2, y2 = pixels
    return [x1, y1, x2, y1, x2, y2, x1, y2]


def ring_area(ring: Sequence[float]) -> float:
    """Return the area inside a polygon with vertices x, y, x, y, ..., in square pixels."""
    xs = ring[::2]
    ys = ring[1::2]
    turned = zip(xs, ys, [*xs[1:], xs[0]], [*ys[1:], ys[0]], strict=True)
    return abs(sum(x * next_y - next_x * y for x, y, next_x, next_y in turned)) / 2


def bins_of_coco_box(box: Sequence[float], width: int, height: int) -> tuple[int, int, int, int]:
    """Turn a COCO box `[x, y, w, h]` in pixels into bins (x1, y1, x2, y2).

    Bins are rounded outwards and clamped to 0..999.

    Raises ValueError for an image with an axis under 2 pixels.
    """
    x, y, w, h = box
    return bin_box(_within((x, y, x + w, y + h), width, height), width=width, height=height)


def bins_of_coco_ring(ring: Sequence[float], width: int, height: int) -> tuple[int, ...]:
    """Turn the vertices x, y, x, y, ... of a COCO polygon in pixels into bins.

    Bins are rounded to the nearest and clamped to 0..999. Neighbouring vertices with the same bins
    become one vertex; the last and the first vertex are neighbours. Raises ValueError for an image
    with an axis under 2 pixels.
    """
    bins = bin_points(_within(ring, width, height), width=width, height=height)
    points = list(zip(bins[::2], bins[1::2], strict=True))
    steps = zip(points, [*points[1:], *points[:1]], strict=True)
    return tuple(bin for point, following in steps if point != following for bin in point)


def _within(pixels: Sequence[float], width: int, height: int) -> list[float]:
    """Clamp x, y, ... to the image. This changes no bin, but keeps 1e308 times 999 finite."""
    return [min(max(value, 0.0), (width, height)[i % 2]) for i, value in enumerate(pixels)]


def has_area(bins: Sequence[int]) -> bool:
    """Return whether a polygon with vertices x, y, x, y, ... has an area (is not on one line)."""
    points = list(zip(bins[::2], bins[1::2], strict=True))
    directions = [(x - points[0][0], y - points[0][1]) for x, y in points if (x, y) != points[0]]
    return any(dx * directions[0][1] != dy * directions[0][0] for dx, dy in directions)


def number_categories(names: Iterable[str]) -> dict[str, int]:
    """Return the COCO id of each category name: 1, 2, ... in alphabetical order."""
    return {name: number for number, name in enumerate(sorted(set(names)), 1)}


NOT_JUDGED_AREA = 1e12
"""The `area` that is written for a region to ignore that is not a crowd.

pycocotools ignores an object whose area is outside the evaluated range, and the predictions that
match the object by IoU.
"""


def samples_to_coco(
    samples: Sequence[Sample], image_ids: Sequence[int], category_ids: Mapping[str, int]
) -> dict[str, Any]:
    """Return the ground truth of samples as a COCO data set with one image per sample.

    Points are left out. An object is written as its annotation if the sample has annotations, else
    as its bins converted to pixels. A region to ignore becomes a crowd, or an object with the area
    `NOT_JUDGED_AREA`. `image_ids` has one id per sample; annotations are numbered from 1. Raises
    KeyError for a name that is not in `category_ids`.
    """
    annotations: list[dict[str, Any]] = []

    def add(
        image_id: int,
        desc: str,
        annotation: Annotation,
        *,
        crowd: bool = False,
        judged: bool = True,
    ) -> None:
        shape = annotation.segmentation or [ring_of(annotation.corners)]
        area = annotation.box[2] * annotation.box[3]
        if not isinstance(shape, Mapping):
            area = sum(map(ring_area, shape))
        annotations.append(
            {
                "id": len(annotations) + 1,
                "image_id": image_id,
                "category_id": category_ids[desc],
                "bbox": list(annotation.box),
                "segmentation": shape,
                "area": area if judged or crowd else NOT_JUDGED_AREA,
                "iscrowd": int(crowd),
            }
        )

    for image_id, sample in zip(image_ids, samples, strict=True):
        for index, truth in enumerate(sample.objects):
            if truth.kind is GeometryKind.POINT:
                continue
            add(image_id, truth.desc, annotation_of(sample, index))
        for region in sample.ignore:
            add(image_id, region.desc, region.annotation, crowd=region.is_crowd, judged=False)
    images = [
        {"id": image_id, "width": sample.width, "height": sample.height}
        for image_id, sample in zip(image_ids, samples, strict=True)
    ]
    return {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": id, "name": name} for name, id in category_ids.items()],
    }


def annotation_of(sample: Sample, index: int) -> Annotation:
    """Return the annotation, in pixels, of object number `index` of a sample.

    If the sample has no annotations, the result is made from the object's bins.
    """
    if sample.annotated:
        return sample.annotated[index]
    truth = sample.objects[index]
    pixels = pixels_of(truth.bins, width=sample.width, height=sample.height)
    x, y, w, h = box_around(pixels)
    return Annotation((x, y, w, h), [ring_of(pixels)])


def predictions_to_coco(
    predictions: Iterable[ImagePredictions], category_ids: Mapping[str, int]
) -> CocoResults:
    """Return predictions in the format of COCO results; `category_ids` has the id of each name."""
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
            pixels = found.pixels_in(image.width, image.height)
            results.append(
                {
                    "image_id": image.image_id,
                    "category_id": category_ids[found.desc],
                    "bbox": box_around(pixels),
                    "segmentation": [ring_of(pixels)],
                    "score": found.score,
                }
            )
    return CocoResults(results, dict(unknown), num_points)
