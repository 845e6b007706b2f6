import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from launch.demo.model import make_demo_model
from shared.grounding.serialize import serialize_objects
from shared.prompts import DEFAULT_USER_PROMPT, detection_messages
from shared.records import GeometryKind, GroundTruthObject


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "model"
    assert make_demo_model(out, seed=17, prompt=DEFAULT_USER_PROMPT)
    return out


@pytest.fixture(scope="module")
def processor(checkpoint):
    return AutoProcessor.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def model(checkpoint):
    return AutoModelForImageTextToText.from_pretrained(checkpoint)


def scene(count: int) -> list[GroundTruthObject]:
    return [
        GroundTruthObject(
            kind=GeometryKind.BBOX, bins=(100 * i, 5, 100 * i + 99, 999), desc="seven"
        )
        for i in range(count)
    ]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes(checkpoint, tmp_path):
    make_demo_model(tmp_path / "again", seed=17, prompt=DEFAULT_USER_PROMPT)
    for file in checkpoint.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name


def test_another_seed_gives_other_weights_and_leaves_torch_s_own_random_state_alone(
    checkpoint, tmp_path
):
    before = torch.random.get_rng_state()
    make_demo_model(tmp_path / "other", seed=18, prompt=DEFAULT_USER_PROMPT)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != (
        checkpoint / "model.safetensors"
    ).read_bytes()


def test_it_has_two_to_four_million_float32_parameters_and_tied_embeddings(model):
    assert 2_000_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 4_000_000
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_the_tokenizer_has_1000_coord_tokens_in_order_and_the_model_an_embedding_for_each_token(
    processor, model
):
    ids = processor.tokenizer.convert_tokens_to_ids([f"<|coord_{k}|>" for k in range(1000)])
    assert ids == list(range(ids[0], ids[0] + 1000))
    assert model.get_input_embeddings().weight.shape[0] == len(processor.tokenizer) == ids[-1] + 1


@pytest.mark.parametrize(
    "text",
    [
        serialize_objects(scene(4)),
        "{}",
        'naïve 漢字 \x00 }}} {"a"}\n\t é😀',
        "<|im_start|>user\nHello<|im_end|>",
    ],
)
def test_text_survives_encoding_and_decoding(processor, text):
    assert processor.tokenizer.decode(processor.tokenizer.encode(text)) == text


def test_coord_tokens_survive_decoding_without_special_tokens(processor):
    text = serialize_objects(scene(1))
    assert (
        processor.tokenizer.decode(
            processor.tokenizer.encode(text + "<|im_end|>"), skip_special_tokens=True
        )
        == text
    )


def test_an_object_costs_18_tokens_whatever_its_index_and_its_brace_is_fused_as_in_qwens_vocabulary(
    processor,
):
    pieces = processor.tokenizer.convert_ids_to_tokens(
        processor.tokenizer.encode(serialize_objects(scene(9)))
    )
    assert len(pieces) == 9 * 18
    assert [piece for piece in pieces if "}" in piece] == [*["},"] * 8, "}}"]
    assert processor.tokenizer.tokenize("{}") == ["{}"]


def test_an_image_becomes_36_tokens_whatever_its_size(processor):
    text = processor.apply_chat_template(
        detection_messages(1, system_prompt=None, user_prompt=DEFAULT_USER_PROMPT),
        add_generation_prompt=True,
        tokenize=False,
    )
    assert (
        text
        == f"<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{DEFAULT_USER_PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    )
    for size in (96, 32, 300):
        encoded = processor(
            text=[text], images=[Image.new("RGB", (size, size))], return_tensors="pt"
        )
        assert int((encoded.input_ids == processor.image_token_id).sum()) == 36


def test_the_answer_depends_on_the_image(processor, model):
    text = "<|vision_start|><|image_pad|><|vision_end|>{"
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (96, 96, 3), dtype=np.uint8))
    logits = []
    for image in (Image.new("RGB", (96, 96)), noise):
        with torch.no_grad():
            logits.append(
                model(**processor(text=[text], images=[image], return_tensors="pt")).logits[0, -1]
            )
    assert float((logits[0] - logits[1]).abs().max()) > 1e-3


def test_the_checkpoint_names_the_architecture_and_the_stop_token_that_vllm_reads(
    checkpoint, processor
):
    assert json.loads((checkpoint / "config.json").read_text())["architectures"] == [
        "Qwen3VLForConditionalGeneration"
    ]
    assert json.loads((checkpoint / "generation_config.json").read_text())[
        "eos_token_id"
    ] == processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
