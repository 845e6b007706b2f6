"""Tool calls are parsed with vLLM's own tool parsers."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from environment_support import generated, user
from scripted_client import Answer, ScriptedClient
from scripted_engines import (
    ScriptedEngines,
    ask,
    client_over,
    conversation_over,
    decode_settings,
    demo_tokenizer,
    says,
)

from launch.tools.demo.language_model import TOOL_CALL, make_tokenizer
from rollout_actors.environments.chat.tools import (
    ToolCallReader,
    UncalledTools,
    chat_templates,
    has_own_parser,
    reader_of,
)
from rollout_actors.environments.examples.hidden_digit import QUESTION
from rollout_actors.environments.loading import load_environment
from rollout_actors.environments.tool import ToolEnv

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS},
    }
]
CALL = '<tool_call>{"name":"add","arguments":{"a":2,  "b":3}}</tool_call>'
"""As no template writes it: the spaces are others."""


TOKENIZER = demo_tokenizer()
LONG = decode_settings(TOKENIZER, max_new_tokens=512)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def read(text: str, *, seed: int = 1, parser: str = "hermes") -> Any:
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    return ToolCallReader(parser, TOKENIZER).read(token_ids, text, TOOLS, seed=seed)


def test_without_a_parsers_name_calls_stay_text(tmp_path):
    assert reader_of(None, TOKENIZER) is None
    TOKENIZER.save_pretrained(tmp_path)
    assert not has_own_parser(tmp_path)
    engines = ScriptedEngines([says(TOKENIZER, CALL)])
    conversation = conversation_over(engines, TOKENIZER, decode=LONG)
    message = ask(conversation, [user("2 + 3?")], tools=TOOLS).choices[0].message
    assert (message.content, message.tool_calls) == (CALL, None)


PLAIN = "{{ messages }}"
WITH_TOOLS = "{{ tools }}"
NAMED = [{"name": "default", "template": PLAIN}, {"name": "t", "template": WITH_TOOLS}]


@pytest.mark.parametrize(
    ("files", "shows"),
    [
        ({}, False),
        ({"chat_template.jinja": PLAIN}, False),
        ({"chat_template.jinja": PLAIN + WITH_TOOLS}, True),
        (
            {
                "chat_template.jinja": PLAIN,
                "additional_chat_templates/tool_use.jinja": WITH_TOOLS,
            },
            True,
        ),
        ({"tokenizer_config.json": json.dumps({"chat_template": PLAIN})}, False),
        ({"tokenizer_config.json": json.dumps({"chat_template": NAMED})}, True),
    ],
)
def test_whether_a_checkpoints_template_shows_tools_is_read_from_its_files(files, shows, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert any("tools" in template for template in chat_templates(tmp_path)) == shows


def test_what_is_named_like_a_chat_template_and_is_no_file_is_passed_over(tmp_path):
    (tmp_path / "chat_template.jinja").symlink_to("gone")
    (tmp_path / "additional_chat_templates" / "folder.jinja").mkdir(parents=True)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": PLAIN}))
    assert chat_templates(tmp_path) == [json.dumps(PLAIN)]


def test_that_no_rollout_ever_called_a_tool_is_said_at_doubling_numbers_until_one_has():
    uncalled = UncalledTools()
    assert uncalled.problem(0, 0) is None, "nothing was offered"
    problems = [uncalled.problem(8, calls) for calls in (0, 0, 0, 0, 1, 0, 0, 0, 0, 0)]
    assert [problem is not None for problem in problems] == [True, True, False, True] + [False] * 6
    assert (problems[3] or "").startswith("none of 32 rollouts called a tool")


def test_a_batch_without_a_tool_call_is_warned_of_and_one_without_tools_is_not(caplog):
    def log_of(environment: ToolEnv, script: Any) -> str:
        caplog.clear()
        generated(environment, [{"question": "2 + 3?"}] * 4, ScriptedClient(script))
        return caplog.text

    def calls_once(call: Any) -> Any:
        return "5" if call.turn else Answer(None, tool_calls=[("add", {"a": 2, "b": 3})])

    uncalled = ToolEnv([add])
    first = log_of(uncalled, lambda call: "5")
    assert "called a tool" not in first, "four may have had no need of it"
    assert "none of 8 rollouts called a tool" in log_of(uncalled, lambda call: "5")
    for environment, script in ((ToolEnv([add]), calls_once), (ToolEnv([]), lambda call: "5")):
        assert "called a tool" not in "".join(log_of(environment, script) for _ in range(2))


# What imports vllm, which takes ten seconds: with the engine tests, which import it anyway.


@pytest.mark.engine
def test_tool_calls_are_parsed_with_vllms_own_parser():
    message = read("I add. " + CALL)
    (call,) = message.tool_calls
    assert (message.content, call.type) == ("I add. ", "function")
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 2, "b": 3}')
    assert read(CALL).content is None


@pytest.mark.engine
def test_ids_of_calls_follow_from_the_requests_seed():
    ids = [[call.id for call in read(CALL + CALL, seed=seed).tool_calls] for seed in (1, 1, 2)]
    assert ids[0] == ids[1]
    assert len({*ids[0], *ids[2]}) == 4
    assert all(len(one) == 9 and one.isalnum() for one in ids[0])


@pytest.mark.engine
@pytest.mark.parametrize(
    "text",
    [
        "red",
        "",
        "<tool_call>{broken</tool_call>",
        '<tool_call>{"name": "add"}</tool_call>',
        "<tool_call>",
    ],
)
def test_what_the_parser_cannot_read_stays_text(text):
    message = read(text)
    assert (message.content, message.tool_calls) == (text, ())


@pytest.mark.engine
def test_a_parser_that_fails_leaves_the_text_as_content(caplog):
    from vllm.tool_parsers import ToolParser, ToolParserManager

    class Failing(ToolParser):
        def extract_tool_calls(self, model_output: str, request: Any) -> Any:
            raise RuntimeError("no such thing")

    ToolParserManager.register_module("failing_of_a_test", module=Failing)
    message = read("red", parser="failing_of_a_test")
    assert (message.content, message.tool_calls) == ("red", ())
    warning = "failing_of_a_test failed on 'red', which stays text (RuntimeError: no such thing)"
    assert warning in caplog.text


@pytest.mark.engine
def test_an_unknown_parser_is_refused_with_the_names_that_there_are():
    message = (
        r"^environment\.tool_call_parser: vLLM has no parser 'hermez'; set it to one of"
        r" .*hermes"
    )
    with pytest.raises(ValueError, match=message):
        reader_of("hermez", TOKENIZER)


@pytest.mark.engine
def test_the_checkpoint_may_bring_its_own_parser(tmp_path):
    tokenizer = demo_tokenizer()
    tokenizer.response_template = {"fields": {}}
    assert isinstance(reader_of(None, tokenizer), ToolCallReader)
    tokenizer.save_pretrained(tmp_path)
    assert has_own_parser(tmp_path)


@pytest.mark.engine
def test_a_tool_environment_over_the_engines_goes_on_from_calls_as_they_were_sampled():
    answers = ["I add. " + CALL, CALL + CALL, "5"]
    engines = ScriptedEngines([says(TOKENIZER, answer) for answer in answers])
    reader = reader_of("hermes", TOKENIZER)
    client = client_over(engines, TOKENIZER, tool_calls=reader, decode=LONG)
    (state,) = generated(ToolEnv([add]), [{"question": "2 + 3?"}], client).state
    assert (state["error"], state["num_splits"]) == (None, 0)
    roles = " ".join(message["role"] for message in state["completion"])
    assert roles == "assistant tool assistant tool tool assistant"
    results = [message["content"] for message in state["completion"] if message["role"] == "tool"]
    assert results == ["5", "5", "5"]
    assert state["trajectory"][0]["response"].choices[0].finish_reason == "tool_calls"
    steps = [step["tokens"] for step in state["trajectory"]]
    for earlier, later in pairwise(steps):
        so_far = earlier["prompt_ids"] + earlier["completion_ids"]
        assert later["prompt_ids"][: len(so_far)] == so_far
    num_before = len(steps[0]["prompt_ids"]) + len(steps[0]["completion_ids"])
    added = TOKENIZER.decode(steps[1]["prompt_ids"][num_before:])
    assert added == "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.engine
def test_the_demos_model_with_tools_plays_the_environment_that_it_is_made_for():
    tokenizer = make_tokenizer(tools=True)
    engines = ScriptedEngines([says(tokenizer, text) for text in (TOOL_CALL, "7", "which")])
    reader = reader_of("hermes", tokenizer)
    decode = decode_settings(tokenizer, max_new_tokens=2)
    client = client_over(engines, tokenizer, tool_calls=reader, decode=decode)
    inputs = [{"question": QUESTION, "answer": "7"}] * 2
    environment = load_environment("hidden_digit")
    called, uncalled = generated(environment, inputs, client, max_concurrent=1).state
    assert (called["error"], called["reward"], called["num_splits"]) == (None, 1.0, 0)
    assert (uncalled["error"], uncalled["reward"]) == (None, 0.0)
    assert uncalled["stop_condition"] == "no_tools_called"


@pytest.mark.engine
def test_messages_of_openais_own_types_are_taken():
    engines = ScriptedEngines([says(TOKENIZER, CALL), says(TOKENIZER, "5")])
    reader = reader_of("hermes", TOKENIZER)
    conversation = conversation_over(engines, TOKENIZER, tool_calls=reader, decode=LONG)
    asked = [user("2 + 3?")]
    message = ask(conversation, asked, tools=TOOLS).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"}
    ask(conversation, [*asked, message, result], tools=TOOLS)
    assert conversation.num_splits == 0
