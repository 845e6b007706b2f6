"""Unknown, mistyped and missing keys: dotted path, list index, what is wrong, what to do; all at
once.
"""

from __future__ import annotations

import random

import pytest
from config_changes import (
    BBOX_GEO,
    BUDGET,
    COORD_DIAG,
    DECODE_MODE,
    DIAGNOSTICS,
    MATCHING,
    OBJECTIVE,
    TEMPERATURE,
    VLLM,
    changed,
    fits,
    problems,
)

from shared.config import RunConfig, load_config
from shared.errors import ConfigError

UNKNOWN = {
    "modle": "did you mean 'model'?",
    "training.learning_rat": "did you mean 'learning_rate'?",
    "training.parts.vision": "did you mean 'vision_tower'?",
    "evaluation.iou_threshold": "did you mean 'iou_thresholds'?",
    f"{MATCHING}.unknown_rollout_key": "the keys here are pipeline, rollout_backend, ",
    f"{MATCHING}.decoding.temprature": "did you mean 'temperature'?",
    f"{VLLM}.actors.num_actor": "did you mean 'num_actors'?",
    # Keys that were moved: the place they moved to.
    f"{MATCHING}.temprature": f"did you mean '{TEMPERATURE}'?",
    f"{MATCHING}.topp": f"did you mean '{MATCHING}.decoding.top_p'?",
    f"{MATCHING}.rollout_infer_batchsize": "did you mean 'decode_batch_size'?",
    "stage2_ab.channel_b.decode_batchsize": f"did you mean '{MATCHING}.decode_batch_size'?",
    "training.packing_lenght": "did you mean 'global_max_length'?",
    f"{OBJECTIVE}[0].wieght": "did you mean 'weight'?",
    f"{OBJECTIVE}[1].config.w1_wieght": "did you mean 'w1_weight'?",
    f"{OBJECTIVE}[1].config.desc_ce_weight": "",
}

VARIANTS = "one of stage1_sft, stage2_rollout_aligned, stage2_two_channel, trajectory_pg"
EMPTY = "must not be empty, which would be the current folder; write a path, or remove the key"
NO_RISING = "must name at least one threshold, in rising order, got"
THRESHOLDS = "evaluation.iou_thresholds"
WRONG = [
    # Numbers and truth values.
    ("training.seed", "17", "must be an integer, got the text '17'; write 17 without quotes"),
    ("training.seed", 17.0, "must be an integer, got 17.0; write 17 without a decimal point"),
    ("training.seed", True, "must be an integer, got true; change it (The run's seed"),
    ("training.seed", -1, "must be at least 0, got -1; "),
    ("training.max_steps", 1.5, "must be an integer, got 1.5; "),
    ("training.learning_rate", "1e-3", "must be a number, got the text '1e-3'; write 0.001 witho"),
    ("training.learning_rate", "fast", "must be a number, got the text 'fast'; change it (Peak l"),
    ("training.learning_rate", 1e9, "must be at most 1, got 1000000000.0; "),
    ("training.learning_rate", float("nan"), "must be a finite number, got nan; "),
    ("training.learning_rate", float("inf"), "must be a finite number, got inf; "),
    ("training.parts.aligner.learning_rate", 1e9, "must be at most 1, got 1000000000.0; "),
    ("training.parts.aligner.learning_rate", 0.0, "must be greater than 0, got 0.0"),
    ("training.packing", "yes", "must be true or false, got the text 'yes'; "),
    ("training.packing", "true", "must be true or false, got the text 'true'; write true without"),
    (
        "training.packing_buffer",
        None,
        "must be an integer, got null; remove the key for the ... 256",
    ),
    ("training.adam_beta2", 1.0, "must be less than 1, got 1.0; "),
    ("training.eval_steps", 0, "must be greater than 0, got 0; change it (Evaluate after every"),
    (
        "timeouts.learn_s",
        0,
        "must be greater than 0, got 0; change it (Lear ... the key it is 600.0)",
    ),
    ("learner.gpus", 0.25, "must be whole GPUs, or 0, got 0.25: NCCL "),
    (BUDGET, 0, "must be greater than 0, got 0; change"),
    ("stage2_ab.schedule.b_ratio", -0.1, "must be at least 0, got -0.1; "),
    ("stage2_ab.schedule.b_ratio", 1.5, "must be at most 1, got 1.5; "),
    (TEMPERATURE, 5.1, "must be at most 5, got 5.1: higher ones let banned token ids through; low"),
    (TEMPERATURE, -1, "must be at least 0, got -1; "),
    (f"{MATCHING}.decoding.top_k", 2**31, "must be less than 2147483648, got 2147483648; "),
    (f"{MATCHING}.decoding.top_k", -2, "must be at least -1, got -2; "),
    (f"{MATCHING}.decoding.top_p", 1.5, "must be at most 1, got 1.5; "),
    (f"{MATCHING}.decoding.top_p", 0.0, "must be greater than 0, got 0.0; "),
    (f"{VLLM}.sync.bucket_bytes", 1, "must be at least 65536, got 1; "),
    (f"{VLLM}.actors.gpus_per_actor", 0.5, "must be whole GPUs, or 0, got 0.5: NCCL cannot put "),
    (f"{VLLM}.actors.gpus_per_actor", -1, "must be at least 0, got -1; "),
    (f"{MATCHING}.decode_batch_size", 0, "must be greater than 0, got 0; change it (Most sequenc"),
    (f"{MATCHING}.ot_epsilon", 0, "must be greater than 0, got 0; "),
    (f"{MATCHING}.ot_iters", 0, "must be greater than 0, got 0; "),
    (f"{MATCHING}.maskiou_resolution", 1, "must be at least 2, got 1; change it (Side of the canv"),
    (f"{MATCHING}.maskiou_resolution", 4097, "must be at most 4096, got 4097; "),
    (f"{MATCHING}.maskiou_gate", 1.1, "must be at most 1, got 1.1; "),
    (f"{MATCHING}.repetition_penalty", 1e-320, "must be at least 0.01, got 1e-320; "),
    (f"{MATCHING}.repetition_penalty", 101.0, "must be at most 100, got 101.0; "),
    (f"{OBJECTIVE}[1].enabled", 1, "must be true or false, got 1; "),
    (f"{OBJECTIVE}[1].config.temperature", 0, "must be greater than 0, got 0; "),
    # Texts and paths.
    ("telemetry.run_dir", "", EMPTY),
    ("data.val", " ", EMPTY),
    ("data.train", 3, "must be a path, got 3; "),
    ("model.path", "", "must not be empty; "),
    ("model.path", 3, "must be text, got 3; "),
    # One of several.
    (
        "training.lr_schedule",
        "cosin",
        "must be one of constant, cosine, linear, got the text 'cosin'; did you mean 'cosine'?",
    ),
    ("stage2_ab.channel_b.mode", "micro", "must be step, got the text 'micro'; write step"),
    (f"{MATCHING}.ot_cost", "L2", "must be one of l1, l2, got the text 'L2'; "),
    ("custom.trainer_variant", "stage2", f"must be {VARIANTS}, got the text 'stage2'; "),
    ("custom.trainer_variant", None, f"must be {VARIANTS}, got null; "),
    ("custom.trainer_variant", "stage_2", "'stage_2' was renamed; write stage2_rollout_aligned"),
    ("custom.trainer_variant", "stage2_ab_training", "'stage2_ab_training' was renamed; write sta"),
    ("custom.object_field_order", "descfirst", "must be one of ... did you mean 'desc_first'?"),
    ("evaluation.score", "mean", "must be one of constant, coord_probability, got the text 'mean'"),
    # Mappings and lists.
    ("telemetry", None, "must be a mapping of keys, got null; write its keys (name, ... remove it"),
    ("training", [], "must be a mapping of keys, got a list; write its keys (seed, max_steps, "),
    (OBJECTIVE, {}, "must be a list, got a mapping; "),
    (
        f"{OBJECTIVE}[2]",
        3,
        "must be a mapping of keys, got 3; write its keys (enabled, weight, channels, name, config)",
    ),
    (f"{OBJECTIVE}[1].channels", [], "must not be empty; name A, B or both"),
    (
        f"{OBJECTIVE}[1].channels",
        ["A", "A"],
        "names a channel twice: [A, A]; name each channel onc",
    ),
    (
        f"{MATCHING}.geometry",
        [],
        "must hold bbox_2d, and no kind ... poly and point_2d beside it or not",
    ),
    (f"{MATCHING}.geometry", ["poly"], "must hold bbox_2d, and no kind twice, got [poly]; "),
    (f"{MATCHING}.geometry", ["bbox_2d", "bbox_2d"], "must hold bbox_2d, and no kind twice, got ["),
    (THRESHOLDS, [], f"{NO_RISING} []; write [0.5, 0.75]"),
    (THRESHOLDS, [0.75, 0.5], f"{NO_RISING} [0.75, 0.5]; "),
    (THRESHOLDS, [0.5, 0.5], f"{NO_RISING} [0.5, 0.5]; "),
    (THRESHOLDS, 0.5, "must be a list, got 0.5; "),
]
IN_A_LIST = [
    (THRESHOLDS, [0.5, 1.5], f"{THRESHOLDS}[1]: must be at most 1, got 1.5; "),
    (THRESHOLDS, [0.0, 0.5], f"{THRESHOLDS}[0]: must be greater than 0, got 0.0; "),
    (
        THRESHOLDS,
        ["0.5"],
        f"{THRESHOLDS}[0]: must be a number, got the ... write 0.5 without quotes",
    ),
    (
        f"{OBJECTIVE}[0].channels",
        ["A", "C"],
        f"{OBJECTIVE}[0].channels[1]: must be one of A, B, got",
    ),
    ("timeouts", {3: 1.0}, "timeouts.3: is not a known key; "),
]

MISSING = [
    ("training.seed", "add it, for example `seed: 17` (The run's seed"),
    ("custom.trainer_variant", f"add it, {VARIANTS}"),
    (f"{MATCHING}.pipeline", "add it, for example `pipeline: {objective: [{name: token_ce, "),
    (OBJECTIVE, "add it"),
    (DIAGNOSTICS, "add it"),
]


@pytest.mark.parametrize("path", UNKNOWN)
def test_unknown_keys_carry_the_full_path_with_list_indices_and_a_suggestion(path):
    (line,) = problems({path: 1})
    assert line.startswith(f"{path}: is not a known key; {UNKNOWN[path]}")


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [*((path, value, f"{path}: {expected}") for path, value, expected in WRONG), *IN_A_LIST],
)
def test_wrong_values_are_refused_without_conversion_and_say_what_to_write(path, value, expected):
    (line,) = problems({path: value})
    assert fits(line, expected), line


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (f"{MATCHING}.maskiou_resolution", 2),
        (f"{MATCHING}.maskiou_resolution", 4096),
        (THRESHOLDS, [0.3, 0.5, 1.0]),
        ("evaluation.worst_scenes", 0),
    ],
)
def test_bounds_belong_to_what_is_accepted(path, value):
    assert problems({path: value}) == []


@pytest.mark.parametrize(("path", "message"), MISSING)
def test_missing_keys_are_named_with_an_example(path, message):
    (line,) = problems({path: ...})
    assert line.startswith(f"{path}: is required, and missing; {message}")


@pytest.mark.parametrize(
    "section", [name for name, field in RunConfig.model_fields.items() if field.is_required()]
)
def test_a_required_section_of_the_wrong_kind_is_one_problem(section):
    (line,) = problems({section: [1]})
    assert line.startswith(f"{section}: must be ")


def test_all_problems_are_reported_at_once_whatever_their_kind():
    lines = problems(
        {
            "training.sed": 3,
            "training.max_steps": "10",
            "custom.trainer_variant": ...,
            f"{OBJECTIVE}[0].config.desc_ce_weight": float("nan"),
            f"{OBJECTIVE}[1].weight": "1",
            f"{OBJECTIVE}[2]": {"name": "coord_diag"},
            f"{MATCHING}.rollout_buffer": {"enabled": True},
            "global_max_length": 100,
        }
    )
    assert [line.split(": ")[0] for line in lines] == [
        f"{MATCHING}.rollout_buffer.enabled",
        "training.max_steps",
        "training.sed",
        "custom.trainer_variant",
        f"{OBJECTIVE}[0].config.desc_ce_weight",
        f"{OBJECTIVE}[1].weight",
        f"{OBJECTIVE}[2].name",
    ]


def test_contradictions_are_all_reported_at_once_where_every_value_is_legal():
    lines = problems({DECODE_MODE: "sample", "global_max_length": 100, f"{VLLM}.enable_lora": True})
    paths = [line.split(": ")[0] for line in lines]
    assert paths == [f"{VLLM}.enable_lora", DECODE_MODE, "global_max_length"]


@pytest.mark.parametrize(
    "changes",
    [
        {TEMPERATURE: "1.0", DECODE_MODE: "sample"},
        {f"{MATCHING}.temperature": 1.0, DECODE_MODE: "sample"},
        {f"{MATCHING}.temprature": 1.0, DECODE_MODE: "sample"},
        {f"{VLLM}.mod": "actors", f"{VLLM}.mode": ...},
        {f"{OBJECTIVE}[0].weight": "1", f"{OBJECTIVE}[1].enabled": False},
    ],
)
def test_a_value_that_is_already_reported_causes_no_second_report(changes):
    assert len(problems(changes)) == 1


def overlaps(a: str, b: str) -> bool:
    """Tell whether one dotted path lies in the other."""
    return a == b or a.startswith((f"{b}.", f"{b}[")) or b.startswith((f"{a}.", f"{a}["))


def paths_in(node, above=""):
    if isinstance(node, dict):
        items = [(f"{above}.{key}".removeprefix("."), item) for key, item in node.items()]
    else:
        items = [(f"{above}[{index}]", item) for index, item in enumerate(node)]
    for path, item in items:
        yield path
        if isinstance(item, (dict, list)):
            yield from paths_in(item, path)


ALL_MODULES = {
    "custom.trainer_variant": "stage2_rollout_aligned",
    "stage2_ab.schedule": {},
    "evaluation": {"iou_thresholds": [0.5], "score": "constant"},
    f"{OBJECTIVE}[2]": BBOX_GEO,
    f"{DIAGNOSTICS}[0]": COORD_DIAG,
}
NAN = float("nan")
VALUES = [None, "x", "a\nb", 0, -1, 1.5, NAN, True, [], {}, ["A"], [[1]], {"a": {"b": 1}}, ...]


@pytest.mark.slow
@pytest.mark.parametrize("base", [{}, ALL_MODULES], ids=["minimal", "all modules"])
def test_whatever_stands_at_a_key_the_answer_is_a_configuration_or_lines_of_problems(base):
    sound = changed(base)
    paths = list(paths_in(sound))
    choice = random.Random(0)
    for number in range(1500):
        apart: list[str] = []
        for path in choice.sample(paths, 1 + number % 4):
            if not any(overlaps(path, other) for other in apart):
                apart.append(path)
        # From the back, so that a deleted entry does not move one that is still to be changed.
        changes = {path: choice.choice(VALUES) for path in sorted(apart, reverse=True)}
        try:
            load_config(changed(changes, sound))
        except ConfigError as error:
            lines = str(error).splitlines()
            assert all(": " in line and "; " in line for line in lines), lines
