"""`data.train` and `data.val` are a path, or a list of files (issue 21, point 5)."""

from pathlib import Path

import pytest
from config_changes import fits, load, problems

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


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], "data.train: has no file; write "),
        (["a.jsonl"], "data.train[0]: must be a mapping of keys, got the text"),
        ([{"path": "a.jsonl"}], "data.train[0].weight: is required, and missing; add it, "),
        ([COCO | {"weight": 0.5}], "data.train[0].weight: must be an integer, got 0.5"),
        ([COCO | {"weight": 0}], "data.train[0].weight: must be at least 1, got 0"),
        ([COCO | {"wieght": 1}], "data.train[0].wieght: is not a known key; did you mean 'weight'"),
        ([REFS, REFS], "data.train: several files are called 'refcoco'; give each a `name`"),
        ([COCO | {"path": "a b.jsonl"}], "data.train: 'a b' has characters that a name"),
        (COCO, "data.train: must be a list, got a mapping"),
        (3, "data.train: must be a path, got 3"),
    ],
)
def test_what_is_no_list_of_files_is_one_problem_with_its_place(files, expected):
    (problem,) = problems({"data.train": files})
    assert fits(problem, expected)


def test_held_out_files_have_no_weights():
    (problem,) = problems({"data.val": [COCO]})
    assert fits(problem, "data.val[0].weight: is not a known key; the keys here are path, name")
