"""The style sheet of the pages. Colours of tokens are RGB triples, so that a weight can be their
opacity.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

# Text of a model as HTML: everything escaped, and what cannot be seen, or would rearrange its
# neighbours, shown by its code point.


def printable(text: str) -> str:
    """The same text where a character without a glyph (control, lone surrogate, change of
    direction, ...) is written `\\uXXXX`; not escaped for HTML.
    """
    return (
        text
        if text.isprintable()
        else "".join(one if one.isprintable() else _code(one) for one in text)
    )


def attribute(text: str) -> str:
    """For between the double quotes of an attribute."""
    return html.escape(printable(text))


def inline(text: str) -> str:
    """As an element's content. A line feed shows as an arrow and breaks the line."""
    if text.isprintable():
        return html.escape(text, quote=False)
    return "".join(
        html.escape(one, quote=False) if one.isprintable() else _marked(one) for one in text
    )


def piece(data: bytes) -> str:
    """The content of one token: its text, or its bytes in hexadecimal where it begins or ends
    inside a character.
    """
    try:
        return inline(data.decode())
    except UnicodeDecodeError:
        return f'<b class="code">{data.hex(" ")}</b>'


def _marked(one: str) -> str:
    return '<b class="code">↵</b>\n' if one == "\n" else f'<b class="code">{_code(one)}</b>'


def _code(one: str) -> str:
    return f"\\u{ord(one):04x}"


STYLE = """
:root { --ink: #1c2330; --soft: #5c6675; --line: #dde2ea; --paper: #fff; --ground: #f5f7fa; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 0 0 10px; }
h3 { font-size: 14px; margin: 14px 0 6px; }
p { margin: 0 0 10px; } .soft, figcaption, .note { color: var(--soft); font-size: 13px; } .note { margin: 8px 0 0; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px; margin-top: 16px; }
.chips { display: flex; flex-wrap: wrap; gap: 6px; margin: 10px 0 0; padding: 0; list-style: none; }
.chips li { background: #eaeef4; border-radius: 11px; padding: 2px 11px; font-size: 13px; overflow-wrap: anywhere; } .chips b { font-weight: 600; }
.chips .warn { background: #fde8d7; color: #7a3300; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 16px; }
figure { margin: 0; max-width: 560px; } figure svg { display: block; width: 100%; height: auto; border-radius: 6px; background: #888; }
figure svg.pixels { image-rendering: pixelated; } figcaption { margin-top: 6px; }
.definitions { position: absolute; }
polygon { fill: none; stroke-width: 2.5; vector-effect: non-scaling-stroke; } polygon.halo { stroke: #fff; stroke-width: 5; stroke-opacity: 0.75; }
svg text { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-weight: 700; stroke: #fff; paint-order: stroke; stroke-linejoin: round; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; font-size: 12px; color: var(--soft); font-weight: 600; }
th, td { padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
tbody tr:last-child td { border-bottom: 0; }
.objects th { white-space: nowrap; } .objects td:last-child { width: 34%; }
td.mark { white-space: nowrap; width: 1%; padding-right: 12px; font: 700 13px ui-monospace, "DejaVu Sans Mono", monospace; }
.bins { color: var(--soft); font: 12px ui-monospace, "DejaVu Sans Mono", monospace; display: block; }
.text, .tokens { font: 13px/1.7 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; background: #f8f9fb; border: 1px solid var(--line); border-radius: 6px; padding: 8px 10px; margin: 0; }
.text .cut { color: #a02020; background: #fdeaea; text-decoration: line-through; text-decoration-color: #d88; }
.code { color: #8a4b00; background: #fff3dc; border-radius: 3px; font-weight: 400; font-size: 0.85em; }
.tokens { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 2; }
.tokens i { font-style: normal; unicode-bidi: isolate; padding: 2px 0; box-shadow: inset 1px 0 0 #0002; }
.run { --c: 130 140 155; background: rgb(var(--c) / var(--a, 0)); border-bottom: 2px solid rgb(var(--c)); padding: 2px 0; border-radius: 2px;
       -webkit-box-decoration-break: clone; box-decoration-break: clone; }
.run.neutral { color: #6b7482; border-bottom: 1px dotted #aab2bd; }
.run.structure { --c: 37 110 235; } .run.desc { --c: 22 150 80; } .run.matched_structure { --c: 130 80 220; }
.run.coord { --c: 240 150 20; } .run.coord i { padding: 2px 3px; } .run.coord b { font-weight: 600; } .run.closing { --c: 220 50 110; }
.legend { margin-bottom: 12px; } .legend td { border: 0; padding: 2px 14px 2px 0; } .legend td:nth-child(-n+3), .legend th { white-space: nowrap; }
.legend .tokens { line-height: 1.7; } .legend .run { margin-right: 6px; } .legend .run i { padding: 2px 5px; box-shadow: none; }
.seam { color: #fff; background: #3c4656; border-radius: 3px; padding: 2px 6px; margin: 0 4px; font-size: 11px; }
.run.context { color: #6b7482; border-bottom: 0; } .run.context i { box-shadow: none; }
.run.up { --c: 37 110 235; } .run.down { --c: 214 90 10; border-bottom-style: double; border-bottom-width: 3px; } .run.unusable { --c: 200 30 60; --a: 0.3; }
.dialogue { display: grid; grid-template-columns: minmax(60px, max-content) minmax(0, 1fr); gap: 8px 14px; }
.dialogue .who { font-size: 13px; font-weight: 600; color: var(--soft); text-align: right; padding-top: 9px; max-width: 120px; overflow-wrap: anywhere; }
.dialogue .text.completion { background: #eef4ff; border-color: #c9d9f8; }
.dialogue .border { grid-column: 1 / -1; font-size: 12px; color: var(--soft); border-top: 1px dashed #aab2bd; padding-top: 4px; margin-top: 4px; }
.call { border-left: 3px solid #8a4b00; padding-left: 8px; } .field { color: var(--soft); font-size: 12px; }
.figures { margin-bottom: 14px; } .figures td { font-variant-numeric: tabular-nums; }
"""


# What the pages of `launch.show_sample` have in common: their frame, and how a token is shown.


def document(heading: str, run: str, sections: Sequence[str], *, definitions: str = "") -> str:
    """The page, which needs nothing beside itself. `definitions` is SVG that its pictures refer
    to."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport"'
        f' content="width=device-width, initial-scale=1">\n<title>{inline(heading)} ·'
        f" {inline(run)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{definitions}\n<main>\n"
        + "\n".join(sections)
        + "\n</main>\n</body>\n</html>\n"
    )


def header(heading: str, run: str, summary: str, chips: Sequence[str], notes: Sequence[str]) -> str:
    """`chips` are rows of them."""
    below = "".join(f'<p class="note">{inline(note)}</p>' for note in notes)
    return (
        f'<header><h1>{inline(heading)}</h1><p class="soft">{inline(run)} · steps count from 1,'
        " positions from 0</p>"
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
    head = (
        f"<tr><th>{inline(kind)}</th><th>tokens</th><th>{inline(figures)}</th><th>meaning</th></tr>"
    )
    body = "".join(
        "<tr><td"
        f' class="tokens">{row.swatches}</td><td>{row.num_tokens}</td><td>{inline(row.figures)}</td><td>{inline(row.meaning)}</td></tr>'
        for row in rows
    )
    return f'<table class="legend"><thead>{head}</thead><tbody>{body}</tbody></table>'
