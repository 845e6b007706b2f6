"""Computes the results of an evaluation, and the tables for the console."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.run_folder.console import escaped
from launch.tools.vf_eval.record import EvaluationSettings
from launch.tools.vf_eval.results_file import FinishedRollout, KeptState
from rollout_actors.environments.answers.parsers import text_of
from rollout_actors.environments.clients.openai import merged
from rollout_actors.environments.datasets import GenerateMetadata, GenerateOutputs
from rollout_actors.environments.environment import Environment
from rollout_actors.environments.generate import metadata_of
from rollout_actors.environments.rewards import compare_rollouts
from rollout_actors.environments.types import Messages, State
from shared.metrics import mean

_NUM_ERRORS_SHOWN = 3
_PASS_AT = (1, 2, 4, 8, 16, 32, 64, 128)


def results_of(
    rollouts: Sequence[FinishedRollout],
    evaluation: EvaluationSettings,
    environment: Environment,
    *,
    wall_s: float,
    date: str,
) -> GenerateOutputs:
    """Return results as `Environment.evaluate` does, for the rollouts of an evaluation.

    The rollouts may be of several `vf-eval` commands, of which the later ones resumed the
    evaluation.

    `wall_s` is the duration in seconds, `date` the time of the evaluation, for the metadata.

    States contain only the fields that were kept.
    """
    states = [rollout.full_state() for rollout in rollouts]
    groups: dict[str, list[State]] = {}
    for state in states:
        groups.setdefault(repr((state["task"], state["example_id"])), []).append(state)
    for group in groups.values():
        compare_rollouts(group)
    sampling = merged(environment.sampling_args, evaluation.sampling_args)
    metadata = replace(
        metadata_of(environment, str(evaluation.model), sampling, states),
        env_args=evaluation.env_args,
        num_examples=len({rollout.example for rollout in rollouts}),
        rollouts_per_example=evaluation.rollouts_per_example,
        time_ms=1000 * wall_s,
        date=date,
        state_columns=list(evaluation.state_columns),
    )
    return GenerateOutputs.from_states(states, metadata)


def show_rollout(state: KeptState, console: Console) -> None:
    """Print the prompt, completion and reward of a rollout."""
    shown = {"prompt": state["prompt"], "completion": state["completion"] or ""}
    for title, messages in shown.items():
        console.print(Text(f"{title} of example {state['example_id']}", style="bold"))
        console.print(Text(escaped(_transcript(messages))))
    names = ("reward", "answer", "stop_condition", "error")
    end = ", ".join(f"{name} {state.get(name)!r}" for name in names)
    console.print(Text(escaped(end), style="bold"))


def _transcript(messages: Messages) -> str:
    if isinstance(messages, str):
        return messages
    lines = []
    for message in messages:
        line = f"[{message.get('role', '?')}] {text_of(message)}"
        for call in message.get("tool_calls") or ():
            function: dict[str, Any] = call.get("function") or {}
            line += f" -> {function.get('name', '?')}({function.get('arguments', '')})"
        lines.append(line)
    return "\n".join(lines)


class ScoreSummary(NamedTuple):
    """The summary of a reward or a metric over an evaluation's rollouts."""

    mean: float
    error: float | None
    """Standard error of the mean, computed from the means of examples; None for one example.

    Rollouts of one example are not independent samples.
    """
    least: float
    most: float

    @classmethod
    def from_values(cls, values: Sequence[Sequence[float]]) -> ScoreSummary:
        """Summarise the values of each example's rollouts; there must be at least one value.

        An example may have no values, because its rollouts failed or are of another environment of
        the group.
        """
        flat = [value for of_example in values for value in of_example]
        means = [mean(of_example) for of_example in values if of_example]
        error = None
        if len(means) > 1:
            centre = mean(means)
            squares = math.fsum((one - centre) ** 2 for one in means)
            error = math.sqrt(squares / (len(means) - 1) / len(means))
        return cls(mean(flat), error, min(flat), max(flat))


def pass_at(k: int, solved: Sequence[tuple[int, int]]) -> float:
    """Return an unbiased estimate of the probability that any of `k` rollouts solves its example.

    `solved` has, for each example, the numbers of solved rollouts and of all rollouts (at least k).
    """
    return mean([1 - math.comb(total - good, k) / math.comb(total, k) for good, total in solved])


def summary_tables(
    rollouts: Sequence[FinishedRollout], metadata: GenerateMetadata, *, solved_at: float
) -> list[Table]:
    """Return a table of the scores of rollouts that did not fail, and a table of facts.

    `solved_at`: least reward of a solved rollout.
    """
    groups: dict[int, list[FinishedRollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.example, []).append(rollout)
    examples = list(groups.values())
    sound = [[one.state for one in group if one.error is None] for group in examples]
    scores = {}
    if any(sound):
        scores["reward"] = ScoreSummary.from_values(
            [[state["reward"] or 0.0 for state in group] for group in sound]
        )
    tasks = list(dict.fromkeys(state["task"] for group in sound for state in group))
    for task in tasks if len(tasks) > 1 else ():
        scores[f"reward of {task}"] = ScoreSummary.from_values(
            [
                [state["reward"] or 0.0 for state in group if state["task"] == task]
                for group in sound
            ]
        )
    for name in metadata.avg_metrics:
        label = "reward (metric)" if name == "reward" else name
        # Rollouts of other environments of a group do not have this metric.
        scores[label] = ScoreSummary.from_values(
            [[one["metrics"][name] for one in group if name in one["metrics"]] for group in sound]
        )
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for head in ("mean", "std. error", "least", "most"):
        table.add_column(head, justify="right")
    for name, score in scores.items():
        figures = ("-" if figure is None else f"{figure:.4f}" for figure in score)
        table.add_row(Text(escaped(name)), *figures)
    return [table, _facts(examples, metadata, solved_at)]


def _facts(
    examples: Sequence[Sequence[FinishedRollout]], metadata: GenerateMetadata, solved_at: float
) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)

    def add(name: str, fact: str) -> None:
        table.add_row(name, Text(escaped(fact)))

    rollouts = [rollout for group in examples for rollout in group]
    states = [rollout.state for rollout in rollouts]
    add("rollouts", f"{len(rollouts)}, of {len(examples)} examples")
    fewest = min(map(len, examples))
    if fewest > 1:
        # A failed rollout has not solved its example.
        solved = []
        for group in examples:
            rewards = [one.state["reward"] or 0.0 for one in group if one.error is None]
            solved.append((sum(reward >= solved_at - 1e-9 for reward in rewards), len(group)))
        for k in [*(k for k in _PASS_AT if k < fewest), fewest]:
            remark = f"  (reward of {solved_at:g} or more)" if k == 1 else ""
            add(f"pass@{k}", f"{pass_at(k, solved):.4f}{remark}")
    errors = Counter(state["error"] for state in states if state["error"] is not None)
    add("errors", f"{errors.total()}, not in the means" if errors else "0")
    for text, count in errors.most_common(_NUM_ERRORS_SHOWN):
        add("", f"{count} x {_short(text)}")
    if len(errors) > _NUM_ERRORS_SHOWN:
        add("", f"and {len(errors) - _NUM_ERRORS_SHOWN} others")
    for name, count in metadata.num_reward_errors.items():
        of_states = (state.get("reward_errors", {}).get(name) for state in states)
        add(
            "reward errors",
            f"{count} x {name}, not in its mean: {_short(next(filter(None, of_states)))}",
        )
    if metadata.num_given_up:
        names = ", ".join(f"{count} x {name}" for name, count in metadata.num_given_up.items())
        add("given up", f"{names}: functions without async that exceeded a time limit")
    add("truncated", str(metadata.num_truncated))
    stops = Counter(state["stop_condition"] for state in states)
    add("ended by", ", ".join(f"{name} {count}" for name, count in stops.most_common() if name))
    counted = [
        (one.prompt_tokens, one.completion_tokens)
        for one in rollouts
        if one.prompt_tokens is not None and one.completion_tokens is not None
    ]
    if counted:
        num_read, num_sampled = (sum(column) for column in zip(*counted, strict=True))
        each = f"{num_read / len(counted):.1f} and {num_sampled / len(counted):.1f}"
        add("tokens", f"{num_read} read, {num_sampled} sampled; a rollout {each}")
    for name in ("generation", "scoring"):
        mean_ms = mean([state["timing"].get(f"{name}_ms", 0.0) for state in states])
        add(name, f"{mean_ms / 1000:.3f} s a rollout")
    add("wall time", f"{metadata.time_ms / 1000:.1f} s")
    return table


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 200 else f"{line[:200]}..."
