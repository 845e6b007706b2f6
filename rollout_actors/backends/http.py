"""The part of a rollout server's HTTP client that both kinds of server share.

A rollout server is an engine that runs outside of the training run: `rollmatch serve`
(`rollmatch_server`) or vLLM's `vllm serve` (`stock_server`).
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
"""Seconds between two checks whether a starting server answers."""
WATCH_S = 10.0
"""Seconds between two checks whether a server that generates still answers and makes progress."""
CONNECT_S = 10.0
TELL_S = 2.0
STILL_LOADING = (502, 503, 504)
"""HTTP statuses of a server that is loading, or of a proxy in front of it."""
STARTED_AGAIN = "was restarted during the run, so it has the checkpoint's weights"
IN_THE_LEARNER = "rollout_matching.vllm.mode: colocate or rollout_matching.rollout_backend: hf"
"""Configuration of a run that needs no rollout servers, for error messages."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Address of a rollout server: its URL, and the time limits and the token of calls to it."""

    key: str
    """Path of the server's entry in the configuration, for error messages."""
    base_url: str
    timeout_s: float
    infer_timeout_s: float | None
    """Time limit of a call that generates; None: no limit, the server's progress is checked."""
    kind: Literal["rollmatch", "vllm"]
    token: str | None = field(default=None, repr=False)
    """Bearer token of each call; None: the token in the server's token file, if it has one."""
    run: str = ""
    """Name of the training run that uses the server, from `lease.run_name`; empty: no run."""

    @property
    def health_route(self) -> str:
        """HTTP route that a running server answers without a token."""
        # A stock server would redirect from `/health/`.
        return "/health" if self.kind == "vllm" else "/health/"


def server_addresses(section: ServerSection, run: str = "") -> tuple[ServerAddress, ...]:
    """Return the addresses of the configured rollout servers, with their bearer token.

    `run`: name of the training run that uses the servers.

    Raises ConfigError if the environment variable of the token is not set.
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
    """Return the bearer token in an environment variable; `variable` None: return None.

    Raises ConfigError that names the configuration's `key` if the variable is not set.
    """
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        raise ConfigError(
            f"{key}: the environment variable {variable} is not set; export the server's token in"
            f" {variable}, or remove the key"
        )
    # Replace it in all logs and error messages from now on.
    hide({"token": token})
    return token


class UnansweredError(Exception):
    """A server gave no answer: no connection, a broken connection, or no answer in time.

    The call may be retried.
    """


class LateError(UnansweredError):
    """A server gave no answer within the time limit."""


class HttpStatusError(Exception):
    """A server answered with an HTTP error.

    After a status 5xx the call may be retried. After a 4xx the answer would be the same again.
    """

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
    """Sends HTTP calls to one rollout server. Errors name it as the rollout actor `name`.

    `get` and `post` return the body of the answer. They raise UnansweredError and HttpStatusError.
    """

    def __init__(self, name: str, address: ServerAddress) -> None:
        self.name = name
        self.address = address
        # A proxy from the environment cannot reach loopback addresses of this machine.
        self._trust_env = not is_loopback(urlsplit(address.base_url).hostname or "")
        self._tls = httpx.create_ssl_context(trust_env=self._trust_env)

    async def get(self, route: str, *, timeout_s: float | None = None) -> bytes:
        """Send a GET request. `timeout_s` None: the time limit of the server's address."""
        return await self._call("GET", route, None, timeout_s or self.address.timeout_s)

    async def post(self, route: str, body: bytes, *, timeout_s: float | None) -> bytes:
        """POST a JSON body; `timeout_s` None: no limit. Cancelling closes the connection."""
        return await self._call("POST", route, body, timeout_s)

    def error(self, message: str, phase: str) -> RolloutError:
        """Build an error of this phase (such as `generate`) that names the server and its URL."""
        return RolloutError(self.with_url(message), actor=self.name, phase=phase)

    def with_url(self, message: str) -> str:
        """Prefix a message with the server's URL, unless the name is the URL already."""
        url = self.address.base_url
        return message if self.name == url else f"{url} {message}"

    def tell(self, route: str) -> None:
        """POST to a route and ignore all errors, because the server may have ended."""
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
        # Read each time, because a restarted server has a new token.
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
        # A new connection each time: a server may close an idle one, and the next call would fail.
        connection = httpx.AsyncClient(
            verify=self._tls,
            trust_env=self._trust_env,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
        )
        try:
            # httpx's own limits apply to each read and write. This one applies to the whole call.
            async with asyncio.timeout(timeout_s), connection:
                answer = await connection.request(
                    method, self.address.base_url + route, content=body, headers=headers
                )
        except TimeoutError as error:
            raise LateError(f"no answer to {route} after {timeout_s:g} s") from error
        except httpx.HTTPError as error:
            reason = f"{route}: {type(error).__name__}: {error}".rstrip(": ")
            raise UnansweredError(reason) from error
        except AttributeError as error:
            # anyio asks a connection for its peer after the server has already reset it.
            if error.name != "getpeername":
                raise
            raise UnansweredError(f"{route}: the connection was reset") from error
        if not answer.is_success:
            raise HttpStatusError(answer)
        return answer.content


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server's report about itself."""

    world_size: int
    """Number of rollout devices."""
    version: int
    """Version of the server's weights; 0: the checkpoint's, or not reported."""
    process: str
    """Id of the server's process, which is the same at all its addresses; empty: unknown."""
    problems: tuple[str, ...]
    """Settings of the server that are unsuitable for the run, each with its remedy."""


class HttpEngine(WatchedEngine, ABC):
    """The client of a rollout server, with an engine's methods. Each server kind has a subclass."""

    process = ""
    # Never true: this process continues if the server ends.
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
            index: index of the server in the run, and of its receiver group in a weight sync.
            expected: the settings of an engine that suits the run.
            command: command that starts a suitable server, for messages.
        """
        self._http = HttpClient(name, address)
        self._index = index
        self._expected = expected
        self._command = command

    async def start(self) -> int:
        """Wait for the server and check that it suits the run. Return its number of devices.

        Raises RolloutError with the command that starts a suitable server.
        """
        await self._wait_until_up()
        facts = await self.inspect()
        if facts.problems:
            message = f"does not suit the run: {'; '.join(facts.problems)}"
            raise self._http.error(f"{message}. A suitable command: `{self._command}`", "start")
        await self._claim()
        self.process = facts.process
        return facts.world_size

    @abstractmethod
    async def inspect(self) -> ServerFacts:
        """Return what a running server reports, without changing it. Raises RolloutError."""

    async def _claim(self) -> None:
        """Take over a suitable server for this run."""

    async def progress(self) -> int | None:
        """Return the number of tokens that the server has sampled since its start.

        Return None if it is idle or does not count tokens. Raises UnreachableError.
        """
        return await self._look(self._num_tokens)

    async def check_alive(self) -> None:
        """Raise UnreachableError if the server does not answer or was restarted.

        A restarted server has the checkpoint's weights.
        """
        if await self._look(self._was_started_again):
            raise self._unreachable(STARTED_AGAIN)

    @abstractmethod
    async def _num_tokens(self) -> int | None:
        """Request the number of sampled tokens; None: the server is idle or does not count them."""

    @abstractmethod
    async def _was_started_again(self) -> bool:
        """Return whether the server was restarted, so that it has the checkpoint's weights."""

    async def _look(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Send a query to the server, with one retry. Raises UnreachableError."""
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
        """Do nothing: the server continues to run, and each call has its own connection."""

    async def _wait_until_up(self) -> None:
        address = self._http.address
        remedy = (
            f"check that it runs (`{self._command}`), that {address.key}.base_url is its address"
            f" and that no firewall blocks it, or set {IN_THE_LEARNER}"
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
                    why = f"is not a rollout server: it answers {address.health_route} with {error}"
                    raise self._http.error(f"{why}; {remedy}", "start") from error
                last = str(error)
            if time.monotonic() + POLL_S >= deadline:
                limit = f"{SECTION}.timeout_s = {address.timeout_s:g} s"
                why = f"was not ready within {limit} (last: {last})"
                raise self._http.error(f"{why}; {remedy}", "start")
            await asyncio.sleep(POLL_S)

    async def _answers(self, calls: Sequence[Call[T]]) -> tuple[list[T], int]:
        """Make all calls at once. If one fails or is late, repeat all of them once.

        Return the answers in order, and the number of failed attempts (`Rollout.attempt`). Raises
        UnreachableError. Raises RolloutError if the server refused a call; then any other server
        with the same weights would refuse it too.
        """
        for attempt in range(TRIES):
            # Repeat all of them: seeds are per request, so the rollouts are the same.
            work = all_answers([call() for call in calls])
            try:
                if self._http.address.infer_timeout_s is None:
                    return await self._watched(work), attempt
                return await work, attempt
            except HttpStatusError as error:
                # A restarted server refuses calls too. Report that first, because then other
                # servers can answer.
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
        # Two tasks: the call has no limit, so only the watch can distinguish a slow server from a
        # stuck one.
        task = asyncio.create_task(work)
        watch = asyncio.create_task(self._watch())
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                watch.result()
            return await task
        finally:
            # `wait` does not cancel its tasks when it is cancelled or one of them is done.
            task.cancel()
            watch.cancel()

    async def _watch(self) -> None:
        # If the engine of a running server is stuck, its token count does not change.
        timeout_s = self._http.address.timeout_s
        last: int | None = None
        changed = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                now = await self._num_tokens()
            except HttpStatusError as error:
                raise UnansweredError(f"{self._http.address.health_route}: {error}") from error
            # None: the server is idle or does not count, so there is no stall to detect.
            if now is None or now != last:
                last = now
                changed = time.monotonic()
            elif time.monotonic() - changed >= timeout_s:
                raise UnansweredError(
                    "the server answers, but its engine has sampled no token for"
                    f" {SECTION}.timeout_s = {timeout_s:g} s"
                )

    def _parse(self, parse: Callable[[bytes], T], body: bytes, phase: str) -> T:
        """Parse an answer. Raises RolloutError with `phase` if `parse` raises ValueError."""
        try:
            return parse(body)
        except ValueError as error:
            remedy = f"check that it is `{self._command}`, and {SECTION}.kind"
            raise self._http.error(f"sent an invalid answer: {error}; {remedy}", phase) from error


async def all_answers(calls: Sequence[Coroutine[object, None, T]]) -> list[T]:
    """Run the coroutines concurrently and return their results in order.

    If one raises, cancel the others and raise its error.
    """
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
