"""From the declared pipeline to objective functions. The declaration is complete, so nothing is added here."""

from __future__ import annotations

from learner.objectives.coord_reg import CoordReg
from learner.objectives.interface import Objective
from learner.objectives.token_ce import TokenCE
from shared.config.pipeline import Channel, ObjectiveEntry, PipelineSection, TokenCEEntry


def build_objectives(pipeline: PipelineSection, channel: Channel) -> list[Objective]:
    """The enabled objectives of `channel`, in declared order."""
    return [_build(entry) for entry in pipeline.active(channel)]


def _build(entry: ObjectiveEntry) -> Objective:
    if isinstance(entry, TokenCEEntry):
        return TokenCE(entry.weight)
    return CoordReg(entry.weight, entry.config)
