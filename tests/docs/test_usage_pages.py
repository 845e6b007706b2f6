"""Tutorials, tasks and references of running: every command is one that the project takes."""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path

import pytest
from command_support import commands_of
from hydra import compose, initialize_config_dir

from launch.cli import COMMANDS, CONF, as_mapping, as_schema_overrides, read_arguments
from launch.inspect.evaluate import EvaluateOptions, ModelOptions
from launch.inspect.replay import ReplayOptions
from launch.inspect.show_sample import ShowOptions
from launch.tools.add_coord_tokens import AddOptions
from launch.tools.coco import ExportOptions
from launch.tools.import_data.__main__ import FORMATS
from launch.tools.keys import keys_below
from launch.tools.rex_omni import RexOmniOptions
from shared.config import load_config

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (
    "tutorials/first_run.md",
    "tutorials/detection.md",
    "how_to/augmentation.md",
    "how_to/export_and_import.md",
    "how_to/memory_and_adapters.md",
    "how_to/mix_data.md",
    "how_to/sweeps.md",
    "reference/commands.md",
)
OPTIONS = {
    "launch.add_coord_tokens": AddOptions,
    "launch.replay": ReplayOptions,
    "launch.rex_omni": RexOmniOptions,
    "launch.show_sample": ShowOptions,
}


@cache
def is_composed(*words: str) -> bool:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        load_config(as_mapping(compose("train", overrides=as_schema_overrides(list(words)))))
    return True


def commands_of_page(page: str) -> list[tuple[str, list[str]]]:
    blocks = re.findall(r"^```\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    # Variables of one block are used in later ones.
    return commands_of("\n".join(blocks))


def first_values(words: list[str]) -> list[str]:
    """Return the words of a sweep's first trial."""
    return [re.sub(r"=([^,'\[{]+),.*", r"=\1", word) for word in words if word != "-m"]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_is_one_that_the_project_takes(page):
    for module, words in commands_of_page(page):
        if "--help" in words:
            words.remove("--help")
            if module == "launch.import_data":
                assert words[0].removeprefix("format=") in FORMATS
                continue
        match module:
            case "launch.train" | "launch.preflight" if words[0].startswith("resume="):
                assert as_schema_overrides(words)
            case "launch.train" | "launch.preflight":
                assert is_composed(*first_values(words))
            case "launch.evaluate":
                schema = ModelOptions if words[0].startswith("model=") else EvaluateOptions
                read_arguments(schema, [word for word in words if "." not in word.split("=")[0]])
            case "launch.import_data":
                first, *rest = words
                read_arguments(FORMATS[first.removeprefix("format=")], rest)
            case "launch.coco":
                command, *rest = words
                schema = {"import": FORMATS["coco"], "export": ExportOptions}[command]
                read_arguments(schema, rest)
            case "launch.keys":
                assert keys_below(*words)
            case "launch.diff_runs" | "launch.ledger" | "launch.view":
                assert words
                importlib.import_module(module)
            case _:
                read_arguments(OPTIONS[module], words)


def test_the_reference_has_every_command():
    page = (DOCS / "reference" / "commands.md").read_text()
    assert set(COMMANDS) == set(re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE))
