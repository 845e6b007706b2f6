"""Makes the demo's data: scenes of real handwritten digits with a box and a name each.

`python -m launch.make_demo_data --out outputs/demo/data` writes `train.jsonl`, `val.jsonl` and their PNG files, in the record format
that the ordinary loader reads (DESIGN 7.1). The digits come with scikit-learn: 1,500 appear in training scenes, the other 297 in
validation scenes only. They are the last ones of the set, so other people wrote them. The same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from launch.make_once import make_once

CANVAS = 96
"""Width and height of a scene, in pixels."""
GRID = 8
"""Positions and sizes are multiples of this many pixels (one patch of the demo's model), so that a box can be learned exactly."""
HEIGHTS = (32, 40, 48)
MIN_WIDTH = 16
MAX_DIGITS = 4
NUM_TRAIN_DIGITS = 1500
FAINTEST_INK = 3
"""Of 16: a lighter pixel of the scan counts as paper when a digit is cropped."""
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PLACEMENT_ATTEMPTS = 64


@dataclass(frozen=True, slots=True)
class Digit:
    ink: np.ndarray
    """[rows, columns] uint8, 0 (paper) to 16, cropped to the ink."""
    name: str


@dataclass(frozen=True, slots=True)
class Placement:
    """A digit on the canvas. Pixels; the box of its ink is half-open, `[left, left + width) x [top, top + height)`."""

    digit: Digit
    left: int
    top: int
    width: int
    height: int

    def overlaps(self, other: Placement) -> bool:
        apart_x = self.left + self.width <= other.left or other.left + other.width <= self.left
        apart_y = self.top + self.height <= other.top or other.top + other.height <= self.top
        return not (apart_x or apart_y)

    def bins(self) -> tuple[int, int, int, int]:
        """(x1, y1, x2, y2) in norm1000 of the first and the last pixel of the ink, rounded outwards (DESIGN 4)."""
        scale = 999 / (CANVAS - 1)
        right, bottom = self.left + self.width - 1, self.top + self.height - 1
        return math.floor(self.left * scale), math.floor(self.top * scale), math.ceil(right * scale), math.ceil(bottom * scale)


def load_handwriting() -> tuple[list[Digit], list[Digit]]:
    """(digits for training scenes, digits for validation scenes), in the order of the data set."""
    scans = load_digits()
    digits = [Digit(ink=_crop(scan.astype(np.uint8)), name=NAMES[label]) for scan, label in zip(scans.images, scans.target, strict=True)]
    return digits[:NUM_TRAIN_DIGITS], digits[NUM_TRAIN_DIGITS:]


def _crop(scan: np.ndarray) -> np.ndarray:
    rows = np.flatnonzero((scan >= FAINTEST_INK).any(axis=1))
    columns = np.flatnonzero((scan >= FAINTEST_INK).any(axis=0))
    return scan[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def arrange_scene(digits: Sequence[Digit], rng: np.random.Generator) -> list[Placement]:
    """1 to `MAX_DIGITS` digits at free places of the canvas, in reading order."""
    count = int(rng.integers(1, MAX_DIGITS + 1))
    while True:
        scene: list[Placement] = []
        for _ in range(PLACEMENT_ATTEMPTS):
            placement = _place_anywhere(digits[int(rng.integers(len(digits)))], rng)
            if not any(placement.overlaps(other) for other in scene):
                scene.append(placement)
            if len(scene) == count:
                return sorted(scene, key=lambda placed: (placed.top, placed.left))


def _place_anywhere(digit: Digit, rng: np.random.Generator) -> Placement:
    """At a random height and position; the width keeps the digit's proportions as closely as the grid allows."""
    height = int(rng.choice(HEIGHTS))
    rows, columns = digit.ink.shape
    width = max(math.floor(height * columns / rows / GRID + 0.5) * GRID, MIN_WIDTH)
    left = int(rng.integers((CANVAS - width) // GRID + 1)) * GRID
    top = int(rng.integers((CANVAS - height) // GRID + 1)) * GRID
    return Placement(digit=digit, left=left, top=top, width=width, height=height)


def draw_scene(scene: Sequence[Placement]) -> Image.Image:
    canvas = Image.new("L", (CANVAS, CANVAS))
    for placed in scene:
        ink = Image.fromarray((placed.digit.ink * 255.0 / 16).astype(np.uint8))
        canvas.paste(ink.resize((placed.width, placed.height), Image.Resampling.BILINEAR), (placed.left, placed.top))
    return canvas.convert("RGB")


def write_split(folder: Path, split: str, digits: Sequence[Digit], count: int, rng: np.random.Generator) -> None:
    """`count` scenes: `folder/{split}.jsonl` and `folder/{split}/00000.png` and so on."""
    (folder / split).mkdir()
    with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as lines:
        for number in range(count):
            scene = arrange_scene(digits, rng)
            image = f"{split}/{number:05d}.png"
            draw_scene(scene).save(folder / image)
            objects = [{"bbox_2d": placed.bins(), "desc": placed.digit.name} for placed in scene]
            lines.write(json.dumps({"images": [image], "width": CANVAS, "height": CANVAS, "objects": objects}) + "\n")


def make_demo_data(out: Path, *, seed: int, num_train: int, num_val: int) -> bool:
    """Writes both splits into the folder `out`, unless they are there. True where they were made now; ConfigError: see `make_once`."""

    def make(folder: Path) -> None:
        train_digits, val_digits = load_handwriting()
        write_split(folder, "train", train_digits, num_train, np.random.default_rng([seed, 0]))
        write_split(folder, "val", val_digits, num_val, np.random.default_rng([seed, 1]))

    return make_once(out, {"seed": seed, "train": num_train, "val": num_val}, make)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m launch.make_demo_data", description="Make the demo's data: scenes of handwritten digits.")
    parser.add_argument("--out", type=Path, default=Path("outputs/demo/data"), help="folder to make (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--train", type=int, default=2000, help="number of training scenes (default: %(default)s)")
    parser.add_argument("--val", type=int, default=256, help="number of validation scenes (default: %(default)s)")
    options = parser.parse_args(arguments)
    made = make_demo_data(options.out, seed=options.seed, num_train=options.train, num_val=options.val)
    print(f"demo data: {options.train} training and {options.val} validation scenes in {options.out}" + ("" if made else " (there already)"))


if __name__ == "__main__":
    main()
