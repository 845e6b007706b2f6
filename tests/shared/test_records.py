from __future__ import annotations

import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shared.errors import RecordError
from shared.records import GeometryKind, GroundTruthObject, load_record

BOX = {"bbox_2d": [1, 2, 3, 4], "desc": "cat"}


def row(**changes: Any) -> dict[str, Any]:
    return {"images": ["a.png"], "width": 768, "height": 512, "objects": [BOX], **changes}


def load(mapping: Any, **options: Any):
    return load_record(mapping, root="/nowhere", require_images=False, **options)


def refusal(mapping: Any, **options: Any) -> RecordError:
    with pytest.raises(RecordError) as caught:
        load(mapping, **options)
    return caught.value


def test_a_row_becomes_a_sample() -> None:
    sample = load(
        row(
            objects=[
                {"desc": "größe 猫", "bbox_2d": ["<|coord_0|>", 2, "<|coord_999|>", 4]},
                {"poly": [5, 6, 7, 8, 9, 10], "desc": "dog"},
            ],
            messages=[{"role": "user"}],
            source="here",
        )
    )
    assert sample.objects == (
        GroundTruthObject(GeometryKind.BBOX, (0, 2, 999, 4), "größe 猫"),
        GroundTruthObject(GeometryKind.POLY, (5, 6, 7, 8, 9, 10), "dog"),
    )
    assert (sample.width, sample.height) == (768, 512) and sample.metadata == {
        "messages": [{"role": "user"}],
        "source": "here",
    }
    assert (
        sample.images[0].path == Path("/nowhere/a.png")
        and sample.images[0].sha256 == ""
        and sample.images[0].data is None
    )


def test_no_objects_are_a_valid_answer() -> None:
    assert load(row(objects=[])).objects == ()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sample_id": "s"}, "s"),
        ({"id": 7}, "7"),
        ({"id": "x", "sample_id": "x"}, "x"),
        ({}, "train:3"),
    ],
)
def test_the_id_comes_from_the_row_or_from_the_caller(
    changes: dict[str, Any], expected: str
) -> None:
    assert load(row(**changes), default_id="train:3").sample_id == expected


def test_without_any_id_it_is_a_digest_of_the_row() -> None:
    assert (
        load(row()).sample_id
        == load(dict(reversed(row().items()))).sample_id
        != load(row(width=9)).sample_id
    )


@pytest.mark.parametrize(
    "changes", [{"id": True}, {"id": None}, {"id": ""}, {"id": 1.5}, {"id": "a", "sample_id": "b"}]
)
def test_an_id_that_is_none_is_refused(changes: dict[str, Any]) -> None:
    assert refusal(row(**changes)).field in ("id", "sample_id")


@pytest.mark.parametrize(
    ("mapping", "field"),
    [
        ([], "row"),
        (None, "row"),
        ({}, "images"),
        (row(images=[]), "images"),
        (row(images="a.png"), "images"),
        (row(images=["a.png", 3]), "images[1]"),
        (row(images=[""]), "images[0]"),
        (row(width=0), "width"),
        (row(width=True), "width"),
        (row(height=5.0), "height"),
        (row(height="5"), "height"),
        ({key: value for key, value in row().items() if key != "height"}, "height"),
        (row(objects={}), "objects"),
        (row(objects=[BOX, 3]), "objects[1]"),
        (row(objects=[BOX, {"desc": "cat"}]), "objects[1]"),
        (row(objects=[BOX | {"poly": [1, 2, 3, 4, 5, 6]}]), "objects[0]"),
        (row(objects=[BOX | {"score": 1}]), "objects[0].score"),
        (row(objects=[{"bbox_2d": [1, 2, 3, 4]}]), "objects[0].desc"),
        (row(objects=[BOX | {"desc": ""}]), "objects[0].desc"),
        (row(objects=[BOX | {"desc": " \t"}]), "objects[0].desc"),
        (row(objects=[BOX | {"desc": 7}]), "objects[0].desc"),
        (row(objects=[BOX | {"desc": None}]), "objects[0].desc"),
        (row(objects=[BOX | {"desc": "a <|im_end|>"}]), "objects[0].desc"),
        (row(objects=[BOX | {"desc": "\ud800"}]), "objects[0].desc"),
        (row(objects=[BOX | {"bbox_2d": "1, 2, 3, 4"}]), "objects[0].bbox_2d"),
        (row(objects=[BOX | {"bbox_2d": [1, 2, 3]}]), "objects[0].bbox_2d"),
        (row(objects=[BOX | {"bbox_2d": [1, 2, 3, 4, 5]}]), "objects[0].bbox_2d"),
        (row(objects=[BOX | {"bbox_2d": [3, 2, 1, 4]}]), "objects[0].bbox_2d"),
        (row(objects=[BOX | {"bbox_2d": [1, 4, 3, 2]}]), "objects[0].bbox_2d"),
        (row(objects=[BOX, {"poly": [1, 2, 3, 4], "desc": "dog"}]), "objects[1].poly"),
        (row(objects=[BOX, {"poly": [1, 2, 3, 4, 5, 6, 7], "desc": "dog"}]), "objects[1].poly"),
        (row(objects=[BOX, {"poly": [[1, 2], [3, 4], [5, 6]], "desc": "dog"}]), "objects[1].poly"),
    ],
)
def test_a_bad_row_is_refused_by_the_name_of_its_field(mapping: Any, field: str) -> None:
    error = refusal(mapping)
    assert error.field == field and error.remedy and str(error).startswith(f"{field}: ")


@pytest.mark.parametrize(
    "value", [-1, 1000, 1.0, True, None, "5", "<|coord_1000|>", "<|coord_01|>", [1]]
)
def test_a_coordinate_is_an_integer_bin_or_a_coord_token(value: object) -> None:
    error = refusal(row(objects=[BOX, BOX | {"bbox_2d": [1, 2, value, 999]}]))
    assert error.field == "objects[1].bbox_2d" and f"value 2 is {value!r}" in str(error)


def test_a_pipe_in_place_of_a_picture_is_refused_and_not_opened(tmp_path: Path) -> None:
    """Nobody writes into it: whoever opened it would wait for ever."""
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(RecordError) as caught:
        load_record(row(), root=tmp_path)
    assert str(caught.value).startswith(
        f"images[0]: cannot read {tmp_path / 'a.png'}: it is a named pipe, not a file; correct the"
        " path"
    )
    unchecked = load_record(row(), root=tmp_path, require_images=False)
    with pytest.raises(
        RecordError, match=r"a\.png: it is a named pipe, not a file; restore the file"
    ):
        unchecked.with_image_data()
    (tmp_path / "device.png").symlink_to("/dev/zero")
    with pytest.raises(RecordError, match=r"device\.png: it is a device, not a file"):
        load_record(row(images=["device.png"]), root=tmp_path)


def test_a_geometry_that_the_run_does_not_learn_is_refused_at_its_place_in_the_row() -> None:
    mapping = row(
        objects=[BOX | {"bbox_2d": [1, 90, 3, 99]}, {"poly": [1, 2, 3, 4, 5, 6], "desc": "dog"}]
    )
    assert len(load(mapping, geometry=frozenset(GeometryKind)).objects) == 2
    error = refusal(mapping, geometry=frozenset({GeometryKind.BBOX}))
    assert (
        error.field == "objects[1].poly"
        and error.remedy
        == "write it as bbox_2d (`launch.coco import geometry=bbox` does so for a whole file),"
        " remove the object, or choose a custom.trainer_variant that learns polygons: stage1_sft"
        " or stage2_rollout_aligned"
    )


def test_a_polygon_keeps_its_vertices_in_order_numbers_and_coord_tokens_alike() -> None:
    given = [500, "<|coord_7|>", 999, 0, "<|coord_0|>", 999, 500, 7]
    (found,) = load(row(objects=[{"poly": given, "desc": "dog"}])).objects
    assert found == GroundTruthObject(GeometryKind.POLY, (500, 7, 999, 0, 0, 999, 500, 7), "dog")


@pytest.mark.parametrize("num_values", [0, 2, 4, 5, 7, 9])
def test_a_polygon_has_at_least_three_points_and_an_even_number_of_values(num_values: int) -> None:
    error = refusal(row(objects=[{"poly": list(range(num_values)), "desc": "dog"}]))
    assert (
        error.field == "objects[0].poly"
        and f"has {num_values} values" in str(error)
        and "at least 3 points" in error.remedy
    )


def test_polygon_values_are_bins() -> None:
    error = refusal(row(objects=[{"poly": [1, 2, 3, 4, 5, 1000], "desc": "dog"}]))
    assert error.field == "objects[0].poly" and "value 5 is 1000" in str(error)


UNSORTED = [
    {"bbox_2d": [5, 50, 60, 60], "desc": "c"},
    {"bbox_2d": [9, 10, 20, 20], "desc": "b"},
    {"poly": [30, 90, 4, 40, 2, 10], "desc": "a"},
]


def test_objects_are_brought_into_reading_order() -> None:
    assert [object_.desc for object_ in load(row(objects=UNSORTED)).objects] == ["a", "b", "c"]


def test_a_polygon_is_where_its_least_y_and_least_x_are_whatever_vertex_has_them() -> None:
    box = {"bbox_2d": [300, 100, 400, 200], "desc": "box"}
    right, left = (
        {"poly": [900, 100, x, 500, 900, 500], "desc": name}
        for x, name in ((301, "right"), (299, "left"))
    )
    above = {"poly": [800, 800, 900, 99, 990, 800], "desc": "above"}
    ordered = load(row(objects=[right, box, left, above]))
    assert [object_.desc for object_ in ordered.objects] == ["above", "left", "box", "right"]
    assert (
        load(row(objects=[above, left, box, right]), sort_objects=False).objects == ordered.objects
    )


def test_equal_places_keep_their_order() -> None:
    objects = [BOX | {"desc": name} for name in "zay"]
    assert [
        object_.desc for object_ in load(row(objects=objects), sort_objects=False).objects
    ] == list("zay")
    assert [object_.desc for object_ in load(row(objects=objects)).objects] == list("zay")


def test_without_sorting_the_row_has_to_be_in_reading_order() -> None:
    error = refusal(row(objects=UNSORTED), sort_objects=False)
    assert error.field == "objects[1]" and "sort" in error.remedy


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_images_are_read_and_their_digest_is_kept(tmp_path: Path, format: str) -> None:
    (tmp_path / "sub").mkdir()
    Image.new("RGB", (8, 8), "red").save(tmp_path / "sub" / "image", format=format)
    (image,) = load_record(row(images=["sub/image"]), root=tmp_path).images
    data = (tmp_path / "sub" / "image").read_bytes()
    assert (
        image.path == tmp_path / "sub" / "image"
        and image.data is None
        and image.sha256 == hashlib.sha256(data).hexdigest()
    )
    assert image.with_data().data == data


@pytest.mark.parametrize("content", [b"", b"not an image", b"<svg/>", b"RIFF....WAVE", b"\x89PN"])
def test_a_file_that_is_no_image_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(RecordError, match=r"images\[0\]: .* is not an image"):
        load_record(row(), root=tmp_path)


@pytest.mark.parametrize("name", ["missing.png", ".", "null\x00.png"])
def test_an_image_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecordError, match=r"images\[0\]: cannot read") as caught:
        load_record(row(images=[name]), root=tmp_path)
    assert pickle.loads(pickle.dumps(caught.value)).field == "images[0]"


def test_every_image_of_a_row_has_the_rows_size_and_is_read_once(tmp_path: Path) -> None:
    for name, color in (("a.png", "red"), ("b.png", "blue")):
        Image.new("RGB", (8, 8), color).save(tmp_path / name)
    measured: list[bytes] = []

    def image_size(data: bytes) -> tuple[int, int]:
        measured.append(data)
        return (768, 512) if data == (tmp_path / "a.png").read_bytes() else (512, 768)

    with pytest.raises(
        RecordError, match=r"images\[1\]: .*b\.png is 512 x 768 pixels, the row says 768 x 512; "
    ):
        load_record(row(images=["a.png", "b.png"]), root=tmp_path, image_size=image_size)
    assert measured == [(tmp_path / name).read_bytes() for name in ("a.png", "b.png")]


def test_an_image_that_does_not_decode_is_refused_with_the_reason(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")

    def image_size(data: bytes) -> tuple[int, int]:
        raise ValueError("broken stream")

    with pytest.raises(
        RecordError, match=r"images\[0\]: .*a\.png is not a readable image \(broken stream\)"
    ):
        load_record(row(), root=tmp_path, image_size=image_size)


def test_images_are_not_measured_where_they_are_not_read() -> None:
    def image_size(data: bytes) -> tuple[int, int]:
        raise AssertionError("nobody asked")

    assert load(row(), image_size=image_size).images[0].sha256 == ""


def test_an_image_that_changes_under_the_job_is_noticed(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.png")
    (image,) = load_record(row(), root=tmp_path).images
    Image.new("RGB", (8, 8), "blue").save(tmp_path / "a.png")
    with pytest.raises(RecordError, match="changed"):
        image.with_data()
