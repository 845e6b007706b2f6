"""Text of a model as HTML: everything escaped, and what cannot be seen, or would rearrange its neighbours, shown by its code point."""

from __future__ import annotations

import html


def printable(text: str) -> str:
    """The same text where a character without a glyph (control, lone surrogate, change of direction, ...) is written `\\uXXXX`; not escaped for HTML."""
    return text if text.isprintable() else "".join(one if one.isprintable() else _code(one) for one in text)


def attribute(text: str) -> str:
    """For between the double quotes of an attribute."""
    return html.escape(printable(text))


def inline(text: str) -> str:
    """As an element's content. A line feed shows as an arrow and breaks the line."""
    if text.isprintable():
        return html.escape(text, quote=False)
    return "".join(html.escape(one, quote=False) if one.isprintable() else _marked(one) for one in text)


def piece(data: bytes) -> str:
    """The content of one token: its text, or its bytes in hexadecimal where it begins or ends inside a character."""
    try:
        return inline(data.decode())
    except UnicodeDecodeError:
        return f'<b class="code">{data.hex(" ")}</b>'


def _marked(one: str) -> str:
    return '<b class="code">↵</b>\n' if one == "\n" else f'<b class="code">{_code(one)}</b>'


def _code(one: str) -> str:
    return f"\\u{ord(one):04x}"
