"""Turns what a reader finds into records, and counts what cannot be used."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from PIL import ExifTags, Image

from launch.import_data.coco_files import write_json, written_once
from launch.import_data.objects import Converted, ObjectSkip, SourceObject, convert
from launch.import_data.source import (
    ImageSkip,
    ImportOptions,
    ImportReport,
    Orphans,
    SourceImage,
    counted,
)
from learner.data.image_files import image_size
from shared.dataset import load_dataset
from shared.errors import ConfigError, RecordError
from shared.records import read_image


def import_data(options: ImportOptions) -> ImportReport:
    """Write the records and the files beside them; count what cannot be used.

    Raises:
        RecordError: the source is malformed, or gives no record.
        ConfigError: a file exists already, or a folder of the source does not.
    """
    records = options.records
    categories = records.with_suffix(".categories.json")
    counts = records.with_suffix(".import.json")
    require_absent(records, categories, counts)
    report = ImportReport()
    source = options.read()
    records.parent.mkdir(parents=True, exist_ok=True)
    with written_once(records) as lines:
        for record in _records(source.images, options, report):
            lines.write(json.dumps(record, ensure_ascii=False) + "\n")
        lines.flush()
        if not report.num_written:
            first = [
                f"{reason}: first {where}"
                for reason, where in report.first.items()
                if reason is not ImageSkip.NO_OBJECTS
            ]
            raise RecordError(
                f"gives no record; images skipped: {counted(report.images_skipped)}; objects"
                f" skipped: {counted(report.objects_skipped)}"
                f" ({', '.join(first) or 'there is no image with an object'})",
                field="images",
                remedy=f"correct {options.source_key}=... or the file names, or set"
                " keep_empty=true",
                file=str(source.file),
            )
        load_dataset(
            lines.name, on_bad_row="error", sort_objects=False, check_images=options.check_images
        )
        if source.categories is not None:
            write_json(categories, source.categories)
        write_json(counts, report.as_json())
    return report


def _records(
    images: Iterable[SourceImage | Orphans], options: ImportOptions, report: ImportReport
) -> Iterator[dict[str, Any]]:
    """Yield one record per usable image, in the source's order; count everything in `report`."""
    for image in images:
        if isinstance(image, Orphans):
            if image.num_annotations:
                report.num_annotations += image.num_annotations
                report.objects_skipped[ObjectSkip.UNKNOWN_IMAGE] += image.num_annotations
                report.first.setdefault(ObjectSkip.UNKNOWN_IMAGE, str(image.file))
            continue
        # Rows about one image, or none, are told apart by their id.
        where = f"{image.path} (sample {image.sample_id})"
        report.num_images += 1
        report.num_annotations += len(image.objects)
        results: list[Converted | ObjectSkip] = []
        size = image.size or (0, 0)
        skip = image.skip
        if skip is None and not image.path.is_file():
            skip = ImageSkip.MISSING_FILE
        if skip is None and image.size is None:
            try:
                with Image.open(image.path) as header:
                    size = header.size
                    if header.getexif().get(ExifTags.Base.Orientation) not in (None, 0, 1):
                        # Tools that annotate turn the picture, and this project does not.
                        skip = ImageSkip.ROTATED
            except Exception:  # all that Pillow's parsers run into; see `image_size`
                skip = ImageSkip.UNREADABLE
        if skip is None and min(size) < 2:
            skip = ImageSkip.NO_SCALE
        if skip is None:
            for found in image.objects:
                if isinstance(found, SourceObject):
                    pixels = found.scaled(*size) if image.fractions else found
                    results.append(convert(pixels, size, options.geometry, options.max_vertices))
                else:
                    results.append(found)
            num_objects = sum(isinstance(result, Converted) for result in results)
            skip = _reason_to_skip(image.path, size, num_objects, options)
        if skip is not None:
            report.images_skipped[skip] += 1
            report.first.setdefault(skip, where)
            if skip is not ImageSkip.NO_OBJECTS:
                report.objects_skipped[ObjectSkip.IMAGE_SKIPPED] += len(image.objects)
                continue
        # Of an image without objects too: its annotations were skipped for reasons of their own.
        for result in results:
            report.add(result, where)
        if skip is not None:
            continue
        report.num_written += 1
        objects = [result.object for result in results if isinstance(result, Converted)]
        # Answers list objects from top to bottom, then from left to right.
        objects.sort(key=lambda found: (min(found.bins[1::2]), min(found.bins[::2])))
        yield {
            "sample_id": image.sample_id,
            "images": [Path(os.path.relpath(image.path, options.records.parent)).as_posix()],
            "width": size[0],
            "height": size[1],
            "objects": [{str(found.kind): found.bins, "desc": found.desc} for found in objects],
            **image.keys,
        }


def _reason_to_skip(
    path: Path, size: tuple[int, int], num_objects: int, options: ImportOptions
) -> ImageSkip | None:
    if not num_objects and not options.keep_empty:
        return ImageSkip.NO_OBJECTS
    if options.max_objects is not None and num_objects > options.max_objects:
        return ImageSkip.TOO_MANY_OBJECTS
    if not options.check_images:
        return None
    # Decoding comes last, because it is the only check that costs anything.
    try:
        decoded = image_size(read_image(path))
    except (OSError, ValueError):
        return ImageSkip.UNREADABLE
    return None if decoded == size else ImageSkip.SIZE_MISMATCH


def require_absent(*paths: Path) -> None:
    """Raise ConfigError where a file that would be written exists."""
    existing = [str(path) for path in paths if path.exists()]
    if existing:
        raise ConfigError(f"out: {', '.join(existing)} exists; choose another name or remove it")
