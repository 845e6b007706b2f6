"""How requests are cut (decisions 5, 15 and 16; spec rollout-matching-sft, "vLLM server
mode derives per-rank request chunking").
"""

from __future__ import annotations

from itertools import product

import pytest

from shared.chunking import (
    RoundPart,
    chunk_size,
    cut_rounds,
    rank_rounds,
    rank_share,
    round_chunk,
    round_parts,
    split_contiguous,
    split_over,
    split_weighted,
)


def joined(parts):
    return [i for part in parts for i in part]


def test_vllm_server_mode_fails_fast_when_cap_is_infeasible():
    """decode_batch_size 1, S = 2 and W = 4, on one server or two: guidance to add devices, to use
    fewer ranks or to raise the cap.
    """
    message = (
        "decode_batch_size 1 x 2 rollout devices .* 4 learner ranks; .*decode_batch_size to at"
        " least 2, .*devices, .*fewer learner ranks$"
    )
    for world_sizes in ([2], [1, 1]):
        with pytest.raises(ValueError, match=message):
            chunk_size(1, world_sizes, 4)


def test_a_rank_asks_for_its_part_of_what_the_devices_decode_at_a_time():
    for cap, num_devices, num_ranks in product(range(1, 7), range(1, 6), range(1, 6)):
        if cap * num_devices >= num_ranks:
            chunk = chunk_size(cap, [1] * num_devices, num_ranks)
            assert chunk * num_ranks <= cap * num_devices < (chunk + 1) * num_ranks
            assert chunk == chunk_size(cap, [num_devices], num_ranks)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        *(
            (chunk_size, arguments, "decode_batch_size")
            for arguments in (
                (4, [], 1),
                (4, [1], 0),
                (4, [1], -1),
                (0, [1], 1),
                (-1, [2], 1),
                (4, [2, 0], 1),
                (4, [-1, 3], 1),
            )
        ),
        *(
            (rank_share, (total, ranks, rank), f"cannot give rank {rank} of {ranks} its part of")
            for total, ranks, rank in ((-3, 2, 0), (-1, 1, 0), (3, 0, 0), (3, 2, 2), (3, 2, -1))
        ),
        (split_contiguous, (-1, 2), "^cannot split "),
        (split_contiguous, (3, 0), "^cannot split "),
        (split_weighted, (3, []), "^cannot split "),
        (split_weighted, (3, [1, 0]), "^cannot split "),
        (rank_rounds, ([3], 0), "^cannot split "),
        (rank_rounds, ([-1], 2), "^cannot split "),
    ],
)
def test_counts_that_cannot_be_shared_or_split_are_refused(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)


def test_the_shares_of_the_ranks_are_contiguous_and_the_first_have_one_more():
    for total, num_ranks in product(range(20), range(1, 6)):
        shares = [rank_share(total, num_ranks, rank) for rank in range(num_ranks)]
        assert joined(shares) == list(range(total))
        sizes = [len(range(rank, total, num_ranks)) for rank in range(num_ranks)]
        assert [len(share) for share in shares] == sizes


def test_the_shares_of_the_ranks_have_whole_groups_and_the_first_have_one_more():
    for size, groups, num_ranks in product(range(1, 6), range(8), range(1, 5)):
        total = size * groups
        shares = [rank_share(total, num_ranks, rank, together=size) for rank in range(num_ranks)]
        assert joined(shares) == list(range(total))
        of_groups = [rank_share(groups, num_ranks, rank) for rank in range(num_ranks)]
        assert shares == [range(part.start * size, part.stop * size) for part in of_groups]


def test_a_total_that_is_no_whole_groups_is_a_programmers_error():
    """The configuration is refused before (`shared.config.checks.algorithm`)."""
    with pytest.raises(AssertionError, match=r"30 .*multiple .* 8"):
        rank_share(30, 2, 0, together=8)


def test_a_round_is_split_over_the_servers_in_order_and_the_last_may_get_fewer_or_none():
    assert split_contiguous(7, 3) == [range(3), range(3, 6), range(6, 7)]
    assert split_contiguous(2, 4) == [range(1), range(1, 2), range(2, 2), range(2, 2)]
    for n, num_servers in product(range(20), range(1, 6)):
        parts = split_contiguous(n, num_servers)
        assert joined(parts) == list(range(n))
        assert len(parts) == num_servers
        assert max(map(len, parts)) == -(-n // num_servers)


def test_a_weighted_split_is_proportional_to_one_and_ties_go_to_the_lower_index():
    assert split_weighted(5, [1, 1]) == [range(3), range(3, 5)]
    assert split_weighted(7, [1, 2, 4]) == [range(1), range(1, 3), range(3, 7)]
    for n, weights in product(range(20), ([1], [1, 1, 1], [3, 1], [2, 5, 1])):
        parts = split_weighted(n, weights)
        assert joined(parts) == list(range(n))
        for part, weight in zip(parts, weights, strict=True):
            assert abs(len(part) - n * weight / sum(weights)) < 1


def test_engines_of_one_size_share_evenly_and_others_by_their_devices():
    assert split_over(10, (2, 2, 2)) == split_contiguous(10, 3)
    by_devices = split_over(10, (1, 2, 2))
    assert by_devices == split_weighted(10, (1, 2, 2)) == [range(2), range(2, 6), range(6, 10)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rounds_are_the_fewest_of_whole_groups_in_which_no_rank_has_more_than_its_chunk(size):
    for first, second, room in product(range(14), range(14), range(1, 6)):
        shares = [first * size, second * size]
        rounds = rank_rounds(shares, room * size, together=size)
        assert len(rounds) == -(-max(first, second) // room)
        for rank, share in enumerate(shares):
            assert joined(round_[rank] for round_ in rounds) == list(range(share))
        parts = [part for round_ in rounds for part in round_]
        assert all(part.start % size == part.stop % size == 0 for part in parts)
        assert all(len(part) <= room * size for part in parts)
        if size == 1:
            assert rounds == rank_rounds(shares, room)


def test_rounds_of_ranks_are_as_even_as_their_shares():
    assert rank_rounds([32], 18) == [[range(16)], [range(16, 32)]]
    assert rank_rounds([5, 4], 2) == [
        [range(2), range(2)],
        [range(2, 4), range(2, 4)],
        [range(4, 5), range(4, 4)],
    ]
    assert rank_rounds([24, 16], 8, together=8) == [
        [range(8), range(8)],
        [range(8, 16), range(8, 16)],
        [range(16, 24), range(16, 16)],
    ]
    assert rank_rounds([0, 0], 3) == rank_rounds([], 3) == []


@pytest.mark.parametrize(
    ("decode_batch_size", "chunk"), [(1, 8), (2, 8), (3, 8), (5, 8), (6, 16), (8, 24), (100, 296)]
)
def test_a_rank_asks_for_as_many_whole_groups_as_there_is_room_for_and_for_one_at_least(
    decode_batch_size, chunk
):
    assert round_chunk(decode_batch_size, [1, 1, 1], 1, together=8) == chunk
    assert round_chunk(2 * decode_batch_size, [1, 1, 1], 2, together=8) == chunk
    without_groups = chunk_size(decode_batch_size, [1, 2], 2)
    assert round_chunk(decode_batch_size, [1, 2], 2, together=1) == without_groups


def test_a_group_does_not_make_up_for_devices_that_are_fewer_than_the_learner_ranks():
    with pytest.raises(ValueError, match=r"decode_batch_size 1 x 2 .* 4 learner"):
        round_chunk(1, [2], 4, together=8)


def test_a_step_is_cut_into_rounds_of_each_ranks_own_requests_in_order():
    assert cut_rounds(["abcde", "vwxy"], 2) == [
        [["a", "b"], ["v", "w"]],
        [["c", "d"], ["x", "y"]],
        [["e"], []],
    ]
    assert cut_rounds([[], []], 3) == []


def test_a_round_is_shared_out_in_rank_order_and_a_part_that_crosses_ranks_is_two():
    assert round_parts([3, 2], (1, 1)) == [RoundPart(0, 0, range(3)), RoundPart(1, 1, range(2))]
    assert round_parts([2, 3], (1, 1)) == [
        RoundPart(0, 0, range(2)),
        RoundPart(0, 1, range(1)),
        RoundPart(1, 1, range(1, 3)),
    ]
    assert round_parts([1, 0], (1, 3)) == [RoundPart(1, 0, range(1))]
