"""What an evaluation is of, in its folder's `evaluation.json`, so that it can go on; and which
rollouts it still needs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from launch.vf_eval.arguments import NUM_EXAMPLES, ROLLOUTS_PER_EXAMPLE, EvalOptions
from launch.vf_eval.results_file import FinishedRollout
from rollout_actors.environments.chat.responses import RETURNS_TOKENS
from rollout_actors.environments.clients.openai import merged
from shared.errors import ConfigError, RecordError, StorageError

NAME = "evaluation.json"


def _some_or_all(number: int) -> int:
    if number < 1 and number != -1:
        raise ValueError(f"must be 1 or more, or -1 for all, got {number}")
    return number


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid", strict=True))
class EvaluationSettings:
    """All that decides what its rollouts are. How many at a time, and where the endpoint is, do
    not.
    """

    environment: str
    env_args: dict[str, Any]
    model: str | None
    """None until the endpoint has said which one it serves."""
    sampling_args: dict[str, Any]
    base_url: str | None
    """As it was said; the same for the key."""
    key_variable: str | None
    num_examples: Annotated[int, AfterValidator(_some_or_all)]
    """-1: all."""
    rollouts_per_example: Annotated[int, Field(ge=1)]
    state_columns: tuple[str, ...]

    @classmethod
    def of(cls, options: EvalOptions) -> EvaluationSettings:
        """A new one."""
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
        """This one, with what may be said anew. ConfigError with everything that was said and is
        another than it was.
        """
        says_sampling = options.sampling_args is not None or options.tokens
        said: list[tuple[str, Any, Any]] = [
            ("ENVIRONMENT", options.environment, self.environment),
            ("-a", options.env_args, self.env_args),
            ("-m", options.model, self.model),
            (
                "-t, -T, -S, --tokens",
                _sampling(options) if says_sampling else None,
                self.sampling_args,
            ),
            ("-C", options.state_columns, self.state_columns),
        ]
        problems = [
            _difference(flag, now, before)
            for flag, now, before in said
            if now is not None and now != before
        ]
        if problems:
            raise ConfigError(
                [
                    *problems,
                    (
                        f"{folder}: is of another evaluation; say what it says, or leave it out, or"
                        " start a new one without --resume"
                    ),
                ]
            )
        return replace(
            self,
            base_url=options.base_url or self.base_url,
            key_variable=options.key_variable or self.key_variable,
            num_examples=(
                self.num_examples if options.num_examples is None else options.num_examples
            ),
            rollouts_per_example=options.rollouts_per_example or self.rollouts_per_example,
        )

    def no_smaller_than(self, other: EvaluationSettings) -> EvaluationSettings:
        sizes = (self.num_examples, other.num_examples)
        return replace(
            self,
            num_examples=-1 if -1 in sizes else max(sizes),
            rollouts_per_example=max(self.rollouts_per_example, other.rollouts_per_example),
        )

    def write(self, folder: Path) -> None:
        """Whole or not at all. StorageError where it cannot be written."""
        path = folder / NAME
        partial = path.with_suffix(".partial")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            partial.write_text(
                json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
            )
            partial.replace(path)
        except OSError as error:
            raise StorageError(
                str(path),
                error.strerror or str(error),
                remedy="free space or permit writing there, or choose another folder with -o",
            ) from error


def read_evaluation(folder: Path) -> EvaluationSettings:
    """Raises ConfigError where the folder has none, RecordError where it is broken."""
    path = folder / NAME
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"--resume: {path} cannot be read ({error.strerror}); name a folder that an evaluation"
            " of vf-eval made"
        ) from error
    try:
        read = json.loads(data)
    except json.JSONDecodeError as error:
        raise RecordError(
            f"is not JSON ({error.msg})",
            field="line",
            remedy=_REMEDY,
            file=str(path),
            line=error.lineno,
        ) from error
    except UnicodeDecodeError as error:
        raise RecordError(
            f"is no text ({error.reason} at byte {error.start})",
            field="evaluation",
            remedy=_REMEDY,
            file=str(path),
        ) from error
    if not isinstance(read, dict):
        raise RecordError(
            f"is a JSON {type(read).__name__}, not an object",
            field="evaluation",
            remedy=_REMEDY,
            file=str(path),
        )
    try:
        # Strict but for tuples, which JSON writes as lists.
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in read.items()
        }
        return EvaluationSettings(**fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise RecordError(
            first["msg"], field=".".join(map(str, first["loc"])), remedy=_REMEDY, file=str(path)
        ) from error


_REMEDY = "start a new evaluation without --resume"


def new_folder(output: Path, evaluation: EvaluationSettings) -> Path:
    """Of nobody else: `ENVIRONMENT--MODEL/DATE-TIME`."""
    environment, model = (
        Path(evaluation.environment).name.removesuffix(".py"),
        str(evaluation.model),
    )
    # Servers of ours and of vLLM call a model by its path, if nothing else is said.
    name = re.sub(
        r"[^\w.-]+",
        "-",
        f"{environment}--{Path(model).name if Path(model).is_absolute() else model}",
    )
    base = output / name / datetime.now().strftime("%Y%m%d-%H%M%S")
    number = 1
    while True:
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise StorageError(
                str(folder), error.strerror or str(error), remedy="choose another folder with -o"
            ) from error
        else:
            return folder


def missing_places(
    done: Mapping[tuple[int, int], FinishedRollout],
    names: Sequence[str],
    rollouts: int,
    *,
    by_example: bool,
) -> list[tuple[int, int]]:
    """(example, rollout) of what has to be rolled out: nothing there, or it failed.

    `names` are the examples'; rows of one name are one example's. `by_example`: rewards compare an
    example's rollouts, so that they are made together.
    """
    missing = [
        (e, r)
        for e in range(len(names))
        for r in range(rollouts)
        if (e, r) not in done or done[e, r].error is not None
    ]
    if not by_example:
        return missing
    incomplete = {names[example] for example, _ in missing}
    return [(e, r) for e, name in enumerate(names) if name in incomplete for r in range(rollouts)]


def _sampling(options: EvalOptions) -> dict[str, Any]:
    return merged(RETURNS_TOKENS if options.tokens else None, options.sampling_args)


def _difference(flag: str, now: Any, before: Any) -> str:
    if not isinstance(now, Mapping) or not isinstance(before, Mapping):
        return f"{flag}: is {_text(now)} and was {_text(before)}"
    keys = [key for key in dict.fromkeys([*now, *before]) if now.get(key) != before.get(key)]
    parts = [
        f"{key} is {_text(now[key]) if key in now else 'not said'} and was"
        f" {_text(before[key]) if key in before else 'not said'}"
        for key in keys
    ]
    return f"{flag}: {'; '.join(parts)}"


def _text(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else json.dumps(value, ensure_ascii=False)
