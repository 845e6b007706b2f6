"""The estimate of a run's memory, against the model itself."""

import pytest
import torch
from config_support import configuration
from safetensors.torch import save_file
from tiny_qwen import FAMILIES, make_stock_model

from launch.add_coord_tokens import AddOptions, make_coord_model
from launch.data_checks import ImageNeeds
from launch.device_memory import DeviceMemory, Needs, container_limits, device_memory
from launch.memory_estimate import (
    Estimate,
    ModelShape,
    engine_estimate,
    learner_estimate,
    num_trainable,
    sequences_in_cache,
    shared_device_estimate,
    synced_bytes,
)
from launch.placement import Resources, plan_placement
from launch.run_engines import settings_of_run
from learner.loading import load_model
from shared.errors import ConfigError
from shared.transports import Device


@pytest.fixture
def config(demo_checkpoint, tmp_path):
    return lambda **changes: configuration(demo_checkpoint, tmp_path / "data", tmp_path / "run", global_max_length=512, **changes)


@pytest.fixture(scope="module")
def shape(demo_checkpoint):
    return ModelShape.read(demo_checkpoint)


@pytest.fixture(scope="module", params=FAMILIES)
def stock(request, tmp_path_factory):
    """A checkpoint of each family, with the tensor names of its own files."""
    folder = tmp_path_factory.mktemp(request.param)
    make_coord_model(AddOptions(model=make_stock_model(folder / "stock", request.param), out=folder / "model"))
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
    run, shape = configuration(stock, tmp_path / "data", tmp_path / "run", **changes), ModelShape.read(stock)
    model = load_model(run, torch.device("cpu")).model
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert num_trainable(run, shape) == trained
    parts = learner_estimate(run, shape).parts
    assert parts["gradients"] == 4 * trained
    assert parts["optimizer"] == 8 * trained
    if "model__adapter" not in changes:
        assert parts["weights"] == sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def test_bfloat16_halves_the_weights_and_adds_float32_masters(config, shape):
    single, half = learner_estimate(config(), shape).parts, learner_estimate(config(model__dtype="bfloat16"), shape).parts
    assert half["weights"] * 2 == half["master weights"] == single["weights"]
    assert single["master weights"] == 0
    assert half["optimizer"] == single["optimizer"]


def test_sharding_divides_all_but_the_activations(config, shape):
    whole, shared = (learner_estimate(config(learner__world_size=2, learner__parallel=parallel), shape).parts for parallel in ("ddp", "fsdp"))
    for name in whole:
        assert shared[name] == (whole[name] if name.startswith("activations") else whole[name] // 2)


def test_recomputing_activations_keeps_one_layer_and_the_inputs_of_the_others(config, shape):
    (kept,), (recomputed,) = (
        [size for name, size in learner_estimate(config(model__gradient_checkpointing=value), shape).parts.items() if name.startswith("activations")]
        for value in (False, True)
    )
    assert recomputed < kept


def test_the_cache_holds_as_many_sequences_as_its_bytes_allow(config, shape):
    run = config(rollout_matching__vllm__kv_cache_memory_bytes=2**20)
    engine = engine_estimate(run, shape, 1, Device.CUDA, 2**34)
    assert engine.parts["key-value cache"] == 2**20
    # Keys and values, 3 layers, 2 heads of 32, float32.
    assert sequences_in_cache(run, shape, engine, 1) == 2**20 // (2 * 3 * 2 * 32 * 4 * 512)
    assert engine_estimate(config(), shape, 1, Device.CUDA, 2**34).total == int(0.85 * 2**34)


@pytest.mark.parametrize("devices", [1, 2])
def test_on_cpu_a_cache_without_a_size_holds_the_longest_sequences_that_are_decoded_at_a_time(config, shape, devices):
    run = config()
    engine = engine_estimate(run, shape, devices, Device.CPU, 2**34)
    fit, asked = sequences_in_cache(run, shape, engine, devices), run.rollout_matching.decode_batch_size * devices
    assert asked <= fit <= asked + 1
    settings = settings_of_run(run, plan_placement(run, [Resources(cpus=16, gpus=0)]), ImageNeeds())
    assert settings.kv_cache_memory_bytes == engine_estimate(run, shape, 1, Device.CPU, 0).parts["key-value cache"]
    on_gpus = plan_placement(run, [Resources(cpus=16, gpus=4)])
    assert settings_of_run(run, on_gpus, ImageNeeds()).kv_cache_memory_bytes is None


def test_a_folder_that_holds_no_weights_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"model\.path: {tmp_path} cannot be read \(.*\); give a folder that save_pretrained wrote"):
        ModelShape.read(tmp_path)


def test_a_model_of_another_family_is_refused_by_the_name_of_a_tensor(demo_checkpoint, tmp_path):
    (tmp_path / "config.json").write_text((demo_checkpoint / "config.json").read_text())
    save_file({"model.decoder.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.path: .* holds model\.decoder\.weight, which no Qwen2\.5-VL or Qwen3-VL has; choose"):
        ModelShape.read(tmp_path)


LEARNER = Estimate("learner rank", {"weights": 10, "master weights": 20, "gradients": 20, "optimizer": 40, "activations of a row of 9 tokens": 30})
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
def test_a_learner_and_an_engine_on_one_gpu_need_the_most_that_either_leaves_there_beside_the_other(config, shape, vllm, offload, total):
    run = config(rollout_matching__vllm={"mode": "colocate", **vllm}, rollout_matching__offload=offload, stage2_ab__channel_b__enable_pipeline=False)
    assert shared_device_estimate(run, shape, LEARNER, ENGINE).total == total


def test_weights_that_are_made_for_a_sync_need_room_beside_the_engine(config, shape):
    colocate = {"rollout_matching__vllm": {"mode": "colocate"}, "stage2_ab__channel_b__enable_pipeline": False}
    run = config(**colocate, model__adapter={"kind": "dora", "rank": 4, "target_modules": ["q_proj"]})
    merged = shared_device_estimate(run, shape, LEARNER, ENGINE)
    # 3 layers, hidden 128, 4 heads of 32, float32.
    assert merged.parts["weights made for the sync"] == 3 * 128 * 4 * 32 * 4
    assert "weights made for the sync" in merged.describe()
    shards = shared_device_estimate(config(**colocate, learner__world_size=2, learner__parallel="fsdp"), shape, LEARNER, ENGINE)
    assert shards.parts["weights made for the sync"] == shape.num_parameters * 4


def test_what_a_gpu_cannot_hold_is_refused_together_where_it_is_shared_and_else_alone():
    shared = Estimate("learner rank and engine on one GPU, while the engine works", {"weights": 150})
    small, middle, large = (DeviceMemory(Device.CUDA, size) for size in (50, 130, 150))
    together, apart = Needs(LEARNER, 1, ENGINE, 1, shared), Needs(LEARNER, 1, ENGINE, 1)
    assert [problem.split(": ")[0] for problem in middle.problems(together)] == ["learner.gpus"]
    assert "learner rank and engine on one GPU" in middle.problems(together)[0]
    assert middle.problems(apart) == large.problems(together) == []
    assert [problem.split(": ")[0] for problem in small.problems(apart)] == ["learner.gpus", "rollout_matching.vllm.kv_cache_memory_bytes"]
    assert [problem.split(": ")[0] for problem in small.problems(Needs(LEARNER, 1))] == ["learner.gpus"]


def test_on_cpu_all_processes_share_the_machine():
    needs = Needs(LEARNER, 2, ENGINE, 3)
    assert DeviceMemory(Device.CPU, 2 * 120 + 3 * 60).problems(needs) == []
    (problem,) = DeviceMemory(Device.CPU, 2 * 120 + 3 * 60 - 1).problems(needs)
    assert problem.startswith("cluster.address: the processes need about")


def test_on_cpu_the_weights_that_a_sync_shares_are_counted_too():
    needs = Needs(LEARNER, 2, ENGINE, 3, synced=70)
    total = 2 * LEARNER.total + 3 * ENGINE.total + 70
    assert DeviceMemory(Device.CPU, total).problems(needs) == []
    (problem,) = DeviceMemory(Device.CPU, total - 1).problems(needs)
    assert "weights in shared memory" in problem


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ({"mode": "actors"}, True),
        ({"mode": "actors", "enable_lora": True, "sync": {"mode": "adapter"}}, True),
        ({"mode": "actors", "enable_lora": True, "sync": {"mode": "adapter", "fallback_to_full": False}}, False),
        ({"mode": "server", "server": {"servers": [{"base_url": "http://127.0.0.1:1", "group_port": 0}]}}, True),
        ({"mode": "server", "server": {"servers": [{"base_url": "http://10.0.0.2:1", "group_port": 0}]}}, False),
        ({"mode": "colocate"}, False),
    ],
)
def test_weights_are_shared_with_engines_of_the_same_machine_that_may_take_all_of_them(config, shape, backend, expected):
    changes = {"model__adapter": {"kind": "lora", "rank": 4}} if "enable_lora" in backend else {}
    run = config(rollout_matching__vllm=backend, stage2_ab__channel_b__enable_pipeline=backend["mode"] != "colocate", **changes)
    synced = synced_bytes(run, plan_placement(run, [Resources(cpus=8, gpus=0)]), shape)
    assert synced == (4 * shape.num_parameters if expected else 0)


@pytest.mark.parametrize(
    ("own", "files", "limits"),
    [
        ("0::/\n", {"memory.max": "1000\n"}, [1000]),
        ("0::/a/b\n", {"memory.max": "max\n", "a/memory.max": "700\n", "a/b/memory.max": "max\n"}, [700]),
        ("0::/not/mounted/here\n", {"memory.max": "500\n"}, [500]),
        ("4:memory:/x\n3:cpuset:/x\n0::/\n", {"memory/x/memory.limit_in_bytes": "300\n", "memory/memory.limit_in_bytes": "9000\n"}, [300, 9000]),
        ("0::/\n", {}, []),
    ],
)
def test_a_containers_limit_is_read_from_every_control_group_around_the_process(tmp_path, monkeypatch, own, files, limits):
    """Of either version of control groups; without them there is no limit."""
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text)
    monkeypatch.setattr("launch.device_memory.OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr("launch.device_memory.CGROUPS", tmp_path / "cgroup")
    assert list(container_limits()) == limits
    there = device_memory(Device.CPU)
    assert there is not None and (there.total == min(limits) if limits else there.total > 2**30)
