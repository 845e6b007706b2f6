"""Files of other formats that were made to exhaust a machine are refused by a named limit."""

import json
import os
import pickle

import pytest
from import_support import picture, write

from launch.tools.import_data import yolo

ALIASES = "a: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"b{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)
"""A list that 10 ** 9 texts unfold from."""
REF = {"ref_id": 1, "ann_id": 1, "image_id": 1, "split": "train"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{ALIASES}train: *a8\nnames: [c]\n", "train[0]: input should be a valid string"),
        (f"{ALIASES}names: {{0: *a8}}\ntrain: images\n", "names[0]: input should be a valid"),
        (f"train: {'[' * 5000}{']' * 5000}\nnames: [c]\n", "file: is not YAML"),
        (
            f"train: images\nnames: {{? {'9' * 5000}\n: c}}\n",
            "names: input should be a valid integer",
        ),
        ("train: /\nnames: [c]\n", "train: names '/', the whole disk"),
        ("train: x\n" + "#" * 2**24, "more than MAX_LABEL_BYTES = "),
    ],
)
def test_a_yolo_file_that_exhausts_a_reader_is_refused_by_its_key(tmp_path, refused, text, told):
    (tmp_path / "images").mkdir()
    (tmp_path / "data.yaml").write_text(text)
    message = refused("format=yolo", f"source={tmp_path}")
    assert told in message and len(message) < 3000


def test_a_yolo_folder_far_above_the_images_is_not_searched_to_its_end(
    tmp_path, refused, monkeypatch
):
    monkeypatch.setattr(yolo, "MAX_FOLDER_FILES", 3)
    (tmp_path / "images").mkdir()
    for number in range(4):
        (tmp_path / "images" / f"{number}.txt").touch()
    (tmp_path / "data.yaml").write_text("train: images\nnames: [c]\n")
    message = refused("format=yolo", f"source={tmp_path}")
    assert "train: names" in message and "more than MAX_FOLDER_FILES = 3" in message


@pytest.mark.parametrize(
    "options",
    [("format=yolo", "source={}"), ("format=swift", "source={}/data.yaml")],
)
def test_a_pipe_in_place_of_annotations_is_refused_and_not_opened(tmp_path, refused, options):
    os.mkfifo(tmp_path / "data.yaml")
    message = refused(*(option.format(tmp_path) for option in options))
    assert "it is a named pipe, not a file" in message


def nested_tenfold() -> list:
    """Return a list that 10 ** 9 texts unfold from."""
    value = ["x"] * 10
    for _ in range(8):
        value = [value] * 10
    return value


@pytest.mark.parametrize(
    ("refs", "told"),
    [
        (lambda: [{**REF, "sentences": [], "ref_id": nested_tenfold()}], "MAX_VALUES = "),
        (lambda: [{**REF, "sentences": [{"sent": "x"}] * 5000}] * 5000, "MAX_VALUES = "),
        (lambda: [{**REF, "sentences": [], "ref_id": 10**9000}], "more than 64 bits"),
    ],
)
def test_references_of_a_pickle_of_refcoco_do_not_unfold_without_an_end(
    tmp_path, refused, refs, told
):
    (tmp_path / "refs.p").write_bytes(pickle.dumps(refs()))
    empty = {"images": [], "annotations": [], "categories": []}
    (tmp_path / "i.json").write_text(json.dumps(empty))
    message = refused(
        "format=refcoco",
        f"refs={tmp_path / 'refs.p'}",
        f"annotations={tmp_path / 'i.json'}",
        f"images={tmp_path}",
    )
    assert told in message


def test_a_line_of_ms_swift_that_is_too_long_is_refused_with_its_number(tmp_path, refused):
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n" + json.dumps({"messages": [], "x": "a" * 2**24}))
    message = refused("format=swift", f"source={path}")
    assert f"{path}:3: row: has " in message and "more than MAX_LINE_BYTES = " in message


def test_a_polygon_of_too_many_vertices_is_left_out_and_counted(tmp_path, refused):
    picture(tmp_path / "a.png", 32, 32)
    ring = [float(value % 31) for value in range(50_000)]
    box = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 30, 30]}
    content = {
        "images": [{"id": 1, "file_name": "a.png"}],
        "categories": [{"id": 1, "name": "c"}],
        "annotations": [{**box, "segmentation": [ring]}],
    }
    file = write(tmp_path / "i.json", json.dumps(content))
    options = ("format=coco", f"annotations={file}", f"images={tmp_path}")
    message = refused(*options, "geometry=poly", "max_vertices=16")
    assert "too_many_vertices 1" in message
