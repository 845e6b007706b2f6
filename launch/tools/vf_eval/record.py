"""The settings of an evaluation, in its folder's `evaluation.json`, so that it can go on."""

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
    """All that decides what the rollouts of an evaluation are, and where its endpoint was.

    Example: environment "arithmetic", env_args {"largest": 9}, model "demo", num_examples 50,
    rollouts_per_example 4.
    """

    environment: str
    env_args: dict[str, object]
    model: str | None
    """None until the endpoint has said which one it serves."""
    sampling_args: dict[str, object]
    base_url: str | None
    """As it was given; the same for the key."""
    key_variable: str | None
    num_examples: int
    """-1: all."""
    rollouts_per_example: int
    state_columns: tuple[str, ...]

    @classmethod
    def from_options(cls, options: EvalOptions) -> EvaluationSettings:
        """Make the settings of a new evaluation."""
        assert options.environment is not None, "without a folder to resume it is required"
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
        """Return these settings with the endpoint and the sizes that the options name.

        Raises:
            ConfigError: every other option that is given and differs.
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
            f"{flag}: is {_text(now)} and was {_text(before)}"
            for flag, (now, before) in settings.items()
            if now is not None and now != before
        ]
        if sampling is None and (lost := masked_keys(self.sampling_args)):
            problems.append(f"-S: {lost[0]} is a secret, which no file keeps; give -S again")
        if problems:
            remedy = "say what it says, or leave it out, or start a new one without --resume"
            raise ConfigError([*problems, f"{folder}: is of another evaluation; {remedy}"])
        return replace(
            self,
            # The secrets in them, which the folder does not have.
            env_args=self.env_args if options.env_args is None else options.env_args,
            sampling_args=self.sampling_args if sampling is None else sampling,
            base_url=options.base_url or self.base_url,
            key_variable=options.key_variable or self.key_variable,
            num_examples=options.num_examples or self.num_examples,
            rollouts_per_example=options.rollouts_per_example or self.rollouts_per_example,
        )

    def write(self, folder: Path) -> None:
        """Write the folder's `evaluation.json`, whole or not at all, without secrets.

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
        ConfigError: the folder has none.
        RecordError: it is broken.
    """
    path = folder / NAME
    try:
        return TypeAdapter(EvaluationSettings).validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"--resume: {path} cannot be read ({error.strerror}); name a folder that an evaluation"
            " of vf-eval made"
        ) from error
    except ValidationError as error:
        remedy = "start a new evaluation without --resume"
        raise first_problem(error, path, "evaluation", remedy) from error


def new_folder(output: Path, evaluation: EvaluationSettings) -> Path:
    """Make a folder `ENVIRONMENT--MODEL/DATE-TIME` that nobody else has. Raises StorageError."""
    environment = Path(evaluation.environment).name.removesuffix(".py")
    # Servers of ours and of vLLM call a model by its path, if nothing else is said.
    model = str(evaluation.model)
    if Path(model).is_absolute():
        model = Path(model).name
    model = model.replace("/", "--")  # as the `verifiers` package does
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
    """Return (example, rollout) of each rollout that is not there, or failed.

    Args:
        names: those of the examples; rows of one name are one example's.
        rollouts: the number of each example.
        by_example: rewards compare an example's rollouts, so they are made together.
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
