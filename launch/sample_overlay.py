"""Objects drawn over an image as inline SVG: sharp at any size, and the image's bytes are on the page once (issue 3, "Seeing a sample")."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from launch.html_text import attribute, inline
from shared.pictures import on_white
from shared.records import GeometryKind
from shared.tokens.vocabulary import NUM_BINS

MATCH_COLOURS = ("#0072b2", "#00875a", "#a64ca6", "#b26b00", "#00838f", "#5b4fc7", "#6b7d00", "#8d5524", "#c2185b", "#2e5fa3")
"""Of pairs, in turn; none is close to the two below."""
UNMATCHED_PREDICTION = "#d62222"
UNMATCHED_TRUTH = "#1a1a1a"

_SHOWN_WIDTH = 480
"""About what a panel measures on the page, in CSS pixels: letters are sized for it, whatever the image measures."""
_EMBEDDED = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
_ORIENTATION = 0x0112
"""EXIF: browsers turn an image by it, the training does not."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One object to draw."""

    kind: str
    bins: Sequence[int]
    """0..999: x1, y1, x2, y2, or x, y per vertex."""
    label: str
    """At its upper left corner; empty for none."""
    title: str
    """Shown under the pointer."""
    colour: str
    dashed: bool


@dataclass(frozen=True, slots=True)
class Canvas:
    """The images of a sample, all of one size in pixels."""

    images: tuple[bytes, ...]
    """Encoded files."""
    width: int
    height: int

    def definitions(self) -> str:
        """The images, once, for `panel` to use. Goes into the page before any panel."""
        images = "".join(
            f'<image id="image{i}" width="{self.width}" height="{self.height}" preserveAspectRatio="none" href="{_data_uri(data)}"/>'
            for i, data in enumerate(self.images)
        )
        return f'<svg width="0" height="0" class="definitions" aria-hidden="true"><defs>{images}</defs></svg>'

    def panel(self, image: int, shapes: Sequence[Shape], caption: str) -> str:
        drawn = "".join(self._draw(shape) for shape in shapes)
        small = ' class="pixels"' if self.width < _SHOWN_WIDTH else ""
        return (
            f'<figure><svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{attribute(caption)}"{small}>'
            f'<use href="#image{image}"/>{drawn}</svg><figcaption>{inline(caption)}</figcaption></figure>'
        )

    def _draw(self, shape: Shape) -> str:
        points = _outline(shape, self.width, self.height)
        path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if shape.dashed else ""
        # A white line underneath keeps every colour visible on any image.
        lines = f'<polygon points="{path}" class="halo"/><polygon points="{path}" stroke="{shape.colour}"{dash}/>'
        return f"<g><title>{inline(shape.title)}</title>{lines}{self._label(shape, points)}</g>"

    def _label(self, shape: Shape, points: Sequence[tuple[float, float]]) -> str:
        if not shape.label:
            return ""
        unit = self.width / _SHOWN_WIDTH
        left, top = min(x for x, _ in points), min(y for _, y in points)
        x, y = min(left + 4 * unit, self.width - 10 * unit * len(shape.label)), min(max(top, 0) + 16 * unit, self.height - 4 * unit)
        return f'<text x="{x:.2f}" y="{y:.2f}" font-size="{14 * unit:.2f}" stroke-width="{4 * unit:.2f}" fill="{shape.colour}">{inline(shape.label)}</text>'


def _outline(shape: Shape, width: int, height: int) -> list[tuple[float, float]]:
    """Vertices in pixels, at pixel centres: bin k of an axis of length W is pixel `k / 999 * (W - 1)`."""
    bins = shape.bins
    if shape.kind == GeometryKind.BBOX:
        x1, y1, x2, y2 = bins
        bins = (x1, y1, x2, y1, x2, y2, x1, y2)
    last = NUM_BINS - 1
    return [(x / last * (width - 1) + 0.5, y / last * (height - 1) + 0.5) for x, y in zip(bins[::2], bins[1::2], strict=True)]


def _data_uri(data: bytes) -> str:
    """The file as it is where every browser shows it as the training sees it; a PNG of its pixels otherwise."""
    with Image.open(io.BytesIO(data)) as image:
        if image.format in _EMBEDDED and _is_upright(image):
            return f"data:{_EMBEDDED[image.format]};base64,{base64.b64encode(data).decode()}"
        file = io.BytesIO()
        on_white(image).save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _is_upright(image: Image.Image) -> bool:
    try:
        return bool(image.getexif().get(_ORIENTATION, 1) == 1)
    except Exception:  # whatever Pillow's reading of damaged EXIF data runs into, which browsers may read otherwise
        return False
