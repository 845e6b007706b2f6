"""Renders one rollout of an environment as a page: dialogue, rewards and trained tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple

from launch.inspect.sample_pages.html import (
    LegendRow,
    TokenCell,
    TokenRun,
    opacity_of,
    render,
    token_cell,
)
from learner.rollout_logs.trajectories import ExampleEntry, LoggedMessages, TrajectoryRecord


class Use(StrEnum):
    """How training uses a token. The values are also the CSS classes of coloured tokens."""

    CONTEXT = "context"
    UP = "up"
    DOWN = "down"
    LEVEL = "level"
    UNUSABLE = "unusable"


class Credit(NamedTuple):
    """Use and advantage of a token. Neighbours with equal credit are coloured as one stretch."""

    use: Use
    advantage: float | None
    """None for context tokens, and if no reward was computed."""

    @property
    def size(self) -> float:
        """Return the absolute advantage if its sign has a colour, else 0."""
        if self.advantage is None or self.use not in (Use.UP, Use.DOWN):
            return 0.0
        return abs(self.advantage)


class ToolCall(NamedTuple):
    name: str | None
    """Name of the tool; None if the call lacks OpenAI's form (`text` is then the whole call)."""
    text: str
    id: str | None


class ContentPart(NamedTuple):
    text: str
    is_type: bool
    """Whether `text` is only the type of a part that has no text, such as an image."""


@dataclass(frozen=True, slots=True)
class MessageView:
    role: str
    fields: Mapping[str, str]
    text: str
    parts: Sequence[ContentPart]
    calls: Sequence[ToolCall]

    @property
    def is_empty(self) -> bool:
        return not (self.fields or self.text or self.parts or self.calls)


@dataclass(frozen=True, slots=True)
class RolloutPage:
    """The content of the HTML page of an environment's rollout."""

    run: str
    line: TrajectoryRecord
    pieces: Mapping[int, bytes]
    """The UTF-8 bytes of each token of the examples, by token id."""
    objective: tuple[str, ...]
    """The enabled loss modules with their weights."""
    notes: tuple[str, ...]
    """Remarks on the numbers of the page."""

    def html(self) -> str:
        line = self.line
        examples = line["examples"]
        credits = [_credits(example) for example in examples]
        strongest = max((credit.size for of_one in credits for credit in of_one), default=0.0)
        versions = {one["weight_version"] for one in examples if one["weight_version"] is not None}
        engines = {one["engine"] for one in examples if one["engine"] is not None}
        return render(
            "rollout.html",
            heading=f"Step {line['step']}, position {line['position']}",
            run=self.run,
            notes=self.notes,
            line=line,
            num_learned=sum(sum(example["mask"]) for example in examples),
            versions=sorted(versions),
            engines=sorted(engines),
            prompt=_message_views(line["prompt"]),
            completion=_message_views(line["completion"]),
            objective="; ".join(self.objective),
            figures=[_figures(i, example, examples) for i, example in enumerate(examples)],
            legend_rows=_legend_rows(credits, strongest),
            runs_of_examples=[
                self._runs(example, of_one, strongest)
                for example, of_one in zip(examples, credits, strict=True)
            ],
        )

    def _runs(
        self, example: ExampleEntry, credits: Sequence[Credit], strongest: float
    ) -> list[TokenRun]:
        runs = []
        for credit, members in groupby(enumerate(credits), key=lambda member: member[1]):
            tokens = [self._token(example, index, credit) for index, _ in members]
            runs.append(TokenRun(credit.use, _opacity(credit, strongest), tokens))
        return runs

    def _token(self, example: ExampleEntry, index: int, credit: Credit) -> TokenCell:
        token_id = example["token_ids"][index]
        facts = [f"token {index}", f"id {token_id}"]
        if credit.use is Use.CONTEXT:
            facts.append("context")
        else:
            advantage = credit.advantage
            facts.append("no advantage" if advantage is None else f"advantage {signed(advantage)}")
            logprob = example["logprobs"][index]
            probability = f" (probability {math.exp(logprob):.3g})" if logprob <= 0 else ""
            facts.append(f"log-probability {logprob:.3f}{probability}")
            if "teacher_logprobs" in example:
                facts.append(f"the teacher's {example['teacher_logprobs'][index]:.3f}")
        return token_cell(facts, self.pieces[token_id])


def advantages(example: ExampleEntry) -> Sequence[float | None]:
    """Return the advantage of every token of a training example, [L]; None if not scored."""
    by_token = example["token_advantages"]
    return [example["advantage"]] * len(example["token_ids"]) if by_token is None else by_token


def signed(value: float) -> str:
    """Format an advantage: `+0.25`, `-0.25`, `0`."""
    return f"{value:+.3g}" if value else "0"


def _credits(example: ExampleEntry) -> list[Credit]:
    """Return the credit of every token of the example, [L]."""
    credits = []
    for advantage, is_learned in zip(advantages(example), example["mask"], strict=True):
        if not is_learned:
            credits.append(Credit(Use.CONTEXT, None))
        elif advantage is None or not math.isfinite(advantage):
            credits.append(Credit(Use.UNUSABLE, advantage))
        else:
            use = Use.UP if advantage > 0 else Use.DOWN if advantage < 0 else Use.LEVEL
            credits.append(Credit(use, advantage))
    return credits


def _opacity(credit: Credit, strongest: float) -> float | None:
    return opacity_of(credit.size / strongest) if credit.size else None


def _legend_rows(credits: Sequence[Sequence[Credit]], strongest: float) -> list[LegendRow]:
    """Return a row for each use that occurs in the examples."""
    rows = []
    for use in Use:
        of_use = [credit for of_one in credits for credit in of_one if credit.use is use]
        if not of_use:
            continue
        values = sorted({credit.advantage for credit in of_use if credit.advantage is not None})
        figures = signed(values[0]) if values else ""
        if len(values) > 1:
            figures += f" … {signed(values[-1])}"
        largest = max(of_use, key=lambda credit: credit.size)
        opacities = [_opacity(largest, strongest)]
        rows.append(LegendRow(use, opacities, len(of_use), figures))
    return rows


def _message_views(logged: LoggedMessages | None) -> str | list[MessageView] | None:
    if logged is None or isinstance(logged, str):
        return logged
    return [_message_view(message) for message in logged]


def _message_view(message: Mapping[str, object]) -> MessageView:
    """Return a view of a message; environments may put any value into it."""
    content = message.get("content")
    calls = message.get("tool_calls") or []
    return MessageView(
        role=str(message["role"]) if "role" in message else "no role",
        fields={
            key: _text(value)
            for key, value in message.items()
            if key not in ("role", "content", "tool_calls") and value not in (None, "", [], {})
        },
        text="" if content is None or isinstance(content, list) else _text(content),
        parts=[_part(part) for part in content] if isinstance(content, list) else [],
        calls=[_tool_call(call) for call in (calls if isinstance(calls, list) else [calls])],
    )


def _part(part: object) -> ContentPart:
    match part:
        case {"type": "text", "text": str(text)}:
            return ContentPart(text, is_type=False)
        case {"type": str(kind)}:
            return ContentPart(kind, is_type=True)
        case _:
            return ContentPart(_text(part), is_type=False)


def _tool_call(call: object) -> ToolCall:
    """Return a view of a tool call: usually JSON text, but environments may use other values."""
    parsed = call
    if isinstance(call, str):
        try:
            parsed = json.loads(call)
        except ValueError:
            return ToolCall(None, call, None)
    match parsed:
        case {"function": {"name": str(name), "arguments": arguments}, **others}:
            call_id = others.get("id")
            return ToolCall(name, _text(arguments), call_id if isinstance(call_id, str) else None)
        case _:
            return ToolCall(None, _text(call), None)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _figures(
    number: int, example: ExampleEntry, examples: Sequence[ExampleEntry]
) -> dict[str, str]:
    """Return the row of an example in the table of figures, by column."""
    logprobs = [
        logprob
        for logprob, is_learned in zip(example["logprobs"], example["mask"], strict=True)
        if is_learned
    ]
    advantage = "none" if example["advantage"] is None else signed(example["advantage"])
    version = example["weight_version"]
    figures = {
        "example": str(number),
        "tokens": str(len(example["token_ids"])),
        "images": str(len(example["images"])),
        "learned": str(len(logprobs)),
        "advantage": advantage if example["token_advantages"] is None else "one per token",
        # Not fmean, which raises an error for infinities of both signs.
        "mean log-probability": f"{sum(logprobs) / len(logprobs):.3f}" if logprobs else "–",
        "turns": ", ".join(map(str, example["turns"])) or "–",
        "weights": "–" if version is None else f"v{version}",
        "engine": example["engine"] or "–",
    }
    if not any(other["images"] for other in examples):
        del figures["images"]
    return figures
