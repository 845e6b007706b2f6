"""The commands and tables of docs/how_to/change_the_algorithm.md."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from command_support import module_and_arguments
from hydra import compose, initialize_config_dir

from launch.cli import CONF, as_mapping, as_schema_overrides
from learner.objectives import base
from learner.objectives.registry import build_objectives
from shared.config import load_config
from shared.config.pipeline import Channel

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how_to" / "change_the_algorithm.md").read_text()
TERMS = {
    "focal": ("token_ce", "focal_text"),
    "less_median": ("policy_gradient",),
    "sequence_ratio": ("sequence_ratio",),
}


def block_after(text: str) -> list[tuple[str, list[str]]]:
    assert text in PAGE
    return [
        module_and_arguments(line)
        for line in PAGE.partition(text)[2].split("```")[1].split("\n")
        if line
    ]


def terms_of(overrides: list[str]) -> tuple[str, ...]:
    """The terms that a run with these words logs on channel B."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("train", overrides=as_schema_overrides(overrides))
    pipeline = load_config(as_mapping(composed)).rollout_matching.pipeline
    built = build_objectives(pipeline, Channel.B, torch.arange(1000))
    return tuple(term for objective in built.objectives for term in objective.term_names)


@pytest.mark.slow
def test_the_commands_of_the_examples_build_their_objectives(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT)
    commands = block_after("Run them in one process")
    assert {module for module, _ in commands} == {"launch.train"}
    found = {words[1].partition("=")[2]: terms_of(words) for _, words in commands}
    assert found == TERMS


@pytest.mark.slow
def test_a_copy_of_the_examples_is_found_in_the_folder_of_the_run(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "examples" / "algorithms", tmp_path / "mine")
    for file in (tmp_path / "mine" / "objective").iterdir():
        file.write_text(file.read_text().replace("examples.algorithms", "mine"))
    checked, trained = block_after("Then check and train with rollout actors")
    assert (checked[0], trained) == ("launch.preflight", ("launch.train", checked[1]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert terms_of(checked[1]) == TERMS["focal"]
    finally:
        for name in ("mine", "mine.focal_text"):
            sys.modules.pop(name, None)


def documented(heading: str) -> dict[str, str]:
    """The names in the first column of the section's tables, with their shapes in the second."""
    section = PAGE.partition(f"\n### {heading}\n")[2].partition("\n### ")[0]
    shapes = {}
    for first, second in re.findall(r"^\| (`[^|]+) \| ([^|]*) \|", section, re.MULTILINE):
        names = re.findall(r"`([^`]+)`", first)
        all_shapes = re.findall(r"\[[^]]+\]", second) or [second]
        shapes |= dict(zip(names, all_shapes * (len(names) // len(all_shapes)), strict=True))
    return shapes


def test_the_page_has_every_value_that_an_objective_reads_with_its_shape():
    found = documented("What it reads")
    values = {field.name for field in fields(base.RowValues)} - {"reference"}
    values |= {f"reference.{field.name}" for field in fields(base.ReferenceValues)}
    for name in values:
        assert found.pop(name) == f"[{', '.join(name.rpartition('_')[2])}]", name
    parts = {
        "text": base.TextSupervision,
        "coord": base.CoordSupervision,
        "boxes": base.BoxSupervision,
        "learned": base.LearnedSupervision,
        "learned.teacher": base.TeacherSupervision,
    }
    columns = {f"{part}.{field}" for part, kind in parts.items() for field in kind._fields}
    # The second name of a line begins with its dot.
    found["learned.teacher.weight"] = found.pop(".weight")
    assert {*found} == columns - {"learned.teacher"}
    assert set(base.Supervision._fields) == {name.partition(".")[0] for name in columns}
