"""The tokens of a target, coloured by what supervises them and how much (issue 3, "Seeing a sample").

The hue is the role, the strength of the colour is the token's weight in `token_ce`; coord slots show the token's bin and the bin it should be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from launch.sample_parts import LegendRow, legend, marked_token, strength, token
from learner.rollout_line import TargetEntry
from learner.targets import TokenRole
from shared.tokens.vocabulary import TokenCodec

MEANINGS = {
    TokenRole.NEUTRAL: "in the kept prefix, and not of a matched object (or the name of one): never supervised",
    TokenRole.STRUCTURE: "text of a ground-truth object, and the separators before it",
    TokenRole.DESC: "overlaps the name (desc) of a ground-truth object",
    TokenRole.MATCHED_STRUCTURE: "in the kept prefix: a matched object's braces, keys and separators",
    TokenRole.COORD: "a supervised coord slot: the token's bin → the bin it should be",
    TokenRole.CLOSING: "the closing brace, or the end of the answer",
}


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring tokens with the same role and weight."""

    start: int
    stop: int
    role: TokenRole
    weight: float

    @property
    def tag(self) -> str:
        return self.role.name.lower()


@dataclass(frozen=True, slots=True)
class TokenView:
    """A target as the page shows it."""

    target: TargetEntry
    num_prefix: int
    """Tokens before the appended text; 0 in channel A."""
    codec: TokenCodec

    @property
    def runs(self) -> list[Run]:
        """Cut once more where the appended text begins."""
        whole = [Run(start, stop, TokenRole[role.upper()], weight) for start, stop, role, weight in self.target["supervision"]]
        return [
            Run(start, stop, run.role, run.weight)
            for run in whole
            for start, stop in pairwise(sorted({run.start, run.stop, min(max(run.start, self.num_prefix), run.stop)}))
        ]

    def tokens(self) -> str:
        """Every token, in order; the appended text begins behind a mark."""
        target = self.target
        aims = dict(zip(target["coord_positions"], target["coord_targets"], strict=True))
        total, strongest = self._total_weight(), max((run.weight for run in self.runs), default=0.0)
        parts: list[str] = []
        for run in self.runs:
            if run.start == self.num_prefix and self.num_prefix:
                parts.append('<span class="seam" title="the kept prefix ends here">append</span>')
            content = "".join(self._token(position, run, aims, total) for position in range(run.start, run.stop))
            parts.append(f'<span class="run {run.tag}"{_strength(run, strongest)}>{content}</span>')
        return "".join(parts)

    def legend(self) -> str:
        """A row for each role there is: its colour, how many tokens, which weights, what it means."""
        runs = self.runs
        strongest = max((run.weight for run in runs), default=0.0)
        rows = []
        for role in TokenRole:
            of_role = [run for run in runs if run.role is role]
            if not of_role:
                continue
            weights = sorted({run.weight for run in of_role})
            swatches = "".join(f'<span class="run {run.tag}"{_strength(run, strongest)}><i>{run.tag}</i></span>' for run in _one_per_weight(of_role))
            count = sum(run.stop - run.start for run in of_role)
            shown = "slots" if role is TokenRole.COORD else ", ".join(f"{weight:g}" for weight in weights)
            rows.append(LegendRow(swatches, count, shown, MEANINGS[role]))
        return legend("role", "weight", rows)

    def _total_weight(self) -> float:
        return sum(run.weight * (run.stop - run.start) for run in self.runs)

    def _token(self, position: int, run: Run, aims: dict[int, float], total: float) -> str:
        token_id = self.target["token_ids"][position]
        facts = [f"token {position}", f"id {token_id}", run.tag]
        if position in aims:
            bin_, aim = self.codec.coord_bin(token_id), aims[position]
            facts += [f"bin {bin_}, should be {aim:g}", f"one of {len(aims)} slots"]
            return marked_token(facts, f"{bin_}<b>→{aim:.4g}</b>")
        facts.append(f"weight {run.weight:g}" + (f" ({run.weight / total:.2%} of the sample's text)" if run.weight else ""))
        return token(facts, self.codec.piece_bytes(token_id))


def _strength(run: Run, strongest: float) -> str:
    """None for an unsupervised run."""
    if run.role is TokenRole.COORD:
        return ' style="--a:0.45"'
    return strength(run.weight / strongest) if run.weight else ""


def _one_per_weight(runs: Sequence[Run]) -> list[Run]:
    return list({run.weight: run for run in sorted(runs, key=lambda run: run.weight)}.values())
