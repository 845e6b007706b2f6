"""docs/tutorials/detection.md: the commands for one's own model and data fit each other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_support import commands_of
from hydra import compose, initialize_config_dir
from PIL import Image
from rich.console import Console
from tiny_qwen import make_stock_model

from launch.checks.preflight import preflight
from launch.cli import CONF, as_mapping, as_schema_overrides, with_absolute_paths
from launch.processes.placement import Resources
from launch.tools import add_coord_tokens, coco
from launch.train import run
from shared.config import load_config
from shared.run_files import read_lines

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "detection.md"


def commands(models: Path, title: str = "## 6. Use a real model") -> list[tuple[str, list[str]]]:
    """Return the modules of the section's first block, in order, each with its arguments."""
    section = PAGE.read_text().partition(title)[2]
    return commands_of(section.split("```")[1].replace("/models", str(models)))


def made_stock_and_annotations(folder: Path) -> None:
    """Make what the section's commands name: a small stock checkpoint, and COCO files."""
    stock = make_stock_model(folder / "models" / "Qwen3-VL-4B-Instruct", "qwen3_vl")
    config_file = stock / "config.json"
    length = '"max_position_embeddings": '
    text = config_file.read_text()
    config_file.write_text(text.replace(f"{length}4096", f"{length}262144"))
    (folder / "images").mkdir()
    for part, number in (("train", 1), ("val", 2)):
        Image.new("RGB", (100, 80)).save(folder / "images" / f"{number}.png")
        box = {
            "id": 1,
            "image_id": number,
            "category_id": 3,
            "bbox": [10, 20, 30, 40],
            "iscrowd": 0,
            "segmentation": [[10, 20, 40, 20, 40, 60]],
            "area": 600,
        }
        image = {"id": number, "file_name": f"{number}.png", "width": 100, "height": 80}
        categories = [{"id": 3, "name": "cat"}]
        content = {"images": [image], "annotations": [box], "categories": categories}
        (folder / f"instances_{part}.json").write_text(json.dumps(content))


@pytest.mark.slow
def test_the_commands_for_ones_own_model_and_data_work_one_after_the_other(tmp_path, monkeypatch):
    """A small stock checkpoint and COCO files with polygons; both jobs are checked and not run.

    Stage 2 begins with a copy of the checkpoint with which stage 1 begins.
    """
    monkeypatch.chdir(tmp_path)
    made_stock_and_annotations(tmp_path)
    *steps, checked, trained, checked_2, trained_2 = commands(tmp_path / "models")
    assert (checked[0], trained) == ("launch.preflight", ("launch.train", checked[1]))
    assert (checked_2[0], trained_2) == ("launch.preflight", ("launch.train", checked_2[1]))
    adding, *importing = steps
    assert adding[0] == "launch.add_coord_tokens"
    add_coord_tokens.main(adding[1])
    assert [module for module, _ in importing] == ["launch.coco"] * 2
    for _, arguments in importing:
        coco.main(arguments)
    made = next(word for word in adding[1] if word.startswith("out="))
    shutil.copytree(made.removeprefix("out="), tmp_path / "outputs/mine/stage1/checkpoint")
    for words in (checked[1], checked_2[1]):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = load_config(as_mapping(compose("train", overrides=as_schema_overrides(words))))
        findings = preflight(
            with_absolute_paths(config),
            nodes_of=lambda *_: [Resources(cpus=64, gpus=4)],
            memory_of=lambda _: None,
        )
        assert findings.problems == []


@pytest.mark.slow
def test_the_supervised_commands_train_a_stock_checkpoint_in_its_own_format(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made_stock_and_annotations(tmp_path)
    for module, arguments in commands(tmp_path / "models"):
        if module == "launch.coco":
            coco.main(arguments)
    checked, trained = commands(tmp_path / "models", "### Supervised training only")
    assert (checked[0], trained) == ("launch.preflight", ("launch.train", checked[1]))
    short = [
        "training.num_epochs=2",
        "training.effective_batch_size=1",
        "rollout_matching.max_new_tokens=8",
        "learner.cpu_threads=1",
    ]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        words = as_schema_overrides([*trained[1], *short])
        config = load_config(as_mapping(compose("train", overrides=words)))
    run(config, Console(quiet=True))
    folder = tmp_path / "outputs" / "mine" / "sft"
    (first, second) = read_lines(folder / "metrics.jsonl")
    assert (first["channel"], second["step"]) == ("A", 2)
    assert (folder / "checkpoint" / "model.safetensors").exists()
    assert [line["step"] for line in read_lines(folder / "evaluations.jsonl")] == [0, 2]
