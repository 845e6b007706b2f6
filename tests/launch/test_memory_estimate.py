"""The estimate of a run's memory, against the model itself."""

import pytest
import torch
from config_support import configuration

from launch.memory_estimate import ModelShape, engine_estimate, learner_estimate, num_trainable, sequences_in_cache
from learner.loading import load_model
from shared.errors import ConfigError


@pytest.fixture
def config(demo_checkpoint, tmp_path):
    return lambda **changes: configuration(demo_checkpoint, tmp_path / "data", tmp_path / "run", global_max_length=512, **changes)


@pytest.fixture(scope="module")
def shape(demo_checkpoint):
    return ModelShape.read(demo_checkpoint)


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
def test_weights_gradients_and_optimizer_state_are_exact(config, shape, changes):
    run = config(**changes)
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
    engine = engine_estimate(run, shape, 1, 2**34)
    assert engine.parts["key-value cache"] == 2**20
    # Keys and values, 3 layers, 2 heads of 32, float32.
    assert sequences_in_cache(run, shape, engine, 1) == 2**20 // (2 * 3 * 2 * 32 * 4 * 512)
    assert engine_estimate(config(), shape, 1, 2**34).total == int(0.85 * 2**34)


def test_a_folder_that_holds_no_weights_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"model\.path: {tmp_path} cannot be read \(.*\); give a folder that save_pretrained wrote"):
        ModelShape.read(tmp_path)
