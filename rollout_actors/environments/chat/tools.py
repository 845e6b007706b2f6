"""Tools of the OpenAI API: Python functions with their schemas, and parsing of tool calls."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
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
"""Names that the OpenAI API accepts for a function."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+>")
"""An object's address in its default text."""
_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):")
_ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


@dataclass(frozen=True, slots=True)
class Tool:
    """A Python function that a model may call as a tool, with its schema for the model.

    Example:
        `def add(a: int): "Add one."` has the schema `{"type": "function", "function": {"name":
        "add", "description": "Add one.", "parameters": {"type": "object", "properties": {"a":
        {"type": "integer"}}, "required": ["a"], "additionalProperties": False}}}`;
        `read('{"a": 2}')` is `{"a": 2}`.
    """

    name: str
    function: Callable[..., object]
    """The function, plain or asynchronous."""
    schema: JsonObject
    """The tool as an entry of `tools` in an API call."""
    required: tuple[str, ...]
    """Names of the arguments without a default."""
    partial_arguments: type[BaseModel]
    """pydantic model that converts arguments, all optional. Aliases are the arguments' names."""

    @classmethod
    def of(cls, function: Callable[..., object], args_to_skip: Collection[str] = ()) -> Tool:
        """Make a tool from a function's signature, type hints and docstring.

        Each entry of the docstring's `Args:` section describes a parameter. A `functools.partial`
        without its own name or docstring has those of the function that it wraps. Arguments that
        the partial binds are skipped.

        Args:
            args_to_skip: parameters that the model neither sees nor sets.

        Raises:
            ValueError: names the function and why it cannot be a tool.
        """
        name = name_of(function)
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"tool {name}: a tool's name must have 1 to 64 letters, digits, - and _; give a"
                " named function"
            )
        parameters = _parameters(name, function)
        if absent := [arg for arg in args_to_skip if arg not in parameters]:
            raise ValueError(
                f"tool {name}: args_to_skip has {', '.join(absent)}, but the parameters are"
                f" {', '.join(parameters) or 'none'}"
            )
        # A partial without its own docstring would have the docstring of its class.
        documented = function
        while isinstance(documented, partial) and "__doc__" not in vars(documented):
            documented = documented.func
        description, descriptions = read_docstring(inspect.getdoc(documented) or "")
        wrapped = unwrap_partial(function)
        skipped = {*args_to_skip, *(wrapped.keywords if isinstance(wrapped, partial) else ())}
        if "self" in parameters and "self" not in skipped:
            raise ValueError(f"tool {name}: self is not bound; give a method of an object")
        if inspect.isgeneratorfunction(wrapped) or inspect.isasyncgenfunction(wrapped):
            raise ValueError(f"tool {name}: it is a generator; return the values in a list")
        fields: dict[str, Any] = {}
        optional: dict[str, Any] = {}
        for parameter in parameters.values():
            if parameter.name in skipped:
                continue
            hint = Any if parameter.annotation is parameter.empty else parameter.annotation
            default = ... if parameter.default is parameter.empty else parameter.default
            # By alias, because a model's field must not be called `_x`, and should not be `copy`.
            options: dict[str, Any] = {"alias": parameter.name}
            # Without a description, the description in an `Annotated` hint is used.
            if parameter.name in descriptions:
                options["description"] = descriptions[parameter.name]
            field_name = f"argument_{len(fields)}"
            fields[field_name] = (hint, Field(default, **options))
            optional[field_name] = (hint, Field(None, alias=parameter.name))
        # An argument that the function does not have is a mistake that the model should read about.
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
        """Parse the arguments of a tool call, JSON that a model wrote, for the function.

        Args:
            is_whole: whether all required arguments must be there; False: some are added later.

        Raises:
            ValueError: the arguments are wrong; the text is for the model.
        """
        try:
            written = json.loads(text) if text.strip() else {}
        except (ValueError, RecursionError) as error:
            # Without the advice to programmers about numbers with too many digits.
            reason = str(error).partition(";")[0]
            raise ValueError(f"the arguments of {self.name} are not JSON: {reason}") from error
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
        """Raise ValueError, with a text for the model, if a required argument is missing."""
        absent = [name for name in self.required if name not in arguments]
        if missing := [f"{name}: Field required" for name in absent]:
            raise ValueError(f"the arguments of {self.name} are wrong: {'; '.join(missing)}")

    async def call(self, arguments: Fields) -> str:
        """Call the function with these arguments, in a thread if it is not asynchronous.

        Its errors are raised.

        Returns:
            The function's value for the model: text unchanged, anything else as JSON.

        Raises:
            TypeError: the value has neither a JSON form nor a text of its own.
            UnicodeEncodeError: the text has half of a surrogate pair.
        """
        if inspect.iscoroutinefunction(self.function):
            value = await self.function(**arguments)
        else:
            # A partial, because a parameter may have the name of a parameter of `in_thread`.
            value = await in_thread(partial(self.function, **arguments))
            value = await value if inspect.isawaitable(value) else value

        def as_json(item: object) -> object:
            if isinstance(item, Set):
                return sorted(item, key=repr)  # the order of texts differs between processes
            if isinstance(item, BaseModel):
                return item.model_dump(mode="json")
            if isinstance(item, Enum):
                return item.value
            if is_dataclass(item) and not isinstance(item, type):
                return {field.name: getattr(item, field.name) for field in fields(item)}
            if hasattr(item, "tolist"):  # arrays and their numbers
                return item.tolist()
            text = str(item)
            if _ADDRESS.search(text) or isinstance(item, bytes | bytearray):
                raise TypeError(
                    f"{self.name} returned {type(item).__name__}, which is not JSON; it must"
                    " return text, or values that JSON has"
                )
            return text

        value = value.value if isinstance(value, Enum) else value
        # Without escapes, because the model reads it.
        is_text = isinstance(value, str)
        text = value if is_text else json.dumps(value, ensure_ascii=False, default=as_json)
        text.encode()  # raises now, because no prompt could be made of it
        return text


def convert_tool_to_oai_format(
    tool: Callable[..., object], args_to_skip: Collection[str] = ()
) -> JsonObject:
    """Return the OpenAI schema of a function without `args_to_skip`; see `Tool.of`."""
    return Tool.of(tool, args_to_skip).schema


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's text up to its first section, and the text about each argument."""
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
    """Generates JSON schemas without the `title` of each field, which only repeats its name."""

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
                f"tool {name}: parameter {one} cannot be given by name; use only named parameters"
            )
    return signature.parameters


# Tool calls in a model's text, parsed by vLLM's own parsers, which its server uses too.

_RANDOM_ID = re.compile(r"chatcmpl-tool-\w+|[0-9A-Za-z]{9}")
"""Ids that vLLM draws at random. Other ids contain the name of the called function, which chat
templates read from them.
"""


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """A model's answer, divided into text and tool calls."""

    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()


class ToolCallReader:
    """Parses tool calls in a model's answers by one of vLLM's tool parsers."""

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """Import vllm, which takes some seconds.

        Raises:
            ValueError: vLLM has no parser of this name; the text names the run's key.
        """
        # Imported here, because most runs have no tools.
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager as Parsers

        try:
            self._parser: Callable[..., Any] = Parsers.get_tool_parser(name)
        except KeyError as error:
            known = ", ".join(sorted({*Parsers.tool_parsers, *Parsers.lazy_parsers}))
            raise ValueError(
                f"environment.tool_call_parser: vLLM has no parser {name!r}; set it to one of"
                f" {known}"
            ) from error
        self._name = name
        self._tokenizer = tokenizer
        self._request = ChatCompletionRequest

    def read(
        self, token_ids: Sequence[int], text: str, tools: Sequence[Fields], *, seed: int
    ) -> AssistantMessage:
        """Return the text and the tool calls in an answer. What cannot be parsed stays text.

        Args:
            text: the answer's tokens as text, without special tokens.
            seed: the request's seed. Ids of tool calls that vLLM would draw at random are derived
                from the seed, because an id may be part of the next prompt.
        """
        request = self._request(
            messages=[], tools=[dict(tool) for tool in tools], tool_choice="auto"
        )
        try:
            # A new parser for each message, because vLLM's parsers keep state.
            parser = self._parser(self._tokenizer, request.tools)
            # Some parsers read special tokens, and request here that the text includes them.
            request = parser.adjust_request(request)
            written = self._tokenizer.decode(
                list(token_ids),
                skip_special_tokens=request.skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
            found = parser.extract_tool_calls(written, request)
        except Exception as error:  # many parsers, and any text that a model may write
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
                # Nine characters, because some templates accept no other length.
                call_id = hashlib.sha256(f"{seed}/{index}".encode()).hexdigest()[:9]
            function = Function(name=call.function.name, arguments=call.function.arguments)
            calls.append(ToolCall(id=call_id, type="function", function=function))
        content = found.content if (found.content or "").strip() else None
        return AssistantMessage(content, tuple(calls))


def reader_of(name: str | None, tokenizer: PreTrainedTokenizerBase) -> ToolCallReader | None:
    """Return the parser of tool calls that vLLM knows by this name.

    `name` None: the parser that the tokenizer's files name. Return None if they name none.
    """
    if name is None and isinstance(getattr(tokenizer, "response_template", None), Mapping):
        name = "hf"  # vLLM's parser for such a template
    return None if name is None else ToolCallReader(name, tokenizer)


def has_own_parser(checkpoint: Path) -> bool:
    """Return whether the tokenizer in a checkpoint folder names a parser of tool calls.

    The tokenizer is not loaded.
    """
    path = checkpoint / "tokenizer_config.json"
    return path.is_file() and isinstance(
        json.loads(path.read_text(encoding="utf-8")).get("response_template"), Mapping
    )


def chat_templates(checkpoint: Path) -> list[str]:
    """Return the chat templates in a checkpoint folder, without loading the tokenizer."""
    paths = (
        checkpoint / "chat_template.jinja",
        *checkpoint.glob("additional_chat_templates/*.jinja"),
    )
    templates = [path.read_text(encoding="utf-8") for path in paths if path.is_file()]
    config = checkpoint / "tokenizer_config.json"
    if not templates and config.is_file():
        # One text, or a list of named texts.
        template = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
        templates = [json.dumps(template)] if template else []
    return templates


def num_tool_calls(state: Fields) -> int | None:
    """Return the number of tool calls in a rollout; None if the model was offered no tools."""
    if not state.get("oai_tools"):
        return None
    return sum(
        len(message.get("tool_calls") or ())
        for step in state.get("trajectory") or ()
        for message in step.get("completion") or ()
        if isinstance(message, Mapping)
    )


class UncalledTools:
    """Warns if a model that is offered tools never calls one."""

    FIRST_ROLLOUTS = 8
    """Number of rollouts before the first warning, because fewer rollouts may not need a tool."""

    def __init__(self) -> None:
        self._num_rollouts = 0
        self._next_warning = self.FIRST_ROLLOUTS
        self._has_called = False

    def problem(self, num_rollouts: int, num_calls: float) -> str | None:
        """Count further rollouts, and return a warning if no rollout has called a tool so far.

        Args:
            num_rollouts: number of further rollouts, whose model was offered tools.
            num_calls: number of tool calls in these rollouts.

        Returns:
            A warning after `FIRST_ROLLOUTS` rollouts without a call, and again each time the number
            of rollouts has doubled; otherwise None.
        """
        self._has_called = self._has_called or num_calls > 0
        self._num_rollouts += num_rollouts
        if self._has_called or not num_rollouts or self._num_rollouts < self._next_warning:
            return None
        self._next_warning = 2 * self._num_rollouts
        return (
            f"none of {self._num_rollouts} rollouts called a tool, although tools were offered;"
            " read the model's answers: the chat template must show the tools, and tool calls must"
            " be parsed (by environment.tool_call_parser in training, by the endpoint's own parser"
            " with vf-eval)"
        )
