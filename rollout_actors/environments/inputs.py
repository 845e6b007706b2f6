"""From rows of a dataset to what rollouts begin with."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Protocol, overload

from rollout_actors.environments.dataset_utils import digest
from rollout_actors.environments.messages import cleanup_messages, cleanup_tools, concat_messages, copied, deeply_copied, require_roles
from rollout_actors.environments.types import Messages, RolloutInput


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
        """Of its `prompt`, or of its `question`, with the system prompt and the examples in front, where it has no system message of its own."""
        given = row["question"] if row.get("prompt") is None else row["prompt"]
        if self.message_type == "completion":
            if not isinstance(given, str):
                raise ValueError(f"prompt: must be text where message_type is completion, got {type(given).__name__}")
            return given
        own: Messages = [{"role": "user", "content": given}] if isinstance(given, str) else cleanup_messages(list(given))
        if own and own[0]["role"] == "system":  # type: ignore[index]
            return own
        system: Messages = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
        return concat_messages([system, [dict(message) for message in self.few_shot], own])

    def input(self, row: Mapping[str, Any], index: int) -> RolloutInput:
        """`index` is the id of a row that has none. What the row holds is copied: a rollout changes nothing of the caller's. Its `info` is as it is, but for
        the nulls that a table filled into `oai_tools` (see `cleanup_tools`)."""
        if row.get("prompt") is None and row.get("question") is None:
            raise ValueError(f"row {index} has neither prompt nor question, only {', '.join(sorted(row)) or 'nothing'}; give it one of the two")
        if self.message_type == "chat" and row.get("prompt") is not None and not isinstance(row["prompt"], str):
            require_roles(row["prompt"], f"row {index}: prompt")
        for column in ("example_id", "id"):
            # As tables fill a gap. It is not even equal to itself.
            if isinstance(row.get(column), Real) and row[column] != row[column]:
                raise ValueError(f"{column}: of row {index} is NaN; give every row one, or leave the column out")
        example_id = next((row[key] for key in ("example_id", "id") if row.get(key) is not None), index)
        made: RolloutInput = {"prompt": copied(self.prompt(row)), "example_id": example_id, "task": row.get("task") or self.task}
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
        """Return whether the row at this place says by an `example_id` with which others its rollouts are compared.

        One that is its `id` says no more than that.
        """
        row = self._rows[self._order[index]]
        return row.get("example_id") is not None and repr(row["example_id"]) != repr(row.get("id"))

    def select(self, order: Sequence[int]) -> Examples:
        """Those at these places."""
        return Examples(self._rows, self._form, [self._order[place] for place in order])


def placed(examples: Iterable[RolloutInput]) -> list[RolloutInput]:
    """The inputs of one call, each with a `position`: the row's, or else its place among them. So seeds do not depend on the order in which rollouts begin."""
    return [{"position": place, **one} for place, one in enumerate(examples)]


def require_own_positions(inputs: Sequence[RolloutInput]) -> None:
    """Of a client whose seeds follow from them. ValueError for what is no place, and for one that two rollouts have, which would sample the same."""
    remedy = "give every row a place of its own in the step, or leave the column out"
    taken: dict[int, int] = {}
    for number, one in enumerate(inputs):
        position: Any = one["position"]
        if isinstance(position, bool) or not isinstance(position, Integral) or position < 0:
            raise ValueError(f"position: of input {number} must be a whole number from 0, got {position!r}; {remedy}")
        first = taken.setdefault(int(position), number)
        if first != number:
            raise ValueError(f"position: inputs {first} and {number} both have {position}, and their seeds would be the same; {remedy}")


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
                + "".join(f" (input {place} by its number in the data, for it has none)" for place in unnamed)
                + " and are different rows, whose rollouts would be compared as those of one; "
                "give every row an id of its own, or leave the column out"
            )


def _digest(one: RolloutInput) -> str:
    """Return the same for the same row, which may hold arrays: those have no truth value."""
    return digest({key: one.get(key) for key in ("prompt", "answer", "info")})


def rows_of(inputs: Any) -> Rows:
    """What a caller means by inputs: a dataset, rows (also of a generator), one row, or a mapping of columns. TypeError for what is none of them."""
    if not isinstance(inputs, Mapping):
        if isinstance(inputs, str) or not isinstance(inputs, Iterable):
            raise TypeError(f"inputs: must be a dataset, rows, one row, or a mapping of columns, got {type(inputs).__name__}")
        rows: Any = inputs
        return rows if hasattr(rows, "__len__") and hasattr(rows, "__getitem__") else list(rows)
    columns = {key: value for key, value in inputs.items() if value is not None}
    if "prompt" not in columns and "question" not in columns:
        raise ValueError(f"inputs: neither prompt nor question, only {', '.join(sorted(map(str, columns))) or 'nothing'}; give one of the two")
    prompts = columns.get("prompt", columns.get("question"))
    is_one_row = isinstance(prompts, str) or (isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], Mapping))
    if is_one_row:
        return [inputs]
    for key, value in columns.items():
        # (The array of one number has no length.)
        if isinstance(value, str | bytes | Mapping | Set) or not isinstance(value, Collection) or getattr(value, "shape", None) == ():
            raise TypeError(f"inputs: {key} must be a list with one for each row, got {type(value).__name__}, since the prompts are a column")
    sizes = {key: len(value) for key, value in columns.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"inputs: the columns have different lengths: {', '.join(f'{key} {size}' for key, size in sizes.items())}")
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
