"""`rollmatch import-data`: files of other formats become records that the ordinary loader reads."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from import_support import picture, prediction, write
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from launch.tools.coco import main as coco_main
from launch.tools.import_data.__main__ import main
from learner.segments import decode_image
from shared.dataset import Dataset
from shared.grounding.coco import bins_of_coco_box
from shared.grounding.geometry import pixels_of
from shared.prompts import Prompts

BOX = (100, 252, 404, 759)
"""Bins of the pixels x 10 to 40, y 20 to 60 on 100 x 80, as tests/launch/coco computes them."""


def found(data: Dataset) -> list[list[tuple[str, tuple[int, ...], str]]]:
    return [[(str(one.kind), one.bins, one.desc) for one in sample.objects] for sample in data]


YOLO_BOX = "0.25 0.5 0.3 0.5"
"""The centre 25, 40 and the size 30, 40 of 100 x 80 pixels."""
YOLO_RING = "0.1 0.25 0.4 0.25 0.4 0.75"


def yolo_folder(folder: Path, **changes: str) -> Path:
    keys = {"train": "images/train", "names": "{0: cat, 1: a dog}"} | changes
    write(folder / "data.yaml", "".join(f"{key}: {value}\n" for key, value in keys.items()))
    picture(folder / "images" / "train" / "a.png")
    write(folder / "labels" / "train" / "a.txt", f"0 {YOLO_BOX}\n\n1 {YOLO_RING}\n")
    return folder


def test_a_yolo_folder_gives_boxes_and_polygons_and_says_what_it_skipped(tmp_path, run):
    folder = yolo_folder(tmp_path / "yolo")
    lines = ["7 0.5 0.5 0.1 0.1", "0 0.5 0.5", "0 nan 0.5 0.1 0.1", "0 10 20 40 60", "x 1 1 1 1"]
    with_confidence = f"0 {YOLO_BOX} 0.9"
    labels = "\n".join([f"0 {YOLO_BOX}", *lines, with_confidence])
    picture(folder / "images" / "train" / "deep" / "b.png")
    write(folder / "labels" / "train" / "deep" / "b.txt", labels)
    picture(folder / "images" / "train" / "without_labels.png")
    write(folder / "labels" / "train" / "gone.txt", f"0 {YOLO_BOX}\n")
    write(folder / "labels" / "train" / "classes.txt", "cat\na dog\n")
    data, report = run("yolo", source=folder, geometry="auto")
    cat = ("bbox_2d", BOX, "cat")
    assert found(data) == [[("poly", (101, 253, 404, 253, 404, 759), "a dog"), cat][::-1], [cat]]
    assert [sample.sample_id for sample in data] == [
        "images/train/a.png",
        "images/train/deep/b.png",
    ]
    assert report["images"]["skipped"] == {"no_objects": 1}
    skipped = {"unknown_category": 1, "malformed": 5, "unknown_image": 1}
    assert report["objects"]["skipped"] == skipped
    assert report["objects"]["boxes_for_polygons"] == {"no_polygon": 2}


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        ({"train": "../images/train", "names": "[cat]"}, YOLO_BOX),
        ({"path": "/datasets/of/somebody/else", "train": "[images/train]"}, YOLO_BOX),
        ({"train": "list.txt"}, YOLO_BOX),
        ({"kpt_shape": "[2, 2]"}, f"{YOLO_BOX} 0.2 0.2 0.3 0.3"),
    ],
    ids=["Roboflow's paths", "another disk's root", "a list of images", "poses"],
)
def test_data_yaml_is_read_as_its_tools_write_it(tmp_path, run, changes, labels):
    folder = yolo_folder(tmp_path / "yolo", **changes)
    write(folder / "labels" / "train" / "a.txt", f"0 {labels}")
    write(folder / "list.txt", "./images/train/a.png\n")
    data, _ = run("yolo", source=folder)
    assert found(data) == [[("bbox_2d", BOX, "cat")]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train": "nowhere"},
            "data.yaml: train: names 'nowhere', which does not exist; correct it",
        ),
        ({"train": ""}, "data.yaml: train: is missing; add a folder of images"),
        ({"names": "[[cat]]"}, "data.yaml: names[0]: input should be a valid string, got ['cat']"),
        ({"names": "{a: cat}"}, "data.yaml: names.a: input should be a valid integer"),
        ({"names": "{"}, "data.yaml: file: is not YAML"),
    ],
)
def test_a_wrong_data_yaml_is_refused_by_its_key(tmp_path, refused, changes, message):
    folder = yolo_folder(tmp_path / "yolo", **changes)
    assert message in refused("format=yolo", f"source={folder}")


@pytest.mark.parametrize(
    ("names", "first"),
    [("[no, yes]", "no"), ("[1, 2]", "1"), ("{'0': ~, 1: on}", "~"), ("[0.10, x]", "0.10")],
)
def test_names_of_yolo_are_the_texts_in_the_file(tmp_path, run, names, first):
    folder = yolo_folder(tmp_path / "yolo", names=names)
    data, _ = run("yolo", source=folder)
    assert data[0].objects[0].desc == first


@pytest.mark.parametrize(
    "rows",
    [
        ["0.5 0.5 0.2 0.2 0.45 0.45 1 0.55 0.55 1"],
        ["0.5 0.5 0.2 0.2 0.45 0.45 0.55 0.55", "0.3 0.6 0.4 0.2 0.2 0.65 0.4 0.55 0.3 0.6"],
    ],
    ids=["with what is visible", "points alone"],
)
def test_rows_of_poses_without_their_key_are_refused(tmp_path, refused, rows):
    """They would be read as polygons around the wrong points."""
    folder = yolo_folder(tmp_path / "yolo")
    labels = folder / "labels" / "train" / "a.txt"
    write(labels, "".join(f"0 {row}\n" for row in rows))
    told = refused("format=yolo", f"source={folder}")
    assert "kpt_shape: is missing" in told
    assert f"{labels}:1" in told and "kpt_shape: [17, 3]" in told


def test_small_polygons_in_the_middle_are_no_poses(tmp_path, run):
    folder = yolo_folder(tmp_path / "yolo")
    rows = ["0.4 0.4 0.6 0.4 0.6 0.6 0.4 0.6", "0.45 0.5 0.55 0.42 0.6 0.5 0.55 0.6"]
    write(folder / "labels" / "train" / "a.txt", "".join(f"0 {row}\n" for row in rows))
    _, report = run("yolo", source=folder, geometry="poly")
    assert report["objects"]["polygons"] == 2


@pytest.mark.parametrize(
    "line",
    ["data/images/train/a.png", "/home/anna/set/images/train/a.png", "images\\train\\a.png"],
    ids=["CVAT's", "another disk's", "with Windows' separators"],
)
def test_paths_of_a_list_may_start_from_another_folder(tmp_path, run, line):
    folder = yolo_folder(tmp_path / "yolo", train="train.txt")
    write(folder / "train.txt", f"\ufeff{line}\n")
    data, _ = run("yolo", source=folder)
    assert data[0].objects[0].desc == "cat"


def voc_object(name: str = "cat", box: str = "11 21 40 60", **more: str) -> str:
    keys = ("xmin", "ymin", "xmax", "ymax")
    corners = "".join(f"<{k}>{v}</{k}>" for k, v in zip(keys, box.split(), strict=True))
    others = "".join(f"<{key}>{value}</{key}>" for key, value in more.items())
    return f"<object><name>{name}</name>{others}<bndbox>{corners}</bndbox></object>"


def voc_file(path: Path, *objects: str, filename: str = "", width: int = 100) -> Path:
    size = f"<size><width>{width}</width><height>80</height><depth>3</depth></size>"
    name = f"<filename>{filename or path.stem}.png</filename>"
    return write(path, f"<annotation>{name}{size}{''.join(objects)}</annotation>")


def test_a_voc_folder_gives_boxes_whose_pixels_are_numbered_from_one(tmp_path, run):
    folder = tmp_path / "VOC2012"
    for name in ("a", "b", "c", "d", "e"):
        picture(folder / "JPEGImages" / f"{name}.png")
    part = "<part><name>ear</name><bndbox><xmin>11</xmin></bndbox></part>"
    xml = folder / "Annotations"
    voc_file(xml / "a.xml", voc_object(part=part), voc_object(difficult="1"))
    voc_file(xml / "b.xml", voc_object(box="11.0 21.0 x 60"), filename="C:\\other\\name")
    voc_file(xml / "c.xml", voc_object(), voc_object(" "), width=0)
    voc_file(xml / "d.xml", voc_object(), width=90)
    write(xml / "e.xml", "<annotation><object>")
    voc_file(xml / "not_in_the_list.xml", voc_object())
    write(folder / "ImageSets" / "Main" / "train.txt", "a  1\nb -1\nc 0\nd\ne\nf\n")
    data, report = run("voc", source=folder, split="train")
    assert found(data) == [[("bbox_2d", BOX, "cat")]] * 2
    assert [sample.sample_id for sample in data] == ["a", "c"]
    (region,) = data[0].ignore
    assert (region.desc, region.is_crowd, region.annotation.box) == ("cat", False, (10, 20, 30, 40))
    assert data[1].ignore == ()
    assert report["images"]["skipped"] == {
        "no_objects": 1,
        "size_mismatch": 1,
        "malformed_labels": 1,
        "unknown_annotation": 1,
    }
    skipped = {"difficult": 1, "malformed": 1, "unusable_name": 1, "image_skipped": 1}
    assert report["objects"]["skipped"] == skipped


def test_a_voc_folder_without_subfolders_keeps_difficult_objects_on_demand(tmp_path, run):
    picture(tmp_path / "flat" / "a.png")
    voc_file(tmp_path / "flat" / "a.xml", voc_object(difficult="1"))
    data, _ = run("voc", source=tmp_path / "flat", keep_difficult="true")
    assert found(data) == [[("bbox_2d", BOX, "cat")]]


def coco_annotation(id: int, image_id: int = 5, category_id: int = 3) -> dict[str, Any]:
    ring = [10, 20, 40, 20, 40, 60]
    ids = {"id": id, "image_id": image_id, "category_id": category_id}
    return {**ids, "bbox": [10, 20, 30, 40], "segmentation": [ring], "iscrowd": 0}


def refs_of(*sentences: str, ref_id: int = 1, ann_id: int = 70, split: str = "train") -> dict:
    return {
        "ref_id": ref_id,
        "ann_id": ann_id,
        "category_id": 3,
        "image_id": 5,
        "split": split,
        "file_name": "COCO_train2014_000000000005_70.jpg",
        "sentences": [{"sent_id": 1, "sent": one, "raw": one, "tokens": []} for one in sentences],
    }


def refcoco(folder: Path, refs: object, suffix: str = ".p") -> list[str]:
    name = "COCO_train2014_000000000005.png"
    picture(folder / "train2014" / name)
    content = {
        "images": [{"id": 5, "file_name": name, "width": 100, "height": 80}],
        "annotations": [coco_annotation(70)],
        "categories": [{"id": 3, "name": "cat"}],
    }
    write(folder / "instances.json", json.dumps(content))
    path = folder / f"refs(unc){suffix}"
    path.write_bytes(pickle.dumps(refs, 0) if suffix == ".p" else json.dumps(refs).encode())
    return [
        f"refs={path}",
        f"annotations={folder / 'instances.json'}",
        f"images={folder / 'train2014'}",
    ]


@pytest.mark.parametrize("suffix", [".p", ".json"])
def test_each_sentence_of_a_ref_is_a_row_that_asks_for_its_phrase(tmp_path, run, suffix):
    refs = [
        refs_of("the left cat", "sleeping cat"),
        refs_of(" ", ref_id=2),
        refs_of("a <|image_pad|> cat", ref_id=5),
        refs_of("nothing", ref_id=3, ann_id=71),
        refs_of("another split", ref_id=4, split="testA"),
    ]
    options = dict(word.split("=", 1) for word in refcoco(tmp_path / "refcoco", refs, suffix))
    data, report = run("refcoco", **options)
    assert found(data) == [[("bbox_2d", BOX, "cat")]] * 2
    assert [sample.sample_id for sample in data] == ["1:1", "1:2"]
    asked = [Prompts(("Find {phrase}.",)).texts(sample)[1] for sample in data]
    assert asked == ["Find the left cat.", "Find sleeping cat."]
    assert report["images"]["skipped"] == {"unusable_text": 2, "unknown_annotation": 1}


@pytest.mark.parametrize("kind", ["images", "annotations", "categories"])
def test_a_ref_whose_id_names_two_entries_is_refused(tmp_path, refused, kind):
    words = refcoco(tmp_path / "refcoco", [refs_of("the left cat")])
    path = tmp_path / "refcoco" / "instances.json"
    content = json.loads(path.read_text())
    content[kind].append(content[kind][0])
    write(path, json.dumps(content))
    message = f"instances.json: {kind}[1].id: is {content[kind][0]['id']}, like {kind}[0].id"
    assert message in refused("format=refcoco", *words)


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harmed",)


@pytest.mark.parametrize(
    ("refs", "options", "message"),
    [
        ([Harmful()], [], "refs(unc).p: refs: is not a pickle of lists, dictionaries, texts and"),
        ([{"ref_id": 1}], [], "[0].ann_id: field required"),
        ([refs_of("a")], ["split=testB"], "split: is testB: no ref has it; choose from train"),
    ],
)
def test_refs_that_cannot_be_read_are_refused_and_run_nothing(
    tmp_path, monkeypatch, refused, refs, options, message
):
    monkeypatch.chdir(tmp_path)
    assert message in refused("format=refcoco", *refcoco(tmp_path / "refcoco", refs), *options)
    assert not Path("harmed").exists()


def swift_row(question: str, answer: str, ref: list[str], bbox: list, **more: Any) -> dict:
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    objects = {"ref": ref, "bbox": bbox} | more.pop("objects", {})
    return {"messages": messages, "images": ["pictures/a.png"], "objects": objects} | more


PIXELS = [10, 20, 40, 60]


def swift_file(folder: Path, *rows: dict) -> Path:
    picture(folder / "pictures" / "a.png")
    return write(folder / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


IN_JSON = '{"bbox_2d": <bbox>, "label": "<ref-object>"}'


@pytest.mark.parametrize(
    ("question", "answer", "refs", "names"),
    [
        ("Look", f"[{IN_JSON}, {IN_JSON}, {IN_JSON.replace('<ref-object>', 'bird')}]",
         ["cat", "dog"], ["cat", "dog", "bird"]),
        ("Look", f"[{IN_JSON.replace('<ref-object>', 'bird')}, {IN_JSON}, {IN_JSON}]",
         ["cat", "dog"], ["bird", "cat", "dog"]),
        ("Look", IN_JSON * 3, ["cat", "dog", "bird"], ["cat", "dog", "bird"]),
        ("Look", "<bbox><bbox> <ref-object>, <bbox> <ref-object>", ["cat", "dog"],
         ["cat", "cat", "dog"]),
        ("Look", "<ref-object> <bbox><bbox>, <ref-object> <bbox>", ["cat", "dog"],
         ["cat", "cat", "dog"]),
        ("Find <ref-object>", "<bbox>, <bbox>, <bbox>", ["cat"], ["cat", "cat", "cat"]),
        ("Look", "<ref-object><bbox>, " * 3, ["cat", "dog", "bird"], ["cat", "dog", "bird"]),
    ],
    ids=["JSON with a text", "JSON, the text first", "JSON", "labels behind", "labels before",
         "one asked", "one each"],
)  # fmt: skip
def test_each_box_of_ms_swift_has_the_label_next_to_it(
    tmp_path, run, question, answer, refs, names
):
    boxes = [[10, 20, 40, 30], [10, 40, 40, 50], [10, 60, 40, 70]]
    row = swift_row(f"<image>{question}", answer, refs, boxes)
    data, _ = run("swift", source=swift_file(tmp_path / "swift", row))
    assert [one.desc for one in data[0].objects] == names


def test_a_row_of_ms_swift_asks_its_own_question_and_has_boxes_in_pixels_or_parts(tmp_path, run):
    """Its ref may hold a placeholder itself."""
    refs = ["<ref-object> sign", "dog", "cat"]
    question, answer = "<image>Find <ref-object>, <ref-object>", "Here: <ref-object><bbox>"
    row = swift_row(question, answer, refs, [PIXELS])
    row["messages"].insert(0, {"role": "system", "content": "Be brief."})
    parts = swift_row("<image>Find <ref-object>", "<bbox>", ["cat"], [[0.1, 0.25, 0.4, 0.75]],
                      objects={"bbox_type": "norm1"})  # fmt: skip
    data, _ = run("swift", source=swift_file(tmp_path / "swift", row, parts))
    assert Prompts().texts(data[0]) == ("Be brief.", "Find <ref-object> sign, dog")
    assert [sample.sample_id for sample in data] == ["rows:1", "rows:2"]
    assert found(data) == [[("bbox_2d", BOX, "cat")]] * 2


def test_rows_of_ms_swift_that_are_no_detection_are_counted_by_reason(tmp_path, run):
    good = swift_row("<image>Find <ref-object>", "<bbox>", ["cat"], [PIXELS])
    click = swift_row("<image>Open it", "click(<bbox>)", [], [[61, 22]])
    nameless = swift_row("<image>Find it", "<bbox>", [], [PIXELS])
    turns = {**good, "messages": good["messages"] * 2}
    region = swift_row("<image>What is at <bbox>?", "<ref-object>", ["cat"], [PIXELS])
    missing = swift_row("<image>Find <ref-object>", "<bbox><bbox>", ["cat"], [PIXELS])
    text = {"messages": good["messages"]}
    caption = {"messages": good["messages"], "images": ["pictures/a.png"]}
    two = {**good, "images": ["pictures/a.png", "pictures/a.png"]}
    lost = {**good, "images": ["pictures/lost.png"]}
    either = swift_row(
        "<image>Find <ref-object> or <ref-object>", "<bbox>", ["cat", "dog"], [PIXELS]
    )
    parts = swift_row("<image>Find <ref-object>", "<bbox>", ["cat"], [[0.1, 0.25, 0.4, 0.75]])
    control = swift_row("<image>Find <|im_start|><ref-object>", "<bbox>", ["cat"], [PIXELS])
    rows = [good, click, nameless, turns, region, missing, text, caption, two, lost, either, parts]
    rows.append(control)
    data, report = run("swift", source=swift_file(tmp_path / "swift", *rows))
    assert len(data) == 1
    assert report["images"]["skipped"] == {
        "no_objects": 5,
        "several_turns": 1,
        "box_in_question": 1,
        "malformed_labels": 1,
        "no_image": 1,
        "several_images": 1,
        "missing_file": 1,
        "unusable_text": 1,
    }
    skipped = {"point": 1, "unusable_name": 2, "malformed": 1, "image_skipped": 6}
    assert report["objects"]["skipped"] == skipped


def test_a_malformed_row_of_ms_swift_is_refused_with_its_line(tmp_path, refused):
    rows = [swift_row("<image>a", "b", [], []), {"messages": "hello"}]
    source = swift_file(tmp_path / "swift", *rows)
    message = "rows.jsonl:2: messages: input should be a valid list, got 'hello'; correct the row"
    assert message in refused("format=swift", f"source={source}")
    source.write_text(json.dumps(rows[0])[:-1] + ', "images": ["b.png"]}\n')
    message = "rows.jsonl:1: images: is given twice in one object; keep one"
    assert message in refused("format=swift", f"source={source}")


def test_lvis_rows_ask_for_the_classes_that_are_labelled_throughout(tmp_path, run):
    picture(tmp_path / "coco" / "train2017" / "5.png")
    image = {
        "id": 5,
        "coco_url": "http://images.cocodataset.org/train2017/5.png",
        "width": 100,
        "height": 80,
        "neg_category_ids": [1],
        "not_exhaustive_category_ids": [4],
    }
    content = {
        "images": [image],
        "annotations": [coco_annotation(1), coco_annotation(2, category_id=4)],
        "categories": [{"id": i, "name": n} for i, n in ((1, "apple"), (3, "cat"), (4, "leaf"))],
    }
    annotations = write(tmp_path / "lvis.json", json.dumps(content))
    data, report = run("lvis", annotations=annotations, images=tmp_path / "coco", geometry="poly")
    assert [one.desc for one in data[0].objects] == ["cat"]
    question = Prompts(("Find every {classes}.",)).texts(data[0])[1]
    assert question == "Find every apple, cat."
    assert report["objects"]["skipped"] == {"not_exhaustive": 1}
    # Anywhere on this picture a leaf may be one that has no annotation.
    regions = [(one.desc, one.is_crowd, one.annotation.box) for one in data[0].ignore]
    assert regions == [("leaf", False, (10, 20, 30, 40)), ("leaf", True, (0, 0, 100, 80))]
    assert (tmp_path / "out" / "train.categories.json").exists()


def hugging_face(folder: Path, names: list[str] | None, objects: list[Any]) -> Path:
    from datasets import ClassLabel, Dataset, Features, List, Value
    from datasets import Image as Picture

    label = Value("int64") if names is None else ClassLabel(names=names)
    per_object = {"bbox": List(Value("float32")), "category": label}
    features = Features({"image": Picture(), "objects": List(per_object)})
    if isinstance(objects[0], dict):
        columns = {key: List(feature) for key, feature in per_object.items()}
        features = Features({"image": Picture(), "objects": columns})
    picture(folder.parent / "a.png")
    rows = {"image": [str(folder.parent / "a.png")] * len(objects), "objects": objects}
    data = Dataset.from_dict(rows, features=features)
    data.map(lambda row: row).save_to_disk(str(folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objects", "names", "options"),
    [
        ({"bbox": [[10, 20, 30, 40]], "category": [1]}, ["dog", "cat"], {}),
        ([{"bbox": [10, 20, 40, 60], "category": 1}], None,
         {"names": "dog, cat", "box_order": "xyxy"}),
    ],
    ids=["lists by key, class labels", "a list of objects, numbers"],
)  # fmt: skip
def test_a_hugging_face_data_set_on_disk_is_read_with_its_pictures(
    tmp_path, run, objects, names, options
):
    wrong = {"bbox": [[1, 2, 3], [0.1, 0.2, 0.3, 0.4]], "category": [1, 1]}
    if isinstance(objects, list):
        wrong = [{"bbox": [1, 2, 3, 4], "category": -1}]
    source = hugging_face(tmp_path / "data", names, [objects, wrong])
    (tmp_path / "a.png").rename(tmp_path / "moved.png")
    data, report = run("hf", source=source, **options)
    assert found(data) == [[("bbox_2d", BOX, "cat")]]
    assert [sample.sample_id for sample in data] == ["train:0"]
    skipped = {"malformed": 2} if names else {"unknown_category": 1}
    assert report["objects"]["skipped"] == skipped
    assert [path.suffix for path in (tmp_path / "out" / "train_images").iterdir()] == [".png"]


@pytest.mark.slow
def test_a_hugging_face_data_set_with_other_columns_is_refused_by_their_names(tmp_path, refused):
    source = hugging_face(tmp_path / "data", ["cat"], [{"bbox": [PIXELS], "category": [0]}])
    message = "has no column boxes, only image, objects; give their names"
    assert message in refused("format=hf", f"source={source}", "objects=boxes")
    message = "column objects has no key label, only bbox, category; give their names"
    assert message in refused("format=hf", f"source={source}", "category=label")
    message = "image: column objects holds dict, not one image per row; give another column"
    assert message in refused("format=hf", f"source={source}", "image=objects")
    source = hugging_face(tmp_path / "numbers", None, [{"bbox": [PIXELS], "category": [0]}])
    message = "names: the data set has numbers in category, but no names for them; give the names"
    assert message in refused("format=hf", f"source={source}")
    source = hugging_face(tmp_path / "from_one", None, [{"bbox": [PIXELS] * 2, "category": [1, 2]}])
    message = "names: 2 are given, but the data set has category 2; name every category"
    assert message in refused("format=hf", f"source={source}", "names=cat,dog")
    message = "source: /nowhere (split train) cannot be loaded"
    assert message in refused("format=hf", "source=/nowhere")


SHOWN = (100, 80)
"""Width and height of the pictures that EXIF turns, as they are displayed."""
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
"""From the picture as it is displayed to the one that is stored."""


def turned_picture(path: Path, orientation: int, size: tuple[int, int] = SHOWN) -> tuple[int, int]:
    """Save a picture that EXIF turns; displayed, x 10 to 40, y 20 to 60 of it are white.

    Return the size that is stored.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = Image.new("L", size)
    shown.paste(255, (10, 20, 40, 60))
    stored = shown.transpose(TURNS[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(path, exif=exif)
    return stored.size


def stored_box(path: Path) -> tuple[int, int, int, int]:
    """Return x1, y1, x2, y2 of what is white, as it is stored."""
    box = Image.open(path).getbbox()
    assert box is not None
    return box


def white_share(data: Dataset) -> float:
    """Return the share of white pixels in the first object's box, as the learner sees both."""
    (sample,) = data
    pixels = decode_image(sample.images[0])
    assert pixels.size == (sample.width, sample.height)
    x1, y1, x2, y2 = pixels_of(sample.objects[0].bins, width=sample.width, height=sample.height)
    inside = pixels.convert("L").crop((round(x1), round(y1), round(x2), round(y2)))
    assert inside.width * inside.height >= 30 * 40
    return inside.histogram()[255] / (inside.width * inside.height)


def coco_of(folder: Path, size: tuple[int, int], box: list[float], **more: Any) -> dict[str, Path]:
    entry = {"id": 1, "image_id": 5, "category_id": 3, "bbox": box, **more}
    content = {
        "images": [{"id": 5, "file_name": "a.png", "width": size[0], "height": size[1]}],
        "annotations": [entry],
        "categories": [{"id": 3, "name": "cat"}],
    }
    annotations = write(folder / "instances.json", json.dumps(content))
    return {"annotations": annotations, "images": folder}


@pytest.mark.parametrize("orientation", TURNS)
def test_boxes_of_a_picture_that_exif_turns_lie_on_the_object_as_it_is_displayed(
    tmp_path, run, orientation
):
    """What the stated size tells needs no key; the key decides for the others."""
    stored = turned_picture(tmp_path / "a.png", orientation)
    x1, y1, x2, y2 = stored_box(tmp_path / "a.png")
    of_displayed = coco_of(tmp_path / "displayed", SHOWN, [10, 20, 30, 40])
    of_stored = coco_of(tmp_path / "stored", stored, [x1, y1, x2 - x1, y2 - y1])
    tells = stored != SHOWN
    for options, exif in (
        *([(of_displayed, None), (of_displayed, "stored")] if tells else []),
        (of_displayed, "displayed"),
        (of_stored, "stored"),
    ):
        data, report = run(
            "coco",
            annotations=options["annotations"],
            images=tmp_path,
            **({} if exif is None else {"exif": exif}),
        )
        assert report["images"]["turned_by_exif"] == 1
        assert white_share(data) > 0.9
        shutil.rmtree(tmp_path / "out")
    if tells:  # Label Studio's: the size that is stored, boxes on what is displayed
        wrong = coco_of(tmp_path / "wrong", stored, [10, 20, 30, 40])
        data, _ = run("coco", annotations=wrong["annotations"], images=tmp_path, exif="displayed")
        assert white_share(data) > 0.9


@pytest.mark.parametrize("orientation", TURNS)
def test_results_of_stored_pictures_go_back_into_their_annotations_frame(
    tmp_path, run, orientation
):
    stored = turned_picture(tmp_path / "a.png", orientation)
    x1, y1, x2, y2 = stored_box(tmp_path / "a.png")
    (data,), _ = run("coco", **coco_of(tmp_path, stored, [x1, y1, x2 - x1, y2 - y1]), exif="stored")
    predictions = write(tmp_path / "predictions.jsonl", json.dumps(prediction(data)))
    categories = tmp_path / "out" / "train.categories.json"
    results = tmp_path / "results.json"
    coco_main(
        ["export", f"predictions={predictions}", f"categories={categories}", f"out={results}"]
    )
    (result,) = json.loads(results.read_text())
    x, y, w, h = result["bbox"]
    assert [x, y, x + w, y + h] == pytest.approx([x1, y1, x2, y2], abs=0.2)


@pytest.mark.parametrize("orientation", TURNS)
def test_polygons_and_parts_of_a_stored_picture_are_turned_with_it(tmp_path, run, orientation):
    folder = yolo_folder(tmp_path / "yolo")
    path = folder / "images" / "train" / "a.png"
    width, height = turned_picture(path, orientation)
    x1, y1, x2, y2 = stored_box(path)
    ring = (x1 / width, y1 / height, x2 / width, y1 / height, x2 / width, y2 / height)
    write(folder / "labels" / "train" / "a.txt", f"0 {' '.join(map(str, ring))}")
    data, _ = run("yolo", source=folder, geometry="poly", exif="stored")
    (found_one,) = data[0].objects
    corners = set(zip(found_one.bins[::2], found_one.bins[1::2], strict=True))
    assert len(corners) == 3
    assert corners < {(101, 253), (404, 253), (404, 759), (101, 759)}


@pytest.mark.parametrize(
    ("orientation", "size"),
    [(6, (80, 100)), (2, SHOWN), (3, SHOWN), (4, SHOWN), (6, (90, 90))],
    ids=["the stored size", "mirrored", "180 degrees", "flipped", "square"],
)
def test_a_turned_picture_whose_size_tells_nothing_is_left_out_and_the_key_is_named(
    tmp_path, refused, orientation, size
):
    stored = turned_picture(tmp_path / "a.png", orientation, SHOWN if size[0] != 90 else size)
    options = coco_of(tmp_path, stored, [10, 20, 30, 40])
    for check in ("true", "false"):
        told = refused(
            "format=coco", *(f"{k}={v}" for k, v in options.items()), f"check_images={check}"
        )
        assert "rotated_by_exif 1" in told
        assert "exif=displayed" in told and "exif=stored" in told


def test_formats_without_a_size_leave_a_turned_picture_out(tmp_path, run, capsys):
    folder = yolo_folder(tmp_path / "yolo")
    turned_picture(folder / "images" / "train" / "b.jpg", 6)
    write(folder / "labels" / "train" / "b.txt", f"0 {YOLO_BOX}")
    _, report = run("yolo", source=folder)
    assert report["images"]["skipped"] == {"rotated_by_exif": 1}
    assert "exif=displayed or exif=stored" in capsys.readouterr().out


def test_the_picture_of_a_voc_file_is_the_one_of_its_own_stem(tmp_path, run):
    """Names inside stay as they were when frames are renumbered or copied."""
    folder = tmp_path / "VOC"
    for name in ("1.png", "2.png", "other.PNG"):
        picture(folder / "JPEGImages" / name)
    for name, inside in (("1", "2.png"), ("2", "1.png"), ("3", r"C:\x\other.png")):
        text = f"<annotation><filename>{inside}</filename>{voc_object()}</annotation>"
        write(folder / "Annotations" / f"{name}.XML", text)
    data, _ = run("voc", source=folder)
    assert [sample.images[0].path.name for sample in data] == ["1.png", "2.png", "other.PNG"]


def test_suffixes_may_be_in_upper_case(tmp_path, run):
    folder = yolo_folder(tmp_path / "yolo")
    labels = folder / "labels" / "train"
    (labels / "a.txt").rename(labels / "a.TXT")
    picture(folder / "images" / "train" / "a.png").rename(folder / "images" / "train" / "a.PNG")
    write(folder / "list.txt", "images/train/a.png\n")
    write(folder / "data.yaml", "train: list.txt\nnames: [cat, dog]\n")
    assert len(run("yolo", source=folder)[0][0].objects) == 2
    shutil.rmtree(tmp_path / "out")
    options = coco_of(tmp_path, SHOWN, [10, 20, 30, 40])
    picture(tmp_path / "a.png").rename(tmp_path / "a.PNG")
    data, _ = run("coco", **options)
    assert data[0].images[0].path.name == "a.PNG"


@pytest.mark.parametrize("on_disk", ["NFC", "NFD"])
def test_a_file_is_found_by_a_name_that_differs_in_its_unicode_normalisation(
    tmp_path, run, on_disk
):
    in_json = {"NFC": "NFD", "NFD": "NFC"}[on_disk]
    folder, name = (unicodedata.normalize(on_disk, text) for text in ("größe_é", "kürbis.png"))
    picture(tmp_path / folder / name)
    options = coco_of(tmp_path, SHOWN, [10, 20, 30, 40])
    content = json.loads(options["annotations"].read_text())
    content["images"][0]["file_name"] = unicodedata.normalize(in_json, f"{folder}/{name}")
    write(options["annotations"], json.dumps(content))
    data, _ = run("coco", **options)
    assert data[0].images[0].path.name == name


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le"])
def test_a_byte_order_mark_is_read_over_and_utf_16_is_refused_by_name(
    tmp_path, run, refused, encoding
):
    picture(tmp_path / "a.png")
    options = coco_of(tmp_path, SHOWN, [10, 20, 30, 40])
    file = options["annotations"]
    file.write_bytes(file.read_text().encode(encoding))
    if encoding == "utf-8-sig":
        assert len(run("coco", **options)[0]) == 1
    else:
        told = refused("format=coco", *(f"{key}={value}" for key, value in options.items()))
        assert f"{file}: file: is UTF-16" in told


def test_a_malformed_annotation_is_skipped_counted_and_the_first_is_named(tmp_path, run, capsys):
    picture(tmp_path / "a.png")
    options = coco_of(tmp_path, SHOWN, [10, 20, 30, 40])
    content = json.loads(options["annotations"].read_text())
    good = content["annotations"][0]
    bad = [{**good, "bbox": None}, {"id": 3}, {**good, "bbox": [1, 2, "3", 4]}, 7]
    content["annotations"] = [good, *bad]
    write(options["annotations"], json.dumps(content))
    data, report = run("coco", **options)
    assert found(data) == [[("bbox_2d", BOX, "cat")]]
    assert report["objects"]["skipped"] == {"malformed": 4}
    assert "annotations[1].bbox: " in capsys.readouterr().out


WIDE = (200, 100)
"""Width and height of the picture that the boxes below are of."""
TRUE_BOXES = [(120, 30, 60, 50), (20, 40, 90, 55), (150, 70, 40, 25), (100, 10, 95, 80)]
"""x, y, w, h in pixels."""
ORDERS = {
    "xywh": lambda x, y, w, h: [x, y, w, h],
    "xyxy": lambda x, y, w, h: [x, y, x + w, y + h],
    "yxyx": lambda x, y, w, h: [y, x, y + h, x + w],
    "cxcywh": lambda x, y, w, h: [x + w / 2, y + h / 2, w, h],
}
UNITS = {"pixels": WIDE, "parts": (1, 1), "thousandths": (1000, 1000)}


def numbers_of(box: tuple[float, ...], order: str, unit: str) -> list[float]:
    scale = [whole / side for whole, side in zip(UNITS[unit], WIDE, strict=True)] * 2
    return ORDERS[order](*(value * factor for value, factor in zip(box, scale, strict=True)))


def boxes_in(format: str, folder: Path, boxes: list[list[float]]) -> dict[str, Any]:
    """Write a data set of a picture and these boxes, one row each where rows are of one box."""
    picture(folder / "pictures" / "a.png", *WIDE)
    image = {"id": 5, "file_name": "a.png", "width": WIDE[0], "height": WIDE[1]}
    entries = [coco_annotation(i) | {"bbox": b, "segmentation": []} for i, b in enumerate(boxes)]
    content = {"images": [image], "annotations": entries, "categories": [{"id": 3, "name": "cat"}]}
    file = write(folder / "instances.json", json.dumps(content))
    if format in ("coco", "lvis"):
        return {"annotations": file, "images": folder / "pictures"}
    if format == "refcoco":
        refs = [refs_of("it", ref_id=i, ann_id=i) for i in range(len(boxes))]
        refs_file = write(folder / "refs.json", json.dumps(refs))
        return {"refs": refs_file, "annotations": file, "images": folder / "pictures"}
    if format == "voc":
        objects = "".join(voc_object(box=" ".join(map(str, box))) for box in boxes)
        write(folder / "voc" / "a.xml", f"<annotation>{objects}</annotation>")
        return {"source": folder / "voc", "images": folder / "pictures"}
    if format == "yolo":
        rows = "".join(f"0 {' '.join(map(str, box))}\n" for box in boxes)
        write(folder / "yolo" / "labels" / "a.txt", rows)
        write(folder / "yolo" / "data.yaml", "train: images\nnames: [cat]\n")
        picture(folder / "yolo" / "images" / "a.png", *WIDE)
        return {"source": folder / "yolo"}
    row = swift_row("<image>Find <ref-object>", "<bbox>" * len(boxes), ["cat"], boxes)
    return {"source": write(folder / "rows.jsonl", json.dumps(row))}


OWN = {
    "coco": ("xywh", "pixels"),
    "lvis": ("xywh", "pixels"),
    "refcoco": ("xywh", "pixels"),
    "voc": ("xyxy", "pixels"),
    "swift": ("xyxy", "pixels"),
    "yolo": ("cxcywh", "parts"),
}


@pytest.mark.parametrize("format", OWN)
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("order", ORDERS)
def test_boxes_in_another_order_or_unit_are_refused_with_the_key_and_read_with_it(
    tmp_path, run, refused, format, order, unit
):
    """Four boxes of one picture are enough, and none is read wrongly."""
    boxes = [numbers_of(box, order, unit) for box in TRUE_BOXES]
    options = boxes_in(format, tmp_path / "data", boxes)
    keys = {"box_order": order, "box_unit": unit}
    if (order, unit) == OWN[format]:
        keys = {}
    else:
        told = refused(f"format={format}", *(f"{key}={value}" for key, value in options.items()))
        assert "set box_order=" in told or "set box_unit=" in told
        assert f"{order} in {unit}" in told
    data, _ = run(format, **options, **keys)
    read = sorted(one.bins for sample in data for one in sample.objects)
    truth = sorted(bins_of_coco_box(box, *WIDE) for box in TRUE_BOXES)
    off = 6 if format == "voc" and unit == "pixels" else 1  # counts from 1
    assert len(read) == len(truth)
    for one, other in zip(read, truth, strict=True):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) <= off * 2


@pytest.mark.parametrize("format", OWN)
@pytest.mark.parametrize(
    "boxes",
    [
        [(20, 30, 60, 50)],
        [(0, 0, 200, 100)],
        [(0, 0, 200, 100), (1, 1, 198, 98)],
        [(-8, -4, 60, 50), (150, 60, 62, 48), (0, 0, 204, 102)],
        [(5, 5, 1, 1), (190, 95, 2, 2), (3, 90, 1, 3)],
        [(2, 3, 1, 1)],
        [(0, 0, 1, 1), (100, 50, 1, 1)],
    ],
    ids=["one", "fills", "both fill", "slightly out", "tiny", "one pixel", "a corner's pixel"],
)  # fmt: skip
def test_true_boxes_of_small_files_are_never_refused(tmp_path, run, format, boxes):
    order, unit = OWN[format]
    numbers = [numbers_of(box, order, unit) for box in boxes]
    if format == "voc":
        numbers = [[x1 + 1, y1 + 1, x2, y2] for x1, y1, x2, y2 in numbers]
    if format == "yolo" and boxes[0][0] < 0:
        numbers = [[min(max(value, 0), 1) for value in box] for box in numbers]
    _, report = run(format, **boxes_in(format, tmp_path / "data", numbers))
    assert report["objects"]["boxes"] == len(boxes)


IDS = {"coco": {"cat": 3}, "lvis": {"cat": 3}, "voc": {"cat": 1}, "yolo": {"cat": 0}}
IDS |= {"swift": {"cat": 1}, "hf": {"dog": 0, "cat": 1}}


@pytest.mark.parametrize(
    "format", [*sorted(IDS.keys() - {"hf"}), pytest.param("hf", marks=pytest.mark.slow)]
)
def test_perfect_predictions_on_data_of_every_format_are_perfect_coco_results(
    tmp_path, run, format
):
    """By pycocotools, against annotations with the ids that the import wrote."""
    true_boxes = TRUE_BOXES
    if format == "hf":
        true_boxes = [tuple(value / 2 for value in box) for box in TRUE_BOXES]
        objects = [{"bbox": list(box), "category": 1} for box in true_boxes]
        options = {"source": hugging_face(tmp_path / "data", ["dog", "cat"], [objects])}
    else:
        boxes = [numbers_of(box, *OWN[format]) for box in TRUE_BOXES]
        if format == "voc":
            boxes = [[x1 + 1, y1 + 1, x2, y2] for x1, y1, x2, y2 in boxes]
        options = boxes_in(format, tmp_path / "data", boxes)
    (sample,), report = run(format, **options)
    assert report["no_coco_results"] is None
    categories = json.loads((tmp_path / "out" / "train.categories.json").read_text())
    assert {one["name"]: one["id"] for one in categories} == IDS[format]
    image_id = sample.metadata["image_id"]
    assert image_id == (5 if format in ("coco", "lvis") else 1)
    ids = {"image_id": image_id, "category_id": IDS[format]["cat"], "iscrowd": 0}
    entries = [
        {"id": i, "bbox": list(box), "area": box[2] * box[3], **ids}
        for i, box in enumerate(true_boxes, 1)
    ]
    size = {"width": sample.width, "height": sample.height}
    truth = COCO()
    truth.dataset = {"images": [{"id": image_id, **size}], "annotations": entries}
    truth.dataset["categories"] = categories
    truth.createIndex()
    row = prediction(sample)
    for answer, annotation in zip(row["objects"], sample.annotated, strict=True):
        answer["pixels"] = annotation.corners
    predictions = write(tmp_path / "predictions.jsonl", json.dumps(row))
    results = tmp_path / "results.json"
    names = tmp_path / "out" / "train.categories.json"
    coco_main(["export", f"predictions={predictions}", f"categories={names}", f"out={results}"])
    scored = COCOeval(truth, truth.loadRes(str(results)), "bbox")
    scored.evaluate()
    scored.accumulate()
    precision = scored.eval["precision"][:, :, :, 0, -1]
    assert precision[precision > -1].min() == 1


@pytest.mark.parametrize("format", ["refcoco", "swift"])
def test_an_import_whose_predictions_cannot_be_coco_results_says_why(tmp_path, run, capsys, format):
    boxes = [numbers_of(box, *OWN[format]) for box in TRUE_BOXES]
    options = boxes_in(format, tmp_path / "data", boxes)
    if format == "swift":
        rows = options["source"].read_text()
        write(options["source"], f"{rows}\n{rows}")
    _, report = run(format, **options)
    assert "COCO results are of every object" in report["no_coco_results"]
    assert report["no_coco_results"] in capsys.readouterr().out
    assert not (tmp_path / "out" / "train.categories.json").exists()


def test_odd_rows_are_counted_and_the_first_is_named(tmp_path, run, capsys):
    """An object twice, boxes of one pixel, one file under two ids."""
    boxes = [[20, 30, 60, 50], [20, 30, 60, 50], [7, 8, 1, 1], [100, 20, 60, 50]]
    options = boxes_in("coco", tmp_path / "data", boxes)
    content = json.loads(options["annotations"].read_text())
    content["images"].append({**content["images"][0], "id": 6})
    content["annotations"].append({**coco_annotation(9, image_id=6), "bbox": [30, 30, 50, 50]})
    write(options["annotations"], json.dumps(content))
    _, report = run("coco", **options)
    assert (report["objects"]["repeated"], report["objects"]["one_pixel"]) == (1, 1)
    assert report["images"]["repeated"] == 1
    told = capsys.readouterr().out
    file = options["images"] / "a.png"
    assert f"image of an earlier row: {file} (sample 6), as sample 5" in told
    assert f"repeated object: {file} (sample 5)" in told


@pytest.mark.slow
def test_a_refused_hugging_face_import_leaves_no_pictures(tmp_path, refused):
    objects = [{"bbox": [60, 50, 90, 70], "category": 0}, {"bbox": [50, 40, 95, 75], "category": 0}]
    source = hugging_face(tmp_path / "data", ["cat"], [objects])
    (tmp_path / "a.png").rename(tmp_path / "moved.png")
    assert "set box_order=xyxy" in refused("format=hf", f"source={source}")
    assert not (tmp_path / "out" / "train_images").exists()


def test_a_split_that_is_not_there_is_refused_with_those_that_are(tmp_path, refused):
    folder = tmp_path / "VOC"
    voc_file(folder / "Annotations" / "a.xml", voc_object())
    for name in ("train", "val"):
        write(folder / "ImageSets" / "Main" / f"{name}.txt", "a\n")
    told = refused("format=voc", f"source={folder}", "split=trian")
    assert "split: is trian" in told and "train, val" in told
    yolo = yolo_folder(tmp_path / "yolo")
    assert "defined: train" in refused("format=yolo", f"source={yolo}", "split=val")


LONG = [20, 38, 60, 4]
"""x, y, w, h of a flat box; upright about its centre 50, 40 it is x 48 to 52, y 10 to 70."""
UPRIGHT = (484, 126, 525, 886)


@pytest.mark.parametrize("degrees", [90.0, -90.0, 270, "90", 450])
def test_a_box_that_cvat_has_turned_is_taught_as_what_encloses_it(tmp_path, run, degrees):
    picture(tmp_path / "a.png")
    attributes = {"rotation": degrees, "occluded": False}
    options = coco_of(tmp_path, SHOWN, LONG, attributes=attributes, segmentation=[])
    data, report = run("coco", **options)
    assert found(data) == [[("bbox_2d", UPRIGHT, "cat")]]
    assert report["objects"]["turned_boxes"] == 1
    assert report["objects"]["unknown_keys"] == {}


def test_a_turned_box_is_a_polygon_of_its_corners_where_polygons_are_wanted(tmp_path, run):
    picture(tmp_path / "a.png")
    ring = [20, 38, 80, 38, 80, 42, 20, 42]
    options = coco_of(tmp_path, SHOWN, LONG, attributes={"rotation": 30}, segmentation=[ring])
    data, _ = run("coco", **options, geometry="auto")
    (one,) = data[0].objects
    # The left upper corner is 30 to the left and 2 above: clockwise it goes up.
    x, y = 50 - 30 * 0.8660 + 2 * 0.5, 40 - 30 * 0.5 - 2 * 0.8660
    assert one.kind == "poly"
    assert abs(one.bins[0] - x / 99 * 999) < 1 and abs(one.bins[1] - y / 79 * 999) < 1


FLAT = "<bndbox><xmin>21</xmin><ymin>39</ymin><xmax>80</xmax><ymax>42</ymax></bndbox>"
CVAT_TURN = "<attribute><name>rotation</name><value>90.0</value></attribute>"


@pytest.mark.parametrize(
    "element",
    [
        "<robndbox><cx>50</cx><cy>40</cy><w>60</w><h>4</h><angle>1.5707963</angle></robndbox>",
        f"{FLAT}<attributes>{CVAT_TURN}</attributes>",
        f"{FLAT}<angle>1.5707963</angle>",
        f"{FLAT}<angle>90</angle>",
    ],
    ids=["robndbox", "CVAT's attribute", "an angle next to a box", "in degrees"],
)
def test_turned_boxes_of_voc_are_read(tmp_path, run, element):
    folder = tmp_path / "flat"
    picture(folder / "a.png")
    voc_file(folder / "a.xml", f"<object><name>cat</name>{element}</object>")
    data, report = run("voc", source=folder)
    assert found(data) == [[("bbox_2d", UPRIGHT, "cat")]]
    assert report["objects"]["turned_boxes"] == 1


def test_keys_next_to_a_box_that_nobody_reads_are_counted_and_the_first_place_is_named(
    tmp_path, run, capsys
):
    picture(tmp_path / "a.png")
    more = {"bbox_mode": 0, "area": 5, "attributes": {"occluded": True, "heading": 3}}
    _, report = run("coco", **coco_of(tmp_path, SHOWN, [10, 20, 30, 40], **more))
    assert report["objects"]["unknown_keys"] == {"bbox_mode": 1, "attributes.heading": 1}
    told = capsys.readouterr().out
    assert "bbox_mode 1" in told
    assert f"key bbox_mode: {tmp_path / 'a.png'}" in told
    shutil.rmtree(tmp_path / "out")
    voc_file(tmp_path / "flat" / "a.xml", voc_object(pose="Left", visible="0"))
    picture(tmp_path / "flat" / "a.png")
    _, report = run("voc", source=tmp_path / "flat")
    assert report["objects"]["unknown_keys"] == {"visible": 1}
    shutil.rmtree(tmp_path / "out")
    row = swift_row(
        "<image>Find <ref-object>", "<bbox>", ["cat"], [PIXELS], objects={"angle": [30]}
    )
    _, report = run("swift", source=swift_file(tmp_path / "swift", row))
    assert report["objects"]["unknown_keys"] == {"angle": 1}


def test_records_go_to_a_jsonl_file_or_into_a_folder(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["format=yolo", f"source={tmp_path}", f"out={tmp_path / 'train.json'}"])
    told = " ".join(capsys.readouterr().err.split())
    assert re.search(rf"{tmp_path / 'train.json'} .*; write {tmp_path / 'train.jsonl'}", told)
    assert not (tmp_path / "train.json").exists()


def test_the_command_names_its_formats_and_prints_what_it_skipped_first(tmp_path, refused, capsys):
    formats = "coco, lvis, refcoco, yolo, voc, swift, hf"
    assert re.search(f"format: .* {formats}, .*format=yolov8", refused("format=yolov8"))
    assert "got nothing; write format=NAME" in refused()
    main(["--help"])
    assert f"Formats: {formats}" in capsys.readouterr().out
    folder = yolo_folder(tmp_path / "yolo")
    write(folder / "labels" / "train" / "a.txt", f"0 {YOLO_BOX}\n9 {YOLO_BOX}")
    main(["format=yolo", f"source={folder}", f"out={tmp_path / 'out'}"])
    printed = capsys.readouterr().out
    assert "1 of 1 written; skipped: none" in printed
    assert f"first     unknown_category: {folder}/images/train/a.png" in printed


def test_labels_that_a_yolo_reader_does_not_find_are_no_images_without_objects(tmp_path, refused):
    folder = yolo_folder(tmp_path / "yolo")
    (folder / "labels").rename(folder / "annotations")
    place = f"train: names 1 images, but none has a label file (first: {folder}/labels/train/a.txt)"
    assert place in refused("format=yolo", f"source={folder}", "keep_empty=true")


@pytest.mark.parametrize(
    "change",
    [
        ("<annotation>", '<annotation xmlns="http://host.xz/voc">'),
        ("<annotation>", "<annotations><annotation>"),
    ],
    ids=["a namespace", "several annotations in a file"],
)
def test_a_voc_file_of_another_form_is_not_an_image_without_objects(tmp_path, run, change):
    folder = tmp_path / "voc"
    for name in ("a", "b"):
        picture(folder / f"{name}.png")
    box = "<bndbox><xmin>11</xmin><ymin>21</ymin><xmax>40</xmax><ymax>60</ymax></bndbox>"
    text = f"<annotation><object><name>cat</name>{box}</object></annotation>"
    write(folder / "a.xml", text)
    end = "</annotations>" if "annotations" in change[1] else ""
    write(folder / "b.xml", text.replace(*change) + end)
    data, report = run("voc", source=folder, keep_empty="true")
    assert found(data) == [[("bbox_2d", BOX, "cat")]]
    assert report["images"]["skipped"] == {"malformed_labels": 1}


def test_an_image_that_a_source_names_twice_is_one_row(tmp_path, run):
    folder = yolo_folder(tmp_path / "yolo", train="[images/train, list.txt]")
    write(folder / "list.txt", "images/train/a.png\n")
    assert len(run("yolo", source=folder)[0]) == 1


def test_two_rows_of_one_id_are_refused_with_both_images(tmp_path, refused):
    words = refcoco(tmp_path / "refcoco", [refs_of("the left cat"), refs_of("another")])
    error = refused("format=refcoco", *words)
    assert re.search("sample_id: '1:1' is the id of two rows, .*png .* and .*png .*; give", error)


def test_two_categories_of_one_name_are_refused_by_their_ids(tmp_path, refused):
    folder = yolo_folder(tmp_path / "yolo", names="{0: cat, 1: dog, 2: cat}")
    error = refused("format=yolo", f"source={folder}")
    assert "categories: 0 and 2 are both called 'cat'; rename one: predictions are" in error


def test_of_unused_categories_of_one_name_the_first_is_kept_for_the_export(tmp_path, run):
    """Lists of COCO's 91 categories call the unused ones N/A."""
    run("yolo", source=yolo_folder(tmp_path / "yolo", names="{0: cat, 1: a dog, 2: N/A, 3: N/A}"))
    (path,) = tmp_path.rglob("*.categories.json")
    assert json.loads(path.read_text()) == [
        {"id": 0, "name": "cat"},
        {"id": 1, "name": "a dog"},
        {"id": 2, "name": "N/A"},
    ]


def test_a_source_without_one_record_is_refused_with_the_first_image(tmp_path, refused):
    folder = yolo_folder(tmp_path / "yolo")
    (folder / "images" / "train" / "a.png").write_bytes(b"no picture")
    error = refused("format=yolo", f"source={folder}")
    first = f"{folder}/images/train/a.png (sample images/train/a.png)"
    assert re.search("images: .*no record; images skipped: unreadable 1; ", error)
    assert f"(unreadable: first {first}); correct source=... or the files\n" in error
    folder = yolo_folder(tmp_path / "unknown")
    write(folder / "labels" / "train" / "a.txt", f"9 {YOLO_BOX}")
    first = f"{folder}/images/train/a.png (sample images/train/a.png)"
    assert f"(unknown_category: first {first})" in refused("format=yolo", f"source={folder}")
