"""The thin shell around a rank, without Ray."""

from types import SimpleNamespace

from learner.actor import LearnerActor


def test_requests_leave_in_order_part_by_part():
    rank = LearnerActor()
    rank._learner = SimpleNamespace(
        next_requests=lambda plan: [f"{plan}{i}" for i in range(5)],
        held_out_requests=lambda step: [f"h{step}"],
    )
    assert rank.begin("next_requests", "p") == 5
    assert [rank.requests(0, 2).requests, rank.requests(2, 5).requests] == [
        ("p0", "p1"),
        ("p2", "p3", "p4"),
    ]
    assert rank.begin("held_out_requests", 7) == 1
    assert rank.requests(0, 1).requests == ("h7",)
