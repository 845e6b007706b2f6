"""A backend that answers from a script after a fixed time: for whatever is about the order and
timing of a run, not about a model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rollout_actors.engine.completion import Completion, EngineInfo, StartTime
from shared.errors import RolloutError
from shared.rollouts import Rollout, RolloutRequest, SyncReport, WeightOffer

Script = Callable[[RolloutRequest], Sequence[int]]
"""The token ids a request is answered with, its stop token included where it has one."""


class ScriptedBackend:
    """A `RolloutBackend` without an engine. The same request gets the same answer, whoever gives it
    and in whatever company.
    """

    def __init__(self, name: str, script: Script, *, latency_s: float = 0.0) -> None:
        """`latency_s` is the time of one `generate` call, however many requests it has."""
        self._name = name
        self._script = script
        self._latency_s = latency_s
        self._version = 0
        self._closed = False

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        if not requests:
            return []
        if self._closed:
            raise RolloutError("the backend was closed", actor=self._name, phase="generate")
        origin = EngineInfo(self._name, self._version, None, StartTime.now())
        time.sleep(self._latency_s)
        end = time.perf_counter()
        return [self._answer(request).rollout(request, origin, end) for request in requests]

    def receive_weights(self, offer: WeightOffer) -> SyncReport:
        """There are no weights to take: only the version is."""
        self._version = offer.version
        return SyncReport(version=offer.version, bytes=0, phase_s={}, canary_max_abs=0.0)

    @property
    def version(self) -> int:
        return self._version

    def close(self) -> None:
        self._closed = True

    def _answer(self, request: RolloutRequest) -> Completion:
        token_ids = list(self._script(request))[: request.decode.max_new_tokens]
        # A script is certain of what it says.
        return Completion.up_to_stop(
            request.prompt_token_ids, token_ids, [0.0] * len(token_ids), request.decode
        )
