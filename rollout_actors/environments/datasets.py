"""Conversion of dataset rows to rollout inputs, and of results to columns, files and datasets
(spec: orchestration, dataset construction).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from functools import cache
from numbers import Integral, Real
from operator import is_not
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Protocol, overload

from rollout_actors.environments.chat.messages import (
    cleanup_messages,
    cleanup_tools,
    concat_messages,
    copied,
    require_roles,
    sanitize_messages,
)
from rollout_actors.environments.types import Arguments, Fields, Messages, RolloutInput, State
from shared.config.secrets import masked
from shared.errors import StorageError
from shared.run_files import cannot_write

if TYPE_CHECKING:
    from datasets import Dataset

_LOGGER = logging.getLogger(__name__)

RESULTS = "results.jsonl"
METADATA = "metadata.json"
"""Names of the files (`RESULTS`, `METADATA`) that `GenerateOutputs.save` writes."""
COLUMNS = ("prompt", "completion", "answer", "state", "info", "task", "example_id", "reward")

# Rows to inputs

_READ = frozenset({"prompt", "question", "answer", "info", "task", "id", "example_id", "position"})
"""Columns of a dataset that are read."""


class Rows(Protocol):
    """Rows of a dataset: a Hugging Face `Dataset`, a pandas `DataFrame`, or any sequence of
    mappings.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """Conversion of a dataset row into the input of a rollout, with a prompt for the model.

    Example: with the system prompt "Be brief." the row `{"question": "2 + 2?", "answer": "4"}`
    becomes an input whose prompt is a system message and a user message.
    """

    message_type: str = "chat"
    system_prompt: str | None = None
    few_shot: tuple[Fields, ...] = ()
    task: str = "default"
    """Value of `task` for rows that have none."""

    def prompt(self, row: Fields) -> Messages:
        """Return the prompt of a dataset row: its `prompt`, or its `question` if `prompt` is empty.

        The system prompt and the few-shot messages are put before the row's messages, unless the
        row begins with a system message.
        """
        prompt = row[_prompt_column(row)]
        if self.message_type == "completion":
            if not isinstance(prompt, str):
                kind = type(prompt).__name__
                raise ValueError(f"prompt: must be text if message_type is completion, got {kind}")
            return prompt
        if isinstance(prompt, str):
            messages: Messages = [{"role": "user", "content": prompt}]
        else:
            messages = cleanup_messages(list(prompt))
        if messages and messages[0]["role"] == "system":  # type: ignore[index]
            return messages
        system: Messages = []
        if self.system_prompt is not None:
            system = [{"role": "system", "content": self.system_prompt}]
        return concat_messages([system, [dict(message) for message in self.few_shot], messages])

    def input(self, row: Fields, index: int) -> RolloutInput:
        """Make the input of a rollout from a dataset row; `index` is the id of a row without an id.

        The row's values are copied, so that a rollout cannot change the caller's data. `info` is
        unchanged, except for nulls that a table filled into `oai_tools` (see `cleanup_tools`).

        Columns that are not read are named in a warning.

        Raises ValueError if the row is no mapping or has no prompt, a message has no known role, or
        an id is NaN.
        """
        if not isinstance(row, Mapping):
            raise ValueError(
                f"row {index} is {type(row).__name__}; write rows like"
                ' {"question": "...", "answer": "..."}'
            )
        if unused := row.keys() - _READ:
            _warn_of_unused(tuple(sorted(map(str, unused))))
        if row.get("prompt") is None and row.get("question") is None:
            known = ", ".join(sorted(row)) or "nothing"
            raise ValueError(
                f"row {index} has neither prompt nor question, only {known}; give it one of the two"
            )
        for column in ("example_id", "id"):
            # Tables fill gaps with NaN, which is not equal to itself.
            if isinstance(row.get(column), Real) and row[column] != row[column]:
                raise ValueError(
                    f"{column}: NaN in row {index}; give every row a value, or leave the column out"
                )
        row = {key: _without_gaps(value) for key, value in row.items()}
        if row.get("prompt") is None and row.get("question") is None:
            raise ValueError(f"row {index}: prompt is NaN; give it a prompt, or leave the row out")
        column = _prompt_column(row)
        if self.message_type == "chat" and not isinstance(row[column], str):
            require_roles(row[column], f"row {index}: {column}")
        # Compared with None, because 0 and an empty text are ids, and 0 is a task.
        ids = [row[key] for key in ("example_id", "id") if row.get(key) is not None]
        task = row.get("task")
        result: RolloutInput = {
            "prompt": copied(self.prompt(row)),
            "example_id": ids[0] if ids else index,
            "task": self.task if task is None or task == "" else str(task),
        }
        if row.get("id") is not None:
            result["id"] = row["id"]
        for key in ("answer", "info", "position"):
            if row.get(key) is not None:
                result[key] = copied(row[key])
        info: object = result.get("info")
        if isinstance(info, dict) and isinstance(info.get("oai_tools"), list):
            info["oai_tools"] = cleanup_tools(info["oai_tools"])
        return result


@cache  # once for a dataset, not for each row
def _warn_of_unused(columns: tuple[str, ...]) -> None:
    _LOGGER.warning(
        "columns %s of the dataset are not used: reward functions get only a row's answer, info"
        " and task; put what they need into info",
        ", ".join(columns),
    )


def _prompt_column(row: Fields) -> str:
    """Return the name of the column with a row's prompt: `prompt`, or `question` if it is empty."""
    prompt = row.get("prompt")
    is_empty = prompt is None or (isinstance(prompt, str | list) and not prompt)
    return "question" if is_empty and row.get("question") is not None else "prompt"


def _without_gaps(value: object) -> object:
    """Replace NaN in a field of a row by None. Tables mark missing values with NaN."""
    if isinstance(value, str):
        return value
    if isinstance(value, (dict, Mapping)):  # a dict is recognised at once
        held = {key: _without_gaps(one) for key, one in value.items()}
        return held if any(held[key] is not value[key] for key in held) else value
    if isinstance(value, list):
        items = [_without_gaps(one) for one in value]
        return items if any(map(is_not, items, value)) else value
    return None if isinstance(value, Real) and value != value else value


class Examples(Sequence[RolloutInput]):
    """A dataset as a sequence of rollout inputs. Each input is made from its row on access."""

    def __init__(self, rows: Rows, form: PromptFormat, order: Sequence[int] | None = None) -> None:
        """`order`: indices of the rows to use, in this order; None: all rows.

        Raises TypeError if `rows` is no dataset.
        """
        is_indexed = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
        if not is_indexed or isinstance(rows, str | bytes | Mapping):
            raise TypeError(
                f"dataset: must be a datasets.Dataset, a DataFrame or a list of rows, got"
                f" {type(rows).__name__}; write list(...) for an iterator, choose a split of a"
                " DatasetDict, and read a file with datasets.load_dataset"
            )
        # The index of a DataFrame selects a column, not a row.
        table: Any = rows
        self._rows: Rows = table.to_dict("records") if hasattr(table, "iterrows") else rows
        self._form = form
        self._order: Sequence[int] = range(len(rows)) if order is None else order

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> RolloutInput: ...
    @overload
    def __getitem__(self, index: slice) -> Examples: ...
    @overload
    def __getitem__(self, index: str) -> list[object]: ...
    def __getitem__(self, index: int | slice | str) -> RolloutInput | Examples | list[object]:
        """Return an example, a slice, or a column by its name. KeyError: no such column."""
        if isinstance(index, str):
            if index not in self.column_names:
                raise KeyError(f"no column {index!r}; there are {', '.join(self.column_names)}")
            return [row.get(index) for row in self]
        if isinstance(index, slice):
            return Examples(self._rows, self._form, self._order[index])
        number = self._order[index]
        return self._form.input(self._rows[number], number)

    def __iter__(self) -> Iterator[RolloutInput]:
        return (self[index] for index in range(len(self)))

    @property
    def column_names(self) -> list[str]:
        """Names of the fields of the first input."""
        return list(self[0]) if self._order else []

    def names_group(self, index: int) -> bool:
        """Return whether a row has an `example_id` that other rows may share on purpose.

        Rollouts of rows with the same `example_id` are compared. An `example_id` that equals the
        row's own `id` does not count.
        """
        row = self._rows[self._order[index]]
        return row.get("example_id") is not None and repr(row["example_id"]) != repr(row.get("id"))

    def formed(self, form: PromptFormat) -> Examples:
        """Return the same dataset with another prompt format."""
        return Examples(self._rows, form, self._order)

    def first(self, n: int) -> Examples:
        """Return the first `n` rows as a dataset, or all if there are fewer."""
        return self[:n]

    def select(self, indices: Sequence[int]) -> Examples:
        """Return the rows at these indices as a dataset, in this order."""
        return Examples(self._rows, self._form, [self._order[index] for index in indices])


def with_positions(examples: Iterable[RolloutInput]) -> list[RolloutInput]:
    """Return the rollout inputs, each with a `position`: its own, or else its index.

    Seeds derive from positions, so they do not depend on the order in which rollouts begin.
    """
    return [{"position": index, **row} for index, row in enumerate(examples)]


def check_positions(inputs: Sequence[RolloutInput]) -> None:
    """Raise ValueError unless the positions of the rollout inputs are distinct whole numbers.

    Seeds derive from positions.
    """
    remedy = "give every row a different position in the step, or leave the column out"
    taken: dict[int, int] = {}
    for index, row in enumerate(inputs):
        position: object = row["position"]
        if isinstance(position, bool) or not isinstance(position, Integral) or position < 0:
            raise ValueError(
                f"position: must be a whole number from 0, got {position!r} in input {index};"
                f" {remedy}"
            )
        first = taken.setdefault(int(position), index)
        if first != index:
            raise ValueError(
                f"position: inputs {first} and {index} both have {position}, so their seeds would"
                f" be the same; {remedy}"
            )


def check_one_row_per_id(examples: Examples, inputs: Sequence[RolloutInput]) -> None:
    """Refuse different dataset rows with the same id, because their rollouts would be compared.

    The same row may occur several times, once for each of its rollouts. Rows with a column
    `example_id` may share its values on purpose.

    `inputs`: the rollout inputs of `examples`, in order.

    Raises ValueError if two inputs of a task have the same `example_id` and different prompts,
    answers or infos, and at least one of them has no `example_id` column of its own: its `id` or
    its row number is used.
    """
    taken: dict[str, int] = {}
    digests: dict[int, str] = {}
    for index, row in enumerate(inputs):
        first = taken.setdefault(repr((row["task"], row["example_id"])), index)
        if first == index:
            continue
        for number in (first, index):
            # Only for rows with equal ids: a digest writes the whole row as JSON.
            if number not in digests:
                content = {key: inputs[number].get(key) for key in ("prompt", "answer", "info")}
                digests[number] = digest(content)
        if digests[first] == digests[index]:
            continue
        implicit = [number for number in (first, index) if not examples.names_group(number)]
        if implicit:
            unnamed = "".join(
                f" (input {number} has no id, so its row number is used)"
                for number in implicit
                if inputs[number].get("id") is None
            )
            raise ValueError(
                f"id: inputs {first} and {index} both have {row['example_id']!r}{unnamed} but are"
                " different rows, and their rollouts would be compared as one group; give every row"
                " its own id, or leave the column out"
            )


Inputs = Rows | Iterable[Fields] | Fields
"""What `Environment.generate` accepts: a dataset, rows, one row, or a mapping of columns."""


def to_rows(inputs: Inputs) -> Rows:
    """Convert the `inputs` of `Environment.generate` to dataset rows.

    Inputs are a dataset, rows (also of a generator), one row, or a mapping of columns.

    Raises TypeError or ValueError if the inputs have another form.
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
    prompts = columns.get("prompt", columns.get("question"))
    if prompts is None:
        known = ", ".join(sorted(map(str, columns))) or "nothing"
        raise ValueError(f"inputs: neither prompt nor question, only {known}; give one of the two")
    # One row has a text or a list of messages as its prompt; a column has one prompt per row.
    is_conversation = (
        isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], Mapping)
    )
    if isinstance(prompts, str) or is_conversation:
        return [inputs]
    for key, value in columns.items():
        # A zero-dimensional array has `__len__` too, which raises.
        is_column = isinstance(value, Collection) and getattr(value, "shape", None) != ()
        if not is_column or isinstance(value, str | bytes | Mapping | Set):
            raise TypeError(
                f"inputs: {key} must be a list with one value per row, got {type(value).__name__},"
                " because the prompts are a column"
            )
    sizes = {key: len(value) for key, value in columns.items()}
    if len(set(sizes.values())) > 1:
        lengths = ", ".join(f"{key} {size}" for key, size in sizes.items())
        raise ValueError(f"inputs: the columns have different lengths: {lengths}")
    values = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in values]


# Results to datasets, for `make_dataset`, files and the hub


def build_dataset_from_outputs(
    results: GenerateOutputs,
    *,
    include_ids: bool = True,
    state_columns: Sequence[str] | None = None,
) -> Dataset:
    """Convert the results of `Environment.generate` to a Hugging Face `Dataset`, a row per rollout.

    Columns: with `include_ids`, `id` (if any state has one) and `example_id`; `prompt` and
    `completion` (as returned by `sanitize_messages`), `answer` and `info` if there are any, `task`,
    `reward`, one for each metric, and one for each of `state_columns`: fields of the state, or
    nested ones such as `timing.total_ms`. A column whose types or keys differ between rows is
    stored as JSON.

    Raises:
        KeyError: no state has a state column.
        TypeError: `state_columns` is a single text.
    """
    from datasets import Dataset  # imports pyarrow and pandas

    columns: dict[str, Sequence[object]] = {}
    if include_ids:
        if any("id" in state for state in results.state):
            columns["id"] = [state.get("id") for state in results.state]
        columns["example_id"] = results.example_id
    columns["prompt"] = [sanitize_messages(prompt) for prompt in results.prompt]
    columns["completion"] = [
        # A rollout that failed at once has no completion, but the column must have one type.
        sanitize_messages(("" if isinstance(prompt, str) else []) if said is None else said)
        for prompt, said in zip(results.prompt, results.completion, strict=True)
    ]
    if any(answer != "" for answer in results.answer):
        columns["answer"] = results.answer
    columns["task"] = results.task
    if any(results.info):
        columns["info"] = results.info
    columns["reward"] = results.reward
    # A metric may have the name of one of the columns above.
    metrics = results.metrics.items()
    columns |= {name if name not in columns else f"metric_{name}": v for name, v in metrics}
    for path in check_state_columns(state_columns):
        if path not in columns:
            columns[path] = _state_column(results.state, path)
    rows = zip(*columns.values(), strict=True)
    return Dataset.from_list(
        [{name: plain(value) for name, value in zip(columns, row, strict=True)} for row in rows],
        on_mixed_types="use_json",
    )


def check_state_columns(state_columns: Sequence[str] | None) -> list[str]:
    """Return the argument `state_columns` as a list. Raises TypeError if it is a single text."""
    if isinstance(state_columns, str):
        text = f"must be a list of names, got the text {state_columns!r}; give {[state_columns]}"
        raise TypeError(f"state_columns: {text}")
    return list(state_columns or ())


def field_of(state: Fields, path: str) -> object:
    """Return a field of a rollout's state, or of a mapping in it: `timing.total_ms`.

    A single key that contains the dots takes precedence. Raises KeyError that lists the existing
    keys.
    """
    value: object = state
    keys = path.split(".")
    for depth, key in enumerate(keys):
        rest = ".".join(keys[depth:])
        if isinstance(value, Mapping) and rest in value:
            return value[rest]
        if not isinstance(value, Mapping) or key not in value:
            above = ".".join(keys[:depth]) or "the state"
            known = f"a {type(value).__name__}"
            if isinstance(value, Mapping):
                known = ", ".join(map(str, value)) or "nothing"
            raise KeyError(f"state column {path!r}: {above} has no {key!r}, only {known}")
        value = value[key]
    return value


def has_field(path: str, states: Sequence[Fields]) -> bool:
    """Return whether the state of any rollout has this field."""
    try:
        _state_column(states, path)
    except KeyError:
        return False
    return bool(states)


def _state_column(states: Sequence[Fields], path: str) -> list[object]:
    """Return the field of each state; None for states without it, such as failed ones."""
    values: list[object] = []
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


def plain(value: object) -> Any:
    """Convert a value to types that JSON and tables can hold.

    Models of pydantic and dataclasses become mappings, sets and tuples become lists, NaN and
    infinity become None. Anything else that JSON does not know (paths, dates) becomes its text.
    """
    if isinstance(value, str):
        # Half a surrogate pair, which a model may write, cannot be encoded in UTF-8.
        return value.encode(errors="replace").decode()
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None  # JSON has neither NaN nor infinity
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


def push_dataset(dataset: Dataset, name: str) -> None:
    """Push a dataset to the Hugging Face hub, with the token that the hub's tools have stored.

    Raises StorageError if the hub does not accept it, or cannot be reached.
    """
    import httpx2  # the HTTP client of the hub's library

    try:
        dataset.push_to_hub(name)
    # network errors, the hub's refusals, and names that it does not allow
    except (OSError, httpx2.HTTPError, ValueError) as error:
        remedy = (
            "store a token with `hf auth login`; unset HF_HUB_OFFLINE; use the name OWNER/NAME,"
            " or NAME for the token's owner"
        )
        raise StorageError(
            f"dataset {name}", f"{type(error).__name__}: {error}", action="push", remedy=remedy
        ) from error


def digest(row: Fields) -> str:
    """Return a hash of a dataset row: 16 hex digits, the same in every process."""
    text = json.dumps(plain(row), sort_keys=True)
    # Memory addresses in the text of objects are removed: they differ between processes.
    return hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", text).encode()).hexdigest()[:16]


# Results


@dataclass(slots=True)
class GenerateMetadata:
    """Counts and averages over the rollouts of one call of `Environment.generate`."""

    env_id: str
    env_args: Arguments
    model: str
    sampling_args: Arguments
    num_examples: int
    rollouts_per_example: int
    num_errors: int
    """Number of rollouts that failed; `state["error"]` says why."""
    num_truncated: int
    avg_reward: float
    """Mean over the rollouts that did not fail; NaN without any, or without scoring."""
    avg_metrics: dict[str, float]
    """Mean of each metric over the rollouts that have it."""
    time_ms: float = 0.0
    """Wall time of the call."""
    date: str = ""
    """Time at the start of the call, in ISO 8601."""
    state_columns: list[str] = field(default_factory=list)
    path_to_save: Path | None = None
    num_reward_errors: dict[str, int] = field(default_factory=dict)
    """For each reward function that failed, the number of rollouts (`state["reward_errors"]`)."""
    num_given_up: dict[str, int] = field(default_factory=dict)
    """For each plain function that exceeded a time limit in its thread, how often it did so."""

    def __getitem__(self, name: str) -> object:
        return getattr(self, name)


class GenerateOutputs(dict[str, Any]):
    """The results of `Environment.generate` as columns, readable by key and by attribute.

    `prompt`, `completion`, `answer`, `state`, `info`, `task`, `example_id` and `reward` are lists
    with an item per rollout. `metrics` has such a list for every metric, with None for rollouts
    without it. Example: two rollouts have `reward` [1.0, 0.0] and `metrics` {"right": [1.0, None]}.
    """

    metadata: GenerateMetadata

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"results have no {name!r}, only {', '.join(self)}") from None

    def __repr__(self) -> str:
        # Short, because asyncio writes out the result of a task that it has run.
        reward = self["metadata"].avg_reward
        return f"GenerateOutputs({len(self['state'])} rollouts, avg_reward {reward:.3f})"

    @classmethod
    def from_states(cls, states: Sequence[State], metadata: GenerateMetadata) -> GenerateOutputs:
        results = cls({name: [state.get(name) for state in states] for name in COLUMNS})
        results["state"] = list(states)
        # 0 is a valid answer.
        results["answer"] = ["" if answer is None else answer for answer in results["answer"]]
        results["info"] = [info or {} for info in results["info"]]
        metrics = [state["metrics"] or {} for state in states]
        names = dict.fromkeys(name for of_state in metrics for name in of_state)
        results["metrics"] = {name: [of_state.get(name) for of_state in metrics] for name in names}
        results["metadata"] = metadata
        return results

    def save(self, folder: Path, dataset: Dataset) -> None:
        """Write the results to a folder: `results.jsonl` and `metadata.json`.

        `dataset` contains the results as rows.

        Raises StorageError if a file cannot be written.
        """
        self.metadata.path_to_save = folder = make_folder(folder)
        metadata = plain(asdict(self.metadata))
        # They may hold keys and tokens, and folders of results are passed on.
        for name in ("env_args", "sampling_args"):
            metadata[name] = masked(metadata[name])
        try:
            with (folder / RESULTS).open("w", encoding="utf-8") as file:
                for row in dataset:
                    file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
            text = json.dumps(metadata, indent=1, ensure_ascii=False)
            (folder / METADATA).write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            raise cannot_write(folder, error, remedy=StorageError.ANOTHER_FOLDER) from error


def make_folder(folder: Path | str) -> Path:
    """Create a folder and check that it is writable. Raises StorageError."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # `mkdir` does not fail for an existing folder without write permission.
        with TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise cannot_write(folder, error, remedy=StorageError.ANOTHER_FOLDER) from error
