"""How a step's requests are split into rounds and shares (decisions 5, 15 and 16).

A *round* is generated at the same time by all engines; a *share* is one engine's part of it. The
buckets of a weight sync are cut here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

T = TypeVar("T")


def split_contiguous(n: int, num_servers: int) -> list[range]:
    """Assign `ceil(n / num_servers)` requests to each server, in order, until none are left.

    So one server may get fewer, and those after it none. Raises ValueError for negative `n`, and
    without servers.

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

    Each range gets its share rounded down. The largest remainders get one more, ties by index.

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
    """Split a round over engines: evenly if all have as many devices, else in proportion."""
    if len(set(devices)) == 1:
        return split_contiguous(n, len(devices))
    return split_weighted(n, devices)


def rank_share(total: int, world_size: int, rank: int, *, together: int = 1) -> range:
    """Return the contiguous part of `total` for `rank`; the first ranks may have one more.

    Args:
        together: size of a group, which is never split; `total` is a multiple of it.

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
    """Return the number of requests per learner rank in a round.

    It is the largest with which no rollout device decodes more than `decode_batch_size` at a time.

    Args:
        server_world_sizes: the number of devices of each server.

    Raises:
        ValueError: a count is below 1, there is no server, or `decode_batch_size * devices` is
            below the number of learner ranks, so that a rank would have no request.
    """
    counts = (decode_batch_size, learner_world_size, *server_world_sizes)
    if min(counts) < 1 or not server_world_sizes:
        raise ValueError(
            f"decode_batch_size {decode_batch_size} over servers of {list(server_world_sizes)}"
            f" devices, {learner_world_size} learner ranks; give a server, and make every"
            " count at least 1"
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
    """Return `chunk_size` rounded down to whole groups of `together`, but at least one group."""
    chunk = chunk_size(decode_batch_size, server_world_sizes, learner_world_size)
    return max(together, chunk - chunk % together)


@dataclass(frozen=True, slots=True)
class RoundPart:
    """The requests of one learner rank that one engine generates in a round."""

    engine: int
    rank: int
    requests: range
    """Indices of the rank's requests in the round; never empty."""
    num_failed: int = 0
    """Number of engines that failed to answer this part before."""


def round_parts(sizes: Sequence[int], devices: Sequence[int]) -> list[RoundPart]:
    """Split a round over engines; `sizes` are the requests of each learner rank, in rank order.

    Example: 2 ranks with 3 requests each, 2 engines with one device: engine 0 generates requests 0,
    1, 2 of rank 0, engine 1 those of rank 1. With 3 engines, engine 1 has one part of each rank.
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
    """Split each rank's share of a step into the fewest rounds of at most `chunk` requests per
    rank.

    Args:
        together: size of a group, which is never split; shares and `chunk` are multiples of it.

    Returns:
        `[round][rank]`: ranges within the rank's share, in order, split by `split_contiguous`.

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
    """Split the requests of each learner rank into rounds, `[round][rank]`, with `rank_rounds`."""
    rounds = []
    for parts in rank_rounds([len(share) for share in requests], chunk):
        cut = zip(requests, parts, strict=True)
        rounds.append([list(share[part.start : part.stop]) for share, part in cut])
    return rounds


def cut_past(
    items: Iterable[T], limit: int, size_of: Callable[[T], int]
) -> Iterator[tuple[T, ...]]:
    """Yield the items in order, in buckets.

    A bucket ends with the item that takes its total size past `limit`, or with the last item.
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
