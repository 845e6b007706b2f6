"""The numbers of an evaluation, for the console."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from rollout_actors.environments.outputs import mean
from rollout_actors.environments.results_file import FinishedRollout

_ERRORS_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Score:
    """Of a reward or a metric."""

    mean: float
    error: float | None
    """Standard error of the mean, over the examples' own means: rollouts of one example are no independent samples. None of a single example."""
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[Sequence[float]]) -> Score:
        """Of each example, the values of its rollouts, at least one in all. Examples may have none:
        their rollouts failed, or are of another environment of a group."""
        flat = [value for own in values for value in own]
        means = [mean(own) for own in values if own]
        error = None
        if len(means) > 1:
            centre = mean(means)
            error = math.sqrt(math.fsum((one - centre) ** 2 for one in means) / (len(means) - 1) / len(means))
        return cls(mean(flat), error, min(flat), max(flat))


def pass_at(k: int, solved: Sequence[tuple[int, int]]) -> float:
    """The chance that one of `k` rollouts solves an example, without bias; `solved` has each example's number of solved rollouts, and of all (at least k)."""
    return mean([1 - math.comb(total - good, k) / math.comb(total, k) for good, total in solved])


def summary_tables(rollouts: Sequence[FinishedRollout], *, solved_at: float, wall_s: float) -> list[Table]:
    """Scores of the rollouts that did not fail, and what else is to be known. At least one rollout;
    rewards are there."""
    groups: dict[int, list[FinishedRollout]] = {}
    for one in rollouts:
        groups.setdefault(one.example, []).append(one)
    examples = list(groups.values())
    scores = {}
    if any(one.error is None for one in rollouts):
        rewards = [[one.reward or 0.0 for one in own if one.error is None] for own in examples]
        scores["reward"] = Score.of(rewards)
    for name in dict.fromkeys(name for one in rollouts for name in one.metrics):
        scores[name if name != "reward" else "reward (metric)"] = Score.of([[one.metrics[name] for one in own if name in one.metrics] for own in examples])
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for head in ("mean", "std. error", "least", "most"):
        table.add_column(head, justify="right")
    for name, score in scores.items():
        table.add_row(Text(name), f"{score.mean:.4f}", "-" if score.error is None else f"{score.error:.4f}", f"{score.least:.4f}", f"{score.most:.4f}")
    return [table, _facts(examples, rollouts, solved_at, wall_s)]


def _facts(examples: Sequence[Sequence[FinishedRollout]], rollouts: Sequence[FinishedRollout], solved_at: float, wall_s: float) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    add = table.add_row
    add("rollouts", f"{len(rollouts)}, of {len(examples)} examples")
    least = min(map(len, examples))
    if least > 1:
        # A rollout that failed has not solved its example.
        solved = [(sum(one.error is None and (one.reward or 0.0) >= solved_at - 1e-9 for one in own), len(own)) for own in examples]
        ks = [k for k in (1, 2, 4, 8, 16, 32, 64, 128) if k < least] + [least]
        for k in ks:
            add(f"pass@{k}", f"{pass_at(k, solved):.4f}" + (f"  (reward of {solved_at:g} or more)" if k == 1 else ""))
    errors = Counter(one.error for one in rollouts if one.error is not None)
    add("errors", f"{errors.total()}, not in the means" if errors else "0")
    for text, count in errors.most_common(_ERRORS_SHOWN):
        add("", Text(f"{count} x {_short(text)}"))
    if len(errors) > _ERRORS_SHOWN:
        add("", f"and {len(errors) - _ERRORS_SHOWN} others")
    failed = Counter(name for one in rollouts for name in one.reward_errors)
    for name, count in failed.most_common():
        first = next(one.reward_errors[name] for one in rollouts if name in one.reward_errors)
        add("reward errors", Text(f"{count} x {name}, not in its mean: {_short(first)}"))
    given_up = Counter(name for one in rollouts for name in one.given_up)
    if given_up:
        add("given up", Text(", ".join(f"{count} x {name}" for name, count in given_up.most_common()) + ": plain functions that ran past a limit"))
    add("truncated", str(sum(one.is_truncated for one in rollouts)))
    stops = Counter(one.stop_condition for one in rollouts if one.stop_condition is not None)
    add("ended by", Text(", ".join(f"{name} {count}" for name, count in stops.most_common())))
    counted = [(one.prompt_tokens, one.completion_tokens) for one in rollouts if one.prompt_tokens is not None and one.completion_tokens is not None]
    if counted:
        read, said = (sum(column) for column in zip(*counted, strict=True))
        add("tokens", f"{read} read, {said} sampled; a rollout {read / len(counted):.1f} and {said / len(counted):.1f}")
    for name in ("generation_ms", "scoring_ms"):
        add(name.removesuffix("_ms"), f"{mean([one.timing.get(name, 0.0) for one in rollouts]) / 1000:.3f} s a rollout")
    add("wall time", f"{wall_s:.1f} s")
    return table


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 200 else f"{line[:200]}..."
