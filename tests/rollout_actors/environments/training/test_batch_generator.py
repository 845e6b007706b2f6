"""Batches generated ahead."""

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
        full = "batch 2: 2 .*max_ahead is 1; .*result of 0"
        with pytest.raises(RuntimeError, match=full):
            batches.submit(2, rows(1))
        with pytest.raises(ValueError, match="batch 0 is submitted already"):
            batches.submit(0, rows(1))
        batches.result(0, 60)
        batches.submit(2, rows(1))
        assert batches.result(2, 60).reward == [1.0]
    with pytest.raises(ValueError, match=r"max_ahead: .* 0 or more, .*-1"):
        batches_by(max_ahead=-1)


def test_an_error_of_a_batch_is_delivered_with_its_result_and_the_next_one_goes_on():
    with batches_by() as batches:
        batches.submit(0, [{"no": "question"}])
        batches.submit(1, rows(1))
        with pytest.raises(ValueError, match="neither prompt nor question"):
            batches.result(0, 60)
        assert batches.result(1, 60).reward == [1.0]
        with pytest.raises(ValueError, match=r"batch 0 is not submitted; .*none"):
            batches.result(0, 60)


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
    with pytest.raises(RuntimeError, match=r"batch 0 .*not generated: .*closed"):
        batches.result(0)
    with pytest.raises(RuntimeError, match="batch 1: the generator is closed"):
        batches.submit(1, rows(1))
    batches.close()
