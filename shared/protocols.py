"""The plugs between the packages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shared.rollouts import Rollout, RolloutRequest, SyncReport, WeightOffer


class RolloutBackend(Protocol):
    """Something that turns requests into rollouts and takes weights."""

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """One rollout per request, in the same order. No requests: no call to any engine. Raises RolloutError."""
        ...

    def receive_weights(self, offer: WeightOffer) -> SyncReport:
        """Take and verify the offered weights; afterwards `version` is the offer's. Raises WeightSyncError."""
        ...

    @property
    def version(self) -> int:
        """The version of the weights being served; 0 before the first sync."""
        ...

    def close(self) -> None:
        """Release the engine and its processes. Twice is harmless."""
        ...
