"""One rollout of an environment as a page of HTML that needs nothing beside itself: what was said,
what it was worth, and what is learned of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Any, NamedTuple

from launch.sample_pages.html import (
    LegendRow,
    chip_row,
    count,
    document,
    header,
    inline,
    legend,
    section,
    strength,
    token,
)
from learner.rollout_logs.trajectories import ExampleEntry, LoggedMessages, TrajectoryRecord

# The tokens of an environment's rollout, coloured by what they are learned with: the hue is the
# sign of the advantage, the strength of the colour its size.


class Use(StrEnum):
    """Of a token in training; also the class of its run in the style sheet."""

    CONTEXT = "context"
    UP = "up"
    DOWN = "down"
    LEVEL = "level"
    UNUSABLE = "unusable"


MEANINGS = {
    Use.CONTEXT: (
        "only read: prompts, what the environment said, and answers that another example learns"
    ),
    Use.UP: "learned, and to be made more likely",
    Use.DOWN: "learned, and to be made less likely",
    Use.LEVEL: "learned with the advantage 0, which changes nothing",
    Use.UNUSABLE: "to be learned, but with no advantage that is a number: the run ends here",
}


class Credited(NamedTuple):
    """What a token is learned with; neighbours of the same are one run."""

    use: Use
    advantage: float | None
    """None of context, and where nothing was scored."""


@dataclass(frozen=True, slots=True)
class CreditView:
    """The examples of one rollout as the page shows them."""

    examples: Sequence[ExampleEntry]
    pieces: Mapping[int, bytes]
    """The text of every token there is, by its id."""

    def tokens(self, number: int) -> str:
        """Every token of this example, in order."""
        example, strongest = self.examples[number], self._strongest()
        parts: list[str] = []
        for run, members in groupby(enumerate(_credited(example)), key=lambda member: member[1]):
            content = "".join(self._token(example, place, run) for place, _ in members)
            parts.append(f'<span class="run {run.use}"{_strength(run, strongest)}>{content}</span>')
        return "".join(parts)

    def legend(self) -> str:
        """A row for each use there is, over all examples."""
        everything, strongest = (
            [one for example in self.examples for one in _credited(example)],
            self._strongest(),
        )
        rows = []
        for use in Use:
            of_use = [one for one in everything if one.use is use]
            if not of_use:
                continue
            values = sorted({one.advantage for one in of_use if one.advantage is not None})
            figures = (
                signed(values[0])
                if len(values) == 1
                else f"{signed(values[0])} … {signed(values[-1])}"
                if values
                else ""
            )
            swatch = (
                '<span class="run'
                f' {use}"{_strength(max(of_use, key=_size), strongest)}><i>{use}</i></span>'
            )
            rows.append(LegendRow(swatch, len(of_use), figures, MEANINGS[use]))
        return legend("token", "advantage", rows)

    def _strongest(self) -> float:
        return max(
            (_size(one) for example in self.examples for one in _credited(example)), default=0.0
        )

    def _token(self, example: ExampleEntry, place: int, run: Credited) -> str:
        token_id = example["token_ids"][place]
        facts = [f"token {place}", f"id {token_id}"]
        if run.use is Use.CONTEXT:
            facts.append("context")
        else:
            advantage = (
                "no advantage" if run.advantage is None else f"advantage {signed(run.advantage)}"
            )
            facts += [advantage, f"log-probability {_logprob(example['logprobs'][place])}"]
        return token(facts, self.pieces[token_id])


def learned_logprobs(example: ExampleEntry) -> list[float]:
    return [
        logprob
        for logprob, is_learned in zip(example["logprobs"], example["mask"], strict=True)
        if is_learned
    ]


def advantages(example: ExampleEntry) -> Sequence[float | None]:
    """[L]"""
    by_token = example["token_advantages"]
    return [example["advantage"]] * len(example["token_ids"]) if by_token is None else by_token


def signed(value: float) -> str:
    """An advantage: `+0.25`, `-0.25`, `0`."""
    return f"{value:+.3g}" if value else "0"


def _credited(example: ExampleEntry) -> list[Credited]:
    """[L]"""
    given = zip(advantages(example), example["mask"], strict=True)
    return [
        Credited(_use(advantage), advantage) if is_learned else _CONTEXT
        for advantage, is_learned in given
    ]


_CONTEXT = Credited(Use.CONTEXT, None)


def _use(advantage: float | None) -> Use:
    if advantage is None or not math.isfinite(advantage):
        return Use.UNUSABLE
    return Use.UP if advantage > 0 else Use.DOWN if advantage < 0 else Use.LEVEL


def _size(one: Credited) -> float:
    """Of the advantage, where its sign has a colour."""
    return (
        abs(one.advantage) if one.use in (Use.UP, Use.DOWN) and one.advantage is not None else 0.0
    )


def _strength(run: Credited, strongest: float) -> str:
    return strength(_size(run) / strongest) if _size(run) else ""


def _logprob(value: float) -> str:
    """With the probability, where it is one."""
    return f"{value:.3f} (probability {math.exp(value):.3g})" if value <= 0 else f"{value:.3f}"


@dataclass(frozen=True, slots=True)
class RolloutPage:
    """What the page shows."""

    run: str
    line: TrajectoryRecord
    pieces: Mapping[int, bytes]
    """The text of every token of the examples, by its id."""
    objective: tuple[str, ...]
    """The active modules with their weights."""
    notes: tuple[str, ...]
    """What the reader should know of the figures."""

    def html(self) -> str:
        line, heading = self.line, f"Step {self.line['step']}, position {self.line['position']}"
        sections = [
            header(heading, self.run, _summary(line), [_facts(line), _metrics(line)], self.notes)
        ]
        if line["error"] is not None:
            note = (
                "A rollout that failed teaches nothing, and is not in the mean that the others of"
                " its row are compared with."
            )
            sections.append(
                section("Error", f'<div class="text">{inline(line["error"])}</div>', note)
            )
        sections += [_dialogue(line), _learned(self)]
        return document(heading, self.run, sections)


def _summary(line: TrajectoryRecord) -> str:
    calls = count(line["num_turns"], "call") + " of the model"
    if line["error"] is not None:
        return f"Failed after {calls}: nothing is learned of it."
    num_learned = sum(sum(example["mask"]) for example in line["examples"])
    return (
        f"Reward {line['reward']:.4g} for {calls}:"
        f" {count(len(line['examples']), 'training example')} with"
        f" {count(num_learned, 'learned token')}."
    )


def _facts(line: TrajectoryRecord) -> str:
    examples = line["examples"]
    facts = {
        "row": str(line["example"]),
        "turns": str(line["num_turns"]),
        "splits": str(line["num_splits"]),
        "seconds": f"{line['generate_s']:.2f}",
    }
    versions = sorted(
        {example["weight_version"] for example in examples if example["weight_version"] is not None}
    )
    engines = sorted({example["engine"] for example in examples if example["engine"] is not None})
    facts |= {"weights": ", ".join(f"v{version}" for version in versions)} if versions else {}
    facts |= {"engine": ", ".join(engines)} if engines else {}
    facts |= {"environment": line["actor"]}
    found = {
        "failed": line["error"] is not None,
        "truncated: it was ended for its length": line["is_truncated"],
    }
    return chip_row(facts, [warning for warning, holds in found.items() if holds])


def _metrics(line: TrajectoryRecord) -> str:
    metrics = {
        name if name != "reward" else "reward (metric)": f"{value:.4g}"
        for name, value in line["metrics"].items()
    }
    failed = [f"{name} failed: {told}" for name, told in line["reward_errors"].items()]
    return chip_row({"reward": f"{line['reward']:.4g}"} | metrics, failed)


# The dialogue: a row of two cells for each message, who and what


def _dialogue(line: TrajectoryRecord) -> str:
    rows = [
        *_rows(line["prompt"], "prompt"),
        '<div class="border">what follows is the rollout</div>',
        *_rows(line["completion"], "completion"),
    ]
    return section("Dialogue", f'<div class="dialogue">{"".join(rows)}</div>')


def _rows(messages: LoggedMessages | None, name: str) -> Iterator[str]:
    """`name` is what a text is called."""
    if messages is None:
        yield _row(name, "", '<span class="soft">none: it ended before</span>')
    elif isinstance(messages, str):
        yield _row(name, name, inline(messages))
    else:
        for message in messages:
            yield _message(message)


def _row(who: str, kind: str, content: str) -> str:
    """`kind` is a class of the style sheet."""
    return f'<div class="who">{inline(who)}</div><div class="text {kind}">{content}</div>'


def _message(message: Mapping[str, Any]) -> str:
    role = str(message["role"]) if "role" in message else "no role"
    calls = message.get("tool_calls") or []
    others = {
        key: value
        for key, value in message.items()
        if key not in ("role", "content", "tool_calls") and value not in (None, "", [], {})
    }
    # Before what was said: which call a tool answers, and what was thought.
    parts = [
        f'<div class="field"><b>{inline(key)}</b> {inline(_text(value))}</div>'
        for key, value in others.items()
    ]
    parts += [
        _content(message.get("content")),
        *map(_call, calls if isinstance(calls, list) else [calls]),
    ]
    # Nothing else of the role is a class: an environment may give any.
    kind = "completion" if role == "assistant" else ""
    return _row(role, kind, "".join(parts) or '<span class="soft">no content</span>')


def _content(content: Any) -> str:
    if content is None or content == "":
        return ""
    return "".join(map(_part, content)) if isinstance(content, list) else inline(_text(content))


def _part(part: Any) -> str:
    """One of several of a message's content; of what is no text its type."""
    match part:
        case {"type": "text", "text": str(text)}:
            return f"<div>{inline(text)}</div>"
        case {"type": str(kind)}:
            return f'<div><b class="code">{inline(kind)}</b></div>'
        case _:
            return f"<div>{inline(_text(part))}</div>"


def _call(given: Any) -> str:
    """Of a tool: as a JSON text in the log, or whatever else an environment has made of it."""
    match _parsed(given):
        case {"function": {"name": str(name), "arguments": arguments}, **others}:
            known_as = (
                f' <span class="soft">{inline(others["id"])}</span>'
                if "id" in others and isinstance(others["id"], str)
                else ""
            )
            return (
                f'<div class="call"><b>{inline(name)}</b>'
                f" {inline(_text(arguments))}{known_as}</div>"
            )
        case _:
            return f'<div class="call">{inline(_text(given))}</div>'


def _parsed(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError:
        return given


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# What is learned


def _learned(page: RolloutPage) -> str:
    examples = page.line["examples"]
    if not examples:
        why = (
            "it failed"
            if page.line["error"] is not None
            else "no call of the model has left tokens"
        )
        return section("What is learned", f'<p class="soft">Nothing: {why}.</p>')
    view = CreditView(examples, page.pieces)
    bodies = [
        f'<h3>Example {number}</h3><div class="text tokens">{view.tokens(number)}</div>'
        for number in range(len(examples))
    ]
    note = (
        f"Objective: {'; '.join(page.objective)}. The stronger the colour, the larger the"
        " advantage; point at a token for its numbers. Turns count from 0."
    )
    heading = f"What is learned: {count(len(examples), 'training example')}"
    return section(heading, f"{_figures(examples)}{view.legend()}{''.join(bodies)}", note)


def _figures(examples: Sequence[ExampleEntry]) -> str:
    with_images = any(example["images"] for example in examples)
    heads = (
        "example",
        "tokens",
        *(("images",) if with_images else ()),
        "learned",
        "advantage",
        "mean log-probability",
        "turns",
        "weights",
        "engine",
    )
    cells = (
        _cells(number, example, with_images=with_images) for number, example in enumerate(examples)
    )
    rows = "".join(
        f"<tr>{''.join(f'<td>{inline(cell)}</td>' for cell in row)}</tr>" for row in cells
    )
    return (
        "<table"
        f' class="figures"><thead><tr>{"".join(f"<th>{head}</th>" for head in heads)}</tr></thead><tbody>{rows}</tbody></table>'
    )


def _cells(number: int, example: ExampleEntry, *, with_images: bool) -> Iterator[str]:
    logprobs, advantage, version = (
        learned_logprobs(example),
        example["advantage"],
        example["weight_version"],
    )
    yield str(number)
    yield str(len(example["token_ids"]))
    if with_images:
        yield str(len(example["images"]))
    yield str(len(logprobs))
    yield (
        "one per token"
        if example["token_advantages"] is not None
        else "none"
        if advantage is None
        else signed(advantage)
    )
    # Not fmean, which refuses infinities of both signs.
    yield f"{sum(logprobs) / len(logprobs):.3f}" if logprobs else "–"
    yield ", ".join(map(str, example["turns"])) or "–"
    yield "–" if version is None else f"v{version}"
    yield example["engine"] or "–"
