"""Tools: what the model is told of them, and what becomes of its calls."""

from __future__ import annotations

import asyncio
import threading
from functools import partial, update_wrapper
from typing import Annotated, Any, Literal

import pytest
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


def tool_messages(state: State) -> list[dict[str, Any]]:
    return [message for message in state["completion"] if message["role"] == "tool"]


def contents_after(
    calls: list[tuple[str, Any]], tools: Any = (area, echo, fail), **kwargs: Any
) -> list[str]:
    """What the tool messages say that answer one message with these calls."""
    client = ScriptedClient([Answer(None, tool_calls=calls), "done"])
    return [
        message["content"]
        for message in tool_messages(rolled_out(ToolEnv(tools, **kwargs), ROW, client))
    ]


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

    properties = convert_tool_to_oai_format(tool)["function"]["parameters"]["properties"]
    assert properties["kind"] == {"enum": ["a", "b"], "type": "string"}
    assert properties["many"] == {"items": {"type": "number"}, "type": "array"}
    assert properties["perhaps"] == {"anyOf": [{"type": "string"}, {"type": "null"}]}
    assert properties["point"] == {"$ref": "#/$defs/Point"}
    assert properties["table"] == {"additionalProperties": {"type": "integer"}, "type": "object"}
    assert properties["hint"] == {"description": "so", "type": "integer"}
    assert properties["any_"] == {}


def test_parameters_may_have_any_name():
    def tool(copy: int, _hidden: int, model_config: int, title: str) -> list[Any]:
        return [copy, _hidden, model_config, title]

    made = Tool.of(tool)
    assert list(made.schema["function"]["parameters"]["properties"]) == [
        "copy",
        "_hidden",
        "model_config",
        "title",
    ]
    assert made.read('{"copy": 1, "_hidden": 2, "model_config": 3, "title": "t"}') == {
        "copy": 1,
        "_hidden": 2,
        "model_config": 3,
        "title": "t",
    }


def test_a_docstring_without_sections_is_the_description():
    assert read_docstring("Just this.\nAnd that: no section.") == (
        "Just this.\nAnd that: no section.",
        {},
    )
    assert read_docstring("") == ("", {})


def test_a_function_without_a_name_is_refused():
    with pytest.raises(ValueError, match="tool <lambda>: the name of a tool has 1 to 64 letters"):
        Tool.of(lambda x: x)


def test_what_cannot_be_told_to_a_model_is_refused_with_the_tools_name_and_a_remedy():
    def takes_all(**kwargs: Any) -> None: ...
    def takes_a_lock(lock: threading.Lock) -> None: ...
    def takes_the_unknown(x: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(
        ValueError, match=r"tool takes_all: parameter .*kwargs.* cannot be given by name"
    ):
        Tool.of(takes_all)
    with pytest.raises(ValueError, match=r"tool takes_a_lock: .*hide them with args_to_skip"):
        Tool.of(takes_a_lock)
    with pytest.raises(ValueError, match=r"tool takes_the_unknown: .*Nowhere"):
        Tool.of(takes_the_unknown)
    with pytest.raises(
        ValueError,
        match="tool area: args_to_skip has depth, which is no parameter; they are width, height",
    ):
        Tool.of(area, ["depth"])
    with pytest.raises(ValueError, match="tool area is there already"):
        ToolEnv([area, area])
    with pytest.raises(ValueError, match="message_type"):
        ToolEnv([area], message_type="completion")


# Calls


def test_the_calls_of_one_message_are_answered_in_order_each_with_its_id():
    client = ScriptedClient(
        [
            Answer(
                "let me see",
                tool_calls=[
                    ("area", {"width": 3}),
                    ("echo", {"text": "hi"}),
                    ("area", {"width": 1, "height": 1}),
                ],
            ),
            "done",
        ]
    )
    state = rolled_out(ToolEnv([area, echo]), ROW, client)
    assert tool_messages(state) == [
        {"role": "tool", "tool_call_id": "call_0_0", "content": "6"},
        {"role": "tool", "tool_call_id": "call_0_1", "content": "hi"},
        {"role": "tool", "tool_call_id": "call_0_2", "content": "1"},
    ]
    assert client.calls[1].prompt == [*ROW["prompt"], *state["completion"][:-1]]
    assert [tool["function"]["name"] for tool in client.calls[0].arguments["tools"]] == [
        "area",
        "echo",
    ]


def test_an_unknown_tool_malformed_arguments_and_a_raising_tool_become_tool_messages():
    contents = contents_after(
        [
            ("steal", {}),
            ("area", '{"width": '),
            ("area", "[1]"),
            ("area", {"width": "wide"}),
            ("area", {}),
            ("fail", {"reason": "why"}),
        ]
    )
    assert contents[0] == "there is no tool steal; there are area, echo, fail"
    assert contents[1].startswith("the arguments of area are not JSON")
    assert contents[2] == "the arguments of area are no JSON object, but [1]"
    assert (
        contents[3]
        == "the arguments of area are wrong: width: Input should be a valid integer, unable to"
        " parse string as an integer"
    )
    assert contents[4] == "the arguments of area are wrong: width: Field required"
    assert contents[5] == "'why'"


def test_an_error_of_which_nothing_is_said_is_told_by_its_name():
    def wait() -> str:
        raise TimeoutError

    assert contents_after([("wait", {})], tools=[wait]) == ["TimeoutError"]
    assert contents_after([("wait", {})], tools=[wait], error_formatter=lambda error: "") == [
        "TimeoutError"
    ]


def test_the_error_formatter_says_what_the_model_is_told():
    assert contents_after(
        [("fail", {"reason": "why"})], error_formatter=lambda error: f"<{type(error).__name__}>"
    ) == ["<KeyError>"]


def test_arguments_come_as_their_types_and_defaults_stay_the_functions_own():
    seen: list[Any] = []

    def tool(point: Point, number: int, marker: Any = seen) -> str:
        seen.append((point, number, marker is seen))
        return "ok"

    contents_after([("tool", {"point": {"x": 1}, "number": "7"})], tools=[tool])
    assert seen == [(Point(x=1), 7, True)]


def test_a_tool_without_arguments_may_be_called_with_none_at_all():
    def now() -> float:
        return 1.5

    assert contents_after([("now", ""), ("now", {})], tools=[now]) == ["1.5", "1.5"]


def test_what_is_no_text_is_told_as_json():
    values = iter([{"a": [1, None]}, None, True, Point(x=1), {"who": threading.main_thread}])

    def tool() -> Any:
        return next(values)

    contents = contents_after([("tool", {})] * 5, tools=[tool])
    assert contents[:4] == ['{"a": [1, null]}', "null", "true", '{"x": 1, "title": "here"}']
    assert "main_thread" in contents[4]


def test_plain_tools_run_in_threads_so_that_rollouts_do_not_wait_for_each_other():
    barrier = threading.Barrier(2, timeout=60)

    def meet() -> str:
        barrier.wait()
        return threading.current_thread().name

    client = ScriptedClient(
        lambda call: "done" if call.turn else Answer(None, tool_calls=[("meet", {})])
    )
    results = generated(ToolEnv([meet]), [{"question": "a"}, {"question": "b"}], client)
    assert results.metadata.num_errors == 0
    names = [tool_messages(state)[0]["content"] for state in results.state]
    assert all("MainThread" not in name and "Barrier" not in name for name in names)


def test_methods_and_asynchronous_callables_are_tools_too():
    class Counter:
        def __init__(self) -> None:
            self.total = 0

        async def add(self, number: int) -> int:
            """Add.

            Args:
                number: how much
            """
            await asyncio.sleep(0)
            self.total += number
            return self.total

    counter = Counter()
    assert list(Tool.of(counter.add).schema["function"]["parameters"]["properties"]) == ["number"]
    assert contents_after(
        [("add", {"number": 2}), ("add", {"number": 3})], tools=[counter.add]
    ) == ["2", "5"]


# Partials


def test_a_partial_is_told_as_what_it_wraps_without_what_it_binds():
    told = convert_tool_to_oai_format(area)["function"]
    shown = convert_tool_to_oai_format(partial(area, height=5))["function"]
    assert (shown["name"], shown["description"]) == ("area", told["description"])
    properties = {"width": told["parameters"]["properties"]["width"]}
    assert shown["parameters"] == {
        "type": "object",
        "properties": properties,
        "required": ["width"],
        "additionalProperties": False,
    }
    by_place = convert_tool_to_oai_format(partial(area, 5))["function"]["parameters"]
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
    contents = contents_after(
        [("area", {"width": 2}), ("area", {"width": 2, "height": 1})], tools=[tool]
    )
    assert contents == [
        "10",
        "the arguments of area are wrong: height: Extra inputs are not permitted",
    ]


# Turns


def test_a_rollout_ends_with_the_first_message_that_calls_no_tool():
    state = rolled_out(
        ToolEnv([area]),
        ROW,
        ScriptedClient([Answer(None, tool_calls=[("area", {"width": 1})]), "done", "never"]),
    )
    assert state["stop_condition"] == "no_tools_called"
    assert [message["role"] for message in state["completion"]] == [
        "assistant",
        "tool",
        "assistant",
    ]
    assert len(state["trajectory"]) == 2


def test_a_rollout_has_ten_turns_at_most_unless_it_is_told_otherwise():
    def always() -> ScriptedClient:
        return ScriptedClient(lambda call: Answer(None, tool_calls=[("area", {"width": 1})]))

    state = rolled_out(ToolEnv([area]), ROW, always())
    assert (len(state["trajectory"]), state["stop_condition"]) == (10, "max_turns_reached")
    assert len(rolled_out(ToolEnv([area], max_turns=2), ROW, always())["trajectory"]) == 2


def test_a_rows_own_tools_are_what_the_model_is_shown():
    other = convert_tool_to_oai_format(echo)
    client = ScriptedClient(["done"])
    rolled_out(ToolEnv([area]), {**ROW, "info": {"oai_tools": [other]}}, client)
    assert client.calls[0].arguments["tools"] == [other]


def test_a_tool_that_is_added_later_is_there_for_later_rollouts():
    environment = ToolEnv([area])
    client = ScriptedClient(["done", Answer(None, tool_calls=[("echo", {"text": "x"})]), "done"])
    rolled_out(environment, ROW, client)
    environment.add_tool(echo)
    assert environment.tool_names == ["area", "echo"]
    assert [
        message["content"] for message in tool_messages(rolled_out(environment, ROW, client))
    ] == ["x"]


# Stateful tools


def take(name: str, session: list[str], limit: int = 5) -> str:
    """Take a thing.

    Args:
        name: which
        session: whose
    """
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


def test_skipped_arguments_are_not_in_the_schema_and_come_from_update_tool_args():
    shop = Shop()
    assert list(shop.oai_tools[0]["function"]["parameters"]["properties"]) == ["name", "limit"]
    client = ScriptedClient(
        lambda call: (
            "done"
            if call.turn == 2
            else Answer(
                None, tool_calls=[("take", {"name": f"{call.prompt[0]['content']}{call.turn}"})]
            )
        )
    )
    results = generated(shop, [{"question": "a"}, {"question": "b"}], client)
    assert [state["session"] for state in results.state] == [["a0", "a1"], ["b0", "b1"]]
    assert [message["content"] for message in tool_messages(results.state[0])] == [
        "1 of 5",
        "2 of 5",
    ]
    assert sorted(shop.closed) == [["a0", "a1"], ["b0", "b1"]]


def test_a_model_cannot_set_a_skipped_argument():
    client = ScriptedClient(
        [Answer(None, tool_calls=[("take", {"name": "x", "session": ["mine"]})]), "done"]
    )
    state = rolled_out(Shop(), ROW, client)
    assert (
        tool_messages(state)[0]["content"]
        == "the arguments of take are wrong: session: Extra inputs are not permitted"
    )
    assert state["session"] == []


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
    client = ScriptedClient([Answer(None, tool_calls=[("take", arguments)]), "done"])
    assert tool_messages(rolled_out(Filled(owner=owner), ROW, client))[0]["content"] == answer


def test_what_update_tool_args_raises_fails_the_rollout():
    client = ScriptedClient([Answer(None, tool_calls=[("take", {"name": "poison"})]), "done"])
    results = generated(Shop(), [{"question": "a"}], client)
    assert without_place(results.state[0]) == "RuntimeError: the session is gone"


def test_update_tool_args_may_be_plain():
    class Plain(Shop):
        def update_tool_args(self, tool_name, tool_args, messages, state):  # type: ignore[override]
            return {**tool_args, "session": state["session"]}

    state = rolled_out(
        Plain(), ROW, ScriptedClient([Answer(None, tool_calls=[("take", {"name": "x"})]), "done"])
    )
    assert state["session"] == ["x"]


# Metrics


def test_the_tool_rubric_counts_calls_and_errors_and_is_no_part_of_the_reward():
    def one(state: State) -> float:
        return 1.0

    environment = ToolEnv([area, echo])
    environment.rubric = RubricGroup([Rubric([one]), ToolRubric(environment.tool_names)])
    client = ScriptedClient(
        [
            Answer(
                None, tool_calls=[("area", {"width": 1}), ("area", {"width": "w"}), ("steal", {})]
            ),
            "done",
        ]
    )
    results = generated(environment, [{"question": "a"}], client)
    assert results.reward == [1.0]
    assert results.metadata.avg_metrics == {
        "one": 1.0,
        "num_tool_calls": 3.0,
        "num_tool_errors": 2.0,
        "num_calls_of_area": 2.0,
        "num_calls_of_echo": 0.0,
    }


def test_a_tool_that_calls_exit_is_told_to_the_model_as_any_that_raises():
    def python(code: str) -> None:
        exec(code)

    answers = contents_after([("python", {"code": "exit()"})], tools=[python])
    assert answers == ["python called exit()"]
