"""The face of a reader: its options, and the images that it finds, in a format's own terms."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, PositiveInt

from launch.import_data.boxes import PIXELS_XYWH, BoxOrder, BoxReading, BoxUnit
from launch.import_data.objects import (
    Converted,
    Ignored,
    ObjectSkip,
    SourceObject,
    WantedGeometry,
)
from shared.config.base import ConfigPath, Section, refusal
from shared.errors import ConfigError
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
    keys: Mapping[str, Any] = field(default_factory=dict)
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
    categories: list[dict[str, Any]] | None = None
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

    num_images: int = 0
    num_annotations: int = 0
    num_written: int = 0
    """Images that became records."""
    images_skipped: Counter[ImageSkip] = field(default_factory=Counter)
    kept: Counter[GeometryKind] = field(default_factory=Counter)
    objects_skipped: Counter[ObjectSkip] = field(default_factory=Counter)
    boxes_for_polygons: Counter[ObjectSkip] = field(default_factory=Counter)
    """Boxes that were kept where polygons were wanted, by the reason."""
    num_clamped: int = 0
    num_simplified: int = 0
    num_turned_boxes: int = 0
    """Boxes turned about their centre, of which the enclosing box or the corners were kept."""
    num_one_pixel: int = 0
    """Boxes of at most one pixel."""
    num_repeated_objects: int = 0
    """Objects with the name and the box of another one of their image."""
    num_repeated_images: int = 0
    """Written rows about a picture that an earlier row is about."""
    no_coco_results: str | None = None
    """Why predictions cannot become COCO results."""
    num_turned_images: int = 0
    """Written images that their EXIF orientation turns."""
    num_ignored: int = 0
    """Annotations that became regions to ignore; each is in `objects_skipped` too."""
    notes: tuple[str, ...] = ()
    """What a user has to know of the source as a whole."""
    unknown_keys: Counter[str] = field(default_factory=Counter)
    """Keys next to a box that its reader does not know, by name; they had no effect."""
    first: dict[str, str] = field(default_factory=dict)
    """The image or file where each reason, or unknown key, was met first."""

    def add(
        self,
        found: SourceObject | Ignored | ObjectSkip,
        result: Converted | Ignored | ObjectSkip,
        where: str,
    ) -> None:
        """Count an annotation of an image that is not skipped."""
        if isinstance(found, SourceObject):
            self.num_turned_boxes += found.is_turned and isinstance(result, Converted)
            self.unknown_keys.update(found.unknown_keys)
            for key in found.unknown_keys:
                self.first.setdefault(f"key {key}", where)
        if not isinstance(result, Converted):
            reason = result.reason if isinstance(result, Ignored) else result
            self.num_ignored += isinstance(result, Ignored)
            self.objects_skipped[reason] += 1
            self.first.setdefault(reason, where)
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
                "turned_by_exif": self.num_turned_images,
                "repeated": self.num_repeated_images,
            },
            "no_coco_results": self.no_coco_results,
            "objects": {
                "read": self.num_annotations,
                "boxes": self.kept[GeometryKind.BBOX],
                "polygons": self.kept[GeometryKind.POLY],
                "skipped": dict(self.objects_skipped),
                "boxes_for_polygons": dict(self.boxes_for_polygons),
                "clamped": self.num_clamped,
                "simplified": self.num_simplified,
                "turned_boxes": self.num_turned_boxes,
                "one_pixel": self.num_one_pixel,
                "repeated": self.num_repeated_objects,
                "unknown_keys": dict(self.unknown_keys),
                "ignored": self.num_ignored,
            },
        }

    def describe(self) -> str:
        boxes = self.kept[GeometryKind.BBOX]
        polygons = self.kept[GeometryKind.POLY]
        first = "".join(f"\nfirst     {reason}: {where}" for reason, where in self.first.items())
        if self.num_turned_boxes:
            first = f"\nturned    {self.num_turned_boxes} boxes about their centre{first}"
        if self.unknown_keys:
            first = f"\nunknown   keys without effect: {counted(self.unknown_keys)}{first}"
        odd = {
            "boxes of one pixel": self.num_one_pixel,
            "repeated objects (same name and box)": self.num_repeated_objects,
            "rows about a picture of an earlier row": self.num_repeated_images,
        }
        if any(odd.values()):
            first = f"\nodd       {counted({k: n for k, n in odd.items() if n})}{first}"
        if self.no_coco_results is not None:
            first = f"\nresults   no COCO results of predictions: {self.no_coco_results}{first}"
        if self.num_turned_images:
            first = f"\nexif      {self.num_turned_images} images are turned{first}"
        if self.num_ignored:
            first = f"\nignored   {self.num_ignored} regions, in which no answer is judged{first}"
        first = "".join(f"\nnote      {note}" for note in self.notes) + first
        if self.images_skipped[ImageSkip.ROTATED]:
            first = f"\nexif      {EXIF_REMEDY}{first}"
        return (
            f"images    {self.num_written} of {self.num_images} written;"
            f" skipped: {counted(self.images_skipped)}\n"
            f"objects   {boxes} boxes and {polygons} polygons of {self.num_annotations}"
            f" annotations; skipped: {counted(self.objects_skipped)}\n"
            f"altered   {self.num_clamped} clamped to their image, {self.num_simplified} polygons"
            " simplified\n"
            f"fallbacks boxes in place of polygons: {counted(self.boxes_for_polygons)}{first}"
        )


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


def find_file(path: Path) -> Path:
    """Return the file of this path.

    If there is none: one whose suffix differs in case alone, or a name in Unicode normalisation (a
    disk of macOS has `u` and two dots where JSON has `ü`).
    """
    if path.is_file():
        return path
    return files_by_suffix(_find_folder(path.parent)).get(file_key(path.name), path)


def file_key(name: str) -> tuple[str, str]:
    """Return the stem in one Unicode normalisation, and the suffix in lower case."""
    path = PurePath(unicodedata.normalize("NFC", name))
    return path.stem, path.suffix.lower()


@lru_cache(maxsize=64)
def _find_folder(path: Path) -> Path:
    """Return the folder of this path, or one whose name differs in Unicode normalisation alone."""
    if path.is_dir() or path == path.parent:
        return path
    folder = _find_folder(path.parent)
    wanted = unicodedata.normalize("NFC", path.name)
    names = [one.name for one in folder.iterdir()] if folder.is_dir() else []
    same = sorted(name for name in names if unicodedata.normalize("NFC", name) == wanted)
    return folder / (same[0] if same else path.name)


@lru_cache(maxsize=8)
def files_by_suffix(folder: Path) -> Mapping[tuple[str, str], Path]:
    """List the files of a folder by `file_key`; of two, the first by name."""
    files = sorted(folder.iterdir(), reverse=True) if folder.is_dir() else []
    return {file_key(file.name): file for file in files if file.is_file()}


def require_folder(key: str, path: Path, holds: str) -> None:
    if not path.is_dir():
        raise ConfigError(f"{key}: {path} is not a folder; give the folder that {holds}")


def counted(counts: Mapping[Any, int]) -> str:
    """Format counts, most first: `crowd 2, rle 1`, or `none`."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {count}" for name, count in ordered) or "none"
