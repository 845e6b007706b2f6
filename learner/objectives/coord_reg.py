"""`coord_reg`: losses of coord slots against soft targets, and gates between coord and text tokens.

`coord_diag` measures the same slots (decision 37).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from learner.objectives import coord_math
from learner.objectives.base import LogitNeeds, ObjectiveLoss, RowValues, Supervision
from shared.config.pipeline import CoordRegConfig


class CoordReg:
    """The loss `coord_reg`: a weighted sum of terms over coordinate slots and text tokens.

    Terms of weight 0 are not computed or logged.
    """

    def __init__(self, weight: float, config: CoordRegConfig) -> None:
        self._weight = weight
        self._config = config
        weights = {
            "coord_ce": config.coord_ce_weight,
            "soft_ce": config.soft_ce_weight,
            "w1": config.w1_weight,
            "coord_gate": config.coord_gate_weight,
            "text_gate": config.text_gate_weight,
        }
        self._weights = {term: of_term for term, of_term in weights.items() if of_term}

    @property
    def term_names(self) -> tuple[str, ...]:
        return tuple(f"coord_reg.{term}" for term in self._weights)

    @property
    def needs(self) -> LogitNeeds:
        temperature = self._config.temperature
        return LogitNeeds(
            text_gate=temperature if "text_gate" in self._weights else None,
            coord_gate=temperature if "coord_gate" in self._weights else None,
        )

    def __call__(self, values: RowValues, supervision: Supervision) -> ObjectiveLoss:
        targets_SC = None
        if "soft_ce" in self._weights or "w1" in self._weights:
            targets_SC = coord_math.soft_targets(
                supervision.coord.targets,
                sigma=self._config.target_sigma,
                truncate=self._config.target_truncate,
            )
        terms = [self._term(term, values, supervision, targets_SC) for term in self._weights]
        loss = values.coord_logits_SC.new_zeros(())
        for weight, term in zip(self._weights.values(), terms, strict=True):
            loss = loss + weight * term
        return ObjectiveLoss(self._weight * loss, tuple(term.detach() for term in terms))

    def _term(
        self,
        term: str,
        values: RowValues,
        supervision: Supervision,
        targets_SC: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute one term: the weighted sum over slots or text tokens, a scalar."""
        coord = supervision.coord
        logits_SC = values.coord_logits_SC
        if term == "coord_ce":
            nearest_S = coord_math.nearest_bins(coord.targets)
            return (coord.weight * coord_math.coord_cross_entropy(logits_SC, nearest_S)).sum()
        if term == "coord_gate":
            assert values.coord_gate_S is not None, "requested by `needs`"
            return (coord.weight * values.coord_gate_S).sum()
        if term == "text_gate":
            assert values.text_gate_X is not None, "requested by `needs`"
            return (supervision.text.gate_weight * values.text_gate_X).sum()
        assert targets_SC is not None
        distance = {"soft_ce": coord_math.soft_cross_entropy, "w1": coord_math.wasserstein1}[term]
        distances_S = distance(logits_SC, targets_SC, temperature=self._config.temperature)
        return (coord.weight * distances_S).sum()


@dataclass(frozen=True, slots=True)
class CoordDiag:
    """The metrics `coord_diag`: how accurate the predicted distributions of coord slots are."""

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
