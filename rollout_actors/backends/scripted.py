"""A backend that answers from a script after a fixed time: for whatever is about the order and timing of a run, not about a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from shared.errors import RolloutError
from shared.rollouts import FinishReason, Rollout, RolloutRequest, SyncReport, WeightOffer

Script = Callable[[RolloutRequest], Sequence[int]]
"""The token ids a request is answered with, its stop token included where it has one."""


class ScriptedBackend:
    """A `RolloutBackend` without an engine. The same request gets the same answer, whoever gives it and in whatever company."""

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
        started_s, started = time.time(), time.perf_counter()
        time.sleep(self._latency_s)
        return [self._rollout(request, started_s, time.perf_counter() - started) for request in requests]

    def receive_weights(self, offer: WeightOffer) -> SyncReport:
        """There are no weights to take: only the version is."""
        self._version = offer.version
        return SyncReport(version=offer.version, bytes=0, phase_s={}, canary_max_abs=0.0)

    @property
    def version(self) -> int:
        return self._version

    def close(self) -> None:
        self._closed = True

    def _rollout(self, request: RolloutRequest, started_s: float, generate_s: float) -> Rollout:
        answer = list(self._script(request))[: request.decode.max_new_tokens]
        end = next((i for i, token_id in enumerate(answer) if token_id in request.decode.stop_token_ids), len(answer))
        stopped = end < len(answer)
        return Rollout(
            step=request.step,
            position=request.position,
            sample_id=request.sample_id,
            prompt_token_ids=request.prompt_token_ids,
            response_token_ids=tuple(answer[:end]),
            stop_token_id=answer[end] if stopped else None,
            # A script is certain of what it says.
            logprobs=(0.0,) * end if request.decode.return_logprobs else None,
            stop_token_logprob=0.0 if stopped and request.decode.return_logprobs else None,
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            forced_positions=(),
            weight_version=self._version,
            actor=self._name,
            attempt=0,
            seed=request.seed,
            generate_s=generate_s,
            started_s=started_s,
        )
