"""Whether a run's servers answer and suit it, and whether the ports at which it waits for their
engines are free.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rollout_actors.backends.http import (
    IN_THE_LEARNER,
    HttpClient,
    HttpStatusError,
    ServerAddress,
    ServerFacts,
    UnansweredError,
    server_addresses,
)
from rollout_actors.backends.stock_server import ServerEngineSpec
from rollout_actors.engine.settings import EngineSettings
from shared.config import RunConfig
from shared.config.derive import rollout_servers
from shared.config.rollout import ServerSection
from shared.errors import RolloutError

ANSWER_S = 5.0
"""A server that runs answers at once; a start waits `server.timeout_s` for one that is still
loading.
"""
INSPECT_S = 20.0
"""Some of what a server is asked its engine answers, and that may be stuck."""
_SERVERS = "rollout_matching.vllm.server.servers"


def instead_of_servers(config: RunConfig) -> str:
    """What this run can be set to do without them: environments ask for answers while the learner
    learns, which no engine of its own gives.
    """
    return IN_THE_LEARNER if config.environment is None else "rollout_matching.vllm.mode: actors"


def port_problems(config: RunConfig) -> Iterator[str]:
    """The ports at which the first learner rank waits for the servers' engines, taken to be this
    machine's.
    """
    section = rollout_servers(config)
    for index, server in enumerate(section.servers if section is not None else ()):
        if server.group_port and not _is_free(server.group_port):
            yield (
                f"{_SERVERS}[{index}].group_port: {server.group_port} is taken on this machine;"
                " choose another, or 0 for any free one"
            )


@dataclass(frozen=True, slots=True)
class ServerAnswers:
    """What the servers of a run say."""

    lines: tuple[str, ...]
    problems: tuple[str, ...]
    not_up: tuple[str, ...]
    """Those of the problems that a run would wait for: servers that do not answer yet."""
    devices: tuple[int, ...] | None
    """Rollout devices of each server, in order; None where one of them did not say."""


def ask_servers(
    section: ServerSection,
    settings: EngineSettings | None,
    *,
    instead: str = IN_THE_LEARNER,
    inspect_s: float = INSPECT_S,
) -> ServerAnswers:
    """Ask each of them what a run's client asks at its start, without waiting for one that loads,
    and changing nothing.

    Args:
        settings: what the run expects of them; None: not known, and they are asked only whether
        they are up.
        instead: of servers, as `instead_of_servers` says.
        inspect_s: for everything that one server is asked.

    Raises:
        ConfigError: the token is not there.
    """
    addresses = [
        replace(address, timeout_s=ANSWER_S) for address in server_addresses(section, instead)
    ]
    answers = asyncio.run(_all(addresses, settings, inspect_s))
    lines, problems, not_up, seen = [], [], list[str](), dict[str, int]()
    for index, (address, answer) in enumerate(zip(addresses, answers, strict=True)):
        path = f"{_SERVERS}[{index}].base_url: {address.base_url}"
        if isinstance(answer, str):
            problems.append(f"{path} {answer}")
            not_up += problems[-1:] if isinstance(answer, _NotUp) else ()
        elif answer is not None:
            lines.append(f"serves    {_told(address, answer)}")
            problems += [f"{path} does not suit the run; {problem}" for problem in answer.problems]
            if answer.process and seen.setdefault(answer.process, index) != index:
                problems.append(
                    f"{path} is the server of servers[{seen[answer.process]}]; list every server"
                    " once"
                )
    known = [answer.world_size for answer in answers if isinstance(answer, ServerFacts)]
    return ServerAnswers(
        tuple(lines),
        tuple(problems),
        tuple(not_up),
        tuple(known) if len(known) == len(addresses) else None,
    )


class _NotUp(str):
    """Why a server does not answer at all."""

    __slots__ = ()


async def _all(
    addresses: list[ServerAddress], settings: EngineSettings | None, limit_s: float
) -> list[ServerFacts | str | None]:
    return await asyncio.gather(
        *(_ask(index, address, settings, limit_s) for index, address in enumerate(addresses))
    )


async def _ask(
    index: int, address: ServerAddress, settings: EngineSettings | None, limit_s: float
) -> ServerFacts | str | None:
    """What it says of itself, or what is wrong with it; None: it is up."""
    try:
        async with asyncio.timeout(limit_s):
            await HttpClient(address.base_url, address, command="").get(
                address.health_route, timeout_s=ANSWER_S
            )
            return (
                None
                if settings is None
                else await ServerEngineSpec(address.base_url, address, index, settings)().inspect()
            )
    except TimeoutError:
        return (
            f"answers {address.health_route}, and has not said in {limit_s:g} s what it was started"
            " with: its engine may be stuck; start it again"
        )
    except UnansweredError as error:
        return _NotUp(
            f"does not answer ({error}); launch it, check the address, or set {address.instead}"
        )
    except HttpStatusError as error:
        text = (
            f"answers {error.status} to {address.health_route}; check the server's output, and"
            f" {_SERVERS.rpartition('.')[0]}.token_env"
        )
        return _NotUp(text) if error.status == 503 else text  # what one says that is still loading
    except RolloutError as error:
        return error.message


def _told(address: ServerAddress, facts: ServerFacts) -> str:
    devices = "1 rollout device" if facts.world_size == 1 else f"{facts.world_size} rollout devices"
    weights = f", version {facts.version} of some run's weights" if facts.version else ""
    return f"{address.base_url}: {devices}{weights}"


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True
