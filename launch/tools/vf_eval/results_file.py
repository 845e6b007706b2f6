"""The rollouts of an evaluation on disk: a line of JSON for each as soon as it is done.

`rollouts.jsonl` only grows. Where a rollout was made again, its last line holds. A line that was
being written when the process died is removed when the file is opened the next time.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollout_actors.environments.datasets import field_of, plain
from rollout_actors.environments.types import State
from shared.data.limits import MAX_EXAMPLE_BYTES, file_lines
from shared.errors import RecordError, StorageError
from shared.run_files import RunFile, cannot_write

NAME = "rollouts.jsonl"
_INPUT_FIELDS = ("prompt", "example_id", "answer", "info")
_OUTPUT_FIELDS = ("completion", "error", "stop_condition", "timing")
"""Fields of a state, of its input and of the rest, that are kept as `plain` makes them."""


class FinishedRollout(BaseModel):
    """A line of the file.

    Example: example 3, rollout 1, reward 0.5, metrics {"exact": 0.5}, error None.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, ser_json_inf_nan="constants"
    )

    example: Annotated[int, Field(ge=0)]
    """The number of its row in the evaluated dataset."""
    rollout: Annotated[int, Field(ge=0)]
    """Its number among those of the example."""
    example_id: Any
    id: Any = None
    """The state's own; None: it has none."""
    row: str
    """`digest` of the input: the dataset may have changed before an evaluation goes on."""
    prompt: list[dict[str, Any]] | str
    completion: list[dict[str, Any]] | str | None
    answer: Any = None
    info: Any = None
    task: str
    reward: float | None
    metrics: dict[str, float]
    error: str | None
    reward_errors: dict[str, str] = {}
    """Errors of reward functions, by their names."""
    given_up: list[str] = []
    """Names of the plain functions whose thread was given up."""
    stop_condition: str | None
    is_truncated: bool
    timing: dict[str, Any]
    prompt_tokens: int | None
    """Tokens that the model read in all calls; None where the endpoint does not count."""
    completion_tokens: int | None
    """Tokens that it sampled."""
    columns: dict[str, Any]
    """The fields of the state that were asked for, by their paths, as far as it had them."""

    @classmethod
    def from_state(
        cls, state: State, *, example: int, rollout: int, row: str, state_columns: Sequence[str]
    ) -> FinishedRollout:
        columns = {}
        for path in state_columns:
            try:
                columns[path] = plain(field_of(state, path))
            except KeyError:
                continue  # the dataset says so if no rollout has it
        prompt_tokens, completion_tokens = count_tokens(state)
        return cls(
            **{name: plain(state.get(name)) for name in ("id", *_INPUT_FIELDS, *_OUTPUT_FIELDS)},
            example=example,
            rollout=rollout,
            row=row,
            task=str(state["task"]),
            reward=None if state["reward"] is None else float(state["reward"]),
            metrics={name: float(value) for name, value in (state["metrics"] or {}).items()},
            reward_errors=plain(state.get("reward_errors", {})),
            given_up=list(state.get("given_up", ())),
            is_truncated=bool(state["is_truncated"]),
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            columns=columns,
        )

    @property
    def key(self) -> tuple[int, int]:
        return self.example, self.rollout

    def state(self) -> State:
        """Return as much of the state as was kept: enough for scores and datasets."""
        row = self.model_dump(include={"task", *_INPUT_FIELDS})
        state = State(
            input={key: value for key, value in row.items() if value is not None},
            id=self.example_id if self.id is None else self.id,
            is_completed=True,
            trajectory=[],
            advantage=None,
            **self.model_dump(include={"is_truncated", "metrics", "reward", *_OUTPUT_FIELDS}),
        )
        if self.reward_errors:
            state["reward_errors"] = dict(self.reward_errors)
        if self.given_up:
            state["given_up"] = list(self.given_up)
        state.update({path: value for path, value in self.columns.items() if path not in state})
        state["trajectory"] = self.columns.get("trajectory", [])
        return state


def count_tokens(state: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Count the tokens that all calls of a rollout read, and that they sampled.

    None where a step has neither tokens nor the endpoint's count.
    """
    num_read = 0
    num_sampled = 0
    for step in state["trajectory"]:
        tokens = step["tokens"]
        usage = getattr(step["response"], "usage", None)
        if tokens is not None:
            num_read += len(tokens["prompt_ids"])
            num_sampled += len(tokens["completion_ids"])
        elif usage is not None:
            num_read += usage.prompt_tokens
            num_sampled += usage.completion_tokens
        else:
            return None, None
    return num_read, num_sampled


class ResultsFile:
    """`rollouts.jsonl` in an evaluation's folder, of this process alone; a context manager."""

    def __init__(self, folder: Path) -> None:
        """Make the folder, open the file, and remove a last line that was cut off.

        Raises:
            RecordError: another line is broken.
            StorageError: the file cannot be written, or another process writes it.
        """
        self.path = folder / NAME
        with ExitStack() as stack:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lines = RunFile(self.path, mode="ab", remedy=StorageError.ANOTHER_FOLDER)
                stack.enter_context(closing(lines))
                # Held until the file is closed, or the process ends.
                fcntl.flock(lines.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.was_torn = _cut_half_line(self.path)
                """Whether a line was removed."""
                self.rollouts = {rollout.key: rollout for rollout in read_rollouts(self.path)}
            except BlockingIOError:
                raise StorageError(
                    str(self.path),
                    "another process is writing it",
                    remedy="wait for its end, or start an evaluation of its own",
                ) from None
            except OSError as error:
                raise cannot_write(self.path, error, remedy=StorageError.ANOTHER_FOLDER) from error
            stack.pop_all()  # it stays open
        self._lines = lines

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._lines.close()

    def append(self, rollout: FinishedRollout) -> None:
        """Write a rollout, whatever becomes of the process then. Raises StorageError."""
        self._lines.write(rollout.model_dump_json() + "\n")
        self.rollouts[rollout.key] = rollout


def read_rollouts(path: Path) -> list[FinishedRollout]:
    """Read every line. Raises RecordError at the first that is not a finished rollout."""
    rollouts: list[FinishedRollout] = []
    limit = MAX_EXAMPLE_BYTES
    for line in file_lines(path, "MAX_EXAMPLE_BYTES", limit) if path.exists() else ():
        try:
            line.require_short()
            rollouts.append(FinishedRollout.model_validate_json(line.content))
        except RecordError as error:
            raise error.at(str(path), line.number) from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            problem = first["msg"].replace("at line 1 column", "at column")
            raise RecordError(
                problem[:1].lower() + problem[1:],
                field=".".join(map(str, first["loc"])) or "line",
                remedy="delete this line, and its rollout is made again",
                file=str(path),
                line=line.number,
            ) from error
    return rollouts


def _cut_half_line(path: Path) -> bool:
    """Remove a last line without an end, as `read_lines` of a run does; return whether one was."""
    data = path.read_bytes()
    num_whole = data.rfind(b"\n") + 1
    os.truncate(path, num_whole)
    return num_whole < len(data)
