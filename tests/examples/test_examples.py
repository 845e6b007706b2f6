"""What `examples/` lists composes, and its script runs to its end."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from command_support import Started, adopted_orphans, commands, module_and_arguments
from hydra import compose, initialize_config_dir
from tiny_qwen import make_stock_model

from launch.cli import CONF, as_mapping, as_schema_overrides, read_arguments
from launch.inspect.evaluate import ModelOptions, model_config
from launch.tools.import_data.__main__ import FORMATS
from launch.tools.new_environment import write_environment
from launch.tools.rex_omni import RexOmniOptions
from rollout_actors.warm import warm_python
from shared.config import RunConfig, load_config

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "first_day.sh"
PAGE = (ROOT / "examples" / "README.md").read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if not line.startswith("#")]


def words_of(command: str) -> tuple[str, list[str]]:
    """Return the module that a line runs, and its arguments."""
    if command.startswith("sbatch deploy/slurm.sbatch "):  # it hands its words on
        return "launch.train", shlex.split(command)[2:]
    return module_and_arguments(command)


@cache
def run_of(*words: str) -> RunConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("train", overrides=as_schema_overrides(list(words)))
    return load_config(as_mapping(composed))


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    return make_stock_model(tmp_path_factory.mktemp("stock") / "model", "qwen3_vl")


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_is_listed_composes(command, stock, tmp_path):
    module, words = words_of(command)
    match module:
        case "launch.train" | "launch.preflight":
            if words[0] == "--config-dir":  # what the line above it has written
                write_environment(words[1], tmp_path)
                words[:2] = [f"hydra.searchpath=[file://{tmp_path}]"]
            run_of(*words)
        case "launch.evaluate":
            first, data, *overrides = words
            assert first.startswith("model=/models/")
            model_config(read_arguments(ModelOptions, [f"model={stock}", data]), overrides)
        case "launch.import_data":
            first, *rest = words
            read_arguments(FORMATS[first.removeprefix("format=")], rest)
        case "launch.rex_omni":
            read_arguments(RexOmniOptions, words)
        case "launch.new_environment":
            name, option, _ = words
            assert option == "--out"
            assert write_environment(name, tmp_path)
        case _:
            pytest.fail(f"nobody checks {module}")


@pytest.mark.slow
def test_rows_that_ask_and_several_sources_are_read_as_they_are_written():
    runs = [
        run_of(*words_of(line)[1]) for line in COMMANDS if "refcoco.jsonl" in line and "+" in line
    ]
    assert runs[0].user_prompt == "Find {phrase}."
    assert runs[1].data.prompts == ("Find {phrase}.", "Where is {phrase}?")
    assert [source.weight for source in runs[2].data.sources("train")] == [3, 1]


def test_every_format_has_a_line_and_every_page_that_is_named_is_there():
    imported = [words_of(line)[1][0] for line in COMMANDS if " import-data " in line]
    assert imported == [f"format={name}" for name in FORMATS]
    for path in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (ROOT / "examples" / path).exists(), path


@pytest.mark.slow
def test_a_day_with_a_model_of_ones_own_composes():
    """The branch of the script that no test runs: its words, with the folders filled in."""
    text = SCRIPT.read_text()
    own = text.partition("\nelse\n")[2].partition("\nfi\n")[0]
    words = {name: value.split() for name, value in re.findall(r"(\w+)=\((.*)\)", own)}
    train = text.partition("\n# 4.")[2].partition("\n\n")[0].partition('"${sizes[@]}"')[2]
    values = {"$MODEL": "Qwen/Qwen3-VL-4B-Instruct", "$day": "day", "\\\n": " "}
    for name, value in values.items():
        train = train.replace(name, value)
    run = run_of(*words["experiment"], *words["sizes"], *shlex.split(train))
    assert run.model.adapter is not None
    assert run.rollout_matching.vllm.mode == "colocate"
    assert run.data.answer_format == "qwen3_vl"


@pytest.mark.long
@pytest.mark.engine
def test_a_first_day_goes_from_a_stock_model_to_its_figures_and_an_environment(tmp_path):
    day = tmp_path / "day"
    with adopted_orphans(), commands(Started) as start:
        python = " ".join(warm_python.command())
        run = start([str(SCRIPT), str(tmp_path)], tmp_path / "log", PYTHON=python)
        assert run.process.wait(timeout=1800) == 0, run.output
        run.assert_nothing_left()
    *_, last = run.output.splitlines()
    number = r"[01]\.\d{3}"
    assert re.match(rf"first day: F1@0\.5 {number} before, {number} after ten steps; ", last)
    reports = ("evaluations/before", "run/evaluations/after")
    before, after = (json.loads((day / one / "report.json").read_text()) for one in reports)
    assert before["num_samples"] == after["num_samples"] > 0
    assert {"ap", "ap50"} <= before["coco"]["any_class"]["bbox"].keys()
    steps = [(day / one / "metrics.jsonl").read_text() for one in ("run", "environment")]
    assert steps[0].count('"loss/') and steps[1].count('"reward/')
    channels = re.findall(r"^step +\d+/10 (.)", run.output, re.MULTILINE)
    assert "".join(channels[:10]) == "AAAAABABAB", "before those of the environment"
