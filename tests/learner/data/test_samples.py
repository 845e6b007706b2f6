"""A data file's rows as samples: read once, and after that only when something has changed."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from config_support import configuration
from PIL import Image

from learner.data import kept, samples
from learner.data.samples import load_samples
from shared.errors import RecordError
from shared.records import Sample

ROW = '{"id": "%d", "images": ["%d.png"], "width": 8, "height": 8, "objects": [%s]}\n'
BOX = '{"bbox_2d": [1, 2, 3, 4], "desc": "cat"}'
NUM_ROWS = 6


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A data file and its images; whatever is found about them is kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "QUICK_S", 0.0)
    for number in range(NUM_ROWS):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
    rows = [ROW % (number, number, BOX) for number in range(NUM_ROWS)]
    (tmp_path / "train.jsonl").write_text("".join(rows))
    return tmp_path


@pytest.fixture
def loads(monkeypatch):
    """Data files that are read from now on."""
    read = []

    def load(path, **options):
        read.append(path.name)
        return load_dataset(path, **options)

    load_dataset = samples.load_dataset
    monkeypatch.setattr(samples, "load_dataset", load)
    return read


def load(folder: Path, **changes):
    config = configuration(folder, folder, folder, **changes)
    return load_samples(config, *config.data.sources("train"))


def test_a_file_that_has_not_changed_is_not_read_again_and_gives_the_same_samples(folder, loads):
    first = load(folder)
    again = load(folder)
    assert loads == ["train.jsonl"]
    assert tuple(again) == tuple(first)
    assert [sample.sample_id for sample in again] == [str(number) for number in range(NUM_ROWS)]
    assert all(image.sha256 for sample in again for image in sample.images)
    assert (again.skipped, again.key) == (first.skipped, first.key)


def rewrite(folder):
    path = folder / "train.jsonl"
    path.write_text(path.read_text().replace("cat", "dog"))


def repaint(folder):
    Image.new("RGB", (8, 8), "white").save(folder / "2.png")


def remove(folder):
    (folder / "2.png").unlink()
    rows = [ROW % (number, number, BOX) for number in range(NUM_ROWS) if number != 2]
    of_before = (folder / "train.jsonl").stat()
    (folder / "train.jsonl").write_text("".join(rows))
    os.utime(folder / "train.jsonl", ns=(of_before.st_atime_ns, of_before.st_mtime_ns))


@pytest.mark.parametrize("change", [rewrite, repaint, remove])
def test_a_file_is_read_again_when_it_or_an_image_of_it_has_changed(folder, loads, change):
    before = tuple(load(folder))
    change(folder)
    assert tuple(load(folder)) != before
    assert tuple(load(folder)) != before
    assert len(loads) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"data__sort_objects": False},
        {"data__check_images": False},
        {"data__on_bad_row": "skip"},
        {"custom__trainer_variant": "stage1_sft"},  # which learns polygons too
    ],
)
def test_a_file_is_read_again_under_other_rules(folder, loads, changes):
    load(folder)
    load(folder, **changes)
    load(folder, **changes)
    assert len(loads) == 2


def test_another_version_of_the_reader_reads_again(folder, loads, monkeypatch):
    load(folder)
    monkeypatch.setattr(kept, "READER_VERSION", kept.READER_VERSION + 1)
    load(folder)
    assert len(loads) == 2


def test_a_seed_matters_only_where_it_decides_what_rows_are_asked_for(folder, loads):
    load(folder)
    load(folder, training__seed=5)
    assert len(loads) == 1
    templates = ["Find {phrase}.", "Find all."]
    rows = (folder / "train.jsonl").read_text().replace('"id"', '"phrase": "a cat", "id"')
    (folder / "train.jsonl").write_text(rows)
    for seed in (5, 6, 6):
        load(folder, training__seed=seed, data__prompts=templates)
    assert len(loads) == 3


def test_what_was_skipped_is_told_again_until_it_is_mended(folder, loads, caplog):
    (folder / "3.png").write_bytes(b"no image")
    first = load(folder, data__on_bad_row="skip")
    caplog.clear()
    again = load(folder, data__on_bad_row="skip")
    assert len(loads) == 1
    assert again.skipped == first.skipped
    assert f"bad row skipped: {folder / 'train.jsonl'}:4: images[0]" in caplog.text
    Image.new("RGB", (8, 8)).save(folder / "3.png")
    assert load(folder, data__on_bad_row="skip").num_skipped == 0
    (folder / "4.png").unlink()
    (skipped,) = load(folder, data__on_bad_row="skip").skipped
    assert "4.png" in skipped
    Image.new("RGB", (8, 8)).save(folder / "4.png")
    assert load(folder, data__on_bad_row="skip").num_skipped == 0


@pytest.mark.parametrize("damage", [lambda content: b"", lambda content: content[:200]])
def test_what_was_kept_and_cannot_be_read_is_found_again(folder, loads, damage):
    before = tuple(load(folder))
    (file,) = folder.glob("cache/rollmatch/rows/*")
    file.write_bytes(damage(file.read_bytes()))
    assert tuple(load(folder)) == before
    assert len(loads) == 2


def test_rows_are_those_of_the_start_though_the_file_is_replaced_and_an_edit_is_told(folder):
    path = folder / "train.jsonl"
    dataset = load(folder)
    before = tuple(dataset)
    other = folder / "other.jsonl"
    other.write_text(path.read_text().replace("cat", "dog"))
    path.rename(folder / "old.jsonl")
    other.rename(path)
    assert tuple(dataset) == before
    assert dataset.keep(np.array([4]), ())[0] == before[4]
    edited = (folder / "old.jsonl").read_text().replace('"id": "3"', '"id": "9"')
    (folder / "old.jsonl").write_text(edited)
    assert dataset[2] == before[2]
    message = r"train.jsonl:4: row: has changed since it was checked; do not edit data during a run"
    with pytest.raises(RecordError, match=message):
        dataset[3]


def test_a_process_holds_the_same_bytes_of_a_row_whatever_the_row_holds(folder):
    def held(dataset):
        table = dataset.table
        return sum(getattr(table, name).nbytes for name in type(table).__slots__)

    small = held(load(folder))
    rows = [ROW % (number, number, ", ".join([BOX] * 100)) for number in range(NUM_ROWS)]
    (folder / "train.jsonl").write_text("".join(rows))
    large = load(folder)
    assert len(large[0].objects) == 100
    assert held(large) == small < 100 * NUM_ROWS


def test_kept_rows_are_those_that_fit(folder):
    dataset = load(folder)
    part = dataset.keep(np.array([1, 4]), ("a row",))
    assert [sample.sample_id for sample in part] == ["1", "4"]
    assert [image.sha256 for sample in part for image in sample.images] == [
        dataset[row].images[0].sha256 for row in (1, 4)
    ]
    assert (part.skipped, part.path) == (("a row",), dataset.path)
    assert isinstance(replace(part)[0], Sample)
    with pytest.raises(RecordError, match=r"no usable row: 1 .*: a row"):
        dataset.keep(np.array([], dtype=int), ("a row",))


def test_what_is_kept_is_as_open_as_its_folder(folder):
    load(folder)
    (file,) = folder.glob("cache/rollmatch/rows/*")
    assert file.stat().st_mode & 0o777 == file.parent.stat().st_mode & 0o666
