"""Checks of a data file at the start: its images decoded, and known from an earlier start; the
lengths of its prompts.

`python -m benchmarks.image_files`. Every way loads the same rows, and the samples must be equal.
Driver and learner ranks check the same file one after the other: before, each paid "decoded"; now
the first does, and all others pay "known". Of lengths each paid "encoded" for every size of
picture.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image
from transformers import AutoProcessor, Qwen2VLImageProcessor

from launch.tools.demo.model import make_demo_model
from learner.data.fitting import require_lengths
from learner.data.samples import fingerprints, image_size, known_images
from learner.segments import PromptEncoder
from shared.dataset import Dataset, image_names, load_dataset
from shared.prompts import DEFAULT_USER_PROMPT, Prompts
from shared.tokens.hf_codec import HFTokenCodec

T = TypeVar("T")

WIDTH = 1024
HEIGHT = 768
NUM_SIZES = 50


def write_data(folder: Path, num_images: int) -> Path:
    """JPEG photos of noise over a gradient, each of one row and, as photos are, of many sizes."""
    generator = np.random.default_rng(0)
    gradient = np.linspace(0, 200, WIDTH)[None, :, None]
    rows = []
    for number in range(num_images):
        height = HEIGHT - number % NUM_SIZES
        pixels = gradient + generator.integers(0, 55, (height, WIDTH, 3))
        encoded = io.BytesIO()
        Image.fromarray(pixels.astype(np.uint8)).save(encoded, format="JPEG", quality=85)
        (folder / f"{number}.jpg").write_bytes(encoded.getvalue())
        objects = [{"bbox_2d": [10, 10 + i, 500, 600 + i], "desc": "a thing"} for i in range(10)]
        rows.append(
            {"images": [f"{number}.jpg"], "width": WIDTH, "height": height, "objects": objects}
        )
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def decoded(file: Path) -> Dataset:
    return load_dataset(
        file, on_bad_row="error", sort_objects=True, check_images=True, image_size=image_size
    )


def known(file: Path) -> Dataset:
    facts = known_images(file, fingerprints(file, image_names(file)))
    return load_dataset(
        file, on_bad_row="error", sort_objects=True, check_images=True, known_images=facts
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {
        name: [] for name in ("decoded", "known", "encoded", "by size", "all of the check")
    }

    def timed(name: str, work: Callable[..., T], *given: object) -> T:
        started_s = time.perf_counter()
        result = work(*given)
        seconds[name].append(time.perf_counter() - started_s)
        return result

    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder, "cache"))
        make_demo_model(Path(folder, "model"), seed=17, prompt=DEFAULT_USER_PROMPT)
        processor = AutoProcessor.from_pretrained(Path(folder, "model"))
        # The demo's own limits are those of its small pictures.
        processor.image_processor = Qwen2VLImageProcessor(
            patch_size=16, merge_size=2, min_pixels=65_536, max_pixels=2_000_000
        )
        codec = HFTokenCodec(processor.tokenizer)
        file = write_data(Path(folder), arguments.images)
        encoder = PromptEncoder(processor, Prompts())
        check = partial(
            require_lengths,
            encoder=encoder,
            codec=codec,
            max_new_tokens=9,
            global_max_length=10**6,
            on_bad_row="error",
        )
        known(file)
        for _ in range(arguments.repeats):
            dataset = timed("decoded", decoded, file)
            assert timed("known", known, file) == dataset, "other samples"
            of_sizes = dataset[:NUM_SIZES]
            prompts = timed("encoded", list, map(encoder.encode, of_sizes))
            assert timed("by size", list, map(encoder.num_tokens, of_sizes)) == [
                len(prompt.token_ids) for prompt in prompts
            ], "other lengths"
            timed("all of the check", check, dataset)
    print(
        f"{arguments.images} images of {WIDTH} x about {HEIGHT} in {NUM_SIZES} sizes, 10 objects"
        f" each, {arguments.repeats} times in turn"
    )
    for before, after, number in (
        ("decoded", "known", arguments.images),
        ("encoded", "by size", len(of_sizes)),
    ):
        ratio = statistics.median(
            one / other for one, other in zip(seconds[before], seconds[after], strict=True)
        )
        per_image = [1000 * statistics.median(seconds[name]) / number for name in (before, after)]
        print(
            f"{before} {per_image[0]:.3f} ms an image, {after} {per_image[1]:.3f}, ratio"
            f" {ratio:.1f}"
        )
    print(
        "all of the check of lengths, with the ground truths:"
        f" {1000 * statistics.median(seconds['all of the check']) / arguments.images:.3f} ms a row"
    )
    print("Both ways gave the same samples and lengths.")


if __name__ == "__main__":
    main()
