"""The client over a run's own engines: which one a call goes to, with which seed, how many at a
time, and what becomes of it when it fails or is cancelled.
"""

from __future__ import annotations

import asyncio
import gc
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import MagicMock

import pytest
from counted_time import counted
from environment_support import Talk, generated, rows, user
from scripted_client import ScriptedClient
from scripted_engines import ScriptedEngines, ask, client_over, demo_tokenizer, says, state_at

from rollout_actors.environments.clients.openai import is_rollout_client
from rollout_actors.environments.types import State
from shared.errors import RolloutError, UnreachableError
from shared.seeds import request_seed

TOKENIZER = demo_tokenizer()
FIFTH = [{"question": "q", "position": 5}]


def says_no(number: int = 1, delay_s: float = 0.0) -> ScriptedEngines:
    return ScriptedEngines(lambda _: says(TOKENIZER, "no", delay_s=delay_s), number=number)


def test_the_client_has_to_know_the_rollout_and_a_stand_in_with_every_attribute_has_not():
    assert is_rollout_client(client_over(says_no(), TOKENIZER))
    client = MagicMock()
    client.chat.completions.create = ScriptedClient(["a", "b"]).chat.completions.create
    for _ in range(2):
        assert generated(Talk(max_turns=1), rows(1), client).state[0]["error"] is None


# Places and seeds


def test_all_calls_of_a_rollout_go_to_the_engine_of_its_position():
    engines = says_no(3)
    inputs = [{"question": f"q{i}", "position": 10 + i} for i in range(7)]
    results = generated(Talk(max_turns=3), inputs, client_over(engines, TOKENIZER))
    assert results.metadata.num_errors == 0
    assert len(engines.requests) == 21
    assert {(request.position, engine) for engine, request in engines.requests} == {
        (10 + i, (10 + i) % 3) for i in range(7)
    }


def test_each_call_has_the_seed_of_its_step_position_and_turn():
    engines = says_no(2)
    generated(Talk(max_turns=3), FIFTH, client_over(engines, TOKENIZER))
    requests = [request for _, request in engines.requests]
    assert [request.seed for request in requests] == [request_seed(7, 3, 5, i) for i in range(3)]
    places = {(request.step, request.position, request.sample_id) for request in requests}
    assert places == {(3, 5, "0")}


def test_rollouts_that_do_not_know_their_place_are_numbered_as_they_begin():
    engines = says_no()
    client = client_over(engines, TOKENIZER)
    for conversation in [client.conversation(state_at(None)) for _ in range(3)]:
        ask(conversation, [user("hello")])
    assert [request.position for _, request in engines.requests] == [0, 1, 2]


def test_seeds_do_not_depend_on_the_order_in_which_rollouts_begin():
    class Late(Talk):
        async def setup_state(self, state: State) -> State:
            await asyncio.sleep(0.01 * ((3 * state["example_id"]) % 5))
            return state

    def sampled(environment: Talk, **bounds: Any) -> tuple[list[str], dict[str, tuple[int, int]]]:
        engines = ScriptedEngines(lambda request: says(TOKENIZER, f"no {request.seed}"), number=3)
        inputs = [{"question": f"q{i}"} for i in range(5)]
        results = generated(environment, inputs, client_over(engines, TOKENIZER), **bounds)
        assert results.metadata.num_errors == 0
        return [request.sample_id for _, request in engines.requests], {
            f"{request.sample_id} {len(request.prompt_token_ids)}": (request.seed, engine)
            for engine, request in engines.requests
        }

    late_order, late_seeds = sampled(Late(max_turns=2))
    order, seeds = sampled(Talk(max_turns=2), max_concurrent=1)
    assert late_order != order == [str(i) for i in range(5) for _ in range(2)]
    assert late_seeds == seeds
    assert [seeds[key][0] for key in sorted(seeds)] == [
        request_seed(7, 3, position, turn) for position in range(5) for turn in range(2)
    ]


def test_rollouts_of_one_row_have_seeds_of_their_own_and_the_callers_rows_no_position():
    dataset = [{"question": "q"}, {"question": "r"}]
    engines = says_no()
    evaluation = Talk(max_turns=1, dataset=dataset).evaluate(
        client_over(engines, TOKENIZER), "m", rollouts_per_example=3, use_tqdm=False
    )
    asyncio.run(evaluation)
    assert {request.seed for _, request in engines.requests} == {
        request_seed(7, 3, position, 0) for position in range(6)
    }
    assert dataset == [{"question": "q"}, {"question": "r"}]


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (
            (0, 1, 0),
            "position: inputs 0 and 2 both have 0, .*; give every row a different position",
        ),
        ((4, 5, None, 2), "inputs 2 and 3 both have 2"),
        ((0, "front"), "must be a whole number from 0, got 'front' in input 1"),
        ((True,), "got True"),
        ((-1,), "got -1"),
    ],
)
def test_places_that_two_rollouts_have_and_what_is_no_place_are_refused_before_the_first_call(
    positions, message
):
    inputs = [
        {"question": "q"} | ({} if position is None else {"position": position})
        for position in positions
    ]
    engines = ScriptedEngines([])
    with pytest.raises(ValueError, match=message):
        generated(Talk(), inputs, client_over(engines, TOKENIZER))
    assert engines.requests == []


def test_a_column_of_positions_is_nothing_to_other_clients():
    inputs = [{"question": "q", "position": "front"}] * 2
    results = generated(Talk(max_turns=1), inputs, ScriptedClient(["a", "b"]))
    assert results.metadata.num_errors == 0


# Failures


@pytest.mark.parametrize(
    "failure",
    [RolloutError("its process has ended", actor="actor-0", phase="generate"), ValueError("mine")],
    ids=repr,
)
def test_what_an_engine_fails_with_is_asked_of_nobody_again(failure):
    engines = ScriptedEngines([says(TOKENIZER, "a"), failure], number=2)
    (state,) = generated(Talk(max_turns=2), rows(1), client_over(engines, TOKENIZER)).state
    assert (state["error"], state["reward"]) == (f"{type(failure).__name__}: {failure}", 0.0)
    assert [engine for engine, _ in engines.requests] == [0, 0]


def test_what_an_engine_that_cannot_be_reached_was_asked_is_asked_of_the_next_one_with_the_same_seed_and_prompt(
    caplog,
):
    gone = UnreachableError("failed 2 times", actor="server-2", phase="generate")
    engines = ScriptedEngines([says(TOKENIZER, "a"), gone, gone, says(TOKENIZER, "b")], number=3)
    (state,) = generated(Talk(max_turns=2), FIFTH, client_over(engines, TOKENIZER)).state
    assert state["error"] is None
    assert [engine for engine, _ in engines.requests] == [2, 2, 0, 1]
    _, (_, first), (_, again), (_, last) = engines.requests
    assert first == again == last
    assert last.seed == request_seed(7, 3, 5, 1)
    assert re.search("failed 2 times; .*next engine .*sample 0", caplog.text)


def test_where_no_engine_can_be_reached_each_is_asked_once_and_the_rollout_says_so():
    engines = ScriptedEngines(
        [UnreachableError(f"failed {i}", actor=f"server-{i}", phase="generate") for i in range(3)],
        number=3,
    )
    (state,) = generated(Talk(max_turns=2), rows(1), client_over(engines, TOKENIZER)).state
    assert state["error"] == "UnreachableError: generate on server-2: failed 2"
    assert len(engines.requests) == 3


def test_an_engine_that_fails_after_the_caller_was_cancelled_leaves_no_warning():
    unhandled = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unhandled.append(context["message"]))
        lost = RolloutError("its process has ended", actor="actor-0", phase="generate")
        client = client_over(ScriptedEngines([lost]), TOKENIZER)

        async def work() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                conversation = client.conversation(state_at())
                await conversation.chat.completions.create(model="m", messages=[user("q")])

        task = asyncio.ensure_future(client.unless_an_engine_fails(work()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    gc.collect()
    assert unhandled == []


# Turns at an engine


def test_no_engine_has_more_requests_at_a_time_than_it_may():
    engines = says_no(2, delay_s=0.005)
    client = client_over(engines, TOKENIZER, max_under_way=3)
    # Twice: each `generate` of a test runs an event loop of its own.
    for _ in range(2):
        assert generated(Talk(max_turns=2), rows(20), client).metadata.num_errors == 0
    assert engines.most_under_way == [3, 3]


def test_the_wait_for_a_turn_at_an_engine_is_not_in_the_timing():
    client = client_over(says_no(delay_s=0.1), TOKENIZER, max_under_way=1)
    results, _ = counted(Talk(max_turns=1).generate(rows(8), client, "model", use_tqdm=False))
    spent_ms = [state["timing"]["generation_ms"] for state in results.state]
    assert spent_ms == pytest.approx([100.0] * 8)
    assert results.metadata.time_ms == pytest.approx(800.0)


def test_cancelling_generate_aborts_every_request_and_those_that_wait_are_never_asked():
    engines = says_no(2, delay_s=60.0)
    client = client_over(engines, TOKENIZER, max_under_way=3)

    async def cancelled() -> None:
        task = asyncio.create_task(Talk().generate(rows(20), client, "m", use_tqdm=False))
        while sum(engines.num_under_way) < 6:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    # What one event loop leaves behind keeps nobody from asking on the next.
    for times in (1, 2):
        asyncio.run(asyncio.wait_for(cancelled(), 60))
        assert len(engines.requests) == engines.num_cancelled == 6 * times
        assert engines.num_under_way == [0, 0]


def test_a_client_may_be_used_on_several_event_loops_at_once():
    client = client_over(says_no(delay_s=0.001), TOKENIZER, max_under_way=1)
    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(generated, Talk(max_turns=2), rows(10), client) for _ in range(3)]
        assert [one.result(timeout=240).metadata.num_errors for one in running] == [0, 0, 0]
