"""A real `python -m launch.serve`, for tests."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from process_family import ended_with_its_family, family_of

from rollout_actors.backends.http import RemoteEngine, ServerAddress
from rollout_actors.backends.stock_server import ServerEngineSpec
from rollout_actors.engine import warm_python
from rollout_actors.engine.settings import EngineSettings
from shared.rollouts import Rollout, RolloutRequest, SyncReport, WeightOffer
from shared.weight_sync.phases import SyncPhase

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class ServeProcess:
    process: subprocess.Popen[str]
    url: str
    """Before it is ready, too."""
    errors: Path
    """What it wrote to its standard error."""

    def address(self, index: int = 0) -> ServerAddress:
        return ServerAddress(f"rollout_matching.vllm.server.servers[{index}]", self.url, 120.0, None, "rollmatch")

    def engine(self, name: str, expected: EngineSettings, index: int = 0) -> ServerEngineSpec:
        return ServerEngineSpec(name, self.address(index), index, expected)

    def family(self) -> list[psutil.Process]:
        """The server and the processes of its engine."""
        return family_of(self.process)


@contextmanager
def serve_process(
    arguments: Sequence[str],
    folder: Path,
    *,
    program: Sequence[str] = ("-m", "launch.serve"),
    variables: Mapping[str, str] | None = None,
    python: Sequence[str] = tuple(warm_python.command()),
) -> Iterator[ServeProcess]:
    """Started, and ended at the end if it is still there. Its engine may still be loading. With `python=[sys.executable]` nothing of it is forked."""
    errors = folder / "serve.err"
    with (
        errors.open("w") as err,
        subprocess.Popen(
            [*python, *program, *arguments],
            cwd=ROOT,
            env=os.environ | {"HF_HUB_OFFLINE": "1"} | dict(variables or {}),
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
        ) as process,
        ended_with_its_family(process),
    ):
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith("loading"), errors.read_text()
        yield ServeProcess(process, first.split()[-1], errors)


class OneServer:
    """One client as `sync_weights` and a test need it: a loop in a thread. Closed, it refuses with a RuntimeError."""

    def __init__(self, client: RemoteEngine) -> None:
        self._client = client
        self._thread = ThreadPoolExecutor(1)

    def start(self) -> int:
        return asyncio.run(self._client.start())

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        return self._thread.submit(lambda: asyncio.run(self._client.generate(requests))).result()

    def settle(self) -> None:
        """Nothing is generated beside a sync here."""

    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]:
        return self._thread.submit(lambda: asyncio.run(self._receive(offer)))

    @property
    def version(self) -> int:
        return self._client.version

    def close(self) -> None:
        self._thread.shutdown()

    async def _receive(self, offer: WeightOffer) -> SyncReport:
        for phase in SyncPhase:
            report = await self._client.run_sync_phase(phase, offer)
        assert report is not None
        return report
