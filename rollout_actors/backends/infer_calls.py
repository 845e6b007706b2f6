"""How a server's share of a round becomes calls of a size that the server takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollout_actors.server.messages import CallLimits, InferCall
from shared.repeat_guard import RepeatGuardSettings
from shared.rollouts import RolloutRequest


def infer_calls(
    requests: Sequence[RolloutRequest],
    limits: CallLimits,
    *,
    run: str | None,
    version: int | None,
    guard: RepeatGuardSettings | None = None,
) -> list[InferCall]:
    """As few as the limits allow, which together hold the requests in their order, to be guarded by
    this rule.

    Raises ValueError naming the sample whose request is too large for a call of its own.
    """
    parts: list[list[RolloutRequest]] = [[]]
    room = limits.max_request_bytes
    for request in requests:
        size = _most_bytes(InferCall.of([request], run=run, version=version, guard=guard))
        if size > limits.max_request_bytes:
            raise ValueError(
                f"takes calls of max_request_bytes = {limits.max_request_bytes}, and sample {request.sample_id} with its images is {size}; start it with "
                f"max_request_bytes={size}, or make the images smaller"
            )
        if size > room or len(parts[-1]) == limits.max_requests:
            parts.append([])
            room = limits.max_request_bytes
        parts[-1].append(request)
        room -= size
    return [InferCall.of(part, run=run, version=version, guard=guard) for part in parts]


def _most_bytes(call: InferCall) -> int:
    """Of its body; a call of several requests is no larger than their own calls together. Writes no image for it, they are most of it."""
    without = [replace(request, images=tuple(replace(image, data=image.data and b"") for image in request.images)) for request in call.requests]
    sizes = [len(image.data) for request in call.requests for image in request.images if image.data is not None]
    return len(call.model_copy(update={"requests": tuple(without)}).body()) + sum(4 * -(-size // 3) for size in sizes)
