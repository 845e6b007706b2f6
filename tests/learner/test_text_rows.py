"""Rows without images: of a text model, and of a model with a vision tower beside rows that have
some. Packed, they are what each segment is alone.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_qwen import TOWERS, make_stock_model
from transformers import AutoModelForImageTextToText, Qwen3Config, Qwen3ForCausalLM

from learner.collate import collate
from learner.segments import EncodedPrompt, Segment
from learner.targets import Target, TextWeights, TokenRole

NO_TEXT = TextWeights(desc=0.0, matched_structure=0.0, structure=0.0)
NUM_IDS = 60


def segment(position: int, num_prompt: int, num_target: int) -> Segment:
    ids = np.random.default_rng(position).integers(5, NUM_IDS, num_prompt + num_target).tolist()
    roles = np.full(num_target, TokenRole.NEUTRAL, dtype=np.uint8)
    logprobs = (-1.0,) * num_target
    target = Target("s", tuple(ids[num_prompt:]), roles, (), (), (), compared_logprobs=logprobs)
    return Segment(position, EncodedPrompt.from_text(ids[:num_prompt]), target)


SEGMENTS = [segment(0, 7, 3), segment(1, 12, 1), segment(2, 5, 9)]


@pytest.fixture(scope="module", params=["qwen3", *TOWERS])
def parts(request, tmp_path_factory):
    torch.manual_seed(3)
    if request.param == "qwen3":
        shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
        config = Qwen3Config(num_hidden_layers=2, tie_word_embeddings=True, **shape, **heads)
        return Qwen3ForCausalLM(config).train(), None
    folder = make_stock_model(tmp_path_factory.mktemp("stock"), request.param)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return model.train(), model.model.get_rope_index


def hidden_of(model, rope_index, segments):
    row = collate(segments, text_weights=NO_TEXT, rope_index=rope_index)
    inputs = row.inputs
    assert inputs.image_arguments(torch.float32) == {}
    ids, positions = inputs.input_ids, inputs.position_ids
    output = model.model(
        input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False
    )
    return row, output.last_hidden_state[0]


@pytest.mark.slow
def test_a_packed_row_without_images_is_what_its_segments_are_alone(parts):
    model, rope_index = parts
    row, packed = hidden_of(model, rope_index, SEGMENTS)
    assert row.num_tokens == sum(map(len, SEGMENTS)) == len(packed)
    alone = [hidden_of(model, rope_index, [one])[1] for one in SEGMENTS]
    torch.testing.assert_close(packed, torch.cat(alone), atol=2e-5, rtol=1e-4)
    ids_1L = torch.tensor([[*SEGMENTS[1].prompt.token_ids, *SEGMENTS[1].target.token_ids]])
    plain = model.model(input_ids=ids_1L, use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(alone[1], plain, atol=2e-5, rtol=1e-4)


def test_its_sampled_tokens_are_predicted_by_the_position_before_them(parts):
    row, _ = hidden_of(*parts, SEGMENTS)
    sampled = [token for one in SEGMENTS for token in one.target.token_ids]
    assert row.token_ids_N[row.compared.at].tolist() == sampled
