"""A learner rank and the shell around it, without Ray."""

from learner.actor import LearnerRank
from shared.sent_requests import PictureShelf


def test_requests_leave_in_order_part_by_part():
    rank = LearnerRank(PictureShelf(list), list)
    assert rank.begin([f"p{i}" for i in range(5)]) == 5
    assert [rank.requests(0, 2).requests, rank.requests(2, 5).requests] == [
        ("p0", "p1"),
        ("p2", "p3", "p4"),
    ]
    assert rank.begin(["h7"]) == 1
    assert rank.requests(0, 1).requests == ("h7",)
