"""Rollouts as the calls of the model that they consist of, and what is learned of them, merged or each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from rollout_actors.environments.training.examples import merge_trajectories_for_training, process_trajectories_for_training
from rollout_actors.environments.types import State
from shared.records import ImageRef
from shared.trajectory import TrainingExample


class Call(NamedTuple):
    """A call of the model as an engine answered it with the weights of version 0."""

    prompt_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]
    """Of the sampled tokens."""
    images: tuple[ImageRef, ...] = ()
    """Of the prompt."""


def examples_of(calls: Sequence[Call], *, merges: bool, advantage: float | None = None) -> list[TrainingExample]:
    """Make the examples of one rollout, with the images that each shows, as the runner does."""
    trajectory = [
        {
            "prompt": [{"role": "user", "content": [{"image": one.sha256} for one in call.images]}],
            "completion": [],
            "response": None,
            "tokens": {
                "prompt_ids": call.prompt_ids,
                "prompt_mask": [0] * len(call.prompt_ids),
                "completion_ids": call.sampled_ids,
                "completion_mask": [1] * len(call.sampled_ids),
                "completion_logprobs": call.logprobs,
            },
            "reward": None,
            "advantage": None,
            "extras": {"weight_version": 0},
        }
        for call in calls
    ]
    state = State(trajectory=trajectory, reward=0.0, advantage=advantage, error=None)
    merged, apart = merge_trajectories_for_training, process_trajectories_for_training
    examples = merged([state]).examples if merges else apart([state])
    return [replace(made, images=calls[made.steps[-1]].images) for made in examples]
