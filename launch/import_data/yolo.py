"""Reads a YOLO folder as Ultralytics defines it: `data.yaml`, `images/` and `labels/`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field

from launch.import_data.coco_files import CocoEntry, parse_json, read_bytes
from launch.import_data.objects import ObjectSkip, SourceObject, finite
from launch.import_data.source import ImportOptions, Orphans, Source, SourceImage, find_file
from shared.config.base import ConfigPath
from shared.errors import RecordError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
SLACK = 0.01
"""By how much a coordinate may lie outside of 0..1, as in Ultralytics' own check: rounding."""


class _DataFile(CocoEntry):
    names: dict[int, str]
    path: str = "."
    """Root of the folders below, relative to the file."""
    train: list[str] = Field(default_factory=list)
    val: list[str] = Field(default_factory=list)
    test: list[str] = Field(default_factory=list)
    """Folders of images, or text files that list them."""
    kpt_shape: list[int] | None = None
    """Labels are of poses: points stand behind the box."""


class YoloImport(ImportOptions):
    """The keys of `format=yolo`."""

    source: Annotated[ConfigPath, Field(examples=["my_folder"])]
    """Folder with `data.yaml`, or a file like it."""

    split: Literal["train", "val", "test"] = "train"
    """Key of `data.yaml` that says where the images are."""

    @property
    def name(self) -> str:
        return self.split

    def read(self) -> Source:
        file = self.source / "data.yaml" if self.source.is_dir() else self.source
        data = parse_json(file, lambda raw: _parse(file, raw), read_bytes(file), "correct it")
        entries = {"train": data.train, "val": data.val, "test": data.test}[self.split]
        # Absolute, because a label file is found by the folder `/images/` in its image's path.
        folder = file.parent.absolute()
        root = folder / data.path if (folder / data.path).is_dir() else folder
        places = []
        for entry in entries:
            # Roboflow writes `../train/images` for a folder that lies beside the file.
            tried = [root / entry, folder / entry, folder / entry.removeprefix("../")]
            found = [place for place in tried if place.exists()]
            if not found:
                remedy = f"correct it; tried {', '.join(map(str, dict.fromkeys(tried)))}"
                problem = f"names {entry!r}, which is not there"
                raise RecordError(problem, field=self.split, remedy=remedy, file=str(file))
            places.append(found[0])
        if not places:
            remedy = "name a folder of images there, or choose another split=..."
            raise RecordError("is missing", field=self.split, remedy=remedy, file=str(file))
        return Source(file, self._images(data, places, root))

    def _images(
        self, data: _DataFile, places: list[Path], root: Path
    ) -> Iterator[SourceImage | Orphans]:
        used: set[Path] = set()
        for place in places:
            if place.is_dir():
                files = sorted(place.rglob("*"))
                images = [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]
            else:
                lines = [line.strip() for line in _lines(place)]
                images = [
                    (place.parent if line.startswith("./") else root) / line for line in lines
                ]
            for image in images:
                labels = _labels_of(image)
                used.add(labels)
                objects = [_object(line, data) for line in _lines(labels)]
                name = os.path.relpath(image, root)
                yield SourceImage(name, image, objects, fractions=True)
        for place in places:
            folder = _labels_of(place / "any.jpg").parent
            if place.is_dir() and folder != place:
                for labels in sorted(set(folder.rglob("*")) - used):
                    # LabelImg writes its list of names there.
                    if labels.suffix.lower() == ".txt" and labels.stem != "classes":
                        yield Orphans(labels, len(_lines(labels)))


def _parse(file: Path, content: bytes) -> _DataFile:
    try:
        raw = yaml.safe_load(content)
    except yaml.YAMLError as error:
        problem = f"is not YAML: {' '.join(str(error).split())}"
        raise RecordError(problem, field="file", remedy="correct it", file=str(file)) from error
    if isinstance(raw, dict):
        for key in ("train", "val", "test"):
            if isinstance(raw.get(key), str):
                raw[key] = [raw[key]]
            elif key in raw and raw[key] is None:
                del raw[key]
        if isinstance(raw.get("names"), list):
            raw["names"] = dict(enumerate(raw["names"]))
    return _DataFile.model_validate(raw)


def _labels_of(image: Path) -> Path:
    """Return the label file: `labels` for the last `images` of the path, or beside the image."""
    before, found, behind = str(image).rpartition(f"{os.sep}images{os.sep}")
    path = Path(before, "labels", behind) if found else image
    return find_file(path.with_suffix(".txt"))


def _lines(file: Path) -> list[str]:
    """Return the lines that are not blank; an image without objects may have no file of labels."""
    if not file.is_file():
        return []
    text = file.read_text(encoding="utf-8", errors="replace")
    return [line for line in text.splitlines() if line.strip()]


def _object(line: str, data: _DataFile) -> SourceObject | ObjectSkip:
    """Read `class cx cy w h` or `class x y x y x y ...`, in parts of the image."""
    numbers = finite(line.split())
    if numbers is None or len(numbers) < 5 or not numbers[0].is_integer():
        return ObjectSkip.MALFORMED
    category, *values = numbers
    if data.kpt_shape is not None:
        values = values[:4]
    # Beyond are pixels, or a box that is followed by a confidence: 5 values.
    if len(values) % 2 or not -SLACK <= min(values) <= max(values) <= 1 + SLACK:
        return ObjectSkip.MALFORMED
    if int(category) not in data.names:
        return ObjectSkip.UNKNOWN_CATEGORY
    desc = data.names[int(category)]
    if len(values) == 4:
        cx, cy, w, h = values
        return SourceObject(desc, (cx - w / 2, cy - h / 2, w, h))
    xs = values[::2]
    ys = values[1::2]
    box = (min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys))
    return SourceObject(desc, box, [values])
