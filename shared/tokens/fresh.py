"""Tokens whose embeddings were made and not learned: a file that a checkpoint's folder holds.

`rollmatch add-coord-tokens` writes it. A run with an adapter, which leaves the embeddings as they
are, trains these rows in addition to its matrices. A run that trains the embeddings needs no file.
So the checkpoints of the first have it too, and those of the second do not.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, with_config

from shared.records import read_record

FILE = "fresh_tokens.json"
REMEDY = "make the checkpoint again, or restore the file"


@with_config(ConfigDict(extra="forbid", strict=True))
@dataclass(frozen=True, slots=True)
class FreshTokens:
    """Token ids in a row.

    Example: `FreshTokens(first_id=151669, count=1000)` are the ids 151669 to 152668.
    """

    first_id: Annotated[int, Field(ge=0)]
    count: Annotated[int, Field(gt=0)]

    @classmethod
    def of(cls, folder: Path) -> FreshTokens | None:
        """Read those of the checkpoint in `folder`; None where it has no such file.

        Raises ConfigError naming file and field for a file that says something else.
        """
        return read_record(folder / FILE, cls, key="model.path", remedy=REMEDY)

    def save(self, folder: Path) -> None:
        """Write the file. Raises OSError."""
        (folder / FILE).write_text(json.dumps(asdict(self)) + "\n")

    @property
    def ids(self) -> range:
        return range(self.first_id, self.first_id + self.count)
