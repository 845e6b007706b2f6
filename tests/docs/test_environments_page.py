"""Pages about environments: their files and commands, as they stand on the pages."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_support import module_and_arguments
from environment_support import generated
from fake_openai import FakeOpenAI
from fake_server import serving
from hydra import compose, initialize_config_dir
from scripted_client import Answer, Call, ScriptedClient

from launch.cli import CONF, as_mapping, as_schema_overrides
from launch.tools.new_environment import write_environment
from rollout_actors.environments.loading import load_environment
from shared.config import load_config

ROOT = Path(__file__).parents[2]
TUTORIAL = "docs/tutorials/environment.md"
PAGES = (TUTORIAL, "docs/reference/environments.md")
# The program of coming_from_verifiers.md is tested by `test_verifiers_page.py`.
TRAINING_PAGES = (
    *PAGES,
    "docs/tutorials/language_model.md",
    "docs/how_to/coming_from_verifiers.md",
)
PAGE = "\n".join((ROOT / path).read_text() for path in PAGES)
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
PROGRAMS = [text for language, text in BLOCKS if language == "python"]
FILES = {text.partition("\n")[0].removeprefix("# "): text for text in PROGRAMS}
COMMANDS = [line for language, text in BLOCKS if not language for line in text.splitlines()]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The reader's folder, with the files of the page."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] + ".py" in FILES:
            del sys.modules[name]


def answered(text: str) -> str:
    return f"<answer>{text}</answer>"


def sorts_at_last(call: Call) -> str:
    """Answer nothing that can be read, then the words as they are, then in their order."""
    words = call.prompt[1]["content"]
    return ["hm", answered(words), answered(" ".join(sorted(words.split())))][call.turn]


def test_every_text_of_the_page_in_python_is_a_file_and_every_command_is_one_of_this_project():
    assert list(FILES) == ["sort_words.py", "look.py", "convert_units.py", "both.py"]
    known = r"vf-eval |python -m (launch\.train|pytest) |rollmatch new-environment "
    assert [command for command in COMMANDS if not re.match(known, command)] == []


def test_the_file_of_the_page_is_an_environment(folder):
    environment = load_environment("sort_words", num_examples=20, num_words=5)
    results = generated(environment, environment.get_dataset(), ScriptedClient(sorts_at_last))
    assert results.metadata.num_errors == 0
    assert results.metrics["all_right"] == [1.0] * 20
    hints = [message["content"] for message in results.completion[0] if message["role"] == "user"]
    assert "<answer>first second third ...</answer>" in hints[0]
    assert re.fullmatch(r"\d of the words stand right\. Try again\.", hints[1])


def test_a_right_answer_ends_the_rollout(folder):
    environment = load_environment("sort_words")
    rows = [{"question": "dune apple", "answer": "apple dune"}]
    client = ScriptedClient([answered("apple dune")])
    (state,) = generated(environment, rows, client).state
    assert (state["stop_condition"], state["reward"]) == ("solved", pytest.approx(1.3))


def test_the_rollouts_can_be_looked_at_as_the_page_does(folder, capsys):
    look = importlib.import_module("look").look
    results = asyncio.run(look(ScriptedClient(sorts_at_last), "my-model"))
    printed = capsys.readouterr().out
    assert len(results.state) == 3
    assert printed.count("error: None") == 3
    assert "    user: I see no answer." in printed
    # of three messages one has no answer: 1 + 0.2 + 0.1 * 2 / 3
    assert "mean reward 1.27" in printed


@pytest.mark.slow
def test_the_tools_of_the_page_can_be_called(folder):
    environment = load_environment("convert_units")
    calls = [("to_centimetres", {"length": 3, "unit": unit}) for unit in ("mile", "foot")]
    client = ScriptedClient([Answer(None, tool_calls=calls), "It is 91.44 cm."])
    results = generated(environment, environment.get_dataset(), client)
    answers = [message["content"] for message in results.completion[0] if message["role"] == "tool"]
    assert re.search("mile; .*inch, foot, yard", answers[0])
    assert answers[1:] == ["91.44"]
    assert results.reward == [1.0]
    assert results.metadata.avg_metrics["num_tool_errors"] == 1.0


def test_the_group_of_the_page_plays_both(folder):
    def plays(call: Call) -> Any:
        return "91.44" if "tools" in call.arguments else answered("")

    group = load_environment("both")
    results = asyncio.run(group.evaluate(ScriptedClient(plays), "m", use_tqdm=False))
    assert results.metadata.num_errors == 0
    assert results.task == ["sort"] * 50 + ["convert"]
    assert results.reward[-1] == 1.0


def replies(text: str) -> str:
    """Sort words."""
    return answered(" ".join(sorted(text.split())))


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for line in COMMANDS if "vf-eval" in line])
def test_the_commands_of_the_page_evaluate_as_they_stand(folder, command):
    environ = {key: value for key, value in os.environ.items() if not key.startswith("OPENAI_")}
    environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{environ.get('PYTHONPATH', '')}"
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    with serving(FakeOpenAI(reply=replies).app()) as url:
        done = subprocess.run(
            ["bash", "-c", command],
            env=environ | {"OPENAI_BASE_URL": f"{url}/v1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all_right" in done.stdout
    num_datasets = len(list(folder.glob("outputs/evals/*/*/results.jsonl")))
    assert num_datasets == (1 if " -s " in command else 0)


def test_the_page_names_the_examples_that_there_are():
    folder = ROOT / "rollout_actors" / "environments" / "examples"
    names = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert [name for name in names if f"`{name}` (" not in PAGE] == []
    assert f"({TUTORIAL})" in (ROOT / "README.md").read_text()


def training_commands() -> list[str]:
    """Return every command that trains, with its continued lines joined."""
    texts = [(ROOT / path).read_text().replace("\\\n", " ") for path in TRAINING_PAGES]
    return [
        line
        for text in texts
        for line in re.findall(r"^\S*python -m launch\.train .*$", text, re.M)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("command", training_commands())
def test_a_training_command_of_the_pages_composes(command, tmp_path):
    module, words = module_and_arguments(command)
    assert module == "launch.train"
    if words[0] == "--config-dir":  # written by the command above it
        write_environment(words[1], tmp_path)
        words[:2] = [f"hydra.searchpath=[file://{tmp_path}]"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("train", overrides=as_schema_overrides(words))
    assert load_config(as_mapping(composed)).environment is not None


def test_the_commands_that_make_an_environment_and_test_it_name_its_files(tmp_path):
    new, test = (line for line in COMMANDS if "new-environment" in line or "pytest" in line)
    _, _, name, _, folder = new.split()
    written = write_environment(name, tmp_path / folder)
    assert tmp_path / test.split()[-1] in written
