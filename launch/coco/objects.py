"""One COCO annotation becomes one object of a record, or the reason why it does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from launch.coco.files import CocoAnnotation, CocoImage
from shared.grounding.coco import bins_of_coco_box, bins_of_coco_ring, has_area
from shared.grounding.geometry import simplify_ring
from shared.records import GeometryKind, GroundTruthObject


class Wanted(StrEnum):
    """Which geometry the records are to have."""

    BBOX = "bbox"
    """The annotations' boxes."""
    POLY = "poly"
    """Polygons; an annotation without one usable ring is left out."""
    AUTO = "auto"
    """Polygons where there is one usable ring, boxes for the rest."""


class ObjectSkip(StrEnum):
    """Why an annotation was left out. The last four concern polygons; under `auto` they are why
    there is a box instead.
    """

    UNKNOWN_IMAGE = "unknown_image"
    IMAGE_SKIPPED = "image_skipped"
    CROWD = "crowd"
    UNKNOWN_CATEGORY = "unknown_category"
    DEGENERATE_BOX = "degenerate_box"
    OUTSIDE_IMAGE = "outside_image"
    NO_POLYGON = "no_polygon"
    RUN_LENGTH_CODE = "run_length_code"
    SEVERAL_RINGS = "several_rings"
    DEGENERATE_POLYGON = "degenerate_polygon"


@dataclass(frozen=True, slots=True)
class Converted:
    """An object and what had to be done to it."""

    object: GroundTruthObject
    clamped: bool
    """The shape reaches beyond its image."""
    simplified: bool = False
    """A polygon that lost vertices to `max_vertices`."""
    no_polygon: ObjectSkip | None = None
    """Why it is a box where a polygon was wanted."""


@dataclass(slots=True)
class ObjectCounts:
    """Counts of annotations; each is in `kept` or in `skipped`, once."""

    kept: Counter[GeometryKind] = field(default_factory=Counter)
    skipped: Counter[ObjectSkip] = field(default_factory=Counter)
    boxes_for_polygons: Counter[ObjectSkip] = field(default_factory=Counter)
    """Of those kept: boxes where polygons were wanted, by reason."""
    num_clamped: int = 0
    """Of those kept."""
    num_simplified: int = 0
    """Of those kept."""

    def keep(self, converted: Sequence[Converted]) -> None:
        self.kept.update(one.object.kind for one in converted)
        self.boxes_for_polygons.update(
            one.no_polygon for one in converted if one.no_polygon is not None
        )
        self.num_clamped += sum(one.clamped for one in converted)
        self.num_simplified += sum(one.simplified for one in converted)

    def as_json(self) -> dict[str, Any]:
        return {
            "boxes": self.kept[GeometryKind.BBOX],
            "polygons": self.kept[GeometryKind.POLY],
            "skipped": dict(self.skipped),
            "boxes_for_polygons": dict(self.boxes_for_polygons),
            "clamped": self.num_clamped,
            "simplified": self.num_simplified,
        }


def convert(
    annotation: CocoAnnotation,
    image: CocoImage,
    names: Mapping[int, str],
    wanted: Wanted,
    max_vertices: int | None,
) -> Converted | ObjectSkip:
    """The annotation as an object. `names` maps category ids to names; each axis of `image` must
    have 2 pixels or more.
    """
    if annotation.iscrowd:
        return ObjectSkip.CROWD
    if annotation.category_id not in names:
        return ObjectSkip.UNKNOWN_CATEGORY
    desc = names[annotation.category_id]
    box = _box(annotation, image, desc)
    if isinstance(box, ObjectSkip) or wanted is Wanted.BBOX:
        return box
    polygon = _polygon(annotation, image, desc, max_vertices)
    if isinstance(polygon, ObjectSkip) and wanted is Wanted.AUTO:
        return Converted(box.object, box.clamped, no_polygon=polygon)
    return polygon


def _box(annotation: CocoAnnotation, image: CocoImage, desc: str) -> Converted | ObjectSkip:
    x, y, w, h = annotation.bbox
    if w <= 0 or h <= 0:
        return ObjectSkip.DEGENERATE_BOX
    if x >= image.width or y >= image.height or x + w <= 0 or y + h <= 0:
        return ObjectSkip.OUTSIDE_IMAGE
    bins = bins_of_coco_box(annotation.bbox, image.width, image.height)
    if bins[0] == bins[2] or bins[1] == bins[3]:  # inside the last pixel, which is one bin
        return ObjectSkip.DEGENERATE_BOX
    return Converted(
        GroundTruthObject(GeometryKind.BBOX, bins, desc),
        _reaches_beyond((x, y, x + w, y + h), image),
    )


def _polygon(
    annotation: CocoAnnotation, image: CocoImage, desc: str, max_vertices: int | None
) -> Converted | ObjectSkip:
    rings = annotation.segmentation
    if isinstance(rings, dict):
        return ObjectSkip.RUN_LENGTH_CODE
    if not rings:
        return ObjectSkip.NO_POLYGON
    if len(rings) > 1:
        return ObjectSkip.SEVERAL_RINGS
    bins = bins_of_coco_ring(rings[0], image.width, image.height)
    simplified = max_vertices is not None and len(bins) > 2 * max_vertices
    if simplified:
        assert max_vertices is not None
        bins = tuple(
            bin
            for point in simplify_ring(list(zip(bins[::2], bins[1::2], strict=True)), max_vertices)
            for bin in point
        )
    if not has_area(bins):
        return ObjectSkip.DEGENERATE_POLYGON
    return Converted(
        GroundTruthObject(GeometryKind.POLY, bins, desc),
        _reaches_beyond(rings[0], image),
        simplified,
    )


def _reaches_beyond(pixels: Sequence[float], image: CocoImage) -> bool:
    """Whether one of the points x, y, ... lies outside its image."""
    xs, ys = pixels[::2], pixels[1::2]
    return min(xs) < 0 or min(ys) < 0 or max(xs) > image.width or max(ys) > image.height
