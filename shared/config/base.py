"""The base of every section of the configuration (decision 39)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
)
from pydantic_core import PydanticCustomError

PATH_TAG = "a path"
LIST_TAG = "a list"
"""Tags of a key that is either: pydantic puts them into the place of an error."""

Fraction01 = Annotated[float, Field(ge=0.0, le=1.0)]
"""A number in [0, 1]."""

LearningRate = Annotated[PositiveFloat, Field(le=1.0)]
"""A learning rate: AdamW moves every weight by about this much per update, so 1 is far too much."""


class Section(BaseModel):
    """A closed, frozen mapping of keys.

    Unknown keys are refused, nothing is converted (`"8"` is not 8), no number is NaN or infinite.
    Attribute docstrings give unit and meaning, and are quoted in errors. A required field has an
    example, which the error about its absence shows.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a configuration.

    Example: `Problem("training.seed", "must be at least 0, got -1", "write 17")` reads
    "training.seed: must be at least 0, got -1; write 17".
    """

    path: str
    """Dotted, with list indices: `rollout_matching.pipeline.objective[0].weight`."""
    wrong: str
    """The fault, without the path."""
    remedy: str
    """The thing to do."""

    def __str__(self) -> str:
        return f"{self.path}: {self.wrong}; {self.remedy}"


def refusal(wrong: str, remedy: str, key: str | None = None) -> PydanticCustomError:
    """Make the error that a validator raises for a value that the types allow.

    Args:
        key: the offending key, where the value is a mapping.
    """
    # A custom message is a template: texts travel in the context so that braces stay braces.
    context = {"wrong": wrong, "remedy": remedy, "key": key}
    return PydanticCustomError("refused", "{wrong}; {remedy}", context)


def _path(path: object) -> object:
    if isinstance(path, str) and not path.strip():
        wrong = "must not be empty, which would be the current folder"
        raise refusal(wrong, "write a path, or remove the key")
    # As text: a path is none in JSON, whose values are strict.
    return str(Path(path).expanduser()) if isinstance(path, str) else path


ConfigPath = Annotated[Path, BeforeValidator(_path), Field(strict=False)]
"""A path written as text, relative to the working directory, `~` its user's home; it need not
exist."""


def _whole(gpus: float) -> float:
    if not gpus.is_integer():
        wrong = f"must be whole GPUs, or 0, got {gpus:g}: NCCL cannot put two ranks on one GPU"
        raise refusal(wrong, "write a whole number, or 0 for none")
    return gpus


WholeGPUs = Annotated[NonNegativeFloat, AfterValidator(_whole)]
"""GPUs that Ray reserves for one process."""


def dotted(keys: tuple[str | int, ...]) -> str:
    """Join keys and list indices: `("a", "b", 0, "c")` is `a.b[0].c`."""
    parts = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return "".join(parts).removeprefix(".")


def leaves(values: Mapping[str, object], prefix: tuple[str, ...] = ()) -> dict[str, object]:
    """Return the values that are no mappings, by their dotted keys."""
    found: dict[str, object] = {}
    for key, value in values.items():
        path = (*prefix, key)
        if isinstance(value, Mapping):
            found |= leaves(value, path)
        else:
            found[dotted(path)] = value
    return found


def plain(value: Any) -> Any:
    """Copy nested mappings and sequences into dictionaries and lists.

    A key that is no text (YAML reads `3:` and `on:` so) becomes text, and is refused later as the
    unknown key it is.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
