"""Split a step's requests into rounds, and rounds over engines (decisions 5, 15 and 16).

All engines generate a *round* at the same time; a *share* is one engine's part of it. A learner
rank's part of a step is also called its share. `cut_past` cuts the weights of a sync into buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

T = TypeVar("T")


def split_contiguous(n: int, num_servers: int) -> list[range]:
    """Split n requests over servers: each gets `ceil(n / num_servers)` until no request is left.

    So the last server with requests may get fewer than the others, and later servers get none. The
    ranges are contiguous. Raises ValueError if `n` is negative or there is no server.

    Example: 4 requests over 3 servers are `range(0, 2)`, `range(2, 4)` and `range(4, 4)`.
    """
    if n < 0 or num_servers < 1:
        raise ValueError(
            f"cannot split {n} requests over {num_servers} servers; use n >= 0 and at least"
            " one server"
        )
    size = -(-n // num_servers)
    return [range(min(i * size, n), min((i + 1) * size, n)) for i in range(num_servers)]


def split_weighted(n: int, weights: Sequence[int]) -> list[range]:
    """Split n requests into contiguous ranges, in proportion to `weights`.

    Each size is rounded down. Then the ranges with the largest remainders get one request more; of
    equal remainders the first. Raises ValueError for negative `n`, and for weights below 1.

    Example: 5 requests with weights 1 and 2 are `range(0, 2)` and `range(2, 5)`.
    """
    if n < 0 or not weights or min(weights) < 1:
        raise ValueError(
            f"cannot split {n} requests by {list(weights)}; use n >= 0, weights above 0"
        )
    total = sum(weights)
    counts = [n * weight // total for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(n * weights[i] % total), i))
    for i in by_remainder[: n - sum(counts)]:
        counts[i] += 1
    ends = list(accumulate(counts))
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def split_over(n: int, devices: Sequence[int]) -> list[range]:
    """Split a round of n requests over engines with these numbers of devices.

    Engines with more devices get proportionally more requests (`split_weighted`). If all numbers
    are equal, the requests are split by `split_contiguous`.
    """
    if len(set(devices)) == 1:
        return split_contiguous(n, len(devices))
    return split_weighted(n, devices)


def rank_share(total: int, world_size: int, rank: int, *, together: int = 1) -> range:
    """Return the contiguous part of a step's `total` requests that belongs to a learner rank.

    If the total cannot be divided evenly, the first ranks have one request (or group) more.

    `together`: number of rollouts of a prompt, which stay on one rank; divides `total`.

    Example: 5 over 2 ranks are `range(0, 3)` and `range(3, 5)`.
    """
    if together != 1:
        assert total % together == 0, f"{total} is not a multiple of the group size {together}"
        groups = rank_share(total // together, world_size, rank)
        return range(groups.start * together, groups.stop * together)
    if total < 0 or world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"cannot give rank {rank} of {world_size} its part of {total}; use a total of at least"
            " 0, and a rank below the world size"
        )
    size, extra = divmod(total, world_size)
    start = rank * size + min(rank, extra)
    return range(start, start + size + (rank < extra))


def chunk_size(
    decode_batch_size: int, server_world_sizes: Sequence[int], learner_world_size: int
) -> int:
    """Return the number of requests of each learner rank in a round.

    It is the largest number at which no rollout device decodes more than `decode_batch_size`
    requests at a time.

    `server_world_sizes`: the number of devices of each server or engine.

    Raises ValueError if a count is below 1, there is no server, or `decode_batch_size * devices` is
    below the number of learner ranks, so that a rank would have no request.
    """
    counts = (decode_batch_size, learner_world_size, *server_world_sizes)
    if min(counts) < 1 or not server_world_sizes:
        raise ValueError(
            f"cannot split decode_batch_size {decode_batch_size} between {learner_world_size}"
            f" learner ranks and servers of {list(server_world_sizes)} devices; at least one server"
            " and numbers of at least 1 are needed"
        )
    devices = sum(server_world_sizes)
    chunk = decode_batch_size * devices // learner_world_size
    if chunk < 1:
        raise ValueError(
            f"decode_batch_size {decode_batch_size} x {devices} rollout devices is less than"
            f" {learner_world_size} learner ranks; raise decode_batch_size to at least"
            f" {-(-learner_world_size // devices)}, add rollout devices, or use fewer learner ranks"
        )
    return chunk


def round_chunk(
    decode_batch_size: int,
    server_world_sizes: Sequence[int],
    learner_world_size: int,
    *,
    together: int = 1,
) -> int:
    """Return `chunk_size` rounded down to a multiple of `together`, but at least `together`.

    `together` is the number of rollouts of a prompt, which are generated in the same round.
    `server_world_sizes` has the number of devices of each engine.
    """
    chunk = chunk_size(decode_batch_size, server_world_sizes, learner_world_size)
    return max(together, chunk - chunk % together)


@dataclass(frozen=True, slots=True)
class RoundPart:
    """The requests of one learner rank in a round that are assigned to one engine."""

    engine: int
    rank: int
    requests: range
    """Indices among the rank's requests of the round; never empty."""
    num_failed: int = 0
    """Number of engines that were assigned these requests before, and failed to answer."""


def round_parts(sizes: Sequence[int], devices: Sequence[int]) -> list[RoundPart]:
    """Assign the requests of a round to engines.

    Args:
        sizes: the number of requests of each learner rank, in rank order.
        devices: the number of devices of each engine.

    Example: for 2 ranks with 3 requests each and 2 engines with one device, engine 0 gets the
    requests of rank 0, and engine 1 gets the requests of rank 1. If there are 3 engines, engine 1
    gets request 2 of rank 0 and request 0 of rank 1.
    """
    ends = list(accumulate(sizes))
    parts = []
    for engine, share in enumerate(split_over(ends[-1], devices)):
        for rank, (size, end) in enumerate(zip(sizes, ends, strict=True)):
            start = end - size
            first = max(share.start, start)
            last = min(share.stop, end)
            if first < last:
                parts.append(RoundPart(engine, rank, range(first - start, last - start)))
    return parts


def rank_rounds(shares: Sequence[int], chunk: int, *, together: int = 1) -> list[list[range]]:
    """Split a step into the fewest rounds with at most `chunk` requests of each learner rank.

    Args:
        shares: the number of requests of each learner rank in the step.
        together: number of rollouts of a prompt, which stay in one round; divides shares and chunk.

    Returns:
        `[round][rank]`: indices among the rank's requests, in order, split by `split_contiguous`.

    Example: shares of 5 and 4 with a chunk of 3 are 2 rounds: `[0:3], [0:2]` and `[3:5], [2:4]`.
    """
    if together != 1:
        groups = rank_rounds([share // together for share in shares], chunk // together)
        return [
            [range(part.start * together, part.stop * together) for part in round_]
            for round_ in groups
        ]
    if min(shares, default=0) < 0 or chunk < 1:
        raise ValueError(
            f"cannot split shares of {list(shares)} requests into rounds of {chunk} per rank;"
            " use a chunk of at least 1"
        )
    num_rounds = max((-(-share // chunk) for share in shares), default=0)
    if not num_rounds:
        return []
    by_rank = [split_contiguous(share, num_rounds) for share in shares]
    return [list(round_) for round_ in zip(*by_rank, strict=True)]


def cut_rounds(requests: Sequence[Sequence[T]], chunk: int) -> list[list[list[T]]]:
    """Split the requests of a step into rounds, with `rank_rounds`.

    `requests` are the requests of each learner rank; the result is `[round][rank]`.
    """
    rounds = []
    for parts in rank_rounds([len(share) for share in requests], chunk):
        cut = zip(requests, parts, strict=True)
        rounds.append([list(share[part.start : part.stop]) for share, part in cut])
    return rounds


def cut_past(
    items: Iterable[T], limit: int, size_of: Callable[[T], int]
) -> Iterator[tuple[T, ...]]:
    """Yield the items in order, in buckets (tuples).

    A bucket ends with the item that makes the bucket's total size larger than `limit`, or with the
    last item. `size_of` returns the size of an item.
    """
    bucket: list[T] = []
    size = 0
    for item in items:
        bucket.append(item)
        size += size_of(item)
        if size > limit:
            yield tuple(bucket)
            bucket = []
            size = 0
    if bucket:
        yield tuple(bucket)
