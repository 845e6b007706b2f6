"""The seed of an engine's sampling for each request (decision 10)."""

from __future__ import annotations

import hashlib


def request_seed(run_seed: int, step: int, position: int, turn: int = 0, path: str = "") -> int:
    """Return the seed of an engine's sampling for one request, 1..2**31 - 1.

    It depends only on the request's place in the run, not on rounds or on the engine that answers.
    It is a hash, so that neighbouring steps, positions and turns have unrelated seeds.

    Args:
        position: index of the rollout in the step, over all learner ranks.
        turn: index of the model call in the rollout.
        path: path of a nested rollout below the outer rollout; empty for the outer rollout.
    """
    digest = hashlib.sha256(f"{run_seed}/{step}/{position}/{turn}{path}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % (2**31 - 1) + 1
