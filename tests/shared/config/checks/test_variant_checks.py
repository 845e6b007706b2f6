"""What a variant asks of the other sections."""

from __future__ import annotations

import pytest

from shared.config.pipeline import EXAMPLE_PIPELINE, Channel

OBJECTIVE = "rollout_matching.pipeline.objective"
TOKEN_CE = EXAMPLE_PIPELINE["objective"][0]
ALIGNED = {"custom.trainer_variant": "stage2_rollout_aligned", "stage2_ab": ...}
STAGE1 = {"custom.trainer_variant": "stage1_sft"}

NOT_COVERED = "no enabled entry with a weight above 0, its own and a term's, covers channel"
COORD_REG = {
    "name": "coord_reg",
    "enabled": True,
    "weight": 1.0,
    "channels": ["A", "B"],
    "config": {
        "coord_ce_weight": 0.0,
        "soft_ce_weight": 1.0,
        "w1_weight": 0.0,
        "coord_gate_weight": 0.0,
        "text_gate_weight": 0.0,
        "temperature": 1.0,
        "target_sigma": 2.0,
        "target_truncate": None,
    },
}
NO_TERMS = {key: 0.0 for key in COORD_REG["config"] if key.endswith("_weight")}

# A message is cut into its beginning (path, value, reason) and its end (remedy).
REFUSED = [
    (
        {"training.packing_drop_last": False},
        (
            "training.packing_drop_last: false asks for further steps that learn the segments left"
            " at the end of the run, and stage2_rollout_aligned only carries"
        ),
        "; set training.packing_drop_last: true, or training.packing: false",
    ),
    (
        {"stage2_ab.channel_b.rollouts_per_step": 48},
        (
            "stage2_ab.channel_b.rollouts_per_step: 48 has no effect under stage2_rollout_aligned,"
            " whose steps take the effective batch size, 32 raw rollouts"
        ),
        "; remove the key, and set training.effective_batch_size to the raw rollouts of a step",
    ),
    (
        {
            "stage2_ab.channel_b.rollouts_per_step": 33,
            "training.effective_batch_size": 33,
            "training.per_device_train_batch_size": 4,
        },
        (
            "stage2_ab.channel_b.rollouts_per_step: 33 has no effect under stage2_rollout_aligned,"
            " whose steps take the effective batch size, 36 raw rollouts"
        ),
        "; remove the key, and set training.effective_batch_size to the raw rollouts of a step",
    ),
    (
        {"training.per_device_train_batch_size": 16, "training.packing_buffer": 15},
        (
            "training.packing_buffer: 15 segments cannot hold the 16 raw rollouts of a micro-step"
            " (training.per_device_train_batch_size)"
        ),
        "; raise it to at least 16, or take fewer per micro-step",
    ),
    (
        {f"{OBJECTIVE}[0].channels": ["A"], f"{OBJECTIVE}[1].channels": ["A"]},
        (
            f"{OBJECTIVE}: no enabled entry with a weight above 0, its own and a term's, covers"
            " channel B, so its steps would learn nothing"
        ),
        "; add B to the channels of an entry that has them",
    ),
    (
        {f"{OBJECTIVE}[0].weight": 0.0, f"{OBJECTIVE}[1].enabled": False},
        (
            f"{OBJECTIVE}: no enabled entry with a weight above 0, its own and a term's, covers"
            " channel B, so its steps would learn nothing"
        ),
        "; add B to the channels of an entry that has them",
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
    {
        "training.packing_buffer": 1,
        "training.packing": False,
        "training.per_device_train_batch_size": 4,
    },
    {"training.packing_window": 64},
    {f"{OBJECTIVE}[0].channels": ["B"], f"{OBJECTIVE}[1].channels": ["B"]},
    {
        f"{OBJECTIVE}[2]": {
            "name": "bbox_geo",
            "enabled": True,
            "weight": 1.0,
            "channels": ["B"],
            "config": {"smoothl1_weight": 1.0, "ciou_weight": 1.0},
        }
    },
]


@pytest.mark.parametrize(("changes", "reason", "remedy"), REFUSED)
def test_the_aligned_variant_refuses_what_it_would_ignore_or_cannot_do(
    problems, changes, reason, remedy
):
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
    on_a, on_b = (
        {f"{OBJECTIVE}": [TOKEN_CE | {"channels": ["A"]}]},
        {f"{OBJECTIVE}": [TOKEN_CE | {"channels": ["B"]}]},
    )
    assert problems({**STAGE1, **on_a}) == []
    (line,) = problems({**STAGE1, **on_b})
    assert line.endswith(
        "covers channel A, so its steps would learn nothing; add A to the channels of an entry that"
        " has them"
    )
    assert problems({**ALIGNED, **on_b}) == []
    (line,) = problems({**ALIGNED, **on_a})
    assert "covers channel B" in line
    (line,) = problems(on_b)
    assert line.endswith(
        "covers channel A, so its steps would learn nothing; add A to the channels of an entry that"
        " has them, or change stage2_ab.schedule"
    )


def test_a_pipeline_of_diagnostics_alone_learns_nothing(problems):
    diagnostics = [
        {"name": "coord_diag", "enabled": True, "weight": 1.0, "channels": ["A", "B"], "config": {}}
    ]
    (line,) = problems(
        {**ALIGNED, OBJECTIVE: [], "rollout_matching.pipeline.diagnostics": diagnostics}
    )
    assert line.startswith(
        f"{OBJECTIVE}: no enabled entry with a weight above 0, its own and a term's, covers"
        " channel B"
    )


@pytest.mark.parametrize(
    ("weights", "is_enough"),
    [
        (NO_TERMS, False),
        *((NO_TERMS | {term: 0.1}, True) for term in NO_TERMS if term != "text_gate_weight"),
    ],
)
def test_a_lone_coord_reg_teaches_by_its_terms(problems, weights, is_enough):
    lines = problems({OBJECTIVE: [COORD_REG | {"config": COORD_REG["config"] | weights}]})
    assert [line.partition(", so its steps")[0] for line in lines] == (
        [] if is_enough else [f"{OBJECTIVE}: {NOT_COVERED} {channel}" for channel in "AB"]
    )


@pytest.mark.parametrize(
    ("weights", "is_enough"), [((0.0, 0.0), False), ((0.1, 0.0), True), ((0.0, 0.1), True)]
)
def test_a_lone_bbox_geo_teaches_by_its_terms(problems, weights, is_enough):
    entry = {
        "name": "bbox_geo",
        "enabled": True,
        "weight": 1.0,
        "channels": ["A", "B"],
        "config": dict(zip(("smoothl1_weight", "ciou_weight"), weights, strict=True)),
    }
    lines = problems({OBJECTIVE: [entry]})
    assert [line.partition(", so its steps")[0] for line in lines] == (
        [] if is_enough else [f"{OBJECTIVE}: {NOT_COVERED} {channel}" for channel in "AB"]
    )


def test_a_lone_token_ce_teaches_whatever_its_descriptions_weigh(problems):
    """Structure, the closing brace and EOS weigh 1 on their own."""
    assert (
        problems({OBJECTIVE: [TOKEN_CE | {"config": dict.fromkeys(TOKEN_CE["config"], 0.0)}]}) == []
    )


def with_text_gate(*channels, **changes):
    return (
        COORD_REG
        | {"channels": list(channels), "config": COORD_REG["config"] | {"text_gate_weight": 0.5}}
        | changes
    )


@pytest.mark.parametrize(
    ("text", "gate", "channels"),
    [
        (TOKEN_CE | {"channels": ["A"]}, with_text_gate("A", "B"), "B"),
        (TOKEN_CE | {"channels": ["B"]}, with_text_gate("A", "B"), "A"),
        (TOKEN_CE | {"enabled": False}, with_text_gate("A", "B"), "A and B"),
        (TOKEN_CE | {"channels": ["B"]}, with_text_gate("A"), "A"),
    ],
)
def test_a_text_gate_needs_a_token_ce_on_its_channels(problems, text, gate, channels):
    (line,) = problems({OBJECTIVE: [text, gate]})
    assert (
        line
        == f"{OBJECTIVE}[1].config.text_gate_weight: 0.5 acts on the text that token_ce weighs, and"
        f" no token_ce is active on channel {channels}; add a token_ce entry there, with weight"
        " 0.0 if text is not to be learned, or set text_gate_weight: 0.0"
    )


@pytest.mark.parametrize(
    ("variant", "text", "gate"),
    [
        ({}, TOKEN_CE | {"weight": 0.0}, with_text_gate("A", "B")),
        ({}, TOKEN_CE, with_text_gate("A")),
        (
            {"stage2_ab.schedule.b_ratio": 0.0},
            TOKEN_CE | {"channels": ["A"]},
            with_text_gate("B", enabled=False),
        ),
        (STAGE1, TOKEN_CE | {"channels": ["A"]}, with_text_gate("A", "B")),
        (ALIGNED, TOKEN_CE | {"channels": ["B"]}, with_text_gate("A", "B")),
    ],
)
def test_a_text_gate_is_accepted_where_token_ce_is_active_on_every_channel_that_both_gate_and_steps_have(
    problems, variant, text, gate
):
    assert problems({**variant, OBJECTIVE: [text, gate]}) == []


def test_polygons_are_refused_where_boxes_alone_are_matched(problems):
    (line,) = problems({"rollout_matching.geometry": ["bbox_2d", "poly"]})
    assert (
        line == "rollout_matching.geometry: poly is not in stage2_two_channel, which matches boxes"
        " only; "
        "remove poly, or set custom.trainer_variant: stage2_rollout_aligned"
    )
    for changes in (
        {"rollout_matching.geometry": ["bbox_2d"]},
        {**ALIGNED, "rollout_matching.geometry": ["bbox_2d", "poly"]},
        {"rollout_matching.geometry": None},
    ):
        assert problems(changes) == []


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
