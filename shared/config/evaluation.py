"""`evaluation`: what the held-out report says, and how predictions are scored. No effect under `trajectory_pg`, whose reports are of rewards."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt

from shared.config.base import Section, refusal


def _rising(thresholds: tuple[float, ...]) -> tuple[float, ...]:
    if not thresholds or list(thresholds) != sorted(set(thresholds)):
        raise refusal(f"must name at least one threshold, in rising order, got {list(thresholds)}", "write [0.5, 0.75]")
    return thresholds


class EvaluationSection(Section):
    iou_thresholds: Annotated[tuple[Annotated[float, Field(gt=0.0, le=1.0)], ...], Field(strict=False), AfterValidator(_rising)] = (0.5, 0.75)
    """Least IoU of a detection, one set of precision, recall and F1 for each; the first is the one on the progress line."""

    score: Literal["constant", "coord_probability"] = "coord_probability"
    """Confidence of a prediction for COCO AP: 1 for all, or the mean probability that the engine gave its coord tokens."""

    worst_scenes: NonNegativeInt = 8
    """Pictures of the scenes with the lowest F1 in a report."""
