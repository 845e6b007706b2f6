"""Batches generated ahead."""

import asyncio
import threading
import time

import pytest
from environment_support import rows, rubric_of, said_the_answer
from scripted_client import ScriptedClient

from rollout_actors.environments.batch_generator import AsyncBatchGenerator
from rollout_actors.environments.lifecycle import cleanup
from rollout_actors.environments.multi_turn import SingleTurnEnv


def echo(call):
    return call.text


def environment():
    return SingleTurnEnv(rubric=rubric_of(said_the_answer))


def test_results_come_by_batch_number_in_whatever_order_they_are_fetched():
    with AsyncBatchGenerator(environment(), ScriptedClient(echo), "model", max_ahead=2) as batches:
        for number in range(3):
            batches.submit(number, rows(number + 1))
        assert [len(batches.result(number, 60).reward) for number in (2, 0, 1)] == [3, 1, 2]


def test_batches_are_generated_ahead_of_the_one_who_uses_them():
    client = ScriptedClient(echo)
    with AsyncBatchGenerator(environment(), client, "model") as batches:
        batches.submit(0, rows(2))
        batches.submit(1, rows(3))
        deadline_s = time.monotonic() + 60
        while client.num_calls < 5 and time.monotonic() < deadline_s:
            time.sleep(0.005)
        assert client.num_calls == 5


def test_batches_are_generated_one_after_another_in_the_order_of_their_submission():
    asked, client = (
        [],
        ScriptedClient(lambda call: asked.append(call.text) or call.text, delay_s=0.02),
    )
    with AsyncBatchGenerator(environment(), client, "model", max_ahead=1) as batches:
        batches.submit(7, rows(2))
        batches.submit(3, [{"question": "later", "answer": "later"}])
        assert batches.result(3, 60).reward == [1.0]
        assert asked == ["q0", "q1", "later"] and client.most_under_way == 2


def test_only_a_bounded_number_of_batches_is_ahead_and_a_result_makes_room():
    with AsyncBatchGenerator(environment(), ScriptedClient(echo), "model", max_ahead=1) as batches:
        batches.submit(0, rows(1))
        batches.submit(1, rows(1))
        with pytest.raises(
            RuntimeError,
            match="batch 2: 2 are submitted and max_ahead is 1; fetch the result of 0 first",
        ):
            batches.submit(2, rows(1))
        batches.result(0, 60)
        batches.submit(2, rows(1))
        assert batches.result(2, 60).reward == [1.0]


def test_an_error_of_a_batch_is_delivered_with_its_result_and_the_next_one_goes_on():
    with AsyncBatchGenerator(environment(), ScriptedClient(echo), "model") as batches:
        batches.submit(0, [{"no": "question"}])
        batches.submit(1, rows(1))
        with pytest.raises(ValueError, match="neither prompt nor question"):
            batches.result(0, 60)
        assert batches.result(1, 60).reward == [1.0]
        with pytest.raises(ValueError, match="batch 0 is not submitted; there are none"):
            batches.result(0, 60)


def test_a_number_is_used_once_at_a_time():
    with AsyncBatchGenerator(environment(), ScriptedClient(echo), "model") as batches:
        batches.submit(0, rows(1))
        with pytest.raises(ValueError, match="batch 0 is submitted already"):
            batches.submit(0, rows(1))


def test_a_result_that_is_not_there_in_time_can_be_asked_for_again():
    is_asked_again = threading.Event()

    async def late(call):
        while not is_asked_again.is_set():
            await asyncio.sleep(0.01)
        return call.text

    with AsyncBatchGenerator(environment(), ScriptedClient(late), "model") as batches:
        batches.submit(0, rows(1))
        with pytest.raises(
            TimeoutError,
            match=r"batch 0 is not there after 0.05 s; look whether the endpoint answers",
        ):
            batches.result(0, 0.05)
        is_asked_again.set()
        assert batches.result(0, 60).reward == [1.0]


def test_arguments_of_generate_are_passed_on():
    client = ScriptedClient(echo, delay_s=0.01)
    with AsyncBatchGenerator(
        environment(),
        client,
        "model",
        sampling_args={"temperature": 0.5},
        max_concurrent=1,
        score_rollouts=False,
    ) as batches:
        batches.submit(0, rows(3))
        assert batches.result(0, 60).reward == [None] * 3
    assert client.most_under_way == 1 and client.calls[0].arguments == {"temperature": 0.5}


def test_it_works_while_the_callers_own_event_loop_runs():
    async def used():
        with AsyncBatchGenerator(environment(), ScriptedClient(echo), "model") as batches:
            batches.submit(0, rows(2))
            return await asyncio.to_thread(batches.result, 0, 60)

    assert asyncio.run(used()).reward == [1.0, 1.0]


def test_closing_cancels_what_is_under_way_and_its_rollouts_clean_up():
    released = []

    class Held(SingleTurnEnv):
        @cleanup
        def release(self, state):
            released.append(state["example_id"])

    client = ScriptedClient(echo, delay_s=60)
    batches = AsyncBatchGenerator(Held(), client, "model")
    batches.submit(0, rows(2))
    while client.num_under_way < 2:
        time.sleep(0.002)
    batches.close(timeout_s=60)
    assert sorted(released) == [0, 1] and client.num_cancelled == 2
    with pytest.raises(RuntimeError, match="batch 0 was not generated: the generator is closed"):
        batches.result(0)
    with pytest.raises(RuntimeError, match="batch 1: the generator is closed"):
        batches.submit(1, rows(1))
    batches.close()


def test_a_result_that_is_waited_for_is_told_of_the_closing():
    client = ScriptedClient(echo, delay_s=60)
    batches = AsyncBatchGenerator(environment(), client, "model")
    batches.submit(0, rows(1))
    told = []

    def waits():
        with pytest.raises(RuntimeError, match="closed"):
            batches.result(0, 60)
        told.append(True)

    thread = threading.Thread(target=waits)
    thread.start()
    while not client.num_under_way:
        time.sleep(0.002)
    batches.close(timeout_s=60)
    thread.join(60)
    assert told == [True]


def test_closing_has_a_timeout_that_says_what_to_look_for():
    release = threading.Event()

    class Stuck(SingleTurnEnv):
        @cleanup
        async def wait(self, state):
            await asyncio.to_thread(release.wait, 60)

    client = ScriptedClient(echo, delay_s=60)
    batches = AsyncBatchGenerator(Stuck(), client, "model")
    batches.submit(0, rows(1))
    while not client.num_under_way:
        time.sleep(0.002)
    with pytest.raises(
        TimeoutError,
        match=r"did not end within 0.1 s; look for a cleanup or a reward function that hangs",
    ):
        batches.close(timeout_s=0.1)
    release.set()
    batches.close(timeout_s=60)


def test_a_bound_is_not_negative():
    with pytest.raises(ValueError, match="max_ahead: must be 0 or more, got -1"):
        AsyncBatchGenerator(environment(), ScriptedClient(echo), "model", max_ahead=-1)
