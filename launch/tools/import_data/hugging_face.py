"""Reads a data set of the library `datasets` with a column of images and one of objects."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from launch.tools.import_data.objects import (
    HARMLESS_KEYS,
    ObjectSkip,
    SourceObject,
    finite,
)
from launch.tools.import_data.source import ImageSkip, ImportOptions, Source, SourceImage
from shared.errors import ConfigError
from shared.prompts import open_picture

if TYPE_CHECKING:
    from datasets import Dataset


class HuggingFaceImport(ImportOptions):
    """Options of `rollmatch import-data format=hf`: data sets of the library `datasets`."""

    source: Annotated[str, Field(min_length=1, examples=["cppe-5"])]
    """Folder of `save_to_disk`, or a folder or hub id for `datasets.load_dataset`."""

    split: str = "train"
    """Split of the data set; ignored if the folder has no splits."""

    image: str = "image"
    """Column of images."""

    objects: str = "objects"
    """Column of objects: lists by key, or a list of mappings."""

    bbox: str = "bbox"
    """Key of the boxes in the column of objects."""

    category: str = "category"
    """Key of the categories in the same column: texts, class labels, or numbers of `names`."""

    names: str | None = None
    """Names of the categories 0, 1, ..., separated by commas, if the data set lacks them."""

    @property
    def name(self) -> str:
        return self.split

    def read(self) -> Source:
        import datasets  # takes two seconds, and only this format needs it

        folder = Path(self.source)
        saved = any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
        try:
            if saved:
                data = datasets.load_from_disk(self.source)
                if isinstance(data, datasets.DatasetDict):
                    if self.split not in data:
                        raise KeyError(f"its splits are {', '.join(data)}")
                    data = data[self.split]
            else:
                data = datasets.load_dataset(self.source, split=self.split)
        except Exception as error:
            # Catch all errors: the library raises those of its readers, the hub and the disk.
            reason = " ".join(str(error).split()) or type(error).__name__
            told = f"source: {self.source} (split {self.split}) cannot be loaded: {reason[:300]}"
            raise ConfigError(f"{told}; correct source=... or split=...") from error
        missing = [key for key in (self.image, self.objects) if key not in data.features]
        if missing:
            columns = ", ".join(data.features)
            told = f"the data set has no column {', '.join(missing)}, only {columns}"
            raise ConfigError(f"image, objects: {told}; give their names (image=..., objects=...)")
        pictures = data.features[self.image]
        is_text = isinstance(pictures, datasets.Value) and "string" in pictures.dtype  # paths
        if not (is_text or isinstance(pictures, datasets.Image)):
            told = f"column {self.image} holds {type(pictures).__name__}, not one image per row"
            raise ConfigError(f"image: {told}; give another column (image=...)")
        per_object = _element(data.features[self.objects])
        keys = list(per_object) if isinstance(per_object, dict) else []
        if missing := [key for key in (self.bbox, self.category) if key not in keys]:
            has = ", ".join(keys) or "none"
            told = f"column {self.objects} has no key {', '.join(missing)}, only {has}"
            raise ConfigError(f"bbox, category: {told}; give their names (bbox=..., category=...)")
        label = _element(per_object[self.category])
        names = label.names if isinstance(label, datasets.ClassLabel) else []
        if self.names is not None:
            names = [name.strip() for name in self.names.split(",")]
        elif isinstance(label, datasets.Value) and "int" in label.dtype:
            told = f"the data set has numbers in {self.category}, but no names for them"
            raise ConfigError(f"names: {told}; give the names in order (names=cat,dog,...)")
        data = data.cast_column(self.image, datasets.Image(decode=False))
        known = {self.bbox, self.category} | HARMLESS_KEYS
        unknown = tuple(key for key in keys if key not in known)
        categories = [{"id": id, "name": name} for id, name in enumerate(names)] or None
        pictures = self.records.with_name(f"{self.records.stem}_images")
        images = self._images(data, names, unknown, pictures)
        return Source(folder, images, categories, written=pictures)

    def _images(
        self, data: Dataset, names: list[str], unknown: tuple[str, ...], pictures: Path
    ) -> Iterator[SourceImage]:
        for number, row in enumerate(data):
            sample_id = f"{self.split}:{number}"
            entries = row[self.objects] or []
            if isinstance(entries, Mapping):
                columns = [entries[key] or [] for key in (self.bbox, self.category)]
                if len(columns[0]) != len(columns[1]):
                    unread = [ObjectSkip.MALFORMED] * len(columns[0])
                    skip = ImageSkip.MALFORMED_LABELS
                    yield SourceImage(sample_id, pictures, unread, skip=skip)
                    continue
                pairs = list(zip(*columns, strict=True))
            else:
                pairs = [(entry[self.bbox], entry[self.category]) for entry in entries]
            read = [self._object(box, category, names) for box, category in pairs]
            objects = [
                replace(one, unknown_keys=unknown) if isinstance(one, SourceObject) else one
                for one in read
            ]
            picture = row[self.image]
            if picture is None:
                yield SourceImage(sample_id, pictures, objects, skip=ImageSkip.NO_IMAGE)
                continue
            path = _write(picture["bytes"], pictures) if picture["bytes"] else Path(picture["path"])
            yield SourceImage(sample_id, path, objects, reading=self.reading)

    def _object(self, box: object, category: object, names: list[str]) -> SourceObject | ObjectSkip:
        numbers = finite(box) if isinstance(box, Sequence) else None
        if numbers is None or len(numbers) != 4:
            return ObjectSkip.MALFORMED
        if isinstance(category, int):
            if self.names is not None and category >= len(names):
                told = f"{len(names)} are given, but the data set has category {category}"
                raise ConfigError(f"names: {told}; name every category, in order from 0")
            if not 0 <= category < len(names):
                return ObjectSkip.UNKNOWN_CATEGORY
            category = names[category]
        if not isinstance(category, str):
            return ObjectSkip.MALFORMED
        return SourceObject(category, self.reading.box(numbers))


def _element(feature: Any) -> Any:
    """Return the feature of a list's elements; for a feature of another kind, the feature itself.

    A feature is a column's type in the library `datasets`.
    """
    from datasets import List

    return feature.feature if isinstance(feature, List) else feature


def _write(content: bytes, folder: Path) -> Path:
    """Write an image into the folder, and return its path.

    The file's name is the digest of its bytes, so that no other image is overwritten.
    """
    try:
        with open_picture(content) as picture:
            suffix = (picture.format or "image").lower()
    except Exception:  # reported later as an unreadable image
        suffix = "image"
    path = folder / f"{hashlib.sha256(content).hexdigest()[:32]}.{suffix}"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path
