"""The estimate of a run's memory, against the model itself."""

import math
from dataclasses import replace

import pytest
import torch
from config_support import configuration
from safetensors.torch import save_file
from tiny_qwen import FAMILIES, make_stock_model

from launch.add_coord_tokens import AddOptions, make_coord_model
from launch.checks.data import ImageNeeds
from launch.checks.memory import (
    CUDA_CONTEXT,
    DeviceMemory,
    Estimate,
    ModelShape,
    Needs,
    VisionShape,
    container_limits,
    device_memory,
    engine_estimate,
    learner_estimate,
    num_trainable,
    sequences_in_cache,
    shared_device_estimate,
    synced_bytes,
)
from launch.runtime.engine_settings import settings_of_run
from launch.runtime.placement import Resources, plan_placement
from learner.model.loading import load_model
from shared.errors import ConfigError
from shared.weight_sync.transports import Device, TransportKind


@pytest.fixture
def config(demo_checkpoint, tmp_path):
    return lambda **changes: configuration(
        demo_checkpoint, tmp_path / "data", tmp_path / "run", global_max_length=512, **changes
    )


@pytest.fixture(scope="module")
def shape(demo_checkpoint):
    return ModelShape.read(demo_checkpoint)


def engine_parts(run, shape, device=Device.CUDA, transport=TransportKind.GLOO):
    """Bytes of an engine over one device of 16 GiB."""
    return engine_estimate(run, shape, 1, device, 2**34, transport).parts


@pytest.fixture(scope="module", params=FAMILIES)
def stock(request, tmp_path_factory):
    """A checkpoint of each family, with the tensor names of its own files."""
    folder = tmp_path_factory.mktemp(request.param)
    make_coord_model(
        AddOptions(model=make_stock_model(folder / "stock", request.param), out=folder / "model")
    )
    return folder / "model"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"training__parts": {"vision_tower": {"frozen": True}}},
        {"training__parts": {"vision_tower": {"frozen": True}, "aligner": {"frozen": True}}},
        {"model__adapter": {"kind": "lora", "rank": 4}},
        {"model__adapter": {"kind": "dora", "rank": 4}},
    ],
)
def test_weights_gradients_and_optimizer_state_are_exact(stock, tmp_path, changes):
    run, shape = (
        configuration(stock, tmp_path / "data", tmp_path / "run", **changes),
        ModelShape.read(stock),
    )
    model = load_model(run, torch.device("cpu")).model
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert num_trainable(run, shape) == trained
    parts = learner_estimate(run, shape).parts
    assert parts["gradients"] == 4 * trained
    assert parts["optimizer"] == 8 * trained
    if "model__adapter" not in changes:
        assert parts["weights"] == sum(
            parameter.numel() * parameter.element_size() for parameter in model.parameters()
        )


@pytest.mark.slow
def test_bfloat16_halves_the_weights_and_adds_float32_masters(config, shape):
    single, half = (
        learner_estimate(config(), shape).parts,
        learner_estimate(config(model__dtype="bfloat16"), shape).parts,
    )
    assert half["weights"] * 2 == half["master weights"] == single["weights"]
    assert single["master weights"] == 0
    assert half["optimizer"] == single["optimizer"]


def test_sharding_divides_all_but_the_activations(config, shape):
    whole, shared = (
        learner_estimate(config(learner__world_size=2, learner__parallel=parallel), shape).parts
        for parallel in ("ddp", "fsdp")
    )
    divided = {"weights", "master weights", "gradients", "optimizer"}
    assert divided < set(whole)
    for name in whole:
        assert shared[name] == (whole[name] // 2 if name in divided else whole[name])


def test_recomputing_activations_keeps_one_layer_and_the_inputs_of_the_others(config, shape):
    kept, recomputed = (
        [
            size
            for name, size in learner_estimate(
                config(model__gradient_checkpointing=value), shape
            ).parts.items()
            if name.startswith("activations")
        ]
        for value in (False, True)
    )
    assert len(kept) == 2, "of the language model and of the vision tower"
    assert all(less < more for less, more in zip(recomputed, kept, strict=True))


def test_the_vision_tower_keeps_its_layers_for_every_patch_of_a_row_of_images(config, shape):
    # Hidden 128, 3 layers, intermediate 512, 4 patches to a token, float32, rows of 512 tokens.
    layer = (10 * 128 + 4 * 512) * 512 * 4 * 4

    def activations(of=shape, **changes):
        return learner_estimate(config(**changes), of).parts["activations of its images"]

    assert activations() == 3 * layer
    assert activations(model__gradient_checkpointing=True) == 3 * 128 * 512 * 4 * 4 + layer
    # Frozen, it keeps nothing for a backward.
    assert activations(training__parts={"vision_tower": {"frozen": True}}) == layer
    assert activations(model__adapter={"kind": "lora", "rank": 4}) == layer
    assert activations(replace(shape, vision=None)) == 0


def test_with_attention_by_mask_a_packed_row_has_one_of_its_length_squared_twice_and_its_keys_and_values_repeated(
    config, shape
):
    def masks(**changes):
        return learner_estimate(config(**changes), shape).parts["attention masks"]

    # One byte a pair, and a number that is added; 4 heads of 32; 3 layers.
    pairs = 512 * 512 * (1 + 4)
    repeated = 2 * 4 * 32 * 512 * 4
    assert masks(model__attention="sdpa") == pairs + 3 * repeated
    recomputed = masks(model__attention="sdpa", model__gradient_checkpointing=True)
    assert recomputed == pairs + repeated
    assert masks(model__attention="sdpa", training__packing=False) == 0
    assert masks() == 0, "segment by segment"


@pytest.mark.parametrize("is_packed", [True, False])
def test_eager_attention_keeps_the_softmax_of_every_head_of_each_layer_that_is_not_recomputed(
    config, shape, is_packed
):
    # 4 heads of 32 over rows of 512 tokens, in float32 and once more in the model's dtype.
    of_layer = 4 * 512 * 512 * (4 + 4) + 2 * 4 * 32 * 512 * 4
    for recomputes, layers in ((False, 3), (True, 1)):
        run = config(
            model__attention="eager",
            model__gradient_checkpointing=recomputes,
            training__packing=is_packed,
        )
        assert (
            learner_estimate(run, shape).parts["attention masks"]
            == 512 * 512 * (1 + 4) + layers * of_layer
        )
    half = config(model__attention="eager", model__dtype="bfloat16", training__packing=is_packed)
    softmax, repeated = 4 * 512 * 512 * (2 + 4), 2 * 4 * 32 * 512 * 2
    assert learner_estimate(half, shape).parts["attention masks"] == 512 * 512 * (1 + 2) + 3 * (
        softmax + repeated
    )


def test_an_engine_may_be_given_any_fraction_of_a_gpu_that_leaves_room_for_a_syncs_buckets(
    config, shape
):
    """vLLM's fraction holds what its process needs, and what allocators leave unused."""
    card = 80 * 2**30
    there = DeviceMemory(Device.CUDA, card)
    small = Estimate("learner rank", {"weights": 1})

    def told(**vllm):
        run = config(rollout_matching__vllm={"mode": "actors", **vllm})
        needs = Needs(
            small, 1, engine_estimate(run, shape, 1, Device.CUDA, card, TransportKind.NCCL), 1
        )
        return there.problems(needs), there.warnings(needs)

    assert [told(gpu_memory_utilization=fraction) for fraction in (0.85, 0.90, 0.92)] == [
        ([], [])
    ] * 3
    (problem,), warnings = told(gpu_memory_utilization=1.0)
    assert not warnings
    assert (
        problem.startswith("rollout_matching.vllm.gpu_memory_utilization: engine device: 80.0")
        and "a GPU has 80.00 GiB" in problem
    )
    # Nobody but the reserve holds the rest of an engine whose cache is given.
    assert told(kv_cache_memory_bytes=70 * 2**30) == ([], [])
    problems, (warning,) = told(kv_cache_memory_bytes=75 * 2**30)
    assert not problems
    assert (
        warning.startswith("rollout_matching.vllm.kv_cache_memory_bytes: ")
        and "8% are reserved" in warning
    )


@pytest.mark.parametrize(("mode", "most"), [("actors", 2048), ("colocate", 16384)])
def test_an_engine_needs_a_layers_activations_in_a_forward_of_what_vllm_batches(
    config, shape, mode, most
):
    """In the vision tower: hidden 128, intermediate 512, 4 patches to a token, float32."""

    def activations(size, of):
        run = config(
            rollout_matching__vllm={"mode": mode},
            rollout_matching__decode_batch_size=size,
            stage2_ab__channel_b__enable_pipeline=False,
        )
        return engine_parts(run, of)["activations of a forward"]

    assert activations(64, shape) == (10 * 128 + 4 * 512) * 4 * most * 4
    text = replace(shape, vision=None)
    assert activations(1, text) == text.layer_numbers_per_token * 512 * 4, "of one sequence"


def test_on_a_gpu_cuda_takes_its_part_of_every_process(config, shape):
    learner = {
        device: learner_estimate(config(), shape, device).parts["CUDA context"] for device in Device
    }
    assert learner == {Device.CPU: 0, Device.CUDA: CUDA_CONTEXT}
    given = config(rollout_matching__vllm__kv_cache_memory_bytes=2**20)
    assert engine_parts(given, shape)["CUDA context"] == CUDA_CONTEXT
    assert engine_parts(given, shape, Device.CPU)["CUDA context"] == 0


def test_both_ends_of_a_sync_between_gpus_hold_copies_of_buckets(config, shape):
    """At most 256 MiB and the largest tensor; a small model fits into one. The sender has no row
    meanwhile."""
    run = config()
    everything = 4 * shape.num_parameters
    for transport, device, expected in (
        (TransportKind.NCCL, Device.CUDA, 2 * everything),
        (TransportKind.IPC, Device.CUDA, everything),
        (TransportKind.GLOO, Device.CPU, 0),
    ):
        assert engine_parts(run, shape, device, transport)["buckets of a sync"] == expected
    small = config(rollout_matching__vllm__sync={"bucket_bytes": 1 << 16})
    largest = max(4 * math.prod(sizes) for sizes in shape.parameters.values())
    buckets = engine_parts(small, shape, transport=TransportKind.NCCL)["buckets of a sync"]
    assert buckets == 2 * ((1 << 16) + largest)
    parts = learner_estimate(run, shape, Device.CUDA, TransportKind.NCCL).parts
    assert parts["buckets of a sync"] == 0, "the row's activations are more"
    many = replace(
        shape,
        parameters=dict(shape.parameters)
        | {f"model.language_model.layers.{i}.w.weight": (10**9,) for i in (7, 8)},
    )
    parts = learner_estimate(run, many, Device.CUDA, TransportKind.NCCL).parts
    of_a_row = sum(
        size for name, size in parts.items() if name.startswith(("activations", "attention"))
    )
    assert parts["buckets of a sync"] == 2 * ((256 << 20) + 4 * 10**9) - of_a_row


def test_a_learner_of_78_gib_is_warned_of_on_a_gpu_of_80_and_refused_on_one_of_40(config, shape):
    """Qwen3-VL-4B with float32 masters, rows of 12,000 tokens: what CUDA and the vision tower take
    has no room there."""
    run = config(model__dtype="bfloat16", model__gradient_checkpointing=True).model_copy(
        update={"global_max_length": 12_000}
    )
    matrices = {
        f"model.language_model.layers.{layer}.mlp.up_proj.weight": (2560, 43_965)
        for layer in range(36)
    }
    large = ModelShape(
        matrices | {"model.language_model.embed_tokens.weight": (152_936, 2560)},
        2560,
        36,
        9728,
        32,
        8,
        128,
        152_936,
        VisionShape(1024, 24, 4096, 4),
    )
    learner = learner_estimate(run, large, Device.CUDA, TransportKind.NCCL)
    assert large.num_parameters == pytest.approx(4.44e9, rel=1e-3)
    assert (
        sum(
            size
            for name, size in learner.parts.items()
            if "images" not in name and "masks" not in name and "CUDA" not in name
        )
        < 79 * 2**30
    )
    card, large, small = (
        DeviceMemory(Device.CUDA, size) for size in (80 * 2**30, 141 * 10**9, 40 * 2**30)
    )
    (warning,) = card.warnings(Needs(learner, 1))
    assert (
        "of a GPU's 80.00 GiB 73.60 GiB can be planned (8% are reserved)" in warning
        and warning.endswith("It is an estimate, and tried")
    )
    assert (
        card.problems(Needs(learner, 1))
        == small.warnings(Needs(learner, 1))
        == large.problems(Needs(learner, 1))
        == large.warnings(Needs(learner, 1))
        == []
    )
    (problem,) = small.problems(Needs(learner, 1))
    assert problem.startswith("learner.gpus: learner rank: ") and "tried" not in problem


def test_the_cache_holds_as_many_sequences_as_its_bytes_allow(config, shape):
    run = config(rollout_matching__vllm__kv_cache_memory_bytes=2**20)
    engine = engine_estimate(run, shape, 1, Device.CUDA, 2**34)
    assert engine.parts["key-value cache"] == 2**20
    # Keys and values, 3 layers, 2 heads of 32, float32.
    assert sequences_in_cache(run, shape, engine, 1) == 2**20 // (2 * 3 * 2 * 32 * 4 * 512)
    assert engine_estimate(config(), shape, 1, Device.CUDA, 2**34).total == int(0.85 * 2**34)


@pytest.mark.parametrize("devices", [1, 2])
def test_on_cpu_a_cache_without_a_size_holds_the_longest_sequences_that_are_decoded_at_a_time(
    config, shape, devices
):
    run = config()
    engine = engine_estimate(run, shape, devices, Device.CPU, 2**34)
    fit, asked = (
        sequences_in_cache(run, shape, engine, devices),
        run.rollout_matching.decode_batch_size * devices,
    )
    assert asked <= fit <= asked + 1
    settings = settings_of_run(run, plan_placement(run, [Resources(cpus=16, gpus=0)]), ImageNeeds())
    assert (
        settings.kv_cache_memory_bytes
        == engine_estimate(run, shape, 1, Device.CPU, 0).parts["key-value cache"]
    )
    on_gpus = plan_placement(run, [Resources(cpus=16, gpus=4)])
    assert settings_of_run(run, on_gpus, ImageNeeds()).kv_cache_memory_bytes is None


def test_a_folder_that_holds_no_weights_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ConfigError,
        match=(
            rf"model\.path: {tmp_path} cannot be read \(.*\); give a folder that save_pretrained"
            r" wrote"
        ),
    ):
        ModelShape.read(tmp_path)


def test_a_model_of_another_family_is_refused_by_the_name_of_a_tensor(demo_checkpoint, tmp_path):
    (tmp_path / "config.json").write_text((demo_checkpoint / "config.json").read_text())
    save_file({"model.decoder.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ConfigError,
        match=(
            r"model\.path: .* holds model\.decoder\.weight, which no Qwen2\.5-VL or Qwen3-VL has;"
            r" choose"
        ),
    ):
        ModelShape.read(tmp_path)


LEARNER = Estimate(
    "learner rank",
    {
        "weights": 10,
        "master weights": 20,
        "gradients": 20,
        "optimizer": 40,
        "activations of a row of 9 tokens": 30,
    },
)
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
    config, shape, vllm, offload, total
):
    run = config(
        rollout_matching__vllm={"mode": "colocate", **vllm},
        rollout_matching__offload=offload,
        stage2_ab__channel_b__enable_pipeline=False,
    )
    assert shared_device_estimate(run, shape, LEARNER, ENGINE).total == total


def test_an_engine_that_sleeps_keeps_what_cuda_takes_and_both_have_a_bucket_while_weights_pass(
    config, shape
):
    run = config(
        rollout_matching__vllm={"mode": "colocate"}, stage2_ab__channel_b__enable_pipeline=False
    )
    learner, engine = (
        Estimate(one.what, {**one.parts, "CUDA context": 7}) for one in (LEARNER, ENGINE)
    )
    learning = shared_device_estimate(
        run,
        shape,
        replace(learner, parts={**learner.parts, "activations of a row of 9 tokens": 10**12}),
        engine,
    )
    assert learning.total == 10**12 + 90 + 7 + 7
    working = shared_device_estimate(run, shape, learner, engine, TransportKind.IPC)
    assert working.parts["buckets of a sync"] == 4 * shape.num_parameters
    assert working.total == 90 + 60 + 7 + 7 + 4 * shape.num_parameters


def test_weights_that_are_made_for_a_sync_need_room_beside_the_engine(config, shape):
    colocate = {
        "rollout_matching__vllm": {"mode": "colocate"},
        "stage2_ab__channel_b__enable_pipeline": False,
    }
    run = config(
        **colocate, model__adapter={"kind": "dora", "rank": 4, "target_modules": ["q_proj"]}
    )
    merged = shared_device_estimate(run, shape, LEARNER, ENGINE)
    # 3 layers, hidden 128, 4 heads of 32, float32.
    assert merged.parts["weights made for the sync"] == 3 * 128 * 4 * 32 * 4
    assert "weights made for the sync" in merged.describe()
    shards = shared_device_estimate(
        config(**colocate, learner__world_size=2, learner__parallel="fsdp"), shape, LEARNER, ENGINE
    )
    assert shards.parts["weights made for the sync"] == shape.num_parameters * 4


def test_what_a_gpu_cannot_hold_is_refused_together_where_it_is_shared_and_else_alone():
    shared = Estimate(
        "learner rank and engine on one GPU, while the engine works", {"weights": 150}
    )
    small, middle, large = (DeviceMemory(Device.CUDA, size) for size in (40, 125, 164))
    together, apart = Needs(LEARNER, 1, ENGINE, 1, shared), Needs(LEARNER, 1, ENGINE, 1)
    assert [problem.split(": ")[0] for problem in middle.problems(together)] == ["learner.gpus"]
    assert "learner rank and engine on one GPU" in middle.problems(together)[0]
    assert middle.problems(apart) == large.problems(together) == large.warnings(together) == []
    assert [problem.split(": ")[0] for problem in small.problems(apart)] == [
        "learner.gpus",
        "rollout_matching.vllm.kv_cache_memory_bytes",
    ]
    assert [problem.split(": ")[0] for problem in small.problems(Needs(LEARNER, 1))] == [
        "learner.gpus"
    ]


def test_on_cpu_all_processes_share_the_machine():
    needs = Needs(LEARNER, 2, ENGINE, 3)
    enough, tight, half = (DeviceMemory(Device.CPU, size) for size in (420, 419, 210))
    assert (
        enough.problems(needs)
        == enough.warnings(needs)
        == tight.problems(needs)
        == half.warnings(needs)
        == []
    )
    for (told,) in (tight.warnings(needs), half.problems(needs)):
        assert told.startswith("cluster.address: the processes need about")


def test_on_cpu_the_weights_that_a_sync_shares_are_counted_too():
    needs = Needs(LEARNER, 2, ENGINE, 3, synced=70)
    total = 2 * LEARNER.total + 3 * ENGINE.total + 70
    assert DeviceMemory(Device.CPU, total).warnings(needs) == []
    (warning,) = DeviceMemory(Device.CPU, total - 1).warnings(needs)
    assert "weights in shared memory" in warning


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ({"mode": "actors"}, True),
        ({"mode": "actors", "enable_lora": True, "sync": {"mode": "adapter"}}, True),
        (
            {
                "mode": "actors",
                "enable_lora": True,
                "sync": {"mode": "adapter", "fallback_to_full": False},
            },
            False,
        ),
        (
            {
                "mode": "server",
                "server": {"servers": [{"base_url": "http://127.0.0.1:1", "group_port": 0}]},
            },
            True,
        ),
        (
            {
                "mode": "server",
                "server": {"servers": [{"base_url": "http://10.0.0.2:1", "group_port": 0}]},
            },
            False,
        ),
        ({"mode": "colocate"}, False),
    ],
)
def test_weights_are_shared_with_engines_of_the_same_machine_that_may_take_all_of_them(
    config, shape, backend, expected
):
    changes = {"model__adapter": {"kind": "lora", "rank": 4}} if "enable_lora" in backend else {}
    run = config(
        rollout_matching__vllm=backend,
        stage2_ab__channel_b__enable_pipeline=backend["mode"] != "colocate",
        **changes,
    )
    synced = synced_bytes(run, plan_placement(run, [Resources(cpus=8, gpus=0)]), shape)
    assert synced == (4 * shape.num_parameters if expected else 0)


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
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text)
    monkeypatch.setattr("launch.checks.memory.OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr("launch.checks.memory.CGROUPS", tmp_path / "cgroup")
    assert list(container_limits()) == limits
    there = device_memory(Device.CPU)
    assert there is not None and (there.total == min(limits) if limits else there.total > 2**30)
