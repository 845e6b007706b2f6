"""The chat template of the demo's SmolLM2: the model's own, and tools."""

from __future__ import annotations

import json
import re

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from launch.tools.demo.smollm import CHAT_TEMPLATE

OWN = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template of SmolLM2-135M-Instruct."""


def rendered(template, messages, **options):
    (text,), _ = render_jinja_template([messages], chat_template=template, **options)
    return text


@pytest.mark.parametrize("roles", ["user", "system user", "system user assistant user"])
@pytest.mark.parametrize("prompt", [True, False])
def test_without_tools_the_text_is_that_of_the_models_own_template(roles, prompt):
    messages = [{"role": role, "content": f" of the {role}\n"} for role in roles.split()]
    options = {"add_generation_prompt": prompt}
    assert rendered(CHAT_TEMPLATE, messages, **options) == rendered(OWN, messages, **options)


def test_tools_are_described_and_calls_and_their_answers_are_shown():
    function = {"name": "add", "description": "Return a + b.", "parameters": {"type": "object"}}
    called = {"name": "add", "arguments": {"a": 1, "b": 2}}
    text = rendered(
        CHAT_TEMPLATE,
        [
            {"role": "user", "content": "What is 1 + 2?"},
            {"role": "assistant", "content": None, "tool_calls": [{"function": called}]},
            {"role": "tool", "content": "3"},
        ],
        tools=[{"type": "function", "function": function}],
        add_generation_prompt=True,
    )
    system, question, call, answer, prompt = text.split("<|im_start|>")[1:]
    assert json.loads(system.splitlines()[2]) == function
    assert question == "user\nWhat is 1 + 2?<|im_end|>\n"
    written = re.fullmatch(r"assistant\n<tool_call>(.*)</tool_call><\|im_end\|>\n", call, re.DOTALL)
    assert json.loads(written[1]) == called, "as vLLM's parser `hermes` reads it"
    assert answer == "user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
    assert prompt == "assistant\n"
