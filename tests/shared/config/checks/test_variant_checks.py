"""The demands of a variant on the other sections."""

from __future__ import annotations

import pytest
from config_changes import (
    ALIGNED,
    BBOX_GEO,
    BUDGET,
    COORD_DIAG,
    COORD_REG,
    DIAGNOSTICS,
    MATCHING,
    OBJECTIVE,
    STAGE1,
    TEMPERATURE,
    TOKEN_CE,
    fits,
    load,
    problems,
)

from shared.config.pipeline import EXAMPLE_POLICY_GRADIENT, Channel

NOT_COVERED = (
    f"{OBJECTIVE}: no enabled entry with a weight above 0, its own and a term's, covers channel"
)
NO_TERMS = {key: 0.0 for key in COORD_REG["config"] if key.endswith("_weight")}
PER_DEVICE = "training.per_device_train_batch_size"
BUFFER = "training.packing_buffer"
DROP_LAST = "training.packing_drop_last"

REFUSED = [
    (
        {DROP_LAST: False},
        (
            f"{DROP_LAST}: false, and stage2_rollout_aligned has no step for the ... set {DROP_LAST}:"
            " true, or training.packing: false"
        ),
    ),
    (
        {BUDGET: 48},
        (
            f"{BUDGET}: 48 has no effect under stage2_rollout_aligned, whose steps take the effective"
            " batch size, 32; remove the key, and set training.effective_batch_size"
        ),
    ),
    (
        {BUDGET: 33, "training.effective_batch_size": 33, PER_DEVICE: 4},
        (
            f"{BUDGET}: 33 has no effect under stage2_rollout_aligned, whose steps take the effective"
            " batch size, 36;"
        ),
    ),
    (
        {PER_DEVICE: 16, BUFFER: 15},
        (
            f"{BUFFER}: 15 segments cannot hold the 16 raw rollouts of a micro-step ({PER_DEVICE});"
            " raise it to at least 16, or take fewer per micro-step"
        ),
    ),
    (
        {f"{OBJECTIVE}[0].channels": ["A"], f"{OBJECTIVE}[1].channels": ["A"]},
        f"{NOT_COVERED} B; add B to the channels of an entry that has them",
    ),
    ({f"{OBJECTIVE}[0].weight": 0.0, f"{OBJECTIVE}[1].enabled": False}, f"{NOT_COVERED} B; "),
    ({OBJECTIVE: [], DIAGNOSTICS: [COORD_DIAG]}, f"{NOT_COVERED} B; "),
]

ACCEPTED = [
    {},
    {"stage2_ab": {"schedule": {"b_ratio": 0.5, "warmup_steps": 20}}},
    {"stage2_ab.channel_b.enable_pipeline": True},
    {BUDGET: 32},
    {"stage2_ab.channel_b.mode": "step"},
    {DROP_LAST: False, "training.packing": False},
    {PER_DEVICE: 16, BUFFER: 16},
    {BUFFER: 1},
    {BUFFER: 1, "training.packing": False, PER_DEVICE: 4},
    {"training.packing_window": 64},
    {f"{OBJECTIVE}[0].channels": ["B"], f"{OBJECTIVE}[1].channels": ["B"]},
    {f"{OBJECTIVE}[2]": BBOX_GEO},
]


@pytest.mark.parametrize(("changes", "expected"), REFUSED)
def test_the_aligned_variant_refuses_what_it_would_ignore_or_cannot_do(changes, expected):
    (line,) = problems({**ALIGNED, **changes})
    assert fits(line, expected), line


@pytest.mark.parametrize("changes", ACCEPTED)
def test_the_aligned_variant_accepts_the_rest(changes):
    assert problems({**ALIGNED, **changes}) == []


def test_every_contradiction_of_the_aligned_variant_is_reported_at_once():
    lines = problems({**ALIGNED, BUDGET: 31, DROP_LAST: False})
    assert [line.split(": ")[0] for line in lines] == [BUDGET, DROP_LAST]


PER_SAMPLE = "stage2_ab.channel_b.rollouts_per_sample"
REWARDED = EXAMPLE_POLICY_GRADIENT | {
    "config": EXAMPLE_POLICY_GRADIENT["config"] | {"normalize": "rollout"}
}
NEAR_THE_START = REWARDED | {"name": "reference_kl", "config": {"estimator": "k3"}}
COMPARED = {f"{OBJECTIVE}[2]": REWARDED, PER_SAMPLE: 4, TEMPERATURE: 1.0}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {**COMPARED, PER_SAMPLE: 1},
            f"{PER_SAMPLE}: 1, and policy_gradient compares the rollouts of a sample with each",
        ),
        (
            {**COMPARED, PER_SAMPLE: 5},
            (
                f"{PER_SAMPLE}: 5 x 1 learner ranks does not divide the 32 rollouts of a step; set"
                f" {BUDGET} to a multiple of 5"
            ),
        ),
        (
            {**COMPARED, PER_SAMPLE: 32, "learner.world_size": 2},
            f"{PER_SAMPLE}: 32 x 2 learner ranks does not divide ... to a multiple of 64",
        ),
        (
            {**COMPARED, TEMPERATURE: 0.0},
            (
                f"{TEMPERATURE}: 0 is greedy: it makes an example's rollouts all the same, and"
                " policy_gradient learns from differences; set 1.0"
            ),
        ),
        (
            {**COMPARED, f"{MATCHING}.decoding.top_p": 0.9},
            f"{MATCHING}.decoding.top_p: 0.9 changes what is sampled, and policy_gradient needs",
        ),
        (
            {**COMPARED, f"{OBJECTIVE}[2].config.normalize": "batch"},
            (
                f"{OBJECTIVE}[2].config.normalize: batch would divide the losses of matched objects"
                " by sampled tokens too; set step, rollout or constant"
            ),
        ),
        (
            {f"{OBJECTIVE}[2]": NEAR_THE_START},
            (
                f"{OBJECTIVE}[2].name: 'reference_kl' takes the tokens of policy_gradient, and none"
                " is enabled; add one such as `{name: policy_gradient, "
            ),
        ),
        (
            {**COMPARED, f"{OBJECTIVE}[3]": NEAR_THE_START | {"config": {"estimator": "top"}}},
            (
                f"{OBJECTIVE}[3].config.top_tokens: is required, and missing beside estimator: top;"
                " write a number such as 20"
            ),
        ),
        (
            {
                **COMPARED,
                f"{OBJECTIVE}[3]": NEAR_THE_START
                | {"config": {"estimator": "k3", "top_tokens": 9}},
            },
            (
                f"{OBJECTIVE}[3].config.top_tokens: 9 has no effect beside estimator: k3; remove the"
                " key, or set estimator: top"
            ),
        ),
        (
            {**COMPARED, BUFFER: 63},
            (
                f"{BUFFER}: 63 segments cannot hold a whole step (32 samples on channel A, 32 raw"
                " rollouts on channel B, each matched and learned by its reward); raise it to at"
                " least 64,"
            ),
        ),
        (
            {**STAGE1, PER_SAMPLE: 2},
            f"{PER_SAMPLE}: 2 has no effect under stage1_sft; remove it; environment.",
        ),
    ],
)
def test_rollouts_that_are_matched_and_rewarded_are_of_whole_groups_and_sampled(changes, expected):
    (line,) = problems(changes)
    assert fits(line, expected), line


@pytest.mark.parametrize("changes", [{}, ALIGNED, STAGE1, COMPARED])
def test_several_updates_of_targets_are_refused(changes):
    (line,) = problems({**changes, "training.updates_per_batch": 2})
    expected = (
        "training.updates_per_batch: 2, and ... learns targets, where no ratio bounds the later"
        " updates; set it to 1, or set custom.trainer_variant: trajectory_pg"
    )
    assert fits(line, expected), line


@pytest.mark.parametrize(
    "changes",
    [
        COMPARED,
        {**COMPARED, BUFFER: 64},
        {**COMPARED, "learner.world_size": 2},
        # Several rollouts of a sample may also be matched alone.
        {PER_SAMPLE: 4},
    ],
)
def test_rollouts_of_a_sample_may_be_matched_and_rewarded_in_one_step(changes):
    assert problems(changes) == []


@pytest.mark.parametrize("variant", ["stage1_sft", "stage2_two_channel"])
def test_where_a_step_learns_all_its_segments_dropping_the_last_has_no_effect(variant):
    assert problems({"custom.trainer_variant": variant, DROP_LAST: False}) == []


@pytest.mark.parametrize(
    ("variant", "channel", "ending"),
    [
        (STAGE1, "A", None),
        (STAGE1, "B", " A; add A to the channels of an entry that has them"),
        (ALIGNED, "B", None),
        (ALIGNED, "A", " B; add B to the channels of an entry that has them"),
        (
            {},
            "B",
            " A; add A to the channels of an entry that has them, or change stage2_ab.schedule",
        ),
    ],
)
def test_only_the_channels_that_steps_have_need_an_objective(variant, channel, ending):
    lines = problems({**variant, OBJECTIVE: [TOKEN_CE | {"channels": [channel]}]})
    assert lines == ([] if ending is None else [NOT_COVERED + ending])


@pytest.mark.parametrize(
    ("entry", "config", "is_enough"),
    [
        (COORD_REG, NO_TERMS, False),
        *((COORD_REG, {**NO_TERMS, term: 0.1}, True) for term in NO_TERMS if term[:4] != "text"),
        (BBOX_GEO, {"smoothl1_weight": 0.0, "ciou_weight": 0.0}, False),
        (BBOX_GEO, {"smoothl1_weight": 0.1, "ciou_weight": 0.0}, True),
        (BBOX_GEO, {"smoothl1_weight": 0.0, "ciou_weight": 0.1}, True),
        # Structure, the closing brace and EOS weigh 1 on their own.
        (TOKEN_CE, dict.fromkeys(TOKEN_CE["config"], 0.0), True),
    ],
)
def test_a_lone_module_teaches_by_its_terms(entry, config, is_enough):
    alone = entry | {"channels": ["A", "B"], "config": entry["config"] | config}
    lines = problems({OBJECTIVE: [alone]})
    expected = [] if is_enough else [f"{NOT_COVERED} A", f"{NOT_COVERED} B"]
    assert [line.partition(";")[0] for line in lines] == expected


def with_text_gate(*channels, **changes):
    config = COORD_REG["config"] | {"text_gate_weight": 0.5}
    return COORD_REG | {"channels": list(channels), "config": config} | changes


@pytest.mark.parametrize(
    ("variant", "text", "gate", "missing"),
    [
        ({}, {"channels": ["A"]}, with_text_gate("A", "B"), "B"),
        ({}, {"channels": ["B"]}, with_text_gate("A", "B"), "A"),
        ({}, {"enabled": False}, with_text_gate("A", "B"), "A and B"),
        ({}, {"channels": ["B"]}, with_text_gate("A"), "A"),
        ({}, {"weight": 0.0}, with_text_gate("A", "B"), None),
        ({}, {}, with_text_gate("A"), None),
        (
            {"stage2_ab.schedule.b_ratio": 0.0},
            {"channels": ["A"]},
            with_text_gate("B", enabled=False),
            None,
        ),
        (STAGE1, {"channels": ["A"]}, with_text_gate("A", "B"), None),
        (ALIGNED, {"channels": ["B"]}, with_text_gate("A", "B"), None),
    ],
)
def test_a_text_gate_needs_a_token_ce_on_every_channel_that_both_gate_and_steps_have(
    variant, text, gate, missing
):
    expected = (
        f"{OBJECTIVE}[1].config.text_gate_weight: 0.5 acts on the text that token_ce weighs, and"
        f" none is active on channel {missing}; add one there ... or set text_gate_weight: 0.0"
    )
    lines = problems({**variant, OBJECTIVE: [TOKEN_CE | text, gate]})
    assert len(lines) == (missing is not None)
    assert all(fits(line, expected) for line in lines), lines


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({f"{MATCHING}.ot_epsilon_cap": 0.2, **ALIGNED}, None),
        (
            {f"{MATCHING}.ot_epsilon_cap": 0.2},
            f"{MATCHING}.ot_epsilon_cap: 0.2 has no effect without polygons, which stage2_two_channel",
        ),
        (
            {f"{MATCHING}.ot_epsilon_cap": 0.2, **ALIGNED, f"{MATCHING}.geometry": ["bbox_2d"]},
            f"{MATCHING}.ot_epsilon_cap: 0.2 has no effect without polygons, which stage2_rollout_aligned",
        ),
        (
            {f"{MATCHING}.point_tolerance": 20.0},
            f"{MATCHING}.point_tolerance: 20 has no effect without points",
        ),
        (
            {
                f"{MATCHING}.point_tolerance": 20.0,
                f"{MATCHING}.geometry": ["bbox_2d", "point_2d"],
            },
            None,
        ),
        ({f"{MATCHING}.supervise_separators": True}, None),
        (
            {
                f"{MATCHING}.supervise_separators": True,
                OBJECTIVE: [TOKEN_CE | {"channels": ["A"]}, COORD_REG],
            },
            f"{MATCHING}.supervise_separators: true, and no token_ce",
        ),
        ({f"{OBJECTIVE}[0].config.matched_desc_weight": 0.5}, None),
        (
            {
                f"{OBJECTIVE}[0].channels": ["A"],
                f"{OBJECTIVE}[0].config.matched_desc_weight": 0.5,
            },
            f"{OBJECTIVE}[0].config.matched_desc_weight: 0.5 has no effect on channel A, the only",
        ),
        (
            {f"{OBJECTIVE}[0].channels": ["A"], f"{OBJECTIVE}[0].config.fp_end_weight": 0.0},
            f"{OBJECTIVE}[0].config.fp_end_weight: 0 has no effect on channel A, the only",
        ),
        (
            {
                f"{MATCHING}.trim_trailing_false_positives": True,
                f"{MATCHING}.maskiou_gate_schedule": {"start": 0.1, "steps": 10},
                **ALIGNED,
            },
            None,
        ),
    ],
)
def test_an_option_beyond_the_specification_that_would_change_nothing_is_refused(changes, expected):
    lines = problems(changes)
    assert len(lines) == (expected is not None)
    assert all(line.startswith(expected) for line in lines), lines


def test_polygons_are_refused_where_boxes_and_points_alone_are_matched():
    geometry = f"{MATCHING}.geometry"
    assert problems({geometry: ["bbox_2d", "poly"]}) == [
        (
            f"{geometry}: poly is not in stage2_two_channel, which matches boxes and points only;"
            " remove poly, or set custom.trainer_variant: stage2_rollout_aligned"
        )
    ]
    assert problems({**ALIGNED, geometry: ["bbox_2d", "poly"]}) == []


def test_every_step_of_the_aligned_variant_is_channel_b_and_none_of_teacher_forced_training():
    assert {load(ALIGNED).channel(step) for step in range(100)} == {Channel.B}
    assert {load(STAGE1).channel(step) for step in range(100)} == {Channel.A}
