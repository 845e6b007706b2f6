"""Writes each rollout of an evaluation to disk as a JSON line when it is finished.

Scores and datasets are computed from `rollouts.jsonl`. Lines are only appended. If a rollout was
repeated, its last line counts. If the process died while it wrote a line, that line is removed when
the file is opened again.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NotRequired

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from rollout_actors.environments.datasets import plain
from rollout_actors.environments.types import Messages, State
from shared.errors import RecordError, StorageError
from shared.run_files import RunFile, cannot_write

NAME = "rollouts.jsonl"


class KeptState(TypedDict):
    """The fields of a rollout's state that scores and datasets need, as plain JSON values.

    The fields named by `-C` are kept too.
    """

    # `constants`: keeps infinite or NaN metrics, which `plain` would convert to None.
    __pydantic_config__ = ConfigDict(extra="allow", strict=True, ser_json_inf_nan="constants")  # type: ignore[misc]

    id: object
    example_id: object
    prompt: Messages
    completion: Messages | None
    answer: NotRequired[object]
    info: NotRequired[object]
    task: str
    reward: float | None
    metrics: dict[str, float]
    error: str | None
    reward_errors: NotRequired[dict[str, str]]
    """Errors of reward functions, by function name."""
    given_up: NotRequired[list[str]]
    """Names of functions without `async` whose thread was given up after a timeout."""
    stop_condition: str | None
    is_truncated: bool
    timing: dict[str, Any]


class FinishedRollout(BaseModel):
    """A finished rollout: a line of `rollouts.jsonl`.

    Example: example 3, rollout 1, state {"reward": 0.5, "metrics": {"exact": 0.5}, ...}.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, ser_json_inf_nan="constants"
    )

    example: NonNegativeInt
    """Index of the row in the evaluated dataset."""
    rollout: NonNegativeInt
    """Index of the rollout among the rollouts of the example."""
    row: str
    """`digest` of the row's input, to detect a changed dataset in a resumed evaluation."""
    state: KeptState
    prompt_tokens: int | None
    """Tokens read in all model calls; None if the endpoint does not count them."""
    completion_tokens: int | None
    """Tokens sampled in all model calls."""

    @classmethod
    def from_state(
        cls, state: State, *, example: int, rollout: int, row: str, state_columns: Sequence[str]
    ) -> FinishedRollout:
        # The column `timing.total_ms` lies inside a field, but a field name may also contain a dot.
        fields = {name for path in state_columns for name in (path, path.partition(".")[0])}
        kept = {name: plain(state[name]) for name in KeptState.__annotations__ if name in state}
        kept |= {name: plain(state[name]) for name in fields if name in state}
        kept["metrics"] = {name: float(value) for name, value in (state["metrics"] or {}).items()}
        prompt_tokens, completion_tokens = count_tokens(state)
        return cls(
            example=example,
            rollout=rollout,
            row=row,
            state=kept,  # type: ignore[arg-type]  # pydantic checks it
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
        )

    @property
    def key(self) -> tuple[int, int]:
        return self.example, self.rollout

    @property
    def error(self) -> str | None:
        """Return why the rollout failed; None if it did not."""
        return self.state["error"]

    def full_state(self) -> State:
        """Return the rollout's state, with defaults for the fields that were not kept."""
        return State({"is_completed": True, "trajectory": [], "advantage": None, **self.state})


def count_tokens(state: State) -> tuple[int | None, int | None]:
    """Return the numbers of tokens that all model calls of a rollout read and sampled.

    They are None if a call has neither tokens nor a count by the endpoint.
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
    """The `rollouts.jsonl` of an evaluation, locked by this process; a context manager."""

    def __init__(self, folder: Path) -> None:
        """Open the file, and remove an incomplete last line.

        Raises:
            RecordError: another line is damaged.
            StorageError: the file cannot be written, or another process writes it.
        """
        self.path = folder / NAME
        with ExitStack() as stack:
            try:
                lines = RunFile(self.path, mode="ab", remedy=StorageError.ANOTHER_FOLDER)
                stack.enter_context(closing(lines))
                # Held until the file is closed or the process ends.
                fcntl.flock(lines.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                data = self.path.read_bytes()
                num_whole = data.rfind(b"\n") + 1
                os.truncate(self.path, num_whole)
                self.was_torn = num_whole < len(data)
                """Whether an incomplete line was removed."""
                self.rollouts = {rollout.key: rollout for rollout in read_rollouts(self.path)}
            except BlockingIOError:
                raise StorageError(
                    str(self.path),
                    "another process is writing it",
                    remedy="wait for its end, or start a separate evaluation",
                ) from None
            except OSError as error:
                raise cannot_write(self.path, error, remedy=StorageError.ANOTHER_FOLDER) from error
            stack.pop_all()  # keeps the file open
        self._lines = lines

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._lines.close()

    def append(self, rollout: FinishedRollout) -> None:
        """Write a rollout to disk at once. Raises StorageError."""
        self._lines.write(rollout.model_dump_json() + "\n")
        self.rollouts[rollout.key] = rollout


def read_rollouts(path: Path) -> list[FinishedRollout]:
    """Return all rollouts of a `rollouts.jsonl`. Raises RecordError at the first damaged line."""
    rollouts: list[FinishedRollout] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            rollouts.append(FinishedRollout.model_validate_json(line))
        except ValidationError as error:
            remedy = "delete this line, and resume to repeat its rollout"
            raise first_problem(error, path, "line", remedy, line=number) from error
    return rollouts


def first_problem(
    error: ValidationError, path: Path, whole: str, remedy: str, *, line: int | None = None
) -> RecordError:
    """Return pydantic's first error as RecordError.

    `whole` takes the place of the field's name in an error about no single field.
    """
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"])) or whole
    return RecordError(first["msg"], field=field, remedy=remedy, file=str(path), line=line)
