"""Makes the demo environments' language model: a Qwen3 with about 250,000 random weights.

`AutoModelForCausalLM`, `AutoTokenizer` and vLLM load the checkpoint without code of this project.
The same arguments give the same bytes. With `tools`, the model knows the words of the environment
`hidden_digit`. A whole tool call is one token, so that random weights sometimes sample it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from launch.tools.demo.once import make_once
from rollout_actors.environments.examples import copy_digits, hidden_digit

HIDDEN = 128
HEAD_SIZE = 32
"""Size of an attention head: the smallest that vLLM supports on CPU."""
MAX_LENGTH = 512

PAD = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"
UNKNOWN = "<|unknown|>"
SPECIAL_TOKENS = (PAD, START, END, UNKNOWN)

# A word with the space before it and the line feed after it, or any single character. A digit has
# the same token in questions and answers, so a model that copies it needs only one embedding.
# Joining the texts of tokens gives the whole text.
PIECES = r" ?[A-Za-z]+\n?|[^A-Za-z]"

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

TOOLS_CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool.function | tojson }}
    {%- endfor %}
    {{- '<|im_end|>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + ({'name': call.function.name, \
'arguments': call.function.arguments} | tojson) + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
TOOL_CALL = '<tool_call>{"name": "peek", "arguments": {}}</tool_call>'
"""A tool call in the form of the chat template and of vLLM's parser `hermes`."""


def tokenizer_texts(*, tools: bool) -> Iterator[str]:
    """Yield texts with all words that a demo environment needs.

    `tools`: the environment `hidden_digit`, which has a tool; else `copy_digits`.
    """
    yield from ("system\n", "user\n", "assistant\n")
    if tools:
        environment = hidden_digit.load_environment()
        yield from ("tool\n", hidden_digit.QUESTION, "0123456789")
        yield from (json.dumps(tool["function"]) for tool in environment.oai_tools)
    else:
        yield copy_digits.row("0123456789")["question"]
        yield copy_digits.SECOND_TURN


def make_tokenizer(*, tools: bool = False) -> PreTrainedTokenizerFast:
    """Return the demo's tokenizer: special tokens, then a token per word of `tokenizer_texts`.

    Any other word becomes the unknown token. `tools`: the tokenizer for the environment with a
    tool.
    """
    words = [piece for text in tokenizer_texts(tools=tools) for piece in re.findall(PIECES, text)]
    distinct = dict.fromkeys((*SPECIAL_TOKENS, *words))
    vocabulary = {word: number for number, word in enumerate(distinct)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    # Without a decoder, tokens would be joined by spaces.
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    if tools:
        tokenizer.add_tokens([AddedToken(TOOL_CALL, special=False, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        extra_special_tokens=[START],
        chat_template=TOOLS_CHAT_TEMPLATE if tools else CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=HEAD_SIZE,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
        initializer_range=0.02,
        dtype="float32",
    )


def make_demo_lm(out: Path, *, seed: int, tools: bool = False) -> bool:
    """Write the language model's checkpoint to the folder `out` with `make_once`.

    `tools`: the model for the environment with a tool. Return whether the folder is new.
    """

    def make(folder: Path) -> None:
        tokenizer = make_tokenizer(tools=tools)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = Qwen3ForCausalLM(make_config(tokenizer))
        model.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return make_once(out, {"seed": seed, "tools": 1} if tools else {"seed": seed}, make)
