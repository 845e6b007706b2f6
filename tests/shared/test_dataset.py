from __future__ import annotations

import itertools
import json
import logging
import pickle
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from PIL import Image

from shared.dataset import Dataset, Draw, MixedStream, RowStream, SampleStream, load_dataset
from shared.errors import RecordError, UnlearnedGeometryError
from shared.records import GeometryKind, PictureSize

CAT = {"bbox_2d": [1, 20, 3, 40], "desc": "cat"}
DOG = {"bbox_2d": [1, 2, 3, 4], "desc": "dog"}
POLYGON = {"poly": [1, 2, 3, 4, 5, 6], "desc": "dog"}


def row(**changes: Any) -> str:
    sound = {"images": ["a.png"], "width": 8, "height": 8, "objects": [CAT]}
    return json.dumps({**sound, **changes})


@pytest.fixture
def write(tmp_path: Path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")

    def write_file(*lines: str | bytes) -> Path:
        path = tmp_path / "train.jsonl"
        encoded = (line.encode() if isinstance(line, str) else line for line in lines)
        path.write_bytes(b"\n".join(encoded))
        return path

    return write_file


def load(path: Path, **options: Any) -> Dataset:
    defaults = {"on_bad_row": "error", "sort_objects": True, "check_images": True}
    return load_dataset(path, **{**defaults, **options})


def refusal(path: Path, **options: Any) -> RecordError:
    with pytest.raises(RecordError) as caught:
        load(path, **options)
    return caught.value


def ids(dataset: Dataset) -> list[str]:
    return [sample.sample_id for sample in dataset]


def test_rows_are_a_sequence_in_file_order(write) -> None:
    path = write(row(), "", row(id="x"), "  \r", row(width=9) + "\r")
    dataset = load(path)
    assert ids(dataset) == ["train:1", "x", "train:5"]
    assert len(dataset) == 3
    assert dataset[2].width == 9
    assert dataset[-1] == dataset[2]
    with pytest.raises(IndexError):
        dataset[3]
    assert dataset[:2] == (dataset[0], dataset[1])
    assert (dataset.path, dataset.num_skipped, dataset.skipped) == (path, 0, ())
    assert dataset[0].images[0].path == path.parent / "a.png"
    assert dataset[0].images[0].sha256


def with_number(text: str) -> str:
    return row(score=0).replace('"score": 0', f'"score": {text}')


BAD_ROWS = [
    ('{"images": [', "row", "not JSON at column 13"),
    ("[]", "row", "is a list"),
    (row().encode().replace(b"cat", b"c\xffat"), "row", "not UTF-8 at byte"),
    (row(objects=[CAT, DOG | {"bbox_2d": [1, 2, 3, 1000]}]), "objects[1].bbox_2d", "1000"),
    (row(images=["b.png"]), "images[0]", "cannot read"),
    (row(id="first"), "sample_id", "line 1"),
    ('{"width": 1, "width": 2}', "width", "given twice"),
    (with_number("7" * 5000), "row", "integer of 5000 digits"),
    ("[" * 100_000, "row", "nested too deeply"),
    (with_number('{"a": ' * 50_000 + "0" + "}" * 50_000), "row", "nested too deeply"),
]


@pytest.mark.parametrize(("line", "field", "problem"), BAD_ROWS)
def test_a_bad_row_is_an_error_with_file_line_field_and_remedy(
    write, line: str | bytes, field: str, problem: str
) -> None:
    path = write(row(id="first"), "", line, "also bad")
    error = refusal(path)
    assert (error.file, error.line, error.field) == (str(path), 3, field)
    assert error.remedy
    assert str(error).startswith(f"{path}:3: {field}: ")
    assert problem in str(error)


@pytest.mark.parametrize(
    ("lines", "told", "ending"),
    [
        ((row(), "bad"), [2], None),
        ((row(), "one", row(id=""), "three"), [2, 3, 4], "these 3"),
        ((*["bad"] * 57, row()), list(range(1, 21)), "57; the first 20 are listed above"),
    ],
)
def test_all_bad_rows_are_told_up_to_20_with_their_number(write, lines, told, ending) -> None:
    path = write(*lines)
    error = refusal(path)
    first = str(error).splitlines()
    if ending is not None:
        assert first.pop() == f"{path}: bad rows: {ending}"
    assert [line.split(": ")[0] for line in first] == [f"{path}:{number}" for number in told]
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_byte_order_mark_is_read_over_and_utf_16_is_refused_by_name(write) -> None:
    path = write(b"\xef\xbb\xbf" + row().encode(), row())
    assert len(load(path)) == 2
    path.write_bytes(row().encode("utf-16"))
    assert "is UTF-16" in str(refusal(path))


def test_bad_rows_are_skipped_counted_and_logged_when_told_to(
    write, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(row(id="first"), *(line for line, _, _ in BAD_ROWS), row(id="last"))
    with caplog.at_level(logging.WARNING):
        dataset = load(path, on_bad_row="skip")
    assert ids(dataset) == ["first", "last"]
    assert dataset.num_skipped == len(BAD_ROWS) == len(caplog.records)
    for line, (reason, (_, field, _)) in enumerate(zip(dataset.skipped, BAD_ROWS, strict=True), 2):
        assert reason.startswith(f"{path}:{line}: {field}: ")
        assert reason in caplog.text


def test_objects_of_a_geometry_that_the_run_does_not_learn_are_no_bad_rows_to_skip(write) -> None:
    polygon = {"poly": [0, 0, 9, 0, 9, 9], "desc": "cat"}
    path = write(row(), "bad", row(id="polygon", objects=[polygon]))
    with pytest.raises(UnlearnedGeometryError) as caught:
        load(path, on_bad_row="skip", geometry=frozenset({GeometryKind.BBOX}))
    error = caught.value
    assert (error.field, error.file, error.line) == ("objects[0].poly", str(path), 3)
    assert "geometry=bbox" in error.remedy


@pytest.mark.parametrize(
    ("lines", "problem"),
    [((), "is empty"), (("", "  ", "\n"), "is empty"), (("{", "}"), "no usable row: 2 are bad")],
)
def test_a_file_without_a_usable_row_is_an_error_even_when_bad_ones_may_be_skipped(
    write, lines: tuple[str, ...], problem: str
) -> None:
    error = refusal(write(*lines), on_bad_row="skip")
    assert error.field == "file"
    assert problem in str(error)


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, name: str) -> None:
    error = refusal(tmp_path / name, on_bad_row="skip")
    assert (error.file, error.field) == (str(tmp_path / name), "file")
    assert "cannot be read" in str(error)


def test_rows_with_bad_images_are_skipped_like_any_bad_row(write) -> None:
    gone = row(id="gone", images=["a.png", "b.png"])
    path = write(row(id="kept"), row(id="small", width=9), gone)
    dataset = load(path, on_bad_row="skip", image_size=lambda data: PictureSize(8, 8))
    assert ids(dataset) == ["kept"]
    assert [reason.split(": ")[:2] for reason in dataset.skipped] == [
        [f"{path}:2", "images[0]"],
        [f"{path}:3", "images[1]"],
    ]


@pytest.mark.parametrize(
    ("objects", "options", "field"),
    [
        ([CAT, POLYGON], {"geometry": frozenset({GeometryKind.BBOX})}, "objects[1].poly"),
        ([CAT, DOG], {"sort_objects": False}, "objects[1]"),
    ],
)
def test_objects_are_of_the_runs_geometry_and_in_order_where_they_are_not_sorted(
    write, objects, options, field
) -> None:
    path = write(row(), row(objects=objects))
    assert [object_.desc for object_ in load(path)[1].objects] == ["dog", "cat"]
    error = refusal(path, **options)
    assert (error.file, error.line, error.field) == (str(path), 2, field)


def test_each_epoch_has_every_index_once_in_another_order() -> None:
    stream = SampleStream(20, seed=5, shuffle=True)
    epochs = [stream.take(20) for _ in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert SampleStream(20, seed=5, shuffle=True).take(60) == list(itertools.chain(*epochs))
    assert SampleStream(20, seed=6, shuffle=True).take(20) != epochs[0]
    assert all(type(index) is int for index in epochs[0])


def test_without_shuffling_the_order_is_the_files_without_end() -> None:
    assert SampleStream(3, seed=5, shuffle=False).take(7) == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("seed", range(20))
def test_several_files_are_drawn_by_their_weights_exactly_wherever_one_stops(seed: int) -> None:
    random = Random(seed)
    weights = [random.randrange(1, 30) for _ in range(random.randrange(1, 6))]
    total = sum(weights)
    stream = MixedStream([7] * len(weights), weights, seed=5, shuffle=True)
    drawn: Counter[int] = Counter()
    for length in range(1, 2 * total + 1):
        drawn[next(stream).source] += 1
        for number, weight in enumerate(weights):
            # Its share, rounded down or up.
            assert length * weight // total <= drawn[number] <= -(-length * weight // total)
    assert drawn == {number: 2 * weight for number, weight in enumerate(weights)}


def test_each_file_has_an_order_and_epochs_of_its_own_and_one_alone_that_of_a_run_without_weights():
    stream = MixedStream([6, 6, 3], [4, 2, 2], seed=5, shuffle=True)
    drawn = stream.take(96)
    indexes = [[draw.row for draw in drawn if draw.source == one] for one in range(3)]
    assert [draw.epoch for draw in drawn if draw.source == 2] == [at // 3 for at in range(24)]
    for of_file, size in zip(indexes, (6, 6, 3), strict=True):
        epochs = [of_file[start : start + size] for start in range(0, len(of_file), size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert indexes[0][:24] != indexes[1][:24], "files of one size have different orders"
    assert indexes[0] == SampleStream(6, seed=5, shuffle=True).take(48)
    alone = MixedStream([6], [9], seed=5, shuffle=True).take(48)
    assert alone == [Draw(0, index, at // 6) for at, index in enumerate(indexes[0])]


@pytest.mark.parametrize("position", [0, 1, 7, 8, 50])
def test_draws_from_several_files_go_on_behind_any_position(position: int) -> None:
    whole = MixedStream([5, 3, 2], [3, 2, 4], seed=7, shuffle=True).take(90)
    stream = MixedStream([5, 3, 2], [3, 2, 4], seed=7, shuffle=True)
    stream.take(11)
    stream.move_to(position)
    assert stream.take(40) == whole[position : position + 40]


def test_samples_of_one_file_of_several_are_called_after_it(write) -> None:
    path = write(row(), row(id="x"))
    dataset = load(path, source="coco")
    assert ids(dataset) == ["coco/train:1", "coco/x"]
    assert {sample.source for sample in dataset} == {"coco"}
    assert load(path)[1].source is None
    twice = refusal(write(row(id="x"), row(id="x")), source="coco")
    assert "'x' is also on line 1" in str(twice)


def test_rows_of_a_mixture_are_drawn_exactly_by_weight_and_resumed_and_without_one_as_ever() -> (
    None
):
    mixture = [(6, 3), (4, 1)]
    drawn = RowStream(10, mixture, seed=7, shuffle=True).take(80)
    for first in range(0, 80, 4):
        assert sum(row >= 6 for row in drawn[first : first + 4]) == 1
    assert sorted(drawn[:24:1])[0] == 0 and {row for row in drawn if row >= 6} == set(range(6, 10))
    resumed = RowStream(10, mixture, seed=7, shuffle=True)
    resumed.move_to(33)
    assert resumed.take(47) == drawn[33:]
    assert resumed.alike(7, [9, 1, 6, 0]) == [9, 6]
    assert resumed.alike(5, [9, 1, 6, 0]) == [1, 0]
    plain = RowStream(10, (), seed=7, shuffle=True)
    assert plain.take(25) == SampleStream(10, seed=7, shuffle=True).take(25)
    assert plain.alike(7, [9, 1]) == [9, 1]
    docs = RowStream(5, [(3, 2), (2, 1)], seed=0, shuffle=False)
    assert docs.take(6) == [0, 1, 3, 2, 0, 4]
