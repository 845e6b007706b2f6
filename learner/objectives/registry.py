"""From the declared pipeline to objective functions. The declaration is complete, so nothing is added here."""

from __future__ import annotations

import torch

from learner.objectives.coord_reg import CoordReg
from learner.objectives.interface import Objective
from learner.objectives.token_ce import TokenCE
from shared.config.pipeline import Channel, ObjectiveEntry, PipelineSection, TokenCEEntry


def build_objectives(pipeline: PipelineSection, channel: Channel, coord_ids_C: torch.Tensor) -> list[Objective]:
    """The enabled objectives of `channel`, in declared order. `coord_ids_C` is the token id of each bin."""
    return [_build(entry, coord_ids_C) for entry in pipeline.active(channel)]


def _build(entry: ObjectiveEntry, coord_ids_C: torch.Tensor) -> Objective:
    if isinstance(entry, TokenCEEntry):
        return TokenCE(entry.weight)
    return CoordReg(entry.weight, entry.config, coord_ids_C)
