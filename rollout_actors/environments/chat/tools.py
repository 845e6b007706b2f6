"""A Python function as a tool of the OpenAI API: what the model is told of it, and how what the
model writes becomes a call.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError
from pydantic.json_schema import GenerateJsonSchema

from rollout_actors.environments.concurrency import bare, in_thread, name_of

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""What the OpenAI API takes for the name of a function."""
_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):")
_ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that a model may call."""

    name: str
    function: Callable[..., Any]
    """Plain, or asynchronous."""
    schema: dict[str, Any]
    """As it stands among the `tools` of a call: `{"type": "function", "function": {"name",
    "description", "parameters"}}`.
    """
    arguments: type[BaseModel]
    """What the model may give, each field by its alias."""
    given: type[BaseModel]
    """The same, and none of them has to be there."""

    @classmethod
    def of(cls, function: Callable[..., Any], args_to_skip: Collection[str] = ()) -> Tool:
        """From its signature, its type hints and its docstring (the text, and an `Args:` section
        with a line for each). Of a partial, they are those of what it wraps, but for a `__name__`
        and a `__doc__` that it was given itself; what it binds is skipped.

        `args_to_skip` are the parameters that the model neither sees nor sets. ValueError names the
        function and what cannot be told to a model.
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
        description, told = read_docstring(_docstring(function))
        called = bare(function)
        skipped = {*args_to_skip, *(called.keywords if isinstance(called, partial) else ())}
        seen = [one for one in parameters.values() if one.name not in skipped]
        # By alias, since a model's field may not be called `_x`, and should not be called `copy`.
        fields: dict[str, Any] = {
            f"argument_{place}": (_hint(one), _field(one, told)) for place, one in enumerate(seen)
        }
        try:
            arguments = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
            optional: dict[str, Any] = {
                field: (hint, Field(None, alias=info.alias))
                for field, (hint, info) in fields.items()
            }
            given = create_model(name, __config__=ConfigDict(extra="forbid"), **optional)
            form = arguments.model_json_schema(schema_generator=_Untitled)
        except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema) as error:
            reason = error.message.partition(".")[0]
            raise ValueError(
                f"tool {name}: {reason}; give its parameters types that JSON has, or hide them with"
                " args_to_skip"
            ) from error
        shown = {key: value for key, value in form.items() if key != "title"}
        return cls(
            name,
            function,
            {
                "type": "function",
                "function": {"name": name, "description": description, "parameters": shown},
            },
            arguments,
            given,
        )

    def read(self, text: str, *, is_whole: bool = True) -> dict[str, Any]:
        """The arguments that a model wrote as JSON, as the function takes them. ValueError says
        what is wrong with them, for the model to read.

        `is_whole`: False: some may be missing, which somebody else fills in (`require_whole`).
        """
        try:
            given = json.loads(text) if text.strip() else {}
        except json.JSONDecodeError as error:
            raise ValueError(f"the arguments of {self.name} are not JSON: {error}") from error
        if not isinstance(given, Mapping):
            raise ValueError(f"the arguments of {self.name} are no JSON object, but {text[:60]}")
        try:
            checked = (self.arguments if is_whole else self.given).model_validate(given)
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, one['loc']))}: {one['msg']}"
                for one in error.errors(include_url=False)
            )
            raise ValueError(f"the arguments of {self.name} are wrong: {faults}") from error
        fields = type(checked).model_fields
        return {
            str(fields[field].alias): getattr(checked, field)
            for field in fields
            if field in checked.model_fields_set
        }

    def require_whole(self, arguments: Mapping[str, Any]) -> None:
        """ValueError, for the model to read, where one that it may give is missing."""
        required = [
            field.alias for field in self.arguments.model_fields.values() if field.is_required()
        ]
        if missing := [name for name in required if name not in arguments]:
            raise ValueError(
                f"the arguments of {self.name} are wrong:"
                f" {'; '.join(f'{name}: Field required' for name in missing)}"
            )

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """What the function returns, as text: text as it is, anything else as JSON. A plain
        function runs in a thread. Raises what it raises.
        """
        if inspect.iscoroutinefunction(self.function):
            value = await self.function(**arguments)
        else:
            # whose parameters may have the names of those of `in_thread`
            value = await in_thread(partial(self.function, **arguments))
            value = await value if inspect.isawaitable(value) else value
        return (
            value
            if isinstance(value, str)
            else json.dumps(value, ensure_ascii=False, default=_plain)
        )


def convert_tool_to_oai_format(
    tool: Callable[..., Any], args_to_skip: Collection[str] = ()
) -> dict[str, Any]:
    """What a model is told of a function. See `Tool.of`."""
    return Tool.of(tool, args_to_skip).schema


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring says of the function, up to its first section, and of each argument, in the
    section `Args:`.
    """
    description: list[str] = []
    arguments: dict[str, list[str]] = {}
    section, indent, last = "", 0, ""
    for line in text.splitlines():
        if found := _SECTION.fullmatch(line.strip()):
            section, indent, last = found[1], 0, ""
        elif not section:
            description.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = indent or depth
            argument = _ARGUMENT.fullmatch(line.strip()) if depth <= indent else None
            if argument is not None:
                last = argument[1]
                arguments[last] = [argument[2]]
            elif last:
                arguments[last].append(line.strip())
    return "\n".join(description).strip(), {
        name: " ".join(filter(None, lines)) for name, lines in arguments.items()
    }


class _Untitled(GenerateJsonSchema):
    """Without a `title` for each field, which only says its name again."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False


def _docstring(function: Callable[..., Any]) -> str:
    # Where it was given none, a partial has that of its class.
    if isinstance(function, partial) and "__doc__" not in vars(function):
        return _docstring(function.func)
    return inspect.getdoc(function) or ""


def _parameters(name: str, function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        signature = inspect.signature(bare(function), eval_str=True)
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
    return dict(signature.parameters)


def _hint(parameter: inspect.Parameter) -> Any:
    return Any if parameter.annotation is parameter.empty else parameter.annotation


def _field(parameter: inspect.Parameter, told: Mapping[str, str]) -> Any:
    default = ... if parameter.default is parameter.empty else parameter.default
    options: dict[str, Any] = {"alias": parameter.name}
    # Without one of the docstring, that of an `Annotated` hint stays.
    if parameter.name in told:
        options["description"] = told[parameter.name]
    return Field(default, **options)


def _plain(value: Any) -> Any:
    """What JSON has no form of: a model by its fields, anything else by its text."""
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)
