"""`timeouts`: the longest each kind of wait may take, in seconds. A wait that ends so stops the run with what to check."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat

from shared.config.base import Section
from shared.errors import Limit


class TimeoutsSection(Section):
    start_s: PositiveFloat = 300.0
    """Until the learner and every engine are ready."""

    generate_s: PositiveFloat = 300.0
    """One round of rollouts, of training or held-out. With an environment: one call of the model; an environment actor's whole part of a round, however many
    turns its rollouts have, may take twice as long."""

    learn_s: PositiveFloat = 600.0
    """Learning one round, or finishing a step. Also a wait of learner ranks for each other, held-out requests and scores, and saving."""

    sync_phase_s: PositiveFloat = 60.0
    """Each phase of a weight sync; the joining of servers has
    `rollout_matching.vllm.server.timeout_s`."""

    interrupt_s: PositiveFloat = 60.0
    """From Ctrl-C, SIGTERM or a failed rollout or sync until the weights of the last finished update are saved: the row that is being learned, the token that
    a learner rank is generating itself or the sync that is running, and the writing."""

    def limit(self, key: Literal["start_s", "generate_s", "learn_s", "sync_phase_s", "interrupt_s"]) -> Limit:
        return Limit(self.model_dump()[key], f"timeouts.{key}")
