"""The rows of a JSONL data file as samples, which are read from the file each time they are used.

A process keeps about 100 bytes per row, whatever the row contains. So a run on a hundred thousand
images needs hardly more memory than a run on a hundred.

Shape legend: N rows, M images of all rows.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import weakref
from abc import abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import numpy as np

from shared.data.limits import FileLine, file_lines, require_file
from shared.errors import RecordError
from shared.records import (
    DEFAULT_GEOMETRY,
    GeometryKind,
    ImageFacts,
    ImageSize,
    Sample,
    load_record,
)

_LEAST_SIDE = 64
"""Boxes of one pixel are counted only in images whose sides have at least this many pixels."""


@dataclass(frozen=True, slots=True)
class RowRules:
    """How a row of a data file becomes a sample: arguments of `load_dataset`."""

    sort_objects: bool
    """Sort objects in reading order; false: a row with another order is an error."""
    check_images: bool
    geometry: frozenset[GeometryKind] = DEFAULT_GEOMETRY
    source: str | None = None

    def sample(
        self,
        path: Path,
        number: int,
        mapping: Any,
        *,
        image_size: ImageSize | None = None,
        known_images: Mapping[str, ImageFacts],
    ) -> Sample:
        """Return the sample of a decoded row, which is on line `number` of the file at `path`.

        Raises RecordError, which does not name file and line.
        """
        sample = load_record(
            mapping,
            root=path.parent,
            require_images=self.check_images,
            sort_objects=self.sort_objects,
            default_id=f"{path.stem}:{number}",
            geometry=self.geometry,
            image_size=image_size,
            known_images=known_images,
        )
        if self.source is None:
            return sample
        return replace(sample, sample_id=f"{self.source}/{sample.sample_id}", source=self.source)


@dataclass(frozen=True, slots=True, eq=False)
class RowTable:
    """A table of a data file's N usable rows: their places in the file, and their images' digests.

    It takes about 100 bytes per row, whatever the row contains.
    """

    places_N3: np.ndarray
    """int64: the offset and length of the row's line in bytes, and its line number from 1."""
    checks_N: np.ndarray
    """uint64: checksum of the line's bytes."""
    sizes_N2: np.ndarray
    """int32: width and height of the row's image."""
    images_N1: np.ndarray
    """int64 [N + 1]: number of images in all earlier rows.

    Row i has the images `images_N1[i]` to `images_N1[i + 1]`.
    """
    sha256_M: np.ndarray
    """uint8 [images_N1[-1], 32]: digests of the image files; empty if they were not checked."""

    def keep(self, rows: np.ndarray) -> RowTable:
        """Return the table of only the rows at these ascending indices."""
        counts = np.diff(self.images_N1)
        images_N1 = np.concatenate([[0], np.cumsum(counts[rows])])
        sha256_M = self.sha256_M
        if len(sha256_M):
            sha256_M = sha256_M[np.repeat(np.isin(np.arange(len(counts)), rows), counts)]
        columns = (self.places_N3[rows], self.checks_N[rows], self.sizes_N2[rows])
        return RowTable(*columns, images_N1, sha256_M)


class _OpenFile:
    """A file that stays open as long as any object reads its rows."""

    def __init__(self, path: Path) -> None:
        with readable(path):
            require_file(path)
            self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)


class IndexedSamples(Sequence[Sample]):
    """Base class of sequences whose samples are made when an index or a slice is read."""

    @abstractmethod
    def _sample(self, row: int) -> Sample:
        """Return the sample of a row, 0 <= row < length."""

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Sample, ...]: ...

    def __getitem__(self, index: int | slice) -> Sample | tuple[Sample, ...]:
        if isinstance(index, slice):
            return tuple(self._sample(row) for row in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self._sample(index % len(self))


class FileRows(IndexedSamples):
    """The samples of a JSONL data file, each read from the file when it is used.

    The file stays open: replacing it does not affect a run, and changing it is detected.
    """

    def __init__(
        self, path: Path, table: RowTable, rules: RowRules, file: _OpenFile | None = None
    ) -> None:
        """Create the sequence. `file` is the open file; None: open it. Raises RecordError."""
        self.table = table
        self._path = path
        self._rules = rules
        self._file = file or _OpenFile(path)

    def keep(self, rows: np.ndarray) -> FileRows:
        """Return the sequence of only the rows at these ascending indices."""
        return FileRows(self._path, self.table.keep(rows), self._rules, self._file)

    def __len__(self) -> int:
        return len(self.table.checks_N)

    def _sample(self, row: int) -> Sample:
        table = self.table
        offset, size, number = table.places_N3[row].tolist()
        with readable(self._path):
            line = os.pread(self._file.descriptor, size, offset)
        if checksum(line) != table.checks_N[row]:
            problem = "has changed since it was checked"
            remedy = "do not edit data during a run; start the run again"
            raise RecordError(
                problem, field="row", remedy=remedy, file=str(self._path), line=number
            )
        mapping = decode_row(self._path, line)
        known: dict[str, ImageFacts] = {}
        if self._rules.check_images:
            width, height = table.sizes_N2[row].tolist()
            digests = table.sha256_M[table.images_N1[row] : table.images_N1[row + 1]]
            known = {
                name: ImageFacts(digest.tobytes().hex(), width, height)
                for name, digest in zip(mapping["images"], digests, strict=True)
            }
        return self._rules.sample(self._path, number, mapping, known_images=known)


def checksum(line: bytes) -> np.uint64:
    """Return a 64-bit digest of a line, so that a later change of the file is noticed."""
    return np.uint64(int.from_bytes(hashlib.blake2b(line, digest_size=8).digest()))


class TableBuilder:
    """Builds a `RowTable` row by row while a data file is read. It keeps no samples."""

    def __init__(self) -> None:
        self._places = array("q")
        self._checks = array("Q")
        self._sizes = array("i")
        self._images = array("q", [0])
        self._sha256 = bytearray()

    def add(self, offset: int, line: bytes, number: int, sample: Sample) -> None:
        self._places.extend((offset, len(line), number))
        self._checks.append(int(checksum(line)))
        self._sizes.extend((sample.width, sample.height))
        self._images.append(self._images[-1] + len(sample.images))
        for image in sample.images:
            self._sha256 += bytes.fromhex(image.sha256)  # "" if it was not checked

    def table(self) -> RowTable:
        return RowTable(
            np.array(self._places, dtype=np.int64).reshape(-1, 3),
            np.array(self._checks, dtype=np.uint64),
            np.array(self._sizes, dtype=np.int32).reshape(-1, 2),
            np.array(self._images, dtype=np.int64),
            np.frombuffer(bytes(self._sha256), dtype=np.uint8).reshape(-1, 32),
        )


class Oddities:
    """Counts the rows of a data file with unusual but allowed contents, to report them to the user.

    It keeps one number per row.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}
        self._rows: dict[int, int] = {}

    def add(self, number: int, sample: Sample) -> None:
        """Add the sample on line `number` of the file."""
        boxes = [one.bins for one in sample.objects if one.kind is GeometryKind.BBOX]
        # A box of one pixel is one step of bins, rounded outwards.
        steps = (1000 / sample.width + 2, 1000 / sample.height + 2)
        num_tiny = sum(c - a < steps[0] and d - b < steps[1] for a, b, c, d in boxes)
        if min(sample.width, sample.height) >= _LEAST_SIDE:
            self._count("boxes of one pixel", num_tiny, f"line {number}")
        num_repeated = len(sample.objects) - len(set(sample.objects))
        self._count("repeated objects of a row", num_repeated, f"line {number}")
        asked = (sample.prompt, sample.system, sample.phrase, sample.classes)
        key = hash((tuple(str(image.path) for image in sample.images), asked))
        first = self._rows.setdefault(key, number)
        where = f"line {number}, as line {first}"
        self._count(
            "rows with the images and question of an earlier row", int(first != number), where
        )

    def told(self) -> tuple[str, ...]:
        return tuple(
            f"{number} {what} (first: {self._first[what]})" for what, number in self._counts.items()
        )

    def _count(self, what: str, number: int, where: str) -> None:
        if number:
            self._counts[what] += number
            self._first.setdefault(what, where)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = "correct the path, or create the data first"
        raise RecordError(
            f"cannot be read: {error.strerror}", field="file", remedy=remedy, file=str(path)
        ) from error


def lines_of(path: Path) -> Iterator[FileLine]:
    """Yield the lines of a data file that are not blank. Raises RecordError."""
    with readable(path):
        yield from file_lines(path)


def require_utf8(content: bytes, path: Path) -> None:
    """Raise RecordError if the beginning of a data file looks like UTF-16.

    UTF-16 is recognised with or without a byte order mark.
    """
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in content[:2]:
        remedy = "save the file as UTF-8"
        raise RecordError("is UTF-16, not UTF-8", field="file", remedy=remedy, file=str(path))


def decode_row(path: Path, line: bytes) -> Any:
    """Parse one line of a data file as JSON.

    Duplicate keys and integers of thousands of digits are errors.
    """
    require_utf8(line, path)
    try:
        return json.loads(line.decode("utf-8-sig"), object_pairs_hook=_object, parse_int=_integer)
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 at byte {error.start + 1}"
        remedy = "save the file as UTF-8"
        raise _bad_row(problem, remedy) from error
    except json.JSONDecodeError as error:
        problem = f"is not JSON at column {error.colno}: {error.msg}"
        raise _bad_row(problem, "write one JSON object per line") from error
    except RecursionError as error:
        problem = "is nested too deeply to read"
        raise _bad_row(problem, "flatten it; a row needs three levels") from error


def _bad_row(problem: str, remedy: str) -> RecordError:
    return RecordError(problem, field="row", remedy=remedy)


def _integer(digits: str) -> int:
    try:
        return int(digits)
    except ValueError as error:
        # Python reads integers of up to 4,300 digits (sys.set_int_max_str_digits).
        problem = f"has an integer of {len(digits)} digits, {digits[:8]}..."
        raise _bad_row(problem, "write a smaller number") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise RecordError("is given twice in one object", field=twice, remedy="keep one")
    return mapping
