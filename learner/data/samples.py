"""Load the run's data files as samples, and check the image files that they name.

Preflight and learner load the files with the same function, so both keep and skip the same rows.
This module does not import torch, because preflight runs before anything heavy is loaded.

If a file and its images have not changed since an earlier run, the file is not read again: the
positions of its rows are cached. The start then reads only the file size and change times of each
image. Each image is decoded once; size and digest of intact images are cached. Broken images are
reported with their row.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path

import PIL

from learner.data import kept
from learner.targets import target_settings
from shared.config import RunConfig
from shared.config.model import DataSource
from shared.data.file_rows import FileRows, RowRules, RowTable
from shared.dataset import Dataset, image_names, load_dataset, note_skipped
from shared.prompts import on_white, open_picture, orientation_of
from shared.records import ImageFacts, PictureSize, image_facts

ReportProgress = Callable[[int, int], None]
"""A function that shows the progress of an image check: called with number checked and total."""


def load_samples(
    config: RunConfig, source: DataSource, report: ReportProgress | None = None
) -> Dataset:
    """Load a data file of `data.train` or `data.val`, and check the images that it names.

    `report` is called with the progress, if the check of images takes long. Raises RecordError as
    `load_dataset` does.
    """
    data = config.data
    path = source.path
    geometry = target_settings(config).geometry
    rules = RowRules(data.sort_objects, data.check_images, geometry, source.name)
    prompts = config.prompts
    of_file = kept.fingerprint(path)
    key = kept.digest_of(
        *(PIL.__version__, str(path), of_file, data.on_bad_row),
        *(rules.sort_objects, rules.check_images, sorted(geometry), rules.source),
        prompts if prompts.have_blanks else None,
        [field.name for field in fields(RowTable)],
    )
    found = _kept_rows(path, key, rules)
    if found is not None:
        return _with_key(found, key)
    started_s = time.monotonic()
    prints = fingerprints(path, image_names(path)) if data.check_images else {}
    dataset = load_dataset(
        path,
        on_bad_row=data.on_bad_row,
        sort_objects=data.sort_objects,
        check_images=data.check_images,
        geometry=geometry,
        image_size=image_size,
        known_images=known_images(path, prints, report),
        require=prompts.texts,
        source=source.name,
    )
    if kept.fingerprint(path) != of_file:  # changed while it was read
        return dataset
    if time.monotonic() - started_s >= kept.QUICK_S:
        arrays = {field.name: getattr(dataset.table, field.name) for field in fields(RowTable)}
        rest = [prints, dataset.skipped, dataset.turned, dataset.odd]
        kept.keep(kept.kept_file(path, "rows"), key, arrays, rest, lost="reads all rows")
    return _with_key(dataset, key)


def _kept_rows(path: Path, key: str, rules: RowRules) -> Dataset | None:
    """Return the cached dataset with this key, if its images have not changed."""
    found = kept.read(kept.kept_file(path, "rows"), key)
    if found is None:
        return None
    prints, *notes = found.rest
    if any(kept.fingerprint(path.parent / name) != then for name, then in prints.items()):
        return None
    skipped, turned, odd = map(tuple, notes)
    for reason in skipped:
        note_skipped(reason)
    return Dataset(path, FileRows(path, RowTable(**found.arrays), rules), skipped, turned, odd)


def _with_key(dataset: Dataset, key: str) -> Dataset:
    """Return the dataset with its cache key: a digest of `key` and the dataset's table of rows.

    `key` depends on the file and the reading rules, the table on the images' contents and the
    skipped rows.
    """
    digest = hashlib.sha256(key.encode())
    for field in fields(RowTable):
        digest.update(getattr(dataset.table, field.name).tobytes())
    return replace(dataset, key=digest.hexdigest())


def image_size(data: bytes) -> PictureSize:
    """Decode an image and return its displayed size. Raises ValueError if it cannot be decoded."""
    # The whole image is decoded, because the header does not show whether the file is truncated.
    try:
        with open_picture(data) as image:
            if image.format == "PNG":  # its EXIF block may follow the pixels
                image.load()
            orientation = orientation_of(image)  # before a TIFF is loaded, which turns it
            return PictureSize(*on_white(image).size, orientation)
    except Exception as error:
        # Every exception: on damaged files Pillow's decoders raise many kinds (OSError,
        # SyntaxError, struct.error, EOFError, ...).
        raise ValueError(str(error) or type(error).__name__) from error


def header_size(path: Path) -> PictureSize:
    """Read the size of an image from its file's header. Raises ValueError if it cannot be read."""
    try:
        with open_picture(path) as image:
            size = PictureSize(*image.size, orientation_of(image))
            # Pillow returns the displayed size of a TIFF, and the stored size of other formats.
            if image.format != "TIFF":
                size = PictureSize(*size.stored, size.orientation)
            return size
    except Exception as error:  # as in `image_size`
        raise ValueError(str(error) or type(error).__name__) from error


def fingerprints(data_file: Path, names: set[str]) -> dict[str, kept.Fingerprint | None]:
    """Return the file size and change times of images, by their path in the rows of `data_file`.

    The value is None for a missing file.
    """
    return {name: kept.fingerprint(data_file.parent / name) for name in sorted(names)}


def known_images(
    data_file: Path,
    prints: Mapping[str, kept.Fingerprint | None],
    report: ReportProgress | None = None,
) -> dict[str, ImageFacts]:
    """Return size and digest of the images that can be decoded, by their path in the rows.

    Only new or changed images are decoded. After `kept.QUICK_S` seconds, `report` is called for
    every decoded image.
    """
    root = data_file.parent
    there = {name: found for name, found in prints.items() if found is not None}
    file = kept.kept_file(data_file, "images")
    key = kept.digest_of(PIL.__version__)
    before = kept.read(file, key)
    known = {
        name: ImageFacts(*facts)
        for name, (found, *facts) in ({} if before is None else before.rest).items()
        if there.get(name) == found
    }
    left = [name for name in there if name not in known]
    started_s = time.monotonic()
    for done, name in enumerate(left, len(known) + 1):
        if (facts := image_facts(root / name, image_size)) is not None:
            known[name] = facts
        if report is not None and time.monotonic() - started_s >= kept.QUICK_S:
            report(done, len(there))
    if left and time.monotonic() - started_s >= kept.QUICK_S:
        rows = {name: (there[name], one.sha256, *one.size) for name, one in known.items()}
        kept.keep(file, key, {}, rows, lost="decodes all images")
    return known
