"""`checkpoint`: what is kept of the weights."""

from __future__ import annotations

from shared.config.base import Section


class CheckpointSection(Section):
    save_final: bool = True
    """Save the trained model at the end, as an ordinary checkpoint in the run's folder."""
