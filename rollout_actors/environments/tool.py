"""Environments in which the model calls Python functions as tools.

In each turn the environment answers the tool calls of the model's last message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rollout_actors.environments.chat.tools import Tool
from rollout_actors.environments.concurrency import is_process_exit, name_of
from rollout_actors.environments.lifecycle import awaited, stop
from rollout_actors.environments.multi_turn import MultiTurnEnv
from rollout_actors.environments.rewards import RewardFunction
from rollout_actors.environments.rubric import Rubric
from rollout_actors.environments.types import Arguments, Message, Messages, State
from shared.config.secrets import redacted


class ToolEnv(MultiTurnEnv):
    """An environment with tools. A rollout ends with the model's first message without a call.

    A row's own `info["oai_tools"]` replaces the tool descriptions that the model sees, not the
    functions that answer the calls.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., object]] | None = None,
        max_turns: int = 10,
        error_formatter: Callable[[Exception], str] = str,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            tools: functions whose parameters have type hints, plain or asynchronous; the model
                reads their docstrings. Plain ones run in threads, at most min(32, cores + 4) at a
                time together with plain reward functions, so functions that wait for a network
                should be asynchronous. A `functools.partial` without its own name or docstring
                has those of the function that it wraps; bound arguments are hidden.
            max_turns: maximum number of model calls in a rollout; -1: no limit.
            error_formatter: makes the answer to a tool call that fails: the tool is unknown, its
                arguments are wrong, or it raises. An empty answer becomes the error's class name.
        """
        super().__init__(max_turns=max_turns, **kwargs)
        if self.message_type != "chat":
            raise ValueError(f"message_type: must be chat for tools, got {self.message_type!r}")
        self.error_formatter = error_formatter
        self._tools: dict[str, Tool] = {}
        if callable(tools):
            raise TypeError(f"tools: is {type(tools).__name__}; give a list of functions")
        for tool in tools or ():
            self.add_tool(tool)

    def add_tool(self, tool: Callable[..., object]) -> None:
        """Add a tool for rollouts that begin from now on."""
        self._add(Tool.of(tool))

    def remove_tool(self, tool: Callable[..., object]) -> None:
        """Remove a tool from rollouts that begin from now on.

        Raises ValueError if the environment does not have it.
        """
        name = name_of(tool)
        # The function is compared too: another one may have this name.
        if self.tool_map.get(name) != tool:
            known = ", ".join(self._tools) or "none"
            raise ValueError(f"tool {name} does not exist; there are {known}")
        del self._tools[name]
        self.oai_tools = [one for one in self.oai_tools if one["function"]["name"] != name]

    @property
    def tool_map(self) -> dict[str, Callable[..., object]]:
        return {name: tool.function for name, tool in self._tools.items()}

    @property
    def tool_names(self) -> list[str]:
        return list(self._tools)

    @stop
    async def no_tools_called(self, state: State) -> bool:
        # Before the first model call the trajectory is empty.
        return bool(state["trajectory"]) and not calls_of(state["trajectory"][-1]["completion"][-1])

    async def env_response(self, messages: Messages, state: State, **kwargs: object) -> Messages:
        """Run the tool calls of the model's last message in order. Return a message for each."""
        last: Any = messages[-1]
        return [await self._answer(call, messages, state) for call in calls_of(last)]

    async def call_tool(
        self,
        tool_name: str,
        tool_args: Arguments,
        tool_call_id: str,
        state: State | None = None,
        **kwargs: object,
    ) -> Message:
        """Call a tool with complete arguments, and return the message that the model gets.

        An error of the tool becomes the message, because the model may try another way.

        Args:
            state: the rollout's state, which counts errors. An override must pass it on.
        """
        try:
            tool = self._tool(tool_name)
            tool.require_whole(tool_args)
            content = await tool.call(tool_args)
        except Exception as error:
            content = self._refusal(error, state)
        except SystemExit as error:
            if is_process_exit(error):
                raise
            content = self._refusal(RuntimeError(f"{tool_name} called exit()"), state)
        return {"role": "tool", "tool_call_id": tool_call_id, "content": content}

    def _add(self, tool: Tool) -> None:
        if tool.name in self._tools:
            raise ValueError(f"tool {tool.name} exists already; give one a different __name__")
        self._tools[tool.name] = tool
        self.oai_tools = [*self.oai_tools, tool.schema]

    def _tool(self, name: str) -> Tool:
        if name not in self._tools:
            known = ", ".join(self._tools) or "none"
            raise ValueError(f"there is no tool {name}; there are {known}")
        return self._tools[name]

    async def _answer(self, call: Message, messages: Messages, state: State) -> Message:
        """Parse a tool call, and run it."""
        name = call["function"]["name"]
        written = call["function"].get("arguments") or ""
        try:
            arguments = self._tool(name).read(written, is_whole=not self._fills_in)
        except ValueError as error:
            content = self._refusal(error, state)
            return {"role": "tool", "tool_call_id": call["id"], "content": content}
        # Outside of the `try`: an error here is not the model's, so it fails the rollout.
        arguments = await awaited(self.update_tool_args(name, arguments, messages, state))
        return await awaited(self.call_tool(name, arguments, call["id"], state=state))

    def _refusal(self, error: Exception, state: State | None) -> str:
        if state is not None:
            state["num_tool_errors"] = state.get("num_tool_errors", 0) + 1
        # The model reads it, and the log of rollouts keeps it.
        return redacted(self.error_formatter(error)) or type(error).__name__

    _fills_in = False
    """Whether `update_tool_args` may add required arguments that the model left out."""

    async def update_tool_args(
        self,
        tool_name: str,
        tool_args: Arguments,
        messages: Messages,
        state: State,
    ) -> Arguments:
        """Return the arguments to call a tool with; `tool_args` are the model's arguments.

        Override it to change or add arguments.
        """
        return tool_args


class StatefulToolEnv(ToolEnv):
    """A tool environment that sets some parameters of its tools itself, hidden from the model.

    A subclass overrides `update_tool_args` to add these arguments, for example from the rollout's
    state. The override may also add arguments that the model left out. An error in it fails the
    rollout.
    """

    _fills_in = True

    def add_tool(self, tool: Callable[..., object], args_to_skip: Sequence[str] = ()) -> None:
        """Add a tool. The model neither sees nor sets the parameters in `args_to_skip`."""
        self._add(Tool.of(tool, args_to_skip))


class ToolRubric(Rubric):
    """Counts tool calls as metrics that do not change the reward.

    The metrics are `num_tool_calls`, `num_tool_errors`, and `num_calls_of_<tool>`.
    """

    def __init__(self, tools: Iterable[Callable[..., object] | str] = ()) -> None:
        """`tools`: the tools whose calls are counted separately, as functions or names."""
        names = [tool if isinstance(tool, str) else name_of(tool) for tool in tools]
        functions: list[RewardFunction] = [
            num_tool_calls,
            num_tool_errors,
            *(_counter_of(name) for name in names),
        ]
        super().__init__(functions, [0.0] * len(functions))


def num_tool_calls(completion: Messages) -> int:
    return sum(_counted(completion).values())


def num_tool_errors(state: State) -> int:
    """Return how many tool calls of a rollout were answered with an error."""
    return int(state.get("num_tool_errors", 0))


def calls_of(message: Message) -> list[Message]:
    """Return the tool calls in a model's message; an empty list if there are none."""
    return list(message.get("tool_calls") or ())


def _counter_of(name: str) -> RewardFunction:
    def count(completion: Messages) -> int:
        return _counted(completion)[name]

    count.__name__ = f"num_calls_of_{name}"
    return count


def _counted(completion: Messages) -> Counter[str]:
    return Counter(
        call["function"]["name"]
        for message in completion
        if isinstance(message, dict)
        for call in calls_of(message)
    )
