"""The configuration of a run that has ended, as later commands read it."""

import json
import re

import pytest
from config_support import configuration, trajectory_config

from launch.checks.environment import ENVIRONMENT_KEYS, loaded_environment
from launch.run_folder.resume import config_of_run, deciding
from launch.run_folder.saved_run import load_run
from shared.errors import ConfigError


@pytest.fixture
def file(tmp_path):
    """The configuration in a run's folder."""
    folder = tmp_path / "run"
    folder.mkdir()
    config = configuration(tmp_path / "model", tmp_path / "data", folder)
    (folder / "config.json").write_text(config.model_dump_json())
    return folder / "config.json"


def refused(run, **changes):
    with pytest.raises(ConfigError) as caught:
        load_run(run, changes)
    return str(caught.value)


def test_what_was_written_is_read_and_dotted_keys_may_be_changed(file, tmp_path):
    config = load_run(file.parent)
    assert config == configuration(tmp_path / "model", tmp_path / "data", file.parent)
    changed = load_run(file.parent, {"evaluation.worst_scenes": 3})
    evaluation = config.evaluation.model_copy(update={"worst_scenes": 3})
    assert changed == config.model_copy(update={"evaluation": evaluation})


@pytest.mark.parametrize("is_file", [False, True])
def test_a_folder_without_a_run_is_refused(tmp_path, is_file):
    run = tmp_path / "x"
    if is_file:
        run.write_text("")
    assert re.search(rf"run: {run} holds no run .*config\.json", refused(run))


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe{"])
def test_a_damaged_configuration_is_refused(file, content):
    file.write_bytes(content)
    problem = refused(file.parent)
    assert "config.json" in problem and "restore it" in problem


def test_a_configuration_that_cannot_be_read_is_refused(file):
    file.unlink()
    file.mkdir()
    unread = "config.json cannot be read (Is a directory); permit reading it, or restore it"
    assert unread in refused(file.parent)


def test_the_run_of_another_version_is_told_from_wrong_changes(file):
    assert "another version" not in refused(file.parent, **{"evaluation.worst_scens": 3})
    file.write_text(json.dumps(json.loads(file.read_text()) | {"of_old": 1}))
    problem = refused(file.parent, **{"evaluation.worst_scenes": 3})
    other = "config.json was written by another version of rollmatch; check out that version"
    assert f"{other}\nof_old: is not a known key" in problem


@pytest.fixture
def with_secret(tmp_path):
    """The folder of a run of an environment with a key, and its configuration."""
    folder = tmp_path / "with secret"
    folder.mkdir()
    args = {"api_key": "sk-LEAK5", "num_examples": 3}
    config = trajectory_config(tmp_path / "model", folder, environment__args=args)
    (folder / "config.json").write_text(config.model_dump_json())
    return folder, config


def test_a_secret_is_not_kept_and_the_environment_asks_for_it_again(with_secret, monkeypatch):
    folder, _ = with_secret
    assert "LEAK" not in (folder / "config.json").read_text()
    saved = config_of_run(folder, [])
    with pytest.raises(ConfigError) as caught:
        loaded_environment("arithmetic", saved.environment.args, ENVIRONMENT_KEYS)
    assert "environment.args: api_key is a secret" in str(caught.value)
    assert "'environment.args.KEY=${oc.env:NAME}'" in str(caught.value)
    monkeypatch.setenv("MY_KEY", "sk-LEAK6")
    again = config_of_run(folder, ["++environment.args.api_key=${oc.env:MY_KEY}"])
    assert again.environment.args == {"api_key": "sk-LEAK6", "num_examples": 3}
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ConfigError, match=r"args\.api_key: .*MY_KEY.* set "):
        config_of_run(folder, ["++environment.args.api_key=${oc.env:MY_KEY}"])


def test_a_run_with_another_secret_is_the_same_run(with_secret):
    folder, config = with_secret
    args = {"environment.args": {"api_key": "another", "num_examples": 3}}
    other = load_run(folder, args)
    assert other != config
    assert deciding(other.model_dump(mode="json")) == deciding(config.model_dump(mode="json"))
    fewer = load_run(folder, {**args, "environment.args.num_examples": 2})
    assert deciding(fewer.model_dump(mode="json")) != deciding(config.model_dump(mode="json"))
