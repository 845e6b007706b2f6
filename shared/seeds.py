"""One seed per request (DESIGN 5, decision 10)."""

from __future__ import annotations

import hashlib


def request_seed(run_seed: int, step: int, position: int, turn: int = 0, path: str = "") -> int:
    """The sampling seed of one request: 1..2**31 - 1, a function of its place in the run alone.

    Neither chunking nor the number of actors nor the actor that answers enters. A hash rather than
    arithmetic, so that neighbouring steps, positions and turns share no seeds.
    """
    digest = hashlib.sha256(f"{run_seed}/{step}/{position}/{turn}{path}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % (2**31 - 1) + 1
