import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from launch import make_demo_data as demo
from shared.errors import ConfigError


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "data"
    assert demo.make_demo_data(out, seed=17, num_train=40, num_val=12)
    return out


def records(data: Path, split: str) -> list[dict]:
    return [json.loads(line) for line in (data / f"{split}.jsonl").read_text().splitlines()]


def every_file(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_same_seed_gives_the_same_bytes_and_another_seed_gives_others(data, tmp_path):
    demo.make_demo_data(tmp_path / "again", seed=17, num_train=40, num_val=12)
    demo.make_demo_data(tmp_path / "other", seed=18, num_train=40, num_val=12)
    assert every_file(tmp_path / "again") == every_file(data)
    assert every_file(tmp_path / "other").keys() == every_file(data).keys()
    assert (tmp_path / "other" / "train.jsonl").read_bytes() != (data / "train.jsonl").read_bytes()


def test_every_scene_has_its_image_and_one_to_four_named_boxes_in_reading_order(data):
    rows = records(data, "train") + records(data, "val")
    assert len(rows) == 52
    assert {len(row["objects"]) for row in rows} == {1, 2, 3, 4}
    for row in rows:
        with Image.open(data / row["images"][0]) as image:
            assert image.size == (row["width"], row["height"]) == (96, 96)
        boxes = [found["bbox_2d"] for found in row["objects"]]
        assert all(0 <= x1 < x2 <= 999 and 0 <= y1 < y2 <= 999 for x1, y1, x2, y2 in boxes)
        assert boxes == sorted(boxes, key=lambda box: (box[1], box[0]))
        assert {found["desc"] for found in row["objects"]} <= set(demo.NAMES)


def test_all_ink_is_inside_a_box_and_every_box_has_some(data):
    for row in records(data, "train"):
        ink = np.asarray(Image.open(data / row["images"][0]).convert("L")) > 0
        outside = ink.copy()
        for found in row["objects"]:
            # Bins round outwards, by less than a tenth of a pixel: the nearest pixel is the exact one.
            x1, y1, x2, y2 = (round(v * 95 / 999) for v in found["bbox_2d"])
            assert x2 - x1 == y2 - y1
            assert (x2 - x1 + 1) in demo.SIZES
            assert ink[y1 : y2 + 1, x1 : x2 + 1].any()
            outside[y1 : y2 + 1, x1 : x2 + 1] = False
        assert not outside.any()


def test_bins_are_pixels_of_the_first_and_last_pixel_rounded_outwards():
    digit = demo.Digit(scan=np.full((8, 8), 16, dtype=np.uint8), name="one")
    assert demo.Placement(digit, left=0, top=0, size=96).bins() == (0, 0, 999, 999)
    # 8 / 95 * 999 = 84.13, 31 / 95 * 999 = 325.99
    assert demo.Placement(digit, left=8, top=8, size=24).bins() == (84, 84, 326, 326)


def test_digits_never_overlap():
    _, digits = demo.load_handwriting()
    rng = np.random.default_rng(0)
    for _ in range(50):
        covered = np.zeros((96, 96), dtype=int)
        for placed in demo.arrange_scene(digits, rng):
            covered[placed.top : placed.top + placed.size, placed.left : placed.left + placed.size] += 1
        assert covered.max() == 1


def test_validation_digits_are_the_297_that_training_never_shows():
    train, val = demo.load_handwriting()
    assert (len(train), len(val)) == (1500, 297)
    assert {digit.name for digit in val} == set(demo.NAMES)


def test_data_that_is_there_is_kept(data, capsys):
    before = (data / "train.jsonl").stat().st_mtime_ns
    demo.main(["--out", str(data), "--train", "40", "--val", "12"])
    assert "there already" in capsys.readouterr().out
    assert (data / "train.jsonl").stat().st_mtime_ns == before


def test_a_folder_made_from_other_settings_is_refused_by_name(data):
    with pytest.raises(ConfigError, match="was made from another seed, train; remove it"):
        demo.make_demo_data(data, seed=18, num_train=41, num_val=12)
