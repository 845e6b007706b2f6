"""The rollouts of an evaluation on disk: a line of JSON for each as soon as it is done, so that
whatever ends the evaluation, they are kept.

`rollouts.jsonl` only grows. Where a rollout was made again, its last line holds. A line that was
being written when the process died is removed when the file is opened the next time.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import IO, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollout_actors.environments.datasets import field_of, plain
from rollout_actors.environments.types import State
from shared.errors import RecordError, StorageError
from shared.run_files import RunFile

NAME = "rollouts.jsonl"
REMEDY = "delete this line, and its rollout is made again"


class FinishedRollout(BaseModel):
    """A line of the file."""

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
    """What reward functions failed of, by their names."""
    given_up: list[str] = []
    """The plain functions whose thread was given up, by their names."""
    stop_condition: str | None
    is_truncated: bool
    timing: dict[str, Any]
    prompt_tokens: int | None
    """All that the model read, and said, in its calls; None where the endpoint does not count."""
    completion_tokens: int | None
    columns: dict[str, Any]
    """The state's fields that were asked for, by their paths, as far as the state had them."""

    @classmethod
    def of(
        cls, state: State, *, example: int, rollout: int, row: str, state_columns: Sequence[str]
    ) -> FinishedRollout:
        columns = {}
        for path in state_columns:
            try:
                columns[path] = plain(field_of(state, path))
            except KeyError:
                continue  # the dataset says so if no rollout has it
        prompt_tokens, completion_tokens = tokens_of(state)
        return cls(
            example=example,
            rollout=rollout,
            example_id=plain(state["example_id"]),
            id=plain(state.get("id")),
            row=row,
            prompt=plain(state["prompt"]),
            completion=plain(state["completion"]),
            answer=plain(state.get("answer")),
            info=plain(state.get("info")),
            task=str(state["task"]),
            reward=None if state["reward"] is None else float(state["reward"]),
            metrics={name: float(value) for name, value in (state["metrics"] or {}).items()},
            error=plain(state["error"]),
            reward_errors=plain(state.get("reward_errors", {})),
            given_up=list(state.get("given_up", ())),
            stop_condition=state["stop_condition"],
            is_truncated=bool(state["is_truncated"]),
            timing=plain(state["timing"]),
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            columns=columns,
        )

    @property
    def place(self) -> tuple[int, int]:
        return self.example, self.rollout

    def state(self) -> State:
        """As much of the state as was kept: what scores and datasets are made of."""
        given = {
            "prompt": self.prompt,
            "example_id": self.example_id,
            "task": self.task,
            "answer": self.answer,
            "info": self.info,
        }
        state = State(
            input={key: value for key, value in given.items() if value is not None},
            id=self.example_id if self.id is None else self.id,
            is_completed=True,
            is_truncated=self.is_truncated,
            stop_condition=self.stop_condition,
            trajectory=[],
            completion=self.completion,
            reward=self.reward,
            advantage=None,
            metrics=dict(self.metrics),
            error=self.error,
            timing=dict(self.timing),
        )
        if self.reward_errors:
            state["reward_errors"] = dict(self.reward_errors)
        if self.given_up:
            state["given_up"] = list(self.given_up)
        state.update({path: value for path, value in self.columns.items() if path not in state})
        state["trajectory"] = self.columns.get("trajectory", [])
        return state


def tokens_of(state: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Those that all calls of a rollout read and sampled: by the steps' tokens, or else by what the
    endpoint counted. None where a step has neither.
    """
    read, sampled = 0, 0
    for step in state["trajectory"]:
        usage = getattr(step["response"], "usage", None)
        if step["tokens"] is not None:
            read, sampled = (
                read + len(step["tokens"]["prompt_ids"]),
                sampled + len(step["tokens"]["completion_ids"]),
            )
        elif usage is not None:
            read, sampled = read + usage.prompt_tokens, sampled + usage.completion_tokens
        else:
            return None, None
    return read, sampled


class ResultsFile:
    """`rollouts.jsonl` in an evaluation's folder, of this process alone. To be used in a `with`."""

    def __init__(self, folder: Path) -> None:
        """The folder is made, and a last line that was cut off is removed. Raises RecordError where
        another line is broken, StorageError where the file cannot be written or another process
        writes it."""
        self.path = folder / NAME
        with ExitStack() as stack:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lines = stack.enter_context(
                    closing(RunFile(self.path, mode="ab", error_of=_cannot))
                )
                _lock(lines.file, self.path)
                self.was_torn = _mend(self.path)
                """Whether a line was removed."""
                self.rollouts = {one.place: one for one in read_rollouts(self.path)}
            except OSError as error:
                raise _cannot(self.path, error) from error
            stack.pop_all()  # it stays open
        self._lines = lines

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._lines.close()

    def append(self, one: FinishedRollout) -> None:
        """When this returns, the rollout stays done, whatever becomes of the process. StorageError
        where it cannot be written.
        """
        self._lines.write(one.model_dump_json() + "\n")
        self.rollouts[one.place] = one


def read_rollouts(path: Path) -> list[FinishedRollout]:
    """Every line. RecordError with file, line and remedy for one that is not a finished rollout."""
    found: list[FinishedRollout] = []
    broken: list[tuple[int, ValidationError]] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1) if path.exists() else ():
        if not line.strip():
            continue
        try:
            found.append(FinishedRollout.model_validate_json(line))
        except ValidationError as error:
            broken.append((number, error))
    if broken:
        number, refused = broken[0]
        first = refused.errors(include_url=False)[0]
        field, problem = (
            ".".join(map(str, first["loc"])) or "line",
            _lowered(first["msg"]).replace("at line 1 column", "at column"),
        )
        remedy = REMEDY
        if len(broken) > 1 and not found:
            remedy = (
                "none of its lines is a rollout of an evaluation; put the file back that belongs"
                " there, or start a new evaluation"
            )
        elif len(broken) > 1:
            remedy = (
                f"delete this line and the others that are broken ({len(broken)} in all), and their"
                " rollouts are made again"
            )
        raise RecordError(
            problem, field=field, remedy=remedy, file=str(path), line=number
        ) from refused
    return found


def _mend(path: Path) -> bool:
    """Every line of ours ends with a newline: what does not was being written. Kept where nothing
    but the newline is missing.
    """
    if not path.exists():
        return False
    data = path.read_bytes()
    _, _, rest = data.rpartition(b"\n")
    if not rest:
        return False
    try:
        FinishedRollout.model_validate_json(rest)
    except ValidationError:
        os.truncate(path, len(data) - len(rest))
        return True
    with path.open("ab") as file:
        file.write(b"\n")
    return False


def _lock(file: IO[bytes], path: Path) -> None:
    """Until it is closed, or the process ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StorageError(
            str(path),
            "another process is writing it",
            remedy="wait for its end, or start an evaluation of its own",
        ) from None


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]


def _cannot(path: Path, error: OSError) -> StorageError:
    return StorageError(
        str(path),
        error.strerror or str(error),
        remedy="free space or permit writing there, or choose another folder",
    )
