"""Measure seconds and memory of loading the data at the start of a run with many images.

`python -m benchmarks.start` loads the data as the driver and each learner rank do at the start,
each time in a separate process: once without a cache and once with the cache of the first time,
for a tenth of the records and for all of them. The samples must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from PIL import Image

from launch.tools.demo.model import make_demo_model
from shared.prompts import DEFAULT_USER_PROMPT

CONFIG = Path(__file__).parents[1] / "tests/data/minimal_config.yaml"
WIDTH = 64
HEIGHT = 48
LINKS = 10_000
"""Number of hard links to one image file; ext4 allows 65,000."""
OBJECTS = 7.3
"""Mean number of objects per image, as in COCO."""
NAMES = ("person", "car", "dining table", "traffic light", "sports ball", "potted plant")


def write_data(folder: Path, num_records: int) -> None:
    """Write a data file with rows of one image each; all image files are the same small image."""
    drawn = random.Random(num_records)
    folder.mkdir()
    (folder / "images").mkdir()
    with (folder / "train.jsonl").open("w") as file:
        for number in range(num_records):
            name = f"images/{number:012d}.jpg"
            picture = folder / f"picture_{number // LINKS}.jpg"
            if number % LINKS == 0:
                Image.new("RGB", (WIDTH, HEIGHT)).save(picture)
            (folder / name).hardlink_to(picture)
            objects = []
            for _ in range(1 + int(drawn.expovariate(1 / (OBJECTS - 0.5)))):
                x, y = drawn.randrange(900), drawn.randrange(900)
                box = [x, y, drawn.randrange(x, 1000), drawn.randrange(y, 1000)]
                objects.append({"bbox_2d": box, "desc": drawn.choice(NAMES)})
            row = {"id": f"picture-{number}", "images": [name], "width": WIDTH, "height": HEIGHT}
            file.write(json.dumps(row | {"objects": objects}) + "\n")


def memory_mb(line: str) -> float:
    """Return a memory figure of this process in MB, from a line of `/proc/self/status`."""
    status = Path("/proc/self/status").read_text()
    (value,) = (row.split()[1] for row in status.splitlines() if row.startswith(line))
    return int(value) / 1000


def start(folder: Path, model: Path) -> dict[str, object]:
    """Load the data as a run does at its start; return times, memory and a digest of samples."""
    from learner.data.fitting import require_train_lengths
    from learner.data.samples import load_samples
    from learner.model.loading import load_tokens
    from learner.segments import PromptEncoder
    from shared.config import load_config

    values = yaml.safe_load(CONFIG.read_text())
    values["model"]["path"] = str(model)
    values["data"] = {"train": str(folder / "train.jsonl")}
    values["global_max_length"] = 20_000
    config = load_config(values)
    tokens = load_tokens(config)
    encoder = PromptEncoder(tokens.processor, config.prompts)
    before_mb = memory_mb("VmRSS")
    started_s = time.perf_counter()
    dataset = load_samples(config, *config.data.sources("train"))
    rows_s = time.perf_counter() - started_s
    fitting = require_train_lengths(config, dataset, encoder, tokens.codec)
    return {
        "rows_s": rows_s,
        "lengths_s": time.perf_counter() - started_s - rows_s,
        "held_mb": memory_mb("VmRSS") - before_mb,
        "peak_mb": memory_mb("VmHWM") - before_mb,
        "digest": fitting.measures.digest,
        "num_samples": len(fitting.samples),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--start", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start is not None:
        print(json.dumps(start(*arguments.start)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "model"
        make_demo_model(model, seed=17, prompt=DEFAULT_USER_PROMPT)
        environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
        for num_records in (arguments.records // 10, arguments.records):
            data = folder / str(num_records)
            write_data(data, num_records)
            digests = set()
            for which in ("nothing kept", "kept"):
                command = [sys.executable, "-m", "benchmarks.start", "--start", data, model]
                done = subprocess.run(
                    command, env=environment, check=True, capture_output=True, text=True
                )
                found = json.loads(done.stdout.splitlines()[-1])
                digests.add(found["digest"])
                assert found["num_samples"] == num_records
                print(
                    f"{num_records:>7} records, {which:<12}  rows {found['rows_s']:6.2f} s, lengths"
                    f" {found['lengths_s']:6.2f} s; memory {found['held_mb']:5.0f} MB more, at most"
                    f" {found['peak_mb']:5.0f} MB",
                    flush=True,
                )
            assert len(digests) == 1, "the samples differ"
    print("Both ways gave the same samples.")


if __name__ == "__main__":
    main()
