"""One dataset row: images, their size, and the ground-truth objects on them (DESIGN 7.1)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from shared.errors import RecordError


class GeometryKind(StrEnum):
    """The value is the JSON key of the geometry."""

    BBOX = "bbox_2d"
    POLY = "poly"


@dataclass(frozen=True, slots=True)
class GroundTruthObject:
    kind: GeometryKind
    bins: tuple[int, ...]
    """Integers 0..999 (norm1000): (x1, y1, x2, y2), or x, y per polygon vertex."""
    desc: str


@dataclass(frozen=True, slots=True)
class ImageRef:
    """One encoded image file. `sha256` (hex) is of the encoded bytes; empty where the file was not read (`require_images=False`)."""

    path: Path | None
    data: bytes | None
    sha256: str

    def with_data(self) -> ImageRef:
        """The same image with its bytes, read from `path` where they are not held. RecordError when the file is gone or has changed."""
        if self.data is not None:
            return self
        assert self.path is not None, "an ImageRef has a path or data"
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise RecordError(f"cannot read {self.path}: {error.strerror}", field="images", remedy="restore the file") from error
        sha256 = hashlib.sha256(data).hexdigest()
        if self.sha256 and sha256 != self.sha256:
            raise RecordError(f"{self.path} changed since it was checked", field="images", remedy="do not edit data under a running job; start again")
        return replace(self, data=data, sha256=sha256)


@dataclass(frozen=True, slots=True)
class Sample:
    sample_id: str
    images: tuple[ImageRef, ...]
    width: int
    height: int
    objects: tuple[GroundTruthObject, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
