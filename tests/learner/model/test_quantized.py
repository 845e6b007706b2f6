"""A learner whose adapter is trained on a base in 4 bits (QLoRA): engines are sent, and checkpoints
hold, what it computes with.
"""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
from config_support import configuration
from transformers import AutoModelForImageTextToText

from launch.checks.learner_memory import learner_estimate
from launch.checks.model_shape import ModelShape, RunSizes
from learner.model.adapters import (
    adapted_layers,
    adapter_files,
    apply_adapter,
    quantize_layers,
    without_adapter,
)
from learner.model.checkpoint import CheckpointContent, CheckpointWeights
from learner.model.checkpoint_folder import BaseFiles
from learner.model.loading import load_model
from learner.model.parts import model_part
from learner.model.ranks import Ranks
from learner.model.sharding import Parallel
from shared.config.model import AdapterSection
from shared.model_families import ModelPart
from shared.weight_sync.canary import SMALLEST_BEYOND, SMALLEST_MEAN

pytestmark = pytest.mark.slow

ADAPTER = {"kind": "lora", "rank": 4, "alpha": 8.0, "quantize": "nf4"}
LANGUAGE = (ModelPart.LANGUAGE_MODEL,)
WITH_TOWER = (ModelPart.VISION_TOWER, ModelPart.LANGUAGE_MODEL)
TARGETS = ["q_proj", "qkv"]
IDS_1T = torch.tensor([[5, 17, 230, 41, 7, 99, 512]])
TOLERANCE = {"float32": 1e-5, "bfloat16": SMALLEST_BEYOND}
"""Largest difference of a log-probability, in nats: merged or not, sums are rounded otherwise. In
bfloat16 the tightest that the canary allows a token; the mean has its own bound there.
"""


@pytest.fixture
def load(demo_checkpoint):
    """The demo's model as `load_model` has it, with an adapter that has learned something: noise in
    place of its start.
    """

    def make(dtype="float32", *, parts=LANGUAGE, trained=True):
        model = ordinary(demo_checkpoint, dtype)
        targets = {} if parts == LANGUAGE else {"target_modules": TARGETS}
        quantize_layers(model, parts, torch.device("cpu"))
        section = AdapterSection.model_validate(ADAPTER | targets)
        apply_adapter(model, section, base_path="here", seed=3, parts=parts)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in trainable(model) if trained else ():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        return model.train()

    return make


def ordinary(folder, dtype="float32"):
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=getattr(torch, dtype))


def trainable(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def logprobs(model):
    with torch.no_grad():
        return model(input_ids=IDS_1T, use_cache=False).logits.float().log_softmax(-1)


def quantized(model):
    """The parameters in 4 bits by their path."""
    named = model.named_parameters()
    return {name: one for name, one in named if getattr(one, "quant_state", None) is not None}


def num_bytes(model):
    """Of all weights under the adapter, and of what unpacks those in 4 bits."""
    parameters = [one for name, one in model.named_parameters() if ".lora_" not in name]
    blocks = [one.quant_state.absmax for one in quantized(model).values()]
    return sum(tensor.nbytes for tensor in (*parameters, *blocks))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_learner_computes_what_the_weights_that_are_sent_do(load, demo_checkpoint, dtype):
    model = load(dtype)
    engine = ordinary(demo_checkpoint, dtype)
    before = logprobs(engine)
    weights = dict(CheckpointWeights(model).tensors())
    assert list(weights) == [name for name, _ in engine.named_parameters()]
    specs = [(name, tensor.dtype, tensor.shape) for name, tensor in weights.items()]
    assert list(CheckpointWeights(model).specs()) == specs
    assert {tensor.dtype for tensor in weights.values()} == {getattr(torch, dtype)}
    engine.load_state_dict(weights, strict=False)
    expected = logprobs(model)
    differences = (logprobs(engine) - expected).abs()
    assert differences.max() <= TOLERANCE[dtype]
    assert differences.mean() <= SMALLEST_MEAN
    assert (before - expected).abs().max() > 2 * SMALLEST_BEYOND, "and not as the checkpoint"


@pytest.mark.parametrize("parts", [LANGUAGE, WITH_TOWER])
def test_all_linear_layers_of_the_adapted_parts_are_in_4_bits_and_nothing_else_is(load, parts):
    model = load(parts=parts)
    held = quantized(model)
    assert {model_part(name) for name in held} == set(parts)
    of_tower = 3 * 4 if parts == WITH_TOWER else 0
    assert len(held) == 3 * 7 + of_tower, "named in target_modules or not"
    for name, weight in held.items():
        assert weight.dtype == torch.uint8 and not weight.requires_grad, name
        assert weight.nbytes * 2 == weight.quant_state.shape.numel()
    assert {weight.dtype for weight in trainable(model)} == {torch.float32}
    assert not any("embed" in name or "lm_head" in name for name in held)


@pytest.mark.parametrize(("dtype", "parts"), [("float32", LANGUAGE), ("bfloat16", WITH_TOWER)])
def test_weights_in_4_bits_are_estimated_as_they_are(demo_checkpoint, tmp_path, dtype, parts):
    changes = {"model__dtype": dtype, "model__adapter": ADAPTER}
    if parts == WITH_TOWER:
        changes["model__adapter"] = ADAPTER | {"target_modules": TARGETS}
        changes["training__parts"] = {"vision_tower": {"adapted": True}}
    run = configuration(demo_checkpoint, tmp_path / "data", tmp_path / "run", **changes)
    sizes = RunSizes.of(run, ModelShape.read(demo_checkpoint))
    estimated = learner_estimate(sizes).parts["weights"]
    model = load_model(run, torch.device("cpu")).model
    assert estimated == pytest.approx(num_bytes(model), rel=0.05)
    assert {model_part(name) for name in quantized(model)} == set(parts)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_short_training_lowers_the_loss_and_moves_the_adapter_alone(load, dtype):
    model = load(dtype, trained=False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    optimizer = torch.optim.AdamW(trainable(model), lr=2e-2)
    losses = []
    for _ in range(4):
        logits = model(input_ids=IDS_1T, use_cache=False).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits.float(), IDS_1T[0, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    moved = {name for name, one in model.named_parameters() if not torch.equal(one, before[name])}
    assert moved == {name for name in before if ".lora_" in name}


def test_without_its_adapter_the_model_is_its_base_in_4_bits_also_where_it_generates(load):
    model = load()
    with_it = logprobs(model)
    sent = {name: tensor.clone() for name, tensor in CheckpointWeights(model).tensors()}
    # Some CPUs have the packed weights in another order where a model is in eval mode.
    assert torch.equal(logprobs(model.eval()), with_it)
    model.train()
    with without_adapter(model):
        base = logprobs(model)
    assert torch.equal(logprobs(load(trained=False)), base)
    assert not torch.equal(with_it, base)
    assert all(torch.equal(sent[name], one) for name, one in CheckpointWeights(model).tensors())


def test_a_checkpoint_is_ordinary_and_has_the_weights_that_are_sent(
    load, demo_checkpoint, tmp_path
):
    model = load("bfloat16")
    weights = dict(CheckpointWeights(model).tensors())
    folder = tmp_path / "saved"
    folder.mkdir()
    base = BaseFiles.read(demo_checkpoint)
    content = CheckpointContent(model, base, weights, adapter_files(model))
    content.write_weights(folder)
    described = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in described and described["dtype"] == "bfloat16"
    saved = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto")
    assert all(torch.equal(one, weights[name]) for name, one in saved.named_parameters())
    adapter = safetensors.torch.load_file(folder / "adapter" / "adapter_model.safetensors")
    assert len(adapter) == 2 * len(adapted_layers(model)) == 2 * 3 * 7
    assert {tensor.dtype for tensor in adapter.values()} == {torch.bfloat16}


def test_ranks_compare_weights_in_4_bits(load):
    model = load()
    Parallel(model, CheckpointWeights(model), Ranks(0, 2)).check()
