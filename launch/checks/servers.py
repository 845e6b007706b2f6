"""Checks that a run's engine servers and teacher answer and are suitable; that ports are free."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rollout_actors.backends.http import (
    IN_THE_LEARNER,
    STILL_LOADING,
    HttpClient,
    HttpStatusError,
    ServerAddress,
    ServerFacts,
    UnansweredError,
    server_addresses,
)
from rollout_actors.backends.stock_server import ServerEngineSpec
from rollout_actors.engine.settings import EngineSettings
from rollout_actors.environments.training.runner import load_tokenizer
from rollout_actors.environments.training.teacher import MODELS, Teacher, TeacherSettings
from shared.config.algorithm import TeacherSection
from shared.config.rollout import ServerEntry, ServerSection
from shared.errors import RolloutError, UnreachableError

ANSWER_S = 15.0
"""Time limit in seconds for one answer. Later, the run itself waits longer for a server that is
still loading (`server.timeout_s`)."""
INSPECT_S = 60.0
"""Time limit in seconds for all requests to one server. Some requests are answered by the engine of
the server, which may be stuck."""
_SERVERS = "rollout_matching.vllm.server.servers"


def port_problems(servers: Sequence[ServerEntry]) -> Iterator[str]:
    """Yield a problem for each `group_port` that is taken on this machine.

    Learner rank 0 listens on these ports, if it runs on this machine.
    """
    for index, server in enumerate(servers):
        if not server.group_port:
            continue
        try:
            socket.create_server(("", server.group_port)).close()
        except OSError:
            yield (
                f"{_SERVERS}[{index}].group_port: {server.group_port} is taken on this machine;"
                " choose another, or 0 for any free one"
            )


@dataclass(frozen=True, slots=True)
class ServerAnswers:
    """Facts that preflight has learned about a run's engine servers."""

    lines: tuple[str, ...]
    problems: tuple[str, ...]
    not_up: tuple[str, ...]
    """Those of `problems` about servers that do not answer yet. A run would wait for them."""
    devices: tuple[int, ...] | None
    """Number of rollout devices of each server, in order; None if a server did not report it."""


def ask_servers(
    section: ServerSection,
    run: str,
    settings: EngineSettings | None,
    *,
    inspect_s: float = INSPECT_S,
) -> ServerAnswers:
    """Send each engine server the requests with which a starting run checks it.

    Does not wait for servers that are still loading, and does not change anything on them.

    Args:
        run: the name of the run in its requests.
        settings: the engine settings that the run requires. None: not known, so the servers are
            only asked whether they are up.
        inspect_s: time limit in seconds for all requests to one server.

    Raises ConfigError if the environment variable of the servers' bearer token is not set.
    """
    addresses = [replace(one, timeout_s=ANSWER_S) for one in server_addresses(section, run)]

    async def ask_all() -> list[ServerFacts | str | None]:
        asked = (_ask(index, one, settings, inspect_s) for index, one in enumerate(addresses))
        return await asyncio.gather(*asked)

    answers = asyncio.run(ask_all())
    lines = []
    problems = []
    not_up = []
    devices = []
    first_index: dict[str, int] = {}
    for index, (address, answer) in enumerate(zip(addresses, answers, strict=True)):
        path = f"{_SERVERS}[{index}].base_url: {address.base_url}"
        if isinstance(answer, str):
            problems.append(f"{path} {answer}")
            if isinstance(answer, _NotUp):
                not_up.append(problems[-1])
        elif answer is not None:
            devices.append(answer.world_size)
            plural = "" if answer.world_size == 1 else "s"
            weights = f", version {answer.version} of some run's weights" if answer.version else ""
            lines.append(
                f"serves    {address.base_url}: {answer.world_size} rollout device{plural}{weights}"
            )
            problems += [f"{path} does not suit the run; {problem}" for problem in answer.problems]
            if answer.process and first_index.setdefault(answer.process, index) != index:
                first = first_index[answer.process]
                problems.append(f"{path} is the same server as servers[{first}]; list it once")
    return ServerAnswers(
        tuple(lines),
        tuple(problems),
        tuple(not_up),
        tuple(devices) if len(devices) == len(addresses) else None,
    )


def teacher_problems(
    section: TeacherSection, model_path: str, max_length: int, *, waits: bool
) -> Iterator[str]:
    """Send the teacher the requests with which environment actors check it; yield problems.

    Args:
        model_path: folder whose tokenizer the teacher must share.
        max_length: tokens of the longest sequence that the teacher must accept.
        waits: a teacher that does not answer yet is not a problem.

    Raises ConfigError if the environment variable of the teacher's bearer token is not set.
    """
    settings = TeacherSettings.from_section(section)

    async def ask() -> None:
        try:
            await HttpClient("teacher", settings.address).get(MODELS, timeout_s=ANSWER_S)
        except HttpStatusError as error:
            if error.status in STILL_LOADING:
                raise UnansweredError(f"it is loading: {error}") from error
            # The requests below repeat any other error, and explain it.
        tokenizer = load_tokenizer(model_path)
        teacher = Teacher(settings, max_under_way=1)
        await teacher.require_suitable(tokenizer, max_length)

    try:
        asyncio.run(ask())
    except (UnansweredError, UnreachableError) as error:
        if not waits:
            yield (
                f"environment.teacher.base_url: {section.base_url} does not answer ({error});"
                " start the teacher's server, or check the address"
            )
    except RolloutError as error:
        yield f"environment.teacher: {error.message}"


class _NotUp(str):
    """The problem of a server that does not answer, or that is still loading."""

    __slots__ = ()


async def _ask(
    index: int, address: ServerAddress, settings: EngineSettings | None, limit_s: float
) -> ServerFacts | str | None:
    """Return the server's facts, or its problem; None if it is up and `settings` is None."""
    try:
        async with asyncio.timeout(limit_s):
            client = HttpClient(address.base_url, address)
            await client.get(address.health_route, timeout_s=ANSWER_S)
            if settings is None:
                return None
            return await ServerEngineSpec(address.base_url, address, index, settings)().inspect()
    except TimeoutError:
        return (
            f"answers {address.health_route}, but did not report its settings in {limit_s:g} s: its"
            " engine may be stuck; start it again"
        )
    except UnansweredError as error:
        return _NotUp(
            f"does not answer ({error}); start the server, check the address, or set"
            f" {IN_THE_LEARNER}"
        )
    except HttpStatusError as error:
        text = (
            f"answers {error.status} to {address.health_route}; check the server's output, and"
            " rollout_matching.vllm.server.token_env"
        )
        return _NotUp(text) if error.status == 503 else text  # 503: it is still loading
    except RolloutError as error:
        return error.message
