"""A vLLM engine that answers rollout requests and receives weights from the learner.

This module does not use Ray: `rollout_actors.engine.actor` runs an engine in its own process.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from vllm import SamplingParams, TokensPrompt
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from rollout_actors.engine.completion import EngineInfo, StartTime
from rollout_actors.engine.failure import EngineEndedError, EngineFailures
from rollout_actors.engine.left_over import EngineProcesses
from rollout_actors.engine.settings import EngineSettings, engine_arguments
from rollout_actors.engine.vllm_io import (
    probe_params,
    probe_prompt,
    probe_scores,
    request_prompt,
    sampling_params,
    to_completion,
)
from rollout_actors.repeat_guard.rule import engine_rule, guard_call, require_guard
from rollout_actors.weight_sync.adapters import AdapterLoader
from rollout_actors.weight_sync.receiver import TransferGroup, WeightReceiver
from shared.errors import LostStartError, RolloutError
from shared.protocols import CLOSE_S
from shared.rollouts import Rollout, RolloutRequest, SyncReport, WeightOffer
from shared.tokens.repeat_guard import RepeatGuardSettings, RepeatRule
from shared.weight_sync.canary import CanaryProbe, Scores
from shared.weight_sync.phases import SyncPhase

T = TypeVar("T")

WATCH_S = 1.0
"""Interval in seconds at which a waiting call checks whether vLLM's process has died."""


class VllmEngine:
    """The engine of a rollout actor: vLLM's `AsyncLLM`. It samples only with verified weights."""

    process = ""
    """Id of the server that the engine uses: empty, because there is no server."""

    def __init__(
        self,
        name: str,
        settings: EngineSettings,
        *,
        index: int = 0,
        processes: EngineProcesses | None = None,
    ) -> None:
        """Store the arguments; `start` uses them.

        Args:
            index: the engine's number in the run. It determines the ranks of its workers in the
                process group of a weight sync.
            processes: the processes of the engine that this engine replaces; `start` kills those
                that still exist. None: they are not known.
        """
        self.name = name
        self._processes = processes
        self._settings = settings
        # Rank 0 is the sender. If engines had the same offset, joining would hang.
        self._rank_offset = 1 + index * settings.tensor_parallel_size
        self._llm: AsyncLLM | None = None
        self._failures = EngineFailures()
        self._ended: tuple[str, str] | None = None
        """The result of `_end`, after its first call."""
        self.intake: WeightReceiver | None = None
        """Receives new weights; None before the start."""
        self._num_probes = 0
        self._num_finished_tokens = 0
        self._rule: RepeatRule | None = None
        """Rule of the repeat guard, set by `guard_by`."""

    async def start(self) -> int:
        """Load the model and return the number of devices. Blocks the event loop for 10 s or more.

        The process's environment must contain `engine_environment(settings)`. Raises RolloutError
        with vLLM's reason, or if a worker lacks the configured repeat guard. Raises LostStartError
        if something else killed vLLM's process.
        """
        # Set before vLLM starts its process, which inherits the environment.
        os.environ.update(self._failures.environment)
        if self._processes is not None:
            self._processes.end_left()
            os.environ.update(self._processes.environment)
        try:
            self._llm = AsyncLLM.from_engine_args(
                AsyncEngineArgs(**engine_arguments(self._settings))
            )
        except Exception as error:  # vLLM has no specific class for a bad model or machine
            reason, story = self._failures.of_error(error)
            kind = LostStartError if self._failures.was_killed(error) else RolloutError
            self._failures.remove()
            failure = kind(f"the engine did not start: {reason}", actor=self.name, phase="start")
            # A note, not part of the message: it is for error.txt.
            failure.add_note(story)
            raise failure from error
        await self.collective_rpc("unlink_shared_memory")
        await self.guard_by(self._settings.repeat_guard)
        # vLLM labels every rollout with this version; `to_completion` compares it with ours.
        await self._llm.update_weight_version("0")
        adapter = AdapterLoader(self._llm, enabled=self._settings.enable_lora)
        group = TransferGroup(
            self._llm, transport=self._settings.transport, rank_offset=self._rank_offset
        )
        self.intake = WeightReceiver(
            self.name,
            self._llm,
            group,
            score=self._score,
            adapter=adapter,
            fatal=(EngineDeadError,),
        )
        return self._settings.tensor_parallel_size

    async def guard_by(self, settings: RepeatGuardSettings | None) -> None:
        """Set when repeating answers to new requests are ended; None: never.

        The engine must be idle.

        Raises:
            RolloutError: a worker does not have the repeat guard, or refuses the settings.
            EngineDeadError: vLLM's process has ended.
        """
        try:
            answers = await self.collective_rpc(*guard_call(settings))
        except EngineDeadError:
            raise
        except Exception as error:  # the only class that vLLM has for a failure in its worker
            message = f"its workers refuse rollout_matching.repeat_terminate: {error}"
            raise RolloutError(message, actor=self.name, phase="start") from error
        require_guard(answers, settings, self.name)
        # In a thread, because loading a tokenizer takes seconds and this loop serves other calls.
        # The actor needs the rule to mark the tokens that the guard forced.
        self._rule = await asyncio.to_thread(engine_rule, settings, self._settings.model_path)

    async def collective_rpc(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of each of vLLM's workers (one per device). Return their results."""
        return await self.llm.collective_rpc(method, args=arguments)

    @property
    def llm(self) -> AsyncLLM:
        assert self._llm is not None, "start comes first"
        return self._llm

    @property
    def is_dead(self) -> bool:
        return self._llm is not None and self._llm.errored

    @property
    def why_dead(self) -> str:
        """Reason why the engine's process ended, if `is_dead`."""
        return self._end()[0]

    @property
    def version(self) -> int:
        """Version of the weights that sample rollouts; 0: the checkpoint's."""
        return 0 if self.intake is None else self.intake.version

    @property
    def shut(self) -> str:
        """Reason why the engine cannot generate rollouts now; empty if it can."""
        return "it is not running" if self.intake is None else self.intake.unavailable_reason

    @property
    def num_tokens(self) -> int:
        """Number of tokens sampled since the start, by vLLM's last report.

        Safe to read from any thread.
        """
        num_tokens = self._num_finished_tokens
        if self._llm is not None:
            # An atomic copy, because the engine's thread adds and removes entries.
            for state in tuple(self._llm.output_processor.request_states.values()):
                if state.detokenizer is not None:
                    num_tokens += state.detokenizer.num_output_tokens()
        return num_tokens

    async def progress(self) -> int:
        """Return the number of tokens sampled since the start, by vLLM's last report.

        Raises EngineEndedError if vLLM's process has ended.
        """
        if self.is_dead:
            raise EngineEndedError(self.why_dead)
        return self.num_tokens

    async def check_alive(self) -> None:
        """Wait until every worker has answered a test call. A stuck worker never answers.

        Raises EngineEndedError if vLLM's process has ended.
        """
        await self._all([self.collective_rpc("active_guard")])

    async def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Generate one rollout per request, in order.

        Raises:
            RolloutError: the engine cannot generate now (`shut`), or a request was refused.
            EngineEndedError: vLLM's process has ended.
        """
        if not requests:
            return []
        if self.shut:
            message = f"the engine serves no rollouts: {self.shut}"
            raise RolloutError(message, actor=self.name, phase="generate")
        origin = EngineInfo(self.name, self.version, self._rule, StartTime.now())
        return await self._all([self._rollout(request, origin) for request in requests])

    async def run_sync_phase(self, phase: SyncPhase, offer: WeightOffer) -> SyncReport | None:
        """Run one phase of a weight sync. The last phase returns the report, others None.

        Raises:
            WeightSyncError: the phase failed; it names phase and engine.
            EngineEndedError: vLLM's process has ended.
        """
        assert self.intake is not None, "start comes first"
        if phase is SyncPhase.CANARY:
            # Requests queued since the pause would start together with the canary, with unverified
            # weights. With adapters on CPU they would also end vLLM's process, which mistakes one
            # prompt's log-probabilities for the whole batch's.
            queued = list(self.llm.output_processor.request_states)
            if queued:
                await self.llm.abort(queued, internal=True)
        return (await self._all([self.intake.run_phase(phase, offer)]))[0]

    def close(self) -> None:
        """Shut down the engine's processes. A second call has no effect."""
        if self._llm is not None:
            # This limit is shorter than vLLM's own waits inside.
            self._llm.shutdown(timeout=CLOSE_S)
            self._failures.remove()
            if self._processes is not None:
                self._processes.remove()
        self._llm = self.intake = None

    async def _all(self, works: Sequence[Coroutine[object, None, T]]) -> list[T]:
        """Run the coroutines concurrently. Return their results in order, or raise the first error.

        Raises EngineEndedError if vLLM's process has ended.
        """
        # vLLM never answers a request to a process that dies, hence the periodic check.
        llm = self.llm
        tasks = [asyncio.create_task(work) for work in works]
        pending: set[asyncio.Task[T]] = set(tasks)
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=WATCH_S, return_when=asyncio.FIRST_EXCEPTION
                )
                for task in done:
                    task.result()
                if pending and llm.errored:
                    raise llm.dead_error
            return [task.result() for task in tasks]
        except EngineDeadError as error:
            reason, story = self._end()
            ended = EngineEndedError(reason)
            # A note, not part of the message: it is for error.txt.
            ended.add_note(story)
            raise ended from error
        finally:
            # if one failed, or this call was cancelled, vLLM aborts the other requests
            for task in tasks:
                task.cancel()
            # With a limit: a request of a hanging engine may not react to its cancellation.
            await asyncio.wait(tasks, timeout=WATCH_S)

    def _end(self) -> tuple[str, str]:
        """Return why the engine's process ended, and the traceback of the error that ended it.

        vLLM itself reports neither.
        """
        # Computed once: several calls may find the dead engine, and the error file is removed.
        if self._ended is None:
            manager = self.llm.engine_core.resources.engine_manager
            processes = [] if manager is None else manager.processes
            exit_codes = {process.name: process.exitcode for process in processes}
            self._ended = self._failures.of_end(exit_codes)
            # Removed now, because a dead engine may never be closed.
            self._failures.remove()
        return self._ended

    async def _rollout(self, request: RolloutRequest, origin: EngineInfo) -> Rollout:
        prompt = request_prompt(request, self.name)
        params = sampling_params(request.decode, request.seed)
        try:
            output = await self._complete(prompt, params, f"{request.step}/{request.position}")
        except VLLMClientError as error:
            message = f"sample {request.sample_id} was refused: {error}"
            raise RolloutError(message, actor=self.name, phase="generate") from error
        # Measured here, not when all have ended, because each rollout has its own duration.
        end_s = time.perf_counter()
        # vLLM forgets finished requests, and the token count must not decrease.
        self._num_finished_tokens += len(output.outputs[0].token_ids)
        completion = to_completion(output, request, actor=self.name, version=origin.version)
        return completion.rollout(request, origin, end_s)

    async def _complete(
        self, prompt: TokensPrompt, params: SamplingParams, request_id: str, *, adapted: bool = True
    ) -> RequestOutput:
        """Run one request, with the served adapter (if there is one) or without it."""
        assert self.intake is not None, "start comes first"
        # None: base weights only.
        adapter = self.intake.lora_request if adapted else None
        # FINAL_ONLY: exactly one output.
        async for output in self.llm.generate(prompt, params, request_id, lora_request=adapter):
            return output
        raise AssertionError("vLLM ended a request without an output")

    async def _score(self, probe: CanaryProbe, *, adapted: bool) -> Scores:
        self._num_probes += 1
        prompt = probe_prompt(probe, self.name)
        request_id = f"canary/{self._num_probes}"
        return probe_scores(
            await self._complete(prompt, probe_params(), request_id, adapted=adapted)
        )
