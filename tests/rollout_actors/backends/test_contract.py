"""What every rollout backend promises (`shared.protocols.RolloutBackend`), whoever it is.

A backend joins by a function in `BACKENDS`, which makes one on the checkpoint's weights, with room
for `BATCH` sequences at a time and, where it has one, the repeat guard `GUARD`.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from backend_support import (
    ModelHost,
    OfEngines,
    UnderTest,
    child_processes,
    colocated_settings,
    what_was_said,
)
from counting_rows import RowsFile
from engine_support import TIMEOUTS, EnginePool, SmallLearner, create_actor, small_settings
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from process_family import is_alive
from serve_process import OneServer, serve_process
from stock_process import TOKEN, stock_process

from launch.runtime.rollout_client import RolloutClient
from learner.model.checkpoint import CheckpointWeights
from learner.weight_sync.sender import WeightSender
from rollout_actors.backends.colocate import ColocatedBackend, ColocatedSpec
from rollout_actors.backends.hf import HFBackend
from rollout_actors.backends.rollmatch_server import ServerClient, serve_arguments
from rollout_actors.backends.scripted import ScriptedBackend
from rollout_actors.backends.stock_server import StockClient
from rollout_actors.environments.chat.responses import RETURNS_TOKENS
from rollout_actors.environments.multi_turn import SingleTurnEnv
from rollout_actors.environments.rubric import Rubric
from shared.errors import RolloutError
from shared.rollouts import FinishReason
from shared.tokens.repeat_guard import RepeatGuardSettings, RepeatRule

BATCH = 4
GUARD = RepeatGuardSettings(
    min_new_tokens=12,
    max_consecutive_token_repeats=9,
    ngram_size=2,
    ngram_repeats=5,
    max_object_keys=None,
)
SHORT = 8
"""Tokens: too few for the guard to look."""


@contextmanager
def scripted(learner, folder):
    def script(request):
        seed = request.seed if request.decode.temperature else request.position
        return [50 + (seed * 31 + i * 7) % 400 for i in range(SHORT + 4)]

    yield UnderTest(
        "scripted", ScriptedBackend("scripted", script), learner, is_model=False, is_engine=False
    )


@contextmanager
def hf(learner, folder):
    rows: list[int] = []
    hook = learner.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    backend = HFBackend(ModelHost(learner, "hf"), decode_batch_size=BATCH, repeat_guard=GUARD)
    yield UnderTest(
        "hf", backend, learner, is_engine=False, take_rows=partial(taken, rows), guard=GUARD
    )
    hook.remove()


def taken(rows):
    values, rows[:] = list(rows), []
    return values


@contextmanager
def colocate(learner, checkpoint):
    learner.sender = WeightSender(
        CheckpointWeights(learner.model),
        transport="inproc",
        receivers=(),
        timeout_s=TIMEOUTS.sync_phase.seconds,
    )
    backend = ColocatedSpec(colocated_settings(checkpoint, max_num_seqs=BATCH, repeat_guard=GUARD))(
        ModelHost(learner)
    )
    assert isinstance(backend, ColocatedBackend)
    backend.collective_rpc("count_rows")
    yield UnderTest(
        "colocate",
        backend,
        learner,
        take_rows=lambda: backend.collective_rpc("take_rows")[0],
        guard=GUARD,
    )
    backend.close()


@contextmanager
def actors(learner, checkpoint):
    settings = small_settings(
        checkpoint,
        max_num_seqs=BATCH,
        repeat_guard=GUARD,
        worker_extension="counting_worker.CountingWorker",
    )
    actor = create_actor("actor", settings, 0)
    pool = RolloutClient([actor], ["actor"], TIMEOUTS, decode_batch_size=BATCH)
    pool.start()
    ray.get(actor.ask.remote("count_rows"))
    processes = [psutil.Process(pid) for pid in ray.get(actor.process_ids.remote())]
    backend = OfEngines(pool, learner)
    yield UnderTest(
        "actors",
        backend,
        learner,
        take_rows=lambda: ray.get(actor.ask.remote("take_rows"))[0],
        guard=GUARD,
        processes=processes,
    )
    backend.close()


@contextmanager
def server(learner, checkpoint):
    settings = small_settings(checkpoint, max_num_seqs=BATCH, repeat_guard=GUARD)
    with tempfile.TemporaryDirectory() as name:
        folder, rows = Path(name), RowsFile(Path(name) / "rows")
        program = [str(Path(__file__).parents[2] / "fakes" / "counting_serve.py")]
        # Started without the guard: the run brings its rule.
        with serve_process(
            serve_arguments(replace(settings, repeat_guard=None), port=0),
            folder,
            program=program,
            variables=rows.variables,
        ) as process:
            client = ServerClient("server", process.address(), index=0, expected=settings)
            yield from served(
                "server", client, process, rows, learner, openai=(process.url, "none")
            )


@contextmanager
def stock(learner, checkpoint):
    settings = small_settings(
        checkpoint,
        max_num_seqs=BATCH,
        repeat_guard=GUARD,
        worker_extension="counting_worker.CountingWorker",
    )
    with tempfile.TemporaryDirectory() as name:
        folder, rows = Path(name), RowsFile(Path(name) / "rows")
        with stock_process(settings, folder, variables=rows.variables) as process:
            client = StockClient("stock", process.address(), index=0, expected=settings)
            yield from served("stock", client, process, rows, learner, openai=(process.url, TOKEN))


def served(name, client, process, rows, learner, *, openai):
    pool = OneServer(client)
    pool.start()
    # The server is not the client's to end: closing it leaves the process to whoever started it.
    yield UnderTest(
        name,
        OfEngines(pool, learner),
        learner,
        take_rows=rows.take,
        guard=GUARD,
        servers=process.family(),
        openai=openai,
    )
    pool.close()


BACKENDS: dict[
    str, tuple[Callable[[SmallLearner, Path], AbstractContextManager[UnderTest]], list[Any]]
] = {
    "scripted": (scripted, []),
    "hf": (hf, []),
    "colocate": (colocate, [pytest.mark.engine]),
    "actors": (actors, [pytest.mark.engine, pytest.mark.ray]),
    "server": (server, [pytest.mark.engine]),
    "stock": (stock, [pytest.mark.engine, pytest.mark.long]),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=marks) for name, (_, marks) in BACKENDS.items()],
)
def under(request, demo_checkpoint):
    make, marks = BACKENDS[request.param]
    if marks:
        # a test compares with it, and its processes are none of the backend's
        request.getfixturevalue("engine_pool")
    before = child_processes()
    with (
        closing(SmallLearner(demo_checkpoint, num_receivers=1)) as learner,
        make(learner, demo_checkpoint) as under,
    ):
        under.children_before = before
        under.sync()
        # what a start needs for a moment has ended
        under.servers = [process for process in under.servers if is_alive(process)]
        yield under


def requests_of(under, positions, **decode):
    return [
        under.learner.request(position, **{"max_new_tokens": SHORT, **decode})
        for position in positions
    ]


@pytest.mark.slow
def test_one_rollout_per_request_in_order_each_with_its_place_and_seed(under):
    requests = [
        replace(request, step=7) for request in requests_of(under, [9, 2, 5, 0, 7, 1, 8, 3, 4])
    ]
    rollouts = under.backend.generate(requests)
    assert [(r.step, r.position, r.sample_id, r.seed) for r in rollouts] == [
        (7, r.position, r.sample_id, r.seed) for r in requests
    ]
    assert all(
        rollout.attempt == 0 and rollout.actor and rollout.generate_s > 0 and rollout.started_s > 0
        for rollout in rollouts
    )
    for rollout in rollouts:
        assert rollout.logprobs is not None
        assert 0 < len(rollout.response_token_ids) == len(rollout.logprobs) <= SHORT


@pytest.mark.slow
def test_a_vllm_backend_produces_token_ids_suitable_for_strict_alignment_as_every_backend_does(
    under,
):
    requests = requests_of(under, range(3))
    for request, rollout in zip(requests, under.backend.generate(requests), strict=True):
        expanded = (
            under.learner.logits(request.prompt_token_ids, request.images[0])[0]
            if under.is_model
            else request.prompt_token_ids
        )
        assert rollout.prompt_token_ids == expanded


@pytest.mark.slow
def test_greedy_rollouts_are_the_learners_own(under):
    if not under.is_model:
        pytest.skip("a script is no model")
    requests = requests_of(under, range(6))
    for request, rollout in zip(requests, under.backend.generate(requests), strict=True):
        tokens, logprobs = under.learner.greedy(request)
        assert rollout.response_token_ids == tokens
        assert rollout.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_the_stop_token_is_kept_apart_from_the_response(under):
    (request,) = requests_of(under, [0])
    (free,) = under.backend.generate(
        [replace(request, decode=replace(request.decode, stop_token_ids=()))]
    )
    assert (free.finish_reason, free.stop_token_id, len(free.response_token_ids)) == (
        FinishReason.LENGTH,
        None,
        SHORT,
    )
    assert free.logprobs is not None
    stop = free.response_token_ids[3]
    end = free.response_token_ids.index(stop)
    (stopped,) = under.backend.generate(
        [replace(request, decode=replace(request.decode, stop_token_ids=(stop,)))]
    )
    assert (stopped.finish_reason, stopped.stop_token_id, stopped.response_token_ids) == (
        FinishReason.STOP,
        stop,
        free.response_token_ids[:end],
    )
    assert stopped.logprobs == pytest.approx(free.logprobs[:end], abs=1e-5)
    assert stopped.stop_token_logprob == pytest.approx(free.logprobs[end], abs=1e-5)


@pytest.mark.slow
def test_a_seed_says_what_is_sampled(under):
    requests = requests_of(under, range(5), temperature=1.0)
    first = under.backend.generate(requests)
    assert what_was_said(under.backend.generate(requests)) == what_was_said(first)
    other = under.backend.generate(
        [replace(request, seed=request.seed + 5000) for request in requests]
    )
    assert all(
        a.response_token_ids != b.response_token_ids for a, b in zip(first, other, strict=True)
    )


def test_an_environment_that_asks_by_the_openai_api_is_told_the_tokens_that_the_backend_samples(
    under,
):
    if under.openai is None:
        pytest.skip("it has no such routes")
    url, key = under.openai
    sampling = {"temperature": 0.7, "seed": 11, "max_tokens": SHORT} | RETURNS_TOKENS
    environment = SingleTurnEnv(rubric=Rubric([lambda completion: len(completion[-1]["content"])]))

    async def generated():
        async with AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key=key,
            http_client=DefaultAsyncHttpxClient(trust_env=False),
            max_retries=0,
        ) as client:
            (model,) = [one.id async for one in client.models.list()]
            rows = [
                {"question": "Detect every object in the image."},
                {"question": "Which objects are there?"},
            ]
            return await environment.generate(rows, client, model, sampling, use_tqdm=False)

    for state in asyncio.run(generated()).state:
        assert (state["error"], state["reward"]) == (None, len(state["completion"][-1]["content"]))
        tokens = state["trajectory"][0]["tokens"]
        (request,) = requests_of(under, [0], temperature=0.7)
        same = replace(
            request,
            prompt_token_ids=tuple(tokens["prompt_ids"]),
            images=(),
            seed=11,
            decode=replace(request.decode, banned_token_ids=()),
        )
        (rollout,) = under.backend.generate([same])
        assert rollout.prompt_token_ids == tuple(tokens["prompt_ids"])
        assert rollout.response_token_ids == tuple(
            tokens["completion_ids"][: len(rollout.response_token_ids)]
        )
        assert rollout.logprobs == pytest.approx(
            tokens["completion_logprobs"][: len(rollout.response_token_ids)], abs=1e-6
        )


@pytest.mark.slow
def test_neighbours_do_not_matter(under):
    requests = requests_of(under, range(6), temperature=1.0)
    together = under.backend.generate(requests)
    assert [r.response_token_ids for r in under.backend.generate(requests[::-1])][::-1] == [
        r.response_token_ids for r in together
    ]
    for request, rollout in zip(requests, together, strict=True):
        (alone,) = under.backend.generate([request])
        assert alone.response_token_ids == rollout.response_token_ids
        assert alone.logprobs == pytest.approx(rollout.logprobs, abs=1e-5)


def test_an_engine_samples_what_actors_sample_to_the_bit_however_the_requests_are_cut(
    under, demo_checkpoint, request
):
    if not under.is_engine:
        pytest.skip("it has no engine")
    engine_pool: EnginePool = request.getfixturevalue("engine_pool")
    engine_pool.learn(demo_checkpoint, 61)
    under.learner.learn(61)
    under.sync()
    requests = requests_of(under, range(9), temperature=1.0, max_new_tokens=32)
    said = what_was_said(engine_pool.generate(requests))
    assert all(
        RepeatRule(GUARD).first_repetition(tokens) is None for *_, tokens, _, _, _, _, _ in said
    ), "those actors have no guard"
    assert what_was_said(under.backend.generate(requests)) == said
    assert (
        what_was_said(under.backend.generate(requests[:4]) + under.backend.generate(requests[4:]))
        == said
    )


@pytest.mark.slow
def test_never_more_than_the_decode_batch_are_decoded_at_a_time(under):
    if under.take_rows is None:
        pytest.skip("a script decodes nothing")
    under.take_rows()
    under.backend.generate(requests_of(under, range(2 * BATCH + 2)))
    assert max(under.take_rows()) == BATCH


def test_no_requests_make_no_call(under):
    if under.take_rows is None:
        assert under.backend.generate([]) == []
        return
    under.take_rows()
    assert under.backend.generate([]) == []
    assert under.take_rows() == []
    under.backend.generate(requests_of(under, [0]))
    assert under.take_rows() != [], "what is decoded is counted"


@pytest.mark.slow
def test_a_rollout_says_which_weights_it_is_of(under):
    requests = requests_of(under, range(2))
    # where weights travel in a group, the second ones go over the one that the first have opened
    for seed in (4, 5):
        before = under.backend.version
        old = under.backend.generate(requests)
        under.learner.learn(seed)
        report = under.sync()
        assert report.version == under.backend.version == under.learner.version == before + 1
        assert report.canary_max_abs <= 1e-4
        new = under.backend.generate(requests)
        assert ({r.weight_version for r in old}, {r.weight_version for r in new}) == (
            {before},
            {before + 1},
        )
        if under.is_model:
            assert [r.response_token_ids for r in new] == [
                under.learner.greedy(request)[0] for request in requests
            ]
            assert [r.response_token_ids for r in new] != [r.response_token_ids for r in old]


@pytest.mark.slow
def test_the_guard_ends_one_sequence_and_not_its_neighbours(under):
    if under.guard is None:
        pytest.skip("it has none")
    under.forget()
    under.sync()  # the checkpoint's own weights repeat themselves now and then
    requests = requests_of(under, range(8), max_new_tokens=16)
    unguarded = HFBackend(ModelHost(under.learner), decode_batch_size=8).generate(requests)
    num_ended = 0
    for free, rollout in zip(unguarded, under.backend.generate(requests), strict=True):
        end = RepeatRule(under.guard).first_repetition(free.response_token_ids)
        if end in (None, 16):
            assert (
                rollout.response_token_ids,
                rollout.finish_reason,
                rollout.forced_positions,
            ) == (free.response_token_ids, free.finish_reason, ())
            continue
        num_ended += 1
        assert (rollout.response_token_ids, rollout.finish_reason) == (
            free.response_token_ids[:end],
            FinishReason.REPETITION,
        )
        assert (rollout.stop_token_id, rollout.stop_token_logprob, rollout.forced_positions) == (
            under.learner.stop,
            None,
            (end,),
        )
    assert 0 < num_ended < len(requests), "otherwise nothing was tested"


def test_close_leaves_no_process_and_nothing_that_answers(under):
    """The last one: the backend is gone behind it."""
    under.backend.close()
    under.backend.close()
    kept = under.children_before.union(under.servers)
    deadline = time.monotonic() + 30
    while left := [
        process for process in {*under.processes, *child_processes()} - kept if is_alive(process)
    ]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)
    ended = [process for process in under.servers if not is_alive(process)]
    assert not ended, "it ends nobody else's"
    with pytest.raises((RolloutError, RuntimeError)):
        under.backend.generate(requests_of(under, [0]))
