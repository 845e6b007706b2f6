"""The client of a `rollmatch serve` server, and the command that starts the server."""

from __future__ import annotations

import asyncio
import shlex
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from rollout_actors.backends.http import (
    HttpEngine,
    HttpStatusError,
    ServerAddress,
    ServerFacts,
    UnansweredError,
)
from rollout_actors.engine.settings import EngineSettings, model_type
from rollout_actors.server import messages
from rollout_actors.server.lease import HEARTBEAT_S
from rollout_actors.server.messages import IMAGE_PIXELS, CallLimits, InferCall
from shared.errors import RolloutError, WeightSyncError
from shared.rollouts import Rollout, RolloutRequest, SyncReport, WeightOffer
from shared.tokens.repeat_guard import RepeatGuardSettings
from shared.weight_sync.phases import CLIENT_MARGIN_S, SyncPhase, phase_limit


def infer_calls(
    requests: Sequence[RolloutRequest],
    limits: CallLimits,
    *,
    run: str | None,
    version: int | None,
    guard: RepeatGuardSettings | None = None,
) -> list[InferCall]:
    """Split rollout requests into as few HTTP calls as the server's limits allow, in order.

    `version`: the weight version that must answer; None: any.

    Raises ValueError that names a sample too large for one call.

    Example:
        7 requests and max_requests 3 -> calls with 3, 3 and 1 requests.
    """
    parts: list[list[RolloutRequest]] = [[]]
    room = limits.max_request_bytes
    for request in requests:
        size = _body_bytes(InferCall.of([request], run=run, version=version, guard=guard))
        if size > limits.max_request_bytes:
            raise ValueError(
                f"accepts calls of max_request_bytes = {limits.max_request_bytes}, but sample"
                f" {request.sample_id} with its images has {size}; start it with"
                f" max_request_bytes={size}, or make the images smaller"
            )
        # A call of several requests is not larger than the sum of its single-request calls.
        if size > room or len(parts[-1]) == limits.max_requests:
            parts.append([])
            room = limits.max_request_bytes
        parts[-1].append(request)
        room -= size
    return [InferCall.of(part, run=run, version=version, guard=guard) for part in parts]


def _body_bytes(call: InferCall) -> int:
    (request,) = call.requests
    # Computed without encoding the images, which are most of the size.
    images = tuple(replace(image, data=image.data and b"") for image in request.images)
    without_data = call.model_copy(update={"requests": (replace(request, images=images),)})
    size = len(without_data.body())
    for image in request.images:
        size += 4 * -(-len(image.data or b"") // 3)  # base64: 4 characters for 3 bytes
    return size


def serve_command(settings: EngineSettings, base_url: str) -> str:
    """Return the `rollmatch serve` command that starts a server with these settings.

    The settings of the repeat guard are not in it, because the run sends them with each call.
    """
    arguments = serve_arguments(settings, port=urlsplit(base_url).port or 8000)
    return shlex.join(["rollmatch", "serve", *arguments])


def serve_arguments(settings: EngineSettings, *, port: int) -> list[str]:
    """Return the arguments (`key=value`) of a `rollmatch serve` command with these settings."""
    values = {
        "model": settings.model_path,
        "port": port,
        "device": settings.device,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "seed": settings.seed,
    }
    # A server always accepts at least one image, and a text model ignores this.
    if settings.max_images_per_prompt:
        values["max_images_per_prompt"] = settings.max_images_per_prompt
    if settings.max_image_pixels > IMAGE_PIXELS:
        values["max_image_pixels"] = settings.max_image_pixels
    if settings.max_pixels is not None:
        values["max_pixels"] = settings.max_pixels
    if settings.kv_cache_memory_bytes is None:
        values["gpu_memory_utilization"] = settings.gpu_memory_utilization
    else:
        values["kv_cache_memory_bytes"] = settings.kv_cache_memory_bytes
    if settings.enforce_eager:
        values["enforce_eager"] = "true"
    if settings.head_dtype != "model":
        values["head_dtype"] = settings.head_dtype
    if settings.enable_lora:
        values |= {"enable_lora": "true", "max_lora_rank": settings.max_lora_rank}
    return [f"{key}={value}" for key, value in values.items()]


class ServerClient(HttpEngine):
    """The client of one `rollmatch serve` server. The server refuses unsuitable requests itself."""

    version = 0
    """Version of the server's weights as this client knows it; 0: the checkpoint's."""

    def __init__(
        self, name: str, address: ServerAddress, *, index: int, expected: EngineSettings
    ) -> None:
        command = serve_command(expected, address.base_url)
        super().__init__(name, address, index=index, expected=expected, command=command)
        # By this id the server distinguishes this run's weights and requests from another run's.
        self._run = uuid.uuid4().hex
        self._limits = CallLimits(sys.maxsize, sys.maxsize, sys.maxsize)  # until `inspect`
        self._heartbeat: asyncio.Task[None] | None = None

    async def inspect(self) -> ServerFacts:
        try:
            info = self._read(messages.ServerInfo, await self._http.get("/info/"), "start")
        except (UnansweredError, HttpStatusError) as error:
            why = f"does not answer /info/: {error}; check that it is `{self._command}`"
            raise self._http.error(why, "start") from error
        self.version = info.version
        self._limits = info.limits
        problems = tuple(disagreements(info, self._expected))
        return ServerFacts(info.world_size, info.version, info.process, problems)

    async def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Generate one rollout per request, by one call of `/infer/` or several concurrent ones."""
        if not requests:
            return []
        try:
            calls = infer_calls(
                requests,
                self._limits,
                run=self._run,
                version=self.version,
                guard=self._expected.repeat_guard,
            )
            bodies = [call.body() for call in calls]
        except ValueError as error:
            raise self._http.error(str(error), "generate") from error
        limit_s = self._http.address.infer_timeout_s
        answers, attempt = await self._answers(
            [partial(self._http.post, "/infer/", body, timeout_s=limit_s) for body in bodies]
        )
        rollouts: list[Rollout] = []
        for answer in answers:
            rollouts += self._read(messages.InferAnswer, answer, "generate").rollouts
        # Compare every position, not only the number: a rollout in another's place would be trained
        # as that one.
        wanted = [(request.step, request.position) for request in requests]
        if [(rollout.step, rollout.position) for rollout in rollouts] != wanted:
            raise self._http.error(
                f"answered {len(rollouts)} rollouts that do not match the {len(requests)}"
                " requests in their order; this is a bug: report it with the server's output",
                "generate",
            )
        return [replace(rollout, actor=self._http.name, attempt=attempt) for rollout in rollouts]

    async def run_sync_phase(self, phase: SyncPhase, offer: WeightOffer) -> SyncReport | None:
        """Run one phase of a weight sync by one HTTP call. The last phase returns the report.

        The call is not retried, because an attempted phase has changed the server.
        """
        # The server enforces the phase's limit itself, and its error says more.
        limit_s = phase_limit(offer, phase).seconds + CLIENT_MARGIN_S
        route = "/init_communicator/" if phase is SyncPhase.RENDEZVOUS else f"/sync/{phase}/"
        call = messages.SyncCall.of(phase, offer.for_group(self._index), self._run)
        try:
            answer = await self._http.post(route, call.body(), timeout_s=limit_s)
            report = self._read(messages.SyncAnswer, answer, phase).report
        except (UnansweredError, HttpStatusError, RolloutError) as error:
            raise self._sync_error(error, phase) from error
        # After the last phase, calls request the new version.
        if phase is SyncPhase.CANARY:
            assert report is not None
            self.version = report.version
        return report

    async def _claim(self) -> None:
        if self._http.address.run:
            self._heartbeat = asyncio.create_task(self._renew_lease())

    async def _renew_lease(self) -> None:
        """Renew the lease while this process lives, even if the run sends no requests."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            # If the server does not answer, the run's next call reports it.
            with suppress(UnansweredError, HttpStatusError):
                await self._http.get(self._http.address.health_route)

    def close(self) -> None:
        """End the run's lease, so that the server accepts weights from another run."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self._http.address.run:
            self._http.tell("/end_lease/")

    async def _num_tokens(self) -> int | None:
        health = self._read(
            messages.Health, await self._http.get(self._http.address.health_route), "generate"
        )
        return health.num_tokens if health.num_running else None

    async def _was_started_again(self) -> bool:
        info = await self._http.get("/info/")
        return self._read(messages.ServerInfo, info, "generate").process != self.process

    def _read(self, form: type[messages.M], body: bytes, phase: str) -> messages.M:
        return self._parse(partial(messages.read, form), body, phase)

    def _sync_error(
        self, error: UnansweredError | HttpStatusError | RolloutError, phase: SyncPhase
    ) -> WeightSyncError:
        """Build the error of a phase. The engine's own error keeps all its fields."""
        fields: dict[str, Any] = {"actor": self._http.name, "phase": phase}
        message = str(error)
        if isinstance(error, RolloutError):
            return WeightSyncError(error.message, **fields)
        if isinstance(error, UnansweredError):
            message += "; check that the server is running and can reach the learner's node"
        else:
            # Other bodies come from a proxy and are reported unchanged.
            with suppress(ValueError):
                detail = messages.read(messages.ErrorAnswer, error.body.encode()).error
                message = detail.message
                fields |= {"quantity": detail.quantity, "size": detail.size}
                if detail.kind is messages.ErrorKind.WEIGHT_SYNC:
                    fields["phase"] = detail.phase
        return WeightSyncError(self._http.with_url(message), **fields)


def disagreements(info: messages.ServerInfo, expected: EngineSettings) -> Iterator[str]:
    """Yield a text for each setting of the server that is unsuitable for the run, with a remedy."""
    if info.taken:
        yield info.taken
    family = model_type(expected.model_path)
    if info.model_type != family:
        kinds = f"model_type is {info.model_type} ({info.model}), the run's is {family}"
        yield f"{kinds}: start it with model={expected.model_path}"
    for name, actual, wanted in (
        ("dtype", info.dtype, expected.dtype),
        ("head_dtype", info.head_dtype, expected.head_dtype),
        ("transport", info.transport, expected.transport),
    ):
        if actual != wanted:
            remedy = f"start the server with {name}={wanted}"
            yield f"{name} is {actual}, the run's is {wanted}: {remedy}"
    if info.max_pixels != expected.max_pixels:
        remedy = f"start the server with max_pixels={expected.max_pixels or 'null'}"
        yield (
            f"max_pixels is {info.max_pixels or 'null'}, the run's data.max_pixels is"
            f" {expected.max_pixels or 'null'}: {remedy}"
        )
    num_sequences = expected.sequences_per_device * info.world_size
    for name, limit, needed in (
        ("max_model_len", info.max_model_len, expected.max_model_len),
        ("max_num_seqs", info.max_num_seqs, num_sequences),
        ("max_images_per_prompt", info.max_images_per_prompt, expected.max_images_per_prompt),
        ("max_image_pixels", info.limits.max_image_pixels, expected.max_image_pixels),
    ):
        if limit < needed:
            remedy = f"start the server with {name}={needed}"
            yield f"{name} is {limit}, the run needs {needed}: {remedy}"
    rank = expected.max_lora_rank
    if expected.enable_lora and not (info.enable_lora and info.max_lora_rank >= rank):
        served = f"adapters of rank {info.max_lora_rank}" if info.enable_lora else "no adapters"
        remedy = f"start the server with enable_lora=true max_lora_rank={rank}"
        yield (
            f"the server serves {served}, the run's are of rank {rank}: {remedy}, or set"
            " rollout_matching.vllm.sync.mode: full"
        )
