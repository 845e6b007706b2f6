"""The configuration of a run that has ended, as later commands read it."""

import json

import pytest
from config_support import configuration

from launch.runtime.saved_run import load_run
from shared.errors import ConfigError


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(
        configuration(tmp_path / "model", tmp_path / "data", folder).model_dump_json()
    )
    return folder


def refused(run, **changes):
    with pytest.raises(ConfigError) as caught:
        load_run(run, changes)
    return str(caught.value)


def test_what_was_written_is_read_and_dotted_keys_may_be_changed(run, tmp_path):
    config = load_run(run)
    assert config == configuration(tmp_path / "model", tmp_path / "data", run)
    changed = load_run(run, {"evaluation.worst_scenes": 3})
    assert changed == config.model_copy(
        update={"evaluation": config.evaluation.model_copy(update={"worst_scenes": 3})}
    )


def test_a_folder_without_a_run_is_refused(tmp_path):
    assert f"run: {tmp_path / 'x'} holds no run (no config.json); give the folder" in refused(
        tmp_path / "x"
    )
    (tmp_path / "file").write_text("")
    assert "holds no run (no config.json)" in refused(tmp_path / "file")


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe{"])
def test_a_damaged_configuration_is_refused(run, content):
    (run / "config.json").write_bytes(content)
    assert "config.json" in refused(run) and "restore it" in refused(run)


def test_a_configuration_that_cannot_be_read_is_refused(run):
    (run / "config.json").unlink()
    (run / "config.json").mkdir()
    assert (
        "config.json cannot be read (Is a directory); permit reading it, or restore it"
        in refused(run)
    )


def test_the_run_of_another_version_is_told_from_wrong_changes(run):
    assert "another version" not in refused(run, **{"evaluation.worst_scens": 3})
    saved = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(saved | {"of_old": 1}))
    said = refused(run, **{"evaluation.worst_scenes": 3})
    assert (
        "config.json was written by another version; check that version out\nof_old: is not a"
        " known key" in said
    )
