"""Reads a YOLO folder in the layout of Ultralytics: `data.yaml`, `images/`, `labels/`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path, PureWindowsPath
from typing import Annotated, ClassVar, Literal

import yaml
from pydantic import Field

from launch.tools.import_data.boxes import BoxOrder, BoxReading, BoxUnit
from launch.tools.import_data.files import FileEntry, find_file, parse_json, read_bytes
from launch.tools.import_data.objects import ObjectSkip, SourceObject, finite
from launch.tools.import_data.source import ImportOptions, Orphans, Source, SourceImage
from shared.config.base import ConfigPath
from shared.data.limits import MAX_FOLDER_FILES, MAX_LABEL_BYTES, above
from shared.errors import RecordError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
SLACK = 0.01
"""How far rounding may move a coordinate out of 0..1. Ultralytics' own check permits as much."""


class _DataFile(FileEntry):
    names: dict[int, str]
    path: str = "."
    """Root of the folders below, relative to `data.yaml`."""
    train: list[str] = Field(default_factory=list)
    val: list[str] = Field(default_factory=list)
    test: list[str] = Field(default_factory=list)
    """Folders of images, or text files that list them."""
    kpt_shape: list[Annotated[int, Field(strict=False)]] | None = None
    """Set for labels of poses, which have points after the box."""


class YoloImport(ImportOptions):
    """Options of `rollmatch import-data format=yolo`: a YOLO folder of Ultralytics' layout."""

    source: Annotated[ConfigPath, Field(examples=["my_folder"])]
    """Folder with `data.yaml`, or a file of this form."""

    format_reading: ClassVar[BoxReading] = BoxReading(BoxOrder.CXCYWH, BoxUnit.PARTS)

    split: Literal["train", "val", "test"] = "train"
    """Key of `data.yaml` with the folder of the images."""

    @property
    def name(self) -> str:
        return self.split

    def read(self) -> Source:
        file = self.source / "data.yaml" if self.source.is_dir() else self.source
        remedy = "correct it"
        data = parse_json(file, lambda raw: _parse(file, raw), _content(file), remedy)
        splits = {"train": data.train, "val": data.val, "test": data.test}
        entries = splits[self.split]
        # Absolute, because label files are found by the folder `/images/` in the image path.
        folder = file.parent.absolute()
        root = folder / data.path if (folder / data.path).is_dir() else folder
        places = []
        for entry in entries:
            # Roboflow writes `../train/images` for a folder next to the file.
            tried = [root / entry, folder / entry, folder / entry.removeprefix("../")]
            found = [place for place in tried if place.exists()]
            if not found:
                remedy = f"correct it; tried {', '.join(map(str, dict.fromkeys(tried)))}"
                problem = f"names {entry!r}, which does not exist"
                raise RecordError(problem, field=self.split, remedy=remedy, file=str(file))
            if found[0].resolve() == Path(folder.anchor):
                remedy = "name the folder of the images"
                problem = f"names {entry!r}, the whole disk"
                raise RecordError(problem, field=self.split, remedy=remedy, file=str(file))
            places.append(found[0])
        if not places:
            there = ", ".join(name for name, found in splits.items() if found) or "none"
            remedy = f"add a folder of images, or choose another split=... (defined: {there})"
            raise RecordError("is missing", field=self.split, remedy=remedy, file=str(file))
        return Source(
            file,
            self._images(data, places, root),
            [{"id": id, "name": name} for id, name in sorted(data.names.items())],
        )

    def _images(
        self, data: _DataFile, places: list[Path], root: Path
    ) -> Iterator[SourceImage | Orphans]:
        labels_of: dict[Path, Path] = {}
        poses = None if data.kpt_shape else _PoseEvidence()
        for place in places:
            if place.is_dir():
                images = self._files(place, IMAGE_SUFFIXES)
            else:
                images = [_listed(line.strip(), place.parent, root) for line in _lines(place)]
            for image in dict.fromkeys(images):
                if image in labels_of:
                    continue
                labels = labels_of[image] = _labels_of(image)
                rows = [line.split() for line in _lines(labels, _content)]
                objects = [_object(row, data, self.reading) for row in rows]
                if poses is not None:
                    poses.add(rows, labels)
                name = os.path.relpath(image, root)
                yield SourceImage(name, image, objects, reading=self.reading)
        used = set(labels_of.values())
        if used and not any(labels.is_file() for labels in used):
            raise RecordError(
                f"names {len(labels_of)} images, but none has a label file (first: {min(used)})",
                field=self.split,
                remedy="put the labels there, in `labels` next to `images`, or next to the images"
                " (empty files for images without objects)",
                file=str(self.source),
            )
        for place in places:
            folder = _labels_of(place / "any.jpg").parent
            if place.is_dir() and folder != place:
                for labels in self._files(folder, (".txt",)):
                    # LabelImg writes its list of names to classes.txt.
                    if labels not in used and labels.stem != "classes":
                        yield Orphans(labels, len(_lines(labels, _content)))
        if poses is not None and poses.are_poses:
            raise RecordError(
                "is missing, but the rows of labels are poses: the first four numbers are a box,"
                f" and all further points lie in it (first: {poses.first})",
                field="kpt_shape",
                remedy="write the number of points, and 2 or 3 numbers each: kpt_shape: [17, 3]",
                file=str(self.source),
            )

    def _files(self, folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
        """Return the files with these suffixes in a folder tree. Raises RecordError."""
        found: list[Path] = []
        num_seen = 0
        for place, _, names in os.walk(folder):
            num_seen += len(names)
            if num_seen > MAX_FOLDER_FILES:
                raise RecordError(
                    f"names {folder}, which holds {above('MAX_FOLDER_FILES', MAX_FOLDER_FILES)}",
                    field=self.split,
                    remedy="name the folder of the images, not a folder far above it",
                    file=str(self.source),
                )
            found += [Path(place, name) for name in names if name.lower().endswith(suffixes)]
        return sorted(found)


def _parse(file: Path, content: bytes) -> _DataFile:
    try:
        # BaseLoader keeps scalars as text: `no` is a name, not a boolean.
        raw = yaml.load(content, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError) as error:
        problem = f"is not YAML: {' '.join(str(error).split())}"
        raise RecordError(problem, field="file", remedy="correct it", file=str(file)) from error
    if isinstance(raw, dict):
        for key in ("train", "val", "test"):
            if isinstance(raw.get(key), str):
                raw[key] = [raw[key]]
            if raw.get(key) in ([""], ["~"], ["null"]):
                del raw[key]
        if raw.get("kpt_shape") in ("", "~", "null"):
            del raw["kpt_shape"]
        names = raw.get("names")
        if isinstance(names, list):
            raw["names"] = dict(enumerate(names))
        elif isinstance(names, dict):
            raw["names"] = {
                int(id) if id.isdecimal() and len(id) < 10 else id: name
                for id, name in names.items()
            }
    return _DataFile.model_validate(raw)


def _labels_of(image: Path) -> Path:
    """Return the path of an image's label file.

    It is in the folder `labels` instead of `images`, or else next to the image.
    """
    before, found, behind = str(image).rpartition(f"{os.sep}images{os.sep}")
    path = Path(before, "labels", behind) if found else image
    return find_file(path.with_suffix(".txt"))


def _content(file: Path) -> bytes:
    return read_bytes(file, "MAX_LABEL_BYTES", MAX_LABEL_BYTES)


def _lines(file: Path, read: Callable[[Path], bytes] = read_bytes) -> list[str]:
    """Return the lines of a text file that are not blank.

    There are none if the file does not exist, because images without objects may lack a label file.
    """
    if not file.is_file():
        return []
    text = read(file).decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()]


def _listed(line: str, folder: Path, root: Path) -> Path:
    """Return the image that a line of an image list names.

    The path in the line may begin with folders that do not exist here: CVAT writes
    `data/images/train/a.jpg` for a file in `images/train`. `root` is the root folder of the data,
    `folder` the folder of the list.
    """
    first = (folder if line.startswith("./") else root) / line
    parts = PureWindowsPath(line).parts  # reads both separators
    for start in range(max(1, len(parts) - 1)):
        for place in (root, folder):
            found = find_file(place.joinpath(*parts[start:]))
            if found.is_file():
                return found
    return first


def _object(row: list[str], data: _DataFile, reading: BoxReading) -> SourceObject | ObjectSkip:
    """Read `class cx cy w h` or `class x y x y x y ...`, in fractions of the image."""
    numbers = finite(row)
    if numbers is None or len(numbers) < 5 or not numbers[0].is_integer():
        return ObjectSkip.MALFORMED
    category, *values = numbers
    if data.kpt_shape is not None:
        values = values[:4]
    if len(values) % 2:  # a box followed by a confidence
        return ObjectSkip.MALFORMED
    is_in_parts = -SLACK <= min(values) <= max(values) <= 1 + SLACK
    skip = ObjectSkip.MALFORMED if reading.unit is BoxUnit.PARTS and not is_in_parts else None
    if int(category) not in data.names:
        return ObjectSkip.UNKNOWN_CATEGORY
    desc = data.names[int(category)]
    if len(values) == 4:
        return SourceObject(desc, reading.box(values), skip=skip)
    if skip is not None:
        return skip
    xs = values[::2]
    ys = values[1::2]
    box = (min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys))
    return SourceObject(desc, box, [values])


class _PoseEvidence:
    """Detects that rows of labels are poses, not polygons, although `kpt_shape` is missing.

    A pose is a box with points in it. Read as a polygon, its numbers give a ring that crosses
    itself, which is rare for true polygons.
    """

    def __init__(self) -> None:
        self._num_rows = 0
        self._num_crossing = 0
        self._is_polygon = False
        self.first = ""

    @property
    def are_poses(self) -> bool:
        return not self._is_polygon and self._num_crossing * 3 > self._num_rows

    def add(self, rows: list[list[str]], labels: Path) -> None:
        for number, row in enumerate(rows, 1):
            values = finite(row[1:]) if not self._is_polygon and len(row) > 6 else None
            if values is None:
                continue
            self._num_rows += 1
            self.first = self.first or f"{labels}:{number}"
            in_threes = len(values) % 3 == 1 and set(values[6::3]) <= {0.0, 1.0, 2.0}
            if in_threes and _in_box(values, 3):
                self._num_crossing += 1
            elif len(values) % 2 or len(values) > 300 or not _in_box(values, 2):
                self._is_polygon = True
            else:
                self._num_crossing += _crosses_itself(values)


def _in_box(values: list[float], stride: int) -> bool:
    """Return whether the first four values are a box in the image, and the rest points in this box.

    A point may also be (0, 0), which means unlabelled. Each point has `stride` values.
    """
    cx, cy, w, h = values[:4]
    points = zip(values[4::stride], values[5::stride], strict=True)
    return (
        min(cx - w / 2, cy - h / 2) >= -SLACK
        and max(cx + w / 2, cy + h / 2) <= 1 + SLACK
        and all(
            (x, y) == (0, 0) or (abs(x - cx) <= w / 2 + SLACK and abs(y - cy) <= h / 2 + SLACK)
            for x, y in points
        )
    )


def _crosses_itself(values: list[float]) -> bool:
    """Return whether edges of a ring x, y, ... cross, or all vertices are on one line."""
    points = list(zip(values[::2], values[1::2], strict=True))
    edges = list(zip(points, [*points[1:], *points[:1]], strict=True))

    def side(edge: tuple[tuple[float, float], tuple[float, float]], x: float, y: float) -> float:
        (ax, ay), (bx, by) = edge
        return (bx - ax) * (y - ay) - (by - ay) * (x - ax)

    if all(abs(side(edge, *point)) < 1e-12 for edge in edges for point in points):
        return True
    return any(
        side(one, *other[0]) * side(one, *other[1]) < 0
        and side(other, *one[0]) * side(other, *one[1]) < 0
        for i, one in enumerate(edges)
        for other in edges[i + 2 :]
    )
