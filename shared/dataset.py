"""Datasets: the rows of a data file, and the order in which a run draws them."""

from __future__ import annotations

import itertools
import json
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, overload

import numpy as np

from shared.data.file_rows import (
    FileRows,
    IndexedSamples,
    Oddities,
    RowRules,
    RowTable,
    TableBuilder,
    decode_row,
    lines_of,
)
from shared.errors import BadRows, RecordError, UnlearnedGeometryError
from shared.records import DEFAULT_GEOMETRY, GeometryKind, ImageFacts, ImageSize, Sample

_LOGGER = logging.getLogger(__name__)


class Joined(IndexedSamples):
    """The samples of several datasets as one sequence."""

    def __init__(self, parts: Sequence[Sequence[Sample]]) -> None:
        self._parts = parts
        self._starts = list(itertools.accumulate(map(len, parts), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def _sample(self, row: int) -> Sample:
        part = bisect_right(self._starts, row) - 1
        return self._parts[part][row - self._starts[part]]


@dataclass(frozen=True, slots=True)
class Dataset(Sequence[Sample]):
    """The usable rows of one data file, in the file's order."""

    path: Path
    samples: Sequence[Sample]
    """The rows as samples; `FileRows` if they were read from a file."""
    skipped: tuple[str, ...] = ()
    """For each bad row that was skipped: file, line, field and problem."""
    turned: tuple[str, ...] = ()
    """Paths, as in the rows, of images whose EXIF orientation is not upright.

    Empty if images were not checked.
    """
    odd: tuple[str, ...] = ()
    """Peculiarities of the usable rows: how many rows have each, and the first of these rows."""
    key: str = ""
    """Digest of all that determines the samples, including the images; empty if not known."""

    @property
    def num_skipped(self) -> int:
        return len(self.skipped)

    @property
    def table(self) -> RowTable:
        """The places, image sizes and digests of the rows.

        Only for a dataset that was read from a file.
        """
        assert isinstance(self.samples, FileRows), f"{self.path} was not read from a file"
        return self.samples.table

    def line_of(self, row: int) -> int | None:
        """Return the line number of a row in its file, from 1.

        None if the dataset was not read from a file.
        """
        if not isinstance(self.samples, FileRows):
            return None
        return int(self.samples.table.places_N3[row, 2])

    def __len__(self) -> int:
        return len(self.samples)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Sample, ...]: ...

    def __getitem__(self, index: int | slice) -> Sample | tuple[Sample, ...]:
        found = self.samples[index]
        return found if isinstance(found, Sample) else tuple(found)

    def keep(self, rows: np.ndarray, skipped: Sequence[str]) -> Dataset:
        """Return a dataset with only the rows at these ascending indices.

        `skipped`: the reason for each skipped row of the file, including rows skipped earlier.

        Raises RecordError if `rows` is empty.
        """
        samples = self.samples
        if len(rows) < len(samples):
            if isinstance(samples, FileRows):
                samples = samples.keep(rows)
            else:
                samples = tuple(samples[row] for row in rows.tolist())
        return replace(self, samples=samples, skipped=tuple(skipped)).require_rows()

    def require_rows(self) -> Dataset:
        """Return this dataset. Raises RecordError if it has no usable row."""
        if self.samples:
            return self
        problem = "is empty"
        if self.skipped:
            problem = (
                f"has no usable row: {len(self.skipped)} are bad, the first: {self.skipped[0]}"
            )
        remedy = "write one JSON object per line"
        raise RecordError(problem, field="file", remedy=remedy, file=str(self.path))


def note_skipped(error: RecordError | str) -> str:
    """Log that a bad row is skipped, and return the reason as text."""
    _LOGGER.warning("bad row skipped: %s", error)
    return str(error)


def load_dataset(
    path: str | Path,
    *,
    on_bad_row: Literal["error", "skip"],
    sort_objects: bool,
    check_images: bool,
    geometry: frozenset[GeometryKind] = DEFAULT_GEOMETRY,
    image_size: ImageSize | None = None,
    known_images: Mapping[str, ImageFacts] = MappingProxyType({}),
    require: Callable[[Sample], object] | None = None,
    source: str | None = None,
) -> Dataset:
    """Read and check a JSONL data file, one row per line (decision 31). Blank lines are ignored.

    Image paths are relative to the file. A row without an id is named by its file and line.

    Args:
        source: name of the file, if the run reads several; ids of its samples are `source/id`.
        on_bad_row: "error": raise an error about all bad rows; "skip": log and count them.
        check_images: `require_images` of `load_record`.
        sort_objects, geometry, image_size, known_images: as in `load_record`.
        require: raises RecordError for a sample that the run cannot use.

    Raises RecordError, which names file, line, field and remedy of the first 20 bad rows, and the
    number of all bad rows. With "skip", it is raised only if the file cannot be read or has no
    usable row, or if an object has a geometry that the run does not learn.
    """
    path = Path(path)
    rules = RowRules(sort_objects, check_images, geometry, source)
    table = TableBuilder()
    bad = BadRows()
    skipped: list[str] = []
    turned: dict[str, None] = {}
    line_of: dict[str, int] = {}
    oddities = Oddities()
    for line in lines_of(path):
        number = line.number
        try:
            line.require_short()
            mapping = decode_row(path, line.content)
            sample = rules.sample(
                path, number, mapping, image_size=image_size, known_images=known_images
            )
            if sample.sample_id in line_of:
                row_id = sample.sample_id.removeprefix("" if source is None else f"{source}/")
                raise RecordError(
                    f"{row_id!r} is also on line {line_of[sample.sample_id]}",
                    field="sample_id",
                    remedy="give every row its own id",
                )
            if require is not None:
                require(sample)
        except RecordError as error:
            located = error.at(str(path), number)
            if on_bad_row == "error" or isinstance(error, UnlearnedGeometryError):
                bad.add(located)
            else:
                skipped.append(note_skipped(located))
            continue
        line_of[sample.sample_id] = number
        table.add(line.offset, line.content, number, sample)
        turned |= dict.fromkeys(
            name
            for name in mapping["images"]
            if name in known_images and known_images[name].orientation != 1
        )
        oddities.add(number, sample)
    bad.raise_if_any()
    rows = FileRows(path, table.table(), rules)
    return Dataset(path, rows, tuple(skipped), tuple(turned), oddities.told()).require_rows()


def image_names(path: Path) -> set[str]:
    """Return the image paths in the rows of a JSONL data file.

    Bad rows are ignored here, because `load_dataset` reports them.
    """
    names: set[str] = set()
    for line in lines_of(path):
        try:
            images = json.loads(line.content)["images"] if line.problem is None else ()
            if isinstance(images, list):
                names.update(name for name in images if isinstance(name, str) and name.strip())
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return names


class SampleStream(Iterator[int]):
    """An endless stream of row indices of a dataset; each epoch has every index once.

    With `shuffle` the order of an epoch depends only on `seed`, `number` and the epoch's number.

    Example: `SampleStream(3, seed=0, shuffle=False).take(4)` is `[0, 1, 2, 0]`.

    `number`: index of the stream among several with the same seed.
    """

    def __init__(self, num_samples: int, seed: int, shuffle: bool, number: int = 0) -> None:
        assert num_samples > 0, "a dataset needs a usable row"
        self._num_samples = num_samples
        self._seed = seed
        self._shuffle = shuffle
        self._number = number
        self.epoch = 0
        """Epoch of the last index that was returned, from 0."""
        self._offset = 0
        self._order = self._epoch_order()

    def __next__(self) -> int:
        if self._offset == self._num_samples:
            self.epoch += 1
            self._offset = 0
            self._order = self._epoch_order()
        index = int(self._order[self._offset])
        self._offset += 1
        return index

    def move_to(self, position: int) -> None:
        """Continue as if the first `position` indices of the stream had been returned."""
        self.epoch, self._offset = divmod(position, self._num_samples)
        self._order = self._epoch_order()

    def take(self, n: int) -> list[int]:
        return [next(self) for _ in range(n)]

    def _epoch_order(self) -> np.ndarray:
        """Return the indices of the epoch in order: int64 [num_samples]."""
        if not self._shuffle:
            return np.arange(self._num_samples)
        words = (self._seed, self.epoch, self._number)
        generator = np.random.Generator(np.random.PCG64(words if self._number else words[:2]))
        return generator.permutation(self._num_samples)


class Draw(NamedTuple):
    """One draw from several datasets: a dataset, a row and an epoch.

    Example: the third row of the first file, for the second time: `Draw(0, 2, epoch=1)`.
    """

    source: int
    """Index of the dataset."""
    row: int
    """Index of the row in the dataset."""
    epoch: int
    """How often all rows of the dataset had been drawn before this pass over them, from 0."""


class MixedStream(Iterator[Draw]):
    """An endless stream of draws from several datasets, mixed by weights.

    Every block of `sum(weights)` draws has exactly `weights[i]` draws of dataset i. They are in the
    order of that dataset's `SampleStream`. Of the first n draws, for any n,
    `n * weights[i] / sum(weights)` are of dataset i, rounded up or down.

    Example: `MixedStream([9, 2], [2, 1], seed=0, shuffle=False)` draws rows 0 and 1 of the first
    dataset, 0 of the second, 2 and 3 of the first, 1 of the second, and then begins an epoch of the
    second.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[int], seed: int, shuffle: bool
    ) -> None:
        self._streams = [
            SampleStream(size, seed, shuffle, number) for number, size in enumerate(sizes)
        ]
        divisor = gcd(*weights)
        self._block = list(even_order([weight // divisor for weight in weights]))
        self._offset = 0

    def __next__(self) -> Draw:
        number = self._block[self._offset]
        self._offset = (self._offset + 1) % len(self._block)
        stream = self._streams[number]
        row = next(stream)
        return Draw(number, row, stream.epoch)

    def move_to(self, position: int) -> None:
        """Continue as if the first `position` draws of the stream had been returned."""
        blocks, self._offset = divmod(position, len(self._block))
        for number, stream in enumerate(self._streams):
            in_block = self._block[: self._offset].count(number)
            stream.move_to(blocks * self._block.count(number) + in_block)

    def take(self, n: int) -> list[Draw]:
        return [next(self) for _ in range(n)]


class RowStream:
    """An endless stream of row indices of an environment's training data.

    With a mixture, the data consist of successive parts that are drawn in proportion to weights.

    Example: 5 rows with the mixture `[(3, 2), (2, 1)]` have a part of 3 rows with weight 2, and a
    part of 2 rows with weight 1. Without `shuffle`, the stream is 0, 1, 3, 2, 0, 4, ...
    """

    def __init__(
        self, num_rows: int, mixture: Sequence[Sequence[int]], seed: int, shuffle: bool
    ) -> None:
        """Create the stream. Without a mixture all rows are one part."""
        sizes, weights = zip(*(mixture or [(num_rows, 1)]), strict=True)
        self._starts = list(itertools.accumulate(sizes, initial=0))
        self._stream = MixedStream(sizes, weights, seed, shuffle)

    def take(self, n: int) -> list[int]:
        return [self._starts[one.source] + one.row for one in self._stream.take(n)]

    def move_to(self, position: int) -> None:
        """Continue as if the first `position` rows of the stream had been returned."""
        self._stream.move_to(position)

    def alike(self, row: int, rows: list[int]) -> list[int]:
        """Return those of `rows` that are in the same part of the mixture as `row`.

        All of them if there is no mixture.
        """
        if len(self._starts) == 2:
            return rows
        part = bisect_right(self._starts, row)
        start, stop = self._starts[part - 1 : part + 1]
        return [one for one in rows if start <= one < stop]


def even_order(weights: Sequence[int]) -> Iterator[int]:
    """Yield each index i `weights[i]` times, as evenly distributed as possible.

    Among the first n values, for any n, i occurs `n * weights[i] / sum(weights)` times, rounded up
    or down.

    This is the quota method (Balinski and Young, 1975). The next index is the one with the least
    `(count + 1) / weight` among the indices that would not exceed their share, rounded up.
    """
    total = sum(weights)
    counts = [0] * len(weights)
    for length in range(1, total + 1):
        open_numbers = [
            i for i, weight in enumerate(weights) if counts[i] * total < length * weight
        ]
        chosen = min(open_numbers, key=lambda i: (counts[i] + 1) / weights[i])
        counts[chosen] += 1
        yield chosen
