"""Print the reference of the configuration: `rollmatch keys [SECTION] [--markdown FOLDER]`.

Every line comes from the schema (`shared/config`): key, type, default and description.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from launch.cli import explained
from launch.run_folder.console import make_console
from shared.config import RunConfig
from shared.config.explain import as_yaml, suggestion
from shared.config.pipeline import IMPORTED
from shared.errors import ConfigError

JsonSchema = Mapping[str, Any]
"""A JSON schema, as pydantic writes it."""
WORDS = {
    "null": "null",
    "boolean": "true or false",
    "integer": "integer",
    "number": "number",
    "string": "text",
    "object": "mapping",
}
BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
REQUIRED = "required"
SECTION = "section"
WIDTH = 80
INDENT = 4 * " "
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

    Example: `Key("training.max_grad_norm", "number > 0 or null; default 1.0", "Clip ...", False)`.
    """

    path: str
    kind: str
    """The values that the key takes, and its default in YAML or `REQUIRED`."""
    description: str
    is_section: bool
    """Whether there are keys below this key."""


def keys_of(schema: JsonSchema, above: str = "") -> Iterator[Key]:
    """Yield every configuration key below a section.

    The section's own keys come before the keys of the sections in it.

    Args:
        schema: the JSON schema of the section, without `$ref`.
        above: the section's path with a dot at its end; empty for the whole configuration.
    """
    required = schema.get("required", ())
    below: list[tuple[Key, list[tuple[str, JsonSchema]]]] = []
    for name, field in schema["properties"].items():
        sections = list(_sections(field))
        kind = _values(field)
        if name in required:
            kind += f", {REQUIRED}"
        elif not sections or field.get("default", {}) in (None, []):
            kind += f"; default {as_yaml(field['default'])}"
        path = f"{above}{name}{'[]' if sections and sections[0][0] else ''}"
        key = Key(path, kind, " ".join(field["description"].split()), bool(sections))
        if sections:
            below.append((key, [(f"{above}{name}{entry}.", one) for entry, one in sections]))
        else:
            yield key
    for key, inside in below:
        yield key
        for path, section in inside:
            yield from keys_of(section, path)


def all_keys() -> list[Key]:
    schema = RunConfig.model_json_schema()
    return list(keys_of(_resolved(schema, schema["$defs"])))


def keys_below(section: str) -> list[Key]:
    """List the configuration key `section` and all keys below it; all keys for an empty text.

    Raises ConfigError if there is no such key; the message suggests one.
    """
    keys = all_keys()
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
            if key.is_section:
                kind = [] if key.kind == SECTION else [f"({key.kind})  "]
                lines += ["", f"## `{key.path}`", "", *kind, key.description]
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
    """Return the path of a key without what stands for entries of lists.

    For example, `servers[].base_url` becomes `servers.base_url`.
    """
    return ".".join(part.partition("[")[0] for part in path.split("."))


def _resolved(node: Any, definitions: JsonSchema) -> Any:
    """Return a JSON schema with each `$ref` replaced by the definition that it refers to.

    Other keys next to a `$ref`, such as a description, stay.
    """
    if isinstance(node, list):
        return [_resolved(one, definitions) for one in node]
    if not isinstance(node, dict):
        return node
    found = definitions[node["$ref"].rpartition("/")[2]] if "$ref" in node else {}
    merged = found | {key: value for key, value in node.items() if key != "$ref"}
    return {key: _resolved(value, definitions) for key, value in merged.items() if key != "$defs"}


def _options(field: JsonSchema) -> Iterator[JsonSchema]:
    """Yield the alternatives of a schema (its `anyOf` or `oneOf`), or the schema itself."""
    alternatives = field.get("anyOf") or field.get("oneOf")
    if alternatives is None:
        yield field
    else:
        for alternative in alternatives:
            yield from _options(alternative)


def _sections(field: JsonSchema) -> Iterator[tuple[str, JsonSchema]]:
    """Yield the schemas of the sections that a key takes.

    Each comes with the text that stands for an entry of a list, or with an empty text.
    """
    for option in _options(field):
        if "properties" in option:
            yield "", option
        elif "items" in option:
            entries = [one for _, one in _sections(option["items"])]
            for entry in entries:
                name = entry["properties"]["name"].get("const", IMPORTED) if entries[1:] else ""
                yield f"[{name}]", entry


def _values(field: JsonSchema) -> str:
    kinds = dict.fromkeys(_value(option) for option in _options(field))
    return " or ".join(sorted(kinds, key=lambda kind: kind == "null"))


def _value(option: JsonSchema) -> str:
    if "const" in option or "enum" in option:
        return " | ".join(f"`{as_yaml(one)}`" for one in option.get("enum", [option.get("const")]))
    if "properties" in option:
        return SECTION
    if "prefixItems" in option:
        items = option["prefixItems"]
        return f"list of {len(items)}: {_values(items[0])}"
    if "items" in option:
        return f"list of {_values(option['items'])}"
    if option.get("format") == "path":
        return "path"
    bounds = [f" {sign} {option[name]}" for name, sign in BOUNDS.items() if name in option]
    return WORDS[option["type"]] + ",".join(bounds)


def _print(console: Console, keys: Sequence[Key]) -> None:
    for key in keys:
        console.print(Text.assemble((key.path, "bold"), f"  {key.kind}"))
        # The console does not wrap lines itself, and would cut a padded text at its width.
        text = textwrap.fill(
            key.description, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT
        )
        console.print(text, highlight=False, markup=False)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("rollmatch keys", description=__doc__)
    parser.add_argument("section", nargs="?", default="", help="a key, such as training; none: all")
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
