"""The process of `verifiers:NAME`: runs a `verifiers` environment in an interpreter that has it.

`foreign.verifiers` starts this program, which imports nothing of this project. A request is a line
of JSON on its input, an answer a line on its output. The first request loads the environment. When
its input ends, because it is closed or its parent has ended, the program tears the environment down
and ends within `GRACE_S`.

It uses the interface of `verifiers` 0.1.8 to 0.3.1: `load_environment`, `Environment.rollout` and
`Rubric.score_group`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import json
import os
import sys
import threading
from collections.abc import Awaitable, Iterable
from typing import Any, TextIO

# Defined here, because this program cannot import the aliases of `environments.types`.
JsonObject = dict[str, Any]
"""A request, its answer, or a part of them."""
GRACE_S = 9.0
"""Time limit for closing the environment. With `verifiers.END_S` it is below `CLOSED_S` / 2."""
CALL_S = 24 * 3600.0
"""Time limit of a model call. The engines have their own limit, which is much shorter."""


class Bridge:
    """Runs a `verifiers` environment, and answers the requests of the training run's process."""

    def __init__(self, answers: TextIO) -> None:
        self._answers = answers
        self._environment: Any = None
        self._rows: dict[str, Any] = {}
        self._played: dict[int, Any] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def load(self, request: JsonObject) -> None:
        """Load the environment that a request names. Return its rows, tools and settings.

        Call it before there is an event loop, because the environment's code may run one.
        """
        try:
            result = self._load(request["name"], request["args"])
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            # CancelledError, because an environment may await a task that it has cancelled.
            self._answer(request["id"], error=described(error))
            raise SystemExit(1) from error
        self._answer(request["id"], result)

    def _load(self, name: str, args: JsonObject) -> JsonObject:
        import verifiers

        version = getattr(verifiers, "__version__", "of an unknown version")
        if not hasattr(verifiers, "load_environment"):
            raise RuntimeError(
                f"verifiers {version} has no load_environment: its environments are tasksets of"
                " verifiers.v1, which are not supported; install verifiers==0.3.1"
            )
        environment = verifiers.load_environment(name, **args)
        self._environment = environment
        if has_own(environment, "dataset"):
            self._rows["train"] = environment.get_dataset()
        if has_own(environment, "eval_dataset"):  # otherwise it would return the training rows
            self._rows["held_out"] = environment.get_eval_dataset()
        shown = ("prompt", "answer", "task", "example_id")
        return {
            "rows": {
                split: [{key: row.get(key) for key in shown} for row in dataset]
                for split, dataset in self._rows.items()
            },
            "message_type": getattr(environment, "message_type", "chat"),
            "sampling_args": {
                key: value
                for key, value in (environment.sampling_args or {}).items()
                if value is not None and (key, value) not in (("n", 1), ("extra_body", {}))
            },
            "tools": tools_of(environment),
        }

    async def serve(self, requests: Iterable[str]) -> None:
        """Answer requests until the input ends, then tear the environment down."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def read() -> None:
            for line in requests:
                loop.call_soon_threadsafe(self._begin, json.loads(line))
            # Ends the process even if the event loop hangs: its answers are not read any more.
            late = threading.Timer(GRACE_S, os._exit, (1,))
            late.daemon = True
            late.start()
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=read, daemon=True).start()
        await ended.wait()
        for task in self._tasks.values():
            task.cancel()
        await self._environment._teardown()

    def _begin(self, request: JsonObject) -> None:
        number = request["id"]
        if request["do"] == "cancel":
            if number in self._tasks:
                self._tasks[number].cancel()
            return
        work = self._rollout if request["do"] == "rollout" else self._score
        task = asyncio.ensure_future(self._do(number, work(request)))
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number))

    async def _do(self, number: int, work: Awaitable[object]) -> None:
        try:
            result = await work
        except (Exception, SystemExit) as error:
            self._answer(number, error=described(error))
        else:
            self._answer(number, result)

    async def _rollout(self, request: JsonObject) -> JsonObject:
        row = self._rows[request["split"]][request["row"]]
        client = client_of(request["url"], getattr(self._environment, "message_type", "chat"))
        try:
            state = await self._environment.rollout(
                dict(row), client, request["model"], request["sampling_args"]
            )
        finally:
            await client.close()
        error = state.get("error")
        if error is None:
            self._played[request["id"]] = state
        return {
            "error": None if error is None else described(error),
            "is_truncated": bool(state.get("is_truncated")),
            "stop_condition": state.get("stop_condition"),
        }

    async def _score(self, request: JsonObject) -> list[JsonObject]:
        rubric = self._environment.rubric
        states = [self._played.pop(number) for number in request["rollouts"]]
        places = {}
        if "score_sem" in inspect.signature(rubric.score_group).parameters:
            places["score_sem"] = contextlib.nullcontext()
        await rubric.score_group(states, **places)
        if hasattr(rubric, "cleanup"):
            for state in states:
                await rubric.cleanup(state)
        return [
            {
                "reward": float(state["reward"]),
                "metrics": {key: float(one) for key, one in (state["metrics"] or {}).items()},
            }
            for state in states
        ]

    def _answer(self, number: int, result: object = None, error: str | None = None) -> None:
        answer = {"id": number, "result": result, "error": error}
        self._answers.write(json.dumps(answer, default=str) + "\n")
        self._answers.flush()


def has_own(environment: object, dataset: str) -> bool:
    """Return whether an environment has its own rows in the attribute that `dataset` names.

    From `verifiers` 0.1.10 on, it may instead have a function that makes these rows.
    """
    made = (getattr(environment, name, None) for name in (dataset, f"{dataset}_source"))
    return any(one is not None for one in made)


def client_of(url: str, message_type: str) -> Any:
    """Make the client for the model calls of one rollout, which are sent to this base URL.

    The client never retries, because the second attempt would be recorded as another model call.
    """
    try:
        from verifiers.clients import resolve_client
        from verifiers.types import ClientConfig
    except ImportError:  # before 0.1.10
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=CALL_S)
    kind = "openai_chat_completions" if message_type == "chat" else "openai_completions"
    return resolve_client(
        ClientConfig(
            client_type=kind,
            api_base_url=url,
            api_key_var="ROLLMATCH_HAS_NO_KEY",
            max_retries=0,
            timeout=CALL_S,
        )
    )


def tools_of(environment: object) -> list[JsonObject]:
    """Return the tools of a `verifiers` environment in the form of OpenAI's API."""
    if tools := getattr(environment, "oai_tools", None):
        return list(tools)
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
            },
        }
        for tool in getattr(environment, "tool_defs", None) or ()
    ]


def described(error: BaseException) -> str:
    """Return a text about an error and its causes: `ModelError: , for BadRequestError: ...`."""
    text = f"{type(error).__name__}: {error}"
    return text if error.__cause__ is None else f"{text}, for {described(error.__cause__)}"


def main() -> None:
    # Registered first, so called last. It skips Python's own shutdown, which takes seconds.
    ended = {"status": 1}
    atexit.register(lambda: (sys.stdout.flush(), sys.stderr.flush(), os._exit(ended["status"])))
    # The environment's output must not mix with answers, and it must not read requests.
    answers = os.fdopen(os.dup(1), "w")
    requests = os.fdopen(os.dup(0))
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    # A child that an environment forks would keep the pipe open after this process has ended.
    os.register_at_fork(after_in_child=lambda: os.dup2(nothing, answers.fileno()))
    # The parent's endpoint is on this machine, so no proxy may be used.
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))
    sys.path.append(os.getcwd())  # noqa: PTH109
    bridge = Bridge(answers)
    first = requests.readline()
    if first:
        bridge.load(json.loads(first))
        asyncio.run(bridge.serve(requests))
    ended["status"] = 0


if __name__ == "__main__":
    main()
