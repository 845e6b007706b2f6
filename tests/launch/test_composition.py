"""What is wrong on the command line itself is told with the path of the key, as every other problem
of the configuration is.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from launch.cli import as_mapping, as_schema_overrides
from shared.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_an_interpolation_that_leads_nowhere_is_refused_with_its_path() -> None:
    with pytest.raises(ConfigError) as caught:
        as_mapping(OmegaConf.create({"training": {"max_steps": "${training.steps}", "seed": 17}}))
    told = (
        "training.max_steps: its interpolation cannot be resolved (Interpolation key"
        " 'training.steps' not found)"
    )
    assert (
        str(caught.value)
        == f"{told}; write the value itself, or ${{...}} with the whole path of a key that is there"
    )


def test_a_key_inside_a_list_is_refused_with_its_path() -> None:
    """Hydra's own answer is about its lexer."""
    with pytest.raises(ConfigError) as caught:
        as_schema_overrides(
            [
                "training.seed=1",
                "rollout_matching.pipeline.objective[0].weight=2",
                "++a[1]=3",
                "a.b=[1,2]",
            ]
        )
    cannot = (
        "a key inside a list cannot be set on the command line; give the whole list ('{}=[...]'),"
        " or write it in a file of conf/experiment"
    )
    objective = "rollout_matching.pipeline.objective"
    assert caught.value.problems == (
        f"{objective}[0].weight: {cannot.format(objective)}",
        f"a[1]: {cannot.format('a')}",
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "preflight"])
@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "rollout_matching.pipeline.objective[0].weight=2",
            "rollout_matching.pipeline.objective[0].weight: a key inside a list",
        ),
        (
            "training.max_steps=${training.steps}",
            "training.max_steps: its interpolation cannot be resolved",
        ),
    ],
)
def test_the_commands_say_so_and_end(command: str, override: str, told: str) -> None:
    words = [sys.executable, "-m", f"launch.{command}", "+experiment=stage2_3v1", override]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (2, "")
    assert told in done.stdout


def test_a_command_outside_of_the_virtual_environment_says_so() -> None:
    """`-S` leaves out the installed packages, as another Python does not have them."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "launch.train"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={},
        timeout=60,
        check=False,
    )
    told = (
        f"does not have the project's packages; run `{ROOT}/.venv/bin/python -m launch.train ...`"
        " (`make setup` makes it)\n"
    )
    assert done.returncode == 1
    assert done.stderr.endswith(told) and "Traceback" not in done.stderr
