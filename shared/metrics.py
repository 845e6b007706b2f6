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


class MetricSums:
    """Sums of named numbers over the rows and samples of a step."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def as_dict(self) -> dict[str, float]:
        return dict(self._sums)
