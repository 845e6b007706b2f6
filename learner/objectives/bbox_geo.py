"""`bbox_geo`: boxes decoded by expectation against their targets, both in [0, 1] (DESIGN 8). Only where the pipeline lists it.

Shape legend: S coord slots, B boxes.
"""

from __future__ import annotations

import torch

from learner.objectives import coord_math
from learner.objectives.interface import LogitNeeds, ObjectiveLoss, RowValues, Supervision
from learner.objectives.weighted_terms import WeightedTerms
from shared.config.pipeline import BboxGeoConfig
from shared.tokens.vocabulary import NUM_BINS


class BboxGeo:
    def __init__(self, weight: float, config: BboxGeoConfig) -> None:
        self._terms = WeightedTerms("bbox_geo", weight, {"smoothl1": config.smoothl1_weight, "ciou": config.ciou_weight})

    @property
    def term_names(self) -> tuple[str, ...]:
        return self._terms.names

    @property
    def needs(self) -> LogitNeeds:
        return LogitNeeds()

    def __call__(self, values: RowValues, supervision: Supervision) -> ObjectiveLoss:
        slots_B4, weight = supervision.boxes
        decoded_B4 = _boxes(coord_math.expected_coordinate(values.coord_logits_SC), slots_B4)
        targets_B4 = _boxes(supervision.coord.targets / (NUM_BINS - 1), slots_B4)
        return self._terms.loss(
            {
                "smoothl1": lambda: (weight * coord_math.smooth_l1(decoded_B4, targets_B4)).sum(),
                "ciou": lambda: (weight * (1.0 - coord_math.ciou(decoded_B4, targets_B4))).sum(),
            }
        )


def _boxes(coordinates_S: torch.Tensor, slots_B4: torch.Tensor) -> torch.Tensor:
    return coord_math.canonical_boxes(coordinates_S[slots_B4])
