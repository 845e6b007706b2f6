"""The interface of a format's reader: its options, and the images and annotations it finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, PositiveInt

from launch.tools.import_data.boxes import PIXELS_XYWH, BoxEvidence, BoxOrder, BoxReading, BoxUnit
from launch.tools.import_data.objects import (
    Converted,
    Ignored,
    ObjectSkip,
    SourceObject,
    WantedGeometry,
)
from shared.config.base import ConfigPath, Section, refusal
from shared.records import GeometryKind


class ImageSkip(StrEnum):
    """Reasons to leave out an image, or a row with an image."""

    MISSING_FILE = "missing_file"
    UNREADABLE = "unreadable"
    SIZE_MISMATCH = "size_mismatch"
    ROTATED = "rotated_by_exif"
    NO_SCALE = "axis_of_one_pixel"
    NO_OBJECTS = "no_objects"
    TOO_MANY_OBJECTS = "too_many_objects"
    MALFORMED_LABELS = "malformed_labels"
    UNKNOWN_ANNOTATION = "unknown_annotation"
    UNUSABLE_TEXT = "unusable_text"
    NO_IMAGE = "no_image"
    SEVERAL_IMAGES = "several_images"
    SEVERAL_TURNS = "several_turns"
    BOX_IN_QUESTION = "box_in_question"


class ExifFrame(StrEnum):
    """The image to which annotations refer, if its file has an EXIF orientation."""

    DISPLAYED = "displayed"
    """The image after EXIF has turned it."""
    STORED = "stored"
    """The image before EXIF turns it."""


@dataclass(frozen=True, slots=True)
class SourceImage:
    """One image and its annotations as a reader found them. It becomes one row.

    Example: `SourceImage("7", Path("7.jpg"), [SourceObject("cat", (10, 20, 30, 40))], (64, 48))`.
    """

    sample_id: str
    path: Path
    objects: Sequence[SourceObject | Ignored | ObjectSkip]
    """The annotated objects. For an object that the reader skips, the reason takes its place."""
    size: tuple[int, int] | None = None
    """Width and height in pixels as stated by the source; None: use the image file's."""
    reading: BoxReading = PIXELS_XYWH
    """Order and unit of the numbers in which the source writes a box."""
    keys: Mapping[str, object] = field(default_factory=dict)
    """Additional keys of the dataset row: `phrase`, `prompt`, ..., and metadata."""
    unlabelled: Sequence[str] = ()
    """Partly annotated classes. Predictions of these classes are not counted."""
    skip: ImageSkip | None = None
    """Why the reader leaves the image out."""


@dataclass(frozen=True, slots=True)
class Orphans:
    """A number of annotations whose images are not in the source, and the file that has them."""

    file: Path
    num_annotations: int
    reason: ObjectSkip = ObjectSkip.UNKNOWN_IMAGE


@dataclass(frozen=True, slots=True)
class Source:
    """The images and annotations that a format's reader has found."""

    file: Path
    """The file or folder to name in errors."""
    images: Iterable[SourceImage | Orphans]
    categories: list[dict[str, object]] | None = None
    """Content of `NAME.categories.json`; None: class names are numbered in alphabetical order."""
    notes: tuple[str, ...] = ()
    """Remarks for the user about the source as a whole."""
    written: Path | None = None
    """Folder to which the reader writes images."""


REPEATED_IMAGE = "image of an earlier row"
"""A reason in `ImportReport.first`: the image is also the image of an earlier row."""
EXIF_REMEDY = (
    f"the size does not show whether the boxes of {ImageSkip.ROTATED} images refer to the displayed"
    " or the stored image: set exif=displayed or exif=stored"
)


@dataclass(slots=True)
class ImportReport:
    """Counts of images and annotations of an import, by outcome."""

    images: Counter[str] = field(
        default_factory=lambda: Counter(read=0, written=0, turned_by_exif=0, repeated=0)
    )
    """Numbers of images. `written` images became records, and EXIF turns `turned_by_exif` of these.
    `repeated` images are also the image of an earlier record.
    """
    images_skipped: Counter[ImageSkip] = field(default_factory=Counter)
    objects: Counter[str] = field(
        default_factory=lambda: Counter(
            dict.fromkeys(("read", "boxes", "polygons", "clamped", "simplified"), 0)
            | dict.fromkeys(("turned_boxes", "one_pixel", "repeated", "ignored"), 0)
        )
    )
    """Numbers of annotations. `ignored` annotations became regions to ignore, and also count in
    `objects_skipped`. `turned_boxes` are rotated boxes. `repeated` objects equal another object of
    their image in name and box.
    """
    objects_skipped: Counter[ObjectSkip] = field(default_factory=Counter)
    boxes_for_polygons: Counter[ObjectSkip] = field(default_factory=Counter)
    """Boxes that were kept although polygons were wanted, by reason."""
    unknown_keys: Counter[str] = field(default_factory=Counter)
    """For each key that the reader does not know, how many annotations have it. Such keys had no
    effect.
    """
    no_coco_results: str | None = None
    """Why predictions cannot be exported as COCO results."""
    notes: tuple[str, ...] = ()
    """Remarks of the reader about the source as a whole."""
    first: dict[str, str] = field(default_factory=dict)
    """By skip reason or unknown key, the first image or file that has it."""
    boxes: BoxEvidence = field(default_factory=BoxEvidence)
    names: set[str] = field(default_factory=set)
    """Class names of objects and of regions to ignore."""
    sample_of: dict[Path, str] = field(default_factory=dict)
    """By image path, the id of the first sample with this image."""

    def skip_image(self, reason: ImageSkip, num_objects: int, where: str) -> None:
        """Count an image that is left out, with its annotations; `where` says which it is."""
        self.images_skipped[reason] += 1
        self.first.setdefault(reason, where)
        if reason is not ImageSkip.NO_OBJECTS:  # its annotations have their own reasons
            self.objects_skipped[ObjectSkip.IMAGE_SKIPPED] += num_objects

    def skip_objects(self, reason: ObjectSkip, number: int, where: str) -> None:
        """Count `number` annotations that are left out; `where` says in which image."""
        if number:
            self.objects_skipped[reason] += number
            self.first.setdefault(reason, where)

    def add_object(
        self,
        found: SourceObject | Ignored | ObjectSkip,
        result: Converted | Ignored | ObjectSkip,
        where: str,
    ) -> None:
        """Count an annotation of an image that is not skipped.

        `found` is the annotation, and `result` what it was converted to; `where` says in which
        image.
        """
        if isinstance(found, SourceObject):
            self.objects["turned_boxes"] += found.is_turned and isinstance(result, Converted)
            self.unknown_keys.update(found.unknown_keys)
            for key in found.unknown_keys:
                self.first.setdefault(f"key {key}", where)
        if not isinstance(result, Converted):
            self.objects["ignored"] += isinstance(result, Ignored)
            self.skip_objects(result.reason if isinstance(result, Ignored) else result, 1, where)
            return
        is_box = result.object.kind is GeometryKind.BBOX
        self.objects["boxes" if is_box else "polygons"] += 1
        self.objects["clamped"] += result.clamped
        self.objects["simplified"] += result.simplified
        if result.no_polygon is not None:
            self.boxes_for_polygons[result.no_polygon] += 1

    def add_record(
        self, image: SourceImage, path: Path, converted: list[Converted], where: str
    ) -> None:
        """Count an image that is written as a dataset row, and its unusual properties."""
        self.images["written"] += 1
        ignored = [one.region.desc for one in image.objects if isinstance(one, Ignored)]
        self.names.update([one.object.desc for one in converted], filter(str.strip, ignored))
        first = self.sample_of.setdefault(path, image.sample_id)
        if first != image.sample_id:
            self.images["repeated"] += 1
            self.first.setdefault(REPEATED_IMAGE, f"{where}, as sample {first}")
        num_tiny = sum(max(one.source.box[2:]) <= 1 for one in converted)
        num_distinct = len({(one.object.desc, one.source.box) for one in converted})
        for key, name, number in (
            ("one_pixel", "box of one pixel", num_tiny),
            ("repeated", "repeated object", len(converted) - num_distinct),
        ):
            if number:
                self.objects[key] += number
                self.first.setdefault(name, where)

    def as_json(self) -> dict[str, object]:
        return {
            "images": {**self.images, "skipped": dict(self.images_skipped)},
            "no_coco_results": self.no_coco_results,
            "objects": {
                **self.objects,
                "skipped": dict(self.objects_skipped),
                "boxes_for_polygons": dict(self.boxes_for_polygons),
                "unknown_keys": dict(self.unknown_keys),
            },
        }

    def describe(self) -> str:
        images, objects, keys = self.images, self.objects, self.unknown_keys
        why = self.no_coco_results
        odd = {
            "boxes of one pixel": objects["one_pixel"],
            "repeated objects (same name and box)": objects["repeated"],
            "rows with the image of an earlier row": images["repeated"],
        }
        odd = {name: number for name, number in odd.items() if number}
        optional = [
            ("exif", EXIF_REMEDY if self.images_skipped[ImageSkip.ROTATED] else ""),
            *(("note", note) for note in self.notes),
            ("ignored", _number(objects["ignored"], "regions, in which predictions do not count")),
            ("exif", _number(images["turned_by_exif"], "images are turned")),
            ("results", why and f"predictions cannot be exported as COCO results: {why}"),
            ("odd", counted(odd) if odd else ""),
            ("unknown", f"keys without effect: {counted(keys)}" if keys else ""),
            ("turned", _number(objects["turned_boxes"], "boxes are rotated about their centre")),
            *(("first", f"{reason}: {where}") for reason, where in self.first.items()),
        ]
        return (
            f"images    {images['written']} of {images['read']} written;"
            f" skipped: {counted(self.images_skipped)}\n"
            f"objects   {objects['boxes']} boxes and {objects['polygons']} polygons of"
            f" {objects['read']} annotations; skipped: {counted(self.objects_skipped)}\n"
            f"altered   {objects['clamped']} clamped to their image,"
            f" {objects['simplified']} polygons simplified\n"
            f"fallbacks boxes in place of polygons: {counted(self.boxes_for_polygons)}"
            + "".join(f"\n{name:9} {text}" for name, text in optional if text)
        )


def _number(number: int, of_what: str) -> str:
    return f"{number} {of_what}" if number else ""


def _no_other_file(out: Path) -> Path:
    if out.suffix in (".json", ".parquet", ".csv"):
        raise refusal(f"{out} does not end in .jsonl", f"write {out.with_suffix('.jsonl')}")
    return out


class ImportOptions(Section):
    """Options of `rollmatch import-data` for all formats. A format adds its own and `read`."""

    source_key: ClassVar[str] = "source"
    """The key to correct if no image is found."""

    format_reading: ClassVar[BoxReading] = PIXELS_XYWH
    """Usual order and unit of a box's numbers in the format."""

    out: Annotated[ConfigPath, AfterValidator(_no_other_file), Field(examples=["data/train.jsonl"])]
    """JSONL file to write, or a folder for it. Image paths in the file are relative to it."""

    geometry: Annotated[WantedGeometry, Field(strict=False)] = WantedGeometry.BBOX
    """Boxes (`bbox`), polygons (`poly`), or both (`auto`). Annotations without exactly one usable
    ring are left out by `poly` and become boxes with `auto`.
    """

    max_vertices: Annotated[int, Field(ge=3)] | None = None
    """Polygons with more vertices are simplified to this many, to save tokens; null: no limit."""

    max_objects: PositiveInt | None = None
    """Images with more objects are left out; null: no limit."""

    keep_empty: bool = False
    """Keep images without objects; their answer is empty."""

    exif: Annotated[ExifFrame, Field(strict=False)] | None = None
    """The image that boxes refer to, if EXIF turns the image and its stated size does not show
    which: `displayed`, or `stored` (boxes are then turned too); null: such images are left out.
    """

    box_order: Annotated[BoxOrder, Field(strict=False)] | None = None
    """Order of a box's numbers: `xywh`, `xyxy`, `yxyx` or `cxcywh`; null: the format's order."""

    box_unit: Annotated[BoxUnit, Field(strict=False)] | None = None
    """Unit of a box: `pixels`, `parts` of the image (0 to 1) or `thousandths` (0 to 1000); null:
    the format's unit.
    """

    check_boxes: bool = True
    """Refuse a file if its boxes fit their images only in another order or unit."""

    check_images: bool = True
    """Decode every image, and compare its size with the stated size; false: bad images are found
    when they are used.
    """

    @property
    def records(self) -> Path:
        return self.out if self.out.suffix == ".jsonl" else self.out / f"{self.name}.jsonl"

    @property
    def reading(self) -> BoxReading:
        """Return how the source writes a box, as set by the keys or usual in the format."""
        own = self.format_reading
        return replace(own, order=self.box_order or own.order, unit=self.box_unit or own.unit)

    @property
    def name(self) -> str:
        """Return the name of the JSONL file, without suffix, if `out` is a folder."""
        raise NotImplementedError

    def no_coco_results(self, _report: ImportReport, /) -> str | None:
        """Return why predictions cannot be exported as COCO results; None: they can."""
        return None

    def read(self) -> Source:
        """Read the annotations to import. Images are read later, one by one.

        Raises RecordError or ConfigError if the source cannot be read.
        """
        raise NotImplementedError


def counted(counts: Mapping[Any, int]) -> str:
    """Format counts, highest first: `crowd 2, rle 1`, or `none`."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {count}" for name, count in ordered) or "none"
