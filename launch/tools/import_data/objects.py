"""Converts one annotation in pixels to an object of a dataset row, or to a reason to skip it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from shared.data.limits import MAX_VERTICES
from shared.grounding.coco import bins_of_coco_box, bins_of_coco_ring, has_area
from shared.grounding.geometry import simplify_ring
from shared.model_families import CONTROL_TOKENS
from shared.records import GeometryKind, GroundTruthObject
from shared.tokens.vocabulary import COORD_TOKENS

HARMLESS_KEYS = frozenset(
    {"id", "image_id", "area", "attributes", "num_keypoints", "keypoints", "score", "caption"}
    | {"category_name", "supercategory", "image_name"}
)
"""Keys of an annotation that do not affect the meaning of its box."""


class WantedGeometry(StrEnum):
    """The geometry of the objects to write: boxes or polygons."""

    BBOX = "bbox"
    """Boxes, as annotated."""
    POLY = "poly"
    """Polygons. An annotation without exactly one usable ring is left out."""
    AUTO = "auto"
    """Polygons for annotations with one usable ring, boxes for the others."""


class ObjectSkip(StrEnum):
    """Reasons to leave out an annotation. The last five apply to polygons."""

    UNKNOWN_IMAGE = "unknown_image"
    IMAGE_SKIPPED = "image_skipped"
    CROWD = "crowd"
    UNKNOWN_CATEGORY = "unknown_category"
    UNUSABLE_NAME = "unusable_name"
    MALFORMED = "malformed"
    DIFFICULT = "difficult"
    NOT_EXHAUSTIVE = "not_exhaustive"
    POINT = "point"
    DEGENERATE_BOX = "degenerate_box"
    OUTSIDE_IMAGE = "outside_image"
    NO_POLYGON = "no_polygon"
    RUN_LENGTH_CODE = "run_length_code"
    SEVERAL_RINGS = "several_rings"
    TOO_MANY_VERTICES = "too_many_vertices"
    DEGENERATE_POLYGON = "degenerate_polygon"


@dataclass(frozen=True, slots=True)
class SourceObject:
    """One annotated object as in its file, in pixels or in fractions of its image.

    Example: `SourceObject("cat", (10, 20, 30, 40))` is 30 wide and 40 high.
    """

    desc: str
    box: tuple[float, float, float, float]
    """x, y, w, h of the box; half-open."""
    rings: Sequence[Sequence[float]] | dict[str, object] | None = None
    """Mask: rings x, y, ..., or a mapping with a run-length code."""
    is_turned: bool = False
    """Whether the object is a rotated box: `box` encloses it, and its corners are the only ring."""
    unknown_keys: tuple[str, ...] = ()
    """Keys of the annotation that its reader does not know."""
    skip: ObjectSkip | None = None
    """Why the reader leaves the object out. Its box still counts as evidence for the file's box
    order.
    """

    def scaled(self, width: float, height: float) -> SourceObject:
        """Return the object with its x multiplied by `width` and its y by `height`."""
        x, y, w, h = self.box
        rings = self.rings
        if isinstance(rings, Sequence):
            rings = [[v * (width, height)[i % 2] for i, v in enumerate(ring)] for ring in rings]
        return replace(self, box=(x * width, y * height, w * width, h * height), rings=rings)

    def upright(self, orientation: int, width: int, height: int) -> SourceObject:
        """Return the object turned like EXIF turns its stored image for display.

        Args:
            orientation: EXIF orientation, 1 to 8.
            width, height: size of the stored image, in pixels.
        """

        def turned(x: float, y: float) -> tuple[float, float]:
            if orientation in (2, 3, 7, 8):
                x = width - x
            if orientation in (3, 4, 6, 7):
                y = height - y
            return (y, x) if orientation >= 5 else (x, y)

        x, y, w, h = self.box
        (x1, y1), (x2, y2) = turned(x, y), turned(x + w, y + h)
        sides = (h, w) if orientation >= 5 else (w, h)
        rings = self.rings
        if isinstance(rings, Sequence):
            rings = [list(itertools.chain(*map(turned, ring[::2], ring[1::2]))) for ring in rings]
        return replace(self, box=(min(x1, x2), min(y1, y2), *sides), rings=rings)


def turned_box(
    desc: str, box: Sequence[float], angle: float, unknown_keys: tuple[str, ...] = ()
) -> SourceObject | ObjectSkip:
    """Read a box x, y, w, h in pixels that is rotated about its centre.

    `angle`: in radians, clockwise as displayed.
    """
    x, y, w, h = box
    if w <= 0 or h <= 0:
        return ObjectSkip.DEGENERATE_BOX
    sin, cos = math.sin(angle), math.cos(angle)
    corners = [(-w, -h), (w, -h), (w, h), (-w, h)]
    xs = [x + (w + right * cos - down * sin) / 2 for right, down in corners]
    ys = [y + (h + right * sin + down * cos) / 2 for right, down in corners]
    if finite([*xs, *ys]) is None:
        return ObjectSkip.MALFORMED
    # Rounding removes the noise of sine and cosine, which might change the bin.
    xs, ys = ([round(value, 6) for value in axis] for axis in (xs, ys))
    ring = list(itertools.chain(*zip(xs, ys, strict=True)))
    around = (min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys))
    return SourceObject(desc, around, [ring], is_turned=True, unknown_keys=unknown_keys)


@dataclass(frozen=True, slots=True)
class Ignored:
    """An annotated region that is not trained. Predictions in the region are not counted."""

    reason: ObjectSkip
    region: SourceObject
    is_crowd: bool
    """How it is decided whether a prediction is inside the region.

    True: by the share of the prediction's area in the region (a crowd in COCO). False: by their
    IoU.
    """


@dataclass(frozen=True, slots=True)
class Converted:
    """An object of a dataset row, and what was changed to convert it."""

    object: GroundTruthObject
    source: SourceObject
    """The annotation that was converted, in pixels."""
    clamped: bool
    """Whether the shape reached beyond its image and was clamped."""
    simplified: bool = False
    """Whether `max_vertices` removed vertices of the polygon."""
    no_polygon: ObjectSkip | None = None
    """Why the object is a box although polygons were wanted."""


def finite(values: Iterable[Any]) -> list[float] | None:
    """Convert values to numbers; None if a value is not a finite number."""
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError, OverflowError):
        return None
    return numbers if all(map(math.isfinite, numbers)) else None


def is_learnable(text: str) -> bool:
    """Return whether a text is not blank and has no control tokens or coordinate tokens."""
    return bool(text.strip()) and not any(token in text for token in CONTROL_TOKENS + COORD_TOKENS)


def convert(
    found: SourceObject, size: tuple[int, int], wanted: WantedGeometry, max_vertices: int | None
) -> Converted | ObjectSkip:
    """Convert one annotation to an object, or to the reason to skip it.

    Args:
        found: annotation in pixels.
        size: width and height of the image, at least 2 pixels each.
        max_vertices: polygons with more vertices are simplified; None: no limit.
    """
    if not is_learnable(found.desc):
        return ObjectSkip.UNUSABLE_NAME
    box = _box(found, size)
    if isinstance(box, ObjectSkip) or wanted is WantedGeometry.BBOX:
        return box
    polygon = _polygon(found, size, max_vertices)
    if isinstance(polygon, ObjectSkip) and wanted is WantedGeometry.AUTO:
        return replace(box, no_polygon=polygon)
    return polygon


def _box(found: SourceObject, size: tuple[int, int]) -> Converted | ObjectSkip:
    x, y, w, h = found.box
    if w <= 0 or h <= 0:
        return ObjectSkip.DEGENERATE_BOX
    if x >= size[0] or y >= size[1] or x + w <= 0 or y + h <= 0:
        return ObjectSkip.OUTSIDE_IMAGE
    bins = bins_of_coco_box(found.box, *size)
    if bins[0] == bins[2] or bins[1] == bins[3]:  # within the last pixel, which is one bin
        return ObjectSkip.DEGENERATE_BOX
    return Converted(
        GroundTruthObject(GeometryKind.BBOX, bins, found.desc),
        found,
        _reaches_beyond((x, y, x + w, y + h), size),
    )


def _polygon(
    found: SourceObject, size: tuple[int, int], max_vertices: int | None
) -> Converted | ObjectSkip:
    rings = found.rings
    if isinstance(rings, dict):
        return ObjectSkip.RUN_LENGTH_CODE
    if not rings:
        return ObjectSkip.NO_POLYGON
    if len(rings) > 1:
        return ObjectSkip.SEVERAL_RINGS
    if len(rings[0]) > 2 * MAX_VERTICES:
        return ObjectSkip.TOO_MANY_VERTICES
    bins = bins_of_coco_ring(rings[0], *size)
    simplified = False
    if max_vertices is not None and len(bins) > 2 * max_vertices:
        simplified = True
        points = simplify_ring(list(zip(bins[::2], bins[1::2], strict=True)), max_vertices)
        bins = tuple(itertools.chain(*points))
    if not has_area(bins):
        return ObjectSkip.DEGENERATE_POLYGON
    return Converted(
        GroundTruthObject(GeometryKind.POLY, bins, found.desc),
        found,
        _reaches_beyond(rings[0], size),
        simplified,
    )


def _reaches_beyond(pixels: Sequence[float], size: tuple[int, int]) -> bool:
    """Return whether one of the points x, y, ... lies outside the image."""
    xs = pixels[::2]
    ys = pixels[1::2]
    return min(xs) < 0 or min(ys) < 0 or max(xs) > size[0] or max(ys) > size[1]
