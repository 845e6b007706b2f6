"""From names to environments."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollout_actors.environment_names import environment_names
from rollout_actors.environments.loading import load_environment

FILE = """
from rollout_actors.environments.multi_turn import SingleTurnEnv

def load_environment(size, step=1):
    return SingleTurnEnv(dataset=[{"question": str(i)} for i in range(0, size, step)])
"""
ANY = FILE.replace("size, step=1", "**given").replace("0, size, step", "given['size']")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory; what it adds to the modules' places is taken back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def installed(folder: Path, name: str, value: str) -> None:
    """What installing a package that names an environment leaves."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[rollmatch.environments]\n{name} = {value}\n")


def test_an_example_is_loaded_by_its_name():
    arguments = {"num_examples": 3, "num_eval_examples": 2}
    environment = load_environment("arithmetic", **arguments)
    assert (len(environment.get_dataset()), len(environment.get_eval_dataset())) == (3, 2)
    assert (environment.env_id, environment.env_args) == ("arithmetic", arguments)


@pytest.mark.parametrize(
    ("name", "env_id"),
    [
        ("guess-number", "guess_number"),
        ("rollout_actors.environments.examples.arithmetic", "arithmetic"),
    ],
    ids=["dashes are underscores", "by its path"],
)
def test_a_module_is_loaded_by_its_path(name, env_id):
    assert load_environment(name).env_id == env_id


@pytest.mark.parametrize(
    ("file", "source", "name", "env_id"),
    [
        ("mine.py", FILE, "mine", "mine"),
        ("mine.py", ANY, "mine", "mine"),
        ("folder/arithmetic.py", FILE, "folder/arithmetic.py", "arithmetic"),
    ],
    ids=["a module of the working directory", "that takes any arguments", "whatever has its name"],
)
def test_a_file_is_loaded_by_its_path_whatever_else_has_its_name(here, file, source, name, env_id):
    (here / file).parent.mkdir(exist_ok=True)
    (here / file).write_text(source)
    environment = load_environment(name, size=4)
    assert (environment.env_id, environment.env_args) == (env_id, {"size": 4})
    assert len(environment.get_dataset()) == 4


def test_files_of_the_same_name_in_two_folders_are_two_modules(here):
    for folder in ("one", "two"):
        (here / folder).mkdir()
        (here / folder / "task.py").write_text(FILE)
        load_environment(str(here / folder / "task.py"), size=1)
    modules = [module for name, module in sys.modules.items() if "environment_task_" in name]
    assert sorted(Path(module.__file__).parent.name for module in modules) == ["one", "two"]


@pytest.mark.parametrize("value", ["theirs", "theirs:load_environment"])
def test_an_installed_entry_point_is_loaded_by_its_name(here, value):
    (here / "theirs.py").write_text(FILE)
    installed(here, "much-wanted", value)
    sys.path.append(str(here))
    assert "much-wanted" in environment_names()
    environment = load_environment("much-wanted", size=1)
    assert (environment.env_id, len(environment.get_dataset())) == ("much-wanted", 1)


def test_a_wrong_name_lists_what_there_is():
    names = "arithmetic, calculator, copy_digits, grounding, guess_number, hidden_digit"
    message = (
        rf"no environment 'aritmetic' \(.* arithmetic\?\); .*{names}, .*\.py .*load_environment\("
        r".* gym:NAME, openenv:URL, verifiers:NAME$"
    )
    with pytest.raises(ValueError, match=message):
        load_environment("aritmetic")


@pytest.mark.parametrize(
    ("name", "source", "problem"),
    [
        (
            "arithmetic",
            FILE,
            (
                r"arithmetic is ambiguous: the example .*examples\.arithmetic and the module"
                r" arithmetic; write the module with its package"
            ),
        ),
        ("none.py", None, r"^none\.py: there is no such file"),
        ("empty", "", r"empty\.py has no load_environment; define load_environment\(\*\*args\)"),
        (
            "wrong",
            "def load_environment(): return 3",
            r"wrong: its load_environment returned int; return an Environment of rollout_actors",
        ),
        (
            "elsewhere",
            "class SingleTurnEnv: pass\ndef load_environment(): return SingleTurnEnv()",
            r"returned elsewhere\.SingleTurnEnv; return an Environment of rollout_actors",
        ),
    ],
    ids=["two things", "no file", "no function", "no environment", "another library's"],
)
def test_what_is_no_environment_is_refused(here, name, source, problem):
    if source is not None:
        (here / f"{name}.py").write_text(source)
    with pytest.raises(ValueError, match=problem):
        load_environment(name)


def test_wrong_arguments_are_named_with_those_that_there_are(here):
    (here / "mine.py").write_text(FILE)
    with pytest.raises(ValueError, match=r"^mine: .*'stop'; .*\(size, step=1\)$"):
        load_environment("mine", size=3, stop=1)
