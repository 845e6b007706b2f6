"""`timeouts`: the longest each kind of wait may take, in seconds. A wait that ends so stops the run with what to check."""

from __future__ import annotations

from pydantic import PositiveFloat

from shared.config.base import Section


class TimeoutsSection(Section):
    start_s: PositiveFloat = 300.0
    """Until the learner and every actor are ready."""

    generate_s: PositiveFloat = 300.0
    """One round of rollouts, of training or held-out."""

    learn_s: PositiveFloat = 600.0
    """Learning one round, or finishing a step. Also a wait of learner ranks for each other, held-out requests and scores, and saving."""

    sync_phase_s: PositiveFloat = 60.0
    """Each phase of a weight sync."""
