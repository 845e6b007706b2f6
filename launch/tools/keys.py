"""Print the reference of the configuration: `rollmatch keys [SECTION] [--markdown FOLDER]`.

Every line comes from the schema (`shared/config`): key, type, default and description.
"""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import annotated_types
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from launch.cli import explained
from launch.run_folder.console import make_console
from shared.config import RunConfig
from shared.config.base import Section
from shared.config.explain import as_yaml, sections_in, suggestion
from shared.errors import ConfigError

NULL = "null"
WORDS = {
    types.NoneType: NULL,
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    Path: "path",
}
ANY = "any value"
SECTION = "section"
REQUIRED = "required"
COMMAND = "rollmatch keys --markdown docs/reference/keys"
PAGES = {
    "model_and_data": ("model and data", ("model", "data", "global_max_length", "custom")),
    "training": ("training", ("training", "learner", "checkpoint", "resume")),
    "rollouts": ("rollouts and matching", ("rollout_matching",)),
    "engines": ("engines", ("rollout_matching.vllm",)),
    "objectives": ("objectives and schedule", ("rollout_matching.pipeline", "stage2_ab")),
    "environments": ("environments", ("environment",)),
    "job": ("the job", ("cluster", "timeouts", "evaluation", "telemetry")),
}
"""Pages of the configuration reference: file name, title and the keys that it explains."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the configuration.

    `[]` in its path stands for each entry of a list, `[token_ce]` for an entry of this name.

    Example: `Key("training.max_grad_norm", "number > 0, or null", "1.0", "Largest L2 norm ...")`.
    """

    path: str
    type: str
    default: str
    """In YAML; `REQUIRED` if the key has no default, empty for a section."""
    description: str

    @property
    def kind(self) -> str:
        """Type and default of the key, as text for the reference."""
        if not self.default or self.default == REQUIRED:
            return ", ".join(filter(None, (self.type, self.default)))
        return f"{self.type}; default {self.default}"


def keys_of(schema: type[Section] = RunConfig, above: str = "") -> Iterator[Key]:
    """Yield every configuration key below a section, depth first, in the order of the schema."""
    for name, field in schema.model_fields.items():
        description = " ".join((field.description or "").split())
        inside = sections_in(field.annotation)
        is_list = _is_list(field.annotation)
        path = f"{above}{name}{'[]' if inside and is_list else ''}"
        default = "" if inside and not is_list else _default(field)
        yield Key(path, _type(field.annotation, field.metadata), default, description)
        for section in inside:
            # An entry of the objective has the keys of its name.
            entry = f"{name}[{_entry_name(section)}]" if len(inside) > 1 else path
            yield from keys_of(section, f"{above if len(inside) > 1 else ''}{entry}.")


def keys_below(section: str) -> list[Key]:
    """List the configuration key `section` and all keys below it; all keys for an empty text.

    Raises:
        ConfigError: there is no such key; the message suggests one.
    """
    keys = list(keys_of())
    plain = {key.path: _plain(key.path) for key in keys}
    found = [key for key in keys if not section or f"{plain[key.path]}.".startswith(f"{section}.")]
    if not found:
        near = suggestion(section, plain.values())
        remedy = f"did you mean {near}?" if near else "`rollmatch keys` lists them"
        raise ConfigError(f"SECTION: {section} is not a key; {remedy}")
    return found


def markdown(page: str) -> str:
    """Return the Markdown of the reference page that `PAGES` has under this name."""
    title, sections = PAGES[page]
    others = {one for _, several in PAGES.values() for one in several} - set(sections)
    lines = [f"# Keys: {title}", "", f"From the schema, by `{COMMAND}`."]
    for section in sections:
        below = [one for one in others if one.startswith(f"{section}.")]
        for key in keys_below(section):
            if any(f"{_plain(key.path)}.".startswith(f"{one}.") for one in below):
                continue
            if key.type == SECTION:
                lines += ["", f"## `{key.path}`", "", key.description]
            else:
                lines += ["", f"**`{key.path}`** ({key.kind})  ", key.description]
    return "\n".join(lines) + "\n"


def write_markdown(folder: Path) -> list[Path]:
    """Write every reference page of `PAGES` into the folder, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for page in PAGES:
        path = folder / f"{page}.md"
        path.write_text(markdown(page), encoding="utf-8")
        paths.append(path)
    return paths


def _plain(path: str) -> str:
    """Remove what stands for entries of lists: `servers[].base_url` is `servers.base_url`."""
    return ".".join(part.partition("[")[0] for part in path.split("."))


def _entry_name(section: type[Section]) -> str | None:
    names = (
        typing.get_args(section.model_fields["name"].annotation)
        if "name" in section.model_fields
        else ()
    )
    return str(names[0]) if names else "module:Class"


def _default(field: FieldInfo) -> str:
    return REQUIRED if field.is_required() else as_yaml(field.default)


def _is_list(annotation: Any) -> bool:
    return typing.get_origin(annotation) is tuple or any(
        _is_list(part) for part in typing.get_args(annotation)
    )


def _type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe the values that a key takes."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        inner = [one for part in parts[1:] for one in getattr(part, "metadata", [part])]
        return _type(parts[0], [*inner, *metadata])
    if origin in (typing.Union, types.UnionType):
        kinds = dict.fromkeys(_type(part, metadata) for part in parts)
        return " or ".join(sorted(kinds, key=lambda kind: kind == NULL))
    if origin is typing.Literal:
        return " | ".join(f"`{part}`" for part in parts)
    if origin is tuple:
        if parts[-1] is not Ellipsis:
            return f"list of {len(parts)}: {_type(parts[0])}"
        return f"list of {_type(parts[0])}"
    if origin is dict or annotation is dict:
        return "mapping"
    if not isinstance(annotation, type):
        return ANY
    if issubclass(annotation, Section):
        return SECTION
    if issubclass(annotation, StrEnum):
        return " | ".join(f"`{one}`" for one in annotation)
    return WORDS.get(annotation, ANY) + ",".join(filter(None, map(_bound, metadata)))


def _bound(one: object) -> str:
    match one:
        case annotated_types.Gt(gt=least):
            return f" > {least}"
        case annotated_types.Ge(ge=least):
            return f" >= {least}"
        case annotated_types.Lt(lt=most):
            return f" < {most}"
        case annotated_types.Le(le=most):
            return f" <= {most}"
        case _:
            return ""


def _print(console: Console, keys: Sequence[Key]) -> None:
    for key in keys:
        console.print(Text.assemble((key.path, "bold"), f"  {key.kind}"))
        console.print(Padding(key.description, (0, 0, 0, 4)), highlight=False, markup=False)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("rollmatch keys", description=__doc__)
    parser.add_argument("section", nargs="?", default="", help="a key, such as training; else all")
    parser.add_argument("--markdown", type=Path, metavar="FOLDER", help="write the pages")
    options = parser.parse_args(arguments)
    console = make_console()
    with explained(console):
        if options.markdown is not None:
            for path in write_markdown(options.markdown):
                console.print(f"written   {path}", highlight=False, markup=False)
        else:
            _print(console, keys_below(options.section))


if __name__ == "__main__":
    main()
