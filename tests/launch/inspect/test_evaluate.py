"""`rollmatch evaluate`: what it refuses, and what it makes of real engines' answers (issue
3, "Evaluation").
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from config_support import configuration, trajectory_config
from hydra import compose, initialize_config_dir

from launch.checks.data import ImageNeeds
from launch.cli import as_mapping
from launch.driver import evaluate
from launch.inspect.evaluate import (
    EvaluateOptions,
    LocalHeldOut,
    evaluation_config,
    main,
    report_folder,
)
from launch.pipeline import one_ahead
from launch.processes.engine_settings import settings_of_run
from launch.processes.placement import Resources, plan_placement
from launch.reports.detection import make_report
from launch.reports.page import write_report
from learner.data.samples import load_samples
from learner.held_out import HeldOut
from learner.model.loading import load_tokens
from shared.config import load_config
from shared.config.load import cross_check
from shared.errors import ConfigError
from shared.weight_sync.phases import sync_weights

ROOT = Path(__file__).parents[3]


@pytest.fixture
def make_run(tmp_path):
    """A finished run's folder, as far as the command looks at it."""

    def make(config=None, **changes):
        folder = tmp_path / "run"
        (folder / "checkpoint").mkdir(parents=True)
        (folder / "checkpoint" / "config.json").write_text("{}")
        config = config or configuration(tmp_path / "model", tmp_path / "data", folder, **changes)
        (folder / "config.json").write_text(config.model_dump_json())
        return folder

    return make


@pytest.fixture
def run(make_run):
    return make_run(evaluation__iou_thresholds=[0.5, 0.6])


def in_a_process(*arguments):
    """The command in a process of its own, which prints at its end what it has imported."""
    code = (
        "import sys; from launch.inspect.evaluate import main\ntry: main(sys.argv[1:])\nfinally:"
        " print('imported', *sorted({n.split('.')[0] for n in sys.modules}))"
    )
    words = [sys.executable, "-c", code, *arguments]
    wide = os.environ | {"COLUMNS": "400"}
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=wide, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout


def refused(run, *overrides, **options):
    with pytest.raises(ConfigError) as caught:
        evaluation_config(EvaluateOptions(run=run, **options), overrides)
    return str(caught.value)


@pytest.mark.slow
def test_everything_wrong_is_said_before_anything_heavy_is_imported(run):
    wrong = ("training.lerning_rate=0.1", "rollout_matching.decode_batch_size=six")
    output = in_a_process(f"run={run}", *wrong, "checkpoint=nowhere")
    assert re.search(r"training\.lerning_rate: .*known.*'learning_rate'", output)
    assert "rollout_matching.decode_batch_size" in output
    imported = set(output.split("imported ")[1].split())
    assert "pydantic" in imported
    assert not imported & {"torch", "ray", "vllm", "transformers", "pycocotools"}


def test_arguments_that_are_none_and_keys_that_are_missing_are_named(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as ended:
        main(["outputs/run", "runn=x"])
    assert ended.value.code == 2
    output = capsys.readouterr().out
    for problem in (
        "outputs/run: is not key=value",
        "run: is required, and missing",
        "runn: is not a known key; did you mean",
    ):
        assert problem in output


def test_the_runs_own_configuration_holds_with_the_changes_and_its_own_checkpoint(run, tmp_path):
    changes = ["data.val=other.jsonl", "evaluation.worst_scenes=3", "evaluation.score=constant"]
    config = evaluation_config(EvaluateOptions(run=run), changes)
    assert config.model.path == str(run / "checkpoint")
    assert config.data.val == Path("other.jsonl").resolve()
    section = config.evaluation
    assert (section.worst_scenes, section.score) == (3, "constant")
    assert section.iou_thresholds == (0.5, 0.6)
    assert config.rollout_matching.decode_batch_size == 6
    evaluations = run / "evaluations"
    assert report_folder(config, EvaluateOptions(run=run)) == evaluations / "checkpoint_other"
    later = tmp_path / "later"
    later.mkdir()
    (later / "config.json").write_text("{}")
    options = EvaluateOptions(run=run, checkpoint=later, name="mine")
    assert evaluation_config(options, []).model.path == str(later)
    assert report_folder(config, options) == evaluations / "mine"


NO_QUEUE = {"stage2_ab__channel_b": {"enable_pipeline": False}}


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout_matching__vllm": {"mode": "colocate"}, **NO_QUEUE},
        {"rollout_matching__vllm": {"mode": "colocate"}, "cluster__kind": "local", **NO_QUEUE},
        {
            "rollout_matching__vllm": {
                "mode": "actors",
                "enable_lora": True,
                "sync": {"mode": "adapter"},
            },
            "model__adapter": {"kind": "lora"},
        },
        {
            "model__adapter": {"kind": "lora", "quantize": "nf4"},
            "training__parts": {"vision_tower": {"adapted": True}, "aligner": {"frozen": True}},
        },
        {
            "learner__world_size": 2,
            "learner__parallel": "fsdp",
            "learner__shard_size": 2,
            "training__per_device_train_batch_size": 1,
            "training__effective_batch_size": 4,
            "training__gradient_accumulation_steps": 2,
            "stage2_ab__channel_b": {"rollouts_per_step": 8},
            "training__packing_buffer": 4,
        },
    ],
)
def test_a_run_of_any_topology_is_evaluated_by_actors_that_serve_whole_weights(make_run, changes):
    config = evaluation_config(EvaluateOptions(run=make_run(**changes)), [])
    assert cross_check(config) == []
    placement = plan_placement(config, [Resources(cpus=8, gpus=8)], learns=False)
    assert placement.transport == "nccl"
    assert not config.rollout_matching.vllm.enable_lora
    assert config.learner.world_size == 1


def test_an_evaluation_asks_for_its_actors_alone(run):
    config = evaluation_config(EvaluateOptions(run=run), [])
    placement = plan_placement(config, [Resources(cpus=8, gpus=3)], learns=False)
    assert placement.bundles == [Resources(cpus=1, gpus=1)] * 3
    with pytest.raises(ConfigError, match=r"3 actors of 1 GPU .*3 GPU, .* 2\b"):
        plan_placement(config, [Resources(cpus=8, gpus=2)], learns=False)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["stage2_hf", "stage2_server"])
def test_on_cpu_the_actors_of_a_run_that_had_none_start_at_once_and_take_what_they_need(
    tmp_path, demo_checkpoint, experiment
):
    overrides = [f"+experiment={experiment}", f"++telemetry.run_dir={tmp_path}"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        trained = load_config(as_mapping(compose("train", overrides=overrides)))
    (tmp_path / "config.json").write_text(trained.model_dump_json())
    config = evaluation_config(EvaluateOptions(run=tmp_path, checkpoint=demo_checkpoint), [])
    placement = plan_placement(config, [Resources(cpus=2, gpus=0)], learns=False)
    assert placement.bundles == [Resources(cpus=1, gpus=0)]
    settings = settings_of_run(config, placement, ImageNeeds())
    assert settings.enforce_eager
    # Keys and values, 3 layers, 2 heads of 32, float32: the longest sequences, and a block that
    # vLLM keeps.
    a_token = 2 * 3 * 2 * 32 * 4
    longest = config.rollout_matching.decode_batch_size * config.global_max_length
    assert settings.kv_cache_memory_bytes == a_token * (longest + 128)


def test_a_moved_run_is_read_where_it_is(run, tmp_path):
    moved = tmp_path / "moved"
    run.rename(moved)
    config = evaluation_config(EvaluateOptions(run=moved), [])
    assert (config.telemetry.run_dir, config.model.path) == (moved, str(moved / "checkpoint"))


def test_a_run_without_a_checkpoint_or_held_out_samples_is_refused_for_both(run):
    (run / "checkpoint" / "config.json").unlink()
    problems = refused(run, "data.val=null")
    none = f"checkpoint: {run / 'checkpoint'} holds no checkpoint (no config.json); let the run end"
    assert f"{none} with checkpoint.save_final: true" in problems
    no_data = "data.val: the run has no held-out set; name one with data.val=FILE.jsonl"
    assert no_data in problems


def test_a_run_of_an_environment_is_refused_with_the_command_that_evaluates_it(make_run, tmp_path):
    folder = make_run(trajectory_config(tmp_path / "model", tmp_path / "run"))
    assert "run: it trains on an environment" in refused(folder)
    (folder / "checkpoint" / "config.json").unlink()
    both = refused(folder)
    assert "run: it trains on an environment" in both and "checkpoint: " in both


@pytest.mark.parametrize(
    ("overrides", "problems"),
    [
        *[
            (
                overrides,
                [
                    "model.path: is set by the checkpoint; use checkpoint=FOLDER",
                    "telemetry.run_dir: is set by the run; use run=FOLDER, and name=NAME",
                ],
            )
            for overrides in (
                ["model.path=x", "telemetry.run_dir=y"],
                ["model={path: x}", "telemetry={run_dir: y}"],
            )
        ],
        (["model=x"], ["model: must be a mapping of keys"]),
        (['data.val=["a'], ["data.val: cannot read '[\"a'"]),
    ],
)
def test_model_and_folder_are_chosen_by_the_commands_own_arguments_alone(run, overrides, problems):
    found = refused(run, *overrides)
    assert [problem for problem in problems if problem not in found] == []


def test_a_report_is_not_overwritten(run):
    (run / "evaluations" / "checkpoint_val").mkdir(parents=True)
    config = evaluation_config(EvaluateOptions(run=run), [])
    twice = r"name: .*/checkpoint_val already holds a report; .* name=NAME"
    with pytest.raises(ConfigError, match=twice):
        report_folder(config, EvaluateOptions(run=run))


@pytest.mark.parametrize("name", ["a/b", "..", ".", "", "/tmp", "x.partial"])
def test_a_report_stays_in_the_runs_folder(run, name):
    with pytest.raises(ValueError, match=rf"one folder, .*{re.escape(repr(name))}"):
        EvaluateOptions(run=run, name=name)


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
        HeldOut(config, [load_samples(config, *config.data.sources("val"))], load_tokens(config)),
        config.timeouts,
    )
    by_the_command = evaluate(
        alone, engine_pool.over("actor-0", "actor-2", decode_batch_size=2), 60, one_ahead
    )
    assert by_the_command.outcomes == in_training.outcomes
    assert [scene.position for scene in in_training.outcomes] == list(range(16))
    scores = {found.score for scene in in_training.outcomes for found in scene.objects}
    assert len(scores) > 8 and all(0 < score <= 1 + 1e-6 for score in scores)

    report = make_report(replace(in_training, wall_s=1.0), config, subject="warm checkpoint")
    write_report(tmp_path / "report", report)
    content = json.loads((tmp_path / "report" / "report.json").read_text())
    assert content["num_samples"] == 16
    assert content["detection"][0]["f1"] == report.counts.f1
    assert len(list((tmp_path / "report" / "pictures").iterdir())) == len(content["worst_scenes"])
    assert len((tmp_path / "report" / "predictions.jsonl").read_text().splitlines()) == 16
