"""`coord_reg`: the coord slots' distribution against a soft target, and the gates between coord and text vocabulary (DESIGN 8)."""

from __future__ import annotations

import torch

from learner.objectives import coord_math
from learner.objectives.interface import LogitNeeds, ObjectiveLoss, RowValues, Supervision
from learner.objectives.weighted_terms import WeightedTerms
from shared.config.pipeline import CoordRegConfig


class CoordReg:
    def __init__(self, weight: float, config: CoordRegConfig) -> None:
        self._config = config
        self._terms = WeightedTerms(
            "coord_reg",
            weight,
            {
                "coord_ce": config.coord_ce_weight,
                "soft_ce": config.soft_ce_weight,
                "w1": config.w1_weight,
                "coord_gate": config.coord_gate_weight,
                "text_gate": config.text_gate_weight,
            },
        )

    @property
    def term_names(self) -> tuple[str, ...]:
        return self._terms.names

    @property
    def needs(self) -> LogitNeeds:
        temperature = self._config.temperature
        return LogitNeeds(text_gate=temperature if "text_gate" in self._terms else None, coord_gate=temperature if "coord_gate" in self._terms else None)

    def __call__(self, values: RowValues, supervision: Supervision) -> ObjectiveLoss:
        text, coord, logits_SC, temperature = supervision.text, supervision.coord, values.coord_logits_SC, self._config.temperature
        targets_SC = coord_math.soft_targets(coord.targets, sigma=self._config.target_sigma, truncate=self._config.target_truncate)
        return self._terms.loss(
            {
                "coord_ce": lambda: (coord.weight * coord_math.coord_cross_entropy(logits_SC, coord_math.nearest_bins(coord.targets))).sum(),
                "soft_ce": lambda: (coord.weight * coord_math.soft_cross_entropy(logits_SC, targets_SC, temperature=temperature)).sum(),
                "w1": lambda: (coord.weight * coord_math.wasserstein1(logits_SC, targets_SC, temperature=temperature)).sum(),
                "coord_gate": lambda: _weighted(coord.weight, values.coord_gate_S),
                "text_gate": lambda: _weighted(text.gate_weight, values.text_gate_X),
            }
        )


def _weighted(weight: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    assert gate is not None, "the module asks for the gates it uses"
    return (weight * gate).sum()
