"""What a variant asks of the other sections."""

from __future__ import annotations

import pytest

from shared.config.pipeline import EXAMPLE_PIPELINE, Channel

OBJECTIVE = "rollout_matching.pipeline.objective"
TOKEN_CE = EXAMPLE_PIPELINE["objective"][0]
ALIGNED = {"custom.trainer_variant": "stage2_rollout_aligned", "stage2_ab": ...}
STAGE1 = {"custom.trainer_variant": "stage1_sft"}

# A message is cut into its beginning (path, value, reason) and its end (remedy).
REFUSED = [
    (
        {"training.packing_drop_last": False},
        "training.packing_drop_last: false asks for further steps that learn the segments left at the end of the run, and stage2_rollout_aligned only carries",
        "; set training.packing_drop_last: true, or training.packing: false",
    ),
    (
        {"stage2_ab.channel_b.rollouts_per_step": 48},
        "stage2_ab.channel_b.rollouts_per_step: 48 has no effect under stage2_rollout_aligned, whose steps take the effective batch size, 32 raw rollouts",
        "; remove the key, and set training.effective_batch_size to the raw rollouts of a step",
    ),
    (
        {"stage2_ab.channel_b.rollouts_per_step": 33, "training.effective_batch_size": 33, "training.per_device_train_batch_size": 4},
        "stage2_ab.channel_b.rollouts_per_step: 33 has no effect under stage2_rollout_aligned, whose steps take the effective batch size, 36 raw rollouts",
        "; remove the key, and set training.effective_batch_size to the raw rollouts of a step",
    ),
    (
        {"training.per_device_train_batch_size": 16, "training.packing_buffer": 15},
        "training.packing_buffer: 15 segments cannot hold the 16 raw rollouts of a micro-step (training.per_device_train_batch_size)",
        "; raise it to at least 16, or take fewer per micro-step",
    ),
    (
        {f"{OBJECTIVE}[0].channels": ["A"], f"{OBJECTIVE}[1].channels": ["A"]},
        f"{OBJECTIVE}: no enabled entry with a weight above 0 covers channel B, so its steps would learn nothing",
        "; add B to the channels of an entry",
    ),
    (
        {f"{OBJECTIVE}[0].weight": 0.0, f"{OBJECTIVE}[1].enabled": False},
        f"{OBJECTIVE}: no enabled entry with a weight above 0 covers channel B, so its steps would learn nothing",
        "; add B to the channels of an entry",
    ),
]

ACCEPTED = [
    {},
    {"stage2_ab": {"schedule": {"b_ratio": 0.5, "warmup_steps": 20}}},
    {"stage2_ab.channel_b.enable_pipeline": True},
    {"stage2_ab.channel_b.rollouts_per_step": 32},
    {"stage2_ab.channel_b.mode": "step"},
    {"stage2_ab.schedule.b_ratio": 1.0, "stage2_ab.schedule.warmup_steps": 0},
    {"training.packing_drop_last": False, "training.packing": False},
    {"training.per_device_train_batch_size": 16, "training.packing_buffer": 16},
    {"training.packing_buffer": 1},
    {"training.packing_buffer": 1, "training.packing": False, "training.per_device_train_batch_size": 4},
    {"training.packing_window": 64},
    {f"{OBJECTIVE}[0].channels": ["B"], f"{OBJECTIVE}[1].channels": ["B"]},
    {f"{OBJECTIVE}[2]": {"name": "bbox_geo", "enabled": True, "weight": 1.0, "channels": ["B"], "config": {"smoothl1_weight": 1.0, "ciou_weight": 1.0}}},
]


@pytest.mark.parametrize(("changes", "reason", "remedy"), REFUSED)
def test_the_aligned_variant_refuses_what_it_would_ignore_or_cannot_do(problems, changes, reason, remedy):
    (line,) = problems({**ALIGNED, **changes})
    assert line.startswith(reason)
    assert line.endswith(remedy)


@pytest.mark.parametrize("changes", ACCEPTED)
def test_the_aligned_variant_accepts_the_rest(problems, changes):
    assert problems({**ALIGNED, **changes}) == []


@pytest.mark.parametrize("variant", ["stage1_sft", "stage2_two_channel"])
def test_where_a_step_learns_all_its_segments_dropping_the_last_has_no_effect(problems, variant):
    assert problems({"custom.trainer_variant": variant, "training.packing_drop_last": False}) == []


def test_only_the_channels_that_steps_have_need_an_objective(problems):
    on_a, on_b = {f"{OBJECTIVE}": [TOKEN_CE | {"channels": ["A"]}]}, {f"{OBJECTIVE}": [TOKEN_CE | {"channels": ["B"]}]}
    assert problems({**STAGE1, **on_a}) == []
    (line,) = problems({**STAGE1, **on_b})
    assert line.endswith("covers channel A, so its steps would learn nothing; add A to the channels of an entry")
    assert problems({**ALIGNED, **on_b}) == []
    (line,) = problems({**ALIGNED, **on_a})
    assert "covers channel B" in line
    (line,) = problems(on_b)
    assert line.endswith("covers channel A, so its steps would learn nothing; add A to the channels of an entry, or change stage2_ab.schedule")


def test_a_pipeline_of_diagnostics_alone_learns_nothing(problems):
    diagnostics = [{"name": "coord_diag", "enabled": True, "weight": 1.0, "channels": ["A", "B"], "config": {}}]
    (line,) = problems({**ALIGNED, OBJECTIVE: [], "rollout_matching.pipeline.diagnostics": diagnostics})
    assert line.startswith(f"{OBJECTIVE}: no enabled entry with a weight above 0 covers channel B")


def test_every_contradiction_of_the_aligned_variant_is_reported_at_once(problems):
    lines = problems(
        {
            **ALIGNED,
            "stage2_ab.channel_b.rollouts_per_step": 31,
            "training.packing_drop_last": False,
        }
    )
    assert [line.split(": ")[0] for line in lines] == [
        "stage2_ab.channel_b.rollouts_per_step",
        "training.packing_drop_last",
    ]


def test_every_step_of_the_aligned_variant_is_channel_b_and_none_of_teacher_forced_training(load):
    assert {load(ALIGNED).channel(step) for step in range(100)} == {Channel.B}
    assert {load(STAGE1).channel(step) for step in range(100)} == {Channel.A}
