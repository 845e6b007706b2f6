from __future__ import annotations

import hashlib
import os
import pickle
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shared.errors import RecordError
from shared.records import (
    ALL_GEOMETRY,
    GeometryKind,
    GroundTruthObject,
    PictureSize,
    load_record,
)

BOX = {"bbox_2d": [1, 2, 3, 4], "desc": "cat"}
BBOX = GeometryKind.BBOX
POLY = GeometryKind.POLY


def row(**changes: Any) -> dict[str, Any]:
    return {"images": ["a.png"], "width": 768, "height": 512, "objects": [BOX], **changes}


def poly(*values: Any, desc: str = "dog") -> dict[str, Any]:
    return {"poly": list(values), "desc": desc}


def load(mapping: Any, **options: Any):
    return load_record(mapping, root="/nowhere", require_images=False, **options)


def loaded(*objects: Any, **options: Any) -> tuple[GroundTruthObject, ...]:
    return load(row(objects=list(objects)), **options).objects


def refusal(mapping: Any, **options: Any) -> RecordError:
    with pytest.raises(RecordError) as caught:
        load(mapping, **options)
    return caught.value


def save(path: Path, color: str = "black", **options: Any) -> None:
    Image.new("RGB", (8, 8), color).save(path, **options)


def test_a_row_becomes_a_sample() -> None:
    box = {"desc": "größe 猫", "bbox_2d": ["<|coord_0|>", 2, "<|coord_999|>", 4]}
    # A polygon keeps its vertices in order, numbers and coord tokens alike.
    polygon = poly(500, "<|coord_7|>", 999, 0, "<|coord_0|>", 999, 500, 7)
    metadata = {"messages": [{"role": "user"}], "source": "here"}
    sample = load(row(objects=[polygon, box], **metadata))
    assert sample.objects == (
        GroundTruthObject(POLY, (500, 7, 999, 0, 0, 999, 500, 7), "dog"),
        GroundTruthObject(BBOX, (0, 2, 999, 4), "größe 猫"),
    )
    assert (sample.width, sample.height, sample.metadata) == (768, 512, metadata)
    (image,) = sample.images
    assert (image.path, image.sha256, image.data) == (Path("/nowhere/a.png"), "", None)


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
    digest = load(row()).sample_id
    assert digest == load(dict(reversed(row().items()))).sample_id
    assert digest != load(row(width=9)).sample_id


@pytest.mark.parametrize(
    ("mapping", "field"),
    [
        ([], "row"),
        (None, "row"),
        *((row(id=value), "id") for value in (True, None, "", 1.5)),
        (row(id="a", sample_id="b"), "sample_id"),
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
        *(
            (row(objects=[BOX | {"desc": desc}]), "objects[0].desc")
            for desc in ("", " \t", 7, None, "a <|im_end|>", "<|vision_start|>", "\ud800")
        ),
        (row(prompt="Find <|image_pad|>."), "prompt"),
        (row(system="Hello<|im_end|>"), "system"),
        (row(phrase="<|im_start|>the cat"), "phrase"),
        (row(classes=["cat", "dog <IMG_CONTEXT>"]), "classes[1]"),
        *(
            (row(objects=[BOX | {"bbox_2d": bins}]), "objects[0].bbox_2d")
            for bins in ("1, 2, 3, 4", [1, 2, 3], [1, 2, 3, 4, 5], [3, 2, 1, 4], [1, 4, 3, 2])
        ),
        (row(objects=[BOX, poly([1, 2], [3, 4], [5, 6])]), "objects[1].poly"),
        (row(objects=[BOX | {"point_2d": [1, 2]}]), "objects[0]"),
        *(
            (row(objects=[{"desc": "ear", "point_2d": bins}]), "objects[0].point_2d")
            for bins in ([1], [1, 2, 3, 4], [1, 1000], [[1, 2]], 5)
        ),
    ],
)
def test_a_bad_row_is_refused_by_the_name_of_its_field(mapping: Any, field: str) -> None:
    error = refusal(mapping)
    assert error.field == field
    assert error.remedy
    assert str(error).startswith(f"{field}: ")


@pytest.mark.parametrize(
    "value", [-1, 1000, 1.0, True, None, "5", "<|coord_1000|>", "<|coord_01|>", [1]]
)
@pytest.mark.parametrize("kind", ["bbox_2d", "poly"])
def test_a_coordinate_is_an_integer_bin_or_a_coord_token(kind: str, value: object) -> None:
    error = refusal(row(objects=[BOX, {"desc": "dog", kind: [1, 2, value, 999]}]))
    assert error.field == f"objects[1].{kind}"
    assert f"value 2 is {value!r}" in str(error)


@pytest.mark.parametrize("num_values", [0, 2, 4, 5, 7, 9])
def test_a_polygon_has_at_least_three_points_and_an_even_number_of_values(num_values: int) -> None:
    error = refusal(row(objects=[BOX, poly(*range(num_values))]))
    assert error.field == "objects[1].poly"
    assert f"has {num_values} values" in str(error)
    assert "at least 3 points" in error.remedy


def test_a_geometry_that_the_run_does_not_learn_is_refused_at_its_place_in_the_row() -> None:
    mapping = row(objects=[BOX | {"bbox_2d": [1, 90, 3, 99]}, poly(1, 2, 3, 4, 5, 6)])
    assert len(load(mapping, geometry=frozenset(GeometryKind)).objects) == 2
    point = {"desc": "ear", "point_2d": [1, "<|coord_2|>"]}
    (loaded_point,) = loaded(point, geometry=ALL_GEOMETRY)
    assert loaded_point == GroundTruthObject(GeometryKind.POINT, (1, 2), "ear")
    error = refusal(row(objects=[point]))
    assert error.field == "objects[0].point_2d"
    assert error.remedy.startswith("write rollout_matching.geometry: [bbox_2d, point_2d], with a")
    error = refusal(mapping, geometry=frozenset({BBOX}))
    assert error.field == "objects[1].poly"
    assert error.remedy.startswith("write it as bbox_2d (`rollmatch coco import geometry=bbox`")


UNSORTED = [
    {"bbox_2d": [5, 50, 60, 60], "desc": "c"},
    {"bbox_2d": [9, 10, 20, 20], "desc": "b"},
    {"point_2d": [8, 50], "desc": "d"},
    poly(30, 90, 4, 40, 2, 10, desc="a"),
]
# A polygon is where its least y and its least x are, whatever vertex has them.
AROUND_A_BOX = [
    poly(900, 100, 301, 500, 900, 500, desc="right"),
    {"bbox_2d": [300, 100, 400, 200], "desc": "box"},
    poly(900, 100, 299, 500, 900, 500, desc="left"),
    poly(800, 800, 900, 99, 990, 800, desc="above"),
]
EQUAL = [BOX | {"desc": name} for name in "zay"]


@pytest.mark.parametrize(
    ("objects", "expected"),
    [
        (UNSORTED, ["a", "b", "c", "d"]),
        (AROUND_A_BOX, ["above", "left", "box", "right"]),
        (EQUAL, ["z", "a", "y"]),
    ],
)
def test_objects_are_brought_into_reading_order_or_have_to_be_in_it(objects, expected) -> None:
    ordered = loaded(*objects, geometry=ALL_GEOMETRY)
    assert [object_.desc for object_ in ordered] == expected
    written = sorted(objects, key=lambda object_: expected.index(object_["desc"]))
    assert loaded(*written, geometry=ALL_GEOMETRY, sort_objects=False) == ordered
    if written != objects:
        error = refusal(row(objects=objects), geometry=ALL_GEOMETRY, sort_objects=False)
        assert error.field == "objects[1]"
        assert "sort" in error.remedy


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_images_are_read_and_their_digest_is_kept(tmp_path: Path, format: str) -> None:
    path = tmp_path / "sub" / "image"
    path.parent.mkdir()
    save(path, format=format)
    (image,) = load_record(row(images=["sub/image"]), root=tmp_path).images
    data = path.read_bytes()
    assert (image.path, image.data) == (path, None)
    assert image.sha256 == hashlib.sha256(data).hexdigest()
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


def test_a_pipe_in_place_of_a_picture_is_refused_and_not_opened(tmp_path: Path) -> None:
    """Nobody writes into it: whoever opened it would wait for ever."""
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(RecordError, match=r"^images\[0\]: .*a\.png: .*named pipe, .*; correct"):
        load_record(row(), root=tmp_path)
    unchecked = load_record(row(), root=tmp_path, require_images=False)
    with pytest.raises(RecordError, match=r"a\.png: .*named pipe, .*; restore"):
        unchecked.with_image_data()
    (tmp_path / "device.png").symlink_to("/dev/zero")
    with pytest.raises(RecordError, match=r"device\.png: .* a device, "):
        load_record(row(images=["device.png"]), root=tmp_path)


def test_every_image_of_a_row_has_the_rows_size_and_is_read_once(tmp_path: Path) -> None:
    save(tmp_path / "a.png", "red")
    save(tmp_path / "b.png", "blue")
    contents = [(tmp_path / name).read_bytes() for name in ("a.png", "b.png")]
    measured: list[bytes] = []

    def image_size(data: bytes) -> PictureSize:
        measured.append(data)
        return PictureSize(768, 512) if data == contents[0] else PictureSize(512, 768)

    message = r"images\[1\]: .*b\.png is 512 x 768 pixels, the row says 768 x 512; "
    with pytest.raises(RecordError, match=message):
        load_record(row(images=["a.png", "b.png"]), root=tmp_path, image_size=image_size)
    assert measured == contents


def test_a_row_with_the_stored_size_of_a_turned_picture_is_told_of_its_orientation(
    tmp_path: Path,
) -> None:
    save(tmp_path / "a.png")
    with pytest.raises(RecordError) as caught:
        load_record(row(), root=tmp_path, image_size=lambda data: PictureSize(512, 768, 6))
    assert caught.value.field == "images[0]"
    assert "is 512 x 768 pixels after its EXIF orientation 6" in caught.value.problem
    assert "the row says 768 x 512" in caught.value.problem
    assert "as displayed" in caught.value.remedy


def test_an_image_that_does_not_decode_is_refused_with_the_reason_where_images_are_read(
    tmp_path: Path,
) -> None:
    def image_size(data: bytes) -> PictureSize:
        raise ValueError("broken stream")

    save(tmp_path / "a.png")
    message = r"images\[0\]: .*a\.png is not a readable image \(broken stream\)"
    with pytest.raises(RecordError, match=message):
        load_record(row(), root=tmp_path, image_size=image_size)
    assert load(row(), image_size=image_size).images[0].sha256 == ""


def test_an_image_that_changes_under_the_job_is_noticed(tmp_path: Path) -> None:
    save(tmp_path / "a.png", "red")
    (image,) = load_record(row(), root=tmp_path).images
    save(tmp_path / "a.png", "blue")
    with pytest.raises(RecordError, match="changed"):
        image.with_data()


def test_annotations_follow_their_objects_into_reading_order() -> None:
    boxes = [[10.5, 90, 5, 5], [1, 2, 2.25, 2]]
    objects = [{"bbox_2d": [10, 90, 30, 99], "desc": "dog"}, BOX]
    mapping = row(objects=objects, annotated=[{"bbox": box} for box in boxes])
    sample = load(mapping)
    assert [one.desc for one in sample.objects] == ["cat", "dog"]
    assert [one.box for one in sample.annotated] == [(1, 2, 2.25, 2), (10.5, 90, 5, 5)]
    assert [one.box for one in load(row(annotated=[{"bbox": [0, 0, 1, 1]}])).annotated] == [
        (0, 0, 1, 1)
    ]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"annotated": []}, "annotated"),
        ({"annotated": "all"}, "annotated"),
        ({"annotated": [{"bbox": [1, 2, 3]}]}, "annotated[0].bbox"),
        ({"annotated": [{"bbox": [1, 2, 3, float("nan")]}]}, "annotated[0].bbox"),
        ({"annotated": [{"bbox": [1, 2, -3, 4]}]}, "annotated[0].bbox"),
        ({"annotated": [{"bbox": [1, 2, 3, 4], "segmentation": [["a"]]}]}, "annotated[0].segm"),
        ({"ignore": {}}, "ignore"),
        ({"ignore": [[1, 2, 3, 4]]}, "ignore[0]"),
        ({"ignore": [{"bbox": [1, 2, 3, 4]}]}, "ignore[0].desc"),
        ({"ignore": [{"bbox": [1, 2, 3, 4], "desc": "cat", "iscrowd": 2}]}, "ignore[0].iscrowd"),
    ],
)
def test_what_is_kept_of_annotations_is_checked(changes: dict[str, Any], field: str) -> None:
    error = refusal(row(**changes))
    assert error.field.startswith(field)
    assert "import the annotations again" in error.remedy


@pytest.mark.parametrize("on_disk", ["NFC", "NFD"])
def test_a_name_in_another_unicode_normalisation_is_told_with_the_one_that_is_there(
    tmp_path: Path, on_disk: str
) -> None:
    name = unicodedata.normalize(on_disk, "kürbis.png")
    Image.new("RGB", (2, 2)).save(tmp_path / name)
    written = unicodedata.normalize({"NFC": "NFD", "NFD": "NFC"}[on_disk], name)
    with pytest.raises(RecordError) as caught:
        load_record(row(images=[written]), root=tmp_path)
    assert "Unicode normalisation" in caught.value.problem
    assert ascii(name) in caught.value.problem
