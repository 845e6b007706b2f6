"""From the declared pipeline to objective functions. The declaration is complete, so nothing is
added here.
"""

from __future__ import annotations

from typing import assert_never

import torch

from learner.objectives.base import ChannelObjectives, Diagnostic, Objective
from learner.objectives.bbox_geo import BboxGeo
from learner.objectives.coord_diag import CoordDiag
from learner.objectives.coord_reg import CoordReg
from learner.objectives.policy_gradient import PolicyDiag, PolicyGradient
from learner.objectives.token_ce import TokenCE
from shared.config.pipeline import (
    BboxGeoEntry,
    Channel,
    CoordRegEntry,
    ObjectiveEntry,
    PipelineSection,
    PolicyGradientEntry,
    TokenCEEntry,
)
from shared.errors import ConfigError
from shared.metrics import Reduction, metric_of


def build_objectives(
    pipeline: PipelineSection, channel: Channel, coord_ids_C: torch.Tensor
) -> ChannelObjectives:
    """The enabled modules of `channel`, in declared order. `coord_ids_C` is the token id of each
    bin.

    A policy gradient is not to be judged without its distance from the engine's policy, so that it
    is always measured. ConfigError for a module whose numbers are not in the table of metrics: its
    first step could not be logged.
    """
    entries = pipeline.active(channel)
    policies: list[Diagnostic] = [
        PolicyDiag(entry.config) for entry in entries if isinstance(entry, PolicyGradientEntry)
    ]
    diagnostics: tuple[Diagnostic, ...] = (
        *(CoordDiag() for _ in pipeline.active_diagnostics(channel)),
        *policies,
    )
    objectives = tuple(_build(entry) for entry in entries)
    logged: list[tuple[str, Reduction, Objective | Diagnostic]]
    logged = [
        (f"loss/{name}", Reduction.SUM, objective)
        for objective in objectives
        for name in objective.term_names
    ]
    logged += [
        (name, Reduction.MEAN, diagnostic)
        for diagnostic in diagnostics
        for name in diagnostic.names
    ]
    problems = [
        f"rollout_matching.pipeline: {type(module).__name__} gives {name}, which the table of"
        f" shared/metrics.py does not have as a {reduction}; "
        f'add Metric("{name}", Reduction.{reduction.name}, "...") to METRICS there'
        for name, reduction, module in logged
        if (metric := metric_of(name)) is None or metric.reduction is not reduction
    ]
    if problems:
        raise ConfigError(problems)
    return ChannelObjectives(objectives, diagnostics, coord_ids_C)


def _build(entry: ObjectiveEntry) -> Objective:
    match entry:
        case TokenCEEntry():
            return TokenCE(entry.weight)
        case CoordRegEntry():
            return CoordReg(entry.weight, entry.config)
        case BboxGeoEntry():
            return BboxGeo(entry.weight, entry.config)
        case PolicyGradientEntry():
            return PolicyGradient(entry.weight, entry.config)
        case _:
            assert_never(entry)
