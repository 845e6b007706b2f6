"""The numbers of an evaluation, for the console."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.vf_eval.record import EvaluationSettings
from launch.vf_eval.results_file import FinishedRollout, ResultsFile
from rollout_actors.environments.clients.openai import merged
from rollout_actors.environments.datasets import GenerateMetadata, GenerateOutputs, mean
from rollout_actors.environments.environment import Environment
from rollout_actors.environments.rubric import compare_rollouts, text_of
from rollout_actors.environments.types import Messages, State

# From the finished rollouts of an evaluation to its results: one way for those of this call and
# those that were there.


@dataclass(slots=True)
class RolloutNotes:
    """Writes the rollouts of one call of `Environment.generate` into the file, as they come."""

    file: ResultsFile
    places: Sequence[tuple[int, int]]
    """Example and number of each rollout of the call."""
    digests: Sequence[str]
    """Of each example's row."""
    state_columns: Sequence[str]
    warn: Callable[[str], None]
    num_failed: int = field(default=0, init=False)
    _has_compared: bool = field(default=False, init=False)

    def write(self, index: int, state: State) -> None:
        """`on_rollout` of the call."""
        example, rollout = self.places[index]
        one = FinishedRollout.of(
            state,
            example=example,
            rollout=rollout,
            row=self.digests[example],
            state_columns=self.state_columns,
        )
        self.file.append(one)
        self.num_failed += one.error is not None
        if self._has_compared or one.error is not None:
            return
        # Now, and not when all are done: a wrong name is better known early.
        self._has_compared = True
        if absent := [path for path in self.state_columns if path not in one.columns]:
            self.warn(
                f"-C: the first rollout has no {', '.join(absent)}; its state has"
                f" {', '.join(map(str, state))}"
            )


def results_of(
    rollouts: Sequence[FinishedRollout],
    evaluation: EvaluationSettings,
    environment: Environment,
    *,
    wall_s: float,
    date: str,
) -> GenerateOutputs:
    """What `Environment.evaluate` would have returned; states hold what was kept of them."""
    states = [one.state() for one in rollouts]
    groups: dict[str, list[State]] = {}
    for state in states:
        groups.setdefault(repr((state["task"], state["example_id"])), []).append(state)
    for group in groups.values():
        compare_rollouts(group)
    names = dict.fromkeys(name for one in rollouts for name in one.metrics)
    metadata = GenerateMetadata(
        env_id=environment.name,
        env_args=evaluation.env_args,
        model=str(evaluation.model),
        sampling_args=merged(environment.sampling_args, evaluation.sampling_args),
        num_examples=len({one.example for one in rollouts}),
        rollouts_per_example=evaluation.rollouts_per_example,
        num_errors=sum(one.error is not None for one in rollouts),
        num_truncated=sum(one.is_truncated for one in rollouts),
        avg_reward=mean(
            [one.reward for one in rollouts if one.error is None and one.reward is not None]
        ),
        avg_metrics={
            name: mean([one.metrics[name] for one in rollouts if name in one.metrics])
            for name in names
        },
        time_ms=1000 * wall_s,
        date=date,
        state_columns=list(evaluation.state_columns),
        num_reward_errors=dict(Counter(name for one in rollouts for name in one.reward_errors)),
        num_given_up=dict(Counter(name for one in rollouts for name in one.given_up)),
    )
    return GenerateOutputs.from_states(states, metadata)


def show_rollout(one: FinishedRollout, console: Console) -> None:
    """Prompt, completion and reward, to be read."""
    for title, said in (("prompt", one.prompt), ("completion", one.completion or "")):
        console.print(Text(f"{title} of example {one.example_id}", style="bold"))
        console.print(Text(_readable(said)))
    console.print(
        Text(
            f"reward {one.reward}, answer {one.answer!r}, ended by {one.stop_condition}"
            + (f", error {one.error}" if one.error else ""),
            style="bold",
        )
    )


def _readable(said: Messages) -> str:
    if isinstance(said, str):
        return said
    return "\n".join(
        f"[{message.get('role', '?')}] {text_of(message)}{_calls(message)}" for message in said
    )


def _calls(message: dict[str, Any]) -> str:
    functions = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    return "".join(
        f" -> {function.get('name', '?')}({function.get('arguments', '')})"
        for function in functions
    )


_ERRORS_SHOWN = 3


@dataclass(frozen=True, slots=True)
class ScoreSummary:
    """Of a reward or a metric."""

    mean: float
    error: float | None
    """Standard error of the mean, over the examples' own means: rollouts of one example are no
    independent samples. None of a single example.
    """
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[Sequence[float]]) -> ScoreSummary:
        """Of each example, the values of its rollouts, at least one in all. Examples may have none:
        their rollouts failed, or are of another environment of a group."""
        flat = [value for own in values for value in own]
        means = [mean(own) for own in values if own]
        error = None
        if len(means) > 1:
            centre = mean(means)
            error = math.sqrt(
                math.fsum((one - centre) ** 2 for one in means) / (len(means) - 1) / len(means)
            )
        return cls(mean(flat), error, min(flat), max(flat))


def pass_at(k: int, solved: Sequence[tuple[int, int]]) -> float:
    """The chance that one of `k` rollouts solves an example, without bias; `solved` has each
    example's number of solved rollouts, and of all (at least k).
    """
    return mean([1 - math.comb(total - good, k) / math.comb(total, k) for good, total in solved])


def summary_tables(
    rollouts: Sequence[FinishedRollout], *, solved_at: float, wall_s: float
) -> list[Table]:
    """Scores of the rollouts that did not fail, and what else is to be known. At least one rollout;
    rewards are there."""
    groups: dict[int, list[FinishedRollout]] = {}
    for one in rollouts:
        groups.setdefault(one.example, []).append(one)
    examples = list(groups.values())
    scores = {}
    if any(one.error is None for one in rollouts):
        rewards = [[one.reward or 0.0 for one in own if one.error is None] for own in examples]
        scores["reward"] = ScoreSummary.of(rewards)
    for name in dict.fromkeys(name for one in rollouts for name in one.metrics):
        scores[name if name != "reward" else "reward (metric)"] = ScoreSummary.of(
            [[one.metrics[name] for one in own if name in one.metrics] for own in examples]
        )
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for head in ("mean", "std. error", "least", "most"):
        table.add_column(head, justify="right")
    for name, score in scores.items():
        table.add_row(
            Text(name),
            f"{score.mean:.4f}",
            "-" if score.error is None else f"{score.error:.4f}",
            f"{score.least:.4f}",
            f"{score.most:.4f}",
        )
    return [table, _facts(examples, rollouts, solved_at, wall_s)]


def _facts(
    examples: Sequence[Sequence[FinishedRollout]],
    rollouts: Sequence[FinishedRollout],
    solved_at: float,
    wall_s: float,
) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    add = table.add_row
    add("rollouts", f"{len(rollouts)}, of {len(examples)} examples")
    least = min(map(len, examples))
    if least > 1:
        # A rollout that failed has not solved its example.
        solved = [
            (
                sum(one.error is None and (one.reward or 0.0) >= solved_at - 1e-9 for one in own),
                len(own),
            )
            for own in examples
        ]
        ks = [k for k in (1, 2, 4, 8, 16, 32, 64, 128) if k < least] + [least]
        for k in ks:
            add(
                f"pass@{k}",
                f"{pass_at(k, solved):.4f}"
                + (f"  (reward of {solved_at:g} or more)" if k == 1 else ""),
            )
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
        add(
            "given up",
            Text(
                ", ".join(f"{count} x {name}" for name, count in given_up.most_common())
                + ": plain functions that ran past a limit"
            ),
        )
    add("truncated", str(sum(one.is_truncated for one in rollouts)))
    stops = Counter(one.stop_condition for one in rollouts if one.stop_condition is not None)
    add("ended by", Text(", ".join(f"{name} {count}" for name, count in stops.most_common())))
    counted = [
        (one.prompt_tokens, one.completion_tokens)
        for one in rollouts
        if one.prompt_tokens is not None and one.completion_tokens is not None
    ]
    if counted:
        read, said = (sum(column) for column in zip(*counted, strict=True))
        add(
            "tokens",
            f"{read} read, {said} sampled; a rollout {read / len(counted):.1f} and"
            f" {said / len(counted):.1f}",
        )
    for name in ("generation_ms", "scoring_ms"):
        add(
            name.removesuffix("_ms"),
            f"{mean([one.timing.get(name, 0.0) for one in rollouts]) / 1000:.3f} s a rollout",
        )
    add("wall time", f"{wall_s:.1f} s")
    return table


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 200 else f"{line[:200]}..."
