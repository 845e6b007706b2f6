"""Checks what the run's files contain, with torch and transformers: samples, tokens and weights.

These imports take most of the time of a start. A result without problems is therefore kept in the
user's cache, and a start with the same files and the same configuration imports neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from launch.checks.data import DataFacts, check_data, load_data
from launch.checks.host import hidden, installation_state, uncollected
from launch.checks.model_shape import ModelShape
from launch.checks.weights import weight_warnings
from learner.data import kept
from shared.config import RunConfig
from shared.config.pipeline import Channel, ImportedEntry, PipelineSection
from shared.dataset import Dataset
from shared.errors import ConfigError, RecordError

T = TypeVar("T")
CODE = [Path(__file__).parents[2] / name for name in ("launch", "learner", "shared")]
"""Folders of this package whose modules decide the result of the checks."""
_UPDATE_KEYS = {
    *("learning_rate", "lr_warmup_steps", "lr_schedule", "min_lr_ratio", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "max_nonfinite_updates"),
}
NOT_READ: dict[str, bool | set[str]] = {
    **dict.fromkeys(("telemetry", "checkpoint", "resume", "cluster", "timeouts"), True),
    "training": _UPDATE_KEYS,
}
"""Keys of the configuration that do not decide the result of the checks."""
_KEPT: TypeAdapter[tuple[list[str], DataFacts | None]] = TypeAdapter(
    tuple[list[str], DataFacts | None]
)
"""Lines of a report, and facts about data files, as the cache has them."""


@dataclass(slots=True)
class PreflightReport:
    """The findings of a preflight check: lines to print, and problems that would stop the run."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    facts: DataFacts | None = None
    """Facts about the run's data; None if the data are invalid or the checkpoint is incomplete."""

    def attempt(self, make: Callable[[], T]) -> T | None:
        """Return the result of `make`; None if it raises ConfigError or RecordError.

        Such an error is recorded as problems.
        """
        try:
            return make()
        except ConfigError as error:
            self.problems += error.problems
        except RecordError as error:
            self.problems.append(str(error))
        return None

    def collect(self, problems: Iterable[str]) -> None:
        """Record the problems that a check yields.

        If the check raises ConfigError or RecordError, only this error is recorded.
        """
        self.problems += self.attempt(lambda: list(problems)) or ()


def check_contents(config: RunConfig, report: PreflightReport) -> ModelShape | None:
    """Check data, tokenizer, weights and objectives of a run whose checkpoint is complete.

    Adds lines, problems and facts to `report`. Returns the sizes of the model, or None if the files
    do not hold all its weights.
    """
    folder = Path(config.model.path)
    datasets: tuple[Sequence[Dataset], Sequence[Dataset]] | None = ((), ())
    if config.algorithm.uses_environment:
        report.facts = report.attempt(lambda: check_data(config))
        report.lines += () if report.facts is None else report.facts.describe()
    else:
        datasets = report.attempt(lambda: load_data(config))
    key = None if datasets is None else _key(config, *datasets)
    # One file for each name, because several experiments use the same model.
    file = kept.kept_file(folder / config.telemetry.name, "contents")
    if key is not None and (found := kept.read(file, key)) is not None:
        lines, facts = _KEPT.validate_python(found.rest)
        report.lines += lines
        report.facts = facts or report.facts
        return report.attempt(lambda: ModelShape.read(folder))

    started_s = time.monotonic()
    num_lines = len(report.lines)
    num_problems = len(report.problems)
    # transformers imports them, and with them pandas, for a kind of generation and for losses
    # of object detection that we do not use. It remembers that it has not found them, so scipy
    # is hidden only if neither the learner nor an environment uses this process.
    hides_scipy = config.environment is None and config.cluster.kind != "local"
    with uncollected(), hidden("sklearn"), hidden("scipy") if hides_scipy else nullcontext():
        import transformers.generation.candidate_generator  # noqa: F401

        from learner.model.loading import load_tokens
    facts = None
    if config.algorithm.uses_environment:
        report.attempt(lambda: load_tokens(config))
    elif datasets is not None:
        learnable = report.attempt(lambda: _learnable(config, *datasets, report.lines))
        facts = DataFacts.from_datasets(
            config.data.augment, *(datasets if learnable is None else learnable)
        )
        report.facts = facts
        report.lines += facts.describe()
    for_engines = config.rollout_matching.starts_engines
    warnings = report.attempt(lambda: weight_warnings(folder, for_engines=for_engines))
    report.lines += (f"warning   {warning}" for warning in warnings or ())
    shape = None if warnings is None else report.attempt(lambda: ModelShape.read(folder))
    report.attempt(lambda: require_objectives(config.rollout_matching.pipeline))
    took_s = time.monotonic() - started_s
    if key is not None and len(report.problems) == num_problems and took_s >= kept.QUICK_S:
        of_data = None if facts is None else asdict(facts)
        rest = [report.lines[num_lines:], of_data]
        kept.keep(file, key, {}, rest, lost="checks tokens and weights")
    return shape


def _key(config: RunConfig, train: Sequence[Dataset], val: Sequence[Dataset]) -> str | None:
    """Return a digest of everything that decides the result of the checks.

    None if that is not known: the user's own objective is imported, or bad rows are skipped, for
    which warnings are logged.
    """
    pipeline = config.rollout_matching.pipeline
    own = [entry.name for entry in pipeline.objective if isinstance(entry, ImportedEntry)]
    baselines = [section.advantage_baseline for _, section in pipeline.policy_gradients()]
    own += [name for name in baselines if ":" in name]
    data = [one.key for one in (*train, *val)]
    if own or config.data.on_bad_row == "skip" or not all(data):
        return None
    files = sorted(Path(config.model.path).rglob("*"))
    return kept.digest_of(
        installation_state(CODE),
        config.model_dump_json(exclude=NOT_READ),
        data,
        [(str(file), kept.fingerprint(file)) for file in files],
    )


def require_objectives(pipeline: PipelineSection) -> None:
    """Build the objectives of both channels. Raises ConfigError as `build_objectives` does."""
    import torch

    from learner.objectives.registry import build_objectives

    no_tokens = torch.empty(0, dtype=torch.int64)
    for channel in Channel:
        build_objectives(pipeline, channel, no_tokens)


def _learnable(
    config: RunConfig, train: Sequence[Dataset], val: Sequence[Dataset], lines: list[str]
) -> tuple[list[Dataset], list[Dataset]]:
    """Return the training and validation samples that the learner would use.

    Samples that cannot be encoded are left out if `data.on_bad_row` is `skip`. Appends to `lines`
    the number of objects that are very small in the image that the model sees, and warnings about
    ground truth that is longer than `rollout_matching.max_new_tokens`.

    Raises the errors of `learner.data.fitting.require_lengths`.
    """
    from learner.data.fitting import (
        describe_cut_answers,
        describe_small_objects,
        require_train_lengths,
    )
    from learner.held_out import HeldOut
    from learner.model.loading import load_tokens
    from learner.segments import PromptEncoder

    tokens = load_tokens(config)
    encoder = PromptEncoder(tokens.processor, config.prompts)
    fitting = [require_train_lengths(config, one, encoder, tokens.codec) for one in train]
    held_out = HeldOut(config, val, tokens).fittings if val else []
    for key, fittings in (("data.train", fitting), ("data.val", held_out)):
        if fittings:
            small = describe_small_objects(key, fittings, encoder.picture_resize)
            lines.append(f"objects   {small}")
    for one in [*(fitting if config.num_b_steps else []), *held_out]:
        warning = describe_cut_answers(
            one,
            tokens.codec,
            max_new_tokens=config.rollout_matching.max_new_tokens,
            answer_format=config.answer_format.for_pictures(encoder.picture_resize),
            checkpoint=Path(config.model.path),
        )
        if warning is not None:
            lines.append(f"warning   {warning}")
    return [one.samples for one in fitting], [one.samples for one in held_out]
