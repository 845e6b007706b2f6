"""Tools of the OpenAI API: the schemas of Python functions, and calls read from a model's text."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openai.types.chat import ChatCompletionMessageFunctionToolCall as ToolCall
from openai.types.chat.chat_completion_message_function_tool_call import Function
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError
from pydantic.json_schema import GenerateJsonSchema

from rollout_actors.environments.concurrency import in_thread, name_of, unwrap_partial
from rollout_actors.environments.types import Arguments, Fields, JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOGGER = logging.getLogger(__name__)

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""What the OpenAI API takes for the name of a function."""
_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):")
_ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that a model may call.

    Example:
        `def add(a: int): "Add one."` has the schema `{"type": "function", "function": {"name":
        "add", "description": "Add one.", "parameters": {"type": "object", "properties": {"a":
        {"type": "integer"}}, "required": ["a"], "additionalProperties": False}}}`;
        `read('{"a": 2}')` is `{"a": 2}`.
    """

    name: str
    function: Callable[..., object]
    """Plain, or asynchronous."""
    schema: JsonObject
    """The tool among the `tools` of a call of the API."""
    required: tuple[str, ...]
    """Names of the arguments that have no default."""
    partial_arguments: type[BaseModel]
    """Model of the arguments, none of which has to be there; each field goes by its alias."""

    @classmethod
    def of(cls, function: Callable[..., object], args_to_skip: Collection[str] = ()) -> Tool:
        """Make a tool from a function's signature, type hints and docstring.

        Each line of the docstring's `Args:` section describes a parameter. A partial has those of
        what it wraps, except a `__name__` and a `__doc__` of its own; what it binds is skipped.

        Args:
            args_to_skip: parameters that the model neither sees nor sets.

        Raises:
            ValueError: names the function and what cannot be told to a model.
        """
        name = name_of(function)
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"tool {name}: the name of a tool has 1 to 64 letters, digits, - and _; give a"
                " named function"
            )
        parameters = _parameters(name, function)
        if absent := [arg for arg in args_to_skip if arg not in parameters]:
            raise ValueError(
                f"tool {name}: args_to_skip has {', '.join(absent)}, which is no parameter; they"
                f" are {', '.join(parameters) or 'none'}"
            )
        # A partial that was given no docstring has that of its class.
        documented = function
        while isinstance(documented, partial) and "__doc__" not in vars(documented):
            documented = documented.func
        description, descriptions = read_docstring(inspect.getdoc(documented) or "")
        wrapped = unwrap_partial(function)
        skipped = {*args_to_skip, *(wrapped.keywords if isinstance(wrapped, partial) else ())}
        fields: dict[str, Any] = {}
        optional: dict[str, Any] = {}
        for parameter in parameters.values():
            if parameter.name in skipped:
                continue
            hint = Any if parameter.annotation is parameter.empty else parameter.annotation
            default = ... if parameter.default is parameter.empty else parameter.default
            # By alias, since a model's field may not be called `_x`, and should not be `copy`.
            options: dict[str, Any] = {"alias": parameter.name}
            # Without a description the one of an `Annotated` hint stays.
            if parameter.name in descriptions:
                options["description"] = descriptions[parameter.name]
            field_name = f"argument_{len(fields)}"
            fields[field_name] = (hint, Field(default, **options))
            optional[field_name] = (hint, Field(None, alias=parameter.name))
        # An argument that the function does not have is a mistake that the model should read of.
        closed = ConfigDict(extra="forbid")
        try:
            arguments = create_model(name, __config__=closed, **fields)
            partial_arguments = create_model(name, __config__=closed, **optional)
            shown = arguments.model_json_schema(schema_generator=_Untitled)
        except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema) as error:
            reason = error.message.partition(".")[0]
            raise ValueError(
                f"tool {name}: {reason}; give its parameters types that JSON has, or hide them with"
                " args_to_skip"
            ) from error
        shown.pop("title", None)
        described = {"name": name, "description": description, "parameters": shown}
        schema = {"type": "function", "function": described}
        of_fields = arguments.model_fields.values()
        required = tuple(str(info.alias) for info in of_fields if info.is_required())
        return cls(name, function, schema, required, partial_arguments)

    def read(self, text: str, *, is_whole: bool = True) -> Arguments:
        """Read the arguments that a model wrote as JSON, as the function takes them.

        Args:
            is_whole: False: some may be missing, which somebody else fills in (`require_whole`).

        Raises:
            ValueError: says what is wrong with them, for the model to read.
        """
        try:
            written = json.loads(text) if text.strip() else {}
        except json.JSONDecodeError as error:
            raise ValueError(f"the arguments of {self.name} are not JSON: {error}") from error
        if not isinstance(written, Mapping):
            raise ValueError(f"the arguments of {self.name} are no JSON object, but {text[:60]}")
        try:
            checked = self.partial_arguments.model_validate(written)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, one['loc']))}: {one['msg']}"
                for one in error.errors(include_url=False)
            )
            raise ValueError(f"the arguments of {self.name} are wrong: {problems}") from error
        arguments = {
            str(info.alias): getattr(checked, field)
            for field, info in self.partial_arguments.model_fields.items()
            if field in checked.model_fields_set
        }
        if is_whole:
            self.require_whole(arguments)
        return arguments

    def require_whole(self, arguments: Fields) -> None:
        """Raise ValueError, for the model to read, where a required argument is missing."""
        absent = [name for name in self.required if name not in arguments]
        if missing := [f"{name}: Field required" for name in absent]:
            raise ValueError(f"the arguments of {self.name} are wrong: {'; '.join(missing)}")

    async def call(self, arguments: Fields) -> str:
        """Call the function, a plain one in a thread. Raises what it raises.

        Returns:
            Its value: text as it is, anything else as JSON.
        """
        if inspect.iscoroutinefunction(self.function):
            value = await self.function(**arguments)
        else:
            # A partial, since a parameter may have the name of one of `in_thread`.
            value = await in_thread(partial(self.function, **arguments))
            value = await value if inspect.isawaitable(value) else value
        if isinstance(value, str):
            return value

        def as_json(item: object) -> object:
            return item.model_dump(mode="json") if isinstance(item, BaseModel) else str(item)

        # The model is to read letters, not their escapes.
        return json.dumps(value, ensure_ascii=False, default=as_json)


def convert_tool_to_oai_format(
    tool: Callable[..., object], args_to_skip: Collection[str] = ()
) -> JsonObject:
    """Return the OpenAI schema of a function; see `Tool.of`."""
    return Tool.of(tool, args_to_skip).schema


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's description, up to the first section, and that of each argument."""
    description: list[str] = []
    arguments: dict[str, list[str]] = {}
    section = ""
    indent = 0
    name = ""
    for line in text.splitlines():
        if found := _SECTION.fullmatch(line.strip()):
            section = found[1]
            indent = 0
            name = ""
        elif not section:
            description.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = indent or depth
            argument = _ARGUMENT.fullmatch(line.strip()) if depth <= indent else None
            if argument is not None:
                name = argument[1]
                arguments[name] = [argument[2]]
            elif name:
                arguments[name].append(line.strip())
    joined = {name: " ".join(filter(None, lines)) for name, lines in arguments.items()}
    return "\n".join(description).strip(), joined


class _Untitled(GenerateJsonSchema):
    """A JSON schema without the `title` of each field, which only repeats its name."""

    def field_title_should_be_set(self, schema: object) -> bool:  # noqa: ARG002
        return False


def _parameters(name: str, function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    try:
        signature = inspect.signature(unwrap_partial(function), eval_str=True)
    except NameError as error:
        raise ValueError(
            f"tool {name}: a type hint cannot be read: {error}; use types that its module knows"
        ) from error
    for one in signature.parameters.values():
        if one.kind in (one.POSITIONAL_ONLY, one.VAR_POSITIONAL, one.VAR_KEYWORD):
            raise ValueError(
                f"tool {name}: parameter {one} cannot be given by name; a tool has named parameters"
                " alone"
            )
    return signature.parameters


# Tool calls in what a model wrote, read by vLLM's own parsers: the same that its server has.

_RANDOM_ID = re.compile(r"chatcmpl-tool-\w+|[0-9A-Za-z]{9}")
"""Ids that vLLM draws. Others say what was called, and templates read them."""


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """A model's message."""

    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()


class ToolCallReader:
    """One of vLLM's tool parsers, for one tokenizer."""

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """Import vllm, which takes some seconds.

        Raises:
            ValueError: vLLM has no parser of this name; it names the key of a run that has one.
        """
        # Here and not above: most runs have no tools.
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager as Parsers

        try:
            self._parser: Callable[..., Any] = Parsers.get_tool_parser(name)
        except KeyError as error:
            known = ", ".join(sorted({*Parsers.tool_parsers, *Parsers.lazy_parsers}))
            raise ValueError(
                f"environment.tool_call_parser: vLLM has none of the name {name!r}; set it to one"
                f" of {known}"
            ) from error
        self._name = name
        self._tokenizer = tokenizer
        self._request = ChatCompletionRequest

    def read(
        self, token_ids: Sequence[int], text: str, tools: Sequence[Fields], *, seed: int
    ) -> AssistantMessage:
        """Read the message of these tokens. What the parser cannot read is content, as it stands.

        Args:
            text: the tokens as text, without special ones.
            seed: the request's. Ids that vLLM would draw at random follow from it: an id may be in
                the next prompt.
        """
        request = self._request(
            messages=[], tools=[dict(tool) for tool in tools], tool_choice="auto"
        )
        try:
            # A new one for each message, since vLLM's parsers keep what they have read.
            parser = self._parser(self._tokenizer, request.tools)
            # Some parsers read special tokens, and ask here for a text that still has them.
            request = parser.adjust_request(request)
            written = self._tokenizer.decode(
                list(token_ids),
                skip_special_tokens=request.skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
            found = parser.extract_tool_calls(written, request)
        except Exception as error:  # of any of many parsers, on any text that a model may write
            what = f"{type(error).__name__}: {error}"
            failure = "vLLM's tool parser %s failed on %r, which stays text (%s)"
            _LOGGER.warning(failure, self._name, text[:200], what)
            return AssistantMessage(text)
        if not found.tools_called:
            return AssistantMessage(text)
        calls = []
        for index, call in enumerate(found.tool_calls):
            call_id = call.id
            if _RANDOM_ID.fullmatch(call_id):
                # Nine characters, because some templates take no others.
                call_id = hashlib.sha256(f"{seed}/{index}".encode()).hexdigest()[:9]
            function = Function(name=call.function.name, arguments=call.function.arguments)
            calls.append(ToolCall(id=call_id, type="function", function=function))
        content = found.content if (found.content or "").strip() else None
        return AssistantMessage(content, tuple(calls))


def reader_of(name: str | None, tokenizer: PreTrainedTokenizerBase) -> ToolCallReader | None:
    """Return the reader of this name, else the checkpoint's own; None: it has none."""
    if name is None and isinstance(getattr(tokenizer, "response_template", None), Mapping):
        name = "hf"  # vLLM's parser by such a template
    return None if name is None else ToolCallReader(name, tokenizer)


def has_own_parser(checkpoint: Path) -> bool:
    """Tell whether `reader_of` finds one in this folder's tokenizer, without loading it."""
    path = checkpoint / "tokenizer_config.json"
    return path.is_file() and isinstance(
        json.loads(path.read_text(encoding="utf-8")).get("response_template"), Mapping
    )


def chat_templates(checkpoint: Path) -> list[str]:
    """Return the chat templates of this folder's tokenizer, without loading it."""
    paths = (
        checkpoint / "chat_template.jinja",
        *checkpoint.glob("additional_chat_templates/*.jinja"),
    )
    templates = [path.read_text(encoding="utf-8") for path in paths if path.is_file()]
    config = checkpoint / "tokenizer_config.json"
    if not templates and config.is_file():
        # One text, or a list of them with names.
        template = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
        templates = [json.dumps(template)] if template else []
    return templates


def num_tool_calls(state: Fields) -> int | None:
    """Count the model's calls in a rollout; None where it is offered no tools."""
    if not state.get("oai_tools"):
        return None
    return sum(
        len(message.get("tool_calls") or ())
        for step in state.get("trajectory") or ()
        for message in step.get("completion") or ()
        if isinstance(message, Mapping)
    )


class UncalledTools:
    """A count of rollouts none of which called a tool, for a warning."""

    FIRST_ROLLOUTS = 8
    """Rollouts before the first warning: fewer may have had no need of a tool."""

    def __init__(self) -> None:
        self._num_rollouts = 0
        self._next_warning = self.FIRST_ROLLOUTS
        self._has_called = False

    def problem(self, num_rollouts: int, num_calls: float) -> str | None:
        """Count more rollouts that could call a tool, and their calls.

        Returns:
            A warning after `FIRST_ROLLOUTS` without a call, and whenever twice as many had none.
        """
        self._has_called = self._has_called or num_calls > 0
        self._num_rollouts += num_rollouts
        if self._has_called or not num_rollouts or self._num_rollouts < self._next_warning:
            return None
        self._next_warning = 2 * self._num_rollouts
        return (
            f"none of {self._num_rollouts} rollouts called a tool, though they were offered some;"
            " read what the model answers: its chat template must show tools, and its calls must"
            " be read (by environment.tool_call_parser in training, by the endpoint's own parser"
            " with vf-eval)"
        )
