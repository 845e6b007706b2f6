"""The demo's data: scenes of real handwritten digits with a box and a name each (decision 31).

The digits come with scikit-learn: 1,500 appear in training scenes, the other 297 in validation
scenes only; they are the last ones of the set, so other people wrote them. The same arguments give
the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.spatial import ConvexHull
from sklearn.datasets import load_digits

from launch.tools.demo.once import make_once
from shared.grounding.geometry import bin_box, bin_points, simplify_ring

CANVAS = 96
"""Width and height of a scene, in pixels."""
GRID = 8
"""Positions and sizes are multiples of a patch of the demo's model, so a box is learnt exactly."""
SIZES = (32, 40, 48)
MAX_DIGITS = 4
NUM_TRAIN_DIGITS = 1500
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PLACEMENT_ATTEMPTS = 64
INK = 96
"""Pixels of at least this brightness (of 255) lie inside a digit's outline."""
MAX_VERTICES = 6
"""The most an outline has: an object with one has 35 tokens, one with a box 19."""


class DemoGeometry(StrEnum):
    BOXES = "boxes"
    POLYGONS = "polygons"
    MIXED = "mixed"
    """Polygons for the odd digits, boxes for the even ones."""


@dataclass(frozen=True, slots=True)
class Digit:
    scan: np.ndarray
    """[8, 8] uint8, 0 (paper) to 16."""
    name: str


@dataclass(frozen=True, slots=True)
class DigitPlacement:
    """A digit on the canvas, in pixels: `[left, left + size) x [top, top + size)`."""

    digit: Digit
    left: int
    top: int
    size: int

    def overlaps(self, other: DigitPlacement) -> bool:
        apart_x = self.left + self.size <= other.left or other.left + other.size <= self.left
        apart_y = self.top + self.size <= other.top or other.top + other.size <= self.top
        return not (apart_x or apart_y)

    def bins(self) -> tuple[int, int, int, int]:
        """Return (x1, y1, x2, y2) in norm1000 of the first and the last pixel."""
        return bin_box(
            (self.left, self.top, self.left + self.size - 1, self.top + self.size - 1),
            width=CANVAS,
            height=CANVAS,
        )

    def picture(self) -> Image.Image:
        """Draw the digit: `size` x `size`, grey, 0 to 255."""
        scan = Image.fromarray((self.digit.scan * 255.0 / 16).astype(np.uint8))
        return scan.resize((self.size, self.size), Image.Resampling.BILINEAR)

    def outline(self) -> tuple[int, ...]:
        """Return x, y in norm1000 of the ink's convex hull, simplified to `MAX_VERTICES`.

        Clockwise from the topmost, then leftmost vertex.
        """
        ys, xs = np.nonzero(np.asarray(self.picture()) >= INK)
        ink = np.stack([xs, ys], axis=1)
        # Qhull goes counterclockwise where y points up, so clockwise in an image.
        hull = [(int(x), int(y)) for x, y in ink[ConvexHull(ink).vertices]]
        # Turned before as well, so that what is left out does not depend on where Qhull begins.
        ring = _from_the_top(simplify_ring(_from_the_top(hull), MAX_VERTICES))
        return bin_points(
            [value for x, y in ring for value in (self.left + x, self.top + y)],
            width=CANVAS,
            height=CANVAS,
        )

    def record_object(self, geometry: DemoGeometry) -> dict[str, Any]:
        """Describe the digit as an object of a record."""
        is_odd = NAMES.index(self.digit.name) % 2 == 1
        if geometry is DemoGeometry.POLYGONS or (geometry is DemoGeometry.MIXED and is_odd):
            return {"poly": self.outline(), "desc": self.digit.name}
        return {"bbox_2d": self.bins(), "desc": self.digit.name}


def _from_the_top(ring: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Turn the ring to begin with its topmost, then leftmost vertex."""
    first = min(range(len(ring)), key=lambda i: (ring[i][1], ring[i][0]))
    return [*ring[first:], *ring[:first]]


def load_all_digits() -> list[Digit]:
    """Return scikit-learn's 1,797 digits in their order, in which writers change."""
    scans = load_digits()
    return [
        Digit(scan=scan.astype(np.uint8), name=NAMES[label])
        for scan, label in zip(scans.images, scans.target, strict=True)
    ]


def load_handwriting() -> tuple[list[Digit], list[Digit]]:
    """Return the digits for training scenes and those for validation scenes, in their order."""
    digits = load_all_digits()
    return digits[:NUM_TRAIN_DIGITS], digits[NUM_TRAIN_DIGITS:]


def arrange_scene(digits: Sequence[Digit], rng: np.random.Generator) -> list[DigitPlacement]:
    """Put 1 to `MAX_DIGITS` digits on the canvas, none over another, in reading order."""
    count = int(rng.integers(1, MAX_DIGITS + 1))
    while True:
        scene: list[DigitPlacement] = []
        for _ in range(PLACEMENT_ATTEMPTS):
            digit = digits[int(rng.integers(len(digits)))]
            size = int(rng.choice(SIZES))
            left = int(rng.integers((CANVAS - size) // GRID + 1)) * GRID
            top = int(rng.integers((CANVAS - size) // GRID + 1)) * GRID
            placement = DigitPlacement(digit, left, top, size)
            if not any(placement.overlaps(other) for other in scene):
                scene.append(placement)
            if len(scene) == count:
                return sorted(scene, key=lambda placed: (placed.top, placed.left))


def draw_scene(scene: Sequence[DigitPlacement]) -> Image.Image:
    canvas = Image.new("L", (CANVAS, CANVAS))
    for placed in scene:
        canvas.paste(placed.picture(), (placed.left, placed.top))
    return canvas.convert("RGB")


def _reading_order(found: dict[str, Any]) -> tuple[int, int]:
    # An outline begins further down and right than the box of its digit.
    bins = found["poly"] if "poly" in found else found["bbox_2d"]
    return min(bins[1::2]), min(bins[::2])


def write_split(
    folder: Path,
    split: str,
    digits: Sequence[Digit],
    count: int,
    geometry: DemoGeometry,
    rng: np.random.Generator,
) -> None:
    """Write `count` scenes: `folder/{split}.jsonl` and `folder/{split}/00000.png` and so on."""
    (folder / split).mkdir()
    with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as lines:
        for number in range(count):
            scene = arrange_scene(digits, rng)
            image = f"{split}/{number:05d}.png"
            draw_scene(scene).save(folder / image)
            objects = [placed.record_object(geometry) for placed in scene]
            objects.sort(key=_reading_order)
            record = {"images": [image], "width": CANVAS, "height": CANVAS, "objects": objects}
            lines.write(json.dumps(record) + "\n")


def make_demo_data(
    out: Path,
    *,
    seed: int,
    num_train: int,
    num_val: int,
    geometry: DemoGeometry = DemoGeometry.BOXES,
) -> bool:
    """Write both splits into the folder `out`, as `make_once` does."""

    def make(folder: Path) -> None:
        train_digits, val_digits = load_handwriting()
        write_split(
            folder, "train", train_digits, num_train, geometry, np.random.default_rng([seed, 0])
        )
        write_split(folder, "val", val_digits, num_val, geometry, np.random.default_rng([seed, 1]))

    settings: dict[str, str | int] = {"seed": seed, "train": num_train, "val": num_val}
    # Folders from before there was a choice stay valid.
    if geometry is not DemoGeometry.BOXES:
        settings["geometry"] = str(geometry)
    return make_once(out, settings, make)
