"""Reads COCO annotations ("instances"), and LVIS annotations of the same form."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, PlainValidator, ValidationError, field_validator, model_validator

from launch.tools.import_data.boxes import BoxReading
from launch.tools.import_data.files import (
    FileEntry,
    first_problem,
    parse_json,
    read_bytes,
    require_folder,
)
from launch.tools.import_data.objects import (
    HARMLESS_KEYS,
    Ignored,
    ObjectSkip,
    SourceObject,
    finite,
    is_learnable,
    turned_box,
)
from launch.tools.import_data.source import ImportOptions, Orphans, Source, SourceImage
from shared.config.base import ConfigPath
from shared.errors import RecordError

_Pixels = Annotated[int, Field(gt=0, lt=2**31, strict=False)]
"""A width or height in pixels. Some tools write 640.0."""


class CocoImage(FileEntry):
    id: int
    file_name: Annotated[str, Field(min_length=1)]
    width: _Pixels | None = None
    height: _Pixels | None = None
    neg_category_ids: list[int] = Field(default_factory=list)
    """LVIS: categories that are not on the image."""
    not_exhaustive_category_ids: list[int] = Field(default_factory=list)
    """LVIS: categories with some objects that are not annotated."""

    @property
    def size(self) -> tuple[int, int] | None:
        """Return the width and height stated in the file; None: use the image file's size."""
        if self.width is None or self.height is None:
            return None
        return self.width, self.height

    @model_validator(mode="before")
    @classmethod
    def _named_by_url(cls, value: object) -> object:
        """Take the file name from `coco_url` (`.../train2017/000000000009.jpg`) of LVIS v1."""
        if isinstance(value, dict) and "file_name" not in value:
            url = value.get("coco_url")
            if isinstance(url, str):
                return {**value, "file_name": "/".join(url.split("/")[-2:])}
        return value


_HARMLESS_ATTRIBUTES = frozenset({"occluded", "truncated", "difficult", "track_id", "keyframe"})
_ROTATION = "rotation"


Rings = list[list[float]] | dict[str, object] | None
"""A mask: rings x, y, ... in pixels, or a mapping with a run-length code."""


class CocoAnnotation(FileEntry):
    id: object = None
    image_id: int
    category_id: int
    bbox: Annotated[list[float], Field(min_length=4, max_length=4)]
    """x, y, w, h in pixels."""
    iscrowd: Annotated[bool, Field(strict=False)] = False
    segmentation: Rings = None
    rotation: float = 0.0
    """CVAT's `attributes.rotation`: clockwise rotation of the box about its centre, in degrees."""
    unknown_keys: tuple[str, ...] = ()
    """Keys that this reader does not know, including `attributes.name` for attributes."""

    @model_validator(mode="before")
    @classmethod
    def _other_keys(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        known = cls.model_fields.keys() - {_ROTATION, "unknown_keys"}
        unknown = [key for key in value if key not in known and key not in HARMLESS_KEYS]
        if not value.get("ignore"):  # Label Studio writes 0
            unknown = [key for key in unknown if key != "ignore"]
        entry = {key: value[key] for key in known if key in value}
        attributes = value.get("attributes")
        if isinstance(attributes, dict):
            angle = finite([attributes[_ROTATION]]) if _ROTATION in attributes else None
            of_tool = _HARMLESS_ATTRIBUTES
            if angle is not None:
                entry[_ROTATION] = angle[0]
                of_tool |= {_ROTATION}
            unknown += [f"attributes.{key}" for key in attributes if key not in of_tool]
        if unknown:
            entry["unknown_keys"] = tuple(unknown)
        return entry

    @field_validator("segmentation")
    @classmethod
    def _pairs(cls, value: Rings) -> Rings:
        if isinstance(value, list) and any(len(ring) % 2 for ring in value):
            raise ValueError("a ring must have an even number of values: x, y for each vertex")
        return value


@dataclass(frozen=True, slots=True)
class Malformed:
    """An annotation that cannot be read."""

    id: object
    image_id: object
    error: ValidationError


def _read_annotation(value: object) -> CocoAnnotation | Malformed:
    try:
        return CocoAnnotation.model_validate(value)
    except ValidationError as error:
        ids = value if isinstance(value, dict) else {}
        return Malformed(ids.get("id"), ids.get("image_id"), error)


class CocoCategory(FileEntry):
    id: int
    name: str


class CocoFile(FileEntry):
    images: list[CocoImage]
    annotations: list[Annotated[CocoAnnotation | Malformed, PlainValidator(_read_annotation)]]
    categories: list[CocoCategory]

    @property
    def readable(self) -> list[CocoAnnotation]:
        return [one for one in self.annotations if isinstance(one, CocoAnnotation)]

    @property
    def first_malformed(self) -> tuple[str, str]:
        """Return the field and the problem of the first annotation that cannot be read."""
        for index, one in enumerate(self.annotations):
            if isinstance(one, Malformed):
                field, problem = first_problem(one.error)
                return f"annotations[{index}]{'.' if field else ''}{field}", problem
        raise AssertionError("all annotations are readable")


def read_annotations(path: Path) -> CocoFile:
    """Read a file of COCO annotations ("instances").

    Raises:
        RecordError: the file cannot be read; an image, a category or every annotation is malformed;
            an id is repeated; or the name of a used category cannot be learned, or is the name of
            two used categories.
    """
    remedy = "correct the entry, or remove it"
    file = parse_json(path, CocoFile.model_validate_json, read_bytes(path), remedy)
    if file.annotations and not file.readable:
        field, problem = file.first_malformed
        raise RecordError(problem, field=field, remedy=remedy, file=str(path))
    require_unique_ids(path, images=file.images, categories=file.categories)
    used = {annotation.category_id for annotation in file.readable}
    first_of_name: dict[str, int] = {}
    for index, category in enumerate(file.categories):
        if category.id not in used:
            continue
        first = first_of_name.setdefault(category.name, index)
        # The model learns names as text, so they may not contain tokens of the answer format.
        if not is_learnable(category.name):
            problem = "which cannot be an object's desc"
            remedy = "give the category a name in words"
        elif first != index:
            problem = f"like categories[{first}].name, and both are in use"
            remedy = "rename one: predictions are assigned to categories by name"
        else:
            continue
        field, problem = f"categories[{index}].name", f"is {category.name!r}, {problem}"
        raise RecordError(problem, field=field, remedy=remedy, file=str(path))
    return file


def require_unique_ids(
    path: Path, **entries_of: Sequence[CocoImage | CocoCategory | CocoAnnotation | Malformed]
) -> None:
    """Raise RecordError if two entries of a list in the file have the same id."""
    for kind, entries in entries_of.items():
        first_of_id: dict[object, int] = {}
        for index, entry in enumerate(entries):
            if not isinstance(entry.id, int):
                continue
            first = first_of_id.setdefault(entry.id, index)
            if first != index:
                problem = f"is {entry.id}, like {kind}[{first}].id"
                field, remedy = f"{kind}[{index}].id", "give every entry its own id"
                raise RecordError(problem, field=field, remedy=remedy, file=str(path))


def distinct_categories(file: CocoFile) -> list[dict[str, object]]:
    """List a file's categories for the COCO export.

    Of several categories with the same name, the one that annotations use is kept.
    """
    used = {annotation.category_id for annotation in file.readable}
    in_use_last = sorted(file.categories, key=lambda category: category.id in used)
    id_of = {category.name: category.id for category in in_use_last}
    return [
        category.model_dump() for category in file.categories if id_of[category.name] == category.id
    ]


class CrowdReading(StrEnum):
    """How annotations with iscrowd 1 are read."""

    IGNORE = "ignore"
    OBJECTS = "objects"


class CocoImport(ImportOptions):
    """Options of `rollmatch import-data format=coco`: a file of COCO annotations."""

    source_key: ClassVar[str] = "images"

    annotations: Annotated[ConfigPath, Field(examples=["instances_train2017.json"])]
    """JSON file of COCO annotations."""

    images: Annotated[ConfigPath, Field(examples=["train2017"])]
    """Folder that the annotations' file names are relative to."""

    crowds: Annotated[CrowdReading, Field(strict=False)] = CrowdReading.IGNORE
    """How annotations with iscrowd 1 are read: as regions to ignore (`ignore`, as in COCO) or as
    single objects (`objects`: CVAT sets iscrowd 1 for every mask).
    """

    @property
    def name(self) -> str:
        return self.annotations.stem

    def read(self) -> Source:
        require_folder("images", self.images, "the annotations' file names are relative to")
        file = read_annotations(self.annotations)
        notes = tuple(self._notes(file))
        return Source(self.annotations, self._images(file), distinct_categories(file), notes)

    def _notes(self, file: CocoFile) -> Iterator[str]:
        num_malformed = len(file.annotations) - len(file.readable)
        if num_malformed:
            first = ": ".join(file.first_malformed)
            yield f"{num_malformed} annotations are malformed, the first: {first}"
        masks = [one for one in file.readable if isinstance(one.segmentation, dict)]
        if self.crowds is CrowdReading.IGNORE and masks and all(m.iscrowd for m in masks):
            yield (
                f"all {len(masks)} masks have iscrowd 1, which CVAT also writes for single objects;"
                " if they are single objects, set crowds=objects"
            )

    def _images(self, file: CocoFile) -> Iterator[SourceImage | Orphans]:
        names = {category.id: category.name for category in file.categories}
        by_image: defaultdict[int | None, list[CocoAnnotation | Malformed]] = defaultdict(list)
        for annotation in file.annotations:
            id = annotation.image_id
            by_image[id if isinstance(id, int) else None].append(annotation)
        for image in file.images:
            yield self._image(image, by_image.pop(image.id, []), names)
        yield Orphans(self.annotations, len(by_image.pop(None, [])), ObjectSkip.MALFORMED)
        yield Orphans(self.annotations, sum(map(len, by_image.values())))

    def _image(
        self, image: CocoImage, annotations: list[CocoAnnotation | Malformed], names: dict[int, str]
    ) -> SourceImage:
        return SourceImage(
            str(image.id),
            self.images / image.file_name,
            [self._object(annotation, names) for annotation in annotations],
            image.size,
            reading=self.reading,
            keys={"image_id": image.id},
        )

    def _object(
        self, annotation: CocoAnnotation | Malformed, names: dict[int, str]
    ) -> SourceObject | Ignored | ObjectSkip:
        if isinstance(annotation, Malformed):
            return ObjectSkip.MALFORMED
        found = source_object(annotation, names, self.reading)
        is_crowd = annotation.iscrowd and self.crowds is CrowdReading.IGNORE
        if not is_crowd or isinstance(found, ObjectSkip):
            return found
        return Ignored(ObjectSkip.CROWD, found, is_crowd=True)


def source_object(
    annotation: CocoAnnotation, names: dict[int, str], reading: BoxReading
) -> SourceObject | ObjectSkip:
    """Convert a COCO annotation to an object, or to a reason to skip it.

    `names` maps category ids to names. `reading` is how the file writes boxes.
    """
    if annotation.category_id not in names:
        return ObjectSkip.UNKNOWN_CATEGORY
    box = reading.box(annotation.bbox)
    desc = names[annotation.category_id]
    rings = annotation.segmentation
    unknown = annotation.unknown_keys
    if annotation.rotation % 360:
        if _is_box(rings, box):
            angle = math.radians(annotation.rotation)
            return turned_box(desc, box, angle, unknown)
        unknown = (*unknown, "attributes.rotation")  # cannot be applied to other shapes
    return SourceObject(desc, box, rings, unknown_keys=unknown)


def _is_box(
    rings: Sequence[Sequence[float]] | dict[str, object] | None, box: Sequence[float]
) -> bool:
    """Return whether an annotation has no mask but its box.

    Some tools write the box of such an annotation as a ring too.
    """
    if not rings:
        return True
    if isinstance(rings, dict) or len(rings) > 1:
        return False
    x, y, w, h = box
    corners = [(x, y), (x + w, y), (x + w, y + h), (x, y + h)]
    points = zip(rings[0][::2], rings[0][1::2], strict=True)
    return all(any(math.dist(point, corner) < 0.5 for corner in corners) for point in points)


class LvisImport(CocoImport):
    """Options of `rollmatch import-data format=lvis`: a file of LVIS annotations.

    LVIS (Gupta et al., 2019) labels every object of some classes, and lists other classes as
    absent. A row's `classes` lists both, so that `Find every {classes}.` has a complete
    answer. Objects of classes that are only partly labelled are left out.
    """

    annotations: Annotated[ConfigPath, Field(examples=["lvis_v1_train.json"])]
    """JSON file of LVIS annotations."""

    images: Annotated[ConfigPath, Field(examples=["coco"])]
    """Folder with COCO's `train2017` and `val2017`, as named at the end of `coco_url`."""

    def _image(
        self, image: CocoImage, annotations: list[CocoAnnotation | Malformed], names: dict[int, str]
    ) -> SourceImage:
        found = super()._image(image, annotations, names)
        partial = set(image.not_exhaustive_category_ids)
        readable = [one for one in annotations if isinstance(one, CocoAnnotation)]
        complete = {one.category_id for one in readable} | set(image.neg_category_ids)
        # Sorted by name, so that the order does not reveal which classes are present.
        classes = sorted(names[id] for id in complete - partial if id in names)
        objects = [
            Ignored(ObjectSkip.NOT_EXHAUSTIVE, one, is_crowd=False)
            if isinstance(annotation, CocoAnnotation)
            and annotation.category_id in partial
            and isinstance(one, SourceObject)
            else one
            for annotation, one in zip(annotations, found.objects, strict=True)
        ]
        unlabelled = sorted(names[id] for id in partial if id in names)
        keys = {**found.keys, "classes": classes}
        return replace(found, objects=objects, keys=keys, unlabelled=unlabelled)
