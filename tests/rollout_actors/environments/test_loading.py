"""From names to environments."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rollout_actors.environments.group import EnvGroup
from rollout_actors.environments.loading import environment_names, load_environment
from rollout_actors.environments.multi_turn import SingleTurnEnv

FILE = """
from rollout_actors.environments.multi_turn import SingleTurnEnv

def load_environment(size, step=1):
    return SingleTurnEnv(dataset=[{"question": str(i)} for i in range(0, size, step)])
"""


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
    environment = load_environment("arithmetic", num_examples=3, num_eval_examples=2)
    assert (len(environment.get_dataset()), len(environment.get_eval_dataset())) == (3, 2)
    assert environment.env_id == "arithmetic"
    assert environment.env_args == {"num_examples": 3, "num_eval_examples": 2}


def test_dashes_of_a_name_are_underscores():
    assert load_environment("guess-number").env_id == "guess_number"


def test_a_module_is_loaded_by_its_path():
    assert (
        load_environment("rollout_actors.environments.examples.arithmetic").env_id == "arithmetic"
    )


def test_a_module_of_the_working_directory_is_found(here):
    (here / "mine.py").write_text(FILE)
    environment = load_environment("mine", size=4)
    assert isinstance(environment, SingleTurnEnv)
    assert (environment.env_id, environment.env_args, len(environment.get_dataset())) == (
        "mine",
        {"size": 4},
        4,
    )


def test_a_file_is_loaded_by_its_path_whatever_else_has_its_name(here):
    (here / "folder").mkdir()
    (here / "folder" / "arithmetic.py").write_text(FILE)
    environment = load_environment("folder/arithmetic.py", size=4, step=2)
    assert (environment.env_id, len(environment.get_dataset())) == ("arithmetic", 2)
    with pytest.raises(ValueError, match=r"^nothing\.py: there is no such file"):
        load_environment("nothing.py")


@pytest.mark.parametrize("value", ["theirs", "theirs:load_environment"])
def test_an_installed_entry_point_is_loaded_by_its_name(here, value):
    (here / "theirs.py").write_text(FILE)
    installed(here, "much-wanted", value)
    sys.path.append(str(here))
    assert "much-wanted" in environment_names()
    environment = load_environment("much-wanted", size=1)
    assert (environment.env_id, len(environment.get_dataset())) == ("much-wanted", 1)


def test_a_wrong_name_lists_what_there_is():
    with pytest.raises(ValueError) as caught:
        load_environment("aritmetic")
    assert (
        str(caught.value)
        == "no environment 'aritmetic' (did you mean arithmetic?); there are arithmetic,"
        " copy_digits, grounding, guess_number, hidden_digit, key_value_store, and any module or .py file"
        " that has load_environment(**args)"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["", ".x", "a/b", "no.such.module", "rollout_actors.environments.nothing", "two words"]
)
def test_a_name_that_means_nothing_is_refused_as_such(name):
    with pytest.raises(ValueError, match="no environment"):
        load_environment(name)


def test_a_name_that_means_two_things_is_refused(here):
    (here / "arithmetic.py").write_text(FILE)
    with pytest.raises(
        ValueError,
        match=(
            r"arithmetic is the example .*examples\.arithmetic and the module arithmetic; write the"
            r" module with its package"
        ),
    ):
        load_environment("arithmetic")


def test_wrong_arguments_are_named_with_those_that_there_are(here):
    (here / "mine.py").write_text(FILE)
    with pytest.raises(ValueError) as caught:
        load_environment("mine", sise=3, stop=1)
    assert (
        str(caught.value)
        == "mine: there is no argument 'sise'; there is no argument 'stop'; 'size' is missing; it"
        " takes size, step=1"
    )


def test_a_module_without_load_environment_is_told_what_to_define(here):
    (here / "empty.py").write_text("")
    with pytest.raises(
        ValueError, match=r"empty\.py has no load_environment; define load_environment\(\*\*args\)"
    ):
        load_environment("empty")


def test_what_is_no_environment_is_refused(here):
    (here / "wrong.py").write_text("def load_environment(): return 3")
    with pytest.raises(
        ValueError,
        match=(
            r"wrong: its load_environment returned int; return an Environment of"
            r" rollout_actors\.environments"
        ),
    ):
        load_environment("wrong")


def test_an_environment_of_another_library_is_refused_by_its_full_name(here):
    (here / "elsewhere.py").write_text(
        "class SingleTurnEnv: pass\ndef load_environment(): return SingleTurnEnv()"
    )
    with pytest.raises(
        ValueError,
        match=(
            r"returned elsewhere\.SingleTurnEnv; return an Environment of"
            r" rollout_actors\.environments"
        ),
    ):
        load_environment("elsewhere")


def test_what_a_module_raises_while_it_is_imported_or_called_is_raised(here):
    (here / "needs.py").write_text("import no_such_module_at_all")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        load_environment("needs")
    (here / "package").mkdir()
    (here / "package" / "__init__.py").write_text("import no_such_module_at_all")
    (here / "package" / "inner.py").write_text(FILE)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        load_environment("package.inner", size=1)
    (here / "raises.py").write_text("def load_environment(): raise RuntimeError('mine')")
    with pytest.raises(RuntimeError, match="mine"):
        load_environment("raises")


def test_a_folder_without_a_module_is_no_environment(here):
    (here / "folder").mkdir()
    with pytest.raises(ValueError, match="no environment 'folder'"):
        load_environment("folder")


def test_what_takes_any_arguments_is_given_them(here):
    (here / "anything.py").write_text(
        FILE.replace("size, step=1", "**given").replace("0, size, step", "given['n']")
    )
    environment: Any = load_environment("anything", n=2)
    assert len(environment.get_dataset()) == 2


def test_a_group_of_loaded_environments_goes_by_their_names():
    group = EnvGroup(
        [
            load_environment(name, num_examples=1)
            for name in ("arithmetic", "guess_number", "key_value_store")
        ]
    )
    assert [row["task"] for row in group.get_dataset()] == [
        "arithmetic",
        "guess_number",
        "key_value_store",
    ]
