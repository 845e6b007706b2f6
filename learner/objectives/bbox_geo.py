"""`bbox_geo`: loss between a box's expected coordinates and its targets, in [0, 1] (decision 37).

It is used only if the pipeline lists it.

Shape legend: S coord slots, B boxes.
"""

from __future__ import annotations

import torch

from learner.objectives import coord_math
from learner.objectives.base import LogitNeeds, ObjectiveLoss, RowValues, Supervision
from shared.config.pipeline import BboxGeoConfig
from shared.tokens.vocabulary import NUM_BINS


class BboxGeo:
    """The box loss: smooth-L1 and CIoU between predicted and target boxes, as one weighted loss.

    Training logs no separate IoU metric.
    """

    term_names = ("bbox_geo",)
    needs = LogitNeeds()

    def __init__(self, weight: float, config: BboxGeoConfig) -> None:
        self._weight = weight
        self._config = config

    def __call__(self, values: RowValues, supervision: Supervision) -> ObjectiveLoss:
        slots_B4, weight = supervision.boxes
        # Targets are bins (0..999). Dividing by the last bin brings them to [0, 1].
        decoded_B4 = _boxes(coord_math.expected_coordinate(values.coord_logits_SC), slots_B4)
        targets_B4 = _boxes(supervision.coord.targets / (NUM_BINS - 1), slots_B4)
        smooth_l1 = (weight * coord_math.smooth_l1(decoded_B4, targets_B4)).sum()
        ciou_loss = (weight * (1.0 - coord_math.ciou(decoded_B4, targets_B4))).sum()
        loss = self._config.smoothl1_weight * smooth_l1 + self._config.ciou_weight * ciou_loss
        return ObjectiveLoss(self._weight * loss, (loss.detach(),))


def _boxes(coordinates_S: torch.Tensor, slots_B4: torch.Tensor) -> torch.Tensor:
    return coord_math.canonical_boxes(coordinates_S[slots_B4])
