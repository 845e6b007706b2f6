"""Reads a Pascal VOC folder: `Annotations/*.xml` and images."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath
from typing import Annotated, ClassVar
from xml.etree import ElementTree

from pydantic import Field

from launch.tools.import_data.boxes import BoxOrder, BoxReading
from launch.tools.import_data.files import files_by_suffix, find_file, read_bytes, require_folder
from launch.tools.import_data.objects import Ignored, ObjectSkip, SourceObject, finite, turned_box
from launch.tools.import_data.source import ImageSkip, ImportOptions, Source, SourceImage
from launch.tools.import_data.yolo import IMAGE_SUFFIXES
from shared.config.base import ConfigPath
from shared.data.file_rows import readable
from shared.data.limits import MAX_LABEL_BYTES, read_file
from shared.errors import RecordError

_CORNERS = ("xmin", "ymin", "xmax", "ymax")
_ROTATION = "rotation"
_KNOWN = frozenset(
    {"name", "bndbox", "robndbox", "angle", "type", "difficult", "attributes", "id", "score"}
    | {"pose", "truncated", "occluded", "part", "actions", "point", "deleted", "verified"}
)
"""Children of an object that are read, or do not affect the meaning of its box."""
_KNOWN_ATTRIBUTES = frozenset(
    {_ROTATION, "occluded", "truncated", "difficult", "track_id", "keyframe"}
)


class VocImport(ImportOptions):
    """Options of `rollmatch import-data format=voc`: a Pascal VOC folder."""

    format_reading: ClassVar[BoxReading] = BoxReading(BoxOrder.XYXY, one_based=True)

    source: Annotated[ConfigPath, Field(examples=["VOCdevkit/VOC2012"])]
    """Folder with `Annotations/`, or folder with XML files."""

    images: ConfigPath | None = None
    """Folder of the images; null: `JPEGImages` or `images` in `source`, or the XML folder."""

    split: str | None = None
    """Name of a list in `ImageSets/Main`, such as `train`; null: all XML files."""

    keep_difficult: bool = False
    """Keep objects marked `difficult`, which the VOC evaluation does not count."""

    @property
    def name(self) -> str:
        return self.split or self.source.name or "voc"

    def read(self) -> Source:
        require_folder("source", self.source, "holds Annotations/")
        if self.images is not None:
            require_folder("images", self.images, "the annotations' file names are relative to")
        folder = self.source / "Annotations"
        if not folder.is_dir():
            folder = self.source
        if self.split is None:
            files = sorted(file for file in folder.iterdir() if file.suffix.lower() == ".xml")
        else:
            lists = self.source / "ImageSets" / "Main"
            file = find_file(lists / f"{self.split}.txt")
            if not file.is_file():
                there = ", ".join(sorted(one.stem for one in lists.glob("*.txt"))[:20]) or "none"
                remedy = f"choose from {there}, or leave out split=... for all XML files"
                problem = f"is {self.split}, but this list does not exist"
                raise RecordError(problem, field="split", remedy=remedy, file=str(lists))
            listed = read_bytes(file)
            # Lists for one class have a second column: 1, 0 or -1.
            lines = listed.decode(errors="replace").splitlines()
            names = [line.split()[0] for line in lines if line.strip()]
            files = [find_file(folder / f"{name}.xml") for name in dict.fromkeys(names)]
        if not files:
            remedy = "give the folder that holds Annotations/, or another split=..."
            raise RecordError("has no XML file", field="source", remedy=remedy, file=str(folder))
        places = [self.images, self.source / "JPEGImages", self.source / "images", folder]
        pictures = next(place for place in places if place is not None and place.is_dir())
        return Source(folder, self._images(files, pictures))

    def _images(self, files: list[Path], pictures: Path) -> Iterator[SourceImage]:
        for file in files:
            if not file.is_file():
                yield SourceImage(file.stem, file, [], skip=ImageSkip.UNKNOWN_ANNOTATION)
                continue
            try:
                with readable(file):
                    root = ElementTree.fromstring(
                        read_file(file, "MAX_LABEL_BYTES", MAX_LABEL_BYTES)
                    )
            except (ElementTree.ParseError, ValueError):  # ValueError: an unknown encoding
                yield SourceImage(file.stem, file, [], skip=ImageSkip.MALFORMED_LABELS)
                continue
            if root.tag != "annotation" and root.find("object") is None:
                # Objects in a namespace, or below another element: not an image without objects.
                yield SourceImage(file.stem, file, [], skip=ImageSkip.MALFORMED_LABELS)
                continue
            path = _picture_of(file, (root.findtext("filename") or "").strip(), pictures)
            size = finite(root.findtext(f"size/{axis}") for axis in ("width", "height"))
            objects = [self._object(entry) for entry in root.findall("object")]
            yield SourceImage(
                file.stem,
                path,
                objects,
                # Tools write zeros for an unknown size.
                (int(size[0]), int(size[1])) if size is not None and min(size) > 0 else None,
                reading=self.reading,
            )

    def _object(self, entry: ElementTree.Element) -> SourceObject | Ignored | ObjectSkip:
        read = _box_of(entry, self.reading)
        if read is None:
            return ObjectSkip.MALFORMED
        box, angle = read
        desc = (entry.findtext("name") or "").strip()
        unknown = _unknown_keys(entry)
        found: SourceObject | ObjectSkip
        if angle % math.tau:
            found = turned_box(desc, box, angle, unknown)
        else:
            x, y, w, h = box
            found = SourceObject(desc, (x, y, w, h), unknown_keys=unknown)
        is_difficult = (entry.findtext("difficult") or "").strip() == "1"
        if self.keep_difficult or not is_difficult or isinstance(found, ObjectSkip):
            return found
        return Ignored(ObjectSkip.DIFFICULT, found, is_crowd=False)


def _picture_of(file: Path, filename: str, pictures: Path) -> Path:
    """Return the image with the stem of the XML file, or else the image named in the file.

    The name in the XML may be outdated, because it stays when files are renamed or copied. It may
    lack its suffix or be a path on another disk.
    """
    there = files_by_suffix(pictures)
    name = PureWindowsPath(filename).name  # reads both separators
    own = PureWindowsPath(name).suffix.lower()
    has_suffix = own in IMAGE_SUFFIXES
    suffixes = dict.fromkeys((own, *IMAGE_SUFFIXES)) if has_suffix else IMAGE_SUFFIXES
    for stem in (file.stem, name, name[: -len(own)] if has_suffix else name):
        for suffix in suffixes:
            found = there.get((unicodedata.normalize("NFC", stem), suffix))
            if found is not None:
                return found
    return pictures / filename if name else pictures / f"{file.stem}{IMAGE_SUFFIXES[0]}"


def _box_of(entry: ElementTree.Element, reading: BoxReading) -> tuple[list[float], float] | None:
    """Return x, y, w, h in pixels, and the clockwise rotation in radians.

    The rotation is roLabelImg's `robndbox/angle` or an `angle` next to a `bndbox` (values over 2 pi
    are degrees), plus CVAT's attribute `rotation` in degrees. Returns None if the box is incomplete
    or a value is not a number.
    """
    angle = finite([entry.findtext("angle") or entry.findtext("robndbox/angle") or 0])
    rotations = [
        attribute.findtext("value")
        for attribute in entry.findall("attributes/attribute")
        if (attribute.findtext("name") or "").strip() == _ROTATION
    ]
    degrees = finite(rotations[:1] or [0])
    if angle is None or degrees is None:
        return None
    own = angle[0] if abs(angle[0]) <= math.tau else math.radians(angle[0])
    turn = own + math.radians(degrees[0])
    centred = finite(entry.findtext(f"robndbox/{key}") for key in ("cx", "cy", "w", "h"))
    if centred is not None:
        cx, cy, w, h = centred
        return [cx - w / 2, cy - h / 2, w, h], turn
    corners = finite(entry.findtext(f"bndbox/{key}") for key in _CORNERS)
    if corners is None:
        return None
    return list(reading.box(corners)), turn


def _unknown_keys(entry: ElementTree.Element) -> tuple[str, ...]:
    """Return the keys of an object that this reader does not know."""
    keys = [child.tag for child in entry if child.tag not in _KNOWN]
    keys += [
        f"bndbox.{child.tag}" for child in entry.iterfind("bndbox/*") if child.tag not in _CORNERS
    ]
    for attribute in entry.iterfind("attributes/attribute"):
        name = (attribute.findtext("name") or "").strip()
        if name not in _KNOWN_ATTRIBUTES:
            keys.append(f"attributes.{name}")
    return tuple(keys)
