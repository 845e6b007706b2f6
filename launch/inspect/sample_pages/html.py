"""Renders the templates of launch/templates as HTML, with all texts escaped.

Every `{{ value }}` of a template passes through `inline`. A value within the quotes of an attribute
also needs the filter `attribute`.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup


def printable(text: str) -> str:
    """Replace characters that are not printable, such as controls, by `\\uXXXX`.

    The result is not escaped for HTML.
    """
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)


def attribute(text: str) -> Markup:
    """Escape a text for use within the double quotes of an attribute."""
    return Markup(html.escape(printable(text)))


def inline(value: object) -> Markup:
    """Escape a text for the content of an HTML element; `Markup` stays as it is.

    A line feed becomes an arrow and a line break.
    """
    if isinstance(value, Markup):
        return value
    text = html.escape(str(value), quote=False)
    for char in {char for char in text if not char.isprintable()}:
        shown = "↵</b>\n" if char == "\n" else f"{printable(char)}</b>"
        text = text.replace(char, f'<b class="code">{shown}')
    return Markup(text)


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parents[2] / "templates"),
    undefined=StrictUndefined,
    autoescape=True,
    finalize=inline,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(template: str, **values: object) -> str:
    """Render the HTML template of this name in launch/templates."""
    return _ENVIRONMENT.get_template(template).render(values)


def counted(things: int | Sequence[object], noun: str) -> str:
    """Format a number, or the length of a list, with its noun: `1 object`, `2 objects`."""
    number = things if isinstance(things, int) else len(things)
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


_ENVIRONMENT.filters |= {"attribute": attribute, "counted": counted}


class TokenCell(NamedTuple):
    """A token as one cell of a sample page."""

    facts: Sequence[str]
    """Texts shown when the pointer is over the token."""
    content: str | Markup


class TokenRun(NamedTuple):
    """A stretch of neighbouring tokens of one colour on a sample page."""

    tag: str
    """CSS class of the stretch, which sets the hue."""
    opacity: float | None
    """Strength of the colour, 0..1; None without colour."""
    tokens: Sequence[TokenCell]
    begins_appended: bool = False
    """Whether a mark before the stretch shows the end of the answer's kept prefix."""


class LegendRow(NamedTuple):
    tag: str
    opacities: Sequence[float | None]
    """Strength of the colour of each swatch in the row."""
    num_tokens: int
    figures: str


def token_cell(facts: Sequence[str], data: bytes) -> TokenCell:
    """Return a token's cell: its text (bytes, if not valid UTF-8), and `facts` about it."""
    if not data:
        return TokenCell([*facts, "no text"], Markup('<b class="code">∅</b>'))
    try:
        content = inline(data.decode())
    except UnicodeDecodeError:
        content = Markup(f'<b class="code">{data.hex(" ")}</b>')
    return TokenCell([*facts, data.decode(errors="replace")], content)


def opacity_of(share: float) -> float:
    """Return a token colour's opacity, 0.12..0.5, for a share (0..1) of the strongest value."""
    return 0.12 + 0.38 * share
