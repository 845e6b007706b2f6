"""The command line: how a command ends, its `key=value` options, and what Hydra may be given."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from pydantic import Field
from ray.exceptions import RayTaskError
from rich.console import Console

from launch import cli
from launch.cli import CONF, as_mapping, as_schema_overrides, explained, read_arguments
from launch.run_folder.console import CONSOLE_LOG
from shared.config import load_config
from shared.config.base import ConfigPath, Section
from shared.errors import ConfigError, LearnerError, RecordError, RolloutError

ROOT = Path(__file__).parents[2]


def ending(action):
    """Exit status and output."""
    output = io.StringIO()
    with pytest.raises(SystemExit) as caught, explained(Console(file=output, width=200)):
        action()
    return caught.value.code, output.getvalue()


def raising(error):
    def act():
        raise error

    return act


@pytest.mark.parametrize(
    ("error", "status", "output"),
    [
        (ConfigError("a.b: is wrong; write c"), 2, "ConfigError\na.b: is wrong; write c\n"),
        (RecordError("is wrong", field="x", remedy="mend it"), 2, None),
        (LearnerError("ended", phase="start"), 1, None),
        (
            PermissionError(13, "Permission denied", "/x"),
            1,
            "PermissionError\n[Errno 13] Permission denied: '/x'\n",
        ),
    ],
)
def test_what_the_user_can_mend_ends_with_2_and_what_went_wrong_with_1(error, status, output):
    code, printed = ending(raising(error))
    assert code == status
    assert output is None or printed == output


def test_what_ray_makes_of_an_actors_error_is_not_told_a_second_time_with_its_traceback():
    error = RolloutError("no room", actor="rollout-actor-0", phase="start")
    task_error = RayTaskError(
        "EngineActor.start", f"Traceback (most recent call last):\n{error}", error
    )
    of_ray = task_error.as_instanceof_cause()
    assert isinstance(of_ray, RolloutError)
    error.__cause__ = of_ray
    assert ending(raising(error)) == (1, f"RolloutError\n{error}\n")
    error.__cause__ = other = LearnerError("ended", phase="send_weights")
    assert ending(raising(error))[1] == f"RolloutError\n{error}\ncaused by LearnerError: {other}\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_ends_with_130_and_no_traceback(number):
    interrupted = "interrupted; every process that this command started was ended\n"
    assert ending(lambda: os.kill(os.getpid(), number)) == (130, interrupted)


def test_a_command_under_nohup_continues_when_the_terminal_is_closed():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with explained(Console(file=io.StringIO())):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


PRINTING = """
import sys
from pathlib import Path
from rich.console import Console
from launch.cli import explained
from launch.run_folder.console import keep_lost_console
console = Console()
with explained(console):
    console.print("before the run folder")
    keep_lost_console(Path(sys.argv[1]))
    console.print("to standard output")
    print("to standard error", file=sys.stderr)
    console.print("the end")
"""


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["a reader that is gone", "a full disk", "closed descriptors"])
def test_a_command_outlives_its_console_whose_lines_continue_in_the_run_folder(lost, tmp_path):
    command = [sys.executable, "-c", PRINTING, str(tmp_path)]
    if lost == "closed descriptors":
        command = ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', *command]
        target = None
    elif lost == "a full disk":
        target = os.open("/dev/full", os.O_WRONLY)
    else:
        end, target = os.pipe()
        os.close(end)
    done = subprocess.run(command, cwd=ROOT, stdout=target, stderr=target, timeout=240, check=False)
    if target is not None:
        os.close(target)
    assert done.returncode == 0
    lines = (tmp_path / CONSOLE_LOG).read_text().splitlines()
    told = [line for line in lines if "the console could not be written" in line]
    assert len(told) == 2  # of standard output, of standard error
    assert [line for line in lines if line not in told] == [
        "to standard output",
        "to standard error",
        "the end",
    ]


STUBBORN = """
import time
from rich.console import Console
from launch.cli import explained
with explained(Console()):
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        print("saving", flush=True)
        time.sleep(60)
"""


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_command_at_once_and_says_what_it_leaves():
    """A SIGTERM that is repeated, and a SIGINT that comes twice, do not."""
    cli._end_at_once(time.monotonic() + 60.0)
    command = [sys.executable, "-c", STUBBORN]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "saving\n"
        process.send_signal(signal.SIGTERM)
        time.sleep(cli.TWICE_S)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 130
        told = process.stderr.read()
    assert re.search("ended at once: .*files .*processes none ", told)


class Options(Section):
    name: Annotated[str, Field(min_length=1)] | None = None
    title: str = "none"
    folder: ConfigPath | None = None
    count: int | None = 1
    """How many."""
    sure: bool = False


@pytest.mark.parametrize(
    ("arguments", "problems"),
    [
        (
            ["name=a", "name=b", "poly", "cuont=5", "title="],
            (
                "name: is given twice; keep one",
                "poly: is not key=value; the keys are name, title, folder, count, sure",
                "cuont: is not a known key; did you mean 'count'?",
            ),
        ),
        (["name=a", "name=b"], ("name: is given twice; keep one",)),
        (["count=many"], ("count: must be an integer, got the text 'many'",)),
        (["name="], ("name: must not be empty",)),
    ],
)
def test_every_wrong_argument_is_named_at_once(arguments, problems):
    with pytest.raises(ConfigError) as caught:
        read_arguments(Options, arguments)
    assert len(caught.value.problems) == len(problems)
    for problem, expected in zip(caught.value.problems, problems, strict=True):
        assert problem.startswith(expected)


def test_help_lists_every_key_with_its_default_and_meaning(capsys):
    with pytest.raises(SystemExit) as caught:
        read_arguments(Options, ["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("name=null ")
    assert "count=1      How many." in printed


@pytest.mark.parametrize("text", ["5", "true", "1e3", "[a", "a=b", " x ", "2026-11-21"])
def test_text_and_paths_are_taken_as_they_are_written(text):
    options = read_arguments(Options, [f"name={text}", f"title={text}", f"folder={text}"])
    assert (options.name, options.title, options.folder) == (text, text, Path(text))


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("name=null", None),
        ("folder=null", None),
        ("count=null", None),
        ("title=null", "null"),
        ("count=5", 5),
        ("sure=true", True),
    ],
)
def test_null_is_none_where_the_schema_knows_it_and_other_values_are_yaml_scalars(argument, value):
    options = read_arguments(Options, [argument])
    assert getattr(options, argument.partition("=")[0]) == value


def test_an_interpolation_that_leads_nowhere_is_refused_with_its_path() -> None:
    with pytest.raises(ConfigError) as caught:
        as_mapping(OmegaConf.create({"training": {"max_steps": "${training.steps}", "seed": 17}}))
    problem = str(caught.value)
    assert re.search(r"^training\.max_steps: .*'training\.steps'.*; .*\$\{\.\.\.\}", problem)


def test_a_key_inside_a_list_is_refused_with_its_path() -> None:
    """Hydra's own answer is about its lexer."""
    objective = "rollout_matching.pipeline.objective"
    overrides = ["training.seed=1", f"{objective}[0].weight=2", "++a[1]=3", "a.b=[1,2]"]
    with pytest.raises(ConfigError) as caught:
        as_schema_overrides(overrides)
    first, second = caught.value.problems
    assert first.startswith(f"{objective}[0].weight: ") and second.startswith("a[1]: ")
    assert f"'{objective}.0.weight=...'" in first and f"'{objective}=[...]'" in first
    assert "'a.1=...'" in second


def test_a_key_inside_a_list_is_set_by_the_number_of_its_entry() -> None:
    objective = "rollout_matching.pipeline.objective"
    with initialize_config_dir(str(CONF), version_base="1.3"):
        overrides = as_schema_overrides(["+experiment=stage2_3v1", f"{objective}.1.weight=0.25"])
        config = load_config(as_mapping(compose("train", overrides=overrides)))
    assert config.rollout_matching.pipeline.objective[1].weight == 0.25


def test_a_path_may_begin_with_the_home_folder(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert read_arguments(Options, ["folder=~/x"]).folder == Path("/home/me/x")


@pytest.mark.parametrize(
    "path",
    [
        *("/a/b", "/a=b", "/a (1)/b", "/a[1]/b", "[x]/b", "{x}/b", "~/runs", "/a b/ü", "/a,b"),
        *("/it's", "/a\\", "/a\\'b", '/a"b', "a#b", "/50%/x", "3", "true", "/choice(1,2)"),
    ],
)
def test_a_run_is_resumed_whatever_characters_its_path_has(path: str) -> None:
    (override,) = as_schema_overrides([f"resume={path}"])
    read = OverridesParser.create().parse_override(override)
    assert (read.key_or_group, read.value(), read.is_sweep_override()) == (
        "resume.run",
        path,
        False,
    )


def test_a_value_that_hydra_cannot_read_becomes_a_text_and_structures_stay() -> None:
    overrides = ["data.train=/x (1)/ü.jsonl", "a.b=[1,2]", "a.c={d: 1}", "seed=1,2", "e=${f.g}"]
    quoted = "++data.train='/x (1)/ü.jsonl'"
    assert as_schema_overrides(overrides) == [quoted, *(f"++{one}" for one in overrides[1:])]


def test_rollmatch_has_every_command_of_launch():
    """Each module of launch that is a program; of a package its `__main__`."""
    programs = {
        path.parent.name if path.stem == "__main__" else path.stem
        for path in (ROOT / "launch").rglob("*.py")
        if '\nif __name__ == "__main__":' in path.read_text() and path.name != "process.py"
    }
    assert {name.replace("-", "_") for name in cli.COMMANDS} == programs
    assert all(find_spec(f"launch.{name}") for name in programs)


@pytest.mark.parametrize(("words", "status"), [([], 0), (["--help"], 0), (["trian", "--help"], 2)])
def test_rollmatch_without_a_command_lists_them(words, status, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["rollmatch", *words])
    with pytest.raises(SystemExit) as ended:
        cli.run_command()
    out, err = capsys.readouterr()
    assert ended.value.code == status
    listed = err if status else out
    assert [name for name in cli.COMMANDS if f"\n  {name} " not in listed] == []
    assert ("rollmatch: trian " in listed) == bool(status)


@pytest.mark.slow
def test_rollmatch_runs_a_command_as_python_does_with_m(tmp_path, monkeypatch, capsys):
    """The arguments, the exit status, and where modules are looked for."""
    (tmp_path / "own_objective.py").write_text("print('imported')\n")
    own = "rollout_matching.pipeline.objective=[{name: 'own_objective:Own', enabled: true, weight: 1.0, channels: [A, B], config: {}}]"
    nowhere = ["model.path=nowhere", "data.train=nowhere.jsonl", "data.val=null"]
    command = ["rollmatch", "preflight", "+experiment=stage2_hf", own, *nowhere]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.run_command()
    assert ended.value.code == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert "imported" in lines
    assert last.startswith("rollout_matching.pipeline.objective[0].name: own_objective has no Own;")


def test_a_command_outside_of_the_virtual_environment_says_so() -> None:
    """`-S` leaves out the installed packages, as another Python does not have them."""
    words = [sys.executable, "-S", "-m", "launch.train"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env={}, check=False)
    remedy = (
        f"does not have the project's packages; run `{ROOT}/.venv/bin/python -m launch.train ...`"
        " (`make setup` creates it)\n"
    )
    assert done.returncode == 1
    assert done.stderr.endswith(remedy) and "Traceback" not in done.stderr


LOGS = """
import logging
from launch.cli import explained
from launch.run_folder.console import make_console
with explained(make_console()):
    try:
        raise ValueError("\\x1b[31m")
    except ValueError:
        logging.getLogger("x").exception("row %s", "\\x1b]0;title\\x07")
"""


def test_what_is_logged_shows_terminal_controls_escaped():
    command = [sys.executable, "-c", LOGS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert "\x1b" not in done.stderr
    assert "row \\x1b]0;title\\x07" in done.stderr and "ValueError: \\x1b[31m" in done.stderr
