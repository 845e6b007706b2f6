"""`python -m launch.import_coco annotations=instances.json images=FOLDER out=data/train.jsonl`:
COCO annotations become records (DESIGN 7.1).

Beside `train.jsonl` it writes `train.categories.json`, for the way back (`launch.export_coco`), and
`train.import.json`, which counts what was left out or altered, and why: every annotation is in
exactly one of `boxes`, `polygons` and `skipped`. `out` may be a folder; then the records are called
after the annotations. Nothing is overwritten, and the records appear when the ordinary loader has
read them.

How COCO's coordinates become bins is said in `shared.grounding.coco`. Parts of a shape outside its
image are clamped to the border.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveInt
from rich.console import Console

from launch.cli import explained, read_arguments
from launch.coco.files import (
    CocoAnnotation,
    CocoFile,
    CocoImage,
    counted,
    distinct_categories,
    read_annotations,
    require_absent,
    write_json,
    written_once,
)
from launch.coco.objects import Converted, ObjectCounts, ObjectSkip, Wanted, convert
from learner.image_files import image_size
from shared.config.base import ConfigPath, Section
from shared.dataset import load_dataset
from shared.errors import ConfigError, RecordError
from shared.records import GeometryKind, GroundTruthObject, read_image


class ImportOptions(Section):
    annotations: Annotated[ConfigPath, Field(examples=["instances_train2017.json"])]
    """JSON file of COCO annotations."""

    images: Annotated[ConfigPath, Field(examples=["train2017"])]
    """Folder that the annotations' file names are relative to."""

    out: Annotated[ConfigPath, Field(examples=["data/train.jsonl"])]
    """JSONL file to write, or a folder for it; image paths in it are relative to it."""

    geometry: Annotated[Wanted, Field(strict=False)] = Wanted.BBOX
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
        return (
            self.out if self.out.suffix == ".jsonl" else self.out / f"{self.annotations.stem}.jsonl"
        )


class ImageSkip(StrEnum):
    """Why an image was left out."""

    MISSING_FILE = "missing_file"
    UNREADABLE = "unreadable"
    SIZE_MISMATCH = "size_mismatch"
    NO_SCALE = "axis_of_one_pixel"
    NO_OBJECTS = "no_objects"
    TOO_MANY_OBJECTS = "too_many_objects"


@dataclass(slots=True)
class ImportReport:
    num_images: int
    num_annotations: int
    num_written: int = 0
    """Images that became records."""
    images_skipped: Counter[ImageSkip] = field(default_factory=Counter)
    objects: ObjectCounts = field(default_factory=ObjectCounts)

    def as_json(self) -> dict[str, Any]:
        return {
            "images": {
                "read": self.num_images,
                "written": self.num_written,
                "skipped": dict(self.images_skipped),
            },
            "objects": {"read": self.num_annotations, **self.objects.as_json()},
        }

    def describe(self) -> list[str]:
        objects = self.objects
        num_boxes, num_polygons = objects.kept[GeometryKind.BBOX], objects.kept[GeometryKind.POLY]
        return [
            (
                f"images    {self.num_written} of {self.num_images} written; skipped:"
                f" {counted(self.images_skipped)}"
            ),
            (
                f"objects   {num_boxes} boxes and {num_polygons} polygons of {self.num_annotations}"
                f" annotations; skipped: {counted(objects.skipped)}"
            ),
            (
                f"altered   {objects.num_clamped} clamped to their image, {objects.num_simplified}"
                " polygons simplified"
            ),
            f"fallbacks boxes in place of polygons: {counted(objects.boxes_for_polygons)}",
        ]


def import_coco(options: ImportOptions) -> ImportReport:
    """Writes the records and the two files beside them.

    RecordError for annotations that are malformed (a shape that cannot be used is counted, not
    malformed) or give no record; ConfigError for files that exist already and for a folder of
    images that does not.
    """
    records = options.records
    categories, report = (
        records.with_suffix(".categories.json"),
        records.with_suffix(".import.json"),
    )
    require_absent([records, categories, report])
    if not options.images.is_dir():
        raise ConfigError(
            f"images: {options.images} is not a folder; give the folder that the annotations' file"
            " names are relative to"
        )
    source = read_annotations(options.annotations)
    work = _Import(options, source)
    records.parent.mkdir(parents=True, exist_ok=True)
    with written_once(records) as lines:
        for record in work.records():
            lines.write(json.dumps(record, ensure_ascii=False) + "\n")
        lines.flush()
        if not work.report.num_written:
            skipped = (
                ", ".join(f"{reason}: first {path}" for reason, path in work.first_skipped.items())
                or "there is no image"
            )
            counts = (
                f"images skipped: {counted(work.report.images_skipped)}; objects skipped:"
                f" {counted(work.report.objects.skipped)}"
            )
            problem = f"gives no record; {counts} ({skipped})"
            raise RecordError(
                problem,
                field="images",
                remedy="correct images=... or the file names, or set keep_empty=true",
                file=str(options.annotations),
            )
        load_dataset(
            lines.name, on_bad_row="error", sort_objects=False, check_images=options.check_images
        )
        write_json(categories, distinct_categories(source))
        write_json(report, work.report.as_json())
    return work.report


class _Import:
    """One pass over the images, which counts as it goes."""

    def __init__(self, options: ImportOptions, source: CocoFile) -> None:
        self.report = ImportReport(
            num_images=len(source.images), num_annotations=len(source.annotations)
        )
        self.first_skipped: dict[ImageSkip, Path] = {}
        """Of every reason."""
        self._options, self._source, self._names = options, source, source.names()
        self._folder = os.path.relpath(options.images, options.records.parent)
        self._annotations: defaultdict[int, list[CocoAnnotation]] = defaultdict(list)
        for annotation in source.annotations:
            self._annotations[annotation.image_id].append(annotation)

    def records(self) -> Iterator[dict[str, Any]]:
        """One record per usable image, in the order of the file."""
        for image in self._source.images:
            annotations = self._annotations.pop(image.id, [])
            record = self._record(image, annotations)
            if not isinstance(record, ImageSkip):
                self.report.num_written += 1
                yield record
                continue
            self.report.images_skipped[record] += 1
            self.first_skipped.setdefault(record, self._options.images / image.file_name)
            # whose annotations were skipped for reasons of their own
            if record is not ImageSkip.NO_OBJECTS:
                self.report.objects.skipped[ObjectSkip.IMAGE_SKIPPED] += len(annotations)
        if self._annotations:
            self.report.objects.skipped[ObjectSkip.UNKNOWN_IMAGE] += sum(
                map(len, self._annotations.values())
            )

    def _record(
        self, image: CocoImage, annotations: Sequence[CocoAnnotation]
    ) -> dict[str, Any] | ImageSkip:
        path, options = self._options.images / image.file_name, self._options
        if not path.is_file():
            return ImageSkip.MISSING_FILE
        if min(image.width, image.height) < 2:
            return ImageSkip.NO_SCALE
        results = [
            convert(one, image, self._names, options.geometry, options.max_vertices)
            for one in annotations
        ]
        converted = [result for result in results if isinstance(result, Converted)]
        why = _why_not(image, path, len(converted), options)
        if why is None or why is ImageSkip.NO_OBJECTS:
            self.report.objects.keep(converted)
            self.report.objects.skipped.update(
                result for result in results if isinstance(result, ObjectSkip)
            )
        return (
            _row(image, Path(self._folder, image.file_name), [one.object for one in converted])
            if why is None
            else why
        )


def _why_not(
    image: CocoImage, path: Path, num_objects: int, options: ImportOptions
) -> ImageSkip | None:
    """The decoding comes last, because it is the only part that costs anything."""
    if not num_objects and not options.keep_empty:
        return ImageSkip.NO_OBJECTS
    if options.max_objects is not None and num_objects > options.max_objects:
        return ImageSkip.TOO_MANY_OBJECTS
    if not options.check_images:
        return None
    try:
        size = image_size(read_image(path))
    except (OSError, ValueError):
        return ImageSkip.UNREADABLE
    return None if size == (image.width, image.height) else ImageSkip.SIZE_MISMATCH


def _row(image: CocoImage, path: Path, objects: Sequence[GroundTruthObject]) -> dict[str, Any]:
    """The record; `image_id` is metadata to the loader."""
    ordered = sorted(objects, key=lambda found: (min(found.bins[1::2]), min(found.bins[::2])))
    return {
        "sample_id": str(image.id),
        "images": [path.as_posix()],
        "width": image.width,
        "height": image.height,
        "objects": [{str(found.kind): found.bins, "desc": found.desc} for found in ordered],
        "image_id": image.id,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    with explained(Console(stderr=True, soft_wrap=True)):
        options = read_arguments(ImportOptions, sys.argv[1:] if arguments is None else arguments)
        report = import_coco(options)
        print(f"records   {options.records}", *report.describe(), sep="\n")


if __name__ == "__main__":
    main()
