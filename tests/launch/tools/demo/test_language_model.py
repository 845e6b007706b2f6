from itertools import product
from pathlib import Path

import pytest
import torch
from tokenizers.decoders import DecodeStream
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch.tools.demo.language_model import TOOL_CALL, make_demo_lm
from rollout_actors.environments.chat.template import ChatTemplate, PreviousCall
from rollout_actors.environments.examples import copy_digits, hidden_digit
from shared.errors import ConfigError


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
    """Write both turns, answered."""
    row = copy_digits.row(digits)
    first, last = row["answer"]
    return [
        {"role": "user", "content": row["question"]},
        {"role": "assistant", "content": first},
        {"role": "user", "content": copy_digits.SECOND_TURN},
        {"role": "assistant", "content": last},
    ]


def test_it_has_under_300000_float32_parameters_and_tied_embeddings_one_for_each_token(
    model, tokenizer
):
    assert sum(parameter.numel() for parameter in model.parameters()) < 300_000
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer) <= 64


@pytest.mark.parametrize("digits", [3 * str(digit) for digit in range(10)])
def test_a_dialogue_has_no_unknown_token_and_survives_encoding_and_decoding(tokenizer, digits):
    text = tokenizer.apply_chat_template(dialogue(digits), tokenize=False)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.unk_token_id not in token_ids
    assert tokenizer.decode(token_ids) == text


def test_what_is_sampled_reads_as_its_tokens_put_behind_each_other(tokenizer):
    special = tokenizer.all_special_ids
    words = [(text, at) for text, at in tokenizer.get_vocab().items() if at not in special]
    for (first_text, first), (second_text, second) in product(words, words):
        token_ids = [first, second, tokenizer.eos_token_id]
        shown = tokenizer.decode(token_ids, skip_special_tokens=True)
        assert shown == first_text + second_text


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
    end = tokenizer.eos_token_id
    answers = [sampled for sampled in range(len(tokenizer)) if sampled != end]
    for sampled, (ending, stop) in product(answers, [((), None), ((end,), end)]):
        answer = {"role": "assistant", "content": tokens.decode((sampled,), with_special=False)}
        sampled_text = tokens.decode((sampled,), with_special=True)
        stop_text = "" if stop is None else tokenizer.eos_token
        token_ids = (*prompt, sampled, *ending)
        last = PreviousCall(rendered, 1, token_ids, sampled_text, stop, stop_text, answer)
        messages = [*asked, answer, {"role": "user", "content": copy_digits.SECOND_TURN}]
        continued = tokens.continued(last, tokens.render(messages, None), messages, None)
        assert continued is not None, tokenizer.convert_ids_to_tokens(sampled)
        assert continued[: len(prompt) + 2] == (*prompt, sampled, end)
        assert tokenizer.unk_token_id not in continued[len(prompt) + 1 :]


# The one that can call a tool


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "lm_tools"
    assert make_demo_lm(out, seed=17, tools=True)
    return out


@pytest.fixture
def tools_tokenizer(with_tools):
    return AutoTokenizer.from_pretrained(with_tools)


TOOLS = hidden_digit.load_environment().oai_tools
QUESTION = {"role": "user", "content": hidden_digit.QUESTION}
CALL = {"id": "a", "type": "function", "function": {"name": "peek", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_the_model_with_tools_is_another_checkpoint_with_the_same_bytes_each_time(
    with_tools, tmp_path
):
    make_demo_lm(tmp_path / "again", seed=17, tools=True)
    for file in with_tools.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name
    assert not make_demo_lm(with_tools, seed=17, tools=True)
    with pytest.raises(ConfigError, match="was made from another tools"):
        make_demo_lm(with_tools, seed=17)


def test_a_rollout_with_a_tool_call_has_no_unknown_token_and_goes_on_from_the_call_as_it_was_sampled(
    tools_tokenizer,
):
    tokens = ChatTemplate(tools_tokenizer)
    rendered = tokens.render([QUESTION], TOOLS)
    assert '"name": "peek"' in rendered
    (call,) = tokens.encode(TOOL_CALL)
    prompt = tokens.encode(rendered)
    end = tools_tokenizer.eos_token_id
    sampled = (*prompt, call, end)
    last = PreviousCall(rendered, 1, sampled, TOOL_CALL, end, tools_tokenizer.eos_token, CALLED)
    messages = [QUESTION, CALLED, {"role": "tool", "tool_call_id": "a", "content": "7"}]
    continued = tokens.continued(last, tokens.render(messages, TOOLS), messages, TOOLS)
    assert continued is not None
    assert continued[: len(sampled)] == sampled
    assert tools_tokenizer.unk_token_id not in continued
    appended = tokens.decode(continued[len(sampled) :], with_special=True)
    assert appended == "<|im_start|>tool\n7<|im_end|><|im_start|>assistant\n"


def test_random_weights_call_the_tool_in_one_answer_of_a_hundred_or_more(
    with_tools, tools_tokenizer
):
    model = AutoModelForCausalLM.from_pretrained(with_tools)
    tokens = ChatTemplate(tools_tokenizer)
    prompt = tokens.encode(tokens.render([QUESTION], TOOLS))
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    call = tools_tokenizer.convert_tokens_to_ids(TOOL_CALL)
    assert float(logits.softmax(-1)[call]) > 0.01
