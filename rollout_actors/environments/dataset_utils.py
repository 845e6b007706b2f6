"""The one way from results to a dataset: for `Environment.make_dataset`, for files, and for the hub (spec: orchestration, dataset construction)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout_actors.environments.messages import sanitize_messages
from rollout_actors.environments.outputs import GenerateOutputs
from rollout_actors.environments.types import State


def build_dataset_from_outputs(results: GenerateOutputs, *, include_ids: bool = True, state_columns: Sequence[str] | None = None) -> Any:
    """A Hugging Face `Dataset` with a row for each rollout.

    Columns: `example_id`, `prompt` and `completion` (as `sanitize_messages` has them), `answer` and `info` where there are any, `task`, `reward`, one for each
    metric, and one for each of `state_columns`: fields of the state, `timing.total_ms` for one inside another. KeyError for one that no state has.
    """
    from datasets import Dataset  # imports pyarrow and pandas

    return Dataset.from_list(rows_of_outputs(results, include_ids=include_ids, state_columns=state_columns))


def rows_of_outputs(results: GenerateOutputs, *, include_ids: bool = True, state_columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The same as mappings."""
    columns: dict[str, Sequence[Any]] = {}
    if include_ids:
        columns["example_id"] = results.example_id
    columns["prompt"] = [sanitize_messages(prompt) for prompt in results.prompt]
    columns["completion"] = [sanitize_messages(completion) for completion in results.completion]
    if any(results.answer):
        columns["answer"] = results.answer
    columns["task"] = results.task
    if any(results.info):
        columns["info"] = results.info
    columns["reward"] = results.reward
    columns |= results.metrics
    for path in state_columns or ():
        if path in columns:
            continue
        columns[path] = [field_of(state, path) for state in results.state]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def field_of(state: State, path: str) -> Any:
    """A field of the state, or of a mapping in it: `timing.total_ms`. KeyError with what there is."""
    value: Any = state
    for depth, key in enumerate(path.split(".")):
        if key not in value:
            above = ".".join(path.split(".")[:depth]) or "the state"
            raise KeyError(f"state column {path!r}: {above} has no {key!r}, only {', '.join(map(str, value))}")
        value = value[key]
    return value


def push_dataset(dataset: Any, name: str) -> None:
    """To the Hugging Face hub, under this name, with the token that its own tools have stored."""
    dataset.push_to_hub(name)
