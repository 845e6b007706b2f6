"""The thin shell around a rank, without Ray."""

from types import SimpleNamespace

from learner.actor import LearnerActor


def test_requests_leave_in_order_part_by_part_each_as_an_object_of_its_own():
    rank = LearnerActor()
    rank._learner = SimpleNamespace(next_requests=lambda plan: [f"{plan}{i}" for i in range(5)], held_out_requests=lambda step: [f"h{step}"])
    assert rank.next_requests("p") == 5
    assert [rank.requests(0, 2), rank.requests(2, 4), rank.requests(4, 5)] == [["p0", "p1"], ["p2", "p3"], "p4"]
    # They hold the pictures of a whole step.
    assert not rank._requests
    assert rank.held_out_requests(7) == 1
    assert rank.requests(0, 1) == "h7"
