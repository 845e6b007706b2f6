"""The client of a stock `vllm serve` in whose environment this package is installed: `server.kind:
vllm` (docs/stock_server.md).

Its own routes are used directly: token-in/token-out for rollouts and canary, the weight-transfer
routes for syncs. What this package adds on the server's side (the transport, the worker's receipts,
the repeat guard) is named on its command line.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
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
)
from rollout_actors.backends.rollmatch_server import ServerClient
from rollout_actors.backends.stock_messages import (
    Generated,
    probe_body,
    read_answer,
    read_probe,
    rollout_body,
)
from rollout_actors.backends.stock_routes import (
    STOCK_SERVER,
    UNVERIFIED,
    RouteError,
    StockRoutes,
    disagreements,
    missing_guards,
)
from rollout_actors.engine.completion import EngineInfo, StartTime
from rollout_actors.engine.settings import EngineSettings, engine_arguments, engine_environment
from rollout_actors.repeat_guard.rule import engine_rule, guard_call, require_guard
from rollout_actors.weight_sync.receiver import TransferGroup, WeightReceiver
from shared.errors import RolloutError, Timeout, WeightSyncError, late
from shared.rollouts import Rollout, RolloutRequest, SyncReport, WeightOffer
from shared.weight_sync.canary import CanaryProbe, Scores
from shared.weight_sync.offer import AdapterOffer, offer_for
from shared.weight_sync.phases import SyncPhase, phase_limit

# Which client a rollout server has.


@dataclass(frozen=True, slots=True)
class ServerEngineSpec:
    """Makes the client of one server: `EngineActor(ServerEngineSpec(...))`."""

    name: str
    address: ServerAddress
    index: int
    """The server's place among the servers of the run, and so its group's in a weight sync."""
    expected: EngineSettings
    """What the run would start an engine of its own with: the server must agree."""

    def __call__(self) -> RemoteEngine:
        client = StockClient if self.address.kind == "vllm" else ServerClient
        return client(self.name, self.address, index=self.index, expected=self.expected)


# How a stock `vllm serve` is started so that it gives the rollouts of this run: what the client's
# messages and docs/stock_server.md name.


NOT_SAID = frozenset({"model", "distributed_executor_backend", "disable_log_stats"})
"""Engine arguments that are no flags here: the model comes first, a server that is in no placement
group chooses how its devices work together, and the counters behind /metrics are how a run sees
that the engine gets on."""


def stock_command(settings: EngineSettings, base_url: str) -> str:
    """The command line, with the variables that this package needs set before it."""
    url = urlsplit(base_url)
    arguments = [
        "vllm",
        "serve",
        settings.model_path,
        "--host",
        url.hostname or "127.0.0.1",
        "--port",
        str(url.port or 8000),
        *stock_arguments(settings),
    ]
    return (
        " ".join(
            f"{name}={shlex.quote(value)}" for name, value in stock_environment(settings).items()
        )
        + " "
        + shlex.join(arguments)
    )


def stock_environment(settings: EngineSettings) -> dict[str, str]:
    """Variables of the server's process and its children; the key that callers must bring is not
    among them.
    """
    return {"VLLM_SERVER_DEV_MODE": "1"} | engine_environment(settings)


def stock_arguments(settings: EngineSettings) -> list[str]:
    """Of `vllm serve`, behind the model: the engine's arguments as flags, and the routes that have
    to be opened.
    """
    values = {
        name: value for name, value in engine_arguments(settings).items() if name not in NOT_SAID
    }
    return [
        "--enable-scale-out",
        *(
            part
            for name, value in values.items()
            for part in _flag(f"--{name.replace('_', '-')}", value)
        ),
    ]


def _flag(name: str, value: Any) -> list[str]:
    match value:
        case None:
            return []
        case False:
            return [f"--no-{name.removeprefix('--')}"]
        case True:
            return [name]
        case dict():
            return [name, json.dumps(value)]
        case list():
            return [name, *value]
        case _:
            return [name, str(value)]


GENERATE = "/inference/v1/generate"
CHECKPOINT = ("default", "-0")
"""How the label ends that weights have which nobody sent: vLLM's own, or version 0 of a run."""


class StockClient(RemoteEngine):
    """The door is shut while the server's weights are not this run's, or not verified."""

    def __init__(
        self,
        name: str,
        address: ServerAddress,
        *,
        index: int,
        expected: EngineSettings,
        watch_s: float = WATCH_S,
    ) -> None:
        http = HttpClient(
            name, address, command=stock_command(expected, address.base_url), watch_s=watch_s
        )
        super().__init__(http, index=index, expected=expected)
        self._engine = StockRoutes(http, run=uuid.uuid4().hex[:8])
        # A group of its own: its workers' ranks begin behind the sender's.
        group = TransferGroup(self._engine, transport=expected.transport, rank_offset=1)
        self._intake = WeightReceiver(
            name, self._engine, group, score=self._score, adapter=NoAdapters()
        )
        self._intake.shut = "it was not started"
        self._rule = engine_rule(expected.repeat_guard, expected.model_path)

    async def inspect(self) -> ServerFacts:
        """Raises RolloutError also naming what opens a route that is closed."""
        await self._check_routes()
        with self._saying("start"):
            world_size, info = await self._engine.world_size(), await self._engine.info()
            problems = tuple(disagreements(info, self._expected, world_size=world_size))
            # Without the worker extension nobody could say what guards. Asked of every server: an
            # engine that is stuck does not answer.
            if not problems:
                guards = await self._engine.collective_rpc("active_guard")
                problems = (
                    () if self._expected.repeat_guard is None else tuple(missing_guards(guards))
                )
        return ServerFacts(world_size, 0, "", None, problems)

    async def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """All requests at once; where one fails or takes too long, all of them once more with the
        same seeds. Raises RolloutError.
        """
        if not requests:
            return []
        if self._intake.shut:
            raise self._http.error(f"serves no rollouts: {self._intake.shut}", "generate")
        origin = EngineInfo(self._http.name, self.version, self._rule, StartTime.now())
        bodies = [rollout_body(request, self._http.name) for request in requests]
        answers, attempt = await self._http.asked_twice(lambda: self._share(requests, bodies))
        label = self._engine.label(str(origin.version))
        read = [
            (read_answer(answer, request, actor=origin.actor, label=label), end)
            for request, (answer, end) in zip(requests, answers, strict=True)
        ]
        return [
            replace(answer.rollout(request, origin, end), attempt=attempt)
            for request, (answer, end) in zip(requests, read, strict=True)
        ]

    async def run_sync_phase(self, phase: SyncPhase, offer: WeightOffer) -> SyncReport | None:
        """By the server's own routes, each called once: a phase is not what it was once it has been
        tried.
        """
        if phase is SyncPhase.RENDEZVOUS:
            # Here, because nothing is generated: requests that another run sent were waited for by
            # the pause, and those that it still sends get labels of this run's weights, which it
            # refuses.
            try:
                await self._guard(phase, phase_limit(offer, SyncPhase.PAUSE))
            except RolloutError as error:
                raise WeightSyncError(error.message, actor=self._http.name, phase=phase) from error
        return await self._intake.run(phase, offer_for(offer, self._index))

    @property
    def version(self) -> int:
        return self._intake.version

    async def _check_routes(self) -> None:
        """That every route is open to this client. Raises RolloutError naming what opens the one
        that is not.
        """
        limit_s = self._http.address.timeout_s
        try:
            # refused, for what is wrong with it, where the route is open
            await self._http.post(GENERATE, b"{}", timeout_s=limit_s)
        except UnansweredError as error:
            raise self._http.error(f"{GENERATE}: {error}", "start") from error
        except HttpStatusError as error:
            remedy = {
                401: (
                    "it was started with --api-key: export the same key in a variable and name it"
                    " in rollout_matching.vllm.server.token_env"
                ),
                403: "start it with --enable-scale-out",
                404: f"it is not {STOCK_SERVER}; check rollout_matching.vllm.server.kind",
            }
            if error.status in remedy:
                raise self._http.error(
                    f"does not open {GENERATE} ({error}); {remedy[error.status]}", "start"
                ) from error
        try:
            await self._http.get("/is_paused", timeout_s=limit_s)
        except UnansweredError as error:
            raise self._http.error(f"/is_paused: {error}", "start") from error
        except HttpStatusError as error:
            closed = (
                f"does not open its weight-transfer routes ({error}); start it with"
                " VLLM_SERVER_DEV_MODE=1 in its environment"
            )
            raise self._http.error(closed, "start") from error

    async def _claim(self, facts: ServerFacts) -> None:
        """Label the server's weights as this run's version 0 where they are the checkpoint's; else
        nothing is served until a sync.
        """
        with self._saying("start"):
            label = await self._engine.weight_label()
            if label == UNVERIFIED:
                # A run ended in the middle of an update, which may have left the model in pieces.
                await self._engine.collective_rpc("abandon_update")
            if not label.endswith(CHECKPOINT):
                self._intake.shut = (
                    f"it holds weights that another run has sent ({label}), until this run sends"
                    " its own"
                )
                return
            await self._engine.resume_generation()
            await self._engine.update_weight_version(str(self.version))
        limit = Timeout(self._http.address.timeout_s, "rollout_matching.vllm.server.timeout_s")
        await self._guard("start", limit)
        self._intake.shut = ""

    async def _guard(self, phase: str, limit: Timeout) -> None:
        """Have the server's workers guard by the run's rule. Raises RolloutError(phase) where one
        of them does not, or none has answered by the limit."""
        settings = self._expected.repeat_guard
        method, fields = guard_call(settings)
        with self._saying(phase):
            try:
                async with asyncio.timeout(limit.seconds):
                    answers = await self._engine.collective_rpc(method, args=(fields,))
            except TimeoutError as error:
                told = late("its workers about the run's repeat guard", limit, "the server's log")
                raise self._http.error(told, phase) from error
        require_guard(answers, settings, self._http.name)

    @contextmanager
    def _saying(self, phase: str) -> Iterator[None]:
        """What the server's routes did not say, as an error of this phase."""
        try:
            yield
        except RouteError as error:
            # the routes have said whose they are
            raise RolloutError(str(error), actor=self._http.name, phase=phase) from error

    async def _share(
        self, requests: Sequence[RolloutRequest], bodies: Sequence[bytes]
    ) -> list[tuple[Generated, float]]:
        """Every answer with the time of its end, or the first error; a connection that closes ends
        its request in the server.
        """
        work = all_answers(
            [
                self._complete(body, request.sample_id)
                for request, body in zip(requests, bodies, strict=True)
            ]
        )
        return await (
            work
            if self._http.address.infer_timeout_s is not None
            else self._http.watched(work, self._progress)
        )

    async def _progress(self) -> int | None:
        await self._http.get(
            self._http.address.health_route, timeout_s=self._http.address.timeout_s
        )
        return await self._engine.num_tokens()

    async def _complete(self, body: bytes, sample_id: str) -> tuple[Generated, float]:
        try:
            answer = await self._http.post(
                GENERATE, body, timeout_s=self._http.address.infer_timeout_s
            )
        except HttpStatusError as error:
            if error.may_be_tried_again:
                raise
            raise self._http.error(f"refused sample {sample_id}: {error}", "generate") from error
        return self._read(answer, "generate"), time.perf_counter()

    async def _score(self, probe: CanaryProbe, *, adapted: bool) -> Scores:
        assert adapted, "it takes no adapters: there is nothing to leave out"
        try:
            answer = await self._http.post(
                GENERATE, probe_body(probe, self._http.name), timeout_s=None
            )
            return read_probe(self._read(answer, "canary"))
        except (UnansweredError, HttpStatusError, ValueError) as error:
            raise self._http.error(f"does not score the canary: {error}", "canary") from error

    def _read(self, body: bytes, phase: str) -> Generated:
        try:
            return Generated.model_validate_json(body)
        except ValueError as error:
            raise self._http.error(another_answer(error, STOCK_SERVER), phase) from error


class NoAdapters:
    """In place of an adapter intake: vLLM's route for adapters reads a folder of the server's
    machine, and does not say whether it replaced the last one.
    """

    request = None

    async def take(self, terms: AdapterOffer) -> None:
        raise ValueError(
            "a stock vllm serve takes no adapter alone; set rollout_matching.vllm.sync.mode: full"
        )

    async def verify(self) -> None:
        raise AssertionError("take comes first, and refuses")

    async def drop(self) -> None:
        """There is none."""
