"""Data that others made to exhaust a machine is refused by a limit that the message names."""

import io
import json
import os
import re
import struct
import zlib
from typing import Any

import pytest
from PIL import Image

from learner.data.samples import header_size, image_size
from shared.data.limits import MAX_LINE_BYTES, MAX_PIXELS, file_lines, read_file
from shared.dataset import load_dataset
from shared.errors import MAX_SHOWN, RecordError
from shared.prompts import open_picture

BOX = {"bbox_2d": [1, 2, 3, 4], "desc": "a"}
DIGITS = "9" * 1000


def row(**changes: Any) -> str:
    return json.dumps({"images": ["a.png"], "width": 8, "height": 8, "objects": [BOX], **changes})


@pytest.fixture
def load(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")

    def load(*lines: str, on_bad_row="error"):
        path = tmp_path / "x.jsonl"
        path.write_text("\n".join(lines))
        return load_dataset(path, on_bad_row=on_bad_row, sort_objects=True, check_images=True)

    return load


def test_a_line_that_is_too_long_is_refused_with_its_place_size_and_limit(load):
    with pytest.raises(RecordError) as caught:
        load(row(), row(x="a" * MAX_LINE_BYTES), row())
    assert caught.value.line == 2
    size = len(row(x="")) + MAX_LINE_BYTES + 1
    assert caught.value.problem.startswith(f"has {size} bytes, more than MAX_LINE_BYTES = ")
    dataset = load(row(), row(x="a" * MAX_LINE_BYTES), row(id="last"), on_bad_row="skip")
    assert [sample.sample_id for sample in dataset] == ["x:1", "last"]
    assert dataset.num_skipped == 1


def test_a_line_at_the_limit_is_read_and_places_are_those_of_the_file(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"a" * 8 + b"\r\n\n" + b"b" * 20 + b"\n" + b"c" * 9)
    lines = list(file_lines(path, "LIMIT", 8))
    assert [line[:-1] for line in lines] == [
        (1, 0, b"a" * 8, 10),
        (3, 11, b"b" * 10, 21),
        (4, 32, b"c" * 9, 9),
    ]
    assert lines[0].problem is None
    for line in lines[1:]:
        assert re.search(
            rf" {line.size} bytes, .*LIMIT = 8 \(shared/data/limits\.py\)", line.problem
        )


@pytest.mark.parametrize(
    ("changes", "field", "limit"),
    [
        ({"objects": [BOX] * 30_000}, "objects", "MAX_COORDINATES"),
        ({"images": ["a.png"] * 1_001}, "images", "MAX_IMAGES"),
        ({"objects": [{**BOX, "desc": "a" * 1_000_001}]}, "objects[0].desc", "MAX_TEXT"),
        ({"prompt": "a" * 1_000_001}, "prompt", "MAX_TEXT"),
    ],
)
def test_a_row_that_no_context_holds_is_refused_by_its_field(load, changes, field, limit):
    with pytest.raises(RecordError) as caught:
        load(row(**changes))
    assert (caught.value.field, caught.value.line) == (field, 1)
    assert f"more than {limit} = " in caught.value.problem


@pytest.mark.parametrize(
    "text",
    [
        row(objects=[{**BOX, "bbox_2d": ["a" * 100_000]}]),
        "{" + f'"{"k" * 100_000}":1,' * 2 + '"x":1}',
        row(images=["a" * 100_000]),
    ],
)
def test_a_message_does_not_repeat_the_megabytes_that_it_is_about(load, text):
    with pytest.raises(RecordError) as caught:
        load(text)
    assert len(str(caught.value)) < 3 * MAX_SHOWN


def test_an_annotated_number_of_a_thousand_digits_is_a_bad_row(load):
    huge = row(annotated=[{"bbox": [1, 2, 3, 4]}]).replace(
        "[1, 2, 3, 4]}]", f"[1, 2, 3, {DIGITS}]}}]"
    )
    with pytest.raises(RecordError, match=r"annotated\[0\]\.bbox"):
        load(huge)


def test_a_key_that_is_given_twice_among_many_is_found_in_one_pass(load):
    keys = ",".join(f'"k{i}":0' for i in range(200_000))
    with pytest.raises(RecordError) as caught:
        load(f'{{{keys},"k199999":1}}')
    assert (caught.value.field, caught.value.problem) == ("k199999", "is given twice in one object")


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "a.png"
    with path.open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        file.truncate(100 * 2**30)
    with pytest.raises(OSError, match=r"107374182400 bytes, more than MAX_FILE_BYTES = "):
        read_file(path)


def test_a_pipe_is_no_data_and_a_link_to_a_file_is(tmp_path):
    os.mkfifo(tmp_path / "x.jsonl")
    with pytest.raises(RecordError, match="it is a named pipe, not a file"):
        load_dataset(tmp_path / "x.jsonl", on_bad_row="skip", sort_objects=True, check_images=False)
    (tmp_path / "real").write_bytes(b"ab")
    (tmp_path / "link").symlink_to("real")
    assert read_file(tmp_path / "link") == b"ab"


@pytest.mark.parametrize("side", [11_600, 15_500, 30_000])
def test_a_picture_of_too_many_pixels_is_refused_by_its_header(tmp_path, side):
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
    path = tmp_path / "a.png"
    path.write_bytes(png)
    for measure in (lambda: image_size(png), lambda: header_size(path), lambda: open_picture(png)):
        with pytest.raises(ValueError, match=f"more than MAX_PIXELS = {MAX_PIXELS} "):
            measure()


def test_a_picture_within_the_limit_is_opened():
    file = io.BytesIO()
    Image.new("1", (9_000, 9_000)).save(file, "PNG")
    assert open_picture(file.getvalue()).size == (9_000, 9_000)
