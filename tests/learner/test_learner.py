"""One rank, step by step, with rollouts nobody had to generate (spec: channel-b step mode;
decisions 6, 7, 10 and 24).
"""

import base64
import hashlib
import json
import re
from dataclasses import replace

import pytest
from config_support import configuration
from learner_support import (
    finish_step,
    half_right,
    make_learner,
    same,
    timeless,
    weights_of,
)

from launch.inspect.show_sample import ShowOptions, show_sample
from learner.rollout_logs.samples import read_step
from learner.rollout_logs.writer import step_path
from shared.config.pipeline import EXAMPLE_POLICY_GRADIENT, Channel
from shared.errors import LearnerError, RolloutError
from shared.schedule import RunSchedule
from shared.seeds import request_seed
from shared.sent_requests import PictureShelf

pytestmark = pytest.mark.slow

SMALL = {
    "global_max_length": 512,
    "training__max_steps": 3,
    "training__effective_batch_size": 12,
    "training__packing_window": 4,
    "stage2_ab__schedule__warmup_steps": 1,
    "stage2_ab__channel_b__rollouts_per_step": 12,
}


@pytest.fixture(scope="module")
def config(demo_checkpoint, demo_data, tmp_path_factory):
    return lambda **changes: configuration(
        demo_checkpoint, demo_data, tmp_path_factory.mktemp("run"), **SMALL | changes
    )


def channel_b_step(config, rounds):
    """A fresh learner's first channel-B step, learned in these rounds: its report and the weights
    after it.
    """
    learner = make_learner(config)
    rollouts = half_right(learner, RunSchedule(config).plan(1))
    for round_ in rounds:
        learner.accumulate([rollouts[i] for i in round_])
    return finish_step(learner), weights_of(learner)


def test_rows_losses_and_weights_do_not_depend_on_how_the_step_was_cut_into_rounds(config):
    whole, weights = channel_b_step(config(), [range(12)])
    assert whole.channel is Channel.B
    for rounds in ([range(6), range(6, 12)], [range(5), range(5, 7), range(7, 12)]):
        report, other = channel_b_step(config(), rounds)
        assert timeless(report.metrics) == timeless(whole.metrics)
        assert same(weights, other)


def test_32_raw_rollouts_pack_into_fewer_than_32_packed_sequences(config):
    settings = config(
        global_max_length=1024,
        training__effective_batch_size=32,
        stage2_ab__channel_b__rollouts_per_step=None,
    )
    report, _ = channel_b_step(settings, [range(16), range(16, 32)])
    assert report.metrics["rollout/num"] == report.metrics["packing/num_segments"] == 32
    assert report.metrics["packing/num_rows"] <= 8
    assert report.metrics["packing/fill_ratio"] > 0.75


def test_every_request_has_a_seed_of_its_own_that_its_place_in_the_run_decides(config):
    learner = make_learner(config())
    requests = learner.next_requests(RunSchedule(config()).plan(1))
    seeds = [request.seed for request in requests]
    images = [image for request in requests for image in request.images]
    assert seeds == [request_seed(17, 1, position) for position in range(12)]
    assert len(set(seeds)) == 12
    assert all(image.sha256 and image.data is None for image in images), "read when they are sent"


def test_options_beyond_the_specification_are_learned_counted_and_logged(config):
    pipeline = config().rollout_matching.pipeline.model_dump()
    pipeline["objective"][0]["config"] |= {"matched_desc_weight": 0.5, "fp_end_weight": 0.5}
    settings = config(
        rollout_matching__pipeline=pipeline,
        rollout_matching__supervise_separators=True,
        rollout_matching__trim_trailing_false_positives=True,
        rollout_matching__maskiou_gate_schedule={"start": 0.1, "steps": 10},
    )
    learner = make_learner(settings)
    codec = learner.loaded.codec
    rollouts = []
    for rollout in half_right(learner, RunSchedule(settings).plan(1)):
        text = b"".join(map(codec.piece_bytes, rollout.response_token_ids)).decode()
        renamed = codec.encode(re.sub(r'(?<="desc": ")[^"]+', "zebra", text))
        rollouts.append(replace(rollout, response_token_ids=tuple(renamed)))
    learner.accumulate(rollouts)
    metrics = finish_step(learner).metrics
    lines = read_step(step_path(settings.telemetry.run_dir / "rollouts", 2))
    roles = [run for line in lines for run in line["target"]["supervision"]]
    corrected = [run for run in roles if run[2:] == ("corrected_desc", 0.5)]
    assert (
        metrics["rollout/num_corrected_names"] == len(corrected) == metrics["rollout/num_matched"]
    )
    separators = sum(run[1] - run[0] for run in roles if run[2:] == ("separator", 1.0))
    assert metrics["rollout/num_separators"] == separators > 0
    assert metrics["rollout/match_gate"] == 0.1
    assert metrics["packing/num_segments"] == 12


def test_two_learners_draw_the_same_samples_in_the_same_order(config):
    drawn = []
    for _ in range(2):
        learner = make_learner(config())
        for plan in RunSchedule(config()).plans():
            if plan.channel is Channel.B:
                break
            learner.next_requests(plan)
            drawn.append([sample.sample_id for sample in learner.steps[0].samples])
    assert drawn[0] == drawn[1]


def test_several_files_are_learned_by_their_weights_with_figures_for_each(config, demo_data):
    files = [
        {"path": str(demo_data / "train.jsonl"), "weight": 3},
        {"path": str(demo_data / "val.jsonl"), "weight": 1, "name": "other"},
    ]
    settings = config(data__train=files)
    schedule = RunSchedule(settings)
    learner = make_learner(settings)
    learner.next_requests(schedule.plan(0))
    first = finish_step(learner).metrics
    counts = {name: value for name, value in first.items() if name.startswith("source/")}
    assert counts == {"source/num_samples/other": 3, "source/num_samples/train": 9}
    learner.publisher.version = 1
    rollouts = half_right(learner, schedule.plan(1))
    learner.accumulate([replace(rollout, weight_version=1) for rollout in rollouts])
    second = finish_step(learner).metrics
    for figure in ("num_matched", "num_ground_truth", "num_valid_objects"):
        parts = [second[f"source/{figure}/{name}"] for name in ("train", "other")]
        assert sum(parts) == second[f"rollout/{figure}"] > 0
    rate = second["source/num_matched/other"] / second["source/num_ground_truth/other"]
    assert second["source/match_rate/other"] == rate
    names = [rollout.sample_id.partition("/")[0] for rollout in rollouts]
    assert (names.count("train"), names.count("other")) == (9, 3)
    files[0]["weight"] = 2
    others = make_learner(config(data__train=files)).algorithm.fingerprints()
    assert others["data.train"] != learner.algorithm.fingerprints()["data.train"]


def test_points_are_learned_on_both_channels_beside_boxes(config, demo_data, tmp_path):
    """Those of odd rows; `bbox_geo` passes over them."""
    rows = [json.loads(line) for line in (demo_data / "train.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row["images"] = [str(demo_data / image) for image in row["images"]]
        for one in row["objects"]:
            if number % 2:
                one["point_2d"] = one.pop("bbox_2d")[:2]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    pipeline = config().rollout_matching.pipeline.model_dump()
    terms = {"smoothl1_weight": 1.0, "ciou_weight": 1.0}
    geo = {"name": "bbox_geo", "enabled": True, "weight": 1.0, "channels": ["A", "B"]}
    pipeline["objective"] = [*pipeline["objective"], geo | {"config": terms}]
    settings = config(
        data__train=str(tmp_path / "train.jsonl"),
        rollout_matching__pipeline=pipeline,
        rollout_matching__geometry=["bbox_2d", "point_2d"],
    )
    schedule = RunSchedule(settings)
    learner = make_learner(settings)
    learner.next_requests(schedule.plan(0))
    reports = [finish_step(learner)]
    learner.publisher.version = 1
    rollouts = half_right(learner, schedule.plan(1))
    learner.accumulate([replace(rollout, weight_version=1) for rollout in rollouts])
    reports.append(finish_step(learner))
    for number, report in enumerate(reports, 1):
        terms = [
            report.metrics[f"loss/{term}"] for term in ("total", "bbox_geo", "coord_reg.soft_ce")
        ]
        assert all(0 < term < float("inf") for term in terms)
        lines = read_step(step_path(settings.telemetry.run_dir / "rollouts", number))
        for line in lines:
            num_slots = sum(len(one["bins"]) for one in line["ground_truth"])
            assert len(line["target"]["coord_positions"]) == num_slots
    found = [one["kind"] for line in lines for one in line["reading"]["objects"]]
    assert set(found) == {"bbox_2d", "point_2d"}
    assert reports[1].metrics["rollout/num_matched"] == len(found)


AUGMENT = {"flip": 0.5, "crop": 0.6, "scale": [0.6, 1.2], "colour": 0.3, "min_visible": 0.5}


def test_engines_and_learner_are_shown_the_same_augmented_picture_and_so_is_whoever_looks_at_it(
    config,
):
    settings = config(data__augment=AUGMENT)
    schedule = RunSchedule(settings)
    learner = make_learner(settings)
    rollouts = half_right(learner, schedule.plan(1))
    step = learner.steps[0]
    boxes = []
    shelf = PictureShelf(lambda value: boxes.append(value) or len(boxes) - 1)
    # As `half_right` asked: the requests of a step are made anew.
    received = shelf.send(step.requests()).with_data(lambda refs: [boxes[ref] for ref in refs])
    for request, sample in zip(received, step.samples, strict=True):
        assert [image.data for image in request.images] == [image.data for image in sample.images]
        assert hashlib.sha256(request.images[0].data).hexdigest() == request.images[0].sha256
    augmented = [one.augmentation for one in step.shown]
    assert len(set(augmented)) == 12 and None not in augmented
    learner.accumulate(rollouts)
    metrics = finish_step(learner).metrics
    assert (metrics["augment/num_samples"], metrics["augment/num_unchanged"]) == (12, 0)
    stored = {sample.sample_id: sample for sample in learner.algorithm.train[0]}
    num_objects = sum(len(stored[sample.sample_id].objects) for sample in step.samples)
    assert metrics["augment/num_dropped_objects"] == num_objects - sum(
        len(sample.objects) for sample in step.samples
    )
    assert metrics["rollout/num_ground_truth"] < num_objects
    (settings.telemetry.run_dir / "config.json").write_text(settings.model_dump_json())
    page = show_sample(ShowOptions(run=settings.telemetry.run_dir, step=2, position=3)).read_text()
    assert base64.b64encode(step.samples[3].images[0].data).decode() in page
    # Of the place in the run, not of what went before.
    other = make_learner(config(data__augment=AUGMENT))
    other.algorithm.move_to(24)
    other.algorithm.move_to(0)
    other.next_requests(schedule.plan(1))
    assert other.steps[0].samples == step.samples


def test_a_sample_of_several_rollouts_is_augmented_once_and_every_rank_augments_alike(config):
    several = {"stage2_ab__channel_b": {"rollouts_per_step": 12, "rollouts_per_sample": 3}}
    pipeline = config().rollout_matching.pipeline.model_dump()
    pipeline["objective"] = [*pipeline["objective"], EXAMPLE_POLICY_GRADIENT]
    settings = config(
        data__augment=AUGMENT,
        rollout_matching__pipeline=pipeline,
        rollout_matching__decoding={"temperature": 1.0},
        **several,
    )
    learner = make_learner(settings)
    learner.next_requests(RunSchedule(settings).plan(1))
    step = learner.steps[0]
    pictures = [sample.images[0].sha256 for sample in step.samples]
    assert [pictures.count(one) for one in pictures] == [3] * 12
    assert step.samples[0] is step.samples[2]
    assert step.metrics.totals.as_dict()["augment/num_samples"] == 4


def test_a_rollout_of_other_weights_or_another_prompt_ends_the_run(config):
    learner = make_learner(config())
    rollout, *_ = half_right(learner, RunSchedule(config()).plan(1))
    with pytest.raises(RolloutError, match="weight version 7"):
        learner.accumulate([replace(rollout, weight_version=7)])
    prompt = rollout.prompt_token_ids
    other_prompt = replace(rollout, prompt_token_ids=(*prompt[:3], 5, *prompt[4:]))
    with pytest.raises(RolloutError, match="the prompts differ first at token 3"):
        learner.accumulate([other_prompt])


def test_an_error_of_the_next_row_does_not_hide_an_error_of_the_row_before(config):
    learner = make_learner(config(training__packing=False))
    first, second, *_ = half_right(learner, RunSchedule(config()).plan(1))
    first = replace(first, logprobs=(-50.0,) * len(first.response_token_ids))
    prompt = second.prompt_token_ids
    second = replace(second, prompt_token_ids=(*prompt[:3], 5, *prompt[4:]))
    with pytest.raises(RolloutError, match="log-prob") as caught:
        learner.accumulate([first, second])
    assert "the prompts differ first at token 3" in str(caught.value.__context__)


def test_a_learner_that_is_told_to_stop_leaves_after_its_row_with_the_weights_of_the_last_update(
    config,
):
    learner = make_learner(config(training__packing=False))
    rollouts, rows = half_right(learner, RunSchedule(config()).plan(1)), []
    before = weights_of(learner)

    def stop_in_the_third_row(*_):
        rows.append(1)
        if len(rows) == 3:
            learner.stop()

    learner.loaded.model.lm_head.register_full_backward_hook(stop_in_the_third_row)
    with pytest.raises(LearnerError, match="stopped because the run is ending") as caught:
        learner.accumulate(rollouts)
    assert (len(rows), learner.num_updates) == (3, 0)
    assert type(caught.value) is LearnerError
    assert same(before, weights_of(learner))


MALFORMED = [
    "",
    "I see a cat.",
    "[{",
    '{"object_1": {"desc": "two", "bbox_2d": ["<|coord_1|>"]}}',
    '{"object_2": {"desc": "", "bbox_2d"',
    '{"object_3": 7, "a": {}}',
    "}}}}",
    '{"',
]


def test_parse_failures_are_visible_without_crashing(config):
    settings = config()
    learner = make_learner(settings)
    texts = [MALFORMED[i % len(MALFORMED)] for i in range(12)]
    rollouts = half_right(learner, RunSchedule(settings).plan(1))
    encode = learner.loaded.codec.encode
    learner.accumulate(
        [
            replace(rollout, response_token_ids=tuple(encode(text)))
            for rollout, text in zip(rollouts, texts, strict=True)
        ]
    )
    metrics = finish_step(learner).metrics
    num_dropped = metrics["rollout/num_dropped_objects"]
    assert num_dropped == metrics["rollout/num_dropped.wrong_arity"] > 0
    assert metrics["rollout/num_fallback"] > 0
    assert metrics["rollout/num_truncated"] > 0
    assert metrics["rollout/num_appended"] == metrics["rollout/num_ground_truth"], (
        "the ground truth is learned all the same"
    )
    assert metrics["loss/total"] > 0
    lines = read_step(step_path(settings.telemetry.run_dir / "rollouts", 2))
    dropped = [one["reason"] for line in lines for one in line["reading"]["dropped"]]
    assert [line["rollout"]["text"] for line in lines] == texts
    assert dropped == ["wrong_arity"] * int(num_dropped)


def test_training_uses_one_sequence_and_one_forward_pass(config):
    """Scenario: every sample is in exactly one forward, as one canonical sequence."""
    learner = make_learner(config())
    forwards = []
    learner.loaded.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: forwards.append(kwargs["input_ids"][0].tolist()),
        with_kwargs=True,
    )
    learner.accumulate(half_right(learner, RunSchedule(config()).plan(1)))
    report = finish_step(learner)
    assert len(forwards) == report.metrics["packing/num_rows"]
    eos = learner.loaded.codec.eos_token_id
    # A prompt holds one <|im_end|> (the user's turn), a target one more.
    assert sum(tokens.count(eos) for tokens in forwards) == 2 * 12
    assert sum(map(len, forwards)) == report.metrics["packing/num_tokens"]


def test_packing_is_never_applied_during_rollout_generation(config):
    learner = make_learner(config())
    requests = learner.next_requests(RunSchedule(config()).plan(1))
    encode = learner.algorithm.encoder.encode
    prompts = [encode(sample).request_token_ids for sample in learner.steps[0].samples]
    assert [request.prompt_token_ids for request in requests] == prompts, "its prompt alone"
    assert all(len(request.images) == 1 for request in requests)
