"""One seed per request (decision 10)."""

from __future__ import annotations

import hashlib


def request_seed(run_seed: int, step: int, position: int, turn: int = 0, path: str = "") -> int:
    """Return the sampling seed of one request, 1..2**31 - 1.

    It depends on the request's place in the run alone, not on chunking or on the answering actor.
    A hash rather than arithmetic, so that neighbouring steps, positions and turns share no seeds.
    """
    digest = hashlib.sha256(f"{run_seed}/{step}/{position}/{turn}{path}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % (2**31 - 1) + 1
