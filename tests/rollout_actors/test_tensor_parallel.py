"""One engine over two devices: each worker takes its part of every weight, and the engine answers
as one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from engine_support import TIMEOUTS, SmallLearner, create_actor, generated, small_settings
from fake_server import eventually

from launch.processes.fleet import Fleet
from launch.processes.rollout_client import RolloutClient
from launch.processes.rounds import RoundSize
from shared.weight_sync.phases import sync_weights

pytestmark = [pytest.mark.engine, pytest.mark.long]


def shared_memory(actor: Any) -> list[str]:
    """Names of the memory that the engine's processes share, of Python's and of vLLM's kernels.

    Linux writes "(deleted)" after a name that does not exist any more.
    """
    engine = psutil.Process(ray.get(actor.process_ids.remote())[0])
    maps = "".join(
        Path(f"/proc/{one.pid}/maps").read_text()
        for one in (engine, *engine.children(recursive=True))
    )
    return re.findall(r"/dev/shm/((?:psm_|vllm_)\S+(?: \(deleted\))?)", maps)


@pytest.fixture(scope="module")
def actor(ray_cluster: None, demo_checkpoint: Path) -> Any:
    return create_actor("actor-0", small_settings(demo_checkpoint, tensor_parallel_size=2), 0)


@pytest.fixture(scope="module")
def pool(actor: Any) -> Iterator[RolloutClient]:
    pool = RolloutClient(Fleet([actor], ["actor-0"], TIMEOUTS), RoundSize(4))
    pool.start()
    yield pool
    names = {name for name in shared_memory(actor) if name.startswith("psm_")}
    assert names, "messages of the engine to its processes"
    pool.close()
    assert eventually(lambda: not [name for name in names if Path("/dev/shm", name).exists()])


@pytest.fixture(scope="module")
def learner(demo_checkpoint: Path) -> Iterator[SmallLearner]:
    with closing(SmallLearner(demo_checkpoint, num_receivers=2)) as learner:
        yield learner


def test_an_engine_of_two_devices_takes_weights_on_both_and_decodes_for_both(
    pool: RolloutClient, learner: SmallLearner
) -> None:
    assert pool.devices == (2,)
    assert [len(rank) for round_ in pool.split([list(range(9))]) for rank in round_] == [5, 4], (
        "4 sequences for each of 2 devices at a time"
    )
    for seed in (1, 2):
        learner.learn(seed)
        report = sync_weights(learner, pool)
        assert report.canary_max_abs < 1e-4
        requests = [learner.request(position) for position in range(4)]
        for rollout, request in zip(generated(pool, requests), requests, strict=True):
            tokens, logprobs = learner.greedy(request)
            assert rollout.response_token_ids == tokens
            assert rollout.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_the_memory_that_workers_share_has_no_name_that_a_kill_would_leave(
    pool: RolloutClient, actor: Any
) -> None:
    # vLLM's CPU kernels share memory only on processors with AVX-512.
    names = [name for name in shared_memory(actor) if name.startswith("vllm_")]
    assert names or "avx512f" not in Path("/proc/cpuinfo").read_text()
    assert all(name.endswith("(deleted)") for name in names)
