"""How a step's requests are cut into rounds and shares (DESIGN 5, decisions 5, 15 and 16), and
tensors into buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

T = TypeVar("T")


def split_contiguous(n: int, num_servers: int) -> list[range]:
    """`ceil(n / num_servers)` requests to each server in order; the last servers may get fewer or
    none.
    """
    if n < 0 or num_servers < 1:
        raise ValueError(
            f"cannot split {n} requests over {num_servers} servers; both counts must be positive"
        )
    size = -(-n // num_servers)
    return [range(min(i * size, n), min((i + 1) * size, n)) for i in range(num_servers)]


def split_weighted(n: int, weights: Sequence[int]) -> list[range]:
    """Contiguous ranges proportional to `weights`: the floor each, then the largest remainders,
    ties to the lower index.
    """
    if n < 0 or not weights or min(weights) < 1:
        raise ValueError(
            f"cannot split {n} requests by weights {list(weights)}; every weight must be at least 1"
        )
    total = sum(weights)
    counts = [n * weight // total for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(n * weights[i] % total), i))
    for i in by_remainder[: n - sum(counts)]:
        counts[i] += 1
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def rank_share(total: int, world_size: int, rank: int, *, together: int = 1) -> range:
    """The contiguous part of `total` that `rank` owns; the first ranks have one more, or where so
    many stay `together`, so many more.
    """
    if together != 1:
        assert total % together == 0, f"{total} are no groups of {together}"
        groups = rank_share(total // together, world_size, rank)
        return range(groups.start * together, groups.stop * together)
    if total < 0 or world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"cannot give rank {rank} of {world_size} its part of {total}; the total must be at"
            " least 0, and the rank one of 0..world_size - 1"
        )
    size, extra = divmod(total, world_size)
    start = rank * size + min(rank, extra)
    return range(start, start + size + (rank < extra))


def chunk_size(
    decode_batch_size: int, server_world_sizes: Sequence[int], learner_world_size: int
) -> int:
    """Requests per learner rank and round, so that no rollout device decodes more than
    `decode_batch_size` at a time.

    `server_world_sizes` are the devices of each server. Raises ValueError where a count is under 1
    or there is no server, and where `decode_batch_size * devices < learner ranks`: then not every
    rank could have one request.
    """
    if (
        min(decode_batch_size, learner_world_size, *server_world_sizes) < 1
        or not server_world_sizes
    ):
        raise ValueError(
            f"decode_batch_size {decode_batch_size} over servers of {list(server_world_sizes)}"
            f" devices cannot serve {learner_world_size} learner ranks; give at least one server,"
            " and make every count at least 1"
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


def split_over(n: int, devices: Sequence[int]) -> list[range]:
    """A round over engines: contiguous where all have the same number of devices, else in
    proportion to it.
    """
    return (
        split_contiguous(n, len(devices)) if len(set(devices)) == 1 else split_weighted(n, devices)
    )


@dataclass(frozen=True, slots=True)
class RoundPart:
    """What one engine generates for one learner rank in a round."""

    engine: int
    rank: int
    requests: range
    """Places among the rank's requests of the round; never empty."""
    num_failed: int = 0
    """Engines that failed to answer it before this one."""


def round_parts(sizes: Sequence[int], devices: Sequence[int]) -> list[RoundPart]:
    """How engines share out a round of `sizes` requests of each learner rank: in rank order, so
    that a part crosses from one rank to the next as two parts.
    """
    ends = list(accumulate(sizes))
    starts = [0, *ends[:-1]]
    return [
        RoundPart(engine, rank, range(overlap.start - start, overlap.stop - start))
        for engine, part in enumerate(split_over(ends[-1], devices))
        for rank, (start, end) in enumerate(zip(starts, ends, strict=True))
        if (overlap := range(max(part.start, start), min(part.stop, end)))
    ]


def round_chunk(
    decode_batch_size: int,
    server_world_sizes: Sequence[int],
    learner_world_size: int,
    *,
    together: int = 1,
) -> int:
    """`chunk_size`, of which where so many stay `together` only whole groups are taken: at least
    one, whose rollouts then take turns in the engines.
    """
    chunk = chunk_size(decode_batch_size, server_world_sizes, learner_world_size)
    return max(together, chunk - chunk % together)


def rank_rounds(shares: Sequence[int], chunk: int, *, together: int = 1) -> list[list[range]]:
    """The fewest rounds in which each learner rank learns its share of a step, at most `chunk`
    requests of each rank in a round.

    `[round][rank]`; each range counts within the rank's share. A share is contiguous in order over
    the rounds, and as even as `split_contiguous` makes it. Where so many requests stay `together`,
    shares and `chunk` are multiples of that, and so are all ranges.
    """
    if together != 1:
        groups = rank_rounds([share // together for share in shares], chunk // together)
        return [
            [range(part.start * together, part.stop * together) for part in round_]
            for round_ in groups
        ]
    if min(shares, default=0) < 0 or chunk < 1:
        raise ValueError(
            f"cannot split shares of {list(shares)} requests into rounds of at most {chunk} of each"
            " rank; chunk must be at least 1"
        )
    num_rounds = max((-(-share // chunk) for share in shares), default=0)
    return (
        [
            list(round_)
            for round_ in zip(
                *(split_contiguous(share, num_rounds) for share in shares), strict=True
            )
        ]
        if num_rounds
        else []
    )


def cut_rounds(requests: Sequence[Sequence[T]], chunk: int) -> list[list[list[T]]]:
    """The rounds of a step whose requests are those of each learner rank, `[round][rank]`, as
    `rank_rounds` says.
    """
    rounds = rank_rounds([len(share) for share in requests], chunk)
    return [
        [list(share[part.start : part.stop]) for share, part in zip(requests, round_, strict=True)]
        for round_ in rounds
    ]


def cut_past(
    items: Iterable[T], limit: int, size_of: Callable[[T], int]
) -> Iterator[tuple[T, ...]]:
    """The items in order, cut behind each that takes a bucket past `limit`."""
    bucket: list[T] = []
    size = 0
    for item in items:
        bucket.append(item)
        size += size_of(item)
        if size > limit:
            yield tuple(bucket)
            bucket, size = [], 0
    if bucket:
        yield tuple(bucket)
