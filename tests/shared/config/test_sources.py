"""`data.train` and `data.val` are a path, or a list of files (issue 21, point 5)."""

from pathlib import Path

from config_changes import load

from launch.cli import with_absolute_paths
from shared.config import load_config
from shared.config.model import DataSource

COCO = {"path": "coco.jsonl", "weight": 3}
REFS = {"path": "data/train.jsonl", "weight": 1, "name": "refcoco"}


def test_a_path_is_one_file_without_a_name_and_null_none():
    data = load({"data.train": "a.jsonl", "data.val": None}).data
    assert data.train == Path("a.jsonl")
    assert data.sources("train") == (DataSource("data.train", Path("a.jsonl")),)
    assert data.sources("val") == ()


def test_several_files_have_weights_and_are_called_after_their_files_unless_they_have_a_name():
    run = load({"data.train": [COCO, REFS], "data.val": [{"path": "val.jsonl"}]})
    assert run.data.sources("train") == (
        DataSource("data.train[0].path", Path("coco.jsonl"), "coco", 3),
        DataSource("data.train[1].path", Path("data/train.jsonl"), "refcoco", 1),
    )
    assert run.data.sources("val") == (DataSource("data.val[0].path", Path("val.jsonl"), "val"),)
    assert load_config(run.model_dump(mode="json")) == run
    absolute = with_absolute_paths(run).data.sources("train")
    assert [source.path for source in absolute] == [
        Path.cwd() / "coco.jsonl",
        Path.cwd() / "data/train.jsonl",
    ]
