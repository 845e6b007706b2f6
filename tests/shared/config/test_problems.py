"""Unknown, mistyped and missing keys: dotted path, list index, what is wrong, what to do; all at
once.
"""

from __future__ import annotations

import random

import pytest

from shared.config import load_config
from shared.errors import ConfigError

OBJECTIVE = "rollout_matching.pipeline.objective"

UNKNOWN = {
    "modle": "modle: is not a known key; did you mean 'model'?",
    "training.learning_rat": (
        "training.learning_rat: is not a known key; did you mean 'learning_rate'?"
    ),
    "rollout_matching.unknown_rollout_key": (
        "rollout_matching.unknown_rollout_key: is not a known key; the keys here are pipeline,"
        " rollout_backend, "
    ),
    "rollout_matching.decoding.temprature": (
        "rollout_matching.decoding.temprature: is not a known key; did you mean 'temperature'?"
    ),
    "rollout_matching.vllm.actors.num_actor": (
        "rollout_matching.vllm.actors.num_actor: is not a known key; did you mean 'num_actors'?"
    ),
    # Keys that were moved: the place they moved to.
    "rollout_matching.temprature": (
        "rollout_matching.temprature: is not a known key; did you mean"
        " 'rollout_matching.decoding.temperature'?"
    ),
    "rollout_matching.topp": (
        "rollout_matching.topp: is not a known key; did you mean 'rollout_matching.decoding.top_p'?"
    ),
    "rollout_matching.rollout_infer_batchsize": (
        "rollout_matching.rollout_infer_batchsize: is not a known key; did you mean"
        " 'decode_batch_size'?"
    ),
    "stage2_ab.channel_b.decode_batchsize": (
        "stage2_ab.channel_b.decode_batchsize: is not a known key; did you mean"
        " 'rollout_matching.decode_batch_size'?"
    ),
    "training.packing_lenght": (
        "training.packing_lenght: is not a known key; did you mean 'global_max_length'?"
    ),
    f"{OBJECTIVE}[0].wieght": f"{OBJECTIVE}[0].wieght: is not a known key; did you mean 'weight'?",
    f"{OBJECTIVE}[1].config.w1_wieght": (
        f"{OBJECTIVE}[1].config.w1_wieght: is not a known key; did you mean 'w1_weight'?"
    ),
    f"{OBJECTIVE}[1].config.desc_ce_weight": (
        f"{OBJECTIVE}[1].config.desc_ce_weight: is not a known key; "
    ),
}

WRONG = [
    ("training.seed", "17", "must be an integer, got the text '17'; write 17 without quotes"),
    ("training.seed", 17.0, "must be an integer, got 17.0; write 17 without a decimal point"),
    ("training.seed", True, "must be an integer, got true; change it (The run's seed"),
    ("training.seed", -1, "must be at least 0, got -1; "),
    ("training.max_steps", 1.5, "must be an integer, got 1.5; "),
    (
        "training.learning_rate",
        "1e-3",
        "must be a number, got the text '1e-3'; write 0.001 without quotes",
    ),
    (
        "training.learning_rate",
        "fast",
        "must be a number, got the text 'fast'; change it (Peak learning rate",
    ),
    ("training.learning_rate", 1e9, "must be at most 1, got 1000000000.0; "),
    ("training.parts.aligner.learning_rate", 1e9, "must be at most 1, got 1000000000.0; "),
    ("rollout_matching.vllm.sync.bucket_bytes", 1, "must be at least 65536, got 1; "),
    (
        "telemetry.run_dir",
        "",
        "must not be empty, which would be the current folder; write a path, or remove the key",
    ),
    (
        "data.val",
        " ",
        "must not be empty, which would be the current folder; write a path, or remove the key",
    ),
    ("training.learning_rate", float("nan"), "must be a finite number, got nan; "),
    ("training.learning_rate", float("inf"), "must be a finite number, got inf; "),
    ("training.packing", "yes", "must be true or false, got the text 'yes'; "),
    (
        "training.packing",
        "true",
        "must be true or false, got the text 'true'; write true without quotes",
    ),
    (
        "training.packing_buffer",
        None,
        "must be an integer, got null; remove the key for the default, 256",
    ),
    (
        "training.lr_schedule",
        "cosin",
        "must be one of constant, cosine, linear, got the text 'cosin'; did you mean 'cosine'?",
    ),
    ("training.adam_beta2", 1.0, "must be less than 1, got 1.0; "),
    ("model.path", "", "must not be empty; "),
    ("model.path", 3, "must be text, got 3; "),
    ("data.train", 3, "must be a path, got 3; "),
    (
        "timeouts.learn_s",
        0,
        (
            "must be greater than 0, got 0; change it (Learning one round, or finishing a step;"
            " without the key it is 600.0)"
        ),
    ),
    (
        "telemetry",
        None,
        (
            "must be a mapping of keys, got null; write its keys (name, run_dir, ray_metrics,"
            " timeline, rollouts), or remove it for the defaults"
        ),
    ),
    ("training", [], "must be a mapping of keys, got a list; write its keys (seed, max_steps, "),
    ("stage2_ab.channel_b.mode", "micro", "must be step, got the text 'micro'; write step"),
    (
        "stage2_ab.channel_b.rollouts_per_step",
        0,
        "must be greater than 0, got 0; change it (Raw rollouts per update over all learner ranks",
    ),
    ("stage2_ab.schedule.b_ratio", -0.1, "must be at least 0, got -0.1; "),
    ("stage2_ab.schedule.b_ratio", 1.5, "must be at most 1, got 1.5; "),
    (
        "rollout_matching.decoding.temperature",
        5.1,
        "must be at most 5, got 5.1: higher ones let banned token ids through; lower it",
    ),
    ("rollout_matching.decoding.top_k", 2**31, "must be less than 2147483648, got 2147483648; "),
    ("rollout_matching.decoding.temperature", -1, "must be at least 0, got -1; "),
    (
        "rollout_matching.vllm.actors.gpus_per_actor",
        0.5,
        (
            "must be whole GPUs, or 0, got 0.5: NCCL cannot put two ranks on one GPU; write a whole"
            " number"
        ),
    ),
    ("rollout_matching.vllm.actors.gpus_per_actor", -1, "must be at least 0, got -1; "),
    ("learner.gpus", 0.25, "must be whole GPUs, or 0, got 0.25: NCCL "),
    (
        "rollout_matching.decode_batch_size",
        0,
        "must be greater than 0, got 0; change it (Most sequences that one rollout device decodes",
    ),
    (
        "rollout_matching.geometry",
        [],
        "must hold bbox_2d, and no kind twice, got []; write [bbox_2d] or [bbox_2d, poly]",
    ),
    ("rollout_matching.geometry", ["poly"], "must hold bbox_2d, and no kind twice, got [poly]; "),
    (
        "rollout_matching.geometry",
        ["bbox_2d", "bbox_2d"],
        "must hold bbox_2d, and no kind twice, got [bbox_2d, bbox_2d]; ",
    ),
    ("rollout_matching.ot_cost", "L2", "must be one of l1, l2, got the text 'L2'; "),
    ("rollout_matching.ot_epsilon", 0, "must be greater than 0, got 0; "),
    ("rollout_matching.ot_iters", 0, "must be greater than 0, got 0; "),
    (
        "rollout_matching.maskiou_resolution",
        1,
        "must be at least 2, got 1; change it (Side of the canvas of the mask IoU, in pixels",
    ),
    ("rollout_matching.maskiou_resolution", 4097, "must be at most 4096, got 4097; "),
    ("rollout_matching.maskiou_gate", 1.1, "must be at most 1, got 1.1; "),
    ("rollout_matching.repetition_penalty", 1e-320, "must be at least 0.01, got 1e-320; "),
    ("rollout_matching.repetition_penalty", 101.0, "must be at most 100, got 101.0; "),
    ("rollout_matching.decoding.top_p", 1.5, "must be at most 1, got 1.5; "),
    ("rollout_matching.decoding.top_p", 0.0, "must be greater than 0, got 0.0; "),
    ("rollout_matching.decoding.top_k", -2, "must be at least -1, got -2; "),
    (
        "custom.trainer_variant",
        "stage2",
        (
            "must be one of stage1_sft, stage2_rollout_aligned, stage2_two_channel, trajectory_pg,"
            " got the text 'stage2'; "
        ),
    ),
    (
        "custom.trainer_variant",
        None,
        (
            "must be one of stage1_sft, stage2_rollout_aligned, stage2_two_channel, trajectory_pg,"
            " got null; "
        ),
    ),
    ("custom.trainer_variant", "stage_2", "'stage_2' was renamed; write stage2_rollout_aligned"),
    (
        "custom.trainer_variant",
        "stage2_ab_training",
        "'stage2_ab_training' was renamed; write stage2_two_channel",
    ),
    (
        "custom.object_field_order",
        "descfirst",
        (
            "must be one of desc_first, geometry_first, got the text 'descfirst'; did you mean"
            " 'desc_first'?"
        ),
    ),
    ("rollout_matching.pipeline.objective", {}, "must be a list, got a mapping; "),
    (
        "rollout_matching.pipeline.objective[2]",
        3,
        (
            "must be a mapping of keys, got 3; write its keys (enabled, weight, channels, name,"
            " config)"
        ),
    ),
    (f"{OBJECTIVE}[1].enabled", 1, "must be true or false, got 1; "),
    (f"{OBJECTIVE}[1].channels", [], "must not be empty; name A, B or both"),
    (
        f"{OBJECTIVE}[1].channels",
        ["A", "A"],
        "names a channel twice: [A, A]; name each channel once",
    ),
    (f"{OBJECTIVE}[1].config.temperature", 0, "must be greater than 0, got 0; "),
]

MISSING = [
    ("training.seed", "add it, for example `seed: 17` (The run's seed"),
    (
        "custom.trainer_variant",
        "add it, one of stage1_sft, stage2_rollout_aligned, stage2_two_channel, trajectory_pg",
    ),
    ("rollout_matching.pipeline", "add it, for example `pipeline: {objective: [{name: token_ce, "),
    ("rollout_matching.pipeline.objective", "add it"),
    ("rollout_matching.pipeline.diagnostics", "add it"),
]


@pytest.mark.parametrize("path", UNKNOWN)
def test_unknown_keys_carry_the_full_path_with_list_indices_and_a_suggestion(problems, path):
    (line,) = problems({path: 1})
    assert line.startswith(UNKNOWN[path])


@pytest.mark.parametrize("resolution", [2, 4096])
def test_the_bounds_of_the_canvas_are_accepted(problems, resolution):
    assert problems({"rollout_matching.maskiou_resolution": resolution}) == []


@pytest.mark.parametrize(("path", "value", "message"), WRONG)
def test_wrong_values_are_refused_without_conversion_and_say_what_to_write(
    problems, path, value, message
):
    (line,) = problems({path: value})
    assert line.startswith(f"{path}: {message}")


@pytest.mark.parametrize(("path", "message"), MISSING)
def test_missing_keys_are_named_with_an_example(problems, path, message):
    (line,) = problems({path: ...})
    assert line.startswith(f"{path}: is required, and missing; {message}")


def test_a_channel_that_does_not_exist_is_named_with_its_index(problems):
    assert problems({f"{OBJECTIVE}[0].channels": ["A", "C"]}) == [
        f"{OBJECTIVE}[0].channels[1]: must be one of A, B, got the text 'C'; choose one of A, B"
    ]


def test_an_objective_module_that_does_not_exist_is_refused_with_a_suggestion(problems):
    assert problems({f"{OBJECTIVE}[0].name": "token_c"}) == [
        f"{OBJECTIVE}[0].name: 'token_c' is not an objective module; did you mean 'token_ce'?"
    ]


def test_a_key_that_is_no_text_is_refused_as_unknown(problems, changed):
    (line,) = problems({"timeouts": {3: 1.0}})
    assert line.startswith("timeouts.3: is not a known key; ")


def test_all_problems_are_reported_at_once_whatever_their_kind(problems):
    lines = problems(
        {
            "training.sed": 3,
            "training.max_steps": "10",
            "custom.trainer_variant": ...,
            f"{OBJECTIVE}[0].config.desc_ce_weight": float("nan"),
            f"{OBJECTIVE}[1].weight": "1",
            f"{OBJECTIVE}[2]": {"name": "coord_diag"},
            "rollout_matching.rollout_buffer": {"enabled": True},
            "global_max_length": 100,
        }
    )
    assert [line.split(": ")[0] for line in lines] == [
        "rollout_matching.rollout_buffer.enabled",
        "training.max_steps",
        "training.sed",
        "custom.trainer_variant",
        f"{OBJECTIVE}[0].config.desc_ce_weight",
        f"{OBJECTIVE}[1].weight",
        f"{OBJECTIVE}[2].name",
    ]


def test_contradictions_are_all_reported_at_once_where_every_value_is_legal(problems):
    lines = problems(
        {
            "rollout_matching.decode_mode": "sample",
            "global_max_length": 100,
            "rollout_matching.vllm.enable_lora": True,
        }
    )
    assert [line.split(": ")[0] for line in lines] == [
        "rollout_matching.vllm.enable_lora",
        "rollout_matching.decode_mode",
        "global_max_length",
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout_matching.decoding.temperature": "1.0", "rollout_matching.decode_mode": "sample"},
        {"rollout_matching.decoding.temprature": 1.0, "rollout_matching.decode_mode": "sample"},
        {"rollout_matching.temperature": 1.0, "rollout_matching.decode_mode": "sample"},
        {"rollout_matching.temprature": 1.0, "rollout_matching.decode_mode": "sample"},
        {"rollout_matching.vllm.mod": "actors", "rollout_matching.vllm.mode": ...},
        {f"{OBJECTIVE}[0].weight": "1", f"{OBJECTIVE}[1].enabled": False},
    ],
)
def test_a_value_that_is_already_reported_causes_no_second_report(problems, changes):
    assert len(problems(changes)) == 1


def overlaps(a: str, b: str) -> bool:
    """Tell whether one dotted path lies in the other."""
    return a == b or a.startswith((f"{b}.", f"{b}[")) or b.startswith((f"{a}.", f"{a}["))


def paths(node, above=""):
    if isinstance(node, dict):
        for key, item in node.items():
            yield from (f"{above}{key}", *paths(item, f"{above}{key}."))
    elif isinstance(node, list):
        for index, item in enumerate(node):
            yield from (
                f"{above.removesuffix('.')}[{index}]",
                *paths(item, f"{above.removesuffix('.')}[{index}]."),
            )


ALL_MODULES = {
    "custom.trainer_variant": "stage2_rollout_aligned",
    "stage2_ab.schedule": {},
    "evaluation": {"iou_thresholds": [0.5], "score": "constant"},
    f"{OBJECTIVE}[2]": {
        "name": "bbox_geo",
        "enabled": True,
        "weight": 1.0,
        "channels": ["B"],
        "config": {"smoothl1_weight": 1.0, "ciou_weight": 1.0},
    },
    "rollout_matching.pipeline.diagnostics[0]": {
        "name": "coord_diag",
        "enabled": True,
        "weight": 1.0,
        "channels": ["B"],
        "config": {},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("base", [{}, ALL_MODULES], ids=["minimal", "all modules"])
def test_whatever_stands_at_a_key_the_answer_is_a_configuration_or_lines_of_problems(changed, base):
    sound = changed(base)
    places = list(paths(sound))
    values = [
        None,
        "x",
        "two\nlines",
        0,
        -1,
        1.5,
        float("nan"),
        True,
        [],
        {},
        ["A"],
        [[1]],
        {"a": {"b": 1}},
        ...,
    ]
    choice = random.Random(0)
    for number in range(1500):
        apart: list[str] = []
        for place in choice.sample(places, 1 + number % 4):
            if not any(overlaps(place, other) for other in apart):
                apart.append(place)
        # From the back, so that a deleted entry does not move one that is still to be changed.
        config = changed(
            {place: choice.choice(values) for place in sorted(apart, reverse=True)}, sound
        )
        try:
            load_config(config)
        except ConfigError as error:
            lines = str(error).splitlines()
            assert all(": " in line and "; " in line for line in lines), lines
