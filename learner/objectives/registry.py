"""From the declared pipeline to objective functions. The declaration is complete, so nothing is added here."""

from __future__ import annotations

from typing import assert_never

import torch

from learner.objectives.bbox_geo import BboxGeo
from learner.objectives.coord_diag import CoordDiag
from learner.objectives.coord_reg import CoordReg
from learner.objectives.interface import ChannelObjectives, Objective
from learner.objectives.token_ce import TokenCE
from shared.config.pipeline import BboxGeoEntry, Channel, CoordRegEntry, ObjectiveEntry, PipelineSection, TokenCEEntry


def build_objectives(pipeline: PipelineSection, channel: Channel, coord_ids_C: torch.Tensor) -> ChannelObjectives:
    """The enabled modules of `channel`, in declared order. `coord_ids_C` is the token id of each bin."""
    diagnostics = tuple(CoordDiag() for _ in pipeline.active_diagnostics(channel))
    return ChannelObjectives(tuple(_build(entry) for entry in pipeline.active(channel)), diagnostics, coord_ids_C)


def _build(entry: ObjectiveEntry) -> Objective:
    match entry:
        case TokenCEEntry():
            return TokenCE(entry.weight)
        case CoordRegEntry():
            return CoordReg(entry.weight, entry.config)
        case BboxGeoEntry():
            return BboxGeo(entry.weight, entry.config)
        case _:
            assert_never(entry)
