import json
from pathlib import Path

import pytest
import torch
from tokenizers.decoders import DecodeStream
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch.demo.language_model import TOOL_CALL, make_demo_lm
from rollout_actors.environments.chat.template import ChatTemplate, PreviousCall
from rollout_actors.environments.examples import copy_digits, hidden_digit
from shared.errors import ConfigError

EVERY_NUMBER = [f"{digit}{digit}{digit}" for digit in range(10)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "lm"
    assert make_demo_lm(out, seed=17)
    return out


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def model(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint)


def dialogue(digits: str) -> list[dict[str, str]]:
    """Both turns, answered."""
    row = copy_digits.row(digits)
    first, last = row["answer"]
    return [
        {"role": "user", "content": row["question"]},
        {"role": "assistant", "content": first},
        {"role": "user", "content": copy_digits.SECOND_TURN},
        {"role": "assistant", "content": last},
    ]


def test_the_same_seed_gives_the_same_bytes(checkpoint, tmp_path):
    make_demo_lm(tmp_path / "again", seed=17)
    for file in checkpoint.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name


def test_another_seed_gives_other_weights_and_leaves_torch_s_own_random_state_alone(
    checkpoint, tmp_path
):
    before = torch.random.get_rng_state()
    make_demo_lm(tmp_path / "other", seed=18)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != (
        checkpoint / "model.safetensors"
    ).read_bytes()


def test_a_checkpoint_that_is_there_is_kept(checkpoint):
    assert not make_demo_lm(checkpoint, seed=17)


def test_it_has_under_300000_float32_parameters_and_tied_embeddings_one_for_each_token(
    model, tokenizer
):
    assert sum(parameter.numel() for parameter in model.parameters()) < 300_000
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer) <= 64


@pytest.mark.parametrize("digits", EVERY_NUMBER)
def test_a_dialogue_has_no_unknown_token_and_survives_encoding_and_decoding(tokenizer, digits):
    text = tokenizer.apply_chat_template(dialogue(digits), tokenize=False)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.unk_token_id not in token_ids
    assert tokenizer.decode(token_ids) == text


def test_a_system_prompt_of_words_that_it_knows_is_a_turn_too(tokenizer):
    messages = [{"role": "system", "content": "first of"}, {"role": "user", "content": "last"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert (
        text == "<|im_start|>system\nfirst"
        " of<|im_end|><|im_start|>user\nlast<|im_end|><|im_start|>assistant\n"
    )
    assert tokenizer.unk_token_id not in tokenizer.encode(text)


def test_a_digit_is_the_same_token_in_a_question_and_as_an_answer(tokenizer):
    (answer,) = tokenizer.encode("4")
    assert tokenizer.encode(copy_digits.row("041")["question"]).count(answer) == 1


def test_what_is_sampled_reads_as_its_tokens_put_behind_each_other(tokenizer):
    words = [
        (token_id, word)
        for word, token_id in tokenizer.get_vocab().items()
        if token_id not in tokenizer.all_special_ids
    ]
    for one, its_text in words:
        for other, other_text in words:
            assert (
                tokenizer.decode([one, other, tokenizer.eos_token_id], skip_special_tokens=True)
                == its_text + other_text
            )


def test_the_tokenizer_gives_the_same_text_token_by_token_as_vllm_reads_it(tokenizer):
    token_ids = tokenizer.encode("first of 431")
    stream = DecodeStream(skip_special_tokens=True)
    pieces = [stream.step(tokenizer.backend_tokenizer, token_id) for token_id in token_ids]
    assert pieces == ["first", " of", " ", "4", "3", "1"]


def test_every_answer_is_followed_by_the_second_turn_without_being_tokenised_again(tokenizer):
    tokens = ChatTemplate(tokenizer)
    asked = dialogue("412")[:1]
    rendered = tokens.render(asked, None)
    prompt = tokens.encode(rendered)
    for sampled in range(len(tokenizer)):
        for stop in (None, tokenizer.eos_token_id):
            if sampled == tokenizer.eos_token_id:
                continue
            ending = () if stop is None else (stop,)
            answer = {"role": "assistant", "content": tokens.decode((sampled,), with_special=False)}
            last = PreviousCall(
                rendered,
                1,
                (*prompt, sampled, *ending),
                tokens.decode((sampled,), with_special=True),
                stop,
                "" if stop is None else tokenizer.eos_token,
                answer,
            )
            messages = [*asked, answer, {"role": "user", "content": copy_digits.SECOND_TURN}]
            continued = tokens.continued(last, tokens.render(messages, None), messages, None)
            assert continued is not None, tokenizer.convert_ids_to_tokens(sampled)
            assert continued[: len(prompt) + 2] == (*prompt, sampled, tokenizer.eos_token_id)
            assert tokenizer.unk_token_id not in continued[len(prompt) + 1 :]


def test_the_answer_depends_on_the_number(tokenizer, model):
    logits = []
    for digits in ("012", "342"):
        text = tokenizer.apply_chat_template(
            dialogue(digits)[:1], tokenize=False, add_generation_prompt=True
        )
        with torch.no_grad():
            logits.append(
                model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False)).logits[
                    0, -1
                ]
            )
    assert float((logits[0] - logits[1]).abs().max()) > 1e-3


def test_the_checkpoint_names_the_architecture_and_the_stop_token_that_vllm_reads(
    checkpoint, tokenizer
):
    assert json.loads((checkpoint / "config.json").read_text())["architectures"] == [
        "Qwen3ForCausalLM"
    ]
    assert json.loads((checkpoint / "generation_config.json").read_text())[
        "eos_token_id"
    ] == tokenizer.convert_tokens_to_ids("<|im_end|>")


# That can call a tool


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "lm_tools"
    assert make_demo_lm(out, seed=17, tools=True)
    return out


@pytest.fixture
def calls_tools(with_tools):
    """Its tokenizer."""
    return AutoTokenizer.from_pretrained(with_tools)


TOOLS = hidden_digit.load_environment().oai_tools
QUESTION = {"role": "user", "content": hidden_digit.QUESTION}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "peek", "arguments": "{}"}}
    ],
}


def test_the_model_with_tools_is_another_checkpoint_with_the_same_bytes_each_time(
    with_tools, tmp_path
):
    make_demo_lm(tmp_path / "again", seed=17, tools=True)
    for file in with_tools.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name
    with pytest.raises(ConfigError, match="was made from another tools"):
        make_demo_lm(with_tools, seed=17)


def test_a_rollout_with_a_tool_call_has_no_unknown_token_and_goes_on_from_the_call_as_it_was_sampled(
    calls_tools,
):
    tokens = ChatTemplate(calls_tools)
    rendered = tokens.render([QUESTION], TOOLS)
    assert '"name": "peek"' in rendered
    (call,) = tokens.encode(TOOL_CALL)
    prompt, end = tokens.encode(rendered), calls_tools.eos_token_id
    last = PreviousCall(
        rendered, 1, (*prompt, call, end), TOOL_CALL, end, calls_tools.eos_token, CALLED
    )
    messages = [QUESTION, CALLED, {"role": "tool", "tool_call_id": "a", "content": "7"}]
    continued = tokens.continued(last, tokens.render(messages, TOOLS), messages, TOOLS)
    assert continued is not None
    assert continued[: len(prompt) + 2] == (*prompt, call, end)
    assert calls_tools.unk_token_id not in continued
    assert (
        tokens.decode(continued[len(prompt) + 2 :], with_special=True)
        == "<|im_start|>tool\n7<|im_end|><|im_start|>assistant\n"
    )


def test_random_weights_call_the_tool_in_one_answer_of_a_hundred_or_more(with_tools, calls_tools):
    model = AutoModelForCausalLM.from_pretrained(with_tools)
    tokens = ChatTemplate(calls_tools)
    with torch.no_grad():
        logits = model(torch.tensor([tokens.encode(tokens.render([QUESTION], TOOLS))])).logits[
            0, -1
        ]
    assert float(logits.softmax(-1)[calls_tools.convert_tokens_to_ids(TOOL_CALL)]) > 0.01
