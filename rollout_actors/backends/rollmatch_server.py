"""The client of `python -m launch.serve`: a rollout engine on the other side of HTTP (spec: server
mode).
"""

from __future__ import annotations

import json
import shlex
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from urllib.parse import urlsplit

from rollout_actors.backends.http import (
    WATCH_S,
    HttpClient,
    HttpStatusError,
    RemoteEngine,
    ServerAddress,
    ServerFacts,
    UnansweredError,
    all_answers,
    another_answer,
    too_few_sequences,
)
from rollout_actors.engine.settings import EngineSettings, model_type
from rollout_actors.server import messages
from rollout_actors.server.messages import IMAGE_PIXELS, CallLimits, InferCall
from shared.errors import WeightSyncError
from shared.rollouts import Rollout, RolloutRequest, SyncReport, WeightOffer
from shared.tokens.repeat_guard import RepeatGuardSettings
from shared.weight_sync.offer import offer_for
from shared.weight_sync.phases import CLIENT_MARGIN_S, SyncPhase, phase_limit

# How a server's share of a round becomes calls of a size that the server takes.


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
                f"takes calls of max_request_bytes = {limits.max_request_bytes}, and sample"
                f" {request.sample_id} with its images is {size}; start it with"
                f" max_request_bytes={size}, or make the images smaller"
            )
        if size > room or len(parts[-1]) == limits.max_requests:
            parts.append([])
            room = limits.max_request_bytes
        parts[-1].append(request)
        room -= size
    return [InferCall.of(part, run=run, version=version, guard=guard) for part in parts]


def _most_bytes(call: InferCall) -> int:
    """Of its body; a call of several requests is no larger than their own calls together. Writes no
    image for it, they are most of it.
    """
    without = [
        replace(
            request,
            images=tuple(replace(image, data=image.data and b"") for image in request.images),
        )
        for request in call.requests
    ]
    sizes = [
        len(image.data)
        for request in call.requests
        for image in request.images
        if image.data is not None
    ]
    return len(call.model_copy(update={"requests": tuple(without)}).body()) + sum(
        4 * -(-size // 3) for size in sizes
    )


# How a `python -m launch.serve` is started so that it suits a run: what the messages of the client,
# and of `launch.evaluate`, say.


def serve_command(
    settings: EngineSettings, base_url: str, *, tool_call_parser: str | None = None
) -> str:
    """The command line, for a shell. The parser is for callers of the OpenAI API; this package's
    own ask for tokens.
    """
    arguments = serve_arguments(settings, port=urlsplit(base_url).port or 8000)
    parser = [] if tool_call_parser is None else [f"tool_call_parser={tool_call_parser}"]
    return shlex.join(["python", "-m", "launch.serve", *arguments, *parser])


def serve_arguments(settings: EngineSettings, *, port: int) -> list[str]:
    """`key=value` of everything in the settings that `launch.serve` would not choose itself."""
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
    # A server has room for one at the least; of a text model it is nothing.
    if settings.max_images_per_prompt:
        values["max_images_per_prompt"] = settings.max_images_per_prompt
    if settings.max_image_pixels > IMAGE_PIXELS:
        values["max_image_pixels"] = settings.max_image_pixels
    if settings.kv_cache_memory_bytes is None:
        values["gpu_memory_utilization"] = settings.gpu_memory_utilization
    else:
        values["kv_cache_memory_bytes"] = settings.kv_cache_memory_bytes
    if settings.enforce_eager:
        values["enforce_eager"] = "true"
    if settings.repeat_guard is not None:
        values["repeat_terminate"] = json.dumps({"enabled": True} | asdict(settings.repeat_guard))
    if settings.enable_lora:
        values |= {"enable_lora": "true", "max_lora_rank": settings.max_lora_rank}
    return [f"{key}={value}" for key, value in values.items()]


class ServerClient(RemoteEngine):
    """The engine's state is the server's."""

    def __init__(
        self,
        name: str,
        address: ServerAddress,
        *,
        index: int,
        expected: EngineSettings,
        watch_s: float = WATCH_S,
    ) -> None:
        """`watch_s`: between two questions to `/health/` while a call without a limit is waited
        for.
        """
        # Without the guard: the run brings its rule with every call.
        http = HttpClient(
            name,
            address,
            command=serve_command(replace(expected, repeat_guard=None), address.base_url),
            watch_s=watch_s,
        )
        super().__init__(http, index=index, expected=expected)
        self._version = 0
        # By which the server tells this run's weights and requests from another's.
        self._run = uuid.uuid4().hex
        # Until the start has asked for them.
        self._limits = messages.CallLimits(sys.maxsize, sys.maxsize, sys.maxsize)

    async def inspect(self) -> ServerFacts:
        info = await self._ask(messages.ServerInfo, "/info/")
        world_size = (await self._ask(messages.WorldSize, "/get_world_size/")).world_size
        return ServerFacts(
            world_size,
            info.version,
            info.process,
            info.limits,
            tuple(disagreements(info, self._expected)),
        )

    async def _claim(self, facts: ServerFacts) -> None:
        assert facts.limits is not None, "this kind of server tells them"
        self._version, self._limits = facts.version, facts.limits

    async def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """One `/infer/`, or as many at a time as the server's limits of one make of it; where one
        fails or takes too long, all of them once more with the same seeds."""
        if not requests:
            return []
        try:
            calls = infer_calls(
                requests,
                self._limits,
                run=self._run,
                version=self._version,
                guard=self._expected.repeat_guard,
            )
            bodies = [call.body() for call in calls]
        except ValueError as error:
            raise self._http.error(str(error), "generate") from error
        answers, attempt = await self._http.asked_twice(lambda: self._infer(bodies))
        rollouts = [
            rollout
            for answer in answers
            for rollout in self._read(messages.InferAnswer, answer, "generate").rollouts
        ]
        if [(rollout.step, rollout.position) for rollout in rollouts] != [
            (request.step, request.position) for request in requests
        ]:
            raise self._http.error(
                f"answered {len(rollouts)} rollouts that are not those of the {len(requests)}"
                " requests, in their order",
                "generate",
            )
        return [replace(rollout, actor=self._http.name, attempt=attempt) for rollout in rollouts]

    async def run_sync_phase(self, phase: SyncPhase, offer: WeightOffer) -> SyncReport | None:
        """One HTTP call, never repeated: a phase is not what it was once it has been tried. The
        weights themselves travel by the process group.
        """
        # The server keeps the phase's limit itself and can say more.
        limit_s = phase_limit(offer, phase).seconds + CLIENT_MARGIN_S
        try:
            answer = await self._http.post(
                "/init_communicator/" if phase is SyncPhase.RENDEZVOUS else f"/sync/{phase}/",
                messages.SyncCall.of(phase, offer_for(offer, self._index), self._run).body(),
                timeout_s=limit_s,
            )
        except UnansweredError as error:
            raise self._sync_error(
                f"{error}; check that the server is alive, and that it reaches the learner's node",
                phase,
            ) from error
        except HttpStatusError as error:
            raise self._refused(error, phase) from error
        try:
            report = messages.read(messages.SyncAnswer, answer).report
        except ValueError as error:
            raise self._sync_error(
                another_answer(error, f"`{self._http.command}`"), phase
            ) from error
        if phase is SyncPhase.CANARY:
            assert report is not None
            self._version = report.version
        return report

    @property
    def version(self) -> int:
        return self._version

    async def _infer(self, bodies: Sequence[bytes]) -> list[bytes]:
        limit_s = self._http.address.infer_timeout_s
        work = all_answers([self._http.post("/infer/", body, timeout_s=limit_s) for body in bodies])
        return await (work if limit_s is not None else self._http.watched(work, self._progress))

    async def _progress(self) -> int | None:
        health = await self._http.get(
            self._http.address.health_route, timeout_s=self._http.address.timeout_s
        )
        told = self._read(messages.Health, health, "generate")
        return told.num_tokens if told.num_running else None

    async def _ask(self, form: type[messages.M], route: str) -> messages.M:
        try:
            return self._read(
                form, await self._http.get(route, timeout_s=self._http.address.timeout_s), "start"
            )
        except (UnansweredError, HttpStatusError) as error:
            raise self._http.error(
                f"does not answer {route}: {error}; check that it is `{self._http.command}`",
                "start",
            ) from error

    def _read(self, form: type[messages.M], body: bytes, phase: str) -> messages.M:
        try:
            return messages.read(form, body)
        except ValueError as error:
            raise self._http.error(
                another_answer(error, f"`{self._http.command}`"), phase
            ) from error

    def _refused(self, error: HttpStatusError, phase: SyncPhase) -> WeightSyncError:
        try:
            detail = messages.read(messages.ErrorAnswer, json.dumps(error.body).encode()).error
        except ValueError:
            return self._sync_error(str(error), phase)
        if detail.kind is not messages.ErrorKind.WEIGHT_SYNC:
            return self._sync_error(detail.message, phase)
        return WeightSyncError(
            self._http.named(detail.message),
            actor=self._http.name,
            phase=detail.phase,
            quantity=detail.quantity,
            size=detail.size,
        )

    def _sync_error(self, message: str, phase: SyncPhase) -> WeightSyncError:
        return WeightSyncError(self._http.named(message), actor=self._http.name, phase=phase)


def disagreements(info: messages.ServerInfo, expected: EngineSettings) -> Iterator[str]:
    """What the server was started with that the run cannot use, each with the remedy."""
    family = model_type(expected.model_path)
    if info.model_type != family:
        yield (
            f"model_type is {info.model_type} ({info.model}), the run's is {family}: start it with"
            f" model={expected.model_path}"
        )
    if info.dtype != expected.dtype:
        yield (
            f"dtype is {info.dtype}, the run's model.dtype is {expected.dtype}: start it with"
            f" dtype={expected.dtype}"
        )
    if info.max_model_len < expected.max_model_len:
        yield (
            f"max_model_len is {info.max_model_len}, the run needs {expected.max_model_len}: start"
            f" it with max_model_len={expected.max_model_len}"
        )
    yield from too_few_sequences(
        info.max_num_seqs,
        expected,
        world_size=info.world_size,
        remedy="start it with max_num_seqs=",
    )
    if info.max_images_per_prompt < expected.max_images_per_prompt:
        yield (
            f"max_images_per_prompt is {info.max_images_per_prompt}: start it with"
            f" max_images_per_prompt={expected.max_images_per_prompt}"
        )
    if info.limits.max_image_pixels < expected.max_image_pixels:
        yield (
            f"max_image_pixels is {info.limits.max_image_pixels}, the largest image of the data has"
            f" {expected.max_image_pixels}: start it with"
            f" max_image_pixels={expected.max_image_pixels}"
        )
    if info.transport != expected.transport:
        yield (
            f"its weights come over {info.transport}, the learner sends over {expected.transport}:"
            f" start it with transport={expected.transport}"
        )
    if expected.enable_lora and not (
        info.enable_lora and info.max_lora_rank >= expected.max_lora_rank
    ):
        serves = f"of rank {info.max_lora_rank}" if info.enable_lora else "none"
        yield (
            f"the adapters it serves are {serves}, the run's are of rank {expected.max_lora_rank}:"
            f" start it with enable_lora=true max_lora_rank={expected.max_lora_rank}, or set"
            " rollout_matching.vllm.sync.mode: full"
        )
