"""The command as a user types it: what is wrong appears in seconds, and says what to do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def train(tmp_path, *overrides):
    command = [
        sys.executable,
        "-m",
        "launch.train",
        "+experiment=stage2_3v1",
        f"telemetry.run_dir={tmp_path / 'run'}",
        *overrides,
    ]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "400"},
        timeout=300,
        check=False,
    )


def test_every_wrong_key_is_reported_at_once_with_its_path_and_a_suggestion(tmp_path):
    done = train(
        tmp_path,
        "training.lerning_rate=0.1",
        "rollout_matching.decode_batch_size=six",
        "rollout_matching.temperature=1.0",
        "rollout_matching.vllm.actors.num_actor=3",
    )
    assert done.returncode == 2
    output = done.stdout + done.stderr
    assert "training.lerning_rate" in output
    assert "learning_rate" in output.split("training.lerning_rate", 1)[1].splitlines()[0]
    assert "rollout_matching.decode_batch_size" in output
    assert "rollout_matching.decoding.temperature" in output
    assert "num_actors" in output
    assert "Traceback" not in output


def test_a_queue_without_dedicated_devices_is_refused(tmp_path):
    done = train(tmp_path, "rollout_matching.vllm.mode=colocate")
    assert done.returncode == 2
    assert "stage2_ab.channel_b.enable_pipeline" in done.stdout


def test_a_missing_data_file_ends_the_run_before_anything_is_started(tmp_path):
    done = train(
        tmp_path, f"data.train={tmp_path / 'nowhere.jsonl'}", f"model.path={_model(tmp_path)}"
    )
    assert done.returncode == 2
    assert "data.train: there is no file" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_the_batch_algebra_is_printed_before_the_start(tmp_path):
    done = train(
        tmp_path, f"data.train={tmp_path / 'nowhere.jsonl'}", f"model.path={_model(tmp_path)}"
    )
    assert "32 raw rollouts in 2 rounds (16 + 16)" in done.stdout


def _model(tmp_path):
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"
