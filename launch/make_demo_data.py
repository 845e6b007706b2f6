"""Makes the demo's data: scenes of real handwritten digits with a box and a name each.

`python -m launch.make_demo_data --out outputs/demo/data` writes `train.jsonl`, `val.jsonl` and their PNG files, in the record format
that the ordinary loader reads (DESIGN 7.1). The digits come with scikit-learn: 1,500 appear in training scenes, the other 297 in
validation scenes only. They are the last ones of the set, so other people wrote them. The same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from launch.make_once import make_once
from shared.grounding.geometry import bin_box

CANVAS = 96
"""Width and height of a scene, in pixels."""
GRID = 8
"""Positions and sizes are multiples of this many pixels (one patch of the demo's model), so that a box can be learned exactly."""
SIZES = (32, 40, 48)
MAX_DIGITS = 4
NUM_TRAIN_DIGITS = 1500
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PLACEMENT_ATTEMPTS = 64


@dataclass(frozen=True, slots=True)
class Digit:
    scan: np.ndarray
    """[8, 8] uint8, 0 (paper) to 16."""
    name: str


@dataclass(frozen=True, slots=True)
class Placement:
    """A digit on the canvas. Pixels; its box is that of its scan, half-open, `[left, left + size) x [top, top + size)`."""

    digit: Digit
    left: int
    top: int
    size: int

    def overlaps(self, other: Placement) -> bool:
        apart_x = self.left + self.size <= other.left or other.left + other.size <= self.left
        apart_y = self.top + self.size <= other.top or other.top + other.size <= self.top
        return not (apart_x or apart_y)

    def bins(self) -> tuple[int, int, int, int]:
        """(x1, y1, x2, y2) in norm1000 of the first and the last pixel."""
        return bin_box((self.left, self.top, self.left + self.size - 1, self.top + self.size - 1), width=CANVAS, height=CANVAS)


def load_handwriting() -> tuple[list[Digit], list[Digit]]:
    """(digits for training scenes, digits for validation scenes), in the order of the data set."""
    scans = load_digits()
    digits = [Digit(scan=scan.astype(np.uint8), name=NAMES[label]) for scan, label in zip(scans.images, scans.target, strict=True)]
    return digits[:NUM_TRAIN_DIGITS], digits[NUM_TRAIN_DIGITS:]


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
    size = int(rng.choice(SIZES))
    left, top = (int(rng.integers((CANVAS - size) // GRID + 1)) * GRID for _ in range(2))
    return Placement(digit=digit, left=left, top=top, size=size)


def draw_scene(scene: Sequence[Placement]) -> Image.Image:
    canvas = Image.new("L", (CANVAS, CANVAS))
    for placed in scene:
        scan = Image.fromarray((placed.digit.scan * 255.0 / 16).astype(np.uint8))
        canvas.paste(scan.resize((placed.size, placed.size), Image.Resampling.BILINEAR), (placed.left, placed.top))
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
