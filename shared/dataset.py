"""The data file, and the order in which a run goes through it."""

from __future__ import annotations

import codecs
import json
import logging
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, overload

import numpy as np

from shared.errors import BadRows, RecordError
from shared.records import ALL_GEOMETRY, GeometryKind, ImageFacts, ImageSize, Sample, load_record

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Dataset(Sequence[Sample]):
    """The usable rows of one file, in its order."""

    path: Path
    samples: tuple[Sample, ...]
    skipped: tuple[str, ...] = ()
    """Why each bad row was left out: file, line, field and problem."""

    @property
    def num_skipped(self) -> int:
        return len(self.skipped)

    def __len__(self) -> int:
        return len(self.samples)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Sample, ...]: ...

    def __getitem__(self, index: int | slice) -> Sample | tuple[Sample, ...]:
        return self.samples[index]

    @classmethod
    def of(cls, path: Path, samples: Sequence[Sample], skipped: Sequence[str]) -> Dataset:
        """Raises RecordError where no row is usable."""
        if not samples:
            problem = (
                f"has no usable row: {len(skipped)} were bad, the first: {skipped[0]}"
                if skipped
                else "is empty"
            )
            raise RecordError(
                problem, field="file", remedy="write one JSON object per line", file=str(path)
            )
        return cls(path, tuple(samples), tuple(skipped))


def note_skipped(error: RecordError) -> str:
    """Log that a bad row is left out, and return why."""
    _LOGGER.warning("bad row skipped: %s", error)
    return str(error)


def load_dataset(
    path: str | Path,
    *,
    on_bad_row: Literal["error", "skip"],
    sort_objects: bool,
    check_images: bool,
    geometry: frozenset[GeometryKind] = ALL_GEOMETRY,
    image_size: ImageSize | None = None,
    known_images: Mapping[str, ImageFacts] = MappingProxyType({}),
) -> Dataset:
    """Reads a JSONL file of records (DESIGN 7.1); blank lines mean nothing, image paths are
    relative to the file.

    RecordError names file, line, field and remedy: of the first 20 bad rows, with the number of
    all, or, where `on_bad_row` is "skip" (which logs and counts every bad row), of a file that
    cannot be read or has no usable row. `check_images`, `image_size`, `known_images` and `geometry`
    say what a row must be, as `load_record` does. A row without an id is called after its file and
    line.
    """
    if on_bad_row not in ("error", "skip"):
        raise ValueError(f"on_bad_row is {on_bad_row!r}; use 'error' or 'skip'")
    path = Path(path)
    samples: list[Sample] = []
    bad = BadRows()
    skipped: list[str] = []
    line_of: dict[str, int] = {}
    for number, line in _lines(path):
        try:
            default_id = f"{path.stem}:{number}"
            sample = load_record(
                _decode(path, line),
                root=path.parent,
                require_images=check_images,
                sort_objects=sort_objects,
                default_id=default_id,
                geometry=geometry,
                image_size=image_size,
                known_images=known_images,
            )
            if sample.sample_id in line_of:
                raise RecordError(
                    f"{sample.sample_id!r} is also on line {line_of[sample.sample_id]}",
                    field="sample_id",
                    remedy="give every row its own id",
                )
        except RecordError as error:
            located = error.at(str(path), number)
            if on_bad_row == "error":
                bad.add(located)
            else:
                skipped.append(note_skipped(located))
            continue
        line_of[sample.sample_id] = number
        samples.append(sample)
    bad.raise_if_any()
    return Dataset.of(path, samples, skipped)


def image_names(path: Path) -> set[str]:
    """Collect each image path of a JSONL file of records, once. Rows that cannot be read are passed
    over: `load_dataset` says what is wrong with them.
    """
    names: set[str] = set()
    for _, line in _lines(path):
        try:
            images = json.loads(line)["images"]
            if isinstance(images, list):
                names.update(name for name in images if isinstance(name, str) and name.strip())
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return names


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, without their ends, numbered from 1."""
    try:
        with path.open("rb") as file:
            yield from (
                (number, line.rstrip(b"\r\n"))
                for number, line in enumerate(file, 1)
                if line.strip()
            )
    except OSError as error:
        remedy = "correct the path, or make the data first"
        raise RecordError(
            f"cannot be read: {error.strerror}", field="file", remedy=remedy, file=str(path)
        ) from error


def _decode(path: Path, line: bytes) -> Any:
    if line.startswith(codecs.BOM_UTF8):
        remedy = (
            "save the file as UTF-8 without it: sed -i '1s/^\\xEF\\xBB\\xBF//'"
            f" {shlex.quote(str(path))}"
        )
        raise RecordError(
            "begins with a byte order mark, which JSON does not have", field="row", remedy=remedy
        )
    try:
        return json.loads(line.decode(), object_pairs_hook=_object, parse_int=_integer)
    except UnicodeDecodeError as error:
        raise RecordError(
            f"is not UTF-8 at byte {error.start + 1}", field="row", remedy="save the file as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        raise RecordError(
            f"is not JSON at column {error.colno}: {error.msg}",
            field="row",
            remedy="write one JSON object per line",
        ) from error
    except RecursionError as error:
        raise RecordError(
            "is nested too deeply to be read",
            field="row",
            remedy="flatten it; a row needs three levels",
        ) from error


def _integer(digits: str) -> int:
    try:
        return int(digits)
    except ValueError as error:
        # Python reads integers of 4,300 digits at most (sys.set_int_max_str_digits).
        raise RecordError(
            f"has an integer of {len(digits)} digits, {digits[:8]}...",
            field="row",
            remedy="write a number of sensible size",
        ) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise RecordError("is given twice in one object", field=twice, remedy="keep one")
    return mapping


class SampleStream(Iterator[int]):
    """Indices 0 .. num_samples - 1 without end, epoch by epoch: each epoch has every index once.

    With `shuffle` the order of an epoch depends on `seed` and the epoch's number alone. ValueError
    for an empty dataset or a negative seed.
    """

    def __init__(self, num_samples: int, seed: int, shuffle: bool) -> None:
        if num_samples < 1:
            raise ValueError(
                "there is no sample to draw from; give a dataset with at least one row"
            )
        if seed < 0:
            raise ValueError(f"seed is {seed}; use 0 or more")
        self._num_samples, self._seed, self._shuffle = num_samples, seed, shuffle
        self._epoch, self._offset = 0, 0
        self._order = self._epoch_order()

    def __next__(self) -> int:
        if self._offset == self._num_samples:
            self._epoch, self._offset = self._epoch + 1, 0
            self._order = self._epoch_order()
        index = int(self._order[self._offset])
        self._offset += 1
        return index

    def take(self, n: int) -> list[int]:
        """The next `n` indices."""
        return [next(self) for _ in range(n)]

    def _epoch_order(self) -> np.ndarray:
        """int64 [num_samples]."""
        if not self._shuffle:
            return np.arange(self._num_samples)
        return np.random.Generator(np.random.PCG64((self._seed, self._epoch))).permutation(
            self._num_samples
        )
