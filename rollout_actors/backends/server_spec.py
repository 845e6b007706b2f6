"""Which client a rollout server has."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_actors.backends.http_client import ServerAddress
from rollout_actors.backends.remote_engine import RemoteEngine
from rollout_actors.backends.stock_client import StockClient
from rollout_actors.backends.vllm_server import ServerClient
from rollout_actors.engine_settings import EngineSettings


@dataclass(frozen=True, slots=True)
class ServerEngineSpec:
    """Makes the client of one server: `EngineActor(ServerEngineSpec(...))`."""

    name: str
    address: ServerAddress
    index: int
    """The server's place among the servers of the run, and so its group's in a weight sync."""
    expected: EngineSettings
    """What the run would start an engine of its own with: the server must agree."""

    def __call__(self) -> RemoteEngine:
        client = StockClient if self.address.kind == "vllm" else ServerClient
        return client(self.name, self.address, index=self.index, expected=self.expected)
