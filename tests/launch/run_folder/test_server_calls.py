"""The calls in a step's plan are those that the pool makes and the servers are asked with."""

from __future__ import annotations

from typing import Any

from fake_server import make_request

from launch.processes.rounds import RoundQueue
from launch.run_folder.steps import server_calls
from rollout_actors.server.messages import InferCall
from shared.seeds import request_seed


def planned(
    *rounds: list[range], devices: tuple[int, ...] = (1, 1)
) -> list[list[tuple[str, int, int, int]]]:
    calls = server_calls(rounds, devices, ("a", "b"), run_seed=17, step=3)
    return [
        [(call["server"], call["first_position"], call["count"], call["seed"]) for call in round_]
        for round_ in calls
    ]


def test_a_call_has_the_seed_of_its_first_request() -> None:
    assert planned([range(4)], [range(4, 7)]) == [
        [("a", 0, 2, request_seed(17, 3, 0)), ("b", 2, 2, request_seed(17, 3, 2))],
        [("a", 4, 2, request_seed(17, 3, 4)), ("b", 6, 1, request_seed(17, 3, 6))],
    ]


def test_where_a_server_s_part_crosses_from_one_learner_rank_to_the_next_it_is_asked_twice() -> (
    None
):
    assert [[call[:3] for call in round_] for round_ in planned([range(3), range(16, 18)])] == [
        [("a", 0, 3), ("b", 16, 2)]
    ]
    assert [[call[:3] for call in round_] for round_ in planned([range(2), range(16, 19)])] == [
        [("a", 0, 2), ("a", 16, 1), ("b", 17, 2)]
    ]


def test_an_empty_round_has_no_calls() -> None:
    assert planned([range(4, 4)]) == [[]]


def test_what_is_planned_is_what_is_asked() -> None:
    ranks, devices = [range(5), range(16, 20)], (1, 3)
    asked: list[Any] = []
    for piece in RoundQueue([5, 4], devices, decode_batch_size=3).take():
        requests = tuple(
            make_request(
                ranks[piece.rank].start + index,
                seed=request_seed(17, 3, ranks[piece.rank].start + index),
            )
            for index in piece.requests
        )
        call = InferCall.of(requests)
        asked.append(("ab"[piece.engine], call.requests[0].position, len(call.requests), call.seed))
    assert planned(ranks, devices=devices) == [asked]
