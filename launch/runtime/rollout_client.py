"""One client for a run's rollouts: splits rounds over generators, sends weights to engines."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayError

from launch.runtime.learner_client import UNOBSERVED, LearnerClient, RunObserver
from launch.runtime.replacements import (
    START_CHECK,
    Replacement,
    Replacements,
    StallWatch,
    ended_error,
)
from rollout_actors.engine.ray_calls import RayCall, next_ready, result_of, wait_for_all
from shared.chunking import RoundPart, cut_rounds, round_chunk, round_parts
from shared.config import RunConfig
from shared.config.algorithm import TeacherSection
from shared.config.derive import rank_name
from shared.config.job import TimeoutsSection
from shared.config.rollout import ServerSection
from shared.errors import (
    ConfigError,
    LostRoundError,
    LostStartError,
    RolloutError,
    Timeout,
    UnreachableError,
    WeightSyncError,
)
from shared.protocols import CLOSED_S, PerRank
from shared.rollouts import TRIES, SyncReport, WeightOffer
from shared.sent_requests import in_objects
from shared.weight_sync.phases import (
    POOL_MARGIN_S,
    ReceivingEngines,
    SendingLearner,
    SyncPhase,
    sync_weights,
)

_LOGGER = logging.getLogger(__name__)

ALIVE_S = 30.0
"""Least seconds for an actor with nothing to do to show that it is neither stopped nor stuck."""
HTTP_CLIENT_MARGIN_S = 60.0
"""Ray-side limit on top of a server client's own: for what is neither waiting nor asking."""


@dataclass(frozen=True, slots=True)
class RolloutTimeouts:
    """The limits of a client's waits."""

    start: Timeout
    generate: Timeout | None
    """None: the actors keep a limit of their own."""
    sync_phase: Timeout
    """Limit of each phase of a sync."""
    stall: Timeout | None = None
    """Limit without a token from an engine that owes some, or without any answer; None: no actor is
    watched in a round."""
    join: Timeout | None = None
    """Limit of the phase that joins the engines to the sender; None: as of any other."""
    check: str = "the engine's log, and whether max_new_tokens times the share fits the time"
    """The end of the message of a round that is late: things to look at."""
    start_check: str = START_CHECK
    """The same for a start."""
    closed_s: float = CLOSED_S
    """Seconds for all actors together to end in order."""

    @classmethod
    def for_actors(cls, timeouts: TimeoutsSection) -> RolloutTimeouts:
        return cls(
            timeouts.limit("start_s"),
            timeouts.limit("generate_s"),
            timeouts.limit("sync_phase_s"),
            stall=timeouts.limit("stall_s"),
        )

    @classmethod
    def for_servers(
        cls, section: ServerSection, timeouts: TimeoutsSection, *, watched: bool
    ) -> RolloutTimeouts:
        """Return the limits over servers, whose clients keep that of each call and ask twice.

        `watched`: servers that stall are given up, whatever calls they still have.
        """
        key = "rollout_matching.vllm.server"
        start_s = section.timeout_s + timeouts.start_s
        generate = None
        if section.infer_timeout_s is not None and section.infer_timeout_s > 0:
            generate = Timeout(
                TRIES * section.infer_timeout_s + HTTP_CLIENT_MARGIN_S,
                f"{TRIES} x {key}.infer_timeout_s + {HTTP_CLIENT_MARGIN_S:g}",
            )
        return cls(
            Timeout(start_s, f"{key}.timeout_s + timeouts.start_s"),
            generate,
            timeouts.limit("sync_phase_s"),
            stall=section.answer_limit if watched else None,
            join=section.answer_limit,
        )

    @classmethod
    def for_ranks(cls, config: RunConfig) -> RolloutTimeouts:
        """Return the limits over learner ranks that generate, perhaps through an environment."""
        if config.environment is None:
            return cls.for_actors(config.timeouts)
        return cls.for_environments(config.timeouts, config.environment.teacher)

    @classmethod
    def for_environments(
        cls, timeouts: TimeoutsSection, teacher: TeacherSection | None
    ) -> RolloutTimeouts:
        """Return the limits over environments: an engine, or a teacher, that is late is reported
        first.
        """
        limits = cls.for_actors(timeouts)
        start, start_check = limits.start, limits.start_check
        if teacher is not None:
            # It is waited for, and then asked about its vocabulary.
            waits = 1 + TRIES
            start = Timeout(
                timeouts.start_s + waits * teacher.timeout_s,
                f"{start.key} + {waits} x environment.teacher.timeout_s",
            )
            start_check = "what the environment loads, and whether the teacher answers"
        return replace(
            limits,
            start=start,
            start_check=start_check,
            generate=Timeout(2 * timeouts.generate_s, "2 x timeouts.generate_s"),
            check="what the environment waits for (`py-spy dump`), and whether its rollouts, with"
            " their tools and rewards, fit the time",
        )


class LosableEngines(ReceivingEngines, Protocol):
    """Engines that may all be lost in a round, and be replaced."""

    version: int

    def begin(self, round_: PerRank) -> Future[PerRank]: ...


@dataclass(frozen=True, slots=True)
class SecondTry:
    """Asks new engines, once, for a round that was lost."""

    engines: LosableEngines
    learner: SendingLearner
    observer: RunObserver
    round_: PerRank
    version: int
    """Version of the weights when the round was begun."""

    def answers(self, lost: LostRoundError) -> PerRank:
        """Send the round's weights to new engines, and wait for their answers.

        Raises LostRoundError if the learner has no such weights any more, or for a second time.
        """
        if self.engines.version != self.version:
            why = ", and the weights that it was asked of are gone (max_staleness)"
            raise _lost(lost, why) from lost
        self.observer.sync(sync_weights(self.learner, self.engines, again=True))
        try:
            return self.engines.begin(self.round_).result()
        except LostRoundError as error:
            raise _lost(error, " for the second time in a round") from error


@dataclass(frozen=True, slots=True)
class Round:
    """A round in production."""

    future: Future[PerRank]
    """The answers of those that were asked first; a LostRoundError if all of them are lost."""
    observer: RunObserver = UNOBSERVED
    second_try: SecondTry | None = None
    """None: there are no others to ask."""

    @classmethod
    def answered(cls, answers: PerRank) -> Round:
        """Return a round that was generated before."""
        future: Future[PerRank] = Future()
        future.set_result(answers)
        return cls(future)

    def result(self) -> PerRank:
        """Wait for the answers, if need be for those of others.

        The learner has to be idle: new engines may need its weights.
        """
        with self.observer.waits_for("rollouts"):
            try:
                return self.future.result()
            except LostRoundError as error:
                if self.second_try is None:
                    raise
                return self.second_try.answers(error)


def _lost(error: LostRoundError, why: str) -> LostRoundError:
    message = f"{error.message}; all are lost{why}"
    return LostRoundError(message, actor=error.actor, phase=error.phase)


@dataclass(frozen=True, slots=True)
class _SentPart:
    """A part of a round that an actor has been asked for."""

    part: RoundPart
    deadline: float
    """End of the wait, by the monotonic clock."""
    rollouts: Any
    """Reference to a `list[Rollout]`."""
    count: Any
    """Reference to its length, by which the driver knows that they are ready."""


class RolloutClient:
    """Owns actors with the methods of `EngineActor`: engines, or environments that ask engines.

    Waiting happens in threads of the client: at most one round or one sync at a time, each bounded
    by a timeout, and unblocked by the answers, by an actor's death, or by `close`.

    Example (2 engines of 1 device, decode_batch_size 2, one learner rank): a step of 6 requests is
    split into rounds of 3 and 3; of each the first engine generates 2, the second 1.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        names: Sequence[str],
        timeouts: RolloutTimeouts,
        *,
        decode_batch_size: int = sys.maxsize,
        learner_ranks: int = 1,
        devices: Sequence[int] = (),
        asks_next_on_failure: bool = False,
        replacements: Replacements | None = None,
        learner: SendingLearner | None = None,
        observer: RunObserver = UNOBSERVED,
    ) -> None:
        """Take over the Ray actors.

        Args:
            decode_batch_size: most requests that one rollout device decodes at a time.
            devices: rollout devices of each engine; empty: they are asked at the start.
            asks_next_on_failure: an UnreachableError's requests are asked of the next engine,
                behind its own: for servers launched elsewhere.
            replacements: starts new actors in place of those that are lost, and others take their
                requests; None: a lost actor is an error.
            learner: has the weights of engines that take the place of lost ones; None: a round that
                all engines lost is not asked again.
        """
        self.actors = tuple(actors)
        self.names = tuple(names)
        self.timeouts = timeouts
        self.devices = tuple(devices)
        """Rollout devices of each engine, in order; empty before the start."""
        self.version = 0
        """The version that every engine serves; 0 before the first sync."""
        self._decode_batch_size = decode_batch_size
        self._learner_ranks = learner_ranks
        self._replacements = replacements
        self._learner = learner
        self._observer = observer
        self._asks_next_on_failure = asks_next_on_failure
        self._generators = self
        self._group_size = 1
        self._in_one_round = False
        self._round: Future[Any] | None = None
        self._sync_failed = False
        self._threads = ThreadPoolExecutor(max_workers=3, thread_name_prefix="rollout-client")

    def start(self) -> None:
        """Start every engine at once and wait for all. One that is killed meanwhile is replaced.

        Raises:
            RolloutError: phase "start"; a LostStartError where another start may go better.
            ConfigError: not every learner rank could have a request in each round, or two
                base_urls lead to the same server.
        """
        timeouts = self.timeouts
        call = RayCall(
            "start", timeouts.start, timeouts.start_check, RolloutError, gone=LostStartError
        )
        deadline = call.deadline()
        waiting = {actor.start.remote(): index for index, actor in enumerate(self.actors)}
        devices: dict[int, int] = {}
        processes = [""] * len(self.actors)
        while waiting:
            answer = next_ready(dict.fromkeys(waiting, deadline))
            if answer is None:
                # Not replaced: a limit that is too short for the model is late as often as it is
                # tried.
                names = [self.names[index] for index in waiting.values()]
                raise replace(call, error=LostStartError).timeout_error(names)
            index = waiting.pop(answer)
            try:
                devices[index], processes[index] = result_of(call, self.names[index], answer)
            except LostStartError as error:
                if self._replacements is None:
                    raise
                self._replacements.lose(index, self.actors[index], error)
        devices |= self._take_over()
        self.devices = tuple(devices[index] for index in range(len(self.actors)))
        _require_several(processes)
        try:
            self._chunk()
        except ValueError as error:
            raise ConfigError(f"rollout_matching.decode_batch_size: {error}") from error

    def generate_through(
        self, environments: RolloutClient, *, group_size: int, in_one_round: bool = False
    ) -> None:
        """Send rounds to environments from now on: a request is a group, of one example.

        `in_one_round`: a step's, of all learner ranks, in one call of the only environment.
        """
        assert not in_one_round or len(environments.actors) == 1, "one process has all rollouts"
        self._generators = environments
        self._group_size = group_size
        self._in_one_round = environments._in_one_round = in_one_round

    def split(self, requests: PerRank) -> list[PerRank]:
        """Cut a step's requests into rounds, as few as the decode batches allow."""
        return cut_rounds(requests, sys.maxsize if self._in_one_round else self._chunk())

    def generate(self, round_: PerRank) -> Round:
        """Begin one round.

        Its result has, for each learner rank, references to `list[Rollout]`s in position order: the
        payload stays where it was made. It fails with RolloutError naming the actor; LostRoundError
        if all actors are lost while others are being started.
        """
        second_try = None
        if self._learner is not None:
            second_try = SecondTry(self, self._learner, self._observer, round_, self.version)
        return Round(self.begin(round_), self._observer, second_try)

    def begin(self, round_: PerRank) -> Future[PerRank]:
        """Begin one round, which is not asked again if it is lost."""
        self._round = self._threads.submit(self._generators._collect, round_, self)
        return self._round

    def wait_idle(self) -> None:
        """Wait for the round that is being generated, if there is one.

        Raises its RolloutError, but not a LostRoundError: a lost round may be asked again.
        """
        if self._round is not None:
            with suppress(LostRoundError), self._observer.waits_for("rollouts"):
                self._round.result()

    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]:
        """Begin one sync while nothing is generated. Where it fails, engines serve no rollouts."""
        return self._threads.submit(self._receive, offer)

    @property
    def replaces_lost(self) -> bool:
        """Whether new engines are started in place of lost ones."""
        return self._replacements is not None

    def join_replacements(self) -> bool:
        """Replace who has ended, is stopped or stuck, and wait for all new actors, while nothing
        runs.

        Returns whether there is a new engine, which has neither group nor weights. Raises
        RolloutError where no more may be replaced.
        """
        environments = self._generators if self._generators is not self else None
        self._lose_dead()
        if environments is not None:
            environments._lose_dead()
        has_new_engine = self._join()
        if environments is not None:
            is_told = not (environments._join() or has_new_engine)
            while not is_told:
                told = [actor.use_engines.remote(self.actors) for actor in environments.actors]
                is_told = not environments._lose_silent(told)
                # Where one has ended meanwhile, another takes its place, and all are told again.
                environments._join()
        return has_new_engine

    def replace_named(self, error: WeightSyncError) -> bool:
        """Replace the engine that the error of a sync names; return whether it names one.

        Raises the error where no more may be replaced.
        """
        if error.actor not in self.names:
            return False
        self._lose(self.names.index(error.actor), error)
        return self.join_replacements()

    def pop_replaced(self) -> list[Replacement]:
        """Return the replacements that have joined since the last call."""
        clients = dict.fromkeys((self, self._generators))
        of_each = [client._replacements for client in clients]
        return [done for one in of_each if one is not None for done in one.pop_done()]

    def close(self) -> None:
        """Tell all actors to end, and kill what is left of them after `closed_s`.

        Pending waits fail. Twice is harmless.
        """
        if self._replacements is not None:
            self._replacements.close()
        # One that is loading does not listen.
        closing = [actor.close.remote() for actor in self.actors if self.devices]
        ray.wait(closing, num_returns=len(closing), timeout=self.timeouts.closed_s)
        for actor in self.actors:
            ray.kill(actor)
        self._threads.shutdown(wait=True)

    def _chunk(self) -> int:
        assert self.devices, "start comes first"
        size = self._group_size
        chunk = round_chunk(
            self._decode_batch_size, self.devices, self._learner_ranks, together=size
        )
        return chunk // size

    def _collect(self, round_: PerRank, engines: RolloutClient) -> PerRank:
        """Generate one round. `engines`: this client, or that of the engines behind it."""
        gone = None if self._replacements is None else UnreachableError
        check = self.timeouts.check
        call = RayCall("generate", self.timeouts.generate, check, RolloutError, gone=gone)
        # Environments outlive an engine's end, and would not tell of it.
        watches = {
            client: StallWatch(client.names, client.timeouts.stall)
            for client in dict.fromkeys((self, engines))
            if client.timeouts.stall is not None
        }
        interval_s = min((watch.interval_s for watch in watches.values()), default=None)
        looked_s = time.monotonic()
        sizes = [len(requests) for requests in round_]
        queue = RoundQueue(sizes, self.devices, decode_batch_size=self._decode_batch_size)
        waiting: dict[Any, _SentPart] = {}
        done: list[_SentPart] = []
        while True:
            deadline = call.deadline()
            send = self._send_at_once if self._in_one_round else self._send
            waiting |= {sent.count: sent for sent in send(queue.take(), round_, deadline)}
            if not waiting:
                break
            deadlines = {count: sent.deadline for count, sent in waiting.items()}
            answer = next_ready(deadlines, within_s=interval_s)
            if interval_s is not None and time.monotonic() - looked_s >= interval_s:
                looked_s = time.monotonic()
                for client, watch in watches.items():
                    for index, given_up in watch.look(client.actors).items():
                        # Killed, it fails what it was asked for.
                        client._lose(index, given_up)
            if answer is None and time.monotonic() < min(deadlines.values()):
                continue
            if answer is None:
                first = min(deadlines.values())
                late = [sent.part for sent in waiting.values() if sent.deadline == first]
                names = dict.fromkeys(self.names[part.engine] for part in late)
                raise call.timeout_error(list(names))
            sent = waiting.pop(answer)
            name = self.names[sent.part.engine]
            num = len(sent.part.requests)
            try:
                count = result_of(call, name, answer)
            except UnreachableError as error:
                try:
                    self._give_on(queue, sent.part, error, engines)
                except LostRoundError:
                    # Others would go on with a round that is going to be asked again.
                    for count in waiting:
                        ray.cancel(count)
                    left = len(waiting)
                    ray.wait(list(waiting), num_returns=left, timeout=self.timeouts.closed_s)
                    raise
                continue
            queue.answered(sent.part)
            if count != num:
                message = f"answered {count} of {num} requests"
                raise RolloutError(message, actor=name, phase="generate")
            done.append(sent)
        # In position order, whatever the order of arrival.
        done.sort(key=lambda sent: sent.part.requests.start)
        return [
            [sent.rollouts for sent in done if sent.part.rank == rank]
            for rank in range(len(round_))
        ]

    def _give_on(
        self, queue: RoundQueue, part: RoundPart, error: UnreachableError, engines: RolloutClient
    ) -> None:
        """Give what an actor failed to answer to the next one. Raises the error where nobody is
        left, as a LostRoundError where others are being started.
        """
        name = self.names[part.engine]
        lost = LostRoundError(error.message, actor=error.actor, phase=error.phase)
        if error.actor != name:
            # An environment's actor says that it reached no engine: another would reach none.
            raise lost if engines.replaces_lost else error
        if self._replacements is not None:
            self._lose(part.engine, error)
        elif not self._asks_next_on_failure:
            # What a server answered and is wrong would be no better elsewhere.
            raise error
        engine = queue.failed(part)
        if engine is None:
            raise error if self._replacements is None else lost
        # Of an actor that is replaced it was said why.
        why = error if self._replacements is None else f"{name} is lost"
        _LOGGER.warning("%s; its %d requests go to %s", why, len(part.requests), self.names[engine])

    def _lose(self, index: int, error: RolloutError | WeightSyncError) -> None:
        """Replace this actor. Raises the error where that is not ours to do, or not any more."""
        if self._replacements is None:
            raise error
        self._replacements.lose(index, self.actors[index], error)

    def _lose_dead(self) -> None:
        """Replace all actors that have ended, or do not answer though they have nothing to do."""
        # Servers that are not replaced are asked too: what holds other weights is told as that.
        if self._replacements is not None or self._asks_next_on_failure:
            self._lose_silent([actor.check_alive.remote() for actor in self.actors])

    def _lose_silent(self, answers: Sequence[Any]) -> bool:
        """Replace every actor whose answer fails or does not come; return whether there are any."""
        limit_s = ALIVE_S
        if self._sync_failed:
            # An engine whose peer left a sync is in it for a phase at most.
            limit_s = max(limit_s, self.timeouts.sync_phase.seconds + POOL_MARGIN_S)
        if self.timeouts.stall is not None:
            limit_s = max(limit_s, self.timeouts.stall.seconds)
        ray.wait(answers, num_returns=len(answers), timeout=limit_s)
        is_lost = False
        for index, (name, answer) in enumerate(zip(self.names, answers, strict=True)):
            error: RolloutError
            try:
                ray.get(answer, timeout=0)
                continue
            except GetTimeoutError:
                check = "check whether its process, or its engine's, is stopped or stuck"
                message = f"no answer in {limit_s:g} s; {check}"
                error = RolloutError(message, actor=name, phase="generate")
            except RayError as raised:
                error = ended_error(name, raised)
            self._lose(index, error)
            is_lost = True
        return is_lost

    def _join(self) -> bool:
        """Take the new actors over, once they are ready; return whether there are any."""
        joined = self._take_over()
        for index, num_devices in joined.items():
            if num_devices != self.devices[index]:
                had = f"{self.devices[index]}, on which rounds and process groups are built"
                why = f"came back with {num_devices} rollout devices and had {had}"
                message = f"{why}; start it as before, and go on with `resume=RUN`"
                raise RolloutError(message, actor=self.names[index], phase="start")
        return bool(joined)

    def _take_over(self) -> dict[int, int]:
        """Wait for the actors that are being started, and put them in their places; return their
        rollout devices, by place.
        """
        joined = {} if self._replacements is None else self._replacements.join()
        actors = list(self.actors)
        for index, (actor, _) in joined.items():
            actors[index] = actor
        self.actors = tuple(actors)
        return {index: num_devices for index, (_, num_devices) in joined.items()}

    def _send(
        self, parts: Sequence[RoundPart], round_: PerRank, deadline: float
    ) -> list[_SentPart]:
        sent = []
        for part in parts:
            objects, places = _objects_of(part, round_)
            # The name is what Ray's dashboard shows.
            task = f"generate {len(places)} for learner rank {part.rank}"
            method = self.actors[part.engine].generate.options(num_returns=2, name=task)
            attempt = TRIES * part.num_failed
            rollouts, count = method.remote(*objects, places=places, attempt=attempt)
            sent.append(_SentPart(part, deadline, rollouts, count))
        return sent

    def _send_at_once(
        self, parts: Sequence[RoundPart], round_: PerRank, deadline: float
    ) -> list[_SentPart]:
        """Ask the only actor for the parts of all learner ranks in one call."""
        if not parts:
            return []
        of_parts = [_objects_of(part, round_) for part in parts]
        task = f"generate {sum(len(places) for _, places in of_parts)} at once"
        method = self.actors[0].generate_at_once.options(num_returns=2 * len(parts), name=task)
        answers = method.remote(
            *(sent for objects, _ in of_parts for sent in objects),
            parts=[(len(objects), places) for objects, places in of_parts],
        )
        pairs = zip(parts, answers[::2], answers[1::2], strict=True)
        return [_SentPart(part, deadline, rollouts, count) for part, rollouts, count in pairs]

    def _receive(self, offer: WeightOffer) -> SyncReport:
        shared_offer = ray.put(offer)
        self._sync_failed = True  # until it has succeeded
        check = "that the learner and every other engine are alive"
        # Phase by phase over all engines: none begins to wait for bytes while another is still
        # decoding, and a stopped process is known by its phase.
        for phase in SyncPhase:
            limit = self.timeouts.sync_phase
            if phase is SyncPhase.RENDEZVOUS:
                limit = self.timeouts.join or limit
            call = RayCall(phase, limit, check, WeightSyncError, margin_s=POOL_MARGIN_S)
            asked = [
                (name, actor.run_sync_phase.remote(phase, shared_offer))
                for name, actor in self._named()
            ]
            reports = wait_for_all(call, asked)
        self._sync_failed = False
        self.version = offer.version
        return SyncReport.of_slowest(reports)

    def _named(self) -> list[tuple[str, Any]]:
        return list(zip(self.names, self.actors, strict=True))


def _objects_of(part: RoundPart, round_: PerRank) -> tuple[list[Any], range]:
    return in_objects(round_[part.rank][part.requests.start : part.requests.stop])


def _require_several(processes: Sequence[str]) -> None:
    """Raise ConfigError if two base_urls lead to the same server, which would take the second
    one's sync for another run's.
    """
    for index, process in enumerate(processes):
        first = processes.index(process)
        if process and first != index:
            raise ConfigError(
                f"rollout_matching.vllm.server.servers[{index}].base_url: is the server of"
                f" servers[{first}] by another name; list every server once"
            )


class RankRolloutClient(RolloutClient):
    """Learner ranks that generate what they learn (backend `hf`, or vLLM's mode `colocate`)."""

    def __init__(
        self,
        learner: LearnerClient,
        timeouts: RolloutTimeouts,
        *,
        num_ranks: int,
        devices_per_rank: int,
        decode_batch_size: int,
        group_size: int = 1,
        in_one_round: bool = False,
        observer: RunObserver = UNOBSERVED,
    ) -> None:
        """Take over the ranks. `group_size`: rollouts of a request, where they are of an
        environment. `in_one_round`: a step is one round, of one rank.
        """
        super().__init__(
            (),
            [rank_name(rank, num_ranks) for rank in range(num_ranks)],
            timeouts,
            decode_batch_size=decode_batch_size,
            learner_ranks=num_ranks,
            devices=[devices_per_rank] * num_ranks,
            observer=observer,
        )
        self._ranks = learner
        self._group_size = group_size
        self._in_one_round = in_one_round

    def generate(self, round_: PerRank) -> Round:
        """Begin one round. Fails with a rank's own error, or LearnerError if it is late."""
        limit = self.timeouts.generate
        assert limit is not None, "only servers keep one themselves"
        return Round(self._ranks.generate(round_, limit), self._observer)

    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]:
        # Asked here and not in the thread: every rank takes part before rank 0 is asked to send.
        receiving = self._ranks.receive_weights(offer)

        def serve() -> SyncReport:
            report = receiving.result()
            self.version = offer.version
            return report

        return self._threads.submit(serve)


class RoundQueue:
    """The parts of one round that each engine still has to do, or is asked for. No Ray here.

    No engine is asked for more than `decode_batch_size` per device at a time: what it takes over
    from another waits for its own part.
    """

    def __init__(
        self, sizes: Sequence[int], devices: Sequence[int], *, decode_batch_size: int
    ) -> None:
        """Take the requests of each learner rank, together `decode_batch_size` a device at most."""
        self._bounds = [decode_batch_size * count for count in devices]
        self._waiting: list[deque[RoundPart]] = [deque() for _ in devices]
        self._num_asked = [0] * len(devices)
        for part in round_parts(sizes, devices):
            self._waiting[part.engine].append(part)
        shares = [sum(len(part.requests) for part in waiting) for waiting in self._waiting]
        assert all(share <= bound for share, bound in zip(shares, self._bounds, strict=True)), (
            f"a round of {shares} over engines that take {self._bounds}"
        )

    def take(self) -> list[RoundPart]:
        """Return what can be asked for now; each part comes back by `answered` or `failed`."""
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
        """Put the part behind the next engine's; return that engine, or None where all failed."""
        self.answered(part)
        num_failed = part.num_failed + 1
        engine = (part.engine + 1) % len(self._waiting)
        if num_failed == len(self._waiting):
            return None
        # An engine of fewer devices takes it in several parts.
        size = self._bounds[engine]
        for first in range(0, len(part.requests), size):
            requests = part.requests[first : first + size]
            self._waiting[engine].append(RoundPart(engine, part.rank, requests, num_failed))
        return engine
