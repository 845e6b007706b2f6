"""A learner with LoRA or DoRA: what is trained, what it amounts to merged, and what is written down
(decision 38).
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from peft import PeftModel
from tiny_qwen import make_stock_model
from transformers import AutoModelForImageTextToText, Qwen3Config, Qwen3ForCausalLM

from learner.model.adapters import (
    adapted_layers,
    adapter_files,
    apply_adapter,
    compute_magnitudes,
    embeddings_with_trained_rows,
    without_adapter,
)
from learner.model.checkpoint import CheckpointContent, CheckpointWeights
from learner.model.checkpoint_folder import BaseFiles
from shared.config.model import AdapterSection
from shared.errors import ConfigError
from shared.model_families import ModelPart, find_part
from shared.tokens.fresh import FreshTokens
from shared.weight_sync.offer import AdapterOffer

KINDS = ("lora", "dora")
TOKENS_1T = torch.tensor([[5, 17, 230, 41, 7, 99, 512]])


def load(checkpoint: Path):
    return AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()


def untie(model):
    model.lm_head.weight = torch.nn.Parameter(0.5 * model.lm_head.weight.detach())
    model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = False


def adapted(
    checkpoint: Path,
    kind="lora",
    *,
    seed=3,
    trained=True,
    token_ids=(),
    tied=True,
    parts=(ModelPart.LANGUAGE_MODEL,),
    **section,
):
    """The demo's model with an adapter that has learned something: noise in place of every trained
    tensor's start.
    """
    model = load(checkpoint)
    if not tied:
        untie(model)
    section = AdapterSection(kind=kind, **{"rank": 4, "alpha": 8.0} | section)
    options = {"base_path": str(checkpoint), "token_ids": token_ids, "parts": parts}
    apply_adapter(model, section, seed=seed, **options)
    if trained:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in trainable(model).values():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def trainable(model):
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def logits(model, ids_1T=TOKENS_1T):
    with torch.no_grad():
        return model(input_ids=ids_1T, use_cache=False).logits


def merged(model):
    return {name: tensor.clone() for name, tensor in CheckpointWeights(model).tensors()}


def test_a_text_model_is_adapted_like_a_language_model_beside_a_vision_tower():
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    model = Qwen3ForCausalLM(Qwen3Config(**shape, **heads))
    expected = merged(model)
    apply_adapter(model, AdapterSection(kind="lora", rank=4, alpha=8.0), base_path="text", seed=3)
    assert len(adapted_layers(model)) == 2 * 7
    assert same(merged(model), expected), "merged, and under the same names"


def snapshot(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_adapters_of_the_language_models_linear_layers_are_trained(demo_checkpoint, kind):
    model = adapted(demo_checkpoint, kind)
    paths = adapted_layers(model)
    assert len(paths) == 3 * 7
    assert all(path.startswith("model.language_model.layers.") for path in paths)
    assert {name.split(".lora_")[0] for name in trainable(model)} == set(paths)
    assert not any(module.p for module in model.modules() if isinstance(module, torch.nn.Dropout))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_adapter_follows_from_the_seed_and_changes_nothing(demo_checkpoint, kind):
    before = torch.random.get_rng_state()
    model, again, other = (
        adapted(demo_checkpoint, kind, seed=seed, trained=False) for seed in (3, 3, 4)
    )
    assert torch.equal(before, torch.random.get_rng_state())
    assert same(snapshot(model), snapshot(again))
    assert not same(snapshot(model), snapshot(other))
    torch.testing.assert_close(logits(model), logits(load(demo_checkpoint)), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_pefts_own_merge_and_the_learners_tensors_stay_bit_equal(
    demo_checkpoint, kind
):
    model = adapted(demo_checkpoint, kind)
    before = snapshot(model)
    weights = merged(model)
    assert same(before, snapshot(model))
    for path, layer in adapted_layers(copy.deepcopy(model)).items():
        layer.merge()
        assert torch.equal(weights[f"{path}.weight"], layer.base_layer.weight)
        assert not torch.equal(weights[f"{path}.weight"], before[f"{path}.base_layer.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_have_an_ordinary_checkpoints_names_once_and_do_what_the_adapted_model_does(
    demo_checkpoint, kind
):
    model, ordinary = adapted(demo_checkpoint, kind), load(demo_checkpoint)
    source = CheckpointWeights(model)
    weights = list(source.tensors())
    assert [name for name, _ in weights] == [name for name, _ in ordinary.named_parameters()]
    assert list(source.specs()) == [(name, one.dtype, one.shape) for name, one in weights]
    before = logits(ordinary)
    ordinary.load_state_dict(dict(weights), strict=False)
    ordinary.tie_weights()
    torch.testing.assert_close(logits(ordinary), logits(model), rtol=0, atol=2e-5)
    assert (logits(model) - before).abs().max() > 1e-2


def test_a_model_without_adapters_offers_its_parameters_as_they_are(demo_checkpoint):
    model = load(demo_checkpoint)
    offered = [(name, tensor.data_ptr()) for name, tensor in CheckpointWeights(model).tensors()]
    assert offered == [(name, parameter.data_ptr()) for name, parameter in model.named_parameters()]
    assert adapter_files(model) is None


def test_an_offered_adapter_is_two_files_with_a_digest(demo_checkpoint):
    model = adapted(demo_checkpoint)
    files = adapter_files(model)
    offer = AdapterOffer.make(files, timeout_s=5.0)
    tensors = safetensors.torch.load(offer.files.tensors)
    expected = {
        f"base_model.model.{name.replace('.default.weight', '.weight')}": weight
        for name, weight in trainable(model).items()
    }
    assert len(tensors) == 2 * 3 * 7
    assert same(tensors, expected)
    assert json.loads(offer.files.config)["r"] == 4
    assert files == adapter_files(model)
    assert offer.is_intact
    assert not replace(offer, files=replace(files, tensors=files.tensors[:-1] + b"?")).is_intact
    assert not replace(offer, files=replace(files, config=files.config + " ")).is_intact


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_same_with_activations_recomputed(demo_checkpoint, kind):
    """Embeddings are frozen, so what enters a checkpointed layer needs no gradient, and the layer's
    adapters do.
    """

    def gradients(recompute: bool):
        model = adapted(demo_checkpoint, kind).train()
        if recompute:
            model.gradient_checkpointing_enable()
        output = model(input_ids=TOKENS_1T, use_cache=False).logits.float()
        output.log_softmax(-1)[..., 3].sum().backward()
        return {name: parameter.grad for name, parameter in trainable(model).items()}

    plain = gradients(recompute=False)
    assert any(gradient.abs().max() > 0 for gradient in plain.values())
    assert same(plain, gradients(recompute=True))


def save(model, checkpoint, folder, **options):
    """Save a model with its adapter; return what transformers loads of it."""
    folder.mkdir()
    weights = dict(CheckpointWeights(model).tensors())
    content = CheckpointContent(
        model, BaseFiles.read(checkpoint), weights, adapter_files(model), **options
    )
    content.write_weights(folder)
    saved, information = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(information.values())
    return saved.eval()


@pytest.mark.slow
@pytest.mark.parametrize("token_ids", [(), range(5, 8)], ids=["", "trained rows"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_its_adapter_the_model_is_the_checkpoint_to_the_bit_and_afterwards_itself_again(
    demo_checkpoint, kind, token_ids
):
    model = adapted(demo_checkpoint, kind, token_ids=token_ids)
    with_it, before = logits(model), snapshot(model)
    with without_adapter(model):
        assert torch.equal(logits(model), logits(load(demo_checkpoint)))
    assert torch.equal(logits(model), with_it)
    assert not torch.equal(with_it, logits(load(demo_checkpoint)))
    assert same(snapshot(model), before)
    assert trainable(model), "what is trained stays trained"


TARGETS = {
    "qwen3_vl": ("qkv", "proj", "linear_fc1", "linear_fc2", "q_proj", "down_proj"),
    "qwen2_5_vl": ("qkv", "proj", "gate_proj", "0", "2"),
}
"""Of each tower's family, names in its tower, its aligner and its language model."""


@pytest.fixture(params=TARGETS)
def family(request, tmp_path):
    return make_stock_model(tmp_path / "stock", request.param), TARGETS[request.param]


def logprobs_of_picture(model):
    """Log-probabilities of a text around a picture of 4 x 4 patches, which become 4 tokens."""
    config = model.config
    picture = (config.image_token_id,) * 4
    ids_1T = torch.tensor(
        [[5, 17, config.vision_start_token_id, *picture, config.vision_end_token_id, 41, 7, 99]]
    )
    vision = config.vision_config
    size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return model(
        input_ids=ids_1T,
        mm_token_type_ids=(ids_1T == config.image_token_id).long(),
        pixel_values=torch.randn(16, size, generator=torch.Generator().manual_seed(1)),
        image_grid_thw=torch.tensor([[1, 4, 4]]),
        use_cache=False,
    ).logits.log_softmax(-1)


@pytest.mark.slow
def test_every_part_may_be_adapted_is_trained_by_pictures_and_merged_does_what_it_does(
    family, tmp_path
):
    stock, names = family
    model = adapted(stock, parts=tuple(ModelPart), target_modules=names)
    layers = adapted_layers(model)
    assert {find_part(f"{path}.") for path in layers} == set(ModelPart)
    assert {path.rpartition(".")[2] for path in layers} == set(names)
    logprobs = logprobs_of_picture(model)
    # Of all tokens: what is added behind the last layer reaches the picture's own alone.
    logprobs[0, :, 3].sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in trainable(model).values())
    ordinary = load(stock)
    with torch.no_grad():
        before = logprobs_of_picture(ordinary)
        assert [name for name, _ in CheckpointWeights(model).tensors()] == [
            name for name, _ in ordinary.named_parameters()
        ]
        ordinary.load_state_dict(merged(model), strict=False)
        torch.testing.assert_close(logprobs_of_picture(ordinary), logprobs, rtol=0, atol=1e-5)
        assert (logprobs - before).abs().max() > 1e-2
        adapter_files(model).save(tmp_path / "adapter")
        restored = PeftModel.from_pretrained(load(stock), tmp_path / "adapter").eval()
        assert torch.equal(logprobs_of_picture(restored), logprobs)


def test_the_tower_alone_may_be_adapted(family):
    stock, _ = family
    model = adapted(stock, parts=(ModelPart.VISION_TOWER,), target_modules=("proj",))
    assert {find_part(name) for name in trainable(model)} == {ModelPart.VISION_TOWER}
    assert all(path.endswith(".attn.proj") for path in adapted_layers(model))


def test_a_part_of_which_no_layer_is_named_is_refused_with_the_layers_of_each(demo_checkpoint):
    parts = (ModelPart.VISION_TOWER, ModelPart.LANGUAGE_MODEL)
    has = (
        "vision tower .*linear_fc1, linear_fc2, proj, qkv; .*language model .*down_proj, gate_proj,"
        " k_proj, o_proj, q_proj, up_proj, v_proj$"
    )
    start = rf"^model\.adapter\.target_modules: .*{re.escape(str(demo_checkpoint))}\b"
    key = r"training\.parts\.vision_tower\.adapted"
    with pytest.raises(ConfigError, match=f"{start}, .*{key} .*; .*{has}"):
        adapted(demo_checkpoint, parts=parts)
    with pytest.raises(ConfigError, match=f"{start} .* wq; .*{has}"):
        adapted(demo_checkpoint, parts=parts, target_modules=("qkv", "wq"))


FRESH = range(100, 131)
HEAD = ("model.language_model.embed_tokens.weight", "lm_head.weight")


def learn(model):
    """Take two steps of AdamW over everything that is trained, on text with fresh tokens in it."""
    ids_1T = torch.tensor([[5, 17, *FRESH, 41, 7]])
    optimizer = torch.optim.AdamW(trainable(model).values(), lr=1e-2, weight_decay=0.0)
    for _ in range(2):
        logits = model(input_ids=ids_1T, use_cache=False).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits, ids_1T[0, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_fresh_rows_are_trained_with_the_adapter_and_no_other_row_is(demo_checkpoint, kind, tied):
    model = adapted(demo_checkpoint, kind, trained=False, token_ids=FRESH, tied=tied)
    before = merged(model)
    learn(model)
    after = merged(model)
    matrices = HEAD[:1] if tied else HEAD
    assert list(before) == list(after)
    assert {name for name in HEAD if name in after} == set(matrices)
    for name in matrices:
        rows = (after[name] != before[name]).any(dim=1).nonzero()[:, 0].tolist()
        assert rows == list(FRESH), name
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed - set(matrices) == {f"{path}.weight" for path in adapted_layers(model)}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_sent_and_saved_of_fresh_rows_is_what_the_learner_computes_with(
    demo_checkpoint, tied
):
    model = adapted(demo_checkpoint, token_ids=FRESH, tied=tied)
    ordinary = load(demo_checkpoint)
    names = [name for name, _ in ordinary.named_parameters()] + ([] if tied else ["lm_head.weight"])
    weights = merged(model)
    specs = [(name, tensor.dtype, tensor.shape) for name, tensor in weights.items()]
    assert list(weights) == names
    assert list(CheckpointWeights(model).specs()) == specs
    if not tied:
        untie(ordinary)
    ordinary.load_state_dict(weights, strict=False)
    ids_1T = torch.tensor([[5, *FRESH, 7]])
    torch.testing.assert_close(logits(ordinary, ids_1T), logits(model, ids_1T), rtol=0, atol=2e-5)


@pytest.mark.slow
def test_a_tied_head_has_the_rows_of_the_embedding(demo_checkpoint):
    model = adapted(demo_checkpoint, token_ids=FRESH)
    learn(model)
    head, embedding = model.lm_head, model.get_input_embeddings()
    assert head.token_adapter.base_layer.weight is embedding.token_adapter.base_layer.weight
    assert torch.equal(head.weight, embedding.weight)
    assert len([name for name in trainable(model) if "trainable_tokens" in name]) == 1
    assert set(embeddings_with_trained_rows(model)) == {
        "model.language_model.embed_tokens.token_adapter",
        "lm_head.token_adapter",
    }


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_holds_the_fresh_rows_merged_and_in_the_adapter_to_the_bit(
    demo_checkpoint, tmp_path, tied
):
    base = load(demo_checkpoint)
    if not tied:
        untie(base)
    model = adapted(demo_checkpoint, token_ids=FRESH, tied=tied)
    learn(model)
    sent = merged(model)
    fresh = FreshTokens(FRESH[0], len(FRESH))
    saved = save(model, demo_checkpoint, tmp_path / "saved", fresh=fresh)
    assert same(dict(saved.named_parameters()), sent)
    assert (saved.lm_head.weight is saved.get_input_embeddings().weight) == tied
    restored = PeftModel.from_pretrained(base, tmp_path / "saved" / "adapter").eval()
    assert torch.equal(logits(restored), logits(model))
    assert same(merged(restored.base_model.model), sent)
    assert FreshTokens.of(tmp_path / "saved") == fresh, "who goes on from here trains them too"


def test_magnitudes_are_computed_from_weights_that_come_after_the_adapter(demo_checkpoint):
    model = adapted(demo_checkpoint, "dora", trained=False)
    names = [name for name, _ in model.named_parameters() if "lora_magnitude" in name]
    expected = [model.get_parameter(name).detach().clone() for name in names]
    for name in names:
        model.get_parameter(name).detach().zero_()
    compute_magnitudes(model)
    found = [model.get_parameter(name) for name in names]
    assert names and all(map(torch.equal, found, expected))
