"""`python -m launch.evaluate`: what it refuses, and what it makes of real engines' answers (issue
3, "Evaluation").
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from config_support import configuration, trajectory_config
from hydra import compose, initialize_config_dir
from ray.exceptions import ObjectLostError

from launch.checks.data import ImageNeeds
from launch.cli import as_mapping, read_arguments
from launch.driver import evaluate
from launch.evaluate import EvaluateOptions, LocalHeldOut, evaluation_config, report_folder
from launch.pipeline import one_ahead
from launch.reports.detection import make_report
from launch.reports.page import write_report
from launch.runtime.engine_settings import settings_of_run
from launch.runtime.placement import Resources, plan_placement
from launch.serve import ServeOptions, settings_of
from launch.vf_eval.arguments import read_options
from learner.held_out import HeldOut
from learner.model.loading import load_tokens
from learner.samples import load_samples
from rollout_actors.engine import ray_calls
from shared.config import load_config
from shared.config.checks.general import cross_check
from shared.config.job import TimeoutsSection
from shared.errors import ConfigError, RolloutError
from shared.weight_sync.phases import sync_weights

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path):
    """A finished run's folder, as far as the command looks at it."""
    folder = tmp_path / "run"
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "checkpoint" / "config.json").write_text("{}")
    config = configuration(
        tmp_path / "model", tmp_path / "data", folder, evaluation__iou_thresholds=[0.5, 0.6]
    )
    (folder / "config.json").write_text(config.model_dump_json())
    return folder


def command(*arguments):
    """The command in a process of its own, which says at its end what it has imported."""
    code = (
        "import sys; from launch.evaluate import main\ntry: main(sys.argv[1:])\nfinally:"
        " print('imported', *sorted({n.split('.')[0] for n in sys.modules}))"
    )
    environment = os.environ | {"COLUMNS": "400"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=300,
        check=False,
    )


def refused(run, *overrides, **options):
    with pytest.raises(ConfigError) as caught:
        evaluation_config(EvaluateOptions(run=run, **options), overrides)
    return str(caught.value)


@pytest.mark.slow
def test_everything_wrong_is_said_before_anything_heavy_is_imported(run):
    done = command(
        f"run={run}",
        "training.lerning_rate=0.1",
        "rollout_matching.decode_batch_size=six",
        "checkpoint=nowhere",
    )
    assert done.returncode == 2
    assert "training.lerning_rate: is not a known key; did you mean" in done.stdout
    assert "rollout_matching.decode_batch_size" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    imported = set(done.stdout.split("imported ")[1].split())
    assert "pydantic" in imported
    assert not imported & {"torch", "ray", "vllm", "transformers", "pycocotools"}


@pytest.mark.slow
def test_arguments_that_are_none_and_keys_that_are_missing_are_named():
    done = command("outputs/run", "runn=x")
    assert done.returncode == 2
    for problem in (
        "outputs/run: is not key=value",
        "run: is required, and missing",
        "runn: is not a known key; did you mean",
    ):
        assert problem in done.stdout, done.stdout + done.stderr


def test_the_runs_own_configuration_holds_with_the_changes_and_its_own_checkpoint(run, tmp_path):
    config = evaluation_config(
        EvaluateOptions(run=run),
        ["data.val=other.jsonl", "evaluation.worst_scenes=3", "evaluation.score=constant"],
    )
    assert config.model.path == str(run / "checkpoint")
    assert config.data.val == Path("other.jsonl").resolve()
    assert (
        config.evaluation.iou_thresholds,
        config.evaluation.worst_scenes,
        config.evaluation.score,
    ) == ((0.5, 0.6), 3, "constant")
    assert config.rollout_matching.decode_batch_size == 6
    assert (
        report_folder(config, EvaluateOptions(run=run)) == run / "evaluations" / "checkpoint_other"
    )
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "config.json").write_text("{}")
    options = EvaluateOptions(run=run, checkpoint=tmp_path / "later", name="mine")
    assert evaluation_config(options, []).model.path == str(tmp_path / "later")
    assert report_folder(config, options) == run / "evaluations" / "mine"


@pytest.mark.parametrize(
    "changes",
    [
        {
            "rollout_matching__vllm": {"mode": "colocate"},
            "stage2_ab__channel_b": {"enable_pipeline": False},
        },
        {
            "rollout_matching__vllm": {
                "mode": "actors",
                "enable_lora": True,
                "sync": {"mode": "adapter"},
            },
            "model__adapter": {"kind": "lora"},
        },
        {
            "learner__world_size": 2,
            "training__per_device_train_batch_size": 1,
            "training__effective_batch_size": 4,
            "training__gradient_accumulation_steps": 2,
            "stage2_ab__channel_b": {"rollouts_per_step": 8},
            "training__packing_buffer": 4,
        },
    ],
)
def test_a_run_of_any_topology_is_evaluated_by_actors_that_serve_whole_weights(tmp_path, changes):
    folder = tmp_path / "run"
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "checkpoint" / "config.json").write_text("{}")
    (folder / "config.json").write_text(
        configuration(tmp_path / "model", tmp_path / "data", folder, **changes).model_dump_json()
    )
    config = evaluation_config(EvaluateOptions(run=folder), [])
    assert cross_check(config) == []
    assert plan_placement(config, [Resources(cpus=8, gpus=8)], learns=False).transport == "nccl"
    assert not config.rollout_matching.vllm.enable_lora
    assert config.learner.world_size == 1


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["stage2_hf", "stage2_server"])
def test_on_cpu_the_actors_of_a_run_that_had_none_start_at_once_and_take_what_they_need(
    tmp_path, demo_checkpoint, experiment
):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        values = as_mapping(
            compose(
                "train", overrides=[f"+experiment={experiment}", f"++telemetry.run_dir={tmp_path}"]
            )
        )
    (tmp_path / "config.json").write_text(load_config(values).model_dump_json())
    config = evaluation_config(EvaluateOptions(run=tmp_path, checkpoint=demo_checkpoint), [])
    (one,) = plan_placement(config, [Resources(cpus=2, gpus=0)], learns=False).bundles
    assert one == Resources(cpus=1, gpus=0)
    settings = settings_of_run(
        config, plan_placement(config, [Resources(cpus=2, gpus=0)], learns=False), ImageNeeds()
    )
    assert settings.enforce_eager
    # Keys and values, 3 layers, 2 heads of 32, float32: the longest sequences, and a block that
    # vLLM keeps.
    a_token = 2 * 3 * 2 * 32 * 4
    assert settings.kv_cache_memory_bytes == a_token * (
        config.rollout_matching.decode_batch_size * config.global_max_length + 128
    )


def test_a_moved_run_is_read_where_it_is(run, tmp_path):
    run.rename(tmp_path / "moved")
    config = evaluation_config(EvaluateOptions(run=tmp_path / "moved"), [])
    assert config.telemetry.run_dir == tmp_path / "moved"
    assert config.model.path == str(tmp_path / "moved" / "checkpoint")


def test_a_run_without_a_checkpoint_or_held_out_samples_is_refused_for_both(run):
    (run / "checkpoint" / "config.json").unlink()
    said = refused(run, "data.val=null")
    assert (
        f"checkpoint: {run / 'checkpoint'} holds no checkpoint (no config.json); let the run end"
        " with checkpoint.save_final: true" in said
    )
    assert "data.val: the run had no held-out samples; name some with data.val=FILE.jsonl" in said


@pytest.mark.parametrize(("images", "devices"), [(0, 1), (3, 2)])
def test_a_run_of_an_environment_is_refused_with_the_commands_that_evaluate_it(
    tmp_path, demo_checkpoint, images, devices
):
    """As the run's own held-out reports: its arguments, greedily, by a server that is started as
    its engines were.
    """
    folder, section = (
        tmp_path / "my run",
        {
            "id": "guess_number",
            "args": {"largest": 9},
            "tool_call_parser": "hermes",
            "num_eval_examples": 12,
        },
    )
    shutil.copytree(demo_checkpoint, folder / "checkpoint")
    changes = {
        "environment": {
            **section,
            "rollouts_per_example": 4,
            "chat_template_args": {"enable_thinking": False},
            "max_images_per_prompt": images,
        }
    }
    changes["rollout_matching__repeat_terminate"] = {"enabled": True}
    changes["rollout_matching__vllm"] = {
        "mode": "actors",
        "actors": {"tensor_parallel_size": devices},
    }
    config = trajectory_config(demo_checkpoint, folder, **changes)
    (folder / "config.json").write_text(config.model_dump_json())
    serve, evaluate = (shlex.split(one) for one in refused(folder).split("`")[1::2])
    options = read_arguments(ServeOptions, serve[3:])
    settings = settings_of(options)
    assert options.model == folder / "checkpoint"
    assert (options.dtype, options.tool_call_parser, settings.max_model_len) == (
        config.model.dtype,
        "hermes",
        48,
    )
    assert settings.repeat_guard == config.rollout_matching.repeat_terminate.settings()
    placement = plan_placement(
        config, [Resources(cpus=32, gpus=8 if settings.device == "cuda" else 0)]
    )
    of_the_run = settings_of_run(config, placement, ImageNeeds(max(images, 1)))
    assert settings == replace(
        of_the_run, model_path=str(folder / "checkpoint"), max_lora_rank=settings.max_lora_rank
    )
    assert (settings.tensor_parallel_size, settings.max_num_seqs) == (
        devices,
        devices * config.rollout_matching.decode_batch_size,
    )
    asked = read_options(evaluate[3:])
    assert (asked.environment, asked.env_args, asked.num_examples, asked.rollouts_per_example) == (
        "guess_number",
        {"largest": 9},
        12,
        1,
    )
    assert asked.sampling_args == {
        "max_tokens": 8,
        "temperature": 0.0,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
    }
    assert asked.base_url == f"http://{options.host}:{options.port}/v1"


def test_a_run_of_an_environment_whose_checkpoint_is_damaged_is_refused_for_both(
    tmp_path, demo_checkpoint
):
    folder = tmp_path / "run"
    shutil.copytree(demo_checkpoint, folder / "checkpoint")
    config = trajectory_config(
        demo_checkpoint, folder, environment={"id": "guess_number", "rollouts_per_example": 4}
    )
    (folder / "config.json").write_text(config.model_dump_json())
    (folder / "checkpoint" / "config.json").write_text('{"model_type": "qwen3"}')
    problems = refused(folder).splitlines()
    assert "run: it is of an environment, which vf-eval evaluates" in problems
    assert any(
        problem.startswith("checkpoint: ") and str(folder / "checkpoint") in problem
        for problem in problems
    )


def test_a_run_of_an_environment_without_a_checkpoint_is_refused_for_both(tmp_path):
    (tmp_path / "config.json").write_text(
        trajectory_config(tmp_path / "model", tmp_path).model_dump_json()
    )
    said = refused(tmp_path)
    assert (
        "holds no checkpoint (no config.json); let the run end with checkpoint.save_final: true"
        in said
    )
    assert "run: it is of an environment, which vf-eval evaluates" in said
    assert "launch.serve" not in said, "there is nothing to serve"


@pytest.mark.parametrize(
    "overrides",
    [("model.path=x", "telemetry.run_dir=y"), ("model={path: x}", "telemetry={run_dir: y}")],
)
def test_model_and_folder_are_chosen_by_the_commands_own_arguments_alone(run, overrides):
    said = refused(run, *overrides)
    assert "model.path: the checkpoint decides it; use checkpoint=FOLDER" in said
    assert "telemetry.run_dir: the run decides it; use run=FOLDER, and name=NAME" in said


def test_a_section_that_is_no_mapping_is_refused_not_replaced(run):
    assert "model: must be a mapping of keys" in refused(run, "model=x")


def test_a_value_that_cannot_be_read_is_named(run):
    assert "data.val: cannot read '[\"a'" in refused(run, 'data.val=["a')


def test_a_report_is_not_overwritten(run):
    (run / "evaluations" / "checkpoint_val").mkdir(parents=True)
    with pytest.raises(
        ConfigError,
        match=r"name: .*/checkpoint_val holds a report already; choose another with name=NAME",
    ):
        report_folder(evaluation_config(EvaluateOptions(run=run), []), EvaluateOptions(run=run))


@pytest.mark.parametrize("name", ["a/b", "..", ".", "", "/tmp", "x.partial"])
def test_a_report_stays_in_the_runs_folder(run, name):
    with pytest.raises(ValueError, match="must be the name of one folder"):
        EvaluateOptions(run=run, name=name)


def test_an_evaluation_asks_for_its_actors_alone(run):
    config = evaluation_config(EvaluateOptions(run=run), [])
    placement = plan_placement(config, [Resources(cpus=8, gpus=3)], learns=False)
    assert placement.bundles == [Resources(cpus=1, gpus=1)] * 3
    with pytest.raises(ConfigError, match="3 actors of 1 GPU ask for 3 GPU, the cluster has 2"):
        plan_placement(config, [Resources(cpus=8, gpus=2)], learns=False)


@pytest.mark.engine
@pytest.mark.ray
def test_real_engines_give_the_same_report_to_a_learner_and_to_the_command_on_any_number_of_actors(
    engine_pool, warm_checkpoint, demo_data, tmp_path
):
    from local_learner import LocalLearner

    config = configuration(
        warm_checkpoint,
        demo_data,
        tmp_path / "run",
        global_max_length=512,
        rollout_matching__max_new_tokens=96,
    )
    learner = LocalLearner(config, receiver_ranks=3)
    try:
        sync_weights(learner, engine_pool.pool)
        in_training = evaluate(learner, engine_pool.pool, 60, one_ahead)
    finally:
        learner.close()
    alone = LocalHeldOut(
        HeldOut(config, load_samples(config, config.data.val), load_tokens(config)),
        config.timeouts,
    )
    by_the_command = evaluate(
        alone, engine_pool.over("actor-0", "actor-2", decode_batch_size=2), 60, one_ahead
    )
    assert by_the_command.outcomes == in_training.outcomes
    assert [scene.position for scene in in_training.outcomes] == list(range(16))
    scores = [found.score for scene in in_training.outcomes for found in scene.objects]
    assert (
        len(scores) > 8 and all(0 < score <= 1 + 1e-6 for score in scores) and len(set(scores)) > 8
    )

    report = make_report(replace(in_training, wall_s=1.0), config, subject="warm checkpoint")
    write_report(tmp_path / "report", report)
    content = json.loads((tmp_path / "report" / "report.json").read_text())
    assert content["num_samples"] == 16
    assert content["detection"][0]["f1"] == report.counts.f1
    assert len(list((tmp_path / "report" / "pictures").iterdir())) == len(content["worst_scenes"])
    assert len((tmp_path / "report" / "predictions.jsonl").read_text().splitlines()) == 16


LOST = ObjectLostError("ab" * 28, None, "")


class Scores:
    """The part of `HeldOut` that `LocalHeldOut` uses."""

    def score(self, rollouts):
        return [f"scene of {rollout}" for rollout in rollouts]


@pytest.fixture
def score(monkeypatch):
    """Scores two references with these answers of Ray's; None is late."""

    def score(*answers):
        def wait(refs, *, timeout):
            assert 0 < timeout <= 7
            return [ref for ref in refs if answers[ref] is not None][-1:], refs

        def get(ref):
            if isinstance(answers[ref], Exception):
                raise answers[ref]
            return answers[ref]

        monkeypatch.setattr(ray_calls, "ray", SimpleNamespace(wait=wait, get=get))
        return LocalHeldOut(Scores(), TimeoutsSection(generate_s=7.0)).score([[0, 1]])

    return score


def test_the_shares_are_scored_in_order_within_the_timeout(score):
    assert score(["a", "b"], ["c"]) == ["scene of a", "scene of b", "scene of c"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, r"no answer from .* after timeouts\.generate_s = 7 s; check that every actor's"),
        (LOST, r"a finished answer was lost \(.*\); check that every actor's"),
    ],
)
def test_rollouts_that_are_late_or_lost_are_an_error_with_what_to_check(score, answer, message):
    with pytest.raises(RolloutError, match=f"(?s)collect on rollout engines: {message}"):
        score(["a", "b"], answer)
