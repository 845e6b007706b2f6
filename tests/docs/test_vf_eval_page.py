"""docs/how_to/evaluate.md: its commands, and what it says is printed, as they stand on the page."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from fake_openai import FakeOpenAI
from fake_server import serving

from launch.tools.vf_eval.__main__ import main
from launch.tools.vf_eval.arguments import check_sampling, read_options

PAGE = (Path(__file__).parents[2] / "docs" / "how_to" / "evaluate.md").read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [
    shlex.split(line)
    for block in BLOCKS
    for line in re.findall(r"^(?:vf-eval|vllm) .*$", block, re.MULTILINE)
]


@pytest.fixture
def url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serving(FakeOpenAI(reply=lambda _: "<answer>1</answer>").app()) as base:
        yield f"{base}/v1"


def test_the_page_has_commands():
    assert [command[0] for command in COMMANDS] == ["vf-eval", "vllm", "vf-eval"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 2])
def test_a_command_of_the_page_evaluates(url, number, capsys):
    command = [url if word == "http://127.0.0.1:8000/v1" else word for word in COMMANDS[number][1:]]
    options = read_options(command)
    assert check_sampling(options.sampling_args or {}, "chat") == options.sampling_args
    main(command)
    printed = capsys.readouterr().out
    total = (options.num_examples or 0) * (options.rollouts_per_example or 0)
    assert f"{total}, of {options.num_examples} examples" in printed
    if number == 0:
        (summary,) = (block for block in BLOCKS if block.startswith("arithmetic, demo\n"))
        assert subjects(printed) == subjects(summary)


def subjects(summary: str) -> list[str]:
    """Return what each line of a summary is about."""
    lines = [line.strip() for line in summary.splitlines()]
    return [re.split(r"\s{2,}", line)[0] for line in lines if line]


def test_the_files_of_the_page_are_those_that_are_written(url, tmp_path):
    main(["arithmetic", "-b", url, "-n", "1", "-r", "1", "-s"])
    (folder,) = tmp_path.glob("outputs/evals/arithmetic--demo/*")
    rows = "".join(line for line in PAGE.splitlines() if line.startswith("| `"))
    names = set(re.findall(r"`([\w.]+\.jsonl?)`", rows))
    assert {path.name for path in folder.iterdir()} == names
