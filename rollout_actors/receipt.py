"""What a worker of an engine says it loaded in one update, and the check of it that every way of taking weights makes (DESIGN 9.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import WeightSyncError
from shared.weight_sync import SyncPhase


@dataclass(frozen=True, slots=True)
class Receipt:
    """A worker's account of the full weights of one sync."""

    checksums: list[int]
    """One per bucket, of what was handed to the model."""
    sent: list[int]
    """One per bucket, of what the sender packed."""
    missing: list[str]
    """The engine's parameters that were not loaded."""
    unexpected: list[str]
    """Loaded names that are none of the engine's parameters."""
    load_s: float
    """Seconds in which the model took the weights."""
    verify_s: float
    """Seconds in which checksums were computed."""
    logprobs: list[str]
    """The learner's of the canary; empty where the offer has them. As text: they may be NaN, for which the JSON of a stock server has no number."""


def check_receipts(receipts: Sequence[Receipt], actor: str) -> None:
    """Every worker loaded every parameter of its model and nothing else, and each bucket as it was sent. Raises WeightSyncError(phase="verify")."""
    for receipt in receipts:
        names = [f"not loaded: {name}" for name in receipt.missing] + [f"not a parameter: {name}" for name in receipt.unexpected]
        if names:
            shown = f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
            raise WeightSyncError(shown, actor=actor, phase=SyncPhase.VERIFY, quantity="set of loaded names", size=len(names))
        if len(receipt.checksums) != len(receipt.sent):
            counted = f"{len(receipt.checksums)} buckets arrived with {len(receipt.sent)} checksums; check that learner and engine run the same version"
            raise WeightSyncError(counted, actor=actor, phase=SyncPhase.VERIFY, quantity="number of buckets")
        wrong = [i for i, (got, sent) in enumerate(zip(receipt.checksums, receipt.sent, strict=True)) if got != sent]
        if wrong:
            arrived = f"buckets {wrong} of {len(receipt.sent)} did not arrive as they were sent"
            raise WeightSyncError(arrived, actor=actor, phase=SyncPhase.VERIFY, quantity="bucket checksums", size=len(wrong))
