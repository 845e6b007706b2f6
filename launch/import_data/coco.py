"""Reads COCO annotations ("instances"), and LVIS, whose files have the same form."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from pydantic import Field

from launch.import_data.boxes import BoxReading
from launch.import_data.coco_files import (
    CocoAnnotation,
    CocoFile,
    CocoImage,
    Malformed,
    distinct_categories,
    read_annotations,
)
from launch.import_data.objects import Ignored, ObjectSkip, SourceObject, turned_box
from launch.import_data.source import (
    ImportOptions,
    Orphans,
    Source,
    SourceImage,
    require_folder,
)
from shared.config.base import ConfigPath


class CrowdReading(StrEnum):
    """What annotations with iscrowd 1 are."""

    IGNORE = "ignore"
    OBJECTS = "objects"


class CocoImport(ImportOptions):
    """The keys of `format=coco`."""

    source_key: ClassVar[str] = "images"

    annotations: Annotated[ConfigPath, Field(examples=["instances_train2017.json"])]
    """JSON file of COCO annotations."""

    images: Annotated[ConfigPath, Field(examples=["train2017"])]
    """Folder that the annotations' file names are relative to."""

    crowds: Annotated[CrowdReading, Field(strict=False)] = CrowdReading.IGNORE
    """Annotations with iscrowd 1 are regions to ignore (`ignore`, as COCO means it), or single
    objects (`objects`: CVAT marks every mask so).
    """

    @property
    def name(self) -> str:
        return self.annotations.stem

    def read(self) -> Source:
        require_folder("images", self.images, "the annotations' file names are relative to")
        file = read_annotations(self.annotations)
        return Source(
            self.annotations, self._images(file), distinct_categories(file), self._notes(file)
        )

    def _notes(self, file: CocoFile) -> tuple[str, ...]:
        num_malformed = len(file.annotations) - len(file.readable)
        notes: tuple[str, ...] = ()
        if num_malformed:
            first = ": ".join(file.first_malformed)
            notes = (f"{num_malformed} annotations are malformed, the first: {first}",)
        masks = [one for one in file.readable if isinstance(one.segmentation, dict)]
        if self.crowds is CrowdReading.OBJECTS or not masks or not all(m.iscrowd for m in masks):
            return notes
        note = (
            f"all {len(masks)} masks have iscrowd 1, as CVAT writes single objects too; if they are"
            " single objects, set crowds=objects"
        )
        return (*notes, note)

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
    """Read one annotation; `names` are those of the categories by id."""
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
        unknown = (*unknown, "attributes.rotation")  # of a shape that is no box
    return SourceObject(desc, box, rings, unknown_keys=unknown)


def _is_box(rings: Sequence[Sequence[float]] | dict[str, Any] | None, box: Sequence[float]) -> bool:
    """Tell whether an annotation has no shape but its box, which some tools write as a ring too."""
    if not rings:
        return True
    if isinstance(rings, dict) or len(rings) > 1:
        return False
    x, y, w, h = box
    corners = [(x, y), (x + w, y), (x + w, y + h), (x, y + h)]
    points = zip(rings[0][::2], rings[0][1::2], strict=True)
    return all(any(math.dist(point, corner) < 0.5 for corner in corners) for point in points)


class LvisImport(CocoImport):
    """The keys of `format=lvis`.

    LVIS (Gupta et al., 2019) labels every object of some classes, and says of others that they are
    absent. A row's `classes` are these two together, so that `Find every {classes}.` has a complete
    answer; objects of classes that are not labelled throughout are left out.
    """

    annotations: Annotated[ConfigPath, Field(examples=["lvis_v1_train.json"])]
    """JSON file of LVIS annotations."""

    images: Annotated[ConfigPath, Field(examples=["coco"])]
    """Folder of COCO's `train2017` and `val2017`, as the `coco_url` of LVIS's images ends in."""

    def _image(
        self, image: CocoImage, annotations: list[CocoAnnotation | Malformed], names: dict[int, str]
    ) -> SourceImage:
        found = super()._image(image, annotations, names)
        partial = set(image.not_exhaustive_category_ids)
        readable = [one for one in annotations if isinstance(one, CocoAnnotation)]
        complete = {one.category_id for one in readable} | set(image.neg_category_ids)
        # By name, so that the order does not tell which are there.
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
