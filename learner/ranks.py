"""The learner ranks of a run, as one of them sees the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch


class Ranks(Protocol):
    """Every method but the properties is a collective: all ranks call it, in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def sum(self, value: int) -> int:
        """Over all ranks."""
        ...

    def max(self, value: int) -> int:
        """Over all ranks."""
        ...

    def sum_gradients(self, gradients: Iterable[torch.Tensor]) -> None:
        """In place, over all ranks: afterwards every rank holds the same bits."""
        ...

    def barrier(self) -> None: ...


class OneRank:
    """A learner of one rank: there is nobody to ask."""

    rank = 0
    world_size = 1

    def sum(self, value: int) -> int:
        return value

    def max(self, value: int) -> int:
        return value

    def sum_gradients(self, gradients: Iterable[torch.Tensor]) -> None:
        pass

    def barrier(self) -> None:
        pass
