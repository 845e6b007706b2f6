"""The face of a reader: its options, and the images that it finds, in a format's own terms."""

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
    """The reason why an image, or a row about one, was left out."""

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
    """The picture that annotations are relative to, if its file has an EXIF orientation."""

    DISPLAYED = "displayed"
    """The turned one, as a person sees it."""
    STORED = "stored"
    """The one before it is turned."""


@dataclass(frozen=True, slots=True)
class SourceImage:
    """One image and its annotations as a reader found them; it becomes one row.

    Example: `SourceImage("7", Path("7.jpg"), [SourceObject("cat", (10, 20, 30, 40))], (64, 48))`.
    """

    sample_id: str
    path: Path
    objects: Sequence[SourceObject | Ignored | ObjectSkip]
    """Annotations, or why one cannot be used."""
    size: tuple[int, int] | None = None
    """Width and height in pixels that the format states; None: the file's."""
    reading: BoxReading = PIXELS_XYWH
    """The meaning that the numbers of its boxes were read by."""
    keys: Mapping[str, object] = field(default_factory=dict)
    """Further keys of the row: `phrase`, `prompt`, ..., and metadata."""
    unlabelled: Sequence[str] = ()
    """Classes of which some objects have no annotation: nothing is said about a prediction."""
    skip: ImageSkip | None = None
    """The reason of the reader to leave the image out."""


@dataclass(frozen=True, slots=True)
class Orphans:
    """Annotations of images that the source does not have."""

    file: Path
    num_annotations: int
    reason: ObjectSkip = ObjectSkip.UNKNOWN_IMAGE


@dataclass(frozen=True, slots=True)
class Source:
    """The images and objects that a reader has found."""

    file: Path
    """The file or folder that errors name."""
    images: Iterable[SourceImage | Orphans]
    categories: list[dict[str, object]] | None = None
    """Content of the file of categories, for formats whose results are COCO's."""
    notes: tuple[str, ...] = ()
    """What a user has to know of it as a whole."""
    written: Path | None = None
    """Folder that the reader writes pictures to."""


REPEATED_IMAGE = "picture of an earlier row"
"""A reason of `ImportReport.first`."""
EXIF_REMEDY = (
    f"the size does not tell whether the boxes of {ImageSkip.ROTATED} images are relative to the"
    " picture as it is displayed or as it is stored: set exif=displayed or exif=stored"
)


@dataclass(slots=True)
class ImportReport:
    """Counts of images and annotations: what was read, and what became of it."""

    images: Counter[str] = field(
        default_factory=lambda: Counter(read=0, written=0, turned_by_exif=0, repeated=0)
    )
    """`written` ones became records, of which EXIF turns some, and some repeat a picture."""
    images_skipped: Counter[ImageSkip] = field(default_factory=Counter)
    objects: Counter[str] = field(
        default_factory=lambda: Counter(
            dict.fromkeys(("read", "boxes", "polygons", "clamped", "simplified"), 0)
            | dict.fromkeys(("turned_boxes", "one_pixel", "repeated", "ignored"), 0)
        )
    )
    """`ignored` ones became regions to ignore, and are in `objects_skipped` too; `turned_boxes` are
    turned about their centre; `repeated` ones have the name and the box of another one.
    """
    objects_skipped: Counter[ObjectSkip] = field(default_factory=Counter)
    boxes_for_polygons: Counter[ObjectSkip] = field(default_factory=Counter)
    """Boxes that were kept where polygons were wanted, by the reason."""
    unknown_keys: Counter[str] = field(default_factory=Counter)
    """Keys next to a box that its reader does not know, by name; they had no effect."""
    no_coco_results: str | None = None
    """Why predictions cannot become COCO results."""
    notes: tuple[str, ...] = ()
    """What a user has to know of the source as a whole."""
    first: dict[str, str] = field(default_factory=dict)
    """The image or file where each reason, or unknown key, was met first."""
    boxes: BoxEvidence = field(default_factory=BoxEvidence)
    names: set[str] = field(default_factory=set)
    """Classes of objects and of regions to ignore."""
    sample_of: dict[Path, str] = field(default_factory=dict)
    """The first sample about each picture."""

    def skip_image(self, reason: ImageSkip, num_objects: int, where: str) -> None:
        """Count an image that is left out, with its annotations."""
        self.images_skipped[reason] += 1
        self.first.setdefault(reason, where)
        if reason is not ImageSkip.NO_OBJECTS:  # its annotations have reasons of their own
            self.objects_skipped[ObjectSkip.IMAGE_SKIPPED] += num_objects

    def skip_objects(self, reason: ObjectSkip, number: int, where: str) -> None:
        """Count annotations that are left out."""
        if number:
            self.objects_skipped[reason] += number
            self.first.setdefault(reason, where)

    def add_object(
        self,
        found: SourceObject | Ignored | ObjectSkip,
        result: Converted | Ignored | ObjectSkip,
        where: str,
    ) -> None:
        """Count an annotation of an image that is not skipped."""
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
        """Count an image that is written, and what is odd about it."""
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
            "rows about a picture of an earlier row": images["repeated"],
        }
        odd = {name: number for name, number in odd.items() if number}
        optional = [
            ("exif", EXIF_REMEDY if self.images_skipped[ImageSkip.ROTATED] else ""),
            *(("note", note) for note in self.notes),
            ("ignored", _number(objects["ignored"], "regions, in which no answer is judged")),
            ("exif", _number(images["turned_by_exif"], "images are turned")),
            ("results", why and f"no COCO results of predictions: {why}"),
            ("odd", counted(odd) if odd else ""),
            ("unknown", f"keys without effect: {counted(keys)}" if keys else ""),
            ("turned", _number(objects["turned_boxes"], "boxes about their centre")),
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
        raise refusal(f"{out} is no name of a JSONL file", f"write {out.with_suffix('.jsonl')}")
    return out


class ImportOptions(Section):
    """The keys that every format has. A format adds its own, and `read`."""

    source_key: ClassVar[str] = "source"
    """The key to correct where no image is found."""

    format_reading: ClassVar[BoxReading] = PIXELS_XYWH
    """The meaning of a box's numbers in the format."""

    out: Annotated[ConfigPath, AfterValidator(_no_other_file), Field(examples=["data/train.jsonl"])]
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
    """Keep images without any object; their answer is an empty one."""

    exif: Annotated[ExifFrame, Field(strict=False)] | None = None
    """The picture that boxes are relative to, if EXIF turns it and the format's size does not tell:
    as it is `displayed`, or as it is `stored` (boxes are turned with it); null: left out.
    """

    box_order: Annotated[BoxOrder, Field(strict=False)] | None = None
    """Order of a box's numbers: `xywh`, `xyxy`, `yxyx` or `cxcywh`; null: that of the format."""

    box_unit: Annotated[BoxUnit, Field(strict=False)] | None = None
    """`pixels`, `parts` of the picture (0 to 1) or `thousandths` (0 to 1000); null: that of the
    format.
    """

    check_boxes: bool = True
    """Refuse a file whose boxes fit their pictures in another order or unit alone."""

    check_images: bool = True
    """Decode every image and compare its size; false: a bad image is found when its sample is used.
    """

    @property
    def records(self) -> Path:
        """The file to write."""
        return self.out if self.out.suffix == ".jsonl" else self.out / f"{self.name}.jsonl"

    @property
    def reading(self) -> BoxReading:
        """The meaning of a box's numbers, as the keys or the format say."""
        own = self.format_reading
        return replace(own, order=self.box_order or own.order, unit=self.box_unit or own.unit)

    @property
    def name(self) -> str:
        """The name of the records where `out` is a folder."""
        raise NotImplementedError

    def no_coco_results(self, _report: ImportReport, /) -> str | None:
        """Tell why predictions on the records cannot become COCO results; None: they can."""
        return None

    def read(self) -> Source:
        """Open the source; its images are read one by one.

        Raises RecordError or ConfigError where the source as a whole cannot be read.
        """
        raise NotImplementedError


def counted(counts: Mapping[Any, int]) -> str:
    """Format counts, most first: `crowd 2, rle 1`, or `none`."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {count}" for name, count in ordered) or "none"
