"""Every family of models that is trained computes packed rows, with images of several sizes, as it
computes each segment alone.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from config_support import configuration
from PIL import Image
from tiny_qwen import FAMILIES, make_stock_model

from launch.add_coord_tokens import AddOptions, make_coord_model
from learner.collate import collate
from learner.model.loading import load_model
from learner.objectives.coord_math import Normalizer
from learner.objectives.registry import build_objectives
from learner.segments import EncodedPrompt, PromptEncoder, Segment
from learner.step import train_row
from learner.targets import ground_truth_target, target_settings, text_weights
from learner.weight_sync.canary import Canary
from shared.config.pipeline import Channel
from shared.dataset import load_dataset
from shared.errors import LearnerError

# Patches of 8 pixels, two by two merged: none of them is square in windows, and no two are alike.
IMAGE_SIZES = ((96, 64), (80, 112), (64, 64), (144, 48))


CASES = [(family, attention) for family in FAMILIES for attention in ("auto", "sdpa", "eager")]


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
    )[: len(IMAGE_SIZES)]
    encoder = PromptEncoder(
        loaded.processor, system_prompt=None, user_prompt=config.data.user_prompt
    )
    segments = []
    for position, (sample, (width, height)) in enumerate(zip(samples, IMAGE_SIZES, strict=True)):
        target = ground_truth_target(sample, loaded.codec, target_settings(config))
        segments.append(
            Segment(
                position,
                prompt_of(loaded.processor, encoder, sample, width, height, position),
                target,
            )
        )
    return config, loaded, segments


def prompt_of(processor, encoder, sample, width, height, seed) -> EncodedPrompt:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    encoded = processor(
        text=[encoder.text(sample)], images=[Image.fromarray(pixels)], return_tensors="pt"
    )
    assert encoded["image_grid_thw"].tolist() == [[1, height // 8, width // 8]]
    ids = tuple(encoded["input_ids"][0].tolist())
    return EncodedPrompt(
        encoder.request_ids(sample),
        ids,
        encoded["mm_token_type_ids"][0],
        encoded["pixel_values"],
        encoded["image_grid_thw"],
    )


def step(parts, rows):
    config, loaded, segments = parts
    loaded.model.zero_grad(set_to_none=True)
    objectives = build_objectives(config.rollout_matching.pipeline, Channel.A, loaded.coord_ids_C)
    loss = 0.0
    for row in rows:
        packed = collate(
            row,
            text_weights=text_weights(config.rollout_matching.pipeline, Channel.A),
            rope_index=loaded.model.model.get_rope_index,
        )
        loss += train_row(loaded.model, packed, objectives, Normalizer()).loss / len(segments)
    return loss, {
        name: parameter.grad / len(segments)
        for name, parameter in loaded.model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.slow
def test_packed_rows_have_the_loss_and_gradient_of_their_segments_alone(parts):
    segments = parts[2]
    loss, gradients = step(parts, [[segment] for segment in segments])
    assert gradients["model.visual.patch_embed.proj.weight"].any(), "the vision tower takes part"
    for rows in ([segments], [segments[:1], segments[1:]], [segments[::-1]]):
        packed_loss, packed = step(parts, rows)
        assert packed_loss == pytest.approx(loss, abs=2e-5)
        assert packed.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                packed[name],
                gradient,
                atol=5e-5,
                rtol=1e-3,
                msg=lambda text, name=name: f"{name}: {text}",
            )


@pytest.mark.slow
def test_the_row_s_positions_are_those_the_model_gives_a_segment_by_itself(parts):
    """The slow way: the model makes its own positions, and the whole vocabulary's logits are
    read."""
    _, loaded, segments = parts
    model = loaded.model
    row = collate(
        segments,
        text_weights=text_weights(parts[0].rollout_matching.pipeline, Channel.A),
        rope_index=model.model.get_rope_index,
    )
    with torch.no_grad():
        packed = model.model(
            input_ids=row.inputs.input_ids,
            position_ids=row.inputs.position_ids,
            attention_mask=None,
            pixel_values=row.inputs.pixel_values,
            image_grid_thw=row.inputs.image_grid_thw,
            use_cache=False,
        ).last_hidden_state[0]
        start = 0
        for segment in segments:
            ids = torch.tensor([[*segment.prompt.token_ids, *segment.target.token_ids]])
            modality = torch.cat(
                [
                    segment.prompt.modality_P,
                    segment.prompt.modality_P.new_zeros(len(segment.target.token_ids)),
                ]
            )[None]
            alone = model.model(
                input_ids=ids,
                mm_token_type_ids=modality,
                pixel_values=segment.prompt.pixel_values_RD,
                image_grid_thw=segment.prompt.image_grid_I3,
                use_cache=False,
            ).last_hidden_state[0]
            torch.testing.assert_close(
                packed[start : start + len(alone)], alone, atol=5e-5, rtol=1e-4
            )
            start += len(alone)


def canary_of(parts):
    config, loaded, segments = parts
    response = segments[0].target.token_ids[:8]
    return Canary(
        loaded,
        segments[0].prompt,
        (),
        response,
        tolerance=1e-4,
        proves_adapter=False,
        run_dir=config.telemetry.run_dir,
    )


@pytest.mark.slow
def test_the_canary_reads_the_same_model(parts):
    probe = canary_of(parts).probe()
    assert probe.placeholder_ids == (parts[1].model.config.image_token_id,)
    assert len(probe.expected_logprobs) == len(probe.expanded_token_ids) - 1
    assert all(np.isfinite(probe.expected_logprobs))


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_have_diverged_are_the_learners_error(parts, value):
    _, loaded, _ = parts
    canary = canary_of(parts)
    weight = next(
        parameter
        for name, parameter in loaded.model.named_parameters()
        if "language_model.norm" in name
    )
    before = weight[0].item()
    with torch.no_grad():
        weight[0] = value
    try:
        with pytest.raises(
            LearnerError,
            match=(
                r"canary on the learner: .*canary's token 1 is nan: the weights have diverged, and"
                r" are not saved; .*learning_rate"
            ),
        ):
            canary.logprobs()
    finally:
        with torch.no_grad():
            weight[0] = before
