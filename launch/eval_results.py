"""From the finished rollouts of an evaluation to its results: one way for those of this call and those that were there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from launch.eval_record import Evaluation
from rollout_actors.environments.client import merged
from rollout_actors.environments.environment import Environment
from rollout_actors.environments.outputs import GenerateMetadata, GenerateOutputs, mean
from rollout_actors.environments.parsers import text_of
from rollout_actors.environments.results_file import FinishedRollout, ResultsFile
from rollout_actors.environments.rubric import compare_rollouts
from rollout_actors.environments.types import Messages, State


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
        one = FinishedRollout.of(state, example=example, rollout=rollout, row=self.digests[example], state_columns=self.state_columns)
        self.file.append(one)
        self.num_failed += one.error is not None
        if self._has_compared or one.error is not None:
            return
        # Now, and not when all are done: a wrong name is better known early.
        self._has_compared = True
        if absent := [path for path in self.state_columns if path not in one.columns]:
            self.warn(f"-C: the first rollout has no {', '.join(absent)}; its state has {', '.join(map(str, state))}")


def results_of(rollouts: Sequence[FinishedRollout], evaluation: Evaluation, environment: Environment, *, wall_s: float, date: str) -> GenerateOutputs:
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
        avg_reward=mean([one.reward for one in rollouts if one.error is None and one.reward is not None]),
        avg_metrics={name: mean([one.metrics[name] for one in rollouts if name in one.metrics]) for name in names},
        time_ms=1000 * wall_s,
        date=date,
        state_columns=list(evaluation.state_columns),
        num_reward_errors=dict(Counter(name for one in rollouts for name in one.reward_errors)),
        num_given_up=dict(Counter(name for one in rollouts for name in one.given_up)),
    )
    return GenerateOutputs.of(states, metadata)


def show_rollout(one: FinishedRollout, console: Console) -> None:
    """Prompt, completion and reward, to be read."""
    for title, said in (("prompt", one.prompt), ("completion", one.completion or "")):
        console.print(Text(f"{title} of example {one.example_id}", style="bold"))
        console.print(Text(_readable(said)))
    console.print(
        Text(f"reward {one.reward}, answer {one.answer!r}, ended by {one.stop_condition}" + (f", error {one.error}" if one.error else ""), style="bold")
    )


def _readable(said: Messages) -> str:
    if isinstance(said, str):
        return said
    return "\n".join(f"[{message.get('role', '?')}] {text_of(message)}{_calls(message)}" for message in said)


def _calls(message: dict[str, Any]) -> str:
    functions = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    return "".join(f" -> {function.get('name', '?')}({function.get('arguments', '')})" for function in functions)
