"""A GGUF file becomes a checkpoint folder with its weights, tokenizer and chat template."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch.tools import import_gguf as tool
from shared.errors import ConfigError
from tests.fixtures.gguf_file import WORDS, weights, write_gguf

NAMES = {
    "token_embd": "model.embed_tokens",
    "blk.0.attn_v": "model.layers.0.self_attn.v_proj",
    "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj",
    "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
    "output_norm": "model.norm",
}
"""Names in GGUF and in transformers. (Rows of q and k have another order in GGUF.)"""


@pytest.mark.slow
def test_a_folder_has_the_files_weights_its_tokens_and_its_chat_template(tmp_path):
    line = tool.import_gguf(write_gguf(tmp_path / "a.gguf"), tmp_path / "out", dtype=torch.float32)
    assert "llama" in line and f"{len(WORDS)} tokens" in line
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype is torch.float32
    assert model.generation_config.eos_token_id == 2
    state = model.state_dict()
    for name, ours in NAMES.items():
        np.testing.assert_array_equal(state[f"{ours}.weight"].numpy(), weights()[name])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.convert_ids_to_tokens(range(len(WORDS))) == list(WORDS)
    assert len(tokenizer) == len(WORDS)
    chat = [{"role": "user", "content": "abc"}]
    assert tokenizer.apply_chat_template(chat, return_dict=False) == [7, 2]


@pytest.mark.slow
def test_quantized_weights_are_stored_in_floating_point(tmp_path):
    file = write_gguf(tmp_path / "a.gguf", quantize=True)
    tool.main([f"file={file}", f"out={tmp_path / 'out'}"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype is torch.bfloat16
    for name, ours in NAMES.items():
        found = model.state_dict()[f"{ours}.weight"].float().numpy()
        # Q4_1: 16 values between the smallest and largest of 32 weights, here up to 0.6 apart.
        np.testing.assert_allclose(found, weights()[name], atol=0.03)
    assert not hasattr(model.config, "quantization_config")


def test_what_cannot_be_imported_is_refused(tmp_path, monkeypatch):
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"absent\.gguf"):
        tool.import_gguf(tmp_path / "absent.gguf", out, dtype=torch.float32)
    (tmp_path / "text").write_text("text")
    with pytest.raises(ConfigError, match=r"b'text'"):
        tool.import_gguf(tmp_path / "text", out, dtype=torch.float32)
    with pytest.raises(ConfigError, match="unheard_of"):
        tool.import_gguf(write_gguf(tmp_path / "a.gguf", "unheard_of"), out, dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"9 tokens .* 8"):
        tool.import_gguf(
            write_gguf(tmp_path / "a.gguf", words=[*WORDS, "more"]), out, dtype=torch.float32
        )
    assert not out.exists()
    with pytest.raises(ConfigError, match=str(tmp_path)):
        tool.import_gguf(write_gguf(tmp_path / "a.gguf"), tmp_path, dtype=torch.float32)
    monkeypatch.setattr(tool, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps gguf==0.19.0"):
        tool.import_gguf(write_gguf(tmp_path / "a.gguf"), out, dtype=torch.float32)
