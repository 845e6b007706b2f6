from __future__ import annotations

import itertools
import json
import logging
import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shared.dataset import Dataset, SampleStream, load_dataset
from shared.errors import RecordError
from shared.records import GeometryKind


def row(**changes: Any) -> str:
    return json.dumps(
        {
            "images": ["a.png"],
            "width": 8,
            "height": 8,
            "objects": [{"bbox_2d": [1, 2, 3, 4], "desc": "cat"}],
            **changes,
        }
    )


@pytest.fixture
def write(tmp_path: Path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")

    def write_file(*lines: str | bytes) -> Path:
        path = tmp_path / "train.jsonl"
        path.write_bytes(
            b"\n".join(line.encode() if isinstance(line, str) else line for line in lines)
        )
        return path

    return write_file


def load(path: Path, **options: Any) -> Dataset:
    return load_dataset(
        path, **{"on_bad_row": "error", "sort_objects": True, "check_images": True, **options}
    )


def refusal(path: Path, **options: Any) -> RecordError:
    with pytest.raises(RecordError) as caught:
        load(path, **options)
    return caught.value


def test_rows_are_a_sequence_in_file_order(write) -> None:
    path = write(row(), "", row(id="x"), "  \r", row(width=9) + "\r")
    dataset = load(path)
    assert [sample.sample_id for sample in dataset] == ["train:1", "x", "train:5"] and len(
        dataset
    ) == 3
    assert (
        dataset[2].width == 9
        and dataset[-1] is dataset[2]
        and dataset[:2] == (dataset[0], dataset[1])
    )
    assert dataset.path == path and dataset.num_skipped == 0 and dataset.skipped == ()
    assert dataset[0].images[0].path == path.parent / "a.png" and dataset[0].images[0].sha256


BAD_ROWS = [
    ('{"images": [', "row", "not JSON at column 13"),
    ("[]", "row", "is a list"),
    (row().encode().replace(b"cat", b"c\xffat"), "row", "not UTF-8 at byte"),
    (
        row(
            objects=[
                {"bbox_2d": [1, 2, 3, 4], "desc": "cat"},
                {"bbox_2d": [1, 2, 3, 1000], "desc": "dog"},
            ]
        ),
        "objects[1].bbox_2d",
        "1000",
    ),
    (row(images=["b.png"]), "images[0]", "cannot read"),
    (row(id="first"), "sample_id", "line 1"),
    ('{"width": 1, "width": 2}', "width", "given twice"),
    (row(score=0).replace('"score": 0', '"score": ' + "7" * 5000), "row", "integer of 5000 digits"),
    ("[" * 100_000, "row", "nested too deeply"),
    (
        row(extra=0).replace('"extra": 0', '"extra": ' + '{"a": ' * 50_000 + "0" + "}" * 50_000),
        "row",
        "nested too deeply",
    ),
]


@pytest.mark.parametrize(("line", "field", "problem"), BAD_ROWS)
def test_a_bad_row_is_an_error_with_file_line_field_and_remedy(
    write, line: str | bytes, field: str, problem: str
) -> None:
    path = write(row(id="first"), "", line, "also bad")
    error = refusal(path)
    assert (error.file, error.line, error.field) == (str(path), 3, field) and error.remedy
    assert str(error).startswith(f"{path}:3: {field}: ") and problem in str(error)


def test_all_bad_rows_are_told_up_to_20_with_their_number(write) -> None:
    three = str(refusal(write(row(), "one", row(id=""), "three"))).splitlines()
    assert [line.split(": ")[0].rpartition(":")[2] for line in three[:3]] == ["2", "3", "4"]
    assert three[3].endswith("train.jsonl: bad rows: these 3") and len(three) == 4
    many = refusal(write(*["bad"] * 57, row()))
    lines = str(many).splitlines()
    assert [line.split(": ")[0].rpartition(":")[2] for line in lines[:20]] == [
        str(number) for number in range(1, 21)
    ]
    assert (
        lines[20].endswith("train.jsonl: bad rows: 57, of which the first 20 are above")
        and len(lines) == 21
    )
    assert str(pickle.loads(pickle.dumps(many))) == str(many)
    assert "bad rows" not in str(refusal(write(row(), "bad"))), "one is told as it is"


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_the_remedy_of_a_byte_order_mark_works(write, locale: str) -> None:
    path = write(b"\xef\xbb\xbf" + row().encode(), row())
    error = refusal(path)
    assert str(error).startswith(
        f"{path}:1: row: begins with a byte order mark, which JSON does not have; save the file as"
        " UTF-8 without it: sed -i "
    )
    command = error.remedy.partition(": ")[2]
    subprocess.run(
        command,
        shell=True,
        env={"PATH": os.environ["PATH"], "LC_ALL": locale},
        timeout=60,
        check=True,
    )
    assert len(load(path)) == 2


def test_bad_rows_are_skipped_counted_and_logged_when_told_to(
    write, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(row(id="first"), *(line for line, _, _ in BAD_ROWS), row(id="last"))
    with caplog.at_level(logging.WARNING):
        dataset = load(path, on_bad_row="skip")
    assert [sample.sample_id for sample in dataset] == [
        "first",
        "last",
    ] and dataset.num_skipped == len(BAD_ROWS)
    assert all(
        reason.startswith(f"{path}:{line}: {field}: ")
        for line, (reason, (_, field, _)) in enumerate(
            zip(dataset.skipped, BAD_ROWS, strict=True), 2
        )
    )
    assert len(caplog.records) == len(BAD_ROWS) and all(
        reason in caplog.text for reason in dataset.skipped
    )


@pytest.mark.parametrize("lines", [(), ("", "  ", "\n")])
def test_an_empty_file_is_an_error(write, lines: tuple[str, ...]) -> None:
    error = refusal(write(*lines), on_bad_row="skip")
    assert error.field == "file" and "is empty" in str(error)


def test_a_file_of_bad_rows_only_is_an_error_even_when_they_may_be_skipped(write) -> None:
    assert "no usable row: 2 were bad" in str(refusal(write("{", "}"), on_bad_row="skip"))


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, name: str) -> None:
    error = refusal(tmp_path / name, on_bad_row="skip")
    assert (error.file, error.field) == (str(tmp_path / name), "file") and "cannot be read" in str(
        error
    )


def test_images_are_not_read_where_nobody_asks(write) -> None:
    assert load(write(row(images=["b.png"])), check_images=False)[0].images[0].sha256 == ""


def test_only_the_runs_kinds_of_geometry_are_taken(write) -> None:
    polygon = {"poly": [1, 2, 3, 4, 5, 6], "desc": "dog"}
    path = write(row(), row(objects=[{"bbox_2d": [1, 20, 3, 40], "desc": "cat"}, polygon]))
    assert [object_.desc for object_ in load(path)[1].objects] == ["dog", "cat"]
    error = refusal(path, geometry=frozenset({GeometryKind.BBOX}))
    assert (error.file, error.line, error.field) == (
        str(path),
        2,
        "objects[1].poly",
    ) and "bbox_2d" in error.remedy


def test_rows_with_bad_images_are_skipped_like_any_bad_row(write) -> None:
    path = write(
        row(id="kept"), row(id="small", width=9), row(id="gone", images=["a.png", "b.png"])
    )
    dataset = load(path, on_bad_row="skip", image_size=lambda data: (8, 8))
    assert [sample.sample_id for sample in dataset] == ["kept"]
    assert [reason.removeprefix(f"{path}:").split(": ")[:2] for reason in dataset.skipped] == [
        ["2", "images[0]"],
        ["3", "images[1]"],
    ]


def test_unsorted_objects_are_an_error_where_they_are_not_sorted(write) -> None:
    objects = [{"bbox_2d": [1, 20, 3, 40], "desc": "cat"}, {"bbox_2d": [1, 2, 3, 4], "desc": "dog"}]
    path = write(row(objects=objects))
    assert [object_.desc for object_ in load(path)[0].objects] == ["dog", "cat"]
    assert refusal(path, sort_objects=False).field == "objects[1]"


def test_an_unknown_way_with_bad_rows_is_refused(write) -> None:
    with pytest.raises(ValueError, match="on_bad_row"):
        load(write(row()), on_bad_row="ignore")


def test_each_epoch_has_every_index_once_in_another_order() -> None:
    stream = SampleStream(20, seed=5, shuffle=True)
    epochs = [stream.take(20) for _ in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert SampleStream(20, seed=5, shuffle=True).take(60) == list(itertools.chain(*epochs))
    assert SampleStream(20, seed=6, shuffle=True).take(20) != epochs[0]
    assert all(type(index) is int for index in epochs[0])


def test_without_shuffling_the_order_is_the_files() -> None:
    assert SampleStream(3, seed=5, shuffle=False).take(7) == [0, 1, 2, 0, 1, 2, 0]


def test_the_stream_is_an_iterator_without_end() -> None:
    assert list(itertools.islice(SampleStream(1, seed=0, shuffle=True), 5)) == [0] * 5


@pytest.mark.parametrize(("num_samples", "seed"), [(0, 1), (3, -1)])
def test_a_stream_needs_samples_and_a_seed(num_samples: int, seed: int) -> None:
    with pytest.raises(ValueError):
        SampleStream(num_samples, seed, shuffle=True)
