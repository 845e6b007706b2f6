"""What `custom.trainer_variant: trajectory_pg` asks of the other sections, and what the others say
to an environment.
"""

from __future__ import annotations

import re
from itertools import product

import pytest
import yaml

from shared.config.derive import group_size, has_held_out, raw_rollouts_per_step, remarks
from shared.config.explain import as_yaml
from shared.config.pipeline import EXAMPLE_PIPELINE, EXAMPLE_POLICY_GRADIENT

MATCHING = "rollout_matching"
VLLM = f"{MATCHING}.vllm"
OBJECTIVE = f"{MATCHING}.pipeline.objective"
BUDGET = "stage2_ab.channel_b.rollouts_per_step"
BATCH = "training.effective_batch_size"
STEPS = "training.gradient_accumulation_steps"
NO_QUEUE = {"stage2_ab.channel_b.enable_pipeline": False}
TOKEN_CE = EXAMPLE_PIPELINE["objective"][0]
COORD_DIAG = {"name": "coord_diag", "enabled": True, "weight": 1.0, "channels": ["B"], "config": {}}
SERVER = {"servers": [{"base_url": "http://127.0.0.1:8000", "group_port": 0}]}

OF_THE_ENVIRONMENT = (
    "has no effect under trajectory_pg: the environment has data of its own; remove it (`data=none`"
    " on the command line, `override /data: none` in"
)
SAME = (
    "makes the rollouts of an example all the same, and trajectory_pg learns from their differences"
)
ASK = (
    "generates in the learner, in turn with its learning, and environments ask for answers at any"
    " time"
)
CHOOSE = (
    "actors or server (`backend=actors` on the command line, `override /backend: actors` in an"
    " experiment)"
)
NO_OBJECTIVE = (
    f"{OBJECTIVE}: no enabled policy_gradient with a weight above 0, and trajectory_pg learns by"
    f" nothing else; write an entry such as `{as_yaml(EXAMPLE_POLICY_GRADIENT)}`"
)
GROUPS = "of 8 (environment.rollouts_per_example)"
PER_DEVICE = "training.per_device_train_batch_size"

# The minimal configuration of an environment with these changes, and the one line that it gives.
REFUSED = [
    (
        {"environment": ...},
        (
            "environment: is required, and missing; add it, for example `environment: {id:"
            " guess_number}` (what trajectories are of)"
        ),
    ),
    (
        {"environment": None},
        (
            "environment: is required, and missing; add it, for example `environment: {id:"
            " guess_number}` (what trajectories are of)"
        ),
    ),
    ({"data.train": "train.jsonl"}, f"data.train: {OF_THE_ENVIRONMENT} an experiment)"),
    ({"data.val": "val.jsonl"}, f"data.val: {OF_THE_ENVIRONMENT} an experiment)"),
    # The section itself.
    (
        {"environment": {}},
        (
            "environment.id: is required, and missing; add it, for example `id: guess_number` (An"
            " example environment, an installed one, a module, or the path of a `.py` file:"
            " whatever has `load_environment`)"
        ),
    ),
    (
        {"environment": "guess_number"},
        (
            "environment: must be a mapping of keys, got the text 'guess_number'; write its keys"
            " (id, args, rollouts_per_example, drop_equal_groups, num_eval_examples,"
            " max_images_per_prompt, num_actors, cpus_per_actor, max_concurrent_scoring,"
            " rollout_timeout_s, scoring_timeout_s, chat_template_args, tool_call_parser), or"
            " remove it"
        ),
    ),
    (
        {"environment.rollouts_per_example": 1},
        (
            "environment.rollouts_per_example: must be at least 2, got 1; change it (Rollouts of"
            " each drawn example: the group whose mean reward is taken off the reward of each;"
            " without the key it is 8)"
        ),
    ),
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
    (
        {"environment.num_actor": 2},
        "environment.num_actor: is not a known key; did you mean 'num_actors'?",
    ),
    # Sampling.
    (
        {f"{MATCHING}.decoding.temperature": 0.0},
        f"{MATCHING}.decoding.temperature: 0 is greedy decoding, which {SAME}; set 1.0",
    ),
    (
        {f"{MATCHING}.decoding": ...},
        f"{MATCHING}.decoding.temperature: 0 is greedy decoding, which {SAME}; set 1.0",
    ),
    (
        {f"{MATCHING}.decoding.temperature": 0.0, f"{MATCHING}.decode_mode": "greedy"},
        (
            f"{MATCHING}.decode_mode: 'greedy' {SAME}; remove the key, and set"
            f" {MATCHING}.decoding.temperature: 1.0"
        ),
    ),
    (
        {f"{MATCHING}.decoding.top_p": 0.9},
        (
            f"{MATCHING}.decoding.top_p: 0.9 cuts improbable tokens off, and policy_gradient needs"
            " the probability of every token under the whole vocabulary; set 1.0, or remove"
            " the key"
        ),
    ),
    (
        {f"{MATCHING}.decoding.top_k": 50},
        (
            f"{MATCHING}.decoding.top_k: 50 cuts improbable tokens off, and policy_gradient needs"
            " the probability of every token under the whole vocabulary; set -1, or remove the key"
        ),
    ),
    (
        {f"{MATCHING}.repetition_penalty": 1.1},
        (
            f"{MATCHING}.repetition_penalty: 1.1 makes a token's probability depend on what was"
            " said before in a way that the model does not learn, and policy_gradient needs the"
            " probability of every token under the whole vocabulary; set 1.0, or remove the key"
        ),
    ),
    # Engines.
    (
        {**NO_QUEUE, f"{MATCHING}.rollout_backend": "hf"},
        f"{MATCHING}.rollout_backend: 'hf' {ASK}; set vllm, and {VLLM}.mode: {CHOOSE}",
    ),
    ({**NO_QUEUE, f"{VLLM}.mode": "colocate"}, f"{VLLM}.mode: 'colocate' {ASK}; set {CHOOSE}"),
    (
        {**NO_QUEUE, f"{MATCHING}.max_staleness": 1},
        (
            f"{MATCHING}.max_staleness: 1 lets the queue between generation and learning run on"
            " into the next step, and there is no queue; set stage2_ab.channel_b.enable_pipeline:"
            " true, or max_staleness: 0"
        ),
    ),
    (
        {"environment.num_actors": 9, f"{MATCHING}.decode_batch_size": 8},
        (
            "environment.num_actors: 9 share the 8 that an engine decodes at a time"
            f" ({MATCHING}.decode_batch_size), and each needs one of them; set it to 8 or less, or"
            f" raise {MATCHING}.decode_batch_size"
        ),
    ),
    # Images, which a row may have or not.
    (
        {
            "environment.max_images_per_prompt": 1,
            "learner.world_size": 2,
            "learner.parallel": "fsdp",
        },
        (
            "learner.parallel: fsdp cannot learn trajectories with images"
            " (environment.max_images_per_prompt), which only some rows have; set"
            " learner.parallel: ddp"
        ),
    ),
    # The objective.
    ({OBJECTIVE: []}, NO_OBJECTIVE),
    ({f"{OBJECTIVE}[0].enabled": False}, NO_OBJECTIVE),
    ({f"{OBJECTIVE}[0].weight": 0.0}, NO_OBJECTIVE),
    (
        {f"{OBJECTIVE}[1]": TOKEN_CE},
        (
            f"{OBJECTIVE}[1].name: 'token_ce' has no ground truth to learn from under"
            " trajectory_pg; remove the entry, or choose another custom.trainer_variant"
        ),
    ),
    (
        {f"{MATCHING}.pipeline.diagnostics": [COORD_DIAG]},
        (
            f"{MATCHING}.pipeline.diagnostics[0].name: 'coord_diag' is about coordinates of ground"
            " truth, which there is none of under trajectory_pg; remove the entry"
        ),
    ),
    # Whole groups.
    (
        {BATCH: 33},
        (
            f"{BATCH}: 33 rollouts a step cannot be cut into groups {GROUPS}; set 40, or a larger"
            " multiple of 8"
        ),
    ),
    (
        {BATCH: 4},
        (
            f"{BATCH}: 4 rollouts a step cannot be cut into groups {GROUPS}; set 8, or a larger"
            " multiple of 8"
        ),
    ),
    (
        {BUDGET: 12},
        (
            f"{BUDGET}: 12 rollouts a step cannot be cut into groups {GROUPS}; set 16, or a larger"
            " multiple of 8"
        ),
    ),
    (
        {"learner.world_size": 5, BUDGET: 32},
        (
            f"{BUDGET}: 32 rollouts a step cannot give each of 5 learner ranks a group {GROUPS};"
            " set 40, or a larger multiple of 8"
        ),
    ),
    (
        {"learner.world_size": 4, BATCH: 16},
        (
            f"{BATCH}: 16 rollouts a step cannot give each of 4 learner ranks a group {GROUPS}; set"
            " 32, or a larger multiple of 8"
        ),
    ),
    (
        {PER_DEVICE: 3},
        (
            f"{BATCH}: 32 comes to 33 rollouts a step ({PER_DEVICE} 3 x learner.world_size 1 x 11"
            f" accumulation steps), which cannot be cut into groups {GROUPS}; set 48, or a larger"
            " multiple of 24"
        ),
    ),
    (
        {BATCH: ..., STEPS: 9},
        (
            f"{STEPS}: 9 comes to 9 rollouts a step ({PER_DEVICE} 1 x learner.world_size 1 x 9"
            f" accumulation steps), which cannot be cut into groups {GROUPS}; replace it by"
            f" {BATCH}: 16, or a larger multiple of 8"
        ),
    ),
    (
        {BATCH: ...},
        (
            f"{BATCH}: null comes to 1 rollout a step ({PER_DEVICE} 1 x learner.world_size 1 x 1"
            f" accumulation steps), which cannot be cut into groups {GROUPS}; set 8, or a larger"
            " multiple of 8"
        ),
    ),
    (
        {STEPS: 9},
        (
            f"{STEPS}: 9 contradicts effective_batch_size 32, which takes 32 with 1 per device and"
            " 1 learner ranks; remove one of the two keys"
        ),
    ),
    # Held-out examples.
    *(
        (
            {"environment.num_eval_examples": 0, key: value},
            (
                f"{key}: {value} asks for reports on held-out examples, and"
                " environment.num_eval_examples is 0; set environment.num_eval_examples above 0,"
                f" or {key}: {none}"
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
    {"environment.num_actors": 8, f"{MATCHING}.decode_batch_size": 8},
    {"environment.num_eval_examples": 0},
    {"environment.num_eval_examples": 0, "training.eval_steps": None},
    {"environment.num_eval_examples": 1, "training.eval_steps": 20, "checkpoint.keep_best": 2},
    {"training.eval_steps": 20, "checkpoint.keep_best": 2},
    {f"{MATCHING}.decode_mode": "sample"},
    {
        f"{MATCHING}.decoding": {"temperature": 0.7, "top_p": 1.0, "top_k": -1},
        f"{MATCHING}.repetition_penalty": 1.0,
    },
    {f"{VLLM}.mode": "server", f"{VLLM}.server": SERVER},
    {f"{VLLM}.mode": "server", f"{VLLM}.server": SERVER | {"kind": "vllm"}},
    NO_QUEUE,
    {f"{MATCHING}.max_staleness": 1},
    {f"{OBJECTIVE}[1]": TOKEN_CE | {"enabled": False}},
    {f"{MATCHING}.pipeline.diagnostics": [COORD_DIAG | {"enabled": False}]},
    {f"{OBJECTIVE}[0].config.advantage_std": True, f"{OBJECTIVE}[0].config.normalize": "constant"},
    {BATCH: 8},
    {BATCH: 31, PER_DEVICE: 4},
    {BUDGET: 16, BATCH: 33},
    {BUDGET: 16, BATCH: ...},
    {BATCH: ..., STEPS: 8},
    {BATCH: ..., STEPS: 2, PER_DEVICE: 4},
    {"environment.rollouts_per_example": 2, BATCH: 2},
    {"environment.rollouts_per_example": 32},
    {"learner.world_size": 3, BUDGET: 32},
    {"learner.world_size": 2, "learner.parallel": "fsdp"},
    {
        "learner.world_size": 2,
        "learner.parallel": "fsdp",
        "environment.max_images_per_prompt": 0,
    },
    {
        "learner.world_size": 2,
        "learner.parallel": "ddp",
        "environment.max_images_per_prompt": 4,
    },
    # There is nothing to shard.
    {"learner.parallel": "fsdp", "environment.max_images_per_prompt": 4},
    # An example is in one round whatever a device decodes at a time.
    {f"{MATCHING}.decode_batch_size": 1},
    # What waits for a row when the buffer is full goes into one.
    {"training.packing_buffer": 1},
    {"training.packing": False},
    {
        "model.adapter": {"kind": "lora"},
        f"{VLLM}.enable_lora": True,
        f"{VLLM}.sync.mode": "adapter",
    },
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_trajectories_cannot_be_learned_with_is_refused(trajectory_problems, changes, message):
    assert trajectory_problems(changes) == [message]


@pytest.mark.parametrize("changes", ACCEPTED)
def test_the_rest_is_accepted(trajectory_problems, changes):
    assert trajectory_problems(changes) == []


def test_beam_search_is_refused_by_whoever_it_asks(trajectory_problems):
    lines = trajectory_problems(
        {
            f"{MATCHING}.decode_mode": "beam",
            f"{MATCHING}.num_beams": 4,
            f"{MATCHING}.decoding.temperature": 0.0,
        }
    )
    assert [line.split("; ")[0] for line in lines] == [
        f"{MATCHING}.decode_mode: 'beam' {SAME}",
        f"{MATCHING}.decode_mode: vllm.mode actors has no beam search",
    ]


@pytest.mark.parametrize(("mode", "remedy"), [("greedy", "remove"), ("beam", "remove")])
def test_a_mode_that_contradicts_the_temperature_is_not_called_a_temperature_of_0(
    trajectory_problems, mode, remedy
):
    lines = trajectory_problems({f"{MATCHING}.decode_mode": mode})
    assert not any(line.startswith(f"{MATCHING}.decoding.temperature: ") for line in lines)
    assert all(remedy in line for line in lines if line.startswith(f"{MATCHING}.decode_mode: "))


@pytest.mark.parametrize(
    "where", [{f"{MATCHING}.rollout_backend": "hf"}, {f"{VLLM}.mode": "colocate"}]
)
def test_engines_in_the_learner_have_neither_environments_nor_a_queue(trajectory_problems, where):
    """Both lines send to the same modes."""
    of_the_engines, of_the_queue = trajectory_problems(where)
    assert of_the_engines.split(": ")[0] in (f"{MATCHING}.rollout_backend", f"{VLLM}.mode")
    assert of_the_queue.startswith(
        "stage2_ab.channel_b.enable_pipeline: the in-step queue needs rollouts on dedicated devices"
    )
    assert "actors or server" in of_the_engines
    assert "server or actors" in of_the_queue


def test_an_objective_of_samples_is_refused_entry_by_entry_with_what_is_missing(
    trajectory_problems,
):
    """Text gates and channels, which say more about such entries elsewhere, have nothing to say
    here.
    """
    coord_reg = {"name": "coord_reg", "enabled": True, "weight": 1.0, "channels": ["A", "B"]} | {
        "config": dict.fromkeys(
            [
                "coord_ce_weight",
                "soft_ce_weight",
                "w1_weight",
                "coord_gate_weight",
                "text_gate_weight",
            ],
            1.0,
        )
        | {"temperature": 1.0, "target_sigma": 2.0, "target_truncate": None}
    }
    lines = trajectory_problems({OBJECTIVE: [coord_reg, TOKEN_CE | {"channels": ["A"]}]})
    assert lines[0] == NO_OBJECTIVE
    assert [line.split(" has ")[0] for line in lines[1:]] == [
        f"{OBJECTIVE}[0].name: 'coord_reg'",
        f"{OBJECTIVE}[1].name: 'token_ce'",
    ]


def test_the_entry_that_is_proposed_can_be_copied(trajectory_problems):
    (line,) = trajectory_problems({OBJECTIVE: []})
    assert trajectory_problems({OBJECTIVE: [yaml.safe_load(line.split("`")[1])]}) == []


def test_the_main_job_under_this_variant_is_told_all_that_it_takes(problems, trajectory_problems):
    """What a user of stage2_3v1 reads who changes the variant alone; with all of it done the
    configuration loads.
    """
    lines = problems({"custom.trainer_variant": "trajectory_pg"})
    assert [line.split(": ")[0] for line in lines] == [
        "environment",
        "data.train",
        "data.val",
        f"{MATCHING}.decoding.temperature",
        OBJECTIVE,
        f"{OBJECTIVE}[0].name",
        f"{OBJECTIVE}[1].name",
    ]
    assert trajectory_problems({}) == []


@pytest.mark.parametrize("variant", ["stage1_sft", "stage2_rollout_aligned", "stage2_two_channel"])
def test_the_other_variants_learn_from_no_environment(problems, variant):
    other = {"custom.trainer_variant": variant}
    told = (
        f"environment: has no effect under {variant}; remove it, or set custom.trainer_variant:"
        " trajectory_pg"
    )
    missing = (
        "data.train: is required, and missing; add it, for example `train:"
        " outputs/demo/data/train.jsonl` (JSONL file of training samples)"
    )
    # Its other keys are of no interest then.
    environment = {
        "environment": {"id": "guess_number", "rollouts_per_example": 5, "num_eval_examples": 0}
    }
    assert problems(other | environment) == [told]
    assert problems(other | {"training.eval_steps": 20} | environment) == [told]
    assert problems(other | environment | {"data": ...}) == [missing, told]
    assert problems(other | {"data.train": ...}) == [missing]
    assert problems(other | {"environment": None}) == []


@pytest.mark.parametrize("variant", ["stage2_rollout_aligned", "stage2_two_channel"])
def test_the_other_variants_have_no_advantages(problems, variant):
    other = {"custom.trainer_variant": variant}
    (line,) = problems(other | {f"{OBJECTIVE}[2]": EXAMPLE_POLICY_GRADIENT})
    wrong, remedy = line.split("; ")
    assert (
        wrong
        == f"{OBJECTIVE}[2].name: 'policy_gradient' has no advantages to learn from under {variant}"
    )
    assert remedy == "remove the entry, or set custom.trainer_variant: trajectory_pg"
    assert problems(other | {f"{OBJECTIVE}[2]": EXAMPLE_POLICY_GRADIENT | {"enabled": False}}) == []


def test_where_the_variant_itself_is_wrong_nothing_is_said_that_depends_on_it(
    problems, trajectory_problems
):
    for variant in ({"custom.trainer_variant": ...}, {"custom.trainer_variant": "trajectories"}):
        (line,) = trajectory_problems(variant)
        assert line.startswith("custom.trainer_variant: ")
    (line,) = problems({"custom.trainer_variant": ..., "data": ...})
    assert line.startswith("custom.trainer_variant: ")


def test_a_value_of_the_section_that_is_wrong_itself_causes_no_second_report(trajectory_problems):
    for changes in (
        {"environment.rollouts_per_example": 0},
        {"environment.num_eval_examples": -1, "training.eval_steps": 20},
        {"environment.id": 3},
    ):
        assert len(trajectory_problems(changes)) == 1


def test_the_batch_size_that_a_refusal_of_cut_groups_proposes_is_accepted(trajectory_problems):
    """And so is every larger multiple of what it says."""
    num_refused = 0
    for size, ranks, per_device, asked in product(
        (2, 3, 16),
        (1, 2, 3, 5),
        (1, 3),
        ({BATCH: 7}, {BATCH: 16}, {BATCH: ..., STEPS: 5}, {BATCH: ...}, {BUDGET: 10}),
    ):
        changes = {
            "environment.rollouts_per_example": size,
            "learner.world_size": ranks,
            PER_DEVICE: per_device,
            **asked,
        }
        lines = trajectory_problems(changes)
        if not lines:
            continue
        num_refused += 1
        (line,) = lines
        path, number, unit = re.search(
            r"^([\w.]+): .*?(\d+), or a larger multiple of (\d+)$", line
        ).groups()
        replaced = {STEPS: None} if path == STEPS else {}
        for proposed in (int(number), int(number) + int(unit)):
            assert (
                trajectory_problems(
                    {**changes, **replaced, BATCH if path == STEPS else path: proposed}
                )
                == []
            ), line
    assert num_refused > 50


def test_the_group_of_an_example_and_the_batch_size_follow_from_the_sections(
    load, load_trajectories
):
    assert (group_size(load({})), raw_rollouts_per_step(load({}))) == (1, 32)
    run = load_trajectories({"environment.rollouts_per_example": 16, BUDGET: 48})
    assert (group_size(run), raw_rollouts_per_step(run)) == (16, 48)


def test_there_are_held_out_examples_unless_none_is_asked_for(load, load_trajectories):
    assert has_held_out(load({}))
    assert not has_held_out(load({"data.val": ...}))
    assert [
        has_held_out(load_trajectories({"environment.num_eval_examples": number}))
        for number in (None, 1, 0)
    ] == [True, True, False]


IDLE = [
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
        ", ".join(f"{MATCHING}.{key}" for key in ("geometry", "maskiou_gate", "ot_iters")),
    ),
]


@pytest.mark.parametrize(("changes", "paths"), IDLE)
def test_keys_of_samples_with_ground_truth_are_remarked_on_and_not_refused(
    load_trajectories, changes, paths
):
    """An experiment may be built on one of samples."""
    assert remarks(load_trajectories(changes)) == (
        f"{paths}: no effect under trajectory_pg, which learns from an environment",
    )


def test_keys_that_have_an_effect_or_their_defaults_are_not_remarked_on(load, load_trajectories):
    assert remarks(load_trajectories({})) == ()
    defaults = {
        "stage2_ab.schedule": {"b_ratio": 1.0, "warmup_steps": 0},
        "evaluation.worst_scenes": 8,
        "data": {"shuffle": False, "sort_objects": True},
    }
    assert remarks(load_trajectories(defaults)) == ()
    assert remarks(load({"evaluation.worst_scenes": 3, f"{MATCHING}.maskiou_gate": 0.4})) == ()


def test_an_example_that_is_more_than_all_devices_decode_at_a_time_is_remarked_on(
    load_trajectories,
):
    run = load_trajectories({f"{MATCHING}.decode_batch_size": 2})
    assert remarks(run) == (
        (
            "rollout_matching.decode_batch_size: 2 x 3 rollout devices decode fewer rollouts at a"
            " time than one example for each learner rank has, 8 x 1, so they take turns"
        ),
    )
    assert remarks(load_trajectories({f"{MATCHING}.decode_batch_size": 3})) == ()
    assert (
        len(
            remarks(
                load_trajectories({f"{MATCHING}.decode_batch_size": 3, "learner.world_size": 2})
            )
        )
        == 1
    )
    asked_at_the_start = load_trajectories(
        {f"{MATCHING}.decode_batch_size": 1, f"{VLLM}.mode": "server", f"{VLLM}.server": SERVER}
    )
    assert remarks(asked_at_the_start) == ()
