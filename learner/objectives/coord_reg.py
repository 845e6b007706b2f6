"""`coord_reg`: the coord slots' distribution against a soft target, and the gates between coord and text vocabulary (DESIGN 8).

Shape legend: N positions, S coord slots, C the 1,000 coord bins, V the vocabulary.
"""

from __future__ import annotations

import torch

from learner.objectives import coord_math
from learner.objectives.interface import CoordSupervision, ObjectiveLoss, TextSupervision
from shared.config.pipeline import CoordRegConfig


class CoordReg:
    """A term of weight 0 is not computed: it is no part of the objective, and a log line would suggest that it is."""

    def __init__(self, weight: float, config: CoordRegConfig, coord_ids_C: torch.Tensor) -> None:
        """`coord_ids_C` is the token id of each bin."""
        self._weight = weight
        self._config = config
        self._coord_ids_C = coord_ids_C
        weights = {
            "coord_ce": config.coord_ce_weight,
            "soft_ce": config.soft_ce_weight,
            "w1": config.w1_weight,
            "coord_gate": config.coord_gate_weight,
            "text_gate": config.text_gate_weight,
        }
        self._weights = {name: weight for name, weight in weights.items() if weight}

    @property
    def term_names(self) -> tuple[str, ...]:
        return tuple(f"coord_reg.{name}" for name in self._weights)

    def __call__(self, logits_NV: torch.Tensor, text: TextSupervision, coord: CoordSupervision) -> ObjectiveLoss:
        slot_logits_SV = logits_NV[coord.at]
        coord_logits_SC = slot_logits_SV[:, self._coord_ids_C]
        targets_SC = coord_math.soft_targets(coord.targets, sigma=self._config.target_sigma, truncate=self._config.target_truncate)
        temperature = self._config.temperature
        compute = {
            "coord_ce": lambda: coord.weight * coord_math.coord_cross_entropy(coord_logits_SC, coord_math.nearest_bins(coord.targets)),
            "soft_ce": lambda: coord.weight * coord_math.soft_cross_entropy(coord_logits_SC, targets_SC, temperature=temperature),
            "w1": lambda: coord.weight * coord_math.wasserstein1(coord_logits_SC, targets_SC, temperature=temperature),
            "coord_gate": lambda: coord.weight * coord_math.gate_mass_leak(slot_logits_SV, self._coord_ids_C, temperature=temperature),
            "text_gate": lambda: text.gate_weight * coord_math.text_gate(logits_NV[text.at], self._coord_ids_C, temperature=temperature),
        }
        terms = [compute[name]().sum() for name in self._weights]
        loss = sum((weight * term for weight, term in zip(self._weights.values(), terms, strict=True)), start=logits_NV.new_zeros(()))
        return ObjectiveLoss(self._weight * loss, tuple(term.detach() for term in terms))
