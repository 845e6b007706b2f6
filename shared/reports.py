"""What a step says, as a value that travels from the learner to the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared.config.pipeline import Channel
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
