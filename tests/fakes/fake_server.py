"""Fakes of rollout servers' tests: an engine that does as it is told, and a server over it on a
real port.

As a program it is such a server in a process of its own, to be stopped and killed: `python
fake_server.py MODEL LATENCY_S`.
"""

from __future__ import annotations

import asyncio
import io
import json
import pickle
import socket
import struct
import sys
import threading
import time
import zlib
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from PIL import Image

from rollout_actors.backends.http import HttpEngine, ServerAddress
from rollout_actors.backends.stock_server import ServerEngineSpec
from rollout_actors.engine.settings import EngineSettings
from rollout_actors.server.app import PromptProtocol, make_app
from rollout_actors.server.messages import CallLimits, SyncCall
from rollout_actors.server.service import RolloutService
from shared.records import ImageRef
from shared.rollouts import (
    DecodeMode,
    DecodeSettings,
    FinishReason,
    Rollout,
    RolloutRequest,
    SyncReport,
    WeightOffer,
)
from shared.tokens.repeat_guard import RepeatGuardSettings
from shared.weight_sync.canary import CanaryProbe
from shared.weight_sync.offer import FullOffer, ProcessGroupSpec, TensorSpec
from shared.weight_sync.phases import SyncPhase
from shared.weight_sync.transports import Device, TransportKind

DECODE = DecodeSettings(
    DecodeMode.SAMPLE, 1.0, 1.0, -1, 1.0, 4, 1, (9,), banned_token_ids=(), return_logprobs=True
)


def make_png(width=2, height=2):
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def image_bomb():
    """A PNG file of a hundred bytes whose header says that it is 30,000 pixels wide and high."""
    head = b"IHDR" + struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    checksum = struct.pack(">I", zlib.crc32(head))
    sound = make_png()
    return sound[:12] + head + checksum + sound[33:]


def make_request(position, **changes):
    fields: dict[str, Any] = {"images": (), "decode": DECODE, "seed": 100 + position} | changes
    return RolloutRequest(3, position, f"sample-{position}", (1, 2), **fields)


def make_offer(version=1, *, num_groups=1, world_size=2, timeout_s=120.0):
    groups = tuple(
        ProcessGroupSpec("127.0.0.1", 29500 + index, world_size, f"key-{index}")
        for index in range(num_groups)
    )
    terms = FullOffer(groups, timeout_s, 1 << 20, (TensorSpec("a.weight", "float32", (2, 3), 24),))
    image = ImageRef(None, b"\x89PNG\xff\x00", "ab")
    probe = CanaryProbe((1, 2), (image,), (1, 2, 3), (-0.1, float("-inf")), 1e-4)
    return WeightOffer(version, "rollmatch_gloo", terms, probe)


class ObedientEngine:
    """A `ServedEngine` that answers every request with its position and seed, after `latency_s`, or
    as soon as `goes_on` is set.

    `trouble` is raised by the next calls, one each; None lets one through. So many of the next
    calls as `num_stuck` says have no answer for an hour. Nobody is answered before `meets` requests
    were under way at once. Remembers what it was asked.
    """

    def __init__(self, *, devices=1, latency_s=0.0):
        self.devices = devices
        self.latency_s = latency_s
        self.goes_on = threading.Event()
        self.num_stuck = 0
        self.meets = 0
        self.trouble: list[Exception | None] = []
        self.asked: list[tuple[RolloutRequest, ...]] = []
        self.phases: list[tuple[SyncPhase, WeightOffer]] = []
        self.num_cancelled = 0
        self.num_running = 0
        self.most_at_a_time = 0
        self.is_dead = False
        self.why_dead = ""
        self.version = 0
        self.shut = ""
        self.is_stuck = False
        self.guards: list[RepeatGuardSettings | None] = []
        """The rules that it was given, in order."""
        self.cannot_guard: Exception | None = None
        self._started = time.monotonic()

    @property
    def num_tokens(self):
        """Grows by itself, while requests run and while none does."""
        return 0 if self.is_stuck else int(1000 * (time.monotonic() - self._started))

    async def start(self):
        return self.devices

    async def check_alive(self):
        await self._serve()

    async def guard_by(self, settings):
        if self.cannot_guard is not None:
            raise self.cannot_guard
        self.guards.append(settings)

    async def generate(self, requests):
        self.asked.append(tuple(requests))
        self.num_running += len(requests)
        self.most_at_a_time = max(self.most_at_a_time, self.num_running)
        try:
            await self._serve()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= len(requests)
        return [self._rollout(request) for request in requests]

    async def run_sync_phase(self, phase, offer):
        self.phases.append((phase, offer))
        if phase is SyncPhase.PAUSE:
            self.shut = f"its sync to version {offer.version} is running, or did not complete"
        await self._serve()
        if phase is not SyncPhase.CANARY:
            return None
        self.version = offer.version
        self.shut = ""
        return SyncReport(offer.version, 24, {"pause": 0.1, "wire": 0.2}, 1e-6)

    def close(self):
        pass

    async def _serve(self):
        until_s = time.monotonic() + self.latency_s
        if self.num_stuck:
            self.num_stuck -= 1
            until_s += 3600
        if self.trouble and (trouble := self.trouble.pop(0)) is not None:
            raise trouble
        await asyncio.sleep(0)
        while not self.goes_on.is_set():
            if time.monotonic() >= until_s and self.most_at_a_time >= self.meets:
                break
            await asyncio.sleep(0.01)

    def _rollout(self, request):
        return Rollout(
            step=request.step,
            position=request.position,
            sample_id=request.sample_id,
            prompt_token_ids=request.prompt_token_ids,
            response_token_ids=(request.position, request.seed),
            stop_token_id=9,
            logprobs=(-0.1, -1 / 3),
            stop_token_logprob=-0.25,
            finish_reason=FinishReason.STOP,
            forced_positions=(),
            weight_version=self.version,
            actor="the engine itself",
            attempt=0,
            seed=request.seed,
            generate_s=0.5,
            started_s=time.time(),
        )


def make_settings(folder, **changes):
    """Make settings of an engine whose checkpoint is `folder`, which gets a config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "qwen3_vl"}')
    suits = EngineSettings(
        model_path=str(folder),
        dtype="float32",
        max_model_len=64,
        max_num_seqs=8,
        seed=0,
        transport=TransportKind.GLOO,
        device=Device.CPU,
        gpu_memory_utilization=0.5,
    )
    return replace(suits, **changes)


def make_service(engine, expected, *, max_request_bytes=1 << 20, image_root=None):
    limits = CallLimits(max_request_bytes, max_requests=8, max_image_pixels=10_000)
    names = {"name": "a-server", "model_type": "qwen3_vl"}
    return RolloutService(engine, **names, settings=expected, limits=limits, image_root=image_root)


def make_address(
    url, *, timeout_s=120.0, infer_timeout_s=120.0, token=None, kind="rollmatch", run=""
):
    path = "rollout_matching.vllm.server.servers[0]"
    return ServerAddress(path, url, timeout_s, infer_timeout_s, kind, token, run)


class Run:
    """A run, and its client of one server of either kind, which does as it is told."""

    client: HttpEngine

    def __init__(self, url, expected, server=None, *, kind="rollmatch"):
        self.url = url
        self.expected = expected
        self.server = server
        self.kind = kind
        self.devices = 0

    def make(self, url="", *, index=0, repeat_guard=None, **limits):
        address = make_address(url or self.url, kind=self.kind, **limits)
        expected = replace(self.expected, repeat_guard=repeat_guard)
        spec = ServerEngineSpec("server-0", address, index, expected)
        return pickle.loads(pickle.dumps(spec))()  # as it comes to its process

    def start(self, url="", **changes):
        self.client = self.make(url, **changes)
        self.devices = asyncio.run(self.client.start())
        return self

    def generate(self, *requests):
        return asyncio.run(self.client.generate(requests))

    def sync(self, offer):
        async def run_phases():
            return [await self.client.run_sync_phase(phase, offer) for phase in SyncPhase]

        return asyncio.run(run_phases())


class QuickServer(uvicorn.Server):
    """End without uvicorn's waits of 0.1 s, which hundreds of tests would sum up."""

    async def main_loop(self):
        await self.on_tick(0)
        while not self.should_exit:
            await asyncio.sleep(0.002)

    async def shutdown(self, sockets=None):
        """Cancel the calls under way, with no time of grace."""
        for one in (*self.servers, *(sockets or ())):
            one.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        for task in list(self.server_state.tasks):
            task.cancel()
        await asyncio.gather(*self.server_state.tasks, return_exceptions=True)


@contextmanager
def serving(app, port=0):
    """The application on this port of this machine, by a thread of this process; its URL. 0: any
    free port.
    """
    with socket.create_server(("127.0.0.1", port)) as listening:
        config = uvicorn.Config(app, http=PromptProtocol, log_level="critical", lifespan="off")
        server = QuickServer(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join(60)


HERE: dict[str, Any] = {"trust_env": False, "verify": False}
"""Options of httpx for an address of this machine: no proxy, and no certificates, which it would
read for every client.
"""


@contextmanager
def serving_engine(engine, expected, *, token=None, port=0, **options):
    """A started service over this engine."""
    one = make_service(engine, expected, **options)
    asyncio.run(one.start())
    with serving(make_app(one, token=token), port) as url:
        yield url


class Caller:
    """Calls one server over its port."""

    def __init__(self, url):
        self.url = url

    def get(self, route, **headers):
        return httpx.get(self.url + route, headers=headers, **HERE, timeout=120)

    def post(self, route, body, **headers):
        """Send the bytes, or the JSON of anything else."""
        return httpx.post(
            self.url + route,
            content=body if isinstance(body, bytes) else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"} | headers,
            **HERE,
            timeout=120,
        )

    def running(self):
        return int(self.get("/health/").json()["num_running"])

    def phase(self, phase, version=1):
        is_rendezvous = phase is SyncPhase.RENDEZVOUS
        route = "/init_communicator/" if is_rendezvous else f"/sync/{phase}/"
        answer = self.post(route, SyncCall.of(phase, make_offer(version), "a run").body())
        assert answer.status_code == 200, answer.text

    def sync(self, version=1):
        for phase in SyncPhase:
            self.phase(phase, version)


def asked_and_gone(url, body, is_there):
    """A caller that hangs up as soon as its call is there."""

    async def ask():
        async with httpx.AsyncClient(**HERE, timeout=120) as client:
            headers = {"Content-Type": "application/json"}
            asking = asyncio.create_task(client.post(url, content=body, headers=headers))
            async with asyncio.timeout(120):
                while not is_there():
                    assert not asking.done(), "it was answered"
                    await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.wait([asking])

    asyncio.run(ask())


def eventually(condition, *, within_s=120.0):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def main():
    """Prints its URL."""
    engine = ObedientEngine(latency_s=float(sys.argv[2]))
    with serving_engine(engine, make_settings(Path(sys.argv[1]))) as url:
        print(url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
