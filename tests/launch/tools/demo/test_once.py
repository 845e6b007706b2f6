import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from launch.tools.demo import smollm
from launch.tools.demo.__main__ import main
from launch.tools.demo.once import (
    CARRIED_START,
    DEMO_FOLDERS,
    SETTINGS_FILE,
    UNTRAINED,
    make_missing_demo_files,
    make_once,
    untrained_model,
)
from shared.errors import ConfigError
from tests.fixtures.config_changes import load
from tests.fixtures.gguf_file import write_gguf

LANGUAGE_MODEL = {
    "model.path": "outputs/demo/lm",
    "data.train": "own/train.jsonl",
    "data.val": None,
}


def test_an_interrupted_run_leaves_nothing_that_could_be_taken_for_complete(tmp_path):
    def interrupted(folder):
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_once(tmp_path / "out", {"seed": 1}, interrupted)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_the_user_is_never_taken_over(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="was not made by this command"):
        make_once(tmp_path, {"seed": 1}, lambda folder: None)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_what_exists_is_not_made_again_and_refused_where_its_settings_were_others(tmp_path):
    folders = []
    settings = {"seed": 1, "train": 40, "val": 12}
    assert make_once(tmp_path / "out", settings, folders.append)
    assert not make_once(tmp_path / "out", settings, folders.append)
    changed = {"seed": 2, "train": 41, "val": 12, "geometry": "mixed"}
    with pytest.raises(ConfigError, match=" geometry, seed, train; remove it"):
        make_once(tmp_path / "out", changed, folders.append)
    assert len(folders) == 1


@pytest.mark.slow
def test_what_a_shipped_experiment_needs_is_made_once_before_its_first_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load(LANGUAGE_MODEL)
    shown = []
    make_missing_demo_files(config, shown.append)
    folder = tmp_path / "outputs/demo/lm"
    assert json.loads((folder / SETTINGS_FILE).read_text()) == {"seed": 17}
    assert (folder / "model.safetensors").is_file()
    made_at = folder.stat().st_mtime_ns
    make_missing_demo_files(config, shown.append)
    assert len(shown) == 1 and "rollmatch demo language-model" in shown[0]
    assert folder.stat().st_mtime_ns == made_at


def test_a_trained_start_is_made_for_the_checkpoint_in_it_and_only_kept_whole(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    outcomes = [1, 0]
    runs = []

    def run(command, check):
        if "launch.tools.demo" in command:
            main(command[command.index("launch.tools.demo") + 1 :])
            return Mock(returncode=0)
        runs.append(command[3:])
        return Mock(returncode=outcomes.pop(0))

    monkeypatch.setattr("subprocess.run", run)
    config = load(LANGUAGE_MODEL | {"model.path": "outputs/demo/stage1_polygons/checkpoint"})
    with pytest.raises(SystemExit):
        make_missing_demo_files(config, lambda line: None)
    assert list((tmp_path / "outputs/demo").iterdir()) == []
    make_missing_demo_files(config, lambda line: None)
    assert (tmp_path / "outputs/demo/stage1_polygons" / SETTINGS_FILE).is_file()
    _, *overrides = DEMO_FOLDERS[Path("outputs/demo/stage1_polygons")]
    assert [list(words[: len(overrides)]) for words in runs] == [overrides, overrides]


def test_preflight_trains_no_start_and_looks_at_an_untrained_model_of_its_shape(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    start = Path("outputs/demo/stage1_polygons")
    config = load(LANGUAGE_MODEL | {"model.path": str(start / "checkpoint")})
    shown = []
    assert untrained_model(config.model, shown.append).path == str(UNTRAINED[start])
    assert len(shown) == 1 and "rollmatch demo trained +experiment=stage1_polygons" in shown[0]
    assert UNTRAINED.keys() | set(UNTRAINED.values()) <= DEMO_FOLDERS.keys()
    start.mkdir(parents=True)
    assert untrained_model(config.model, pytest.fail) == config.model


def test_the_carried_start_is_at_most_8_mb_and_finds_its_way_to_where_experiments_look(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert sum(file.stat().st_size for file in CARRIED_START.iterdir()) <= 8_000_000
    config = load(LANGUAGE_MODEL | {"model.path": "outputs/demo/crowded_start"})
    monkeypatch.setattr(
        "subprocess.run",
        lambda command, check: Mock(returncode=main(command[3:]) or 0),
    )
    make_missing_demo_files(config, lambda line: None)
    made = {file.name: file.read_bytes() for file in Path(config.model.path).iterdir()}
    del made[SETTINGS_FILE]
    carried = {file.name: file.read_bytes() for file in CARRIED_START.iterdir()}
    del carried["README.md"]
    assert made == carried
    capsys.readouterr()
    main(["start"])
    assert "there already" in capsys.readouterr().out


def test_a_path_of_the_users_own_is_never_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load(
        {
            "model.path": str(tmp_path / "outputs/demo/lm"),
            "data.train": "train.jsonl",
            "data.val": None,
        }
    )
    make_missing_demo_files(config, pytest.fail)
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_cannot_make_them_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").write_text("a file where a folder has to be")
    config = load(LANGUAGE_MODEL)
    with pytest.raises(
        ConfigError, match=r"launch\.tools\.demo language-model --out outputs/demo/lm.*status"
    ):
        make_missing_demo_files(config, lambda line: None)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_what_is_made_follows_the_umask_whoever_wrote_it(mask, mode, tmp_path):
    before = os.umask(mask)
    try:
        make_once(tmp_path / "out", {"seed": 1}, lambda folder: save_file({}, folder / "a"))
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {mode}


@pytest.mark.slow
def test_smollm_is_made_from_its_package_and_without_it_the_command_to_run_is_named(
    tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(smollm, "PACKAGE", "a_package_that_is_not_installed")
        with pytest.raises(ConfigError, match=r"`make smollm`.*`pip install"):
            smollm.make_smollm(tmp_path / "out")
    package = tmp_path / smollm.PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('has other requirements')")
    write_gguf(package / smollm.FILE)
    monkeypatch.syspath_prepend(tmp_path)
    assert smollm.make_smollm(tmp_path / "out")
    assert not smollm.make_smollm(tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype is torch.float32


@pytest.mark.parametrize("what", ["data", "crowded", "model", "language-model", "start"])
def test_the_command_refuses_a_folder_of_the_user_without_a_traceback(tmp_path, capsys, what):
    with pytest.raises(SystemExit) as end:
        main([what, "--out", str(tmp_path)])
    assert end.value.code == 2
    assert f"{tmp_path}: exists, but was not made by this command" in capsys.readouterr().out
