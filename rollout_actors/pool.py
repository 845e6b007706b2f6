"""The rollout engines of a run as one: shares out requests, keeps the phases of a weight sync in step, and waits for nobody forever."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray

from rollout_actors.ray_answers import Asked, Call, all_answers, next_answer, value_of
from rollout_actors.round_queue import RoundQueue
from shared.chunking import RoundPart, chunk_size, cut_rounds
from shared.config.timeouts import TimeoutsSection
from shared.errors import ConfigError, Limit, RolloutError, UnreachableError, WeightSyncError
from shared.protocols import CLOSED_S, ByRank
from shared.rollouts import TRIES, SyncReport, WeightOffer
from shared.sent_requests import in_objects
from shared.weight_sync import POOL_MARGIN_S, SyncPhase

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolTimeouts:
    """Of a pool's waits."""

    start: Limit
    generate: Limit | None
    """None: the engines keep a limit of their own."""
    sync_phase: Limit
    """Of each phase of a sync."""
    join: Limit | None = None
    """Of the phase that joins the engines to the sender, where it has a limit of its own; None: as
    of any other."""
    check: str = "the engine's log, and whether max_new_tokens times the share fits the time"
    """What to look at where a round is late."""
    closed_s: float = CLOSED_S
    """Of all engines together, to end in order."""

    @classmethod
    def of_actors(cls, timeouts: TimeoutsSection) -> PoolTimeouts:
        return cls(timeouts.limit("start_s"), timeouts.limit("generate_s"), timeouts.limit("sync_phase_s"))


@dataclass(frozen=True, slots=True)
class _Sent:
    """A part that an engine has been asked for."""

    part: RoundPart
    rollouts: Any
    """Reference to a `list[Rollout]`."""
    count: Any
    """Reference to its length: so that the driver need not read it to know that it is there."""


class ActorPool:
    """N actors with the methods of `EngineActor`, already created and placed, which this pool owns from now on.

    Waiting happens in threads of the pool: at most one round or one sync at a time, each bounded by a timeout, and unblocked by
    the engines' answers, by an actor's death, or by `close`.
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
        asks_next_on_failure: bool = False,
    ) -> None:
        """`actors` are Ray actor handles.

        Args:
            decode_batch_size: most requests that one rollout device decodes at a time.
            devices: rollout devices of each engine; None: they are asked at the start.
            asks_next_on_failure: requests that an engine could not be asked, or could not answer (UnreachableError), are asked of the next one, behind its
                own: for engines that are servers launched elsewhere.
        """
        self._names, self._actors = tuple(names), tuple(actors)
        self._timeouts = timeouts
        self._decode_batch_size, self._learner_ranks = decode_batch_size, learner_ranks
        self._asks_next_on_failure = asks_next_on_failure
        self._version = 0
        self._round: Future[Any] | None = None
        self._threads = ThreadPoolExecutor(max_workers=3, thread_name_prefix="actor-pool")
        self.devices: tuple[int, ...] = () if devices is None else tuple(devices)
        """Rollout devices of each engine, in order; empty before the start."""

    def start(self) -> None:
        """Start every engine at once and wait for all.

        Raises RolloutError(phase="start"), and ConfigError where not every learner rank could have a request in each round, or one server has two names.
        """
        call = Call("start", self._timeouts.start, "the engine's log for what it is loading, and the machine's free memory", RolloutError)
        started = all_answers(call, [(name, actor.start.remote()) for name, actor in self._named()])
        self.devices = tuple(devices for devices, _ in started)
        _require_several([process for _, process in started])
        try:
            self._chunk()
        except ValueError as error:
            raise ConfigError(f"rollout_matching.decode_batch_size: {error}") from error

    @property
    def names(self) -> tuple[str, ...]:
        return self._names

    @property
    def actors(self) -> tuple[Any, ...]:
        """The engines' handles, for those who ask them one request at a time; the pool ends them."""
        return self._actors

    @property
    def call_limit(self) -> Limit | None:
        """Of one call that generates; None: the engines keep a limit of their own."""
        return self._timeouts.generate

    @property
    def version(self) -> int:
        """The version that every engine serves; 0 before the first sync."""
        return self._version

    def split(self, requests: ByRank) -> list[ByRank]:
        """The rounds of a step, as few as the decode batches allow."""
        return cut_rounds(requests, self._chunk())

    def generate(self, round_: ByRank) -> Future[ByRank]:
        """Begin one round.

        The future holds, for each learner rank, references to its rollouts in position order, each to a `list[Rollout]`: the payload stays where it
        was made. It fails with RolloutError naming the engine.
        """
        self._round = self._threads.submit(self._collect, round_)
        return self._round

    def settle(self) -> None:
        """Wait for the round that is being generated, if there is one. Raises its RolloutError."""
        if self._round is not None:
            self._round.result()

    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]:
        """Begin one sync, nothing being generated. The future fails with WeightSyncError naming phase and engine; the engines then serve no
        rollouts."""
        return self._threads.submit(self._receive, offer)

    def close(self) -> None:
        """End every actor and with it its engine's processes: in order, all at once, and after `closed_s` whatever is left of them. Whoever still waits is told
        so. Twice is harmless."""
        # One that is loading does not listen.
        closing = [actor.close.remote() for actor in self._actors if self.devices]
        ray.wait(closing, num_returns=len(closing), timeout=self._timeouts.closed_s)
        for actor in self._actors:
            ray.kill(actor)
        self._threads.shutdown(wait=True)

    def _chunk(self) -> int:
        assert self.devices, "start comes first"
        return chunk_size(self._decode_batch_size, self.devices, self._learner_ranks)

    def _collect(self, round_: ByRank) -> ByRank:
        call = Call("generate", self._timeouts.generate, self._timeouts.check, RolloutError)
        queue = RoundQueue(list(map(len, round_)), self.devices, decode_batch_size=self._decode_batch_size)
        sent: dict[Any, _Sent] = {}
        asked: dict[Any, Asked] = {}
        done: list[_Sent] = []
        while True:
            deadline = call.deadline()
            for one in [self._send(part, round_) for part in queue.take()]:
                sent[one.count], asked[one.count] = one, Asked(self._names[one.part.engine], deadline)
            if not asked:
                break
            answer = next_answer(call, asked)
            one, name = sent[answer], asked.pop(answer).name
            try:
                count = value_of(call, name, answer)
            except UnreachableError as error:
                self._ask_next(queue, one.part, error)
                continue
            queue.answered(one.part)
            if count != len(one.part.requests):
                raise RolloutError(f"answered {count} of {len(one.part.requests)} requests", actor=name, phase="generate")
            done.append(one)
        done.sort(key=lambda one: one.part.requests.start)
        return [[one.rollouts for one in done if one.part.rank == rank] for rank in range(len(round_))]

    def _send(self, part: RoundPart, round_: ByRank) -> _Sent:
        objects, places = in_objects(round_[part.rank][part.requests.start : part.requests.stop])
        # What Ray's dashboard calls it.
        task = f"generate {len(places)} for learner rank {part.rank}"
        method = self._actors[part.engine].generate.options(num_returns=2, name=task)
        return _Sent(part, *method.remote(*objects, places=places, attempt=TRIES * part.num_failed))

    def _ask_next(self, queue: RoundQueue, part: RoundPart, error: UnreachableError) -> None:
        """Raises the error where no other engine may be asked, or all of them have failed."""
        engine = queue.failed(part) if self._asks_next_on_failure else None
        if engine is None:
            raise error
        _LOGGER.warning("%s; its %d requests go to %s", error, len(part.requests), self._names[engine])

    def _receive(self, offer: WeightOffer) -> SyncReport:
        shared_offer = ray.put(offer)
        check = "that the learner and every other engine are alive"
        # Phase by phase over all engines: none begins to wait for bytes while another is still decoding, and a stopped process is known by its phase.
        for phase in SyncPhase:
            own_limit = self._timeouts.join if phase is SyncPhase.RENDEZVOUS else None
            call = Call(phase, own_limit or self._timeouts.sync_phase, check, WeightSyncError, margin_s=POOL_MARGIN_S)
            answers = all_answers(call, [(name, actor.run_sync_phase.remote(phase, shared_offer)) for name, actor in self._named()])
        self._version = offer.version
        return SyncReport.of_slowest(answers)

    def _named(self) -> list[tuple[str, Any]]:
        return list(zip(self._names, self._actors, strict=True))


def _require_several(processes: Sequence[str]) -> None:
    """ConfigError where two of the engines are one server, which would take the second one's sync for another run's."""
    for index, process in enumerate(processes):
        if process and processes.index(process) != index:
            server = f"rollout_matching.vllm.server.servers[{index}].base_url"
            raise ConfigError(f"{server}: is the server of servers[{processes.index(process)}] by another name; list every server once")
