"""What tests of backends share: a host for those that live in the learner's process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from engine_support import SmallLearner

from shared.rollouts import Rollout


class ModelHost:
    """`shared.protocols.BackendHost` over the small learner's model. Remembers how often it was away."""

    def __init__(self, learner: SmallLearner) -> None:
        self._learner = learner
        self.is_away = False
        self.num_times_away = 0

    @property
    def model(self) -> Any:
        return self._learner._model

    @property
    def processor(self) -> Any:
        return self._learner._processor

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    @contextmanager
    def away(self, *, weights: bool = True) -> Iterator[None]:
        assert not self.is_away, "the host was sent away twice"
        self.is_away, self.num_times_away = True, self.num_times_away + 1
        try:
            yield
        finally:
            self.is_away = False


def what_was_said(rollouts: Sequence[Rollout]) -> list[tuple[object, ...]]:
    """Everything in a rollout that must not depend on who generated it, when, and beside whom."""
    return [
        (r.step, r.position, r.sample_id, r.prompt_token_ids, r.response_token_ids, r.logprobs, r.stop_token_id, r.stop_token_logprob, r.finish_reason, r.seed)
        for r in rollouts
    ]
