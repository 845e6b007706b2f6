"""`rollmatch new-environment NAME`: what it writes works as it stands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from launch.cli import CONF
from launch.tools.new_environment import main, write_environment
from rollout_actors.environments.loading import load_environment
from shared.config import load_config
from shared.errors import ConfigError


@pytest.fixture
def folder(tmp_path, capsys):
    main(["my_task", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    names = ("my_task.py", "test_my_task.py", "experiment/my_task.yaml")
    assert [name for name in names if f"{tmp_path / name}: `" not in printed] == []
    return tmp_path


def test_printed_commands_quote_a_folder_with_a_blank(tmp_path, capsys):
    main(["my_task", "--out", str(tmp_path / "my folder")])
    printed = capsys.readouterr().out
    assert f"`vf-eval '{tmp_path}/my folder/my_task.py'`" in printed
    assert f"--config-dir '{tmp_path}/my folder' +experiment=my_task`" in printed


@pytest.mark.slow
def test_the_test_that_is_written_passes(folder):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_task.py"]
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "4 passed" in done.stdout, done.stdout + done.stderr


def test_the_experiment_that_is_written_composes_and_loads_from_any_folder(folder):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        overrides = [f"hydra.searchpath=[file://{folder}]", "+experiment=my_task"]
        written = OmegaConf.to_container(compose("train", overrides=overrides), resolve=True)
    run = load_config(written)
    assert run.environment is not None
    environment = load_environment(run.environment.id, **run.environment.args)
    assert environment.name == "my_task"
    assert len(environment.get_dataset()) == 640


@pytest.mark.parametrize("name", ["my-task", "class", "2nd", "arithmetic", "random"])
def test_a_name_that_is_no_modules_or_is_taken_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match=r"^NAME: "):
        write_environment(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over(folder):
    (folder / "my_task.py").write_text("mine")
    with pytest.raises(ConfigError, match=r"--out: .*my_task\.py.* already exists"):
        write_environment("my_task", folder)
    assert (folder / "my_task.py").read_text() == "mine"


def test_a_name_with_a_word_of_the_templates_stays_whole(tmp_path):
    environment, _, experiment = write_environment("PATHFINDER", tmp_path / "NAME")
    assert 'env_id="PATHFINDER"' in environment.read_text()
    assert f'id: "{environment}"' in experiment.read_text()
