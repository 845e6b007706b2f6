"""What `launch.train` refuses before it has started or written anything, and the command as a user
types it: what is wrong appears in seconds, and says what to do.
"""

import os
import subprocess
import sys
from unittest.mock import Mock

import pytest
from config_support import configuration
from rich.console import Console

from launch.train import run, run_job
from shared.errors import ConfigError, LearnerError, LostLearnerError, LostStartError

pytestmark = pytest.mark.slow

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


def test_threads_of_a_run_without_ray_sleep_while_they_wait(demo_checkpoint, demo_data, tmp_path):
    local = {
        "cluster__kind": "local",
        "rollout_matching__rollout_backend": "hf",
        "stage2_ab__channel_b__enable_pipeline": False,
    }
    config = configuration(demo_checkpoint, demo_data, tmp_path / "run", **SOUND | local)
    saved = tmp_path / "config.json"
    saved.write_text(config.model_dump_json())
    code = (
        "import json, os, sys\n"
        "from launch.train import run_job\n"
        "from rich.console import Console\n"
        "from shared.config import load_config\n"
        "sys.modules['torch'] = None\n"
        "try: run_job(load_config(json.load(open(sys.argv[1]))), Console())\n"
        "except ModuleNotFoundError as error: assert error.name == 'torch'\n"
        "print(os.environ['OMP_WAIT_POLICY'])"
    )
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    command = [sys.executable, "-c", code, str(saved)]
    printed = subprocess.check_output(command, text=True, env=environment)
    assert printed.splitlines()[-1] == "PASSIVE"


@pytest.fixture
def train(call_command, tmp_path):
    def train(*overrides):
        run_dir = f"telemetry.run_dir={tmp_path / 'run'}"
        status, output = call_command("launch.train", "+experiment=stage2_3v1", *overrides, run_dir)
        assert status == 2, output
        assert "Traceback" not in output
        return output

    return train


def test_every_wrong_key_is_reported_at_once_with_its_path_and_a_suggestion(train):
    output = train(
        "training.lerning_rate=0.1",
        "rollout_matching.decode_batch_size=six",
        "rollout_matching.temperature=1.0",
        "rollout_matching.vllm.actors.num_actor=3",
    )
    wrong_key = output.partition("training.lerning_rate")[2].splitlines()[0]
    assert "learning_rate" in wrong_key
    for word in ("decode_batch_size", "rollout_matching.decoding.temperature", "num_actors"):
        assert word in output


def test_a_queue_without_dedicated_devices_is_refused(train):
    output = train("rollout_matching.vllm.mode=colocate")
    assert "stage2_ab.channel_b.enable_pipeline" in output


def test_a_missing_data_file_ends_the_run_after_the_batch_algebra_and_before_anything_is_started(
    train, tmp_path
):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    data = (f"data.train={tmp_path / 'nowhere.jsonl'}", "data.val=null")
    output = train(*data, f"model.path={model}")
    assert "data.train: there is no file" in output
    assert "16 raw rollouts in 1 round" in output


@pytest.fixture
def job(demo_checkpoint, demo_data, tmp_path, monkeypatch):
    """Runs a job whose first starts end with these errors; returns where each was to go on."""

    def make(*errors, **settings):
        starts = []

        def start(config, _console):
            starts.append(config.resume.run and str(config.resume.run))
            if len(starts) <= len(errors):
                config.telemetry.run_dir.mkdir(exist_ok=True)
                (config.telemetry.run_dir / "error.txt").write_text(f"of start {len(starts)}")
                raise errors[len(starts) - 1]

        monkeypatch.setattr("launch.train.run", start)
        changes = {f"resume__{key}": value for key, value in settings.items()}
        changes["rollout_matching__vllm__actors"] = {"max_restarts": 2}
        config = configuration(demo_checkpoint, demo_data, tmp_path / "run", **SOUND | changes)
        console = Console(record=True, width=400)
        run_job(config, console)
        return starts, console.export_text()

    return make


LOST = LostLearnerError("its process has ended", phase="accumulate")
BY_ITSELF = LearnerError("the loss is not finite", phase="update")


LATE = LostStartError("no answer from actor-0", actor="actor-0", phase="start")


@pytest.mark.parametrize(
    "at_the_start", [LostLearnerError("its process has ended", phase="start"), LATE]
)
def test_a_job_that_lost_its_learner_is_started_again_from_its_checkpoint(
    job, tmp_path, at_the_start
):
    """It keeps the story of every start. A start that fails is made once more as it was asked."""
    starts, output = job(at_the_start, LOST, automatic=True)
    assert starts == [None, None, "auto"]
    told = "accumulate on the learner: its process has ended; the job is started again; details in"
    assert f"restart   {told} {tmp_path / 'run' / 'error_2.txt'}" in output
    stories = [tmp_path / "run" / f"error_{number}.txt" for number in (1, 2)]
    assert [story.read_text() for story in stories] == ["of start 1", "of start 2"]


@pytest.mark.parametrize("section", [{"checkpoint__full": False}, {"max_restarts": 0}])
def test_a_job_that_could_not_be_started_again_is_refused(
    section, demo_checkpoint, demo_data, tmp_path
):
    changes = {"resume__automatic": True, **section}
    if (restarts := changes.pop("max_restarts", None)) is not None:
        changes["rollout_matching__vllm__actors"] = {"max_restarts": restarts}
    with pytest.raises(ConfigError, match=r"resume\.automatic: true "):
        configuration(demo_checkpoint, demo_data, tmp_path, **SOUND | changes)


@pytest.mark.parametrize(
    ("errors", "automatic", "match"),
    [
        ([LOST], False, "^accumulate on the learner: its process has ended$"),
        ([BY_ITSELF], True, "^update on the learner: the loss is not finite$"),
        (
            [LOST] * 3,
            True,
            r"ended; the job is not started again: .*max_restarts permits 2 in 3600 s",
        ),
        ([LATE] * 3, True, r"^start on actor-0: no answer from actor-0; .*max_restarts permits 2"),
        ([ConfigError("a.b: is wrong")], True, "a.b"),
    ],
)
def test_other_ends_and_one_too_many_end_the_job(job, errors, automatic, match):
    with pytest.raises(type(errors[0]), match=match):
        job(*errors, automatic=automatic)
