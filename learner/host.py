"""What a learner rank offers to a backend that lives in its process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from learner.learner import Learner
from learner.offload import offloaded, require_offload
from shared.config import RunConfig
from shared.errors import RolloutError


class LearnerHost:
    """`shared.protocols.BackendHost` of one rank."""

    def __init__(self, config: RunConfig, learner: Learner) -> None:
        """Raises ConfigError where `rollout_matching.offload` asks for what cannot be done here."""
        self._config = config
        self._learner = learner
        require_offload(config, learner.loaded.device)

    @property
    def name(self) -> str:
        return self._learner.name

    @property
    def model(self) -> Any:
        return self._learner.loaded.model

    @property
    def processor(self) -> Any:
        return self._learner.loaded.processor

    def require_going_on(self) -> None:
        if self._learner.is_told_to_stop:
            raise RolloutError("told to stop, because the run is being ended", actor=self.name, phase="generate")

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._learner.parallel.weights.tensors()

    def offloaded(self, *, model: bool = True) -> AbstractContextManager[None]:
        loaded = self._learner.loaded
        return offloaded(self._config, loaded.model, self._learner.updater, loaded.device, with_model=model)
