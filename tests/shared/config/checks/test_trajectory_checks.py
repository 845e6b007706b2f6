"""The demands of `custom.trainer_variant: trajectory_pg` on the other sections, and what the other
variants say to an environment.
"""

from __future__ import annotations

import re
from itertools import product

import pytest
import yaml
from config_changes import (
    BUDGET,
    COLOCATE,
    COORD_DIAG,
    COORD_REG,
    DECODE_MODE,
    DIAGNOSTICS,
    HF,
    MATCHING,
    NO_QUEUE,
    OBJECTIVE,
    SERVED_LORA,
    SERVERS,
    TEMPERATURE,
    TOKEN_CE,
    VLLM,
    fits,
    load,
    load_trajectories,
    problems,
    trajectory_problems,
)

from shared.config.derive import group_size, has_held_out, raw_rollouts_per_step, remarks
from shared.config.pipeline import EXAMPLE_POLICY_GRADIENT

BATCH = "training.effective_batch_size"
STEPS = "training.gradient_accumulation_steps"
PER_DEVICE = "training.per_device_train_batch_size"
RANKS = "learner.world_size"
FSDP = {RANKS: 2, "learner.parallel": "fsdp"}
IMAGES = "environment.max_images_per_prompt"
HELD_OUT = "environment.num_eval_examples"
STOP = "rollout_matching.decoding.stop"
TEACHER = "environment.teacher"
URL = {"base_url": "http://127.0.0.1:8000", "model": "Qwen/Qwen3-8B"}
SIZE = "environment.rollouts_per_example"
CONFIG = f"{OBJECTIVE}[0].config"
DECODED = f"{MATCHING}.decode_batch_size"

SAME = "makes an example's rollouts all the same, and trajectory_pg learns from differences"
BESIDE = "the environment is in the learner's process under"
WHOLE = "and policy_gradient needs the probability of every token under the whole vocabulary"
NO_OBJECTIVE = (
    f"{OBJECTIVE}: no enabled policy_gradient with a weight above 0, and nothing else teaches"
    " trajectory_pg; write an entry such as `{name: policy_gradient, "
)
CUT = "cannot be cut into groups of 8 (environment.rollouts_per_example); set"
GIVE = "learner ranks a group of 8 (environment.rollouts_per_example); set"
MISSING = "environment: is required, and missing; add it, for example `environment: {id: guess_num"

# The minimal configuration of an environment with these changes, and the one line that it gives.
REFUSED = [
    (
        {"environment.refill_rounds": 3, f"{MATCHING}.max_staleness": 1},
        (
            f"environment.refill_rounds: 3, and {MATCHING}.max_staleness 1 generates the next ..."
            " step before it is known which groups of this one to draw again; set one of the two"
            " to 0"
        ),
    ),
    ({"environment": ...}, MISSING),
    ({"environment": None}, MISSING),
    *(
        (
            {key: "a.jsonl"},
            (
                f"{key}: has no effect under trajectory_pg: the environment has data of its own; remove"
                " it (`data=none`, or `override /data: none` in an experiment)"
            ),
        )
        for key in ("data.train", "data.val")
    ),
    # The section itself.
    (
        {"environment": {}},
        "environment.id: is required, and missing; add it, for example `id: guess_number` (",
    ),
    (
        {"environment": "guess_number"},
        (
            "environment: must be a mapping of keys, got the text 'guess_number'; write its keys (id,"
            " args, rollouts_per_example, ... ), or remove it"
        ),
    ),
    ({SIZE: 1}, f"{SIZE}: must be at least 2, got 1; change it ( ... without the key it is 8)"),
    (
        {"environment.args": ["largest", 9]},
        (
            "environment.args: must be a mapping of keys, got a list; change it (Arguments of its"
            " `load_environment`; without the key it is {})"
        ),
    ),
    (
        {"environment.env_args": {"largest": 9}},
        "environment.env_args: is not a known key; did you mean 'args'?",
    ),
    # Sampling.
    ({TEMPERATURE: 0.0}, f"{TEMPERATURE}: 0 is greedy: it {SAME}; set 1.0"),
    ({f"{MATCHING}.decoding": ...}, f"{TEMPERATURE}: 0 is greedy: it {SAME}; set 1.0"),
    (
        {TEMPERATURE: 0.0, DECODE_MODE: "greedy"},
        f"{DECODE_MODE}: 'greedy' {SAME}; remove the key, and set {TEMPERATURE}: 1.0",
    ),
    (
        {f"{MATCHING}.decoding.top_p": 0.9},
        f"{MATCHING}.decoding.top_p: 0.9 changes what is sampled, {WHOLE}; set 1.0, or remove",
    ),
    (
        {f"{MATCHING}.decoding.top_k": 50},
        f"{MATCHING}.decoding.top_k: 50 changes what is sampled, {WHOLE}; set -1, or remove",
    ),
    (
        {f"{MATCHING}.repetition_penalty": 1.1},
        f"{MATCHING}.repetition_penalty: 1.1 changes what is sampled, {WHOLE}; set 1.0, or remove",
    ),
    # Engines.
    (
        {**HF, "environment.num_actors": 2},
        (
            f"environment.num_actors: 2, and {BESIDE} 'hf', one in each rank; remove the key, or"
            " choose engines of their own (`backend=actors`)"
        ),
    ),
    (
        {**COLOCATE, "environment.cpus_per_actor": 0.5},
        (
            f"environment.cpus_per_actor: 0.5, and {BESIDE} 'colocate'; remove the key and set"
            " learner.cpus, or choose"
        ),
    ),
    (
        {**NO_QUEUE, f"{MATCHING}.max_staleness": 1},
        (
            f"{MATCHING}.max_staleness: 1 lets the queue run on into the next step, and there is no"
            " queue; set stage2_ab.channel_b.enable_pipeline: true, or max_staleness: 0"
        ),
    ),
    (
        {"environment.num_actors": 9, DECODED: 8},
        (
            "environment.num_actors: 9 actors share the 8 rollouts that an engine decodes at a time,"
            f" and each needs one; set it to 8 or less, or raise {DECODED}"
        ),
    ),
    # The objective.
    ({OBJECTIVE: []}, NO_OBJECTIVE),
    ({f"{OBJECTIVE}[0].enabled": False}, NO_OBJECTIVE),
    ({f"{OBJECTIVE}[0].weight": 0.0}, NO_OBJECTIVE),
    (
        {f"{OBJECTIVE}[1]": TOKEN_CE},
        (
            f"{OBJECTIVE}[1].name: 'token_ce' has no ground truth to learn from under trajectory_pg;"
            " remove the entry, or choose another custom.trainer_variant"
        ),
    ),
    (
        {DIAGNOSTICS: [COORD_DIAG]},
        (
            f"{DIAGNOSTICS}[0].name: 'coord_diag' has no ground truth to look at under trajectory_pg;"
            " remove the entry"
        ),
    ),
    # Whole groups.
    ({BATCH: 33}, f"{BATCH}: 33 rollouts a step {CUT} 40, or a larger multiple of 8"),
    ({BATCH: 4}, f"{BATCH}: 4 rollouts a step {CUT} 8, or a larger multiple of 8"),
    ({BUDGET: 12}, f"{BUDGET}: 12 rollouts a step {CUT} 16, or a larger multiple of 8"),
    (
        {RANKS: 5, BUDGET: 32},
        f"{BUDGET}: 32 rollouts a step cannot give each of 5 {GIVE} 40, or a larger multiple of 8",
    ),
    (
        {RANKS: 4, BATCH: 16},
        f"{BATCH}: 16 rollouts a step cannot give each of 4 {GIVE} 32, or a larger multiple of 8",
    ),
    (
        {PER_DEVICE: 3},
        (
            f"{BATCH}: 32 comes to 33 rollouts a step ({PER_DEVICE} 3 x {RANKS} 1 x 11 accumulation"
            f" steps), which {CUT} 48, or a larger multiple of 24"
        ),
    ),
    (
        {BATCH: ..., STEPS: 9},
        (
            f"{STEPS}: 9 comes to 9 rollouts a step ({PER_DEVICE} 1 x {RANKS} 1 x 9 accumulation"
            f" steps), which cannot ... replace it by {BATCH}: 16, or a larger multiple of 8"
        ),
    ),
    (
        {BATCH: ...},
        (
            f"{BATCH}: null comes to 1 rollout a step ({PER_DEVICE} 1 x {RANKS} 1 x 1 accumulation"
            f" steps), which {CUT} 8, or a larger multiple of 8"
        ),
    ),
    ({STEPS: 9}, f"{STEPS}: 9 contradicts effective_batch_size 32, which takes 32 with 1 per"),
    # Settings of the objective that contradict each other.
    (
        {f"{CONFIG}.advantage_baseline": "leave_one_out", f"{CONFIG}.advantage_std": True},
        (
            f"{CONFIG}.advantage_baseline: leave_one_out is there to have no bias, which"
            " advantage_std: true brings back; set advantage_std: false, or"
        ),
    ),
    (
        {f"{CONFIG}.clip": "dual", f"{CONFIG}.above_cap": "mask"},
        (
            f"{CONFIG}.above_cap: mask has no effect beside clip: dual, ... ratio_cap itself; set"
            " above_cap: truncate, or clip: ppo"
        ),
    ),
    (
        {f"{CONFIG}.clip": "cispo", f"{CONFIG}.clip_high": 2.0, f"{CONFIG}.ratio_cap": 2.5},
        (
            f"{CONFIG}.ratio_cap: 2.5 is below 1 + clip_high (2), where ... set 3 or more, or"
            " lower clip_high"
        ),
    ),
    # The teacher.
    (
        {TEACHER: URL, TEMPERATURE: 0.7},
        (
            f"{TEMPERATURE}: 0.7, and environment.teacher scores tokens at temperature 1; set 1.0, or"
            " remove environment.teacher"
        ),
    ),
    (
        {TEACHER: URL, IMAGES: 2},
        (
            f"{IMAGES}: 2, and environment.teacher is sent token ids alone, which carry no pictures;"
            " set 0, or remove environment.teacher"
        ),
    ),
    (
        {TEACHER: URL, "environment.drop_equal_groups": True},
        (
            "environment.drop_equal_groups: true, and groups of equal rewards are learned from"
            " environment.teacher; set it to false, or remove environment.teacher"
        ),
    ),
    (
        {TEACHER: URL, "environment.refill_rounds": 2},
        (
            "environment.refill_rounds: 2, and groups of equal rewards are learned from"
            " environment.teacher; set it to 0, or remove environment.teacher"
        ),
    ),
    (
        {TEACHER: URL | {"base_url": "127.0.0.1:8000"}},
        "environment.teacher.base_url: must be an http(s) URL without query",
    ),
    # Held-out examples.
    *(
        (
            {HELD_OUT: 0, key: value},
            (
                f"{key}: {value} asks for reports on held-out examples, and {HELD_OUT} is 0; set"
                f" {HELD_OUT} above 0, or {key}: {none}"
            ),
        )
        for key, value, none in (
            ("training.eval_steps", 20, "null"),
            ("checkpoint.keep_best", 2, "0"),
        )
    ),
]

ACCEPTED = [
    {},
    {"data": {}},
    {"data": {"shuffle": False}},
    {"environment.args": {"largest": 9, "words": ["a"]}},
    {
        "environment.id": "./my_environment.py",
        "environment.num_actors": 4,
        "environment.cpus_per_actor": 0.5,
        "environment.max_concurrent_scoring": 8,
    },
    {"environment.tool_call_parser": "hermes", "environment.drop_equal_groups": True},
    {"environment.refill_rounds": 3, "environment.drop_equal_groups": True},
    {"training.updates_per_batch": 4, "training.max_nonfinite_updates": 1},
    {"environment.drop_truncated": True, f"{CONFIG}.normalize": "batch"},
    {f"{CONFIG}.clip": "cispo", f"{CONFIG}.above_cap": "mask", f"{CONFIG}.ratio_cap": 3.0},
    {
        f"{CONFIG}.advantage_baseline": "leave_one_out",
        f"{CONFIG}.advantage_std": False,
        f"{CONFIG}.ratio_level": "call_mean",
    },
    {"environment.num_actors": 8, DECODED: 8},
    {TEACHER: URL | {"weight": 0.1, "reward_weight": 0.0, "timeout_s": 5.0, "token_env": "KEY"}},
    {HELD_OUT: 0},
    {HELD_OUT: 0, "training.eval_steps": None},
    {HELD_OUT: 1, "training.eval_steps": 20, "checkpoint.keep_best": 2},
    {"training.eval_steps": 20, "checkpoint.keep_best": 2},
    {DECODE_MODE: "sample"},
    {f"{MATCHING}.decoding": {"temperature": 0.7, "top_p": 1.0, "top_k": -1}},
    {f"{MATCHING}.repetition_penalty": 1.0},
    HF,
    COLOCATE,
    {**COLOCATE, **FSDP, IMAGES: 1},
    SERVERS,
    {**SERVERS, f"{VLLM}.server.kind": "vllm"},
    NO_QUEUE,
    {f"{MATCHING}.max_staleness": 1},
    {f"{OBJECTIVE}[1]": TOKEN_CE | {"enabled": False}},
    {DIAGNOSTICS: [COORD_DIAG | {"enabled": False}]},
    {f"{OBJECTIVE}[0].config.advantage_std": True, f"{OBJECTIVE}[0].config.normalize": "constant"},
    {BATCH: 8},
    {BATCH: 31, PER_DEVICE: 4},
    {BUDGET: 16, BATCH: 33},
    {BUDGET: 16, BATCH: ...},
    {BATCH: ..., STEPS: 8},
    {BATCH: ..., STEPS: 2, PER_DEVICE: 4},
    {SIZE: 2, BATCH: 2},
    {SIZE: 32},
    {RANKS: 3, BUDGET: 32},
    FSDP,
    {**FSDP, IMAGES: 4},
    {RANKS: 2, "learner.parallel": "ddp", IMAGES: 4},
    # An example is in one round whatever a device decodes at a time.
    {DECODED: 1},
    # What waits for a row when the buffer is full goes into one.
    {"training.packing_buffer": 1},
    {"training.packing": False},
    {**SERVED_LORA, f"{VLLM}.sync.mode": "adapter"},
    {STOP: ["</answer>"], "environment.system_prompt": "Think."},
]


@pytest.mark.parametrize(("changes", "expected"), REFUSED)
def test_what_trajectories_cannot_be_learned_with_is_refused(changes, expected):
    (line,) = trajectory_problems(changes)
    assert fits(line, expected), line


def test_stop_texts_are_texts_of_environments():
    (line,) = problems({STOP: ["</answer>"]})
    assert line.startswith(f"{STOP}: ['</answer>'] ends answers of environments")
    assert any(line.startswith(STOP) for line in trajectory_problems({STOP: [""]}))
    run = load_trajectories({STOP: ["</answer>", "\n\n"]})
    decode = run.rollout_matching.decode_settings(stop_token_ids=(1,), banned_token_ids=())
    assert decode.stop == ("</answer>", "\n\n")


@pytest.mark.parametrize("changes", ACCEPTED)
def test_the_rest_is_accepted(changes):
    assert trajectory_problems(changes) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {DECODE_MODE: "beam", f"{MATCHING}.num_beams": 4, TEMPERATURE: 0.0},
            [
                f"{DECODE_MODE}: 'beam' {SAME}",
                f"{DECODE_MODE}: vllm.mode actors has no beam search",
            ],
        ),
        # A mode that contradicts the temperature is not called a temperature of 0.
        (
            {DECODE_MODE: "greedy"},
            [f"{DECODE_MODE}: 'greedy' {SAME}; remove", f"{DECODE_MODE}: 'greedy' contradicts"],
        ),
        # Text gates and channels, which say more about such entries elsewhere, say nothing here.
        (
            {
                f"{OBJECTIVE}[0]": COORD_REG
                | {"config": COORD_REG["config"] | {"text_gate_weight": 1.0}},
                f"{OBJECTIVE}[1]": TOKEN_CE | {"channels": ["A"]},
            },
            [
                NO_OBJECTIVE,
                f"{OBJECTIVE}[0].name: 'coord_reg' has no",
                f"{OBJECTIVE}[1].name: 'token_ce' has no",
            ],
        ),
    ],
)
def test_every_check_says_what_it_alone_knows(changes, expected):
    lines = trajectory_problems(changes)
    assert len(lines) == len(expected)
    assert all(map(fits, lines, expected)), lines


@pytest.mark.parametrize(
    "where", [{f"{MATCHING}.rollout_backend": "hf"}, {f"{VLLM}.mode": "colocate"}]
)
def test_engines_in_the_learner_have_environments_and_no_queue(where):
    (of_the_queue,) = trajectory_problems(where)
    assert of_the_queue.startswith("stage2_ab.channel_b.enable_pipeline: the in-step queue needs")
    assert "server or actors" in of_the_queue


def test_the_entry_that_is_proposed_can_be_copied():
    (line,) = trajectory_problems({OBJECTIVE: []})
    assert trajectory_problems({OBJECTIVE: [yaml.safe_load(line.split("`")[1])]}) == []


def test_the_main_job_under_this_variant_is_told_all_that_it_takes():
    """A user of stage2_3v1 who changes the variant alone reads this."""
    lines = problems({"custom.trainer_variant": "trajectory_pg"})
    assert [line.split(": ")[0] for line in lines] == [
        "environment",
        "data.train",
        "data.val",
        TEMPERATURE,
        OBJECTIVE,
        f"{OBJECTIVE}[0].name",
        f"{OBJECTIVE}[1].name",
    ]


@pytest.mark.parametrize("variant", ["stage1_sft", "stage2_rollout_aligned", "stage2_two_channel"])
def test_the_other_variants_learn_from_no_environment(variant):
    other = {"custom.trainer_variant": variant}
    refused = (
        f"environment: has no effect under {variant}; remove it, or set custom.trainer_variant:"
        " trajectory_pg"
    )
    missing = (
        "data.train: is required, and missing; add it, for example `train:"
        " outputs/demo/data/train.jsonl`"
    )
    # Its other keys are of no interest then.
    environment = {"environment": {"id": "guess_number", "rollouts_per_example": 5}}
    environment["environment"]["num_eval_examples"] = 0
    assert problems(other | environment) == [refused]
    assert problems(other | {"training.eval_steps": 20} | environment) == [refused]
    assert problems(other | environment | {"data": ...}) == [missing, refused]
    assert problems(other | {"data.train": ...}) == [missing]
    assert problems(other | {"environment": None}) == []


@pytest.mark.parametrize("variant", ["stage2_rollout_aligned"])
def test_the_other_variants_have_no_advantages(variant):
    """But for `stage2_two_channel`, which compares the rollouts of a sample."""
    other = {"custom.trainer_variant": variant}
    near_the_start = {"name": "reference_kl", "config": {"estimator": "k3"}}
    for entry in (EXAMPLE_POLICY_GRADIENT, EXAMPLE_POLICY_GRADIENT | near_the_start):
        assert problems(other | {f"{OBJECTIVE}[2]": entry}) == [
            (
                f"{OBJECTIVE}[2].name: '{entry['name']}' has no advantages to learn from under"
                f" {variant}; remove the entry, or set custom.trainer_variant: trajectory_pg"
            )
        ]
    assert problems(other | {f"{OBJECTIVE}[2]": EXAMPLE_POLICY_GRADIENT | {"enabled": False}}) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"custom.trainer_variant": ...},
        {"custom.trainer_variant": "trajectories"},
        {SIZE: 0},
        {HELD_OUT: -1, "training.eval_steps": 20},
        {"environment.id": 3},
    ],
)
def test_what_depends_on_a_wrong_value_is_not_reported_beside_it(changes):
    (line,) = trajectory_problems(changes)
    assert line.startswith(f"{next(iter(changes))}: ")


def test_the_batch_size_that_a_refusal_of_cut_groups_proposes_is_accepted():
    """And so is every larger multiple of what it says."""
    num_refused = 0
    for size, ranks, per_device, asked in product(
        (2, 3, 16),
        (1, 2, 3, 5),
        (1, 3),
        ({BATCH: 7}, {BATCH: 16}, {BATCH: ..., STEPS: 5}, {BATCH: ...}, {BUDGET: 10}),
    ):
        changes = {SIZE: size, RANKS: ranks, PER_DEVICE: per_device, **asked}
        lines = trajectory_problems(changes)
        if not lines:
            continue
        num_refused += 1
        (line,) = lines
        path, number, unit = re.search(
            r"^([\w.]+): .*?(\d+), or a larger multiple of (\d+)$", line
        ).groups()
        replaced = {}
        if path == STEPS:
            path = BATCH
            replaced = {STEPS: None}
        for proposed in (int(number), int(number) + int(unit)):
            assert trajectory_problems({**changes, **replaced, path: proposed}) == [], line
    assert num_refused > 50


def test_the_group_of_an_example_and_the_batch_size_follow_from_the_sections():
    assert (group_size(load({})), raw_rollouts_per_step(load({}))) == (1, 32)
    run = load_trajectories({SIZE: 16, BUDGET: 48})
    assert (group_size(run), raw_rollouts_per_step(run)) == (16, 48)


def test_there_are_held_out_examples_unless_none_is_asked_for():
    assert has_held_out(load({}))
    assert not has_held_out(load({"data.val": ...}))
    runs = [load_trajectories({HELD_OUT: number}) for number in (None, 1, 0)]
    assert [has_held_out(run) for run in runs] == [True, True, False]


@pytest.mark.parametrize(
    ("changes", "paths"),
    [
        ({"stage2_ab.schedule.warmup_steps": 20}, "stage2_ab.schedule.warmup_steps"),
        (
            {"evaluation.worst_scenes": 3, "evaluation.score": "constant"},
            "evaluation.score, evaluation.worst_scenes",
        ),
        (
            {"data.user_prompt": "Count.", "data.on_bad_row": "skip"},
            "data.on_bad_row, data.user_prompt",
        ),
        ({"data": {"max_val_samples": 8}}, "data.max_val_samples"),
        ({"custom.object_field_order": "geometry_first"}, "custom.object_field_order"),
        (
            {
                f"{MATCHING}.geometry": ["bbox_2d"],
                f"{MATCHING}.maskiou_gate": 0.4,
                f"{MATCHING}.ot_iters": 3,
            },
            f"{MATCHING}.geometry, {MATCHING}.maskiou_gate, {MATCHING}.ot_iters",
        ),
        (
            {
                f"{MATCHING}.trim_trailing_false_positives": True,
                f"{MATCHING}.supervise_separators": True,
                f"{MATCHING}.ot_epsilon_cap": 0.2,
            },
            (
                f"{MATCHING}.ot_epsilon_cap, {MATCHING}.trim_trailing_false_positives,"
                f" {MATCHING}.supervise_separators"
            ),
        ),
    ],
)
def test_keys_of_samples_with_ground_truth_are_remarked_on_and_not_refused(changes, paths):
    """An experiment may be built on one of samples."""
    assert remarks(load_trajectories(changes)) == (
        f"{paths}: no effect under trajectory_pg, which learns from an environment",
    )


def test_keys_that_have_an_effect_or_their_defaults_are_not_remarked_on():
    assert remarks(load_trajectories({})) == ()
    defaults = {
        "stage2_ab.schedule": {"b_ratio": 1.0, "warmup_steps": 0},
        "evaluation.worst_scenes": 8,
        "data": {"shuffle": False, "sort_objects": True},
    }
    assert remarks(load_trajectories(defaults)) == ()
    assert remarks(load({"evaluation.worst_scenes": 3, f"{MATCHING}.maskiou_gate": 0.4})) == ()


def test_an_example_that_is_more_than_all_devices_decode_at_a_time_is_remarked_on():
    assert remarks(load_trajectories({DECODED: 2})) == (
        (
            f"{DECODED}: 2 x 3 rollout devices decode fewer rollouts at a time than one example for"
            " each learner rank has, 8 x 1, so they take turns"
        ),
    )
    assert remarks(load_trajectories({DECODED: 3})) == ()
    assert len(remarks(load_trajectories({DECODED: 3, RANKS: 2}))) == 1
    # Servers are asked at the start.
    assert remarks(load_trajectories({DECODED: 1, **SERVERS})) == ()
