"""A backend that returns scripted answers after a fixed time, to test a run's order and timing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rollout_actors.engine.completion import Completion, EngineInfo, StartTime
from shared.errors import RolloutError
from shared.rollouts import Rollout, RolloutRequest, SyncReport, WeightOffer

Script = Callable[[RolloutRequest], Sequence[int]]
"""A function that returns the token ids of the answer to a request.

They include the stop token, if the answer has one.
"""


class ScriptedBackend:
    """A `RolloutBackend` without an engine. Each call of `generate` takes `latency_s` seconds."""

    def __init__(self, name: str, script: Script, *, latency_s: float = 0.0) -> None:
        self._name = name
        self._script = script
        self._latency_s = latency_s
        self.version = 0
        self._closed = False

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        if not requests:
            return []
        if self._closed:
            raise RolloutError("the backend was closed", actor=self._name, phase="generate")
        origin = EngineInfo(self._name, self.version, None, StartTime.now())
        time.sleep(self._latency_s)
        end = time.perf_counter()
        rollouts = []
        for request in requests:
            token_ids = list(self._script(request))[: request.decode.max_new_tokens]
            logprobs = [0.0] * len(token_ids)  # scripted tokens have probability 1
            answer = Completion.up_to_stop(
                request.prompt_token_ids, token_ids, logprobs, request.decode
            )
            rollouts.append(answer.rollout(request, origin, end))
        return rollouts

    def receive_weights(self, offer: WeightOffer) -> SyncReport:
        """Adopt the version of the offer; its weights are ignored."""
        self.version = offer.version
        return SyncReport(version=offer.version, bytes=0, phase_s={}, canary_max_abs=0.0)

    def close(self) -> None:
        self._closed = True
