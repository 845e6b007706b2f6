"""Crowded scenes: many handwritten digits that overlap a little, among clutter.

The task of docs/evidence.md: long answers, in which a model's own mistakes are what follows. Train,
validation and test scenes are of disjoint digits, written by other people. The same arguments give
the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from launch.tools.demo.data import Digit, load_all_digits
from launch.tools.demo.once import make_once
from shared.grounding.geometry import bin_box

CANVAS = 160
"""Width and height of a scene, in pixels."""
GRID = 4
"""Positions are multiples of it: half a patch of the model."""
SIZES = (24, 32, 40, 48)
MIN_DIGITS = 6
MAX_DIGITS = 14
MAX_OVERLAP = 0.15
"""The most of the smaller one's area that two digits share."""
MAX_ATTEMPTS = 200
"""A scene that is not full after so many is begun again."""
MAX_CLUTTER = 8
CLUTTER_SIZES = (12, 16, 20)
SPLITS = {"train": slice(0, 1200), "val": slice(1200, 1497), "test": slice(1497, 1797)}
"""Which of the set's digits the scenes of a split are made of."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A picture on the canvas: `[left, left + size) x [top, top + size)`, in pixels.

    Example: `Placed(scan, "six", left=40, top=8, size=32)`.
    """

    scan: np.ndarray
    """[8, 8] uint8, 0 (paper) to 16."""
    name: str
    """Empty for clutter."""
    left: int
    top: int
    size: int

    def overlap(self, other: Placed) -> float:
        """Return the shared area as a fraction of the smaller one's."""
        right = min(self.left + self.size, other.left + other.size)
        bottom = min(self.top + self.size, other.top + other.size)
        width = max(0, right - max(self.left, other.left))
        height = max(0, bottom - max(self.top, other.top))
        return width * height / min(self.size, other.size) ** 2

    def bins(self) -> tuple[int, int, int, int]:
        """Return (x1, y1, x2, y2) in norm1000 of the first and the last pixel."""
        last = self.size - 1
        return bin_box(
            (self.left, self.top, self.left + last, self.top + last), width=CANVAS, height=CANVAS
        )


def arrange(
    digits: Sequence[Digit],
    rng: np.random.Generator,
    *,
    fewest: int = MIN_DIGITS,
    most: int = MAX_DIGITS,
) -> list[Placed]:
    """Place digits in reading order, then clutter where there is room."""
    count = int(rng.integers(fewest, most + 1))
    scene: list[Placed] = []
    attempts = 0
    while len(scene) < count:
        attempts += 1
        if attempts > MAX_ATTEMPTS:  # there may be no room left for what is still to come
            scene, attempts = [], 0
        digit = digits[int(rng.integers(len(digits)))]
        placed = _somewhere(digit.scan, digit.name, int(rng.choice(SIZES)), rng)
        if all(placed.overlap(other) <= MAX_OVERLAP for other in scene):
            scene.append(placed)
    scene.sort(key=lambda placed: (placed.top, placed.left))
    for _ in range(int(rng.integers(MAX_CLUTTER + 1))):
        # A digit's ink in disorder, so that ink alone does not make an object.
        scan = rng.permutation(digits[int(rng.integers(len(digits)))].scan.ravel()).reshape(8, 8)
        placed = _somewhere(scan, "", int(rng.choice(CLUTTER_SIZES)), rng)
        if all(placed.overlap(other) == 0 for other in scene):
            scene.append(placed)
    return scene


def _somewhere(scan: np.ndarray, name: str, size: int, rng: np.random.Generator) -> Placed:
    left, top = (int(rng.integers((CANVAS - size) // GRID + 1)) * GRID for _ in range(2))
    return Placed(scan, name, left, top, size)


def draw(scene: Sequence[Placed]) -> Image.Image:
    """Draw the scene in grey: the brighter one is seen where two overlap."""
    canvas = np.zeros((CANVAS, CANVAS), dtype=np.uint8)
    for placed in scene:
        scan = Image.fromarray((placed.scan * 255.0 / 16).astype(np.uint8))
        picture = np.asarray(scan.resize((placed.size, placed.size), Image.Resampling.BILINEAR))
        rows = slice(placed.top, placed.top + placed.size)
        columns = slice(placed.left, placed.left + placed.size)
        canvas[rows, columns] = np.maximum(canvas[rows, columns], picture)
    return Image.fromarray(canvas).convert("RGB")


def scenes(
    digits: Sequence[Digit],
    rng: np.random.Generator,
    *,
    fewest: int = MIN_DIGITS,
    most: int = MAX_DIGITS,
) -> Iterator[list[Placed]]:
    """Yield scene after scene, without end."""
    while True:
        yield arrange(digits, rng, fewest=fewest, most=most)


def make_crowded_data(
    out: Path,
    *,
    seed: int,
    counts: Mapping[str, int],
    fewest: int = MIN_DIGITS,
    most: int = MAX_DIGITS,
    phrases: bool = False,
) -> bool:
    """Write `counts` scenes of each split into the folder `out`, as `make_once` does.

    `fewest`, `most`: digits of a scene. `phrases`: each row has a `phrase`, one of the names in its
    scene, and its objects are the digits of that name alone. The scenes are the same.
    """

    def make(folder: Path) -> None:
        digits = load_all_digits()
        for number, split in enumerate(SPLITS):
            rng = np.random.default_rng([seed, number])
            of_split = scenes(digits[SPLITS[split]], rng, fewest=fewest, most=most)
            phrase_rng = np.random.default_rng([seed, number, 1]) if phrases else None
            _write_split(folder, split, islice(of_split, counts[split]), phrase_rng)

    settings: dict[str, str | int] = {"scenes": "crowded", "seed": seed, **counts}
    settings |= {"fewest": fewest, "most": most}
    if phrases:
        settings["rows"] = "phrases"
    return make_once(out, settings, make)


def _write_split(
    folder: Path,
    split: str,
    of_split: Iterable[Sequence[Placed]],
    phrase_rng: np.random.Generator | None,
) -> None:
    (folder / split).mkdir()
    with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as lines:
        for number, scene in enumerate(of_split):
            image = f"{split}/{number:05d}.png"
            draw(scene).save(folder / image)
            objects: list[dict[str, Any]] = [
                {"bbox_2d": placed.bins(), "desc": placed.name} for placed in scene if placed.name
            ]
            record = {"images": [image], "width": CANVAS, "height": CANVAS, "objects": objects}
            if phrase_rng is not None:
                record["phrase"] = objects[int(phrase_rng.integers(len(objects)))]["desc"]
                record["objects"] = [one for one in objects if one["desc"] == record["phrase"]]
            lines.write(json.dumps(record) + "\n")
