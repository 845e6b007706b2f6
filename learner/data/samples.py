"""The run's data files as samples.

One way to load them, so that the check before the start and the learner keep and skip the same
rows. Imports no torch: the check runs before anything heavy is loaded.

A file that was loaded before, and whose images have not changed either, is not read again: where
its rows are is kept. Then a start asks for the size and times of each image, and nothing else
grows with their number.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

import PIL

from learner.data import kept
from learner.data.image_files import ReportProgress, fingerprints, image_size, known_images
from learner.targets import target_settings
from shared.config import RunConfig
from shared.config.model import DataSource
from shared.data.file_rows import FileRows, RowRules, RowTable
from shared.dataset import Dataset, image_names, load_dataset, note_skipped


def load_samples(
    config: RunConfig, source: DataSource, report: ReportProgress | None = None
) -> Dataset:
    """Load a file of `data.train` or `data.val`. Raises RecordError as `load_dataset` does.

    `report` is called with the images that are being checked, where that takes long.
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
    if kept.fingerprint(path) != of_file:  # nobody knows which of the two was read
        return dataset
    if time.monotonic() - started_s >= kept.QUICK_S:
        _keep_rows(dataset, key, prints)
    return _with_key(dataset, key)


def _kept_rows(path: Path, key: str, rules: RowRules) -> Dataset | None:
    """Return the data set that was kept under this key, if its images are those of then."""
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
    """Return the data set with its key: `key` is of the file and the rules by which it is read.

    What is in the images, and which rows were skipped for theirs, the table tells.
    """
    digest = hashlib.sha256(key.encode())
    for field in fields(RowTable):
        digest.update(getattr(dataset.table, field.name).tobytes())
    return replace(dataset, key=digest.hexdigest())


def _keep_rows(dataset: Dataset, key: str, prints: Mapping[str, kept.Fingerprint | None]) -> None:
    arrays = {field.name: getattr(dataset.table, field.name) for field in fields(RowTable)}
    rest = [prints, dataset.skipped, dataset.turned, dataset.odd]
    kept.keep(kept.kept_file(dataset.path, "rows"), key, arrays, rest, lost="reads all rows")
