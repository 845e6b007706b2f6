"""Every parameter of the models that are trained belongs to exactly one part."""

from __future__ import annotations

import pytest
from accelerate import init_empty_weights
from tiny_qwen import FAMILIES
from transformers import (
    InternVLConfig,
    InternVLForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from learner.model.parts import freeze_parts, model_part, trained_parameters
from shared.config.training import PartsSection
from shared.model_families import VISION_MODEL_TYPES, ModelPart

CLASSES = {
    "qwen2_5_vl": (Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig),
    "qwen3_vl": (Qwen3VLForConditionalGeneration, Qwen3VLConfig),
    "qwen3_vl_moe": (Qwen3VLMoeForConditionalGeneration, Qwen3VLMoeConfig),
    "qwen3_5": (Qwen3_5ForConditionalGeneration, Qwen3_5Config),
    "internvl": (InternVLForConditionalGeneration, InternVLConfig),
}


@pytest.fixture(
    scope="module",
    params=[(family, tied) for family in VISION_MODEL_TYPES for tied in (True, False)],
    ids=lambda case: f"{case[0]}-{case[1]}",
)
def model(request):
    """Of the size that the family's configuration has by itself, without memory."""
    kind, config = CLASSES[request.param[0]]
    small: dict[str, dict] = {
        # Of a Qwen3.5 three layers of linear attention, then one of the other kind.
        "text_config": {"num_hidden_layers": 4 if request.param[0] == "qwen3_5" else 2},
        "vision_config": {"depth": 3},
    }
    if request.param[0] == "internvl":
        small["text_config"]["model_type"] = "qwen3"
        small["vision_config"] = {"num_hidden_layers": 3}
    if request.param[0].startswith("qwen3_vl"):
        small["vision_config"]["deepstack_visual_indexes"] = [0, 1]
    with init_empty_weights():
        model = kind(config(**small, tie_word_embeddings=request.param[1]))
    model.tie_weights()
    return model


def test_every_family_that_is_trained_is_tested_here():
    assert set(VISION_MODEL_TYPES) == set(CLASSES) == set(FAMILIES)


@pytest.mark.slow
def test_every_parameter_has_one_part_and_every_part_has_parameters(model):
    inner = model.model
    mergers = [
        one for one in inner.modules() if type(one).__name__.endswith(("Merger", "Projector"))
    ]
    visual = inner.vision_tower if hasattr(inner, "vision_tower") else inner.visual
    vision = {id(parameter) for parameter in visual.parameters()}
    aligner = {id(parameter) for merger in mergers for parameter in merger.parameters()}
    parts = set()
    for name, parameter in model.named_parameters():
        expected = ModelPart.LANGUAGE_MODEL
        if id(parameter) in aligner:
            expected = ModelPart.ALIGNER
        elif id(parameter) in vision:
            expected = ModelPart.VISION_TOWER
        assert model_part(name) is expected, name
        parts.add(expected)
    assert parts == set(ModelPart)


def test_a_head_is_frozen_and_trained_with_the_embedding_tied_or_not(model):
    freeze_parts(model, PartsSection.model_validate({"language_model": {"frozen": True}}))
    trained = {part for part, _ in trained_parameters(model)}
    head, embedding = model.lm_head.weight, model.get_input_embeddings().weight
    frozen = not head.requires_grad and not embedding.requires_grad
    model.requires_grad_(True)
    assert frozen
    assert trained == {ModelPart.VISION_TOWER, ModelPart.ALIGNER}


def test_trained_parameters_are_all_and_each_once(model):
    trained = [id(parameter) for _, parameter in trained_parameters(model)]
    assert len(trained) == len(set(trained)) == len(list(model.parameters()))
