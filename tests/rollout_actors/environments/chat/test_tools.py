"""Tool calls are parsed with vLLM's own tool parsers."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from environment_support import generated, user
from scripted_client import Answer, ScriptedClient
from scripted_engines import (
    ScriptedEngines,
    client_over,
    decode_settings,
    demo_tokenizer,
    says,
    state_at,
)

from launch.demo.language_model import TOOL_CALL, make_tokenizer
from rollout_actors.environments.chat.responses import parse_response_messages
from rollout_actors.environments.chat.tools import (
    ToolCallReader,
    UncalledTools,
    has_own_parser,
    reader_of,
    shows_tools,
)
from rollout_actors.environments.examples.hidden_digit import QUESTION
from rollout_actors.environments.loading import load_environment
from rollout_actors.environments.tool import ToolEnv

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
CALL = '<tool_call>{"name":"add","arguments":{"a":2,  "b":3}}</tool_call>'
"""As no template writes it: the spaces are others."""


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return demo_tokenizer()


def read(tokenizer: Any, text: str, *, seed: int = 1) -> Any:
    return ToolCallReader("hermes", tokenizer).read(
        tokenizer.encode(text, add_special_tokens=False), text, TOOLS, seed=seed
    )


def test_without_a_parsers_name_calls_stay_text(tokenizer: Any, tmp_path: Path) -> None:
    assert reader_of(None, tokenizer) is None
    tokenizer.save_pretrained(tmp_path)
    assert not has_own_parser(tmp_path)
    conversation = client_over(
        ScriptedEngines([says(tokenizer, CALL)]),
        tokenizer,
        decode=decode_settings(tokenizer, max_new_tokens=512),
    ).conversation(state_at())
    response = asyncio.run(
        conversation.chat.completions.create(model="m", messages=[user("2 + 3?")], tools=TOOLS)
    )
    assert response.choices[0].message.content == CALL
    assert response.choices[0].message.tool_calls is None


@pytest.mark.parametrize(
    ("files", "shows"),
    [
        ({}, True),
        ({"chat_template.jinja": "{{ messages }}"}, False),
        ({"chat_template.jinja": "{{ messages }}{{ tools }}"}, True),
        (
            {
                "chat_template.jinja": "{{ messages }}",
                "additional_chat_templates/tool_use.jinja": "{{ tools }}",
            },
            True,
        ),
        ({"tokenizer_config.json": '{"chat_template": "{{ messages }}"}'}, False),
        (
            {
                "tokenizer_config.json": (
                    '{"chat_template": [{"name": "default", "template": "{{ messages }}"}, {"name":'
                    ' "t", "template": "{{ tools }}"}]}'
                )
            },
            True,
        ),
    ],
)
def test_whether_a_checkpoints_template_shows_tools_is_read_from_its_files(
    files: dict[str, str], shows: bool, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert shows_tools(tmp_path) == shows


def test_that_no_rollout_ever_called_a_tool_is_said_at_doubling_numbers_until_one_has() -> None:
    uncalled = UncalledTools()
    assert uncalled.problem(0, 0) is None, "nothing was offered"
    problems = [uncalled.problem(8, calls) for calls in (0, 0, 0, 0, 1, 0, 0, 0, 0, 0)]
    assert [problem is not None for problem in problems] == [True, True, False, True] + [False] * 6
    assert problems[3] is not None
    assert problems[3].startswith(
        "none of 32 rollouts called a tool, though they were offered some; read what the model"
        " answers"
    )


def test_a_batch_without_a_tool_call_is_warned_of_and_one_without_tools_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def log_of(environment: ToolEnv, script: Any) -> str:
        caplog.clear()
        generated(environment, [{"question": "2 + 3?"}] * 4, ScriptedClient(script))
        return caplog.text

    def calls_once(call: Any) -> Any:
        return "5" if call.turn else Answer(None, tool_calls=[("add", {"a": 2, "b": 3})])

    uncalled = ToolEnv([add])
    assert "called a tool" not in log_of(uncalled, lambda call: "5"), (
        "four may have had no need of it"
    )
    assert "none of 8 rollouts called a tool" in log_of(uncalled, lambda call: "5")
    for environment, script in ((ToolEnv([add]), calls_once), (ToolEnv([]), lambda call: "5")):
        assert "called a tool" not in "".join(log_of(environment, script) for _ in range(2))


# What imports vllm, which takes ten seconds: with the engine tests, which import it anyway.


@pytest.mark.engine
def test_tool_calls_are_parsed_with_vllms_own_parser(tokenizer: Any) -> None:
    said = read(tokenizer, "I add. " + CALL)
    (call,) = said.tool_calls
    assert said.content == "I add. "
    assert (call.type, call.function.name, call.function.arguments) == (
        "function",
        "add",
        '{"a": 2, "b": 3}',
    )
    assert read(tokenizer, CALL).content is None


@pytest.mark.engine
def test_ids_of_calls_follow_from_the_requests_seed(tokenizer: Any) -> None:
    ids = [
        [call.id for call in read(tokenizer, CALL + CALL, seed=seed).tool_calls]
        for seed in (1, 1, 2)
    ]
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
def test_what_the_parser_cannot_read_stays_text(tokenizer: Any, text: str) -> None:
    said = read(tokenizer, text)
    assert (said.content, said.tool_calls) == (text, ())


@pytest.mark.engine
def test_a_parser_that_fails_leaves_the_text_as_content(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.tool_parsers import ToolParser, ToolParserManager

    class Failing(ToolParser):
        def extract_tool_calls(self, model_output: str, request: Any) -> Any:
            raise RuntimeError("no such thing")

    ToolParserManager.register_module("failing_of_a_test", module=Failing)
    said = ToolCallReader("failing_of_a_test", tokenizer).read(
        tokenizer.encode("red"), "red", TOOLS, seed=1
    )
    assert (said.content, said.tool_calls) == ("red", ())
    assert (
        "vLLM's tool parser failing_of_a_test failed on 'red', which stays text (RuntimeError: no"
        " such thing)" in caplog.text
    )


@pytest.mark.engine
def test_an_unknown_parser_is_refused_with_the_names_that_there_are(tokenizer: Any) -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"^environment\.tool_call_parser: vLLM has none of the name 'hermez'; set it to one of"
            r" .*hermes"
        ),
    ):
        reader_of("hermez", tokenizer)


@pytest.mark.engine
def test_the_checkpoint_may_bring_its_own_parser(tmp_path: Path) -> None:
    own = demo_tokenizer()
    own.response_template = {"fields": {}}
    assert isinstance(reader_of(None, own), ToolCallReader)
    own.save_pretrained(tmp_path)
    assert has_own_parser(tmp_path)


@pytest.mark.engine
def test_a_tool_environment_over_the_engines_goes_on_from_calls_as_they_were_sampled(
    tokenizer: Any,
) -> None:
    engines = ScriptedEngines(
        [says(tokenizer, "I add. " + CALL), says(tokenizer, CALL + CALL), says(tokenizer, "5")]
    )
    client = client_over(
        engines,
        tokenizer,
        tool_calls=reader_of("hermes", tokenizer),
        decode=decode_settings(tokenizer, max_new_tokens=512),
    )
    (state,) = generated(ToolEnv([add]), [{"question": "2 + 3?"}], client).state
    assert state["error"] is None
    assert [message["role"] for message in state["completion"]] == [
        "assistant",
        "tool",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert [message["content"] for message in state["completion"] if message["role"] == "tool"] == [
        "5",
        "5",
        "5",
    ]
    assert state["trajectory"][0]["response"].choices[0].finish_reason == "tool_calls"
    assert state["num_splits"] == 0
    steps = [step["tokens"] for step in state["trajectory"]]
    for earlier, later in pairwise(steps):
        so_far = earlier["prompt_ids"] + earlier["completion_ids"]
        assert later["prompt_ids"][: len(so_far)] == so_far
    added = tokenizer.decode(
        steps[1]["prompt_ids"][len(steps[0]["prompt_ids"]) + len(steps[0]["completion_ids"]) :]
    )
    assert added == "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.engine
def test_the_demos_model_with_tools_plays_the_environment_that_it_is_made_for() -> None:
    own = make_tokenizer(tools=True)
    script = [says(own, TOOL_CALL), says(own, "7"), says(own, "which")]
    client = client_over(
        ScriptedEngines(script),
        own,
        tool_calls=reader_of("hermes", own),
        decode=decode_settings(own, max_new_tokens=2),
    )
    environment = load_environment("hidden_digit")
    called, uncalled = generated(
        environment, [{"question": QUESTION, "answer": "7"}] * 2, client, max_concurrent=1
    ).state
    assert (called["error"], called["reward"], called["num_splits"]) == (None, 1.0, 0)
    assert (uncalled["error"], uncalled["reward"], uncalled["stop_condition"]) == (
        None,
        0.0,
        "no_tools_called",
    )


@pytest.mark.engine
def test_messages_of_openais_own_types_are_taken(tokenizer: Any) -> None:
    engines = ScriptedEngines([says(tokenizer, CALL), says(tokenizer, "5")])
    client = client_over(
        engines,
        tokenizer,
        tool_calls=reader_of("hermes", tokenizer),
        decode=decode_settings(tokenizer, max_new_tokens=512),
    )
    conversation = client.conversation(state_at())

    async def talk() -> None:
        response = await conversation.chat.completions.create(
            model="m", messages=[user("2 + 3?")], tools=TOOLS
        )
        (message,) = await parse_response_messages(response, "chat")
        answer = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "5"}
        await conversation.chat.completions.create(
            model="m", messages=[user("2 + 3?"), response.choices[0].message, answer], tools=TOOLS
        )

    asyncio.run(talk())
    assert conversation.num_splits == 0
