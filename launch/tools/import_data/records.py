"""Converts the images and annotations of a source to dataset rows, and counts what it skips."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from launch.tools.import_data.boxes import PIXELS_XYWH, BoxReading, BoxUnit, is_in_parts
from launch.tools.import_data.files import (
    files_by_suffix,
    find_file,
    require_absent,
    write_json,
    written_once,
)
from launch.tools.import_data.objects import Converted, Ignored, ObjectSkip, SourceObject, convert
from launch.tools.import_data.source import (
    EXIF_REMEDY,
    ExifFrame,
    ImageSkip,
    ImportOptions,
    ImportReport,
    Orphans,
    Source,
    SourceImage,
    counted,
)
from learner.data.samples import header_size, image_size
from shared.data.annotations import Annotation, IgnoredRegion
from shared.dataset import load_dataset
from shared.errors import RecordError
from shared.grounding.coco import number_categories
from shared.records import GeometryKind, PictureSize, read_image


def import_data(options: ImportOptions) -> ImportReport:
    """Import a source: write its dataset rows and the files next to them; return the counts.

    Raises:
        RecordError: the source is malformed or gives no record.
        ConfigError: an output file exists, or a folder of the source is missing.
    """
    records = options.records
    categories = records.with_suffix(".categories.json")
    counts = records.with_suffix(".import.json")
    require_absent(records, categories, counts)
    files_by_suffix.cache_clear()  # may hold files of an earlier import
    report = ImportReport()
    source = options.read()
    report.notes = source.notes
    records.parent.mkdir(parents=True, exist_ok=True)
    with _removed_on_failure(source.written), written_once(records) as lines:
        for record in _records(source.images, options, report):
            lines.write(json.dumps(record, ensure_ascii=False) + "\n")
        lines.flush()
        if options.check_boxes:
            report.boxes.require_fitting(source.file)
        _require_records(report, options, source.file)
        named = None if source.categories is None else _distinct_categories(source, report)
        load_dataset(
            lines.name, on_bad_row="error", sort_objects=False, check_images=options.check_images
        )
        report.no_coco_results = options.no_coco_results(report)
        if report.no_coco_results is None:
            numbered = number_categories(report.names).items()
            by_name = [{"id": id, "name": name} for name, id in numbered]
            write_json(categories, by_name if named is None else named)
        write_json(counts, report.as_json())
    return report


@contextmanager
def _removed_on_failure(folder: Path | None) -> Iterator[None]:
    """Remove the folder of images if the import that created it fails."""
    is_new = folder is not None and not folder.exists()
    try:
        yield
    except BaseException:
        if folder is not None and is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _require_records(report: ImportReport, options: ImportOptions, file: Path) -> None:
    """Raise RecordError if no image became a record."""
    if report.images["written"]:
        return
    first = [
        f"{reason}: first {where}"
        for reason, where in report.first.items()
        if reason is not ImageSkip.NO_OBJECTS
    ]
    raise RecordError(
        f"gives no record; images skipped: {counted(report.images_skipped)}; objects skipped:"
        f" {counted(report.objects_skipped)}"
        f" ({', '.join(first) or 'no image has an object'})",
        field="images",
        remedy=EXIF_REMEDY
        if report.images_skipped[ImageSkip.ROTATED]
        else f"correct {options.source_key}=... or the files"
        + (", or set keep_empty=true" if ImageSkip.NO_OBJECTS in report.images_skipped else ""),
        file=str(file),
    )


def _distinct_categories(source: Source, report: ImportReport) -> list[dict[str, object]]:
    """Return the source's categories; of several with the same name, the first.

    Raises RecordError if objects have such a name.
    """
    distinct: dict[object, dict[str, object]] = {}
    for category in source.categories or ():
        name = category["name"]
        first = distinct.setdefault(name, category)
        if first is not category and name in report.names:
            raise RecordError(
                f"{first['id']} and {category['id']} are both called {name!r}",
                field="categories",
                remedy="rename one: predictions are assigned to categories by name",
                file=str(source.file),
            )
    return list(distinct.values())


def _records(
    images: Iterable[SourceImage | Orphans], options: ImportOptions, report: ImportReport
) -> Iterator[dict[str, object]]:
    """Yield one record per usable image, in the order of the source, and count everything."""
    where_is: dict[str, str] = {}
    for image in images:
        if isinstance(image, Orphans):
            report.objects["read"] += image.num_annotations
            report.skip_objects(image.reason, image.num_annotations, str(image.file))
            continue
        report.images["read"] += 1
        report.objects["read"] += len(image.objects)
        # The sample id distinguishes rows with the same image, or with none.
        path = find_file(image.path)
        where = f"{path} (sample {image.sample_id})"
        frame = _frame(image, path, options)
        skip = frame if isinstance(frame, ImageSkip) else None
        # Without an opened image, only the annotations that cannot be used have results.
        results: list[Converted | Ignored | ObjectSkip] = [
            found for found in image.objects if not isinstance(found, SourceObject)
        ]
        converted: list[Converted] = []
        if isinstance(frame, _Frame):
            for found in image.objects:
                if isinstance(found, SourceObject) and not found.is_turned:
                    report.boxes.add(image.reading, found.box, frame.annotated_size, where)
            results = [_converted(found, frame, options) for found in image.objects]
            converted = [result for result in results if isinstance(result, Converted)]
            if not converted and not options.keep_empty:
                skip = ImageSkip.NO_OBJECTS
            elif options.max_objects is not None and len(converted) > options.max_objects:
                skip = ImageSkip.TOO_MANY_OBJECTS
        if skip is not None:
            report.skip_image(skip, len(image.objects), where)
        if skip in (None, ImageSkip.NO_OBJECTS):
            for found, result in zip(image.objects, results, strict=True):
                report.add_object(found, result, where)
        if skip is not None or isinstance(frame, ImageSkip):
            continue
        # Answers list objects from top to bottom, then from left to right.
        converted.sort(key=lambda one: (min(one.object.bins[1::2]), min(one.object.bins[::2])))
        first = where_is.setdefault(image.sample_id, where)
        if first is not where:
            problem = f"{image.sample_id!r} is the id of two rows, {first} and {where}"
            raise RecordError(problem, field="sample_id", remedy="give each its own name or id")
        report.add_record(image, path, converted, where)
        report.images["turned_by_exif"] += frame.is_turned
        ignored = _ignored_regions(results, image.unlabelled, frame.size)
        yield {
            "sample_id": image.sample_id,
            "images": [Path(os.path.relpath(path, options.records.parent)).as_posix()],
            "width": frame.size[0],
            "height": frame.size[1],
            "objects": [
                {str(one.object.kind): one.object.bins, "desc": one.object.desc}
                for one in converted
            ],
            # The box of each annotation, and its ring if it became a polygon.
            "annotated": [
                Annotation(
                    one.source.box,
                    one.source.rings if one.object.kind is GeometryKind.POLY else None,
                ).as_json()
                for one in converted
            ],
            **({"ignore": ignored} if ignored else {}),
            # For `rollmatch coco export`: annotations were turned with their image.
            **({} if frame.orientation == 1 else {"exif_orientation": frame.orientation}),
            "image_id": report.images["read"],
            **image.keys,
        }


@dataclass(frozen=True, slots=True)
class _Frame:
    """The size of a record's image, and how annotations are converted to its pixels."""

    size: tuple[int, int]
    """Width and height of the displayed image."""
    is_turned: bool = False
    """Whether the EXIF orientation turns the image."""
    orientation: int = 1
    """Orientation that turns annotations; 1: they already refer to `size`."""
    reading: BoxReading = PIXELS_XYWH
    """Order and unit of the annotations' numbers."""

    @property
    def annotated_size(self) -> tuple[int, int]:
        """Return width and height of the image that annotations refer to."""
        return self.size[::-1] if self.orientation >= 5 else self.size

    def upright(self, found: SourceObject) -> SourceObject:
        """Return the annotation with its coordinates in pixels of the displayed image."""
        width, height = self.annotated_size
        is_pixels = self.reading.unit is BoxUnit.PIXELS
        scale = self.reading.pixels_per_unit((width, height))
        pixels = found if is_pixels else found.scaled(*scale)
        if self.orientation == 1:
            return pixels
        return pixels.upright(self.orientation, width, height)


def _frame(image: SourceImage, path: Path, options: ImportOptions) -> _Frame | ImageSkip:
    """Return the size and orientation of an image, or the reason to skip it.

    If the stated size fits only the displayed image and not the stored one, the annotations refer
    to the displayed image. Otherwise the option `exif` decides.
    """
    if image.skip is not None:
        return image.skip
    if not path.is_file():
        return ImageSkip.MISSING_FILE
    if not options.keep_empty and not any(isinstance(one, SourceObject) for one in image.objects):
        return ImageSkip.NO_OBJECTS  # without reading the file
    stated = image.size
    try:
        seen = image_size(read_image(path)) if options.check_images else header_size(path)
    except (OSError, ValueError):
        if options.check_images or stated is None:
            return ImageSkip.UNREADABLE
        seen = PictureSize(*stated)
    size = seen.displayed
    is_upright = seen.orientation == 1
    if is_upright and stated is not None and not options.check_images:
        size = stated  # compared when the sample is used
    elif stated not in (None, size, seen.stored):
        return ImageSkip.SIZE_MISMATCH
    if min(size) < 2:
        return ImageSkip.NO_SCALE
    tells = stated == seen.displayed != seen.stored
    if not is_upright and not tells and options.exif is None:
        return ImageSkip.ROTATED
    is_stored = not is_upright and not tells and options.exif is ExifFrame.STORED
    orientation = seen.orientation if is_stored else 1
    return _Frame(size, not is_upright, orientation, image.reading)


def _ignored_regions(
    results: Sequence[Converted | Ignored | ObjectSkip],
    unlabelled: Sequence[str],
    size: tuple[int, int],
) -> list[dict[str, object]]:
    """Return the regions of an image to ignore, as a row of a dataset has them.

    For each partly labelled class of LVIS (`unlabelled`), the whole image is such a region.
    """
    whole = Annotation((0.0, 0.0, float(size[0]), float(size[1])))
    found = [
        IgnoredRegion(
            Annotation(one.region.box, one.region.rings or None), one.region.desc, one.is_crowd
        )
        for one in results
        if isinstance(one, Ignored)
    ]
    found += [IgnoredRegion(whole, name, is_crowd=True) for name in unlabelled]
    return [region.as_json() for region in found]


def _converted(
    found: SourceObject | Ignored | ObjectSkip, frame: _Frame, options: ImportOptions
) -> Converted | Ignored | ObjectSkip:
    if isinstance(found, ObjectSkip):
        return found
    if isinstance(found, Ignored):
        region = frame.upright(found.region)
        is_region = min(region.box[2:]) > 0 and bool(region.desc.strip())
        return replace(found, region=region) if is_region else found.reason
    if found.skip is not None:
        return found.skip
    is_checked = options.check_boxes and frame.reading.unit is BoxUnit.PIXELS
    if is_checked and not found.is_turned and is_in_parts(frame.reading.numbers(found.box)):
        return ObjectSkip.MALFORMED  # one box; `BoxEvidence` checks the file as a whole
    return convert(frame.upright(found), frame.size, options.geometry, options.max_vertices)
