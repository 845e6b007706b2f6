"""The client over a run's own engines: which one a call goes to, with which seed, how many at a
time, and what becomes of it when it fails or is cancelled.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import MagicMock

import pytest
from environment_support import Talk, generated, rows, user
from scripted_client import ScriptedClient
from scripted_engines import ScriptedEngines, ask, client_over, demo_tokenizer, says, state_at

from rollout_actors.environments.clients.openai import is_rollout_client
from rollout_actors.environments.types import State
from shared.errors import RolloutError, UnreachableError
from shared.seeds import request_seed


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return demo_tokenizer()


def test_the_client_is_rollout_client(tokenizer: Any) -> None:
    assert is_rollout_client(client_over(ScriptedEngines([]), tokenizer))


def test_a_stand_in_that_has_every_attribute_it_is_asked_for_is_no_client_that_is_rollout_client() -> (
    None
):
    client = MagicMock()
    client.chat.completions.create = ScriptedClient(["a", "b"]).chat.completions.create
    assert [generated(Talk(max_turns=1), rows(1), client).state[0]["error"] for _ in range(2)] == [
        None,
        None,
    ]


def test_all_calls_of_a_rollout_go_to_the_engine_of_its_position(tokenizer: Any) -> None:
    engines = ScriptedEngines(lambda _: says(tokenizer, "no"), number=3)
    inputs = [{"question": f"q{i}", "position": 10 + i} for i in range(7)]
    results = generated(Talk(max_turns=3), inputs, client_over(engines, tokenizer))
    assert results.metadata.num_errors == 0
    assert len(engines.requests) == 21
    assert {(request.position, engine) for engine, request in engines.requests} == {
        (10 + i, (10 + i) % 3) for i in range(7)
    }


def test_each_call_has_the_seed_of_its_step_position_and_turn(tokenizer: Any) -> None:
    engines = ScriptedEngines(lambda _: says(tokenizer, "no"), number=2)
    generated(
        Talk(max_turns=3), [{"question": "q", "position": 5}], client_over(engines, tokenizer)
    )
    assert [request.seed for _, request in engines.requests] == [
        request_seed(7, 3, 5, turn) for turn in range(3)
    ]
    assert {
        (request.step, request.position, request.sample_id) for _, request in engines.requests
    } == {(3, 5, "0")}


def test_rollouts_that_do_not_know_their_place_are_numbered_as_they_begin(tokenizer: Any) -> None:
    client = client_over(engines := ScriptedEngines(lambda _: says(tokenizer, "no")), tokenizer)
    for conversation in [client.conversation(state_at(None)) for _ in range(3)]:
        ask(conversation, [user("hello")])
    assert [request.position for _, request in engines.requests] == [0, 1, 2]


def test_seeds_do_not_depend_on_the_order_in_which_rollouts_begin(tokenizer: Any) -> None:
    class Late(Talk):
        async def setup_state(self, state: State) -> State:
            await asyncio.sleep(0.01 * ((3 * state["example_id"]) % 5))
            return state

    def sampled(environment: Talk, **bounds: Any) -> tuple[list[str], dict[str, tuple[int, int]]]:
        engines = ScriptedEngines(lambda request: says(tokenizer, f"no {request.seed}"), number=3)
        results = generated(
            environment,
            [{"question": f"q{i}"} for i in range(5)],
            client_over(engines, tokenizer),
            **bounds,
        )
        assert results.metadata.num_errors == 0
        begun = [request.sample_id for _, request in engines.requests]
        return begun, {
            f"{request.sample_id} {len(request.prompt_token_ids)}": (request.seed, engine)
            for engine, request in engines.requests
        }

    (one, of_one), (other, of_other) = (
        sampled(Late(max_turns=2)),
        sampled(Talk(max_turns=2), max_concurrent=1),
    )
    assert one != other == [str(i) for i in range(5) for _ in range(2)]
    assert of_one == of_other
    assert [of_one[key][0] for key in sorted(of_one)] == [
        request_seed(7, 3, place, turn) for place in range(5) for turn in range(2)
    ]


def test_rollouts_of_one_row_have_seeds_of_their_own_and_the_callers_rows_no_position(
    tokenizer: Any,
) -> None:
    given = [{"question": "q"}, {"question": "r"}]
    client = client_over(engines := ScriptedEngines(lambda _: says(tokenizer, "no")), tokenizer)
    asyncio.run(
        Talk(max_turns=1, dataset=given).evaluate(
            client, "m", rollouts_per_example=3, use_tqdm=False
        )
    )
    assert {request.seed for _, request in engines.requests} == {
        request_seed(7, 3, place, 0) for place in range(6)
    }
    assert given == [{"question": "q"}, {"question": "r"}]


@pytest.mark.parametrize(
    ("positions", "told"),
    [
        (
            (0, 1, 0),
            (
                "position: inputs 0 and 2 both have 0, and their seeds would be the same; give"
                " every row a place of its own in the step, or leave the column out"
            ),
        ),
        ((4, 5, None, 2), "inputs 2 and 3 both have 2"),
        ((0, "front"), "of input 1 must be a whole number from 0, got 'front'"),
        ((True,), "got True"),
        ((-1,), "got -1"),
    ],
)
def test_places_that_two_rollouts_have_and_what_is_no_place_are_refused_before_the_first_call(
    tokenizer: Any, positions: Any, told: str
) -> None:
    given = [
        {"question": "q"} | ({} if position is None else {"position": position})
        for position in positions
    ]
    engines = ScriptedEngines([])
    with pytest.raises(ValueError, match=told):
        generated(Talk(), given, client_over(engines, tokenizer))
    assert engines.requests == []


def test_a_column_of_positions_is_nothing_to_other_clients() -> None:
    results = generated(
        Talk(max_turns=1), [{"question": "q", "position": "front"}] * 2, ScriptedClient(["a", "b"])
    )
    assert results.metadata.num_errors == 0


@pytest.mark.parametrize(
    "failure",
    [RolloutError("its process has ended", actor="actor-0", phase="generate"), ValueError("mine")],
    ids=repr,
)
def test_what_an_engine_fails_with_is_asked_of_nobody_again(
    tokenizer: Any, failure: Exception
) -> None:
    engines = ScriptedEngines([says(tokenizer, "a"), failure], number=2)
    (state,) = generated(Talk(max_turns=2), rows(1), client_over(engines, tokenizer)).state
    assert state["error"] == f"{type(failure).__name__}: {failure}" and state["reward"] == 0.0
    assert [engine for engine, _ in engines.requests] == [0, 0]


def test_what_an_engine_that_cannot_be_reached_was_asked_is_asked_of_the_next_one_with_the_same_seed_and_prompt(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    gone = UnreachableError("failed 2 times", actor="server-2", phase="generate")
    engines = ScriptedEngines([says(tokenizer, "a"), gone, gone, says(tokenizer, "b")], number=3)
    (state,) = generated(
        Talk(max_turns=2), [{"question": "q", "position": 5}], client_over(engines, tokenizer)
    ).state
    assert state["error"] is None
    assert [engine for engine, _ in engines.requests] == [2, 2, 0, 1]
    _, (_, first), (_, again), (_, last) = engines.requests
    assert first == again == last and last.seed == request_seed(7, 3, 5, 1)
    assert "failed 2 times; the next engine is asked for sample 0" in caplog.text


def test_where_no_engine_can_be_reached_each_is_asked_once_and_the_rollout_says_so(
    tokenizer: Any,
) -> None:
    engines = ScriptedEngines(
        [UnreachableError(f"failed {i}", actor=f"server-{i}", phase="generate") for i in range(3)],
        number=3,
    )
    (state,) = generated(Talk(max_turns=2), rows(1), client_over(engines, tokenizer)).state
    assert (
        state["error"] == "UnreachableError: generate on server-2: failed 2"
        and len(engines.requests) == 3
    )


def test_no_engine_has_more_requests_at_a_time_than_it_may(tokenizer: Any) -> None:
    engines = ScriptedEngines(lambda _: says(tokenizer, "no", delay_s=0.005), number=2)
    client = client_over(engines, tokenizer, max_under_way=3)
    # Twice: each `generate` of a test runs an event loop of its own.
    for _ in range(2):
        results = generated(Talk(max_turns=2), rows(20), client)
        assert results.metadata.num_errors == 0
    assert engines.most_under_way == [3, 3]


@pytest.mark.slow
def test_the_wait_for_a_turn_at_an_engine_is_not_in_the_timing(tokenizer: Any) -> None:
    client = client_over(
        ScriptedEngines(lambda _: says(tokenizer, "no", delay_s=0.1)), tokenizer, max_under_way=1
    )
    results = generated(Talk(max_turns=1), rows(8), client)
    spent_ms = [state["timing"]["generation_ms"] for state in results.state]
    assert min(spent_ms) >= 95
    assert sum(spent_ms) < 2.5 * results.metadata.time_ms, (
        "one at a time, it is the time that there was; with the waits four and a half times"
    )


def test_the_engine_is_told_when_a_rollout_is_cancelled(tokenizer: Any) -> None:
    engines = ScriptedEngines(lambda _: says(tokenizer, "no", delay_s=60.0))
    client = client_over(engines, tokenizer, max_under_way=1)

    async def cancelled_then_asked() -> None:
        tasks = [
            asyncio.create_task(
                Talk().rollout({"prompt": [user("q")], "example_id": i, "task": "t"}, client, "m")
            )
            for i in range(2)
        ]
        async with asyncio.timeout(60):
            while engines.num_under_way != [1]:
                await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in ended] == [asyncio.CancelledError] * 2

    asyncio.run(cancelled_then_asked())
    # the other one still waited for its turn
    assert len(engines.requests) == engines.num_cancelled == 1
    assert engines.num_under_way == [0]


def test_cancelling_generate_aborts_every_request_and_those_that_wait_are_never_asked(
    tokenizer: Any,
) -> None:
    engines = ScriptedEngines(lambda _: says(tokenizer, "no", delay_s=60.0), number=2)
    client = client_over(engines, tokenizer, max_under_way=3)

    async def cancelled() -> None:
        task = asyncio.create_task(
            Talk().generate([{"question": f"q{i}"} for i in range(20)], client, "m", use_tqdm=False)
        )
        while sum(engines.num_under_way) < 6:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    # On two loops, one after the other: what one leaves behind keeps nobody from asking on the
    # next.
    for times in (1, 2):
        asyncio.run(asyncio.wait_for(cancelled(), 20))
        assert len(engines.requests) == engines.num_cancelled == 6 * times
        assert engines.num_under_way == [0, 0]


def test_a_client_may_be_used_on_several_event_loops_at_once(tokenizer: Any) -> None:
    client = client_over(
        ScriptedEngines(lambda _: says(tokenizer, "no", delay_s=0.001)), tokenizer, max_under_way=1
    )
    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(generated, Talk(max_turns=2), rows(10), client) for _ in range(3)]
        assert [one.result(timeout=60).metadata.num_errors for one in running] == [0, 0, 0]


@pytest.mark.slow
def test_waits_of_several_rollouts_at_once_inside_one_are_counted_once(tokenizer: Any) -> None:
    class Gathers(Talk):
        async def setup_state(self, state: State) -> State:
            await asyncio.gather(
                *(
                    Talk(max_turns=1).rollout(dict(state["input"]), self.client, "m")
                    for _ in range(8)
                )
            )
            return state

    environment = Gathers(max_turns=1)
    environment.client = client_over(
        ScriptedEngines(lambda _: says(tokenizer, "no", delay_s=0.02)), tokenizer, max_under_way=1
    )
    (state,) = generated(environment, rows(1), environment.client).state
    assert state["error"] is None and state["timing"]["generation_ms"] > 0.0
