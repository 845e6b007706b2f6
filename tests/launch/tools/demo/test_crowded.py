import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from launch.tools.demo import crowded
from launch.tools.demo.__main__ import main
from launch.tools.demo.data import NAMES, load_all_digits
from shared.dataset import load_dataset

COUNTS = {"train": 20, "val": 6, "test": 6}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("crowded") / "data"
    main(["crowded", "--out", str(out), "--train", "20", "--val", "6", "--test", "6"])
    return out


@pytest.fixture(scope="module")
def arranged() -> list[list[crowded.Placed]]:
    rng = np.random.default_rng(5)
    digits = load_all_digits()
    return [crowded.arrange(digits, rng) for _ in range(60)]


def test_the_same_seed_gives_the_same_bytes_and_another_seed_gives_others(data, tmp_path):
    again, other = tmp_path / "again", tmp_path / "other"
    crowded.make_crowded_data(again, seed=17, counts=COUNTS)
    crowded.make_crowded_data(other, seed=18, counts=COUNTS)
    names = sorted(path.relative_to(data) for path in data.rglob("*") if path.is_file())
    assert len(names) == 32 + 3 + 1
    assert all((again / name).read_bytes() == (data / name).read_bytes() for name in names)
    assert (other / "train.jsonl").read_bytes() != (data / "train.jsonl").read_bytes()


def test_splits_are_of_disjoint_digits_and_together_of_all():
    numbers = [range(1797)[part] for part in crowded.SPLITS.values()]
    assert sorted(number for part in numbers for number in part) == list(range(1797))


@pytest.mark.parametrize("split", COUNTS)
def test_records_are_6_to_14_named_boxes_in_reading_order_that_the_learner_reads(data, split):
    rows = [json.loads(line) for line in (data / f"{split}.jsonl").read_text().splitlines()]
    assert len(rows) == COUNTS[split]
    for row in rows:
        boxes = [found["bbox_2d"] for found in row["objects"]]
        assert 6 <= len(boxes) <= 14
        assert boxes == sorted(boxes, key=lambda box: (box[1], box[0]))
        assert {found["desc"] for found in row["objects"]} <= set(NAMES)
        with Image.open(data / row["images"][0]) as image:
            assert image.size == (row["width"], row["height"]) == (160, 160)
    path = data / f"{split}.jsonl"
    dataset = load_dataset(path, on_bad_row="error", sort_objects=False, check_images=True)
    assert len(dataset.samples) == COUNTS[split]


def test_digits_overlap_a_little_and_clutter_overlaps_nothing(arranged):
    shares = [
        (one.overlap(other), bool(one.name and other.name))
        for scene in arranged
        for one, other in combinations(scene, 2)
    ]
    of_digits = [share for share, are_digits in shares if are_digits]
    assert 0 < max(of_digits) <= crowded.MAX_OVERLAP
    assert {share for share, are_digits in shares if not are_digits} == {0.0}


def test_an_overlap_is_the_shared_area_of_the_smaller_one():
    scan = np.zeros((8, 8), dtype=np.uint8)
    large = crowded.Placed(scan, "six", left=0, top=0, size=40)
    small = crowded.Placed(scan, "two", left=30, top=20, size=20)
    assert large.overlap(small) == small.overlap(large) == 10 * 20 / 20**2
    assert large.overlap(crowded.Placed(scan, "two", left=40, top=0, size=20)) == 0


def test_a_box_is_of_its_first_and_last_pixel():
    placed = crowded.Placed(np.full((8, 8), 16, dtype=np.uint8), "one", left=80, top=4, size=24)
    pixels = np.asarray(crowded.draw([placed]).convert("L"))
    rows, columns = np.nonzero(pixels)
    first_and_last = [columns.min(), rows.min(), columns.max(), rows.max()]
    assert first_and_last == [80, 4, 103, 27]
    # Rounded outwards: bins are of 999 to 159 pixels.
    assert placed.bins() == (502, 25, 648, 170)


def test_scenes_may_have_fewer_digits(tmp_path):
    few = ["--fewest", "1", "--most", "3", "--train", "20", "--val", "0", "--test", "0"]
    main(["crowded", "--out", str(tmp_path / "few"), *few])
    rows = [json.loads(line) for line in (tmp_path / "few" / "train.jsonl").open()]
    assert {len(row["objects"]) for row in rows} == {1, 2, 3}
    with pytest.raises(SystemExit, match="--fewest and --most: 1 to 14, got 4, 3"):
        main(["crowded", "--out", str(tmp_path / "none"), "--fewest", "4", "--most", "3"])


def test_a_row_may_ask_for_the_digits_of_one_name_in_the_same_scene(data, tmp_path):
    out = tmp_path / "asked"
    main(["crowded", "--out", str(out), "--phrases", "--train", "20", "--val", "6", "--test", "6"])
    all_of = [json.loads(line) for line in (data / "train.jsonl").open()]
    asked = [json.loads(line) for line in (out / "train.jsonl").open()]
    for row, whole in zip(asked, all_of, strict=True):
        (image,) = row["images"]
        assert (out / image).read_bytes() == (data / image).read_bytes()
        of_name = [one for one in whole["objects"] if one["desc"] == row["phrase"]]
        assert row["objects"] == of_name != []
    assert len({row["phrase"] for row in asked}) > 3


def test_a_scene_without_room_for_its_digits_is_begun_again():
    digits = load_all_digits()
    for seed in range(10):
        rng = np.random.default_rng(seed)
        crowd = crowded.arrange(digits, rng, fewest=16, most=16)
        assert sum(bool(placed.name) for placed in crowd) == 16
