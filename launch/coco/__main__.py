r"""Turns COCO annotations into records, and an evaluation's predictions into COCO results.

    python -m launch.coco import annotations=instances.json images=FOLDER out=data/train.jsonl
    python -m launch.coco export predictions=RUN/.../predictions.jsonl \
        categories=data/train.categories.json out=results.json

`import` writes, beside `train.jsonl`, `train.categories.json` for the way back, and
`train.import.json`, which counts what was left out or altered, and why: every annotation is in
exactly one of `boxes`, `polygons` and `skipped`. The records appear when the ordinary loader has
read them. `export` leaves out objects whose name is no category's, and counts them. Neither
overwrites. `--help` behind `import` or `export` lists the keys.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveInt, TypeAdapter
from rich.console import Console

from launch.cli import explained, read_arguments
from launch.coco.files import (
    CocoAnnotation,
    CocoCategory,
    CocoEntry,
    CocoFile,
    CocoImage,
    distinct_categories,
    parse_json,
    read_annotations,
    read_bytes,
    write_json,
    written_once,
)
from launch.coco.objects import Converted, ObjectSkip, WantedGeometry, convert
from learner.image_files import image_size
from shared.config.base import ConfigPath, Section
from shared.dataset import load_dataset
from shared.errors import ConfigError, RecordError
from shared.grounding.coco import CocoResults, ImagePredictions, ScoredObject, predictions_to_coco
from shared.records import GeometryKind, read_image


class ImportOptions(Section):
    annotations: Annotated[ConfigPath, Field(examples=["instances_train2017.json"])]
    """JSON file of COCO annotations."""

    images: Annotated[ConfigPath, Field(examples=["train2017"])]
    """Folder that the annotations' file names are relative to."""

    out: Annotated[ConfigPath, Field(examples=["data/train.jsonl"])]
    """JSONL file to write, or a folder for it; image paths in it are relative to it."""

    geometry: Annotated[WantedGeometry, Field(strict=False)] = WantedGeometry.BBOX
    """Boxes (`bbox`), polygons (`poly`: an annotation without one usable ring is left out), or both
    (`auto`: it becomes its box).
    """

    max_vertices: Annotated[int, Field(ge=3)] | None = None
    """Polygons with more vertices are simplified to this many; null: never. Each vertex costs
    tokens.
    """

    max_objects: PositiveInt | None = None
    """Images with more objects are left out; null: none is."""

    keep_empty: bool = False
    """Keep images without any object; their answer is `{}`."""

    check_images: bool = True
    """Decode every image and compare its size; false: a bad image is found when its sample is used.
    """

    @property
    def records(self) -> Path:
        if self.out.suffix == ".jsonl":
            return self.out
        return self.out / f"{self.annotations.stem}.jsonl"


class ExportOptions(Section):
    predictions: Annotated[
        ConfigPath, Field(examples=["outputs/demo/evaluation/predictions.jsonl"])
    ]
    """JSONL file of predictions, written by an evaluation."""

    categories: Annotated[ConfigPath, Field(examples=["data/val.categories.json"])]
    """JSON file of category ids and names, written by the import of the data."""

    out: Annotated[ConfigPath, Field(examples=["results.json"])]
    """JSON file of COCO results to write."""


class ImageSkip(StrEnum):
    """The reason why an image was left out."""

    MISSING_FILE = "missing_file"
    UNREADABLE = "unreadable"
    SIZE_MISMATCH = "size_mismatch"
    NO_SCALE = "axis_of_one_pixel"
    NO_OBJECTS = "no_objects"
    TOO_MANY_OBJECTS = "too_many_objects"


@dataclass(slots=True)
class ImportReport:
    """Counts of images and annotations: what was read, and what became of it."""

    num_images: int
    num_annotations: int
    num_written: int = 0
    """Images that became records."""
    images_skipped: Counter[ImageSkip] = field(default_factory=Counter)
    first_skipped: dict[ImageSkip, Path] = field(default_factory=dict)
    kept: Counter[GeometryKind] = field(default_factory=Counter)
    objects_skipped: Counter[ObjectSkip] = field(default_factory=Counter)
    boxes_for_polygons: Counter[ObjectSkip] = field(default_factory=Counter)
    """Boxes that were kept where polygons were wanted, by the reason."""
    num_clamped: int = 0
    num_simplified: int = 0

    def add(self, result: Converted | ObjectSkip) -> None:
        """Count an annotation of an image that is not skipped."""
        if isinstance(result, ObjectSkip):
            self.objects_skipped[result] += 1
            return
        self.kept[result.object.kind] += 1
        self.num_clamped += result.clamped
        self.num_simplified += result.simplified
        if result.no_polygon is not None:
            self.boxes_for_polygons[result.no_polygon] += 1

    def as_json(self) -> dict[str, Any]:
        return {
            "images": {
                "read": self.num_images,
                "written": self.num_written,
                "skipped": dict(self.images_skipped),
            },
            "objects": {
                "read": self.num_annotations,
                "boxes": self.kept[GeometryKind.BBOX],
                "polygons": self.kept[GeometryKind.POLY],
                "skipped": dict(self.objects_skipped),
                "boxes_for_polygons": dict(self.boxes_for_polygons),
                "clamped": self.num_clamped,
                "simplified": self.num_simplified,
            },
        }

    def describe(self) -> str:
        boxes = self.kept[GeometryKind.BBOX]
        polygons = self.kept[GeometryKind.POLY]
        return (
            f"images    {self.num_written} of {self.num_images} written;"
            f" skipped: {_counted(self.images_skipped)}\n"
            f"objects   {boxes} boxes and {polygons} polygons of {self.num_annotations}"
            f" annotations; skipped: {_counted(self.objects_skipped)}\n"
            f"altered   {self.num_clamped} clamped to their image, {self.num_simplified} polygons"
            " simplified\n"
            f"fallbacks boxes in place of polygons: {_counted(self.boxes_for_polygons)}"
        )


def import_coco(options: ImportOptions) -> ImportReport:
    """Write the records and the two files beside them; count what cannot be used.

    Raises:
        RecordError: the annotations are malformed, or give no record.
        ConfigError: a file exists already, or the folder of images does not.
    """
    records = options.records
    categories = records.with_suffix(".categories.json")
    counts = records.with_suffix(".import.json")
    _require_absent(records, categories, counts)
    if not options.images.is_dir():
        raise ConfigError(
            f"images: {options.images} is not a folder; give the folder that the annotations' file"
            " names are relative to"
        )
    source = read_annotations(options.annotations)
    report = ImportReport(len(source.images), len(source.annotations))
    records.parent.mkdir(parents=True, exist_ok=True)
    with written_once(records) as lines:
        for record in _records(source, options, report):
            lines.write(json.dumps(record, ensure_ascii=False) + "\n")
        lines.flush()
        if not report.num_written:
            first = [f"{reason}: first {path}" for reason, path in report.first_skipped.items()]
            raise RecordError(
                f"gives no record; images skipped: {_counted(report.images_skipped)}; objects"
                f" skipped: {_counted(report.objects_skipped)}"
                f" ({', '.join(first) or 'there is no image'})",
                field="images",
                remedy="correct images=... or the file names, or set keep_empty=true",
                file=str(options.annotations),
            )
        load_dataset(
            lines.name, on_bad_row="error", sort_objects=False, check_images=options.check_images
        )
        write_json(categories, distinct_categories(source))
        write_json(counts, report.as_json())
    return report


def _records(
    source: CocoFile, options: ImportOptions, report: ImportReport
) -> Iterator[dict[str, Any]]:
    """Yield one record per usable image, in the file's order; count everything in `report`."""
    names = {category.id: category.name for category in source.categories}
    folder = os.path.relpath(options.images, options.records.parent)
    by_image: defaultdict[int, list[CocoAnnotation]] = defaultdict(list)
    for annotation in source.annotations:
        by_image[annotation.image_id].append(annotation)
    for image in source.images:
        path = options.images / image.file_name
        annotations = by_image.pop(image.id, [])
        results: list[Converted | ObjectSkip] = []
        skip: ImageSkip | None
        if not path.is_file():
            skip = ImageSkip.MISSING_FILE
        elif min(image.width, image.height) < 2:
            skip = ImageSkip.NO_SCALE
        else:
            results = [
                convert(annotation, image, names, options.geometry, options.max_vertices)
                for annotation in annotations
            ]
            num_objects = sum(isinstance(result, Converted) for result in results)
            skip = _reason_to_skip(image, path, num_objects, options)
        if skip is not None:
            report.images_skipped[skip] += 1
            report.first_skipped.setdefault(skip, path)
            if skip is not ImageSkip.NO_OBJECTS:
                report.objects_skipped[ObjectSkip.IMAGE_SKIPPED] += len(annotations)
                continue
        # Of an image without objects too: its annotations were skipped for reasons of their own.
        for result in results:
            report.add(result)
        if skip is not None:
            continue
        report.num_written += 1
        objects = [result.object for result in results if isinstance(result, Converted)]
        # Answers list objects from top to bottom, then from left to right.
        objects.sort(key=lambda found: (min(found.bins[1::2]), min(found.bins[::2])))
        yield {
            "sample_id": str(image.id),
            "images": [Path(folder, image.file_name).as_posix()],
            "width": image.width,
            "height": image.height,
            "objects": [{str(found.kind): found.bins, "desc": found.desc} for found in objects],
            "image_id": image.id,
        }
    if by_image:
        report.objects_skipped[ObjectSkip.UNKNOWN_IMAGE] += sum(map(len, by_image.values()))


def _reason_to_skip(
    image: CocoImage, path: Path, num_objects: int, options: ImportOptions
) -> ImageSkip | None:
    if not num_objects and not options.keep_empty:
        return ImageSkip.NO_OBJECTS
    if options.max_objects is not None and num_objects > options.max_objects:
        return ImageSkip.TOO_MANY_OBJECTS
    if not options.check_images:
        return None
    # Decoding comes last, because it is the only check that costs anything.
    try:
        size = image_size(read_image(path))
    except (OSError, ValueError):
        return ImageSkip.UNREADABLE
    return None if size == (image.width, image.height) else ImageSkip.SIZE_MISMATCH


class _Metadata(CocoEntry):
    image_id: int


class _PredictionRow(CocoEntry):
    width: int
    height: int
    metadata: _Metadata
    objects: tuple[ScoredObject, ...]


def read_predictions(path: Path) -> list[ImagePredictions]:
    """Read a report's `predictions.jsonl`, one image per line.

    Raises:
        RecordError: names file, line and field, or an image that is predicted twice.
    """
    remedy = (
        "only an evaluation of data that `launch.coco import` wrote can be exported: evaluate those"
        " (data.val=...)"
    )
    found: dict[int, ImagePredictions] = {}
    for number, line in enumerate(read_bytes(path).splitlines(), 1):
        if not line.strip():
            continue
        row = parse_json(path, _PredictionRow.model_validate_json, line, remedy, number)
        image_id = row.metadata.image_id
        if image_id in found:
            raise RecordError(
                f"{image_id} occurs twice",
                field="metadata.image_id",
                remedy="keep one row per image",
                file=str(path),
                line=number,
            )
        found[image_id] = ImagePredictions(image_id, row.width, row.height, row.objects)
    return list(found.values())


def export_coco(options: ExportOptions) -> CocoResults:
    """Write the results, and return them.

    Raises:
        RecordError: an input file is malformed.
        ConfigError: `out` exists.
    """
    _require_absent(options.out)
    # What `import` wrote beside the records.
    content = read_bytes(options.categories)
    parse = TypeAdapter(list[CocoCategory]).validate_json
    categories = parse_json(options.categories, parse, content, "import the annotations again")
    category_ids = {category.name: category.id for category in categories}
    results = predictions_to_coco(read_predictions(options.predictions), category_ids)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.out, results.results)
    return results


def _require_absent(*paths: Path) -> None:
    existing = [str(path) for path in paths if path.exists()]
    if existing:
        raise ConfigError(f"out: {', '.join(existing)} exists; choose another name or remove it")


def _counted(counts: Mapping[Any, int]) -> str:
    """Format counts, most first: `crowd 2, rle 1`, or `none`."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {count}" for name, count in ordered) or "none"


def main(arguments: Sequence[str] | None = None) -> None:
    with explained(Console(stderr=True, soft_wrap=True)):
        command, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
        if command == "import":
            options = read_arguments(ImportOptions, rest)
            report = import_coco(options)
            print(f"records   {options.records}\n{report.describe()}")
        elif command == "export":
            to_export = read_arguments(ExportOptions, rest)
            exported = export_coco(to_export)
            unknown = exported.unknown_names
            print(f"results   {len(exported.results)} objects in {to_export.out}")
            print(f"skipped   {sum(unknown.values())} objects of no category: {_counted(unknown)}")
        elif command in ("-h", "--help"):
            print(__doc__)
        else:
            raise ConfigError(f"{command!r} is no command; write `import` or `export` first")


if __name__ == "__main__":
    main()
