"""Ray actors with the methods of `EngineActor` and no engine: they answer, fail, sleep or die as
they are told.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import ray

from shared.errors import RolloutError, UnreachableError, WeightSyncError
from shared.rollouts import RolloutRequest, SyncReport, WeightOffer
from shared.sent_requests import PictureShelf, SentRequests
from shared.weight_sync.phases import SyncPhase


class FakeActor:
    """While it sleeps in `generate` it samples tokens, but where it is to stall.

    `trouble` is `slow`, `sleep`, `stick` (and from then on no word), `stall`, `die`, `fail`, `fail late`, `lose peer`, `surprise`,
    `unreachable` or nothing.

    `phase` is where it comes: `start`, `generate`, `progress`, `check_alive`, `use_engines`, `close` or
    one of a sync.
    """

    def __init__(self, name: str, phase: str = "", trouble: str = "") -> None:
        self._name = name
        self._phase = phase
        self._trouble = trouble
        self._woken = asyncio.Event()
        self._is_asked = False
        self._is_stuck = False
        self._num_tokens = 0
        self._tasks: list[str] = []

    async def tasks(self) -> list[str]:
        """Names, as Ray's dashboard has them, of the calls of `generate` and of a sync since the
        last change."""
        return self._tasks

    async def become(self, phase: str = "", trouble: str = "") -> None:
        """Change for the next test. Whoever sleeps wakes up."""
        self._woken.set()
        self._is_asked = False
        self._is_stuck = False
        self._tasks = []
        self._woken = asyncio.Event()
        self._phase = phase
        self._trouble = trouble

    async def start(self) -> tuple[int, str]:
        await self._reach("start")
        return 1, ""

    async def generate(
        self, *objects: SentRequests, places: range | None = None, attempt: int = 0
    ) -> tuple[list[Any], int]:
        self._is_asked = True
        self._tasks.append(ray.get_runtime_context().get_task_name())
        await self._reach("generate")
        self._is_asked = False
        requests = SentRequests.chosen(objects, places).requests
        return [(self._name, request) for request in requests], len(requests)

    async def progress(self) -> int | None:
        await self._reach("progress")
        self._num_tokens += self._trouble != "stall"
        return self._num_tokens if self._is_asked else None

    async def check_alive(self) -> None:
        await self._reach("check_alive")
        if self._is_stuck:
            await self._woken.wait()

    async def use_engines(self, engines: Sequence[Any]) -> None:
        await self._reach("use_engines")

    async def run_sync_phase(self, phase: SyncPhase, offer: WeightOffer) -> SyncReport | None:
        self._tasks.append(ray.get_runtime_context().get_task_name())
        await self._reach(phase)
        if phase is not SyncPhase.CANARY:
            return None
        seconds = {"actor-0": 1.0, "actor-1": 2.0}[self._name]
        return SyncReport(offer.version, 10, {"wire": seconds}, canary_max_abs=seconds * 1e-6)

    async def close(self) -> None:
        await self._reach("close")

    async def _reach(self, phase: str) -> None:
        if phase != self._phase:
            return
        match self._trouble:
            case "slow":
                await asyncio.sleep(0.3)
            case "sleep" | "stall" | "stick":
                self._is_stuck = self._trouble == "stick"
                await self._woken.wait()
            case "die":
                os._exit(1)
            case "unreachable":
                raise UnreachableError("gone", actor=self._name, phase=phase)
            case "surprise":
                raise OSError("nobody thought of this")
            case "lose peer":
                # As gloo writes it: `ray_calls.BROKEN_CONNECTION` looks for the path.
                place = "third_party/gloo/gloo/transport/tcp/pair.cc:553"
                message = f"[{place}] Connection closed by peer"
                raise WeightSyncError(message, actor=self._name, phase=phase)
            case "fail late":
                await asyncio.sleep(0.3)
                raise WeightSyncError("told to fail", actor=self._name, phase=phase)
            case "fail" if phase in ("start", "generate"):
                raise RolloutError("told to fail", actor=self._name, phase=phase)
            case "fail":
                raise WeightSyncError(
                    "told to fail", actor=self._name, phase=phase, quantity="nothing", size=2.5
                )


class EchoEngine:
    """Answers with what it is asked."""

    process = ""
    is_dead = False
    num_tokens = 0

    async def generate(self, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        return list(requests)


class Sender:
    """Sends requests from a process of its own."""

    def __init__(self) -> None:
        self._shelf = PictureShelf(ray.put)

    def requests(self, requests: Sequence[RolloutRequest]) -> SentRequests:
        return self._shelf.send(requests)


def create_fake_actor(name: str, phase: str = "", trouble: str = "") -> Any:
    """Start the actor in a process of its own."""
    return ray.remote(FakeActor).options(num_cpus=0).remote(name, phase, trouble)
