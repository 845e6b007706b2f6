"""The check of `benchmarks.photographs` against COCO's own evaluation."""

from __future__ import annotations

import json
from itertools import islice

import pytest
from PIL import Image

from benchmarks.photographs import (
    SCALE,
    annotations,
    check_with_coco,
    labelled,
    of_task,
    overrides,
    photographs,
    write_parts,
)
from launch.tools.import_data.__main__ import main as import_main
from shared.config.model import AugmentSection
from shared.dataset import load_dataset

pytestmark = pytest.mark.slow

CELLS = [("RBC", 11, 21, 70, 80), ("WBC", 101, 21, 180, 120), ("Platelets", 31, 131, 50, 150)]


@pytest.fixture
def source(tmp_path):
    """Two photographs in Pascal VOC's layout, the second without its first cell."""
    for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (tmp_path / "voc" / name).mkdir(parents=True)
    for number in (1, 2):
        Image.new("RGB", (200, 160)).save(tmp_path / f"voc/JPEGImages/cell_{number}.jpg")
        objects = "".join(
            f"<object><name>{name}</name><bndbox><xmin>{left}</xmin><ymin>{top}</ymin>"
            f"<xmax>{right}</xmax><ymax>{bottom}</ymax></bndbox></object>"
            for name, left, top, right, bottom in CELLS[number - 1 :]
        )
        size = "<size><width>200</width><height>160</height><depth>3</depth></size>"
        (tmp_path / f"voc/Annotations/cell_{number}.xml").write_text(
            f"<annotation><filename>cell_{number}.jpg</filename>{size}{objects}</annotation>"
        )
    (tmp_path / "voc/ImageSets/Main/test.txt").write_text("cell_1\ncell_2\n")
    return tmp_path / "voc"


@pytest.fixture
def imported(source, tmp_path):
    folder = tmp_path / "imported"
    import_main(["format=voc", f"source={source}", "split=test", f"out={folder}/test.jsonl"])
    return folder


@pytest.fixture
def data(imported, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    lines = (imported / "test.jsonl").open()
    (folder / "test.jsonl").write_text("".join(map(of_task, lines)))
    return folder


def test_the_annotations_have_the_tasks_boxes_of_the_xml_files(source, imported, data):
    categories = json.loads((imported / "test.categories.json").read_text())
    names = {one["id"]: one["name"] for one in categories}
    entries = annotations(source, data / "test.jsonl", categories)["annotations"]
    # A box from pixel 101 to pixel 180, both in it, is 80 pixels wide and begins behind 100.
    assert [(names[one["category_id"]], one["bbox"], one["image_id"]) for one in entries] == [
        ("WBC", [100, 20, 80, 100], 1),
        ("Platelets", [30, 130, 20, 20], 1),
        ("WBC", [100, 20, 80, 100], 2),
        ("Platelets", [30, 130, 20, 20], 2),
    ]


def test_a_report_that_differs_from_pycocotools_is_noticed(source, data, tmp_path):
    rows = [json.loads(line) for line in (data / "test.jsonl").open()]
    report = tmp_path / "arm_1" / "evaluations" / "step_000060"
    report.mkdir(parents=True)
    with (report / "predictions.jsonl").open("w") as file:
        for row in rows:
            found = [
                {"kind": "bbox_2d", "bins": one["bbox_2d"], "desc": one["desc"], "score": 1.0}
                for one in row["objects"]
                if one["desc"] != "Platelets"
            ]
            metadata = {"image_id": row["image_id"]}
            line = {key: row[key] for key in ("width", "height")}
            file.write(json.dumps(line | {"metadata": metadata, "objects": found}) + "\n")

    def reported(ap, ap50):
        scores = {"by_class": {"bbox": {"ap": ap, "ap50": ap50}}}
        (report / "report.json").write_text(json.dumps({"coco": scores}))

    reported(0.5, 0.5)  # one of two classes is found without an error
    check_with_coco(source, data, report)
    check_with_coco(source, data, report)  # again: the exported results are replaced
    reported(0.5, 0.7)
    with pytest.raises(SystemExit, match=r"AP50 0\.7; pycocotools: \[0\.5"):
        check_with_coco(source, data, report)


def test_the_towers_labels_are_the_boxes_of_the_augmented_photograph(imported):
    seen = islice(photographs(imported / "test.jsonl", fits=lambda part: True), 20)
    boxes = [box for sample in seen for box in labelled(sample).boxes]
    assert {box.name for box in boxes} == {0, 1, 2}
    assert all(box.left < box.right and box.top < box.bottom for box in boxes)
    widest = max(box.right - box.left for box in boxes if box.name == 0)
    assert widest == pytest.approx(60 * SCALE, abs=1.5), "where it is not cut"


def test_parts_have_few_cells_and_no_red_ones(imported, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.photographs.NUM_PARTS", 20)
    monkeypatch.setattr("benchmarks.photographs.MOST", 1)
    write_parts(tmp_path / "parts", imported / "test.jsonl")
    parts = load_dataset(
        tmp_path / "parts" / "train.jsonl", on_bad_row="error", sort_objects=True, check_images=True
    ).samples
    assert [len(part.objects) for part in parts] == [1] * 20
    assert {one.desc for part in parts for one in part.objects} == {"WBC", "Platelets"}


def test_the_augmentation_becomes_overrides():
    section = AugmentSection(flip=0.5, crop=0.25)
    assert overrides(section)[-2:] == ["+data.augment.flip=0.5", "+data.augment.crop=0.25"]
