"""Measure weight syncs with many engines and learner ranks, as processes without models.

`OMP_NUM_THREADS=1 python -m benchmarks.scale_sync [--engines 8 16 32 64] [--ranks 8]` runs the
protocol of a run (`sync_weights`): its weight sender in learner rank 0, its weight receiver in
each engine process, and one gloo group of the sender and all engines. The weights are shards,
which the ranks gather while rank 0 sends, as with FSDP. Engines compute checksums instead of
loading a model, so every sync is verified. With `--network` the group broadcasts the bytes, as to
other machines, instead of one copy in shared memory. The parts are:

- first sync: all processes join the group, then all phases. In later syncs the group is open.
- update: the ranks sum their gradients.
- lost engine: an engine kills itself when the second bucket arrives. The time ends when a new
  engine and all others have joined a new group, and have the weights.

torch looks up the host name of each connection. A name server that drops some of many requests
adds 5 s to joining a group (`RES_OPTIONS=timeout:1`: 1 s).

Each row has the wall time, the CPU time of all processes, and the growth of the CPU time relative
to the number of engines. Exit status 1 if it grows faster than they do. Wall time is not judged:
with a lost engine it does grow (1.0 s with 8 engines, 3.9 s with 64).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed

from learner.model.ranks import ReceiverGroup
from learner.weight_sync.sender import WeightSender
from rollout_actors.weight_sync.receiver import (
    InitRequest,
    LoadReport,
    TransferGroup,
    UpdateRequest,
    WeightReceiver,
)
from shared.errors import WeightSyncError
from shared.rollouts import SyncReport, WeightOffer
from shared.weight_sync.canary import CanaryProbe, Scores
from shared.weight_sync.checksum import BucketChecksum
from shared.weight_sync.gloo import GlooReceiver
from shared.weight_sync.offer import CHECKSUMS, TensorSpec, offsets
from shared.weight_sync.phases import SendReport, SyncPhase, sync_weights
from shared.weight_sync.shared_memory import this_machine
from shared.weight_sync.transports import TransportKind

TIMEOUT_S = 60.0  # of each phase, as `timeouts.sync_phase_s`
ANSWER_S = 4 * TIMEOUT_S
"""Maximum time of a process's start and of an answer."""
NUM_TENSORS = 32
LOGPROBS = (-0.5, -0.25)
PROBE = CanaryProbe((1, 2, 3), (), (1, 2, 3), LOGPROBS, tolerance=1e-4)
MUCH = 1.25
"""Growth of CPU time, relative to the number of engines, that is reported as a failure."""

PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["learner.weight_sync.sender", "rollout_actors.weight_sync.receiver"]
)


class Model:
    """The engine that a weight receiver sees: it receives and checks weights, and keeps none."""

    def __init__(self, *, network: bool) -> None:
        self._network = network
        self._group: GlooReceiver | None = None
        self._bucket_bytes = 0
        self._report: LoadReport | None = None
        self.dies = False
        """Whether this process ends itself when the next second bucket arrives."""

    async def init_weight_transfer_engine(self, request: InitRequest) -> None:
        info: dict[str, Any] = request.init_info
        self._bucket_bytes = info["packed_buffer_size_bytes"]
        address = info["master_address"], info["master_port"]
        terms = {name: info[name] for name in ("world_size", "join_s", "timeout_s")}
        machine = (lambda: [1] * len(this_machine())) if self._network else this_machine
        join = asyncio.to_thread(
            GlooReceiver, *address, rank=info["rank_offset"], machine=machine, **terms
        )
        self._group = await join

    async def shutdown_weight_transfer_engine(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    async def update_weights(self, request: UpdateRequest) -> None:
        await asyncio.to_thread(self._receive, request.update_info)

    def _receive(self, info: dict[str, Any]) -> None:
        assert self._group is not None
        columns = info["names"], info["dtype_names"], info["shapes"]
        specs = [
            TensorSpec(name, dtype, tuple(shape), _num_bytes(dtype, shape))
            for name, dtype, shape in zip(*columns, strict=True)
        ]
        checksums = []
        sent: list[int] = []
        for index, (bucket, packed) in enumerate(
            self._group.receive(tuple(specs), self._bucket_bytes)
        ):
            if self.dies and index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            checksum = BucketChecksum()
            weights = 0
            for spec, start in zip(bucket, offsets(bucket)[:-1], strict=True):
                values = packed[start : start + spec.num_bytes]
                if spec.name == CHECKSUMS:
                    sent = values.clone().view(torch.int64).tolist()
                else:
                    weights += 1
                    checksum.add(values)
            if weights:
                checksums.append(checksum.value())
        self._report = LoadReport(checksums, sent, [], [], 0.0, 0.0, [])

    async def collective_rpc(self, method: str, *, args: tuple[object, ...] = ()) -> list[Any]:
        if method == "abandon_update":
            await self.shutdown_weight_transfer_engine()
        return [] if self._report is None else [asdict(self._report)]

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None: ...
    async def resume_generation(self) -> None: ...
    async def start_weight_update(self) -> None: ...
    async def finish_weight_update(self) -> None: ...
    async def reset_mm_cache(self) -> None: ...
    async def reset_encoder_cache(self) -> None: ...
    async def update_weight_version(self, new_version: str) -> None: ...

    async def reset_prefix_cache(self) -> bool:
        return True


def _num_bytes(dtype: str, shape: Sequence[int]) -> int:
    return torch.Size(shape).numel() * getattr(torch, dtype).itemsize


def engine(pipe: Connection, index: int, network: bool) -> None:
    """Run an engine process, which answers the phases of weight syncs."""
    torch.set_num_threads(1)
    model = Model(network=network)
    group = TransferGroup(model, transport=TransportKind.GLOO, rank_offset=index + 1)

    async def score(probe: CanaryProbe, *, adapted: bool) -> Scores:
        return probe.expanded_token_ids, LOGPROBS

    receiver = WeightReceiver(f"engine-{index}", model, group, score=score, adapter=None)  # type: ignore[arg-type]

    async def serve() -> None:
        while (task := await asyncio.to_thread(pipe.recv)) is not None:
            if isinstance(task, str):
                model.dies = task == "die"
                answer: object = None
            else:
                try:
                    answer = await receiver.run_phase(*task)
                except WeightSyncError as error:
                    answer = error
            pipe.send((answer, time.process_time()))

    asyncio.run(serve())


class Shards:
    """Weights that the learner ranks divide; all ranks call `tensors` at once."""

    def __init__(self, megabytes: int, ranks: int) -> None:
        numbers = (megabytes << 20) // (4 * NUM_TENSORS * ranks)
        self.shards = [torch.randn(numbers) for _ in range(NUM_TENSORS)]
        self._shape = torch.Size([numbers * ranks])
        self._ranks = ranks

    def specs(self) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
        for index in range(NUM_TENSORS):
            yield f"weight_{index}", torch.float32, self._shape

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, shard in enumerate(self.shards):
            parts = [torch.empty_like(shard) for _ in range(self._ranks)]
            torch.distributed.all_gather(parts, shard)
            yield f"weight_{index}", torch.cat(parts)


def rank(pipe: Connection, number: int, arguments: argparse.Namespace, meeting: str) -> None:
    """Run a learner rank process. Rank 0 also sends the weights."""
    torch.set_num_threads(1)
    ranks = arguments.ranks
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=number, world_size=ranks)
    weights = Shards(arguments.megabytes, ranks)
    receivers = (ReceiverGroup(arguments.num_engines),)
    sender = WeightSender(
        weights,
        transport=TransportKind.GLOO,
        receivers=receivers,
        timeout_s=TIMEOUT_S,
        bucket_bytes=arguments.bucket_megabytes << 20,
        is_collective=True,
    )
    while (task := pipe.recv()) is not None:
        answer: object = None
        try:
            match task:
                case ("offer", version):
                    answer = sender.offer(version, PROBE)
                case ("send", offer) if number == 0:
                    answer = sender.send(offer)
                case ("send", _):
                    for _ in weights.tensors():
                        pass
                case "leave":
                    sender.close()
                case "update":
                    gradient = torch.cat(weights.shards)
                    torch.distributed.all_reduce(gradient)
        except WeightSyncError as error:
            answer = error
        pipe.send((answer, time.process_time()))


class Members:
    """Processes of one kind, each with a pipe; all are asked at once."""

    def __init__(self, run: Callable[..., None], number: int, arguments: Sequence[object]) -> None:
        self._run = run
        self._arguments = arguments
        self._members = [self._start(index) for index in range(number)]
        self._cpu_s = [0.0] * number
        self._ended_s = 0.0
        self.num_replaced = 0
        self._threads = ThreadPoolExecutor(number)
        self.ask("ready")

    @property
    def cpu_s(self) -> float:
        """Processor time of all processes until their last answers, in seconds."""
        return self._ended_s + sum(self._cpu_s)

    def ask(self, task: object, *, only: int | None = None) -> list[Any]:
        """Send the task to all processes and return their answers. Raises their first error."""
        chosen = range(len(self._members)) if only is None else [only]
        answers = list(self._threads.map(lambda index: self._ask(index, task), chosen))
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def replace_dead(self) -> bool:
        dead = [i for i, (process, _) in enumerate(self._members) if not process.is_alive()]
        for index in dead:
            self._ended_s += self._cpu_s[index]
            self._members[index] = self._start(index)
            self.num_replaced += 1
        return bool(dead)

    def close(self) -> None:
        for process, _ in self._members:
            process.kill()
            process.join()
        self._threads.shutdown()

    def _start(self, index: int) -> tuple[Any, Connection]:
        near, far = PROCESSES.Pipe()
        arguments = (far, index, *self._arguments)
        # A daemon is ended with this process, also if another process did not start.
        process = PROCESSES.Process(target=self._run, args=arguments, daemon=True)
        process.start()
        far.close()
        return process, near

    def _ask(self, index: int, task: object) -> Any:
        process, pipe = self._members[index]
        try:
            pipe.send(task)
            if not pipe.poll(ANSWER_S):
                raise TimeoutError(f"process {index} of {self._run.__name__}: no answer to {task}")
            answer, self._cpu_s[index] = pipe.recv()
        except TimeoutError:
            raise
        except (EOFError, OSError):
            process.join()
            return WeightSyncError("has ended", actor=f"engine-{index}", phase=SyncPhase.WIRE)
        return answer


class Learner:
    """The learner ranks as `sync_weights` uses them."""

    offers_adapter = False
    falls_back = False

    def __init__(self, ranks: Members) -> None:
        self._ranks = ranks
        self._version = 0
        self._thread = ThreadPoolExecutor(1)

    def offer_weights(self, *, again: bool = False) -> WeightOffer:
        (offer,) = self._ranks.ask(("offer", self._version + 1), only=0)
        return offer

    def send_weights(self, offer: WeightOffer) -> Future[SendReport]:
        return self._thread.submit(lambda: self._ranks.ask(("send", offer))[0])

    def sync_done(self, noise: object) -> None:
        self._version += 1

    def fall_back_to_full(self) -> None: ...

    def leave_groups(self) -> None:
        self._ranks.ask("leave", only=0)


class Engines:
    """The engine processes as `sync_weights` uses them."""

    replaces_lost = True

    def __init__(self, engines: Members) -> None:
        self._engines = engines
        self._thread = ThreadPoolExecutor(1)

    def wait_idle(self) -> None: ...

    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]:
        return self._thread.submit(self._receive, offer)

    def _receive(self, offer: WeightOffer) -> SyncReport:
        for phase in SyncPhase:
            reports = self._engines.ask((phase, offer))
        return SyncReport.of_slowest(reports)

    def join_replacements(self) -> bool:
        return self._engines.replace_dead()

    def replace_named(self, error: WeightSyncError) -> bool:
        return False


Measured = tuple[float, float, dict[str, float]]
"""Wall seconds, CPU seconds of all processes, and seconds of the phases of a sync."""


def measure(arguments: argparse.Namespace, num_engines: int) -> dict[str, Measured]:
    """Return what each part takes with this number of engines."""
    with tempfile.TemporaryDirectory() as folder:
        settings = argparse.Namespace(**vars(arguments), num_engines=num_engines)
        ranks = Members(rank, arguments.ranks, (settings, f"file://{folder}/ranks"))
        engines = Members(engine, num_engines, (arguments.network,))
        learner = Learner(ranks)
        rollouts = Engines(engines)

        def sync() -> dict[str, float]:
            return dict(sync_weights(learner, rollouts).phase_s)  # type: ignore[arg-type]

        def update() -> dict[str, float]:
            ranks.ask("update")
            return {}

        def timed(work: Callable[[], dict[str, float]]) -> Measured:
            cpu_s = ranks.cpu_s + engines.cpu_s
            started_s = time.perf_counter()
            phase_s = work()
            wall_s = time.perf_counter() - started_s
            return wall_s, ranks.cpu_s + engines.cpu_s - cpu_s, phase_s

        try:
            found = {"first sync": timed(sync)}
            repeated = [timed(sync) for _ in range(arguments.repeats)]
            found["sync"] = sorted(repeated, key=lambda one: one[1])[len(repeated) // 2]
            found["update"] = timed(update)
            engines.ask("die", only=num_engines // 2)
            found["lost engine"] = timed(sync)
            assert engines.num_replaced == 1, "the engine was lost, and no other"
        finally:
            engines.close()
            ranks.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--megabytes", type=int, default=16, help="size of the weights")
    parser.add_argument("--bucket-megabytes", type=int, default=4)
    parser.add_argument("--network", action="store_true", help="do not use shared memory")
    parser.add_argument("--repeats", type=int, default=3, help="of a sync in an open group")
    arguments = parser.parse_args()
    first: dict[str, float] = {}
    grows: list[str] = []
    print("engines  part          wall s    CPU s   growth  phases (s)")
    for num_engines in arguments.engines:
        for part, (wall_s, cpu_s, phase_s) in measure(arguments, num_engines).items():
            least_s = first.setdefault(part, cpu_s)
            growth = cpu_s / least_s / (num_engines / arguments.engines[0])
            if growth > MUCH:
                grows.append(f"{part} with {num_engines} engines")
            phases = ", ".join(
                f"{name} {spent:.2f}" for name, spent in phase_s.items() if spent > 0.005
            )
            row = f"{num_engines:7}  {part:<11} {wall_s:8.2f} {cpu_s:8.2f} {growth:8.2f}  {phases}"
            print(row, flush=True)
    if grows:
        sys.exit(f"CPU time grows faster than the number of engines: {', '.join(grows)}")
    print("No part's CPU time grows faster than the number of engines.")


if __name__ == "__main__":
    main()
