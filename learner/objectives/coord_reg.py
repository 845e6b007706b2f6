"""`coord_reg`: the coord slots' distribution against a soft target, and the gates between coord and text vocabulary (DESIGN 8)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from learner.objectives import coord_math
from learner.objectives.interface import ObjectiveLoss, Supervision
from shared.config.pipeline import CoordRegConfig


@dataclass(frozen=True, slots=True)
class CoordReg:
    weight: float
    config: CoordRegConfig
    name: str = "coord_reg"

    def __call__(self, logits_NV: torch.Tensor, supervision: Supervision) -> ObjectiveLoss:
        config, temperature = self.config, self.config.temperature
        slot_logits_SV = logits_NV[supervision.coord_index_S]
        coord_logits_SC = slot_logits_SV[:, supervision.coord_ids_C]
        targets_SC = coord_math.soft_targets(supervision.coord_bins_S, sigma=config.target_sigma, truncate=config.target_truncate)

        def over_slots(loss_S: torch.Tensor) -> torch.Tensor:
            return (supervision.coord_weight_S * loss_S).sum()

        weighted = {
            "coord_ce": (config.coord_ce_weight, lambda: over_slots(coord_math.coord_cross_entropy(coord_logits_SC, supervision.coord_bins_S))),
            "soft_ce": (config.soft_ce_weight, lambda: over_slots(coord_math.soft_cross_entropy(coord_logits_SC, targets_SC, temperature=temperature))),
            "w1": (config.w1_weight, lambda: over_slots(coord_math.wasserstein1(coord_logits_SC, targets_SC, temperature=temperature))),
            "coord_gate": (
                config.coord_gate_weight,
                lambda: over_slots(coord_math.gate_mass_leak(slot_logits_SV, supervision.coord_ids_C, temperature=temperature)),
            ),
            "text_gate": (config.text_gate_weight, lambda: self._text_gate(logits_NV, supervision)),
        }
        # A term of weight 0 is not computed: it is not part of the objective, and its log line would suggest that it is.
        terms = {name: (weight, term()) for name, (weight, term) in weighted.items() if weight}
        loss = sum((weight * term for weight, term in terms.values()), start=logits_NV.new_zeros(()))
        return ObjectiveLoss(self.weight * loss, {name: term.detach() for name, (_, term) in terms.items()})

    def _text_gate(self, logits_NV: torch.Tensor, supervision: Supervision) -> torch.Tensor:
        leak_T = coord_math.text_gate(logits_NV[supervision.text_index_T], supervision.coord_ids_C, temperature=self.config.temperature)
        return (supervision.gate_weight_T * leak_T).sum()
