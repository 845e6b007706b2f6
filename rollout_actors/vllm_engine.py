"""One vLLM engine: requests in, token ids out, weights from the learner in between (DESIGN 4 and 9, FACTS 2 to 4).

No Ray here: `rollout_actors.engine_actor` is the shell that puts an engine into a process of its own.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Sequence
from typing import Any

from PIL import Image, UnidentifiedImageError
from vllm import SamplingParams, TokensPrompt
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from rollout_actors.engine_settings import EngineSettings
from rollout_actors.weight_intake import WeightIntake
from shared.canary import CanaryProbe
from shared.errors import RolloutError
from shared.records import ImageRef
from shared.rollouts import DecodeMode, DecodeSettings, FinishReason, Rollout, RolloutRequest, SyncReport, WeightOffer
from shared.weight_sync import SyncPhase

FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "repetition": FinishReason.REPETITION}
WATCH_S = 1.0
"""How often a waiting call looks whether vLLM's process is alive."""
BAN = -100.0
"""The lowest logit bias that vLLM accepts; `exp(-100)` is nothing in fp32."""


class VllmEngine:
    """An `AsyncLLM` with a name, a weight version, and a door that is shut while its weights are not verified."""

    def __init__(self, name: str, settings: EngineSettings, *, index: int = 0) -> None:
        """`index` is the engine's place among the engines of the run: it decides the ranks of its workers in a weight sync."""
        self.name = name
        self._settings = settings
        self._rank_offset = 1 + index * settings.tensor_parallel_size
        self._llm: AsyncLLM | None = None
        self._intake: WeightIntake | None = None
        self._version = 0
        self._shut = "it was not started"
        self._num_probes = 0

    async def start(self) -> int:
        """Load the model; blocks this event loop for 10 s or more. The environment must hold `engine_environment(settings)` already. Returns its devices."""
        self._llm = AsyncLLM.from_engine_args(_engine_args(self._settings))
        # vLLM's own label, so that its account of a rollout's weights can be compared with ours.
        await self._llm.update_weight_version(str(self._version))
        self._intake = WeightIntake(self.name, self._llm, transport=self._settings.transport, rank_offset=self._rank_offset, score=self._score)
        self._shut = ""
        return self._settings.tensor_parallel_size

    @property
    def is_dead(self) -> bool:
        return self._llm is not None and self._llm.errored

    @property
    def version(self) -> int:
        """The version of the weights being served; 0 is the checkpoint's."""
        return self._version

    async def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """One rollout per request, in order. Raises RolloutError, and vLLM's EngineDeadError when its process is gone."""
        if not requests:
            return []
        if self._shut:
            raise RolloutError(f"the engine serves no rollouts: {self._shut}", actor=self.name, phase="generate")
        started_s, started = time.time(), time.perf_counter()
        tasks = [asyncio.create_task(self._rollout(request, started_s, started)) for request in requests]
        try:
            return await self._all(tasks)
        finally:
            for task in tasks:  # where one failed, or this call was cancelled, vLLM aborts the others
                task.cancel()

    async def receive_weights(self, offer: WeightOffer) -> SyncReport:
        """All phases of one sync. Raises WeightSyncError naming the phase; then no rollout is served until a sync succeeds."""
        for phase in SyncPhase:
            report = await self.run_sync_phase(phase, offer)
        assert report is not None
        return report

    async def run_sync_phase(self, phase: SyncPhase, offer: WeightOffer) -> SyncReport | None:
        """One phase of `SyncPhase`, which must come in order: for a pool that keeps its engines in step. The last one gives the report."""
        assert self._intake is not None, "start comes first"
        if phase is SyncPhase.PAUSE:
            self._shut = f"its sync to version {offer.version} was not completed"
        await self._intake.run(phase, offer)
        if phase is not SyncPhase.CANARY:
            return None
        self._version = offer.version
        self._shut = ""
        return self._intake.report(offer)

    def close(self) -> None:
        """End the engine's processes. Twice is harmless."""
        if self._llm is not None:
            self._llm.shutdown()
        self._llm = self._intake = None
        self._shut = "it was closed"

    async def _all(self, tasks: Sequence[asyncio.Task[Rollout]]) -> list[Rollout]:
        """Every result, or the first error. A request that vLLM took in while its process was dying is never answered: hence the watch."""
        assert self._llm is not None
        pending: set[asyncio.Task[Rollout]] = set(tasks)
        while pending:
            done, pending = await asyncio.wait(pending, timeout=WATCH_S, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            if pending and self._llm.errored:
                raise self._llm.dead_error
        return [task.result() for task in tasks]

    async def _rollout(self, request: RolloutRequest, started_s: float, started: float) -> Rollout:
        prompt = _prompt(request.prompt_token_ids, self._images(request.images, request.sample_id))
        try:
            output = await self._complete(prompt, _sampling_params(request.decode, request.seed), f"{request.step}/{request.position}")
        except VLLMClientError as error:
            raise RolloutError(f"sample {request.sample_id} was refused: {error}", actor=self.name, phase="generate") from error
        completion = output.outputs[0]
        if completion.finish_reason == "abort":
            raise RolloutError(f"sample {request.sample_id} was aborted, and half an answer is none; see the actor's log", actor=self.name, phase="generate")
        self._check_version(completion, request)
        assert output.prompt_token_ids is not None
        response, logprobs = list(completion.token_ids), _sampled_logprobs(completion)
        stopped = completion.finish_reason == "stop"
        end = len(response) - stopped
        return Rollout(
            step=request.step,
            position=request.position,
            sample_id=request.sample_id,
            prompt_token_ids=tuple(output.prompt_token_ids),
            response_token_ids=tuple(response[:end]),
            stop_token_id=response[-1] if stopped else None,
            logprobs=None if logprobs is None else tuple(logprobs[:end]),
            stop_token_logprob=logprobs[-1] if stopped and logprobs is not None else None,
            finish_reason=self._finish_reason(completion, request),
            forced_positions=(),
            weight_version=self._version,
            actor=self.name,
            attempt=0,
            seed=request.seed,
            generate_s=time.perf_counter() - started,
            started_s=started_s,
        )

    async def _complete(self, prompt: TokensPrompt, params: SamplingParams, request_id: str) -> RequestOutput:
        assert self._llm is not None
        # FINAL_ONLY: exactly one output.
        async for output in self._llm.generate(prompt, params, request_id):
            return output
        raise AssertionError("vLLM ends a request with an output")

    async def _score(self, probe: CanaryProbe) -> tuple[list[int], list[float]]:
        """The canary's expanded tokens, and the log-probability of each but the first."""
        self._num_probes += 1
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        output = await self._complete(_prompt(probe.token_ids, self._images(probe.images, "canary")), params, f"canary/{self._num_probes}")
        assert output.prompt_token_ids is not None
        assert output.prompt_logprobs is not None
        token_ids = list(output.prompt_token_ids)
        scores = [(entry, token_id) for entry, token_id in zip(output.prompt_logprobs, token_ids, strict=True) if entry is not None]
        return token_ids, [entry[token_id].logprob for entry, token_id in scores]

    def _images(self, refs: Sequence[ImageRef], sample_id: str) -> list[Image.Image]:
        images = []
        for i, ref in enumerate(refs):
            assert ref.data is not None, f"image {i} of {sample_id} travels without its bytes"
            try:
                images.append(Image.open(io.BytesIO(ref.data)).convert("RGB"))
            except (UnidentifiedImageError, OSError) as error:
                raise RolloutError(f"image {i} of sample {sample_id} ({ref.path}) cannot be decoded: {error}", actor=self.name, phase="generate") from error
        return images

    def _check_version(self, completion: CompletionOutput, request: RolloutRequest) -> None:
        """Every token must come from the version that is about to be recorded, by vLLM's own account."""
        seen = {span.version for span in completion.weight_versions or ()}
        if seen - {str(self._version)}:
            sampled = f"sample {request.sample_id} was sampled by weights {sorted(seen)}, not {self._version} alone"
            raise RolloutError(sampled, actor=self.name, phase="generate")

    def _finish_reason(self, completion: CompletionOutput, request: RolloutRequest) -> FinishReason:
        if completion.finish_reason not in FINISH_REASONS:
            ended = f"vLLM ended sample {request.sample_id} with {completion.finish_reason!r}; see the actor's log"
            raise RolloutError(ended, actor=self.name, phase="generate")
        return FINISH_REASONS[completion.finish_reason]


def _prompt(token_ids: Sequence[int], images: list[Image.Image]) -> TokensPrompt:
    prompt = TokensPrompt(prompt_token_ids=list(token_ids))
    if images:
        prompt["multi_modal_data"] = {"image": images}
    return prompt


def _sampling_params(decode: DecodeSettings, seed: int) -> SamplingParams:
    assert decode.mode is not DecodeMode.BEAM, "AsyncLLM has no beam search; the configuration refuses it"
    return SamplingParams(
        temperature=decode.temperature,
        top_p=decode.top_p,
        top_k=decode.top_k,
        repetition_penalty=decode.repetition_penalty,
        max_tokens=decode.max_new_tokens,
        seed=seed,
        stop_token_ids=list(decode.stop_token_ids),
        ignore_eos=True,  # the request names its stop tokens; the tokenizer's do not add to them
        logit_bias=dict.fromkeys(decode.banned_token_ids, BAN) or None,
        logprobs=0 if decode.return_logprobs else None,  # 0: of the sampled token alone
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _sampled_logprobs(completion: CompletionOutput) -> list[float] | None:
    if completion.logprobs is None:
        return None
    return [entry[token_id].logprob for entry, token_id in zip(completion.logprobs, completion.token_ids, strict=True)]


def _engine_args(settings: EngineSettings) -> AsyncEngineArgs:
    values: dict[str, Any] = {
        "model": settings.model_path,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "seed": settings.seed,
        "tensor_parallel_size": settings.tensor_parallel_size,
        # Stated, because inside a Ray placement group vLLM would choose "ray".
        "distributed_executor_backend": "uni" if settings.tensor_parallel_size == 1 else "mp",
        "kv_cache_memory_bytes": settings.kv_cache_memory_bytes,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enforce_eager": settings.enforce_eager,
        "limit_mm_per_prompt": {"image": settings.max_images_per_prompt, "video": 0},
        "generation_config": "vllm",  # a checkpoint's sampling defaults do not leak into the requests
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": settings.transport},
        "worker_extension_cls": settings.worker_extension,
        "disable_log_stats": True,
    }
    return AsyncEngineArgs(**values)
