"""The base class of all configuration sections, and shared value types (decision 39)."""

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
"""Tags (`PATH_TAG`, `LIST_TAG`) of the alternatives of a key whose value is a path or a list.

pydantic includes the tag in the location of an error. Messages leave the tag out.
"""

MISSING = "is required, and missing"
"""The text, after a key's path, of the message about a required key that is missing."""

Fraction01 = Annotated[float, Field(ge=0.0, le=1.0)]
"""A number in [0, 1]."""

LearningRate = Annotated[PositiveFloat, Field(le=1.0)]
"""A learning rate, at most 1. AdamW moves each weight by about this much per update."""


class Section(BaseModel):
    """Base class of the configuration's sections: immutable values of known keys.

    Unknown keys are errors, nothing is converted (`"8"` is not 8), and numbers must be finite.
    Attribute docstrings give unit and meaning, and error messages quote them. A required field has
    an example, which the error about a missing key shows.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(frozen=True, slots=True)
class Problem:
    """One error in a configuration, as a line of ConfigError's message.

    Example: `Problem("training.seed", "must be at least 0, got -1", "write 17")` reads
    "training.seed: must be at least 0, got -1; write 17".
    """

    path: str
    """Dotted path of the key with list indices: `rollout_matching.pipeline.objective[0].weight`."""
    wrong: str
    """What is wrong, without the path."""
    remedy: str
    """What the user can do."""

    def __str__(self) -> str:
        return f"{self.path}: {self.wrong}; {self.remedy}"


def refusal(wrong: str, remedy: str, key: str | None = None) -> PydanticCustomError:
    """Return the pydantic error that a validator of a key raises for an invalid value.

    Args:
        wrong: what is wrong with the value.
        remedy: what to do.
        key: the invalid key, if the value is a mapping.
    """
    # The message is a template. The texts go into its context, so their braces are not replaced.
    context = {"wrong": wrong, "remedy": remedy, "key": key}
    return PydanticCustomError("refused", "{wrong}; {remedy}", context)


def _path(path: object) -> object:
    if isinstance(path, str) and not path.strip():
        wrong = "must not be empty, because an empty path means the current folder"
        raise refusal(wrong, "write a path, or remove the key")
    # Return a string: pydantic accepts no Path in JSON, whose values are strict.
    return str(Path(path).expanduser()) if isinstance(path, str) else path


ConfigPath = Annotated[Path, BeforeValidator(_path), Field(strict=False)]
"""A path, relative to the working directory. `~` is the user's home. The path need not exist."""


def _whole(gpus: float) -> float:
    if not gpus.is_integer():
        wrong = f"must be a whole number, got {gpus:g}: NCCL cannot run two ranks on one GPU"
        raise refusal(wrong, "write a whole number; 0 reserves no GPU")
    return gpus


WholeGPUs = Annotated[NonNegativeFloat, AfterValidator(_whole)]
"""The number of GPUs that Ray reserves for one process."""


def dotted(keys: tuple[str | int, ...]) -> str:
    """Join keys and list indices into a path: `("a", "b", 0, "c")` becomes `a.b[0].c`."""
    parts = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return "".join(parts).removeprefix(".")


def leaves(values: Mapping[str, object], prefix: tuple[str, ...] = ()) -> dict[str, object]:
    """Flatten nested mappings: return all values that are not mappings, by their dotted keys.

    `prefix` is put before every key.
    """
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

    A key that is not a string (YAML reads `3:` and `on:` as such) is converted to one. Validation
    then reports it as an unknown key.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
