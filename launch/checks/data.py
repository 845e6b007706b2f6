"""What can be known before any process is started: are the data sound?"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from launch.checks.environment import EnvironmentKeys, environment_errors, loaded_environment
from learner.model.loading import MODEL_TYPES, TEXT_MODEL_TYPES, checkpoint_problems
from learner.samples import load_samples
from rollout_actors.engine.settings import model_type
from rollout_actors.environments.chat.tool_calls import has_own_parser, shows_tools
from rollout_actors.environments.environment import Environment
from rollout_actors.environments.training.runner import count_examples, has_tools, require_no_tools
from shared.config import RunConfig
from shared.config.algorithm import EnvironmentSection
from shared.config.derive import has_held_out
from shared.dataset import Dataset
from shared.errors import ConfigError, RecordError
from shared.trajectory import ExampleCounts

_KEYS = EnvironmentKeys("environment.id", "environment.args")
SHOW_EVERY_S = 5.0
"""Between two lines about the images that are being checked."""


@dataclass(frozen=True, slots=True)
class ImageNeeds:
    """What the images of the data ask of an engine."""

    max_per_prompt: int = 1
    max_pixels: int = 0
    """Width times height of the largest one; 0: not known."""

    @classmethod
    def of(cls, *datasets: Dataset) -> ImageNeeds:
        samples = [sample for dataset in datasets for sample in dataset]
        return cls(
            max(len(sample.images) for sample in samples),
            max(sample.width * sample.height for sample in samples),
        )


@dataclass(frozen=True, slots=True)
class DataFacts:
    """What the rest of the run needs to know of its data."""

    images: ImageNeeds
    """Of training and validation."""
    num_train_skipped: int
    num_val_skipped: int
    """Bad rows left out (`data.on_bad_row: skip`); 0 without validation data."""
    examples: ExampleCounts | None = None
    """Of the environment, where the run has one."""
    warning: str | None = None
    """About the environment; the run starts all the same."""

    @classmethod
    def of(cls, train: Dataset, val: Dataset | None) -> DataFacts:
        return cls(
            images=ImageNeeds.of(train) if val is None else ImageNeeds.of(train, val),
            num_train_skipped=train.num_skipped,
            num_val_skipped=0 if val is None else val.num_skipped,
        )

    def describe(self) -> list[str]:
        """One line about the environment's examples and one about a warning, or about the rows that
        were left out; none where none was.
        """
        if self.examples is not None:
            warnings = [] if self.warning is None else [f"warning   {self.warning}"]
            return [
                (
                    f"data      the environment has {self.examples.train} examples to train on,"
                    f" {self.examples.held_out} are held out"
                ),
                *warnings,
            ]
        if not self.num_train_skipped + self.num_val_skipped:
            return []
        return [
            (
                f"data      skipped {self.num_train_skipped} bad rows of data.train and"
                f" {self.num_val_skipped} of data.val (data.on_bad_row: skip)"
            )
        ]


def check_data(config: RunConfig) -> DataFacts:
    """What `load_data` finds, or what the run's environment has, without keeping it. Raises as they
    do.
    """
    return (
        DataFacts.of(*load_data(config))
        if config.environment is None
        else check_environment(config, config.environment)
    )


def check_environment(config: RunConfig, section: EnvironmentSection) -> DataFacts:
    """Loads the environment in this process, as its actors will, and closes it. Raises ConfigError
    where there is none of this name, its arguments are wrong, it lacks data, or a reader of its
    tool calls, and for whatever it raises itself. (Whether vLLM knows the reader its actors find
    out, which import that.)"""
    if problems := checkpoint_problems(Path(config.model.path)):
        raise ConfigError(problems)
    if (
        section.max_images_per_prompt
        and (kind := model_type(config.model.path)) in TEXT_MODEL_TYPES
    ):
        told = (
            f"environment.max_images_per_prompt: {config.model.path} is a {kind} model, which sees"
            " no images"
        )
        raise ConfigError(
            f"{told}; set it to 0, or choose a model with a vision tower ({', '.join(MODEL_TYPES)})"
        )
    examples, warning = _looked_at(config, section)
    if has_held_out(config) and not examples.held_out:
        told = f"environment.num_eval_examples: {section.id} has no rows of its own to evaluate on"
        raise ConfigError(
            f"{told}; give it an eval_dataset, or set the key to 0 for a run without held-out"
            " reports"
        )
    return DataFacts(ImageNeeds(section.max_images_per_prompt), 0, 0, examples, warning)


def _looked_at(config: RunConfig, section: EnvironmentSection) -> tuple[ExampleCounts, str | None]:
    """Its examples, and a warning where the model will not know of its tools."""
    environment = loaded_environment(section.id, section.args, _KEYS)
    try:
        _require_parser(config, section, environment)
        with environment_errors(section.id, _KEYS, _KEYS.name):
            examples = count_examples(environment, section.num_eval_examples)
        if not has_tools(environment) or shows_tools(Path(config.model.path)):
            return examples, None
        warning = (
            f"{environment.name} has tools, and the chat template of {config.model.path} shows"
            " none: the model is not told that it can call them"
        )
        return (
            examples,
            (
                f"{warning}; choose a checkpoint whose template writes `tools` (`make demo-lm`"
                " makes such a one, outputs/demo/lm_tools)"
            ),
        )
    finally:
        # What it holds is for its actors to have.
        asyncio.run(environment.aclose())


def _require_parser(
    config: RunConfig, section: EnvironmentSection, environment: Environment
) -> None:
    try:
        if section.tool_call_parser is None and not has_own_parser(Path(config.model.path)):
            require_no_tools(environment)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def load_data(config: RunConfig) -> tuple[Dataset, Dataset | None]:
    """Training and validation data. Read every row of the run's data files and, where
    `data.check_images`, every image, as the learner will.

    Raises:
        ConfigError: the checkpoint or a data file is missing.
        RecordError: bad rows or images of either file, with file and line (`data.on_bad_row:
        error`).
    """
    if problems := checkpoint_problems(Path(config.model.path)):
        raise ConfigError(problems)
    assert config.data.train is not None, "checked with the configuration"
    datasets: dict[str, Dataset] = {}
    errors: list[RecordError] = []
    for key, path in (("data.train", config.data.train), ("data.val", config.data.val)):
        if path is not None:
            try:
                datasets[key] = load_checked(config, key, path)
            except RecordError as error:
                errors.append(error)
    if errors:
        first, *others = errors
        more = [*first.more, *map(str, others)]
        raise RecordError(
            first.problem,
            field=first.field,
            remedy=first.remedy,
            file=first.file,
            line=first.line,
            more=more,
        )
    return datasets["data.train"], datasets.get("data.val")


def load_checked(config: RunConfig, key: str, path: Path) -> Dataset:
    """The file that `key` names, read as `load_data` does, with its errors."""
    if not path.is_file():
        raise ConfigError(
            f"{key}: there is no file {path}; run `make demo-data` (`make demo-polygons-data` for"
            f" data=demo_polygons), or set {key} to a JSONL file"
        )
    shown_s = time.monotonic()
    # On a terminal the bar of the start is in the line, and is drawn anew in the next one.
    in_place_of_bar = "\r\x1b[2K" if sys.stdout.isatty() else ""

    def show(done: int, total: int) -> None:
        nonlocal shown_s
        if time.monotonic() - shown_s > SHOW_EVERY_S or done == total:
            shown_s = time.monotonic()
            print(
                f"{in_place_of_bar}data      {done} of {total} images of {path.name} are checked",
                flush=True,
            )

    return load_samples(config, path, show)
