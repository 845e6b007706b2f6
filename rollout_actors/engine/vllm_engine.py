"""One vLLM engine: requests in, token ids out, weights from the learner in between.

No Ray here: `rollout_actors.engine.actor` gives an engine a process.
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
"""Seconds between two looks of a waiting call at vLLM's process."""


class VllmEngine:
    """An `AsyncLLM` with a name, which serves no rollouts while its weights are not verified."""

    process = ""
    """`WatchedEngine.process`: nobody else can ask this engine."""

    def __init__(
        self,
        name: str,
        settings: EngineSettings,
        *,
        index: int = 0,
        processes: EngineProcesses | None = None,
    ) -> None:
        """Keep what a start needs.

        Args:
            index: the engine's number in the run, from which its workers' ranks follow.
            processes: those of an engine whose place this one takes; None: it takes nobody's.
        """
        self.name = name
        self._processes = processes
        self._settings = settings
        # Rank 0 is the sender. With one offset for all engines joining would hang.
        self._rank_offset = 1 + index * settings.tensor_parallel_size
        self._llm: AsyncLLM | None = None
        self._failures = EngineFailures()
        self._ended: tuple[str, str] | None = None
        """The result of `_end`."""
        self.intake: WeightReceiver | None = None
        """None before the start."""
        self._num_probes = 0
        self._num_finished_tokens = 0
        self._rule: RepeatRule | None = None
        """The repeat guard's rule, as `guard_by` has set it."""

    async def start(self) -> int:
        """Load the model, which blocks this event loop for 10 s or more. Returns the devices.

        The environment must hold `engine_environment(settings)` already. Raises RolloutError with
        vLLM's reason, or where the repeat guard is configured and not active; LostStartError where
        the process was killed.
        """
        # Before vLLM starts its process, which inherits the environment.
        os.environ.update(self._failures.environment)
        if self._processes is not None:
            self._processes.end_left()
            os.environ.update(self._processes.environment)
        try:
            self._llm = AsyncLLM.from_engine_args(
                AsyncEngineArgs(**engine_arguments(self._settings))
            )
        except Exception as error:  # vLLM has no class of its own for a bad model or machine
            reason, story = self._failures.of_error(error)
            kind = LostStartError if self._failures.was_killed(error) else RolloutError
            self._failures.remove()
            failure = kind(f"the engine did not start: {reason}", actor=self.name, phase="start")
            # Not in the message: it is for error.txt.
            failure.add_note(story)
            raise failure from error
        await self.guard_by(self._settings.repeat_guard)
        # vLLM's own label, by which its account of a rollout's weights is compared with ours.
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
        """Guard what begins from now on by these settings; None: not at all. The engine is idle.

        Raises:
            RolloutError: a worker does not hold the guard, or refuses the settings.
            EngineDeadError: vLLM's process is gone.
        """
        try:
            answers = await self.collective_rpc(*guard_call(settings))
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM's only class for a failure in its worker
            message = f"its workers refuse rollout_matching.repeat_terminate: {error}"
            raise RolloutError(message, actor=self.name, phase="start") from error
        require_guard(answers, settings, self.name)
        # Seconds where a tokenizer is loaded, in which this loop has other calls to answer.
        # The actor's own copy, with which it marks the tokens that the guard forced.
        self._rule = await asyncio.to_thread(engine_rule, settings, self._settings.model_path)

    async def collective_rpc(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of every worker. Returns one answer for each device."""
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
        """Reason why the engine's process ended, where `is_dead`."""
        return self._end()[0]

    @property
    def version(self) -> int:
        """The version of the weights being served; 0 is the checkpoint's."""
        return 0 if self.intake is None else self.intake.version

    @property
    def shut(self) -> str:
        """Reason why no rollouts are served; empty: they are."""
        return "it is not running" if self.intake is None else self.intake.unavailable_reason

    @property
    def num_tokens(self) -> int:
        """Tokens sampled since the start, by vLLM's last report. May be asked from any thread."""
        num_tokens = self._num_finished_tokens
        if self._llm is not None:
            # A copy, taken in one go: the engine's own thread adds and removes.
            for state in tuple(self._llm.output_processor.request_states.values()):
                if state.detokenizer is not None:
                    num_tokens += state.detokenizer.num_output_tokens()
        return num_tokens

    async def progress(self) -> int:
        """Return `num_tokens`. Raises EngineEndedError where vLLM's process is gone."""
        if self.is_dead:
            raise EngineEndedError(self.why_dead)
        return self.num_tokens

    async def check_alive(self) -> None:
        """Ask every worker for something: one that is stopped or stuck does not answer.

        Raises EngineEndedError where vLLM's process is gone.
        """
        await self._all([self.collective_rpc("active_guard")])

    async def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Generate one rollout per request, in order.

        Raises:
            RolloutError: the engine serves none, or a request was refused.
            EngineEndedError: vLLM's process is gone.
        """
        if not requests:
            return []
        if self.shut:
            message = f"the engine serves no rollouts: {self.shut}"
            raise RolloutError(message, actor=self.name, phase="generate")
        origin = EngineInfo(self.name, self.version, self._rule, StartTime.now())
        return await self._all([self._rollout(request, origin) for request in requests])

    async def run_sync_phase(self, phase: SyncPhase, offer: WeightOffer) -> SyncReport | None:
        """Run one phase, in order; the last one returns the report.

        Raises:
            WeightSyncError: naming phase and engine.
            EngineEndedError: vLLM's process is gone.
        """
        assert self.intake is not None, "start comes first"
        if phase is SyncPhase.CANARY:
            # Queued since the pause, they would begin beside the canary, under weights that are not
            # verified; and with adapters on CPU vLLM's process would die of that: it takes a
            # prompt's log-probabilities for those of the whole batch.
            queued = list(self.llm.output_processor.request_states)
            if queued:
                await self.llm.abort(queued, internal=True)
        return (await self._all([self.intake.run_phase(phase, offer)]))[0]

    def close(self) -> None:
        """End the engine's processes. Twice is harmless."""
        if self._llm is not None:
            # vLLM's own limit is less than what it waits for inside.
            self._llm.shutdown(timeout=CLOSE_S)
            self._failures.remove()
            if self._processes is not None:
                self._processes.remove()
        self._llm = self.intake = None

    async def _all(self, works: Sequence[Coroutine[object, None, T]]) -> list[T]:
        """Return every result, or raise the first error.

        Raises EngineEndedError if vLLM's process ended.
        """
        # What vLLM is asked for while its process is dying is never answered: hence the watch.
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
            # Not in the message: it is for error.txt.
            ended.add_note(story)
            raise ended from error
        finally:
            # where one failed, or this call was cancelled, vLLM aborts the other requests
            for task in tasks:
                task.cancel()
            # With a limit: a request of an engine that hangs may not react to its cancellation.
            await asyncio.wait(tasks, timeout=WATCH_S)

    def _end(self) -> tuple[str, str]:
        """Return why the engine's process ended, which vLLM does not say, and the whole story."""
        # Once: several calls may find the dead engine, and the file of errors goes below.
        if self._ended is None:
            manager = self.llm.engine_core.resources.engine_manager
            processes = [] if manager is None else manager.processes
            exit_codes = {process.name: process.exitcode for process in processes}
            self._ended = self._failures.of_end(exit_codes)
            # Now: a dead engine may never be closed.
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
        # Here, not when all have ended: each rollout has its own duration.
        end_s = time.perf_counter()
        # vLLM forgets a request at its end, and the count must not fall.
        self._num_finished_tokens += len(output.outputs[0].token_ids)
        completion = to_completion(output, request, actor=self.name, version=origin.version)
        return completion.rollout(request, origin, end_s)

    async def _complete(
        self, prompt: TokensPrompt, params: SamplingParams, request_id: str, *, adapted: bool = True
    ) -> RequestOutput:
        """Run one request, with the adapter that is served, if there is one, or without."""
        assert self.intake is not None, "start comes first"
        # None: the base weights only.
        adapter = self.intake.lora_request if adapted else None
        # FINAL_ONLY: exactly one output.
        async for output in self.llm.generate(prompt, params, request_id, lora_request=adapter):
            return output
        raise AssertionError("vLLM ends a request with an output")

    async def _score(self, probe: CanaryProbe, *, adapted: bool) -> Scores:
        self._num_probes += 1
        prompt = probe_prompt(probe, self.name)
        request_id = f"canary/{self._num_probes}"
        return probe_scores(
            await self._complete(prompt, probe_params(), request_id, adapted=adapted)
        )
