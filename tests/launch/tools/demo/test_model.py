"""Both of the demo's models are ordinary checkpoints; this is the one that sees."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from launch.tools.demo.__main__ import main
from launch.tools.demo.crowded_model import labelled
from launch.tools.demo.language_model import make_demo_lm
from launch.tools.demo.model import make_demo_model
from launch.tools.demo.scenes import Digit, Placed
from launch.tools.demo.tower import LabelledBox, dense_labels
from shared.grounding.serialize import serialize_objects
from shared.prompts import DEFAULT_USER_PROMPT, detection_messages
from shared.records import GeometryKind, GroundTruthObject


def make_detector(out: Path, *, seed: int) -> bool:
    return make_demo_model(out, seed=seed, prompt=DEFAULT_USER_PROMPT)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "model"
    assert make_detector(out, seed=17)
    return out


@pytest.fixture(scope="module")
def processor(checkpoint):
    return AutoProcessor.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def tokenizer(processor):
    return processor.tokenizer


@pytest.fixture(scope="module")
def model(checkpoint):
    return AutoModelForImageTextToText.from_pretrained(checkpoint)


def scene(count: int) -> list[GroundTruthObject]:
    shapes = [(100 * i, 5, 100 * i + 99, 999) for i in range(count)]
    return [GroundTruthObject(GeometryKind.BBOX, bins, "seven") for bins in shapes]


@pytest.mark.slow
@pytest.mark.parametrize("make", [make_detector, make_demo_lm])
def test_a_seed_gives_the_same_bytes_each_time_and_leaves_torch_s_own_random_state_alone(
    make, tmp_path
):
    before = torch.random.get_rng_state()
    folders = [tmp_path / "first", tmp_path / "again", tmp_path / "other"]
    for folder, seed in zip(folders, (17, 17, 18), strict=True):
        assert make(folder, seed=seed)
    assert not make(folders[0], seed=17), "it exists"
    assert torch.equal(torch.random.get_rng_state(), before)
    first, again, other = (
        {path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders
    )
    assert first == again
    assert first["model.safetensors"] != other["model.safetensors"]


@pytest.mark.parametrize(
    ("make", "architecture"),
    [(make_detector, "Qwen3VLForConditionalGeneration"), (make_demo_lm, "Qwen3ForCausalLM")],
)
def test_the_checkpoint_names_the_architecture_and_the_stop_token_that_vllm_reads(
    make, architecture, tmp_path
):
    make(tmp_path / "model", seed=17)

    def read(name):
        return json.loads((tmp_path / "model" / name).read_text())

    assert read("config.json")["architectures"] == [architecture]
    added = read("tokenizer.json")["added_tokens"]
    (stop,) = (token["id"] for token in added if token["content"] == "<|im_end|>")
    assert read("generation_config.json")["eos_token_id"] == stop


def test_it_has_two_to_four_million_float32_parameters_and_tied_embeddings(model):
    assert 2_000_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 4_000_000
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_the_tokenizer_has_1000_coord_tokens_in_order_and_the_model_an_embedding_for_each_token(
    tokenizer, model
):
    ids = tokenizer.convert_tokens_to_ids([f"<|coord_{k}|>" for k in range(1000)])
    assert ids == list(range(ids[0], ids[0] + 1000))
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer) == ids[-1] + 1


@pytest.mark.parametrize(
    "text",
    [
        serialize_objects(scene(4)),
        "{}",
        'naïve 漢字 \x00 }}} {"a"}\n\t é😀',
        "<|im_start|>user\nHello<|im_end|>",
    ],
)
def test_text_survives_encoding_and_decoding(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_object_costs_18_tokens_whatever_its_index_and_its_brace_is_fused_as_in_qwens_vocabulary(
    tokenizer,
):
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode(serialize_objects(scene(9))))
    assert len(pieces) == 9 * 18
    assert [piece for piece in pieces if "}" in piece] == [*["},"] * 8, "}}"]
    assert tokenizer.tokenize("{}") == ["{}"]


def test_an_image_becomes_36_tokens_whatever_its_size(processor):
    messages = detection_messages(1, system_prompt=None, user_prompt=DEFAULT_USER_PROMPT)
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    asked = f"<|im_start|>user\n{image}{DEFAULT_USER_PROMPT}<|im_end|>\n"
    assert text == f"{asked}<|im_start|>assistant\n"
    for size in (96, 32, 300):
        picture = Image.new("RGB", (size, size))
        encoded = processor(text=[text], images=[picture], return_tensors="pt")
        assert int((encoded.input_ids == processor.image_token_id).sum()) == 36


def placed(name: str, left: int, top: int, size: int) -> Placed:
    return Placed(Digit(np.zeros((8, 8), dtype=np.uint8), name), left, top, size, canvas=160)


def name_and_edges(scene):
    (one,) = labelled([scene])
    labels = dense_labels(one.boxes, one.image.size, (10, 10))
    return labels.name.reshape(10, 10), labels.edges.reshape(10, 10, 4)


def test_a_token_is_labelled_with_the_digit_that_its_middle_lies_on():
    # Middles of tokens are at 8, 24, 40, ...
    six = placed("six", 16, 32, 32)
    name, edges = name_and_edges([six, placed("", 64, 64, 16)])
    assert {(int(y), int(x)) for y, x in np.argwhere(name == 6)} == {
        (2, 1),
        (2, 2),
        (3, 1),
        (3, 2),
    }
    assert (name == -1).sum() == 10 * 10 - 4
    assert edges[2, 1] * 48 == pytest.approx([8, 8, 24, 24])
    assert edges[3, 2] * 48 == pytest.approx([24, 24, 8, 8])


def test_where_two_digits_overlap_a_token_is_of_the_nearer_one():
    left = placed("one", 0, 0, 32)
    right = placed("two", 16, 0, 48)
    for scene in ([left, right], [right, left]):
        name, _ = name_and_edges(scene)
        # Both lie on the middle (24, 8): 11 pixels from that of "one", 22 from that of "two".
        assert name[0, :4].tolist() == [1, 1, 2, 2]


def test_labels_of_an_image_that_is_not_square_follow_its_width_and_height():
    # 4 x 2 tokens of 20 x 20 pixels; middles are at 10, 30, 50, 70 and at 10, 30.
    labels = dense_labels([LabelledBox(20, 20, 60, 40, 2)], (80, 40), (4, 2))
    assert labels.name.reshape(2, 4).tolist() == [[-1] * 4, [-1, 2, 2, -1]]
    assert labels.edges.reshape(2, 4, 4)[1, 1] * 24 == pytest.approx([10, 10, 30, 10])


def test_the_tower_alone_is_taught_and_the_same_arguments_give_the_same_weights(tmp_path, capsys):
    def weights(name, steps):
        arguments = ["--out", str(tmp_path / name), "--tower-steps", str(steps)]
        main(["crowded-model", *arguments])
        return AutoModelForImageTextToText.from_pretrained(tmp_path / name).state_dict()

    random, taught, again = weights("random", 0), weights("taught", 2), weights("again", 2)
    assert "tower     2/2  names right under " in capsys.readouterr().out
    changed = {name for name in random if not torch.equal(random[name], taught[name])}
    assert changed
    assert all(name.startswith("model.visual.") for name in changed)
    assert all(torch.equal(taught[name], again[name]) for name in taught)
