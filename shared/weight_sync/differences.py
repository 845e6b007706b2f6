"""How far a learner and an engine are from each other on the canary, and the record of it.

`shared.weight_sync.canary` says what it is good for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, with_config

from shared.records import read_record

NOISE_FILE = "canary_noise.json"


Nats = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""As a record and a message may hold it: NaN, which `Differences.of` may return, is never noise."""


@with_config(ConfigDict(extra="forbid", strict=True))
@dataclass(frozen=True, slots=True)
class Differences:
    """Absolute differences between the log-probabilities of a learner and an engine, in nats.

    Example: of 0.01, 0.03 and 0.02 they are `Differences(mean=0.02, largest=0.03)`.
    """

    mean: Nats
    largest: Nats

    @classmethod
    def of(cls, differences: Sequence[float]) -> Differences:
        """Summarise them: NaN where one of them is NaN, 0 where there are none."""
        if not differences:
            return cls(0.0, 0.0)
        largest = (
            max(differences) if all(map(math.isfinite, differences)) else math.fsum(differences)
        )
        return cls(math.fsum(differences) / len(differences), largest)

    @classmethod
    def of_worst(cls, several: Sequence[Differences]) -> Differences:
        """Take the largest mean, and the largest difference, of any engine.

        One bad engine so loosens the bounds of all, but not beyond the usual ones, which
        `shared.weight_sync.canary` never exceeds.
        """
        return cls(max(one.mean for one in several), max(one.largest for one in several))

    @classmethod
    def kept(cls, run_dir: Path) -> Differences | None:
        """Return the noise that was recorded in a run's folder; None where none was.

        The same run has it from the report of its first sync. This is for one that would go on in
        the folder of another, which none can today (`launch.checks.host`).

        Raises ConfigError naming file and field for a file that says something else.
        """
        return read_record(
            run_dir / NOISE_FILE, cls, key="telemetry.run_dir", remedy="restore it, or remove it"
        )

    def as_json(self) -> str:
        """Write what `kept` reads."""
        return json.dumps(asdict(self)) + "\n"
