"""`coord_diag`: how well the coord slots' distributions point; logged, not learned (decision
37)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from learner.objectives import coord_math
from learner.objectives.base import LogitNeeds, RowValues, Supervision


@dataclass(frozen=True, slots=True)
class CoordDiag:
    """Measures each coord slot with the functions of training."""

    names: ClassVar[tuple[str, ...]] = (
        "coord_diag/expected_bin_error",
        "coord_diag/top5_accuracy",
        "coord_diag/coord_mass",
    )
    needs: ClassVar[LogitNeeds] = LogitNeeds(coord_mass=True)

    def __call__(self, values: RowValues, supervision: Supervision) -> tuple[torch.Tensor, ...]:
        assert values.coord_mass_S is not None
        logits_SC = values.coord_logits_SC
        targets_S = supervision.coord.targets
        return (
            coord_math.expected_bin_error(logits_SC, targets_S),
            coord_math.top5_hits(logits_SC, targets_S).float(),
            values.coord_mass_S,
        )
