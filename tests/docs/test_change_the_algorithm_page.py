"""The example of docs/how_to/change_the_algorithm.md works as it stands there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from command_support import module_and_arguments
from hydra import compose, initialize_config_dir

from launch.cli import CONF, as_mapping, as_schema_overrides
from learner.objectives.registry import build_objectives
from shared.config import load_config
from shared.config.pipeline import Channel

PAGE = (Path(__file__).parents[2] / "docs" / "how_to" / "change_the_algorithm.md").read_text()


@pytest.mark.slow
def test_the_commands_of_the_page_find_its_objective(tmp_path, monkeypatch):
    """A module and a YAML file outside of the packages, and a command that names both."""
    for path, language in (("focal_text.py", "python"), ("objective/focal.yaml", "yaml")):
        assert f"`mine/{path}`" in PAGE
        file = tmp_path / "mine" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[0])
    block = PAGE.partition("Then check and train")[2].split("```")[1]
    checked, trained = map(module_and_arguments, block.strip().splitlines())
    assert (checked[0], trained) == ("launch.preflight", ("launch.train", checked[1]))
    # Python looks into the folder that `python -m` was started from.
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        overrides = as_schema_overrides(checked[1])
        config = load_config(as_mapping(compose("train", overrides=overrides)))
    try:
        built = build_objectives(config.rollout_matching.pipeline, Channel.B, torch.arange(1000))
    finally:
        sys.modules.pop("mine.focal_text", None)
        sys.modules.pop("mine", None)
    names = [objective.term_names for objective in built.objectives]
    assert names == [("token_ce",), ("focal_text",)]
