"""The data file, and the order in which a run goes through its samples."""

from __future__ import annotations

import codecs
import json
import logging
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
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
    """The reason why each bad row was left out: file, line, field and problem."""

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
        """Make a data set of the usable rows. Raises RecordError where there is none."""
        if not samples:
            problem = "is empty"
            if skipped:
                problem = f"has no usable row: {len(skipped)} were bad, the first: {skipped[0]}"
            remedy = "write one JSON object per line"
            raise RecordError(problem, field="file", remedy=remedy, file=str(path))
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
    require: Callable[[Sample], object] | None = None,
    source: str | None = None,
) -> Dataset:
    """Read a JSONL file of records (decision 31); blank lines mean nothing.

    Image paths are relative to the file. A row without an id is called after its file and line.

    Args:
        source: name of the file among several, whose samples are called `source/id`.
        on_bad_row: "error": a bad row stops the load; "skip": it is logged and counted.
        check_images: `require_images` of `load_record`, which the arguments behind it are of too.
        require: raises RecordError for a sample that the run cannot use.

    Raises:
        RecordError: names file, line, field and remedy of the first 20 bad rows, with the number
            of all. With "skip" only for a file that cannot be read or has no usable row.
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
            row_id = sample.sample_id
            if source is not None:
                sample = replace(sample, sample_id=f"{source}/{row_id}", source=source)
            if require is not None:
                require(sample)
        except RecordError as error:
            located = error.at(str(path), number)
            if on_bad_row == "error":
                bad.add(located)
            else:
                skipped.append(note_skipped(located))
            continue
        line_of[row_id] = number
        samples.append(sample)
    bad.raise_if_any()
    return Dataset.of(path, samples, skipped)


def image_names(path: Path) -> set[str]:
    """Collect the image paths of a JSONL file of records; `load_dataset` reports bad rows."""
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
    """Yield the lines that are not blank, without their ends, numbered from 1."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line.rstrip(b"\r\n")
    except OSError as error:
        remedy = "correct the path, or make the data first"
        raise RecordError(
            f"cannot be read: {error.strerror}", field="file", remedy=remedy, file=str(path)
        ) from error


def _decode(path: Path, line: bytes) -> Any:
    """Parse one line strictly: no byte order mark, no key twice, no absurd number."""
    if line.startswith(codecs.BOM_UTF8):
        command = f"sed -i '1s/^\\xEF\\xBB\\xBF//' {shlex.quote(str(path))}"
        problem = "begins with a byte order mark, which JSON does not have"
        raise _bad_row(problem, f"save the file as UTF-8 without it: {command}")
    try:
        return json.loads(line.decode(), object_pairs_hook=_object, parse_int=_integer)
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 at byte {error.start + 1}"
        remedy = "save the file as UTF-8"
        raise _bad_row(problem, remedy) from error
    except json.JSONDecodeError as error:
        problem = f"is not JSON at column {error.colno}: {error.msg}"
        raise _bad_row(problem, "write one JSON object per line") from error
    except RecursionError as error:
        problem = "is nested too deeply to be read"
        raise _bad_row(problem, "flatten it; a row needs three levels") from error


def _bad_row(problem: str, remedy: str) -> RecordError:
    return RecordError(problem, field="row", remedy=remedy)


def _integer(digits: str) -> int:
    try:
        return int(digits)
    except ValueError as error:
        # Python reads integers of 4,300 digits at most (sys.set_int_max_str_digits).
        problem = f"has an integer of {len(digits)} digits, {digits[:8]}..."
        raise _bad_row(problem, "write a number of sensible size") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise RecordError("is given twice in one object", field=twice, remedy="keep one")
    return mapping


class SampleStream(Iterator[int]):
    """Indices 0 .. num_samples - 1 without end; each epoch has every index once.

    With `shuffle` the order of an epoch depends on `seed`, `number` and the epoch's number alone.

    Example: `SampleStream(3, seed=0, shuffle=False).take(4)` is `[0, 1, 2, 0]`.

    Args:
        number: of the stream, among several of the same seed.

    Raises:
        ValueError: the data set is empty, or the seed negative.
    """

    def __init__(self, num_samples: int, seed: int, shuffle: bool, number: int = 0) -> None:
        if num_samples < 1:
            raise ValueError("there is no sample to draw from; give a dataset with a row")
        if seed < 0:
            raise ValueError(f"seed is {seed}; use 0 or more")
        self._num_samples = num_samples
        self._seed = seed
        self._shuffle = shuffle
        self._number = number
        self._epoch = 0
        self._offset = 0
        self._order = self._epoch_order()

    def __next__(self) -> int:
        if self._offset == self._num_samples:
            self._epoch += 1
            self._offset = 0
            self._order = self._epoch_order()
        index = int(self._order[self._offset])
        self._offset += 1
        return index

    def move_to(self, position: int) -> None:
        """Go on behind the first `position` indices of the stream."""
        self._epoch, self._offset = divmod(position, self._num_samples)
        self._order = self._epoch_order()

    def take(self, n: int) -> list[int]:
        """Return the next `n` indices."""
        return [next(self) for _ in range(n)]

    def _epoch_order(self) -> np.ndarray:
        """Return the indices of the epoch in order: int64 [num_samples]."""
        if not self._shuffle:
            return np.arange(self._num_samples)
        words = (self._seed, self._epoch, self._number)
        generator = np.random.Generator(np.random.PCG64(words if self._number else words[:2]))
        return generator.permutation(self._num_samples)


class MixedStream(Iterator[tuple[int, int]]):
    """Places of samples in several data sets without end: the data set's number, and the index.

    As many in a row as all weights together have exactly `weights[i]` of data set i, whose indices
    are those of its own `SampleStream`. Of the first n, for any n, `n * weights[i] / sum(weights)`
    are of it, rounded up or down. Of one data set the indices are its stream's.

    Example: `MixedStream([9, 2], [2, 1], seed=0, shuffle=False).take(6)` is `[(0, 0), (0, 1),
    (1, 0), (0, 2), (0, 3), (1, 1)]`.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[int], seed: int, shuffle: bool
    ) -> None:
        self._streams = [
            SampleStream(size, seed, shuffle, number) for number, size in enumerate(sizes)
        ]
        divisor = gcd(*weights)
        self._block = _block([weight // divisor for weight in weights])
        self._offset = 0

    def __next__(self) -> tuple[int, int]:
        number = self._block[self._offset]
        self._offset = (self._offset + 1) % len(self._block)
        return number, next(self._streams[number])

    def move_to(self, position: int) -> None:
        """Go on behind the first `position` places of the stream."""
        blocks, self._offset = divmod(position, len(self._block))
        for number, stream in enumerate(self._streams):
            in_block = self._block[: self._offset].count(number)
            stream.move_to(blocks * self._block.count(number) + in_block)

    def take(self, n: int) -> list[tuple[int, int]]:
        """Return the next `n` places."""
        return [next(self) for _ in range(n)]


def _block(weights: Sequence[int]) -> list[int]:
    """Put each number i `weights[i]` times into an order that is even throughout.

    By the quota method (Balinski and Young, 1975): next is the number whose share is least served,
    among those that would not exceed their share rounded up.
    """
    total = sum(weights)
    counts = [0] * len(weights)
    order = []
    for length in range(1, total + 1):
        open_numbers = [
            i for i, weight in enumerate(weights) if counts[i] * total < length * weight
        ]
        chosen = min(open_numbers, key=lambda i: (counts[i] + 1) / weights[i])
        counts[chosen] += 1
        order.append(chosen)
    return order
