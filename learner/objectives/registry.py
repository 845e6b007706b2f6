"""The table of objectives (losses), and the function that builds the objectives of a pipeline.

An objective is a class with the interface of `learner.objectives.base.Objective`. A class in your
own module needs no change here (docs/how_to/change_the_algorithm.md). A class of this repository
needs a line in `OBJECTIVES` and an entry in shared/config/pipeline.py. Terms are logged by their
own names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pydantic import ValidationError, create_model

from learner.algorithms.advantages import find_baseline
from learner.objectives.base import ChannelObjectives, Diagnostic, Objective
from learner.objectives.bbox_geo import BboxGeo
from learner.objectives.coord_reg import CoordDiag, CoordReg
from learner.objectives.policy_gradient import PolicyDiag, PolicyGradient
from learner.objectives.reference_kl import ReferenceKL
from learner.objectives.token_ce import TokenCE
from shared.config.base import Section
from shared.config.explain import explain
from shared.config.pipeline import (
    Channel,
    ImportedEntry,
    ObjectiveEntry,
    PipelineSection,
    imported,
)
from shared.errors import ConfigError

OBJECTIVES: dict[str, Callable[[float, Any], Objective]] = {
    "token_ce": TokenCE,
    "coord_reg": CoordReg,
    "bbox_geo": BboxGeo,
    "policy_gradient": PolicyGradient,
    "reference_kl": ReferenceKL,
}
"""The class of each objective, by its name in the configured pipeline.

It is called with `weight` and `config` of its pipeline entry.
"""


def build_objectives(
    pipeline: PipelineSection, channel: Channel, coord_ids_C: torch.Tensor
) -> ChannelObjectives:
    """Build the objectives and diagnostics that `pipeline` enables for `channel`, in its order.

    `coord_ids_C`: int64, the token id of each coordinate bin.

    Raises:
        ConfigError: an imported objective, its settings or an imported baseline are invalid; an
            objective needs the reference but no `reference_kl` is declared; two objectives log the
            same term.
    """
    problems: list[str] = []
    entries = pipeline.active(channel)
    objectives: list[Objective] = []
    term_owners: dict[str, str] = {}
    for entry in entries:
        path = f"rollout_matching.pipeline.objective[{pipeline.objective.index(entry)}]"
        try:
            objective = _build(entry, path)
        except ConfigError as error:
            problems += error.problems
            continue
        objectives.append(objective)
        needs_reference = objective.needs.reference or objective.needs.reference_top
        if needs_reference and not pipeline.needs_reference:
            problems.append(
                f"{path}.name: {entry.name} needs the reference model, but no reference_kl entry"
                " of channel B is enabled; add such an entry (with weight 0 it only measures)"
            )
        for term in objective.term_names:
            if term in term_owners:
                problems.append(
                    f"{path}.name: {entry.name} logs loss/{term}, but {term_owners[term]} logs it"
                    " too; give the term another name in `term_names`"
                )
            term_owners[term] = entry.name
    diagnostics: list[Diagnostic] = [CoordDiag() for _ in pipeline.active_diagnostics(channel)]
    for path, config in pipeline.policy_gradients() if channel is Channel.B else ():
        # A policy gradient can only be judged with its distance from the engine's policy.
        diagnostics.append(PolicyDiag(config))
        try:
            find_baseline(config.advantage_baseline, f"{path}.advantage_baseline")
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return ChannelObjectives(tuple(objectives), tuple(diagnostics), coord_ids_C)


def _build(entry: ObjectiveEntry, path: str) -> Objective:
    """Build one objective. Raises ConfigError if a class from the user's module is invalid."""
    if not isinstance(entry, ImportedEntry):
        return OBJECTIVES[entry.name](entry.weight, entry.config)
    objective_class = _imported_class(entry.name, f"{path}.name")
    # A section with only this field, so that problems name the path of the key.
    section = create_model("Entry", __base__=Section, config=(objective_class.Config, ...))
    try:
        checked: Any = section.model_validate({"config": entry.config})
    except ValidationError as error:
        problems = [explain(section, one) for one in error.errors(include_url=False)]
        raise ConfigError([f"{path}.{problem}" for problem in problems]) from None
    objective: Objective = objective_class(entry.weight, checked.config)
    if entry.advantages is not None and not objective.needs.learned:
        raise ConfigError(
            f"{path}.advantages: has no effect, because {entry.name} does not read sampled tokens;"
            " set learned=True in its `needs`, or remove the key"
        )
    return objective


def _imported_class(name: str, path: str) -> Any:
    """Import the class of `module:Class`. Raises ConfigError if it is no objective."""
    objective_class = imported(name, path)
    class_name = name.partition(":")[2]
    missing = {"Config", "term_names", "needs", "__call__"} - {*dir(objective_class)}
    if missing:
        raise ConfigError(
            f"{path}: {class_name} has no {', '.join(sorted(missing))};"
            " docs/how_to/change_the_algorithm.md shows the interface of an objective"
        )
    if not issubclass(objective_class.Config, Section):
        raise ConfigError(
            f"{path}: {class_name}.Config is not a settings section; derive it from"
            " shared.config.base.Section"
        )
    return objective_class
