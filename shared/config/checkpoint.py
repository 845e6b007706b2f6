"""`checkpoint`: what is kept of the weights."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from shared.config.base import Section


class CheckpointSection(Section):
    save_final: bool = True
    """Save the trained model at the end, as an ordinary checkpoint in the run's folder."""

    save_steps: PositiveInt | None = None
    """Save after every this many updates too; null: not."""

    save_minutes: PositiveFloat | None = 15.0
    """Save after an update, too, when the newest checkpoint, or the start, is this many minutes ago; null: not. What is learned does not depend on it."""

    keep_last: PositiveInt = 2
    """Checkpoints of `save_steps` and `save_minutes` that are kept, the newest."""

    keep_best: NonNegativeInt = 0
    """Checkpoints that are kept for their held-out F1 (at the first of `evaluation.iou_thresholds`) or, of environments, mean reward, the best; one is
    considered at every report."""

    save_on_interrupt: bool = True
    """Save the weights of the last finished update when the run is ended by Ctrl-C, by SIGTERM, or by a rollout or a sync that failed."""
