from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
from shared.config import load_config
try:
    load_config({config})
except ValueError as error:
    assert {message!r} in str(error), error
else:
    raise SystemExit("no error")
print(*sorted({{"torch", "ray", "vllm", "transformers", "hydra", "omegaconf", "scipy", "learner", "rollout_actors", "launch"}} & set(sys.modules)))
"""


def loaded_before_the_error(config: str, message: str) -> str:
    """The heavy modules, and ours that run anything, that a process has loaded when it refuses
    `config` with `message`.
    """
    root = Path(__file__).parents[3]
    program = PROGRAM.format(config=config, message=message)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=root,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_configuration_errors_need_nothing_heavy():
    assert loaded_before_the_error('{"training": {"sed": 1}}', "did you mean 'seed'?") == ""


def test_unknown_rollout_key_fails_before_rollout_trainer_execution():
    config = '{"rollout_matching": {"unknown_rollout_key": 1}}'
    assert (
        loaded_before_the_error(
            config, "rollout_matching.unknown_rollout_key: is not a known key; the keys here are "
        )
        == ""
    )
