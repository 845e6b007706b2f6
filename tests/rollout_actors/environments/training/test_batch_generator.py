"""Batches generated ahead."""

import asyncio
import threading
import time

import pytest
from environment_support import rows, rubric_of, said_the_answer
from scripted_client import ScriptedClient

from rollout_actors.environments.lifecycle import cleanup
from rollout_actors.environments.multi_turn import SingleTurnEnv
from rollout_actors.environments.training.batch_generator import AsyncBatchGenerator


def echo(call):
    return call.text


def batches_by(client=None, **arguments):
    environment = SingleTurnEnv(rubric=rubric_of(said_the_answer))
    return AsyncBatchGenerator(environment, client or ScriptedClient(echo), "model", **arguments)


def wait_until(holds):
    deadline_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def test_batches_are_generated_ahead_in_the_order_of_their_submission_and_fetched_in_any_order():
    client = ScriptedClient(echo, delay_s=0.02)
    with batches_by(client, max_ahead=2) as batches:
        batches.submit(7, rows(2))
        batches.submit(3, [{"question": "later", "answer": "later"}])
        batches.submit(5, rows(1))
        wait_until(lambda: client.num_calls == 4)
        assert [batches.result(number, 60).reward for number in (3, 5, 7)] == [
            [1.0],
            [1.0],
            [1.0] * 2,
        ]
    assert [call.text for call in client.calls] == ["q0", "q1", "later", "q0"]
    assert client.most_under_way == 2


def test_only_a_bounded_number_of_batches_is_ahead_and_a_result_makes_room():
    with batches_by(max_ahead=1) as batches:
        batches.submit(0, rows(1))
        batches.submit(1, rows(1))
        full = "batch 2: 2 are submitted and max_ahead is 1; fetch the result of 0 first"
        with pytest.raises(RuntimeError, match=full):
            batches.submit(2, rows(1))
        with pytest.raises(ValueError, match="batch 0 is submitted already"):
            batches.submit(0, rows(1))
        batches.result(0, 60)
        batches.submit(2, rows(1))
        assert batches.result(2, 60).reward == [1.0]
    with pytest.raises(ValueError, match="max_ahead: must be 0 or more, got -1"):
        batches_by(max_ahead=-1)


def test_an_error_of_a_batch_is_delivered_with_its_result_and_the_next_one_goes_on():
    with batches_by() as batches:
        batches.submit(0, [{"no": "question"}])
        batches.submit(1, rows(1))
        with pytest.raises(ValueError, match="neither prompt nor question"):
            batches.result(0, 60)
        assert batches.result(1, 60).reward == [1.0]
        with pytest.raises(ValueError, match="batch 0 is not submitted; there are none"):
            batches.result(0, 60)


def test_a_result_that_is_not_there_in_time_can_be_asked_for_again():
    is_asked_again = threading.Event()

    async def late(call):
        while not is_asked_again.is_set():
            await asyncio.sleep(0.01)
        return call.text

    with batches_by(ScriptedClient(late)) as batches:
        batches.submit(0, rows(1))
        problem = r"batch 0 is not there after 0.05 s; look whether the endpoint answers"
        with pytest.raises(TimeoutError, match=problem):
            batches.result(0, 0.05)
        is_asked_again.set()
        assert batches.result(0, 60).reward == [1.0]


def test_arguments_of_generate_are_passed_on():
    client = ScriptedClient(echo, delay_s=0.01)
    arguments = {"sampling_args": {"temperature": 0.5}, "max_concurrent": 1}
    with batches_by(client, score_rollouts=False, **arguments) as batches:
        batches.submit(0, rows(3))
        assert batches.result(0, 60).reward == [None] * 3
    assert client.most_under_way == 1
    assert client.calls[0].arguments == {"temperature": 0.5}


def test_it_works_while_the_callers_own_event_loop_runs():
    async def use():
        with batches_by() as batches:
            batches.submit(0, rows(2))
            return await asyncio.to_thread(batches.result, 0, 60)

    assert asyncio.run(use()).reward == [1.0, 1.0]


def test_closing_cancels_what_is_under_way_and_its_rollouts_clean_up():
    released, refused = [], []

    class Held(SingleTurnEnv):
        @cleanup
        def release(self, state):
            released.append(state["example_id"])

    client = ScriptedClient(echo, delay_s=60)
    batches = AsyncBatchGenerator(Held(), client, "model")
    batches.submit(0, rows(2))

    def waits():
        with pytest.raises(RuntimeError, match="closed"):
            batches.result(0, 60)
        refused.append(True)

    thread = threading.Thread(target=waits)
    thread.start()
    wait_until(lambda: client.num_under_way == 2)
    batches.close(timeout_s=60)
    thread.join(60)
    assert (sorted(released), client.num_cancelled, refused) == ([0, 1], 2, [True])
    with pytest.raises(RuntimeError, match="batch 0 was not generated: the generator is closed"):
        batches.result(0)
    with pytest.raises(RuntimeError, match="batch 1: the generator is closed"):
        batches.submit(1, rows(1))
    batches.close()


def test_closing_has_a_timeout_that_says_what_to_look_for():
    release = threading.Event()

    class Stuck(SingleTurnEnv):
        @cleanup
        async def wait(self, state):
            await asyncio.to_thread(release.wait, 60)

    client = ScriptedClient(echo, delay_s=60)
    batches = AsyncBatchGenerator(Stuck(), client, "model")
    batches.submit(0, rows(1))
    wait_until(lambda: client.num_under_way)
    problem = "did not end within 0.1 s; look for a cleanup or a reward function that hangs"
    with pytest.raises(TimeoutError, match=problem):
        batches.close(timeout_s=0.1)
    release.set()
    batches.close(timeout_s=60)
