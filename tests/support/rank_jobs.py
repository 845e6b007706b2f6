"""What ranks do in tests (`rank_support.RankProcesses`)."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from learner_support import half_right
from transformers import AutoModelForImageTextToText

from learner.learner import Learner
from learner.model.ranks import BUCKET_ELEMENTS, LearnerDevice, LearnerPlace, Rendezvous, join_ranks
from shared.chunking import rank_rounds, rank_share
from shared.config import RunConfig
from shared.config.pipeline import Channel
from shared.errors import LearnerError, RolloutError
from shared.metrics import RankReport
from shared.rollouts import Rollout, WeightOffer
from shared.schedule import RunSchedule

CPU = LearnerDevice(torch.device("cpu"))


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


def learn(place: LearnerPlace, rendezvous: Rendezvous | None, config: RunConfig, num_steps: int, chunk: int, checkpoint: Path | None = None) -> Learned:
    """The first steps of a run, in rounds of at most `chunk` rollouts of each rank; every response is half of the ground truth. None: no checkpoint."""
    learner = Learner(config, place, rendezvous)
    backwards: list[int] = []
    learner.loaded.model.lm_head.register_full_backward_hook(lambda *_: backwards.append(1))
    learned = Learned([], {}, [], [], 0)
    for plan in list(RunSchedule(config).plans())[:num_steps]:
        rollouts = half_right(learner, plan)
        (step,) = learner.steps
        learned.sample_ids.append([sample.sample_id for sample in step.work.samples])
        learned.positions.append(list(step.work.share))
        if plan.channel is Channel.B:
            shares = [len(rank_share(plan.num_samples, place.world_size, rank)) for rank in range(place.world_size)]
            for round_ in rank_rounds(shares, chunk):
                part = round_[place.rank]
                learner.accumulate(rollouts[part.start : part.stop])
        learned.reports.append(learner.finish_step())
    learned.weights = whole_weights(learner)
    if checkpoint is not None:
        learner.weight_sync.publisher.save(checkpoint)
    learned.num_rows = len(backwards)
    learner.close()
    return learned


def whole_weights(learner: Learner) -> dict[str, torch.Tensor]:
    learner.model.sharding.gather()
    weights = {name: tensor.float().clone() for name, tensor in learner.model.sharding.weights.tensors()}
    learner.model.sharding.release()
    return weights


def own_config(place: LearnerPlace, rendezvous: Rendezvous | None, configs: list[RunConfig]) -> None:
    """Ranks that were given different configurations start."""
    Learner(configs[place.rank], place, rendezvous)


def collectives(place: LearnerPlace, rendezvous: Rendezvous | None) -> dict[str, Any]:
    ranks = join_ranks(place, rendezvous, CPU, timeout_s=20.0, sums_in_backward=False)
    generator = torch.Generator().manual_seed(place.rank)
    # More than a bucket, and numbers of both kinds.
    gradients = [torch.randn(shape, generator=generator) for shape in ((3, 5), (BUCKET_ELEMENTS + 7,), (2,), ())]
    gradients.append(torch.randn(4, generator=generator).to(torch.bfloat16))
    before = [gradient.clone() for gradient in gradients]
    met = ranks.meet(place.rank == 1)
    ranks.sum_gradients(gradients)
    return {
        "met": met,
        "sum": ranks.sum(place.rank + 1),
        "max": ranks.max(place.rank * 10),
        "any": ranks.any_of([place.rank == 0, place.rank == 1, False]),
        "same": ranks.first_difference([1, -5, 2**40]),
        "different": ranks.first_difference([1, place.rank, 2 + place.rank]),
        # Of the big one its ends: the rest is like them.
        "before": [ends(tensor) for tensor in before],
        "after": [ends(tensor) for tensor in gradients],
        "times": [(wait.name, wait.start_s, wait.end_s) for wait in ranks.take_times()],
        "default_group": torch.distributed.is_initialized(),
    }


def ends(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1)[:8], tensor.reshape(-1)[-8:]])


def fails_on_rank_1(place: LearnerPlace, rendezvous: Rendezvous | None, config: RunConfig) -> None:
    """A step in which rank 1 gets a rollout of another prompt, and rank 0 goes on to the step's end."""
    learner = Learner(config, place, rendezvous)
    rollouts = half_right(learner, RunSchedule(config).plan(1))
    if place.rank == 1:
        rollouts = [replace(rollout, prompt_token_ids=rollout.prompt_token_ids[1:]) for rollout in rollouts]
    learner.accumulate(rollouts)
    learner.finish_step()


def damaged(rollout: Rollout, field: str) -> Rollout:
    wrong: dict[str, Any] = {field: (-99,) * len(rollout.response_token_ids)}
    return replace(rollout, **wrong)


def fails_and_saves(place: LearnerPlace, rendezvous: Rendezvous | None, config: RunConfig, damage: str, at_end: bool, folder: Path) -> Any:
    """Rank 1 finds this field of its rollouts wrong, in the round or at the step's end; then the ranks save. The rank's error."""
    learner, error = Learner(config, place, rendezvous), None
    rollouts = half_right(learner, RunSchedule(config).plan(1))
    if place.rank == 1:
        rollouts = [damaged(rollout, damage) for rollout in rollouts]
    try:
        learner.accumulate(rollouts)
        if at_end:
            learner.finish_step()
    except (RolloutError, LearnerError) as raised:
        error = raised
    learner.weight_sync.publisher.save(folder)
    learner.close()
    return error


def not_finite(place: LearnerPlace, rendezvous: Rendezvous | None, config: RunConfig) -> None:
    """Rank 1 alone comes to a gradient that is no number."""
    learner = Learner(config, place, rendezvous)
    learner.accumulate(half_right(learner, RunSchedule(config).plan(1)))
    if place.rank == 1:
        parameter = next(learner.loaded.model.parameters())
        parameter.grad = torch.full_like(parameter, float("nan"))
    learner.finish_step()


def ends_itself_on_rank_1(place: LearnerPlace, rendezvous: Rendezvous | None) -> None:
    ranks = join_ranks(place, rendezvous, CPU, timeout_s=60.0, sums_in_backward=False)
    ranks.barrier()
    if place.rank == 1:
        os._exit(1)
    with ranks.of_phase("finish_step"):
        ranks.barrier()


@dataclass
class Stopped:
    error: LearnerError | None
    num_rows: int
    """Forwards of the step that was left."""
    num_updates: int
    saved_last_update: bool


def is_stopped(place: LearnerPlace, rendezvous: Rendezvous | None, config: RunConfig, folder: Path) -> Stopped:
    """The last rank alone is told to stop, in the first row of the second step, which is one of channel A; then the ranks save."""
    learner = Learner(config, place, rendezvous)
    plans = list(RunSchedule(config).plans())
    learner.next_requests(plans[0])
    learner.finish_step()
    updated = whole_weights(learner)
    learner.next_requests(plans[1])
    rows: list[int] = []
    error: LearnerError | None = None

    def count(*_: Any) -> None:
        rows.append(1)
        if place.rank == place.world_size - 1:
            learner.stop()

    learner.loaded.model.lm_head.register_full_backward_hook(count)
    try:
        learner.finish_step()
    except LearnerError as stopped:
        error = stopped
    learner.weight_sync.publisher.save(folder)
    saved = dict(AutoModelForImageTextToText.from_pretrained(folder, dtype="auto").named_parameters())
    same = all(torch.equal(saved[name], weight) for name, weight in updated.items())
    learner.close()
    return Stopped(error, len(rows), learner.num_updates, same)


@dataclass
class Synced:
    offer: WeightOffer | None
    weights: dict[str, torch.Tensor]
    """What would be sent, in the offer's number type; empty where nothing is."""
    versions: list[int]
    """Before the offer, after it and after the sync."""
    held_out: list[int]
    """Positions of the held-out requests."""
    saved: dict[str, torch.Tensor]
    """The checkpoint, loaded by transformers."""
    tied: bool
    dtypes: set[str]
    """That the checkpoint's config.json names."""
    logprobs: tuple[float, ...]
    """Of the canary, which the offer lacks."""


def sync_and_save(place: LearnerPlace, rendezvous: Rendezvous | None, config: RunConfig, folder: Path) -> Synced:
    learner = Learner(config, place, rendezvous)
    versions = [learner.weight_sync.publisher.version]
    offer = learner.weight_sync.publisher.offer()
    versions.append(learner.weight_sync.publisher.version)
    logprobs = learner.model.sharding.forward(learner.weight_sync.publisher.canary.logprobs)
    weights = dict(learner.model.sharding.weights.tensors()) if place.rank == 0 else {}
    learner.weight_sync.publisher.done()
    versions.append(learner.weight_sync.publisher.version)
    learner.weight_sync.publisher.save(folder)
    loaded = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto")
    saved = dict(loaded.named_parameters())
    held_out = [request.position for request in learner.held_out_requests(0)]
    learner.close()
    tied = loaded.lm_head.weight is loaded.model.language_model.embed_tokens.weight
    described = json.loads((folder / "config.json").read_text())
    dtypes = {part["dtype"] for part in (described, described["text_config"], described["vision_config"])}
    return Synced(offer, weights, versions, held_out, saved, tied, dtypes, logprobs)


def drifts(place: LearnerPlace, rendezvous: Rendezvous | None, config: RunConfig) -> None:
    """One bit of one of rank 1's weights is another."""
    learner = Learner(config, place, rendezvous)
    if place.rank == 1:
        weight = learner.loaded.model.get_parameter("model.language_model.layers.1.mlp.up_proj.weight")
        weight.data.view(torch.int32)[0, 0] ^= 1
    learner.weight_sync.publisher.offer()
