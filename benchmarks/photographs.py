"""Compare ways of continued training on photographs: blood cells, from a model of this project.

    python -m benchmarks.photographs --source FOLDER [--out outputs/photographs] [--arms NAME ...]
                                     [--seeds 1 2 3] [--jobs 2]
    python -m benchmarks.photographs --table

`--source` is BCCD in Pascal VOC's layout: 364 photographs of 640 x 480 pixels, MIT licence
(BCCD_Dataset of Shenggan). The task is its white cells and platelets, one to seven in a photograph.
Its red cells, eleven in each, are left out: the model does not learn to find them
(docs/explanation/evidence.md). The arms and the table are those of `benchmarks.evidence`, which the
initial checkpoint's training follows too. The test split is used only by the arms. At the end,
pycocotools evaluates the exported results of every run against the XML files, and must agree with
the run's report.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import compress, count, islice
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from benchmarks import evidence
from launch.tools.coco import ExportOptions, export_coco
from launch.tools.demo.crowded_model import TEXT_SETTINGS
from launch.tools.demo.model import random_model
from launch.tools.demo.once import make_once
from launch.tools.demo.tower import LabelledBox, LabelledImage, teach_tower
from learner.data.augment import Augmenter
from learner.segments import decode_image
from shared.config.model import AugmentSection
from shared.dataset import Draw, load_dataset
from shared.prompts import DEFAULT_USER_PROMPT
from shared.records import GroundTruthObject, Sample
from shared.tokens.vocabulary import NUM_BINS, coord_token

NAMES = ("RBC", "WBC", "Platelets")
TASK = NAMES[1:]
"""Names of the cells that the model must find. The tower is taught all three."""
LEAST_SIDE, SIDE = 64, 224
"""Images have at least and at most these numbers of pixels, squared: a photograph has 256 x 192,
which are 192 tokens."""
SCALE = 0.4
"""Of a photograph, for its parts too: cells of one size are learned in half of the time."""
TOWER_UPDATES = 2000
NUM_PARTS = 6000
MOST = 4
"""Most cells of the task in a part."""
FEW_UPDATES = 1500
FALL_UPDATES = 600
COCO_TOLERANCE = 1e-6
AUGMENT = AugmentSection(flip=0.5, crop=0.8, colour=0.2)
PARTS = AugmentSection(flip=0.5, crop=0.15, colour=0.2)
SIZES = (
    "global_max_length=768",  # image 192, answer 144 and 7 appended objects of 18 tokens
    "rollout_matching.max_new_tokens=144",  # 8 objects; no photograph has more than 7
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, help="BCCD's folder, with Annotations")
    arms = ["sft", "b_50", "best", "sft_wall"]
    evidence.add_options(parser, Path("outputs/photographs"), arms)
    options = parser.parse_args()
    if options.source is None and not options.table:
        sys.exit("--source: give BCCD's folder, which has Annotations, ImageSets and JPEGImages")
    results = evidence.RESULTS / "photographs"
    make = partial(make_start, options.source, results)
    evidence.run(evidence.Task(results, make, overrides(AUGMENT)), options)
    if not options.table:
        for run in sorted(options.out.glob("*_[0-9]*/evaluations/step_*")):
            check_with_coco(options.source, options.out / "data", run)


def overrides(augment: AugmentSection) -> list[str]:
    """Return the overrides of all runs, with this augmentation."""
    values = augment.model_dump(mode="json", exclude_defaults=True)
    return [*SIZES, *(f"+data.augment.{key}={value}" for key, value in values.items())]


def make_start(source: Path, results: Path, out: Path) -> Path:
    """Import the photographs, train the tower and the model; return the best checkpoint."""
    for split in ("train", "val", "test"):
        records = out / "data" / f"{split}.jsonl"
        imported = out / "imported" / records.name
        if not imported.exists():
            arguments = ["format=voc", f"source={source}", f"split={split}", f"out={imported}"]
            command = [sys.executable, "-m", "launch.tools.import_data", *arguments]
            subprocess.run(command, cwd=evidence.ROOT, check=True)
        records.parent.mkdir(exist_ok=True)
        records.write_text("".join(map(of_task, imported.open())))
    make_model(out / "model", out / "imported" / "train.jsonl")
    common = [f"training.seed={evidence.SEED}"]
    common += [f"training.effective_batch_size={evidence.START_BATCH}"]
    common += evidence.data(out / "data", "val")
    falling = [f"training.learning_rate={evidence.START_RATE:g}", "training.lr_schedule=cosine"]
    few, falls = out / "few", out / "start_falls"
    write_parts(out / "parts", out / "imported" / "train.jsonl")
    evidence.train(
        "crowded_sft",
        few,
        *common,
        *SIZES,
        f"data.train={out / 'parts' / 'train.jsonl'}",
        "data.val=null",
        *falling,
        "training.min_lr_ratio=0.2",
        f"training.max_steps={FEW_UPDATES}",
        f"model.path={out / 'model'}",
    )
    common += overrides(AUGMENT)
    evidence.train(
        "crowded_sft",
        falls,
        *common,
        *falling,
        f"training.min_lr_ratio={evidence.RATE / evidence.START_RATE:g}",
        f"training.max_steps={FALL_UPDATES}",
        f"model.path={few / 'checkpoint'}",
    )
    return evidence.train_until_flat(out, results, *common, f"model.path={falls / 'checkpoint'}")


def of_task(line: str) -> str:
    """Return a record's line with the cells of the task only."""
    record = json.loads(line)
    kept = [one["desc"] in TASK for one in record["objects"]]
    for key in ("objects", "annotated"):
        record[key] = list(compress(record[key], kept))
    return json.dumps(record) + "\n"


def make_model(out: Path, train: Path) -> None:
    """Write a Qwen3-VL of 3.3 million parameters, with a tower taught on training photographs."""

    def make(folder: Path) -> None:
        model, processor = random_model(
            evidence.SEED,
            DEFAULT_USER_PROMPT,
            canvas=SIDE,
            text_settings=TEXT_SETTINGS,
            names=NAMES,
        )
        processor.image_processor.size = {"shortest_edge": LEAST_SIDE**2, "longest_edge": SIDE**2}
        first = processor.tokenizer.convert_tokens_to_ids(coord_token(0))
        torch.manual_seed(evidence.SEED)
        teach_tower(
            model.model.visual,
            processor.image_processor,
            model.get_input_embeddings().weight[first : first + NUM_BINS].detach(),
            map(labelled, photographs(train, fits=lambda part: True)),
            num_names=len(NAMES),
            steps=TOWER_UPDATES,
            report=partial(print, flush=True),
        )
        model.save_pretrained(folder)
        processor.save_pretrained(folder)

    settings: dict[str, str | int] = {"seed": evidence.SEED, "tower_steps": TOWER_UPDATES}
    make_once(out, settings, make)


def photographs(train: Path, fits: Callable[[Sample], bool]) -> Iterator[Sample]:
    """Yield parts of training photographs, in a new order and augmented anew each epoch.

    Parts that do not fit are left out.
    """
    samples = load_dataset(train, on_bad_row="error", sort_objects=True, check_images=False).samples
    augmenter = Augmenter(PARTS, evidence.SEED, fits)
    for epoch in count():
        generator = torch.Generator().manual_seed(epoch)
        for row in torch.randperm(len(samples), generator=generator).tolist():
            part = augmenter(samples[row], Draw(source=0, epoch=epoch, row=row)).sample
            if fits(part):
                yield part


def write_parts(out: Path, train: Path) -> None:
    """Write `NUM_PARTS` parts of training photographs to `train.jsonl` in `out`.

    Each has the boxes of 1 to `MOST` cells of the task.
    """

    def make(folder: Path) -> None:
        parts = photographs(train, lambda part: 1 <= len(few_of(part)) <= MOST)
        with (folder / "train.jsonl").open("w") as lines:
            for number, part in enumerate(islice(parts, NUM_PARTS)):
                image = scaled(part)
                image.save(folder / f"{number:05}.jpg", quality=95)
                objects = [{"bbox_2d": one.bins, "desc": one.desc} for one in few_of(part)]
                record = {"images": [f"{number:05}.jpg"], "objects": objects}
                size = {"width": image.width, "height": image.height}
                lines.write(json.dumps(record | size) + "\n")

    settings: dict[str, str | int] = {"seed": evidence.SEED, "parts": NUM_PARTS, "most": MOST}
    make_once(out, settings | {"names": ", ".join(TASK)}, make)


def few_of(sample: Sample) -> list[GroundTruthObject]:
    return [one for one in sample.objects if one.desc in TASK]


def scaled(sample: Sample) -> Image.Image:
    """Return the sample's image, as small as in a whole photograph."""
    image = decode_image(sample.images[0])
    width, height = (max(LEAST_SIDE // 2, round(SCALE * side)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BILINEAR)


def labelled(sample: Sample) -> LabelledImage:
    """Return the sample's image with its boxes in pixels."""
    image = scaled(sample)
    boxes = []
    for one in sample.objects:
        left, top, right, bottom = (
            bin_ * (side - 1) / (NUM_BINS - 1)
            for bin_, side in zip(one.bins, image.size * 2, strict=True)
        )
        # A box contains its last pixel.
        boxes.append(LabelledBox(left, top, right + 1, bottom + 1, NAMES.index(one.desc)))
    return LabelledImage(image, boxes)


def check_with_coco(source: Path, data: Path, report: Path) -> None:
    """Compare the AP of a report with pycocotools, on exported results and the XML files.

    Raises:
        SystemExit: they differ.
    """
    name = report.parents[1].name
    results = report / "coco_results.json"
    results.unlink(missing_ok=True)
    categories = data.parent / "imported" / "test.categories.json"
    export_coco(
        ExportOptions(predictions=report / "predictions.jsonl", categories=categories, out=results)
    )
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = annotations(source, data / "test.jsonl", json.loads(categories.read_text()))
        truth.createIndex()
        scored = COCOeval(truth, truth.loadRes(str(results)), "bbox")
        scored.evaluate()
        scored.accumulate()
        scored.summarize()
    theirs = scored.stats[:2].tolist()
    ours = json.loads((report / "report.json").read_text())["coco"]["by_class"]["bbox"]
    print(f"coco      {name}: AP {theirs[0]:.4f}, AP50 {theirs[1]:.4f}")
    if max(abs(theirs[0] - ours["ap"]), abs(theirs[1] - ours["ap50"])) > COCO_TOLERANCE:
        sys.exit(f"{report}: AP {ours['ap']}, AP50 {ours['ap50']}; pycocotools: {theirs}")


def annotations(source: Path, data: Path, categories: list[dict[str, Any]]) -> dict[str, Any]:
    """Return COCO annotations of the images in `data`, read from the XML files of `source`."""
    ids = {category["name"]: category["id"] for category in categories}
    images, entries = [], []
    for row in map(json.loads, data.open()):
        images.append({"id": row["image_id"], "width": row["width"], "height": row["height"]})
        xml = source / "Annotations" / f"{Path(row['images'][0]).stem}.xml"
        for one in ElementTree.parse(xml).iter("object"):
            left, top, right, bottom = (
                float(one.findtext(f"bndbox/{edge}")) for edge in ("xmin", "ymin", "xmax", "ymax")
            )
            width, height = right - left + 1, bottom - top + 1  # pixels from 1, both ends within
            entry = {"id": len(entries) + 1, "image_id": row["image_id"], "iscrowd": 0}
            entry |= {"bbox": [left - 1, top - 1, width, height], "area": width * height}
            if one.findtext("name") in TASK:
                entries.append(entry | {"category_id": ids[one.findtext("name")]})
    return {"images": images, "annotations": entries, "categories": categories}


if __name__ == "__main__":
    main()
