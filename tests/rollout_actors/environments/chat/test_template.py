"""Prompts that go on from the call before them, for templates as they are written."""

from __future__ import annotations

from typing import Any

import pytest
from environment_support import assistant, user
from scripted_engines import CHATML, demo_tokenizer

from rollout_actors.environments.chat.template import ChatTemplate, PreviousCall

STOP = "<|im_end|>"

TRIMMING = CHATML.replace("message.content }}", "(message.content | trim) }}")
"""As Llama 3's: without the spaces around a message."""

FORGETFUL = """\
{%- set last = namespace(user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and loop.index0 < last.user %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""As Qwen 3's: what was thought before the last question is left out."""

COUNTING = """\
{{- messages | length }}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Begins otherwise with every message."""

BARE = """\
{%- for message in messages %}{{- message.role + ': ' + message.content + '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}
"""
"""Ends no message with a special token."""


def chat_of(template: str = CHATML, **kwargs: Any) -> ChatTemplate:
    return ChatTemplate(demo_tokenizer(template), **kwargs)


def spoken(
    chat: ChatTemplate,
    messages: list[dict[str, Any]],
    sampled: str,
    *,
    stop: str = STOP,
    content: str | None = None,
) -> PreviousCall:
    """`sampled` is the answer to these messages, and `content` what the environment is told of
    it."""
    rendered = chat.render(messages, None)
    token_ids = chat.encode(rendered) + chat.encode(sampled) + (chat.encode(stop) if stop else ())
    answer = assistant(sampled if content is None else content)
    return PreviousCall(
        rendered,
        len(messages),
        token_ids,
        sampled,
        chat.encode(stop)[0] if stop else None,
        stop,
        answer,
    )


def gone_on(chat: ChatTemplate, last: PreviousCall, messages: list[dict[str, Any]]) -> str | None:
    """What follows the last call's tokens in the prompt of these messages, as text."""
    prompt = chat.continued(last, chat.render(messages, None), messages, None)
    if prompt is None:
        return None
    assert prompt[: len(last.token_ids)] == last.token_ids
    return chat.decode(prompt[len(last.token_ids) :], with_special=True)


NEXT = "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


def test_what_the_template_adds_follows_the_sampled_tokens() -> None:
    chat, asked = chat_of(), [user("hello")]
    assert (
        gone_on(chat, spoken(chat, asked, "red"), [*asked, assistant("red"), user("more")]) == NEXT
    )


def test_a_response_that_ended_without_its_stop_token_gets_the_templates_end_of_message_as_unsampled_tokens() -> (
    None
):
    chat, asked = chat_of(), [user("hello")]
    assert (
        gone_on(chat, spoken(chat, asked, "red", stop=""), [*asked, assistant("red"), user("more")])
        == STOP + NEXT
    )


def test_tokens_are_kept_as_they_were_sampled_though_the_text_has_others() -> None:
    chat, asked = chat_of(), [user("hello")]
    letters = tuple(token for letter in "assistant" for token in chat.encode(letter))
    assert letters != chat.encode("assistant")
    rendered = chat.render(asked, None)
    token_ids = chat.encode(rendered) + letters + chat.encode(STOP)
    last = PreviousCall(
        rendered, 1, token_ids, "assistant", chat.encode(STOP)[0], STOP, assistant("assistant")
    )
    assert gone_on(chat, last, [*asked, assistant("assistant"), user("more")]) == NEXT


@pytest.mark.slow
@pytest.mark.parametrize("stop", [STOP, ""])
def test_an_answer_that_the_template_trims_is_gone_on_from_as_it_was_sampled(stop: str) -> None:
    chat, asked = chat_of(TRIMMING), [user("hello")]
    last = spoken(chat, asked, "  red \n", stop=stop)
    assert gone_on(chat, last, [*asked, assistant("  red \n"), user("more")]) == (
        NEXT if stop else STOP + NEXT
    )


def test_an_answer_with_special_tokens_inside_which_the_environment_is_not_told_is_gone_on_from() -> (
    None
):
    chat, asked = chat_of(), [user("hello")]
    last = spoken(chat, asked, "red<|im_start|> box", content="red box")
    assert gone_on(chat, last, [*asked, assistant("red box"), user("more")]) == NEXT


def test_a_template_that_leaves_out_earlier_thoughts_has_no_such_addition() -> None:
    chat, asked = chat_of(FORGETFUL), [user("hello")]
    last = spoken(chat, asked, "<think>so</think>red")
    assert gone_on(chat, last, [*asked, assistant("<think>so</think>red"), user("more")]) is None


def test_a_template_that_leaves_out_earlier_thoughts_is_gone_on_from_while_it_keeps_them() -> None:
    chat, asked = chat_of(FORGETFUL), [user("hello")]
    last = spoken(chat, asked, "<think>so</think>red")
    messages = [*asked, assistant("<think>so</think>red"), {"role": "tool", "content": "4"}]
    assert (
        gone_on(chat, last, messages) == "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"
    )
    without = spoken(chat, asked, "red")
    assert gone_on(chat, without, [*asked, assistant("red"), user("more")]) == NEXT


@pytest.mark.parametrize("template", [COUNTING, BARE])
def test_a_template_that_rewrites_what_was_said_or_knows_no_stop_token_has_no_such_addition(
    template: str,
) -> None:
    chat, asked = chat_of(template), [user("hello")]
    assert (
        gone_on(chat, spoken(chat, asked, "red"), [*asked, assistant("red"), user("more")]) is None
    )


def test_without_a_stop_token_a_template_of_plain_text_is_gone_on_from() -> None:
    chat, asked = chat_of(BARE), [user("hello")]
    assert (
        gone_on(chat, spoken(chat, asked, "red", stop=""), [*asked, assistant("red"), user("more")])
        == "\nuser: more\nassistant: "
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "messages",
    [
        [user("other"), assistant("red"), user("more")],
        [user("hello"), assistant("blue"), user("more")],
        [user("hello"), user("red"), user("more")],
        [user("hello")],
        [{"role": "system", "content": "Be brief."}, user("hello"), assistant("red"), user("more")],
    ],
    ids=[
        "an earlier message is another",
        "the answer is another",
        "the answer is not the model's",
        "asked once more",
        "one message more in front",
    ],
)
@pytest.mark.parametrize("template", [CHATML, TRIMMING])
def test_messages_that_are_not_a_continuation_of_the_last_call_are_not_gone_on_from(
    template: str, messages: list[dict[str, Any]]
) -> None:
    chat = chat_of(template)
    assert gone_on(chat, spoken(chat, [user("hello")], "red"), messages) is None


def test_another_end_of_message_than_the_one_that_was_sampled_has_no_such_addition() -> None:
    chat, asked = chat_of(), [user("hello")]
    assert (
        gone_on(
            chat,
            spoken(chat, asked, "red", stop="<|endoftext|>"),
            [*asked, assistant("red"), user("more")],
        )
        is None
    )


def test_plain_text_goes_on_from_what_was_sampled_and_not_from_behind_a_stop_token() -> None:
    chat = chat_of()
    token_ids = chat.encode("one two", is_plain=True)
    last = PreviousCall("one", 0, token_ids, " two", None, "", {})
    prompt = chat.continued_text(last, "one two three")
    assert prompt == token_ids + chat.encode(" three")
    stopped = PreviousCall("one", 0, (*token_ids, 1), " two", 1, STOP, {})
    assert chat.continued_text(stopped, "one two three") is None
    assert chat.continued_text(last, "two three") is None


def test_templates_read_arguments_of_tool_calls_as_mappings_and_no_content_as_an_empty_one() -> (
    None
):
    chat = chat_of()
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    broken = {"id": "2", "type": "function", "function": {"name": "add", "arguments": "{"}}
    rendered = chat.render(
        [{"role": "assistant", "content": None, "tool_calls": [call, broken]}], None, asks=False
    )
    assert '{"name": "add", "arguments": {"a": 1}}' in rendered
    assert '{"name": "add", "arguments": {}}' in rendered
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}


def test_template_and_its_arguments_may_be_given() -> None:
    chat = chat_of(
        chat_template="{{ mood }}: {{ messages[0].content }}", template_args={"mood": "kind"}
    )
    assert chat.render([user("hello")], None) == "kind: hello"
