"""What can be known before any process is started: are the data sound?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from learner.checkpoint_folder import checkpoint_problems
from learner.samples import load_samples
from shared.config import RunConfig
from shared.dataset import Dataset
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ImageNeeds:
    """What the images of the data ask of an engine."""

    max_per_prompt: int = 1
    max_pixels: int = 0
    """Width times height of the largest one; 0: not known."""

    @classmethod
    def of(cls, *datasets: Dataset) -> ImageNeeds:
        samples = [sample for dataset in datasets for sample in dataset]
        return cls(max(len(sample.images) for sample in samples), max(sample.width * sample.height for sample in samples))


@dataclass(frozen=True, slots=True)
class DataFacts:
    """What the rest of the run needs to know of its data."""

    images: ImageNeeds
    """Of training and validation."""
    num_train_skipped: int
    num_val_skipped: int
    """Bad rows left out (`data.on_bad_row: skip`); 0 without validation data."""

    @classmethod
    def of(cls, train: Dataset, val: Dataset | None) -> DataFacts:
        return cls(
            images=ImageNeeds.of(train) if val is None else ImageNeeds.of(train, val),
            num_train_skipped=train.num_skipped,
            num_val_skipped=0 if val is None else val.num_skipped,
        )

    def describe(self) -> list[str]:
        """One line about the rows that were left out; none where none was."""
        if not self.num_train_skipped + self.num_val_skipped:
            return []
        return [f"data      skipped {self.num_train_skipped} bad rows of data.train and {self.num_val_skipped} of data.val (data.on_bad_row: skip)"]


def check_data(config: RunConfig) -> DataFacts:
    """What `load_data` finds, without keeping it. Raises as it does."""
    return DataFacts.of(*load_data(config))


def load_data(config: RunConfig) -> tuple[Dataset, Dataset | None]:
    """Training and validation data. Read every row of the run's data files and, where `data.check_images`, every image, as the learner will.

    Raises:
        ConfigError: the checkpoint or a data file is missing.
        RecordError: a bad row or image, with file and line (`data.on_bad_row: error`).
    """
    if problems := checkpoint_problems(Path(config.model.path)):
        raise ConfigError(problems)
    train = load_checked(config, "data.train", config.data.train)
    val = None if config.data.val is None else load_checked(config, "data.val", config.data.val)
    return train, val


def load_checked(config: RunConfig, key: str, path: Path) -> Dataset:
    """The file that `key` names, read as `load_data` does, with its errors."""
    if not path.is_file():
        raise ConfigError(
            f"{key}: there is no file {path}; run `make demo-data` (`make demo-polygons-data` for data=demo_polygons), or set {key} to a JSONL file"
        )
    return load_samples(config, path)
