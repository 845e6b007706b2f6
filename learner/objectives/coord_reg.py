"""`coord_reg`: the coord slots' distribution against a soft target, and the gates between coord and
text vocabulary (DESIGN 8).
"""

from __future__ import annotations

from functools import cache

import torch

from learner.objectives import coord_math
from learner.objectives.base import LogitNeeds, ObjectiveLoss, RowValues, Supervision
from shared.config.pipeline import CoordRegConfig


class CoordReg:
    """A term of weight 0 is not computed: it is no part of the objective, and a log line would
    suggest that it is.
    """

    def __init__(self, weight: float, config: CoordRegConfig) -> None:
        self._weight = weight
        self._config = config
        weights = {
            "coord_ce": config.coord_ce_weight,
            "soft_ce": config.soft_ce_weight,
            "w1": config.w1_weight,
            "coord_gate": config.coord_gate_weight,
            "text_gate": config.text_gate_weight,
        }
        self._term_weights = {
            term: term_weight for term, term_weight in weights.items() if term_weight
        }

    @property
    def term_names(self) -> tuple[str, ...]:
        return tuple(f"coord_reg.{term}" for term in self._term_weights)

    @property
    def needs(self) -> LogitNeeds:
        temperature = self._config.temperature
        return LogitNeeds(
            text_gate=temperature if "text_gate" in self._term_weights else None,
            coord_gate=temperature if "coord_gate" in self._term_weights else None,
        )

    def __call__(self, values: RowValues, supervision: Supervision) -> ObjectiveLoss:
        text, coord, logits_SC, temperature = (
            supervision.text,
            supervision.coord,
            values.coord_logits_SC,
            self._config.temperature,
        )
        targets_SC = cache(
            lambda: coord_math.soft_targets(
                coord.targets,
                sigma=self._config.target_sigma,
                truncate=self._config.target_truncate,
            )
        )
        compute = {
            "coord_ce": (
                lambda: (
                    coord.weight
                    * coord_math.coord_cross_entropy(
                        logits_SC, coord_math.nearest_bins(coord.targets)
                    )
                ).sum()
            ),
            "soft_ce": (
                lambda: (
                    coord.weight
                    * coord_math.soft_cross_entropy(
                        logits_SC, targets_SC(), temperature=temperature
                    )
                ).sum()
            ),
            "w1": (
                lambda: (
                    coord.weight
                    * coord_math.wasserstein1(logits_SC, targets_SC(), temperature=temperature)
                ).sum()
            ),
            "coord_gate": lambda: _weighted(coord.weight, values.coord_gate_S),
            "text_gate": lambda: _weighted(text.gate_weight, values.text_gate_X),
        }
        terms = [compute[term]() for term in self._term_weights]
        total = sum(
            (
                term_weight * term
                for term_weight, term in zip(self._term_weights.values(), terms, strict=True)
            ),
            start=logits_SC.new_zeros(()),
        )
        return ObjectiveLoss(self._weight * total, tuple(term.detach() for term in terms))


def _weighted(weight: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    assert gate is not None, "the module asks for the gates it uses"
    return (weight * gate).sum()
