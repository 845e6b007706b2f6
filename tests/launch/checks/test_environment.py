"""An environment that cannot be loaded: every command says so, with the place (5, decision 17;
spec: loading).
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from launch.checks.environment import EnvironmentKeys, loaded_environment
from shared.errors import ConfigError

ROOT = Path(__file__).parents[3]
KEYS = EnvironmentKeys("environment.id", "environment.args")
CALLS_EXIT = "def load_environment():\n    exit()\n"


def written(folder: Path, source: str | bytes, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_bytes(source if isinstance(source, bytes) else source.encode())
    return path


def refusal(env_id: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded_environment(str(env_id), {}, KEYS)
    return str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize(("command", "status"), [("train", 2), ("vf_eval", 2), ("preflight", 1)])
def test_an_environment_that_calls_exit_is_told_with_its_place_and_the_command_fails(
    command: str, status: int, tmp_path: Path
) -> None:
    """Preflight goes on to what else is wrong, and ends as with any problem."""
    mine = written(tmp_path, CALLS_EXIT)
    written(tmp_path, "{}", "config.json")
    of_run = [
        "+experiment=env_3v1",
        f"environment.id={mine}",
        f"model.path={tmp_path}",
        f"telemetry.run_dir={tmp_path / 'run'}",
    ]
    arguments = [str(mine), "-b", "http://127.0.0.1:9/v1"] if command == "vf_eval" else of_run
    environment = os.environ | {"COLUMNS": "400"}
    done = subprocess.run(
        [sys.executable, "-m", f"launch.{command}", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=300,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == status, said
    assert (
        f"{mine} was not loaded: RuntimeError: load_environment called exit() ({mine}:2); check"
        in said
    )
    assert "Traceback" not in said


@pytest.mark.parametrize("status", ["0", "1", "'no key'"])
def test_a_module_that_ends_the_process_is_told_with_its_line(tmp_path: Path, status: str) -> None:
    mine = written(tmp_path, f"import sys\n\nsys.exit({status})\n")
    assert (
        f"called exit({status}) ({mine}:3); check environment.args and the environment"
        in refusal(mine)
    )


def test_a_syntax_error_is_told_with_its_own_file_and_line(tmp_path: Path) -> None:
    mine = written(tmp_path, "def load_environment():\n    x = = 3\n")
    assert (
        refusal(mine)
        == f"environment.id: {mine} was not loaded: SyntaxError: invalid syntax ({mine}:2); check"
        " environment.args and the environment"
    )
    neighbour = written(tmp_path, "import os\n\nfor\n", "torn_neighbour.py")
    mine = written(tmp_path, "import torn_neighbour\n", "other.py")
    assert f"SyntaxError: invalid syntax ({neighbour}:3);" in refusal(mine)


def test_a_syntax_error_of_what_it_reads_is_of_the_line_that_reads_it(tmp_path: Path) -> None:
    mine = written(tmp_path, "def load_environment():\n    return eval('3 +')\n")
    assert f"SyntaxError: invalid syntax (<string>, line 1) ({mine}:2);" in refusal(mine)


def test_where_no_line_is_the_environments_own_none_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = EntryPoint("lost", "no_such_module_anywhere", "rollmatch.environments")
    monkeypatch.setattr(
        "rollout_actors.environments.loading.entry_points", lambda group: EntryPoints([lost])
    )
    assert refusal("lost").endswith(
        "ModuleNotFoundError: No module named 'no_such_module_anywhere'; check environment.args and"
        " the environment"
    )
