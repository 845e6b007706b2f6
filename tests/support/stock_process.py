"""A real stock `vllm serve`, for tests."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from engine_support import SUPPORT
from process_family import ended_with_its_family, family_of

from rollout_actors.backends.http import ServerAddress
from rollout_actors.backends.stock_server import stock_command
from rollout_actors.engine import warm_python
from rollout_actors.engine.settings import EngineSettings

TOKEN = "sesame"


@dataclass(frozen=True)
class StockProcess:
    process: subprocess.Popen[bytes]
    url: str
    output: Path

    def address(self, *, token: str | None = TOKEN, infer_timeout_s: float | None = None) -> ServerAddress:
        return ServerAddress("rollout_matching.vllm.server.servers[0]", self.url, 120.0, infer_timeout_s, "vllm", token)

    def family(self) -> list[psutil.Process]:
        return family_of(self.process)


@contextmanager
def stock_process(settings: EngineSettings, folder: Path, *, variables: Mapping[str, str] | None = None, more: Sequence[str] = ()) -> Iterator[StockProcess]:
    """By the command line that the client's messages name, and `more` arguments. It may still be loading; ended at the end if it is still there."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    command = shlex.split(stock_command(settings, url))
    start = command.index("vllm")
    written = dict(pair.split("=", 1) for pair in command[:start]) | {"PYTHONPATH": str(SUPPORT), "VLLM_API_KEY": TOKEN}
    environment = os.environ | written | dict(variables or {})
    output = folder / "serve.out"
    with (
        output.open("wb") as out,
        subprocess.Popen([*_runnable(command[start:]), *more], env=environment, stdout=out, stderr=out) as process,
        ended_with_its_family(process),
    ):
        yield StockProcess(process, url, output)


def _runnable(command: list[str]) -> list[str]:
    """vLLM's command asks for a package named vllm, which its build for CPU is not: the same server by its module (docs/stock_server.md)."""
    _, serve, model, *arguments = command
    if any(distribution.name == "vllm" for distribution in importlib.metadata.distributions()):
        return [str(Path(sys.executable).parent / "vllm"), serve, model, *arguments]
    return [*warm_python.command(), "-m", "vllm.entrypoints.openai.api_server", "--model", model, *arguments]
