"""The client of a stock server: `vllm serve` with this package installed (`server.kind: vllm`).

It uses only vLLM's own routes (vLLM 0.32; docs/how_to/servers.md). The server's command line loads
this package's transport, load reports and repeat guard.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import time
import uuid
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

from rollout_actors.backends.http import (
    HttpClient,
    HttpEngine,
    HttpStatusError,
    ServerAddress,
    ServerFacts,
    UnansweredError,
)
from rollout_actors.backends.rollmatch_server import ServerClient
from rollout_actors.backends.stock_messages import (
    Generated,
    StockInfo,
    probe_body,
    read_answer,
    read_probe,
    rollout_body,
)
from rollout_actors.engine.completion import EngineInfo, StartTime
from rollout_actors.engine.settings import (
    GUARD_PROCESSOR,
    EngineSettings,
    engine_arguments,
    engine_environment,
)
from rollout_actors.repeat_guard.rule import ActiveGuard, engine_rule, guard_call, require_guard
from rollout_actors.weight_sync.receiver import (
    InitRequest,
    TransferGroup,
    UpdateRequest,
    WeightReceiver,
)
from shared.errors import RolloutError, Timeout, WeightSyncError, late
from shared.rollouts import Rollout, RolloutRequest, SyncReport, WeightOffer
from shared.weight_sync.canary import CanaryProbe, Scores
from shared.weight_sync.phases import SyncPhase, phase_limit

GENERATE = "/inference/v1/generate"
WEIGHT_LABEL = "/weight_info"
TOKEN_COUNTER = "vllm:generation_tokens_total{"
"""Prefix of the lines of `/metrics` that count sampled tokens."""
UNVERIFIED = "rollmatch-unverified"
"""Label of a server's weights from the start of a weight sync until they are verified."""
FRESH = "default"
"""vLLM's own label of its weights. A server has it until a client sends weights or a label."""
CHECKPOINT = (FRESH, "-0")
"""How labels of the checkpoint's weights end: with vLLM's own label, or with version 0 of a run."""
WITH = "start the server with"
NOT_FLAGS = frozenset({"model", "distributed_executor_backend", "disable_log_stats"})
"""Engine arguments that are not flags of `vllm serve` here. The model is the first argument, the
server chooses its executor, and a run needs the counters in /metrics.
"""


@dataclass(frozen=True, slots=True)
class ServerEngineSpec:
    """Arguments of a rollout server's client (`HttpEngine`). A call of the spec makes the client.

    Example: `EngineActor(ServerEngineSpec(...))` is a rollout actor that uses a server.
    """

    name: str
    address: ServerAddress
    index: int
    expected: EngineSettings

    def __call__(self) -> HttpEngine:
        client = StockClient if self.address.kind == "vllm" else ServerClient
        return client(self.name, self.address, index=self.index, expected=self.expected)


def stock_command(settings: EngineSettings, base_url: str) -> str:
    """Return the `vllm serve` command for these settings, after its environment variables."""
    url = urlsplit(base_url)
    variables = stock_environment(settings)
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    address = ["--host", url.hostname or "127.0.0.1", "--port", str(url.port or 8000)]
    command = ["vllm", "serve", settings.model_path, *address, *stock_arguments(settings)]
    return f"{' '.join(words)} {shlex.join(command)}"


def stock_environment(settings: EngineSettings) -> dict[str, str]:
    """Return the environment variables that `vllm serve` needs for a run, except its API key."""
    return {"VLLM_SERVER_DEV_MODE": "1"} | engine_environment(settings)


def stock_arguments(settings: EngineSettings) -> list[str]:
    """Return the arguments of `vllm serve` for these settings, except model and address."""
    arguments = ["--enable-scale-out"]
    for name, value in engine_arguments(settings).items():
        flag = f"--{name.replace('_', '-')}"
        if name in NOT_FLAGS or value is None:
            continue
        match value:
            case bool():
                arguments.append(flag if value else f"--no-{flag.removeprefix('--')}")
            case dict():
                arguments += [flag, json.dumps(value)]
            case list():
                arguments += [flag, *value]
            case _:
                arguments += [flag, str(value)]
    return arguments


class StockRoutes:
    """Calls the HTTP routes of `vllm serve` that sync weights or report the server's state.

    The server opens these routes if `VLLM_SERVER_DEV_MODE=1`; `--api-key` does not protect them. A
    route that fails raises RolloutError. `run` is part of the label of weights that this run sends.
    """

    def __init__(self, http: HttpClient, run: str) -> None:
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
        # Labelled first: if this update or run ends midway, the weights have no valid version.
        await self._post("/update_weight_version", new_version=UNVERIFIED)
        await self._post("/start_weight_update")

    async def update_weights(self, request: UpdateRequest) -> None:
        await self._post("/update_weights", update_info=request.update_info)

    async def finish_weight_update(self) -> None:
        await self._post("/finish_weight_update")

    async def collective_rpc(self, method: str, *, args: tuple[object, ...] = ()) -> list[Any]:
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
        """Return the label of the server's weights: `default` if no client has set one."""
        return read_label(await self._get(WEIGHT_LABEL))

    async def world_size(self) -> int:
        return int(json.loads(await self._get("/get_world_size"))["world_size"])

    async def server_info(self) -> bytes:
        return await self._get("/server_info?config_format=json")

    async def num_tokens(self) -> int | None:
        """Return the number of tokens that the server has sampled since its start.

        Return None if the server does not count them. Raises UnansweredError.
        """
        try:
            metrics = await self._http.get("/metrics")
        except HttpStatusError:
            return None
        lines = [line for line in metrics.decode().splitlines() if line.startswith(TOKEN_COUNTER)]
        # The metrics have one line per engine of the server.
        if not lines:
            return None
        return int(sum(float(line.rpartition(" ")[2]) for line in lines))

    async def _get(self, route: str) -> bytes:
        return await self._answer(route, self._http.get(route))

    async def _post(self, route: str, **body: object) -> bytes:
        # No limit here: each phase of a sync has one, and cancels the call.
        body_json = json.dumps(body).encode()
        return await self._answer(route, self._http.post(route, body_json, timeout_s=None))

    async def _answer(self, route: str, call: Awaitable[bytes]) -> bytes:
        try:
            return await call
        except (UnansweredError, HttpStatusError) as error:
            message = f"{route.partition('?')[0]}: {error}"
            if isinstance(error, HttpStatusError) and error.status == 404:
                message += "; start the server with VLLM_SERVER_DEV_MODE=1 in its environment"
            # A sync replaces this phase by its own.
            raise self._http.error(message, "start") from error


class StockClient(HttpEngine):
    """The client of one `vllm serve` server. It generates only with this run's verified weights."""

    def __init__(
        self, name: str, address: ServerAddress, *, index: int, expected: EngineSettings
    ) -> None:
        command = stock_command(expected, address.base_url)
        super().__init__(name, address, index=index, expected=expected, command=command)
        self._routes = StockRoutes(self._http, run=uuid.uuid4().hex[:8])
        # Each server has its own group: the sender has rank 0 and the workers follow.
        group = TransferGroup(self._routes, transport=expected.transport, rank_offset=1)
        self._intake = WeightReceiver(name, self._routes, group, score=self._score, adapter=None)
        self._intake.unavailable_reason = "it was not started"
        self._rule = engine_rule(expected.repeat_guard, expected.model_path)

    async def inspect(self) -> ServerFacts:
        await self._check_token_route()
        world_size = await self._routes.world_size()
        body = await self._routes.server_info()
        info = self._parse(StockInfo.model_validate_json, body, "start")
        problems = tuple(disagreements(info, self._expected, world_size=world_size))
        # Only the worker extension knows whether the guard is loaded. Query every server, even
        # without a guard, because a stuck engine does not answer.
        if not problems:
            guards = await self._routes.collective_rpc("active_guard")
            if self._expected.repeat_guard is not None:
                problems = tuple(_missing_guards(guards))
        return ServerFacts(world_size, 0, "", problems)

    async def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Generate one rollout per request, by concurrent HTTP calls.

        If this is cancelled, the server ends the requests.
        """
        if not requests:
            return []
        if reason := self._intake.unavailable_reason:
            raise self._http.error(f"serves no rollouts: {reason}", "generate")
        origin = EngineInfo(self._http.name, self.version, self._rule, StartTime.now())
        calls = [
            partial(self._complete, rollout_body(request, origin.actor), request.sample_id)
            for request in requests
        ]
        answers, attempt = await self._answers(calls)
        label = self._routes.label(str(origin.version))
        rollouts = []
        for request, (answer, end) in zip(requests, answers, strict=True):
            try:
                completion = read_answer(answer, request, actor=origin.actor, label=label)
            except RolloutError:
                await self.check_alive()  # a restarted server answers with the checkpoint's weights
                raise
            rollouts.append(replace(completion.rollout(request, origin, end), attempt=attempt))
        return rollouts

    async def run_sync_phase(self, phase: SyncPhase, offer: WeightOffer) -> SyncReport | None:
        """Run one phase of a weight sync, without retries. The last phase returns the report.

        A repeated phase would find the server changed.
        """
        if phase is SyncPhase.RENDEZVOUS:
            # The guard is set here, because the pause has waited for requests of other runs. Those
            # runs refuse answers to their later requests, which have this run's label.
            try:
                await self._set_guard(phase, phase_limit(offer, SyncPhase.PAUSE))
            except RolloutError as error:
                raise WeightSyncError(error.message, actor=self._http.name, phase=phase) from error
        return await self._intake.run_phase(phase, offer.for_group(self._index))

    @property
    def version(self) -> int:
        """Version of the server's weights as this client knows it; 0: the checkpoint's."""
        return self._intake.version

    async def _check_token_route(self) -> None:
        """Raise RolloutError with a remedy if the token route is closed."""
        try:
            # An open route answers an empty request with 400.
            await self._http.post(GENERATE, b"{}", timeout_s=self._http.address.timeout_s)
        except UnansweredError as error:
            raise self._http.error(f"{GENERATE}: {error}", "start") from error
        except HttpStatusError as error:
            remedies = {
                401: (
                    "the server was started with --api-key: export that key in an environment"
                    " variable, and name the variable in rollout_matching.vllm.server.token_env"
                ),
                403: "start the server with --enable-scale-out",
                404: (
                    "the server is not `vllm serve` of vLLM 0.32; check"
                    " rollout_matching.vllm.server.kind"
                ),
            }
            if error.status in remedies:
                message = f"does not open {GENERATE} ({error}); {remedies[error.status]}"
                raise self._http.error(message, "start") from error

    async def _claim(self) -> None:
        """Label the checkpoint's weights as this run's version 0.

        If the server has other weights, it gets no requests until this run's first weight sync.
        """
        label = await self._routes.weight_label()
        if label == UNVERIFIED:
            # A run ended during an update, which may have left the model half updated.
            await self._routes.collective_rpc("abandon_update")
        if not label.endswith(CHECKPOINT):
            held = f"the server has weights from another run ({label})"
            self._intake.unavailable_reason = f"{held}, until this run's first weight sync"
            return
        # A run that ended during a sync has left the engine paused.
        await self._routes.resume_generation()
        await self._routes.update_weight_version(str(self.version))
        timeout_s = self._http.address.timeout_s
        await self._set_guard("start", Timeout(timeout_s, "rollout_matching.vllm.server.timeout_s"))
        self._intake.unavailable_reason = ""

    async def _set_guard(self, phase: str, limit: Timeout) -> None:
        """Set the run's rule of the repeat guard in the server's workers. Raises RolloutError."""
        settings = self._expected.repeat_guard
        method, fields = guard_call(settings)
        try:
            async with asyncio.timeout(limit.seconds):
                answers = await self._routes.collective_rpc(method, args=(fields,))
        except TimeoutError as error:
            message = late("its workers about the run's repeat guard", limit, "the server's log")
            raise self._http.error(message, phase) from error
        require_guard(answers, settings, self._http.name)

    async def _num_tokens(self) -> int | None:
        await self._http.get(self._http.address.health_route)
        return await self._routes.num_tokens()

    async def _was_started_again(self) -> bool:
        # Ask the engine, not the HTTP process, because a stuck engine does not answer.
        return read_label(await self._http.get(WEIGHT_LABEL)) == FRESH

    async def _complete(self, body: bytes, sample_id: str) -> tuple[Generated, float]:
        """Return an answer and its end time by `time.perf_counter`."""
        limit_s = self._http.address.infer_timeout_s
        try:
            answer = await self._http.post(GENERATE, body, timeout_s=limit_s)
        except HttpStatusError as error:
            if error.status >= 500:
                raise
            raise self._http.error(f"refused sample {sample_id}: {error}", "generate") from error
        generated = self._parse(Generated.model_validate_json, answer, "generate")
        return generated, time.perf_counter()

    async def _score(self, probe: CanaryProbe, *, adapted: bool) -> Scores:
        assert adapted, "the client sends no adapters, so it cannot leave one out"
        # Without a limit, because the phase of the sync that contains it has one.
        body = probe_body(probe, self._http.name)
        try:
            answer = await self._http.post(GENERATE, body, timeout_s=None)
            return read_probe(self._parse(Generated.model_validate_json, answer, "canary"))
        except (UnansweredError, HttpStatusError, ValueError) as error:
            raise self._http.error(f"does not score the canary: {error}", "canary") from error


def disagreements(info: StockInfo, expected: EngineSettings, *, world_size: int) -> Iterator[str]:
    """Yield a text for each setting of the server that is unsuitable for the run.

    Each text ends with the argument of `vllm serve` that corrects the setting.
    """
    dtype = info.dtype.removeprefix("torch.")
    if dtype != expected.dtype:
        yield f"dtype is {dtype}, the run's is {expected.dtype}: {WITH} --dtype {expected.dtype}"
    head_dtype = info.overrides.get("head_dtype", "model")
    if head_dtype != expected.head_dtype:
        wrong = f"its logits have the type {head_dtype}, the run's model.head_dtype is"
        override = json.dumps({"head_dtype": expected.head_dtype})
        yield f"{wrong} {expected.head_dtype}: {WITH} --hf-overrides '{override}'"
    if info.logprobs_mode != "processed_logprobs":
        mode = f"{info.logprobs_mode}, before temperature and bans"
        yield f"its log-probabilities are {mode}: {WITH} --logprobs-mode processed_logprobs"
    if not info.worker_extension:
        remedy = f"{WITH} --worker-extension-cls {expected.worker_extension}"
        yield f"its workers cannot report the weights that they loaded: {remedy}"
    num_images = 0 if info.multimodal is None else info.max_images_per_prompt
    if num_images is not None and num_images < expected.max_images_per_prompt:
        needed = f"the data have {expected.max_images_per_prompt}"
        limit = json.dumps({"image": expected.max_images_per_prompt, "video": 0})
        takes = f"the server takes {num_images} images in a prompt"
        yield f"{takes}, {needed}: {WITH} --limit-mm-per-prompt '{limit}'"
    actual_limits = info.processor_arguments or {}
    limits = engine_arguments(expected).get("mm_processor_kwargs", {})
    if actual_limits != limits:
        wrong = f"its images are processed with {actual_limits}, the run's with {limits}"
        right = f"{WITH} --mm-processor-kwargs '{json.dumps(limits)}'"
        yield f"{wrong} (data.max_pixels): {right}"
    for argument, replicas in (
        ("--data-parallel-size", info.data_parallel_size),
        ("--pipeline-parallel-size", info.pipeline_parallel_size),
    ):
        if replicas > 1:
            remedy = f"start one server for each replica, with {argument} 1"
            yield f"{argument} is {replicas}, but weights are not synced to replicas: {remedy}"
    if info.transport != expected.transport:
        takes = "no weights" if info.transport is None else f"weights over {info.transport}"
        sends = f"the learner sends over {expected.transport}"
        backend = json.dumps({"backend": expected.transport})
        yield f"the server takes {takes}, {sends}: {WITH} --weight-transfer-config '{backend}'"
    for argument, actual, wanted in (
        ("--max-model-len", info.max_model_len, expected.max_model_len),
        ("--max-num-seqs", info.max_num_seqs, expected.sequences_per_device * world_size),
    ):
        if actual < wanted:
            yield f"{argument} is {actual}, the run needs {wanted}: {WITH} {argument} {wanted}"


def read_label(weight_info: bytes) -> str:
    return str(json.loads(weight_info)["weight_version"])


def _missing_guards(answers: Sequence[ActiveGuard]) -> Iterator[str]:
    """Yield a message for each worker without the repeat guard, by its `active_guard`."""
    for rank, answer in enumerate(answers):
        if not answer["is_loaded"]:
            who = f"the {answer['runner']} model runner of worker {rank}"
            why = "which rollout_matching.repeat_terminate requires"
            yield f"{who} has no repeat guard, {why}: {WITH} --logits-processors {GUARD_PROCESSOR}"
