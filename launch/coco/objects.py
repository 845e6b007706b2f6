"""Turns one COCO annotation into an object of a record, or into the reason why it is none."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from launch.coco.files import CocoAnnotation, CocoImage
from shared.grounding.coco import bins_of_coco_box, bins_of_coco_ring, has_area
from shared.grounding.geometry import simplify_ring
from shared.records import GeometryKind, GroundTruthObject


class WantedGeometry(StrEnum):
    """The geometry of the records."""

    BBOX = "bbox"
    """The annotations' boxes."""
    POLY = "poly"
    """Polygons; an annotation without one usable ring is left out."""
    AUTO = "auto"
    """Polygons where there is one usable ring, boxes for the rest."""


class ObjectSkip(StrEnum):
    """The reason why an annotation was left out; the last four are those of polygons."""

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


def convert(
    annotation: CocoAnnotation,
    image: CocoImage,
    names: Mapping[int, str],
    wanted: WantedGeometry,
    max_vertices: int | None,
) -> Converted | ObjectSkip:
    """Convert one annotation.

    Args:
        image: has at least 2 pixels on each axis.
        names: category id to name.
        max_vertices: polygons with more are simplified; None: never.
    """
    if annotation.iscrowd:
        return ObjectSkip.CROWD
    if annotation.category_id not in names:
        return ObjectSkip.UNKNOWN_CATEGORY
    desc = names[annotation.category_id]
    box = _box(annotation, image, desc)
    if isinstance(box, ObjectSkip) or wanted is WantedGeometry.BBOX:
        return box
    polygon = _polygon(annotation, image, desc, max_vertices)
    if isinstance(polygon, ObjectSkip) and wanted is WantedGeometry.AUTO:
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
    simplified = False
    if max_vertices is not None and len(bins) > 2 * max_vertices:
        simplified = True
        points = simplify_ring(list(zip(bins[::2], bins[1::2], strict=True)), max_vertices)
        bins = tuple(itertools.chain(*points))
    if not has_area(bins):
        return ObjectSkip.DEGENERATE_POLYGON
    return Converted(
        GroundTruthObject(GeometryKind.POLY, bins, desc),
        _reaches_beyond(rings[0], image),
        simplified,
    )


def _reaches_beyond(pixels: Sequence[float], image: CocoImage) -> bool:
    """Tell whether one of the points x, y, ... lies outside its image."""
    xs = pixels[::2]
    ys = pixels[1::2]
    return min(xs) < 0 or min(ys) < 0 or max(xs) > image.width or max(ys) > image.height
