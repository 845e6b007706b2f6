"""Reads a Pascal VOC folder: `Annotations/*.xml` and the pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated
from xml.etree import ElementTree

from pydantic import Field

from launch.import_data.coco_files import read_bytes
from launch.import_data.objects import ObjectSkip, SourceObject, finite
from launch.import_data.source import (
    ImageSkip,
    ImportOptions,
    Source,
    SourceImage,
    require_folder,
)
from launch.import_data.yolo import IMAGE_SUFFIXES
from shared.config.base import ConfigPath
from shared.errors import RecordError


class VocImport(ImportOptions):
    """The keys of `format=voc`."""

    source: Annotated[ConfigPath, Field(examples=["VOCdevkit/VOC2012"])]
    """Folder with `Annotations/`, or with the XML files themselves."""

    images: ConfigPath | None = None
    """Folder of the pictures; null: `JPEGImages` or `images` of the source, or beside the XML."""

    split: str | None = None
    """List of names in `ImageSets/Main`, such as `train`; null: every XML file."""

    keep_difficult: bool = False
    """Keep objects that are marked `difficult`, which VOC's own evaluation does not count."""

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
            files = sorted(folder.glob("*.xml"))
        else:
            listed = read_bytes(self.source / "ImageSets" / "Main" / f"{self.split}.txt")
            # Lists of one class have a second column, 1, 0 or -1.
            lines = listed.decode(errors="replace").splitlines()
            files = [folder / f"{line.split()[0]}.xml" for line in lines if line.strip()]
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
                root = ElementTree.parse(file).getroot()
            except (ElementTree.ParseError, ValueError):  # ValueError: an encoding nobody knows
                yield SourceImage(file.stem, file, [], skip=ImageSkip.MALFORMED_LABELS)
                continue
            # Names in the XML lack their suffix, or are of the disk of whoever drew the boxes.
            named = pictures / (root.findtext("filename") or "").strip()
            beside = [pictures / f"{file.stem}{suffix}" for suffix in IMAGE_SUFFIXES]
            path = next((one for one in (named, *beside) if one.is_file()), named)
            size = finite(root.findtext(f"size/{axis}") for axis in ("width", "height"))
            objects = [self._object(entry) for entry in root.findall("object")]
            yield SourceImage(
                file.stem,
                path,
                objects,
                # Zeros stand for a size that the tool did not know.
                (int(size[0]), int(size[1])) if size is not None and min(size) > 0 else None,
            )

    def _object(self, entry: ElementTree.Element) -> SourceObject | ObjectSkip:
        corners = finite(
            entry.findtext(f"bndbox/{key}") for key in ("xmin", "ymin", "xmax", "ymax")
        )
        if corners is None:
            return ObjectSkip.MALFORMED
        if not self.keep_difficult and (entry.findtext("difficult") or "").strip() == "1":
            return ObjectSkip.DIFFICULT
        # Pixels are numbered from 1, and the last one is inside.
        x1, y1, x2, y2 = corners[0] - 1, corners[1] - 1, corners[2], corners[3]
        return SourceObject((entry.findtext("name") or "").strip(), (x1, y1, x2 - x1, y2 - y1))
