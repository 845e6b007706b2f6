"""The model as it is trained: number type, frozen parts, recomputed activations."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace

import pytest
import torch
from config_support import configuration, trajectory_config
from jinja2.exceptions import SecurityError
from learner_support import SMALL, finish_step, losses, make_learner
from safetensors.torch import load_file, save_file
from text_families import make_text_model
from tiny_qwen import make_stock_model
from torch.distributed.device_mesh import DeviceMesh

from launch.checks.learner_memory import read_bytes
from launch.checks.model_shape import ModelShape, RunSizes
from launch.tools.add_coord_tokens import AddOptions, make_coord_model
from learner.model.loading import load_model, load_tokens
from learner.model.optimizer.adamw import MasterWeights
from learner.model.packed_rows import Float32Head
from learner.segments import PromptEncoder
from shared.config.pipeline import EXAMPLE_PIPELINE
from shared.dataset import load_dataset
from shared.errors import ConfigError
from shared.schedule import RunSchedule
from shared.tokens.fresh import FreshTokens
from shared.tokens.hf_codec import ADD_TOKENS, LACKING

pytestmark = pytest.mark.slow

DIGITS = {
    "data__answer_format": "qwen3_vl",
    "rollout_matching__pipeline": EXAMPLE_PIPELINE,
}
"""As a stock checkpoint writes boxes, and an objective for them."""


@pytest.fixture
def config(demo_checkpoint, demo_data, tmp_path):
    return lambda **changes: configuration(demo_checkpoint, demo_data, tmp_path, **SMALL | changes)


def test_bfloat16_learns_as_float32_does_and_is_saved_in_bfloat16(config, tmp_path):
    learner, bf16 = losses(config(model__dtype="bfloat16"), 8)
    _, fp32 = losses(config(), 8)
    assert {parameter.dtype for parameter in learner.loaded.model.parameters()} == {torch.bfloat16}
    assert fp32[-1] < 0.8 * fp32[0]
    assert bf16 == pytest.approx(fp32, rel=0.03)
    folder = tmp_path / "checkpoint"
    learner.publisher.checkpoint(folder).write()
    saved = config(model__path=str(folder), model__dtype="bfloat16")
    again = load_model(saved, torch.device("cpu")).model
    pairs = zip(learner.loaded.model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(mine, loaded) for mine, loaded in pairs)


def test_recomputed_activations_change_no_bit_though_parts_are_frozen(config):
    """What enters the first layer then needs no gradient, and its own weights do."""
    frozen = {"vision_tower": {"frozen": True}, "aligner": {"frozen": True}}
    kept, kept_losses = losses(config(training__parts=frozen), 2)
    recomputed, recomputed_losses = losses(
        config(training__parts=frozen, model__gradient_checkpointing=True), 2
    )
    assert kept_losses == recomputed_losses
    pairs = zip(kept.loaded.model.parameters(), recomputed.loaded.model.parameters(), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)


@pytest.mark.parametrize(
    ("changes", "of_tower", "of_text"),
    [
        ({}, [0, 1, 2], [0, 1, 2]),
        ({"model__recompute_every": 2}, [0, 2], [0, 2]),
        ({"model__recompute_every": 4, "model__recompute_tower": False}, [], [0]),
    ],
)
def test_only_the_chosen_layers_are_computed_twice_and_no_bit_changes(
    config, changes, of_tower, of_text
):
    _, kept_losses = losses(config(), 1)
    settings = config(model__gradient_checkpointing=True, **changes)
    learner = make_learner(settings)
    model = learner.loaded.model.model
    calls = Counter()
    for name, stack in (("tower", model.visual.blocks), ("text", model.language_model.layers)):
        for number, layer in enumerate(stack):
            layer.register_forward_pre_hook(lambda *_, at=(name, number): calls.update([at]))
    learner.next_requests(RunSchedule(settings).plan(0))
    report = finish_step(learner)
    assert [report.metrics["loss/total"]] == kept_losses
    num_rows = report.metrics["packing/num_rows"]
    twice = [at for at, number in sorted(calls.items()) if number == 2 * num_rows]
    expected = [("text", at) for at in of_text] + [("tower", at) for at in of_tower]
    assert twice == expected
    once = set(calls) - set(twice)
    assert len(calls) == 6 and all(calls[at] == num_rows for at in once)


def test_a_float32_head_rounds_no_logit_and_its_gradients_once(config):
    model = load_model(config(model__dtype="bfloat16"), torch.device("cpu")).model
    wide = config(model__dtype="bfloat16", model__head_dtype="float32")
    ours = load_model(wide, torch.device("cpu")).model.lm_head
    draw = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(7, ours.in_features, generator=draw).bfloat16()
    given, exact, rounded = hidden_TD.clone(), hidden_TD.double(), hidden_TD.clone()
    for one in (given, exact, rounded):
        one.requires_grad_()
    weight_VD = ours.weight.detach().double().requires_grad_()
    logits_TV = ours(given)
    exact_TV = exact @ weight_VD.t()
    assert logits_TV.dtype is torch.float32
    torch.testing.assert_close(logits_TV.double(), exact_TV, atol=1e-5, rtol=1e-5)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(model.lm_head(rounded).double(), exact_TV, atol=1e-3, rtol=1e-3)
    towards_TV = torch.randn(logits_TV.shape, generator=draw).bfloat16()
    (logits_TV * towards_TV).sum().backward()
    (exact_TV * towards_TV).sum().backward()
    for mine, expected in ((given.grad, exact.grad), (ours.weight.grad, weight_VD.grad)):
        assert mine.dtype is torch.bfloat16
        size = expected.abs().max().item()
        torch.testing.assert_close(mine.double(), expected, atol=2**-7 * size, rtol=2**-7)


def test_a_head_whose_new_tokens_an_adapter_trains_cannot_be_in_float32(config, tmp_path):
    stock = make_stock_model(tmp_path / "stock", "qwen3_vl")
    make_coord_model(AddOptions(model=stock, out=tmp_path / "model"))
    wide = {
        "model__path": str(tmp_path / "model"),
        "model__dtype": "bfloat16",
        "model__head_dtype": "float32",
    }
    assert type(load_model(config(**wide), torch.device("cpu")).model.lm_head) is Float32Head
    adapter = {"model__adapter": {"kind": "lora", "rank": 2}}
    with pytest.raises(ConfigError, match=r"^model\.head_dtype: float32 needs a linear head"):
        load_model(config(**wide, **adapter), torch.device("cpu"))


def test_inputs_of_layers_that_wait_in_host_memory_change_no_bit(config, monkeypatch):
    """As on a GPU, but that nothing is pinned."""
    recomputed = {"model__gradient_checkpointing": True}
    kept, kept_losses = losses(config(**recomputed), 1)
    moved = []

    class Moved(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, *, pin_memory, device_type):
            super().__init__(self.pack, lambda tensor: tensor)

        def pack(self, tensor):
            moved.append(tensor.shape[-1])
            return tensor.clone()

    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", Moved)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    waiting, waiting_losses = losses(config(**recomputed, model__activation_offload=True), 1)
    assert kept_losses == waiting_losses
    pairs = zip(kept.loaded.model.parameters(), waiting.loaded.model.parameters(), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)
    assert moved.count(128) >= 6, "of three layers of the tower, and of the language model"


HEAD = "lm_head.weight"
EMBEDDING = "model.language_model.embed_tokens.weight"
ROUTERS = {f"model.language_model.layers.{layer}.mlp.gate.weight" for layer in range(2)}


def with_weights(folder, base, change):
    shutil.copytree(base, folder)
    weights = change(load_file(base / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def checkpoint_of(case, base, folder):
    match case:
        case "text experts":
            return make_text_model(folder, "qwen3_moe")
        case "experts":
            return make_stock_model(folder, "qwen3_vl_moe", tied=False)
        case "experts as in memory":

            def turned(weights):
                experts = {name: one for name, one in weights.items() if ".experts." in name}
                return weights | {n: one.mT.contiguous() for n, one in experts.items()}

            stock = make_stock_model(folder / "turned", "qwen3_vl_moe", tied=False)
            return with_weights(folder / "model", stock, turned)
        case "another head":
            return with_weights(folder, base, lambda w: w | {HEAD: w[EMBEDDING] * 2})
        case "the embedding as head":
            return with_weights(folder, base, lambda w: w | {HEAD: w[EMBEDDING].clone()})
        case "fresh tokens":
            shutil.copytree(base, folder)
            FreshTokens(300, 1000).save(folder)
    return base if case == "tied" else folder


@pytest.mark.parametrize(
    ("case", "whole"),
    [
        ("tied", set()),
        ("another head", {HEAD, EMBEDDING}),
        ("the embedding as head", {EMBEDDING}),
        ("fresh tokens", {EMBEDDING}),
        ("text experts", set()),
        ("experts", set()),
        ("experts as in memory", set()),
    ],
)
def test_ranks_read_their_rows_of_all_weights_but_of_few_that_they_read_whole(
    case, whole, demo_checkpoint, demo_data, tmp_path
):
    """Three ranks, among which most numbers of rows do not divide evenly; two for four experts."""
    folder = checkpoint_of(case, demo_checkpoint, tmp_path / "model")
    if "experts" in case:
        run = trajectory_config(folder, tmp_path / "run")
    else:
        adapter = {"model__adapter": {"kind": "lora", "rank": 4}} if "fresh" in case else {}
        run = configuration(folder, demo_data, tmp_path, **SMALL | adapter)
    num_ranks = 3 if "experts" not in case else 2
    expected = load_model(run, torch.device("cpu")).model
    ranks = []
    for rank in range(num_ranks):
        # The name keeps the meshes apart in torch's caches: each belongs to another process.
        names = (f"rank_{rank}",)
        mesh = DeviceMesh(
            "cpu", [*range(num_ranks)], mesh_dim_names=names, _init_backend=False, _rank=rank
        )
        mesh.get_local_rank = lambda mesh_dim=None, rank=rank: rank
        ranks.append(load_model(run, torch.device("cpu"), mesh))
        assert (
            ranks[-1].model.lm_head.weight is ranks[-1].model.get_input_embeddings().weight
        ) == (expected.lm_head.weight is expected.get_input_embeddings().weight)
    read_whole = set()
    for name, weight in expected.named_parameters():
        found = [rank.model.get_parameter(name) for rank in ranks]
        assert all(one.requires_grad == weight.requires_grad for one in found)
        if found[0] in ranks[0].rows:
            rows = [rank.rows[one] for rank, one in zip(ranks, found, strict=True)]
            assert [len(one) for one in rows] == [len(one) for one in weight.chunk(num_ranks)]
            assert torch.equal(torch.cat(rows), weight)
        else:
            read_whole.add(name)
            assert all(torch.equal(one, weight) for one in found)
    read_whole = {name for name in read_whole if ".lora_" not in name and "_delta" not in name}
    assert {name.replace(".token_adapter.base_layer", "") for name in read_whole} == whole
    if "head" not in case:  # files with a head that config.json ties are not counted exactly
        sizes = RunSizes.of(run, ModelShape.read(folder))
        sharded = {"parallel": "fsdp", "world_size": num_ranks}
        sizes = replace(sizes, learner=sizes.learner.model_copy(update=sharded))
        read = [
            ranks[0].rows.get(one, one)
            for name, one in ranks[0].model.named_parameters()
            if ".lora_" not in name and "_delta" not in name
        ]
        assert read_bytes(sizes) == sum(one.nbytes for one in read)
    for name, buffer in expected.named_buffers():
        assert all(torch.equal(rank.model.get_buffer(name), buffer) for rank in ranks)


def test_a_stock_checkpoint_is_sent_to_the_command_that_adds_its_tokens(config, tmp_path):
    folder = make_stock_model(tmp_path / "stock", "qwen3_vl")
    with pytest.raises(ConfigError) as caught:
        load_tokens(config(model__path=str(folder)))
    message = str(caught.value)
    assert message.startswith(f"model.path: {folder} ") and LACKING in message
    assert "the coordinate tokens" in message and ADD_TOKENS in LACKING


def test_requests_of_training_and_reports_end_at_every_end_token_of_the_checkpoint(
    config, demo_checkpoint, tmp_path
):
    folder = shutil.copytree(demo_checkpoint, tmp_path / "two_ends")
    tokens = load_tokens(config())
    end, pad = tokens.codec.eos_token_id, tokens.tokenizer.pad_token_id
    assert tokens.stop_token_ids == (end,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [pad, end]}))
    learner = make_learner(config(model__path=str(folder)))
    plans = list(RunSchedule(config(stage2_ab__schedule__warmup_steps=0)).plans())
    asked = [*learner.next_requests(plans[0]), *learner.algorithm.held_out_requests(0)]
    # The first is the one that is taught, and that the repeat guard forces.
    assert {request.decode.stop_token_ids for request in asked} == {(end, pad)}


def test_fresh_tokens_that_the_tokenizer_does_not_have_are_refused(
    config, demo_checkpoint, tmp_path
):
    folder = shutil.copytree(demo_checkpoint, tmp_path / "checkpoint")
    FreshTokens(first_id=7, count=1_000_000).save(folder)
    message = r"fresh_tokens\.json names tokens that do not exist \(count: 1000000 ids from 7,"
    with pytest.raises(ConfigError, match=message):
        load_model(config(model__path=str(folder)), torch.device("cpu"))


def test_grounding_needs_the_processors_chat_template(config, demo_checkpoint, tmp_path):
    folder = shutil.copytree(demo_checkpoint, tmp_path / "checkpoint")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"model\.path: .* has no chat template"):
        load_tokens(config(model__path=str(folder)))


def test_packed_weights_are_refused_by_their_method(config, demo_checkpoint, tmp_path):
    folder = shutil.copytree(demo_checkpoint, tmp_path / "checkpoint")
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError, match=r"quantization_config: awq in config\.json"):
        load_tokens(config(model__path=str(folder)))


def test_code_and_templates_of_a_checkpoint_run_nothing(config, demo_checkpoint, tmp_path):
    """transformers asks a terminal whether to run such code, unless the kind is one of its own."""
    folder = tmp_path / "hostile"
    shutil.copytree(demo_checkpoint, folder)
    executed = tmp_path / "executed"
    (folder / "evil.py").write_text(f"open({str(executed)!r}, 'w')\n")
    kinds = ["Config", "Tokenizer", "Processor", "ImageProcessor", "ModelForImageTextToText"]
    auto_map = {f"Auto{kind}": f"evil.{kind}" for kind in kinds}
    auto_map["AutoTokenizer"] = ["evil.Tokenizer", None]
    for file in folder.glob("*config.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": auto_map}))
    (folder / "chat_template.jinja").write_text(
        "{{ cycler.__init__.__globals__.os.system('touch " + str(executed) + "') }}"
    )
    loaded = load_model(config(model__path=str(folder)), torch.device("cpu"))
    with pytest.raises(SecurityError):
        loaded.processor.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert not executed.exists()


def test_float32_has_no_second_copy_of_its_weights(config):
    model = load_model(config(), torch.device("cpu")).model
    parameters = list(model.parameters())
    masters = MasterWeights(parameters).masters
    assert list(map(id, masters)) == list(map(id, parameters))


def test_max_pixels_reduces_images_and_the_prompts_are_as_much_shorter(config, tmp_path):
    stock = make_stock_model(tmp_path / "stock", "qwen3_vl")
    whole = load_tokens(config(model__path=str(stock), **DIGITS))
    small = load_tokens(config(model__path=str(stock), data__max_pixels=64 * 64, **DIGITS))
    sample = load_dataset(
        config().data.train, on_bad_row="error", sort_objects=True, check_images=True
    )[0]
    encoders = [PromptEncoder(tokens.processor, config().prompts) for tokens in (whole, small)]
    grids = [encoder.encode(sample).image_grid_I3.tolist() for encoder in encoders]
    assert grids == [[[1, 12, 12]], [[1, 8, 8]]], "of 8 pixels each"
    counts = [encoder.num_tokens(sample) for encoder in encoders]
    assert counts[0] - counts[1] == (12 * 12 - 8 * 8) / 4


def test_max_pixels_below_what_the_processor_needs_is_refused_with_the_least(config, tmp_path):
    stock = {"model__path": str(make_stock_model(tmp_path / "stock", "qwen3_vl")), **DIGITS}
    load_tokens(config(**stock, data__max_pixels=4096))
    with pytest.raises(ConfigError, match=r"^data\.max_pixels: 4095 .*; set it to at least 4096$"):
        load_tokens(config(**stock, data__max_pixels=4095))


def test_max_pixels_is_refused_for_a_model_that_reads_no_images(tmp_path):
    folder = make_text_model(tmp_path / "llama", "llama")
    text = trajectory_config(folder, tmp_path, data__max_pixels=4096)
    with pytest.raises(ConfigError, match=r"^data\.max_pixels: .* reads no images; remove"):
        load_tokens(text)
