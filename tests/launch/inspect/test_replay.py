"""`rollmatch replay` learns a recorded step again, without engines, and gets the same numbers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from config_support import configuration, trajectory_config
from edited_lines import edit_line
from resumable_run import start
from trajectory_support import picture
from transformers import AutoProcessor

from launch.inspect.replay import ReplayOptions, _compared, main, replay
from learner.rollout_logs.trajectories import read_step
from learner.segments import decode_image
from shared.config.pipeline import Channel
from shared.errors import ConfigError
from shared.metrics import StepReport
from shared.records import ImageRef
from shared.run_files import read_lines
from shared.trajectory import TrainingExample

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(demo_checkpoint, demo_data, tmp_path_factory):
    """A run of channels A, B, B, B with segments that are carried, rollouts that are stale and
    pictures that are augmented; it has kept the checkpoints after its second and fourth step.
    """
    folder = tmp_path_factory.mktemp("replay") / "run"
    settings = {
        "global_max_length": 400,
        "training__max_steps": 4,
        "training__effective_batch_size": 4,
        "training__packing_window": 4,
        "stage2_ab__channel_b__rollouts_per_step": 4,
        "stage2_ab__schedule__warmup_steps": 1,
        "rollout_matching__max_staleness": 1,
        "learner__cpu_threads": 1,
        "rollout_matching__maskiou_gate_schedule": {"start": 0.1, "steps": 2},
        "telemetry__ray_metrics": False,
        "data__val": None,
        "data__augment": {"flip": 0.5, "crop": 0.7, "scale": [0.7, 1.3], "colour": 0.3},
        "checkpoint__save_steps": 2,
        "checkpoint__save_minutes": None,
    }
    start(configuration(demo_checkpoint, demo_data, folder, **settings))
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "copy")
    return tmp_path / "copy"


def replayed(run: Path, step: int, *, repeats=False, **options) -> dict[int, list[str]]:
    steps = list(replay(ReplayOptions(run=run, step=step, **options), repeats=repeats))
    assert all(step.noise is None for step in steps), "a CPU repeats to the bit"
    return {step.number: step.differences for step in steps}


def test_a_step_is_learned_again_to_the_bit_from_the_checkpoint_before_it(whole):
    assert replayed(whole, 4) == {3: [], 4: []}
    gates = [line.get("rollout/match_gate") for line in read_lines(whole / "metrics.jsonl")]
    assert gates == [None, 0.1, 0.2, 0.3], "a gate with a schedule is of the step alone"


def test_without_a_checkpoint_before_the_step_it_is_learned_from_the_runs_model(whole):
    assert replayed(whole, 2) == {1: [], 2: []}


def test_a_step_that_is_learned_twice_as_on_a_gpu_is_compared_exactly_if_it_repeats(copy):
    edit_line(copy / "metrics.jsonl", 1, lambda line: line.update({"optim/learning_rate": 1.0}))
    steps = replayed(copy, 2, repeats=True)
    assert steps[1] == []
    (difference,) = steps[2]
    assert re.search(r"^optim/learning_rate: 1\.0 recorded, .*, relative difference \d", difference)


def learned(
    loss: float, *, norm: float = 2.0, found: float = 7.0, weights: str = "a"
) -> StepReport:
    metrics = {"loss/total": loss, "optim/grad_norm": norm, "rollout/objects": found}
    return StepReport(0, Channel.B, 1, metrics, (), {"weights": weights})


@pytest.mark.parametrize(
    ("recorded", "repetition", "differing"),
    [
        # Without noise everything must be equal.
        (learned(1.0), learned(1.0), []),
        (learned(1.0 + 1e-9), learned(1.0), ["loss/total"]),
        (learned(1.0, weights="b"), learned(1.0), ["weights"]),
        # The loss repeats with 1e-6, and may differ by ten times as much. The norm and the count
        # happen to be equal in both repetitions, and may differ by as much as the loss.
        (learned(1.0 + 9e-6), learned(1.0 + 1e-6), []),
        (learned(1.0 + 1.2e-5), learned(1.0 + 1e-6), ["loss/total"]),
        (learned(1.0, norm=2.0 + 1.8e-5), learned(1.0 + 1e-6), []),
        (learned(1.0, norm=2.0 + 2.2e-5), learned(1.0 + 1e-6), ["optim/grad_norm"]),
        (learned(1.0, found=8.0), learned(1.0 + 1e-6), ["rollout/objects"]),
        # A noisy metric does not excuse another.
        (learned(1.0, norm=2.1), learned(1.0 + 1e-6, norm=2.1), []),
        (learned(1.001), learned(1.0 + 1e-6, norm=2.0 + 4e-6), ["loss/total"]),
        # If the weights do not repeat, those of the run say nothing.
        (learned(1.0, weights="b"), learned(1.0, weights="c"), []),
    ],
)
def test_on_a_gpu_a_metric_may_differ_by_ten_times_what_it_differs_between_two_repetitions(
    recorded, repetition, differing
):
    again = learned(1.0)
    step = _compared(recorded.metrics, recorded.digests["weights"], again, repetition)
    assert [re.split("[: ]", line)[0] for line in step.differences] == differing
    assert (step.noise is None) == (again.metrics == repetition.metrics)


def test_nothing_of_the_run_changes(whole):
    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}

    before = files()
    replayed(whole, 2)
    assert files() == before


def test_what_is_not_as_recorded_is_named_and_the_command_fails(copy, capsys):
    edit_line(copy / "metrics.jsonl", 1, lambda line: line.update({"loss/total": 0.5}))
    with pytest.raises(SystemExit) as ended:
        main([f"run={copy}", "step=2"])
    assert ended.value.code == 1
    output = capsys.readouterr().out
    assert re.search(r"^step +1 +equal.*\nstep +2 +differs$", output, re.MULTILINE)
    assert "loss/total: 0.5 recorded, " in output


def test_an_edited_rollout_is_another_loss(copy):
    log = copy / "rollouts" / "step_000002.jsonl"
    edit_line(log, 0, lambda line: line["rollout"].update(response_token_ids=[]))
    (differences,) = [found for found in replayed(copy, 2).values() if found]
    assert any(one.startswith("loss/total: ") for one in differences)


def test_what_cannot_be_replayed_is_told(copy):
    log = copy / "rollouts" / "step_000002.jsonl"
    edit_line(log, 1, lambda line: line["rollout"].update(seed=5))
    with pytest.raises(ConfigError, match=r"step 2 .*no rollout of sample .*seed"):
        replayed(copy, 2)
    log.unlink()
    with pytest.raises(ConfigError, match=r"step_000002\.jsonl .*telemetry\.rollouts=true"):
        replayed(copy, 2)
    with pytest.raises(ConfigError, match="has the metrics of 4 steps"):
        replayed(copy, 7)
    with pytest.raises(ConfigError, match=r"checkpoint: .* before step 2; .*none"):
        replayed(copy, 2, checkpoint=copy / "checkpoint")


def test_a_run_of_several_learner_ranks_is_refused(copy):
    config = json.loads((copy / "config.json").read_text())
    config["learner"]["world_size"] = 2
    config["rollout_matching"]["vllm"] = {"mode": "actors", "actors": {"num_actors": 1}}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"run: .* 2 learner ranks.*rollmatch diff-runs"):
        replayed(copy, 1)


OF_AN_ENVIRONMENT = {
    "environment__num_eval_examples": 0,
    "telemetry__ray_metrics": False,
    "checkpoint__save_steps": 2,
    "checkpoint__save_minutes": None,
}


@pytest.fixture(scope="module")
def played(demo_lm, tmp_path_factory):
    """A run of an environment, whose rounds of one group are stale or not within a step. Calls are
    merged or not, a rollout fails, advantages are divided by the deviation of the group, and steps
    are of two updates. What is learned is compared with the weights that the run started with.
    """
    folder = tmp_path_factory.mktemp("replay") / "played"
    changes = {
        "training__max_steps": 4,
        "training__updates_per_batch": 2,
        "rollout_matching__max_staleness": 1,
    }
    config = trajectory_config(
        demo_lm,
        folder,
        objective={"advantage_std": True, "advantage_epsilon": 1e-4},
        reference={"estimator": "top", "top_tokens": 5},
        **OF_AN_ENVIRONMENT | changes,
    )
    start(config, round_size=1, fails={5})
    return folder


def test_a_step_of_an_environment_is_learned_again_to_the_bit(played):
    versions = {
        example["weight_version"]
        for line in read_step(played / "rollouts" / "step_000004.jsonl")
        for example in line["examples"]
    }
    assert len(versions) == 2
    apart = [line["loss/reference_kl"] for line in read_lines(played / "metrics.jsonl")]
    # The first of two updates is at the start itself.
    assert 0.0 < apart[0] < apart[1] < apart[3]
    assert replayed(played, 4) == {3: [], 4: []}
    assert replayed(played, 2) == {1: [], 2: []}


def test_groups_that_were_drawn_again_are_learned_again_to_the_bit(demo_lm, tmp_path):
    changes = {"environment__refill_rounds": 2, "training__max_steps": 2}
    config = trajectory_config(demo_lm, tmp_path, **OF_AN_ENVIRONMENT | changes)
    start(config, round_size=1, reward=lambda at: 0.5 if at < 8 else at % 2)
    metrics = read_lines(tmp_path / "metrics.jsonl")
    assert [line["rollout/num_refilled"] for line in metrics] == [2, 2]
    assert replayed(tmp_path, 2) == {1: [], 2: []}


def test_what_an_environments_log_does_not_have_is_told(played, tmp_path):
    run = tmp_path / "copy"
    shutil.copytree(played, run)
    log = run / "rollouts" / "step_000001.jsonl"
    edited = 1.00001 * read_step(log)[0]["examples"][0]["reward"]
    edit_line(log, 0, lambda line: line["examples"][0].update(reward=edited))
    assert any(one.startswith("loss/total: ") for one in replayed(run, 1)[1])
    edit_line(log, 1, lambda line: line.pop("num_tokens"))
    with pytest.raises(ConfigError, match=r"run: .*no num_tokens"):
        replayed(run, 1)
    edit_line(log, 0, lambda line: line.update(example=line["example"] + 1))
    with pytest.raises(ConfigError, match=r"step 1 .*no rollout of example \d+"):
        replayed(run, 1)
    edit_line(run / "placement.json", 0, lambda placement: placement.pop("examples"))
    with pytest.raises(ConfigError, match=r"run: .*placement\.json .*examples"):
        replayed(run, 1)


def test_pictures_of_an_environment_are_learned_again_from_the_runs_folder(
    demo_checkpoint, tmp_path
):
    shown = picture(96, 64), picture(64, 96, seed=1)
    examples_of = seeing(AutoProcessor.from_pretrained(demo_checkpoint), shown)

    def run(name: str, **changes) -> Path:
        settings = {
            "global_max_length": 400,
            "training__max_steps": 1,
            "environment__max_images_per_prompt": 1,
            "rollout_matching__logprob_tolerance": 1e6,  # nobody computes them
        }
        folder = tmp_path / name
        settings |= OF_AN_ENVIRONMENT | changes
        start(trajectory_config(demo_checkpoint, folder, **settings), examples_of=examples_of)
        return folder

    kept = run("kept")
    assert len(list((kept / "rollouts" / "images").iterdir())) == 2
    assert replayed(kept, 1) == {1: []}
    without = run("without", telemetry__rollout_images=False)
    with pytest.raises(ConfigError, match=r"missing; .*telemetry\.rollout_images=true"):
        replayed(without, 1)


def seeing(processor, shown: tuple[ImageRef, ImageRef]):
    """Make examples of one call, each of which shows one of two pictures."""

    def examples_of(position: int) -> list[TrainingExample]:
        image = shown[position % 2]
        text = "<|vision_start|><|image_pad|><|vision_end|>"
        encoded = processor(text=[text], images=[decode_image(image)])
        prompt = list(encoded["input_ids"][0])
        mask = [0] * len(prompt) + [1] * (1 + position % 3)
        return [
            TrainingExample(
                prompt + [40 + position] * (len(mask) - len(prompt)),
                [-1.0 * is_learned for is_learned in mask],
                mask,
                reward=0.0,
                weight_version=1,
                images=(image,),
            )
        ]

    return examples_of
