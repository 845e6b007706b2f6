r"""The rollout log of an environment: one line of JSON per rollout (see `writer` for the files).

`TrajectoryRecord` is the format of a line, here and in a held-out report.

    jq -c 'select(.error != null) | [.position, .error]' step_000123.jsonl
    jq -r 'select(.reward == 1) | .completion[] | "\(.role): \(.content)"' step_000123.jsonl

A step is learned again from its lines (`logged_rollout`), the pictures of its tokens are beside
them in `rollouts/images/`. Fields that are `NotRequired` are missing in logs of older versions.

Shape legend: L tokens of an example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypeVar

from pydantic import AllowInfNan, ConfigDict, Field, PlainValidator, TypeAdapter, with_config
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict  # pydantic reads those of typing from Python 3.12 on

from learner.rollout_logs.writer import Text, log_entry, picture_path, read_lines
from shared.errors import ConfigError
from shared.records import ImageRef
from shared.trajectory import EnvironmentRollout, ModelCall, TrainingExample

T = TypeVar("T")

_Count = Annotated[int, Field(ge=0)]
_AnyFloat = Annotated[float, AllowInfNan(True)]
"""A float that may be infinite or NaN: a line is written before such a number is refused."""


def _messages(value: Any) -> Any:
    """Accept messages or a text. A function, because pydantic would list every kind that fails."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(isinstance(message, Mapping) for message in value):
        return value
    raise PydanticCustomError("messages", "input should be a list of messages, or a text")


LoggedMessages = Annotated[Sequence[Mapping[str, Any]] | str, PlainValidator(_messages)]
"""A conversation, whose messages hold whatever the environment put into them; a text where it
completes text.
"""


class ExampleEntry(TypedDict):
    """The tokens that are learned of one or more calls of the model."""

    token_ids: Sequence[_Count]
    """[L], as the engine had them."""
    mask: Sequence[Annotated[int, Field(ge=0, le=1)]]
    """[L]: 1 where the token is learned."""
    logprobs: Sequence[_AnyFloat]
    """[L]: the engine's, of the tokens that it sampled; 0 elsewhere."""
    reward: _AnyFloat
    advantage: _AnyFloat | None
    """Before any division by the group's deviation; null where nothing was scored."""
    token_advantages: Sequence[_AnyFloat] | None
    """[L], 0 outside the mask; null: `advantage` at every token."""
    weight_version: int | None
    """The oldest, where there were several; null where the endpoint does not say."""
    engine: Text | None
    """Null where the endpoint does not say, and where there were several."""
    turns: Sequence[_Count]
    """Calls of the rollout, from 0, ascending, whose sampled tokens it holds."""
    images: Sequence[Text]
    """SHA-256 of the files that the tokens have placeholders of, in order."""
    turn_ends: NotRequired[Sequence[_Count]]
    """[turns], ascending to L: where the tokens of each call end; may be empty for a single one."""
    token_is_relative: NotRequired[Sequence[Annotated[int, Field(ge=0, le=1)]] | None]
    """[L]: 1 where the advantage is the reward less the group's mean; null: nobody noted it."""
    group_rewards: NotRequired[Sequence[_AnyFloat]]
    """Those of the example's sound rollouts, by whose deviation an advantage may be divided; empty
    where one was not scored."""
    teacher_logprobs: NotRequired[Sequence[_AnyFloat]]
    """[L]: the teacher's, of the learned tokens; 0 elsewhere. Missing without a teacher."""


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
    """From 1; in a held-out report the steps before it, or null where the checkpoint is silent."""
    position: _Count
    """In the step, from 0; of a held-out report that of its example."""
    example: _Count
    """The row of the environment's data."""
    reward: float
    """0 where it failed."""
    metrics: Mapping[Text, _AnyFloat]
    """Of the reward functions, by name."""
    reward_errors: Mapping[Text, Text]
    """What others failed of, by name."""
    error: Text | None
    """Why it failed, and nothing is learned of it."""
    is_truncated: bool
    """It was cut by length: an answer of it, or the conversation (`is_overlong`)."""
    is_overlong: NotRequired[bool]
    """It ended because there was no room for its next prompt."""
    task: NotRequired[Text | None]
    """Name of its environment, where it is of a group."""
    num_turns: _Count
    """Calls of the model."""
    num_splits: _Count
    """Calls whose prompt did not go on from the tokens of the one before."""
    num_tokens: NotRequired[_Count]
    """Tokens that were sampled."""
    num_length_limited: NotRequired[_Count]
    """Calls whose answer the engine cut by length."""
    num_tool_calls: NotRequired[_Count | None]
    """Calls of tools; null where the model is offered none."""
    given_up: NotRequired[Sequence[Text]]
    """Plain tools and reward functions whose thread was given up at a limit of time."""
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


_RECORD = TypeAdapter(TrajectoryRecord)


def trajectory_record(step: int | None, rollout: EnvironmentRollout) -> TrajectoryRecord:
    """Make the line of one rollout."""
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
    """Read the lines of one step, of all ranks. Raises as `writer.read_lines` does."""
    return read_lines(path, _RECORD)


def logged_rollout(line: TrajectoryRecord, folder: Path) -> EnvironmentRollout:
    """Make the rollout that a line in `folder` was written of: all of it that is learned.

    Unix times, and ids that name rows in errors, are not in the log.

    Raises:
        ConfigError: an older version wrote the line, or a picture is not there.
    """
    if "num_tokens" not in line:
        raise ConfigError(
            f"run: the log in {folder} was written by a version that did not keep all that is"
            " learned of a rollout (it has no num_tokens); check that version out, or run again"
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
            f"run: {path} is not there; steps with pictures are learned again where the run kept"
            " them (telemetry.rollout_images=true)"
        )
    # Its content is compared with the digest when it is read.
    return ImageRef(path, None, sha256)
