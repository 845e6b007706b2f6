"""One line of the rollout log of an environment (learner.rollout_logs.trajectories), and of a
held-out report's rollouts: its format, what is written of a rollout, and whether something is such
a line.

Shape legend: L tokens of an example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import AllowInfNan, ConfigDict, Field, PlainValidator, TypeAdapter, with_config
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict  # pydantic reads those of typing from Python 3.12 on

from learner.rollout_logs.writer import StepLog, Text, checked, read_lines
from shared.trajectory import EnvironmentRollout, TrainingExample

_Count = Annotated[int, Field(ge=0)]
_Given = Annotated[float, AllowInfNan(True)]
"""By a reward function or an engine: a line is written before what is not finite is refused."""


def _messages(value: Any) -> Any:
    """In a function, because pydantic would name every kind that `value` is not of."""
    if isinstance(value, str) or (
        isinstance(value, Sequence) and all(isinstance(message, Mapping) for message in value)
    ):
        return value
    raise PydanticCustomError("messages", "input should be a list of messages, or a text")


LoggedMessages = Annotated[Sequence[Mapping[str, Any]] | str, PlainValidator(_messages)]
"""A conversation; or a text, where an environment completes text. What is in a message is up to the
environment; each tool call is a text, JSON as a rule.
"""


class ExampleEntry(TypedDict):
    """What is learned of one or more calls of the model."""

    token_ids: Sequence[_Count]
    """[L], as the engine had them."""
    mask: Sequence[Annotated[int, Field(ge=0, le=1)]]
    """[L]: 1 where the token is learned."""
    logprobs: Sequence[_Given]
    """[L]: the engine's, of the tokens that it sampled; 0 elsewhere."""
    reward: _Given
    advantage: _Given | None
    """Before any division by the deviation of the group's rewards; null where nothing was scored.
    """
    token_advantages: Sequence[_Given] | None
    """[L], 0 outside the mask; null: `advantage` at every token."""
    weight_version: int | None
    """The oldest, where there were several; null where the endpoint does not say."""
    engine: Text | None
    """Null where the endpoint does not say, and where there were several."""
    turns: Sequence[_Count]
    """Calls of the rollout, from 0, ascending, whose sampled tokens it holds."""
    images: Sequence[Text]
    """SHA-256 of the files that the tokens have placeholders of, in order."""


@with_config(ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))
class CallEntry(TypedDict):
    """A call of the model, as an engine was asked it."""

    path: Text
    """Empty; of a call in a rollout that began inside this one, which of those it was."""
    turn: _Count
    """From 0, of its path."""
    seed: _Count
    engine: Text | None
    """The engine that answered; null: none did."""


@with_config(ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))
class TrajectoryRecord(TypedDict):
    """One rollout."""

    step: _Count | None
    """From 1; in a held-out report the steps before it, and null where the checkpoint does not say.
    """
    position: _Count
    """In the step, from 0; of a held-out report that of its example."""
    example: _Count
    """The row of the environment's data."""
    reward: float
    """0 where it failed."""
    metrics: Mapping[Text, _Given]
    """Of the reward functions, by name."""
    reward_errors: Mapping[Text, Text]
    """What others failed of, by name."""
    error: Text | None
    """Why it failed, and nothing is learned of it."""
    is_truncated: bool
    """It was ended for its length."""
    num_turns: _Count
    """Calls of the model."""
    num_splits: _Count
    """Calls whose prompt did not go on from the tokens of the one before."""
    calls: Sequence[CallEntry]
    """By path and turn; also those without an answer."""
    actor: str
    """In whose process the environment ran."""
    generate_s: float
    """Until its end, scoring included."""
    prompt: LoggedMessages | None
    """Null where it ended before it had any."""
    completion: LoggedMessages | None
    """All that came after the prompt, likewise."""
    examples: Sequence[ExampleEntry]
    """In order; none of a rollout that failed, and of a held-out one."""


_LINE = TypeAdapter(TrajectoryRecord)


def line_of(step: int | None, rollout: EnvironmentRollout) -> TrajectoryRecord:
    return {
        "step": step,
        "position": rollout.position,
        "example": rollout.example,
        "reward": rollout.reward,
        "metrics": dict(rollout.metrics),
        "reward_errors": dict(rollout.reward_errors),
        "error": rollout.error,
        "is_truncated": rollout.is_truncated,
        "num_turns": rollout.num_turns,
        "num_splits": rollout.num_splits,
        "calls": [
            {"path": call.path, "turn": call.turn, "seed": call.seed, "engine": call.engine}
            for call in rollout.calls
        ],
        "actor": rollout.actor,
        "generate_s": rollout.generate_s,
        "prompt": rollout.prompt,
        "completion": rollout.completion,
        "examples": [_entry(example) for example in rollout.examples],
    }


def checked_trajectory_line(value: Any) -> TrajectoryRecord:
    """What a line's JSON says, if it is the line of an environment's rollout log. RecordError, not
    located, with the field that it is not for.
    """
    return checked(value, _LINE, _consistent)


def _entry(example: TrainingExample) -> ExampleEntry:
    return {
        "token_ids": example.token_ids,
        "mask": example.mask,
        "logprobs": example.logprobs,
        "reward": example.reward,
        "advantage": example.advantage,
        "token_advantages": example.token_advantages,
        "weight_version": example.weight_version,
        "engine": example.engine,
        "turns": example.steps,
        "images": [image.sha256 for image in example.images],
    }


def _consistent(line: TrajectoryRecord) -> dict[str, bool]:
    fits = {"examples": line["error"] is None or not line["examples"]}
    for number, example in enumerate(line["examples"]):
        length, by_token, turns = (
            len(example["token_ids"]),
            example["token_advantages"],
            example["turns"],
        )
        fits |= {
            f"examples[{number}].mask": len(example["mask"]) == length,
            f"examples[{number}].logprobs": len(example["logprobs"]) == length,
            f"examples[{number}].token_advantages": by_token is None or len(by_token) == length,
            f"examples[{number}].turns": (
                all(a < b for a, b in pairwise(turns))
                and all(turn < line["num_turns"] for turn in turns)
            ),
        }
    return fits


# What became of every rollout of an environment: a line each in `rollouts/step_000123.jsonl`
# (`learner.rollout_logs.writer`), in the order of positions. `TrajectoryRecord`
# (learner.rollout_logs.trajectories) is the format.
#
# jq -c 'select(.error != null) | [.position, .error]' step_000123.jsonl
# jq -r 'select(.reward == 1) | .completion[] | "\(.role): \(.content)"' step_000123.jsonl


class TrajectoryLog:
    def __init__(self, folder: Path, *, rank: int = 0) -> None:
        """Makes `folder` where it is missing. Raises StorageError."""
        self._step = 0
        self._lines = StepLog(folder, rank=rank)

    def begin(self, step: int) -> None:
        """The lines that follow are of this step. Raises StorageError."""
        self._step = step
        self._lines.begin(step)

    def write(self, rollout: EnvironmentRollout) -> None:
        """Raises StorageError."""
        self._lines.write(line_of(self._step, rollout))

    def close(self) -> None:
        self._lines.close()


def read_step(path: Path) -> list[TrajectoryRecord]:
    """`learner.rollout_logs.writer.read_lines` of a file of `TrajectoryLog`. Raises OSError, and
    RecordError with file and line for a line that this version did not write."""
    return read_lines(path, checked_trajectory_line)
