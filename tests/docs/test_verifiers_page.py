"""docs/how_to/coming_from_verifiers.md: its environment as it stands, and the names that it promises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from environment_support import generated
from scripted_client import ScriptedClient

import rollout_actors.environments as vf
from launch.tools.vf_eval.arguments import read_options

PAGE = (Path(__file__).parents[2] / "docs" / "how_to" / "coming_from_verifiers.md").read_text()
(PROGRAM,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
SAME = PAGE.partition("### The same")[2].partition("\n### ")[0]


def test_the_environment_of_the_page_is_judged_by_rules_and_by_a_model(tmp_path):
    path = tmp_path / "first_word.py"
    path.write_text(PROGRAM)
    judge = ScriptedClient(["Yes."])
    environment = vf.load_environment(str(path), judge_client=judge)
    client = ScriptedClient(["<reasoning>a, p</reasoning>\n<answer>apple</answer>"])
    results = generated(environment, environment.get_dataset(), client)
    assert results.metrics == {"exact": [1.0], "format_reward": [1.0], "judged": [1.0]}
    assert results.reward == [pytest.approx(1.7)]
    assert "<[ word | answer ]>" in client.calls[0].prompt[0]["content"]
    assert "Response: apple" in judge.calls[0].text


def test_the_names_that_the_page_calls_the_same_are_there():
    promised = set(re.findall(r"`(?:vf\.)?@?(?:vf\.)?(\w+)[`(]", SAME))
    things = [vf.ToolEnv([]), vf.StatefulToolEnv([]), vf.XMLParser(), vf.Rubric(), vf]
    things.append(vf.EnvGroup([vf.ToolEnv(dataset=[{"question": "q"}])]))
    things.append(things[-1].get_dataset())
    words = {"client", "model", "parser", "system", "user", "tool", "_sync"}
    words |= {"question", "prompt", "answer", "info", "task", "example_id"}  # of data
    absent = {name for name in promised - words if not any(hasattr(one, name) for one in things)}
    assert absent == set()
    assert {"remove_tool", "env_map", "JudgeRubric", "column_names", "stop"} <= promised


def test_the_flags_that_the_page_calls_the_same_are_read():
    (flags,) = re.findall(r"`(-a [^`]+)`", SAME)
    values = {"-a": "{}", "-S": "{}", "-C": "x", "-b": "u", "-m": "m", "-k": "K", "-D": "d"}
    arguments = ["e", "-f", "10", "--header", "Name: value"]
    for flag in flags.split():
        arguments += [flag] if flag in "-s -v -H -N" else [flag, values.get(flag, "1")]
    options = read_options(arguments)
    assert (options.headers, options.dataset_name) == ({"Name": "value"}, "d")
