"""What every section of the configuration has in common (DESIGN section 10)."""

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

Fraction01 = Annotated[float, Field(ge=0.0, le=1.0)]
"""A number in [0, 1]."""

LearningRate = Annotated[PositiveFloat, Field(le=1.0)]
"""AdamW moves every weight by about this much in one update: more than 1 leaves nothing of a model.
"""


class Section(BaseModel):
    """A closed, frozen mapping of keys: nothing unknown is accepted, nothing is converted (`"8"` is
    not 8), no number is NaN or infinite.

    Attribute docstrings give unit and meaning, and are quoted in the error about a missing key. A
    required field has an example, which that error shows.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a configuration."""

    path: str
    """Dotted, with list indices: `rollout_matching.pipeline.objective[0].weight`."""
    wrong: str
    """What is wrong, without the path."""
    remedy: str
    """What to do."""

    def __str__(self) -> str:
        return f"{self.path}: {self.wrong}; {self.remedy}"


def refusal(wrong: str, remedy: str, key: str | None = None) -> PydanticCustomError:
    """What a validator raises for a value that the types allow; `key` is the offending key where
    the value is a mapping.
    """
    # A custom message is a template: the texts travel in the context so that their braces stay
    # braces.
    return PydanticCustomError(
        "refused", "{wrong}; {remedy}", {"wrong": wrong, "remedy": remedy, "key": key}
    )


def _no_empty_path(path: Any) -> Any:
    if isinstance(path, str) and not path.strip():
        raise refusal(
            "must not be empty, which would be the current folder",
            "write a path, or remove the key",
        )
    return path


ConfigPath = Annotated[Path, BeforeValidator(_no_empty_path), Field(strict=False)]
"""A path written as text. Whether it exists is for the code that opens it to say; relative paths
are relative to the working directory.
"""


def _no_fraction(gpus: float) -> float:
    if not gpus.is_integer():
        raise refusal(
            f"must be whole GPUs, or 0, got {gpus:g}: NCCL cannot put two ranks on one GPU",
            "write a whole number, or 0 for none",
        )
    return gpus


WholeGPUs = Annotated[NonNegativeFloat, AfterValidator(_no_fraction)]
"""GPUs that Ray reserves for one process."""


def dotted(keys: tuple[str | int, ...]) -> str:
    """`("a", "b", 0, "c")` as `a.b[0].c`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(
        "."
    )


def plain(value: Any) -> Any:
    """A deep copy of nested mappings and sequences as dictionaries and lists, so that it can be
    edited and read strictly.

    A key that is no text (YAML reads `3:` and `on:` so) becomes its text, and is then refused as
    the unknown key it is.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
