"""Checking the images of a data file at the start: one by one, by several processes, and known from an earlier start.

`python -m benchmarks.image_files`. Every way loads the same rows, and the samples must be equal. Driver and learner
ranks check the same file one after the other: before, each paid "one by one"; now the first pays "first start", and all others "known".
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from learner.image_files import image_size, known_images
from shared.dataset import Dataset, image_names, load_dataset

WIDTH, HEIGHT = 1024, 768


def write_data(folder: Path, num_images: int) -> Path:
    """JPEG photos of noise over a gradient, each of one row."""
    generator = np.random.default_rng(0)
    gradient = np.linspace(0, 200, WIDTH)[None, :, None]
    rows = []
    for number in range(num_images):
        pixels = gradient + generator.integers(0, 55, (HEIGHT, WIDTH, 3))
        encoded = io.BytesIO()
        Image.fromarray(pixels.astype(np.uint8)).save(encoded, format="JPEG", quality=85)
        (folder / f"{number}.jpg").write_bytes(encoded.getvalue())
        objects = [{"bbox_2d": [10, 10 + i, 500, 600 + i], "desc": "a thing"} for i in range(10)]
        rows.append({"images": [f"{number}.jpg"], "width": WIDTH, "height": HEIGHT, "objects": objects})
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def one_by_one(file: Path) -> Dataset:
    return load_dataset(file, on_bad_row="error", sort_objects=True, check_images=True, image_size=image_size)


def known(file: Path) -> Dataset:
    facts = known_images(file, image_names(file))
    return load_dataset(file, on_bad_row="error", sort_objects=True, check_images=True, known_images=facts)


def first_start(file: Path) -> Dataset:
    shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)
    return known(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1_000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    ways: dict[str, Callable[[Path], Dataset]] = {"one by one": one_by_one, "first start": first_start, "known": known}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder, "cache"))
        file = write_data(Path(folder), arguments.images)
        expected = one_by_one(file)
        for _ in range(arguments.repeats):
            for name, way in ways.items():
                started_s = time.perf_counter()
                dataset = way(file)
                seconds[name].append(time.perf_counter() - started_s)
                assert dataset == expected, f"{name}: other samples"
    print(f"{arguments.images} images of {WIDTH} x {HEIGHT}, {len(os.sched_getaffinity(0))} processors, {arguments.repeats} times in turn")
    for name, values in seconds.items():
        ratio = statistics.median(before / after for before, after in zip(seconds["one by one"], values, strict=True))
        print(f"{name:12} {1000 * statistics.median(values) / arguments.images:7.3f} ms an image  ratio {ratio:7.1f}")
    print("Every way gave the same samples.")


if __name__ == "__main__":
    main()
