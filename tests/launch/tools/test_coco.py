"""`rollmatch coco`: annotations become records, and predictions COCO's results."""

from __future__ import annotations

import json
import re
import shutil
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from import_support import imported, prediction
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from small_tokenizers import byte_level_bpe, rex_codec, small_codecs

from launch.reports.coco_ap import IouType, coco_scores
from launch.tools.coco import main
from shared.dataset import Dataset
from shared.grounding.coco import ScoredObject
from shared.grounding.evaluation import Scene, summarise
from shared.grounding.formats import FORMATS
from shared.grounding.json_list import PictureResize
from shared.grounding.parsing import parse_rollout
from shared.records import GeometryKind, Sample

CATEGORIES = [
    {"id": 3, "name": "cat", "supercategory": "animal"},
    {"id": 1, "name": "größe 猫"},
    {"id": 9, "name": "never used"},
]
SQUARE = [10, 20, 40, 20, 40, 60, 10, 60]
SQUARE_BINS = (101, 253, 404, 253, 404, 759, 101, 759)


def annotation(image_id: int = 1, **changes: Any) -> dict[str, Any]:
    entry = {
        "id": 0,
        "image_id": image_id,
        "category_id": 3,
        "bbox": [10, 20, 30, 40],
        "iscrowd": 0,
        "segmentation": [SQUARE],
        "area": 1200,
    }
    return entry | changes


class Source:
    """COCO files in a folder: `annotations.json` and `pictures/`."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.pictures = folder / "pictures"
        (self.pictures / "deep").mkdir(parents=True)
        self.content: dict[str, Any] = {
            "info": {"year": 2017},
            "licenses": [],
            "images": [],
            "annotations": [],
            "categories": deepcopy(CATEGORIES),
        }
        self._capsys = capsys

    def image(
        self,
        id: int,
        *annotations: dict[str, Any],
        name: str | None = None,
        width: int = 100,
        height: int = 80,
    ) -> Source:
        name = name or f"{id:06d}.png"
        Image.new("RGB", (width, height), (id % 256, 0, 0)).save(self.pictures / name)
        entry = {"id": id, "file_name": name, "width": width, "height": height, "license": 1}
        self.content["images"].append(entry)
        self.content["annotations"] += annotations
        return self

    def run_import(self, **options: str) -> None:
        (self.folder / "annotations.json").write_text(json.dumps(self.content))
        arguments = {
            "annotations": self.folder / "annotations.json",
            "images": self.pictures,
            "out": self.out / "train.jsonl",
            **options,
        }
        main(["import", *(f"{key}={value}" for key, value in arguments.items())])

    def convert(self, **options: str) -> tuple[Dataset, dict[str, Any]]:
        """Import anew; return the records as a run would load them, and the report."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.run_import(**options)
        data, report = imported(self.out / "train.jsonl")
        assert report["objects"]["read"] == len(self.content["annotations"])
        assert report["images"]["read"] == len(self.content["images"])
        return data, report

    def refused(self, **options: str) -> str:
        """Import what cannot be imported; return the message."""
        shutil.rmtree(self.out, ignore_errors=True)
        with pytest.raises(SystemExit) as caught:
            self.run_import(**options)
        assert caught.value.code == 2
        assert not self.out.exists() or list(self.out.iterdir()) == []
        return self._capsys.readouterr().err

    def predict(self, data: Dataset, *extra: dict[str, Any]) -> Path:
        """Write what an evaluation does of a model that finds exactly the ground truth.

        `extra` are further objects on the first image.
        """
        first, *others = data
        rows = [prediction(first, *extra), *map(prediction, others)]
        path = self.folder / "predictions.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def export(self) -> Path:
        results = self.folder / "results.json"
        predictions = self.folder / "predictions.jsonl"
        categories = self.out / "train.categories.json"
        main(["export", f"predictions={predictions}", f"categories={categories}", f"out={results}"])
        return results

    def refused_export(self) -> str:
        with pytest.raises(SystemExit):
            self.export()
        assert not (self.folder / "results.json").exists()
        return self._capsys.readouterr().err


@pytest.fixture
def source(tmp_path, capsys):
    return Source(tmp_path, capsys)


def test_annotations_become_records_that_the_ordinary_loader_reads(source):
    low = annotation(7, bbox=[0, 50, 99, 29], category_id=1)
    source.image(7, low, annotation(7), name="deep/a.png")
    source.image(2, annotation(2, bbox=[0.5, 0.5, 10.25, 10.25]))
    (first, second), report = source.convert()
    # 10 / 99 * 999 = 100.9, 40 / 99 * 999 = 403.6; 20 / 79 * 999 = 252.9, 60 / 79 * 999 = 758.7;
    # 50 / 79 * 999 = 632.3
    assert [(found.kind, found.bins, found.desc) for found in first.objects] == [
        ("bbox_2d", (100, 252, 404, 759), "cat"),
        ("bbox_2d", (0, 632, 999, 999), "größe 猫"),
    ]
    assert (first.sample_id, first.width, first.height) == ("7", 100, 80)
    assert dict(first.metadata) == {"image_id": 7}
    assert second.objects[0].bins == (5, 6, 109, 136)
    row = json.loads((source.out / "train.jsonl").read_text().splitlines()[0])
    assert row["images"] == ["../pictures/deep/a.png"]
    objects = {"read": 3, "boxes": 3, "polygons": 0, "skipped": {}, "boxes_for_polygons": {}}
    assert report == {
        "images": {"read": 2, "written": 2, "skipped": {}, "turned_by_exif": 0, "repeated": 0},
        "no_coco_results": None,
        "objects": {
            **objects,
            "clamped": 0,
            "simplified": 0,
            "turned_boxes": 0,
            "one_pixel": 0,
            "repeated": 0,
            "unknown_keys": {},
            "ignored": 0,
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
def test_what_cannot_be_used_is_counted_by_reason(source, changes, reason):
    data, report = source.image(1, annotation(), annotation(**changes)).convert()
    assert len(data[0].objects) == 1
    assert report["objects"]["skipped"] == {reason: 1}


@pytest.mark.parametrize(
    ("segmentation", "reason"),
    [
        ({"counts": "abc", "size": [80, 100]}, "run_length_code"),
        ([SQUARE, SQUARE], "several_rings"),
        ([], "no_polygon"),
        (None, "no_polygon"),
        ([[]], "degenerate_polygon"),
        ([[10, 20, 40, 60]], "degenerate_polygon"),
        ([[10, 20, 20, 20, 30, 20, 40, 20]], "degenerate_polygon"),
        ([[10, 20, 10.01, 20.01, 40, 60]], "degenerate_polygon"),
        ([[10, 90, 30, 90, 30, 99]], "degenerate_polygon"),
    ],
)
def test_without_one_usable_ring_it_is_left_out_or_becomes_its_box(source, segmentation, reason):
    source.image(1, annotation(), annotation(segmentation=segmentation))
    data, report = source.convert(geometry="poly")
    assert [found.kind for found in data[0].objects] == ["poly"]
    assert report["objects"]["skipped"] == {reason: 1}
    data, report = source.convert(geometry="auto")
    assert sorted(found.kind for found in data[0].objects) == ["bbox_2d", "poly"]
    assert report["objects"]["skipped"] == {}
    assert report["objects"]["boxes_for_polygons"] == {reason: 1}


BEYOND = {"bbox": [-5, 20, 30, 90], "segmentation": [[-5, 20, 25, 20, 25, 110]]}
AT_THE_BORDER = {"bbox": [0, 0, 100, 80], "segmentation": [[0, 0, 100, 0, 100, 80]]}
HUGE = {"bbox": [0, 0, 1e308, 1e308], "segmentation": [[0, 0, 1e308, 0, 1e308, 1e308]]}
HUGE_BOX = {"bbox": [-1e308, -1e308, 1.7e308, 1.7e308], "segmentation": []}


@pytest.mark.parametrize(
    ("shapes", "bins", "num_clamped"),
    [
        ([BEYOND, AT_THE_BORDER], {(0, 0, 999, 0, 999, 999), (0, 253, 252, 253, 252, 999)}, 1),
        ([HUGE, HUGE_BOX], {(0, 0, 999, 0, 999, 999), (0, 0, 999, 999)}, 2),
    ],
    ids=["a little", "as far as numbers go"],
)
def test_shapes_that_reach_beyond_their_image_are_clamped_and_counted(
    source, shapes, bins, num_clamped
):
    source.image(1, *(annotation(**shape) for shape in shapes))
    data, report = source.convert(geometry="auto")
    assert {found.bins for found in data[0].objects} == bins
    assert report["objects"]["clamped"] == num_clamped


@pytest.mark.parametrize(
    ("ring", "options", "num_simplified"),
    [
        ([*SQUARE, *SQUARE[:2]], {}, 0),
        ([10, 20, 25, 19, 40, 20, 40, 60, 25, 60, 10, 60], {"max_vertices": "4"}, 1),
    ],
    ids=["each vertex at its nearest bin", "fewer vertices on demand"],
)
def test_polygons_keep_their_vertices_in_order(source, ring, options, num_simplified):
    source.image(1, annotation(segmentation=[ring]), annotation())
    data, report = source.convert(geometry="poly", **options)
    assert {found.bins for found in data[0].objects} == {SQUARE_BINS}
    assert report["objects"]["simplified"] == num_simplified


def test_images_that_cannot_be_used_are_counted_with_all_their_annotations(source):
    source.image(1, annotation()).image(2, annotation(2), annotation(2)).image(3, annotation(3))
    source.image(4, annotation(4)).image(5, annotation(5), height=1).image(6)
    source.image(8, annotation(8, iscrowd=1))
    (source.pictures / "000002.png").unlink()
    cut = source.pictures / "000003.png"
    cut.write_bytes(cut.read_bytes()[:40])
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


def test_images_without_objects_are_kept_on_demand_and_images_with_too_many_left_out(source):
    source.image(1).image(2, *[annotation(2)] * 3).image(3, *[annotation(3)] * 2)
    data, report = source.convert(keep_empty="true", max_objects="2")
    assert [len(sample.objects) for sample in data] == [0, 2]
    assert report["images"]["skipped"] == {"too_many_objects": 1}
    assert report["objects"]["skipped"] == {"image_skipped": 3}


def test_the_same_files_give_the_same_bytes(source):
    source.image(1, annotation(), annotation(bbox=[1, 1, 9, 9])).image(2, annotation(2))
    source.convert(geometry="auto")
    first = {file.name: file.read_bytes() for file in source.out.iterdir()}
    assert sorted(first) == ["train.categories.json", "train.import.json", "train.jsonl"]
    again = source.folder / "again"
    source.run_import(geometry="auto", out=str(again))
    assert first == {
        file.name.replace("annotations", "train"): file.read_bytes() for file in again.iterdir()
    }


@pytest.mark.slow
def test_nothing_is_overwritten(source, capsys):
    source.image(1, annotation()).convert()
    before = (source.out / "train.jsonl").read_bytes()
    with pytest.raises(SystemExit):
        source.run_import(geometry="poly")
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(r"out: .*train\.jsonl.* exists; .*remove ", error)
    assert (source.out / "train.jsonl").read_bytes() == before


def test_the_counts_are_printed(source, capsys):
    crowd = annotation(iscrowd=1)
    source.image(1, annotation(), crowd, crowd, annotation(category_id=4)).image(2).convert()
    printed = capsys.readouterr().out
    assert "1 of 2 written; skipped: no_objects 1" in printed
    skipped = "crowd 2, unknown_category 1"
    assert f"1 boxes and 0 polygons of 4 annotations; skipped: {skipped}" in printed


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


TWICE = {"id": 1, "file_name": "1.png", "width": 2, "height": 2}
BBOX = "annotations.0.bbox"
RINGS = "annotations.0.segmentation"
NAME = "categories.0.name"
FILE = "images.0.file_name"
NO_DESC = "which cannot be an object's desc"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("images", REMOVED, "annotations.json: images: field required"),
        (BBOX, REMOVED, "annotations[0].bbox: field required"),
        (BBOX, [1, 2, 3], "annotations[0].bbox: list should have at least 4 items"),
        (BBOX, [1, 2, "3", 4], "[0].bbox[2]: input should be a valid number, got '3'"),
        (BBOX, [1, 2, float("nan"), 4], "[0].bbox[2]: input should be a finite number"),
        (BBOX, [1, 2, 10**400, 4], "annotations[0].bbox[2]: input should be a"),
        (RINGS, [[1, 2, 3, 4, 5, 6, 7]], "annotations[0].segmentation: a ring must"),
        (RINGS, SQUARE, "segmentation[0]: input should be a valid list, got 10"),
        ("images.0.width", 0, "images[0].width: input should be greater than 0"),
        ("images.0.width", 10**400, "images[0].width: input should be less than 2147483648"),
        ("images.+", TWICE, "images[1].id: is 1, like images[0].id"),
        ("categories.+", {"id": 3, "name": "x"}, "categories[3].id: is 3, like categories[0].id"),
        (NAME, " ", f"categories[0].name: is ' ', {NO_DESC}"),
        (NAME, "a <|coord_3|>", f"categories[0].name: is 'a <|coord_3|>', {NO_DESC}"),
        (NAME, "<|im_end|>", f"categories[0].name: is '<|im_end|>', {NO_DESC}"),
        (
            FILE,
            "no.png",
            "(missing_file: first {pictures}/no.png (sample 1)); correct images=... or",
        ),
        ("annotations", [], "gives no record; images skipped: no_objects 1"),
    ],
)
def test_malformed_annotations_are_refused_with_their_place(source, path, value, message):
    source.image(1, annotation())
    spoil(source.content, path, value)
    assert message.replace("{pictures}", str(source.pictures)) in source.refused()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "line 1 column 1"),
        (b"", "line 1 column 0"),
        (b'{"images": "\xff"}', "file: invalid JSON"),
    ],
)
def test_a_file_that_is_no_json_is_refused_with_line_and_column(source, content, message):
    broken = source.folder / "broken.json"
    broken.write_bytes(content)
    error = source.refused(annotations=str(broken))
    assert str(broken) in error
    assert message in error


def test_two_categories_of_one_name_are_refused_only_where_both_are_in_use(source):
    source.content["categories"].insert(0, {"id": 0, "name": "cat"})
    source.image(1, annotation()).convert()
    categories = json.loads((source.out / "train.categories.json").read_text())
    assert [entry["id"] for entry in categories] == [3, 1, 9]
    error = source.image(2, annotation(2, category_id=0)).refused()
    problem = "is 'cat', like categories[0].name, and both are in use; rename one"
    assert f"categories[1].name: {problem}" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"geometry": "polygons"}, "geometry: must be one of bbox, poly, auto"),
        ({"max_objects": "many"}, "max_objects: must be an integer"),
        ({"max_vertices": "2"}, "max_vertices: must be at least 3"),
        ({"images": "/nowhere/at/all"}, "images: /nowhere/at/all is not a folder"),
        ({"annotations": "/no.json"}, "/no.json: file: cannot be read: No such file or directory"),
    ],
)
def test_wrong_arguments_are_refused_by_name(source, options, message):
    assert message in source.image(1, annotation()).refused(**options)


def test_there_and_back_everything_is_within_one_bin(source, capsys):
    ring = [50.5, 3.25, 70.5, 3.25, 60, 33.25]
    originals = {
        3: annotation(12),
        1: annotation(12, category_id=1, bbox=[50.5, 3.25, 20, 30], segmentation=[ring]),
    }
    data, _ = source.image(12, *originals.values()).convert(geometry="auto")
    source.predict(data, {"kind": "bbox_2d", "bins": [1, 2, 3, 4], "desc": "unicorn", "score": 1.0})
    results = json.loads(source.export().read_text())
    printed = capsys.readouterr().out
    assert "2 objects" in printed
    assert "skipped   1 objects without a category: unicorn 1" in printed
    assert {result["category_id"] for result in results} == {1, 3}
    for result in results:
        original = originals[result["category_id"]]
        assert (result["image_id"], result["score"]) == (12, 0.75)
        # A bin is 99 / 999 of a pixel at most, on a picture of 100 x 80.
        assert result["bbox"] == pytest.approx(original["bbox"], abs=0.1)
        assert result["segmentation"][0] == pytest.approx(original["segmentation"][0], abs=0.1)


def test_the_annotations_own_boxes_stay_with_the_objects_they_became(source):
    low = annotation(7, bbox=[0.25, 50.5, 99, 29], category_id=1, segmentation=[])
    data, _ = source.image(7, low, annotation(7)).convert(geometry="auto")
    (sample,) = data
    # In reading order, as the objects are.
    assert [one.box for one in sample.annotated] == [(10, 20, 30, 40), (0.25, 50.5, 99, 29)]
    assert sample.annotated[0].segmentation == [SQUARE]
    assert sample.ignore == ()


@pytest.mark.parametrize("size", [{"width": 100.0, "height": 80.0}, {"width": None}, {}])
def test_an_images_size_may_be_a_float_or_left_out(source, size):
    source.image(7, annotation(7, bbox=[10, 20, 30, 40]))
    (entry,) = source.content["images"]
    del entry["width"], entry["height"]
    entry |= size
    data, _ = source.convert()
    assert (data[0].width, data[0].height) == (100, 80)
    assert data[0].objects[0].bins == (100, 252, 404, 759)


def test_crowds_are_regions_to_ignore_or_objects_if_the_user_says_so(source, capsys):
    mask = {"counts": [80, 80, 7840], "size": [80, 100]}
    crowd = annotation(7, iscrowd=1, bbox=[5, 0, 90, 40], segmentation=mask)
    source.image(7, annotation(7), crowd)
    data, report = source.convert()
    (region,) = data[0].ignore
    assert (region.desc, region.is_crowd, region.annotation.box) == ("cat", True, (5, 0, 90, 40))
    assert region.annotation.segmentation == mask
    assert (len(data[0].objects), report["objects"]["ignored"]) == (1, 1)
    assert "set crowds=objects" in capsys.readouterr().out
    data, report = source.convert(crowds="objects")
    assert [one.box for one in data[0].annotated] == [(5, 0, 90, 40), (10, 20, 30, 40)]
    assert (data[0].ignore, report["objects"]["skipped"]) == ((), {})
    assert "set crowds=objects" not in capsys.readouterr().out


def answers(rng: np.random.Generator, sample: Sample, name: str, resize: PictureResize) -> str:
    """Write a model's answer near the truth, in the numbers of a format."""
    sides = np.array([sample.width, sample.height] * 2)
    most = {"qwen3_vl": 1000 * np.ones(4)}.get(name, 999 * np.ones(4))
    if name == "qwen2_5_vl":
        most = np.array([*resize.size_of(sample.width, sample.height)] * 2)
    shapes = []
    regions = [region.annotation.box for region in sample.ignore]
    names = [*(one.desc for one in sample.objects), *("cat" for _ in regions)]
    for (x, y, w, h), desc in zip(
        [*(one.box for one in sample.annotated), *regions], names, strict=True
    ):
        corners = np.array([x, y, x + w, y + h]) + rng.normal(0, 0.02, 4) * [w, h, w, h]
        shapes.append((np.rint(corners.clip(0, sides) / sides * most).astype(int).tolist(), desc))
    if name.startswith("qwen"):
        return json.dumps([{"bbox_2d": box, "label": desc} for box, desc in shapes])
    if name == "coord_tokens":
        entries = {
            f"object_{i}": {"desc": desc, "bbox_2d": [f"<|coord_{bin}|>" for bin in box]}
            for i, (box, desc) in enumerate(shapes, 1)
        }
        return json.dumps(entries, ensure_ascii=False)
    return ", ".join(
        f"<|object_ref_start|>{desc}<|object_ref_end|><|box_start|>"
        + "".join(f"<{bin}>" for bin in box)
        + "<|box_end|>"
        for box, desc in shapes
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["coord_tokens", "qwen3_vl", "qwen2_5_vl", "rex_omni"])
def test_a_report_has_the_figures_of_pycocotools_on_the_original_annotations(source, name):
    """Small boxes, odd sizes and a crowd; the answers as each format writes them."""
    rng = np.random.default_rng(5)
    for image_id in range(1, 13):
        width, height = (int(side) for side in rng.integers(150, 700, 2))
        entries = []
        for number in range(5):
            w, h = rng.uniform(6, 12 if number < 3 else 90, 2)
            box = [rng.uniform(0, width - w), rng.uniform(0, height - h), w, h]
            ids = {"id": 10 * image_id + number, "category_id": int(rng.choice([1, 3]))}
            entries.append(annotation(image_id, **ids, bbox=box, area=w * h, segmentation=[]))
        if image_id % 3 == 0:
            ids = {"id": 10 * image_id + 9, "category_id": 3, "iscrowd": 1}
            entries.append(annotation(image_id, **ids, bbox=[0, 0, 120, 120], area=1.0))
        source.image(image_id, *entries, width=width, height=height)
    data, report = source.convert()
    assert report["objects"]["ignored"] == 4
    resize = PictureResize(28, 56 * 56, 28 * 28 * 1280)
    answer_format = FORMATS[name].for_pictures(resize)
    codec = rex_codec(byte_level_bpe()) if name == "rex_omni" else small_codecs()["gpt2 words"]
    scenes = []
    for position, sample in enumerate(data):
        of_sample = answer_format.of(sample)
        text = answers(rng, sample, name, resize)
        found = parse_rollout(
            codec.encode(text),
            codec,
            geometry=frozenset({GeometryKind.BBOX}),
            answer_format=of_sample,
        ).objects
        objects = tuple(
            ScoredObject(one.kind, one.bins, one.desc, rng.uniform(), of_sample.pixels(one, sample))
            for one in found
        )
        assert len(objects) == len(sample.objects) + len(sample.ignore)
        scenes.append(Scene(position, sample, objects, (), truncated=False))
    rows = [
        {
            "width": scene.sample.width,
            "height": scene.sample.height,
            "metadata": dict(scene.sample.metadata),
            "objects": [asdict(found) for found in scene.objects],
        }
        for scene in scenes
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (source.folder / "predictions.jsonl").write_text(lines)
    truth = COCO(source.folder / "annotations.json")
    theirs = COCOeval(truth, truth.loadRes(str(source.export())), "bbox")
    theirs.evaluate()
    theirs.accumulate()
    theirs.summarize()
    ours = coco_scores(scenes).by_class[IouType.BBOX]
    assert [ours.ap, ours.ap50, ours.ap75, ours.ar] == pytest.approx(
        [*theirs.stats[:3], theirs.stats[8]], abs=1e-9
    )
    assert 0.5 < ours.ap < 1
    # Neither right nor wrong: what was found in the crowds is in no figure.
    counts = summarise(scenes, [0.5]).thresholds[0].same_class
    assert (counts.num_ignored, counts.precision, counts.recall) == (4, 1.0, 1.0)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("metadata.image_id", REMOVED, "field required; only evaluations of imported data"),
        ("metadata.image_id", "a7", "input should be a valid integer, got 'a7'; only evaluations"),
        ("objects.0.score", REMOVED, "field required"),
    ],
)
def test_malformed_predictions_are_refused_with_line_and_field(source, path, value, message):
    data, _ = source.image(1, annotation()).convert()
    predictions = source.predict(data)
    row = json.loads(predictions.read_text())
    spoil(row, path, value)
    predictions.write_text(json.dumps(row) + "\n")
    field = path.replace(".0.", "[0].")
    assert f"predictions.jsonl:1: {field}: {message}" in source.refused_export()


def test_an_image_predicted_twice_is_refused(source):
    data, _ = source.image(1, annotation()).convert()
    predictions = source.predict(data)
    predictions.write_text(predictions.read_text() * 2)
    problem = "metadata.image_id: 1 occurs twice; keep one row per image"
    assert f"predictions.jsonl:2: {problem}" in source.refused_export()


def test_a_name_of_two_categories_gives_no_results(source):
    data, _ = source.image(1, annotation()).convert()
    source.predict(data)
    path = source.out / "train.categories.json"
    (first, *_) = json.loads(path.read_text())
    path.write_text(json.dumps([first, first | {"id": 77}]))
    problem = f"categories: {first['id']} and 77 are both called {first['name']!r}; keep one"
    assert problem in source.refused_export()
