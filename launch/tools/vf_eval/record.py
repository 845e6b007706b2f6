"""Stores the settings of an evaluation in `evaluation.json`, so that it can be resumed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from launch.tools.vf_eval.arguments import NUM_EXAMPLES, ROLLOUTS_PER_EXAMPLE, EvalOptions
from launch.tools.vf_eval.results_file import FinishedRollout, first_problem
from rollout_actors.environments.chat.responses import RETURNS_TOKENS
from rollout_actors.environments.clients.openai import merged
from shared.config.secrets import masked, masked_keys
from shared.errors import ConfigError, StorageError
from shared.run_files import cannot_write, replace_file

NAME = "evaluation.json"


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid", strict=True))
class EvaluationSettings:
    """The settings that determine the rollouts of an evaluation, and its endpoint.

    Example: environment "arithmetic", env_args {"largest": 9}, model "demo", num_examples 50,
    rollouts_per_example 4.
    """

    environment: str
    env_args: dict[str, object]
    model: str | None
    """Name of the model; None until the endpoint has listed its only model."""
    sampling_args: dict[str, object]
    base_url: str | None
    """Address of the endpoint on the command line, like `key_variable`; None if not given."""
    key_variable: str | None
    num_examples: int
    """Number of examples; -1: all."""
    rollouts_per_example: int
    state_columns: tuple[str, ...]

    @classmethod
    def from_options(cls, options: EvalOptions) -> EvaluationSettings:
        assert options.environment is not None, "required unless an evaluation is resumed"
        return cls(
            environment=options.environment,
            env_args=options.env_args or {},
            model=options.model,
            sampling_args=_sampling(options),
            base_url=options.base_url,
            key_variable=options.key_variable,
            num_examples=NUM_EXAMPLES if options.num_examples is None else options.num_examples,
            rollouts_per_example=options.rollouts_per_example or ROLLOUTS_PER_EXAMPLE,
            state_columns=options.state_columns or (),
        )

    def resumed(self, options: EvalOptions, folder: Path) -> EvaluationSettings:
        """Return the settings of a resumed evaluation.

        Options may change the endpoint, the number of examples and the number of rollouts per
        example.

        Raises ConfigError if another given option differs from these settings.
        """
        has_sampling = options.sampling_args is not None or options.tokens
        sampling = _sampling(options) if has_sampling else None
        settings: dict[str, tuple[object, object]] = {
            "ENVIRONMENT": (options.environment, self.environment),
            "-a": (masked(options.env_args), masked(self.env_args)),
            "-m": (options.model, self.model),
            "-t, -T, -S, --tokens": (masked(sampling), masked(self.sampling_args)),
            "-C": (options.state_columns, self.state_columns),
        }
        problems = [
            f"{flag}: is {_text(now)}, but was {_text(before)}"
            for flag, (now, before) in settings.items()
            if now is not None and now != before
        ]
        if sampling is None and (lost := masked_keys(self.sampling_args)):
            problems.append(f"-S: {lost[0]} is a secret, which is not stored; give -S again")
        if problems:
            remedy = "give the same options or none, or start a new evaluation without --resume"
            raise ConfigError([*problems, f"{folder}: has other settings; {remedy}"])
        return replace(
            self,
            # May contain secrets, which the folder does not store.
            env_args=self.env_args if options.env_args is None else options.env_args,
            sampling_args=self.sampling_args if sampling is None else sampling,
            base_url=options.base_url or self.base_url,
            key_variable=options.key_variable or self.key_variable,
            num_examples=options.num_examples or self.num_examples,
            rollouts_per_example=options.rollouts_per_example or self.rollouts_per_example,
        )

    def write(self, folder: Path) -> None:
        """Write `evaluation.json` to the folder atomically, without secrets.

        Raises StorageError.
        """
        path = folder / NAME
        text = json.dumps(masked(asdict(self)), indent=1, ensure_ascii=False) + "\n"
        try:
            replace_file(path, text)
        except OSError as error:
            raise cannot_write(path, error, remedy=StorageError.ANOTHER_FOLDER) from error


def read_evaluation(folder: Path) -> EvaluationSettings:
    """Read the folder's `evaluation.json`.

    Raises:
        ConfigError: the file cannot be read.
        RecordError: the file is damaged.
    """
    path = folder / NAME
    try:
        return TypeAdapter(EvaluationSettings).validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"--resume: {path} cannot be read ({error.strerror}); give the folder of an"
            " evaluation by vf-eval"
        ) from error
    except ValidationError as error:
        remedy = "start a new evaluation without --resume"
        raise first_problem(error, path, "evaluation", remedy) from error


def new_folder(output: Path, evaluation: EvaluationSettings) -> Path:
    """Create a new folder `ENVIRONMENT--MODEL/DATE-TIME`. Raises StorageError."""
    environment = Path(evaluation.environment).name.removesuffix(".py")
    # By default, our server and vLLM name a model by its path.
    model = str(evaluation.model)
    if Path(model).is_absolute():
        model = Path(model).name
    model = model.replace("/", "--")  # like the `verifiers` package
    name = re.sub(r"[^\w.-]+", "-", f"{environment}--{model}")
    base = output / name / datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = base
    number = 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
            folder = base.with_name(f"{base.name}-{number}")
        except OSError as error:
            raise cannot_write(folder, error, remedy=StorageError.ANOTHER_FOLDER) from error


def missing_rollouts(
    finished: Mapping[tuple[int, int], FinishedRollout],
    names: Sequence[str],
    rollouts: int,
    *,
    by_example: bool,
) -> list[tuple[int, int]]:
    """Return (example, rollout) of each rollout of an evaluation that is missing or failed.

    Args:
        names: name of each row; rows with the same name belong to one example.
        rollouts: number of rollouts per example.
        by_example: include all rollouts of an incomplete example, because rewards compare them.
    """
    wanted = [(example, rollout) for example in range(len(names)) for rollout in range(rollouts)]
    missing = [key for key in wanted if key not in finished or finished[key].error is not None]
    if not by_example:
        return missing
    incomplete = {names[example] for example, _ in missing}
    return [key for key in wanted if names[key[0]] in incomplete]


def _sampling(options: EvalOptions) -> dict[str, object]:
    return merged(RETURNS_TOKENS if options.tokens else None, options.sampling_args)


def _text(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else json.dumps(value, ensure_ascii=False)
