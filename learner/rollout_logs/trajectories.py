r"""The rollout log of an environment: one line of JSON per rollout (see `writer` for the files).

`TrajectoryRecord` is the format of a line, here and in a held-out report.

    jq -c 'select(.error != null) | [.position, .error]' step_000123.jsonl
    jq -r 'select(.reward == 1) | .completion[] | "\(.role): \(.content)"' step_000123.jsonl

A step can be trained again from its lines (`logged_rollout`) and the images in `rollouts/images/`.
`NotRequired` fields are missing in logs of older versions.

Shape legend: L tokens of an example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypeVar

from pydantic import AllowInfNan, ConfigDict, Field, PlainValidator, TypeAdapter, with_config
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict  # pydantic needs Python 3.12 to read typing.TypedDict

from learner.rollout_logs.writer import Text, log_entry, picture_path, read_lines
from shared.errors import ConfigError
from shared.records import ImageRef
from shared.trajectory import EnvironmentRollout, ModelCall, TrainingExample

T = TypeVar("T")

_Count = Annotated[int, Field(ge=0)]
_AnyFloat = Annotated[float, AllowInfNan(True)]
"""A float that may be infinite or NaN, because the line is written before such a number raises."""


def _messages(value: Any) -> Any:
    """Accept messages or a text. A union type would report one error for each of its members."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(isinstance(message, Mapping) for message in value):
        return value
    raise PydanticCustomError("messages", "input should be a list of messages, or a text")


LoggedMessages = Annotated[Sequence[Mapping[str, Any]] | str, PlainValidator(_messages)]
"""A conversation as messages with any keys; a text if the environment does not use messages."""


class ExampleEntry(TypedDict):
    """One training example of a rollout: the token sequence of one or more model calls."""

    token_ids: Sequence[_Count]
    """[L]: the token ids of the example's model calls, as the engine read and sampled them."""
    mask: Sequence[Annotated[int, Field(ge=0, le=1)]]
    """[L]: 1 for learned tokens, 0 for other tokens."""
    logprobs: Sequence[_AnyFloat]
    """[L]: the engine's log-probabilities of sampled tokens, 0 for other tokens."""
    reward: _AnyFloat
    advantage: _AnyFloat | None
    """The environment's own advantage, or the reward minus the group's mean, not divided by the
    group's deviation. Null if the group was not scored."""
    token_advantages: Sequence[_AnyFloat] | None
    """[L]: each token's advantage, 0 if it is not learned. Null: every token has `advantage`."""
    weight_version: int | None
    """Version of the weights that generated the example, the oldest if there were several. Null if
    the endpoint does not report it."""
    engine: Text | None
    """The engine that generated the example. Null if the endpoint does not report it, or if there
    were several engines."""
    turns: Sequence[_Count]
    """Numbers of the rollout's model calls in this example, from 0, ascending."""
    images: Sequence[Text]
    """SHA-256 of the image files in the prompts, in the order of their placeholders."""
    turn_ends: NotRequired[Sequence[_Count]]
    """For each of `turns`: the position after the call's last token, ascending to L. May be empty
    for a single call."""
    token_is_relative: NotRequired[Sequence[Annotated[int, Field(ge=0, le=1)]] | None]
    """[L]: 1 if the learner computes the advantage from `group_rewards`, 0 if the environment set
    it. Null: 1 everywhere if there are `group_rewards`, else 0."""
    group_rewards: NotRequired[Sequence[_AnyFloat]]
    """Rewards of the rollouts of the same dataset row that did not fail. Advantages may be divided
    by the rewards' standard deviation. Empty if one of the rollouts was not scored."""
    teacher_logprobs: NotRequired[Sequence[_AnyFloat]]
    """[L]: a teacher model's log-probabilities of learned tokens, 0 for other tokens. Absent
    without a teacher."""


@with_config(ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))
class CallEntry(TypedDict):
    """A model call: one request of the environment to an engine."""

    path: Text
    """The nested rollout that made the call; empty for the outer rollout."""
    turn: _Count
    """Number of the call, from 0 in each path."""
    seed: _Count
    engine: Text | None
    """The engine that answered; null if no engine answered."""


@with_config(ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))
class TrajectoryRecord(TypedDict):
    """One line of the rollout log: a rollout of an environment."""

    step: _Count | None
    """Number of the step, from 1. In a held-out report: the number of steps before it, or null if
    the checkpoint does not record it."""
    position: _Count
    """Position in the step, from 0. In a held-out report: the position of its example."""
    example: _Count
    """Number of the row in the environment's dataset."""
    reward: float
    """The rollout's reward; 0 if the rollout failed."""
    metrics: Mapping[Text, _AnyFloat]
    """The value that each reward function returned, by the function's name."""
    reward_errors: Mapping[Text, Text]
    """The error of each reward function that failed, by the function's name."""
    error: Text | None
    """Why the rollout failed; null if it did not. Failed rollouts are not trained."""
    is_truncated: bool
    """Whether an answer or the conversation (`is_overlong`) was cut by length."""
    is_overlong: NotRequired[bool]
    """Whether the rollout ended because its next prompt would have been too long."""
    task: NotRequired[Text | None]
    """Name of the environment, if it belongs to an environment group."""
    num_turns: _Count
    """Number of model calls."""
    num_splits: _Count
    """Number of model calls whose prompt does not extend the tokens of the call before."""
    num_tokens: NotRequired[_Count]
    """Number of sampled tokens."""
    num_length_limited: NotRequired[_Count]
    """Number of model calls whose answer the engine cut by length."""
    num_tool_calls: NotRequired[_Count | None]
    """Number of the model's tool calls. Null if the model has no tools."""
    given_up: NotRequired[Sequence[Text]]
    """Names of synchronous tools and reward functions that were abandoned at a time limit."""
    calls: Sequence[CallEntry]
    """The model calls, ordered by path and turn, including those without an answer."""
    actor: str
    """The Ray actor in whose process the environment ran."""
    generate_s: float
    """Seconds from the rollout's start to its end, including scoring."""
    prompt: LoggedMessages | None
    """The prompt. Null if the rollout ended before it had one."""
    completion: LoggedMessages | None
    """Everything after the prompt. Null if the rollout ended before it had a prompt."""
    examples: Sequence[ExampleEntry]
    """The training examples, in order. Empty for failed and for held-out rollouts."""


_RECORD = TypeAdapter(TrajectoryRecord)


def trajectory_record(step: int | None, rollout: EnvironmentRollout) -> TrajectoryRecord:
    """Return the line of the rollout log for one rollout. `step` counts from 1."""
    examples = [
        log_entry(
            ExampleEntry,
            one,
            turns=one.steps,
            turn_ends=one.step_ends,
            images=[image.sha256 for image in one.images],
        )
        for one in rollout.examples
    ]
    for entry in examples:
        if entry["teacher_logprobs"] is None:
            del entry["teacher_logprobs"]
    return log_entry(
        TrajectoryRecord,
        rollout,
        step=step,
        metrics=dict(rollout.metrics),
        reward_errors=dict(rollout.reward_errors),
        calls=[log_entry(CallEntry, call) for call in rollout.calls],
        examples=examples,
    )


def read_step(path: Path) -> list[TrajectoryRecord]:
    """Read a step's lines of the rollout log, of all ranks. `path` is the file of rank 0.

    Raises as `writer.read_lines` does.
    """
    return read_lines(path, _RECORD)


def logged_rollout(line: TrajectoryRecord, folder: Path) -> EnvironmentRollout:
    """Return the rollout that a line of the rollout log describes, to train on it again.

    `folder` contains the log and its images.

    The log contains neither Unix times nor the ids of dataset rows. So `started_s` is 0, and
    `example_id` is the row's number.

    Raises ConfigError if an older version wrote the line, or an image is missing.
    """
    if "num_tokens" not in line:
        raise ConfigError(
            f"run: the log in {folder} was written by a version that did not log everything that"
            " training needs (it has no num_tokens); check out that version, or run again"
        )
    examples = [
        TrainingExample(
            token_ids=list(entry["token_ids"]),
            logprobs=list(entry["logprobs"]),
            mask=list(entry["mask"]),
            reward=entry["reward"],
            advantage=entry["advantage"],
            example_id=line["example"],
            weight_version=entry["weight_version"],
            token_advantages=_list(entry["token_advantages"]),
            token_is_relative=_list(entry["token_is_relative"]),
            rollout=line["position"],
            steps=tuple(entry["turns"]),
            step_ends=tuple(entry["turn_ends"]),
            group_rewards=tuple(entry["group_rewards"]),
            images=tuple(_picture(folder, sha256) for sha256 in entry["images"]),
            engine=entry["engine"],
            teacher_logprobs=(
                list(entry["teacher_logprobs"]) if "teacher_logprobs" in entry else None
            ),
        )
        for entry in line["examples"]
    ]
    return EnvironmentRollout(
        position=line["position"],
        example=line["example"],
        reward=line["reward"],
        metrics=dict(line["metrics"]),
        error=line["error"],
        is_truncated=line["is_truncated"],
        num_turns=line["num_turns"],
        num_tokens=line["num_tokens"],
        num_length_limited=line["num_length_limited"],
        num_splits=line["num_splits"],
        examples=tuple(examples),
        prompt=line["prompt"],
        completion=line["completion"],
        actor=line["actor"],
        started_s=0.0,
        generate_s=line["generate_s"],
        reward_errors=dict(line["reward_errors"]),
        given_up=tuple(line["given_up"]),
        num_tool_calls=line["num_tool_calls"],
        calls=tuple(ModelCall(**call) for call in line["calls"]),
        is_overlong=line.get("is_overlong", False),
        task=line.get("task"),
    )


def _list(values: Sequence[T] | None) -> list[T] | None:
    return None if values is None else list(values)


def _picture(folder: Path, sha256: str) -> ImageRef:
    path = picture_path(folder, sha256)
    if not path.is_file():
        raise ConfigError(
            f"run: {path} is missing; steps with images can only be trained again if the run kept"
            " the images (telemetry.rollout_images=true)"
        )
    # When the file is read, its content is compared with the digest.
    return ImageRef(path, None, sha256)
