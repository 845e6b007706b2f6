"""vLLM's synchronous `LLM` in the learner's process: rollouts, and weight syncs through memory.

On CPU the engine runs in the calling thread. On a GPU (not tested) vLLM runs it in a separate
process, because the process that owns CUDA's shared memory cannot open it a second time.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import torch
from vllm import LLM
from vllm.entrypoints.generate.beam_search.utils import BeamSearchOutput
from vllm.exceptions import VLLMClientError
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import BeamSearchParams, SamplingParams

from rollout_actors.backends.calls import POLL_S, Call, EngineCalls
from rollout_actors.backends.ipc_handles import CudaDevice, cuda_devices, packed_buckets
from rollout_actors.engine.completion import Completion, EngineInfo, StartTime
from rollout_actors.engine.sampling import BAN, finish_reason
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
from rollout_actors.weight_sync.receiver import UpdateRequest, WeightReceiver
from shared.errors import RolloutError
from shared.protocols import CLOSE_S
from shared.rollouts import (
    DecodeMode,
    DecodeSettings,
    Rollout,
    RolloutRequest,
    SyncReport,
    WeightOffer,
)
from shared.weight_sync.canary import CanaryProbe, Scores
from shared.weight_sync.checksum import ChecksummedWeights
from shared.weight_sync.offer import AdapterOffer
from shared.weight_sync.transports import TransportKind

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

WEIGHTS = "weights"
CACHE = "kv_cache"
"""vLLM's names (`WEIGHTS`, `CACHE`) of the two parts of memory that a sleeping engine releases."""


class UpdatedLLM:
    """Gives vLLM's `LLM` the methods of a weight sync (`UpdatedEngine`) within one process.

    On CPU the engine gets the learner's tensors, on a GPU a CUDA handle of their memory. Every
    method blocks until its work is done, so a time limit cannot interrupt it.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        transport: TransportKind,
        devices: Sequence[CudaDevice],
        wake: Callable[[], None],
    ) -> None:
        """
        Args:
            devices: the engine's GPUs if the transport is `ipc`; empty for `inproc`.
            wake: restores all memory of the engine, which the canary needs. Loading needs less.
        """
        self._llm = llm
        self._transport = transport
        self._devices = devices
        self._wake = wake
        self._weights: ChecksummedWeights | None = None

    @contextmanager
    def handing_over(self, weights: ChecksummedWeights) -> Iterator[None]:
        """Use these weights of the learner as the weights to load, in the `with` block."""
        self._weights = weights
        try:
            yield
        finally:
            # They refer to the learner's tensors, and the learner needs that memory.
            self._weights = None

    async def pause_generation(self, *, mode: Literal["wait"], clear_cache: bool) -> None:
        """Do nothing, because this call already occupies the engine's only thread."""

    async def resume_generation(self) -> None:
        # The canary follows, and needs the cache's memory too.
        self._wake()

    async def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    async def update_weights(self, request: UpdateRequest) -> None:
        assert self._weights is not None, "an update requires handing_over"
        names = [spec.name for spec in self._weights.terms.sent]
        assert request.update_info["names"] == names, "the update has other names than the offer"
        if self._transport is TransportKind.INPROC:
            # The worker runs in this process: it gets the tensors themselves, without a copy.
            self._llm.update_weights({"update_info": {"weights": self._weights}})
            return
        self._llm.init_weight_transfer_engine({"init_info": {"packed": True}})
        # `closing` frees the buffers even after a failure, whose traceback refers to the iterator.
        with closing(packed_buckets(self._weights, self._devices)) as packed:
            for bucket in packed:
                # Every worker has copied its part when this returns, so the next bucket can reuse
                # the memory.
                self._llm.update_weights({"update_info": bucket})

    async def finish_weight_update(self) -> None:
        self._llm.finish_weight_update()
        for device in self._devices:
            device.collect()

    async def collective_rpc(self, method: str, *, args: tuple[object, ...] = ()) -> list[Any]:
        return self._llm.collective_rpc(method, args=args)

    async def reset_prefix_cache(self) -> bool:
        return self._llm.reset_prefix_cache()

    async def reset_mm_cache(self) -> None:
        self._llm.reset_mm_cache()

    async def reset_encoder_cache(self) -> None:
        self._llm.llm_engine.reset_encoder_cache()

    async def update_weight_version(self, new_version: str) -> None:
        self._llm.update_weight_version(new_version)

    async def add_lora(self, request: LoRARequest) -> bool:
        return self._llm.llm_engine.add_lora(request)

    async def list_loras(self) -> set[int]:
        return self._llm.llm_engine.list_loras()

    async def remove_lora(self, adapter_id: int) -> bool:
        return self._llm.llm_engine.remove_lora(adapter_id)


class BeamLLM(LLM):
    """vLLM's `LLM`, whose beam search also applies bans, repetition penalty and all stop tokens."""

    beam_decode: DecodeSettings | None = None
    """Decode settings of the current beam search."""
    raise_if_stopping: Callable[[], None]
    """Called before each step of a beam search; an exception ends the search."""

    def _beam_search_step(
        self,
        *,
        base_sampling_params: SamplingParams,
        eos_token_id: int | None,
        ignore_eos: bool,
        **rest: Any,
    ) -> bool:
        self.raise_if_stopping()
        decode = self.beam_decode
        assert decode is not None, "set it before beam_search"
        base_sampling_params.logit_bias = dict.fromkeys(decode.banned_token_ids, BAN) or None
        base_sampling_params.repetition_penalty = decode.repetition_penalty
        # Use the request's stop tokens, not the tokenizer's. vLLM's search supports only one.
        stop, *others = decode.stop_token_ids or (None,)
        # Beams that end in another stop token continue in this step, and are completed below.
        is_over = super()._beam_search_step(
            base_sampling_params=base_sampling_params,
            eos_token_id=stop,
            ignore_eos=stop is None,
            **rest,
        )
        for instance in rest["instances_batch"]:
            ended = [beam for beam in instance.beams if beam.tokens[-1] in others]
            instance.completed += ended
            instance.beams = [beam for beam in instance.beams if beam.tokens[-1] not in others]
        return is_over


class ColocatedLLM:
    """The vLLM engine in a learner's process, which generates rollouts and loads new weights.

    Call it only inside its `EngineContext`, from one thread at a time.
    """

    def __init__(
        self,
        name: str,
        settings: EngineSettings,
        *,
        sleep: bool,
        raise_if_stopping: Callable[[], None],
    ) -> None:
        """Load the checkpoint, which takes 5 to 20 s.

        Raises RolloutError if the engine does not have the repeat guard of the settings.

        Args:
            sleep: whether `fall_asleep` releases memory, if the platform supports it.
            raise_if_stopping: called before each engine step; may raise to end the generation.
        """
        self._name = name
        self._rule = engine_rule(settings.repeat_guard, settings.model_path)
        self.sleeps = sleep and current_platform.is_sleep_mode_available()
        self._llm = BeamLLM(**engine_arguments(settings) | {"enable_sleep_mode": self.sleeps})
        self._raise_if_stopping = raise_if_stopping
        self._llm.raise_if_stopping = raise_if_stopping
        method, rule = guard_call(settings.repeat_guard)
        guards = self._llm.collective_rpc(method, args=(rule,))
        require_guard(guards, settings.repeat_guard, name)
        self._llm.update_weight_version("0")
        devices: Sequence[CudaDevice] = ()
        if settings.transport == TransportKind.IPC:
            devices = cuda_devices(settings.tensor_parallel_size)
        self._updated = UpdatedLLM(
            self._llm, transport=settings.transport, devices=devices, wake=self.wake
        )
        adapter = AdapterLoader(self._updated, enabled=settings.enable_lora)
        self.intake = WeightReceiver(name, self._updated, None, score=self._score, adapter=adapter)
        self._sleeping: tuple[str, ...] = ()
        """vLLM's tags of the memory that is released now."""
        self._has_no_weights = False
        """Whether the weights were discarded when the engine fell asleep."""

    def generate(self, requests: Sequence[RolloutRequest], started: StartTime) -> list[Rollout]:
        """Generate one rollout per request, in order, at most `max_num_seqs` at a time."""
        origin = EngineInfo(self._name, self.intake.version, self._rule, started)
        rollouts: list[Rollout] = []
        # Sampled and greedy requests share one batch. A beam search has its own settings.
        for beam_decode, group in groupby(
            requests,
            key=lambda request: request.decode if request.decode.mode is DecodeMode.BEAM else None,
        ):
            alike = list(group)
            if beam_decode is None:
                answers = self._complete(alike, origin.version)
            else:
                answers = self._search_beams(alike, beam_decode)
            for request, (answer, end) in zip(alike, answers, strict=True):
                rollouts.append(answer.rollout(request, origin, end))
        return rollouts

    def take_weights(
        self, offer: WeightOffer, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> SyncReport:
        """Load and verify the offered weights: all `weights`, or the offer's adapter.

        Raises WeightSyncError.
        """
        if isinstance(offer.terms, AdapterOffer):
            return asyncio.run(self.intake.run_all_phases(offer))
        checksummed = ChecksummedWeights(weights, offer.terms)
        with self._updated.handing_over(checksummed):
            return asyncio.run(self.intake.run_all_phases(offer, checksummed))

    def fall_asleep(self, *, weights_follow: bool = False) -> None:
        """Release the device's memory: move weights to host memory, drop the key-value cache.

        `weights_follow`: a sync of all weights wakes the engine, so its weights are dropped too.
        """
        if self.sleeps and not self._sleeping:
            if weights_follow:
                # vLLM itself would keep only registered buffers of what is not a parameter.
                self._llm.collective_rpc("keep_unsynced")
            self._llm.sleep(level=2 if weights_follow else 1)
            self._sleeping = (WEIGHTS, CACHE)
            self._has_no_weights = weights_follow

    def wake(self) -> None:
        assert not self._has_no_weights, "the host said that a sync of all weights is next"
        if self._sleeping:
            self._llm.wake_up(list(self._sleeping))
            self._sleeping = ()

    def wake_for(self, offer: WeightOffer) -> None:
        """Restore the memory that a weight sync with this offer needs before its canary."""
        # That is the memory of the weights: a part of them exists twice while they arrive, and the
        # cache is not used. The first sync of a run scores the canary before that, which needs all
        # memory. Without it vLLM schedules nothing, and `LLM.generate` would never return.
        if self.intake.measures_noise(offer):
            self.wake()
        elif WEIGHTS in self._sleeping:
            self._llm.wake_up([WEIGHTS])
            self._sleeping = (CACHE,)
            if self._has_no_weights:
                self._llm.collective_rpc("restore_unsynced")
                self._has_no_weights = False

    def shut_down(self) -> None:
        """Shut down the engine with its processes, and free its memory."""
        self._llm.llm_engine.engine_core.shutdown(timeout=CLOSE_S)
        # All three refer to the engine. Its memory is free when the last reference is deleted.
        del self._llm, self._updated, self.intake
        gc.collect()

    def serve(self, calls: EngineCalls) -> None:
        """Answer an environment's model calls until the round of `calls` ends.

        A new call is decoded together with the calls that are still unanswered.
        """
        engine = self._llm.llm_engine
        under_way: dict[str, tuple[str, Call]] = {}
        """Maps the external id of a request to vLLM's internal id and the call."""
        try:
            while calls.is_open:
                # Waits only if no request is being decoded, because it would delay the next token.
                self._raise_if_stopping()
                for call in calls.take(wait_s=0.0 if under_way else POLL_S):
                    try:
                        inner_id = self._enqueue(call.request)
                    except RolloutError as error:
                        calls.answer([(call, error)])
                        continue
                    state = engine.output_processor.request_states[inner_id]
                    under_way[state.external_req_id] = (inner_id, call)
                for name, (inner_id, call) in list(under_way.items()):
                    if call.is_given_up:
                        engine.abort_request([inner_id], internal=True)
                        del under_way[name]
                if under_way:
                    outputs, end_s = self._step()
                    answers = []
                    for output in outputs:
                        _, call = under_way.pop(output.request_id)
                        answers.append((call, self._answer(call, output, end_s)))
                    calls.answer(answers)
        finally:
            engine.abort_request([inner_id for inner_id, _ in under_way.values()], internal=True)

    def _answer(self, call: Call, output: RequestOutput, end_s: float) -> Rollout | RolloutError:
        """Return the rollout of a finished request, or an error if it has no valid rollout."""
        version = self.intake.version
        origin = EngineInfo(self._name, version, self._rule, call.started)
        try:
            completion = to_completion(output, call.request, actor=self._name, version=version)
            return completion.rollout(call.request, origin, end_s)
        except RolloutError as error:
            return error

    def _complete(
        self, requests: Sequence[RolloutRequest], version: int
    ) -> list[tuple[Completion, float]]:
        """Return the answer to each request, with its end time by `time.perf_counter`."""
        engine = self._llm.llm_engine
        queued: list[str] = []
        ended: list[tuple[RequestOutput, float]] = []
        try:
            # Enqueue all before the first step, so that the same list gives the same batches.
            for request in requests:
                queued.append(self._enqueue(request))
            while engine.has_unfinished_requests():
                self._raise_if_stopping()
                finished, end = self._step()
                ended += ((output, end) for output in finished)
        except RolloutError:
            engine.abort_request(queued, internal=True)
            raise
        ended.sort(key=lambda pair: int(pair[0].request_id))  # in order of arrival
        return [
            (to_completion(output, request, actor=self._name, version=version), end)
            for request, (output, end) in zip(requests, ended, strict=True)
        ]

    def _enqueue(self, request: RolloutRequest) -> str:
        """Hand a request to vLLM for the next engine steps. Return vLLM's internal id of it.

        Raises RolloutError if vLLM refuses the request.
        """
        try:
            (inner_id,) = self._llm.enqueue(
                [request_prompt(request, self._name)],
                sampling_params(request.decode, request.seed),
                lora_request=self.intake.lora_request,
                use_tqdm=False,
            )
        except VLLMClientError as error:
            raise self._error(f"sample {request.sample_id} was refused: {error}") from error
        return inner_id

    def _step(self) -> tuple[list[RequestOutput], float]:
        """Run one engine step. Return the requests that the step finished, and when it ended."""
        # Like `LLM.wait_for_completion`, which does not report when each request was finished.
        outputs = self._llm.llm_engine.step()
        end_s = time.perf_counter()
        return [one for one in outputs if isinstance(one, RequestOutput) and one.finished], end_s

    def _search_beams(
        self, requests: list[RolloutRequest], decode: DecodeSettings
    ) -> list[tuple[Completion, float]]:
        """Return the best beam of each request, with the end time of the whole search."""
        # vLLM divides the sum over the response by a length that includes the prompt's tokens.
        params = BeamSearchParams(
            beam_width=decode.num_beams,
            max_tokens=decode.max_new_tokens,
            length_penalty=decode.length_penalty,
        )
        self._llm.beam_decode = decode
        prompts = [request_prompt(request, self._name) for request in requests]
        try:
            outputs = self._llm.beam_search(prompts, params, lora_request=self.intake.lora_request)
        except VLLMClientError as error:
            samples = ", ".join(request.sample_id for request in requests)
            raise self._error(f"vLLM refused one of the samples {samples}: {error}") from error
        end = time.perf_counter()
        return [
            (self._best(output, request), end)
            for request, output in zip(requests, outputs, strict=True)
        ]

    def _best(self, output: BeamSearchOutput, request: RolloutRequest) -> Completion:
        best = output.sequences[0]
        # A beam has a finish reason only if it is neither the stop token nor the length limit.
        if best.finish_reason is not None:
            finish_reason(best.finish_reason, request, self._name)
        prompt = tuple(best.orig_prompt["prompt_token_ids"])
        response = best.tokens[len(prompt) :]
        logprobs = [
            entry[token_id].logprob for entry, token_id in zip(best.logprobs, response, strict=True)
        ]
        return Completion.up_to_stop(prompt, response, logprobs, request.decode)

    def _error(self, message: str) -> RolloutError:
        return RolloutError(message, actor=self._name, phase="generate")

    async def _score(self, probe: CanaryProbe, *, adapted: bool) -> Scores:
        (output,) = self._llm.generate(
            [probe_prompt(probe, self._name)],
            probe_params(),
            use_tqdm=False,
            lora_request=self.intake.lora_request if adapted else None,
        )
        return probe_scores(output)
