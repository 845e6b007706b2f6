"""From rows of a dataset to what rollouts begin with."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from numbers import Integral, Real
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Protocol, overload

from rollout_actors.environments.chat.messages import (
    cleanup_messages,
    cleanup_tools,
    concat_messages,
    copied,
    deeply_copied,
    require_roles,
    sanitize_messages,
)
from rollout_actors.environments.types import Messages, RolloutInput, State
from shared.errors import StorageError


class Rows(Protocol):
    """A Hugging Face `Dataset`, or any sequence of mappings."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """How a row's question becomes a prompt."""

    message_type: str = "chat"
    system_prompt: str | None = None
    few_shot: tuple[Mapping[str, Any], ...] = ()
    task: str = "default"
    """Of rows without one."""

    def prompt(self, row: Mapping[str, Any]) -> Messages:
        """Of its `prompt`, or of its `question`, with the system prompt and the examples in front,
        where it has no system message of its own.
        """
        given = row["question"] if row.get("prompt") is None else row["prompt"]
        if self.message_type == "completion":
            if not isinstance(given, str):
                raise ValueError(
                    "prompt: must be text where message_type is completion, got"
                    f" {type(given).__name__}"
                )
            return given
        own: Messages = (
            [{"role": "user", "content": given}]
            if isinstance(given, str)
            else cleanup_messages(list(given))
        )
        if own and own[0]["role"] == "system":  # type: ignore[index]
            return own
        system: Messages = (
            []
            if self.system_prompt is None
            else [{"role": "system", "content": self.system_prompt}]
        )
        return concat_messages([system, [dict(message) for message in self.few_shot], own])

    def input(self, row: Mapping[str, Any], index: int) -> RolloutInput:
        """`index` is the id of a row that has none. What the row holds is copied: a rollout changes
        nothing of the caller's. Its `info` is as it is, but for the nulls that a table filled into
        `oai_tools` (see `cleanup_tools`)."""
        if row.get("prompt") is None and row.get("question") is None:
            raise ValueError(
                f"row {index} has neither prompt nor question, only"
                f" {', '.join(sorted(row)) or 'nothing'}; give it one of the two"
            )
        if (
            self.message_type == "chat"
            and row.get("prompt") is not None
            and not isinstance(row["prompt"], str)
        ):
            require_roles(row["prompt"], f"row {index}: prompt")
        for column in ("example_id", "id"):
            # As tables fill a gap. It is not even equal to itself.
            if isinstance(row.get(column), Real) and row[column] != row[column]:
                raise ValueError(
                    f"{column}: of row {index} is NaN; give every row one, or leave the column out"
                )
        example_id = next(
            (row[key] for key in ("example_id", "id") if row.get(key) is not None), index
        )
        made: RolloutInput = {
            "prompt": copied(self.prompt(row)),
            "example_id": example_id,
            "task": row.get("task") or self.task,
        }
        if row.get("id") is not None:
            made["id"] = row["id"]
        for key in ("answer", "info", "position"):
            if row.get(key) is not None:
                made[key] = deeply_copied(row[key])
        info: Any = made.get("info")
        if isinstance(info, dict) and isinstance(info.get("oai_tools"), list):
            info["oai_tools"] = cleanup_tools(info["oai_tools"])
        return made


class Examples(Sequence[RolloutInput]):
    """Rows of a dataset as inputs of rollouts, each made when it is asked for."""

    def __init__(self, rows: Rows, form: PromptFormat, order: Sequence[int] | None = None) -> None:
        """`order` are the rows' numbers, in the order in which they are had; None: all of them."""
        self._rows, self._form = rows, form
        self._order: Sequence[int] = range(len(rows)) if order is None else order

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> RolloutInput: ...
    @overload
    def __getitem__(self, index: slice) -> Examples: ...
    def __getitem__(self, index: int | slice) -> RolloutInput | Examples:
        if isinstance(index, slice):
            return Examples(self._rows, self._form, self._order[index])
        number = self._order[index]
        return self._form.input(self._rows[number], number)

    def __iter__(self) -> Iterator[RolloutInput]:
        return (self[index] for index in range(len(self)))

    def names_group(self, index: int) -> bool:
        """Return whether the row at this place says by an `example_id` with which others its
        rollouts are compared.

        One that is its `id` says no more than that.
        """
        row = self._rows[self._order[index]]
        return row.get("example_id") is not None and repr(row["example_id"]) != repr(row.get("id"))

    def select(self, order: Sequence[int]) -> Examples:
        """Those at these places."""
        return Examples(self._rows, self._form, [self._order[place] for place in order])


def placed(examples: Iterable[RolloutInput]) -> list[RolloutInput]:
    """The inputs of one call, each with a `position`: the row's, or else its place among them. So
    seeds do not depend on the order in which rollouts begin.
    """
    return [{"position": place, **one} for place, one in enumerate(examples)]


def require_own_positions(inputs: Sequence[RolloutInput]) -> None:
    """Of a client whose seeds follow from them. ValueError for what is no place, and for one that
    two rollouts have, which would sample the same.
    """
    remedy = "give every row a place of its own in the step, or leave the column out"
    taken: dict[int, int] = {}
    for number, one in enumerate(inputs):
        position: Any = one["position"]
        if isinstance(position, bool) or not isinstance(position, Integral) or position < 0:
            raise ValueError(
                f"position: of input {number} must be a whole number from 0, got {position!r};"
                f" {remedy}"
            )
        first = taken.setdefault(int(position), number)
        if first != number:
            raise ValueError(
                f"position: inputs {first} and {number} both have {position}, and their seeds would"
                f" be the same; {remedy}"
            )


def require_one_row_per_id(examples: Examples, inputs: Sequence[RolloutInput]) -> None:
    """Refuse different rows of one name: their rollouts would be compared with each other.

    The same row may be there several times, as often as it is rolled out. Rows that were given one
    `example_id` as such are one group because somebody has said so.

    Args:
        inputs: those of `examples`, in order.

    Raises:
        ValueError: two inputs of a task have one `example_id`, at least one of them by its `id` or
            by its number in the data, and other prompts, answers or infos.
    """
    taken: dict[str, int] = {}
    digests: dict[int, str] = {}
    for number, one in enumerate(inputs):
        first = taken.setdefault(repr((one["task"], one["example_id"])), number)
        if first == number:
            continue
        if first not in digests:
            digests[first] = _digest(inputs[first])
        if _digest(one) == digests[first]:
            continue
        implicit = [place for place in (first, number) if not examples.names_group(place)]
        if implicit:
            unnamed = [place for place in implicit if inputs[place].get("id") is None]
            raise ValueError(
                f"id: inputs {first} and {number} both have {one['example_id']!r}"
                + "".join(
                    f" (input {place} by its number in the data, for it has none)"
                    for place in unnamed
                )
                + " and are different rows, whose rollouts would be compared as those of one; "
                "give every row an id of its own, or leave the column out"
            )


def _digest(one: RolloutInput) -> str:
    """Return the same for the same row, which may hold arrays: those have no truth value."""
    return digest({key: one.get(key) for key in ("prompt", "answer", "info")})


def rows_of(inputs: Any) -> Rows:
    """What a caller means by inputs: a dataset, rows (also of a generator), one row, or a mapping
    of columns. TypeError for what is none of them.
    """
    if not isinstance(inputs, Mapping):
        if isinstance(inputs, str) or not isinstance(inputs, Iterable):
            raise TypeError(
                "inputs: must be a dataset, rows, one row, or a mapping of columns, got"
                f" {type(inputs).__name__}"
            )
        rows: Any = inputs
        return rows if hasattr(rows, "__len__") and hasattr(rows, "__getitem__") else list(rows)
    columns = {key: value for key, value in inputs.items() if value is not None}
    if "prompt" not in columns and "question" not in columns:
        raise ValueError(
            "inputs: neither prompt nor question, only"
            f" {', '.join(sorted(map(str, columns))) or 'nothing'}; give one of the two"
        )
    prompts = columns.get("prompt", columns.get("question"))
    is_one_row = isinstance(prompts, str) or (
        isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], Mapping)
    )
    if is_one_row:
        return [inputs]
    for key, value in columns.items():
        # (The array of one number has no length.)
        if (
            isinstance(value, str | bytes | Mapping | Set)
            or not isinstance(value, Collection)
            or getattr(value, "shape", None) == ()
        ):
            raise TypeError(
                f"inputs: {key} must be a list with one for each row, got {type(value).__name__},"
                " since the prompts are a column"
            )
    sizes = {key: len(value) for key, value in columns.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            "inputs: the columns have different lengths:"
            f" {', '.join(f'{key} {size}' for key, size in sizes.items())}"
        )
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


# The one way from results to a dataset: for `Environment.make_dataset`, for files, and for the hub
# (spec: orchestration, dataset construction).


def build_dataset_from_outputs(
    results: GenerateOutputs,
    *,
    include_ids: bool = True,
    state_columns: Sequence[str] | None = None,
) -> Any:
    """A Hugging Face `Dataset` with a row for each rollout, in the order of the results.

    Columns: `id` (the states', where any has one) and `example_id` (the input's), `prompt` and
    `completion` (as `sanitize_messages` has them), `answer` and `info` where there are any, `task`,
    `reward`, one for each metric, and one for each of `state_columns`: fields of the state,
    `timing.total_ms` for one inside another. A row reads as it was: what differs in type or keys
    from row to row (`info` of several environments, contents of text beside contents of parts) is a
    column of JSON. KeyError for a state column that no state has, TypeError where they are one
    text.
    """
    from datasets import Dataset  # imports pyarrow and pandas

    return Dataset.from_list(
        rows_of_outputs(results, include_ids=include_ids, state_columns=state_columns),
        on_mixed_types="use_json",
    )


def rows_of_outputs(
    results: GenerateOutputs,
    *,
    include_ids: bool = True,
    state_columns: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """The same as mappings."""
    columns: dict[str, Sequence[Any]] = {}
    if include_ids:
        if any("id" in state for state in results.state):
            columns["id"] = [state.get("id") for state in results.state]
        columns["example_id"] = results.example_id
    columns["prompt"] = [sanitize_messages(prompt) for prompt in results.prompt]
    columns["completion"] = [
        sanitize_messages(_said(completion, prompt))
        for prompt, completion in zip(results.prompt, results.completion, strict=True)
    ]
    if any(answer != "" for answer in results.answer):
        columns["answer"] = results.answer
    columns["task"] = results.task
    if any(results.info):
        columns["info"] = results.info
    columns["reward"] = results.reward
    # A metric may have the name of one of the columns above, or of a column of the state.
    columns |= {
        name if name not in columns else f"metric_{name}": values
        for name, values in results.metrics.items()
    }
    for path in column_names(state_columns):
        if path not in columns:
            columns[path] = _column(results.state, path)
    return [
        {name: plain(value) for name, value in zip(columns, row, strict=True)}
        for row in zip(*columns.values(), strict=True)
    ]


def column_names(state_columns: Sequence[str] | None) -> list[str]:
    """None: none. TypeError for one text, whose letters are a sequence of texts too."""
    if isinstance(state_columns, str):
        raise TypeError(
            f"state_columns: must be a list of names, got the text {state_columns!r}; give"
            f" {[state_columns]}"
        )
    return list(state_columns or ())


def field_of(state: Mapping[str, Any], path: str) -> Any:
    """A field of the state, or of a mapping in it: `timing.total_ms`; a key that has a dot itself
    goes first. KeyError with what there is.
    """
    value: Any = state
    keys = path.split(".")
    for depth, key in enumerate(keys):
        rest = ".".join(keys[depth:])
        if isinstance(value, Mapping) and rest in value:
            return value[rest]
        if not isinstance(value, Mapping) or key not in value:
            above = ".".join(keys[:depth]) or "the state"
            there = (
                ", ".join(map(str, value)) or "nothing"
                if isinstance(value, Mapping)
                else f"a {type(value).__name__}"
            )
            raise KeyError(f"state column {path!r}: {above} has no {key!r}, only {there}")
        value = value[key]
    return value


def present(path: str, states: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a state has this field."""
    for state in states:
        try:
            field_of(state, path)
        except KeyError:
            continue
        return True
    return False


def plain(value: Any) -> Any:
    """What JSON and tables can hold: mappings, lists, text, numbers and None as they are, models of
    pydantic and dataclasses as mappings, sets and tuples as lists, anything else (paths, dates,
    objects of users) as its text."""
    if isinstance(value, str):
        # Half a surrogate pair, as a model may write one, is in no UTF-8.
        return value.encode(errors="replace").decode()
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | Set) and not isinstance(value, bytes | bytearray):
        return [plain(item) for item in value]
    if hasattr(value, "model_dump"):
        return plain(value.model_dump(exclude_none=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if hasattr(value, "tolist"):  # arrays and their numbers
        return plain(value.tolist())
    return str(value)


def push_dataset(dataset: Any, name: str) -> None:
    """To the Hugging Face hub, under this name, with the token that its own tools have stored.
    StorageError where the hub does not take it.
    """
    import httpx2  # which the hub's client speaks HTTP with

    try:
        dataset.push_to_hub(name)
    # of the way there, of the hub's answer, of a name that it does not allow
    except (OSError, httpx2.HTTPError, ValueError) as error:
        remedy = (
            "`hf auth login` stores a token; HF_HUB_OFFLINE must not be set; a name is OWNER/NAME,"
            " or NAME for the token's own"
        )
        raise StorageError(
            f"dataset {name}", f"{type(error).__name__}: {error}", action="push", remedy=remedy
        ) from error


def _said(completion: Any, prompt: Any) -> Any:
    """A rollout that failed before the model said anything has no completion: of the prompt's own
    form, so that the column is of one type.
    """
    if completion is not None:
        return completion
    return "" if isinstance(prompt, str) else []


def _column(states: Sequence[State], path: str) -> list[Any]:
    """None for states that do not have the field: one that failed may have ended before it was
    written.
    """
    values: list[Any] = []
    missing: list[KeyError] = []
    for state in states:
        try:
            values.append(field_of(state, path))
        except KeyError as error:
            values.append(None)
            missing.append(error)
    if missing and len(missing) == len(states):
        raise missing[0]
    return values


def digest(given: Mapping[str, Any]) -> str:
    """The same for the same row, in every process."""
    text = json.dumps(plain(given), sort_keys=True)
    # An object that has no form of its own in JSON is written with its address.
    return hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", text).encode()).hexdigest()[:16]


# The results of many rollouts, by column, in the order of the inputs.


RESULTS, METADATA = "results.jsonl", "metadata.json"
"""What `GenerateOutputs.save` writes into its folder."""
COLUMNS = ("prompt", "completion", "answer", "state", "info", "task", "example_id", "reward")


@dataclass(slots=True)
class GenerateMetadata:
    """Of all the rollouts together."""

    env_id: str
    env_args: dict[str, Any]
    model: str
    sampling_args: dict[str, Any]
    num_examples: int
    rollouts_per_example: int
    num_errors: int
    """Rollouts that failed; `state["error"]` says of what."""
    num_truncated: int
    avg_reward: float
    """Mean over the rollouts that did not fail; NaN where there is none, or nothing was scored."""
    avg_metrics: dict[str, float]
    """Means over the rollouts that have the metric."""
    time_ms: float
    """Wall time."""
    date: str
    """ISO 8601, at the start."""
    state_columns: list[str] = field(default_factory=list)
    path_to_save: Path | None = None
    num_reward_errors: dict[str, int] = field(default_factory=dict)
    """Rollouts for which a reward function failed, by its name; `state["reward_errors"]` says why.
    """
    num_given_up: dict[str, int] = field(default_factory=dict)
    """Plain functions that were given up while they ran, by name: their rollouts had reached a
    limit of time; `state["given_up"]`.
    """

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class GenerateOutputs(dict[str, Any]):
    """By key and by attribute: `prompt`, `completion`, `answer`, `state`, `info`, `task`,
    `example_id`, `reward`, each a list with an item per rollout; `metrics`, such a list for every
    metric, with None for rollouts that do not have it; `metadata`."""

    metadata: GenerateMetadata

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"results have no {name!r}, only {', '.join(self)}") from None

    def __repr__(self) -> str:
        # Short: asyncio writes out the result of the task that it has just run, only to find that
        # it is no signal.
        return (
            f"GenerateOutputs({len(self['state'])} rollouts, avg_reward"
            f" {self['metadata'].avg_reward:.3f})"
        )

    @classmethod
    def of(cls, states: Sequence[State], metadata: GenerateMetadata) -> GenerateOutputs:
        made = cls()
        for column in COLUMNS:
            made[column] = (
                list(states) if column == "state" else [state.get(column) for state in states]
            )
        # 0 is an answer.
        made["answer"] = ["" if answer is None else answer for answer in made["answer"]]
        made["info"] = [info or {} for info in made["info"]]
        names = dict.fromkeys(name for state in states for name in state["metrics"] or {})
        made["metrics"] = {
            name: [(state["metrics"] or {}).get(name) for state in states] for name in names
        }
        made["metadata"] = metadata
        return made

    def save(self, folder: Path, dataset: Any) -> None:
        """`results.jsonl`, the dataset's rows, and `metadata.json`, in a folder that is made for
        it. StorageError where it cannot be written.
        """
        self.metadata.path_to_save = folder = made_folder(folder)
        # JSON knows no NaN, which is the mean of nothing.
        metadata = {
            key: None if isinstance(value, float) and math.isnan(value) else value
            for key, value in asdict(self.metadata).items()
        }
        try:
            with (folder / RESULTS).open("w", encoding="utf-8") as file:
                for row in dataset:
                    file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
            (folder / METADATA).write_text(
                json.dumps(metadata, indent=1, ensure_ascii=False, default=str) + "\n",
                encoding="utf-8",
            )
        except OSError as error:
            raise _cannot(folder, error) from error


def made_folder(folder: Path | str) -> Path:
    """It is there, and a file can be made in it; or else StorageError."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise _cannot(folder, error) from error


def _cannot(folder: Path, error: OSError) -> StorageError:
    return StorageError(
        str(folder),
        error.strerror or str(error),
        remedy="free space or permit writing there, or choose another folder",
    )


def mean(values: Sequence[float]) -> float:
    """NaN of none."""
    return math.fsum(values) / len(values) if values else math.nan
