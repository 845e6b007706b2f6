"""What the pages of `launch.show_sample` have in common: their frame, and how a token is shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from launch.html_text import attribute, inline, piece, printable
from launch.sample_style import STYLE


def document(heading: str, run: str, sections: Sequence[str], *, definitions: str = "") -> str:
    """The page, which needs nothing beside itself. `definitions` is SVG that its pictures refer to."""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{inline(heading)} · {inline(run)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{definitions}\n<main>\n"
        + "\n".join(sections)
        + "\n</main>\n</body>\n</html>\n"
    )


def header(heading: str, run: str, summary: str, chips: Sequence[str], notes: Sequence[str]) -> str:
    """`chips` are rows of them."""
    below = "".join(f'<p class="note">{inline(note)}</p>' for note in notes)
    return (
        f'<header><h1>{inline(heading)}</h1><p class="soft">{inline(run)} · steps count from 1, positions from 0</p>'
        f"<p>{inline(summary)}</p>{''.join(chips)}{below}</header>"
    )


def chip_row(facts: Mapping[str, str], warnings: Sequence[str] = ()) -> str:
    items = [f"<li><b>{inline(name)}</b> {inline(value)}</li>" for name, value in facts.items()]
    items += [f'<li class="warn">{inline(warning)}</li>' for warning in warnings]
    return f'<ul class="chips">{"".join(items)}</ul>' if items else ""


def section(heading: str, content: str, note: str = "") -> str:
    below = f'<p class="note">{inline(note)}</p>' if note else ""
    return f"<section><h2>{inline(heading)}</h2>{content}{below}</section>"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def token(facts: Sequence[str], data: bytes) -> str:
    """A token by its text, with facts to be shown under the pointer."""
    text = printable(data.decode(errors="replace")) if data else "no text"
    return marked_token([*facts, text], piece(data) or '<b class="code">∅</b>')


def marked_token(facts: Sequence[str], content: str) -> str:
    """A token by `content`, which is HTML."""
    return f'<i title="{attribute(" · ".join(facts))}">{content}</i>'


def strength(share: float) -> str:
    """The opacity of a run's colour, 0.12 .. 0.5 for a share of 0 .. 1 of the strongest."""
    return f' style="--a:{0.12 + 0.38 * share:.2f}"'


class LegendRow(NamedTuple):
    swatches: str
    """HTML."""
    num_tokens: int
    figures: str
    meaning: str


def legend(kind: str, figures: str, rows: Iterable[LegendRow]) -> str:
    """`kind` and `figures` are the heads of the first and the third column."""
    head = f"<tr><th>{inline(kind)}</th><th>tokens</th><th>{inline(figures)}</th><th>meaning</th></tr>"
    body = "".join(
        f'<tr><td class="tokens">{row.swatches}</td><td>{row.num_tokens}</td><td>{inline(row.figures)}</td><td>{inline(row.meaning)}</td></tr>' for row in rows
    )
    return f'<table class="legend"><thead>{head}</thead><tbody>{body}</tbody></table>'
