"""The table of objectives, and the step from a declared pipeline to objective functions.

A further objective is a class with this interface (`learner.objectives.base.Objective`), a line in
`OBJECTIVES` and its entry in shared/config/pipeline.py; its terms are logged by their own names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from learner.objectives.base import ChannelObjectives, Diagnostic, Objective
from learner.objectives.bbox_geo import BboxGeo
from learner.objectives.coord_diag import CoordDiag
from learner.objectives.coord_reg import CoordReg
from learner.objectives.policy_gradient import PolicyDiag, PolicyGradient
from learner.objectives.token_ce import TokenCE
from shared.config.pipeline import Channel, PipelineSection
from shared.errors import ConfigError
from shared.metrics import Reduction, metric_of

OBJECTIVES: dict[str, Callable[[float, Any], Objective]] = {
    "token_ce": TokenCE,
    "coord_reg": CoordReg,
    "bbox_geo": BboxGeo,
    "policy_gradient": PolicyGradient,
}
"""The class of each module, made of its entry's `weight` and `config`."""


def build_objectives(
    pipeline: PipelineSection, channel: Channel, coord_ids_C: torch.Tensor
) -> ChannelObjectives:
    """Build the enabled modules of `channel`, in declared order.

    `coord_ids_C` is the token id of each bin. ConfigError for a diagnostic whose numbers are not in
    the table of metrics: its first step could not be logged.
    """
    entries = pipeline.active(channel)
    objectives = tuple(OBJECTIVES[entry.name](entry.weight, entry.config) for entry in entries)
    diagnostics: list[Diagnostic] = [CoordDiag() for _ in pipeline.active_diagnostics(channel)]
    # A policy gradient is not to be judged without its distance from the engine's policy.
    diagnostics += [
        PolicyDiag(entry.config) for entry in entries if entry.name == "policy_gradient"
    ]
    problems = []
    for diagnostic in diagnostics:
        for name in diagnostic.names:
            metric = metric_of(name)
            if metric is None or metric.reduction is not Reduction.MEAN:
                problems.append(
                    f"rollout_matching.pipeline: {type(diagnostic).__name__} gives {name}, which"
                    " the table of shared/metrics.py does not have as a mean; "
                    f'add Metric("{name}", Reduction.MEAN, "...") to METRICS there'
                )
    if problems:
        raise ConfigError(problems)
    return ChannelObjectives(objectives, tuple(diagnostics), coord_ids_C)
