"""A model without a vision tower is trained on trajectories, and on nothing else."""

from __future__ import annotations

import pytest
import torch
from config_support import configuration, trajectory_config
from tiny_qwen import stock_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from learner.model.checkpoint import CheckpointContent
from learner.model.loading import load_model
from learner.model.parts import trained_parameters
from shared.errors import ConfigError
from shared.model_families import ModelPart


@pytest.fixture(scope="module")
def text_checkpoint(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("text_model"), stock_tokenizer()
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    torch.manual_seed(5)
    config = Qwen3Config(vocab_size=len(tokenizer), tie_word_embeddings=True, **shape, **heads)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def config(text_checkpoint, tmp_path):
    return trajectory_config(text_checkpoint, tmp_path)


def test_it_loads_with_its_tokenizer_and_all_of_it_is_the_language_model(config):
    loaded = load_model(config, torch.device("cpu"))
    assert loaded.tokenizer is loaded.processor
    assert (loaded.rope_index, loaded.banned_token_ids, len(loaded.coord_ids_C)) == (None, (), 0)
    assert {part for part, _ in trained_parameters(loaded.model)} == {ModelPart.LANGUAGE_MODEL}
    assert loaded.codec.eos_token_id == loaded.tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_its_checkpoint_loads_elsewhere(config, tmp_path):
    loaded, folder = load_model(config, torch.device("cpu")), tmp_path / "saved"
    weights = {name: one.detach() for name, one in loaded.model.named_parameters()}
    folder.mkdir()
    content = CheckpointContent(loaded.model, loaded.base, weights)
    content.write_weights(folder)
    elsewhere = AutoModelForCausalLM.from_pretrained(folder)
    vocabulary = AutoTokenizer.from_pretrained(folder).get_vocab()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in elsewhere.named_parameters())
    assert vocabulary == loaded.tokenizer.get_vocab()


def test_grounding_needs_a_vision_tower(text_checkpoint, demo_data, tmp_path):
    config = configuration(text_checkpoint, demo_data, tmp_path)
    message = r"model\.path: .* is a qwen3 model, which reads no images; choose one of qwen2_5_vl, "
    with pytest.raises(ConfigError, match=message):
        load_model(config, torch.device("cpu"))
