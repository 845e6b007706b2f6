"""The results of many rollouts, by column, in the order of the inputs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from rollout_actors.environments.types import State
from shared.errors import StorageError

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
    """Rollouts for which a reward function failed, by its name; `state["reward_errors"]` says why."""
    num_given_up: dict[str, int] = field(default_factory=dict)
    """Plain functions that were given up while they ran, by name: their rollouts had reached a limit of time; `state["given_up"]`."""

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class GenerateOutputs(dict[str, Any]):
    """By key and by attribute: `prompt`, `completion`, `answer`, `state`, `info`, `task`, `example_id`, `reward`, each a list with an item per rollout;
    `metrics`, such a list for every metric, with None for rollouts that do not have it; `metadata`."""

    metadata: GenerateMetadata

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"results have no {name!r}, only {', '.join(self)}") from None

    def __repr__(self) -> str:
        # Short: asyncio writes out the result of the task that it has just run, only to find that it is no signal.
        return f"GenerateOutputs({len(self['state'])} rollouts, avg_reward {self['metadata'].avg_reward:.3f})"

    @classmethod
    def of(cls, states: Sequence[State], metadata: GenerateMetadata) -> GenerateOutputs:
        made = cls()
        for column in COLUMNS:
            made[column] = list(states) if column == "state" else [state.get(column) for state in states]
        # 0 is an answer.
        made["answer"] = ["" if answer is None else answer for answer in made["answer"]]
        made["info"] = [info or {} for info in made["info"]]
        names = dict.fromkeys(name for state in states for name in state["metrics"] or {})
        made["metrics"] = {name: [(state["metrics"] or {}).get(name) for state in states] for name in names}
        made["metadata"] = metadata
        return made

    def save(self, folder: Path, dataset: Any) -> None:
        """`results.jsonl`, the dataset's rows, and `metadata.json`, in a folder that is made for it. StorageError where it cannot be written."""
        self.metadata.path_to_save = folder = made_folder(folder)
        # JSON knows no NaN, which is the mean of nothing.
        metadata = {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in asdict(self.metadata).items()}
        try:
            with (folder / RESULTS).open("w", encoding="utf-8") as file:
                for row in dataset:
                    file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
            (folder / METADATA).write_text(json.dumps(metadata, indent=1, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
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
    return StorageError(str(folder), error.strerror or str(error), remedy="free space or permit writing there, or choose another folder")


def mean(values: Sequence[float]) -> float:
    """NaN of none."""
    return math.fsum(values) / len(values) if values else math.nan
