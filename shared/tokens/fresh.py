"""A file in a checkpoint's folder that names tokens with new, untrained embeddings.

`rollmatch add-coord-tokens` writes the file. A run with an adapter trains only these tokens' rows
of the embeddings. The run copies the file to its checkpoints, so that a run that starts with such a
checkpoint trains the rows too. A run that trains all embeddings needs no file, and its checkpoints
have none.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, with_config

from shared.records import read_record

FILE = "fresh_tokens.json"
REMEDY = "recreate the checkpoint, or restore the file"


@with_config(ConfigDict(extra="forbid", strict=True))
@dataclass(frozen=True, slots=True)
class FreshTokens:
    """The tokens that were added to a checkpoint and have untrained embeddings: a range of ids.

    Example: `FreshTokens(first_id=151669, count=1000)` are the ids 151669 to 152668.
    """

    first_id: Annotated[int, Field(ge=0)]
    count: Annotated[int, Field(gt=0)]

    @classmethod
    def of(cls, folder: Path) -> FreshTokens | None:
        """Read the tokens from the file in a checkpoint's folder; None if there is no file.

        Raises ConfigError with file and field if the content is invalid.
        """
        return read_record(folder / FILE, cls, key="model.path", remedy=REMEDY)

    def save(self, folder: Path) -> None:
        """Write the file into a checkpoint's folder. Raises OSError."""
        (folder / FILE).write_text(json.dumps(asdict(self)) + "\n")

    @property
    def ids(self) -> range:
        return range(self.first_id, self.first_id + self.count)
