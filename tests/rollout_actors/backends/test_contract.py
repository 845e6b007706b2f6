"""What every rollout backend promises (`shared.protocols.RolloutBackend`), whoever it is.

A backend joins by a function in `BACKENDS`, which makes one on the checkpoint's weights, with room
for `BATCH` sequences at a time and, where it has one, the repeat guard `GUARD`.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray
from backend_support import (
    ModelHost,
    OfEngines,
    UnderTest,
    ask_workers,
    beams,
    child_processes,
    colocated_settings,
    send_in_process,
    what_was_said,
    with_decode,
)
from counting_rows import RowsFile
from engine_support import TIMEOUTS, SmallLearner, create_actor, small_settings
from fake_server import eventually
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from process_family import is_alive
from serve_process import OneServer, serve_process
from stock_process import TOKEN, stock_process

from benchmarks.scripted_backend import ScriptedBackend
from launch.processes.fleet import Fleet
from launch.processes.rollout_client import RolloutClient
from launch.processes.rounds import RoundSize
from rollout_actors.backends.colocate import ColocatedBackend
from rollout_actors.backends.hf import HFBackend
from rollout_actors.backends.http import HttpClient
from rollout_actors.backends.rollmatch_server import ServerClient, serve_arguments
from rollout_actors.backends.stock_server import StockClient, StockRoutes
from rollout_actors.environments.chat.responses import RETURNS_TOKENS
from rollout_actors.environments.multi_turn import SingleTurnEnv
from rollout_actors.environments.rubric import Rubric
from shared.errors import RolloutError, WeightSyncError
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
def scripted(learner, checkpoint):
    def script(request):
        seed = request.seed if request.decode.temperature else request.position
        return [50 + (seed * 31 + i * 7) % 400 for i in range(SHORT + 4)]

    backend = ScriptedBackend("scripted", script)
    yield UnderTest(backend, learner, is_model=False, is_engine=False)


@contextmanager
def hf(learner, checkpoint):
    rows = []
    hook = learner.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )

    def take_rows():
        values, rows[:] = list(rows), []
        return values

    host = ModelHost(learner, "hf")
    backend = HFBackend(host, decode_batch_size=BATCH, repeat_guard=GUARD)
    yield UnderTest(backend, learner, is_engine=False, take_rows=take_rows, guard=GUARD, host=host)
    hook.remove()


@contextmanager
def colocate(learner, checkpoint):
    send_in_process(learner)
    settings = colocated_settings(checkpoint, max_num_seqs=BATCH, repeat_guard=GUARD)
    host = ModelHost(learner)
    backend = ColocatedBackend(host, settings)
    ask_workers(backend, "count_rows")
    yield UnderTest(
        backend,
        learner,
        take_rows=lambda: ask_workers(backend, "take_rows")[0],
        guard=GUARD,
        host=host,
        arm=lambda *fault: ask_workers(backend, "arm", *fault),
    )
    backend.close()


def settings_of_process(checkpoint, **changes):
    return small_settings(checkpoint, max_num_seqs=BATCH, repeat_guard=GUARD, **changes)


@contextmanager
def actors(learner, checkpoint):
    settings = settings_of_process(checkpoint, worker_extension="counting_worker.CountingWorker")
    actor = create_actor("actor", settings, 0)
    pool = RolloutClient(Fleet([actor], ["actor"], TIMEOUTS), RoundSize(BATCH))
    pool.start()
    ray.get(actor.ask.remote("count_rows"))
    backend = OfEngines(pool, learner)
    yield UnderTest(
        backend,
        learner,
        take_rows=lambda: ray.get(actor.ask.remote("take_rows"))[0],
        guard=GUARD,
        arm=lambda *fault: ray.get(actor.ask.remote("arm", *fault)),
        processes=[psutil.Process(pid) for pid in ray.get(actor.process_ids.remote())],
    )
    backend.close()


@contextmanager
def server(learner, checkpoint):
    settings = settings_of_process(checkpoint)
    program = [str(Path(__file__).parents[2] / "fakes" / "counting_serve.py")]
    # Started without the guard: the run brings its rule.
    arguments = serve_arguments(replace(settings, repeat_guard=None), port=0)
    with tempfile.TemporaryDirectory() as name:
        rows = RowsFile(Path(name) / "rows")
        with serve_process(
            arguments, Path(name), program=program, variables=rows.variables
        ) as process:
            client = ServerClient("server", process.address(), index=0, expected=settings)
            yield from served(client, process, rows, learner)


@contextmanager
def stock(learner, checkpoint):
    settings = settings_of_process(checkpoint, worker_extension="counting_worker.CountingWorker")
    with tempfile.TemporaryDirectory() as name:
        rows = RowsFile(Path(name) / "rows")
        with stock_process(settings, Path(name), variables=rows.variables) as process:
            client = StockClient("stock", process.address(), index=0, expected=settings)
            routes = StockRoutes(HttpClient("stock", process.address()), run="none")

            def arm(*fault):
                asyncio.run(routes.collective_rpc("arm", args=fault))

            openai = (process.url, TOKEN)
            yield from served(client, process, rows, learner, arm=arm, openai=openai)


def served(client, process, rows, learner, *, arm=None, openai=None):
    pool = OneServer(client)
    pool.start()
    # The server is not the client's to end: closing it leaves the process to whoever started it.
    yield UnderTest(
        OfEngines(pool, learner),
        learner,
        take_rows=rows.take,
        guard=GUARD,
        arm=arm,
        servers=process.family(),
        openai=openai,
    )
    pool.close()


BACKENDS = {
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
        # A test compares with it, and its processes are none of the backend's.
        request.getfixturevalue("engine_pool")
    before = child_processes()
    with (
        closing(SmallLearner(demo_checkpoint, num_receivers=1)) as learner,
        make(learner, demo_checkpoint) as under,
    ):
        under.children_before = before
        under.sync()
        # What a start needs for a moment has ended.
        under.servers = [process for process in under.servers if is_alive(process)]
        yield under


def requests_of(under, positions, **decode):
    options = {"max_new_tokens": SHORT} | decode
    return [under.learner.request(position, **options) for position in positions]


def tokens_of(rollouts):
    return [rollout.response_token_ids for rollout in rollouts]


@pytest.mark.slow
def test_one_rollout_per_request_in_order_each_with_its_place_and_seed(under):
    requests = [
        replace(request, step=7) for request in requests_of(under, [9, 2, 5, 0, 7, 1, 8, 3, 4])
    ]
    rollouts = under.backend.generate(requests)
    assert [(r.step, r.position, r.sample_id, r.seed) for r in rollouts] == [
        (7, r.position, r.sample_id, r.seed) for r in requests
    ]
    for rollout in rollouts:
        assert (rollout.attempt, bool(rollout.actor)) == (0, True)
        assert rollout.generate_s > 0 and rollout.started_s > 0
        assert 0 < len(rollout.response_token_ids) == len(rollout.logprobs) <= SHORT


@pytest.mark.slow
def test_a_vllm_backend_produces_token_ids_suitable_for_strict_alignment_as_every_backend_does(
    under,
):
    requests = requests_of(under, range(3))
    for request, rollout in zip(requests, under.backend.generate(requests), strict=True):
        expanded = request.prompt_token_ids
        if under.is_model:
            expanded = under.learner.logits(request.prompt_token_ids, request.images[0])[0]
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
    (free,) = under.backend.generate([with_decode(request, stop_token_ids=())])
    assert (free.finish_reason, free.stop_token_id) == (FinishReason.LENGTH, None)
    assert len(free.response_token_ids) == SHORT
    stop = free.response_token_ids[3]
    end = free.response_token_ids.index(stop)
    (stopped,) = under.backend.generate([with_decode(request, stop_token_ids=(stop,))])
    assert (stopped.finish_reason, stopped.stop_token_id) == (FinishReason.STOP, stop)
    assert stopped.response_token_ids == free.response_token_ids[:end]
    assert stopped.logprobs == pytest.approx(free.logprobs[:end], abs=1e-5)
    assert stopped.stop_token_logprob == pytest.approx(free.logprobs[end], abs=1e-5)


def test_a_stop_text_ends_a_response_and_is_a_part_of_it(under):
    if not under.is_model:
        pytest.skip("a script has no text")
    (request,) = requests_of(under, [0])
    (free,) = under.backend.generate([with_decode(request, stop_token_ids=())])

    def text_of(token_ids):
        return under.learner.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)

    # It begins within one token and ends within the next.
    text = text_of(free.response_token_ids[2:4])[1:]
    lengths = range(1, SHORT + 1)
    end = next(n for n in lengths if text in text_of(free.response_token_ids[:n]))
    other = with_decode(request, stop_token_ids=(), stop=("no such text",))
    stopped, not_stopped = under.backend.generate(
        [with_decode(request, stop_token_ids=(), stop=("no such text", text)), other]
    )
    assert (stopped.finish_reason, stopped.stop_token_id) == (FinishReason.STOP, None)
    assert stopped.response_token_ids == free.response_token_ids[:end]
    assert stopped.logprobs == pytest.approx(free.logprobs[:end], abs=1e-5)
    assert tokens_of([not_stopped]) == tokens_of([free])
    assert not_stopped.finish_reason is FinishReason.LENGTH


@pytest.mark.slow
def test_a_seed_says_what_is_sampled(under):
    requests = requests_of(under, range(5), temperature=1.0)
    first = under.backend.generate(requests)
    assert what_was_said(under.backend.generate(requests)) == what_was_said(first)
    others = [replace(request, seed=request.seed + 5000) for request in requests]
    pairs = zip(tokens_of(first), tokens_of(under.backend.generate(others)), strict=True)
    assert all(one != other for one, other in pairs)


def test_what_cannot_be_read_is_refused_by_its_sample_and_the_next_request_is_answered(under):
    if not under.is_model:
        pytest.skip("a script reads nothing")
    (request,) = requests_of(under, [0])
    (image,) = request.images
    cut_off = replace(image, data=image.data[: len(image.data) // 2])
    refused = [(replace(request, images=(cut_off,)), "image 0 of sample sample-0")]
    if under.is_engine:
        too_long = replace(request, prompt_token_ids=request.prompt_token_ids * 60)
        refused.append((too_long, r"sample sample-0 was refused|refused .*HTTP 400"))
    for broken, why in refused:
        with pytest.raises(RolloutError, match=why) as caught:
            under.backend.generate([broken])
        # An UnreachableError would send the request to the next engine.
        assert type(caught.value) is RolloutError
        assert len(under.backend.generate([request])) == 1


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
            questions = ("Detect every object in the image.", "Which objects are there?")
            rows = [{"question": question} for question in questions]
            return await environment.generate(rows, client, model, sampling, use_tqdm=False)

    for state in asyncio.run(generated()).state:
        assert (state["error"], state["reward"]) == (None, len(state["completion"][-1]["content"]))
        tokens = state["trajectory"][0]["tokens"]
        prompt = tuple(tokens["prompt_ids"])
        (request,) = requests_of(under, [0], temperature=0.7)
        decode = replace(request.decode, banned_token_ids=())
        same = replace(request, prompt_token_ids=prompt, images=(), seed=11, decode=decode)
        (rollout,) = under.backend.generate([same])
        length = len(rollout.response_token_ids)
        assert rollout.prompt_token_ids == prompt
        assert rollout.response_token_ids == tuple(tokens["completion_ids"][:length])
        assert rollout.logprobs == pytest.approx(tokens["completion_logprobs"][:length], abs=1e-6)


@pytest.mark.slow
def test_neighbours_do_not_matter(under):
    requests = requests_of(under, range(6), temperature=1.0)
    together = under.backend.generate(requests)
    assert tokens_of(under.backend.generate(requests[::-1]))[::-1] == tokens_of(together)
    for request, rollout in zip(requests, together, strict=True):
        (alone,) = under.backend.generate([request])
        assert alone.response_token_ids == rollout.response_token_ids
        assert alone.logprobs == pytest.approx(rollout.logprobs, abs=1e-5)


def test_an_engine_samples_what_actors_sample_to_the_bit_however_the_requests_are_cut(
    under, demo_checkpoint, request
):
    if not under.is_engine:
        pytest.skip("it has no engine")
    engine_pool = request.getfixturevalue("engine_pool")
    engine_pool.learn(demo_checkpoint, 61)
    under.learner.learn(61)
    under.sync()
    requests = requests_of(under, range(9), temperature=1.0, max_new_tokens=32)
    rollouts = engine_pool.generate(requests)
    repeats = [RepeatRule(GUARD).first_repetition(tokens) for tokens in tokens_of(rollouts)]
    assert set(repeats) == {None}, "those actors have no guard"
    answers = what_was_said(rollouts)
    assert what_was_said(under.backend.generate(requests)) == answers
    parts = under.backend.generate(requests[:4]) + under.backend.generate(requests[4:])
    assert what_was_said(parts) == answers


@pytest.mark.slow
def test_never_more_than_the_decode_batch_are_decoded_at_a_time(under):
    if under.take_rows is None:
        pytest.skip("a script decodes nothing")
    under.take_rows()

    def widest():
        under.backend.generate(requests_of(under, range(2 * BATCH + 2)))
        return max(under.take_rows())

    if not under.servers:
        assert widest() == BATCH
        return
    # To a server requests go one by one: the first may be answered before the next has arrived.
    seen = set()
    assert eventually(lambda: seen.add(widest()) or max(seen) > 1)
    assert max(seen) <= BATCH


def test_no_requests_make_no_call(under):
    take_rows = under.take_rows or (list)
    take_rows()
    assert under.backend.generate([]) == []
    assert take_rows() == []
    under.backend.generate(requests_of(under, [0]))
    assert under.take_rows is None or take_rows() != [], "what is decoded is counted"


@pytest.mark.slow
def test_a_rollout_says_which_weights_it_is_of(under):
    requests = requests_of(under, range(2))
    # Where weights travel in a group, the second ones go over the one that the first have opened.
    for seed in (4, 5):
        before = under.backend.version
        old = under.backend.generate(requests)
        under.learner.learn(seed)
        report = under.sync()
        assert report.version == under.backend.version == under.learner.version == before + 1
        assert report.canary_max_abs <= 1e-4
        new = under.backend.generate(requests)
        assert {rollout.weight_version for rollout in old} == {before}
        assert {rollout.weight_version for rollout in new} == {before + 1}
        if under.is_model:
            assert tokens_of(new) == [under.learner.greedy(request)[0] for request in requests]
            assert tokens_of(new) != tokens_of(old)


def test_each_response_has_the_time_of_its_own_end(under):
    if not under.is_model:
        pytest.skip("a script takes no time")
    requests = requests_of(under, range(2), temperature=1.0)
    endless = [with_decode(request, stop_token_ids=()) for request in requests]
    first, second = tokens_of(under.backend.generate(endless))
    stop = next(token_id for token_id in first[:3] if token_id not in second)
    stopped = [with_decode(request, stop_token_ids=(stop,)) for request in requests]

    def ends_first():
        short, long = under.backend.generate(stopped)
        assert (short.stop_token_id, len(long.response_token_ids)) == (stop, SHORT)
        return 0 < short.generate_s < long.generate_s

    # A server may get the short one's request late, or be stopped between the two answers.
    assert eventually(ends_first) if under.servers else ends_first()


@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_host_that_is_told_to_stop_is_heard_before_the_next_token(under, num_beams):
    if under.host is None:
        pytest.skip("it works in a process of its own")
    asked = requests_of(under, range(2))
    if num_beams > 1:
        asked = [beams(request, num_beams) for request in asked]
    answers = what_was_said(under.backend.generate(asked))
    under.host.num_asked, under.host.stops_at = 0, 3
    with pytest.raises(RolloutError, match="told to stop"):
        under.backend.generate(asked)
    assert under.host.num_asked == 3 and not under.host.is_offloaded
    again = what_was_said(under.backend.generate(asked))
    assert again == answers, "nothing of that round is still queued"


@pytest.mark.parametrize(
    "tensor",
    [
        "model.language_model.layers.1.mlp.gate_proj.weight",
        "model.visual.blocks.1.attn.proj.weight",
    ],
)
def test_a_tensor_that_is_damaged_after_its_checksum_is_caught_by_the_canary(under, tensor):
    if under.arm is None:
        pytest.skip("nobody can be told to damage its weights")
    under.learner.learn(31)
    served = under.backend.version
    under.arm("spoil", tensor)
    with pytest.raises(WeightSyncError) as caught:
        under.sync()
    assert (caught.value.phase, caught.value.quantity) == ("canary", "canary log-probability")
    assert caught.value.size > 1e-4
    assert under.backend.version == served
    (request,) = requests_of(under, [0])
    with pytest.raises(RolloutError, match=r"serves no rollouts: .*sync to version"):
        under.backend.generate([request])
    assert under.sync().version == under.learner.version
    (rollout,) = under.backend.generate([request])
    assert rollout.response_token_ids == under.learner.greedy(request)[0]


@pytest.mark.slow
def test_offending_sequence_is_terminated_without_batch_abort_and_its_neighbours_continue(under):
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
            assert rollout.response_token_ids == free.response_token_ids
            assert (rollout.finish_reason, rollout.forced_positions) == (free.finish_reason, ())
            continue
        num_ended += 1
        assert rollout.response_token_ids == free.response_token_ids[:end]
        assert (rollout.finish_reason, rollout.forced_positions) == (
            FinishReason.REPETITION,
            (end,),
        )
        assert (rollout.stop_token_id, rollout.stop_token_logprob) == (under.learner.stop, None)
    assert 0 < num_ended < len(requests), "otherwise nothing was tested"
    # Without a stop token there is nothing to end a response with.
    endless = [with_decode(request, stop_token_ids=()) for request in requests]
    assert set(map(len, tokens_of(under.backend.generate(endless)))) == {16}


def test_close_leaves_no_process_and_nothing_that_answers(under):
    """The last one: the backend is gone behind it."""
    under.backend.close()
    under.backend.close()
    kept = under.children_before.union(under.servers)

    def left():
        ours = {*under.processes, *child_processes()} - kept
        return [process for process in ours if is_alive(process)]

    deadline = time.monotonic() + 120
    while left():
        assert time.monotonic() < deadline, f"left behind: {left()}"
        time.sleep(0.1)
    assert all(map(is_alive, under.servers)), "it ends nobody else's"
    with pytest.raises((RolloutError, RuntimeError)):
        under.backend.generate(requests_of(under, [0]))
