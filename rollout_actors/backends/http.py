"""What every client of a rollout server does alike: wait for it, send its token, watch it while it
works, ask it twice (spec: server mode).

No connection outlives its call: a server may close an idle one at any time, and the call that finds
it closed would fail for nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import httpx

from rollout_actors.engine.settings import EngineSettings
from rollout_actors.server.messages import CallLimits
from shared.config.rollout import ServerSection, is_loopback
from shared.errors import ConfigError, RolloutError, UnreachableError
from shared.protocols import RolloutEngine
from shared.rollouts import TRIES, Rollout, RolloutRequest, SyncReport, WeightOffer
from shared.weight_sync.phases import SyncPhase

T = TypeVar("T")

SECTION = "rollout_matching.vllm.server"
POLL_S = 0.5
"""Between two questions whether a starting server is up."""
WATCH_S = 10.0
"""Between two questions whether a working server is still there, and gets on."""
CONNECT_S = 10.0
"""Longest time to open a connection."""
NOT_YET = (502, 503, 504)
"""What a server, or the proxy before it, answers while it loads."""

IN_THE_LEARNER = "rollout_matching.vllm.mode: colocate or rollout_matching.rollout_backend: hf"


def another_answer(error: ValueError, expected: str) -> str:
    """What is said of an answer that is not of the form that the expected server gives."""
    return f"answered something else: {error}; check that it is {expected}, and {SECTION}.kind"


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """One entry of `rollout_matching.vllm.server.servers`, with what all of them have in common.
    Picklable.
    """

    key: str
    """Of the entry, for messages."""
    base_url: str
    timeout_s: float
    infer_timeout_s: float | None
    """None: no limit, and the server is watched instead."""
    kind: Literal["rollmatch", "vllm"]
    token: str | None = field(default=None, repr=False)
    instead: str = IN_THE_LEARNER
    """What the run can be set to do without servers, for messages."""

    @property
    def health_route(self) -> str:
        """What the server answers as soon as it is up. A stock one would only redirect from the
        form with a slash.
        """
        return "/health" if self.kind == "vllm" else "/health/"


def server_addresses(
    section: ServerSection, instead: str = IN_THE_LEARNER
) -> tuple[ServerAddress, ...]:
    """In their order. The token is read here, once, from this process's environment. Raises
    ConfigError where it is not there.
    """
    token = None
    if section.token_env is not None:
        token = os.environ.get(section.token_env)
        if not token:
            raise ConfigError(
                f"{SECTION}.token_env: the environment variable {section.token_env} is not set;"
                " export the servers' token in it, or remove the key"
            )
    limit_s = section.infer_timeout_s
    return tuple(
        ServerAddress(
            f"{SECTION}.servers[{index}]",
            entry.base_url,
            section.timeout_s,
            limit_s if limit_s is not None and limit_s > 0 else None,
            section.kind,
            token,
            instead,
        )
        for index, entry in enumerate(section.servers)
    )


class UnansweredError(Exception):
    """No connection, a broken one, no answer in time, or a server that fell silent: the call may be
    tried again.
    """


class HttpStatusError(Exception):
    """An answer that says no. `body` is its JSON, or its text where it is none."""

    def __init__(self, status: int, body: Any) -> None:
        self.status, self.body = status, body
        super().__init__(f"HTTP {status}: {_said(body)}")

    @property
    def may_be_tried_again(self) -> bool:
        """A 4xx would be a 4xx again."""
        return self.status >= 500


async def all_answers(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """In order, or the first error: then the calls that have no answer yet are given up, as they
    are when this is cancelled.
    """
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


class HttpClient:
    """The calls to one server. Holds no connection."""

    def __init__(
        self, name: str, address: ServerAddress, *, command: str, watch_s: float = WATCH_S
    ) -> None:
        """`name` is the server's among the rollout actors; `command` is how such a server is
        started, for messages.
        """
        self._health, self._watch_s = address.health_route, watch_s
        self.name, self.address, self.command = name, address, command
        self._headers = (
            {} if address.token is None else {"Authorization": f"Bearer {address.token}"}
        )
        local = is_loopback(urlsplit(address.base_url).hostname or "")
        # A proxy of the environment is no way to this machine's own address.
        self._trust_env = not local
        self._tls = httpx.create_ssl_context(trust_env=self._trust_env)

    async def wait_until_up(self) -> None:
        """Ask its health route until it says yes. Raises RolloutError(phase="start") after
        `timeout_s`, or at once where something else answers.
        """
        deadline = time.monotonic() + self.address.timeout_s
        while True:
            try:
                await self.get(self._health, timeout_s=max(POLL_S, deadline - time.monotonic()))
                return
            except UnansweredError as error:
                last = str(error)
            except HttpStatusError as error:
                if error.status not in NOT_YET:
                    raise self.error(
                        f"answers {self._health} with {error}, so it is no rollout server;"
                        f" {self._remedy()}",
                        "start",
                    ) from error
                last = str(error)
            if time.monotonic() + POLL_S >= deadline:
                late = (
                    f"did not get ready within {SECTION}.timeout_s = {self.address.timeout_s:g} s"
                    f" (last: {last}); {self._remedy()}"
                )
                raise self.error(late, "start")
            await asyncio.sleep(POLL_S)

    async def get(self, route: str, *, timeout_s: float | None) -> bytes:
        """The answer's body. Raises UnansweredError and HttpStatusError."""
        return await self._call("GET", route, None, timeout_s)

    async def post(self, route: str, body: bytes, *, timeout_s: float | None) -> bytes:
        """The answer's body; `body` is JSON. Cancelling it closes the connection. Raises
        UnansweredError and HttpStatusError.
        """
        return await self._call("POST", route, body, timeout_s)

    async def watched(self, work: Awaitable[T], progress: Callable[[], Awaitable[int | None]]) -> T:
        """`work`, which has no limit of its own, for as long as the server answers and gets on.

        `progress` asks the server how many tokens it has sampled so far; None: it has nothing to
        do, or does not say. Raises UnansweredError when the server no longer answers, and when the
        number has not changed for `timeout_s`: an engine can be stuck behind a server that lives.
        """
        task = asyncio.ensure_future(work)
        watch = asyncio.create_task(self._watch(progress))
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                watch.result()
            return await task
        finally:
            # `wait` ends its tasks neither when it is cancelled nor when one of them is done.
            task.cancel()
            watch.cancel()

    async def asked_twice(self, ask: Callable[[], Awaitable[T]]) -> tuple[T, int]:
        """What `ask` gives, and how many failures came before it (`Rollout.attempt`). Raises
        RolloutError(phase="generate") with the server's URL: an UnreachableError where the server
        did not answer or failed, and another one may be asked."""
        for attempt in range(TRIES):
            try:
                return await ask(), attempt
            except HttpStatusError as error:
                if not error.may_be_tried_again:
                    raise self.error(f"refused the call: {error}", "generate") from error
                last: Exception = error
            except UnansweredError as error:
                last = error
        told = self.named(f"failed {TRIES} times, last with: {last}; check the server's own output")
        raise UnreachableError(told, actor=self.name, phase="generate") from last

    def error(self, message: str, phase: str) -> RolloutError:
        return RolloutError(self.named(message), actor=self.name, phase=phase)

    def named(self, message: str) -> str:
        """With the server's URL, where its name is another."""
        return (
            message if self.name == self.address.base_url else f"{self.address.base_url} {message}"
        )

    async def _call(
        self, method: str, route: str, body: bytes | None, timeout_s: float | None
    ) -> bytes:
        headers = self._headers | ({} if body is None else {"Content-Type": "application/json"})
        try:
            # httpx's own limits are per read and per write; this one is of the whole call.
            async with asyncio.timeout(timeout_s), self._connect() as client:
                answer = await client.request(
                    method, self.address.base_url + route, content=body, headers=headers
                )
        except TimeoutError as error:
            raise UnansweredError(f"no answer to {route} after {timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise UnansweredError(
                f"{route}: {type(error).__name__}: {error}".rstrip(": ")
            ) from error
        if not answer.is_success:
            raise HttpStatusError(answer.status_code, _content(answer))
        return answer.content

    def _connect(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            verify=self._tls,
            trust_env=self._trust_env,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
        )

    async def _watch(self, progress: Callable[[], Awaitable[int | None]]) -> None:
        """Ends, with UnansweredError, when the server does, or its progress."""
        last: int | None = None
        changed = time.monotonic()
        while True:
            await asyncio.sleep(self._watch_s)
            try:
                now = await progress()
            except HttpStatusError as error:
                raise UnansweredError(f"{self._health}: {error}") from error
            if now is None or now != last:
                last, changed = now, time.monotonic()
            elif time.monotonic() - changed >= self.address.timeout_s:
                raise UnansweredError(
                    f"it answers, and its engine has sampled no token for {SECTION}.timeout_s ="
                    f" {self.address.timeout_s:g} s"
                )

    def _remedy(self) -> str:
        return (
            f"check that it runs (`{self.command}`), that {self.address.key}.base_url is its"
            f" address and no firewall is between, or set {self.address.instead}"
        )


def _content(answer: httpx.Response) -> Any:
    try:
        return json.loads(answer.content)
    except ValueError:
        return answer.text


def _said(body: Any) -> str:
    """The message in an error's body: `{"error": {"message": ...}}` here as in vLLM."""
    match body:
        case (
            {"error": {"message": str(message)}}
            | {"message": str(message)}
            | {"detail": str(message)}
        ):
            return message
        case _:
            return str(body)[:500]


# A rollout engine on the other side of HTTP, of either kind (spec: server mode).


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself."""

    world_size: int
    """Rollout devices."""
    version: int
    """Of the weights that it holds; 0: the checkpoint's, or it does not say."""
    process: str
    """As `PooledEngine.process`."""
    limits: CallLimits | None
    """Of one call; None: it has none of its own."""
    problems: tuple[str, ...]
    """What it was started with that the run cannot use, each with the remedy."""


class RemoteEngine(RolloutEngine, ABC):
    """What the clients of both kinds have in common. Holds no connection."""

    def __init__(self, http: HttpClient, *, index: int, expected: EngineSettings) -> None:
        self._http, self._index, self._expected = http, index, expected
        self._process = ""

    async def start(self) -> int:
        """Waits for the server. Returns its rollout devices. Raises RolloutError(phase="start"),
        also where the server does not suit the run: with everything that differs, and the command
        line that would suit."""
        await self._http.wait_until_up()
        facts = await self.inspect()
        if facts.problems:
            raise self._http.error(
                f"does not suit the run: {'; '.join(facts.problems)}. All of it:"
                f" `{self._http.command}`",
                "start",
            )
        await self._claim(facts)
        self._process = facts.process
        return facts.world_size

    @abstractmethod
    async def inspect(self) -> ServerFacts:
        """What a server that is up says of itself; changes nothing there. Raises
        RolloutError(phase="start") where it does not say it.
        """

    @abstractmethod
    async def _claim(self, facts: ServerFacts) -> None:
        """Begin to use a server that suits."""

    @abstractmethod
    async def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]: ...

    @abstractmethod
    async def run_sync_phase(self, phase: SyncPhase, offer: WeightOffer) -> SyncReport | None: ...

    @property
    def process(self) -> str:
        return self._process

    @property
    @abstractmethod
    def version(self) -> int:
        """Of the server's weights, as far as this client has seen; 0 is the checkpoint's."""

    @property
    def is_dead(self) -> bool:
        """Never: a server that has ended may be started again. Its weights are then no longer this
        run's, and it, or their label, says so.
        """
        return False

    def close(self) -> None:
        """Nothing is held, and the server was launched by somebody else."""


def too_few_sequences(
    actual: int, expected: EngineSettings, *, world_size: int, remedy: str
) -> Iterator[str]:
    """`actual` is the server's `max_num_seqs`; the `remedy` is followed by what it should be."""
    least = expected.sequences_per_device * world_size
    if actual < least:
        yield (
            f"its max_num_seqs is {actual}, the run decodes {expected.sequences_per_device} on each"
            f" of its {world_size} devices (rollout_matching.decode_batch_size): {remedy}{least}"
        )
