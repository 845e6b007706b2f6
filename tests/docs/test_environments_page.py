"""docs/environments.md: its files and commands, as they stand on the page."""

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
from environment_support import generated
from fake_openai import FakeOpenAI
from fake_server import serving
from scripted_client import Answer, Call, ScriptedClient

from rollout_actors.environments.loading import load_environment

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "environments.md").read_text()
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
    assert all(re.match(r"vf-eval |python -m launch\.train ", command) for command in COMMANDS)


def test_the_file_of_the_page_is_an_environment(folder):
    environment = load_environment("sort_words", num_examples=20, num_words=5)
    results = generated(environment, environment.get_dataset(), ScriptedClient(sorts_at_last))
    assert results.metadata.num_errors == 0
    assert results.metrics["all_right"] == [1.0] * 20
    hints = [message["content"] for message in results.completion[0] if message["role"] == "user"]
    assert hints[0] == "I see no answer. Write it as <answer>first second third ...</answer>."
    assert re.fullmatch(r"\d of the words stand right\. Try again\.", hints[1])


def test_a_right_answer_ends_the_rollout(folder):
    environment = load_environment("sort_words")
    rows = [{"question": "dune apple", "answer": "apple dune"}]
    client = ScriptedClient([answered("apple dune")])
    (state,) = generated(environment, rows, client).state
    assert (state["stop_condition"], state["reward"]) == ("sorted_at_last", pytest.approx(1.3))


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
    assert answers == ["no unit mile; there are inch, foot, yard", "91.44"]
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
    """Sort words; in a game, always make the same guess."""
    if re.fullmatch(r"[a-z ]+", text):
        return answered(" ".join(sorted(text.split())))
    return "<guess>50</guess>"


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
    assert ("all_right" if "sort_words" in command else "found") in done.stdout
    num_datasets = len(list(folder.glob("outputs/evals/*/*/results.jsonl")))
    assert num_datasets == (1 if " -s " in command else 0)


def test_the_page_names_the_examples_that_there_are():
    folder = ROOT / "rollout_actors" / "environments" / "examples"
    names = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert [name for name in names if f"`{name}` (" not in PAGE] == []
    assert "(docs/environments.md)" in (ROOT / "README.md").read_text()
