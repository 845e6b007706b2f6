"""One engine over two devices: each worker takes its part of every weight, and the engine answers
as one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import ray
from engine_support import TIMEOUTS, SmallLearner, create_actor, generated, small_settings

from launch.processes.fleet import Fleet
from launch.processes.rollout_client import RolloutClient
from launch.processes.rounds import RoundSize
from shared.weight_sync.phases import sync_weights

pytestmark = [pytest.mark.engine, pytest.mark.long]


def named_memory(process: psutil.Process) -> set[Path]:
    """What it and the processes below it have mapped of Python's, and of vLLM's own kernels."""
    maps = "".join(
        Path(f"/proc/{one.pid}/maps").read_text()
        for one in (process, *process.children(recursive=True))
    )
    return {Path(name) for name in re.findall(r"/dev/shm/(?:psm_|vllm_)\S+", maps)}


@pytest.fixture(scope="module")
def pool(ray_cluster: None, demo_checkpoint: Path) -> Iterator[RolloutClient]:
    actor = create_actor("actor-0", small_settings(demo_checkpoint, tensor_parallel_size=2), 0)
    pool = RolloutClient(Fleet([actor], ["actor-0"], TIMEOUTS), RoundSize(4))
    pool.start()
    yield pool
    shared = named_memory(psutil.Process(ray.get(actor.process_ids.remote())[0]))
    # vLLM's own memory is there only with AVX-512: without it its CPU kernels know none.
    assert "psm" in {path.name.split("_")[0] for path in shared}, (
        "what the engine's processes share while they live"
    )
    pool.close()
    assert not [path for path in shared if path.exists()], "a kill alone would have left it behind"


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
