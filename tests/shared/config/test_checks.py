"""Values that contradict each other, and values of later versions."""

from __future__ import annotations

import pytest

from shared.config.checks import CHECKS
from shared.config.pipeline import EXAMPLE_PIPELINE
from shared.config.run import RunConfig

MATCHING = "rollout_matching"
VLLM = f"{MATCHING}.vllm"
OBJECTIVE = f"{MATCHING}.pipeline.objective"
STAGE1 = {"custom.trainer_variant": "stage1_sft"}
NO_QUEUE = {"stage2_ab.channel_b.enable_pipeline": False}

TOKEN_CE = EXAMPLE_PIPELINE["objective"][0]

REFUSED = [
    (
        {"custom.trainer_variant": "trajectory_pg"},
        "custom.trainer_variant: 'trajectory_pg' is not in this version; set stage1_sft, stage2_rollout_aligned or stage2_two_channel",
    ),
    (
        {"training.eval_steps": 20, "data.val": ...},
        "training.eval_steps: 20 asks for reports on held-out samples, and data.val is not set; set data.val to a JSONL file, or remove",
    ),
    ({"learner.world_size": 2}, "learner.world_size: 2 learner ranks are not in this version; "),
    ({f"{MATCHING}.max_staleness": 1}, f"{MATCHING}.max_staleness: rollouts of older weights are not in this version; "),
    ({f"{VLLM}.sync.mode": "adapter"}, f"{VLLM}.sync.mode: 'adapter' needs LoRA, which is not in this version; set {VLLM}.sync.mode: full"),
    ({f"{VLLM}.sync.mode": "auto"}, f"{VLLM}.sync.mode: 'auto' needs LoRA, which is not in this version; "),
    ({**NO_QUEUE, f"{MATCHING}.rollout_backend": "hf"}, f"{MATCHING}.rollout_backend: 'hf' is not in this version; set "),
    ({**NO_QUEUE, f"{VLLM}.mode": ...}, f"{VLLM}.mode: 'colocate' is not in this version; set {VLLM}.mode: actors"),
    ({**NO_QUEUE, **STAGE1, f"{MATCHING}.rollout_backend": "hf"}, f"{MATCHING}.rollout_backend: 'hf' is not in this version; set "),
    ({**NO_QUEUE, **STAGE1, f"{VLLM}.mode": "colocate"}, f"{VLLM}.mode: 'colocate' is not in this version; set {VLLM}.mode: actors"),
    ({f"{VLLM}.mode": "server"}, f"{VLLM}.mode: 'server' is not in this version; set {VLLM}.mode: actors"),
    ({f"{MATCHING}.decode_mode": "sample"}, f"{MATCHING}.decode_mode: 'sample' contradicts decoding.temperature 0, which is greedy; raise "),
    (
        {f"{MATCHING}.decode_mode": "greedy", f"{MATCHING}.decoding.temperature": 0.7},
        f"{MATCHING}.decode_mode: 'greedy' contradicts decoding.temperature 0.7, which is sampling; set ",
    ),
    ({f"{MATCHING}.num_beams": 4}, f"{MATCHING}.num_beams: 4 beams need decode_mode: beam; "),
    ({"global_max_length": 160}, "global_max_length: 160 tokens leave no room for a prompt beside rollout_matching.max_new_tokens 160; raise "),
    ({f"{VLLM}.max_model_len": 2047}, f"{VLLM}.max_model_len: 2047 is less than global_max_length 2048"),
    (
        {"training.gradient_accumulation_steps": 8},
        "training.gradient_accumulation_steps: 8 contradicts effective_batch_size 32, which takes 32 with 1 per device and 1 learner ranks; remove one",
    ),
    (
        {"training.packing_buffer": 31},
        "training.packing_buffer: 31 segments cannot hold a whole step (32 samples on channel A, 32 raw rollouts on channel B); raise it to at least 32",
    ),
    (
        {"training.packing_buffer": 40, "stage2_ab.channel_b.rollouts_per_step": 48},
        "training.packing_buffer: 40 segments cannot hold a whole step (32 samples on channel A, 48 raw rollouts on channel B); raise it to at least 48",
    ),
    (
        {"training.effective_batch_size": 300, "training.per_device_train_batch_size": 8},
        "training.packing_buffer: 256 segments cannot hold a whole step (304 samples on channel A, ",
    ),
    ({"model.dtype": "bfloat16"}, "model.dtype: 'bfloat16' is not in this version (it needs fp32 master weights); set model.dtype: float32"),
    (
        {"model.attn_implementation": "flash_attention_2"},
        "model.attn_implementation: 'flash_attention_2' is not in this version (it needs model.dtype bfloat16); set ",
    ),
    (
        {f"{VLLM}.actors.tensor_parallel_size": 2, f"{VLLM}.actors.gpus_per_actor": 1.0},
        f"{VLLM}.actors.gpus_per_actor: 1 GPUs cannot hold an engine of tensor_parallel_size 2; set it to 2",
    ),
    (
        {f"{OBJECTIVE}[0].channels": ["A"], f"{OBJECTIVE}[1].channels": ["A"]},
        f"{OBJECTIVE}: no enabled entry with a weight above 0, its own and a term's, covers channel B, ",
    ),
    (
        {f"{OBJECTIVE}[0].channels": ["B"], f"{OBJECTIVE}[1].weight": 0.0},
        f"{OBJECTIVE}: no enabled entry with a weight above 0, its own and a term's, covers channel A, ",
    ),
]

ACCEPTED = [
    {"data.val": ...},
    {"training.eval_steps": 1000},
    {f"{MATCHING}.decode_mode": "greedy"},
    {f"{MATCHING}.decode_mode": "sample", f"{MATCHING}.decoding.temperature": 1.0},
    {f"{VLLM}.max_model_len": 2048},
    {"training.gradient_accumulation_steps": 32},
    {"training.effective_batch_size": 33, "training.per_device_train_batch_size": 8, "training.gradient_accumulation_steps": 5},
    {"training.packing_buffer": 7, "training.packing": False},
    {"training.packing_buffer": 32},
    {"training.packing_buffer": 32, "training.packing_window": 64},
    {**STAGE1, "training.packing_buffer": 32, "stage2_ab.channel_b.rollouts_per_step": 48},
    *({f"{MATCHING}.decoding.temperature": temperature} for temperature in (0, 0.01, 5, 5.0)),
    {"learner.gpus": 1, f"{VLLM}.actors.gpus_per_actor": 2.0, "learner.cpus": 0.5, f"{VLLM}.actors.cpus_per_actor": 0.5},
    {"learner.gpus": 0.0, f"{VLLM}.actors.gpus_per_actor": 0},
    {f"{OBJECTIVE}[0].channels": ["A"], f"{OBJECTIVE}[2]": TOKEN_CE | {"channels": ["B"]}},
    {f"{OBJECTIVE}[2]": TOKEN_CE | {"channels": ["A", "B"], "enabled": False}},
    {"training.max_steps": 10, "stage2_ab.schedule.warmup_steps": 400, "training.lr_warmup_steps": 50},
    {f"{OBJECTIVE}[0].channels": ["A"], f"{OBJECTIVE}[1].channels": ["A"], "stage2_ab.schedule.b_ratio": 0.0},
    {f"{OBJECTIVE}[0].channels": ["B"], f"{OBJECTIVE}[1].channels": ["B"], "stage2_ab.schedule.warmup_steps": 0},
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_contradictions_and_values_of_later_versions_are_refused(problems, changes, message):
    (line,) = problems(changes)
    assert line.startswith(message)
    assert "; " in line


@pytest.mark.parametrize("changes", ACCEPTED)
def test_values_that_agree_are_accepted(problems, changes):
    assert problems(changes) == []


@pytest.mark.parametrize(("channels", "twice"), [(["A"], "A"), (["B"], "B"), (["B", "A"], "B and A")])
def test_a_module_is_active_once_per_channel(problems, channels, twice):
    (line,) = problems({f"{OBJECTIVE}[2]": TOKEN_CE | {"channels": channels}})
    assert line.startswith(f"{OBJECTIVE}[2].name: 'token_ce' is active on channel {twice} already, by {OBJECTIVE}[0]; remove or disable one of the two")


def test_a_diagnostic_is_active_once_per_channel_too(problems):
    entry = {"name": "coord_diag", "enabled": True, "weight": 1.0, "channels": ["A", "B"], "config": {}}
    path = f"{MATCHING}.pipeline.diagnostics"
    assert problems({path: [entry | {"channels": ["A"]}, entry | {"channels": ["B"]}, entry | {"enabled": False}]}) == []
    (line,) = problems({path: [entry, entry | {"channels": ["B"]}]})
    assert line.startswith(f"{path}[1].name: 'coord_diag' is active on channel B already, by {path}[0]; ")


def test_every_further_entry_of_a_module_is_reported_once(problems):
    lines = problems({f"{OBJECTIVE}[2]": TOKEN_CE, f"{OBJECTIVE}[3]": TOKEN_CE})
    assert [line.split(": ")[0] for line in lines] == [f"{OBJECTIVE}[2].name", f"{OBJECTIVE}[3].name"]


def test_number_type_and_attention_of_a_later_version_are_two_problems(problems):
    lines = problems({"model.dtype": "bfloat16", "model.attn_implementation": "flash_attention_2"})
    assert [line.split(": ")[0] for line in lines] == ["model.dtype", "model.attn_implementation"]


def test_beam_search_is_refused_for_actors_and_the_modes_that_have_it_are_named(problems):
    (line,) = problems({f"{MATCHING}.decode_mode": "beam", f"{MATCHING}.num_beams": 4})
    assert line.startswith(f"{MATCHING}.decode_mode: vllm.mode actors has no beam search; rollout_backend hf and vllm.mode colocate have it")


def test_beams_contradict_a_temperature_and_one_beam_is_none(problems):
    lines = problems({f"{MATCHING}.decode_mode": "beam", f"{MATCHING}.decoding.temperature": 1.0})
    assert [line.split(": ")[0] for line in lines] == [f"{MATCHING}.decode_mode", f"{MATCHING}.decode_mode", f"{MATCHING}.num_beams"]


@pytest.mark.parametrize(
    ("changes", "where"), [({f"{VLLM}.mode": "colocate"}, "vllm.mode colocate"), ({f"{MATCHING}.rollout_backend": "hf"}, "rollout_backend hf")]
)
def test_the_in_step_queue_needs_dedicated_devices(problems, changes, where):
    (line,) = (line for line in problems(changes) if line.startswith("stage2_ab.channel_b.enable_pipeline: "))
    assert f"dedicated devices, which {where} does not have; set " in line
    assert f"{VLLM}.mode: server or actors" in line


def test_a_decode_batch_that_leaves_a_learner_rank_without_rollouts_is_refused(problems):
    lines = problems({"learner.world_size": 4, f"{MATCHING}.decode_batch_size": 1})
    (line,) = (line for line in lines if line.startswith(f"{MATCHING}.decode_batch_size: "))
    assert line.endswith("raise decode_batch_size to at least 2, add rollout devices, or use fewer learner ranks")


def test_every_check_reads_keys_that_exist():
    for path in {path for check in CHECKS for path in check.reads}:
        section = RunConfig
        for key in path.split("."):
            assert key in section.model_fields, path
            section = section.model_fields[key].annotation
