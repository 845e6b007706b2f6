"""`rollout_matching.vllm.server`: rollout servers launched elsewhere (spec: server mode)."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, PositiveFloat

from shared.config.base import Section, refusal
from shared.errors import Limit

_CHARACTERS = re.compile(r"[A-Za-z0-9._~:/!$&'()*+,;=%\[\]-]+")
"""Of URLs. A name in other letters is written in its ASCII form, `xn--...`."""


def _http_url(url: str) -> str:
    remedy = "write it as http://127.0.0.1:8000"
    if "@" in url:
        # Not repeated: what stands before it may be a secret.
        raise refusal("must hold no user and password, which no server is sent", "write it without, and name the variable with the servers' token in token_env")
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname or ""
        host.encode("idna")  # what opens a connection does it, and fails with no error of the network
    except ValueError as error:
        raise refusal(f"must be an http(s) URL, got {url!r}: {' '.join(str(error).split())}", remedy) from error
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or not _CHARACTERS.fullmatch(url):
        raise refusal(f"must be an http(s) URL without query, got {url!r}", remedy)
    if port == 0:
        raise refusal(f"must name a port that can be called, got {url!r}", remedy)
    return url.rstrip("/")


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine, whoever asks."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return False


class ServerEntry(Section):
    base_url: Annotated[str, AfterValidator(_http_url), Field(examples=["http://127.0.0.1:8000"])]
    """Prefix of the server's routes."""

    group_port: Annotated[int, Field(ge=0, le=65535, examples=[0])]
    """Port on the first learner rank's node where this server's engines join the weight transfer; 0: any free one."""

    @property
    def is_loopback(self) -> bool:
        """Whether the server is on the machine that names it so."""
        host = urlsplit(self.base_url).hostname
        assert host is not None, "checked when it was read"
        return is_loopback(host)


def _addresses(url: str) -> set[tuple[str, int, str]]:
    """Host, port and path that a URL leads to, without asking for names; two for `localhost`."""
    parts = urlsplit(url)
    assert parts.hostname is not None, "checked when it was read"
    hosts = ("127.0.0.1", "::1") if parts.hostname == "localhost" else (parts.hostname,)
    return {(host, parts.port or (443 if parts.scheme == "https" else 80), parts.path) for host in hosts}


def _each_once(servers: tuple[ServerEntry, ...]) -> tuple[ServerEntry, ...]:
    if not servers:
        raise refusal("must list at least one server, got an empty list", "write [{base_url: http://127.0.0.1:8000, group_port: 0}]")
    for index, server in enumerate(servers):
        for earlier in servers[:index]:
            if _addresses(server.base_url) & _addresses(earlier.base_url):
                also = "" if server.base_url == earlier.base_url else f", as {earlier.base_url} too"
                raise refusal(f"{server.base_url} is listed twice{also}", "list every server once")
            if server.group_port and server.group_port == earlier.group_port:
                raise refusal(f"group_port {server.group_port} is listed twice", "give every server its own, or 0 for any free one")
    return servers


class ServerSection(Section):
    servers: Annotated[
        tuple[ServerEntry, ...], Field(strict=False, examples=[[{"base_url": "http://127.0.0.1:8000", "group_port": 0}]]), AfterValidator(_each_once)
    ]
    """In the order in which a round is split over them."""

    kind: Literal["rollmatch", "vllm"] = "rollmatch"
    """`python -m launch.serve`, or a stock `vllm serve` with this package installed."""

    timeout_s: PositiveFloat = 240.0
    """Until every server answers `/health/` at the start, until the weight transfer is set up, and, where `infer_timeout_s` sets no limit, until a server
    that generates has to answer or to sample another token."""

    infer_timeout_s: float | None = None
    """HTTP timeout of one `/infer/`; null, 0 or less: none, and `/health/` is watched instead, for answers and for progress."""

    token_env: Annotated[str, Field(min_length=1)] | None = None
    """Name of the environment variable that holds the servers' bearer token; null: they ask for none."""

    @property
    def join_limit(self) -> Limit:
        """The longest that a server may take to join the communicator of the weight transfer."""
        return Limit(self.timeout_s, "rollout_matching.vllm.server.timeout_s")
