"""The rollout engines of a run as one: shares out requests, keeps the phases of a weight sync in
step, and waits for nobody forever.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray

from launch.runtime.learner_client import RayLearner
from rollout_actors.engine.ray_calls import PendingCall, RayCall, all_answers, next_answer, value_of
from shared.chunking import RoundPart, chunk_size, cut_rounds, round_chunk, round_parts
from shared.config.derive import rank_name
from shared.config.job import TimeoutsSection
from shared.errors import ConfigError, RolloutError, Timeout, UnreachableError, WeightSyncError
from shared.protocols import CLOSED_S, PerRank
from shared.rollouts import TRIES, SyncReport, WeightOffer
from shared.sent_requests import in_objects
from shared.weight_sync.phases import POOL_MARGIN_S, SyncPhase

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolTimeouts:
    """Of a pool's waits."""

    start: Timeout
    generate: Timeout | None
    """None: the engines keep a limit of their own."""
    sync_phase: Timeout
    """Of each phase of a sync."""
    join: Timeout | None = None
    """Of the phase that joins the engines to the sender, where it has a limit of its own; None: as
    of any other."""
    check: str = "the engine's log, and whether max_new_tokens times the share fits the time"
    """What to look at where a round is late."""
    closed_s: float = CLOSED_S
    """Of all engines together, to end in order."""

    @classmethod
    def of_actors(cls, timeouts: TimeoutsSection) -> PoolTimeouts:
        return cls(
            timeouts.limit("start_s"), timeouts.limit("generate_s"), timeouts.limit("sync_phase_s")
        )


@dataclass(frozen=True, slots=True)
class _Sent:
    """A part that an engine has been asked for."""

    part: RoundPart
    rollouts: Any
    """Reference to a `list[Rollout]`."""
    count: Any
    """Reference to its length: so that the driver need not read it to know that it is there."""


class ActorPool:
    """N actors with the methods of `EngineActor`, already created and placed, which this pool owns
    from now on.

    Waiting happens in threads of the pool: at most one round or one sync at a time, each bounded by
    a timeout, and unblocked by the engines' answers, by an actor's death, or by `close`.
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
            asks_next_on_failure: requests that an engine could not be asked, or could not answer
            (UnreachableError), are asked of the next one, behind its
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

        Raises RolloutError(phase="start"), and ConfigError where not every learner rank could have
        a request in each round, or one server has two names.
        """
        call = RayCall(
            "start",
            self._timeouts.start,
            "the engine's log for what it is loading, and the machine's free memory",
            RolloutError,
        )
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
        """The engines' handles, for those who ask them one request at a time; the pool ends
        them."""
        return self._actors

    @property
    def call_limit(self) -> Timeout | None:
        """Of one call that generates; None: the engines keep a limit of their own."""
        return self._timeouts.generate

    @property
    def version(self) -> int:
        """The version that every engine serves; 0 before the first sync."""
        return self._version

    def split(self, requests: PerRank) -> list[PerRank]:
        """The rounds of a step, as few as the decode batches allow."""
        return cut_rounds(requests, self._chunk())

    def generate(self, round_: PerRank) -> Future[PerRank]:
        """Begin one round.

        The future holds, for each learner rank, references to its rollouts in position order, each
        to a `list[Rollout]`: the payload stays where it was made. It fails with RolloutError naming
        the engine.
        """
        self._round = self._threads.submit(self._collect, round_)
        return self._round

    def settle(self) -> None:
        """Wait for the round that is being generated, if there is one. Raises its RolloutError."""
        if self._round is not None:
            self._round.result()

    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]:
        """Begin one sync, nothing being generated. The future fails with WeightSyncError naming
        phase and engine; the engines then serve no rollouts."""
        return self._threads.submit(self._receive, offer)

    def close(self) -> None:
        """End every actor and with it its engine's processes: in order, all at once, and after
        `closed_s` whatever is left of them. Whoever still waits is told so. Twice is harmless."""
        # One that is loading does not listen.
        closing = [actor.close.remote() for actor in self._actors if self.devices]
        ray.wait(closing, num_returns=len(closing), timeout=self._timeouts.closed_s)
        for actor in self._actors:
            ray.kill(actor)
        self._threads.shutdown(wait=True)

    def _chunk(self) -> int:
        assert self.devices, "start comes first"
        return chunk_size(self._decode_batch_size, self.devices, self._learner_ranks)

    def _collect(self, round_: PerRank) -> PerRank:
        call = RayCall("generate", self._timeouts.generate, self._timeouts.check, RolloutError)
        queue = RoundQueue(
            list(map(len, round_)), self.devices, decode_batch_size=self._decode_batch_size
        )
        sent: dict[Any, _Sent] = {}
        asked: dict[Any, PendingCall] = {}
        done: list[_Sent] = []
        while True:
            deadline = call.deadline()
            for one in [self._send(part, round_) for part in queue.take()]:
                sent[one.count], asked[one.count] = (
                    one,
                    PendingCall(self._names[one.part.engine], deadline),
                )
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
                raise RolloutError(
                    f"answered {count} of {len(one.part.requests)} requests",
                    actor=name,
                    phase="generate",
                )
            done.append(one)
        done.sort(key=lambda one: one.part.requests.start)
        return [
            [one.rollouts for one in done if one.part.rank == rank] for rank in range(len(round_))
        ]

    def _send(self, part: RoundPart, round_: PerRank) -> _Sent:
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
        _LOGGER.warning(
            "%s; its %d requests go to %s", error, len(part.requests), self._names[engine]
        )

    def _receive(self, offer: WeightOffer) -> SyncReport:
        shared_offer = ray.put(offer)
        check = "that the learner and every other engine are alive"
        # Phase by phase over all engines: none begins to wait for bytes while another is still
        # decoding, and a stopped process is known by its phase.
        for phase in SyncPhase:
            own_limit = self._timeouts.join if phase is SyncPhase.RENDEZVOUS else None
            call = RayCall(
                phase,
                own_limit or self._timeouts.sync_phase,
                check,
                WeightSyncError,
                margin_s=POOL_MARGIN_S,
            )
            answers = all_answers(
                call,
                [
                    (name, actor.run_sync_phase.remote(phase, shared_offer))
                    for name, actor in self._named()
                ],
            )
        self._version = offer.version
        return SyncReport.of_slowest(answers)

    def _named(self) -> list[tuple[str, Any]]:
        return list(zip(self._names, self._actors, strict=True))


def _require_several(processes: Sequence[str]) -> None:
    """ConfigError where two of the engines are one server, which would take the second one's sync
    for another run's.
    """
    for index, process in enumerate(processes):
        if process and processes.index(process) != index:
            server = f"rollout_matching.vllm.server.servers[{index}].base_url"
            raise ConfigError(
                f"{server}: is the server of servers[{processes.index(process)}] by another name;"
                " list every server once"
            )


# A round as the engines are asked for it: who is asked what, when, and who instead (DESIGN 5,
# decisions 14 and 15). No Ray here.


class RoundQueue:
    """What each engine has to do in a round. None is asked for more than `decode_batch_size` per
    device at a time: what it takes over from one that failed waits for its own."""

    def __init__(
        self, sizes: Sequence[int], devices: Sequence[int], *, decode_batch_size: int
    ) -> None:
        """`sizes` are the requests of each learner rank; together at most `decode_batch_size` for
        each device.
        """
        self._bounds = [decode_batch_size * count for count in devices]
        self._waiting: list[deque[RoundPart]] = [deque() for _ in devices]
        self._num_asked = [0] * len(devices)
        for part in round_parts(sizes, devices):
            self._waiting[part.engine].append(part)
        own = [sum(len(part.requests) for part in waiting) for waiting in self._waiting]
        assert all(count <= bound for count, bound in zip(own, self._bounds, strict=True)), (
            f"a round of {own} over engines that take {self._bounds}"
        )

    def take(self) -> list[RoundPart]:
        """Everything that can be asked for now. Each part has to be given back by `answered` or
        `failed`.
        """
        taken = []
        for engine, waiting in enumerate(self._waiting):
            while (
                waiting
                and self._num_asked[engine] + len(waiting[0].requests) <= self._bounds[engine]
            ):
                taken.append(waiting.popleft())
                self._num_asked[engine] += len(taken[-1].requests)
        return taken

    def answered(self, part: RoundPart) -> None:
        self._num_asked[part.engine] -= len(part.requests)

    def failed(self, part: RoundPart) -> int | None:
        """Puts it behind what the next engine has to do, and says which that is; None: every engine
        has failed at it.
        """
        self.answered(part)
        num_failed, engine = part.num_failed + 1, (part.engine + 1) % len(self._waiting)
        if num_failed == len(self._waiting):
            return None
        # An engine of fewer devices takes it in several.
        size = self._bounds[engine]
        ranges = [
            part.requests[first : first + size] for first in range(0, len(part.requests), size)
        ]
        self._waiting[engine].extend(
            RoundPart(engine, part.rank, requests, num_failed) for requests in ranges
        )
        return engine


# Rollouts that the learner ranks generate themselves (`rollout_backend: hf`, `vllm.mode:
# colocate`), as the driver uses rollout engines.


class RankRollouts:
    """What `launch.runtime.rollout_client.ActorPool` is, where each rank generates what it learns.
    Generation and learning then alternate.
    """

    def __init__(
        self, learner: RayLearner, *, num_ranks: int, devices_per_rank: int, decode_batch_size: int
    ) -> None:
        self._learner = learner
        self._chunk = decode_batch_size * devices_per_rank
        self.names = tuple(rank_name(rank, num_ranks) for rank in range(num_ranks))
        self.devices = (devices_per_rank,) * num_ranks

    @property
    def version(self) -> int:
        """The version that every rank's engine serves; 0 before the first sync."""
        return self._learner.received_version

    def split(self, requests: PerRank) -> list[PerRank]:
        """The rounds of a step, as few as the decode batches allow."""
        return cut_rounds(requests, self._chunk)

    def generate(self, round_: PerRank) -> Future[PerRank]:
        return self._learner.generate(round_)

    def settle(self) -> None:
        """Nothing to wait for: a rank generates and learns in turn."""

    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]:
        """The slowest rank's report. The future fails with WeightSyncError, or with LearnerError
        where a rank did not answer.
        """
        return self._learner.receive_weights(offer)


# Environments and engines of a run as one: what `launch.runtime.rollout_client.ActorPool` is to the
# driver, where rollouts are those of environments.


class EnvironmentPool:
    """Rounds go to the environments, which ask the engines; weights go to the engines."""

    def __init__(
        self,
        engines: ActorPool,
        environments: ActorPool,
        *,
        decode_batch_size: int,
        learner_ranks: int,
        group_size: int,
    ) -> None:
        """Both pools have started.

        Args:
            decode_batch_size: most requests that one rollout device decodes at a time.
            group_size: rollouts of each example in training.
        """
        self._engines, self._environments = engines, environments
        self._chunk = (
            round_chunk(decode_batch_size, engines.devices, learner_ranks, together=group_size)
            // group_size
        )
        self.names = engines.names
        self.devices = engines.devices
        """Rollout devices of each engine."""

    @property
    def version(self) -> int:
        """The version that every engine serves; 0 before the first sync."""
        return self._engines.version

    def split(self, requests: PerRank) -> list[PerRank]:
        """The rounds of a step, as few as the decode batches allow; of whole examples."""
        return cut_rounds(requests, self._chunk)

    def generate(self, round_: PerRank) -> Future[PerRank]:
        """Begin one round. The future holds, for each learner rank, references to its groups of
        rollouts in position order; it fails with RolloutError naming the engine, or the actor whose
        environments are late."""
        return self._environments.generate(round_)

    def settle(self) -> None:
        """Wait for the round that is being generated, if there is one. Raises its RolloutError."""
        self._environments.settle()

    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]:
        """As `ActorPool.receive_weights`."""
        return self._engines.receive_weights(offer)
