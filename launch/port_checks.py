"""Whether the ports that a run binds are free, and whether the servers that it needs answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

from rollout_actors.backends.http_client import HttpClient, HttpStatusError, UnansweredError, server_addresses
from shared.config import RunConfig
from shared.config.derive import rollout_servers

ANSWER_S = 5.0
"""A server that runs answers its health route at once; a start waits `server.timeout_s` for one that is still loading."""
_SERVERS = "rollout_matching.vllm.server.servers"


def port_problems(config: RunConfig) -> Iterator[str]:
    """The ports at which the first learner rank waits for the servers' engines, taken to be this machine's."""
    section = rollout_servers(config)
    for index, server in enumerate(section.servers if section is not None else ()):
        if server.group_port and not _is_free(server.group_port):
            yield f"{_SERVERS}[{index}].group_port: {server.group_port} is taken on this machine; choose another, or 0 for any free one"


def server_problems(config: RunConfig) -> Iterator[str]:
    """Raises ConfigError where the token is not there."""
    section = rollout_servers(config)
    for index, address in enumerate(server_addresses(section) if section is not None else ()):
        path = f"{_SERVERS}[{index}].base_url: {address.base_url}"
        try:
            asyncio.run(HttpClient(address.base_url, address, command="").get(address.health_route, timeout_s=ANSWER_S))
        except UnansweredError as error:
            yield (
                f"{path} does not answer ({error}); launch it, check the address, "
                "or set rollout_matching.vllm.mode: colocate or rollout_matching.rollout_backend: hf"
            )
        except HttpStatusError as error:
            yield f"{path} answers {error.status} to {address.health_route}; look at the server's output, and at {_SERVERS.rpartition('.')[0]}.token_env"


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True
