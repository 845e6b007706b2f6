"""The policy that a run started with, which `reference_kl` compares the learner's with.

With an adapter it is the learner's own model without it, which costs a forward and no memory. Else
it is the checkpoint of `model.path` a second time, held like the first (`learner.parallel`). Both
are the same after a resume too: a resumed run loads `model.path`, and then the trained tensors of
its checkpoint into the learner's model alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, TypeVarTuple

import torch
from transformers import PreTrainedModel

from learner.model.adapters import without_adapter
from learner.model.loading import LoadedModel
from learner.model.ranks import Ranks
from learner.model.sharding import Parallel, load_parallel
from shared.config import RunConfig

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True, slots=True)
class Reference:
    """The model of the run's start: a copy, or the learner's own without its adapter."""

    learner: PreTrainedModel
    """The learner's model."""
    copy: PreTrainedModel | None
    """The second model, frozen; None with an adapter."""
    parallel: Parallel
    """The sharding of the model that computes: the copy, or the learner's."""

    def forward(self, function: Callable[[PreTrainedModel, *Ts], T], *arguments: *Ts) -> T:
        """Return `function(model, *arguments)`, which is one forward, without gradient.

        Where the model is sharded, all ranks call it at once.
        """
        with torch.no_grad():
            if self.copy is not None:
                return self.parallel.forward(function, self.copy, *arguments)
            with without_adapter(self.learner):
                return self.parallel.forward(function, self.learner, *arguments)


def load_reference(
    config: RunConfig, loaded: LoadedModel, parallel: Parallel, ranks: Ranks
) -> Reference | None:
    """Return the reference of a run that declares `reference_kl`; None for others.

    Args:
        loaded, parallel: the learner's, as `load_parallel` returned them.

    Raises:
        ConfigError, LearnerError: as `load_parallel`.
    """
    if not config.rollout_matching.pipeline.needs_reference:
        return None
    if config.model.adapter is not None:
        return Reference(loaded.model, None, parallel)
    copy, its_parallel = load_parallel(config, loaded.device, ranks, parallel.mesh)
    # `eval` computes the same, since there is no dropout, and recomputes no activations.
    copy.model.requires_grad_(False).eval()
    return Reference(loaded.model, copy.model, its_parallel)
