"""`data`: the JSONL files and how their rows become samples (DESIGN 7.1)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from shared.config.base import ConfigPath, Section
from shared.prompts import DEFAULT_USER_PROMPT


class DataSection(Section):
    train: ConfigPath | None = None
    """JSONL file of training samples; image paths in it are relative to the file. Required, but under `trajectory_pg`, whose environment has its own data."""

    val: ConfigPath | None = None
    """JSONL file of held-out samples; null: no validation."""

    on_bad_row: Literal["error", "skip"] = "error"
    """A bad row, also one that the tokenizer or the image processor refuses, stops the start (`error`), or is counted and logged (`skip`)."""

    sort_objects: bool = True
    """Put objects into reading order (min y, min x); false: a row out of order is a bad row."""

    check_images: bool = True
    """Decode every image before the start; false: a bad image is found when its sample is used. What was found is kept in `~/.cache/rollmatch` (or below
    `$XDG_CACHE_HOME`), where it took more than a second, for files whose path, size and time of change stay the same."""

    shuffle: bool = True
    """Visit the samples of every epoch in a seeded random order; false: in the order of the file."""

    system_prompt: str | None = None
    """Text of the system message; null: no system message."""

    user_prompt: Annotated[str, Field(min_length=1)] = DEFAULT_USER_PROMPT
    """Text of the user message, after its images."""

    max_val_samples: PositiveInt | None = None
    """Evaluate on the first this many rows of `val`; null: on all."""
