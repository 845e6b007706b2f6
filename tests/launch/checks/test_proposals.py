"""Settings that preflight proposes where a run does not fit, on the sizes of Qwen3-VL-4B."""

import math
from dataclasses import replace

import pytest
from config_support import configuration

from launch.checks.learner_memory import host_estimate, learner_estimate
from launch.checks.memory import (
    DeviceMemory,
    Needs,
    engine_estimate,
    shared_device_estimate,
)
from launch.checks.model_shape import ModelShape, RunSizes, VisionShape
from launch.checks.proposals import less_recomputation, proposals
from shared.weight_sync.transports import Device, TransportKind

pytestmark = pytest.mark.slow

GIB = 2**30
COST = (
    "model.gradient_checkpointing",
    "model.recompute_every",
    "model.activation_offload",
    "model.attention",
    "training.optimizer",
    "global_max_length",
    "model.adapter.kind",
    "learner.parallel",
    "learner.world_size",
)
"""Keys that are proposed, the cheapest first."""
TEXT = {
    "self_attn.q_proj": (4096, 2560),
    "self_attn.k_proj": (1024, 2560),
    "self_attn.v_proj": (1024, 2560),
    "self_attn.o_proj": (2560, 4096),
    "self_attn.q_norm": (128,),
    "mlp.gate_proj": (9728, 2560),
    "mlp.up_proj": (9728, 2560),
    "mlp.down_proj": (2560, 9728),
}
VISION = {
    "attn.qkv": (3072, 1024),
    "attn.proj": (1024, 1024),
    "mlp.linear_fc1": (4096, 1024),
    "mlp.linear_fc2": (1024, 4096),
}


@pytest.fixture(scope="module")
def qwen():
    """Qwen3-VL-4B, by its published sizes."""
    language, visual = "model.language_model", "model.visual"
    parameters = {f"{language}.embed_tokens.weight": (151_936, 2560)}
    for layer in range(36):
        for name, sizes in TEXT.items():
            parameters[f"{language}.layers.{layer}.{name}.weight"] = sizes
    for layer in range(24):
        for name, sizes in VISION.items():
            parameters[f"{visual}.blocks.{layer}.{name}.weight"] = sizes
    for merger in ("merger", *(f"deepstack_merger_list.{index}" for index in range(3))):
        parameters[f"{visual}.{merger}.linear_fc1.weight"] = (4096, 4096)
        parameters[f"{visual}.{merger}.linear_fc2.weight"] = (2560, 4096)
    vision = VisionShape(1024, 24, 4096, 4)
    return ModelShape(parameters, 2560, 36, 9728, 32, 8, 128, 151_936, vision)


@pytest.fixture
def config(tmp_path):
    def make(tokens=12_000, **changes):
        settings = {"model__dtype": "bfloat16", "rollout_matching__max_new_tokens": 1024}
        return configuration(
            *(tmp_path, tmp_path, tmp_path), global_max_length=tokens, **settings | changes
        )

    return make


def estimate(run, shape):
    return learner_estimate(RunSizes.of(run, shape), Device.CUDA, TransportKind.NCCL)


def fits_on(shape, size):
    card = DeviceMemory(Device.CUDA, size)

    def fitting(changed):
        found = estimate(changed, shape)
        needs = Needs(found, changed.learner.world_size)
        return None if card.problems(needs) or card.warnings(needs) else found

    return fitting


def proposed(run, shape, size, idle_gpus=0):
    fitting = fits_on(shape, size)
    assert fitting(run) is None
    return proposals(run, fitting, idle_gpus=idle_gpus)


def test_all_of_4b_is_trained_on_80_gib_with_keys_that_preflight_names(config, qwen):
    found = proposed(config(), qwen, 80 * GIB)
    assert found[0].overrides == (
        "model.gradient_checkpointing=true",
        "training.optimizer=adamw_bnb_8bit",
    )
    assert found[0].estimate.total == pytest.approx(61 * GIB, rel=0.01)
    assert all(one.estimate.total < 0.92 * 80 * GIB for one in found)
    assert found[0].describe().startswith(" ".join(found[0].overrides) + ": learner rank: ")


def test_an_adapter_of_4b_is_trained_on_24_gib_with_keys_that_preflight_names(config, qwen):
    found = proposed(config(model__adapter={"kind": "lora"}), qwen, 24 * GIB)
    assert found[0].overrides == ("model.gradient_checkpointing=true",)
    assert found[0].estimate.total == pytest.approx(14.4 * GIB, rel=0.01)


@pytest.mark.parametrize(("every", "stronger"), [(4, None), (2, 4), (1, 2)])
def test_as_few_layers_are_recomputed_as_suffice(config, qwen, every, stronger):
    """On a GPU that just holds the run so, and not with the next fewer layers."""
    run = config(model__gradient_checkpointing=True, model__recompute_every=every)
    size = math.ceil(estimate(run, qwen).total / 0.92)
    expected = ("model.gradient_checkpointing=true", f"model.recompute_every={every}")
    found = proposed(config(), qwen, size)
    assert found[0].overrides == (expected if every > 1 else expected[:1])
    if stronger is not None:
        weaker = config(model__gradient_checkpointing=True, model__recompute_every=stronger)
        found = proposed(weaker, qwen, size)
        assert found[0].overrides == expected[1:], "without the key that is set already"


@pytest.mark.parametrize(
    ("same_as", "overrides"),
    [
        ({}, ("model.gradient_checkpointing=false",)),
        ({"model__recompute_every": 4}, ("model.recompute_every=4",)),
        ({"model__recompute_every": 2}, ("model.recompute_every=2",)),
        ({"model__recompute_tower": False}, ("model.recompute_tower=false",)),
        (None, None),
    ],
)
def test_a_run_that_recomputes_more_than_its_memory_demands_is_told_what_fits(
    config, qwen, same_as, overrides
):
    recomputed = {"model__gradient_checkpointing": True}
    run = config(**recomputed)
    as_large_as = config(**(recomputed if same_as != {} else {}) | (same_as or {}))
    size = math.ceil(estimate(as_large_as, qwen).total / 0.92)
    found = less_recomputation(run, fits_on(qwen, size))
    assert (found and found.overrides) == overrides
    assert less_recomputation(config(), fits_on(qwen, 10**12)) is None


def test_a_tower_that_is_not_trained_is_not_named_as_recomputed(config, qwen):
    frozen = {"training__parts": {"vision_tower": {"frozen": True}}}
    run = config(model__gradient_checkpointing=True, **frozen)
    size = math.ceil(estimate(run, qwen).total / 0.92)
    assert less_recomputation(run, fits_on(qwen, size)) is None


def test_a_run_that_keeps_its_towers_activations_is_told_to_recompute_them(config, qwen):
    recomputed = {"model__gradient_checkpointing": True}
    size = math.ceil(estimate(config(**recomputed), qwen).total / 0.92)
    found = proposed(config(**recomputed, model__recompute_tower=False), qwen, size)
    assert found[0].overrides == ("model.recompute_tower=true",)


def test_cheaper_keys_come_first_none_is_needless_and_contradictions_are_left_out(config, qwen):
    found = proposed(config(), qwen, 40 * GIB)
    assert found
    for one in found:
        keys = [override.partition("=")[0] for override in one.overrides]
        assert keys == sorted(keys, key=COST.index), "in the order of their cost"
        assert len(set(keys)) == len(keys)
        assert ("model.activation_offload" in keys) <= ("model.gradient_checkpointing" in keys)
        assert not ("training.optimizer" in keys and "learner.parallel" in keys)


@pytest.mark.parametrize(
    ("size", "idle_gpus", "num_ranks"), [(80, 1, 2), (80, 7, 2), (40, 7, 3), (40, 1, None)]
)
@pytest.mark.parametrize("is_on", [True, False])
def test_gpus_that_a_run_leaves_idle_come_first_and_as_few_of_them_as_suffice(
    config, qwen, size, idle_gpus, num_ranks, is_on
):
    """With recomputation, unless it is on: no number of ranks makes a row's activations smaller."""
    batch = {"training__effective_batch_size": 24, "stage2_ab__channel_b__rollouts_per_step": 24}
    run = config(model__gradient_checkpointing=is_on, **batch)
    found = [one.overrides for one in proposed(run, qwen, size * GIB, idle_gpus)]
    others = [one.overrides for one in proposed(run, qwen, size * GIB)]
    if num_ranks is not None:
        recomputed = () if is_on else ("model.gradient_checkpointing=true",)
        shards = ("learner.parallel=fsdp", f"learner.world_size={num_ranks}")
        others.insert(0, (*recomputed, *shards))
    assert found == others[:4]


def test_a_copy_on_more_of_the_runs_own_gpus_comes_first(config, qwen):
    copies = {"learner__world_size": 8, "learner__parallel": "fsdp", "learner__shard_size": 2}
    batch = {"training__effective_batch_size": 24, "stage2_ab__channel_b__rollouts_per_step": 24}
    run = config(model__gradient_checkpointing=True, **copies, **batch)
    found = proposed(run, qwen, 40 * GIB)
    assert found[0].overrides == ("learner.shard_size=4",)


def test_where_no_adapter_can_be_what_else_fits_is_still_proposed(config, qwen):
    frozen = {"training__parts": {"language_model": {"frozen": True}}}
    found = proposed(config(**frozen), qwen, 24 * GIB)
    assert found and not any("model.adapter" in str(one.overrides) for one in found)


@pytest.mark.parametrize("optimizer", ["adamw_offload", "adamw_offload_all"])
def test_what_leaves_the_gpu_is_counted_in_host_memory(config, qwen, optimizer):
    settings = {"model__gradient_checkpointing": True, "model__activation_offload": True}
    run = config(training__optimizer=optimizer, **settings)
    host = host_estimate(RunSizes.of(run, qwen), 1)
    assert host.what == "host memory of 1 learner rank, during the training"
    assert host.parts == {
        "masters, gradients and moments": 16 * qwen.num_parameters,
        "inputs of layers": 2 * 12_000 * (36 * 2560 + 24 * 4 * 1024),
    }
    plain = estimate(config(model__gradient_checkpointing=True), qwen)
    away = estimate(run, qwen)
    of_update = ("master weights", "optimizer")
    assert sum(away.parts.get(name, 0) for name in of_update) == 0
    saved = 12 * qwen.num_parameters
    if optimizer == "adamw_offload_all":
        largest = 2 * 151_936 * 2560
        assert away.parts["gradients"] == largest, "one at a time, as it leaves"
        saved += 4 * qwen.num_parameters - largest
    kept = 2 * 12_000 * (35 * 2560 + 23 * 4 * 1024)
    assert plain.total - away.total == saved + kept


def test_gradients_that_are_summed_for_a_host_optimizer_leave_with_it_while_an_engine_works(
    config, qwen
):
    def working(optimizer):
        engines = {
            "rollout_matching__vllm": {"mode": "colocate", "gpu_memory_utilization": 0.5},
            "stage2_ab__channel_b__enable_pipeline": False,
            "rollout_matching__offload": {"enabled": True, "offload_optimizer": True},
        }
        sizes = RunSizes.of(config(2000, training__optimizer=optimizer, **engines), qwen)
        learner = learner_estimate(sizes, Device.CUDA, TransportKind.IPC)
        engine = engine_estimate(sizes, 1, Device.CUDA, 200 * GIB, TransportKind.IPC)
        return shared_device_estimate(sizes, learner, engine, TransportKind.IPC)

    found = working("adamw_offload")
    assert found.what.endswith("while the engine works")
    assert "gradients" not in found.parts
    assert found.parts == working("adamw_torch").parts


FSDP = {"learner__parallel": "fsdp", "learner__world_size": 2}


@pytest.mark.parametrize(
    ("changes", "num_ranks", "size"),
    [
        ({}, 1, 2),
        ({"model__dtype": "float32"}, 1, 4),
        ({"learner__world_size": 2}, 2, 2 * 2),
        (FSDP, 2, 4),
        (FSDP | {"learner__world_size": 4, "learner__shard_size": 2}, 4, 2 * 4),
    ],
)
def test_every_rank_loads_the_whole_model_into_host_memory_or_its_shard_in_float32(
    config, qwen, changes, num_ranks, size
):
    """Shards of Qwen3-VL-30B-A3B are 124 GB for each copy of the model."""
    large = replace(qwen, parameters={"model.language_model.layers.0.w.weight": (31_070_000_000,)})
    host = host_estimate(RunSizes.of(config(**changes), large), num_ranks)
    assert host.what.endswith(", while the model is loaded")
    assert host.total == size * 31_070_000_000


@pytest.mark.parametrize("mode", ["actors", "colocate"])
def test_shards_are_gathered_in_host_memory_by_rank_0_and_only_for_a_checkpoint(config, qwen, mode):
    kept = {"model__gradient_checkpointing": True, "model__activation_offload": True}
    engines = {
        "rollout_matching__vllm": {"mode": mode},
        "stage2_ab__channel_b__enable_pipeline": False,
    }
    run = config(tokens=100_000, **FSDP, **kept, **engines)
    host = host_estimate(RunSizes.of(run, qwen), 2)
    assert host.parts == {
        "inputs of layers": 2 * 2 * 100_000 * (36 * 2560 + 24 * 4 * 1024),
        "weights gathered for a checkpoint": 2 * qwen.num_parameters,
    }


def test_8_bit_moments_take_two_bytes_and_a_scale_for_256_and_embeddings_keep_eight(config, qwen):
    embedding = 151_936 * 2560
    small = 36 * 128
    coded = qwen.num_parameters - embedding - small
    parts = estimate(config(training__optimizer="adamw_bnb_8bit"), qwen).parts
    assert parts["optimizer"] == 8 * (embedding + small) + 2 * coded + 8 * coded // 256
    assert parts["master weights"] == parts["gradients"] == 4 * qwen.num_parameters
