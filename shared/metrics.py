"""What a step and a held-out report say, as values that travel from the learner to the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared.config.pipeline import Channel
from shared.evaluation import DetectionCounts
from shared.timeline import Span


@dataclass(frozen=True, slots=True)
class StepReport:
    step: int
    channel: Channel
    weight_version: int
    """Of the weights the step's rollouts came from."""
    metrics: Mapping[str, float]
    """`loss/...`, `rollout/...`, `packing/...`, `optim/...`, `time/...`; no IoU, ever."""
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Detection on the held-out samples with greedy rollouts."""

    step: int
    """Steps done before it."""
    weight_version: int
    num_samples: int
    counts: DetectionCounts
    wall_s: float
    """Generation and scoring."""
