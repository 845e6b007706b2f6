"""The one way from results to a dataset: for `Environment.make_dataset`, for files, and for the hub (spec: orchestration, dataset construction)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

from rollout_actors.environments.messages import sanitize_messages
from rollout_actors.environments.outputs import GenerateOutputs
from rollout_actors.environments.types import State
from shared.errors import StorageError


def build_dataset_from_outputs(results: GenerateOutputs, *, include_ids: bool = True, state_columns: Sequence[str] | None = None) -> Any:
    """A Hugging Face `Dataset` with a row for each rollout, in the order of the results.

    Columns: `id` (the states', where any has one) and `example_id` (the input's), `prompt` and `completion` (as `sanitize_messages` has them), `answer` and
    `info` where there are any, `task`, `reward`, one for each metric, and one for each of `state_columns`: fields of the state, `timing.total_ms` for one
    inside another. A row reads as it was: what differs in type or keys from row to row (`info` of several environments, contents of text beside contents of
    parts) is a column of JSON. KeyError for a state column that no state has, TypeError where they are
    one text.
    """
    from datasets import Dataset  # imports pyarrow and pandas

    return Dataset.from_list(rows_of_outputs(results, include_ids=include_ids, state_columns=state_columns), on_mixed_types="use_json")


def rows_of_outputs(results: GenerateOutputs, *, include_ids: bool = True, state_columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The same as mappings."""
    columns: dict[str, Sequence[Any]] = {}
    if include_ids:
        if any("id" in state for state in results.state):
            columns["id"] = [state.get("id") for state in results.state]
        columns["example_id"] = results.example_id
    columns["prompt"] = [sanitize_messages(prompt) for prompt in results.prompt]
    columns["completion"] = [sanitize_messages(_said(completion, prompt)) for prompt, completion in zip(results.prompt, results.completion, strict=True)]
    if any(answer != "" for answer in results.answer):
        columns["answer"] = results.answer
    columns["task"] = results.task
    if any(results.info):
        columns["info"] = results.info
    columns["reward"] = results.reward
    # A metric may have the name of one of the columns above, or of a column of the state.
    columns |= {name if name not in columns else f"metric_{name}": values for name, values in results.metrics.items()}
    for path in column_names(state_columns):
        if path not in columns:
            columns[path] = _column(results.state, path)
    return [{name: plain(value) for name, value in zip(columns, row, strict=True)} for row in zip(*columns.values(), strict=True)]


def column_names(state_columns: Sequence[str] | None) -> list[str]:
    """None: none. TypeError for one text, whose letters are a sequence of texts too."""
    if isinstance(state_columns, str):
        raise TypeError(f"state_columns: must be a list of names, got the text {state_columns!r}; give {[state_columns]}")
    return list(state_columns or ())


def field_of(state: Mapping[str, Any], path: str) -> Any:
    """A field of the state, or of a mapping in it: `timing.total_ms`; a key that has a dot itself goes first. KeyError with what there is."""
    value: Any = state
    keys = path.split(".")
    for depth, key in enumerate(keys):
        rest = ".".join(keys[depth:])
        if isinstance(value, Mapping) and rest in value:
            return value[rest]
        if not isinstance(value, Mapping) or key not in value:
            above = ".".join(keys[:depth]) or "the state"
            there = ", ".join(map(str, value)) or "nothing" if isinstance(value, Mapping) else f"a {type(value).__name__}"
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
    """What JSON and tables can hold: mappings, lists, text, numbers and None as they are, models of pydantic and dataclasses as mappings, sets and tuples as
    lists, anything else (paths, dates, objects of users) as its text."""
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
    """To the Hugging Face hub, under this name, with the token that its own tools have stored. StorageError where the hub does not take it."""
    import httpx2  # which the hub's client speaks HTTP with

    try:
        dataset.push_to_hub(name)
    except (OSError, httpx2.HTTPError, ValueError) as error:  # of the way there, of the hub's answer, of a name that it does not allow
        remedy = "`hf auth login` stores a token; HF_HUB_OFFLINE must not be set; a name is OWNER/NAME, or NAME for the token's own"
        raise StorageError(f"dataset {name}", f"{type(error).__name__}: {error}", action="push", remedy=remedy) from error


def _said(completion: Any, prompt: Any) -> Any:
    """A rollout that failed before the model said anything has no completion: of the prompt's own form, so that the column is of one type."""
    if completion is not None:
        return completion
    return "" if isinstance(prompt, str) else []


def _column(states: Sequence[State], path: str) -> list[Any]:
    """None for states that do not have the field: one that failed may have ended before it was written."""
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
