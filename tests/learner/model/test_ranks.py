"""The group of the learner ranks: sums, waits that end, and one process group that is nobody else's
(decision 14).
"""

import re
import socket

import pytest
import rank_jobs
import torch
from rank_support import RankProcesses

from learner.model.ranks import LearnerDevice, RankTopology, Rendezvous, join_ranks
from shared.errors import CollectiveError, LearnerError

pytestmark = pytest.mark.slow

CPU = LearnerDevice(torch.device("cpu"))


@pytest.fixture(scope="module")
def collectives(two_ranks):
    return two_ranks.run(rank_jobs.collectives)


def test_counts_are_summed_and_compared_over_ranks(collectives):
    for rank in collectives:
        assert (rank["sum"], rank["max"]) == (3, 10)
        assert rank["all"] == [2**62, 2**62 + 1], "in rank order, to the last bit"
        assert rank["same"] is None
        assert rank["any"] == [True, True, False]
        assert rank["different"] == 1, "the first of the values that differ"
        assert rank["met"] is True, "a flag of one rank is everybody's"


def test_messages_between_ranks_arrive_in_their_order(collectives):
    assert [rank["exchanged"] for rank in collectives] == [[b"back"], [b"first", b"second"]]


def test_rows_are_shared_and_wait_until_there_is_one_for_every_rank(two_ranks):
    calls = [([3, 0], False), ([0, 2], False), ([0, 0], False), ([2, 0], True), ([0, 0], True)]
    first, second = two_ranks.run(rank_jobs.share_rows, calls)
    # Row 2 moves to rank 1. Row 1 waits for rank 1's next row, and row 4 for the last rows.
    assert first == [[0], [1], [], [5, 6], []]
    assert second == [[2], [3], [], [4], []]


def test_gradients_are_summed_in_float32_and_every_rank_holds_the_same_bits(collectives):
    columns = [rank[time] for time in ("before", "after") for rank in collectives]
    for a, b, after, other in zip(*columns, strict=True):
        assert torch.equal(after, other)
        assert torch.equal(after, (a.float() + b.float()).to(a.dtype))


def test_waiting_and_summing_are_timed_apart(collectives):
    for rank in collectives:
        (wait, waited_from, waited_to), (reduce, reduced_from, reduced_to) = rank["times"]
        assert (wait, reduce) == ("wait for ranks", "reduce gradients")
        assert waited_from <= waited_to <= reduced_from < reduced_to


def test_the_group_leaves_torchs_default_group_to_others(collectives):
    assert not any(rank["default_group"] for rank in collectives)


def test_the_rendezvous_is_bound_to_its_address_alone_before_it_is_published():
    rendezvous = Rendezvous("127.0.0.1")
    host, port = rendezvous.endpoint.split(":")
    assert host == "127.0.0.1"
    socket.create_connection((host, int(port)), timeout=5).close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", int(port)), timeout=5)


def test_one_rank_asks_nobody():
    place = RankTopology("rollmatch_gloo", ())
    ranks = join_ranks(place, None, CPU, timeout_s=1.0, num_shards=1)
    assert (ranks.rank, ranks.world_size) == (0, 1)
    assert ranks.any_of([True, False]) == [True, False]
    assert (ranks.sum(3), ranks.max(3), ranks.all_of(3)) == (3, 3, [3])
    assert ranks.first_difference([1]) is None
    assert ranks.meet(False) is False
    assert ranks.pop_spans() == []


def test_a_rank_that_does_not_come_is_missed_with_the_address_and_the_key():
    rendezvous = Rendezvous("127.0.0.1")
    place = RankTopology("rollmatch_gloo", (), rank=0, world_size=2, rendezvous=rendezvous.endpoint)
    message = (
        rf"rank 0 of 2: no answer from the other learner ranks at {rendezvous.endpoint} after"
        r" timeouts\.learn_s = 1 s; "
    )
    with pytest.raises(CollectiveError, match=message):
        join_ranks(place, rendezvous, CPU, timeout_s=1.0, num_shards=1)


def test_a_rank_whose_process_ends_is_missed_at_once_by_the_others():
    processes = RankProcesses(2)
    try:
        error, ended = processes.outcomes(rank_jobs.ends_itself_on_rank_1)
    finally:
        processes.close()
    assert isinstance(ended, EOFError)
    assert type(error) is CollectiveError
    assert error.phase == "finish_step"
    told = (
        "rank 0 of 2: another rank did not answer within timeouts.learn_s = 120 s, or its connection"
        " broke; look at the first error of the other ranks"
    )
    assert told in str(error)


def test_errors_of_several_ranks_say_which_rank_they_are_of(two_ranks, rank_config):
    first, second = two_ranks.outcomes(rank_jobs.not_finite, rank_config(learner__world_size=2))
    for rank, error in enumerate((first, second)):
        assert type(error) is LearnerError, (
            "the sum is the same on every rank, and so is what becomes of it"
        )
        assert error.phase == "update"
        assert re.search(rf"rank {rank} of 2: step 2: .*norm is nan\b", str(error))
