"""Every family of models that is trained computes packed rows, with images of several sizes, as it
computes each segment alone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from config_support import configuration, trajectory_config
from emulated_cuda import CUDA, emulated_cuda, on_host
from tiny_qwen import FAMILIES, HIDDEN, TOWERS, make_stock_model
from torch import nn
from trajectory_support import picture
from transformers import AutoModelForImageTextToText, AutoProcessor

from launch.checks.model_shape import ModelShape
from launch.tools.add_coord_tokens import AddOptions, make_coord_model
from learner.algorithms.matched_targets import ground_truth_target
from learner.collate import collate
from learner.model.attention import packed_row
from learner.model.checkpoint import CheckpointContent, CheckpointWeights
from learner.model.linear_attention import _tell_segments
from learner.model.loading import load_model, model_type_problem
from learner.model.parts import trained_parameters
from learner.objectives.coord_math import Normalizer
from learner.objectives.registry import build_objectives
from learner.segments import ImageEncoder, PromptEncoder, Segment, decode_image
from learner.step import train_row
from learner.targets import target_settings, text_weights
from learner.weight_sync.canary import Canary
from shared.config.pipeline import Channel
from shared.dataset import load_dataset
from shared.errors import ConfigError, LearnerError
from shared.model_families import HYBRID_MODEL_TYPES, TILED_MODEL_TYPES, ModelPart, find_part
from shared.prompts import Prompts
from shared.records import Sample

# Patches of 8 pixels, two by two merged: none of them is square in windows, and no two are alike.
IMAGE_SIZES = ((96, 64), (80, 112), (64, 64), (144, 48))
NUM_TILES = (7, 13, 5, 13)
"""Of 32 pixels, where a family cuts such: 3 x 2, 3 x 4, 2 x 2 and 6 x 2, and one of the whole."""


CASES = [
    *((family, attention) for family in TOWERS for attention in ("auto", "sdpa", "eager")),
    *((family, "auto") for family in FAMILIES if family not in TOWERS),
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def parts(request, demo_data, tmp_path_factory):
    """Configuration, model and segments whose images differ in size."""
    family, attention = request.param
    folder = tmp_path_factory.mktemp(family)
    make_stock_model(folder / "stock", family)
    make_coord_model(AddOptions(model=folder / "stock", out=folder / "model"))
    config = configuration(folder / "model", demo_data, folder, model__attention=attention)
    loaded = load_model(config, torch.device("cpu"))
    samples = load_dataset(
        config.data.train, on_bad_row="error", sort_objects=True, check_images=True
    )
    encoder = PromptEncoder(loaded.processor, config.prompts)
    settings = target_settings(config)
    segments = []
    for position, (sample, size) in enumerate(zip(samples, IMAGE_SIZES, strict=False)):
        target = ground_truth_target(sample, loaded.codec, settings)
        shown = replace(sample, images=(picture(*size, seed=position),))
        prompt = encoder.encode(shown)
        grid = [1, size[1] // 8, size[0] // 8]
        if family in TILED_MODEL_TYPES:
            grid = [NUM_TILES[position], 2, 2]
        assert prompt.image_grid_I3.tolist() == [grid]
        assert encoder.num_tokens(replace(shown, width=size[0], height=size[1])) == len(
            prompt.token_ids
        )
        segments.append(Segment(position, prompt, target))
    return config, loaded, segments


def row_of(parts, segments, **options):
    config, loaded, _ = parts
    weights = text_weights(config.rollout_matching.pipeline, Channel.A)
    return collate(segments, text_weights=weights, rope_index=loaded.rope_index, **options)


def step(parts, rows, **options):
    config, loaded, segments = parts
    loaded.model.zero_grad(set_to_none=True)
    objectives = build_objectives(config.rollout_matching.pipeline, Channel.A, loaded.coord_ids_C)
    packed = [row_of(parts, row, **options).to(loaded.device) for row in rows]
    losses = [train_row(loaded.model, row, objectives, Normalizer()).loss for row in packed]
    number, named = len(segments), loaded.model.named_parameters()
    gradients = {name: one.grad / number for name, one in named if one.grad is not None}
    return sum(losses) / number, gradients


@pytest.mark.slow
def test_packed_rows_have_the_loss_and_gradient_of_their_segments_alone(parts):
    segments = parts[2]
    loss, gradients = step(parts, [[segment] for segment in segments])
    of_towers = [name for name in gradients if find_part(name) is ModelPart.VISION_TOWER]
    assert any(gradients[name].any() for name in of_towers), "the vision tower takes part"
    for rows in ([segments], [segments[:1], segments[1:]], [segments[::-1]]):
        packed_loss, packed = step(parts, rows)
        assert packed_loss == pytest.approx(loss, abs=2e-5)
        assert packed.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(packed[name], gradient, atol=5e-5, rtol=1e-3)


def sharing(config):
    training = config.training.model_copy(update={"share_prompts": True})
    return config.model_copy(update={"training": training})


@pytest.mark.slow
@pytest.mark.parametrize("parts", [(family, "auto") for family in FAMILIES], indirect=True)
def test_shared_prompts_with_images_give_the_loss_and_gradient_of_repeated_ones(parts):
    config, loaded, (first, second, third, _) = parts
    if loaded.model.config.model_type in HYBRID_MODEL_TYPES:
        with pytest.raises(ConfigError, match=r"share_prompts: .* with linear_attention, "):
            load_model(sharing(config), torch.device("cpu"))
        return
    # An equal prompt that was encoded again, and one without images.
    again = replace(first.prompt, pixel_values_RD=first.prompt.pixel_values_RD.clone())
    text = third.without_images()
    rows = [
        first,
        replace(second, prompt=again),
        replace(third, prompt=first.prompt),
        replace(first, prompt=second.prompt),
        replace(third, prompt=second.prompt),
        text,
        replace(second, prompt=text.prompt),
    ]
    loss, gradients = step((config, loaded, rows), [rows])
    shared_loss, shared = step((config, loaded, rows), [rows], share_prompts=True)
    row = row_of(parts, rows, share_prompts=True)
    lengths = [len(one.prompt.token_ids) - 1 for one in (first, second, text)]
    assert row.num_shared == (0, lengths[0], lengths[0], 0, lengths[1], 0, lengths[2])
    assert len(row.inputs.image_grid_thw) == 2
    assert shared_loss == pytest.approx(loss, abs=1e-6)
    assert shared.keys() == gradients.keys()
    norm = torch.cat([one.flatten() for one in gradients.values()]).norm()
    for name, gradient in gradients.items():
        assert (shared[name] - gradient).norm() <= 1e-6 * norm, name
    assert any(gradients[name].any() for name in gradients if "patch_embed" in name)
    with emulated_cuda() as cuda:
        on_device = config, load_model(config, CUDA), rows
        cuda.reset()
        loss_of_device, of_device = step(on_device, [rows], share_prompts=True)
        waits = [*cuda.syncs, *cuda.uploads]
    assert loss_of_device == shared_loss
    assert all(torch.equal(on_host(of_device[name]), one) for name, one in shared.items())
    assert len(waits) <= 8, waits


@pytest.mark.slow
def test_the_row_s_positions_are_those_the_model_gives_a_segment_by_itself(parts):
    """The slow way: the model makes its own positions, and the whole vocabulary's logits are
    read."""
    _, loaded, segments = parts
    row = row_of(parts, segments)
    inputs = row.inputs
    hidden = partial(loaded.model.model, use_cache=False)
    with torch.no_grad():
        with packed_row(row.lengths):
            packed = hidden(
                input_ids=inputs.input_ids,
                position_ids=inputs.position_ids,
                attention_mask=None,
                **inputs.image_arguments(torch.float32),
            ).last_hidden_state[0]
        start = 0
        for segment in segments:
            prompt = segment.prompt
            vision = {"pixel_values": prompt.pixel_values_RD}
            if loaded.rope_index is not None:
                vision["mm_token_type_ids"] = segment.modality[None]
                vision["image_grid_thw"] = prompt.image_grid_I3
            alone = hidden(
                input_ids=torch.tensor([[*prompt.token_ids, *segment.target.token_ids]]), **vision
            ).last_hidden_state[0]
            stop = start + len(alone)
            torch.testing.assert_close(packed[start:stop], alone, atol=5e-5, rtol=1e-4)
            following_T = torch.tensor([*prompt.token_ids, *segment.target.token_ids][1:])
            scores = [
                loaded.model.lm_head(hidden_TE[:-1]).log_softmax(-1).gather(1, following_T[:, None])
                for hidden_TE in (packed[start:stop], alone)
            ]
            torch.testing.assert_close(*scores, atol=1e-5, rtol=1e-5)
            start = stop


@pytest.mark.slow
def test_a_row_on_an_emulated_gpu_has_the_bits_of_the_cpu_and_waits_eight_times_at_most(parts):
    config, _, segments = parts
    loss, gradients = step(parts, [segments])
    with emulated_cuda() as cuda:
        on_device = config, load_model(config, CUDA), segments
        cuda.reset()
        loss_of_device, gradients_of_device = step(on_device, [segments])
        waits = [*cuda.syncs, *cuda.uploads]
    assert loss_of_device == loss
    assert gradients_of_device.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(on_host(gradients_of_device[name]), gradient), name
    assert len(waits) <= 8, waits


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_with_a_merged_adapter_is_written_as_the_family_s_own(family, tmp_path):
    """Names, shapes and values: what reads a stock checkpoint, reads this one."""
    stock = make_stock_model(tmp_path / "stock", family)
    # Of the layers that every family has: experts are no linear layers of transformers'.
    adapter = {"kind": "lora", "rank": 4, "target_modules": ["q_proj", "k_proj", "o_proj"]}
    config = trajectory_config(stock, tmp_path / "run", model__adapter=adapter)
    loaded = load_model(config, torch.device("cpu"))
    assert {part for part, _ in trained_parameters(loaded.model)} == {ModelPart.LANGUAGE_MODEL}
    ids_1T = torch.tensor([[*range(20, 60)]])
    with torch.no_grad():
        before = loaded.model(input_ids=ids_1T, use_cache=False).logits
        for _, parameter in trained_parameters(loaded.model):
            parameter += 0.05 * torch.randn(parameter.shape)
        expected = loaded.model(input_ids=ids_1T, use_cache=False).logits
    weights = dict(CheckpointWeights(loaded.model).tensors())
    content = CheckpointContent(loaded.model, loaded.base, weights)
    (tmp_path / "saved").mkdir()
    content.write_weights(tmp_path / "saved")
    with torch.no_grad():
        saved = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")
        logits = saved(input_ids=ids_1T, use_cache=False).logits
    assert (before - expected).abs().max() > 0.1
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    tower = ModelShape.read(stock).vision
    assert tower is not None and (tower.layers, tower.patches_per_token) == (2, 4)
    shapes = ModelShape.read(tmp_path / "saved").parameters
    assert shapes == ModelShape.read(stock).parameters
    specs = {name: tuple(shape) for name, _, shape in CheckpointWeights(saved).specs()}
    assert specs == {name: tuple(weights[name].shape) for name in specs}


def test_experts_lie_in_files_and_syncs_as_the_hub_s_and_not_as_transformers_keeps_them(tmp_path):
    """Qwen3-VL-MoE's own are [experts, in, out], which vLLM takes all of them for; transformers
    5.19 keeps [experts, out, in], and writes them so."""
    stock = make_stock_model(tmp_path, "qwen3_vl_moe")
    shapes = ModelShape.read(stock).parameters
    experts = "model.language_model.layers.0.mlp.experts"
    assert shapes[f"{experts}.gate_up_proj"] == (4, HIDDEN, 2 * 96)
    assert shapes[f"{experts}.down_proj"] == (4, 96, HIDDEN)
    model = AutoModelForImageTextToText.from_pretrained(stock)
    for name in ("gate_up_proj", "down_proj"):
        kept = model.get_parameter(f"{experts}.{name}")
        sent = dict(CheckpointWeights(model).tensors())[f"{experts}.{name}"]
        assert torch.equal(sent, kept.transpose(1, 2)) and sent.is_contiguous()


def test_a_family_that_is_not_trained_is_refused_by_name_with_what_is_missing():
    problem = model_type_problem(Path("here"), SimpleNamespace(model_type="qwen3_5_moe"))
    assert problem is not None
    assert problem.startswith("model.path: here is a qwen3_5_moe model; packed rows, ")
    assert "its experts" in problem and "choose one of qwen2_5_vl, " in problem


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_what_the_family_s_processor_makes_of_text_and_images(family, tmp_path):
    processor = AutoProcessor.from_pretrained(make_stock_model(tmp_path, family))
    images = tuple(picture(*size, seed) for seed, size in enumerate(IMAGE_SIZES))
    # Only the numbers of images and the texts of a sample matter here.
    sample = Sample("several", images, 96, 64, ())
    encoder = PromptEncoder(processor, Prompts())
    encoded = encoder.encode(sample)
    pictures = [decode_image(image) for image in images]
    expected = processor(text=[encoder.text(sample)], images=pictures, return_tensors="pt")
    assert encoded.token_ids == tuple(expected["input_ids"][0].tolist())
    assert torch.equal(encoded.pixel_values_RD, expected["pixel_values"])
    if family in TILED_MODEL_TYPES:
        assert encoded.image_grid_I3.tolist() == [[tiles, 2, 2] for tiles in NUM_TILES]
        assert sum(NUM_TILES) * 4 == encoded.modality_P.sum()
        sizes = [encoder.picture_resize.size_of(*size) for size in IMAGE_SIZES]
        assert sizes == [(96, 64), (96, 128), (64, 64), (192, 64)]
    else:
        assert torch.equal(encoded.image_grid_I3, expected["image_grid_thw"])
        assert torch.equal(encoded.modality_P, expected["mm_token_type_ids"][0])
    # As prompts of trajectories are read, whose tokens are the engine's.
    read = ImageEncoder(processor).encode(images, encoded.token_ids)
    assert torch.equal(read.pixel_values_RD, encoded.pixel_values_RD)
    for number in (1, 2, 3):
        alone = encoder.encode(replace(sample, images=images[:number]))
        first = read.first(number)
        assert torch.equal(first.pixel_values_RD, alone.pixel_values_RD)
        assert torch.equal(first.image_grid_I3, alone.image_grid_I3)


def canary_of(parts):
    config, loaded, segments = parts
    prompt, response = segments[0].prompt, segments[0].target.token_ids[:8]
    options = {"tolerance": 1e-4, "proves_adapter": False}
    return Canary(loaded, prompt, (), response, run_dir=config.telemetry.run_dir, **options)


@pytest.mark.slow
def test_the_canary_reads_the_same_model(parts):
    probe = canary_of(parts).probe()
    assert probe.placeholder_ids == (parts[1].model.config.image_token_id,)
    assert len(probe.expected_logprobs) == len(probe.expanded_token_ids) - 1
    assert all(np.isfinite(probe.expected_logprobs))


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_have_diverged_are_the_learners_error(parts, value):
    canary = canary_of(parts)
    named = parts[1].model.named_parameters()
    weight = next(parameter.data for name, parameter in named if "language_model.norm" in name)
    before = weight[0].item()
    weight[0] = value
    message = (
        r"canary on the learner: .*canary's token 1 is nan: the weights have diverged and are not"
        r" saved; .*learning_rate"
    )
    try:
        with pytest.raises(LearnerError, match=message):
            canary.logprobs()
    finally:
        weight[0] = before


def test_linear_attention_refuses_a_packed_row_whose_segments_it_was_not_told():
    """A text's positions are [B, T]; with images [3 or 4, B, T], the first those of the text."""
    whole, packed = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0, 1, 0, 1]])
    seen = {"inputs_embeds": torch.zeros(1, 4, 8)}
    for positions in (whole, torch.stack([whole, packed, packed, packed])):
        _, options = _tell_segments(nn.Identity(), (), seen | {"position_ids": positions})
        assert options["segment_lengths"] is None
    for positions in (packed, torch.stack([packed, whole, whole, whole])):
        options = seen | {"position_ids": positions}
        with pytest.raises(AssertionError, match="packed row outside"):
            _tell_segments(nn.Identity(), (), options)
        with packed_row([2, 2]):
            assert _tell_segments(nn.Identity(), (), options)[1]["segment_lengths"] == (2, 2)
