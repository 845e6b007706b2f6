"""Tools: what the model is told of them, and what becomes of its calls."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import date
from enum import Enum
from functools import partial, update_wrapper
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch
from environment_support import generated, rolled_out, without_place
from pydantic import BaseModel, Field
from scripted_client import Answer, ScriptedClient

from rollout_actors.environments.chat.tools import Tool, convert_tool_to_oai_format, read_docstring
from rollout_actors.environments.lifecycle import cleanup
from rollout_actors.environments.rubric import Rubric, RubricGroup
from rollout_actors.environments.tool import StatefulToolEnv, ToolEnv, ToolRubric
from rollout_actors.environments.types import Messages, State

ROW = {"prompt": [{"role": "user", "content": "go"}], "example_id": 0, "task": "t"}


class Point(BaseModel):
    x: int
    title: str = "here"


class Color(Enum):
    RED = "red"


@dataclass
class Painted:
    color: Color
    day: date
    thing: object


def area(width: int, height: int = 2) -> int:
    """The area of a rectangle.

    It has straight sides.

    Args:
        width: from left to right,
            in metres
        height (int): from below

    Returns:
        square metres
    """
    return width * height


async def echo(text: str) -> str:
    return text


def fail(reason: str) -> str:
    raise KeyError(reason)


def wait() -> str:
    raise TimeoutError


def python(code: str) -> None:
    exec(code)


def calls(*named: tuple[str, Any]) -> ScriptedClient:
    """Say these in one message, and then that it is done."""
    return ScriptedClient([Answer(None, tool_calls=named), "done"])


def contents(state: State) -> list[str]:
    return [message["content"] for message in state["completion"] if message["role"] == "tool"]


def contents_after(
    named: list[tuple[str, Any]], tools: Any = (area, echo, fail), **kwargs: Any
) -> list[str]:
    """What the tool messages say that answer one message with these calls."""
    return contents(rolled_out(ToolEnv(tools, **kwargs), ROW, calls(*named)))


def parameters_of(tool: Any) -> dict[str, Any]:
    return convert_tool_to_oai_format(tool)["function"]["parameters"]


def test_a_tool_in_place_of_a_list_of_tools_is_refused():
    with pytest.raises(TypeError, match="tools: is function; give a list of functions"):
        ToolEnv(area)


# What the model is told


def test_the_schema_comes_from_signature_type_hints_and_docstring():
    assert convert_tool_to_oai_format(area) == {
        "type": "function",
        "function": {
            "name": "area",
            "description": "The area of a rectangle.\n\nIt has straight sides.",
            "parameters": {
                "type": "object",
                "properties": {
                    "width": {"type": "integer", "description": "from left to right, in metres"},
                    "height": {"type": "integer", "default": 2, "description": "from below"},
                },
                "required": ["width"],
                "additionalProperties": False,
            },
        },
    }
    text = "Just this.\nAnd that: no section."
    assert (read_docstring(text), read_docstring("")) == ((text, {}), ("", {}))


def test_every_type_that_json_has_can_be_told():
    def tool(
        kind: Literal["a", "b"],
        many: list[float],
        perhaps: str | None,
        point: Point,
        table: dict[str, int],
        hint: Annotated[int, Field(description="so")],
        any_,
    ) -> None: ...

    assert parameters_of(tool)["properties"] == {
        "kind": {"enum": ["a", "b"], "type": "string"},
        "many": {"items": {"type": "number"}, "type": "array"},
        "perhaps": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "point": {"$ref": "#/$defs/Point"},
        "table": {"additionalProperties": {"type": "integer"}, "type": "object"},
        "hint": {"description": "so", "type": "integer"},
        "any_": {},
    }


def takes_all(**kwargs: Any) -> None: ...
def counts(n: int) -> Iterator[int]:
    yield n


async def counts_later(n: int) -> AsyncIterator[int]:
    yield n


class Counter:
    def count(self, n: int) -> int:
        return n


def takes_a_lock(lock: threading.Lock) -> None: ...
def takes_the_unknown(x: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("refused", "problem"),
    [
        (lambda: Tool.of(lambda x: x), "tool <lambda>: a tool's name must have 1 to 64 letters"),
        (
            lambda: Tool.of(takes_all),
            r"tool takes_all: parameter .*kwargs.* cannot be given by name",
        ),
        (lambda: Tool.of(takes_a_lock), r"tool takes_a_lock: .*hide them with args_to_skip"),
        (lambda: Tool.of(counts), "tool counts: it is a generator; return the values in a list"),
        (lambda: Tool.of(partial(counts_later, n=1)), "tool counts_later: it is a generator"),
        (lambda: Tool.of(Counter.count), "tool count: self is not bound; give a method of"),
        (lambda: Tool.of(takes_the_unknown), r"tool takes_the_unknown: .*Nowhere"),
        (
            lambda: Tool.of(area, ["depth"]),
            "tool area: args_to_skip has depth, but the parameters are width, height",
        ),
        (lambda: ToolEnv([area, area]), "tool area exists already"),
        (lambda: ToolEnv([area], message_type="completion"), "message_type"),
    ],
)
def test_what_cannot_be_told_to_a_model_is_refused_with_the_tools_name_and_a_remedy(
    refused, problem
):
    with pytest.raises(ValueError, match=problem):
        refused()


# Calls


def test_the_calls_of_one_message_are_answered_in_order_each_with_its_id():
    both = {"width": 1, "height": 1}
    client = calls(("area", {"width": 3}), ("echo", {"text": "hi"}), ("area", both))
    state = rolled_out(ToolEnv([area, echo]), ROW, client)
    answers = [
        {"role": "tool", "tool_call_id": f"call_0_{i}", "content": content}
        for i, content in enumerate(["6", "hi", "1"])
    ]
    first, *between, last = state["completion"]
    assert between == answers
    assert client.calls[1].prompt == [*ROW["prompt"], first, *answers]
    shown = [tool["function"]["name"] for tool in client.calls[0].arguments["tools"]]
    assert shown == ["area", "echo"]
    assert (last["content"], state["stop_condition"]) == ("done", "no_tools_called")
    assert len(state["trajectory"]) == 2


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("steal", {}, "there is no tool steal; there are area, echo, fail, wait, python"),
        ("area", '{"width": ', "the arguments of area are not JSON"),
        ("area", "[" * 100_000, "the arguments of area are not JSON: maximum recursion depth"),
        (
            "area",
            '{"width": ' + "1" * 5000 + "}",
            "the arguments of area are not JSON: Exceeds the limit (4300 digits) for integer",
        ),
        ("area", "[1]", "the arguments of area are no JSON object, but [1]"),
        (
            "area",
            {"width": "wide"},
            "the arguments of area are wrong: width: Input should be a valid integer, unable to",
        ),
        ("area", {}, "the arguments of area are wrong: width: Field required"),
        ("fail", {"reason": "why"}, "'why'"),
        ("wait", {}, "TimeoutError"),
        ("python", {"code": "exit()"}, "python called exit()"),
    ],
)
def test_an_unknown_tool_malformed_arguments_and_a_raising_tool_become_tool_messages(
    name, arguments, answer
):
    tools = (area, echo, fail, wait, python)
    (content,) = contents_after([(name, arguments)], tools)
    assert content.startswith(answer) and "set_int_max" not in content


def test_the_error_formatter_says_what_the_model_is_told():
    def kind_of(error: Exception) -> str:
        return f"<{type(error).__name__}>"

    call = ("fail", {"reason": "why"})
    assert contents_after([call], error_formatter=kind_of) == ["<KeyError>"]
    assert contents_after([call], error_formatter=lambda error: "") == ["KeyError"]


def test_the_model_is_told_no_secret_of_this_process(monkeypatch):
    monkeypatch.setenv("SEARCH_API_KEY", "sk-LEAK1")
    (content,) = contents_after([("fail", {"reason": "401 for sk-LEAK1"})])
    assert "401 for <secret>" in content


def test_arguments_come_as_their_types_and_defaults_stay_the_functions_own():
    seen: list[Any] = []

    def tool(point: Point, number: int, marker: Any = seen) -> str:
        seen.append((point, number, marker is seen))
        return "ok"

    contents_after([("tool", {"point": {"x": 1}, "number": "7"})], tools=[tool])
    assert seen == [(Point(x=1), 7, True)]


NOT_JSON = "which is not JSON; it must return text, or values that JSON has"


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        ("né", "né"),
        (["né", 1.5, None], '["né", 1.5, null]'),
        ([Point(x=1)], '[{"x": 1, "title": "here"}]'),
        (Color.RED, "red"),
        ([Color.RED], '["red"]'),
        ({"c", "a", "b"}, '["a", "b", "c"]'),
        (
            Painted(Color.RED, date(2026, 1, 2), range(3)),
            '{"color": "red", "day": "2026-01-02", "thing": "range(0, 3)"}',
        ),
        (
            Painted(Color.RED, date(2026, 1, 2), {*"fedcba"}),
            '{"color": "red", "day": "2026-01-02", "thing": ["a", "b", "c", "d", "e", "f"]}',
        ),
        ([Painted], f'["{Painted}"]'),
        (date(2026, 1, 2), '"2026-01-02"'),
        (np.arange(3), "[0, 1, 2]"),
        ({"mean": np.float32(0.5), "all": torch.ones(1, 2)}, '{"mean": 0.5, "all": [[1.0, 1.0]]}'),
        ([object()], f"tool returned object, {NOT_JSON}"),
        ([b"ab"], f"tool returned bytes, {NOT_JSON}"),
        ((x for x in "ab"), f"tool returned generator, {NOT_JSON}"),
        (
            "half \ud83d",
            "'utf-8' codec can't encode character '\\ud83d' in position 5: surrogates not allowed",
        ),
    ],
)
def test_the_model_reads_a_value_as_text_or_json_or_why_it_has_no_such_form(value, answer):
    def tool() -> object:
        return value

    assert contents_after([("tool", {})], tools=[tool]) == [answer]


def test_plain_tools_run_in_threads_so_that_rollouts_do_not_wait_for_each_other():
    barrier = threading.Barrier(2, timeout=240)

    def meet() -> str:
        barrier.wait()
        return threading.current_thread().name

    call = Answer(None, tool_calls=[("meet", {})])
    client = ScriptedClient(lambda asked: "done" if asked.turn else call)
    results = generated(ToolEnv([meet]), [{"question": "a"}, {"question": "b"}], client)
    assert results.metadata.num_errors == 0
    for state in results.state:
        (name,) = contents(state)
        assert "MainThread" not in name and "Barrier" not in name


# Partials


def test_a_partial_is_told_as_what_it_wraps_without_what_it_binds():
    whole = convert_tool_to_oai_format(area)["function"]
    shown = convert_tool_to_oai_format(partial(area, height=5))["function"]
    width = {"width": whole["parameters"]["properties"]["width"]}
    assert shown == {**whole, "parameters": {**whole["parameters"], "properties": width}}
    by_place = parameters_of(partial(area, 5))
    assert list(by_place["properties"]) == ["height"] and "required" not in by_place


@pytest.mark.parametrize(
    "tool",
    [
        partial(area, height=5),
        partial(partial(area, height=9), height=5),
        update_wrapper(partial(area, height=5), area),
    ],
)
def test_a_partial_is_called_with_what_it_binds_which_a_model_cannot_set(tool):
    both = {"width": 2, "height": 1}
    right, wrong = contents_after([("area", {"width": 2}), ("area", both)], tools=[tool])
    assert right == "10"
    assert re.search("arguments of area .*: height: Extra inputs", wrong)


# Turns


def test_a_tool_that_is_removed_is_neither_shown_nor_called_any_more():
    environment = ToolEnv([area, echo])
    environment.remove_tool(area)
    assert environment.tool_map == {"echo": echo}
    client = calls(("area", {"width": 2}))
    state = rolled_out(environment, ROW, client)
    (content,) = contents(state)
    assert re.search("no tool area; .*echo", content)
    assert [tool["function"]["name"] for tool in client.calls[0].arguments["tools"]] == ["echo"]
    with pytest.raises(ValueError, match=r"tool area .*exist; .*echo"):
        environment.remove_tool(area)


def test_an_environment_may_call_tools_itself_and_change_how_they_are_called():
    class Loud(ToolEnv):
        async def call_tool(self, tool_name, tool_args, tool_call_id, **kwargs):
            answer = await super().call_tool(tool_name, tool_args, tool_call_id, **kwargs)
            return {**answer, "content": answer["content"].upper()}

    made = calls(("echo", {"text": "x"}), ("fail", {"reason": "y"}))
    state = rolled_out(Loud([echo, fail]), ROW, made)
    assert (contents(state), state["num_tool_errors"]) == (["X", "'Y'"], 1)
    message = asyncio.run(ToolEnv([echo]).call_tool("echo", {"text": "x"}, "call_7"))
    assert message == {"role": "tool", "content": "x", "tool_call_id": "call_7"}


# Stateful tools


def take(name: str, session: list[str], limit: int = 5) -> str:
    """Take a thing."""
    session.append(name)
    return f"{len(session)} of {limit}"


class Shop(StatefulToolEnv):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_tool(take, args_to_skip=["session"])
        self.closed: list[list[str]] = []

    async def setup_state(self, state: State) -> State:
        state["session"] = []
        return state

    async def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: Messages, state: State
    ) -> dict[str, Any]:
        if "poison" in tool_args.values():
            raise RuntimeError("the session is gone")
        return {**tool_args, "session": state["session"]}

    @cleanup
    async def close(self, state: State) -> None:
        self.closed.append(state["session"])


class PlainShop(Shop):
    def update_tool_args(self, tool_name, tool_args, messages, state):  # type: ignore[override]
        return {**tool_args, "session": state["session"]}


@pytest.mark.parametrize("kind", [Shop, PlainShop])
def test_skipped_arguments_are_not_in_the_schema_and_come_from_update_tool_args(kind):
    def script(asked: Any) -> Any:
        name = f"{asked.prompt[0]['content']}{asked.turn}"
        return "done" if asked.turn == 2 else Answer(None, tool_calls=[("take", {"name": name})])

    shop = kind()
    assert list(shop.oai_tools[0]["function"]["parameters"]["properties"]) == ["name", "limit"]
    results = generated(shop, [{"question": "a"}, {"question": "b"}], ScriptedClient(script))
    assert [state["session"] for state in results.state] == [["a0", "a1"], ["b0", "b1"]]
    assert contents(results.state[0]) == ["1 of 5", "2 of 5"]
    assert sorted(shop.closed) == [["a0", "a1"], ["b0", "b1"]]


def test_a_model_cannot_set_a_skipped_argument():
    state = rolled_out(Shop(), ROW, calls(("take", {"name": "x", "session": ["mine"]})))
    problem = "the arguments of take are wrong: session: Extra inputs are not permitted"
    assert (contents(state), state["session"]) == ([problem], [])


def test_what_update_tool_args_raises_fails_the_rollout():
    results = generated(Shop(), [{"question": "a"}], calls(("take", {"name": "poison"})))
    assert without_place(results.state[0]) == "RuntimeError: the session is gone"


class Filled(StatefulToolEnv):
    """`owner` is shown to the model, which may leave it out."""

    def __init__(self, *, owner: str | None) -> None:
        super().__init__()

        def take(name: str, owner: str, count: int = 1) -> str:
            return f"{count} {name} of {owner}"

        self.add_tool(take)
        self.owner = owner

    async def update_tool_args(self, tool_name, tool_args, messages, state):
        return tool_args if self.owner is None else {"owner": self.owner, **tool_args}


@pytest.mark.parametrize(
    ("arguments", "owner", "answer"),
    [
        ({"name": "x", "count": "2"}, "me", "2 x of me"),
        ({"name": "x", "owner": "you"}, "me", "1 x of you"),
        ({"name": "x"}, None, "the arguments of take are wrong: owner: Field required"),
        (
            {"name": "x", "nobody": 1},
            "me",
            "the arguments of take are wrong: nobody: Extra inputs are not permitted",
        ),
    ],
)
def test_arguments_are_whole_when_update_tool_args_has_filled_them(arguments, owner, answer):
    state = rolled_out(Filled(owner=owner), ROW, calls(("take", arguments)))
    assert contents(state) == [answer]


# Metrics


def test_the_tool_rubric_counts_calls_and_errors_and_is_no_part_of_the_reward():
    def one(state: State) -> float:
        return 1.0

    environment = ToolEnv([area, echo])
    environment.rubric = RubricGroup([Rubric([one]), ToolRubric(environment.tool_names)])
    client = calls(("area", {"width": 1}), ("area", {"width": "w"}), ("steal", {}))
    results = generated(environment, [{"question": "a"}], client)
    assert results.reward == [1.0]
    assert results.metadata.avg_metrics == {
        "one": 1.0,
        "num_tool_calls": 3.0,
        "num_tool_errors": 2.0,
        "num_calls_of_area": 2.0,
        "num_calls_of_echo": 0.0,
    }
