"""HTML of the pages: the templates of launch/templates, and texts as they are safe to show.

Every `{{ value }}` of a template goes through `inline`; between the quotes of an attribute it needs
the filter `attribute`.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup


def printable(text: str) -> str:
    """Write controls, lone surrogates, changes of direction and the like as `\\uXXXX`.

    The result is not escaped for HTML.
    """
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)


def attribute(text: str) -> Markup:
    """Escape a text for between the double quotes of an attribute."""
    return Markup(html.escape(printable(text)))


def inline(value: object) -> Markup:
    """Escape a text for the content of an element; HTML stays as it is.

    A line feed shows as an arrow and breaks the line.
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
    """Fill in a template of launch/templates."""
    return _ENVIRONMENT.get_template(template).render(values)


def counted(things: int | Sequence[object], noun: str) -> str:
    """Write a number, or that of things in a list, with its noun: `1 object`, `2 objects`."""
    number = things if isinstance(things, int) else len(things)
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


_ENVIRONMENT.filters |= {"attribute": attribute, "counted": counted}


class TokenCell(NamedTuple):
    """A token as a page shows it."""

    facts: Sequence[str]
    """Shown under the pointer."""
    content: str | Markup


class TokenRun(NamedTuple):
    """Neighbouring tokens of one colour."""

    tag: str
    """Class in the style sheet: the hue."""
    opacity: float | None
    """Strength of the colour, 0..1; None for none."""
    tokens: Sequence[TokenCell]
    begins_appended: bool = False
    """Whether a mark before it says that the kept prefix ends here."""


class LegendRow(NamedTuple):
    tag: str
    opacities: Sequence[float | None]
    """One for each swatch."""
    num_tokens: int
    figures: str


def token_cell(facts: Sequence[str], data: bytes) -> TokenCell:
    """Show a token by its text, or by its bytes where it begins or ends inside a character."""
    if not data:
        return TokenCell([*facts, "no text"], Markup('<b class="code">∅</b>'))
    try:
        content = inline(data.decode())
    except UnicodeDecodeError:
        content = Markup(f'<b class="code">{data.hex(" ")}</b>')
    return TokenCell([*facts, data.decode(errors="replace")], content)


def opacity_of(share: float) -> float:
    """Return the opacity of a share, 0..1, of the strongest: 0.12..0.5."""
    return 0.12 + 0.38 * share
