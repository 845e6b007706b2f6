"""A row of a dataset: images, their size, and the ground-truth objects in them (decision 31).

`load_record` checks a row and returns it as a `Sample`.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError

from shared.data.annotations import Annotation, IgnoredRegion, load_annotated, load_ignored
from shared.data.limits import (
    MAX_COORDINATES,
    MAX_IMAGE_BYTES,
    MAX_IMAGES,
    MAX_TEXT,
    above,
    read_file,
)
from shared.errors import ConfigError, RecordError, UnlearnedGeometryError
from shared.model_families import CONTROL_TOKENS
from shared.tokens.vocabulary import NUM_BINS, parse_coord_token

T = TypeVar("T")


def read_record(file: Path, kind: type[T], *, key: str, remedy: str) -> T | None:
    """Read a JSON file into the dataclass `kind`, or into a list of dataclasses.

    None if the file does not exist.

    Args:
        key: the key of the configuration that led to the file.
        remedy: what to do about a damaged file.

    Raises ConfigError, which names the file and the first wrong field.
    """
    try:
        return TypeAdapter(kind).validate_json(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        wrong = ": ".join((*map(str, first["loc"]), first["msg"]))
        raise ConfigError(f"{key}: {file} cannot be read ({wrong}); {remedy}") from error
    except OSError as error:
        raise ConfigError(f"{key}: {file} cannot be read ({error}); {remedy}") from error


class GeometryKind(StrEnum):
    """The kind of an object's geometry; the value is its key in JSON."""

    BBOX = "bbox_2d"
    POLY = "poly"
    POINT = "point_2d"


ALL_GEOMETRY = frozenset(GeometryKind)
DEFAULT_GEOMETRY = frozenset({GeometryKind.BBOX, GeometryKind.POLY})
"""The kinds of geometry that a run learns by default.

Points are taught and parsed only if `rollout_matching.geometry` names them.
"""
POINT_TOLERANCE = 50.0
"""Distance of two points, in bins, that counts as an overlap of 0.5 by default."""


class PictureSize(NamedTuple):
    """The size of an image as displayed, in pixels, and the orientation of its file.

    Example: a file of 640 x 480 pixels with EXIF orientation 6 is `PictureSize(480, 640, 6)`.
    """

    width: int
    height: int
    orientation: int = 1
    """EXIF orientation of the file, 1 to 8; 1: upright."""

    @property
    def displayed(self) -> tuple[int, int]:
        """Width and height as a viewer shows the image, after rotation."""
        return self.width, self.height

    @property
    def stored(self) -> tuple[int, int]:
        """Width and height of the pixels in the file, before rotation."""
        return self.displayed[::-1] if self.orientation >= 5 else self.displayed


ImageSize = Callable[[bytes], PictureSize]
"""A function that decodes an encoded image and returns its size.

It raises ValueError with the reason if the bytes are not an image.
"""


@dataclass(frozen=True, slots=True)
class GroundTruthObject:
    """One labelled object of an image: its geometry and its class name.

    Example: `GroundTruthObject(GeometryKind.BBOX, (10, 20, 300, 400), "a cat")`.
    """

    kind: GeometryKind
    bins: tuple[int, ...]
    """Coordinates as integers 0..999 along each axis (norm1000).

    (x1, y1, x2, y2) of a box, x and y of each vertex of a polygon, or (x, y) of a point.
    """
    desc: str


@dataclass(frozen=True, slots=True)
class ImageRef:
    """A reference to an encoded image file: its path or its bytes, and its digest.

    Example: `ImageRef(Path("a.png"), None, "9f86d0...")` names a file; `with_data()` reads it.
    """

    path: Path | None
    data: bytes | None
    sha256: str
    """Hex digest of the encoded bytes; empty if the file was not read."""

    def with_data(self) -> ImageRef:
        """Return the reference with the file's bytes in `data`.

        Raises RecordError if the file is missing or has changed since its digest was computed.
        """
        if self.data is not None:
            return self
        assert self.path is not None, "an ImageRef has a path or data"
        try:
            data = read_image(self.path)
        except OSError as error:
            problem = f"cannot read {self.path}: {error.strerror}"
            raise RecordError(problem, field="images", remedy="restore the file") from error
        sha256 = hashlib.sha256(data).hexdigest()
        if self.sha256 and sha256 != self.sha256:
            remedy = "do not edit data while a job is running; start again"
            _refuse("images", f"{self.path} changed since it was checked", remedy)
        return replace(self, data=data, sha256=sha256)


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """Digest and size of an image file, as found when the file was checked.

    The digest is the sha256 of the encoded bytes, in hex. The size is of the displayed image.
    """

    sha256: str
    width: int
    height: int
    orientation: int = 1
    """EXIF orientation; 1: upright."""

    @property
    def size(self) -> PictureSize:
        return PictureSize(self.width, self.height, self.orientation)


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of a dataset: images and the ground-truth objects in them.

    Example: `Sample("coco-7", (ImageRef(...),), 640, 480, (GroundTruthObject(...),))`.
    """

    sample_id: str
    images: tuple[ImageRef, ...]
    width: int
    height: int
    objects: tuple[GroundTruthObject, ...]
    metadata: Mapping[str, object] = field(default_factory=dict)
    prompt: str | None = None
    """The user message of this row; None: a template of the run (`shared.prompts.Prompts`)."""
    system: str | None = None
    """The system message of this row; None: the system message of the run."""
    phrase: str | None = None
    """Text that replaces `{phrase}` in the run's prompt template."""
    classes: tuple[str, ...] = ()
    """Names that replace `{classes}` in the run's prompt template, joined by commas."""
    annotated: tuple[Annotation, ...] = ()
    """The annotation of each object, used to evaluate answers; empty: `objects` are used."""
    ignore: tuple[IgnoredRegion, ...] = ()
    """Regions to ignore: a prediction inside one counts as neither right nor wrong."""
    source: str | None = None
    """Name of the row's file if `data.train` lists several files; `sample_id` begins with it."""

    def with_image_data(self) -> Sample:
        """Return the sample with the bytes of its images. Raises like `ImageRef.with_data`."""
        return replace(self, images=tuple(image.with_data() for image in self.images))


def load_record(
    mapping: Mapping[str, Any],
    *,
    root: str | Path,
    require_images: bool = True,
    sort_objects: bool = True,
    default_id: str | None = None,
    geometry: frozenset[GeometryKind] = DEFAULT_GEOMETRY,
    image_size: ImageSize | None = None,
    known_images: Mapping[str, ImageFacts] = MappingProxyType({}),
) -> Sample:
    """Check one row of a dataset and return it as a sample (decision 31).

    Args:
        root: folder that image paths are relative to.
        require_images: read every image file, require that it is an image, and keep its digest.
        sort_objects: sort objects in reading order (least y, then least x); false: raise an error
            if they are not sorted.
        default_id: id of a row without `sample_id` and `id`; None: a digest of the row.
        geometry: allowed kinds of geometry.
        image_size: decodes each image, which must have the row's width and height; None: images
            are not decoded.
        known_images: images that were checked before, by path as in the row; they are not read.

    `prompt`, `system`, `phrase` and `classes` set the prompt of the row. `annotated` and `ignore`
    are what an importer kept of the annotations (`shared.data.annotations`). All other keys become
    `metadata`.

    Raises RecordError, which names the field, such as `objects[1].bbox_2d`, and the remedy.
    """
    if not isinstance(mapping, Mapping):
        remedy = "write one object per row, with images, width, height and objects"
        _refuse("row", f"is {_kind(mapping)}", remedy)
    for key in ("images", "width", "height", "objects"):
        if key not in mapping:
            _refuse(key, "is missing", "every row needs images, width, height and objects")
    paths = _list("images", mapping["images"], "a list with at least one path", least=1)
    if len(paths) > MAX_IMAGES:
        problem = f"has {len(paths)} paths, {above('MAX_IMAGES', MAX_IMAGES)}"
        _refuse("images", problem, "split the row")
    width = _size("width", mapping["width"])
    height = _size("height", mapping["height"])
    values = _list("objects", mapping["objects"], "a list of objects; [] for none")
    objects = tuple(
        _load_object(f"objects[{i}]", value, geometry) for i, value in enumerate(values)
    )
    num_coordinates = sum(len(one.bins) for one in objects)
    if num_coordinates > MAX_COORDINATES:
        problem = f"have {num_coordinates} coordinates, {above('MAX_COORDINATES', MAX_COORDINATES)}"
        _refuse("objects", problem, "split the row, or simplify its polygons")
    annotated: Sequence[Annotation] = ()
    if "annotated" in mapping:
        annotated = load_annotated(mapping["annotated"], len(objects))
    if sort_objects:
        order = sorted(range(len(objects)), key=lambda i: _reading_key(objects[i]))
        objects = tuple(objects[i] for i in order)
        annotated = [annotated[i] for i in order] if annotated else ()
    else:
        _require_reading_order(objects)
    sample_id = _sample_id(mapping, default_id)
    prompt, system, phrase = (_text(mapping, key) for key in ("prompt", "system", "phrase"))
    classes = mapping.get("classes")
    names = [] if classes is None else _list("classes", classes, "a list of names")
    for i, name in enumerate(names):
        if not isinstance(name, str) or not name.strip():
            _refuse(f"classes[{i}]", f"is {_kind(name)}", "write a name")
        _require_words(f"classes[{i}]", name)
    # Last, because only this part takes time.
    check = _ImageCheck(Path(root), require_images, image_size, known_images, width, height)
    return Sample(
        sample_id=sample_id,
        images=tuple(check.load(f"images[{i}]", path) for i, path in enumerate(paths)),
        width=width,
        height=height,
        objects=objects,
        metadata={key: value for key, value in mapping.items() if key not in _ROW_KEYS},
        prompt=prompt,
        system=system,
        phrase=phrase,
        classes=tuple(map(str, names)),
        annotated=tuple(annotated),
        ignore=load_ignored(mapping["ignore"]) if "ignore" in mapping else (),
    )


@dataclass(frozen=True, slots=True)
class _ImageCheck:
    root: Path
    require: bool
    size: ImageSize | None
    known: Mapping[str, ImageFacts]
    width: int
    height: int

    def load(self, field: str, value: object) -> ImageRef:
        if not isinstance(value, str) or not value.strip():
            remedy = "write the path of an image file, relative to the data file"
            _refuse(field, f"is {_kind(value)}", remedy)
        path = self.root / value
        if not self.require:
            return ImageRef(path=path, data=None, sha256="")
        if (known := self.known.get(value)) is not None:
            self._require_size(field, path, known.size)
            return ImageRef(path=path, data=None, sha256=known.sha256)
        data = _read_image(field, path)
        if self.size is not None:
            try:
                size = self.size(data)
            except ValueError as error:
                problem = f"{path} is not a readable image ({error})"
                remedy = "replace the file or remove the row"
                raise RecordError(problem, field=field, remedy=remedy) from error
            self._require_size(field, path, size)
        return ImageRef(path=path, data=None, sha256=hashlib.sha256(data).hexdigest())

    def _require_size(self, field: str, path: Path, size: PictureSize) -> None:
        says = (self.width, self.height)
        if size.displayed != says:
            turned = (
                "" if size.orientation == 1 else f" after its EXIF orientation {size.orientation}"
            )
            remedy = "correct width and height, or the file; boxes are relative to this size"
            if says == size.stored:
                remedy = (
                    "images are used as displayed: write this size, with boxes relative to the"
                    " rotated image, or remove the orientation from the file"
                )
            problem = f"{path} is {size.width} x {size.height} pixels{turned}"
            _refuse(field, f"{problem}, the row says {self.width} x {self.height}", remedy)


_ROW_KEYS = frozenset(
    {"images", "width", "height", "objects", "id", "sample_id"}
    | {"prompt", "system", "phrase", "classes", "annotated", "ignore"}
)
_GEOMETRY_KEYS = ", ".join(GeometryKind)
_PNG = b"\x89PNG\r\n\x1a\n"
_SIGNATURES = (_PNG, b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"BM", b"II*\x00", b"MM\x00*")
_KINDS = {
    type(None): "null",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def _refuse(field: str, problem: str, remedy: str) -> NoReturn:
    raise RecordError(problem, field=field, remedy=remedy)


def _kind(value: object) -> str:
    if isinstance(value, str) and not value.strip():
        return "empty"
    return _KINDS[type(value)] if type(value) in _KINDS else type(value).__name__


def _list(field: str, value: object, wanted: str, *, least: int = 0) -> Sequence[object]:
    if not isinstance(value, (list, tuple)):
        _refuse(field, f"is {_kind(value)}", f"write {wanted}")
    if len(value) < least:
        _refuse(field, "is empty", f"write {wanted}")
    return value


def _text(mapping: Mapping[str, object], field: str) -> str | None:
    value = mapping.get(field)
    if value is not None and (not isinstance(value, str) or not value.strip()):
        _refuse(field, f"is {_kind(value)}", "write a text, or leave it out")
    _require_words(field, value or "")
    return value


def _require_words(field: str, text: str) -> None:
    """Refuse a text that would end a turn, stand for an image, or be too long for any context."""
    if len(text) > MAX_TEXT:
        problem = f"has {len(text)} characters, {above('MAX_TEXT', MAX_TEXT)}"
        _refuse(field, problem, "shorten it")
    token = next((token for token in CONTROL_TOKENS if token in text), None)
    if token is not None:
        remedy = "remove it, or write it in words"
        _refuse(field, f"contains {token}, a control token of chats", remedy)


def _size(field: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(field, f"is {_kind(value)}", "write the image's size in pixels, an integer")
    if not 1 <= value < 1 << 31:
        _refuse(field, f"is {value}", "write the image's size in pixels, at least 1")
    return value


def _sample_id(mapping: Mapping[str, object], default_id: str | None) -> str:
    keys = [key for key in ("sample_id", "id") if key in mapping]
    if len(keys) == 2 and mapping["sample_id"] != mapping["id"]:
        problem = f"is {mapping['sample_id']!r} but id is {mapping['id']!r}"
        _refuse("sample_id", problem, "keep one of the two")
    if keys:
        value = mapping[keys[0]]
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
            remedy = "write a string or an integer, or leave it out"
            _refuse(keys[0], f"is {_kind(value)}", remedy)
        return str(value)
    if default_id is not None:
        return default_id
    text = json.dumps(mapping, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_image(path: Path) -> bytes:
    """Return the bytes of an image file.

    Raises OSError, also if the path is not a regular file or the file is too large.
    """
    return read_file(path, "MAX_IMAGE_BYTES", MAX_IMAGE_BYTES)


def _normalised_alike(path: Path) -> str | None:
    """Return the name of a file that differs from this one's only in Unicode normalisation."""
    if path.name.isascii():  # ASCII has no other form, and listing the folder may take long
        return None
    wanted = unicodedata.normalize("NFC", path.name)
    names = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
    same = [name for name in names if unicodedata.normalize("NFC", name) == wanted]
    return next((name for name in same if name != path.name), None)


def _read_image(field: str, path: Path) -> bytes:
    try:
        data = read_image(path)
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        reason = error.strerror if isinstance(error, OSError) else str(error)
        if (same := _normalised_alike(path)) is not None:
            reason = f"the folder contains this name in another Unicode normalisation, {same!a}"
        remedy = "correct the path (it is relative to the data file) or restore the file"
        raise RecordError(f"cannot read {path}: {reason}", field=field, remedy=remedy) from error
    if not data.startswith(_SIGNATURES) and not (data[:4] == b"RIFF" and data[8:12] == b"WEBP"):
        what = "is empty" if not data else f"begins with {data[:8]!r}"
        remedy = "use a PNG, JPEG, WebP, BMP, GIF or TIFF file"
        _refuse(field, f"{path} is not an image: it {what}", remedy)
    return data


def image_facts(path: Path, image_size: ImageSize) -> ImageFacts | None:
    """Return the digest and size of an image file; None if `load_record` would report it as bad."""
    try:
        data = _read_image("images", path)
        return ImageFacts(hashlib.sha256(data).hexdigest(), *image_size(data))
    except ValueError:
        return None


def _load_object(field: str, value: object, geometry: frozenset[GeometryKind]) -> GroundTruthObject:
    if not isinstance(value, Mapping):
        remedy = (
            'write {"bbox_2d": [x1, y1, x2, y2], "desc": "..."}, or with "poly": [x, y, ...] or'
            ' "point_2d": [x, y]'
        )
        _refuse(field, f"is {_kind(value)}", remedy)
    for key in value:
        if key != "desc" and key not in ALL_GEOMETRY:
            remedy = f"remove it; an object has only desc and one of {_GEOMETRY_KEYS}"
            _refuse(f"{field}.{key}", "is not a key of an object", remedy)
    kinds = [kind for kind in GeometryKind if kind in value]
    if len(kinds) != 1:
        problem = "has two geometries" if kinds else "has no geometry"
        _refuse(field, problem, f"give it exactly one of {_GEOMETRY_KEYS}")
    kind = kinds[0]
    path = f"{field}.{kinds[0]}"
    if kind not in geometry:
        remedy = (
            f"write it as {GeometryKind.BBOX} (`rollmatch coco import geometry=bbox` does so"
            " for a whole file), remove the object, or choose a custom.trainer_variant that learns"
            " polygons: stage1_sft or stage2_rollout_aligned"
        )
        if kind is GeometryKind.POINT:
            remedy = (
                f"write rollout_matching.geometry: [{GeometryKind.BBOX}, {kind}], with a"
                " data.answer_format that has points (coord_tokens, qwen3_vl, qwen2_5_vl), or"
                " remove the object"
            )
        problem = "is a kind of geometry that this run does not learn"
        raise UnlearnedGeometryError(problem, field=path, remedy=remedy)
    items = _list(path, value[kind], "a flat list of coordinates")
    bins = tuple(_load_bin(path, i, item) for i, item in enumerate(items))
    _check_bins(path, kind, bins)
    if "desc" not in value:
        _refuse(f"{field}.desc", "is missing", "write what the object is")
    return GroundTruthObject(kind, bins, _load_desc(f"{field}.desc", value["desc"]))


def _load_bin(field: str, i: int, value: object) -> int:
    bin = parse_coord_token(value) if isinstance(value, str) else value
    if isinstance(bin, bool) or not isinstance(bin, int) or not 0 <= bin < NUM_BINS:
        remedy = f"write an integer 0..{NUM_BINS - 1} (norm1000) or its coord token, such as"
        _refuse(field, f"value {i} is {value!r}", f'{remedy} "<|coord_5|>"')
    return bin


def _check_bins(field: str, kind: GeometryKind, bins: tuple[int, ...]) -> None:
    if kind is GeometryKind.POLY:
        if len(bins) < 6 or len(bins) % 2:
            _refuse(field, f"has {len(bins)} values", "write x, y for each of at least 3 points")
    elif kind is GeometryKind.POINT:
        if len(bins) != 2:
            _refuse(field, f"has {len(bins)} values", "write x, y")
    elif len(bins) != 4:
        _refuse(field, f"has {len(bins)} values", "write x1, y1, x2, y2")
    elif bins[0] > bins[2] or bins[1] > bins[3]:
        remedy = "write the upper left corner first, then the lower right one"
        _refuse(field, f"is {list(bins)}: x1 > x2 or y1 > y2", remedy)


def _load_desc(field: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        _refuse(field, f"is {_kind(value)}", "write what the object is")
    _require_words(field, value)
    try:
        value.encode()
    except UnicodeEncodeError:
        problem = f"is {value!r}, which is not text: half of a surrogate pair"
        _refuse(field, problem, "write the character itself, or both halves")
    return value


def in_reading_order(objects: Sequence[GroundTruthObject]) -> tuple[GroundTruthObject, ...]:
    """Return the objects in reading order: sorted by least y, then least x."""
    return tuple(sorted(objects, key=_reading_key))


def _require_reading_order(objects: Sequence[GroundTruthObject]) -> None:
    for i in range(1, len(objects)):
        if _reading_key(objects[i]) < _reading_key(objects[i - 1]):
            remedy = "sort objects by least y, then least x, or set data.sort_objects: true"
            _refuse(f"objects[{i}]", "comes after an object that is below or right of it", remedy)


def _reading_key(object_: GroundTruthObject) -> tuple[int, int]:
    return min(object_.bins[1::2]), min(object_.bins[::2])
