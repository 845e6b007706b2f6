"""`verifiers:NAME`: an unchanged environment of the package `verifiers`, in its own process.

The package needs other versions of its dependencies than this project, so another interpreter runs
it (`foreign.verifiers_bridge`). The environment there calls OpenAI's routes on a local server.
The routes use the client of this rollout, so the trajectory is recorded here, with the token ids
and log-probabilities of the run's own engines. Rewards and metrics come from the environment's
rubric, which scores the rollouts of an example together.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import itertools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from openai.resources.chat.completions import AsyncCompletions
from pydantic import BaseModel

from rollout_actors.environments.chat.messages import cleanup_messages
from rollout_actors.environments.clients.openai import OVERLONG, ask
from rollout_actors.environments.concurrency import Work
from rollout_actors.environments.foreign import verifiers_bridge
from rollout_actors.environments.lifecycle import teardown
from rollout_actors.environments.multi_turn import MultiTurnEnv
from rollout_actors.environments.rewards import scoring_limit
from rollout_actors.environments.rubric import Rubric
from rollout_actors.environments.scope import bind_client, current_scope
from rollout_actors.environments.types import (
    Arguments,
    Client,
    EndpointClient,
    JsonObject,
    Messages,
    ModelResponse,
    RolloutInput,
    SamplingArgs,
    State,
)

VERSION = "0.3.1"
"""The last release of `verifiers` with the interface that most environments use."""
OWN_ARGUMENTS = frozenset(inspect.signature(AsyncCompletions.create).parameters)
"""Sampling arguments that OpenAI's client accepts. Others are sent in `extra_body`."""
END_S = 2.0
"""Time limit for the end of a thread, and of the process after its environment was closed."""
CLOSE_S = verifiers_bridge.GRACE_S + END_S

Answer = Callable[[JsonObject], Work[ModelResponse]]
"""A function that answers a model call: body of a request to an OpenAI route -> response."""


def load_environment(
    name: str,
    *,
    interpreter: str | None = None,
    start_timeout_s: float = 300.0,
    **arguments: object,
) -> VerifiersEnv:
    """Start a process with the package `verifiers`, and load one of its environments there.

    Args:
        name: as in `verifiers.load_environment`. Modules of the working directory are found too.
        interpreter: path of a Python that has `verifiers` and the environment's package; None: the
            Python of this process if it has `verifiers`, else the one that `make foreign` makes.
        start_timeout_s: limit for loading the environment.
        arguments: arguments of `verifiers.load_environment`.

    Raises ValueError if the interpreter does not exist, or did not load the environment.
    """
    process = BridgeProcess(f"verifiers:{name}", interpreter or _interpreter(name))
    try:
        try:
            answer = process.send("load", name=name, args=arguments).result(start_timeout_s)
        except TimeoutError as error:
            raise ValueError(
                f"verifiers:{name}: is not loaded after environment.args.start_timeout_s ="
                f" {start_timeout_s:g} s; check what it waits for, or raise the limit"
            ) from error
        except (RuntimeError, ConnectionError) as error:
            raise ValueError(str(error)) from error
        loaded = Loaded.model_validate(answer)
    except BaseException:
        process.close(wait_s=0.0)  # there is nothing to tear down
        raise
    return VerifiersEnv(process, loaded)


class VerifiersEnv(MultiTurnEnv):
    """A `verifiers` environment: rollouts run in another process, model calls are answered here."""

    def __init__(self, process: BridgeProcess, loaded: Loaded) -> None:
        # A rollout is requested by the number of its row, because the process has the whole row.
        rows = {
            split: [{**row, "info": {"split": split, "row": n}} for n, row in enumerate(of_split)]
            for split, of_split in loaded.rows.items()
        }
        super().__init__(
            dataset=rows.get("train"),
            eval_dataset=rows.get("held_out"),
            rubric=BridgedRubric(process),
            sampling_args=loaded.sampling_args,
            message_type=loaded.message_type,
            oai_tools=loaded.tools,
        )
        self._process = process
        self._endpoint = RolloutEndpoint()

    def add_system_prompt(self, text: str) -> None:  # noqa: ARG002
        raise ValueError(
            f"{self.name} is played by its own library, which writes the prompts; leave"
            " environment.system_prompt out, and set a prompt by environment.args"
        )

    async def rollout(
        self,
        input: RolloutInput,
        client: Client,
        model: str,
        sampling_args: SamplingArgs | None = None,
    ) -> State:
        """Play a rollout of a dataset row in the process with `verifiers`.

        Raises RuntimeError if it failed there, and ConnectionError if the process has ended.
        """
        state = await self.init_state(input)
        scope = current_scope()
        assert scope is not None, "Environment opens a scope around every rollout"
        scope.state = state
        answer = partial(self._answer, state, bind_client(client), model)
        with self._endpoint.answering(answer) as url:
            number, answered = await self._process.ask(
                "rollout",
                split=state["info"]["split"],
                row=state["info"]["row"],
                url=url,
                model=model,
                sampling_args=dict(sampling_args or {}),
            )
        result = Played.model_validate(answered)
        if result.error is not None:
            raise RuntimeError(result.error)
        state["played"] = number
        """The number of the rollout in the process."""
        state["stop_condition"] = result.stop_condition
        state["is_truncated"] = state["is_truncated"] or result.is_truncated
        await self._complete(state)
        return state

    async def env_response(self, messages: Messages, state: State, **kwargs: object) -> Messages:  # noqa: ARG002
        raise AssertionError("the environment responds in its own process")

    @teardown
    def close(self) -> None:
        self._process.close()
        self._endpoint.close()

    async def _answer(
        self, state: State, client: EndpointClient, model: str, body: JsonObject
    ) -> ModelResponse:
        """Answer a model call of the environment, and record it as a step of the trajectory."""
        del body["model"]
        tools = body.pop("tools", None)
        prompt = body.pop("prompt") if self.message_type == "completion" else body.pop("messages")
        if not isinstance(prompt, str):
            prompt = cleanup_messages(prompt)
        known = {key: value for key, value in body.items() if key in OWN_ARGUMENTS}
        others = {key: value for key, value in body.items() if key not in OWN_ARGUMENTS}
        response = await ask(
            client,
            model,
            prompt,
            message_type=self.message_type,
            tools=tools,
            sampling_args={**known, **({"extra_body": others} if others else {})},
        )
        await self.add_model_response(state, prompt, response)
        if response.id == OVERLONG:  # in words that `verifiers` looks for
            raise ValueError("This model's maximum context length is less than that of the prompt")
        return response


class BridgedRubric(Rubric):
    """Scores rollouts by the rubric of a `verifiers` environment, in that environment's process."""

    def __init__(self, process: BridgeProcess) -> None:
        super().__init__()
        self._process = process

    @property
    def compares_rollouts(self) -> bool:
        return True

    async def _score(self, states: Sequence[State]) -> None:
        async with scoring_limit("the rubric"):
            rollouts = [state["played"] for state in states]
            _, results = await self._process.ask("score", rollouts=rollouts)
        for state, result in zip(states, map(Scored.model_validate, results), strict=True):
            state["metrics"] = result.metrics
            state["reward"] = result.reward


class Loaded(BaseModel):
    """The report of the process with `verifiers` about the environment that it has loaded."""

    rows: dict[str, list[JsonObject]]
    """Rows of the datasets `train` and `held_out`, with the fields that this process needs."""
    message_type: str
    sampling_args: Arguments
    tools: list[JsonObject]


class Played(BaseModel):
    """The report of the process with `verifiers` about a rollout that it has played."""

    error: str | None
    is_truncated: bool
    stop_condition: str | None


class Scored(BaseModel):
    """The reward and metrics of a rollout, from the `verifiers` environment's rubric."""

    reward: float
    metrics: dict[str, float]


class BridgeProcess:
    """The process that runs a `verifiers` environment, and the requests to it.

    It may be used from any event loop or thread.
    """

    def __init__(self, name: str, interpreter: str) -> None:
        """Start the process. Raises ValueError if the interpreter does not exist."""
        self._name = name
        self._numbers = itertools.count()
        self._asked: dict[int, _Asked] = {}
        self._lock = threading.Lock()
        # Without the program's folder on its path, because a module there is called `verifiers`.
        command = [interpreter, "-P", verifiers_bridge.__file__]
        try:
            # In its own group, because Ctrl-C is for its parent, which ends it in order.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                process_group=0,
            )
        except OSError as error:
            raise ValueError(
                f"{name}: environment.args.interpreter: {interpreter} was not started ({error});"
                f" {_remedy()}"
            ) from error
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    async def ask(self, do: str, **request: object) -> tuple[int, Any]:
        """Send a request to the process. Return the request's number and the answer.

        `do` is the kind of request. If this call is cancelled, the process ends the request too.

        Raises:
            RuntimeError: the request failed in the process.
            ConnectionError: the process has ended.
        """
        future = self.send(do, **request)
        try:
            return future.number, await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            with self._lock:
                self._asked.pop(future.number, None)
            with suppress(ConnectionError):
                self._write({"id": future.number, "do": "cancel"})
            raise

    def send(self, do: str, **request: object) -> _Asked:
        """Send a request to the process, and return a future with the answer.

        `do` is the kind of request. Raises ConnectionError if the process has ended.
        """
        asked = _Asked(next(self._numbers))
        with self._lock:
            # Before it is written, because the answer may come at once.
            self._asked[asked.number] = asked
        self._write({"id": asked.number, "do": do, **request})
        return asked

    def close(self, wait_s: float = CLOSE_S) -> None:
        """End the process: it closes the environment, and is killed after `wait_s` seconds."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        # With all processes that the environment has started: workers, tool servers.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(END_S)

    def _write(self, request: Mapping[str, object]) -> None:
        assert self._process.stdin is not None
        try:
            with self._lock:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:  # the process has ended, or `close` ran
            raise self._ended() from error

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            with self._lock:
                asked = self._asked.pop(answer["id"], None)
            if asked is None:
                continue  # it was cancelled meanwhile
            with suppress(InvalidStateError):
                if answer["error"] is None:
                    asked.set_result(answer["result"])
                else:
                    asked.set_exception(RuntimeError(f"{self._name}: {answer['error']}"))
        self._process.wait()
        with self._lock:
            # Its output has ended, so these requests will not be answered.
            left = list(self._asked.values())
            self._asked.clear()
        for asked in left:
            with suppress(InvalidStateError):
                asked.set_exception(self._ended())

    def _ended(self) -> ConnectionError:
        return ConnectionError(
            f"{self._name}: its process has ended with status {self._process.poll()}; its output is"
            " in the log of the environment's process"
        )


class _Asked(Future[object]):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class RolloutEndpoint:
    """A local HTTP server with OpenAI's routes, with a separate base URL for each rollout.

    It has its own thread and event loop. Calls are answered on the rollout's event loop.
    """

    def __init__(self) -> None:
        self._answers: dict[str, Callable[[JsonObject], Future[ModelResponse]]] = {}
        app = FastAPI()
        for route in ("/chat/completions", "/completions"):
            app.post(f"/{{rollout}}/v1{route}")(self._call)
        listening = socket.create_server(("127.0.0.1", 0))
        self._url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self._server = uvicorn.Server(
            uvicorn.Config(app, log_config=None, lifespan="off", ws="none")
        )
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listening]}, daemon=True
        )
        self._thread.start()

    @contextmanager
    def answering(self, answer: Answer) -> Iterator[str]:
        """Yield a base URL whose calls are answered by `answer` during the `with` block.

        `answer` runs on this event loop. At the end, unanswered calls are cancelled.
        """
        loop = asyncio.get_running_loop()
        context = contextvars.copy_context()
        tasks: set[asyncio.Task[ModelResponse]] = set()

        async def in_context(body: JsonObject) -> ModelResponse:
            # In the rollout's context, which has its scope; the server's thread has no scope.
            task = loop.create_task(answer(body), context=context)
            tasks.add(task)
            try:
                return await task
            finally:
                tasks.discard(task)

        # Random, because any program on this machine can reach the port, and must not guess a URL.
        key = secrets.token_hex(16)
        self._answers[key] = lambda body: asyncio.run_coroutine_threadsafe(in_context(body), loop)
        try:
            yield f"{self._url}/{key}/v1"
        finally:
            del self._answers[key]
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(END_S)

    async def _call(self, rollout: str, request: Request) -> Response:
        answer = self._answers.get(rollout)
        if answer is None:
            return _refusal("the rollout of this address is over")
        try:
            response = await asyncio.wrap_future(answer(await request.json()))
        except asyncio.CancelledError:
            return _refusal("the rollout of this address is over")
        except Exception as error:  # the environment gets the error, and decides what it means
            return _refusal(f"{type(error).__name__}: {error}")
        return Response(response.model_dump_json(), media_type="application/json")


def _refusal(message: str) -> JSONResponse:
    # 400, because a client would try again after another status.
    return JSONResponse({"error": {"message": message, "type": "BadRequestError"}}, 400)


def _interpreter(name: str) -> str:
    if find_spec("verifiers") is not None:
        return sys.executable
    made = Path(sys.prefix) / "foreign" / "verifiers" / "bin" / "python"
    if not made.is_file():
        raise ValueError(f"verifiers:{name} needs an interpreter that has verifiers; {_remedy()}")
    return str(made)


def _remedy() -> str:
    return (
        "make one, `uv venv FOLDER && uv pip install --python FOLDER/bin/python"
        f" verifiers=={VERSION} ./FOLDER_OF_THE_ENVIRONMENT`, and set"
        " environment.args.interpreter=FOLDER/bin/python"
    )
