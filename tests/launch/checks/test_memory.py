"""The estimate of a run's memory, against the model itself."""

import math
from dataclasses import replace

import pytest
import torch
from config_support import configuration, trajectory_config
from safetensors.torch import save_file
from tiny_qwen import TOWERS, make_stock_model

from launch.checks.data import ImageNeeds
from launch.checks.learner_memory import learner_estimate, read_bytes
from launch.checks.memory import (
    CUDA_CONTEXT,
    DeviceMemory,
    Estimate,
    Needs,
    device_memory,
    engine_estimate,
    sequences_in_cache,
    shared_device_estimate,
    synced_bytes,
)
from launch.checks.model_shape import ModelShape, RunSizes, VisionShape
from launch.processes.engine_settings import settings_of_run
from launch.processes.placement import Resources, plan_placement
from launch.tools.add_coord_tokens import AddOptions, make_coord_model
from learner.host_memory import container_limits
from learner.model.loading import load_model
from shared.config.training import LOGIT_CHUNK
from shared.errors import ConfigError
from shared.weight_sync.transports import Device, TransportKind

GIB = 2**30
REFERENCE = {"estimator": "k3"}
NO_QUEUE = {"stage2_ab__channel_b__enable_pipeline": False}
COLOCATE = {"rollout_matching__vllm": {"mode": "colocate"}, **NO_QUEUE}
BUCKETS = "buckets of a sync"


@pytest.fixture
def config(demo_checkpoint, tmp_path):
    folders = (demo_checkpoint, tmp_path / "data", tmp_path / "run")
    return lambda **changes: configuration(*folders, global_max_length=512, **changes)


@pytest.fixture
def sizes(config, shape):
    """What the memory of a run with these changes follows from."""
    return lambda of=shape, **changes: RunSizes.of(config(**changes), of)


@pytest.fixture(scope="module")
def shape(demo_checkpoint):
    return ModelShape.read(demo_checkpoint)


@pytest.fixture
def learner_parts(sizes):
    """Bytes of a learner rank's parts, of a configuration with these changes."""
    return lambda *of, **changes: learner_estimate(sizes(*of, **changes)).parts


def engine_parts(run, device=Device.CUDA, transport=TransportKind.GLOO):
    """Bytes of an engine's parts, over one device of 16 GiB."""
    return engine_estimate(run, 1, device, 16 * GIB, transport).parts


@pytest.fixture(scope="module", params=TOWERS)
def stock(request, tmp_path_factory):
    """A checkpoint of each family, with the tensor names of its own files."""
    folder = tmp_path_factory.mktemp(request.param)
    stock = make_stock_model(folder / "stock", request.param)
    make_coord_model(AddOptions(model=stock, out=folder / "model"))
    return folder / "model"


FROZEN_TOWER = {"training__parts": {"vision_tower": {"frozen": True}}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        FROZEN_TOWER,
        {"training__parts": {"vision_tower": {"frozen": True}, "aligner": {"frozen": True}}},
        {"model__adapter": {"kind": "lora", "rank": 4}},
        {"model__adapter": {"kind": "dora", "rank": 4}},
        {
            "model__adapter": {"kind": "lora", "rank": 4, "target_modules": ["proj", "q_proj"]},
            "training__parts": {"vision_tower": {"adapted": True}},
        },
    ],
)
def test_weights_gradients_and_optimizer_state_are_exact(stock, tmp_path, changes):
    run = configuration(stock, tmp_path / "data", tmp_path / "run", **changes)
    sizes = RunSizes.of(run, ModelShape.read(stock))
    parameters = list(load_model(run, torch.device("cpu")).model.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    assert sizes.num_trainable == trained
    parts = learner_estimate(sizes).parts
    assert (parts["gradients"], parts["optimizer"]) == (4 * trained, 8 * trained)
    if "model__adapter" not in changes:
        assert parts["weights"] == sum(parameter.nbytes for parameter in parameters)


def test_keys_and_values_of_prompts_that_rollouts_share_are_counted_until_the_backward(
    sizes, shape
):
    """In a row of 512 tokens, 8 rollouts of one token each repeat at most 496 others."""
    settings = {
        "training__share_prompts": True,
        "stage2_ab__channel_b__rollouts_per_sample": 8,
        "training__effective_batch_size": 32,
    }
    name = "keys and values of shared prompts"
    of_token = 2 * shape.kv_heads * shape.head_dim * 4
    run = sizes(**settings)
    assert learner_estimate(run).parts[name] == shape.layers * 7 * 496 * of_token
    known = learner_estimate(run, key_tokens=700).parts[name]
    assert known == shape.layers * (700 - 512) * of_token
    recomputed = sizes(**settings, model__gradient_checkpointing=True)
    assert learner_estimate(recomputed).parts[name] == 0
    assert learner_estimate(sizes()).parts[name] == 0


def test_ranks_read_weights_with_too_few_rows_for_all_of_them_whole(sizes, shape):
    """Six rows are 2, 2 and 2 on three or four ranks, but then the fourth has none."""
    small = replace(shape, parameters={"a": (6, 10), "b": (7,), "c": (3, 5, 2), "d": ()})
    counts = []
    for ranks in (1, 2, 3, 4):
        run = sizes(small)
        learner = {"parallel": "fsdp", "world_size": ranks}
        run = replace(run, learner=run.learner.model_copy(update=learner))
        counts.append(read_bytes(run))
    assert counts == [
        4 * (60 + 7 + 30 + 1),
        4 * (30 + 4 + 20 + 1),
        4 * (20 + 3 + 10 + 1),
        4 * (60 + 2 + 30 + 1),
    ]


def test_heads_for_speculative_decoding_are_loaded_by_nobody_and_not_counted(tmp_path):
    folder = make_stock_model(tmp_path, "qwen3_5")
    expected = ModelShape.read(folder)
    save_file({"mtp.fc.weight": torch.zeros(4, 8)}, folder / "model-mtp.safetensors")
    assert ModelShape.read(folder) == expected


GATHERED = "gathered from shards"


def test_sharding_divides_all_but_the_activations_and_gathers_a_layer_after_another(
    learner_parts, shape
):
    whole, shared = (
        learner_parts(learner__world_size=2, learner__parallel=parallel)
        for parallel in ("ddp", "fsdp")
    )
    divided = {"weights", "master weights", "gradients", "optimizer"}
    assert divided < set(whole)
    gathered = shared.pop(GATHERED)
    assert whole.pop(GATHERED) == 0 < gathered
    # The head's gradient is whole for longer, and among what is gathered.
    whole["temporary tensors of a backward"] -= shape.vocabulary * shape.hidden * 4
    assert shared == {name: size // (1 + (name in divided)) for name, size in whole.items()}


def test_a_copy_is_divided_by_the_ranks_that_hold_it(learner_parts):
    copies, two, four = (
        learner_parts(learner__world_size=ranks, learner__parallel="fsdp", learner__shard_size=size)
        for ranks, size in ((4, 2), (2, None), (4, None))
    )
    assert copies == two != four


def test_shards_are_float32_and_their_own_masters_and_are_gathered_in_the_models_dtype(
    learner_parts,
):
    sharded = {"learner__world_size": 2, "learner__parallel": "fsdp"}
    single, half = (learner_parts(model__dtype=of, **sharded) for of in ("float32", "bfloat16"))
    assert half["weights"] == single["weights"]
    assert half["master weights"] == 0
    assert half[GATHERED] * 2 == single[GATHERED]


def test_of_shards_each_layer_and_what_lies_in_none_is_gathered(shape):
    names = shape.names_by_layer()
    assert sorted(name for of_layer in names.values() for name in of_layer) == sorted(
        shape.parameters
    )
    assert sorted(names) == [
        "",
        *(f"model.language_model.layers.{number}" for number in range(3)),
        *(f"model.visual.blocks.{number}" for number in range(3)),
    ]
    assert "model.visual.deepstack_merger_list.0.norm.weight" in names[""]


def test_what_is_frozen_has_no_gathered_gradient(learner_parts):
    sharded = {"learner__world_size": 2, "learner__parallel": "fsdp"}
    frozen = {name: {"frozen": True} for name in ("vision_tower", "aligner")}
    all_of_it, some = (
        learner_parts(training__parts=parts, **sharded)[GATHERED] for parts in ({}, frozen)
    )
    adapter = learner_parts(model__adapter={"kind": "lora"}, **sharded)[GATHERED]
    assert adapter < some < all_of_it


def test_a_reference_is_a_second_model_where_there_is_no_adapter(demo_lm, tmp_path):
    of = ModelShape.read(demo_lm)

    def parts(reference=REFERENCE, **changes):
        run = trajectory_config(demo_lm, tmp_path, reference=reference, **changes)
        return learner_estimate(RunSizes.of(run, of)).parts

    weights = parts()["weights"]
    assert parts(None)["reference model"] == 0
    assert parts()["reference model"] == weights
    assert parts(model__adapter={"kind": "lora"})["reference model"] == 0
    for dtype, size in (("bfloat16", weights // 2), ("float32", weights)):
        assert parts(model__dtype=dtype)["reference model"] == size
        # Shards are float32 in any case.
        sharded = {"learner__world_size": 2, "learner__parallel": "fsdp", "model__dtype": dtype}
        assert parts(**sharded)["reference model"] == weights // 2


def test_an_engine_may_be_given_any_fraction_of_a_gpu_that_leaves_room_for_a_syncs_buckets(
    sizes,
):
    """vLLM's fraction holds what its process needs, and what allocators leave unused."""
    card = DeviceMemory(Device.CUDA, 80 * GIB)

    def told(**vllm):
        run = sizes(rollout_matching__vllm={"mode": "actors", **vllm})
        engine = engine_estimate(run, 1, Device.CUDA, card.total, TransportKind.NCCL)
        needs = Needs(Estimate("learner rank", {"weights": 1}), 1, engine, 1)
        return card.problems(needs), card.warnings(needs)

    for fraction in (0.85, 0.90, 0.92):
        assert told(gpu_memory_utilization=fraction) == ([], [])
    (problem,), warnings = told(gpu_memory_utilization=1.0)
    assert not warnings
    key = "rollout_matching.vllm.gpu_memory_utilization"
    assert problem.startswith(f"{key}: engine device: 80.0") and "a GPU has 80.00 GiB" in problem
    # Nobody but the reserve holds the rest of an engine whose cache is given.
    assert told(kv_cache_memory_bytes=70 * GIB) == ([], [])
    problems, (warning,) = told(kv_cache_memory_bytes=75 * GIB)
    assert not problems
    assert warning.startswith("rollout_matching.vllm.kv_cache_memory_bytes: ")
    assert "8% are reserved" in warning


@pytest.mark.parametrize(
    ("device", "mode", "most"),
    [
        (Device.CUDA, "actors", 8192),
        (Device.CUDA, "colocate", 8192),
        (Device.CPU, "actors", 2048),
        (Device.CPU, "colocate", 4096),
    ],
)
def test_an_engine_needs_a_layers_activations_in_a_forward_of_what_vllm_batches(
    sizes, shape, device, mode, most
):
    """In the vision tower: hidden 128, intermediate 512, 4 patches to a token, float32."""

    def activations(size, of):
        vllm = {"rollout_matching__vllm": {"mode": mode}}
        run = sizes(of, **vllm, **NO_QUEUE, rollout_matching__decode_batch_size=size)
        return engine_parts(run, device)["activations of a forward"]

    assert activations(64, shape) == (10 * 128 + 4 * 512) * 4 * most * 4
    text = replace(shape, vision=None)
    assert activations(1, text) == text.layer_numbers_per_token * 512 * 4, "of one sequence"


@pytest.mark.parametrize(("device", "size"), [(Device.CPU, 0), (Device.CUDA, CUDA_CONTEXT)])
def test_on_a_gpu_cuda_takes_its_part_of_every_process(sizes, device, size):
    run = sizes(rollout_matching__vllm__kv_cache_memory_bytes=2**20)
    assert learner_estimate(run, device).parts["CUDA context"] == size
    assert engine_parts(run, device)["CUDA context"] == size


@pytest.mark.parametrize(
    ("transport", "device", "copies"),
    [
        (TransportKind.NCCL, Device.CUDA, 2),
        (TransportKind.IPC, Device.CUDA, 1),
        (TransportKind.GLOO, Device.CPU, 0),
    ],
)
def test_both_ends_of_a_sync_between_gpus_hold_copies_of_buckets(
    sizes, shape, transport, device, copies
):
    """At most 256 MiB and the largest tensor; a small model fits into one."""
    everything = 4 * shape.num_parameters
    assert engine_parts(sizes(), device, transport)[BUCKETS] == copies * everything
    small = sizes(rollout_matching__vllm__sync={"bucket_bytes": 1 << 16})
    bucket = (1 << 16) + max(4 * math.prod(sizes) for sizes in shape.parameters.values())
    assert engine_parts(small, device, transport)[BUCKETS] == copies * bucket


def test_the_sender_of_buckets_has_no_row_meanwhile(sizes, shape):
    def parts(of):
        return learner_estimate(sizes(of), Device.CUDA, TransportKind.NCCL).parts

    assert parts(shape)[BUCKETS] == 0, "the row's activations are more"
    layers = {f"model.language_model.layers.{i}.w.weight": (10**9,) for i in (7, 8)}
    many = parts(replace(shape, parameters=dict(shape.parameters) | layers))
    row = sum(
        size
        for name, size in many.items()
        if name.startswith(("activations", "attention", "temporary"))
    )
    assert many[BUCKETS] == 2 * ((256 << 20) + 4 * 10**9) - row


def test_the_sender_of_shards_gathers_a_bucket_and_two_tensors_and_no_layers_meanwhile(
    sizes, shape
):
    large = {f"model.language_model.layers.{i}.w.weight": (10**8,) for i in range(3, 20)}
    of = replace(shape, parameters=dict(shape.parameters) | large)
    settings = {"rollout_matching__vllm__sync": {"bucket_bytes": 10**10}}
    sharded = {"learner__world_size": 2, "learner__parallel": "fsdp"}
    whole, shards = (
        learner_estimate(sizes(of, **settings, **changes), Device.CUDA, TransportKind.NCCL).parts
        for changes in ({}, sharded)
    )
    less_row = whole["temporary tensors of a backward"] - shards["temporary tensors of a backward"]
    bucket = 4 * of.num_parameters
    assert shards[BUCKETS] - whole[BUCKETS] == bucket + 8 * 10**8 - shards[GATHERED] + less_row


def test_layers_that_are_not_recomputed_keep_all_that_their_backward_needs(learner_parts):
    """Of three layers in the tower and in the language model."""
    text, images = "activations of a row of 512 tokens", "activations of its images"
    recomputed = {"model__gradient_checkpointing": True}
    none, every, second, fourth, of_text = (
        learner_parts(**changes)
        for changes in (
            {},
            recomputed,
            {**recomputed, "model__recompute_every": 2},
            {**recomputed, "model__recompute_every": 4},
            {**recomputed, "model__recompute_tower": False},
        )
    )
    for name in (text, images):
        saved_by_a_layer = (none[name] - every[name]) // 3
        assert saved_by_a_layer > 0
        assert none[name] - second[name] == 2 * saved_by_a_layer
        assert none[name] - fourth[name] == saved_by_a_layer
    assert (of_text[text], of_text[images]) == (every[text], none[images])


def test_what_weights_and_optimizer_leave_too_little_room_beside_is_refused_and_not_tried(config):
    """Qwen3-VL-4B with float32 masters, rows of 12,000 tokens: 74.5 GiB are exact, and 7.9 GiB are
    estimated, by a quarter too much at the most."""
    run = config(model__dtype="bfloat16", model__gradient_checkpointing=True)
    run = run.model_copy(update={"global_max_length": 12_000})
    prefix = "model.language_model"
    weights = {f"{prefix}.layers.{i}.mlp.up_proj.weight": (2560, 43_965) for i in range(36)}
    weights[f"{prefix}.embed_tokens.weight"] = (152_936, 2560)
    vision = VisionShape(1024, 24, 4096, 4)
    model = ModelShape(weights, 2560, 36, 9728, 32, 8, 128, 152_936, vision)
    assert model.num_parameters == pytest.approx(4.44e9, rel=1e-3)
    learner = learner_estimate(RunSizes.of(run, model), Device.CUDA, TransportKind.NCCL)
    extra = sum(
        size
        for name, size in learner.parts.items()
        if "images" in name or "masks" in name or "CUDA" in name or "temporary" in name
    )
    assert learner.total - extra < 79 * GIB
    exact = 18 * model.num_parameters
    assert learner.least == math.floor(exact + (learner.total - exact) / 1.25)
    needs = Needs(learner, 1)
    small, too_small, card, large = (
        DeviceMemory(Device.CUDA, size)
        for size in (40 * GIB, learner.least - 1, learner.least, 141 * 10**9)
    )
    assert large.problems(needs) == large.warnings(needs) == []
    assert card.problems(needs) == too_small.warnings(needs) == []
    assert learner.least > 79.2 * GIB, "of an H100 of 80 GB"
    (warning,) = card.warnings(needs)
    assert "can be used (8% are reserved)" in warning
    assert warning.endswith("This is an estimate, so the run starts anyway")
    assert small.warnings(needs) == []
    (problem,) = small.problems(needs)
    assert problem.startswith("learner.gpus: learner rank: ") and "anyway" not in problem


def test_the_cache_holds_as_many_sequences_as_its_bytes_allow(sizes):
    run = sizes(rollout_matching__vllm__kv_cache_memory_bytes=2**20)
    engine = engine_estimate(run, 1, Device.CUDA, 16 * GIB)
    assert engine.parts["key-value cache"] == 2**20
    # Keys and values, 3 layers, 2 heads of 32, float32.
    assert sequences_in_cache(run, engine, 1) == 2**20 // (2 * 3 * 2 * 32 * 4 * 512)
    fraction = engine_estimate(sizes(), 1, Device.CUDA, 16 * GIB)
    assert fraction.total == int(0.85 * 16 * GIB)


@pytest.mark.parametrize("devices", [1, 2])
def test_on_cpu_a_cache_without_a_size_holds_the_longest_sequences_that_are_decoded_at_a_time(
    config, shape, devices
):
    run = config()
    sizes = RunSizes.of(run, shape)
    engine = engine_estimate(sizes, devices, Device.CPU, 16 * GIB)
    asked = run.rollout_matching.decode_batch_size * devices
    assert asked <= sequences_in_cache(sizes, engine, devices) <= asked + 1

    def cache_bytes(gpus):
        placement = plan_placement(run, [Resources(cpus=16, gpus=gpus)])
        return settings_of_run(run, placement, ImageNeeds()).kv_cache_memory_bytes

    of_one_device = engine_estimate(sizes, 1, Device.CPU, 0)
    assert cache_bytes(gpus=0) == of_one_device.parts["key-value cache"]
    assert cache_bytes(gpus=4) is None


def test_a_folder_that_holds_no_weights_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    unread = rf"model\.path: {tmp_path} has no model\.safetensors, .*; give a folder that save_pre"
    with pytest.raises(ConfigError, match=unread):
        ModelShape.read(tmp_path)


# A rank and an engine together

ROW = "activations of a row of 9 tokens"
LEARNER_PARTS = {"weights": 10, "master weights": 20, "gradients": 20, "optimizer": 40, ROW: 30}
LEARNER = Estimate("learner rank", LEARNER_PARTS)
ENGINE = Estimate("engine device", {"weights": 10, "key-value cache": 50})
OFFLOAD = {"enabled": True, "offload_model": True, "offload_optimizer": True}


@pytest.mark.parametrize(
    ("vllm", "offload", "total"),
    [
        ({"sleep": False}, {}, 180),  # everything at once
        ({}, {}, 150),  # the engine sleeps while there are activations
        ({}, OFFLOAD, 120),  # turns, of which learning is the larger
        ({}, {**OFFLOAD, "offload_optimizer": False}, 150),  # full weights are read where they lie
        ({}, {**OFFLOAD, "offload_model": False}, 120),
        ({"kv_cache_memory_bytes": 1, "sleep": False}, OFFLOAD, 180),
        ({}, {**OFFLOAD, "enabled": False}, 150),
    ],
)
def test_a_learner_and_an_engine_on_one_gpu_need_the_most_that_either_leaves_there_beside_the_other(
    sizes, vllm, offload, total
):
    colocate = {"rollout_matching__vllm": {"mode": "colocate", **vllm}, **NO_QUEUE}
    run = sizes(**colocate, rollout_matching__offload=offload)
    assert shared_device_estimate(run, LEARNER, ENGINE).total == total


def test_an_engine_that_sleeps_keeps_what_cuda_takes_and_both_have_a_bucket_while_weights_pass(
    sizes, shape
):
    run = sizes(**COLOCATE)
    engine = replace(ENGINE, parts={**ENGINE.parts, "CUDA context": 7})
    learner = replace(LEARNER, parts={**LEARNER_PARTS, "CUDA context": 7})
    long_row = replace(learner, parts={**learner.parts, ROW: 10**12})
    learning = shared_device_estimate(run, long_row, engine)
    assert learning.total == 10**12 + 90 + 7 + 7
    working = shared_device_estimate(run, learner, engine, TransportKind.IPC)
    assert working.parts[BUCKETS] == 4 * shape.num_parameters
    assert working.total == 90 + 60 + 7 + 7 + 4 * shape.num_parameters


@pytest.mark.parametrize(
    ("dtype", "head_dtype", "of_logit", "with_top"),
    [("bfloat16", "model", 9, 12), ("bfloat16", "float32", 10, 16), ("float32", "model", 10, 16)],
)
def test_the_top_of_a_reference_takes_the_logits_of_its_tokens_once_more(
    demo_lm, tmp_path, dtype, head_dtype, of_logit, with_top
):
    of_model = {"model__dtype": dtype, "model__head_dtype": head_dtype}
    shape = replace(ModelShape.read(demo_lm), vocabulary=10**6)

    def row_bytes(reference):
        run = trajectory_config(demo_lm, tmp_path, reference=reference, **of_model)
        parts = learner_estimate(RunSizes.of(run, shape)).parts
        return parts["temporary tensors of a backward"], run

    top = {"estimator": "top", "top_tokens": 20}
    plain, run = row_bytes({"estimator": "k3"})
    more = row_bytes(top)[0] - plain
    positions = min(LOGIT_CHUNK, run.global_max_length)
    assert more == positions * shape.vocabulary * (with_top - of_logit)


@pytest.mark.parametrize("moves_model", [True, False])
def test_a_reference_leaves_the_gpu_to_the_engine_where_models_do(sizes, moves_model):
    run = sizes(**COLOCATE, rollout_matching__offload=OFFLOAD | {"offload_model": moves_model})
    learner = replace(LEARNER, parts={**LEARNER_PARTS, "reference model": 10**6})
    engine = replace(ENGINE, parts={"weights": 10**7})
    working = shared_device_estimate(run, learner, engine)
    assert ("reference model" in working.parts) is not moves_model


def test_weights_that_are_made_for_a_sync_need_room_beside_the_engine(sizes, shape):
    name = "weights made for the sync"
    adapter = {"kind": "dora", "rank": 4, "target_modules": ["q_proj"]}
    merged = shared_device_estimate(sizes(**COLOCATE, model__adapter=adapter), LEARNER, ENGINE)
    # 3 layers, hidden 128, 4 heads of 32, float32.
    assert merged.parts[name] == 3 * 128 * 4 * 32 * 4
    assert name in merged.describe()
    sharded = sizes(**COLOCATE, learner__world_size=2, learner__parallel="fsdp")
    shards = shared_device_estimate(sharded, LEARNER, ENGINE)
    # Gathered one by one: one is copied, and the next one is made.
    assert shards.parts[name] == 2 * max(map(math.prod, shape.parameters.values())) * 4


CACHE_KEY = "rollout_matching.vllm.kv_cache_memory_bytes"
SHARED = Estimate("learner rank and engine on one GPU, while the engine works", {"weights": 150})


@pytest.mark.parametrize(
    ("total", "needs", "keys"),
    [
        (125, Needs(LEARNER, 1, ENGINE, 1, SHARED), ["learner.gpus"]),
        (164, Needs(LEARNER, 1, ENGINE, 1, SHARED), []),
        (125, Needs(LEARNER, 1, ENGINE, 1), []),
        (40, Needs(LEARNER, 1, ENGINE, 1), ["learner.gpus", CACHE_KEY]),
        (40, Needs(LEARNER, 1), ["learner.gpus"]),
    ],
)
def test_what_a_gpu_cannot_hold_is_refused_together_where_it_is_shared_and_else_alone(
    total, needs, keys
):
    card = DeviceMemory(Device.CUDA, total)
    problems = card.problems(needs)
    assert [problem.split(": ")[0] for problem in problems] == keys
    assert all(SHARED.what in problem for problem in problems if needs.shared is not None)
    if total == 164:
        assert card.warnings(needs) == []


@pytest.mark.parametrize("synced", [0, 70])
def test_on_cpu_all_processes_and_the_weights_of_a_sync_share_the_machine(synced):
    needs = Needs(LEARNER, 2, ENGINE, 3, synced=synced)
    total = 2 * 120 + 3 * 60 + synced
    enough, tight, half = (
        DeviceMemory(Device.CPU, size) for size in (total, total - 1, total // 2)
    )
    assert enough.problems(needs) == enough.warnings(needs) == []
    assert tight.problems(needs) == half.warnings(needs) == []
    for (message,) in (tight.warnings(needs), half.problems(needs)):
        assert message.startswith("cluster.address: the processes need about")
        assert ("weights in shared memory" in message) == bool(synced)


def test_exact_parts_of_all_processes_that_exceed_the_machine_are_refused():
    exact = Estimate("learner rank", {"weights": 60, "optimizer": 40, "activations": 10})
    needs = Needs(exact, 2, Estimate("engine device", {"weights": 20, "key-value cache": 10}), 1)
    assert DeviceMemory(Device.CPU, 245).problems(needs)
    tried = DeviceMemory(Device.CPU, 246)
    assert not tried.problems(needs) and len(tried.warnings(needs)) == 1


ADAPTER = {"mode": "actors", "enable_lora": True}


def at(url):
    return {"mode": "server", "server": {"servers": [{"base_url": url, "group_port": 0}]}}


@pytest.mark.parametrize(
    ("vllm", "is_shared"),
    [
        ({"mode": "actors"}, True),
        (ADAPTER | {"sync": {"mode": "adapter"}}, True),
        (ADAPTER | {"sync": {"mode": "adapter", "fallback_to_full": False}}, False),
        (at("http://127.0.0.1:1"), True),
        (at("http://10.0.0.2:1"), False),
        ({"mode": "colocate"}, False),
    ],
)
def test_weights_are_shared_with_engines_of_the_same_machine_that_may_take_all_of_them(
    config, shape, vllm, is_shared
):
    changes = {"rollout_matching__vllm": vllm}
    if "enable_lora" in vllm:
        changes["model__adapter"] = {"kind": "lora", "rank": 4}
    run = config(**changes, **NO_QUEUE)
    placement = plan_placement(run, [Resources(cpus=8, gpus=0)])
    synced = synced_bytes(RunSizes.of(run, shape), placement)
    assert synced == (4 * shape.num_parameters if is_shared else 0)


@pytest.mark.parametrize(
    ("own", "files", "limits"),
    [
        ("0::/\n", {"memory.max": "1000\n"}, [1000]),
        (
            "0::/a/b\n",
            {"memory.max": "max\n", "a/memory.max": "700\n", "a/b/memory.max": "max\n"},
            [700],
        ),
        ("0::/not/mounted/here\n", {"memory.max": "500\n"}, [500]),
        (
            "4:memory:/x\n3:cpuset:/x\n0::/\n",
            {"memory/x/memory.limit_in_bytes": "300\n", "memory/memory.limit_in_bytes": "9000\n"},
            [300, 9000],
        ),
        ("0::/\n", {}, []),
    ],
)
def test_a_containers_limit_is_read_from_every_control_group_around_the_process(
    tmp_path, monkeypatch, own, files, limits
):
    """Of either version of control groups; without them there is no limit."""
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr("learner.host_memory.OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr("learner.host_memory.CGROUPS", tmp_path / "cgroup")
    assert [limit for _, limit in container_limits()] == limits
    memory = device_memory(Device.CPU)
    assert memory is not None
    assert memory.total == min(limits) if limits else memory.total > GIB
