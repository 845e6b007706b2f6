"""Checks the run's data, or its environment, before any process is started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np

from launch.run_folder.console import Wait
from learner.data.samples import load_samples
from learner.model.checkpoint_folder import checkpoint_problems
from shared.config import RunConfig
from shared.config.model import AugmentSection, DataSource
from shared.dataset import Dataset, image_names
from shared.errors import ConfigError, RecordError
from shared.schedule import RunSchedule
from shared.trajectory import ExampleCounts


@dataclass(frozen=True, slots=True)
class ImageNeeds:
    """The image sizes and counts that an engine must accept for the run's data."""

    max_per_prompt: int = 1
    max_pixels: int = 0
    """Width times height of the largest image; 0: unknown."""

    @classmethod
    def from_datasets(cls, *datasets: Dataset, enlarged: float = 1.0) -> ImageNeeds:
        """Return the largest image, and the largest number of images of a row, of all datasets.

        `enlarged`: the greatest factor by which `data.augment.scale` enlarges an image's sides.
        """
        tables = [dataset.table for dataset in datasets]
        return cls(
            max(int(np.diff(table.images_N1).max()) for table in tables),
            max(int(np.ceil(table.sizes_N2 * enlarged).prod(axis=1).max()) for table in tables),
        )


@dataclass(frozen=True, slots=True)
class DataFacts:
    """Facts about a run's data, or its environment, that the start of the run needs."""

    images: ImageNeeds
    num_train_skipped: int = 0
    num_val_skipped: int = 0
    """Bad validation rows that were left out (`data.on_bad_row: skip`)."""
    examples: ExampleCounts | None = None
    warning: str | None = None
    """A warning about the environment, which does not stop the run."""
    noted: tuple[str, ...] = ()
    """Console lines about images turned by EXIF, unusual rows, and validation images in training
    data."""

    @classmethod
    def from_datasets(
        cls, augment: AugmentSection | None, train: Sequence[Dataset], val: Sequence[Dataset]
    ) -> DataFacts:
        enlarged = 1.0 if augment is None else max(1.0, augment.scale[1])
        return cls(
            ImageNeeds.from_datasets(*train, *val, enlarged=enlarged),
            sum(one.num_skipped for one in train),
            sum(one.num_skipped for one in val),
            noted=(
                *(_about_turned(one) for one in (*train, *val) if one.turned),
                *(f"data      {one.path}: {odd}" for one in (*train, *val) for odd in one.odd),
                *_about_shared(train, val),
            ),
        )

    def describe(self) -> list[str]:
        """Return lines to print about an environment and its examples, or about rows and images."""
        if self.examples is not None:
            counts = f"{self.examples.train} examples to train on, {self.examples.held_out}"
            lines = [f"data      the environment has {counts} are held out"]
            if self.examples.scores_at_once:
                lines.append(
                    "rewards   the rubric scores all rollouts of a step together (score_rollouts):"
                    " one environment process generates and scores them within 2 x"
                    " timeouts.generate_s"
                )
            return lines if self.warning is None else [*lines, f"warning   {self.warning}"]
        if self.num_train_skipped + self.num_val_skipped == 0:
            return list(self.noted)
        counts = f"{self.num_train_skipped} bad rows of data.train and {self.num_val_skipped}"
        skipped = f"data      skipped {counts} of data.val (data.on_bad_row: skip)"
        return [skipped, *self.noted]


def _about_turned(data: Dataset) -> str:
    """Return a console line about the images that are turned as their EXIF data require."""
    first, *others = data.turned
    number = "1 image is" if not others else f"{len(data.turned)} images are"
    return (
        f"data      {data.path}: {number} turned by EXIF orientation (first: {first}); boxes are"
        " relative to the image as it is displayed"
    )


def _about_shared(train: Sequence[Dataset], val: Sequence[Dataset]) -> Iterator[str]:
    """Yield a console line for each validation file with images that are also trained on.

    Images are compared by their digests, or by their paths if the images were not checked.
    """
    paths = {one.path.resolve() for one in train}
    learned: set[bytes | str] = set().union(*map(_pictures, train))
    for one in val:
        if one.path.resolve() in paths:
            yield f"data      {one.path} is in data.train and in data.val"
            continue
        shared = [picture for picture in _pictures(one) if picture in learned]
        if shared:
            number = "1 image is" if len(shared) == 1 else f"{len(shared)} images are"
            first = _name_of(one, shared[0])
            yield f"data      {one.path}: {number} in data.train too (first: {first})"


def _pictures(data: Dataset) -> list[bytes | str]:
    """Return the digests of a dataset's images, or the paths if the images were not checked."""
    if len(data.table.sha256_M):
        return list(dict.fromkeys(digest.tobytes() for digest in data.table.sha256_M))
    folder = data.path.absolute().parent
    return [os.path.normpath(folder / name) for name in sorted(image_names(data.path))]


def _name_of(data: Dataset, picture: bytes | str) -> str:
    """Return an image's path; if only its digest is known, the id of the first sample with it."""
    if isinstance(picture, str):
        return picture
    place = [one.tobytes() for one in data.table.sha256_M].index(picture)
    row = int(np.searchsorted(data.table.images_N1, place, side="right")) - 1
    return f"sample {data[row].sample_id}"


def with_num_steps(config: RunConfig, show: Callable[[str], None]) -> RunConfig:
    """Convert `training.num_epochs` to `training.max_steps`, which needs the number of rows.

    An epoch draws every training row (of an environment: every example) once. The number of steps
    is rounded up, so the last step may draw rows of a next epoch. Calls `show` with a line about
    the number. Returns the same configuration if `num_epochs` is not set.

    Raises:
        ConfigError: some rows are drawn more often than others, or any error of `check_data`.
        RecordError: bad rows or images.
    """
    epochs = config.training.num_epochs
    if epochs is None:
        return config
    if config.environment is not None:
        from launch.checks.environment import check_environment

        counts = check_environment(config, config.environment).examples
        assert counts is not None, "an environment's data are counted"
        if counts.mixture:
            raise ConfigError(
                f"training.num_epochs: {epochs} has no meaning, because {config.environment.id}"
                " mixes environments by weights; set training.max_steps instead"
            )
        num_rows = counts.train
    else:
        num_rows = len(_usable_rows(config))
    wanted = epochs * num_rows * config.group_size
    # Every step draws a row or more, so this is at least the number of steps.
    schedule = RunSchedule(of_length(config, wanted))
    drawn = accumulate(schedule.num_drawn[config.channel(step)] for step in range(wanted))
    steps = next(number for number, total in enumerate(drawn, start=1) if total >= wanted)
    noun = "step" if steps == 1 else "steps"
    show(f"epochs    {epochs} x {num_rows:,} training rows are {steps:,} {noun}")
    return of_length(config, steps)


def of_length(config: RunConfig, num_steps: int) -> RunConfig:
    length = {"max_steps": num_steps, "num_epochs": None}
    return config.model_copy(update={"training": config.training.model_copy(update=length)})


def _usable_rows(config: RunConfig) -> Dataset:
    """Return the training samples that the learner will use. Raises the errors of `load_data`."""
    if problems := checkpoint_problems(Path(config.model.path)):
        raise ConfigError(problems)
    (source,) = config.data.sources("train")
    dataset = load_checked(config, source)
    if config.data.on_bad_row == "error":
        return dataset
    from learner.data.fitting import require_train_lengths
    from learner.model.loading import load_tokens
    from learner.segments import PromptEncoder

    tokens = load_tokens(config)
    encoder = PromptEncoder(tokens.processor, config.prompts)
    # The number of usable rows does not depend on the number of steps.
    one_step = of_length(config, 1)
    return require_train_lengths(one_step, dataset, encoder, tokens.codec).samples


def check_data(config: RunConfig) -> DataFacts:
    """Check the data files, or the run's environment. Raises ConfigError or RecordError."""
    if config.environment is not None:
        from launch.checks.environment import check_environment

        return check_environment(config, config.environment)
    return DataFacts.from_datasets(config.data.augment, *load_data(config))


def load_data(config: RunConfig) -> tuple[list[Dataset], list[Dataset]]:
    """Read training and validation data as the learner will, images too if `data.check_images`.

    Each list has a dataset for every file; without validation data the second list is empty.

    Raises:
        ConfigError: the checkpoint or a data file is missing.
        RecordError: bad rows or images, each with its file and line.
    """
    if problems := checkpoint_problems(Path(config.model.path)):
        raise ConfigError(problems)
    errors: list[RecordError] = []

    def load(split: Literal["train", "val"]) -> Iterator[Dataset]:
        for source in config.data.sources(split):
            try:
                yield load_checked(config, source)
            except RecordError as error:
                errors.append(error)

    train, val = list(load("train")), list(load("val"))
    if errors:
        first, *others = errors
        raise first.at(first.file, first.line, [*first.more, *map(str, others)])
    return train, val


def load_checked(config: RunConfig, source: DataSource) -> Dataset:
    """Read and check a data file, and show progress. Raises the errors of `load_data`."""
    path = source.path
    if not path.is_file():
        raise ConfigError(
            f"{source.key}: there is no file {path}; set {source.key} to a JSONL file, or choose"
            " data=demo, which launch.train makes if it is missing"
        )

    def show(done: int, total: int) -> None:
        Wait.count("data", done, total, f"images of {path.name} are checked")

    return load_samples(config, source, show)
