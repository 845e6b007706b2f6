"""What ranks that learn trajectories do in tests (`rank_support.RankProcesses`)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from config_support import GROUP
from rank_jobs import whole_weights
from trajectory_support import EXAMPLES, begin, make_learner
from transformers import AutoModelForCausalLM

from learner.model.ranks import LearnerPlace, Rendezvous
from shared.chunking import rank_rounds, rank_share
from shared.config import RunConfig
from shared.config.derive import is_sharded
from shared.metrics import RankReport
from shared.schedule import RunSchedule
from shared.trajectory import EnvironmentRequest


@dataclass
class Learned:
    reports: list[RankReport]
    requests: list[list[EnvironmentRequest]]
    """Of each step."""
    held_out: list[EnvironmentRequest]
    weights: dict[str, torch.Tensor]
    """Whole, float32; under fsdp on rank 0 alone."""
    num_rows: int
    """Forwards with a backward, those for the other ranks' sake included."""


def learn(place: LearnerPlace, rendezvous: Rendezvous | None, config: RunConfig, num_steps: int, chunk: int, fails: Collection[int] = ()) -> Learned:
    """The first steps of a run, in rounds of at most `chunk` examples of each rank. The rollouts at the positions of `fails` fail in every step."""
    learner = make_learner(config, EXAMPLES, place, rendezvous)
    backwards: list[int] = []
    learner.loaded.model.lm_head.register_full_backward_hook(lambda *_: backwards.append(1))
    # A sharded rank has no whole model that could answer, and so only a first step.
    first_weights = AutoModelForCausalLM.from_pretrained(config.model.path) if is_sharded(config) else None
    assert first_weights is None or num_steps == 1
    learned = Learned([], [], learner.held_out_requests(0), {}, 0)
    for plan in list(RunSchedule(config).plans())[:num_steps]:
        groups = begin(learner, plan, fails=fails, model=first_weights)
        learned.requests.append(learner.steps[-1].work.requests())
        shares = [len(rank_share(plan.num_samples // GROUP, place.world_size, rank)) for rank in range(place.world_size)]
        for round_ in rank_rounds(shares, chunk):
            part = round_[place.rank]
            learner.accumulate(groups[part.start : part.stop])
        learned.reports.append(learner.finish_step())
    learned.weights = whole_weights(learner)
    learned.num_rows = len(backwards)
    learner.close()
    return learned
