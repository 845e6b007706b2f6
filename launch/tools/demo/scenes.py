"""Makes two kinds of scenes of handwritten digits with boxes and names
(docs/explanation/decisions.md, 31).

`make_demo_data`: one to four digits on 96 x 96 pixels, without overlap. `make_crowded_data`: more
digits on 160 x 160 pixels, with some overlap and clutter. The crowded scenes are the task of
docs/explanation/evidence.md: in long answers, a model continues its own mistakes.

The digits come from scikit-learn. The splits have disjoint digits, and validation and test digits
are by other writers than training digits. The same arguments give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from launch.tools.demo.once import make_once
from shared.grounding.geometry import bin_box, bin_points, simplify_ring

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

CANVAS = 96
"""Width and height of a demo scene, in pixels."""
GRID = 8
"""Positions and sizes are multiples of the model's patch, so boxes can be learned exactly."""
SIZES = (32, 40, 48)
DEMO_MAX_DIGITS = 4
DEMO_SPLITS = {"train": slice(0, 1500), "val": slice(1500, 1797)}
"""The range of scikit-learn's digits that each split of the demo data uses."""
INK = 96
"""Minimum brightness (of 255) of the pixels inside a digit's outline."""
MAX_VERTICES = 6
"""Maximum vertices of an outline. An object then takes 34 tokens; with a box it takes 18."""

CROWDED_CANVAS = 160
CROWDED_GRID = 4
"""Positions in crowded scenes are multiples of this: half of the model's patch."""
CROWDED_SIZES = (24, 32, 40, 48)
MIN_DIGITS = 6
MAX_DIGITS = 14
MAX_OVERLAP = 0.15
"""Maximum shared area of two digits, as a fraction of the smaller digit."""
MAX_CLUTTER = 8
CLUTTER_SIZES = (12, 16, 20)
SPLITS = {"train": slice(0, 1200), "val": slice(1200, 1497), "test": slice(1497, 1797)}


class DemoGeometry(StrEnum):
    BOXES = "boxes"
    POLYGONS = "polygons"
    MIXED = "mixed"
    """Polygons for digits of odd value, boxes for digits of even value."""


@dataclass(frozen=True, slots=True)
class Digit:
    scan: np.ndarray
    """The digit's pixels, [8, 8] uint8, 0 (paper) to 16 (ink)."""
    name: str
    """Name of the digit, such as `six`; empty for clutter."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A digit at a place of a scene: `[left, left + size) x [top, top + size)`, in pixels.

    Example: `Placed(Digit(scan, "six"), left=40, top=8, size=32, canvas=96)`.
    """

    digit: Digit
    left: int
    top: int
    size: int
    canvas: int
    """Width and height of the scene."""

    @property
    def name(self) -> str:
        return self.digit.name

    def overlap(self, other: Placed) -> float:
        """Return the area shared with another digit, as a fraction of the smaller digit."""
        right = min(self.left + self.size, other.left + other.size)
        bottom = min(self.top + self.size, other.top + other.size)
        width = max(0, right - max(self.left, other.left))
        height = max(0, bottom - max(self.top, other.top))
        return width * height / min(self.size, other.size) ** 2

    def bins(self) -> tuple[int, int, int, int]:
        """Return x1, y1, x2, y2 of the digit's first and last pixel, in norm1000 (0..999)."""
        last = self.size - 1
        corners = (self.left, self.top, self.left + last, self.top + last)
        return bin_box(corners, width=self.canvas, height=self.canvas)

    def picture(self) -> Image.Image:
        """Draw the digit in grey, 0 to 255, with `size` x `size` pixels."""
        scan = Image.fromarray((self.digit.scan * 255.0 / 16).astype(np.uint8))
        return scan.resize((self.size, self.size), Image.Resampling.BILINEAR)

    def outline(self) -> tuple[int, ...]:
        """Return x, y of the ink's convex hull in norm1000 (0..999), at most `MAX_VERTICES` points.

        The order is clockwise from the topmost, then leftmost vertex.
        """
        from scipy.spatial import ConvexHull  # takes half a second

        ys, xs = np.nonzero(np.asarray(self.picture()) >= INK)
        ink = np.stack([xs, ys], axis=1)
        # Qhull is counterclockwise for y up, so clockwise in an image.
        hull = [(int(x), int(y)) for x, y in ink[ConvexHull(ink).vertices]]
        # Rotated before simplifying too: the result must not depend on Qhull's first vertex.
        ring = _from_the_top(simplify_ring(_from_the_top(hull), MAX_VERTICES))
        return bin_points(
            [value for x, y in ring for value in (self.left + x, self.top + y)],
            width=self.canvas,
            height=self.canvas,
        )

    def record_object(self, geometry: DemoGeometry) -> dict[str, object]:
        """Return the digit as an object of a dataset row."""
        is_odd = NAMES.index(self.name) % 2 == 1
        if geometry is DemoGeometry.POLYGONS or (geometry is DemoGeometry.MIXED and is_odd):
            return {"poly": self.outline(), "desc": self.name}
        return {"bbox_2d": self.bins(), "desc": self.name}


Scene = list[Placed]


def _from_the_top(ring: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Rotate the ring so that it begins at the topmost, then leftmost vertex."""
    first = min(range(len(ring)), key=lambda i: (ring[i][1], ring[i][0]))
    return [*ring[first:], *ring[:first]]


def load_all_digits() -> list[Digit]:
    """Return scikit-learn's 1,797 digits in their order, which is by writer."""
    from sklearn.datasets import load_digits  # takes a second

    scans = load_digits()
    return [
        Digit(scan=scan.astype(np.uint8), name=NAMES[label])
        for scan, label in zip(scans.images, scans.target, strict=True)
    ]


def _arranged(
    digits: Sequence[Digit],
    count: int,
    rng: np.random.Generator,
    *,
    sizes: Sequence[int],
    grid: int,
    canvas: int,
    max_overlap: float,
    max_attempts: Iterable[int],
) -> Scene:
    """Return `count` digits placed on the canvas, in reading order.

    `max_attempts` are numbers of random placements. If that many placements, of which some overlap,
    do not give `count` digits, a new scene is started with the next number of placements.
    """
    for most in max_attempts:
        scene: Scene = []
        for _ in range(most):
            digit = digits[int(rng.integers(len(digits)))]
            placed = _somewhere(digit, int(rng.choice(sizes)), grid, canvas, rng)
            if all(placed.overlap(other) <= max_overlap for other in scene):
                scene.append(placed)
            if len(scene) == count:
                return sorted(scene, key=lambda placed: (placed.top, placed.left))
    raise AssertionError("max_attempts must be infinite")


def _somewhere(digit: Digit, size: int, grid: int, canvas: int, rng: np.random.Generator) -> Placed:
    left, top = (int(rng.integers((canvas - size) // grid + 1)) * grid for _ in range(2))
    return Placed(digit, left, top, size, canvas)


def demo_scenes(digits: Sequence[Digit], rng: np.random.Generator) -> Iterator[Scene]:
    """Yield endless random demo scenes of one to four digits."""
    while True:
        count = int(rng.integers(1, DEMO_MAX_DIGITS + 1))
        yield _arranged(
            digits,
            count,
            rng,
            sizes=SIZES,
            grid=GRID,
            canvas=CANVAS,
            max_overlap=0,
            max_attempts=repeat(64),
        )


def crowded_scenes(
    digits: Sequence[Digit],
    rng: np.random.Generator,
    *,
    fewest: int = MIN_DIGITS,
    most: int = MAX_DIGITS,
) -> Iterator[Scene]:
    """Yield endless random scenes of many digits, with clutter in the remaining room."""
    place = {"grid": CROWDED_GRID, "canvas": CROWDED_CANVAS}
    while True:
        count = int(rng.integers(fewest, most + 1))
        scene = _arranged(
            digits,
            count,
            rng,
            sizes=CROWDED_SIZES,
            max_overlap=MAX_OVERLAP,
            # Reproduces the data of docs/explanation/evidence.md.
            max_attempts=chain((200,), repeat(201)),
            **place,
        )
        for _ in range(int(rng.integers(MAX_CLUTTER + 1))):
            # Shuffled ink of a digit, so that ink does not always mean an object.
            ink = digits[int(rng.integers(len(digits)))].scan.ravel()
            clutter = Digit(rng.permutation(ink).reshape(8, 8), "")
            placed = _somewhere(clutter, int(rng.choice(CLUTTER_SIZES)), rng=rng, **place)
            if all(placed.overlap(other) == 0 for other in scene):
                scene.append(placed)
        yield scene


def draw(scene: Sequence[Placed]) -> Image.Image:
    """Draw a scene as a grey image. Overlapping digits show the brighter pixel."""
    side = scene[0].canvas
    canvas = np.zeros((side, side), dtype=np.uint8)
    for placed in scene:
        rows = slice(placed.top, placed.top + placed.size)
        columns = slice(placed.left, placed.left + placed.size)
        canvas[rows, columns] = np.maximum(canvas[rows, columns], np.asarray(placed.picture()))
    return Image.fromarray(canvas).convert("RGB")


def _reading_order(found: dict[str, Any]) -> tuple[int, int]:
    # The outline of a digit begins further down and right than its box.
    bins = found["poly"] if "poly" in found else found["bbox_2d"]
    return min(bins[1::2]), min(bins[::2])


def _write_split(
    folder: Path,
    split: str,
    scenes: Iterable[Scene],
    geometry: DemoGeometry = DemoGeometry.BOXES,
    phrase_rng: np.random.Generator | None = None,
) -> None:
    """Write the scenes to `folder/{split}.jsonl` and `folder/{split}/00000.png`, ...."""
    (folder / split).mkdir()
    with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as lines:
        for number, scene in enumerate(scenes):
            image = f"{split}/{number:05d}.png"
            draw(scene).save(folder / image)
            objects = [placed.record_object(geometry) for placed in scene if placed.name]
            objects.sort(key=_reading_order)
            side = scene[0].canvas
            record = {"images": [image], "width": side, "height": side, "objects": objects}
            if phrase_rng is not None:
                record["phrase"] = objects[int(phrase_rng.integers(len(objects)))]["desc"]
                record["objects"] = [one for one in objects if one["desc"] == record["phrase"]]
            lines.write(json.dumps(record) + "\n")


def make_demo_data(
    out: Path,
    *,
    seed: int,
    num_train: int,
    num_val: int,
    geometry: DemoGeometry = DemoGeometry.BOXES,
) -> bool:
    """Write demo scenes of training and validation to the folder `out` with `make_once`.

    Return whether the folder is new.
    """
    counts = {"train": num_train, "val": num_val}

    def make(folder: Path) -> None:
        digits = load_all_digits()
        for number, (split, part) in enumerate(DEMO_SPLITS.items()):
            scenes = demo_scenes(digits[part], np.random.default_rng([seed, number]))
            _write_split(folder, split, islice(scenes, counts[split]), geometry)

    settings: dict[str, str | int] = {"seed": seed, **counts}
    # Folders from before this option stay valid.
    if geometry is not DemoGeometry.BOXES:
        settings["geometry"] = str(geometry)
    return make_once(out, settings, make)


def make_crowded_data(
    out: Path,
    *,
    seed: int,
    counts: Mapping[str, int],
    fewest: int = MIN_DIGITS,
    most: int = MAX_DIGITS,
    phrases: bool = False,
) -> bool:
    """Write `counts` crowded scenes of each split to the folder `out` with `make_once`.

    `fewest`, `most`: least and greatest number of digits in a scene. `phrases`: each row has a
    `phrase`, which is the name of a digit in the scene, and its objects are only the digits of that
    name. The scenes are the same as without `phrases`.

    Return whether the folder is new.
    """

    def make(folder: Path) -> None:
        digits = load_all_digits()
        for number, (split, part) in enumerate(SPLITS.items()):
            rng = np.random.default_rng([seed, number])
            scenes = crowded_scenes(digits[part], rng, fewest=fewest, most=most)
            phrase_rng = np.random.default_rng([seed, number, 1]) if phrases else None
            of_split = islice(scenes, counts[split])
            _write_split(folder, split, of_split, phrase_rng=phrase_rng)

    settings: dict[str, str | int] = {"scenes": "crowded", "seed": seed, **counts}
    settings |= {"fewest": fewest, "most": most}
    if phrases:
        settings["rows"] = "phrases"
    return make_once(out, settings, make)
