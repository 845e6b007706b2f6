from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from launch.coco.__main__ import main
from learner.image_files import image_size
from shared.dataset import Dataset, load_dataset

CATEGORIES = [
    {"id": 3, "name": "cat", "supercategory": "animal"},
    {"id": 1, "name": "größe 猫"},
    {"id": 9, "name": "never used"},
]
SQUARE = [10, 20, 40, 20, 40, 60, 10, 60]


def annotation(image_id: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "id": 0,
        "image_id": image_id,
        "category_id": 3,
        "bbox": [10, 20, 30, 40],
        "iscrowd": 0,
        "segmentation": [SQUARE],
        "area": 1200,
        **changes,
    }


class Source:
    """COCO files in a folder: `annotations.json` and `pictures/`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.content: dict[str, Any] = {
            "info": {"year": 2017},
            "licenses": [],
            "images": [],
            "annotations": [],
            "categories": deepcopy(CATEGORIES),
        }
        (folder / "pictures" / "deep").mkdir(parents=True)

    def image(
        self,
        id: int,
        *annotations: dict[str, Any],
        name: str | None = None,
        width: int = 100,
        height: int = 80,
        **entry: Any,
    ) -> Source:
        name = name or f"{id:06d}.png"
        Image.new("RGB", (width, height), (id % 256, 0, 0)).save(self.folder / "pictures" / name)
        self.content["images"].append(
            {"id": id, "file_name": name, "width": width, "height": height, "license": 1, **entry}
        )
        self.content["annotations"] += annotations
        return self

    def arguments(self, **options: str) -> list[str]:
        (self.folder / "annotations.json").write_text(json.dumps(self.content))
        given = {
            "annotations": self.folder / "annotations.json",
            "images": self.folder / "pictures",
            "out": self.folder / "out" / "train.jsonl",
            **options,
        }
        return [f"{key}={value}" for key, value in given.items()]

    def convert(self, **options: str) -> tuple[Dataset, dict[str, Any]]:
        """The records as a run would load them, and the report."""
        main(["import", *self.arguments(**options)])
        records = self.folder / "out" / "train.jsonl"
        report = json.loads(records.with_suffix(".import.json").read_text())
        objects = report["objects"]
        assert (
            objects["boxes"] + objects["polygons"] + sum(objects["skipped"].values())
            == objects["read"]
            == len(self.content["annotations"])
        )
        assert report["images"]["written"] + sum(report["images"]["skipped"].values()) == len(
            self.content["images"]
        )
        return (
            load_dataset(
                records,
                on_bad_row="error",
                sort_objects=False,
                check_images=True,
                image_size=image_size,
            ),
            report,
        )


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path)


def export(source: Source, predictions: Path, out: Path) -> None:
    categories = source.folder / "out" / "train.categories.json"
    main(["export", f"predictions={predictions}", f"categories={categories}", f"out={out}"])


def refused(source: Source, capsys: pytest.CaptureFixture[str], **options: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["import", *source.arguments(**options)])
    assert caught.value.code == 2
    assert not list(source.folder.glob("out/*")) and not list(source.folder.glob("out/.*"))
    return capsys.readouterr().err


def test_annotations_become_records_that_the_ordinary_loader_reads(source: Source) -> None:
    low = annotation(7, bbox=[0, 50, 99, 29], category_id=1)
    source.image(7, low, annotation(7), name="deep/a.png").image(
        2, annotation(2, bbox=[0.5, 0.5, 10.25, 10.25])
    )
    data, report = source.convert()
    first, second = data
    # 10 / 99 * 999 = 100.9, 40 / 99 * 999 = 403.6; 20 / 79 * 999 = 252.9, 60 / 79 * 999 = 758.7; 50
    # / 79 * 999 = 632.3
    assert [(found.kind, found.bins, found.desc) for found in first.objects] == [
        ("bbox_2d", (100, 252, 404, 759), "cat"),
        ("bbox_2d", (0, 632, 999, 999), "größe 猫"),
    ]
    assert (first.sample_id, first.width, first.height, dict(first.metadata)) == (
        "7",
        100,
        80,
        {"image_id": 7},
    )
    assert second.objects[0].bins == (5, 6, 109, 136)
    assert json.loads((source.folder / "out" / "train.jsonl").read_text().splitlines()[0])[
        "images"
    ] == ["../pictures/deep/a.png"]
    assert report == {
        "images": {"read": 2, "written": 2, "skipped": {}},
        "objects": {
            "read": 3,
            "boxes": 3,
            "polygons": 0,
            "skipped": {},
            "boxes_for_polygons": {},
            "clamped": 0,
            "simplified": 0,
        },
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"iscrowd": 1, "segmentation": {"counts": [1, 2], "size": [80, 100]}}, "crowd"),
        ({"iscrowd": True}, "crowd"),
        ({"bbox": [10, 20, 0, 40]}, "degenerate_box"),
        ({"bbox": [10, 20, 30, -4]}, "degenerate_box"),
        ({"bbox": [99.2, 20, 0.5, 4]}, "degenerate_box"),
        ({"bbox": [100, 20, 30, 40]}, "outside_image"),
        ({"bbox": [10, -40, 30, 40]}, "outside_image"),
        ({"bbox": [1e308, 20, 1e308, 40]}, "outside_image"),
        ({"bbox": [-1e308, 20, 1e307, 40]}, "outside_image"),
        ({"category_id": 4}, "unknown_category"),
        ({"image_id": 4}, "unknown_image"),
    ],
)
def test_what_cannot_be_used_is_counted_by_reason(
    source: Source, changes: dict[str, Any], reason: str
) -> None:
    data, report = source.image(1, annotation(), annotation(**changes)).convert()
    assert len(data[0].objects) == 1 and report["objects"]["skipped"] == {reason: 1}


NO_POLYGON = [
    ({"segmentation": {"counts": "abc", "size": [80, 100]}}, "run_length_code"),
    ({"segmentation": [SQUARE, SQUARE]}, "several_rings"),
    ({"segmentation": []}, "no_polygon"),
    ({"segmentation": None}, "no_polygon"),
    ({"segmentation": [[]]}, "degenerate_polygon"),
    ({"segmentation": [[10, 20, 40, 60]]}, "degenerate_polygon"),
    ({"segmentation": [[10, 20, 20, 20, 30, 20, 40, 20]]}, "degenerate_polygon"),
    ({"segmentation": [[10, 20, 10.01, 20.01, 40, 60]]}, "degenerate_polygon"),
    ({"segmentation": [[10, 90, 30, 90, 30, 99]]}, "degenerate_polygon"),
]


@pytest.mark.parametrize(("changes", "reason"), NO_POLYGON)
def test_without_one_usable_ring_it_is_left_out_or_becomes_its_box(
    source: Source, changes: dict[str, Any], reason: str
) -> None:
    source.image(1, annotation(), annotation(**changes))
    data, report = source.convert(geometry="poly")
    assert [found.kind for found in data[0].objects] == ["poly"] and report["objects"][
        "skipped"
    ] == {reason: 1}
    for file in (source.folder / "out").iterdir():
        file.unlink()
    data, report = source.convert(geometry="auto")
    assert sorted(found.kind for found in data[0].objects) == ["bbox_2d", "poly"]
    assert report["objects"]["skipped"] == {} and report["objects"]["boxes_for_polygons"] == {
        reason: 1
    }


def test_polygons_keep_their_vertices_in_order_each_at_the_nearest_bin(source: Source) -> None:
    data, _ = source.image(1, annotation(segmentation=[[*SQUARE, *SQUARE[:2]]])).convert(
        geometry="poly"
    )
    assert data[0].objects[0].bins == (101, 253, 404, 253, 404, 759, 101, 759)


def test_shapes_that_reach_beyond_their_image_are_clamped_and_counted(source: Source) -> None:
    beyond = annotation(bbox=[-5, 20, 30, 90], segmentation=[[-5, 20, 25, 20, 25, 110]])
    at_the_border = annotation(bbox=[0, 0, 100, 80], segmentation=[[0, 0, 100, 0, 100, 80]])
    data, report = source.image(1, beyond, at_the_border).convert(geometry="poly")
    assert report["objects"]["clamped"] == 1
    assert [found.bins for found in data[0].objects] == [
        (0, 0, 999, 0, 999, 999),
        (0, 253, 252, 253, 252, 999),
    ]


def test_numbers_as_large_as_can_be_are_clamped_too(source: Source) -> None:
    huge = annotation(bbox=[0, 0, 1e308, 1e308], segmentation=[[0, 0, 1e308, 0, 1e308, 1e308]])
    data, report = source.image(
        1, huge, annotation(bbox=[-1e308, -1e308, 1.7e308, 1.7e308], segmentation=[])
    ).convert(geometry="auto")
    assert {found.bins for found in data[0].objects} == {
        (0, 0, 999, 0, 999, 999),
        (0, 0, 999, 999),
    } and report["objects"]["clamped"] == 2


def test_polygons_of_many_vertices_are_simplified_on_demand(source: Source) -> None:
    ring = [10, 20, 25, 19, 40, 20, 40, 60, 25, 60, 10, 60]
    data, report = source.image(1, annotation(segmentation=[ring]), annotation()).convert(
        geometry="poly", max_vertices="4"
    )
    assert {found.bins for found in data[0].objects} == {
        (101, 253, 404, 253, 404, 759, 101, 759)
    } and report["objects"]["simplified"] == 1


def test_images_that_cannot_be_used_are_counted_with_all_their_annotations(source: Source) -> None:
    source.image(1, annotation())
    source.image(2, annotation(2), annotation(2)).image(3, annotation(3)).image(
        4, annotation(4)
    ).image(5, annotation(5), height=1).image(6)
    source.image(8, annotation(8, iscrowd=1))
    (source.folder / "pictures" / "000002.png").unlink()
    (source.folder / "pictures" / "000003.png").write_bytes(
        (source.folder / "pictures" / "000003.png").read_bytes()[:40]
    )
    source.content["images"][3]["width"] = 90
    data, report = source.convert()
    assert [sample.sample_id for sample in data] == ["1"]
    assert report["images"]["skipped"] == {
        "missing_file": 1,
        "unreadable": 1,
        "size_mismatch": 1,
        "axis_of_one_pixel": 1,
        "no_objects": 2,
    }
    assert report["objects"]["skipped"] == {"image_skipped": 5, "crowd": 1}


def test_images_without_objects_are_kept_on_demand_and_images_with_too_many_left_out(
    source: Source,
) -> None:
    source.image(1).image(2, annotation(2), annotation(2), annotation(2)).image(
        3, annotation(3), annotation(3)
    )
    data, report = source.convert(keep_empty="true", max_objects="2")
    assert [len(sample.objects) for sample in data] == [0, 2]
    assert report["images"]["skipped"] == {"too_many_objects": 1} and report["objects"][
        "skipped"
    ] == {"image_skipped": 3}


def test_the_same_files_give_the_same_bytes(source: Source) -> None:
    source.image(1, annotation(), annotation(bbox=[1, 1, 9, 9])).image(2, annotation(2))
    source.convert(geometry="auto")
    first = {file.name: file.read_bytes() for file in (source.folder / "out").iterdir()}
    main(["import", *source.arguments(geometry="auto", out=str(source.folder / "again"))])
    again = {
        file.name.replace("annotations", "train"): file.read_bytes()
        for file in (source.folder / "again").iterdir()
    }
    assert first == again and sorted(first) == [
        "train.categories.json",
        "train.import.json",
        "train.jsonl",
    ]


@pytest.mark.slow
def test_nothing_is_overwritten(source: Source, capsys: pytest.CaptureFixture[str]) -> None:
    source.image(1, annotation()).convert()
    before = (source.folder / "out" / "train.jsonl").read_bytes()
    with pytest.raises(SystemExit):
        main(["import", *source.arguments(geometry="poly")])
    assert (
        "train.jsonl" in (error := capsys.readouterr().err)
        and "exists; choose another name or remove it" in error
    )
    assert (source.folder / "out" / "train.jsonl").read_bytes() == before


def test_the_counts_are_printed(source: Source, capsys: pytest.CaptureFixture[str]) -> None:
    source.image(
        1, annotation(), annotation(iscrowd=1), annotation(iscrowd=1), annotation(category_id=4)
    ).image(2).convert()
    printed = capsys.readouterr().out
    assert "1 of 2 written; skipped: no_objects 1" in printed
    assert (
        "1 boxes and 0 polygons of 4 annotations; skipped: crowd 2, unknown_category 1" in printed
    )


REMOVED = object()


def spoil(content: Any, path: str, value: Any) -> None:
    """Set the value at a path such as `images.0.width`, append it at `images.+`, or remove it."""
    *parents, last = (int(key) if key.isdigit() else key for key in path.split("."))
    for key in parents:
        content = content[key]
    if value is REMOVED:
        del content[last]
    elif last == "+":
        content.append(value)
    else:
        content[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("images", REMOVED, "annotations.json: images: field required"),
        ("annotations.0.bbox", REMOVED, "annotations[0].bbox: field required"),
        ("annotations.0.bbox", [1, 2, 3], "annotations[0].bbox: list should have at least 4 items"),
        (
            "annotations.0.bbox",
            [1, 2, "3", 4],
            "annotations[0].bbox[2]: input should be a valid number, got '3'",
        ),
        (
            "annotations.0.bbox",
            [1, 2, float("nan"), 4],
            "annotations[0].bbox[2]: input should be a finite number",
        ),
        ("annotations.0.bbox", [1, 2, 10**400, 4], "annotations[0].bbox[2]: input should be a"),
        (
            "annotations.0.segmentation",
            [[1, 2, 3, 4, 5, 6, 7]],
            "annotations[0].segmentation: a ring must",
        ),
        (
            "annotations.0.segmentation",
            SQUARE,
            "annotations[0].segmentation[0]: input should be a valid array, got 10",
        ),
        ("images.0.width", 0, "images[0].width: input should be greater than 0"),
        ("images.0.width", 10**400, "images[0].width: input should be less than 2147483648"),
        (
            "images.+",
            {"id": 1, "file_name": "1.png", "width": 2, "height": 2},
            "images[1].id: is 1, as images[0].id is",
        ),
        ("categories.+", {"id": 3, "name": "x"}, "categories[3].id: is 3, as categories[0].id is"),
        ("categories.0.name", " ", "categories[0].name: is ' ', which cannot be an object's desc"),
        (
            "categories.0.name",
            "a <|coord_3|>",
            "categories[0].name: is 'a <|coord_3|>', which cannot be an object's desc",
        ),
        (
            "categories.0.name",
            "<|im_end|>",
            "categories[0].name: is '<|im_end|>', which cannot be an object's desc",
        ),
        (
            "images.0.file_name",
            "elsewhere.png",
            "(missing_file: first {pictures}/elsewhere.png); correct images=... or",
        ),
        ("annotations", [], "gives no record; images skipped: no_objects 1"),
    ],
)
def test_malformed_annotations_are_refused_with_their_place(
    source: Source, capsys: pytest.CaptureFixture[str], path: str, value: Any, message: str
) -> None:
    source.image(1, annotation())
    spoil(source.content, path, value)
    assert message.replace("{pictures}", str(source.folder / "pictures")) in refused(source, capsys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1 column 1"),
        ("", "line 1 column 0"),
        ('{"images": "\udcff"}', "file: invalid JSON"),
    ],
)
def test_a_file_that_is_no_json_is_refused_with_line_and_column(
    source: Source, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    broken = source.folder / "broken.json"
    broken.write_bytes(text.encode(errors="surrogateescape"))
    error = refused(source, capsys, annotations=str(broken))
    assert str(broken) in error and message in error


def test_two_categories_of_one_name_are_refused_only_where_both_are_in_use(
    source: Source, capsys: pytest.CaptureFixture[str]
) -> None:
    source.content["categories"].insert(0, {"id": 0, "name": "cat"})
    source.image(1, annotation()).convert()
    assert [
        entry["id"]
        for entry in json.loads((source.folder / "out" / "train.categories.json").read_text())
    ] == [3, 1, 9]
    for file in (source.folder / "out").iterdir():
        file.unlink()
    source.image(2, annotation(2, category_id=0))
    assert (
        "categories[1].name: is 'cat', as that of categories[0] is, and both are in use; rename one"
        in refused(source, capsys)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"geometry": "polygons"}, "geometry: must be one of bbox, poly, auto"),
        ({"max_objects": "many"}, "max_objects: must be an integer"),
        ({"max_vertices": "2"}, "max_vertices: must be at least 3"),
        ({"images": "/nowhere/at/all"}, "images: /nowhere/at/all is not a folder"),
        (
            {"annotations": "/nowhere/at/all.json"},
            (
                "/nowhere/at/all.json: file: cannot be read: No such file or directory; correct the"
                " path"
            ),
        ),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    source: Source, capsys: pytest.CaptureFixture[str], options: dict[str, str], message: str
) -> None:
    assert message in refused(source.image(1, annotation()), capsys, **options)


def predictions_of(data: Dataset, path: Path, *extra: dict[str, Any]) -> Path:
    """What an evaluation writes where the model found exactly the ground truth (and `extra`, on the
    first image).
    """
    rows = [
        {
            "sample_id": sample.sample_id,
            "width": sample.width,
            "height": sample.height,
            "metadata": dict(sample.metadata),
            "objects": [
                {"kind": found.kind, "bins": found.bins, "desc": found.desc, "score": 0.75}
                for found in sample.objects
            ],
        }
        for sample in data
    ]
    rows[0]["objects"] += extra
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_there_and_back_everything_is_within_one_bin(
    source: Source, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        annotation(12),
        annotation(
            12,
            category_id=1,
            bbox=[50.5, 3.25, 20, 30],
            segmentation=[[50.5, 3.25, 70.5, 3.25, 60, 33.25]],
        ),
    ]
    data, _ = source.image(12, *given).convert(geometry="auto")
    stray = {"kind": "bbox_2d", "bins": [1, 2, 3, 4], "desc": "unicorn", "score": 1.0}
    predictions = predictions_of(data, source.folder / "predictions.jsonl", stray)
    out = source.folder / "results.json"
    export(source, predictions, out)
    results = json.loads(out.read_text())
    assert (
        "2 objects" in (printed := capsys.readouterr().out)
        and "skipped   1 objects of no category: unicorn 1" in printed
    )
    for result in results:
        (original,) = [one for one in given if one["category_id"] == result["category_id"]]
        assert (result["image_id"], result["score"]) == (12, 0.75)
        # A bin is 99 / 999 of a pixel at most, on a picture of 100 x 80.
        assert result["bbox"] == pytest.approx(original["bbox"], abs=0.1)
        assert result["segmentation"][0] == pytest.approx(original["segmentation"][0], abs=0.1)


@pytest.mark.parametrize("kind", ["bbox", "segm"])
def test_pycocotools_scores_perfect_predictions_perfect_against_the_original_annotations(
    source: Source, kind: str
) -> None:
    shapes = [
        ([0, 0, 50, 80], [0, 0, 50, 0, 50, 80, 0, 80]),
        ([60, 10, 40, 30], [60, 10, 100, 10, 100, 40]),
        ([52, 50, 40, 25], [52, 75, 92, 75, 72, 50]),
    ]
    for image_id in (5, 6):
        given = [
            annotation(
                image_id, id=10 * image_id + i, category_id=(3, 1)[i % 2], bbox=b, segmentation=[s]
            )
            for i, (b, s) in enumerate(shapes, 1)
        ]
        source.image(image_id, *[{**one, "area": one["bbox"][2] * one["bbox"][3]} for one in given])
    data, _ = source.convert(geometry="poly")
    predictions = predictions_of(data, source.folder / "predictions.jsonl")
    out = source.folder / "results.json"
    export(source, predictions, out)
    truth = COCO(source.folder / "annotations.json")
    scored = COCOeval(truth, truth.loadRes(str(out)), kind)
    scored.params.iouThrs = np.array([0.5, 0.9])
    scored.evaluate()
    scored.accumulate()
    precision = scored.eval["precision"][:, :, :, 0, -1]
    assert (precision[precision > -1] == 1).all() and (precision[:, :, :2] == 1).all()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("metadata.image_id", REMOVED, "field required; only an evaluation of data that"),
        ("metadata.image_id", "a7", "input should be a valid integer, got 'a7'; only an"),
        ("objects.0.score", REMOVED, "field required"),
    ],
)
def test_malformed_predictions_are_refused_with_line_and_field(
    source: Source, capsys: pytest.CaptureFixture[str], path: str, value: Any, message: str
) -> None:
    data, _ = source.image(1, annotation()).convert()
    predictions = predictions_of(data, source.folder / "predictions.jsonl")
    row = json.loads(predictions.read_text())
    spoil(row, path, value)
    predictions.write_text(json.dumps(row) + "\n")
    out = source.folder / "results.json"
    with pytest.raises(SystemExit):
        export(source, predictions, out)
    field = path.replace(".0.", "[0].")
    assert f"predictions.jsonl:1: {field}: {message}" in capsys.readouterr().err
    assert not out.exists()


def test_an_image_predicted_twice_is_refused(
    source: Source, capsys: pytest.CaptureFixture[str]
) -> None:
    data, _ = source.image(1, annotation()).convert()
    path = predictions_of(data, source.folder / "predictions.jsonl")
    path.write_text(path.read_text() * 2)
    with pytest.raises(SystemExit):
        export(source, path, source.folder / "r.json")
    assert (
        "predictions.jsonl:2: metadata.image_id: 1 occurs twice; keep one row per image"
        in capsys.readouterr().err
    )
