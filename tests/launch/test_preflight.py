"""Bad input ends with a clear error before anything is started (issue 2)."""

import json
import shutil

import pytest
from config_support import configuration
from PIL import Image

from launch.preflight import check_data
from shared.errors import ConfigError, RecordError


@pytest.fixture
def run(tmp_path, demo_data):
    """A configuration over a copy of the data, and the copy's folder; the model is a folder that looks like one."""
    data = tmp_path / "data"
    shutil.copytree(demo_data, data)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return configuration(model, data, tmp_path / "run"), data


def change_row(data, number, **changes):
    lines = (data / "train.jsonl").read_text().splitlines()
    lines[number] = json.dumps(json.loads(lines[number]) | changes)
    (data / "train.jsonl").write_text("\n".join(lines) + "\n")


def test_sound_data_pass(run):
    check_data(run[0])


def test_a_missing_file_is_named_with_its_key(run):
    config, data = run
    (data / "val.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"data\.val: there is no file .*val\.jsonl; run `make demo-data`, or set data\.val"):
        check_data(config)


def test_a_missing_checkpoint_is_named_with_its_key(run, tmp_path):
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"model\.path: .* holds no checkpoint"):
        check_data(run[0])


def test_a_bad_row_is_located_by_file_line_and_field(run):
    config, data = run
    change_row(data, 4, objects=[{"bbox_2d": [5, 5, 1, 9], "desc": "one"}])
    with pytest.raises(RecordError, match=r"train\.jsonl:5: objects\[0\]\.bbox_2d"):
        check_data(config)


def test_an_image_that_is_not_one_is_refused(run):
    config, data = run
    (data / "train" / "00003.png").write_text("not a picture")
    with pytest.raises(RecordError, match=r"00003\.png"):
        check_data(config)


def test_a_truncated_image_is_refused(run):
    config, data = run
    image = data / "train" / "00003.png"
    image.write_bytes(image.read_bytes()[:60])
    with pytest.raises(RecordError, match=r"00003\.png is not a readable image"):
        check_data(config)


def test_an_image_of_another_size_than_its_row_says_is_refused(run):
    config, data = run
    Image.new("RGB", (50, 40)).save(data / "train" / "00003.png")
    with pytest.raises(RecordError, match="is 50 x 40 pixels, the row says 96 x 96"):
        check_data(config)
