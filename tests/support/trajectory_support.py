"""A learner of trajectories without engines, and rollouts of an environment that nobody had to run."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
from PIL import Image

from learner.learner import Learner
from learner.model.ranks import LearnerPlace, ReceiverGroup
from shared.config import RunConfig
from shared.metrics import StepReport, merge_reports
from shared.records import ImageRef
from shared.schedule import StepPlan
from shared.trajectory import EnvironmentRequest, EnvironmentRollout, ExampleCounts, TrainingExample
from shared.weight_sync.transports import Transport

ALONE = LearnerPlace(Transport.GLOO, (ReceiverGroup(1),))
EXAMPLES = ExampleCounts(train=20, held_out=7)
SCRIPTED = "scripted-environment"
"""Whose rollouts they are."""

Group = tuple[EnvironmentRollout, ...]


def make_learner(config: RunConfig, examples: ExampleCounts = EXAMPLES, place: LearnerPlace = ALONE, rendezvous: Any = None) -> Learner:
    return Learner(config, place, rendezvous, examples)


def finish_step(learner: Learner) -> StepReport:
    """The step as its only rank reports it."""
    return merge_reports([learner.finish_step()])


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in learner.loaded.model.named_parameters()}


def begin(learner: Learner, plan: StepPlan, **how: Any) -> list[Group]:
    """Begin a step, and answer its requests: see `rollouts_for`."""
    return rollouts_for(learner, learner.next_requests(plan), **how)


def rollouts_for(
    learner: Learner,
    requests: Sequence[EnvironmentRequest],
    *,
    version: int = 0,
    reward: Callable[[int], float] | None = None,
    fails: Collection[int] = (),
    drift: float = 0.0,
    model: Any = None,
    examples_of: Callable[[int], Sequence[TrainingExample]] | None = None,
) -> list[Group]:
    """One group each, whose tokens follow from its example and the step. By the position's remainder of 3: a rollout of one turn; of two, which are one
    example; of two that are one example each.

    Args:
        reward: of a position; None: from a list, mixed.
        fails: positions of rollouts that have failed.
        drift: by about how much log-probabilities differ from those of the learner's weights, as of older ones.
        model: a whole one with the learner's weights; None: the learner's own.
        examples_of: a position, made by hand, with everything but rewards and advantages; None: as above.
    """
    loaded = learner.loaded
    engine = _Engine(loaded.model if model is None else model, loaded.banned_token_ids, len(loaded.tokenizer), drift)

    def made(request: EnvironmentRequest, example: int, position: int) -> Sequence[TrainingExample]:
        return _examples(engine, request.step, example, position, version) if examples_of is None else examples_of(position)

    return [_group(made, request, reward or _mixed_reward, fails) for request in requests]


def picture(width: int, height: int, seed: int = 0) -> ImageRef:
    """Noise, as a file."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return ImageRef(path=None, data=file.getvalue(), sha256=hashlib.sha256(file.getvalue()).hexdigest())


@dataclass(frozen=True, slots=True)
class _Engine:
    model: Any
    banned_token_ids: tuple[int, ...]
    vocabulary: int
    drift: float

    def ids(self, count: int, random: np.random.Generator) -> list[int]:
        allowed = [token_id for token_id in range(self.vocabulary) if token_id not in self.banned_token_ids]
        chosen: list[int] = random.choice(allowed, count).tolist()
        return chosen

    def logprobs(self, token_ids: Sequence[int], mask: Sequence[int], random: np.random.Generator) -> list[float]:
        """[L], 0 outside the mask."""
        values = logprobs_of(self.model, token_ids, self.banned_token_ids)
        return [value + float(random.normal(0.0, self.drift)) if is_learned else 0.0 for value, is_learned in zip(values, mask, strict=True)]


def _mixed_reward(position: int) -> float:
    return (0.25, 1.0, 0.0, 0.5, 0.75)[position % 5]


def _group(
    made: Callable[[EnvironmentRequest, int, int], Sequence[TrainingExample]],
    request: EnvironmentRequest,
    reward: Callable[[int], float],
    fails: Collection[int],
) -> Group:
    (group,) = request.groups
    rewards = tuple(reward(position) for position in group.positions if position not in fails)
    rollouts = []
    for position in group.positions:
        examples = made(request, group.example, position)
        has_failed = position in fails
        rollouts.append(
            EnvironmentRollout(
                position=position,
                example=group.example,
                reward=0.0 if has_failed else reward(position),
                metrics={"exact": 0.0 if has_failed else reward(position)},
                error="ZeroDivisionError: no such luck" if has_failed else None,
                is_truncated=False,
                num_turns=1 if position % 3 == 0 else 2,
                num_tokens=sum(example.num_learned for example in examples),
                num_length_limited=0,
                num_splits=len(examples) - 1,
                examples=()
                if has_failed
                else tuple(
                    replace(example, reward=reward(position), advantage=reward(position) - fmean(rewards), group_rewards=rewards) for example in examples
                ),
                prompt=[{"role": "user", "content": f"example {group.example}"}],
                completion=[{"role": "assistant", "content": f"position {position}"}],
                actor=SCRIPTED,
                started_s=100.0 + position,
                generate_s=0.5,
            )
        )
    return tuple(rollouts)


def _examples(engine: _Engine, step: int, example: int, position: int, version: int) -> list[TrainingExample]:
    random = np.random.default_rng([step, position])
    prompt = engine.ids(4 + example % 5, np.random.default_rng(example))
    first, between, second = (engine.ids(count, random) for count in (random.integers(1, 5), 3, random.integers(1, 4)))
    fields = {"reward": 0.0, "example_id": example, "weight_version": version, "rollout": position}
    turns = [(prompt, first)] if position % 3 == 0 else [(prompt, first), (between if position % 3 == 2 else [*prompt, *first, *between], second)]
    if position % 3 == 1:
        token_ids = [*prompt, *first, *between, *second]
        mask = [0] * len(prompt) + [1] * len(first) + [0] * len(between) + [1] * len(second)
        ends = len(prompt) + len(first), len(token_ids)
        logprobs = engine.logprobs(token_ids, mask, random)
        return [TrainingExample(token_ids, logprobs, mask, steps=(0, 1), step_ends=ends, **fields)]
    made = []
    for number, (prompt_ids, sampled) in enumerate(turns):
        token_ids, mask = [*prompt_ids, *sampled], [0] * len(prompt_ids) + [1] * len(sampled)
        made.append(TrainingExample(token_ids, engine.logprobs(token_ids, mask, random), mask, steps=(number,), **fields))
    return made


@torch.no_grad()
def logprobs_of(model: Any, token_ids: Sequence[int], banned_token_ids: Sequence[int] = ()) -> list[float]:
    """[L], 0 at the first: as an engine with these weights gives them at temperature 1."""
    logits = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].float()
    logits[:, list(banned_token_ids)] = -torch.inf
    logprobs = logits[:-1].log_softmax(-1)[range(len(token_ids) - 1), token_ids[1:]]
    return [0.0, *logprobs.tolist()]
