"""docs/environments.md: its files and commands, as they stand on the page."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
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
FILES = {
    text.partition("\n")[0].removeprefix("# "): text
    for language, text in BLOCKS
    if language == "python"
}
COMMANDS = [line for language, text in BLOCKS if not language for line in text.splitlines()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The reader's, with the files of the page."""
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


def answered(said: str) -> str:
    return f"<answer>{said}</answer>"


def sorts_at_last(call: Call) -> str:
    """Says nothing that can be read, then the words as they are, and then in their order."""
    words = call.prompt[1]["content"]
    return ["hm", answered(words), answered(" ".join(sorted(words.split())))][call.turn]


def test_every_text_of_the_page_in_python_is_a_file_and_every_command_is_one_of_this_project():
    assert list(FILES) == ["sort_words.py", "look.py", "convert_units.py", "both.py"]
    assert all(re.match(r"python -m launch\.(vf_eval|train) ", command) for command in COMMANDS)


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
    state = generated(
        environment,
        [{"question": "dune apple", "answer": "apple dune"}],
        ScriptedClient([answered("apple dune")]),
    ).state[0]
    assert (state["stop_condition"], state["reward"]) == ("sorted_at_last", pytest.approx(1.3))


def test_the_rollouts_can_be_looked_at_as_the_page_does(folder, capsys):
    results = asyncio.run(
        importlib.import_module("look").look(ScriptedClient(sorts_at_last), "my-model")
    )
    printed = capsys.readouterr().out
    assert len(results.state) == 3
    assert printed.count("error: None") == 3
    assert "    user: I see no answer." in printed
    # of three messages one has no answer: 1 + 0.2 + 0.1 * 2 / 3
    assert "mean reward 1.27" in printed


@pytest.mark.slow
def test_the_tools_of_the_page_can_be_called(folder):
    environment = load_environment("convert_units")
    calls = [
        ("to_centimetres", {"length": 3, "unit": "mile"}),
        ("to_centimetres", {"length": 3, "unit": "foot"}),
    ]
    client = ScriptedClient([Answer(None, tool_calls=calls), "It is 91.44 cm."])
    results = generated(environment, environment.get_dataset(), client)
    assert [
        message["content"] for message in results.completion[0] if message["role"] == "tool"
    ] == ["no unit mile; there are inch, foot, yard", "91.44"]
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
    """Sorts words; of a game, always the same guess."""
    return (
        answered(" ".join(sorted(text.split())))
        if re.fullmatch(r"[a-z ]+", text)
        else "<guess>50</guess>"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if "launch.vf_eval" in command]
)
def test_the_commands_of_the_page_evaluate_as_they_stand(folder, command):
    with serving(FakeOpenAI(reply=replies).app()) as url:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("OPENAI_")}
        places = {"PYTHONPATH": str(ROOT), "PATH": str(Path(sys.executable).parent)}
        environ |= {
            "OPENAI_BASE_URL": f"{url}/v1",
            **{
                name: f"{place}{os.pathsep}{environ.get(name, '')}"
                for name, place in places.items()
            },
        }
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("all_right" if "sort_words" in command else "found") in done.stdout
    assert len(list(folder.glob("outputs/evals/*/*/results.jsonl"))) == (
        1 if " -s " in command else 0
    )


def test_the_page_names_the_examples_that_there_are():
    there = {
        path.stem for path in (ROOT / "rollout_actors" / "environments" / "examples").glob("*.py")
    } - {"__init__"}
    assert {name for name in there if f"`{name}` (" in PAGE} == there


def test_the_readme_leads_to_the_page():
    assert "(docs/environments.md)" in (ROOT / "README.md").read_text()
