"""The rollout engines of a run as one: shares out requests, keeps the phases of a weight sync in step, and waits for nobody forever."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from shared.chunking import chunk_size, rank_rounds, split_over
from shared.errors import ConfigError, RolloutError, UnreachableError, WeightSyncError
from shared.rollouts import SyncReport, WeightOffer
from shared.weight_sync import MARGIN_S, SyncPhase

Error = RolloutError | WeightSyncError

Round = list[list[Any]]
"""References to the requests of one round: those of each learner rank, in position order."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The longest that a wait may take, and what the configuration calls it."""

    seconds: float | None
    """None: the engines keep their own limit."""
    key: str


@dataclass(frozen=True, slots=True)
class PoolTimeouts:
    """Of a pool's waits."""

    start: Limit
    generate: Limit
    sync_phase: Limit

    @classmethod
    def of_actors(cls, *, start_s: float, generate_s: float, sync_phase_s: float) -> PoolTimeouts:
        """The configuration's section `timeouts`."""
        return cls(Limit(start_s, "timeouts.start_s"), Limit(generate_s, "timeouts.generate_s"), Limit(sync_phase_s, "timeouts.sync_phase_s"))


@dataclass(frozen=True, slots=True)
class _Call:
    """One call to every actor that takes part: what to say when it does not end well."""

    phase: str
    limit: Limit
    check: str
    error: type[Error]
    margin_s: float = 0.0
    """Waited beyond the limit, where the actor keeps the same timeout itself and can say more."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one engine generates for one learner rank in a round."""

    rank: int
    engine: int
    """Place in the pool."""
    first_engine: int
    """The one that was asked first."""
    requests: list[Any]


@dataclass(frozen=True, slots=True)
class _Sent:
    piece: _Piece
    rollouts: Any
    """Reference to a `list[Rollout]`."""
    count: Any
    """Reference to its length: so that the driver need not read it to know that it is there."""


Instead = Callable[[int], tuple[str, Any] | None]
"""Given the place of an answer that failed: who is asked instead, and the reference to wait for. None: nobody."""

TRIES = 2
"""Attempts of one server before the next is asked (DESIGN 5, decision 14)."""


class ActorPool:
    """N actors with the methods of `EngineActor`, already created and placed, which this pool owns from now on.

    Waiting happens in threads of the pool: at most one sync or two rounds at a time, each bounded by a timeout, and unblocked by
    the actors' answers, by an actor's death, or by `close`.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        names: Sequence[str],
        timeouts: PoolTimeouts,
        *,
        decode_batch_size: int,
        learner_ranks: int = 1,
        devices: Sequence[int] | None = None,
        are_servers: bool = False,
    ) -> None:
        """`actors` are Ray actor handles.

        Args:
            decode_batch_size: most requests that one rollout device decodes at a time.
            devices: rollout devices of each actor's engine; None: they are asked at the start.
            are_servers: each engine is a server launched elsewhere: requests that could not be brought to it (UnreachableError) are sent once more, to the
                next one.
        """
        self._names, self._actors = tuple(names), tuple(actors)
        self._timeouts = timeouts
        self._decode_batch_size, self._learner_ranks = decode_batch_size, learner_ranks
        self._are_servers = are_servers
        self._version = 0
        self._round: Future[Any] | None = None
        self._threads = ThreadPoolExecutor(max_workers=3, thread_name_prefix="actor-pool")
        self.devices: tuple[int, ...] = () if devices is None else tuple(devices)
        """Rollout devices of each engine, in order; empty before the start."""

    def start(self) -> None:
        """Start every engine at once and wait for all.

        Raises RolloutError(phase="start"), and ConfigError where not every learner rank could have a request in each round.
        """
        call = _Call("start", self._timeouts.start, "the actor's log for what it is loading, and the machine's free memory", RolloutError)
        self.devices = tuple(self._wait(call, [(name, actor.start.remote()) for name, actor in zip(self._names, self._actors, strict=True)]))
        try:
            self._chunk()
        except ValueError as error:
            raise ConfigError(f"rollout_matching.decode_batch_size: {error}") from error

    @property
    def names(self) -> tuple[str, ...]:
        return self._names

    @property
    def version(self) -> int:
        """The version that every actor serves; 0 before the first sync."""
        return self._version

    def split(self, requests: Sequence[Sequence[Any]]) -> list[Round]:
        """The rounds of a step, as few as the decode batches allow: `requests` are those of each learner rank."""
        rounds = rank_rounds([len(share) for share in requests], self._chunk())
        return [[list(share[part.start : part.stop]) for share, part in zip(requests, round_, strict=True)] for round_ in rounds]

    def generate(self, round_: Round) -> Future[Round]:
        """Begin one round.

        The future holds, for each learner rank, references to its rollouts in position order, each to a `list[Rollout]`: the payload stays where it
        was made. It fails with RolloutError naming the actor.
        """
        self._round = self._threads.submit(self._collect, [self._send(piece) for piece in self._pieces(round_)], len(round_))
        return self._round

    def settle(self) -> None:
        """Wait for the round that is being generated, if there is one. Raises its RolloutError."""
        if self._round is not None:
            self._round.result()

    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]:
        """Begin one sync, nothing being generated. The future fails with WeightSyncError naming phase and actor; the actors then serve no
        rollouts."""
        return self._threads.submit(self._receive, offer)

    def close(self) -> None:
        """End every actor and with it its engine's processes. Whoever still waits is told so. Twice is harmless."""
        for actor in self._actors:
            ray.kill(actor)
        self._threads.shutdown(wait=True)

    def _chunk(self) -> int:
        assert self.devices, "start comes first"
        return chunk_size(self._decode_batch_size, self.devices, self._learner_ranks)

    def _pieces(self, round_: Round) -> list[_Piece]:
        """Engines share out the round in rank order; where an engine's part crosses from one rank to the next, it is two pieces."""
        ends = list(accumulate(map(len, round_)))
        starts = [0, *ends[:-1]]
        pieces = []
        for engine, part in enumerate(split_over(ends[-1], self.devices)):
            for rank, (start, end) in enumerate(zip(starts, ends, strict=True)):
                overlap = range(max(part.start, start), min(part.stop, end))
                if overlap:
                    pieces.append(_Piece(rank, engine, engine, round_[rank][overlap.start - start : overlap.stop - start]))
        return pieces

    def _send(self, piece: _Piece, attempt: int = 0) -> _Sent:
        # What Ray's dashboard calls it.
        task = f"generate {len(piece.requests)} for learner rank {piece.rank}"
        rollouts, count = self._actors[piece.engine].generate.options(num_returns=2, name=task).remote(*piece.requests, attempt=attempt)
        return _Sent(piece, rollouts, count)

    def _collect(self, sent: list[_Sent], num_ranks: int) -> Round:
        check = "the actor's log, and whether max_new_tokens times the share fits the time"
        call = _Call("generate", self._timeouts.generate, check, RolloutError)

        def elsewhere(index: int) -> tuple[str, Any] | None:
            piece = sent[index].piece
            following = (piece.engine + 1) % len(self._actors)
            if not self._are_servers or following == piece.first_engine:
                return None
            sent[index] = self._send(replace(piece, engine=following), attempt=TRIES)
            return self._names[following], sent[index].count

        counts = self._wait(call, [(self._names[one.piece.engine], one.count) for one in sent], instead=elsewhere)
        for one, count in zip(sent, counts, strict=True):
            if count != len(one.piece.requests):
                raise RolloutError(f"answered {count} of {len(one.piece.requests)} requests", actor=self._names[one.piece.engine], phase="generate")
        return [[one.rollouts for one in sent if one.piece.rank == rank] for rank in range(num_ranks)]

    def _receive(self, offer: WeightOffer) -> SyncReport:
        shared_offer = ray.put(offer)
        check = "that the learner and every other actor are alive"
        # Phase by phase over all actors: none begins to wait for bytes while another is still decoding, and a stopped process is known by its phase.
        for phase in SyncPhase:
            call = _Call(phase, self._timeouts.sync_phase, check, WeightSyncError, margin_s=2 * MARGIN_S)
            answers = self._wait(call, [(name, actor.run_sync_phase.remote(phase, shared_offer)) for name, actor in self._named()])
        self._version = offer.version
        return SyncReport.of_slowest(answers)

    def _named(self) -> list[tuple[str, Any]]:
        return list(zip(self._names, self._actors, strict=True))

    def _wait(self, call: _Call, answers: list[tuple[str, Any]], *, instead: Instead | None = None) -> list[Any]:
        """Every actor's answer, in order. The first failure ends the wait, whatever the others are doing, where `instead` gives no other answer to wait for."""
        answers = list(answers)
        values: dict[int, Any] = {}
        limit = call.limit
        deadline = None if limit.seconds is None else time.monotonic() + limit.seconds + call.margin_s
        while len(values) < len(answers):
            waiting = {answer: index for index, (_, answer) in enumerate(answers) if index not in values}
            ready, _ = ray.wait(list(waiting), timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(answers[index][0] for index in waiting.values())
                told = f"no answer from {late} after {limit.key} = {limit.seconds:g} s; check {call.check}"
                raise call.error(told, actor=answers[next(iter(waiting.values()))][0], phase=call.phase)
            index = waiting[ready[0]]
            try:
                values[index] = _value(call, *answers[index])
            except UnreachableError:
                other = None if instead is None else instead(index)
                if other is None:
                    raise
                answers[index] = other
        return [values[index] for index in range(len(answers))]


def _value(call: _Call, name: str, answer: Any) -> Any:
    try:
        return ray.get(answer)
    except RayTaskError as error:
        # Ray hides the actor's own exception in one of its own kind.
        if isinstance(error.cause, Error):
            raise error.cause from error
        raise call.error(f"{type(error.cause).__name__}: {error.cause}", actor=name, phase=call.phase) from error
    except RayActorError as error:
        raise call.error(f"its process has ended ({error}); check the actor's log and the machine's memory", actor=name, phase=call.phase) from error
