"""The engine behind a rollout server, over HTTP: what both kinds of server have in common.

`rollmatch_server` and `stock_server` are its two dialects (spec: server mode).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, TypeVar
from urllib.parse import urlsplit

import httpx

from rollout_actors.engine.settings import EngineSettings
from rollout_actors.server.lease import RUN_HEADER, encoded
from rollout_actors.server.token_file import find_token
from shared.config.rollout import ServerSection, is_loopback
from shared.config.secrets import hide
from shared.errors import ConfigError, RolloutError, UnreachableError
from shared.protocols import WatchedEngine
from shared.rollouts import TRIES

T = TypeVar("T")
Call = Callable[[], Coroutine[object, None, T]]

SECTION = "rollout_matching.vllm.server"
POLL_S = 0.5
"""Time between two looks whether a starting server is up."""
WATCH_S = 10.0
"""Time between two looks whether a working server answers and makes progress."""
CONNECT_S = 10.0
TELL_S = 2.0
STILL_LOADING = (502, 503, 504)
"""Statuses of a server, or of the proxy before it, that loads."""
STARTED_AGAIN = "was started again in the midst of the run, and holds the checkpoint's weights"
IN_THE_LEARNER = "rollout_matching.vllm.mode: colocate or rollout_matching.rollout_backend: hf"
"""Settings of a run without servers, for messages."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """One entry of `rollout_matching.vllm.server.servers`, with the section's settings."""

    key: str
    """Path of the entry in the configuration, for messages."""
    base_url: str
    timeout_s: float
    infer_timeout_s: float | None
    """None: no limit, and the server is watched instead."""
    kind: Literal["rollmatch", "vllm"]
    token: str | None = field(default=None, repr=False)
    """None: that of the server's token file, if it has one."""
    run: str = ""
    """The run that asks, as `lease.run_name`; empty: none."""

    @property
    def health_route(self) -> str:
        """The open route of a server that is up."""
        # A stock server would redirect from `/health/`.
        return "/health" if self.kind == "vllm" else "/health/"


def server_addresses(section: ServerSection, run: str = "") -> tuple[ServerAddress, ...]:
    """Return the servers in order, with the token of this process's environment.

    Args:
        run: the run that asks.

    Raises ConfigError where the token's variable is not set.
    """
    token = token_in(section.token_env, f"{SECTION}.token_env")
    limit_s = section.infer_timeout_s
    # 0 or less means no limit, as in `RolloutTimeouts.for_servers`.
    if limit_s is not None and limit_s <= 0:
        limit_s = None
    return tuple(
        ServerAddress(
            key=f"{SECTION}.servers[{index}]",
            base_url=entry.base_url,
            timeout_s=section.timeout_s,
            infer_timeout_s=limit_s,
            kind=section.kind,
            token=token,
            run=run,
        )
        for index, entry in enumerate(section.servers)
    )


def token_in(variable: str | None, key: str) -> str | None:
    """Return the bearer token in a variable of this process's environment, which `key` names.

    Raises ConfigError where it is not set.
    """
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        why = f"the environment variable {variable} is not set"
        raise ConfigError(f"{key}: {why}; export the server's token in it, or remove the key")
    # From logs and error messages, from now on.
    hide({"token": token})
    return token


class UnansweredError(Exception):
    """No connection, a broken one, or no answer in time: the call may be tried again."""


class LateError(UnansweredError):
    """No answer in time."""


class HttpStatusError(Exception):
    """An answer with an error status. A 5xx may be tried again; a 4xx would be the same again."""

    def __init__(self, answer: httpx.Response) -> None:
        self.status = answer.status_code
        self.body = answer.text
        super().__init__(f"HTTP {self.status}: {_error_message(answer)}")


def _error_message(answer: httpx.Response) -> str:
    try:
        body = json.loads(answer.content)
    except ValueError:
        return answer.text[:500]
    match body:
        case {"error": {"message": str(text)}} | {"message": str(text)} | {"detail": str(text)}:
            return text
        case _:
            return str(body)[:500]


class HttpClient:
    """Calls one server, which has this name among the rollout actors.

    `get` and `post` return the answer's body. They raise UnansweredError and HttpStatusError.
    """

    def __init__(self, name: str, address: ServerAddress) -> None:
        self.name = name
        self.address = address
        # A proxy of the environment does not lead to this machine's own address.
        self._trust_env = not is_loopback(urlsplit(address.base_url).hostname or "")
        self._tls = httpx.create_ssl_context(trust_env=self._trust_env)

    async def get(self, route: str, *, timeout_s: float | None = None) -> bytes:
        """Ask with the limit `timeout_s`, or else the address's."""
        return await self._call("GET", route, None, timeout_s or self.address.timeout_s)

    async def post(self, route: str, body: bytes, *, timeout_s: float | None) -> bytes:
        """Send JSON. Cancelling it closes the connection."""
        return await self._call("POST", route, body, timeout_s)

    def error(self, message: str, phase: str) -> RolloutError:
        """Make an error that names the server, and its URL."""
        return RolloutError(self.with_url(message), actor=self.name, phase=phase)

    def with_url(self, message: str) -> str:
        """Put the server's URL first, unless that is its name already."""
        url = self.address.base_url
        return message if self.name == url else f"{url} {message}"

    def tell(self, route: str) -> None:
        """Call a route and wait for no more than `TELL_S`; a server that is gone need not know."""
        with suppress(httpx.HTTPError):
            httpx.post(
                self.address.base_url + route,
                headers=self._headers(),
                verify=self._tls,
                trust_env=self._trust_env,
                timeout=TELL_S,
            )

    def _headers(self) -> dict[str, str]:
        headers = {}
        # Looked for each time: a server that was started again has another.
        if token := self.address.token or find_token(self.address.base_url):
            headers["Authorization"] = f"Bearer {token}"
        if self.address.run:
            headers[RUN_HEADER] = encoded(self.address.run)
        return headers

    async def _call(
        self, method: str, route: str, body: bytes | None, timeout_s: float | None
    ) -> bytes:
        headers = self._headers()
        if body is not None:
            headers["Content-Type"] = "application/json"
        # A new one each time: a server may close an idle one, and the next call would fail.
        connection = httpx.AsyncClient(
            verify=self._tls,
            trust_env=self._trust_env,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
        )
        try:
            # httpx's own limits are per read and per write; this one is for the whole call.
            async with asyncio.timeout(timeout_s), connection:
                answer = await connection.request(
                    method, self.address.base_url + route, content=body, headers=headers
                )
        except TimeoutError as error:
            raise LateError(f"no answer to {route} after {timeout_s:g} s") from error
        except httpx.HTTPError as error:
            reason = f"{route}: {type(error).__name__}: {error}".rstrip(": ")
            raise UnansweredError(reason) from error
        if not answer.is_success:
            raise HttpStatusError(answer)
        return answer.content


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server's account of itself."""

    world_size: int
    """Rollout devices."""
    version: int
    """Weight version; 0: the checkpoint's, or not reported."""
    process: str
    """As `WatchedEngine.process`."""
    problems: tuple[str, ...]
    """Settings that the run cannot use, each with its remedy."""


class HttpEngine(WatchedEngine, ABC):
    """A rollout engine behind HTTP. A subclass speaks the routes of one kind of server."""

    process = ""
    # Never true: this process lives on, whatever becomes of the server.
    is_dead = False

    def __init__(
        self,
        name: str,
        address: ServerAddress,
        *,
        index: int,
        expected: EngineSettings,
        command: str,
    ) -> None:
        """
        Args:
            index: the server's among those of the run, and so its group's in a weight sync.
            expected: the settings of an engine that suits the run.
            command: starts a server that suits, for messages.
        """
        self._http = HttpClient(name, address)
        self._index = index
        self._expected = expected
        self._command = command

    async def start(self) -> int:
        """Wait for the server and check that it suits the run. Returns its rollout devices.

        Raises RolloutError with the command of a server that would suit.
        """
        await self._wait_until_up()
        facts = await self.inspect()
        if facts.problems:
            message = f"does not suit the run: {'; '.join(facts.problems)}"
            raise self._http.error(f"{message}. All of it: `{self._command}`", "start")
        await self._claim()
        self.process = facts.process
        return facts.world_size

    @abstractmethod
    async def inspect(self) -> ServerFacts:
        """Ask a server that is up about itself; changes nothing there. Raises RolloutError."""

    async def _claim(self) -> None:
        """Begin to use a server that suits."""

    async def progress(self) -> int | None:
        """Return the server's count of sampled tokens; None: nothing to do, or no count.

        Raises UnreachableError.
        """
        return await self._look(self._num_tokens)

    async def check_alive(self) -> None:
        """Return where the server answers, and is the one that this client has started with.

        Raises UnreachableError.
        """
        if await self._look(self._was_started_again):
            raise self._unreachable(STARTED_AGAIN)

    @abstractmethod
    async def _num_tokens(self) -> int | None:
        """Ask for the number of tokens sampled so far; None: nothing to do, or no count."""

    @abstractmethod
    async def _was_started_again(self) -> bool:
        """Ask whether another process answers now, which holds the checkpoint's weights."""

    async def _look(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask the server about itself, and once more after a failure. Raises UnreachableError."""
        for attempt in range(TRIES):
            try:
                return await ask()
            except (UnansweredError, HttpStatusError) as error:
                last = error
            if attempt + 1 < TRIES:
                await asyncio.sleep(POLL_S)
        raise self._unreachable(f"does not answer: {last}") from last

    def _unreachable(self, why: str) -> UnreachableError:
        message = self._http.with_url(why)
        return UnreachableError(message, actor=self._http.name, phase="generate")

    def close(self) -> None:
        """Do nothing: somebody else launched the server, and no connection is held."""

    async def _wait_until_up(self) -> None:
        address = self._http.address
        remedy = (
            f"check that it runs (`{self._command}`), that {address.key}.base_url is its address"
            f" and no firewall is between, or set {IN_THE_LEARNER}"
        )
        deadline = time.monotonic() + address.timeout_s
        while True:
            try:
                limit_s = max(POLL_S, deadline - time.monotonic())
                await self._http.get(address.health_route, timeout_s=limit_s)
                return
            except UnansweredError as error:
                last = str(error)
            except HttpStatusError as error:
                if error.status not in STILL_LOADING:
                    why = f"answers {address.health_route} with {error}, so it is no rollout server"
                    raise self._http.error(f"{why}; {remedy}", "start") from error
                last = str(error)
            if time.monotonic() + POLL_S >= deadline:
                limit = f"{SECTION}.timeout_s = {address.timeout_s:g} s"
                why = f"did not get ready within {limit} (last: {last})"
                raise self._http.error(f"{why}; {remedy}", "start")
            await asyncio.sleep(POLL_S)

    async def _answers(self, calls: Sequence[Call[T]]) -> tuple[list[T], int]:
        """Make all calls at once; where one fails or is late, make all of them once more.

        Returns the answers in order, and the number of failures before them (`Rollout.attempt`).
        Raises UnreachableError, and RolloutError where the server refused, as any other would that
        has the same weights.
        """
        for attempt in range(TRIES):
            # All of them, since seeds are per request: the same rollouts come again.
            work = all_answers([call() for call in calls])
            try:
                if self._http.address.infer_timeout_s is None:
                    return await self._watched(work), attempt
                return await work, attempt
            except HttpStatusError as error:
                # A server that was started again refuses too: that is reported first, since others
                # can answer then.
                if error.status < 500:
                    await self.check_alive()
                    raise self._http.error(f"refused the call: {error}", "generate") from error
                last: Exception = error
            except UnansweredError as error:
                last = error
        why = f"failed {TRIES} times, last with: {last}; check the server's own output"
        raise self._unreachable(why) from last

    async def _watched(self, work: Coroutine[object, None, T]) -> T:
        """Await `work` while the server answers and makes progress. Raises UnansweredError."""
        # Two tasks: the call itself has no limit, so only the watch can tell a slow server from a
        # stuck one.
        task = asyncio.create_task(work)
        watch = asyncio.create_task(self._watch())
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                watch.result()
            return await task
        finally:
            # `wait` ends its tasks neither when it is cancelled nor when one of them is done.
            task.cancel()
            watch.cancel()

    async def _watch(self) -> None:
        # An engine can be stuck behind a server that lives: then its count of tokens stands still.
        timeout_s = self._http.address.timeout_s
        last: int | None = None
        changed = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                now = await self._num_tokens()
            except HttpStatusError as error:
                raise UnansweredError(f"{self._http.address.health_route}: {error}") from error
            # None: there is nothing to do, or no count, so nothing can stand still.
            if now is None or now != last:
                last = now
                changed = time.monotonic()
            elif time.monotonic() - changed >= timeout_s:
                raise UnansweredError(
                    "it answers, and its engine has sampled no token for"
                    f" {SECTION}.timeout_s = {timeout_s:g} s"
                )

    def _parse(self, parse: Callable[[bytes], T], body: bytes, phase: str) -> T:
        """Read an answer. Raises RolloutError(phase) for one of another form."""
        try:
            return parse(body)
        except ValueError as error:
            remedy = f"check that it is `{self._command}`, and {SECTION}.kind"
            raise self._http.error(f"answered something else: {error}; {remedy}", phase) from error


async def all_answers(calls: Sequence[Coroutine[object, None, T]]) -> list[T]:
    """Return all answers in order, or raise the first error and give up the other calls."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
