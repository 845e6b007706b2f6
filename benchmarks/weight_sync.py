"""Compare a verified weight sync of a 219-million-parameter model with other ways to send weights.

`python -m benchmarks.weight_sync [--engines 2] [--syncs 9] [--warm-up 5] [--bucket-mib 16]
[--layers 24]`. The model is a random Qwen3-VL, fp32, with tied embeddings. Learner and
engines share this machine's cores with the same priority.

- raw: one gloo broadcast of the same number of bytes, between touched memory, to as many processes
  over loopback (the sync's own bytes pass through shared memory, as always when learner and
  engines are on one machine);
- sync: from the offer until every engine serves the new version. The phases are the slowest
  engine's, or the learner's;
- unverified: the same without checksums and canary on either side, alternating with verified
  syncs. The difference is the cost of verification;
- reload: `save_pretrained`, then vLLM's own `reload_weights` on all engines concurrently, through a
  folder on disk and a folder in memory.

The engines' greedy tokens are compared with the learner's, after verified and after unverified
syncs. If a tensor arrives upside down, a verified sync must fail and an unverified sync must
succeed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
from transformers.utils import logging

from benchmarks.sync_sides import (
    NUM_GREEDY_TOKENS,
    Engine,
    EngineSpec,
    Learner,
    make_model,
    set_verified,
)
from launch.processes.fleet import Fleet, RolloutTimeouts
from launch.processes.rollout_client import RolloutClient
from launch.processes.rounds import RoundSize
from rollout_actors.engine.settings import EngineSettings, engine_environment
from shared.config.job import TimeoutsSection
from shared.errors import WeightSyncError
from shared.rollouts import DecodeMode, DecodeSettings, RolloutRequest, SyncReport
from shared.sent_requests import PictureShelf
from shared.weight_sync.phases import sync_weights
from shared.weight_sync.transports import Device, TransportKind

ROOT = Path(__file__).parent.parent
TIMEOUTS = RolloutTimeouts.for_actors(
    TimeoutsSection(start_s=240.0, generate_s=120.0, sync_phase_s=60.0)
)
CORRUPTED = "model.language_model.layers.1.mlp.gate_proj.weight"
# Ray lowers the priority of its workers by default.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
}


def raw_broadcast_s(num_bytes: int, num_receivers: int, repeats: int = 5) -> float:
    """Return the median seconds of a gloo broadcast between idle processes on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    receivers = [
        context.Process(
            target=_raw_rank, args=(rank, 1 + num_receivers, port, num_bytes, repeats, None)
        )
        for rank in range(1, 1 + num_receivers)
    ]
    for receiver in receivers:
        receiver.start()
    seconds: list[float] = []
    _raw_rank(0, 1 + num_receivers, port, num_bytes, repeats, seconds)
    for receiver in receivers:
        receiver.join()
    return statistics.median(seconds)


def _raw_rank(
    rank: int, world_size: int, port: int, num_bytes: int, repeats: int, seconds: list[float] | None
) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore(
        "127.0.0.1", port, world_size, rank == 0, timedelta(seconds=120)
    )
    group: Any = torch.distributed.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=120))
    data = torch.ones(num_bytes, dtype=torch.uint8)
    options = torch.distributed.BroadcastOptions()
    options.rootRank = 0
    for _ in range(repeats):
        group.barrier().wait()
        started = time.perf_counter()
        group.broadcast([data], options).wait()
        group.barrier().wait()  # until the last receiver has the data
        if seconds is not None:
            seconds.append(time.perf_counter() - started)


@dataclass(frozen=True)
class TimedSync:
    report: SyncReport
    total_s: float
    cpu_s: float
    """Processor time of the processes of learner and engines together, in seconds."""

    @property
    def verify_s(self) -> float:
        """Seconds that the slowest engine needs for verification: checksums, names and canary.

        The learner's part is excluded, because it runs while the engines load.
        """
        return self.report.phase_s["verify"] + self.report.phase_s["canary"]

    @property
    def verify_of_all_s(self) -> float:
        """Seconds of the slowest engine's and the learner's verification, although they overlap."""
        return (
            self.verify_s + self.report.phase_s["send_verify"] + self.report.phase_s["send_canary"]
        )

    def print(self) -> None:
        phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in self.report.phase_s.items())
        print(
            f"sync {self.total_s:.3f} s ({self.report.bytes / self.total_s / 1e9:.2f} GB/s):"
            f" {phases}"
        )


def print_target(what: str, value: float, target: float, *, at_most: bool = False) -> None:
    met = value <= target if at_most else value >= target
    print(
        f"{what}: {value:.2f}, target {'at most' if at_most else 'at least'} {target:g}:"
        f" {'met' if met else 'missed'}"
    )


def check_served(learner: Learner, pool: RolloutClient, num_engines: int) -> None:
    """Require that every engine generates the same greedy tokens as the learner."""
    decode = DecodeSettings(
        DecodeMode.GREEDY, 0.0, 1.0, -1, 1.0, NUM_GREEDY_TOKENS, 1, (), (), return_logprobs=False
    )
    requests = [
        RolloutRequest(0, i, f"check-{i}", learner.tokens, (), decode, i)
        for i in range(num_engines)
    ]
    (shares,) = pool.generate([PictureShelf(ray.put).put_each(requests)]).result()
    rollouts = [rollout for share in ray.get(shares) for rollout in share]
    assert len({rollout.actor for rollout in rollouts}) == num_engines, "every engine answers"
    expected = learner.greedy()
    assert all(rollout.response_token_ids == expected for rollout in rollouts), (
        expected,
        [rollout.response_token_ids for rollout in rollouts],
    )
    print(f"greedy tokens of every engine equal the learner's: {list(expected)}")


def check_corruption(learner: Learner, pool: RolloutClient, actors: Sequence[Any]) -> None:
    """Require that verification detects a tensor that arrives upside down, and only it does.

    The next sync must succeed.
    """
    set_verified(False, learner, actors)
    ray.get(actors[-1].corrupt.remote(CORRUPTED))
    sync_weights(learner, pool)
    set_verified(True, learner, actors)
    ray.get(actors[-1].corrupt.remote(CORRUPTED))
    noticed = None
    try:
        sync_weights(learner, pool)
    except WeightSyncError as error:
        noticed = error
    assert noticed is not None, "a tensor that arrived upside down went unnoticed"
    assert noticed.quantity == "bucket checksums", noticed
    print(f"a tensor that arrives upside down is detected: {noticed}")
    sync_weights(learner, pool)


def reload_s(learner: Learner, actors: Sequence[Any], folder: Path) -> tuple[float, float]:
    """Return the seconds to save a checkpoint, and to reload it in every engine.

    They are of the median of three tries.
    """
    times = []
    for _ in range(3):
        started = time.perf_counter()
        learner.save(folder)
        saved = time.perf_counter()
        ray.get([actor.reload.remote(str(folder)) for actor in actors])
        times.append((saved - started, time.perf_counter() - saved))
    shutil.rmtree(folder)
    return sorted(times, key=sum)[1]


def start_engines(model: Path, num_engines: int) -> tuple[RolloutClient, list[Any]]:
    settings = EngineSettings(
        model_path=str(model),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        seed=0,
        transport=TransportKind.GLOO,
        device=Device.CPU,
        gpu_memory_utilization=0.5,
        kv_cache_memory_bytes=64 << 20,
        worker_extension="benchmarks.unverified_engine.UnverifiedWorker",
    )
    environment = engine_environment(settings) | {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'fakes'}:{ROOT / 'tests' / 'fixtures'}"
    }
    make_actor = ray.remote(Engine).options(num_cpus=0, runtime_env={"env_vars": environment})
    names = [f"engine-{i}" for i in range(num_engines)]
    actors = [make_actor.remote(EngineSpec(name, settings, i)) for i, name in enumerate(names)]
    pool = RolloutClient(Fleet(actors, names, TIMEOUTS), RoundSize(4))
    pool.start()
    return pool, actors


def timed_sync(learner: Learner, pool: RolloutClient) -> TimedSync:
    """Change the learner's weights, send them to the engines, and return the times of the sync."""
    learner.learn()
    cpu_s = _cpu_s(pool)
    started = time.perf_counter()
    report = sync_weights(learner, pool)
    total_s = time.perf_counter() - started
    return TimedSync(report, total_s, _cpu_s(pool) - cpu_s)


def _cpu_s(pool: RolloutClient) -> float:
    return time.process_time() + sum(
        ray.get([actor.cpu_s.remote() for actor in pool.engines.actors])
    )


def run(folder: Path, disk: Path, options: argparse.Namespace) -> None:
    model = make_model(folder / "model", options.layers)
    learner = Learner(
        model,
        options.engines,
        bucket_bytes=options.bucket_mib << 20,
        timeout_s=TIMEOUTS.sync_phase.seconds,
    )
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    print(
        f"{num_bytes / 4e6:.0f} million parameters, {num_bytes / 1e9:.2f} GB, {options.engines}"
        f" engines, {os.cpu_count()} cores, {folder}"
    )
    raw_s = raw_broadcast_s(num_bytes, options.engines)
    print(
        f"raw gloo broadcast {raw_s:.3f} s, {num_bytes / raw_s / 1e9:.2f} GB/s to each of"
        f" {options.engines}"
    )
    pool, actors = start_engines(folder / "model", options.engines)
    for _ in range(1 + options.warm_up):  # the first opens the group
        sync_weights(learner, pool)
    syncs: list[TimedSync] = []
    unverified: list[TimedSync] = []
    for _ in range(options.syncs):
        for is_verified, timed in ((False, unverified), (True, syncs)):
            set_verified(is_verified, learner, actors)
            timed.append(timed_sync(learner, pool))
        syncs[-1].print()
        print(f"  unverified {unverified[-1].total_s:.3f} s")
    set_verified(True, learner, actors)
    check_served(learner, pool, options.engines)
    set_verified(False, learner, actors)
    timed_sync(learner, pool)
    check_served(learner, pool, options.engines)
    check_corruption(learner, pool, actors)
    total_s = statistics.median(sync.total_s for sync in syncs)
    print(f"median of {len(syncs)} syncs: {total_s:.3f} s")
    print_target(
        "transfer rate / raw broadcast rate",
        statistics.median(raw_s / sync.report.phase_s["wire"] for sync in syncs),
        0.7,
    )
    without_s = statistics.median(sync.total_s for sync in unverified)
    print(f"median of as many unverified syncs: {without_s:.3f} s")
    print_target(
        "verification's share of the time", (total_s - without_s) / total_s, 0.25, at_most=True
    )
    cpu_s, cpu_without_s = (
        statistics.median(sync.cpu_s for sync in several) for several in (syncs, unverified)
    )
    print(f"  share of processor time: {(cpu_s - cpu_without_s) / cpu_s:.2f} of {cpu_s:.3f} s")
    of_slowest = statistics.median(sync.verify_s / sync.total_s for sync in syncs)
    of_all = statistics.median(sync.verify_of_all_s / sync.total_s for sync in syncs)
    print(
        f"  by the phases: {of_slowest:.2f} of the slowest engine, {of_all:.2f} with the learner's"
        " phases, which run while the engines load"
    )
    for medium, root in (("disk", disk), ("memory", folder)):
        save_s, load_s = reload_s(learner, actors, root / "saved")
        print(
            f"through {medium}: save {save_s:.3f} s + reload {load_s:.3f} s ="
            f" {save_s + load_s:.3f} s"
        )
        if medium == "disk":
            print_target("save + reload through the disk / sync", (save_s + load_s) / total_s, 2.0)
        else:
            print(f"save + reload through memory / sync: {(save_s + load_s) / total_s:.2f}")
    pool.close()
    learner.sender.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--syncs", type=int, default=9, help="measured syncs of each kind")
    parser.add_argument(
        "--warm-up",
        type=int,
        default=5,
        help="syncs before the measured ones, so that every process has its memory",
    )
    parser.add_argument("--bucket-mib", type=int, default=16)
    parser.add_argument("--layers", type=int, default=24)
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    ray.init(
        address="local", num_cpus=2 * options.engines, include_dashboard=False, log_to_driver=False
    )
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with (
        tempfile.TemporaryDirectory(prefix="rollmatch-", dir=memory) as folder,
        tempfile.TemporaryDirectory(prefix="rollmatch-", dir=ROOT) as disk,
    ):
        try:
            run(Path(folder), Path(disk), options)
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
