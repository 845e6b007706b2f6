"""Which server will be asked for what in a step, and under which seed: known before the step, so that it is in its plan (spec: server-mode metadata)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.chunking import round_parts
from shared.seeds import request_seed


def server_calls(rounds: Sequence[Sequence[range]], devices: Sequence[int], names: Sequence[str], *, run_seed: int, step: int) -> list[list[dict[str, Any]]]:
    """The calls of each round, as long as no server fails: what one takes over keeps the seeds of its requests, and its rollouts say who answered.

    Args:
        rounds: `[round][rank]`, the positions of a step that each learner rank learns.
        devices: of each server.
    """
    calls: list[list[dict[str, Any]]] = []
    for ranks in rounds:
        calls.append([])
        for part in round_parts(list(map(len, ranks)), devices):
            first = ranks[part.rank].start + part.requests.start
            seed = request_seed(run_seed, step, first)
            calls[-1].append({"server": names[part.engine], "first_position": first, "count": len(part.requests), "seed": seed})
    return calls
