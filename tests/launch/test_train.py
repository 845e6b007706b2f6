"""What `launch.train` refuses before it has started or written anything, and the command as a user
types it: what is wrong appears in seconds, and says what to do.
"""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from config_support import configuration
from rich.console import Console

from launch.train import run
from shared.errors import ConfigError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SOUND = {
    "global_max_length": 512,
    "rollout_matching__max_new_tokens": 96,
    "learner__cpus": 0.25,
    "rollout_matching__vllm__actors": {"num_actors": 3, "cpus_per_actor": 0.25},
    "rollout_matching__vllm__kv_cache_memory_bytes": 2**26,
}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"learner__cpus": 4096.0}, r"^learner\.cpus: "),
        ({"global_max_length": 128}, r"^global_max_length: 128 is too short for sample "),
        (
            {"model__adapter": {"kind": "lora", "target_modules": ["q_projj"]}},
            r"^model\.adapter\.target_modules: no linear layer .* is called q_projj",
        ),
        ({"cluster__temp_dir": "/tmp/" + "long" * 20}, r"^cluster\.temp_dir: "),
    ],
)
def test_a_run_that_cannot_work_is_refused_before_anything_is_there(
    changes, problem, demo_checkpoint, demo_data, tmp_path, monkeypatch
):
    ray_init = Mock(side_effect=AssertionError("Ray was started"))
    monkeypatch.setattr("ray.init", ray_init)
    config = configuration(demo_checkpoint, demo_data, tmp_path / "run", **SOUND | changes)
    with pytest.raises(ConfigError, match=problem) as caught:
        run(config, Console())
    assert len(caught.value.problems) == 1
    assert not (tmp_path / "run").exists()


def train(tmp_path, *overrides):
    command = [sys.executable, "-m", "launch.train", "+experiment=stage2_3v1", *overrides]
    command.append(f"telemetry.run_dir={tmp_path / 'run'}")
    wide = os.environ | {"COLUMNS": "400"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=wide, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout


def test_every_wrong_key_is_reported_at_once_with_its_path_and_a_suggestion(tmp_path):
    output = train(
        tmp_path,
        "training.lerning_rate=0.1",
        "rollout_matching.decode_batch_size=six",
        "rollout_matching.temperature=1.0",
        "rollout_matching.vllm.actors.num_actor=3",
    )
    wrong_key = output.partition("training.lerning_rate")[2].splitlines()[0]
    assert "learning_rate" in wrong_key
    for word in ("decode_batch_size", "rollout_matching.decoding.temperature", "num_actors"):
        assert word in output


def test_a_queue_without_dedicated_devices_is_refused(tmp_path):
    output = train(tmp_path, "rollout_matching.vllm.mode=colocate")
    assert "stage2_ab.channel_b.enable_pipeline" in output


def test_a_missing_data_file_ends_the_run_after_the_batch_algebra_and_before_anything_is_started(
    tmp_path,
):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    output = train(tmp_path, f"data.train={tmp_path / 'nowhere.jsonl'}", f"model.path={model}")
    assert "data.train: there is no file" in output
    assert "32 raw rollouts in 2 rounds (16 + 16)" in output
