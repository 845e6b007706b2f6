"""The engine beside the learner: what only it has. What every backend has in common is in
`test_contract.py`.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from backend_support import (
    ModelHost,
    ask_workers,
    beams,
    colocated_settings,
    send_in_process,
    what_was_said,
    with_decode,
)
from engine_support import TEST_MODULES

from rollout_actors.backends.calls import EngineCalls
from rollout_actors.backends.colocate import ColocatedBackend, colocate_tensor_parallel
from rollout_actors.backends.hf import HFBackend
from rollout_actors.warm import warm_python
from shared.errors import ConfigError, RolloutError, WeightSyncError
from shared.rollouts import FinishReason


@pytest.mark.parametrize(
    ("wanted", "visible", "expected"),
    [
        (None, 0, 1),
        (None, 1, 1),
        (None, 2, 2),
        (None, 3, 2),
        (None, 4, 4),
        (None, 8, 4),
        (2, 8, 2),
        (4, 2, None),
    ],
)
def test_an_engine_takes_the_devices_that_it_is_told_or_the_largest_of_4_2_and_1_that_there_are(
    wanted, visible, expected
):
    if expected is not None:
        assert colocate_tensor_parallel(wanted, visible) == expected
        return
    too_many = (
        r"rollout_matching\.vllm\.tensor_parallel_size: is 4, but a learner rank has only 2 devices"
    )
    with pytest.raises(ConfigError, match=too_many):
        colocate_tensor_parallel(wanted, visible)


@pytest.fixture(scope="module")
def learner(learner):
    send_in_process(learner)
    learner.learn(seed=1)
    return learner


@pytest.fixture(scope="module")
def host(learner):
    return ModelHost(learner)


@pytest.fixture(scope="module")
def backend(learner, host, demo_checkpoint):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # a learner's; the engine has one
    backend = ColocatedBackend(host, colocated_settings(demo_checkpoint))
    yield backend
    backend.close()
    torch.set_num_threads(threads)


@pytest.fixture
def synced(backend, learner):
    learner.learn(seed=1)
    backend.receive_weights(learner.offer_weights())
    return backend


@pytest.mark.engine
def test_the_host_is_offloaded_while_the_engine_works_and_its_model_stays_while_it_is_read(
    host, learner, backend
):
    assert host.offloads[0] is True, "while the engine was loaded"
    host.offloads.clear()
    backend.receive_weights(learner.offer_weights())
    assert host.offloads == [False]
    backend.generate([learner.request(0)])
    assert host.offloads == [False, True]
    request = learner.request(0)
    with pytest.raises(RolloutError, match="sample sample-0 was refused"):
        backend.generate([replace(request, prompt_token_ids=request.prompt_token_ids * 60)])
    assert not host.is_offloaded
    assert len(backend.generate([request])) == 1, "what was queued beside it is gone"


@pytest.mark.engine
def test_the_learner_finds_its_process_as_it_left_it(synced, learner):
    torch.manual_seed(3)
    random.seed(3)

    def facts():
        threads = torch.set_num_threads, torch.get_num_threads()
        return torch.get_rng_state().tolist(), random.getstate(), dict(os.environ), threads

    before = facts()
    synced.generate([learner.request(0, temperature=1.0)])
    synced.receive_weights(learner.offer_weights())
    assert facts() == before
    assert not torch.distributed.is_initialized()


def served(backend, play):
    """Play this on an event loop of another thread, while the backend serves its calls."""
    calls = EngineCalls("colocated")
    calls.open()
    ended = []

    def run():
        try:
            ended.append(asyncio.run(play(calls)))
        finally:
            calls.close()

    thread = threading.Thread(target=run)
    backend.serve(calls, thread.start)
    thread.join(240)
    return ended[0]


@pytest.mark.engine
def test_calls_that_come_one_by_one_get_what_a_batch_gets_and_what_is_given_up_ends(
    synced, learner
):
    requests = [learner.request(position, temperature=1.0) for position in range(5)]
    expected = what_was_said(synced.generate(requests))
    too_long = replace(requests[0], prompt_token_ids=requests[0].prompt_token_ids * 60)
    endless = with_decode(learner.request(9, max_new_tokens=400), stop_token_ids=())

    async def play(calls):
        async with asyncio.timeout(240):
            given_up = asyncio.ensure_future(calls.generate(0, endless))
            tasks = [asyncio.ensure_future(calls.generate(0, request)) for request in requests[:3]]
            await tasks[0]
            given_up.cancel()
            with pytest.raises(RolloutError, match="sample sample-0 was refused"):
                await calls.generate(0, too_long)
            tasks += [asyncio.ensure_future(calls.generate(0, request)) for request in requests[3:]]
            return await asyncio.gather(*tasks)

    assert what_was_said(served(synced, play)) == expected
    assert not synced._engine._llm.llm_engine.has_unfinished_requests()


@pytest.mark.engine
def test_the_best_beam_is_that_of_transformers(synced, learner, host):
    requests = [beams(learner.request(position, max_new_tokens=12), 3) for position in range(4)]
    by_transformers = HFBackend(host, decode_batch_size=12).generate(requests)
    for rollout, expected in zip(synced.generate(requests), by_transformers, strict=True):
        assert rollout.response_token_ids == expected.response_token_ids
        assert rollout.prompt_token_ids == expected.prompt_token_ids
        assert rollout.seed == expected.seed
        assert rollout.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    stop = expected.response_token_ids[4]
    short, long = (
        synced.generate(
            [
                with_decode(request, stop_token_ids=(stop,), length_penalty=penalty)
                for request in requests
            ]
        )
        for penalty in (-50.0, 50.0)
    )
    lengths = [
        (len(a.response_token_ids), len(b.response_token_ids))
        for a, b in zip(short, long, strict=True)
    ]
    assert all(a <= b for a, b in lengths) and any(a < b for a, b in lengths)


@pytest.mark.engine
def test_a_beam_obeys_the_requests_bans_and_stop_tokens(synced, learner):
    request = beams(learner.request(0, max_new_tokens=8), 2)
    (free,) = synced.generate([request])
    banned = free.response_token_ids[0]
    bans = (*request.decode.banned_token_ids, banned)
    (other,) = synced.generate([with_decode(request, banned_token_ids=bans)])
    assert banned not in other.response_token_ids
    num_ended = num_by_second = 0
    for stop in free.response_token_ids:
        (rollout,) = synced.generate([with_decode(request, stop_token_ids=(stop,))])
        if rollout.finish_reason is FinishReason.STOP:
            num_ended += 1
            assert rollout.stop_token_id == stop
            assert stop not in rollout.response_token_ids
            # The banned token never comes, so the second of these ends the answer.
            several = with_decode(request, banned_token_ids=bans, stop_token_ids=(banned, stop))
            (by_second,) = synced.generate([several])
            assert stop not in by_second.response_token_ids
            num_by_second += by_second.stop_token_id == stop
    assert num_ended and num_by_second


@pytest.mark.engine
def test_an_engine_that_failed_in_the_middle_of_a_step_is_not_asked_again(synced, learner):
    """The last one of this engine. What it was decoding is still queued inside it."""
    ask_workers(synced, "fail_next_step")
    with pytest.raises(RolloutError, match="generate on colocated: ZeroDivisionError"):
        synced.generate([learner.request(0)])
    with pytest.raises(RolloutError, match="serves no rollouts: it failed"):
        synced.generate([learner.request(0)])
    with pytest.raises(WeightSyncError, match="takes no weights: it failed"):
        synced.receive_weights(learner.offer_weights())
    synced.close()


RANK = """
import sys
import torch
import torch.distributed as dist
from pathlib import Path
from backend_support import ModelHost, colocated_settings, send_in_process, what_was_said
from engine_support import SmallLearner
from rollout_actors.backends.colocate import ColocatedBackend

checkpoint, store, rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def summed():
    value = torch.tensor([rank + 1.0])
    dist.all_reduce(value)
    assert value.tolist() == [3.0]

dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
summed()
learner = SmallLearner(checkpoint, num_receivers=1)
send_in_process(learner)
learner.learn(seed=1)
if rank == 1:
    dist.new_group([0, 1])  # ranks do not have to load their engines at the same point
backend = ColocatedBackend(ModelHost(learner, f"beside-{rank}"), colocated_settings(checkpoint))
if rank == 0:
    dist.new_group([0, 1])
summed()
backend.receive_weights(learner.offer_weights())
said = what_was_said(backend.generate([learner.request(position, temperature=1.0) for position in range(3)]))
both = [None, None]
dist.all_gather_object(both, said)
assert both[0] == both[1]
backend.close()
summed()
dist.destroy_process_group()
print("fine")
"""


@pytest.mark.engine
@pytest.mark.long
def test_learner_ranks_with_a_group_of_their_own_each_have_an_engine_beside_them(
    demo_checkpoint, tmp_path
):
    environment = os.environ | {
        "PYTHONPATH": f"{TEST_MODULES}:{Path(__file__).parents[3]}",
        "OMP_NUM_THREADS": "1",
    }
    command = [*warm_python.command(), "-c", RANK, str(demo_checkpoint), str(tmp_path / "store")]
    options = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ranks = [subprocess.Popen([*command, str(rank)], text=True, **options) for rank in range(2)]
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=600)
            assert out.splitlines()[-1:] == ["fine"], err[-3000:]
    finally:
        for rank in ranks:
            rank.kill()
