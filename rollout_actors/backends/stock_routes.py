"""The routes of a stock `vllm serve` (vLLM 0.32) that a run uses besides token-in/token-out: its
state, and its part in a weight sync.

All of them are open only where the server was started with `VLLM_SERVER_DEV_MODE=1`, and its
`--api-key` does not guard them (docs/stock_server.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollout_actors.backends.http import (
    HttpClient,
    HttpStatusError,
    UnansweredError,
    another_answer,
    too_few_sequences,
)
from rollout_actors.engine.settings import GUARD_PROCESSOR, EngineSettings
from rollout_actors.weight_sync.receiver import InitRequest, UpdateRequest

COUNTER = "vllm:generation_tokens_total{"
"""How a line of `/metrics` begins that counts sampled tokens."""
STOCK_SERVER = "a `vllm serve` of vLLM 0.32"
UNVERIFIED = "rollmatch-unverified"
"""Label of weights between the start of an update and its canary: of nobody's rollouts."""


class RouteError(Exception):
    """A route that did not answer, or said no. The message names the server."""


class StockRoutes:
    """`rollout_actors.weight_sync.receiver.UpdatedEngine` and `transfer_group.JoinsGroups` by HTTP.
    Its methods raise RouteError.
    """

    def __init__(self, http: HttpClient, run: str) -> None:
        """`run` is what this run's weights are labelled with, so that they are told from another
        run's.
        """
        self._http = http
        self._run = run

    def label(self, version: str) -> str:
        return f"rollmatch-{self._run}-{version}"

    async def pause_generation(self, *, mode: Literal["wait"], clear_cache: bool) -> None:
        await self._post(f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}")

    async def resume_generation(self) -> None:
        await self._post("/resume")

    async def init_weight_transfer_engine(self, request: InitRequest) -> None:
        await self._post("/init_weight_transfer_engine", init_info=request.init_info)

    async def shutdown_weight_transfer_engine(self) -> None:
        await self._post("/shutdown_weight_transfer_engine")

    async def start_weight_update(self) -> None:
        # Whatever becomes of this update, and of this run: until it is verified its weights are no
        # version.
        await self._post("/update_weight_version", new_version=UNVERIFIED)
        await self._post("/start_weight_update")

    async def update_weights(self, request: UpdateRequest) -> None:
        await self._post("/update_weights", update_info=request.update_info)

    async def finish_weight_update(self) -> None:
        await self._post("/finish_weight_update")

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]:
        answer = await self._post("/collective_rpc", method=method, args=list(args))
        return list(json.loads(answer)["results"])

    async def reset_prefix_cache(self) -> bool:
        return bool(json.loads(await self._post("/reset_prefix_cache"))["success"])

    async def reset_mm_cache(self) -> None:
        await self._post("/reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        await self._post("/reset_encoder_cache")

    async def update_weight_version(self, new_version: str) -> None:
        await self._post("/update_weight_version", new_version=self.label(new_version))

    async def weight_label(self) -> str:
        """vLLM's `default` where nothing was ever loaded over the checkpoint."""
        return str(json.loads(await self._get("/weight_info"))["weight_version"])

    async def world_size(self) -> int:
        return int(json.loads(await self._get("/get_world_size"))["world_size"])

    async def info(self) -> StockInfo:
        route = "/server_info"
        try:
            return StockInfo.model_validate_json(await self._get(f"{route}?config_format=json"))
        except ValueError as error:
            raise RouteError(
                self._http.named(f"{route} {another_answer(error, STOCK_SERVER)}")
            ) from error

    async def num_tokens(self) -> int | None:
        """Sampled since the server's start; None where it keeps no such account. Raises
        UnansweredError.
        """
        try:
            metrics = await self._http.get("/metrics", timeout_s=self._http.address.timeout_s)
        except HttpStatusError:
            return None
        counts = [
            float(line.rpartition(" ")[2])
            for line in metrics.decode().splitlines()
            if line.startswith(COUNTER)
        ]
        return int(sum(counts)) if counts else None

    async def _get(self, route: str) -> bytes:
        try:
            return await self._http.get(route, timeout_s=self._http.address.timeout_s)
        except (UnansweredError, HttpStatusError) as error:
            raise self._failed(route, error) from error

    async def _post(self, route: str, **body: Any) -> bytes:
        """Unbounded: a phase of a sync has a limit of its own, and cancels what is under way."""
        try:
            return await self._http.post(route, json.dumps(body).encode(), timeout_s=None)
        except (UnansweredError, HttpStatusError) as error:
            raise self._failed(route, error) from error

    def _failed(self, route: str, error: UnansweredError | HttpStatusError) -> RouteError:
        return RouteError(self._http.named(f"{route.partition('?')[0]}: {error}"))


class Part(BaseModel):
    model_config = ConfigDict(protected_namespaces=())


class ImageLimit(Part):
    count: int | None = None


class PromptLimits(Part):
    image: ImageLimit = ImageLimit()


class MultiModalPart(Part):
    limit_per_prompt: PromptLimits


class ModelField(Part):
    dtype: str
    """`torch.float32`, ..."""
    max_model_len: int
    logprobs_mode: str
    multimodal_config: MultiModalPart | None


class SchedulerPart(Part):
    max_num_seqs: int


class ParallelPart(Part):
    data_parallel_size: int
    pipeline_parallel_size: int
    worker_extension_cls: str


class TransferPart(Part):
    backend: str


class EnginePart(Part):
    model: ModelField = Field(alias="model_config")
    scheduler_config: SchedulerPart
    parallel_config: ParallelPart
    weight_transfer_config: TransferPart | None


class StockInfo(Part):
    """What `/server_info` says that a run depends on."""

    vllm_config: EnginePart


def disagreements(info: StockInfo, expected: EngineSettings, *, world_size: int) -> Iterator[str]:
    """What the server was started with that the run cannot use, each with the argument of `vllm
    serve` that mends it.
    """
    engine, model = info.vllm_config, info.vllm_config.model
    if model.dtype != f"torch.{expected.dtype}":
        yield (
            f"its dtype is {model.dtype.removeprefix('torch.')}, the run's model.dtype is"
            f" {expected.dtype}: --dtype {expected.dtype}"
        )
    if model.max_model_len < expected.max_model_len:
        yield (
            f"its max_model_len is {model.max_model_len}, the run needs {expected.max_model_len}:"
            f" --max-model-len {expected.max_model_len}"
        )
    if model.logprobs_mode != "processed_logprobs":
        yield (
            f"its log-probabilities are {model.logprobs_mode}, before temperature and bans:"
            " --logprobs-mode processed_logprobs"
        )
    if not engine.parallel_config.worker_extension_cls:
        yield (
            "its workers cannot say what they loaded: --worker-extension-cls"
            f" {expected.worker_extension}"
        )
    num_images = _num_images(model.multimodal_config)
    if num_images is not None and num_images < expected.max_images_per_prompt:
        limit = json.dumps({"image": expected.max_images_per_prompt, "video": 0})
        yield (
            f"it takes {num_images} images in a prompt, the data have"
            f" {expected.max_images_per_prompt}: --limit-mm-per-prompt '{limit}'"
        )
    for replicas, argument in (
        (engine.parallel_config.data_parallel_size, "--data-parallel-size"),
        (engine.parallel_config.pipeline_parallel_size, "--pipeline-parallel-size"),
    ):
        if replicas > 1:
            yield (
                f"{argument} is {replicas}, over which weights are not synced: start one server for"
                f" each, with {argument} 1"
            )
    if (
        engine.weight_transfer_config is None
        or engine.weight_transfer_config.backend != expected.transport
    ):
        backend = json.dumps({"backend": expected.transport})
        told = (
            "no weights can be sent to it"
            if engine.weight_transfer_config is None
            else f"its weights come over {engine.weight_transfer_config.backend}"
        )
        yield (
            f"{told}, the learner sends over {expected.transport}: --weight-transfer-config"
            f" '{backend}'"
        )
    yield from too_few_sequences(
        engine.scheduler_config.max_num_seqs,
        expected,
        world_size=world_size,
        remedy="--max-num-seqs ",
    )


def missing_guards(answers: list[dict[str, Any]]) -> Iterator[str]:
    """Name each worker without the repeat guard, with the argument of `vllm serve` that loads it.

    `answers`: of `rollout_actors.repeat_guard.vllm.GuardedWorker.active_guard`, one per worker.
    """
    for rank, answer in enumerate(answers):
        if not answer["is_loaded"]:
            yield (
                f"the {answer['runner']} model runner of worker {rank} holds no repeat guard, and"
                " rollout_matching.repeat_terminate asks for one: --logits-processors"
                f" {GUARD_PROCESSOR}"
            )


def _num_images(part: MultiModalPart | None) -> int | None:
    """None: no limit of its own."""
    return 0 if part is None else part.limit_per_prompt.image.count
