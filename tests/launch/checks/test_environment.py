"""An environment that cannot be loaded: every command says so, with the place (5, decision 17;
spec: loading).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from launch.checks.environment import EnvironmentKeys, loaded_environment
from rollout_actors.environments.concurrency import describe_error, traceback_of
from shared.errors import ConfigError

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


@pytest.mark.slow
@pytest.mark.parametrize(("command", "status"), [("train", 2), ("vf_eval", 2), ("preflight", 1)])
def test_an_environment_that_calls_exit_is_told_with_its_place_and_the_command_fails(
    command: str,
    status: int,
    tmp_path: Path,
    call_command: Callable[..., tuple[int, str]],
) -> None:
    """Preflight goes on to what else is wrong, and ends as with any problem."""
    mine = written(tmp_path, CALLS_EXIT)
    written(tmp_path, "{}", "config.json")
    of_run = [
        *("+experiment=env_3v1", "backend=hf"),
        f"environment.id={mine}",
        f"model.path={tmp_path}",
        f"telemetry.run_dir={tmp_path / 'run'}",
    ]
    arguments = [str(mine), "-b", "http://127.0.0.1:9/v1"] if command == "vf_eval" else of_run
    ended, output = call_command(f"launch.{command}", *arguments)
    assert ended == status, output
    called = (
        f"{mine} was not loaded: RuntimeError: load_environment called exit() ({mine}:2); check"
    )
    assert called in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("source", "cause", "line"),
    [
        ("import sys\n\nsys.exit(0)\n", "called exit(0)", 3),
        ("import sys\n\nsys.exit(1)\n", "called exit(1)", 3),
        ("import sys\n\nsys.exit('no key')\n", "called exit('no key')", 3),
        ("def load_environment():\n    x = = 3\n", "SyntaxError: invalid syntax", 2),
        (
            "def load_environment():\n    return eval('3 +')\n",
            "SyntaxError: invalid syntax (<string>, line 1)",
            2,
        ),
    ],
)
def test_what_ends_the_loading_is_told_with_its_line(tmp_path, source, cause, line) -> None:
    """Of a syntax error in what it reads it is the line that reads it."""
    mine = written(tmp_path, source)
    problem = refusal(mine)
    assert problem.startswith(f"environment.id: {mine} was not loaded: ")
    assert f"{cause} ({mine}:{line}); check environment.args and the environment" in problem


def test_a_syntax_error_of_a_neighbour_is_told_with_the_neighbours_line(tmp_path: Path) -> None:
    neighbour = written(tmp_path, "import os\n\nfor\n", "torn_neighbour.py")
    mine = written(tmp_path, "import torn_neighbour\n", "other.py")
    assert f"SyntaxError: invalid syntax ({neighbour}:3);" in refusal(mine)


def test_where_no_line_is_the_environments_own_none_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = EntryPoint("lost", "no_such_module_anywhere", "rollmatch.environments")
    monkeypatch.setattr(
        "rollout_actors.environment_names.entry_points", lambda group: EntryPoints([lost])
    )
    assert refusal("lost").endswith(
        "ModuleNotFoundError: No module named 'no_such_module_anywhere'; check environment.args and"
        " the environment"
    )


def test_an_error_of_loading_and_of_a_rollout_has_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-LEAK1")
    source = """import os
def load_environment(api_key):
    raise {kind}("neither " + api_key + " nor " + os.environ["OPENAI_API_KEY"])
"""
    for kind in ("ValueError", "KeyError"):
        path = written(tmp_path, source.replace("{kind}", kind))
        with pytest.raises(ConfigError) as caught:
            loaded_environment(str(path), {"api_key": "sk-LEAK5"}, KEYS)
        assert "neither <secret> nor <secret>" in str(caught.value)
    error = RuntimeError("call failed with sk-LEAK5")
    error.__context__ = OSError("https://me:pw@host")
    for text in (describe_error(error), traceback_of(error)):
        assert re.findall("LEAK|me:pw|<secret>", text).count("<secret>") == 2
