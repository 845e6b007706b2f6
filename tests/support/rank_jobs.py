"""What ranks do in tests (`rank_support.RankProcesses`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from learner_support import half_right

from learner.learner import Learner
from learner.place import LearnerPlace
from learner.ranks import Rendezvous
from shared.chunking import rank_rounds, rank_share
from shared.config import RunConfig
from shared.config.pipeline import Channel
from shared.reports import RankReport
from shared.schedule import RunSchedule


@dataclass
class Learned:
    reports: list[RankReport]
    weights: dict[str, torch.Tensor]
    """Whole, float32; under fsdp on rank 0 alone."""
    sample_ids: list[list[str]]
    """Of each step's requests."""
    positions: list[list[int]]
    num_rows: int
    """Forwards with a backward, those for the other ranks' sake included."""


def learn(place: LearnerPlace, rendezvous: Rendezvous | None, config: RunConfig, num_steps: int, chunk: int) -> Learned:
    """The first steps of a run, in rounds of at most `chunk` rollouts of each rank; every response is half of the ground truth."""
    learner = Learner(config, place, rendezvous)
    backwards: list[int] = []
    learner._loaded.model.lm_head.register_full_backward_hook(lambda *_: backwards.append(1))
    learned = Learned([], {}, [], [], 0)
    for plan in list(RunSchedule(config).plans())[:num_steps]:
        rollouts = half_right(learner, plan)
        learned.sample_ids.append([sample.sample_id for sample in learner._current.samples])
        learned.positions.append(list(learner._current.share))
        if plan.channel is Channel.B:
            shares = [len(rank_share(plan.num_samples, place.world_size, rank)) for rank in range(place.world_size)]
            for round_ in rank_rounds(shares, chunk):
                part = round_[place.rank]
                learner.accumulate(rollouts[part.start : part.stop])
        learned.reports.append(learner.finish_step())
    learned.weights = whole_weights(learner)
    learned.num_rows = len(backwards)
    learner.close()
    return learned


def whole_weights(learner: Learner) -> dict[str, torch.Tensor]:
    learner._parallel.gather()
    weights = {name: tensor.float().clone() for name, tensor in learner._parallel.weights.tensors()}
    learner._parallel.drop()
    return weights
