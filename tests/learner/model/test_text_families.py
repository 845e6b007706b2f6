"""Text models of any family: what a run accepts, how it computes them, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from config_support import trajectory_config
from safetensors import safe_open
from text_families import FAMILIES, make_text_model, text_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from launch.checks.model_shape import ModelShape
from launch.tools.demo.language_model import make_tokenizer
from learner.algorithms.advantages import TokenAdvantages
from learner.collate import collate
from learner.model.checkpoint import CheckpointWeights, save_as_published
from learner.model.loading import end_of_turn, load_model, load_tokens, model_type_problem
from learner.model.packed_rows import check_packed_rows, logits_of
from learner.objectives.coord_math import Normalizer
from learner.objectives.registry import build_objectives
from learner.segments import EncodedPrompt, Segment
from learner.step import train_row
from learner.targets import AdvantageTarget, TextWeights
from shared.config.pipeline import Channel
from shared.errors import ConfigError


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_text_model_of_any_family_is_loaded_and_its_packed_rows_are_right(kind, tmp_path):
    folder = make_text_model(tmp_path / kind, kind)
    loaded = load_model(trajectory_config(folder, tmp_path / "run"), torch.device("cpu"))
    assert loaded.is_text and loaded.rope_index is None
    assert check_packed_rows(loaded.model, str(folder), "float32", lambda score: score()) < 1e-5
    ids_1T = torch.arange(3, 20)[None]
    with torch.no_grad():
        hidden_TD = loaded.model.base_model(input_ids=ids_1T).last_hidden_state[0]
        whole_TV = loaded.model(input_ids=ids_1T).logits[0]
        torch.testing.assert_close(logits_of(loaded.model)(hidden_TD), whole_TV)
    # Weights go to engines and files under the names that published files of the family have.
    with safe_open(folder / "model.safetensors", "pt") as file:
        written = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    weights = CheckpointWeights(loaded.model)
    sent = dict(weights.tensors())
    assert [(name, one.dtype, one.shape) for name, one in sent.items()] == list(weights.specs())
    assert sent.keys() == written.keys()
    assert all(torch.equal(sent[name], written[name]) for name in written)
    shape = ModelShape.read(folder)
    assert shape.num_parameters == sum(one.numel() for one in written.values())


def rollouts_of_prompts(num_tokens: int, window: int) -> list[Segment]:
    """Rollouts with advantages: three of a prompt longer than the window, one, two."""
    draw = np.random.default_rng(4)
    segments = []
    for number, length in ((3, window + 5), (1, 6), (2, 4)):
        prompt = EncodedPrompt.from_text(draw.integers(3, num_tokens, length).tolist())
        for _ in range(number):
            count = int(draw.integers(2, 6))
            columns = (draw.uniform(low, 1.0, count).tolist() for low in (-3.0, -1.0, 0.1))
            credit = TokenAdvantages(tuple(range(count)), *map(tuple, columns), (0,) * count)
            token_ids = tuple(draw.integers(3, num_tokens, count).tolist())
            target = AdvantageTarget("x", token_ids, credit, credit.engine_logprobs)
            segments.append(Segment(len(segments), prompt, target))
    return segments


@pytest.mark.parametrize("kind", FAMILIES)
def test_shared_prompts_give_the_loss_and_gradient_of_prompts_that_are_repeated(kind, tmp_path):
    folder = make_text_model(tmp_path / kind, kind)
    config = trajectory_config(folder, tmp_path / "run", training__share_prompts=True)
    if kind == "gemma2":
        with pytest.raises(ConfigError, match=r"share_prompts: .* gemma2 model with eager"):
            load_model(config, torch.device("cpu"))
        return
    loaded = load_model(config, torch.device("cpu"))
    model = loaded.model
    assert check_packed_rows(model, "", "float32", lambda run: run(), shares_prompts=True) < 1e-5
    objectives = build_objectives(config.rollout_matching.pipeline, Channel.B, loaded.coord_ids_C)
    segments = rollouts_of_prompts(model.config.vocab_size, window=16)

    def learned(share_prompts):
        model.zero_grad()
        options = {"rope_index": None, "share_prompts": share_prompts}
        row = collate(segments, text_weights=TextWeights(1.0, 1.0), **options)
        result = train_row(model, row, objectives, Normalizer())
        gradients = {name: one.grad.clone() for name, one in model.named_parameters()}
        return row.num_tokens, result, gradients

    num_apart, apart, expected = learned(False)
    num_shared, shared, gradients = learned(True)
    assert num_apart - num_shared == 2 * 20 + 3
    assert shared.loss == pytest.approx(apart.loss, abs=1e-6)
    torch.testing.assert_close(
        shared.compared_logprobs_K, apart.compared_logprobs_K, atol=5e-6, rtol=0
    )
    norm = torch.cat([one.flatten() for one in expected.values()]).norm()
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() < 1e-6 * norm, name
    assert norm > 0.1


def test_a_model_whose_segments_do_not_see_what_they_share_is_refused():
    model = text_model("llama").eval()
    options = {"path": "here", "dtype": "float32", "forward": lambda score: score()}
    assert check_packed_rows(model, **options) < 1e-5
    message = r"here is a llama model, .* at token 2[6-9] .*; set training\.share_prompts: false"
    with pytest.raises(ConfigError, match=message):
        check_packed_rows(model, **options, shares_prompts=True)


def test_prompts_are_not_shared_by_layers_of_another_kind(tmp_path):
    folder = make_text_model(tmp_path / "gemma3", "gemma3_text")
    path = folder / "config.json"
    layers = {"layer_types": ["sliding_attention", "chunked_attention"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | layers))
    config = trajectory_config(folder, tmp_path / "run", training__share_prompts=True)
    message = "share_prompts: .* gemma3_text model with chunked_attention, .* to false"
    with pytest.raises(ConfigError, match=message):
        load_tokens(config)


@pytest.mark.parametrize("kind", ["bloom", "opt"])
def test_a_model_whose_segments_see_each_other_is_refused_with_the_difference(kind):
    model = text_model(kind).eval()
    with pytest.raises(ConfigError, match=f"here is a {kind} model, .* differs by [0-9.]+;"):
        check_packed_rows(model, "here", "float32", lambda score: score())


def test_weights_that_give_nan_are_told_as_such_and_not_as_a_wrong_attention():
    model = text_model("llama").eval()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(ConfigError, match=r"the model in here computes NaN .*; fetch the"):
        check_packed_rows(model, "here", "float32", lambda score: score())


def test_rounding_to_bfloat16_is_permitted_and_segments_that_see_each_other_are_not():
    check_packed_rows(text_model("llama").bfloat16(), "here", "bfloat16", lambda score: score())
    with pytest.raises(ConfigError, match="here is a opt model"):
        check_packed_rows(
            text_model("opt").eval().bfloat16(), "here", "bfloat16", lambda score: score()
        )


def test_a_model_that_changes_logits_after_its_head_in_an_unknown_way_is_refused():
    model = text_model("llama").eval()

    def halve(_module, _inputs, output):
        output.logits = output.logits / 2

    model.register_forward_hook(halve)
    with pytest.raises(ConfigError, match=r"packed row .*model\.attention=eager"):
        check_packed_rows(model, "here", "float32", lambda score: score())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("mamba", "pass a state"),
        ("qwen3_next", r"\(linear_attention\) pass a state"),
        ("lfm2", r"\(conv\) pass a state"),
        ("t5", "generates no text"),
        ("qwen2_vl", "the nearest is qwen2_5_vl"),
        ("llava", "the nearest is qwen3_vl"),
        ("gemma3", "or any text model"),
    ],
)
def test_other_models_are_refused_by_their_type_with_the_reason(kind, reason):
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    config = CONFIG_MAPPING[kind](**(layers if kind == "lfm2" else {}))
    problem = model_type_problem(Path("here"), config, trains_text=True)
    assert problem is not None and problem.startswith(f"model.path: here is a {kind} model")
    assert re.search(reason, problem)


def test_a_text_model_is_refused_where_images_are_read():
    problem = model_type_problem(Path("here"), CONFIG_MAPPING["llama"]())
    assert problem is not None and re.search("llama .* no images; .*qwen2_5_vl, ", problem)


def test_capped_scores_of_attention_are_computed_by_eager_and_never_dropped(tmp_path):
    folder = make_text_model(tmp_path / "gemma2", "gemma2")
    config = trajectory_config(folder, tmp_path / "run")
    model = load_model(config, torch.device("cpu")).model
    assert model.config._attn_implementation == "eager"
    config = trajectory_config(folder, tmp_path / "run", model__attention="sdpa")
    with pytest.raises(ConfigError, match="attn_logit_softcapping"):
        load_model(config, torch.device("cpu"))


def test_attention_with_dropout_is_refused_before_weights_are_loaded(tmp_path):
    folder = make_text_model(tmp_path / "llama", "llama")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_dropout": 0.1}))
    (folder / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(ConfigError, match=r"dropout, .* 0 in config\.json"):
        load_tokens(trajectory_config(folder, tmp_path / "run"))


LLAMA = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|eot|>{% endfor %}"
GEMMA = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}<end_of_turn>\n{% endfor %}"
MISTRAL = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
REFUSES = "{{ raise_exception('ask something else') }}"
NEEDS_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('give a system message') }}{% endif %}"
)
REFUSES_SYSTEM = NEEDS_SYSTEM.replace("!=", "==")


@pytest.mark.parametrize(
    ("template", "end"),
    [
        *((LLAMA, "<|eot|>"), (GEMMA, "<end_of_turn>")),
        *((NEEDS_SYSTEM + LLAMA, "<|eot|>"), (REFUSES_SYSTEM + LLAMA, "<|eot|>")),
        *((MISTRAL, "<|im_end|>"), (REFUSES, "<|im_end|>"), (None, "<|im_end|>")),
    ],
)
def test_the_chat_template_says_which_token_ends_an_answer(template, end):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<|start|>", "<|eot|>", "<s>", "<end_of_turn>"], special_tokens=True)
    tokenizer.chat_template = template
    assert end_of_turn(tokenizer) == end


def test_a_chat_template_that_is_not_valid_is_refused_with_its_line(tmp_path):
    folder = make_text_model(tmp_path / "llama", "llama")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}\n{{ m.content }")
    with pytest.raises(ConfigError, match=r"chat template of .*line 2: .*fetch it again"):
        load_tokens(trajectory_config(folder, tmp_path / "run"))


def test_experts_are_read_back_from_a_saved_checkpoint(tmp_path):
    """Their names in memory and in files differ."""
    folder = make_text_model(tmp_path / "moe", "qwen3_moe")
    loaded = load_model(trajectory_config(folder, tmp_path / "run"), torch.device("cpu"))
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.add_(0.01)
    (tmp_path / "saved").mkdir()
    weights = dict(CheckpointWeights(loaded.model).tensors())
    save_as_published(loaded.model, tmp_path / "saved", weights, loaded.base)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter)
