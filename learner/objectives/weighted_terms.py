"""What `coord_reg` and `bbox_geo` share: a module's loss is the weighted sum of its terms (DESIGN 8)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from learner.objectives.interface import ObjectiveLoss


class WeightedTerms:
    """The terms in use. One of weight 0 is not computed: it is no part of the objective, and a log line would suggest that it is."""

    def __init__(self, module: str, module_weight: float, term_weights: Mapping[str, float]) -> None:
        self._module_weight = module_weight
        self._weights = {name: weight for name, weight in term_weights.items() if weight}
        self.names = tuple(f"{module}.{name}" for name in self._weights)

    def __contains__(self, term: str) -> bool:
        return term in self._weights

    def loss(self, compute: Mapping[str, Callable[[], torch.Tensor]]) -> ObjectiveLoss:
        """`compute` gives every term's value, a scalar; those in use are called."""
        terms = [compute[name]() for name in self._weights]
        total = sum((weight * term for weight, term in zip(self._weights.values(), terms, strict=True)), start=torch.zeros(()))
        return ObjectiveLoss(self._module_weight * total, tuple(term.detach() for term in terms))
