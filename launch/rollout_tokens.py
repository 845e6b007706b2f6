"""The tokens of an environment's rollout, coloured by what they are learned with: the hue is the sign of the advantage, the strength of the colour its size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple

from launch.sample_parts import LegendRow, legend, strength, token
from learner.trajectory_line import ExampleEntry


class Use(StrEnum):
    """Of a token in training; also the class of its run in the style sheet."""

    CONTEXT = "context"
    UP = "up"
    DOWN = "down"
    LEVEL = "level"
    UNUSABLE = "unusable"


MEANINGS = {
    Use.CONTEXT: "only read: prompts, what the environment said, and answers that another example learns",
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
        everything, strongest = [one for example in self.examples for one in _credited(example)], self._strongest()
        rows = []
        for use in Use:
            of_use = [one for one in everything if one.use is use]
            if not of_use:
                continue
            values = sorted({one.advantage for one in of_use if one.advantage is not None})
            figures = signed(values[0]) if len(values) == 1 else f"{signed(values[0])} … {signed(values[-1])}" if values else ""
            swatch = f'<span class="run {use}"{_strength(max(of_use, key=_size), strongest)}><i>{use}</i></span>'
            rows.append(LegendRow(swatch, len(of_use), figures, MEANINGS[use]))
        return legend("token", "advantage", rows)

    def _strongest(self) -> float:
        return max((_size(one) for example in self.examples for one in _credited(example)), default=0.0)

    def _token(self, example: ExampleEntry, place: int, run: Credited) -> str:
        token_id = example["token_ids"][place]
        facts = [f"token {place}", f"id {token_id}"]
        if run.use is Use.CONTEXT:
            facts.append("context")
        else:
            advantage = "no advantage" if run.advantage is None else f"advantage {signed(run.advantage)}"
            facts += [advantage, f"log-probability {_logprob(example['logprobs'][place])}"]
        return token(facts, self.pieces[token_id])


def learned_logprobs(example: ExampleEntry) -> list[float]:
    return [logprob for logprob, is_learned in zip(example["logprobs"], example["mask"], strict=True) if is_learned]


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
    return [Credited(_use(advantage), advantage) if is_learned else _CONTEXT for advantage, is_learned in given]


_CONTEXT = Credited(Use.CONTEXT, None)


def _use(advantage: float | None) -> Use:
    if advantage is None or not math.isfinite(advantage):
        return Use.UNUSABLE
    return Use.UP if advantage > 0 else Use.DOWN if advantage < 0 else Use.LEVEL


def _size(one: Credited) -> float:
    """Of the advantage, where its sign has a colour."""
    return abs(one.advantage) if one.use in (Use.UP, Use.DOWN) and one.advantage is not None else 0.0


def _strength(run: Credited, strongest: float) -> str:
    return strength(_size(run) / strongest) if _size(run) else ""


def _logprob(value: float) -> str:
    """With the probability, where it is one."""
    return f"{value:.3f} (probability {math.exp(value):.3g})" if value <= 0 else f"{value:.3f}"
