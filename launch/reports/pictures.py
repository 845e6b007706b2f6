"""Draws a held-out sample: its image with ground truth, predictions and a legend.

Labels are the objects' names. The built-in font has Latin letters only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from PIL import Image, ImageDraw, ImageFont

from launch.inspect.sample_pages.html import printable
from shared.grounding.evaluation import Pair, Scene, pair_objects
from shared.grounding.geometry import Shape, pixels_of, vertices
from shared.records import GeometryKind

# Bounds of the longest side of a drawing, in pixels: small images are enlarged by whole factors,
# large ones reduced.
_SMALLEST = 512
_LARGEST = 1280
_DASH = 6
_GAP = 4
_LINE = 2
_CROSS_ARM = 8
"""Half the size of the cross that marks a point, in pixels."""
_BAND = 24
"""Height of the legend below the image, in pixels."""

Colour: TypeAlias = tuple[int, int, int]
PixelPoint: TypeAlias = tuple[float, float]
TRUTH: Colour = (0, 150, 50)
FOUND: Colour = (20, 105, 245)
OTHER_NAME: Colour = (215, 110, 0)
UNMATCHED: Colour = (215, 0, 40)
REPEATED: Colour = (165, 35, 200)
LEGEND = (
    ("matched", FOUND),
    ("matched, other name", OTHER_NAME),
    ("repeated", REPEATED),
    ("no match", UNMATCHED),
)
REPEATED_IOU = 0.5
"""Overlap with a matched true object from which an unmatched prediction counts as repeated."""


def draw_scene(scene: Scene, pairs: Sequence[Pair], *, only_missed: bool = False) -> Image.Image:
    """Draw the sample's first image with its ground truth and predictions, and a legend below.

    Args:
        pairs: matched objects (`shared.grounding.evaluation.pair_objects`), for the colours.
        only_missed: leave out the scores, and the true objects that are matched.

    Raises RecordError if the image is missing or has changed.
    """
    from learner.segments import decode_image  # imports torch

    original = decode_image(scene.sample.images[0])
    longest = max(original.size)
    scale = min(1.0, _LARGEST / longest)
    if longest < _SMALLEST:
        scale = math.ceil(_SMALLEST / longest)
    width, height = (max(1, round(side * scale)) for side in original.size)
    resampling = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    picture = Image.new("RGB", (width, height + _BAND), "white")
    picture.paste(original.resize((width, height), resampling))
    pen = _Pen(picture, scale, scene.sample.width, scene.sample.height)
    truths = scene.sample.objects
    matched_names = {pair.prediction: truths[pair.ground_truth].desc for pair in pairs}
    matched = [truths[pair.ground_truth] for pair in pairs]
    colours = []
    for index, found in enumerate(scene.objects):
        colour = UNMATCHED
        if index in matched_names:
            colour = FOUND if matched_names[index] == found.desc else OTHER_NAME
        elif pair_objects((found,), matched, iou_threshold=REPEATED_IOU):
            colour = REPEATED
        colours.append(colour)
    if only_missed:
        taken = {pair.ground_truth for pair in pairs}
        truths = tuple(truth for index, truth in enumerate(truths) if index not in taken)
    for truth in truths:
        pen.outline(truth, TRUTH, dashed=True)
    for found, colour in zip(scene.objects, colours, strict=True):
        pen.outline(found, colour, dashed=False)
    # Labels come last, so that no line crosses them: ground truth at the bottom of its shape,
    # predictions at the top.
    for truth in truths:
        pen.label(truth, printable(truth.desc), TRUTH, at_foot=True)
    for found, colour in zip(scene.objects, colours, strict=True):
        score = "" if only_missed else f" {found.score:.2f}"
        pen.label(found, printable(found.desc) + score, colour, at_foot=False)
    pen.legend(height, "missed (dashed)" if only_missed else "ground truth (dashed)")
    return picture


class _Pen:
    """Draws shapes on `picture`: an image of `width` x `height` pixels, resized by `scale`."""

    def __init__(self, picture: Image.Image, scale: float, width: int, height: int) -> None:
        self._draw = ImageDraw.Draw(picture)
        self._font = ImageFont.load_default(size=13)
        self._scale = scale
        self._width = width
        self._height = height
        self._right = picture.width
        self._bottom = picture.height - _BAND

    def outline(self, shape: Shape, colour: Colour, *, dashed: bool) -> None:
        ring = self._ring(shape)
        for start, end in zip(ring, [*ring[1:], ring[0]], strict=True):
            for line in _dashes(start, end) if dashed else [(start, end)]:
                self._draw.line(line, fill=colour, width=_LINE)

    def label(self, shape: Shape, text: str, colour: Colour, *, at_foot: bool) -> None:
        xs, ys = zip(*self._ring(shape), strict=True)
        left, top, right, bottom = self._draw.textbbox((0, 0), text, font=self._font)
        width = right - left + 6
        height = bottom - top + 6
        # Inside the shape and inside the drawing.
        x = max(0.0, min(min(xs), self._right - width))
        y = max(0.0, min(max(ys) - height if at_foot else min(ys), self._bottom - height))
        self._draw.rectangle((x, y, x + width, y + height), fill=colour)
        self._draw.text((x + 3 - left, y + 3 - top), text, fill="white", font=self._font)

    def legend(self, top: int, truth: str) -> None:
        x = 6.0
        for text, colour in ((truth, TRUTH), *LEGEND):
            self._draw.text((x, top + 4), text, fill=colour, font=self._font)
            x += self._draw.textlength(text, font=self._font) + 14

    def _ring(self, shape: Shape) -> list[PixelPoint]:
        points = [
            pixels_of(point, width=self._width, height=self._height) for point in vertices(shape)
        ]
        scaled = [(x * self._scale, y * self._scale) for x, y in points]
        if shape.kind is not GeometryKind.POINT:
            return scaled
        ((x, y),) = scaled
        arm = _CROSS_ARM
        return [(x - arm, y), (x + arm, y), (x, y), (x, y - arm), (x, y + arm), (x, y)]


def _dashes(start: PixelPoint, end: PixelPoint) -> list[tuple[PixelPoint, PixelPoint]]:
    length = math.dist(start, end)
    if not length:
        return [(start, end)]
    dx = (end[0] - start[0]) / length
    dy = (end[1] - start[1]) / length
    lines = []
    for offset in range(0, math.ceil(length), _DASH + _GAP):
        stop = min(offset + _DASH, length)
        first = (start[0] + dx * offset, start[1] + dy * offset)
        last = (start[0] + dx * stop, start[1] + dy * stop)
        lines.append((first, last))
    return lines
