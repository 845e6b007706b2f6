"""`openenv:URL`: the environment of an OpenEnv server, whose sessions are episodes.

A session is a WebSocket, `/ws`, whose server answers `reset` and `step` with an observation, as in
the packages `openenv` 0.10.0 and `openenv-core` 0.3.0 and their `EnvClient`. Neither package can be
installed with the package versions of this project. A server's HTTP routes `/reset` and `/step`
keep no state between two requests, so an episode cannot be played by them.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import httpx
from pydantic import BaseModel, Field, ValidationError

from rollout_actors.environments.concurrency import waiting
from rollout_actors.environments.foreign.episodes import (
    Episode,
    EpisodeEnv,
    Shown,
    action_form,
)
from rollout_actors.environments.types import Arguments, Fields, JsonObject
from rollout_actors.threads import within
from shared.config.rollout import is_loopback

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

T = TypeVar("T", bound=BaseModel)

MAX_MESSAGE_BYTES = 100 * 2**20
"""Largest accepted answer of an OpenEnv server, in bytes. Observations may be images.

OpenEnv's own client has the same limit.
"""
KINDS = {"string": "a text", "integer": "a whole number", "number": "a number"}
REMEDY = "read the server's log, or raise the limit"


def load_environment(
    url: str,
    *,
    num_examples: int = 200,
    num_eval_examples: int = 50,
    max_turns: int = 20,
    seed: int = 0,
    options: Fields | None = None,
    instructions: str = "",
    sessions: int = 1,
    timeout_s: float = 60.0,
) -> EpisodeEnv:
    """Load the environment of an OpenEnv server.

    Args:
        url: the server's address: `http://127.0.0.1:8000`.
        seed: seed for drawing the rows' seeds, which are passed to `reset`. The environment decides
            how much the episodes of a row have in common.
        options: further arguments of `reset`.
        instructions: first text of the system message, which then describes how to write an action;
            by default the server's description of the environment.
        sessions: limit of concurrent episodes of one environment actor. The server allows
            `max_concurrent_envs` for all actors together (1 by default).
        timeout_s: limit for opening a session, and for each answer in it.

    Raises ValueError if the address is invalid, no OpenEnv server answers there, or the package
    `websockets` is not installed.
    """
    if "@" in urlsplit(url).netloc or urlsplit(url).query:
        # Not repeated, because it may contain a secret.
        raise ValueError(
            "openenv: the server's address has a user name, a password or a query, which would be"
            " saved with the run; write openenv:http://HOST:PORT"
        )
    name = f"openenv:{url}"
    try:
        import websockets.asyncio.client  # noqa: F401
    except ImportError as error:
        remedy = "pip install 'rollmatch[openenv]'"
        raise ValueError(f"{name} needs websockets ({error}); {remedy}") from error
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ValueError(f"{name}: write the server's address as openenv:http://HOST:PORT")
    if sessions < 1:
        raise ValueError(f"{name}: sessions is {sessions}; must be at least 1")
    url = url.rstrip("/")
    is_local = is_loopback(urlsplit(url).hostname or "")
    with httpx.Client(base_url=url, timeout=timeout_s, trust_env=not is_local) as client:
        description = _get(name, client, "/metadata", _Metadata).description
        actions = Actions(_get(name, client, "/schema", _Schemas).action)
    server = Server(name, url, actions, dict(options or {}), sessions, timeout_s)

    async def make_episode() -> Episode:
        return OpenEnvEpisode(server)

    return EpisodeEnv(
        make_episode,
        form=actions.form,
        instructions=instructions or description,
        num_examples=num_examples,
        num_eval_examples=num_eval_examples,
        max_turns=max_turns,
        seed=seed,
    )


class OpenEnvEpisode(Episode):
    """An episode of an OpenEnv server's environment, in its own session."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._slot: asyncio.Semaphore | None = None
        self._socket: ClientConnection | None = None

    async def reset(self, seed: int) -> Shown:
        """Wait for a free slot, open a session, and begin the episode.

        Raises:
            ConnectionError: the server is not reachable, or has no free session.
            TimeoutError: it answers too late.
            RuntimeError: the environment failed.
        """
        from websockets.asyncio.client import connect

        server = self._server
        slot = server.slot()
        with waiting():
            await slot.acquire()
        self._slot = slot
        is_local = is_loopback(urlsplit(server.url).hostname or "")
        try:
            self._socket = await connect(
                f"ws{server.url.removeprefix('http')}/ws",
                open_timeout=server.timeout_s,
                max_size=MAX_MESSAGE_BYTES,
                ping_timeout=None,  # `timeout_s` limits late answers
                proxy=None if is_local else True,
            )
        except OSError as error:  # a TimeoutError too
            raise ConnectionError(
                f"{server.name}: no session within environment.args.timeout_s ="
                f" {server.timeout_s:g} s ({type(error).__name__}: {error}); check that the server"
                " is running"
            ) from error
        answer = await self._ask("reset", {"seed": seed, **server.options})
        return self._shown(answer, reward=None)

    async def step(self, action: str) -> Shown:
        form = self._server.actions.form
        read = self._server.actions.read(action)
        if read is None:
            return Shown(f"I see no action. {form}")
        answer = await self._ask("step", read)
        if answer.type == "error":
            problems = _Refusal.model_validate(answer.data)
            return Shown(f"The environment does not take this action: {problems}. {form}")
        return self._shown(answer, reward=0.0)

    async def close(self) -> None:
        """End the session with the server, so that another episode may begin.

        Raises TimeoutError if the server does not close it in time.
        """
        from websockets.exceptions import ConnectionClosed

        late = f"{self._server.name}: has not closed the session after environment.args.timeout_s"
        try:
            if self._socket is not None:
                async with within(self._server.timeout_s, late, REMEDY):
                    with suppress(ConnectionClosed):  # the server may close it first
                        await self._socket.send(json.dumps({"type": "close"}))
                    await self._socket.wait_closed()
        finally:
            if self._socket is not None:
                self._socket.transport.abort()
            if self._slot is not None:
                self._slot.release()

    async def _ask(self, kind: str, data: Fields) -> _Answer:
        """Send a request. Return the observation, or the server's refusal of a step's action."""
        from websockets.exceptions import ConnectionClosed

        server = self._server
        assert self._socket is not None, "reset opens the socket"
        late = f"{server.name}: no answer to {kind} after environment.args.timeout_s"
        try:
            async with within(server.timeout_s, late, REMEDY):
                with suppress(ConnectionClosed):  # the reason may still be received below
                    await self._socket.send(json.dumps({"type": kind, "data": data}))
                answer = _Answer.model_validate_json(await self._socket.recv())
        except ConnectionClosed as error:
            raise ConnectionError(
                f"{server.name}: closed the session before it answered {kind} ({error}); read the"
                " server's log"
            ) from error
        if answer.type != "error":
            return answer
        failure = _Error.model_validate(answer.data)
        if kind == "step" and failure.code == "VALIDATION_ERROR":
            return answer
        if failure.code == "CAPACITY_REACHED":
            raise ConnectionError(
                f"{server.name}: has no free session ({failure.message}); start it with a higher"
                " max_concurrent_envs, or lower environment.args.sessions, the limit for each"
                f" environment actor (now {server.sessions})"
            )
        raise RuntimeError(
            f"{server.name}: {kind} failed with {failure.code}: {failure.message}; read the"
            " server's log"
        )

    def _shown(self, answer: _Answer, reward: float | None) -> Shown:
        """Convert the server's answer to what the model is shown.

        `reward`: used if the server reports no reward; None: any reward of the server is ignored.
        """
        told = _Observation.model_validate(answer.data)
        return Shown(
            as_text(told.observation),
            reward if told.reward is None or reward is None else float(told.reward),
            "terminated" if told.done else None,
        )


def as_text(observation: Fields) -> str:
    """Convert an OpenEnv observation to text: a line per field, or the value of the only field."""
    texts = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in observation.items()
        if value is not None and key != "metadata"
    }
    if len(texts) == 1:
        return next(iter(texts.values()))
    return "\n".join(f"{key}: {text}" for key, text in texts.items())


class Server:
    """An OpenEnv server, with this process's limit of concurrent sessions."""

    def __init__(
        self,
        name: str,
        url: str,
        actions: Actions,
        options: Arguments,
        sessions: int,
        timeout_s: float,
    ) -> None:
        self.name = name
        self.url = url
        self.actions = actions
        self.options = options
        self.sessions = sessions
        self.timeout_s = timeout_s
        # A semaphore belongs to the event loop that first waits for it.
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )

    def slot(self) -> asyncio.Semaphore:
        """Return the semaphore that limits concurrent sessions of the current event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._slots:
            self._slots[loop] = asyncio.Semaphore(self.sessions)
        return self._slots[loop]


class Actions:
    """Converts actions that a model writes to an OpenEnv server's actions.

    The model writes the value of the action's only field, or else a JSON object.
    """

    def __init__(self, schema: ActionSchema) -> None:
        fields = {key: one for key, one in schema.properties.items() if key != "metadata"}
        self._field: str | None = None
        self._is_text = False
        for field, one in fields.items():
            if len(fields) == 1 and one.get("type") in KINDS:
                self._field = field
                self._is_text = one["type"] == "string"
                what = KINDS[one["type"]]
                if "enum" in one:
                    what = "one of " + ", ".join(map(str, one["enum"]))
                if "description" in one:
                    what += f" ({one['description']})"
        if self._field is None:
            told = {"properties": fields, "required": schema.required, "$defs": schema.defs}
            text = json.dumps({key: value for key, value in told.items() if value})
            what = f"a JSON object of the schema {text}"
        self.form = action_form(what)
        """The description of an action for the model."""

    def read(self, action: str) -> JsonObject | None:
        """Return the action to send for a model's text; None if the text is not a valid action."""
        try:
            value = action if self._is_text else json.loads(action)
        except (ValueError, RecursionError):  # for example thousands of brackets or digits
            return None
        if self._field is not None:
            return {self._field: value}
        return value if isinstance(value, dict) else None


class ActionSchema(BaseModel):
    properties: dict[str, JsonObject] = {}
    required: list[str] = []
    defs: JsonObject = Field({}, alias="$defs")


class _Schemas(BaseModel):
    action: ActionSchema


class _Metadata(BaseModel):
    description: str = ""


class _Answer(BaseModel):
    type: str
    data: JsonObject = {}


class _Observation(BaseModel):
    observation: JsonObject
    reward: bool | float | None = None
    done: bool = False


class _Error(BaseModel):
    code: str = "an error"
    message: str = ""


class _Problem(BaseModel):
    loc: list[str | int] = []
    msg: str


class _Refusal(BaseModel):
    errors: list[_Problem] = []

    def __str__(self) -> str:
        texts = [f"{'.'.join(map(str, one.loc))}: {one.msg}".lstrip(": ") for one in self.errors]
        return "; ".join(texts)


def _get(name: str, client: httpx.Client, route: str, kind: type[T]) -> T:
    try:
        response = client.get(route)
        response.raise_for_status()
        return kind.model_validate_json(response.content)
    except (httpx.HTTPError, ValidationError) as error:
        raise ValueError(
            f"{name}: GET {route} did not answer as an OpenEnv server does ({type(error).__name__}:"
            f" {str(error).splitlines()[0]}); start it, for example by `uvicorn"
            " my_env.server.app:app --port 8000`, and give its address"
        ) from error
